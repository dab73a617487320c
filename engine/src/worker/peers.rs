//! The worker's view of its peers.

use std::collections::VecDeque;
use std::sync::Arc;

use tokio::sync::mpsc;

use super::slots::Slots;
use crate::fabric::PeerIndex;
use crate::ids::Incarnation;
use crate::memory::{PageMap, Pairing};
use crate::wire::message::Message;

/// A peer, from its first session until it is given up and its lanes are down.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) incarnation: Incarnation,
    pub(super) addr: String,
    /// By our pools.
    pub(super) pools: Vec<PeerPool>,
    /// The session's way out, while it stands.
    outbox: Option<mpsc::Sender<Message>>,
    /// Messages that the outbox had no room for.
    backlog: VecDeque<Message>,
    /// Sessions so far.
    pub(super) session: u64,
    /// Sending rooms with frames to post, in turn.
    pub(super) ready: VecDeque<u32>,
    pub(super) lanes: u32,
    /// Given up: no rooms, and removed once its lanes are down.
    pub(super) gone: bool,
}

/// One of our pools against the peer's.
#[derive(Clone, Debug)]
pub(super) struct PeerPool {
    pub(super) pairing: Pairing,
    /// The peer's pages, for planning.
    pub(super) map: Arc<PageMap>,
}

impl Peer {
    pub(super) fn new(incarnation: Incarnation, addr: String) -> Self {
        Self {
            incarnation,
            addr,
            pools: Vec::new(),
            outbox: None,
            backlog: VecDeque::new(),
            session: 0,
            ready: VecDeque::new(),
            lanes: 0,
            gone: false,
        }
    }

    pub(super) fn session_up(&mut self, pairings: Vec<Pairing>, outbox: mpsc::Sender<Message>) {
        self.pools = pairings
            .into_iter()
            .map(|pairing| {
                let layers = pairing.layers.end - pairing.layers.start;
                let page_bytes =
                    pairing.remote.offset + pairing.remote.stride * u64::from(pairing.remote.rows);
                let map = PageMap::of_peer(
                    layers,
                    pairing.planes,
                    pairing.remote_pages,
                    pairing.remote_stride,
                    page_bytes,
                );
                PeerPool { pairing, map: Arc::new(map) }
            })
            .collect();
        self.outbox = Some(outbox);
        self.backlog.clear();
        self.session += 1;
    }

    /// What was not sent is not kept: what still stands is said again when the peer is back.
    pub(super) fn session_down(&mut self) {
        self.outbox = None;
        self.backlog.clear();
    }

    pub(super) const fn has_session(&self) -> bool {
        self.outbox.is_some()
    }

    /// Sends a message, or keeps it until the session takes it. Without a session it is dropped. At
    /// most a handful are sent for a room, so the backlog is bounded by the rooms.
    pub(super) fn tell(&mut self, message: Message) {
        if self.outbox.is_some() {
            self.backlog.push_back(message);
            self.flush();
        }
    }

    /// Says whether anything went out.
    pub(super) fn flush(&mut self) -> bool {
        let mut sent = false;
        while let (Some(outbox), Some(message)) = (&self.outbox, self.backlog.pop_front()) {
            match outbox.try_send(message) {
                Ok(()) => sent = true,
                Err(mpsc::error::TrySendError::Full(message)) => {
                    self.backlog.push_front(message);
                    break;
                }
                // The session has ended; the control plane says so soon.
                Err(mpsc::error::TrySendError::Closed(_)) => self.session_down(),
            }
        }
        sent
    }

    pub(super) fn has_backlog(&self) -> bool {
        !self.backlog.is_empty()
    }
}

/// All peers.
#[derive(Debug)]
pub(super) struct Peers(pub(super) Slots<Peer>);

impl Peers {
    /// The peer's place, unless it has been given up.
    pub(super) fn find(&self, incarnation: Incarnation) -> Option<PeerIndex> {
        self.0
            .iter()
            .find(|(_, peer)| peer.incarnation == incarnation && !peer.gone)
            .map(|(index, _)| PeerIndex(index))
    }

    pub(super) fn get(&self, index: PeerIndex) -> Option<&Peer> {
        self.0.get(index.0)
    }

    pub(super) fn get_mut(&mut self, index: PeerIndex) -> Option<&mut Peer> {
        self.0.get_mut(index.0)
    }

    pub(super) fn tell(&mut self, index: PeerIndex, message: Message) {
        if let Some(peer) = self.get_mut(index) {
            peer.tell(message);
        }
    }
}
