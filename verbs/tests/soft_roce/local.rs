//! Own memory that a work request may not touch.

use kvferry_verbs::{Sge, WorkStatus};

use crate::rig::{End, Rig, saw};

/// Soft-RoCE of Linux 6.1 tells these apart as its own; that of 6.12 reports the first error as if
/// it were a consequence.
const KNOWN: [WorkStatus; 3] =
    [WorkStatus::LocalProtection, WorkStatus::LocalQpOperation, WorkStatus::Flushed];

/// A write that the own NIC must fail; of its bytes only those from `valid` on must not arrive, since
/// packets may have left before the first that cannot.
fn fails(what: &str, a: &mut End, b: &End, sge: Sge, valid: u32) {
    let mut batch = a.qp.batch();
    batch.write(1, &[sge], b.mr.addr(), b.mr.rkey(), true).unwrap();
    batch.post().unwrap();
    let status = a.status();
    saw(what, status);
    assert!(KNOWN.contains(&status.expect_err(what)), "{what}: {status:?}");
    let landed = b.bytes(valid as usize, (sge.bytes - valid) as usize);
    assert!(landed.iter().all(|&byte| byte == 0), "{what}: bytes have arrived");
    assert_eq!(a.write(2, 8, b), Err(WorkStatus::Flushed), "{what}");
}

#[test]
fn a_wrong_local_key_fails_the_write() {
    let Some(rig) = Rig::open() else { return };
    let (mut a, b) = rig.pair();
    let sge = a.mr.sge(0, 4096).unwrap();
    fails("wrong local key", &mut a, &b, Sge { lkey: sge.lkey ^ 0x55, ..sge }, 0);
}

#[test]
fn local_bytes_outside_the_region_fail_the_write() {
    let Some(rig) = Rig::open() else { return };
    let (mut a, b) = rig.pair();
    let sge = a.mr.sge(a.mr.bytes() - 4096, 4096).unwrap();
    fails("local range past the region", &mut a, &b, Sge { bytes: 8192, ..sge }, 4096);
}

#[test]
fn a_local_region_that_was_revoked_fails_the_write() {
    let Some(rig) = Rig::open() else { return };
    let (mut a, b) = rig.pair();
    let sge = a.mr.sge(0, 4096).unwrap();
    a.mr.revoke();
    fails("revoked local region", &mut a, &b, sge, 0);
}
