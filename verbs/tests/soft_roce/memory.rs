//! Registering memory.

use std::os::fd::AsFd as _;

use kvferry_verbs::{Access, VerbsError, WorkStatus};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::rig::{ALL, BYTES, Rig, USUAL, bytes_of, pattern};

#[test]
fn a_dma_buf_is_registered_or_said_to_be_unsupported() {
    let Some(rig) = Rig::open() else { return };
    let file = memfd_create("kvferry-test", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, 8192).unwrap();
    // Not a dma-buf: a device that can register one still refuses this.
    let error = rig.a.pd.register_dmabuf(file.as_fd(), 0, 8192, 0x10000, ALL).unwrap_err();
    println!("dma-buf: {error}");
    match error {
        VerbsError::Unsupported { .. } => {}
        VerbsError::BadMemory { .. } | VerbsError::Os { .. } if !rig.is_soft() => {}
        error => panic!("{error:?}"),
    }
}

#[test]
fn memory_in_pieces_is_written_piece_by_piece_as_one() {
    let Some(rig) = Rig::open() else { return };
    let page = rustix::param::page_size();
    let (mut a, b) = rig.pair();
    let mut memory = vec![0u8; 9 * page];
    // Begins in the middle of a page.
    let start = page / 2 + memory.as_ptr().align_offset(page);
    let bytes = 7 * page;
    let addr = memory[start..].as_mut_ptr();
    // SAFETY: `memory` outlives the regions, and is looked at only when nothing is under way.
    let mrs = unsafe { rig.b.pd.register_raw_chunked(addr, bytes, ALL, 2 * page as u64) }.unwrap();
    assert_eq!(mrs.iter().map(|mr| mr.bytes()).sum::<u64>(), bytes as u64);
    assert!(mrs.len() >= 4 && mrs.iter().all(|mr| mr.bytes() <= 2 * page as u64));
    let mut batch = a.qp.batch();
    let mut from = 0;
    for (n, mr) in mrs.iter().enumerate() {
        let sge = a.mr.sge(from, mr.bytes() as u32).unwrap();
        batch.write(n as u64, &[sge], mr.addr(), mr.rkey(), n + 1 == mrs.len()).unwrap();
        from += mr.bytes();
    }
    batch.post().unwrap();
    assert_eq!(a.status(), Ok(()));
    mrs.iter().for_each(kvferry_verbs::Mr::revoke);
    assert!(memory[start..start + bytes] == pattern(bytes));
    assert!(memory[..start].iter().chain(&memory[start + bytes..]).all(|&byte| byte == 0));
    assert_eq!(a.write_to(99, 8, mrs[0].addr(), mrs[0].rkey()), Err(WorkStatus::RemoteAccess));
    drop((b, mrs));
}

#[test]
fn memory_with_relaxed_ordering_works_like_any() {
    let Some(rig) = Rig::open() else { return };
    let (mut a, b) = rig.pair_with(USUAL, ALL | Access::RELAXED_ORDERING);
    assert_eq!(a.write(0, BYTES as u32, &b), Ok(()));
    assert!(b.bytes(0, BYTES) == pattern(BYTES));
}

#[test]
fn a_region_lives_as_long_as_the_queue_pair_it_is_attached_to() {
    let Some(rig) = Rig::open() else { return };
    let (mut a, mut b) = rig.pair();
    let extra = rig.b.pd.register(vec![0; 4096], ALL).unwrap();
    b.qp.attach(&extra);
    let (addr, rkey) = (extra.addr(), extra.rkey());
    drop(extra);
    assert_eq!(a.write_to(0, 4096, addr, rkey), Ok(()));
    // And no longer: a new queue pair of the same domain cannot reach it.
    drop(b.qp);
    let (mut a, _b) = rig.pair();
    assert_eq!(a.write_to(0, 4096, addr, rkey), Err(WorkStatus::RemoteAccess));
}

#[test]
fn ranges_outside_a_region_have_no_name() {
    let Some(rig) = Rig::open() else { return };
    let source = pattern(5000);
    let mr = rig.a.pd.register(source.clone(), Access::NONE).unwrap();
    assert_eq!(mr.bytes(), 5000);
    assert_eq!(mr.sge(5000, 0).unwrap().addr, mr.addr() + 5000);
    assert!(matches!(mr.sge(4999, 2), Err(VerbsError::OutOfRange { within: 5000, .. })));
    assert!(matches!(mr.sge(u64::MAX, 2), Err(VerbsError::OutOfRange { .. })));
    assert!(matches!(mr.read(4999, &mut [0; 2]), Err(VerbsError::OutOfRange { .. })));
    assert!(bytes_of(&mr, 0, 5000) == source);
    assert_eq!(bytes_of(&mr, 4990, 10), source[4990..]);
}

#[test]
fn permissions_that_do_not_hold_together_are_refused() {
    let Some(rig) = Rig::open() else { return };
    let error = rig.a.pd.register(vec![0; 4096], Access::REMOTE_WRITE).unwrap_err();
    assert!(matches!(error, VerbsError::BadMemory { bytes: 4096, .. }), "{error:?}");
    assert!(error.to_string().contains("remote write needs local write"), "{error}");
}
