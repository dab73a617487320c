//! Connections that break: what both sides say, and when.
#![allow(missing_docs, reason = "tests document themselves by name")]

mod common;

use std::time::{Duration, Instant};

use common::proxy::{Kind, Proxy};
use common::{KV, Node, config, layout, local, wait};
use kvferry::{
    Chunk, EngineConfig, FailureKind, GrantSpec, Incarnation, IoMode, OpenOptions, PeerHealth,
    RecvRoom, SendRoom,
};

/// Promised deadlines are asserted with this much slack on real processes.
const SLACK: u32 = 5;

struct Bridged {
    prefill: Node,
    decode: Node,
    proxy: Proxy,
    peer: Incarnation,
}

fn bridged(set: impl Fn(EngineConfig) -> EngineConfig) -> Bridged {
    let prefill = Node::start(set(config(IoMode::Auto)).listen(local()), layout(64));
    let decode = Node::start(set(config(IoMode::Auto)), layout(64));
    let proxy = Proxy::to(prefill.engine.listen_addr().unwrap());
    let peer = wait(decode.engine.connect(proxy.addr())).unwrap();
    Bridged { prefill, decode, proxy, peer }
}

impl Bridged {
    fn room(&self, id: u64, page: u32) -> (SendRoom, RecvRoom) {
        let sending = self.prefill.engine.open(id.into(), OpenOptions::default()).unwrap();
        let spec = GrantSpec::new(id.into()).pages(KV, [page]);
        let receiving = self.decode.engine.grant(self.peer, spec).unwrap();
        wait(sending.granted()).unwrap();
        (sending, receiving)
    }

    /// Writes and finishes a room of one page, and waits for its end.
    fn complete(&self, sending: &SendRoom, receiving: &RecvRoom) {
        wait(sending.write(Chunk::new(KV, [1], 0..1))).unwrap();
        sending.finish(bytes::Bytes::new()).unwrap();
        wait(receiving.done()).unwrap();
        wait(sending.done()).unwrap();
    }
}

#[test]
fn rooms_survive_the_loss_of_their_control_session_again_and_again() {
    // A busy machine may take longer over a reconnect than the default grace.
    let link = bridged(|config| config.reconnect_grace_ms(500 * u64::from(SLACK)));
    let rooms: Vec<_> = (0..16).map(|id| link.room(id, id as u32)).collect();
    for (sending, receiving) in &rooms {
        link.proxy.cut(Kind::Control);
        link.complete(sending, receiving);
    }
    assert_eq!(link.decode.engine.peers().len(), 1, "the peer that came back is the same");
}

#[test]
fn a_lost_lane_is_replaced_and_later_rooms_cross() {
    let link = bridged(|config| config);
    let (sending, receiving) = link.room(1, 0);
    link.complete(&sending, &receiving);
    link.proxy.cut(Kind::Lane);
    let deadline = Instant::now() + common::PATIENCE;
    loop {
        // A room that is caught by the cut may fail; it fails on both sides alike.
        let (sending, receiving) = link.room(2, 1);
        wait(sending.write(Chunk::new(KV, [1], 0..1))).unwrap();
        sending.finish(bytes::Bytes::new()).unwrap();
        match (wait(sending.done()), wait(receiving.done())) {
            (Ok(_), Ok(_)) => break,
            (Err(ours), Err(theirs)) => {
                assert_eq!(ours.kind, FailureKind::LaneLost);
                assert_eq!(ours.to_string(), theirs.to_string());
            }
            (ours, theirs) => panic!("the sides disagree: {ours:?} {theirs:?}"),
        }
        assert!(Instant::now() < deadline, "lanes are not replaced");
    }
    let has_lanes = |node: &Node| node.engine.peers().iter().any(|peer| !peer.lanes.is_empty());
    assert!(has_lanes(&link.prefill) && has_lanes(&link.decode));
}

#[test]
fn a_peer_that_is_gone_is_known_dead_within_the_grace_and_its_rooms_fail_with_that() {
    let link = bridged(|config| config);
    let (sending, receiving) = link.room(1, 0);
    wait(sending.write(Chunk::new(KV, [1], 0..1))).unwrap();
    link.proxy.refuse();
    let start = Instant::now();
    link.proxy.cut(Kind::Lane);
    link.proxy.cut(Kind::Control);
    let (ours, theirs) = (wait(sending.done()).unwrap_err(), wait(receiving.done()).unwrap_err());
    assert_eq!(
        (ours.kind, theirs.kind),
        (FailureKind::PeerDied, FailureKind::PeerDied),
        "{ours}\n{theirs}"
    );
    assert!(start.elapsed() < Duration::from_secs(1) * SLACK, "it took {:?}", start.elapsed());
    wait(sending.released());
    wait(receiving.released());
    let health = &link.prefill.engine.peers()[0].health;
    assert!(matches!(health, PeerHealth::Gone { kind: FailureKind::PeerDied, .. }), "{health:?}");
}

#[test]
fn a_peer_that_says_nothing_is_silent_on_both_sides_after_peer_silent_ms() {
    let link = bridged(|config| config.peer_silent_ms(300u64));
    let (sending, receiving) = link.room(1, 0);
    link.proxy.stall();
    let start = Instant::now();
    let (ours, theirs) = (wait(sending.done()).unwrap_err(), wait(receiving.done()).unwrap_err());
    assert_eq!(
        (ours.kind, theirs.kind),
        (FailureKind::PeerSilent, FailureKind::PeerSilent),
        "{ours}\n{theirs}"
    );
    assert!(
        start.elapsed() >= Duration::from_millis(200),
        "declared silent after {:?}",
        start.elapsed()
    );
    assert!(start.elapsed() < Duration::from_millis(300) * SLACK, "it took {:?}", start.elapsed());
    wait(sending.released());
    wait(receiving.released());
}

#[test]
fn a_verdict_that_the_loss_of_the_peer_swallows_is_unknown_to_the_sender() {
    let link = bridged(|config| config.peer_silent_ms(300u64));
    let (sending, receiving) = link.room(1, 0);
    wait(sending.write(Chunk::new(KV, [1], 0..1))).unwrap();
    link.proxy.stall();
    sending.finish(bytes::Bytes::new()).unwrap();
    let ours = wait(sending.done()).unwrap_err();
    assert_eq!(ours.kind, FailureKind::VerdictUnknown, "{ours}");
    assert!(ours.causes.join(" ").contains("peer-silent"), "{ours}");
    assert_eq!(wait(receiving.done()).unwrap_err().kind, FailureKind::PeerSilent);
}
