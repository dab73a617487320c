//! Completion channels.

use kvferry_verbs_standin::{WorldOptions, sys};

use crate::common::c;
use crate::common::{Net, Node, SIGNALED, SOLICITED, connected, errno, is_readable, statuses};

#[test]
fn only_an_armed_cq_reports_and_only_once() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, _qb) = connected(&a, &b);
    let write = |n| qa.post(&[qa.write(n, 0..8, &b)]).unwrap();
    write(1);
    assert!(!a.has_event(), "not armed");
    a.arm(false);
    assert!(!a.has_event(), "what is there already is not reported");
    write(2);
    write(3);
    assert!(a.has_event());
    assert!(!a.has_event(), "once");
    write(4);
    assert!(!a.has_event(), "not armed again");
    assert_eq!(statuses(&a.poll()), [(1, 0), (2, 0), (3, 0), (4, 0)]);
}

#[test]
fn a_cq_armed_for_solicited_completions_reports_those_and_errors() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, qb) = connected(&a, &b);
    (0..3).for_each(|n| assert_eq!(qb.receive(n, 0..8), 0));
    b.arm(true);
    qa.post(&[qa.send(1, 0..8)]).unwrap();
    assert!(!b.has_event());
    qa.post(&[qa.send(2, 0..8).flags(SIGNALED | SOLICITED)]).unwrap();
    assert!(b.has_event());
    // Armed for all, it stays so.
    b.arm(false);
    b.arm(true);
    qa.post(&[qa.send(3, 0..8)]).unwrap();
    assert!(b.has_event());
    a.arm(true);
    qa.post(&[qa.write(4, 0..8, &b)]).unwrap();
    assert!(!a.has_event());
    qa.post(&[qa.write(5, 0..8, &b).rkey(0)]).unwrap();
    assert!(a.has_event());
}

#[test]
fn the_descriptor_is_readable_as_long_as_there_are_events() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, _qb) = connected(&a, &b);
    // SAFETY: the channel is there as long as the node.
    let fd = unsafe { (*a.channel).fd };
    for n in 0..3 {
        assert!(!is_readable(fd));
        a.arm(false);
        qa.post(&[qa.write(n, 0..8, &b)]).unwrap();
        a.arm(false);
        qa.post(&[qa.write(n, 0..8, &b)]).unwrap();
        assert!(is_readable(fd) && a.has_event());
        assert!(is_readable(fd) && a.has_event());
    }
    assert!(!is_readable(fd));
}

#[test]
fn a_blocking_channel_wakes_its_sleeper() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, _qb) = connected(&a, &b);
    let channel = c!(net.verbs, ibv_create_comp_channel(a.context));
    let mut name = 0u8;
    let context = (&raw mut name).cast();
    let cq = c!(net.verbs, ibv_create_cq(a.context, 8, context, channel, 0));
    let queue = crate::common::Queue::with(&a, qa.setup, cq, std::ptr::null_mut());
    let peer = crate::common::Queue::new(&b, qa.setup);
    queue.connect(&peer);
    peer.connect(&queue);
    // SAFETY: the CQ and its context are there.
    assert_eq!(unsafe { (*a.context).ops.req_notify_cq.unwrap()(cq, 0) }, 0);
    std::thread::scope(|scope| {
        let (channel, get) = (channel.expose_provenance(), net.verbs.ibv_get_cq_event);
        let sleeper = scope.spawn(move || {
            let channel = std::ptr::with_exposed_provenance_mut(channel);
            let (mut cq, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
            // SAFETY: the channel is there until this thread has ended.
            let code = unsafe { get(channel, &raw mut cq, &raw mut context) };
            (code, cq.expose_provenance(), context.expose_provenance())
        });
        queue.post(&[queue.write(1, 0..8, &b)]).unwrap();
        let expected = (0, cq.expose_provenance(), context.expose_provenance());
        assert_eq!(sleeper.join().unwrap(), expected);
    });
    c!(net.verbs, ibv_ack_cq_events(cq, 1));
    drop(queue);
    assert_eq!(c!(net.verbs, ibv_destroy_cq(cq)), 0);
    assert_eq!(c!(net.verbs, ibv_destroy_comp_channel(channel)), 0);
}

#[test]
fn a_cq_is_there_until_its_events_are_acknowledged() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let null = std::ptr::null_mut();
    let cq = c!(net.verbs, ibv_create_cq(a.context, 8, null, a.channel, 0));
    let queue = crate::common::Queue::with(&a, Default::default(), cq, std::ptr::null_mut());
    let peer = crate::common::Queue::new(&b, Default::default());
    queue.connect(&peer);
    peer.connect(&queue);
    for n in 0..2 {
        // SAFETY: the CQ and its context are there.
        assert_eq!(unsafe { (*a.context).ops.req_notify_cq.unwrap()(cq, 0) }, 0);
        queue.post(&[queue.write(n, 0..8, &b)]).unwrap();
    }
    // One event is taken and not acknowledged; the other is not taken, and is forgotten.
    let (mut found, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
    assert_eq!(c!(net.verbs, ibv_get_cq_event(a.channel, &raw mut found, &raw mut context)), 0);
    assert_eq!(found, cq);
    drop(queue);
    // SAFETY: the channel is there as long as the node.
    let fd = unsafe { (*a.channel).fd };
    let two_cqs = format!("{}: 2 × completion queue", net.world.device_names()[0]);
    std::thread::scope(|scope| {
        let (cq_at, ack) = (cq.expose_provenance(), net.verbs.ibv_ack_cq_events);
        let (world, two_cqs) = (&net.world, &two_cqs);
        scope.spawn(move || {
            // The other event is forgotten when the destruction begins.
            while is_readable(fd) {
                std::thread::yield_now();
            }
            (0..100).for_each(|_| std::thread::yield_now());
            assert!(world.leaks().contains(two_cqs));
            // SAFETY: the CQ is there until this event is acknowledged.
            unsafe { ack(std::ptr::with_exposed_provenance_mut(cq_at), 1) };
        });
        assert_eq!(c!(net.verbs, ibv_destroy_cq(cq)), 0);
    });
    assert!(!net.world.leaks().contains(&two_cqs));
}

#[test]
fn a_descriptor_that_does_not_block_says_that_nothing_is_there() {
    let net = Net::new(WorldOptions::pair());
    let a = Node::new(&net, 0);
    assert!(!a.has_event());
    let mut event = sys::ibv_async_event::default();
    assert_eq!(c!(net.verbs, ibv_get_async_event(a.context, &raw mut event)), -1);
    assert_eq!(errno(), libc::EAGAIN);
}
