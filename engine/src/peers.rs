//! What is known of peers, before anything is sent to them.

use std::net::SocketAddr;

use crate::failure::FailureKind;
use crate::ids::Incarnation;
pub(crate) use crate::wire::message::LaneIo;

/// How a peer is.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PeerHealth {
    /// Its session stands.
    Up,
    /// Its session was lost; it may come back within the grace.
    Reconnecting,
    /// It takes no more rooms.
    Draining,
    /// It is gone, and every room with it has failed.
    Gone {
        /// Why.
        kind: FailureKind,
        /// The first cause.
        cause: String,
    },
}

/// One data lane of a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaneInfo {
    /// Number of the lane, unique in this engine.
    pub lane: u16,
    /// Our end.
    pub local: SocketAddr,
    /// The peer's end.
    pub remote: SocketAddr,
}

/// A fabric a peer is reached by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FabricInfo {
    /// TCP lanes.
    Tcp {
        /// How this side reads and writes them.
        io: LaneIo,
        /// How the peer does.
        peer_io: LaneIo,
    },
}

impl std::fmt::Display for FabricInfo {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tcp { io, .. } => write!(f, "tcp/{io}"),
        }
    }
}

/// A peer, as [`crate::Engine::peers`] shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PeerInfo {
    /// Who it is. Rooms are granted to this.
    pub incarnation: Incarnation,
    /// Its name, as it gave it.
    pub name: String,
    /// Where its session comes from or goes to.
    pub addr: SocketAddr,
    /// How it is.
    pub health: PeerHealth,
    /// What carries its pages.
    pub fabric: FabricInfo,
    /// Its rails: the lanes that stand now.
    pub lanes: Vec<LaneInfo>,
}
