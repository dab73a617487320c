//! What is known of peers, before anything is sent to them.

use std::net::{Ipv6Addr, SocketAddr};

use crate::failure::FailureKind;
use crate::ids::Incarnation;
pub(crate) use crate::wire::message::LaneIo;
use crate::wire::rails::RailCard;

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
#[non_exhaustive]
pub struct LaneInfo {
    /// Number of the lane, unique in this engine.
    pub lane: u16,
    /// What it runs over.
    pub path: LanePath,
    /// Whether it may carry frames. An RDMA lane is proved by a write of nothing first.
    pub open: bool,
}

impl LaneInfo {
    pub(crate) const fn is_rdma(&self) -> bool {
        matches!(self.path, LanePath::Rdma(_))
    }

    /// Whether it joins these rails.
    pub(crate) fn joins(&self, rail: &str, remote: &str) -> bool {
        matches!(&self.path, LanePath::Rdma(path) if path.local.rail == rail && path.remote.rail == remote)
    }

    pub(crate) const fn is_tcp(&self) -> bool {
        matches!(self.path, LanePath::Tcp { .. })
    }
}

/// What a lane runs over.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LanePath {
    /// A TCP connection.
    Tcp {
        /// Our end.
        local: SocketAddr,
        /// The peer's end.
        remote: SocketAddr,
    },
    /// A pair of RC queue pairs.
    Rdma(RdmaPath),
}

/// Two rails, and the queue pairs that join them.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RdmaPath {
    /// Our end.
    pub local: RdmaEnd,
    /// The peer's end.
    pub remote: RdmaEnd,
    /// Largest packet payload in bytes.
    pub mtu_bytes: u32,
}

/// One end of an RDMA lane.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RdmaEnd {
    /// Device and port, as `mlx5_0:1`.
    pub rail: String,
    /// The GID it is addressed by. On InfiniBand, inside a subnet, packets go by LID instead.
    pub gid: Ipv6Addr,
    /// The GID's place in the port's table.
    pub gid_index: u32,
    /// Local identifier; 0 on Ethernet.
    pub lid: u16,
    /// Number of the queue pair.
    pub qp_num: u32,
}

impl std::fmt::Display for LanePath {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tcp { local, remote } => write!(f, "tcp {local} - {remote}"),
            Self::Rdma(path) => write!(f, "rdma {path}"),
        }
    }
}

impl std::fmt::Display for RdmaPath {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} - {}", self.local, self.remote)
    }
}

impl std::fmt::Display for RdmaEnd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { rail, gid, gid_index, lid, qp_num } = self;
        write!(f, "{rail} (GID {gid} at index {gid_index}")?;
        if *lid != 0 {
            write!(f, ", LID {lid}")?;
        }
        write!(f, ", QP {qp_num:#x})")
    }
}

/// A pair of rails that could not be joined, or whose last lane was lost.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PathFault {
    /// Our rail.
    pub rail: String,
    /// The peer's.
    pub remote_rail: String,
    /// What happened last.
    pub cause: String,
    /// Failures since a lane of the two last stood.
    pub failures: u32,
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
    /// Queue pairs, written through by the NICs.
    Rdma,
}

impl std::fmt::Display for FabricInfo {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Rdma => f.write_str("rdma"),
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
    /// Why that is not RDMA, when it is not.
    pub why_not_rdma: Option<String>,
    /// The lanes that stand now.
    pub lanes: Vec<LaneInfo>,
    /// Pairs of rails without a lane, and why.
    pub faults: Vec<PathFault>,
}

/// What an engine has for RDMA.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RdmaReport {
    /// Its rails, in the order they are used.
    pub rails: Vec<RailInfo>,
    /// Why there are none, when there are none.
    pub why_not: Option<String>,
}

/// A NIC port.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RailInfo {
    /// Device and port, as `mlx5_0:1`.
    pub rail: String,
    /// Whether its port carries data.
    pub up: bool,
    /// InfiniBand, or Ethernet (RoCE).
    pub infiniband: bool,
    /// Rate in Mbit/s; 0 where it is not known.
    pub rate_mbit_s: u64,
    /// GIDs it may be addressed by, with their index in the port's table, the best first.
    pub gids: Vec<(u32, Ipv6Addr)>,
}

impl RailInfo {
    pub(crate) fn new(card: &RailCard, up: bool) -> Self {
        Self {
            rail: card.name.clone(),
            up,
            infiniband: card.infiniband,
            rate_mbit_s: card.rate_mbit_s,
            gids: card.gids.iter().map(|gid| (gid.index, Ipv6Addr::from(gid.gid))).collect(),
        }
    }
}
