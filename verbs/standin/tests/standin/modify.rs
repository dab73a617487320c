//! States of a QP.

use kvferry_verbs_standin::{Call, UnknownRoute, WorldOptions, sys};
use sys::ibv_qp_attr_mask as bits;
use sys::ibv_qp_state as qps;
use sys::ibv_wc_status as status;

use crate::common::{
    Net, Node, Queue, Setup, TO_INIT, TO_RTR, TO_RTS, c, connected, connected_as, statuses,
};

const STATE: u32 = bits::IBV_QP_STATE.0;

fn bring<'n>(node: &'n Node<'n>, peer: &Queue<'_>, state: qps::Type) -> Queue<'n> {
    let queue = Queue::new(node, Setup::default());
    let attr = queue.attributes(peer);
    for (step, mask) in
        [(qps::IBV_QPS_INIT, TO_INIT), (qps::IBV_QPS_RTR, TO_RTR), (qps::IBV_QPS_RTS, TO_RTS)]
    {
        if step <= state && state <= qps::IBV_QPS_RTS {
            let attr = sys::ibv_qp_attr { qp_state: step, ..attr };
            assert_eq!(queue.modify(&attr, mask | STATE), 0);
        }
    }
    if state == qps::IBV_QPS_ERR {
        assert_eq!(queue.enter(state), 0);
    }
    assert_eq!(queue.state(), state);
    queue
}

#[test]
fn only_the_transitions_of_the_specification_exist() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let peer = Queue::new(&b, Setup::default());
    let states = [
        qps::IBV_QPS_RESET,
        qps::IBV_QPS_INIT,
        qps::IBV_QPS_RTR,
        qps::IBV_QPS_RTS,
        qps::IBV_QPS_ERR,
    ];
    let all = [0, TO_INIT, TO_RTR, TO_RTS];
    for from in states {
        for to in states {
            // Whichever attributes come with it.
            let allowed = all.map(|mask| {
                let queue = bring(&a, &peer, from);
                let attr = sys::ibv_qp_attr { qp_state: to, ..queue.attributes(&peer) };
                let code = queue.modify(&attr, mask | STATE);
                assert!(code == 0 || code == libc::EINVAL);
                assert_eq!(queue.state(), if code == 0 { to } else { from });
                code == 0
            });
            let expected = match (from, to) {
                (_, qps::IBV_QPS_RESET | qps::IBV_QPS_ERR) => [true, false, false, false],
                (qps::IBV_QPS_RESET, qps::IBV_QPS_INIT) => [false, true, false, false],
                (qps::IBV_QPS_INIT, qps::IBV_QPS_INIT) => [true, true, false, false],
                (qps::IBV_QPS_INIT, qps::IBV_QPS_RTR) => [false, false, true, false],
                (qps::IBV_QPS_RTR, qps::IBV_QPS_RTS) => [false, false, false, true],
                (qps::IBV_QPS_RTS, qps::IBV_QPS_RTS) => [true, false, false, false],
                _ => [false; 4],
            };
            assert_eq!(allowed, expected, "from {from} to {to}");
        }
    }
}

#[test]
fn every_required_attribute_is_required_and_no_other_is_taken() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let peer = Queue::new(&b, Setup::default());
    let steps = [
        (qps::IBV_QPS_RESET, qps::IBV_QPS_INIT, TO_INIT),
        (qps::IBV_QPS_INIT, qps::IBV_QPS_RTR, TO_RTR),
        (qps::IBV_QPS_RTR, qps::IBV_QPS_RTS, TO_RTS),
    ];
    for (from, to, required) in steps {
        for bit in (0..21).map(|bit| 1 << bit).filter(|bit| bit & STATE == 0) {
            let queue = bring(&a, &peer, from);
            let attr = sys::ibv_qp_attr { qp_state: to, ..queue.attributes(&peer) };
            if required & bit != 0 {
                let code = queue.modify(&attr, STATE | required & !bit);
                assert_eq!(code, libc::EINVAL, "to {to} without {bit:#x}");
            } else if bit == bits::IBV_QP_QKEY.0 || bit == bits::IBV_QP_CAP.0 {
                let code = queue.modify(&attr, STATE | required | bit);
                assert_eq!(code, libc::EINVAL, "to {to} with {bit:#x}");
            }
        }
    }
}

#[test]
fn values_that_no_device_has_are_refused_and_change_nothing() {
    let net = Net::new(WorldOptions::pair().with(|device| {
        device.ports[0].active_mtu = sys::IBV_MTU_1024;
    }));
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let peer = Queue::new(&b, Setup::default());
    type Change = fn(&mut sys::ibv_qp_attr);
    let cases: [(qps::Type, u32, Change); 13] = [
        (qps::IBV_QPS_INIT, TO_INIT, |attr| attr.port_num = 2),
        (qps::IBV_QPS_INIT, TO_INIT, |attr| attr.pkey_index = 1),
        (qps::IBV_QPS_RTR, TO_RTR, |attr| attr.path_mtu = sys::IBV_MTU_2048),
        (qps::IBV_QPS_RTR, TO_RTR, |attr| attr.path_mtu = 0),
        (qps::IBV_QPS_RTR, TO_RTR, |attr| attr.dest_qp_num = 1 << 24),
        (qps::IBV_QPS_RTR, TO_RTR, |attr| attr.max_dest_rd_atomic = 17),
        (qps::IBV_QPS_RTR, TO_RTR, |attr| attr.min_rnr_timer = 32),
        (qps::IBV_QPS_RTR, TO_RTR, |attr| attr.ah_attr.is_global = 0),
        (qps::IBV_QPS_RTR, TO_RTR, |attr| attr.ah_attr.grh.sgid_index = 5),
        (qps::IBV_QPS_RTR, TO_RTR, |attr| attr.ah_attr.port_num = 2),
        (qps::IBV_QPS_RTS, TO_RTS, |attr| attr.timeout = 32),
        (qps::IBV_QPS_RTS, TO_RTS, |attr| attr.retry_cnt = 8),
        (qps::IBV_QPS_RTS, TO_RTS, |attr| attr.rnr_retry = 8),
    ];
    for (index, (to, mask, change)) in cases.into_iter().enumerate() {
        let queue = bring(&a, &peer, to - 1);
        let mut attr = sys::ibv_qp_attr { qp_state: to, ..queue.attributes(&peer) };
        change(&mut attr);
        assert_eq!(queue.modify(&attr, mask | STATE), libc::EINVAL, "case {index}");
        assert_eq!(queue.state(), to - 1, "case {index}");
        let right = sys::ibv_qp_attr { qp_state: to, ..queue.attributes(&peer) };
        assert_eq!(queue.modify(&right, mask | STATE), 0, "case {index}");
    }
}

#[test]
fn an_address_that_nobody_has_is_refused_or_never_answered() {
    for (unknown, code) in [(UnknownRoute::Refused, libc::EINVAL), (UnknownRoute::Silent, 0)] {
        let net = Net::new(WorldOptions::pair().with(|device| device.unknown_route = unknown));
        let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
        let (qa, qb) = (bring_to_init(&a), Queue::new(&b, Setup::default()));
        let mut attr = qa.attributes(&qb);
        attr.ah_attr.is_global = 0;
        attr.qp_state = qps::IBV_QPS_RTR;
        assert_eq!(qa.modify(&attr, TO_RTR | STATE), libc::EINVAL, "no address at all");
        attr.ah_attr.is_global = 1;
        attr.ah_attr.grh.dgid = sys::ibv_gid { raw: [0x20; 16] };
        assert_eq!(qa.modify(&attr, TO_RTR | STATE), code);
        if code == 0 {
            attr.qp_state = qps::IBV_QPS_RTS;
            assert_eq!(qa.modify(&attr, TO_RTS | STATE), 0);
            qa.post(&[qa.write(1, 0..8, &b)]).unwrap();
            net.world.expire();
            assert_eq!(statuses(&a.poll()), [(1, status::IBV_WC_RETRY_EXC_ERR)]);
        }
    }
}

fn bring_to_init<'n>(node: &'n Node<'n>) -> Queue<'n> {
    let queue = Queue::new(node, Setup::default());
    let attr = sys::ibv_qp_attr { port_num: 1, qp_access_flags: 7, ..Default::default() };
    let attr = sys::ibv_qp_attr { qp_state: qps::IBV_QPS_INIT, ..attr };
    assert_eq!(queue.modify(&attr, TO_INIT | STATE), 0);
    queue
}

#[test]
fn a_transition_fails_when_a_script_says_so() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, qb) = (bring_to_init(&a), Queue::new(&b, Setup::default()));
    net.world.fail_call(0, Call::ModifyQp(qps::IBV_QPS_RTR), libc::ENETUNREACH);
    let attr = sys::ibv_qp_attr { qp_state: qps::IBV_QPS_RTR, ..qa.attributes(&qb) };
    assert_eq!(qa.modify(&attr, TO_RTR | STATE), libc::ENETUNREACH);
    assert_eq!(qa.modify(&attr, TO_RTR | STATE), 0);
}

#[test]
fn a_qp_can_be_reset_and_connected_anew_on_both_sides() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, qb) = connected(&a, &b);
    qa.post(&[qa.write(1, 0..8, &b), qa.write(2, 0..8, &b).rkey(0)]).unwrap();
    for (own, peer) in [(&qa, &qb), (&qb, &qa)] {
        assert_eq!(own.enter(qps::IBV_QPS_RESET), 0);
        own.connect(peer);
    }
    // Completions of the life before are gone with it, and its slots are free.
    let list: Vec<_> = (10..26).map(|n| qa.write(n, 0..8, &b)).collect();
    qa.post(&list).unwrap();
    let expected: Vec<_> = (10..26).map(|n| (n, 0)).collect();
    assert_eq!(statuses(&a.poll()), expected);
}

#[test]
fn a_reset_empties_both_queues_without_a_word() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let setup = Setup { send_wr: 4, recv_wr: 2, ..Setup::default() };
    let (qa, qb) = connected_as(&a, &b, setup);
    a.fill(0..8, 1);
    net.world.hold(0, qa.number());
    let list: Vec<_> = (0..4).map(|n| qa.write(n, 0..8, &b).flags(0)).collect();
    qa.post(&list).unwrap();
    assert_eq!([1, 2].map(|n| qb.receive(n, 0..0)), [0; 2]);
    for (own, peer) in [(&qa, &qb), (&qb, &qa)] {
        assert_eq!(own.enter(qps::IBV_QPS_RESET), 0);
        own.connect(peer);
    }
    net.world.release(0, qa.number());
    assert_eq!((a.poll(), b.poll(), b.byte(0..8)), (vec![], vec![], 0));
    // All slots are free, and no receive is left.
    let list: Vec<_> = (10..14).map(|n| qa.write(n, 0..8, &b).imm(1)).collect();
    qa.post(&list).unwrap();
    assert_eq!(a.poll(), []);
    assert_eq!([3, 4].map(|n| qb.receive(n, 0..0)), [0; 2]);
    assert_eq!(statuses(&a.poll()), [(10, 0), (11, 0)]);
    assert_eq!(statuses(&b.poll()), [(3, 0), (4, 0)]);
}

#[test]
fn a_qp_that_was_reset_alone_is_never_answered() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, qb) = connected(&a, &b);
    qa.post(&[qa.write(1, 0..8, &b)]).unwrap();
    assert_eq!(statuses(&a.poll()), [(1, 0)]);
    assert_eq!(qa.enter(qps::IBV_QPS_RESET), 0);
    qa.connect(&qb);
    a.fill(0..8, 1);
    qa.post(&[qa.write(2, 0..8, &b)]).unwrap();
    net.world.expire();
    assert_eq!(statuses(&a.poll()), [(2, status::IBV_WC_RETRY_EXC_ERR)]);
    assert_eq!(b.byte(0..8), 0);
}

#[test]
fn a_query_tells_the_next_psns_and_what_was_granted() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, qb) = connected(&a, &b);
    // Three packets of 1024 bytes, and one.
    qa.post(&[qa.write(1, 0..2500, &b), qa.write(2, 0..8, &b)]).unwrap();
    let query = |queue: &Queue<'_>| {
        let (mut attr, mut init) = Default::default();
        let (attr_at, init_at) = (&raw mut attr, &raw mut init);
        assert_eq!(c!(net.verbs, ibv_query_qp(queue.qp, attr_at, 1, init_at)), 0);
        let (attr, init): (sys::ibv_qp_attr, sys::ibv_qp_init_attr) = (attr, init);
        assert_eq!((attr.retry_cnt, attr.port_num), (6, 1));
        assert_eq!((init.cap.max_send_wr, init.cap.max_inline_data), (16, 64));
        (attr.sq_psn, attr.rq_psn)
    };
    assert_eq!((query(&qa), query(&qb)), ((11, 7), (7, 11)));
}

#[test]
fn psns_that_do_not_match_are_never_answered() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, qb) = connected_as(&a, &b, Setup { send_psn: 8, recv_psn: 9, ..Setup::default() });
    qa.post(&[qa.write(1, 0..8, &b)]).unwrap();
    qb.post(&[qb.write(2, 0..8, &a)]).unwrap();
    net.world.expire();
    let lost = status::IBV_WC_RETRY_EXC_ERR;
    assert_eq!((statuses(&a.poll()), statuses(&b.poll())), (vec![(1, lost)], vec![(2, lost)]));
}
