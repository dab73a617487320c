//! What the control plane and the worker say to each other. Both queues are bounded.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::sync::mpsc;

use crate::fabric::NewLane;
use crate::failure::FailureKind;
use crate::ids::Incarnation;
use crate::memory::Pairing;
use crate::room::cell::RoomCell;
use crate::wire::message::Message;

/// From the control plane to the worker. Of one peer, they arrive in the order they happened.
#[derive(Debug)]
pub(crate) enum ToWorker {
    /// A session came up: a new peer's first, or one of a peer that came back.
    PeerUp(PeerUp),
    /// A message of a peer whose session stands.
    Message { peer: Incarnation, message: Message },
    /// A session was lost. The peer may come back; its lanes go on.
    PeerDown { peer: Incarnation },
    /// A peer is given up: its rooms fail with this, its lanes are closed.
    PeerGone { peer: Incarnation, kind: FailureKind, causes: Vec<String> },
    /// A lane is connected and authenticated.
    LaneUp { peer: Incarnation, lane: NewLane },
    /// One of this engine's rails cannot carry lanes any more.
    RailDown { rail: u8, cause: String },
}

/// A session that came up.
#[derive(Debug)]
pub(crate) struct PeerUp {
    pub(crate) peer: Incarnation,
    pub(crate) addr: SocketAddr,
    /// Our pools against the peer's, in our order.
    pub(crate) pairings: Vec<Pairing>,
    /// Where messages to the peer go. Bounded: what does not fit waits in the worker.
    pub(crate) outbox: mpsc::Sender<Message>,
}

/// From the worker to the control plane.
#[derive(Debug)]
pub(crate) enum ToControl {
    /// A lane carries frames.
    LaneOpen { peer: Incarnation, lane: u16 },
    /// A lane is closed and nothing of it is in flight. Whoever dialed it may dial another.
    LaneDown { peer: Incarnation, lane: u16, cause: String },
    /// The peer broke the protocol: its session is to be closed and the peer given up.
    Expel { peer: Incarnation, cause: String },
    /// A room has ended; to be counted and logged.
    Ended(Arc<RoomCell>),
}
