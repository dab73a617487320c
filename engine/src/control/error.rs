//! Why a peer could not be connected to.

use std::fmt;
use std::io;
use std::net::SocketAddr;

use crate::wire::message::Refusal;

/// How far connecting had come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConnectStage {
    /// The TCP connection was not answered.
    Tcp,
    /// The peer accepted the connection and did not finish the handshake.
    Handshake,
    /// The session stands, but no data lane to the peer could be opened.
    Lanes,
}

impl fmt::Display for ConnectStage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "the TCP connection was not answered; check the address and the firewall",
            Self::Handshake => {
                "the handshake was not finished; check whether the peer is stopped or overloaded"
            }
            Self::Lanes => {
                "the session stands but no data lane does; check both sides' logs, \
                 connect again to wait longer"
            }
        })
    }
}

/// A peer that could not be connected to. Except where a variant says otherwise nothing is left
/// behind: the address is not tried again until it is connected to again.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The connection could not be made, or broke during the handshake.
    #[error("cannot connect to {addr}: {source}")]
    Io {
        /// Address dialed.
        addr: SocketAddr,
        /// The operating system's reason.
        source: io::Error,
    },
    /// Not done within [`crate::EngineConfig::connect_timeout_ms`].
    #[error("cannot connect to {addr} within {timeout_ms} ms: {stage}")]
    Timeout {
        /// Address dialed.
        addr: SocketAddr,
        /// The time it had, in milliseconds.
        timeout_ms: u64,
        /// How far it had come. At [`ConnectStage::Lanes`] the session stays and lanes are still
        /// tried.
        stage: ConnectStage,
    },
    /// RDMA is required, and no lane of it comes up. The session stays and lanes are still tried.
    #[error("no RDMA lane to {addr} came up within {timeout_ms} ms: {cause}")]
    NoRdmaLane {
        /// Address dialed.
        addr: SocketAddr,
        /// The time it had, in milliseconds.
        timeout_ms: u64,
        /// What happened last.
        cause: String,
    },
    /// One of the two sides refuses: versions, secrets, layouts, limits.
    #[error("{addr} and this engine do not fit: {refusal}")]
    Refused {
        /// Address dialed.
        addr: SocketAddr,
        /// Why, as seen from this side.
        #[source]
        refusal: Refusal,
    },
    /// Whoever answers could not prove that it has this engine's secret.
    #[error(
        "{addr} could not prove that it has the shared secret; give both sides the same one, \
         or find out who answers there"
    )]
    Unproven {
        /// Address dialed.
        addr: SocketAddr,
    },
    /// What answers does not speak this protocol.
    #[error("{addr} does not answer as an engine would: {what}; check the address")]
    Protocol {
        /// Address dialed.
        addr: SocketAddr,
        /// What was wrong.
        what: String,
    },
    /// This engine has as many peers as it may.
    #[error("this engine has {limit} peers already; disconnect one, or raise max_peers")]
    TooManyPeers {
        /// [`crate::EngineConfig::max_peers`].
        limit: u32,
    },
    /// The engine was shut down, or the peer disconnected from, meanwhile.
    #[error("the engine was shut down, or told to disconnect, while connecting")]
    Stopped,
}

impl ConnectError {
    /// Whether nobody listens at the address.
    pub(super) fn nobody_listens(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::ConnectionRefused)
    }

    /// The same error for one more caller who waits for the same attempt.
    pub(super) fn duplicate(&self) -> Self {
        match self {
            Self::Io { addr, source } => Self::Io {
                addr: *addr,
                source: match source.raw_os_error() {
                    Some(code) => io::Error::from_raw_os_error(code),
                    None => io::Error::new(source.kind(), source.to_string()),
                },
            },
            Self::Timeout { addr, timeout_ms, stage } => {
                Self::Timeout { addr: *addr, timeout_ms: *timeout_ms, stage: *stage }
            }
            Self::NoRdmaLane { addr, timeout_ms, cause } => {
                Self::NoRdmaLane { addr: *addr, timeout_ms: *timeout_ms, cause: cause.clone() }
            }
            Self::Refused { addr, refusal } => {
                Self::Refused { addr: *addr, refusal: refusal.clone() }
            }
            Self::Unproven { addr } => Self::Unproven { addr: *addr },
            Self::Protocol { addr, what } => Self::Protocol { addr: *addr, what: what.clone() },
            Self::TooManyPeers { limit } => Self::TooManyPeers { limit: *limit },
            Self::Stopped => Self::Stopped,
        }
    }
}
