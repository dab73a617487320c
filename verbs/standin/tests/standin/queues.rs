//! Queues that fill up.

use kvferry_verbs_standin::{Call, WorldOptions, sys};
use sys::ibv_qp_state as qps;
use sys::ibv_wr_opcode as wr;

use crate::common::c;
use crate::common::{
    Net, Node, Queue, Setup, Work, connected, connected_as, errno, init, statuses, with_receive,
};

#[test]
fn a_full_send_queue_takes_what_fits_and_names_the_rest() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, _qb) = connected_as(&a, &b, Setup { send_wr: 4, ..Setup::default() });
    let list: Vec<_> = (0..6).map(|n| qa.write(n, 0..8, &b)).collect();
    assert_eq!(qa.post(&list), Err((4, libc::ENOMEM)));
    // All four are done, but slots are free only as their completions are polled.
    assert_eq!(qa.post(&list[4..]), Err((0, libc::ENOMEM)));
    assert_eq!(statuses(&a.poll()), [(0, 0), (1, 0), (2, 0), (3, 0)]);
    qa.post(&list[4..]).unwrap();
    assert_eq!(statuses(&a.poll()), [(4, 0), (5, 0)]);
}

#[test]
fn a_completion_frees_the_unsignaled_before_it_and_nothing_else_does() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, _qb) = connected_as(&a, &b, Setup { send_wr: 4, ..Setup::default() });
    let quiet = |n| qa.write(n, 0..8, &b).flags(0);
    qa.post(&[quiet(0), quiet(1), qa.write(2, 0..8, &b), quiet(3)]).unwrap();
    assert_eq!(qa.post(&[quiet(4)]), Err((0, libc::ENOMEM)));
    assert_eq!(statuses(&a.poll()), [(2, 0)]);
    // Three slots are free; the one behind the completion is not.
    let list: Vec<_> = (4..8).map(quiet).collect();
    assert_eq!(qa.post(&list), Err((3, libc::ENOMEM)));
    // A queue full of unsignaled requests is full for ever.
    assert_eq!(a.poll(), []);
    assert_eq!(qa.post(&[quiet(9)]), Err((0, libc::ENOMEM)));
}

#[test]
fn a_full_receive_queue_refuses_more_until_completions_are_polled() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, qb) = connected_as(&a, &b, Setup { recv_wr: 2, ..Setup::default() });
    assert_eq!([0, 1, 2].map(|n| qb.receive(n, 0..8)), [0, 0, libc::ENOMEM]);
    qa.post(&[qa.send(1, 0..8)]).unwrap();
    assert_eq!(qb.receive(2, 0..8), libc::ENOMEM);
    assert_eq!(statuses(&b.poll()), [(0, 0)]);
    assert_eq!([2, 3].map(|n| qb.receive(n, 0..8)), [0, libc::ENOMEM]);
}

#[test]
fn what_can_never_be_posted_is_refused() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, _qb) = connected(&a, &b);
    let atomic = Work { opcode: wr::IBV_WR_ATOMIC_FETCH_AND_ADD, ..qa.write(1, 0..8, &b) };
    let wide = Work { sges: vec![a.sge(0..8); 5], ..qa.write(1, 0..8, &b) };
    for bad in [atomic, wide] {
        assert_eq!(qa.post(&[qa.write(0, 0..8, &b), bad]), Err((1, libc::EINVAL)));
        assert_eq!(statuses(&a.poll()), [(0, 0)], "what stands before it is posted");
    }
}

#[test]
fn sending_needs_rts_and_receiving_needs_init() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, qb) = (Queue::new(&a, Setup::default()), Queue::new(&b, Setup::default()));
    let attr = qa.attributes(&qb);
    let steps = [
        (qps::IBV_QPS_RESET, 0),
        (qps::IBV_QPS_INIT, crate::common::TO_INIT),
        (qps::IBV_QPS_RTR, crate::common::TO_RTR),
    ];
    for (state, mask) in steps {
        let attr = sys::ibv_qp_attr { qp_state: state, ..attr };
        assert_eq!(qa.modify(&attr, mask | 1), 0);
        assert_eq!(qa.post(&[qa.write(1, 0..8, &b)]), Err((0, libc::EINVAL)), "in {state}");
        let expected = if state == qps::IBV_QPS_RESET { libc::EINVAL } else { 0 };
        assert_eq!(qa.receive(1, 0..8), expected, "in {state}");
    }
}

#[test]
fn capacities_beyond_the_devices_are_refused() {
    let net = Net::new(WorldOptions::pair().with(|device| {
        device.limits.max_qp_wr = 8;
        device.limits.max_sge = 4;
        device.limits.max_inline_bytes = 64;
        device.limits.max_qp = 2;
    }));
    let node = Node::new(&net, 0);
    let setup = Setup { send_wr: 8, recv_wr: 8, ..Setup::default() };
    let create = |change: &dyn Fn(&mut sys::ibv_qp_init_attr)| {
        let mut init = init(node.cq, std::ptr::null_mut(), setup);
        change(&mut init);
        let qp = c!(net.verbs, ibv_create_qp(node.pd, &raw mut init));
        if qp.is_null() { errno() } else { c!(net.verbs, ibv_destroy_qp(qp)) }
    };
    assert_eq!(create(&|_| {}), 0);
    assert_eq!(create(&|init| init.cap.max_send_wr = 9), libc::EINVAL);
    assert_eq!(create(&|init| init.cap.max_recv_wr = 9), libc::EINVAL);
    assert_eq!(create(&|init| init.cap.max_send_sge = 5), libc::EINVAL);
    assert_eq!(create(&|init| init.cap.max_recv_sge = 5), libc::EINVAL);
    assert_eq!(create(&|init| init.cap.max_inline_data = 65), libc::EINVAL);
    assert_eq!(create(&|init| init.recv_cq = std::ptr::null_mut()), libc::EINVAL);
    let ud = sys::ibv_qp_type::IBV_QPT_UD;
    assert_eq!(create(&|init| init.qp_type = ud), libc::EOPNOTSUPP);
    let _two = [Queue::new(&node, setup), Queue::new(&node, setup)];
    assert_eq!(create(&|_| {}), libc::ENOMEM);
}

#[test]
fn depths_beyond_the_devices_are_refused() {
    let net = Net::new(WorldOptions::pair().with(|device| {
        device.limits.max_cqe = 256;
        device.limits.max_srq_wr = 8;
        device.limits.max_cq = 2;
    }));
    let node = Node::new(&net, 0);
    let none = std::ptr::null_mut();
    let cq = |depth| {
        let cq = c!(net.verbs, ibv_create_cq(node.context, depth, none, std::ptr::null_mut(), 0));
        if cq.is_null() { Err(errno()) } else { Ok(cq) }
    };
    assert_eq!([cq(0), cq(257), cq(-1)], [Err(libc::EINVAL); 3]);
    let second = cq(256).unwrap();
    assert_eq!(cq(1), Err(libc::ENOMEM));
    assert_eq!(c!(net.verbs, ibv_destroy_cq(second)), 0);
    let mut attr = sys::ibv_srq_init_attr {
        attr: sys::ibv_srq_attr { max_wr: 9, max_sge: 1, srq_limit: 0 },
        ..Default::default()
    };
    assert!(c!(net.verbs, ibv_create_srq(node.pd, &raw mut attr)).is_null());
    assert_eq!(errno(), libc::EINVAL);
}

#[test]
fn a_shared_queue_counts_like_any_other() {
    let net = Net::pair();
    let node = Node::new(&net, 0);
    let mut attr = sys::ibv_srq_init_attr {
        attr: sys::ibv_srq_attr { max_wr: 2, max_sge: 1, srq_limit: 0 },
        ..Default::default()
    };
    let srq = c!(net.verbs, ibv_create_srq(node.pd, &raw mut attr));
    let post = |wr_id| {
        with_receive(&node, wr_id, 0..8, |receive, bad| {
            // SAFETY: the queue and its context are there.
            unsafe { (*node.context).ops.post_srq_recv.unwrap()(srq, receive, bad) }
        })
    };
    assert_eq!([0, 1, 2].map(post), [0, 0, libc::ENOMEM]);
    let mut limit = sys::ibv_srq_attr { max_wr: 0, max_sge: 0, srq_limit: 2 };
    let mask = sys::IBV_SRQ_LIMIT as i32;
    assert_eq!(c!(net.verbs, ibv_modify_srq(srq, &raw mut limit, mask)), 0);
    assert_eq!(c!(net.verbs, ibv_query_srq(srq, &raw mut limit)), 0);
    assert_eq!((limit.max_wr, limit.max_sge, limit.srq_limit), (2, 1, 2));
    limit.srq_limit = 3;
    assert_eq!(c!(net.verbs, ibv_modify_srq(srq, &raw mut limit, mask)), libc::EINVAL);
    assert_eq!(c!(net.verbs, ibv_destroy_srq(srq)), 0);
}

#[test]
fn posting_and_polling_fail_when_a_script_says_so() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, _qb) = connected(&a, &b);
    net.world.fail_call(0, Call::PostSend, libc::ENOMEM);
    assert_eq!(qa.post(&[qa.write(1, 0..8, &b)]), Err((0, libc::ENOMEM)));
    net.world.fail_call(0, Call::PostRecv, libc::ENOMEM);
    assert_eq!([qa.receive(1, 0..8), qa.receive(2, 0..8)], [libc::ENOMEM, 0]);
    net.world.fail_call(0, Call::PollCq, libc::EIO);
    let mut entry = sys::ibv_wc::default();
    // SAFETY: the CQ is there, and there is room for one.
    let polled = unsafe { (*a.context).ops.poll_cq.unwrap()(a.cq, 1, &raw mut entry) };
    assert!(polled < 0);
    net.world.fail_call(0, Call::CreateQp, libc::ENOMEM);
    let mut init = init(a.cq, std::ptr::null_mut(), Setup::default());
    assert!(c!(net.verbs, ibv_create_qp(a.pd, &raw mut init)).is_null());
    assert_eq!(errno(), libc::ENOMEM);
    qa.post(&[qa.write(3, 0..8, &b)]).unwrap();
    assert_eq!(statuses(&a.poll()), [(3, 0)]);
}
