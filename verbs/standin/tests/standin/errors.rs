//! Requests that fail, and what becomes of the rest.

use kvferry_verbs_standin::{Statuses, VENDOR_ERR, WorldOptions, sys};
use sys::ibv_access_flags as rights;
use sys::ibv_qp_state as qps;
use sys::ibv_wc_status as status;

use crate::common::c;
use crate::common::{
    BYTES, EVERYTHING, Net, Node, Queue, Setup, Work, connected, connected_as, poll, statuses,
};

const FLUSH: u32 = status::IBV_WC_WR_FLUSH_ERR;

#[test]
fn a_request_for_memory_it_may_not_touch_breaks_both_qps() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let other_pd = c!(net.verbs, ibv_alloc_pd(b.context));
    let mrs = [
        b.register(other_pd, EVERYTHING),
        b.register(b.pd, rights::IBV_ACCESS_LOCAL_WRITE.0 | rights::IBV_ACCESS_REMOTE_READ.0),
        b.register(b.pd, rights::IBV_ACCESS_LOCAL_WRITE.0 | rights::IBV_ACCESS_REMOTE_WRITE.0),
        b.register(b.pd, EVERYTHING),
    ];
    // SAFETY: all were just registered.
    let [of_other_pd, read_only, write_only, gone] = mrs.map(|mr| unsafe { (*mr).rkey });
    assert_eq!(c!(net.verbs, ibv_dereg_mr(mrs[3])), 0);
    let write = |queue: &Queue<'_>, rkey| queue.write(1, 0..8, &b).rkey(rkey);
    let read = |queue: &Queue<'_>, rkey| queue.read(1, 0..8, &b).rkey(rkey);
    let at = |queue: &Queue<'_>, remote_addr| Work { remote_addr, ..queue.write(1, 0..8, &b) };
    type Make<'a> = Box<dyn Fn(&Queue<'_>) -> Work + 'a>;
    let cases: Vec<(&str, Make<'_>)> = vec![
        ("an unknown key", Box::new(|queue| write(queue, b.rkey() ^ 0x1000))),
        ("a local key", Box::new(|queue| write(queue, b.lkey()))),
        ("a key of before", Box::new(|queue| write(queue, gone))),
        ("a key of another domain", Box::new(|queue| write(queue, of_other_pd))),
        ("a write to memory to be read", Box::new(|queue| write(queue, read_only))),
        ("a read of memory to be written", Box::new(|queue| read(queue, write_only))),
        ("a range past the end", Box::new(|queue| at(queue, b.addr(BYTES - 7)))),
        ("a range before the start", Box::new(|queue| at(queue, b.addr(0) - 1))),
        ("a range past all memory", Box::new(|queue| at(queue, u64::MAX - 3))),
    ];
    for (name, make) in cases {
        let (qa, qb) = connected(&a, &b);
        a.fill(0..BYTES, 1);
        qa.post(&[make(&qa), qa.write(2, 0..8, &b).flags(0)]).unwrap();
        let seen = a.poll();
        let expected = [(1, status::IBV_WC_REM_ACCESS_ERR), (2, FLUSH)];
        assert_eq!(statuses(&seen), expected, "{name}");
        assert_eq!(seen[0].vendor_err, VENDOR_ERR | status::IBV_WC_REM_ACCESS_ERR);
        assert_eq!((qa.state(), qb.state()), (qps::IBV_QPS_ERR, qps::IBV_QPS_ERR), "{name}");
        assert_eq!(b.events(), [(sys::IBV_EVENT_QP_ACCESS_ERR, qb.number())], "{name}");
        assert_eq!((a.events(), b.byte(0..BYTES)), (vec![], 0), "{name}");
        // What is posted later flushes, too.
        qa.post(&[qa.write(3, 0..8, &b)]).unwrap();
        assert_eq!(statuses(&a.poll()), [(3, FLUSH)]);
        assert_eq!(qb.receive(4, 0..8), 0);
        assert_eq!(statuses(&b.poll()), [(4, FLUSH)]);
    }
    for mr in &mrs[..3] {
        assert_eq!(c!(net.verbs, ibv_dereg_mr(*mr)), 0);
    }
    assert_eq!(c!(net.verbs, ibv_dealloc_pd(other_pd)), 0);
}

#[test]
fn local_errors_have_the_status_of_the_kind_of_device() {
    let table =
        [(Statuses::Specified, 4, 4), (Statuses::SoftRoce61, 2, 4), (Statuses::SoftRoce612, 5, 5)];
    for (statuses_of, unknown_key, range) in table {
        let net = Net::new(WorldOptions::pair().with(|device| device.statuses = statuses_of));
        let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
        let fails = |change: &dyn Fn(&mut sys::ibv_sge)| {
            let (qa, qb) = connected(&a, &b);
            let mut work = qa.write(1, BYTES - 8..BYTES, &b);
            change(&mut work.sges[0]);
            qa.post(&[work, qa.write(2, 0..8, &b)]).unwrap();
            let seen = statuses(&a.poll());
            // The peer has seen nothing.
            assert_eq!((qb.state(), seen[1]), (qps::IBV_QPS_RTS, (2, FLUSH)));
            seen[0].1
        };
        assert_eq!(fails(&|sge| sge.lkey ^= 0x1000), unknown_key, "{statuses_of:?}");
        assert_eq!(fails(&|sge| sge.lkey = a.rkey()), unknown_key, "{statuses_of:?}");
        assert_eq!(fails(&|sge| sge.addr += 1), range, "{statuses_of:?}");
    }
}

#[test]
fn a_read_into_memory_that_may_not_be_written_is_a_local_error() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, _qb) = connected(&a, &b);
    let mr = a.register(a.pd, rights::IBV_ACCESS_REMOTE_READ.0);
    // SAFETY: it was just registered.
    let lkey = unsafe { (*mr).lkey };
    let mut work = qa.read(1, 0..8, &b);
    work.sges[0].lkey = lkey;
    qa.post(&[work]).unwrap();
    assert_eq!(statuses(&a.poll()), [(1, status::IBV_WC_LOC_PROT_ERR)]);
    assert_eq!(c!(net.verbs, ibv_dereg_mr(mr)), 0);
}

#[test]
fn a_message_longer_than_its_receive_breaks_both_qps() {
    let table = [(Statuses::Specified, 9, 1), (Statuses::SoftRoce61, 11, 2)];
    for (statuses_of, sender, receiver) in table {
        let net = Net::new(WorldOptions::pair().with(|device| device.statuses = statuses_of));
        let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
        let (qa, qb) = connected(&a, &b);
        qb.receive(70, 0..9);
        qb.receive(71, 0..9);
        a.fill(0..10, 1);
        qa.post(&[qa.send(1, 0..10)]).unwrap();
        assert_eq!(statuses(&a.poll()), [(1, sender)]);
        assert_eq!(statuses(&b.poll()), [(70, receiver), (71, FLUSH)]);
        assert_eq!((b.byte(0..10), b.events()), (0, vec![]), "the receive has told it");
    }
}

#[test]
fn a_receive_whose_memory_is_gone_breaks_both_qps() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, qb) = connected(&a, &b);
    let receive = |lkey| {
        let sge = sys::ibv_sge { lkey, ..b.sge(0..16) };
        let mut sge = [sge];
        let mut receive = sys::ibv_recv_wr {
            wr_id: 70,
            next: std::ptr::null_mut(),
            sg_list: sge.as_mut_ptr(),
            num_sge: 1,
        };
        let mut bad = std::ptr::null_mut();
        // SAFETY: the QP and its context are there.
        unsafe { (*b.context).ops.post_recv.unwrap()(qb.qp, &raw mut receive, &raw mut bad) }
    };
    assert_eq!(receive(b.lkey() ^ 0x1000), 0);
    qa.post(&[qa.send(1, 0..10)]).unwrap();
    assert_eq!(statuses(&a.poll()), [(1, status::IBV_WC_REM_OP_ERR)]);
    assert_eq!(statuses(&b.poll()), [(70, status::IBV_WC_LOC_PROT_ERR)]);
}

#[test]
fn what_the_peers_qp_does_not_allow_is_an_invalid_request() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let mtu = |mtu| Setup { mtu, ..Setup::default() };
    type Make = fn(&Queue<'_>, &Node<'_>) -> Work;
    let cases: [(Setup, Make); 4] = [
        (Setup { access: 0, ..Setup::default() }, |queue, b| queue.write(1, 0..8, b)),
        (Setup { access: 0, ..Setup::default() }, |queue, b| queue.read(1, 0..8, b)),
        (Setup { dest_rd_atomic: 0, ..Setup::default() }, |queue, b| queue.read(1, 0..8, b)),
        (mtu(sys::IBV_MTU_512), |queue, b| queue.write(1, 0..800, b)),
    ];
    for (index, (of_peer, make)) in cases.into_iter().enumerate() {
        let (qa, qb) = (Queue::new(&a, Setup::default()), Queue::new(&b, of_peer));
        qa.connect(&qb);
        qb.connect(&qa);
        // What it allows is done.
        qb.receive(70, 0..8);
        qa.post(&[qa.send(0, 0..8), make(&qa, &b)]).unwrap();
        let expected = [(0, 0), (1, status::IBV_WC_REM_INV_REQ_ERR)];
        assert_eq!(statuses(&a.poll()), expected, "case {index}");
        assert_eq!(statuses(&b.poll()), [(70, 0)]);
        assert_eq!(b.events(), [(sys::IBV_EVENT_QP_REQ_ERR, qb.number())]);
    }
}

#[test]
fn a_message_longer_than_the_port_carries_is_a_length_error() {
    let net = Net::new(WorldOptions::pair().with(|device| device.limits.max_message_bytes = 1000));
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, _qb) = connected(&a, &b);
    qa.post(&[qa.write(1, 0..1000, &b), qa.write(2, 0..1001, &b)]).unwrap();
    assert_eq!(statuses(&a.poll()), [(1, 0), (2, status::IBV_WC_LOC_LEN_ERR)]);
}

#[test]
fn everything_posted_flushes_when_a_qp_is_broken_by_its_owner() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, qb) = connected(&a, &b);
    net.world.hold(0, qa.number());
    let list: Vec<_> = (0..10).map(|n| qa.write(n, 0..8, &b).flags(0)).collect();
    qa.post(&list).unwrap();
    (100..105).for_each(|n| assert_eq!(qa.receive(n, 0..8), 0));
    assert_eq!(a.poll(), []);
    assert_eq!(qa.enter(qps::IBV_QPS_ERR), 0);
    let expected: Vec<_> = (0..10).chain(100..105).map(|n| (n, FLUSH)).collect();
    assert_eq!(statuses(&a.poll()), expected);
    assert_eq!((a.events(), qb.state()), (vec![], qps::IBV_QPS_RTS));
}

#[test]
fn a_qp_that_breaks_of_itself_says_so() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, _qb) = connected(&a, &b);
    qa.receive(1, 0..8);
    net.world.break_qp(0, qa.number());
    assert_eq!(a.events(), [(sys::IBV_EVENT_QP_FATAL, qa.number())]);
    assert_eq!((statuses(&a.poll()), qa.state()), (vec![(1, FLUSH)], qps::IBV_QPS_ERR));
}

#[test]
fn a_full_cq_loses_completions_and_says_so_once() {
    let net = Net::pair();
    let (a, b) = (Node::with_cq(&net, 0, 4), Node::new(&net, 1));
    let (qa, _qb) = connected_as(&a, &b, Setup { send_wr: 10, ..Setup::default() });
    let list: Vec<_> = (0..7).map(|n| qa.write(n, 0..8, &b)).collect();
    qa.post(&list).unwrap();
    // SAFETY: the CQ is there.
    let number = unsafe { (*a.cq).handle };
    assert_eq!(a.events(), [(sys::IBV_EVENT_CQ_ERR, number)]);
    assert_eq!(statuses(&poll(a.cq)), [(0, 0), (1, 0), (2, 0), (3, 0)]);
    assert_eq!(qa.state(), qps::IBV_QPS_RTS);
    // Slots of lost completions are free only with the next one that is polled.
    let list: Vec<_> = (7..13).map(|n| qa.write(n, 0..8, &b)).collect();
    qa.post(&list[..1]).unwrap();
    assert_eq!(statuses(&a.poll()), [(7, 0)]);
    qa.post(&list[1..]).unwrap();
    assert_eq!(a.events(), []);
}
