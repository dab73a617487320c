//! Who is alive: cuts, deaths, silences and restarts, each told for what it is and in time.

use std::time::Instant;

use tokio::runtime::Runtime;

use super::*;

/// A process of its own, as far as its sockets go: dropping the runtime closes them all at once.
struct Killable {
    rt: Runtime,
    node: Node,
}

impl Killable {
    fn new(config: EngineConfig) -> Self {
        let rt = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let start = || Node::try_with(rt.handle(), config.clone(), vec![card("kv", 64)], None);
        let deadline = Instant::now() + LONG;
        let node = loop {
            match start() {
                Ok(node) => break node,
                // The one that was killed may not have let go of the port yet.
                Err(error) => assert!(Instant::now() < deadline, "{error}"),
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        Self { rt, node }
    }

    /// As by SIGKILL: nothing is said to anybody. Returns the incarnation it had.
    fn kill(self) -> Incarnation {
        self.rt.shutdown_background();
        self.node.incarnation
    }
}

#[tokio::test]
async fn a_cut_session_that_comes_back_within_the_grace_keeps_the_peer() {
    let (mut a, mut b) = (Node::new(local()), Node::new(dialer()));
    let wire = Cuttable::new(a.addr()).await;
    b.control.connect(wire.addr).await.unwrap();
    assert_eq!((a.up().await.peer, b.up().await.peer), (b.incarnation, a.incarnation));
    let lanes = 2;
    for round in 0..3 {
        // The session is connection 0, then two lanes, then each new session.
        wire.cut(if round == 0 { 0 } else { lanes + round });
        assert_eq!(a.down().await, b.incarnation);
        assert_eq!(b.down().await, a.incarnation);
        assert_eq!(a.up().await.peer, b.incarnation);
        assert_eq!(b.up().await.pairings.len(), 1);
        b.send(a.incarnation, message(round as u64)).await;
        assert_eq!(a.message().await, message(round as u64));
    }
}

#[tokio::test]
async fn a_killed_peer_is_dead_within_a_second_for_whoever_dialed_it() {
    let far = Killable::new(local());
    let mut near = Node::new(dialer());
    near.control.connect(far.node.addr()).await.unwrap();
    near.up().await;
    let killed = Instant::now();
    let dead = far.kill();
    let (peer, kind, causes) = near.gone().await;
    assert_eq!((peer, kind), (dead, FailureKind::PeerDied), "{causes:?}");
    assert!(killed.elapsed() < SLACK * Duration::from_secs(1), "{:?}", killed.elapsed());
    assert!(causes.len() >= 2, "{causes:?}");
    assert!(matches!(
        near.health(dead),
        Some(PeerHealth::Gone { kind: FailureKind::PeerDied, .. })
    ));
}

#[tokio::test]
async fn nobody_listening_any_more_is_death_without_waiting_for_the_grace() {
    let grace = Duration::from_secs(60);
    let far = Killable::new(local());
    let mut near = Node::new(dialer().reconnect_grace_ms(60_000u64));
    near.control.connect(far.node.addr()).await.unwrap();
    near.up().await;
    let killed = Instant::now();
    far.kill();
    let (_, kind, causes) = near.gone().await;
    assert_eq!(kind, FailureKind::PeerDied);
    assert!(causes.iter().any(|cause| cause.contains("nobody listens")), "{causes:?}");
    assert!(killed.elapsed() < grace);
}

#[tokio::test]
async fn a_killed_peer_is_dead_within_a_second_for_whoever_it_dialed() {
    let mut near = Node::new(local());
    let far = Killable::new(dialer());
    let (control, addr) = (far.node.control.clone(), near.addr());
    far.rt.spawn(async move { control.connect(addr).await }).await.unwrap().unwrap();
    near.up().await;
    let killed = Instant::now();
    let dead = far.kill();
    let (peer, kind, causes) = near.gone().await;
    assert_eq!((peer, kind), (dead, FailureKind::PeerDied), "{causes:?}");
    assert!(killed.elapsed() < SLACK * Duration::from_secs(1), "{:?}", killed.elapsed());
}

#[tokio::test]
async fn a_peer_that_says_nothing_is_silent_after_its_time_and_not_before() {
    let silent = Duration::from_millis(300);
    let mut a = Node::new(local().peer_silent_ms(300u64));
    let us = identity(None);
    let puppet = Puppet::dial(a.addr(), &us).await;
    a.up().await;
    let from = Instant::now();
    let (peer, kind, causes) = a.gone().await;
    assert_eq!((peer, kind), (us.incarnation, FailureKind::PeerSilent), "{causes:?}");
    assert!(from.elapsed() >= silent - silent / 6, "{:?}", from.elapsed());
    assert!(from.elapsed() < SLACK * silent, "{:?}", from.elapsed());
    drop(puppet);
}

#[tokio::test]
async fn a_peer_that_takes_nothing_is_silent_too_however_much_it_says() {
    let mut a = Node::new(local().peer_silent_ms(300u64));
    let mut puppet = Puppet::dial(a.addr(), &identity(None)).await;
    let peer = a.up().await.peer;
    let aux = bytes::Bytes::from(vec![0; 1 << 20]);
    let outbox = a.outboxes[&peer].clone();
    tokio::spawn(async move {
        let sent = crate::failure::Landed::default();
        let large =
            Message::Finished { room: RoomId(1), epoch: Epoch(1), sent, aux, checksum: None };
        while outbox.send(large.clone()).await.is_ok() {}
    });
    let talking = tokio::spawn(async move {
        loop {
            let frame = encode(&Message::Heartbeat, 100).unwrap();
            if puppet.wire.writer.write_all(&frame).await.is_err() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    let (_, kind, causes) = a.gone().await;
    assert_eq!(kind, FailureKind::PeerSilent);
    assert!(causes[0].contains("took no byte"), "{causes:?}");
    talking.await.unwrap();
}

#[tokio::test]
async fn a_quiet_pair_of_engines_with_unlike_patience_stays_together() {
    let (mut a, b) = pair(local().peer_silent_ms(120u64), dialer().peer_silent_ms(60_000u64)).await;
    tokio::time::sleep(Duration::from_millis(1000)).await;
    assert_eq!(a.health(b.incarnation), Some(PeerHealth::Up));
    b.send(a.incarnation, message(1)).await;
    assert_eq!(a.message().await, message(1));
}

#[tokio::test]
async fn a_peer_restarted_at_its_address_is_gone_before_its_successor_is_up() {
    // The grace is longer than the test: it must be the successor that ends it. The dialer does not
    // find the address empty, for the wire in between goes on listening.
    let far = Killable::new(local());
    let addr = far.node.addr();
    let wire = Cuttable::new(addr).await;
    let mut near = Node::new(dialer().reconnect_grace_ms(60_000u64));
    let old = near.control.connect(wire.addr).await.unwrap();
    near.up().await;
    assert_eq!(far.kill(), old);
    assert_eq!(near.down().await, old);
    let again = Killable::new(local().listen(Some(addr)));
    let (peer, kind, causes) = near.gone().await;
    assert_eq!((peer, kind), (old, FailureKind::PeerRestarted), "{causes:?}");
    assert_eq!(near.up().await.peer, again.node.incarnation);
    again.kill();
}

#[tokio::test]
async fn a_restarted_peer_that_dials_in_succeeds_the_one_that_listened_there() {
    for dies in [true, false] {
        let mut a = Node::new(local().reconnect_grace_ms(60_000u64).peer_silent_ms(600u64));
        let (first, second) = (identity(Some(9)), identity(Some(9)));
        let mut old = Some(Puppet::dial(a.addr(), &first).await);
        a.up().await;
        if dies {
            // Otherwise its host went down, and nothing tells of that but silence.
            old = None;
        }
        let addr = a.addr();
        let successor = tokio::spawn(async move { Puppet::dial(addr, &second).await.hello });
        let (peer, kind, _) = a.gone().await;
        assert_eq!((peer, kind), (first.incarnation, FailureKind::PeerRestarted));
        a.up().await;
        successor.await.unwrap();
        drop(old);
    }
}

#[tokio::test]
async fn two_engines_behind_one_address_are_not_taken_for_a_restart() {
    let mut a = Node::new(local().peer_silent_ms(600u64));
    let mut first = Puppet::dial(a.addr(), &identity(Some(9))).await;
    let old = a.up().await.peer;
    let living = tokio::spawn(async move {
        for _ in 0..200 {
            first.send(&Message::Heartbeat).await;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    let second = identity(Some(9));
    let _second = Puppet::dial(a.addr(), &second).await;
    assert_eq!(a.up().await.peer, second.incarnation);
    assert_eq!(a.health(old), Some(PeerHealth::Up));
    living.abort();
}

#[tokio::test]
async fn a_peer_that_was_given_up_is_redialed_until_it_is_back() {
    let far = Killable::new(local());
    let addr = far.node.addr();
    let mut near = Node::new(dialer());
    near.control.connect(addr).await.unwrap();
    near.up().await;
    far.kill();
    assert_eq!(near.gone().await.1, FailureKind::PeerDied);
    let again = Killable::new(local().listen(Some(addr)));
    assert_eq!(near.up().await.peer, again.node.incarnation);
    // Goodbye is no reason to forget an address either.
    let (control, peer) = (again.node.control.clone(), near.incarnation);
    again.rt.spawn(async move { control.disconnect(peer, "for a while").await }).await.unwrap();
    assert_eq!(near.gone().await.1, FailureKind::Shutdown);
    assert_eq!(near.up().await.peer, again.node.incarnation);
    again.kill();
}
