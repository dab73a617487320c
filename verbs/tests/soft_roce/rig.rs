//! Two devices, and queue pairs between them.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kvferry_verbs::{
    Access, AddressVector, Completion, Context, Cq, Gid, GidEntry, GidType, GlobalRoute,
    InitAttributes, Library, LinkLayer, Mr, Pd, Qp, QpOptions, RtrAttributes, RtsAttributes,
    WorkStatus, rank_gids,
};

/// The port of every device.
pub(crate) const PORT: u8 = 1;
/// Bytes of each end's memory.
pub(crate) const BYTES: usize = 1 << 20;
/// What a queue pair is made with.
pub(crate) const SEND_WRS: u32 = 128;
pub(crate) const RECV_WRS: u32 = 32;
pub(crate) const SGES: u32 = 4;
pub(crate) const INLINE_BYTES: u32 = 64;
/// What peers may do unless a test says otherwise.
pub(crate) const ALL: Access = {
    let bits = Access::LOCAL_WRITE;
    bits.union(Access::REMOTE_WRITE).union(Access::REMOTE_READ)
};
/// How long anything is waited for that must come: far beyond what it takes on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// The devices are the same for all tests of the process, and one of these takes their port down.
static DEVICES: Mutex<()> = Mutex::new(());

/// One device, opened.
pub(crate) struct Side {
    pub(crate) context: Context,
    pub(crate) pd: Pd,
    /// Where the other side is reached from.
    pub(crate) gid: GidEntry,
    pub(crate) lid: u16,
    pub(crate) link_layer: LinkLayer,
}

/// Both devices.
pub(crate) struct Rig {
    pub(crate) a: Side,
    pub(crate) b: Side,
    _alone: MutexGuard<'static, ()>,
}

/// A queue pair and what it works with. `b` is its peer's memory.
pub(crate) struct End {
    pub(crate) qp: Qp,
    pub(crate) cq: Cq,
    pub(crate) mr: Mr,
}

/// How patient a queue pair is, in the codes of `RtsAttributes`.
#[derive(Clone, Copy)]
pub(crate) struct Patience {
    pub(crate) timeout: u8,
    pub(crate) retry_count: u8,
    pub(crate) rnr_retry: u8,
}

/// Half a second until a silent peer is given up. Soft-RoCE retries 7 times for ever.
pub(crate) const USUAL: Patience = Patience { timeout: 14, retry_count: 6, rnr_retry: 6 };

impl Rig {
    /// The first pair of `KVFERRY_RDMA`, or `None` and a word on why.
    pub(crate) fn open() -> Option<Self> {
        let Ok(named) = std::env::var("KVFERRY_RDMA") else {
            println!("skipped: KVFERRY_RDMA is not set");
            return None;
        };
        let first = named.split(',').next().unwrap_or(&named);
        let (a, b) = first.split_once(':').expect("KVFERRY_RDMA is a1:b1,a2:b2");
        let alone = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
        let library = Library::open().unwrap();
        let (a, b) = (Context::open(&library, a).unwrap(), Context::open(&library, b).unwrap());
        let (gid_a, gid_b) = common_gids(&a, &b).expect("two GIDs of one type and family");
        Some(Self { a: Side::new(a, gid_a), b: Side::new(b, gid_b), _alone: alone })
    }

    /// Whether both are Soft-RoCE: rxe alone names its network device so (Linux,
    /// `drivers/infiniband/sw/rxe/rxe_verbs.c`: `parent_show`).
    pub(crate) fn is_soft(&self) -> bool {
        [&self.a, &self.b].iter().all(|side| {
            let device = format!("/sys/class/infiniband/{}/parent", side.context.name());
            std::path::Path::new(&device).exists()
        })
    }

    /// Two connected ends of [`BYTES`] bytes each: `a` has a pattern, `b` has zeros.
    pub(crate) fn pair(&self) -> (End, End) {
        self.pair_with(USUAL, ALL)
    }

    /// As [`Rig::pair`]; `access` is to `b`'s memory.
    pub(crate) fn pair_with(&self, patience: Patience, access: Access) -> (End, End) {
        let mut a = self.a.end(pattern(BYTES), ALL);
        let mut b = self.b.end(vec![0; BYTES], access);
        self.connect(&mut a.qp, &mut b.qp, patience);
        (a, b)
    }

    pub(crate) fn connect(&self, a: &mut Qp, b: &mut Qp, patience: Patience) {
        let (to_a, to_b) = (a.number(), b.number());
        self.a.join(a, &self.b, to_b, patience);
        self.b.join(b, &self.a, to_a, patience);
    }
}

impl Side {
    pub(crate) fn new(context: Context, gid: GidEntry) -> Self {
        let port = context.port(PORT).unwrap();
        let pd = context.allocate_pd().unwrap();
        Self { pd, gid, lid: port.lid, link_layer: port.link_layer, context }
    }

    pub(crate) fn end(&self, memory: Vec<u8>, access: Access) -> End {
        // Memory first: when a process is killed, the kernel destroys what it had made last (Linux,
        // `drivers/infiniband/core/rdma_core.c`: `__uverbs_cleanup_ufile`). A region that goes before
        // its queue pair looks like a wrong key to the peer.
        let mr = self.pd.register(memory, access).unwrap();
        let cq = self.context.create_cq(2 * SEND_WRS + RECV_WRS, None).unwrap();
        let qp = self.pd.create_qp(&options(&cq)).unwrap();
        End { qp, cq, mr }
    }

    pub(crate) fn join(&self, qp: &mut Qp, peer: &Self, number: u32, patience: Patience) {
        let gid = (self.link_layer == LinkLayer::Ethernet).then_some(peer.gid.gid);
        self.join_at(qp, gid, peer.lid, number, patience);
    }

    /// Joins a queue pair with the one of this number. Sequence numbers are made from numbers, which
    /// both ends know.
    pub(crate) fn join_at(
        &self,
        qp: &mut Qp,
        gid: Option<Gid>,
        lid: u16,
        number: u32,
        patience: Patience,
    ) {
        let access = Access::REMOTE_WRITE | Access::REMOTE_READ;
        qp.to_init(&InitAttributes { port: PORT, pkey_index: 0, access }).unwrap();
        qp.to_rtr(&self.rtr(gid, lid, number)).unwrap();
        qp.to_rts(&self.rts(qp.number(), patience)).unwrap();
    }

    pub(crate) fn rtr(&self, gid: Option<Gid>, lid: u16, number: u32) -> RtrAttributes {
        RtrAttributes {
            path_mtu: self.context.port(PORT).unwrap().active_mtu,
            remote_qp_num: number,
            rq_psn: number ^ 0x00a5_5a00,
            address: AddressVector {
                port: PORT,
                lid,
                sl: 0,
                global: gid.map(|gid| GlobalRoute {
                    gid,
                    gid_index: u8::try_from(self.gid.index).unwrap(),
                    traffic_class: 0,
                    hop_limit: 64,
                    flow_label: 0,
                }),
            },
            max_dest_rd_atomic: 4,
            min_rnr_timer: 12,
        }
    }

    pub(crate) const fn rts(&self, number: u32, patience: Patience) -> RtsAttributes {
        let Patience { timeout, retry_count, rnr_retry } = patience;
        let sq_psn = number ^ 0x00a5_5a00;
        RtsAttributes { sq_psn, timeout, retry_count, rnr_retry, max_rd_atomic: 4 }
    }
}

impl End {
    /// Waits for `count` completions.
    pub(crate) fn wait(&self, count: usize) -> Vec<Completion> {
        wait(&self.cq, count)
    }

    /// Waits for one completion, and gives its status.
    pub(crate) fn status(&self) -> Result<(), WorkStatus> {
        self.wait(1)[0].result.map(drop).map_err(|error| error.status)
    }

    /// Writes all of its memory's first `bytes` bytes to the start of `to`.
    pub(crate) fn write(&mut self, wr_id: u64, bytes: u32, to: &Self) -> Result<(), WorkStatus> {
        self.write_to(wr_id, bytes, to.mr.addr(), to.mr.rkey())
    }

    pub(crate) fn write_to(
        &mut self,
        wr_id: u64,
        bytes: u32,
        addr: u64,
        rkey: u32,
    ) -> Result<(), WorkStatus> {
        let sge = self.mr.sge(0, bytes).unwrap();
        let mut batch = self.qp.batch();
        batch.write(wr_id, &[sge], addr, rkey, true).unwrap();
        batch.post().unwrap();
        self.status()
    }

    /// Its memory's bytes.
    pub(crate) fn bytes(&self, offset: usize, bytes: usize) -> Vec<u8> {
        bytes_of(&self.mr, offset, bytes)
    }
}

pub(crate) fn bytes_of(mr: &Mr, offset: usize, bytes: usize) -> Vec<u8> {
    let mut read = vec![0; bytes];
    mr.read(offset, &mut read).unwrap();
    read
}

pub(crate) const fn options(cq: &Cq) -> QpOptions<'_> {
    QpOptions {
        send_cq: cq,
        recv_cq: cq,
        srq: None,
        max_send_wr: SEND_WRS,
        max_recv_wr: RECV_WRS,
        max_send_sge: SGES,
        max_recv_sge: 1,
        max_inline_bytes: INLINE_BYTES,
    }
}

pub(crate) fn wait(cq: &Cq, count: usize) -> Vec<Completion> {
    let deadline = Instant::now() + PATIENCE;
    let mut all = vec![Completion::EMPTY; count];
    let mut have = 0;
    while have < count {
        have += cq.poll(&mut all[have..]).unwrap();
        assert!(Instant::now() < deadline, "{have} of {count} completions came");
        std::thread::yield_now();
    }
    all
}

/// Bytes of which no two stretches look alike.
pub(crate) fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at.wrapping_mul(31) ^ (at >> 8).wrapping_mul(7)) as u8).collect()
}

/// Prints what a mistake gave, for the record.
pub(crate) fn saw(what: &str, status: Result<(), WorkStatus>) {
    match status {
        Ok(()) => println!("status: {what}: success"),
        Err(status) => println!("status: {what}: {status}"),
    }
}

/// The best GIDs of two devices that can speak to each other.
pub(crate) fn common_gids(a: &Context, b: &Context) -> Option<(GidEntry, GidEntry)> {
    let (of_a, of_b) = (a.gid_table(PORT).unwrap(), b.gid_table(PORT).unwrap());
    let ranked = rank_gids(&of_b);
    rank_gids(&of_a).into_iter().find_map(|a| {
        let same = |b: &&&GidEntry| b.kind == a.kind && b.gid.class() == a.gid.class();
        let b = ranked.iter().find(same)?;
        debug_assert!(a.kind != GidType::InfiniBand || a.net_device.is_none());
        Some((a.clone(), (*b).clone()))
    })
}
