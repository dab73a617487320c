//! Queues that are full, and queue pairs that are stopped.

use std::collections::BTreeSet;

use kvferry_verbs::{
    BatchError, Completion, PostFault, QpState, Recv, VerbsError, WorkStatus, WrFlags,
};

use crate::rig::{ALL, INLINE_BYTES, Patience, RECV_WRS, Rig, SGES, USUAL};

/// Nobody answers for longer than any test takes: 4.3 s, six times.
const SILENT: Patience = Patience { timeout: 20, ..USUAL };

#[test]
fn a_full_queue_takes_what_fits_and_says_so() {
    let Some(rig) = Rig::open() else { return };
    let (mut a, b) = rig.pair_with(SILENT, ALL);
    let (addr, rkey) = (b.mr.addr(), b.mr.rkey());
    let sge = a.mr.sge(0, 64).unwrap();
    // Nothing completes, so nothing makes room.
    b.qp.destroy().unwrap();
    let mut posted = 0;
    let (batch_len, error) = loop {
        let mut batch = a.qp.batch();
        for wr_id in posted..posted + 7 {
            batch.write(wr_id, &[sge], addr, rkey, wr_id % 3 == 0).unwrap();
        }
        let len = batch.len();
        match batch.post() {
            Ok(()) => posted += len as u64,
            Err(error) => break (len, error),
        }
        assert!(posted <= u64::from(2 * a.qp.max_send_wr()), "it takes more than it has");
    };
    assert!(matches!(error.source, PostFault::Full), "{error}");
    assert!(error.is_full() && error.posted < batch_len, "{error}");
    posted += error.posted as u64;
    println!("a queue of {} took {posted}", a.qp.max_send_wr());
    assert!(posted >= u64::from(crate::rig::SEND_WRS), "less than was granted");

    // It says so again, and nothing of what it refused is there.
    let mut batch = a.qp.batch();
    batch.write(9999, &[sge], addr, rkey, true).unwrap();
    let again = batch.post().unwrap_err();
    assert!(again.is_full() && again.posted == 0, "{again}");
    a.qp.to_error().unwrap();
    let ids: Vec<u64> = a.wait(posted as usize).iter().map(|done| done.wr_id).collect();
    assert!(ids.iter().copied().eq(0..posted), "{ids:?}");
    assert_eq!(a.cq.poll(&mut [Completion::EMPTY]).unwrap(), 0);
}

#[test]
fn a_queue_pair_that_is_stopped_accounts_for_everything_that_was_posted() {
    let Some(rig) = Rig::open() else { return };
    let (mut a, b) = rig.pair_with(SILENT, ALL);
    let (addr, rkey) = (b.mr.addr(), b.mr.rkey());
    let sge = a.mr.sge(0, 4096).unwrap();
    b.qp.destroy().unwrap();
    let recvs: Vec<Recv> = (0..10).map(|n| Recv { wr_id: 1000 + n, sge: Some(sge) }).collect();
    a.qp.post_recv(&recvs).unwrap();
    let mut batch = a.qp.batch();
    for wr_id in 0..50 {
        batch.write(wr_id, &[sge], addr, rkey, WrFlags::NONE).unwrap();
    }
    batch.post().unwrap();
    assert_eq!(a.qp.state().unwrap(), QpState::ReadyToSend);
    a.qp.to_error().unwrap();
    assert_eq!(a.qp.state().unwrap(), QpState::Error);
    let done = a.wait(60);
    for completion in &done {
        assert_eq!(completion.result.unwrap_err().status, WorkStatus::Flushed, "{completion:?}");
        assert_eq!(completion.result.unwrap_err().qp_num, a.qp.number());
    }
    let ids: BTreeSet<u64> = done.iter().map(|completion| completion.wr_id).collect();
    assert!(ids.into_iter().eq((0..50).chain(1000..1010)));
    // Stopping again is nothing new.
    a.qp.to_error().unwrap();
    assert_eq!(a.write_to(77, 8, addr, rkey), Err(WorkStatus::Flushed));
}

#[test]
fn a_receive_queue_that_is_full_says_how_many_it_took() {
    let Some(rig) = Rig::open() else { return };
    let (mut a, _b) = rig.pair();
    let granted = a.qp.capacities().max_recv_wr;
    assert!(granted >= RECV_WRS);
    let sge = a.mr.sge(0, 64).unwrap();
    let recvs: Vec<Recv> =
        (0..2 * u64::from(granted) + 2).map(|wr_id| Recv { wr_id, sge: Some(sge) }).collect();
    let error = a.qp.post_recv(&recvs).unwrap_err();
    assert!(error.is_full(), "{error}");
    assert!(error.posted >= RECV_WRS as usize && error.posted < recvs.len(), "{error}");
    a.qp.to_error().unwrap();
    let ids: Vec<u64> = a.wait(error.posted).iter().map(|done| done.wr_id).collect();
    assert!(ids.into_iter().eq(0..error.posted as u64));
    assert_eq!(a.cq.poll(&mut [Completion::EMPTY]).unwrap(), 0);
}

#[test]
fn what_does_not_fit_into_a_batch_leaves_it_as_it_was() {
    let Some(rig) = Rig::open() else { return };
    let (mut a, b) = rig.pair();
    let (addr, rkey) = (b.mr.addr(), b.mr.rkey());
    let capacities = a.qp.capacities();
    assert!(capacities.max_send_sge >= SGES && capacities.max_inline_bytes >= INLINE_BYTES);
    let sge = a.mr.sge(0, 8).unwrap();
    let many = vec![sge; capacities.max_send_sge as usize + 1];
    let long = vec![0; capacities.max_inline_bytes as usize + 1];
    let mut batch = a.qp.batch();
    let error = batch.write(1, &many, addr, rkey, true).unwrap_err();
    assert_eq!(error, BatchError::TooManySges { given: many.len(), max: capacities.max_send_sge });
    let error = batch.send_inline(1, &long, true).unwrap_err();
    let max = capacities.max_inline_bytes;
    assert_eq!(error, BatchError::InlineTooLong { given: long.len(), max });
    assert!(batch.is_empty());
    for wr_id in 0..u64::from(capacities.max_send_wr) {
        let last = wr_id + 1 == u64::from(capacities.max_send_wr);
        batch.write(wr_id, &[sge], addr, rkey, last).unwrap();
    }
    let error = batch.write(9999, &[sge], addr, rkey, true).unwrap_err();
    assert_eq!(error, BatchError::Full { max: capacities.max_send_wr });
    batch.post().unwrap();
    let done = a.wait(1)[0];
    assert_eq!((done.wr_id, done.result.is_ok()), (u64::from(capacities.max_send_wr) - 1, true));
}

#[test]
fn steps_out_of_turn_are_refused_by_name() {
    let Some(rig) = Rig::open() else { return };
    let mut end = rig.a.end(vec![0; 64], ALL);
    let rts = rig.a.rts(end.qp.number(), USUAL);
    let refused = |error| match error {
        VerbsError::Transition { from, to, .. } => (from, to),
        error => panic!("{error:?}"),
    };
    let from_reset = refused(end.qp.to_rts(&rts).unwrap_err());
    assert_eq!(from_reset, (QpState::Reset, QpState::ReadyToSend));
    let (mut a, _b) = rig.pair();
    assert_eq!(a.qp.query().unwrap().state, QpState::ReadyToSend);
    let again = refused(a.qp.to_rts(&rts).unwrap_err());
    assert_eq!(again, (QpState::ReadyToSend, QpState::ReadyToSend));
    a.qp.to_error().unwrap();
    let from_error = refused(a.qp.to_rts(&rts).unwrap_err());
    assert_eq!(from_error, (QpState::Error, QpState::ReadyToSend));
}
