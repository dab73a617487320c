//! The end of things.

use kvferry_verbs_standin::{Call, WorldOptions, sys};
use sys::ibv_qp_state as qps;

use crate::common::c;
use crate::common::{Net, Node, Queue, Setup, connected, statuses};

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
fn events_of_what_is_destroyed_are_forgotten() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, _qb) = connected(&a, &b);
    net.world.break_qp(0, qa.number());
    drop(qa);
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
    let acknowledged = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (at, acknowledged) = ((&raw mut event).expose_provenance(), &acknowledged);
        let ack = net.verbs.ibv_ack_async_event;
        scope.spawn(move || {
            acknowledged.store(true, std::sync::atomic::Ordering::SeqCst);
            // SAFETY: the event is there until this thread has ended.
            unsafe { ack(std::ptr::with_exposed_provenance_mut(at)) };
        });
        drop(qa);
        assert!(acknowledged.load(std::sync::atomic::Ordering::SeqCst));
    });
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
