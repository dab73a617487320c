//! Memory of the peer's that may not be touched is not, and both ends learn of it.

use kvferry_verbs::{Access, QpState, WorkStatus};

use crate::rig::{ALL, BYTES, End, Rig, USUAL, saw};

/// A write that the peer must refuse, and what follows from it.
fn is_refused(what: &str, a: &mut End, b: &End, (addr, rkey): (u64, u32), bytes: u32) {
    let before = b.bytes(0, BYTES);
    let status = a.write_to(1, bytes, addr, rkey);
    saw(what, status);
    assert_eq!(status, Err(WorkStatus::RemoteAccess), "{what}");
    assert_eq!(a.qp.state().unwrap(), QpState::Error, "{what}");
    assert!(b.bytes(0, BYTES) == before, "{what}: bytes have changed");
    // Everything after it is swept up, whether it would have been allowed or not.
    let (good, rkey) = (b.mr.addr(), b.mr.rkey());
    for wr_id in 2..5 {
        assert_eq!(a.write_to(wr_id, 8, good, rkey), Err(WorkStatus::Flushed), "{what}");
    }
}

#[test]
fn a_wrong_key_is_refused() {
    let Some(rig) = Rig::open() else { return };
    let (mut a, b) = rig.pair();
    // The low byte is not part of the index: the region is found, and its key differs.
    let at = (b.mr.addr(), b.mr.rkey() ^ 0x55);
    is_refused("wrong key", &mut a, &b, at, 4096);
    let (mut a, b) = rig.pair();
    let at = (b.mr.addr(), b.mr.rkey() ^ 0x00ff_ff00);
    is_refused("key of no region", &mut a, &b, at, 4096);
}

#[test]
fn a_read_by_a_wrong_key_is_refused() {
    let Some(rig) = Rig::open() else { return };
    let (a, mut b) = rig.pair();
    let into = b.mr.sge(0, 4096).unwrap();
    let mut batch = b.qp.batch();
    batch.read(1, &[into], a.mr.addr(), a.mr.rkey() ^ 0x55, true).unwrap();
    batch.post().unwrap();
    let status = b.status();
    saw("read by a wrong key", status);
    assert_eq!(status, Err(WorkStatus::RemoteAccess));
    assert_eq!(b.bytes(0, 4096), [0; 4096]);
}

#[test]
fn bytes_outside_the_region_are_refused() {
    let Some(rig) = Rig::open() else { return };
    let past = |b: &End| (b.mr.addr() + b.mr.bytes() - 4096, b.mr.rkey());
    let (mut a, b) = rig.pair();
    let at = past(&b);
    is_refused("range past the region", &mut a, &b, at, 8192);
    let (mut a, b) = rig.pair();
    let at = (b.mr.addr() - 4096, b.mr.rkey());
    is_refused("range before the region", &mut a, &b, at, 4096);
}

#[test]
fn a_region_that_was_revoked_is_refused_and_its_bytes_stay() {
    let Some(rig) = Rig::open() else { return };
    let (mut a, b) = rig.pair();
    assert_eq!(a.write(0, 4096, &b), Ok(()));
    assert!(b.mr.is_registered());
    b.mr.revoke();
    assert!(!b.mr.is_registered());
    b.mr.revoke();
    let at = (b.mr.addr(), b.mr.rkey());
    is_refused("revoked region", &mut a, &b, at, 8192);
}

#[test]
fn a_region_without_remote_write_is_refused() {
    let Some(rig) = Rig::open() else { return };
    let (mut a, b) = rig.pair_with(USUAL, Access::LOCAL_WRITE | Access::REMOTE_READ);
    let at = (b.mr.addr(), b.mr.rkey());
    is_refused("region without remote write", &mut a, &b, at, 4096);
}

#[test]
fn a_region_of_another_domain_is_refused() {
    let Some(rig) = Rig::open() else { return };
    let (mut a, b) = rig.pair();
    let other = rig.b.context.allocate_pd().unwrap().register(vec![0; BYTES], ALL).unwrap();
    let at = (other.addr(), other.rkey());
    is_refused("region of another domain", &mut a, &b, at, 4096);
}
