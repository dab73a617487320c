//! What goes over arrives, whole and in order.

use kvferry_verbs::{Recv, WorkOpcode, WrFlags};

use crate::rig::{BYTES, INLINE_BYTES, Rig, SGES, pattern};

#[test]
fn writes_of_any_length_land_where_they_are_sent() {
    let Some(rig) = Rig::open() else { return };
    let (mut a, b) = rig.pair();
    let source = pattern(BYTES);
    for bytes in [0, 1, 1024, 4096, 4097, 65_537, BYTES as u32] {
        assert_eq!(a.write(u64::from(bytes), bytes, &b), Ok(()));
        assert!(b.bytes(0, bytes as usize) == source[..bytes as usize], "{bytes} bytes");
    }
}

#[test]
fn stretches_are_gathered_in_the_order_they_are_named() {
    let Some(rig) = Rig::open() else { return };
    let (mut a, b) = rig.pair();
    let source = pattern(BYTES);
    let stretches: Vec<(usize, usize)> =
        (0..SGES as usize).map(|n| (700_000 - 100_000 * n, 1000 + 1001 * n)).collect();
    let sges: Vec<_> =
        stretches.iter().map(|&(at, len)| a.mr.sge(at as u64, len as u32).unwrap()).collect();
    let mut batch = a.qp.batch();
    batch.write(1, &sges, b.mr.addr() + 5, b.mr.rkey(), true).unwrap();
    batch.post().unwrap();
    assert_eq!(a.status(), Ok(()));
    let gathered: Vec<u8> =
        stretches.iter().flat_map(|&(at, len)| source[at..at + len].to_vec()).collect();
    assert!(b.bytes(5, gathered.len()) == gathered);
    assert_eq!(b.bytes(0, 5), [0; 5], "bytes before it");
}

#[test]
fn a_write_with_a_number_lands_and_tells_it() {
    let Some(rig) = Rig::open() else { return };
    let (mut a, b) = rig.pair();
    b.qp.post_recv(&[Recv { wr_id: 77, sge: None }]).unwrap();
    let sge = a.mr.sge(0, 5000).unwrap();
    let mut batch = a.qp.batch();
    batch.write_with_imm(1, &[sge], b.mr.addr(), b.mr.rkey(), 0x0102_0304, true).unwrap();
    batch.post().unwrap();
    let sent = a.wait(1)[0];
    assert_eq!((sent.wr_id, sent.result.unwrap().opcode), (1, WorkOpcode::Write));
    let received = b.wait(1)[0];
    let work = received.result.unwrap();
    assert_eq!((received.wr_id, work.opcode), (77, WorkOpcode::ReceiveWriteImm));
    assert_eq!((work.imm, work.qp_num), (Some(0x0102_0304), b.qp.number()));
    assert!(b.bytes(0, 5000) == pattern(5000));
}

#[test]
fn a_read_brings_the_peers_bytes() {
    let Some(rig) = Rig::open() else { return };
    let (a, mut b) = rig.pair();
    let sges = [b.mr.sge(100, 3000).unwrap(), b.mr.sge(10_000, 7000).unwrap()];
    let mut batch = b.qp.batch();
    batch.read(9, &sges, a.mr.addr() + 333, a.mr.rkey(), true).unwrap();
    batch.post().unwrap();
    let completion = b.wait(1)[0];
    let work = completion.result.unwrap();
    assert_eq!((work.opcode, work.imm, work.qp_num), (WorkOpcode::Read, None, b.qp.number()));
    let source = pattern(BYTES);
    assert!(b.bytes(100, 3000) == source[333..3333]);
    assert!(b.bytes(10_000, 7000) == source[3333..10_333]);
}

#[test]
fn messages_arrive_in_order_with_their_lengths_and_numbers() {
    let Some(rig) = Rig::open() else { return };
    let (mut a, b) = rig.pair();
    let recvs: Vec<Recv> = (0..8)
        .map(|n| Recv { wr_id: 100 + n, sge: Some(b.mr.sge(n * 4096, 4096).unwrap()) })
        .collect();
    b.qp.post_recv(&recvs).unwrap();
    let lengths = [1, 64, 1000, 4096, 0, 7, 4095, 100];
    let sges = lengths.map(|len| a.mr.sge(u64::from(len) * 3, len).unwrap());
    let mut batch = a.qp.batch();
    for (n, sge) in (0..).zip(sges) {
        let flags = if n == 7 { WrFlags::SIGNALED } else { WrFlags::NONE };
        if n % 2 == 0 {
            batch.send(n, &[sge], flags | WrFlags::SOLICITED).unwrap();
        } else {
            batch.send_with_imm(n, &[sge], 0xffff_0000 + n as u32, flags).unwrap();
        }
    }
    batch.post().unwrap();
    let sent = a.wait(1)[0];
    assert_eq!((sent.wr_id, sent.result.unwrap().opcode), (7, WorkOpcode::Send));
    let source = pattern(BYTES);
    for (n, received) in (0..).zip(b.wait(8)) {
        let work = received.result.unwrap();
        let len = lengths[n as usize];
        assert_eq!((received.wr_id, work.opcode), (100 + n, WorkOpcode::Receive));
        assert_eq!(work.bytes, len);
        assert_eq!(work.imm, (n % 2 == 1).then_some(0xffff_0000 + n as u32));
        let expected = &source[3 * len as usize..][..len as usize];
        assert_eq!(b.bytes(n as usize * 4096, len as usize), expected);
    }
}

#[test]
fn inline_bytes_are_taken_when_they_are_posted() {
    let Some(rig) = Rig::open() else { return };
    let (mut a, b) = rig.pair();
    b.qp.post_recv(&[Recv { wr_id: 5, sge: Some(b.mr.sge(1000, 64).unwrap()) }]).unwrap();
    let mut header = [7u8; INLINE_BYTES as usize];
    let mut batch = a.qp.batch();
    batch.write_inline(0, &header[..40], b.mr.addr(), b.mr.rkey(), false).unwrap();
    batch.send_inline(1, &header, true).unwrap();
    batch.post().unwrap();
    header.fill(9);
    assert_eq!(a.status(), Ok(()));
    assert_eq!(b.wait(1)[0].result.unwrap().bytes, INLINE_BYTES);
    assert_eq!(b.bytes(1000, 64), [7; 64]);
    assert_eq!(b.bytes(0, 41)[..], [&[7; 40][..], &[0]].concat()[..]);
    assert_eq!(header, [9; 64]);
}

#[test]
fn a_chain_of_64_is_posted_at_once_and_ends_in_one_completion() {
    let Some(rig) = Rig::open() else { return };
    let (mut a, b) = rig.pair();
    const EACH: usize = 8192;
    let sges: Vec<_> = (0..64).map(|n| a.mr.sge(n * EACH as u64, EACH as u32).unwrap()).collect();
    let mut batch = a.qp.batch();
    for (n, sge) in (0..).zip(&sges) {
        // The other way round, so that no write can stand in for another.
        let to = b.mr.addr() + (63 - n) * EACH as u64;
        batch.write(n, std::slice::from_ref(sge), to, b.mr.rkey(), n == 63).unwrap();
    }
    assert_eq!(batch.len(), 64);
    batch.post().unwrap();
    let end = a.wait(1)[0];
    assert_eq!((end.wr_id, end.result.is_ok()), (63, true));
    let source = pattern(BYTES);
    for n in 0..64 {
        let landed = b.bytes((63 - n) * EACH, EACH);
        assert!(landed == source[n * EACH..][..EACH], "write {n}");
    }
    // A later request's completion is the next: the unsignaled ones had none.
    assert_eq!(a.write(999, 8, &b), Ok(()));
}

#[test]
fn a_fence_waits_for_the_read_before_it() {
    let Some(rig) = Rig::open() else { return };
    let (a, mut b) = rig.pair();
    const LEN: u32 = 300_000;
    let into = b.mr.sge(0, LEN).unwrap();
    let mut batch = b.qp.batch();
    // From a's start to b, and from there to a's middle.
    batch.read(1, &[into], a.mr.addr(), a.mr.rkey(), false).unwrap();
    let flags = WrFlags::SIGNALED | WrFlags::FENCE;
    batch.write(2, &[into], a.mr.addr() + 500_000, a.mr.rkey(), flags).unwrap();
    batch.post().unwrap();
    assert_eq!(b.status(), Ok(()));
    assert!(a.bytes(500_000, LEN as usize) == pattern(LEN as usize));
}

#[test]
fn a_batch_that_is_dropped_posts_nothing() {
    let Some(rig) = Rig::open() else { return };
    let (mut a, b) = rig.pair();
    let sge = a.mr.sge(0, 4096).unwrap();
    let mut batch = a.qp.batch();
    batch.write(1, &[sge], b.mr.addr(), b.mr.rkey(), true).unwrap();
    drop(batch);
    a.qp.batch().post().unwrap();
    assert_eq!(a.write_to(2, 8, b.mr.addr() + 8192, b.mr.rkey()), Ok(()));
    assert_eq!(b.bytes(0, 4096), [0; 4096], "the write that was dropped");
    assert_eq!(a.cq.poll(&mut [kvferry_verbs::Completion::EMPTY]).unwrap(), 0);
}
