//! What goes wrong when a script says so.

use std::time::Duration;

use kvferry_verbs_standin::{Fault, Mode, Pick, VENDOR_ERR, WorldOptions, sys};
use sys::ibv_qp_state as qps;
use sys::ibv_wc_status as status;
use sys::ibv_wr_opcode as wr;

use crate::common::{Net, Node, connected, statuses};

const FLUSH: u32 = status::IBV_WC_WR_FLUSH_ERR;
const LOST: u32 = status::IBV_WC_RETRY_EXC_ERR;

#[test]
fn the_nth_request_that_fits_every_condition_fails() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let ((q1, r1), (q2, _r2)) = (connected(&a, &b), connected(&a, &b));
    let range = b.addr(100)..b.addr(200);
    let pick =
        Pick::any().device(0).qp(q1.number()).opcode(wr::IBV_WR_RDMA_WRITE).touching(range).nth(3);
    let rule = net.world.script(pick, Fault::fail(status::IBV_WC_LOC_PROT_ERR));
    r1.receive(70, 0..8);
    let hit = |n| q1.write(n, 199..207, &b);
    q2.post(&[q2.write(0, 150..160, &b)]).unwrap();
    q1.post(&[
        hit(1),
        q1.send(2, 0..8),
        q1.read(3, 150..160, &b),
        q1.write(4, 92..100, &b),
        q1.write(5, 200..208, &b),
        q1.write(6, 92..101, &b),
    ])
    .unwrap();
    assert_eq!(net.world.fired(rule), 0);
    q1.post(&[hit(7), hit(8)]).unwrap();
    assert_eq!(net.world.fired(rule), 1);
    let seen = a.poll();
    let (last, before) = seen.split_last().unwrap();
    let (failed, before) = before.split_last().unwrap();
    assert!(before.iter().all(|seen| seen.status == 0), "{before:?}");
    assert_eq!(failed.vendor_err, VENDOR_ERR | status::IBV_WC_LOC_PROT_ERR);
    assert_eq!(statuses(&[*failed, *last]), [(7, status::IBV_WC_LOC_PROT_ERR), (8, FLUSH)]);
    assert_eq!((r1.state(), b.events()), (qps::IBV_QPS_RTS, vec![]), "a local matter");
}

#[test]
fn as_many_requests_fail_as_it_says() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let pick = Pick::any().nth(2).times(2);
    let rule = net.world.script(pick, Fault::fail(status::IBV_WC_GENERAL_ERR));
    let results: Vec<_> = (0..5)
        .map(|n| {
            let (qa, _qb) = connected(&a, &b);
            qa.post(&[qa.write(n, 0..8, &b)]).unwrap();
            a.poll()[0].status
        })
        .collect();
    assert_eq!(results, [0, status::IBV_WC_GENERAL_ERR, status::IBV_WC_GENERAL_ERR, 0, 0]);
    assert_eq!(net.world.fired(rule), 2);
}

#[test]
fn a_remote_failure_breaks_the_peer_and_may_have_landed_in_part() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, qb) = connected(&a, &b);
    a.fill(0..100, 1);
    let fault =
        Fault::Fail { status: status::IBV_WC_REM_OP_ERR, vendor_err: 0x88, landed_bytes: 60 };
    net.world.script(Pick::any(), fault);
    qa.post(&[qa.write(1, 0..100, &b), qa.write(2, 0..100, &b)]).unwrap();
    let seen = a.poll();
    assert_eq!(statuses(&seen), [(1, status::IBV_WC_REM_OP_ERR), (2, FLUSH)]);
    assert_eq!(seen[0].vendor_err, 0x88);
    assert_eq!((b.byte(0..60), b.byte(60..100)), (1, 0));
    assert_eq!((qb.state(), b.events()), (qps::IBV_QPS_ERR, vec![(2, qb.number())]));
}

#[test]
fn a_device_may_report_nothing_but_flushes() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, _qb) = connected(&a, &b);
    net.world.script(Pick::any().nth(2), Fault::fail(FLUSH));
    let list: Vec<_> = (0..4).map(|n| qa.write(n, 0..8, &b)).collect();
    qa.post(&list).unwrap();
    assert_eq!(statuses(&a.poll()), [(0, 0), (1, FLUSH), (2, FLUSH), (3, FLUSH)]);
}

#[test]
fn behind_a_lost_answer_requests_land_and_are_flushed() {
    let delay = Duration::from_secs(3600);
    let net = Net::new(WorldOptions::pair().with(|device| device.retry_delay = delay));
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, qb) = connected(&a, &b);
    qb.receive(70, 0..0);
    a.fill(0..100, 1);
    let rule = net.world.script(Pick::any().nth(2), Fault::LoseAnswer);
    qa.post(&[
        qa.write(0, 0..10, &b),
        qa.write(1, 10..20, &b),
        qa.write(2, 20..30, &b).imm(7),
        qa.read(3, 50..60, &b),
    ])
    .unwrap();
    // The peer has all of it, and has been told of it; the requester knows of the first only.
    assert_eq!((b.byte(0..30), statuses(&b.poll())), (1, vec![(70, 0)]));
    assert_eq!(statuses(&a.poll()), [(0, 0)]);
    qa.post(&[qa.write(4, 30..40, &b)]).unwrap();
    assert_eq!(b.byte(30..40), 1);
    net.world.expire();
    assert_eq!(statuses(&a.poll()), [(1, LOST), (2, FLUSH), (3, FLUSH), (4, FLUSH)]);
    assert_eq!((net.world.fired(rule), qb.state()), (1, qps::IBV_QPS_RTS));
}

#[test]
fn no_error_overtakes_a_lost_answer() {
    let delay = Duration::from_secs(3600);
    let net = Net::new(WorldOptions::pair().with(|device| device.retry_delay = delay));
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    for make in [
        (|qa: &crate::common::Queue<'_>, b| qa.write(2, 0..8, b).rkey(0)) as fn(&_, &_) -> _,
        |qa, _| qa.send(2, 0..8),
    ] {
        let (qa, _qb) = connected(&a, &b);
        net.world.script(Pick::any(), Fault::LoseAnswer);
        qa.post(&[qa.write(1, 0..8, &b), make(&qa, &b), qa.write(3, 0..8, &b)]).unwrap();
        assert_eq!(a.poll(), []);
        net.world.expire();
        assert_eq!(statuses(&a.poll()), [(1, LOST), (2, FLUSH), (3, FLUSH)]);
    }
}

#[test]
fn a_held_qp_executes_nothing_and_no_time_passes_for_it() {
    let delay = Duration::from_secs(3600);
    let net = Net::new(WorldOptions::pair().with(|device| device.retry_delay = delay));
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let ((q1, r1), (q2, _r2)) = (connected(&a, &b), connected(&a, &b));
    net.world.port_down(1, 1);
    q1.post(&[q1.write(1, 0..8, &b)]).unwrap();
    q2.post(&[q2.write(2, 0..8, &b)]).unwrap();
    net.world.hold(0, q1.number());
    net.world.expire();
    assert_eq!(statuses(&a.poll()), [(2, LOST)]);
    net.world.port_up(1, 1);
    assert_eq!(a.poll(), []);
    net.world.release(0, q1.number());
    assert_eq!(statuses(&a.poll()), [(1, 0)]);
    // Its peer may still write to it.
    net.world.hold(0, q1.number());
    r1.post(&[r1.write(3, 0..8, &a)]).unwrap();
    assert_eq!(statuses(&b.poll()), [(3, 0)]);
}

#[test]
fn scripts_are_asked_once_about_a_request_that_is_tried_again_and_again() {
    let mode = Mode::Deferred { per_poll: 1, idle: None };
    let net = Net::new(WorldOptions::pair().with(|device| device.mode = mode));
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, qb) = connected(&a, &b);
    let rule = net.world.script(Pick::any().nth(2), Fault::fail(status::IBV_WC_FATAL_ERR));
    qa.post(&[qa.send(1, 0..8), qa.write(2, 0..8, &b)]).unwrap();
    (0..5).for_each(|_| assert_eq!(a.poll(), []));
    assert_eq!(net.world.fired(rule), 0);
    qb.receive(70, 0..8);
    assert_eq!(net.world.step(2), 2);
    assert_eq!(statuses(&a.poll()), [(1, 0), (2, status::IBV_WC_FATAL_ERR)]);
}
