//! The end of things.

use kvferry_verbs_standin::{Call, WorldOptions, sys};
use sys::ibv_qp_state as qps;

use crate::common::c;
use crate::common::{Net, Node, Queue, Setup, connected, is_readable, statuses};

#[test]
fn what_is_in_use_is_not_destroyed_and_that_is_counted() {
    let net = Net::pair();
    let node = Node::new(&net, 0);
    let attr = sys::ibv_srq_attr { max_wr: 1, max_sge: 1, srq_limit: 0 };
    let mut init = sys::ibv_srq_init_attr { attr, ..Default::default() };
    let srq = c!(net.verbs, ibv_create_srq(node.pd, &raw mut init));
    let queue = Queue::with(&node, Setup::default(), node.cq, srq);
    let busy = [
        c!(net.verbs, ibv_dealloc_pd(node.pd)),
        c!(net.verbs, ibv_destroy_cq(node.cq)),
        c!(net.verbs, ibv_destroy_srq(srq)),
        c!(net.verbs, ibv_destroy_comp_channel(node.channel)),
    ];
    assert_eq!(busy, [libc::EBUSY; 4]);
    assert_eq!(c!(net.verbs, ibv_close_device(node.context)), -1);
    assert_eq!(net.world.refused_destructions(), 5);
    // All of it still works.
    let peer = Queue::new(&node, Setup::default());
    queue.connect(&peer);
    peer.connect(&queue);
    queue.post(&[queue.write(1, 0..8, &node)]).unwrap();
    assert_eq!(statuses(&node.poll()), [(1, 0)]);
    drop(queue);
    assert_eq!(c!(net.verbs, ibv_destroy_srq(srq)), 0);
}

#[test]
fn what_is_alive_is_named() {
    let net = Net::pair();
    assert_eq!(net.world.leaks(), Vec::<String>::new());
    let node = Node::new(&net, 1);
    let queue = Queue::new(&node, Setup::default());
    let name = &net.world.device_names()[1];
    let expected = [
        format!("{name}: 1 × open context"),
        format!("{name}: 1 × protection domain"),
        format!("{name}: 1 × memory region"),
        format!("{name}: 1 × completion channel"),
        format!("{name}: 1 × completion queue"),
        format!("{name}: QP {:#x} in state {}", queue.number(), qps::IBV_QPS_RESET),
    ];
    assert_eq!(net.world.leaks(), expected);
}

#[test]
fn completions_of_a_qp_go_with_it_or_stay() {
    for keeps in [false, true] {
        let options = WorldOptions::pair().with(|device| device.destroy_keeps_completions = keeps);
        let net = Net::new(options);
        let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
        let ((q1, r1), (q2, _r2)) = (connected(&a, &b), connected(&a, &b));
        r1.receive(70, 0..8);
        q1.post(&[q1.send(1, 0..8)]).unwrap();
        q2.post(&[q2.write(2, 0..8, &b)]).unwrap();
        drop((q1, r1));
        let (of_a, of_b) = (statuses(&a.poll()), statuses(&b.poll()));
        let expected =
            if keeps { (vec![(1, 0), (2, 0)], vec![(70, 0)]) } else { (vec![(2, 0)], vec![]) };
        assert_eq!((of_a, of_b), expected);
    }
}

#[test]
fn completions_go_from_both_cqs_of_a_qp() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let null = std::ptr::null_mut();
    let other = c!(net.verbs, ibv_create_cq(b.context, 8, null, std::ptr::null_mut(), 0));
    for mut make in [
        Box::new(|init: &mut sys::ibv_qp_init_attr| init.send_cq = other) as Box<dyn FnMut(&mut _)>,
        Box::new(|init: &mut sys::ibv_qp_init_attr| init.recv_cq = other),
    ] {
        let mut init = crate::common::init(b.cq, std::ptr::null_mut(), Setup::default());
        make(&mut init);
        let qp = c!(net.verbs, ibv_create_qp(b.pd, &raw mut init));
        let qb = Queue { node: &b, qp, setup: Setup::default() };
        let qa = Queue::new(&a, Setup::default());
        qa.connect(&qb);
        qb.connect(&qa);
        qb.receive(70, 0..8);
        qa.post(&[qa.send(1, 0..8)]).unwrap();
        qb.post(&[qb.write(2, 0..8, &a)]).unwrap();
        drop((qa, qb));
        assert_eq!((b.poll(), crate::common::poll(other)), (vec![], vec![]));
    }
    assert_eq!(c!(net.verbs, ibv_destroy_cq(other)), 0);
}

#[test]
fn events_of_what_is_destroyed_are_forgotten() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, _qb) = connected(&a, &b);
    net.world.break_qp(0, qa.number());
    drop(qa);
    // SAFETY: the context is open as long as the node.
    assert!(!is_readable(unsafe { (*a.context).async_fd }));
    assert_eq!(a.events(), []);
}

#[test]
fn a_qp_is_there_until_its_events_are_acknowledged() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, _qb) = connected(&a, &b);
    net.world.break_qp(0, qa.number());
    let mut event = sys::ibv_async_event::default();
    assert_eq!(c!(net.verbs, ibv_get_async_event(a.context, &raw mut event)), 0);
    // SAFETY: the kind of the event is that of a QP.
    assert_eq!(unsafe { event.element.qp }, qa.qp);
    std::thread::scope(|scope| {
        let (at, world) = ((&raw mut event).expose_provenance(), &net.world);
        let ack = net.verbs.ibv_ack_async_event;
        scope.spawn(move || {
            // It is reset when its destruction begins, and stays until the event is acknowledged.
            let of_a = || world.qps(0).first().map(|qp| qp.state);
            while of_a() == Some(qps::IBV_QPS_ERR) {
                std::thread::yield_now();
            }
            (0..100).for_each(|_| std::thread::yield_now());
            assert_eq!(of_a(), Some(qps::IBV_QPS_RESET));
            // SAFETY: the event is there until this thread has ended.
            unsafe { ack(std::ptr::with_exposed_provenance_mut(at)) };
        });
        drop(qa);
    });
    assert_eq!(net.world.qps(0), []);
}

#[test]
fn a_qp_that_cannot_be_destroyed_is_still_there() {
    let net = Net::pair();
    let node = Node::new(&net, 0);
    let queue = Queue::new(&node, Setup::default());
    net.world.fail_call(0, Call::DestroyQp, libc::EBUSY);
    assert_eq!(c!(net.verbs, ibv_destroy_qp(queue.qp)), libc::EBUSY);
    assert_eq!(queue.state(), qps::IBV_QPS_RESET);
    net.world.fail_call(0, Call::DeregMr, libc::EBUSY);
    assert_eq!(c!(net.verbs, ibv_dereg_mr(node.mr)), libc::EBUSY);
}

#[test]
fn a_world_outlives_its_handle_as_long_as_a_device_is_open() {
    let net = Net::pair();
    let context = net.open(0);
    let verbs = crate::common::Verbs::of(&net.world);
    let leaks = net.world.leaks();
    assert_eq!(leaks.len(), 1);
    let mut attr = sys::ibv_device_attr::default();
    // The assertion of `Net` would fail now, and rightly.
    let net = std::mem::ManuallyDrop::new(net);
    // SAFETY: the world is not used after this.
    drop(unsafe { std::ptr::read(&raw const net.world) });
    assert_eq!(c!(verbs, ibv_query_device(context, &raw mut attr)), 0);
    assert_eq!(c!(verbs, ibv_close_device(context)), 0);
}
