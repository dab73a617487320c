//! What sessions carry, who may have one, and how they end on purpose.

use super::*;
use crate::control::ConnectError;
use crate::failure::Landed;
use crate::wire::message::Refusal;

#[tokio::test]
async fn messages_come_whole_and_in_order_behind_their_sessions_beginning() {
    let (mut a, b) = pair(local(), dialer()).await;
    let sending = async {
        for id in 0..5000 {
            b.send(a_of(&b), message(id)).await;
        }
    };
    let receiving = async {
        for id in 0..5000 {
            assert_eq!(a.message().await, message(id));
        }
    };
    tokio::join!(sending, receiving);
}

fn a_of(node: &Node) -> Incarnation {
    node.peers.snapshot()[0].incarnation
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn simultaneous_connects_end_in_one_session_and_both_succeed() {
    for _ in 0..60 {
        let (mut a, mut b) = (Node::new(local()), Node::new(local()));
        let (to_b, to_a) = tokio::join!(a.control.connect(b.addr()), b.control.connect(a.addr()));
        assert_eq!((to_b.unwrap(), to_a.unwrap()), (b.incarnation, a.incarnation));
        // Whatever happened on the way, what each side was told last is the same one session: what is
        // put in its outbox arrives. A session that loses is lost with what was said in it.
        exchange(&mut a, &mut b).await;
        for (node, peer) in [(&a, &b), (&b, &a)] {
            assert_eq!(node.health(peer.incarnation), Some(PeerHealth::Up));
            assert_eq!(node.peers.snapshot().len(), 1);
        }
        let bye = tokio::join!(a.control.shutdown("done"), b.control.shutdown("done"));
        assert_eq!(bye, ((), ()));
    }
}

/// Both sides speak in whatever session they were told of last, until each has heard the other.
async fn exchange(a: &mut Node, b: &mut Node) {
    let deadline = tokio::time::Instant::now() + LONG;
    let (mut heard_a, mut heard_b) = (false, false);
    while !(heard_a && heard_b) {
        assert!(
            tokio::time::Instant::now() < deadline,
            "no session stands: {:?} {:?}",
            a.peers,
            b.peers
        );
        for (node, heard) in [(&mut *a, &mut heard_a), (&mut *b, &mut heard_b)] {
            while let Ok(said) = tokio::time::timeout(Duration::from_millis(5), node.next()).await {
                match said {
                    ToWorker::Message { .. } => *heard = true,
                    ToWorker::PeerGone { kind, causes, .. } => {
                        panic!("given up: {kind} {causes:?}")
                    }
                    _ => {}
                }
            }
            for outbox in node.outboxes.values() {
                let _ = outbox.try_send(message(0));
            }
        }
    }
}

#[tokio::test]
async fn of_two_sessions_at_once_the_smaller_incarnations_is_kept_and_the_other_told() {
    let rt = Handle::current();
    for (ours, theirs, kept) in [(1, 2, true), (2, 1, false)] {
        let ours = Incarnation(ours);
        let mut a = Node::with(&rt, local(), vec![card("kv", 64)], Some(ours));
        let mut us = identity(None);
        us.incarnation = Incarnation(theirs);
        // Dialed by the engine, at the puppet's address.
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let control = a.control.clone();
        let connecting = tokio::spawn(async move { control.connect(addr).await });
        let (mut stream, _) = listener.accept().await.unwrap();
        framing::accept(&mut stream).await.unwrap();
        let mut first = Wire::new(stream);
        handshake::answer(&us, &mut first).await.unwrap();
        first.writer.write_all(&us.welcome().unwrap()).await.unwrap();
        a.up().await;
        // And by the puppet, at the engine's.
        let mut second = Wire::new(open(a.addr(), Kind::Control).await);
        match handshake::dial(&us, &mut second, |_| false).await.unwrap() {
            Dialed::Standing(peer) => assert!(kept && peer == ours),
            Dialed::Welcome(_) => {
                assert!(!kept);
                assert_eq!(a.down().await, us.incarnation);
                assert_eq!(a.up().await.peer, us.incarnation);
            }
        }
        connecting.abort();
    }
}

#[tokio::test]
async fn a_draining_peer_is_marked_and_takes_no_new_sessions() {
    let (mut a, b) = pair(local(), dialer()).await;
    a.control.drain(None);
    eventually("the peer is told", || b.health(a.incarnation) == Some(PeerHealth::Draining)).await;
    let error = Node::new(dialer()).control.connect(a.addr()).await.unwrap_err();
    let ConnectError::Refused { refusal: Refusal::Draining, .. } = error else {
        panic!("{error:?}")
    };
    b.send(a.incarnation, message(1)).await;
    assert_eq!(a.message().await, message(1), "the session that stands goes on");
}

#[tokio::test]
async fn one_peer_can_be_drained_and_is_told_again_when_it_comes_back() {
    let mut a = Node::new(local());
    let (mut b, other) = (Node::new(dialer()), Node::new(dialer()));
    let wire = Cuttable::new(a.addr()).await;
    b.control.connect(wire.addr).await.unwrap();
    other.control.connect(a.addr()).await.unwrap();
    a.control.drain(Some(b.incarnation));
    eventually("the peer is told", || b.health(a.incarnation) == Some(PeerHealth::Draining)).await;
    assert_eq!(other.health(a.incarnation), Some(PeerHealth::Up));
    b.up().await;
    wire.cut(0);
    assert_eq!(b.down().await, a.incarnation);
    b.up().await;
    eventually("it is told again", || b.health(a.incarnation) == Some(PeerHealth::Draining)).await;
    a.up().await;
}

#[tokio::test]
async fn a_peer_that_is_disconnected_is_told_why_and_not_redialed() {
    let (mut a, mut b) = pair(local(), dialer()).await;
    b.send(a.incarnation, message(1)).await;
    b.control.disconnect(a.incarnation, "moved\nelsewhere").await;
    let (peer, kind, causes) = b.gone().await;
    assert_eq!((peer, kind), (a.incarnation, FailureKind::Shutdown));
    assert_eq!(causes[1], "moved elsewhere");
    assert_eq!(a.message().await, message(1), "what was sent before the goodbye arrives");
    let (peer, kind, causes) = a.gone().await;
    assert_eq!((peer, kind), (b.incarnation, FailureKind::Shutdown));
    assert_eq!(causes[1], "moved elsewhere");
    assert!(b.control.core.targets.lock().unwrap().is_empty());
    // And it can be connected to again.
    assert_eq!(b.control.connect(a.addr()).await.unwrap(), a.incarnation);
    assert_eq!(b.up().await.peer, a.incarnation);
}

#[tokio::test]
async fn shutdown_sends_what_waits_says_goodbye_and_ends_every_task() {
    let (mut a, mut b) = pair(local(), dialer()).await;
    let silent = TcpStream::connect(a.addr()).await.unwrap();
    let (addr, core) = (a.addr(), Arc::clone(&a.control.core));
    // More than the kernel takes at once, so that much of it still waits here.
    for id in 0..100 {
        a.outboxes[&b.incarnation].try_send(row(id)).unwrap();
    }
    a.control.shutdown("the node is drained").await;
    assert_eq!(core.phase.receiver_count(), 0, "a task is left");
    assert!(TcpStream::connect(addr).await.is_err(), "it still listens");
    for id in 0..100 {
        assert_eq!(b.message().await, row(id));
    }
    let (peer, kind, causes) = b.gone().await;
    assert_eq!((peer, kind), (a.incarnation, FailureKind::Shutdown));
    assert_eq!(causes[1], "the node is drained");
    assert_eq!(a.gone().await.1, FailureKind::Shutdown);
    let error = a.control.connect(addr).await.unwrap_err();
    assert!(matches!(error, ConnectError::Stopped), "{error:?}");
    // The one that was left redials, and ends no less.
    b.control.shutdown("too").await;
    assert_eq!(b.control.core.phase.receiver_count(), 0);
    drop(silent);
    // What the worker says afterwards is heard: rooms end and lanes close after a shutdown.
    let lanes: Vec<_> = a.lanes.keys().copied().collect();
    for lane in lanes {
        a.close_lane(b.incarnation, lane).await;
    }
    drop(a.worker);
    eventually("the last task ends with the worker", || Arc::strong_count(&core) <= 2).await;
}

/// A message as large as they come often.
fn row(id: u64) -> Message {
    Message::Finished {
        room: RoomId(id),
        epoch: Epoch(1),
        sent: Landed::default(),
        aux: vec![7; 64 << 10].into(),
        checksum: None,
    }
}

#[tokio::test]
async fn what_a_worker_said_last_is_sent_though_it_ends_before_the_sessions_do() {
    let (mut a, mut b) = pair(local(), dialer()).await;
    for id in 0..100 {
        a.outboxes[&b.incarnation].try_send(row(id)).unwrap();
    }
    a.said = mpsc::channel(1).1;
    // The peer speaks to a worker that is gone.
    b.send(a.incarnation, message(1)).await;
    for id in 0..100 {
        assert_eq!(b.message().await, row(id));
    }
    let (peer, kind, causes) = b.gone().await;
    assert_eq!((peer, kind), (a.incarnation, FailureKind::Shutdown));
    assert_eq!(causes[1], "its worker has ended");
}

#[tokio::test]
async fn a_shutdown_does_not_wait_for_a_worker_that_hears_nothing() {
    let (control, _, _said) = narrow();
    let mut puppet = Puppet::dial(control.listen_addr().unwrap(), &identity(None)).await;
    for id in 0..10 {
        puppet.send(&message(id)).await;
    }
    tokio::time::timeout(SLACK * crate::control::SHUTDOWN, control.shutdown("stop")).await.unwrap();
    assert_eq!(control.core.phase.receiver_count(), 0);
}

/// A control plane whose worker takes one thing at a time, when the test takes it.
fn narrow() -> (Control, mpsc::Sender<ToWorker>, mpsc::Receiver<ToWorker>) {
    let (tx, said) = mpsc::channel(1);
    let (_, from_worker) = mpsc::channel(1);
    let setup = ControlSetup {
        config: Arc::new(local()),
        incarnation: Incarnation::draw().unwrap(),
        cards: vec![card("kv", 64)],
        io: LaneIo::Epoll,
        rails: Err("not here".to_owned()),
        worker: WorkerMail::new(tx.clone(), Arc::new(Wakeup::new().unwrap())),
        from_worker,
        peers: Arc::default(),
    };
    (Control::start(&Handle::current(), setup).unwrap(), tx, said)
}

#[tokio::test]
async fn a_peer_that_is_given_up_does_not_count_as_connected_until_the_worker_has_heard() {
    let a = Node::new(local());
    let (addr, peer) = (a.addr(), a.incarnation);
    let (control, tx, mut said) = narrow();
    let connecting = async {
        for _ in 0..=control.core.config.lanes {
            said.recv().await.unwrap();
        }
    };
    let (connected, ()) = tokio::join!(control.connect(addr), connecting);
    assert_eq!(connected.unwrap(), peer);
    // The worker is busy, and its mailbox full.
    tx.try_send(ToWorker::PeerDown { peer }).unwrap();
    a.control.shutdown("gone for good").await;
    let health = || control.core.peers.get(peer).unwrap().health;
    eventually("it is given up", || matches!(health(), PeerHealth::Gone { .. })).await;
    let error = control.connect(addr).await.unwrap_err();
    assert!(error.nobody_listens(), "{error}");
    drop(said);
    control.shutdown("done").await;
}

#[tokio::test]
async fn a_session_replaced_before_its_welcome_is_answered_all_the_same() {
    // Which of its two halves a session runs first is drawn anew each time.
    for _ in 0..20 {
        let (control, tx, mut said) = narrow();
        let addr = control.listen_addr().unwrap();
        let us = Arc::new(identity(None));
        tx.send(ToWorker::PeerDown { peer: us.incarnation }).await.unwrap();
        let dial = |us: Arc<Identity>| async move {
            let mut wire = Wire::new(open(addr, Kind::Control).await);
            handshake::dial(&us, &mut wire, |_| false).await.map(|dialed| (dialed, wire))
        };
        let first = tokio::spawn(dial(Arc::clone(&us)));
        eventually("the first is taken", || control.core.peer(us.incarnation).is_some()).await;
        let second = tokio::spawn(dial(us));
        tokio::time::sleep(Duration::from_millis(20)).await;
        let hearing = tokio::spawn(async move { while said.recv().await.is_some() {} });
        let first = first.await.unwrap();
        assert!(first.is_ok(), "{first:?}");
        let second = second.await.unwrap();
        assert!(second.is_ok(), "{second:?}");
        drop((first, second));
        control.shutdown("done").await;
        hearing.abort();
    }
}
