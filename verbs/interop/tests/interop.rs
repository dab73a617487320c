//! Queue pairs of this project and of the `ibverbs` crate, an independent user of libibverbs, talk to each
//! other over the devices that `KVFERRY_RDMA` names (`a1:b1`): ours on the first, theirs on the second.

use std::ffi::CString;
use std::time::{Duration, Instant};

use ibverbs::{QueuePairEndpoint, ibv_qp_type, ibv_wc};
use kvferry_verbs::{
    Access, AddressVector, Completion, Context, Cq, GidEntry, GlobalRoute, InitAttributes, Library,
    Mr, Pd, Qp, QpOptions, Recv, RtrAttributes, RtsAttributes, rank_gids,
};

const BYTES: usize = 64 << 10;
/// Far longer than anything takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// The devices under test.
fn devices() -> Option<(String, String)> {
    let Ok(named) = std::env::var("KVFERRY_RDMA") else {
        println!("skipped: KVFERRY_RDMA is not set");
        return None;
    };
    let first = named.split(',').next().unwrap_or(&named);
    let (a, b) = first.split_once(':').expect("KVFERRY_RDMA is a1:b1,a2:b2");
    Some((a.to_owned(), b.to_owned()))
}

/// Our end.
struct Ours {
    context: Context,
    _pd: Pd,
    cq: Cq,
    qp: Qp,
    mr: Mr,
    gid: GidEntry,
}

fn best_gid(context: &Context) -> GidEntry {
    let table = context.gid_table(1).unwrap();
    (*rank_gids(&table).first().expect("a GID")).clone()
}

impl Ours {
    fn new(device: &str) -> Self {
        let context = Context::open(&Library::open().unwrap(), device).unwrap();
        let pd = context.allocate_pd().unwrap();
        let pattern: Vec<u8> = (0..BYTES).map(|i| (i * 7 + i / 251) as u8).collect();
        let mr = pd.register(pattern, Access::LOCAL_WRITE).unwrap();
        let cq = context.create_cq(64, None).unwrap();
        let options = QpOptions {
            send_cq: &cq,
            recv_cq: &cq,
            srq: None,
            max_send_wr: 32,
            max_recv_wr: 8,
            max_send_sge: 2,
            max_recv_sge: 1,
            max_inline_bytes: 64,
        };
        let qp = pd.create_qp(&options).unwrap();
        let gid = best_gid(&context);
        Self { context, _pd: pd, cq, qp, mr, gid }
    }

    fn endpoint(&self) -> QueuePairEndpoint {
        let mut gid = ibverbs::Gid::default();
        gid.as_mut().raw = self.gid.gid.0.octets();
        let lid = self.context.port(1).unwrap().lid;
        QueuePairEndpoint { num: self.qp.number(), lid, gid: Some(gid) }
    }

    /// Joins theirs. That crate begins every stream of packets with number 0.
    fn join(&mut self, num: u32, gid: &GidEntry) {
        let port = self.context.port(1).unwrap();
        let init = InitAttributes { port: 1, pkey_index: 0, access: Access::LOCAL_WRITE };
        self.qp.to_init(&init).unwrap();
        let global = GlobalRoute {
            gid: gid.gid,
            gid_index: self.gid.index as u8,
            traffic_class: 0,
            hop_limit: 64,
            flow_label: 0,
        };
        let address = AddressVector { port: 1, lid: 0, sl: 0, global: Some(global) };
        self.qp
            .to_rtr(&RtrAttributes {
                path_mtu: port.active_mtu,
                remote_qp_num: num,
                rq_psn: 0,
                address,
                max_dest_rd_atomic: 1,
                min_rnr_timer: 18,
            })
            .unwrap();
        self.qp
            .to_rts(&RtsAttributes {
                sq_psn: 0,
                timeout: 14,
                retry_count: 6,
                rnr_retry: 6,
                max_rd_atomic: 1,
            })
            .unwrap();
    }

    fn completion(&self) -> Completion {
        let deadline = Instant::now() + PATIENCE;
        let mut completions = [Completion::EMPTY; 1];
        while self.cq.poll(&mut completions).unwrap() == 0 {
            assert!(Instant::now() < deadline, "nothing completed here");
            std::thread::yield_now();
        }
        completions[0]
    }
}

/// Waits for one completion of theirs.
fn theirs_completes(cq: &ibverbs::CompletionQueue<'_>, wr_id: u64) -> ibv_wc {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let mut completions = [ibv_wc::default(); 1];
        if let Some(done) = cq.poll(&mut completions).unwrap().first() {
            assert!(done.is_valid(), "{:?}", done.error());
            assert_eq!(done.wr_id(), wr_id);
            return *done;
        }
        assert!(Instant::now() < deadline, "nothing completed there");
        std::thread::yield_now();
    }
}

#[test]
fn messages_writes_and_reads_cross_between_our_queue_pair_and_the_ibverbs_crates() {
    let Some((a, b)) = devices() else { return };
    let mut ours = Ours::new(&a);
    let their_gid = best_gid(&Context::open(&Library::open().unwrap(), &b).unwrap());
    let list = ibverbs::devices().unwrap();
    let name = CString::new(b).unwrap();
    let device = list.iter().find(|device| device.name() == Some(&name)).expect("their device");
    let context = device.open().unwrap();
    let cq = context.create_cq(64, 0).unwrap();
    let pd = context.alloc_pd().unwrap();
    let mut memory = pd.allocate::<u8>(BYTES).unwrap();
    let prepared = pd
        .create_qp(&cq, &cq, ibv_qp_type::IBV_QPT_RC)
        .set_gid_index(their_gid.index)
        .allow_remote_rw()
        .set_max_send_wr(8)
        .set_max_recv_wr(8)
        .build()
        .unwrap();
    let num = prepared.endpoint().num;
    let mut theirs = prepared.handshake(ours.endpoint()).unwrap();
    ours.join(num, &their_gid);

    // Ours sends from inside the work request, theirs receives.
    // SAFETY: nothing else touches these bytes until the receive has completed.
    unsafe { theirs.post_receive(&mut memory, 0..16, 1) }.unwrap();
    let mut batch = ours.qp.batch();
    batch.send_inline(10, b"from our side...", true).unwrap();
    batch.post().unwrap();
    assert!(ours.completion().result.is_ok());
    assert_eq!(theirs_completes(&cq, 1).len(), 16);
    assert_eq!(&memory[..16], b"from our side...");

    // Theirs sends, ours receives.
    let sge = ours.mr.sge(0, 16).unwrap();
    ours.qp.post_recv(&[Recv { wr_id: 20, sge: Some(sge) }]).unwrap();
    memory[..16].copy_from_slice(b"from their side.");
    // SAFETY: as above.
    unsafe { theirs.post_send(&mut memory, 0..16, 2) }.unwrap();
    let received = ours.completion();
    assert_eq!((received.wr_id, received.result.unwrap().bytes), (20, 16));
    theirs_completes(&cq, 2);
    let mut message = [0; 16];
    ours.mr.read(0, &mut message).unwrap();
    assert_eq!(&message, b"from their side.");

    // Ours writes a chain of sixteen with one doorbell, the last one told of.
    let (base, rkey) = (memory.as_ptr() as u64, memory.rkey().key);
    let piece = (BYTES / 16) as u32;
    let mut batch = ours.qp.batch();
    for i in 0..16u32 {
        let sge = ours.mr.sge(u64::from(i * piece), piece).unwrap();
        // Backwards, so that a mistake of order shows.
        let at = base + u64::from((15 - i) * piece);
        batch.write(30 + u64::from(i), &[sge], at, rkey, i == 15).unwrap();
    }
    batch.post().unwrap();
    let written = ours.completion();
    assert_eq!(written.wr_id, 45);
    assert!(written.result.is_ok(), "{written:?}");
    let mut source = vec![0; BYTES];
    ours.mr.read(0, &mut source).unwrap();
    for (i, chunk) in source.chunks(piece as usize).enumerate() {
        let at = (15 - i) * piece as usize;
        assert!(&memory[at..at + piece as usize] == chunk, "piece {i}");
    }

    // And reads them back.
    let back = ours.mr.sge(0, piece).unwrap();
    let mut batch = ours.qp.batch();
    batch.read(50, &[back], base, rkey, true).unwrap();
    batch.post().unwrap();
    assert!(ours.completion().result.is_ok());
    let mut read = vec![0; piece as usize];
    ours.mr.read(0, &mut read).unwrap();
    assert!(read == memory[..piece as usize], "what was read is what is there");
}
