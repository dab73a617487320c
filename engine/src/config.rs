//! What an engine can be told, with units, defaults and their reasons.

use std::net::SocketAddr;

use crate::wire::message::NAME_BYTES_MAX;
use crate::wire::rails::RAILS_MAX;

/// Most lanes to one peer. Lanes past the number of cores a host gives to networking gain nothing.
pub const LANES_MAX: u32 = 64;
/// Bytes a secret must have: what a brute force of the handshake cannot reach.
pub const SECRET_BYTES_MIN: usize = 16;

/// Longest time any state of a room may last, in milliseconds: a day. Longer timeouts, a peer's
/// included, are taken as this, so that no room can wait for ever.
pub const ROOM_TIMEOUT_MS_MAX: u64 = 86_400_000;

/// How lanes are read and written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum IoMode {
    /// io_uring where the kernel allows it, epoll otherwise; which one is reported on every peer.
    #[default]
    Auto,
    /// io_uring, or the engine does not start.
    RequireIoUring,
    /// epoll, for kernels and sandboxes where io_uring is not wanted.
    Epoll,
}

/// What carries pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum FabricChoice {
    /// RDMA where both sides have it, TCP otherwise; which one, and why, is reported on every peer.
    #[default]
    Auto,
    /// RDMA, or the engine does not start and peers without it are refused.
    RequireRdma,
    /// TCP.
    Tcp,
}

/// Settings of RDMA. The defaults suit a cluster whose network needs nothing special.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RdmaConfig {
    /// Rails to use, as `mlx5_0` (its first port) or `mlx5_0:2`, in this order. Empty: every port that is
    /// up.
    pub rails: Vec<String>,
    /// Entry of the GID table to use on every rail. `None`: chosen by type and address, RoCE v2 and
    /// routable first, and the next one is tried where a path does not work.
    pub gid_index: Option<u32>,
    /// Queue pairs for each pair of rails. Two let one fill while the other's tail is acknowledged.
    pub qps_per_rail: u16,
    /// InfiniBand service level, 0 to 15.
    pub service_level: u8,
    /// Traffic class in RoCE and global headers (its upper six bits are the DSCP). Set it only where the
    /// network has a lossless or ECN class for it.
    pub traffic_class: u8,
    /// Entry of the partition key table.
    pub pkey_index: u16,
    /// How long the NIC waits for an answer: 4.096 µs × 2^this, 1 to 31. 14 is 67 ms.
    pub timeout: u8,
    /// Times it then tries again, 0 to 7. With 14 and 6, a dead path is known after half a second, and by
    /// some NICs after up to four times that.
    pub retry_count: u8,
    /// Let the NIC write out of order where the platform gains by it (PCIe relaxed ordering). Completions
    /// stay in order.
    pub relaxed_ordering: bool,
    /// Another libibverbs than the host's.
    #[cfg(feature = "rdma")]
    #[doc(hidden)]
    pub library: Option<kvferry_verbs::Library>,
}

impl Default for RdmaConfig {
    fn default() -> Self {
        Self {
            rails: Vec::new(),
            gid_index: None,
            qps_per_rail: 2,
            service_level: 0,
            traffic_class: 0,
            pkey_index: 0,
            timeout: 14,
            retry_count: 6,
            relaxed_ordering: true,
            #[cfg(feature = "rdma")]
            library: None,
        }
    }
}

/// When lanes are sent from the pages without a copy into the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum ZeroCopy {
    /// On lanes that leave the host, until the kernel reports that it copied all the same.
    #[default]
    Auto,
    /// Never.
    Off,
    /// On every lane, until the kernel reports that it copied.
    Try,
}

/// A shared secret. Both sides prove that they have it; it never travels.
#[derive(Clone)]
pub struct Secret(Vec<u8>);

impl Secret {
    /// # Errors
    /// [`ConfigError::SecretTooShort`] under [`SECRET_BYTES_MIN`] bytes.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Result<Self, ConfigError> {
        let bytes = bytes.into();
        if bytes.len() < SECRET_BYTES_MIN {
            return Err(ConfigError::SecretTooShort { bytes: bytes.len() });
        }
        Ok(Self(bytes))
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// Settings of an engine. Start from [`EngineConfig::default`] and chain setters.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct EngineConfig {
    /// Name for logs and for the peer's table.
    pub name: String,
    /// Address to accept peers on; port 0 takes a free one, [`crate::Engine::listen_addr`] tells
    /// which. `None`: this engine only dials.
    pub listen: Option<SocketAddr>,
    /// Shared secret of all engines that may talk to each other.
    pub secret: Option<Secret>,
    /// Listen on an address that others can reach without a secret. Off: such a bind is refused.
    pub insecure: bool,
    /// What carries pages.
    pub fabric: FabricChoice,
    /// How RDMA is used, where it is.
    pub rdma: RdmaConfig,
    /// How TCP lanes are read and written.
    pub io: IoMode,
    /// When TCP lanes are sent without a copy.
    pub zero_copy: ZeroCopy,
    /// TCP connections for data to each peer. Two keep a second frame moving while the first one's
    /// tail is acknowledged; across a network more may be needed to fill the path.
    pub lanes: u16,
    /// CPU to pin the worker to. `None`: not pinned.
    pub worker_cpu: Option<usize>,
    /// How long an idle worker polls before it sleeps, in microseconds.
    pub spin_us: u64,
    /// Silence after which a peer counts as lost, in milliseconds. Long enough for a process that was
    /// descheduled or paused for a collection, short against a request's patience.
    pub peer_silent_ms: u64,
    /// How long the pages of a room that has ended may wait for the peer to let go of them before this
    /// side closes every lane to the peer, in milliseconds. A living peer answers in microseconds to
    /// milliseconds; a scheduler that waits for the pages waits no longer than this. (A sender that gives up
    /// behind its `finish` ends when the receiver answers, or after half a second without an answer; its
    /// pages are asked back meanwhile.)
    pub fence_after_ms: u64,
    /// How long a peer whose session closed may take to come back before it counts as dead, in
    /// milliseconds. A killed process must be known dead within a second.
    pub reconnect_grace_ms: u64,
    /// How long connecting, with its handshake, may take, in milliseconds.
    pub connect_timeout_ms: u64,
    /// Default time a sender waits for a grant, in milliseconds: the decode side may be short of
    /// pages for a while.
    pub grant_timeout_ms: u64,
    /// Default time from grant to verdict, in milliseconds: a long prefill lies in between.
    pub room_timeout_ms: u64,
    /// Rooms live or not yet released at once in one engine, sending and receiving together.
    pub max_rooms: u32,
    /// Chunks of one room that may wait to be posted; a further `try_write` is told to wait.
    pub max_queued_chunks: u32,
    /// Peers with a session at once.
    pub max_peers: u32,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            name: String::new(),
            listen: None,
            secret: None,
            insecure: false,
            fabric: FabricChoice::Auto,
            rdma: RdmaConfig::default(),
            io: IoMode::Auto,
            zero_copy: ZeroCopy::Auto,
            lanes: 2,
            worker_cpu: None,
            spin_us: 50,
            peer_silent_ms: 3000,
            fence_after_ms: 500,
            reconnect_grace_ms: 500,
            connect_timeout_ms: 5000,
            grant_timeout_ms: 60_000,
            room_timeout_ms: 120_000,
            max_rooms: 1 << 14,
            max_queued_chunks: 64,
            max_peers: 1024,
        }
    }
}

macro_rules! setters {
    ($config:ident: $($field:ident: $type:ty),+ $(,)?) => {
        impl $config {
            $(
                #[doc = concat!("Sets [`", stringify!($config), "::", stringify!($field), "`].")]
                #[must_use]
                pub fn $field(mut self, $field: impl Into<$type>) -> Self {
                    self.$field = $field.into();
                    self
                }
            )+
        }
    };
}

setters! {
    RdmaConfig:
    rails: Vec<String>,
    gid_index: Option<u32>,
    qps_per_rail: u16,
    service_level: u8,
    traffic_class: u8,
    pkey_index: u16,
    timeout: u8,
    retry_count: u8,
    relaxed_ordering: bool,
}

#[cfg(feature = "rdma")]
impl RdmaConfig {
    /// Uses another libibverbs than the host's.
    #[doc(hidden)]
    #[must_use]
    pub fn library(mut self, library: kvferry_verbs::Library) -> Self {
        self.library = Some(library);
        self
    }
}

setters! {
    EngineConfig:
    name: String,
    listen: Option<SocketAddr>,
    secret: Option<Secret>,
    insecure: bool,
    fabric: FabricChoice,
    rdma: RdmaConfig,
    io: IoMode,
    zero_copy: ZeroCopy,
    lanes: u16,
    worker_cpu: Option<usize>,
    spin_us: u64,
    peer_silent_ms: u64,
    fence_after_ms: u64,
    reconnect_grace_ms: u64,
    connect_timeout_ms: u64,
    grant_timeout_ms: u64,
    room_timeout_ms: u64,
    max_rooms: u32,
    max_queued_chunks: u32,
    max_peers: u32,
}

/// Settings that cannot be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A field is out of its range.
    #[error("{field} is {value}, it must be {want}")]
    Field {
        /// Field of [`EngineConfig`].
        field: &'static str,
        /// What it was.
        value: u64,
        /// What would do.
        want: &'static str,
    },
    /// The secret is too short to protect anything.
    #[error("the secret has {bytes} bytes; use at least 16, from a random source")]
    SecretTooShort {
        /// Bytes given.
        bytes: usize,
    },
    /// Anyone could join.
    #[error(
        "listening on {addr} without a secret would let anyone write KV pages; set a secret, listen on a loopback address, or set insecure"
    )]
    Insecure {
        /// Address asked for.
        addr: SocketAddr,
    },
}

impl EngineConfig {
    /// # Errors
    /// [`ConfigError`] naming the first setting that cannot be.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let within = |field, value: u64, low: u64, high: u64, want| {
            if (low..=high).contains(&value) {
                Ok(())
            } else {
                Err(ConfigError::Field { field, value, want })
            }
        };
        within("name bytes", self.name.len() as u64, 0, NAME_BYTES_MAX as u64, "at most 64")?;
        within("lanes", u64::from(self.lanes), 1, u64::from(LANES_MAX), "1 to 64")?;
        within("spin_us", self.spin_us, 0, 1_000_000, "at most a second")?;
        within("peer_silent_ms", self.peer_silent_ms, 50, 3_600_000, "50 to 3600000")?;
        within("fence_after_ms", self.fence_after_ms, 10, 600_000, "10 to 600000")?;
        within("reconnect_grace_ms", self.reconnect_grace_ms, 0, 600_000, "at most 600000")?;
        within("connect_timeout_ms", self.connect_timeout_ms, 1, 600_000, "1 to 600000")?;
        within("grant_timeout_ms", self.grant_timeout_ms, 1, ROOM_TIMEOUT_MS_MAX, "1 to a day")?;
        within("room_timeout_ms", self.room_timeout_ms, 1, ROOM_TIMEOUT_MS_MAX, "1 to a day")?;
        within(
            "max_rooms",
            u64::from(self.max_rooms),
            1,
            1 << 20,
            "1 to 1048576 (slots have 20 bits)",
        )?;
        let rdma = &self.rdma;
        within("rdma.rails", rdma.rails.len() as u64, 0, RAILS_MAX as u64, "at most 16 rails")?;
        within("rdma.qps_per_rail", u64::from(rdma.qps_per_rail), 1, 16, "1 to 16")?;
        within("rdma.service_level", u64::from(rdma.service_level), 0, 15, "0 to 15")?;
        within("rdma.timeout", u64::from(rdma.timeout), 1, 31, "1 to 31 (0 would wait for ever)")?;
        within("rdma.retry_count", u64::from(rdma.retry_count), 0, 7, "0 to 7")?;
        within("max_queued_chunks", u64::from(self.max_queued_chunks), 1, 4096, "1 to 4096")?;
        within("max_peers", u64::from(self.max_peers), 1, 65_536, "1 to 65536")?;
        match self.listen {
            Some(addr) if !is_loopback(&addr) && self.secret.is_none() && !self.insecure => {
                Err(ConfigError::Insecure { addr })
            }
            _ => Ok(()),
        }
    }
}

/// Whether only this host can reach the address.
pub(crate) fn is_loopback(addr: &SocketAddr) -> bool {
    addr.ip().to_canonical().is_loopback()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_is_valid() {
        EngineConfig::default().validate().unwrap();
    }

    #[test]
    fn a_bind_that_others_can_reach_needs_a_secret_or_the_word_insecure() {
        let everyone: SocketAddr = "0.0.0.0:0".parse().unwrap();
        let config = EngineConfig::default().listen(everyone);
        assert_eq!(config.validate(), Err(ConfigError::Insecure { addr: everyone }));
        assert!(config.clone().insecure(true).validate().is_ok());
        assert!(config.secret(Secret::new(*b"0123456789abcdef").unwrap()).validate().is_ok());
        for local in ["127.0.0.1:0", "[::1]:0", "[::ffff:127.0.0.1]:0"] {
            let addr: SocketAddr = local.parse().unwrap();
            assert!(EngineConfig::default().listen(addr).validate().is_ok(), "{local}");
        }
    }

    #[test]
    fn a_short_secret_is_refused_and_no_secret_is_printed() {
        assert_eq!(Secret::new(*b"short").unwrap_err(), ConfigError::SecretTooShort { bytes: 5 });
        assert!(!format!("{:?}", Secret::new(*b"0123456789abcdef").unwrap()).contains("0123"));
    }

    #[test]
    fn a_setting_out_of_range_is_named() {
        let error = EngineConfig::default().lanes(0u16).validate().unwrap_err();
        assert!(matches!(error, ConfigError::Field { field: "lanes", value: 0, .. }));
    }
}
