//! Work that is done later.

use std::time::Duration;

use kvferry_verbs_standin::{Mode, WorldOptions, sys};
use sys::ibv_qp_state as qps;
use sys::ibv_wc_status as status;

use crate::common::{Net, Node, Setup, connected, connected_as, statuses};

fn deferred(per_poll: usize, seed: u64) -> Net {
    let mode = Mode::Deferred { per_poll, idle: None };
    let options = WorldOptions::pair().with(|device| device.mode = mode);
    Net::new(WorldOptions { seed, ..options })
}

#[test]
fn nothing_executes_before_a_step_and_no_more_than_it_says() {
    let net = deferred(0, 1);
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, _qb) = connected(&a, &b);
    a.fill(0..100, 1);
    let list: Vec<_> =
        (0..5).map(|n| qa.write(n, n as usize * 10..n as usize * 10 + 10, &b)).collect();
    qa.post(&list).unwrap();
    assert_eq!((a.poll(), b.byte(0..50)), (vec![], 0));
    assert_eq!(net.world.step(2), 2);
    assert_eq!((statuses(&a.poll()), b.byte(0..20), b.byte(20..50)), (vec![(0, 0), (1, 0)], 1, 0));
    assert_eq!(net.world.qps(0)[0].executed, 2);
    assert_eq!(net.world.step(100), 3);
    assert_eq!(net.world.step(100), 0);
    assert_eq!(statuses(&a.poll()), [(2, 0), (3, 0), (4, 0)]);
}

#[test]
fn a_poll_of_either_side_executes_a_few() {
    let net = deferred(2, 1);
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, _qb) = connected(&a, &b);
    let list: Vec<_> = (0..6).map(|n| qa.write(n, 0..8, &b)).collect();
    qa.post(&list).unwrap();
    assert_eq!(b.poll(), []);
    assert_eq!(net.world.qps(0)[0].executed, 2);
    assert_eq!(statuses(&a.poll()), [(0, 0), (1, 0), (2, 0), (3, 0)]);
}

#[test]
fn the_seed_decides_whose_turn_it_is_and_every_qp_keeps_its_order() {
    let run = |seed| {
        let net = deferred(0, seed);
        let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
        let pairs: Vec<_> = (0..3).map(|_| connected(&a, &b)).collect();
        for (qp, (qa, _)) in pairs.iter().enumerate() {
            let list: Vec<_> = (0..8).map(|n| qa.write(qp as u64 * 100 + n, 0..8, &b)).collect();
            qa.post(&list).unwrap();
        }
        assert_eq!(net.world.step(1000), 24);
        let order: Vec<_> = a.poll().iter().map(|seen| seen.wr_id).collect();
        for qp in 0..3 {
            let own: Vec<_> = order.iter().filter(|id| **id / 100 == qp).collect();
            assert!(own.is_sorted() && own.len() == 8, "{order:?}");
        }
        order
    };
    assert_eq!(run(7), run(7));
    assert_ne!(run(7), run(8));
}

#[test]
fn an_error_finds_requests_in_flight() {
    let net = deferred(0, 3);
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, _qb) = connected(&a, &b);
    a.fill(0..100, 1);
    qa.post(&[
        qa.write(0, 0..10, &b).flags(0),
        qa.write(1, 10..20, &b).rkey(0).flags(0),
        qa.write(2, 20..30, &b).flags(0),
        qa.write(3, 30..40, &b),
    ])
    .unwrap();
    assert_eq!(net.world.step(2), 2);
    let flush = status::IBV_WC_WR_FLUSH_ERR;
    let expected = [(1, status::IBV_WC_REM_ACCESS_ERR), (2, flush), (3, flush)];
    assert_eq!(statuses(&a.poll()), expected);
    assert_eq!((b.byte(0..10), b.byte(10..40)), (1, 0));
}

#[test]
fn a_queue_fills_up_while_its_requests_are_in_flight() {
    let net = deferred(0, 3);
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, qb) = connected_as(&a, &b, Setup { send_wr: 4, ..Setup::default() });
    let list: Vec<_> = (0..5).map(|n| qa.write(n, 0..8, &b)).collect();
    assert_eq!(qa.post(&list), Err((4, libc::ENOMEM)));
    // A QP that is destroyed takes what is in flight along.
    drop(qb);
    drop(qa);
    assert_eq!((net.world.step(10), a.poll(), b.byte(0..8)), (0, vec![], 0));
}

#[test]
fn a_qp_broken_by_its_owner_has_landed_what_was_executed_and_no_more() {
    let net = deferred(0, 3);
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, _qb) = connected(&a, &b);
    a.fill(0..100, 1);
    qa.post(&[qa.write(0, 0..10, &b).flags(0), qa.write(1, 10..20, &b)]).unwrap();
    net.world.step(1);
    assert_eq!(qa.enter(qps::IBV_QPS_ERR), 0);
    assert_eq!(net.world.step(10), 0);
    assert_eq!(statuses(&a.poll()), [(1, status::IBV_WC_WR_FLUSH_ERR)]);
    assert_eq!((b.byte(0..10), b.byte(10..20)), (1, 0));
}

#[test]
fn time_wakes_a_sleeper_whose_work_nobody_polls_along() {
    let mode = Mode::Deferred { per_poll: 0, idle: Some(Duration::from_millis(1)) };
    let net = Net::new(WorldOptions::pair().with(|device| device.mode = mode));
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, qb) = connected(&a, &b);
    qb.receive(70, 0..0);
    b.arm(false);
    qa.post(&[qa.write(1, 0..8, &b), qa.write(2, 0..8, &b).imm(5)]).unwrap();
    b.sleep();
    assert_eq!(statuses(&b.poll()), [(70, 0)]);
    assert_eq!(statuses(&a.poll()), [(1, 0), (2, 0)]);
}

#[test]
fn a_deferred_request_that_nobody_answers_ends_by_the_clock() {
    let net = deferred(0, 3);
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, qb) = connected(&a, &b);
    drop(qb);
    a.arm(false);
    qa.post(&[qa.write(1, 0..8, &b)]).unwrap();
    assert_eq!(net.world.step(1), 0);
    a.sleep();
    assert_eq!(statuses(&a.poll()), [(1, status::IBV_WC_RETRY_EXC_ERR)]);
}

#[test]
fn a_request_without_a_receive_does_not_stop_other_qps() {
    let net = deferred(0, 3);
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let ((q1, r1), (q2, _r2)) = (connected(&a, &b), connected(&a, &b));
    q1.post(&[q1.send(1, 0..8)]).unwrap();
    q2.post(&[q2.write(2, 0..8, &b), q2.write(3, 0..8, &b)]).unwrap();
    assert_eq!(net.world.step(10), 2);
    assert_eq!(statuses(&a.poll()), [(2, 0), (3, 0)]);
    r1.receive(70, 0..8);
    assert_eq!(a.poll(), [], "it is deferred all the same");
    assert_eq!(net.world.step(10), 1);
    assert_eq!(statuses(&a.poll()), [(1, 0)]);
}
