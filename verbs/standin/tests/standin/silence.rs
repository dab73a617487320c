//! Peers that do not answer.

use std::time::{Duration, Instant};

use kvferry_verbs_standin::{Mode, Statuses, WorldOptions, sys};
use sys::ibv_qp_state as qps;
use sys::ibv_wc_status as status;

use crate::common::{Net, Node, Queue, Setup, connected, connected_as, statuses};

const LOST: u32 = status::IBV_WC_RETRY_EXC_ERR;
const FLUSH: u32 = status::IBV_WC_WR_FLUSH_ERR;

/// A world whose retries end when the test says so.
fn patient() -> Net {
    Net::new(WorldOptions::pair().with(|device| device.retry_delay = Duration::from_secs(3600)))
}

#[test]
fn a_peer_that_is_broken_reset_or_gone_does_not_answer() {
    let net = patient();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    a.fill(0..8, 1);
    for end in [Some(qps::IBV_QPS_ERR), Some(qps::IBV_QPS_RESET), None] {
        let (qa, qb) = connected(&a, &b);
        qa.post(&[qa.write(0, 8..16, &b)]).unwrap();
        let broken = end.map(|state| assert_eq!(qb.enter(state), 0));
        let _stays = broken.map(|()| qb);
        qa.post(&[qa.write(1, 0..8, &b), qa.write(2, 0..8, &b).flags(0)]).unwrap();
        assert_eq!(statuses(&a.poll()), [(0, 0)], "the rest is being retried");
        net.world.expire();
        assert_eq!(statuses(&a.poll()), [(1, LOST), (2, FLUSH)]);
        assert_eq!((qa.state(), b.byte(0..8)), (qps::IBV_QPS_ERR, 0));
    }
}

#[test]
fn a_peer_that_names_another_does_not_answer() {
    let net = patient();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let [q1, q2, peer] = [&a, &a, &b].map(|node| Queue::new(node, Setup::default()));
    q1.connect(&peer);
    q2.connect(&peer);
    peer.connect(&q2);
    for queue in [&q1, &q2] {
        queue.post(&[queue.write(u64::from(queue.number()), 0..8, &b)]).unwrap();
    }
    net.world.expire();
    let expected = [(u64::from(q2.number()), 0), (u64::from(q1.number()), LOST)];
    assert_eq!(statuses(&a.poll()), expected);
}

#[test]
fn addresses_of_two_kinds_do_not_reach_each_other() {
    let net = patient();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    // Both have the IPv4 address; one speaks RoCE v1 and the other v2.
    let [v1, v2] = [2, 3].map(|gid_index| Setup { gid_index, ..Setup::default() });
    let (qa, qb) = (Queue::new(&a, v1), Queue::new(&b, v2));
    qa.connect(&qb);
    qb.connect(&qa);
    qa.post(&[qa.write(1, 0..8, &b)]).unwrap();
    net.world.expire();
    assert_eq!(statuses(&a.poll()), [(1, LOST)]);
}

#[test]
fn retries_end_by_the_clock_and_wake_a_sleeper() {
    let delay = Duration::from_millis(20);
    let net = Net::new(WorldOptions::pair().with(|device| device.retry_delay = delay));
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, qb) = connected(&a, &b);
    drop(qb);
    a.arm(false);
    let start = Instant::now();
    qa.post(&[qa.write(1, 0..8, &b)]).unwrap();
    a.sleep();
    assert!(start.elapsed() >= delay);
    assert_eq!(statuses(&a.poll()), [(1, LOST)]);
}

#[test]
fn with_no_delay_they_end_at_once() {
    let net = Net::new(WorldOptions::pair().with(|device| device.retry_delay = Duration::ZERO));
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, qb) = connected(&a, &b);
    drop(qb);
    qa.post(&[qa.write(1, 0..8, &b), qa.write(2, 0..8, &b)]).unwrap();
    assert_eq!(statuses(&a.poll()), [(1, LOST), (2, FLUSH)]);
}

#[test]
fn a_peer_that_is_ready_before_retries_end_answers() {
    let net = patient();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, qb) = (Queue::new(&a, Setup::default()), Queue::new(&b, Setup::default()));
    qa.connect(&qb);
    qa.post(&[qa.write(1, 0..8, &b)]).unwrap();
    assert_eq!(a.poll(), []);
    qb.connect(&qa);
    assert_eq!(statuses(&a.poll()), [(1, 0)]);
    net.world.expire();
    assert_eq!((a.poll(), qa.state()), (vec![], qps::IBV_QPS_RTS));
}

#[test]
fn a_deferred_request_is_retried_while_everybody_sleeps() {
    let net = Net::new(WorldOptions::pair().with(|device| {
        device.mode = Mode::Deferred { per_poll: 0, idle: Some(Duration::from_millis(1)) };
        device.retry_delay = Duration::from_secs(3600);
    }));
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, qb) = (Queue::new(&a, Setup::default()), Queue::new(&b, Setup::default()));
    qa.connect(&qb);
    a.arm(false);
    qa.post(&[qa.write(1, 0..8, &b)]).unwrap();
    assert_eq!(net.world.step(1), 0, "it was tried");
    qb.connect(&qa);
    a.sleep();
    assert_eq!(statuses(&a.poll()), [(1, 0)]);
}

#[test]
fn a_port_that_is_down_carries_nothing_either_way_and_says_so() {
    let net = patient();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, qb) = connected(&a, &b);
    net.world.port_down(1, 1);
    net.world.port_down(1, 1);
    assert_eq!((a.events(), b.events()), (vec![], vec![(sys::IBV_EVENT_PORT_ERR, 1)]));
    qa.post(&[qa.write(1, 0..8, &b)]).unwrap();
    qb.post(&[qb.write(2, 0..8, &a)]).unwrap();
    assert_eq!((a.poll(), b.poll()), (vec![], vec![]));
    // It is up again in time for the one and too late for the other.
    net.world.expire();
    assert_eq!((statuses(&a.poll()), statuses(&b.poll())), (vec![(1, LOST)], vec![(2, LOST)]));
    let (qa, _qb) = connected(&a, &b);
    qa.post(&[qa.write(3, 0..8, &b)]).unwrap();
    a.arm(false);
    net.world.port_up(1, 1);
    assert!(a.has_event(), "nobody has to poll");
    assert_eq!(b.events(), [(sys::IBV_EVENT_PORT_ACTIVE, 1)]);
    assert_eq!(statuses(&a.poll()), [(3, 0)]);
}

#[test]
fn a_request_with_no_timeout_waits_for_ever() {
    let net = patient();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, qb) = connected_as(&a, &b, Setup { timeout: 0, ..Setup::default() });
    drop(qb);
    qa.post(&[qa.write(1, 0..8, &b)]).unwrap();
    net.world.expire();
    assert_eq!((a.poll(), qa.state()), (vec![], qps::IBV_QPS_RTS));
}

#[test]
fn soft_roce_has_its_own_ways_to_be_silent() {
    for (kind, down) in [(Statuses::SoftRoce61, LOST), (Statuses::SoftRoce612, FLUSH)] {
        let net = Net::new(WorldOptions::pair().with(|device| device.statuses = kind));
        let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
        let (qa, qb) = connected_as(&a, &b, Setup { retry_cnt: 7, ..Setup::default() });
        qb.enter(qps::IBV_QPS_ERR);
        qa.post(&[qa.write(1, 0..8, &b)]).unwrap();
        net.world.expire();
        assert_eq!(a.poll(), [], "seven retries are endless");
        let (qa, _qb) = connected(&a, &b);
        net.world.port_down(0, 1);
        qa.post(&[qa.write(2, 0..8, &b)]).unwrap();
        net.world.expire();
        assert_eq!(statuses(&a.poll()), [(2, down)], "{kind:?}");
    }
}
