//! Messages for which there is no receive, or none that is long enough; and shared receives.

use kvferry_verbs::{QpOptions, QpState, Recv, SrqOptions, WorkStatus};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::rig::{ALL, BYTES, PATIENCE, Patience, Rig, USUAL, options, pattern, saw, wait};

#[test]
fn a_message_for_which_there_is_no_receive_fails_after_its_retries() {
    let Some(rig) = Rig::open() else { return };
    let (mut a, b) = rig.pair_with(Patience { rnr_retry: 2, ..USUAL }, ALL);
    let sge = a.mr.sge(0, 1000).unwrap();
    let mut batch = a.qp.batch();
    batch.send(1, &[sge], true).unwrap();
    batch.post().unwrap();
    let status = a.status();
    saw("no receive posted", status);
    assert_eq!(status, Err(WorkStatus::RnrRetryExceeded));
    assert_eq!(a.write(2, 8, &b), Err(WorkStatus::Flushed));
}

#[test]
fn a_message_that_is_longer_than_its_receive_fails_at_both_ends() {
    let Some(rig) = Rig::open() else { return };
    let (mut a, b) = rig.pair();
    let small = b.mr.sge(0, 100).unwrap();
    b.qp.post_recv(&[Recv { wr_id: 5, sge: Some(small) }]).unwrap();
    let sge = a.mr.sge(0, 8192).unwrap();
    let mut batch = a.qp.batch();
    batch.send(1, &[sge], true).unwrap();
    batch.post().unwrap();
    let (sent, received) = (a.status(), b.wait(1)[0]);
    saw("message too long, sender", sent);
    let of_receiver = received.result.map(drop).map_err(|error| error.status);
    saw("message too long, receiver", of_receiver);
    // The specification's and Soft-RoCE's.
    let known = [WorkStatus::RemoteInvalidRequest, WorkStatus::RemoteOperation];
    assert!(known.contains(&sent.unwrap_err()), "{sent:?}");
    assert_eq!(received.wr_id, 5);
    let known = [WorkStatus::LocalLength, WorkStatus::LocalQpOperation];
    assert!(known.contains(&of_receiver.unwrap_err()), "{of_receiver:?}");
    assert_eq!(b.bytes(100, 8092), vec![0; 8092], "bytes past the receive");
}

#[test]
fn shared_receives_wake_whoever_waits_and_tell_whose_message_it_was() {
    let Some(rig) = Rig::open() else { return };
    let channel = rig.b.context.completion_channel().unwrap();
    let cq = rig.b.context.create_cq(64, Some(&channel)).unwrap();
    let srq = rig.b.pd.create_srq(SrqOptions { max_wr: 16, max_sge: 1 }).unwrap();
    assert!(srq.granted().max_wr >= 16 && cq.depth() >= 64);
    let memory = rig.b.pd.register(vec![0; BYTES], ALL).unwrap();
    let recvs: Vec<Recv> =
        (0..16).map(|n| Recv { wr_id: n, sge: Some(memory.sge(n * 64, 64).unwrap()) }).collect();
    srq.post(&recvs).unwrap();
    let options = QpOptions { srq: Some(&srq), max_recv_wr: 0, max_recv_sge: 0, ..options(&cq) };
    let mut peers = [rig.b.pd.create_qp(&options).unwrap(), rig.b.pd.create_qp(&options).unwrap()];
    let mut senders = [rig.a.end(pattern(BYTES), ALL), rig.a.end(pattern(BYTES), ALL)];
    for (sender, peer) in senders.iter_mut().zip(&mut peers) {
        rig.connect(&mut sender.qp, peer, USUAL);
        let own = peer.post_recv(&recvs[..1]).unwrap_err();
        assert_eq!(own.posted, 0, "it has no queue of its own: {own}");
    }

    assert_eq!(channel.take_events().unwrap(), 0, "nobody asked yet");
    for round in 0..4 {
        let which = round % 2;
        cq.request_notify().unwrap();
        assert_eq!(wait(&cq, 0).len(), 0);
        let sender = &mut senders[which];
        let sge = sender.mr.sge(round as u64 * 100, 64).unwrap();
        let mut batch = sender.qp.batch();
        batch.send(1, &[sge], true).unwrap();
        batch.post().unwrap();
        let mut fds = [PollFd::new(&channel, PollFlags::IN)];
        let limit = Timespec::try_from(PATIENCE).unwrap();
        assert_eq!(poll(&mut fds, Some(&limit)).unwrap(), 1, "nothing came");
        assert_eq!(channel.take_events().unwrap(), 1);
        assert_eq!(channel.take_events().unwrap(), 0);
        let received = wait(&cq, 1)[0];
        let work = received.result.unwrap();
        assert_eq!((work.qp_num, work.bytes), (peers[which].number(), 64));
        let mut bytes = [0; 64];
        memory.read(received.wr_id as usize * 64, &mut bytes).unwrap();
        assert_eq!(bytes[..], pattern(BYTES)[round * 100..][..64]);
        assert_eq!(senders[which].status(), Ok(()));
    }

    // Without being asked again it stays silent.
    let mut batch = senders[0].qp.batch();
    batch.send_inline(1, b"silent", true).unwrap();
    batch.post().unwrap();
    wait(&cq, 1);
    assert_eq!(channel.take_events().unwrap(), 0);
    assert_eq!(peers[0].state().unwrap(), QpState::ReadyToSend);
}
