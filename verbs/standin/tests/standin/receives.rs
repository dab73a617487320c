//! Receives: missing, shared, and used up.

use std::time::Duration;

use kvferry_verbs_standin::{WorldOptions, sys};
use sys::ibv_qp_state as qps;
use sys::ibv_wc_status as status;

use crate::common::c;
use crate::common::{Net, Node, Queue, Setup, connected, connected_as, statuses, with_receive};

const RNR: u32 = status::IBV_WC_RNR_RETRY_EXC_ERR;

#[test]
fn without_a_receive_a_request_waits_for_one_and_holds_up_those_behind_it() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, qb) = connected(&a, &b);
    a.fill(0..10, 1);
    qa.post(&[qa.send(1, 0..10), qa.write(2, 0..10, &b)]).unwrap();
    net.world.expire();
    assert_eq!((a.poll(), b.byte(0..10)), (vec![], 0));
    a.arm(false);
    assert_eq!(qb.receive(70, 100..110), 0);
    assert!(a.has_event(), "nobody has to poll");
    assert_eq!(statuses(&b.poll()), [(70, 0)]);
    assert_eq!(statuses(&a.poll()), [(1, 0), (2, 0)]);
    assert_eq!((b.byte(100..110), b.byte(0..10)), (1, 1));
}

#[test]
fn retries_for_a_receive_end_unless_they_are_endless() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    // 491.52 ms × 6: nothing ends before the test says so.
    let setup = Setup { rnr_retry: 6, rnr_timer: 31, ..Setup::default() };
    let (qa, qb) = connected_as(&a, &b, setup);
    qa.post(&[qa.send(1, 0..10), qa.write(2, 0..10, &b)]).unwrap();
    assert_eq!(a.poll(), []);
    net.world.expire();
    assert_eq!(statuses(&a.poll()), [(1, RNR), (2, status::IBV_WC_WR_FLUSH_ERR)]);
    assert_eq!((qa.state(), qb.state()), (qps::IBV_QPS_ERR, qps::IBV_QPS_RTS));
    // By the clock, and with no retries at once.
    for (rnr_retry, waits) in [(2, true), (0, false)] {
        let (qa, _qb) = connected_as(&a, &b, Setup { rnr_retry, ..Setup::default() });
        qa.post(&[qa.send(1, 0..10)]).unwrap();
        let seen = if waits { a.wait(1) } else { a.poll() };
        assert_eq!(statuses(&seen), [(1, RNR)]);
    }
}

#[test]
fn all_but_the_last_packet_of_a_write_lands_before_its_receive_is_there() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, qb) = connected(&a, &b);
    a.fill(0..4000, 1);
    qa.post(&[qa.write(1, 0..2500, &b).imm(1)]).unwrap();
    assert_eq!((a.poll(), b.byte(0..2048), b.byte(2048..2500)), (vec![], 1, 0));
    qb.receive(70, 0..0);
    assert_eq!((statuses(&a.poll()), b.byte(0..2500)), (vec![(1, 0)], 1));
    // One packet is the last one.
    qa.post(&[qa.write(2, 3000..3100, &b).imm(1)]).unwrap();
    assert_eq!(b.byte(3000..3100), 0);
    qb.receive(71, 0..0);
    assert_eq!((statuses(&a.poll()), b.byte(3000..3100)), (vec![(2, 0)], 1));
    // A bad key shows in the first packet, long before the receive is needed.
    qa.post(&[qa.write(3, 0..2500, &b).imm(1).rkey(0)]).unwrap();
    assert_eq!(statuses(&a.poll()), [(3, status::IBV_WC_REM_ACCESS_ERR)]);
}

/// A shared receive queue of a host.
struct Shared<'n> {
    node: &'n Node<'n>,
    srq: *mut sys::ibv_srq,
}

impl<'n> Shared<'n> {
    fn new(node: &'n Node<'n>) -> Self {
        let attr = sys::ibv_srq_attr { max_wr: 16, max_sge: 1, srq_limit: 0 };
        let mut init = sys::ibv_srq_init_attr { attr, ..Default::default() };
        let srq = c!(node.net.verbs, ibv_create_srq(node.pd, &raw mut init));
        assert!(!srq.is_null());
        Self { node, srq }
    }

    fn post(&self, wr_id: u64) {
        let code = with_receive(self.node, wr_id, 0..16, |receive, bad| {
            // SAFETY: the queue and its context are there.
            unsafe { (*self.node.context).ops.post_srq_recv.unwrap()(self.srq, receive, bad) }
        });
        assert_eq!(code, 0);
    }

    fn set_limit(&self, srq_limit: u32) {
        let mut attr = sys::ibv_srq_attr { srq_limit, ..Default::default() };
        let mask = sys::IBV_SRQ_LIMIT as i32;
        assert_eq!(c!(self.node.net.verbs, ibv_modify_srq(self.srq, &raw mut attr, mask)), 0);
    }

    fn connected(&'n self, from: &'n Node<'n>) -> (Queue<'n>, Queue<'n>) {
        let qa = Queue::new(from, Setup::default());
        let qb = Queue::with(self.node, Setup::default(), self.node.cq, self.srq);
        qa.connect(&qb);
        qb.connect(&qa);
        (qa, qb)
    }
}

impl Drop for Shared<'_> {
    fn drop(&mut self) {
        let code = c!(self.node.net.verbs, ibv_destroy_srq(self.srq));
        assert!(code == 0 || std::thread::panicking());
    }
}

#[test]
fn a_shared_queue_serves_its_qps_in_the_order_of_arrival() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let shared = Shared::new(&b);
    let ((q1, r1), (q2, r2)) = (shared.connected(&a), shared.connected(&a));
    (70..74).for_each(|wr_id| shared.post(wr_id));
    q1.post(&[q1.send(1, 0..8)]).unwrap();
    q2.post(&[q2.write(2, 0..8, &b).imm(1)]).unwrap();
    q1.post(&[q1.send(3, 0..8)]).unwrap();
    let seen: Vec<_> = b.poll().iter().map(|seen| (seen.wr_id, seen.qp_num)).collect();
    assert_eq!(seen, [(70, r1.number()), (71, r2.number()), (72, r1.number())]);
    // A QP of it has no receives of its own.
    assert_eq!(r1.receive(9, 0..8), libc::EINVAL);
}

#[test]
fn receives_of_a_shared_queue_outlive_a_broken_qp_and_an_event_says_it_takes_no_more() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let shared = Shared::new(&b);
    let ((q1, r1), (q2, r2)) = (shared.connected(&a), shared.connected(&a));
    shared.post(70);
    assert_eq!(r1.enter(qps::IBV_QPS_ERR), 0);
    assert_eq!(b.events(), [(sys::IBV_EVENT_QP_LAST_WQE_REACHED, r1.number())]);
    assert_eq!((b.poll(), r1.enter(qps::IBV_QPS_ERR), b.events()), (vec![], 0, vec![]));
    q2.post(&[q2.send(1, 0..8)]).unwrap();
    assert_eq!((b.poll()[0].wr_id, b.poll()), (70, vec![]));
    // An error that breaks it counts as well.
    q2.post(&[q2.write(2, 0..8, &b).rkey(0)]).unwrap();
    let expected = [
        (sys::IBV_EVENT_QP_ACCESS_ERR, r2.number()),
        (sys::IBV_EVENT_QP_LAST_WQE_REACHED, r2.number()),
    ];
    assert_eq!(b.events(), expected);
    drop(q1);
}

#[test]
fn a_shared_queue_says_once_that_it_runs_low() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let shared = Shared::new(&b);
    let (qa, _qb) = shared.connected(&a);
    (70..75).for_each(|wr_id| shared.post(wr_id));
    shared.set_limit(4);
    qa.post(&[qa.send(1, 0..8)]).unwrap();
    assert_eq!(b.events(), [], "four are left");
    qa.post(&[qa.send(2, 0..8), qa.send(3, 0..8)]).unwrap();
    // SAFETY: the queue is there.
    let number = unsafe { (*shared.srq).handle };
    assert_eq!(b.events(), [(sys::IBV_EVENT_SRQ_LIMIT_REACHED, number)]);
}

#[test]
fn a_request_that_waits_for_a_shared_receive_is_woken_by_one() {
    let net = Net::new(WorldOptions::pair().with(|device| device.retry_delay = Duration::ZERO));
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let shared = Shared::new(&b);
    let (qa, _qb) = shared.connected(&a);
    qa.post(&[qa.send(1, 0..8)]).unwrap();
    assert_eq!(a.poll(), []);
    a.arm(false);
    shared.post(70);
    assert!(a.has_event(), "nobody has to poll");
    assert_eq!((statuses(&a.poll()), statuses(&b.poll())), (vec![(1, 0)], vec![(70, 0)]));
}
