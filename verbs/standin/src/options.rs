//! What a world is made of.

use std::time::Duration;

use ibverbs_sys as sys;

/// A world: its devices, and what is common to them.
#[derive(Debug, Clone)]
pub struct WorldOptions {
    /// The devices, in the order of their numbers.
    pub devices: Vec<DeviceOptions>,
    /// What decides whose work is next where a device defers it.
    pub seed: u64,
    /// Functions that [`World::resolve`](crate::World::resolve) does not find, as in an older
    /// library.
    pub missing_symbols: Vec<&'static str>,
}

impl WorldOptions {
    /// Two devices of one RoCE port each that reach each other and themselves.
    #[must_use]
    pub fn pair() -> Self {
        Self::devices(2)
    }

    /// `count` devices of one RoCE port each, all on one network.
    #[must_use]
    pub fn devices(count: u8) -> Self {
        let devices = (0..count).map(DeviceOptions::roce).collect();
        Self { devices, seed: 0, missing_symbols: Vec::new() }
    }

    /// The same, with every device changed by `change`.
    #[must_use]
    pub fn with(mut self, change: impl Fn(&mut DeviceOptions)) -> Self {
        self.devices.iter_mut().for_each(change);
        self
    }
}

/// One device.
#[derive(Debug, Clone)]
pub struct DeviceOptions {
    /// When posted work executes.
    pub mode: Mode,
    /// Which statuses it reports where devices differ.
    pub statuses: Statuses,
    /// What it grants at most.
    pub limits: Limits,
    /// Its ports; the first is port 1.
    pub ports: Vec<PortOptions>,
    /// How long a request that nobody answers is retried, by a real clock, until it completes with
    /// `RETRY_EXC_ERR`; with zero it does so at once. A QP whose `timeout` is 0 waits for ever
    /// (InfiniBand specification, 9.7.6.1.3).
    pub retry_delay: Duration,
    /// What moving to RTR does when no device has the address.
    pub unknown_route: UnknownRoute,
    /// Whether completions of a QP stay in their CQ when it is destroyed or reset. Off, as with
    /// mlx5 (rdma-core, `providers/mlx5/verbs.c`: `mlx5_destroy_qp` calls `__mlx5_cq_clean`); on, as
    /// with Soft-RoCE (`providers/rxe/rxe.c`: `rxe_destroy_qp` leaves the CQ alone).
    pub destroy_keeps_completions: bool,
    /// Whether bytes are moved. Off where instructions of the caller are counted and the copying
    /// would drown them; everything else stays the same.
    pub moves_bytes: bool,
}

impl DeviceOptions {
    /// A device with one RoCE port: the `index`-th host of the network.
    #[must_use]
    pub fn roce(index: u8) -> Self {
        Self::with_port(PortOptions::roce(index))
    }

    /// A device with one InfiniBand port of LID `lid`.
    #[must_use]
    pub fn infiniband(lid: u16) -> Self {
        Self::with_port(PortOptions::infiniband(lid))
    }

    fn with_port(port: PortOptions) -> Self {
        Self {
            mode: Mode::Immediate,
            statuses: Statuses::Specified,
            limits: Limits::default(),
            ports: vec![port],
            retry_delay: Duration::from_millis(5),
            unknown_route: UnknownRoute::Refused,
            destroy_keeps_completions: false,
            moves_bytes: true,
        }
    }
}

/// When posted work executes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Before `post_send` returns, as far as it can: what it completes can be polled at once.
    Immediate,
    /// Later, so that queues fill and an error finds work in flight. Across the QPs of all
    /// deferring devices the next one is drawn by the world's seed; on one QP order is kept.
    Deferred {
        /// How many requests execute before each `poll_cq` of any device of the world; with 0 only
        /// [`World::step`](crate::World::step) and `idle` execute any.
        per_poll: usize,
        /// One request also executes whenever this much time has passed, so that a caller who
        /// sleeps on its completion channel is woken. `None` where the test alone decides.
        idle: Option<Duration>,
    },
}

/// Which statuses a device reports where devices differ.
///
/// The rows of Soft-RoCE were recorded with two `rxe` devices over a veth pair, on Linux 6.1 and
/// 6.12 (Debian), rdma-core 44:
///
/// | provoked by | `Specified` | 6.1 | 6.12 |
/// |---|---|---|---|
/// | unknown local key | 4 `LOC_PROT` | 2 `LOC_QP_OP` | 5 `WR_FLUSH` |
/// | local range past its MR | 4 `LOC_PROT` | 4 `LOC_PROT` | 5 `WR_FLUSH` |
/// | message longer than its receive | 9 `REM_INV_REQ`; receiver 1 `LOC_LEN` | 11 `REM_OP`; receiver 2 `LOC_QP_OP` | as 6.1 |
/// | own port down | 12 `RETRY_EXC` | 12 `RETRY_EXC` | 5 `WR_FLUSH` |
/// | no answer, `retry_cnt` 7 | 12 `RETRY_EXC` | never completes | never completes |
///
/// `Specified` is the InfiniBand specification, chapters 9.9 and 11.6.2. That `retry_cnt` 7 is not counted down is in
/// Linux, `drivers/infiniband/sw/rxe/rxe_comp.c`: `rxe_completer`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Statuses {
    /// As the specification says.
    Specified,
    /// As Soft-RoCE of Linux 6.1.
    SoftRoce61,
    /// As Soft-RoCE of Linux 6.12: some first errors look like their consequences.
    SoftRoce612,
}

/// What moving to RTR does when no device of the world has the address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnknownRoute {
    /// It fails with `EINVAL`, as where the kernel cannot resolve it (Linux,
    /// `drivers/infiniband/core/verbs.c`: `ib_resolve_eth_dmac`).
    Refused,
    /// It succeeds, and nothing is ever answered: the address exists for the kernel only.
    Silent,
}

/// What a device grants at most. Asking for more is refused with `EINVAL`; more objects than
/// `max_*` counts, with `ENOMEM`.
#[derive(Debug, Clone, Copy)]
#[expect(missing_docs, reason = "the fields of `ibv_device_attr` of the same names")]
pub struct Limits {
    pub max_pd: u32,
    pub max_qp: u32,
    pub max_qp_wr: u32,
    pub max_sge: u32,
    pub max_cq: u32,
    pub max_cqe: u32,
    pub max_srq: u32,
    pub max_srq_wr: u32,
    pub max_srq_sge: u32,
    pub max_mr: u32,
    pub max_mr_size: u64,
    pub max_rd_atomic: u8,
    /// Most bytes of inline data a QP may ask for.
    pub max_inline_bytes: u32,
    /// Longest message of a port; a longer one completes with `LOC_LEN_ERR`.
    pub max_message_bytes: u32,
    /// Most bytes registered at a time, as `RLIMIT_MEMLOCK` bounds them: beyond, registering fails
    /// with `ENOMEM` (Linux, `drivers/infiniband/core/umem.c`: `ib_umem_get`). A dma-buf is not
    /// counted.
    pub max_pinned_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_pd: 256,
            max_qp: 4096,
            max_qp_wr: 8192,
            max_sge: 30,
            max_cq: 1024,
            max_cqe: 1 << 20,
            max_srq: 256,
            max_srq_wr: 32_767,
            max_srq_sge: 31,
            max_mr: 1 << 16,
            max_mr_size: u64::MAX,
            max_rd_atomic: 16,
            max_inline_bytes: 512,
            max_message_bytes: 1 << 30,
            max_pinned_bytes: u64::MAX,
        }
    }
}

/// One port.
#[derive(Debug, Clone)]
pub struct PortOptions {
    /// Its LID; 0 makes it a RoCE port.
    pub lid: u16,
    /// `IBV_MTU_*`: the largest path MTU it carries.
    pub active_mtu: sys::ibv_mtu,
    /// Its table of GIDs; `None` is an entry that is not in use.
    pub gids: Vec<Option<Gid>>,
    /// Whether the link is up.
    pub up: bool,
}

impl PortOptions {
    /// The port of the `host`-th host of a RoCE network, with the table a Linux host shows for one
    /// interface with an IPv4 address: link-local and IPv4, each as RoCE v1 and v2, then unused
    /// entries (Linux, `drivers/infiniband/core/roce_gid_mgmt.c`).
    #[must_use]
    pub fn roce(host: u8) -> Self {
        let mut local = [0; 16];
        local[..2].copy_from_slice(&[0xfe, 0x80]);
        local[8..].copy_from_slice(&[0x02, 0x5e, 0, 0xff, 0xfe, 0, 0, host]);
        let mut ipv4 = [0; 16];
        ipv4[10..].copy_from_slice(&[0xff, 0xff, 10, 0, 1, host]);
        let versions = [sys::IBV_GID_TYPE_ROCE_V1, sys::IBV_GID_TYPE_ROCE_V2];
        let used = [local, ipv4]
            .into_iter()
            .flat_map(|bytes| versions.map(|kind| Some(Gid { bytes, kind })));
        let gids = used.chain([None; 4]).collect();
        Self { lid: 0, active_mtu: sys::IBV_MTU_4096, gids, up: true }
    }

    /// The port of LID `lid` on an InfiniBand network.
    #[must_use]
    pub fn infiniband(lid: u16) -> Self {
        let mut bytes = [0; 16];
        bytes[..2].copy_from_slice(&[0xfe, 0x80]);
        bytes[14..].copy_from_slice(&lid.to_be_bytes());
        let gids = vec![Some(Gid { bytes, kind: sys::IBV_GID_TYPE_IB })];
        Self { lid, active_mtu: sys::IBV_MTU_4096, gids, up: true }
    }
}

/// An entry of a port's table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gid {
    /// The address.
    pub bytes: [u8; 16],
    /// `IBV_GID_TYPE_*`. Only entries of one kind reach each other.
    pub kind: sys::ibv_gid_type,
}
