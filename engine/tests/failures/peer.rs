//! Failures of whole peers: killed, restarted, stopped, or forgetful.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::time::{Duration, Instant};

use kvferry::{
    Chunk, FailureKind, GrantError, GrantSpec, IoMode, OpenOptions, PeerHealth, Role, RoomHandle,
    RoomId,
};

use crate::common::{KV, Node, config, layout, local, wait};
use crate::link::{Carried, Link, PAGE_BYTES, ROOM, Says, WRITES, assert_pages, land, until};
use crate::process::{Process, SALT};
use crate::tamper::Tamper;

/// Promised deadlines are asserted with this much slack on real processes.
const SLACK: u32 = 5;

pub fn a_killed_peer_is_known_dead_on_the_other_side_and_a_path_cut_for_good_on_both(
    kind: FailureKind,
) -> Option<Carried> {
    // A prefill node is killed: nobody listens there any more.
    let mut killed = Process::start();
    let decode = Node::start(config(IoMode::Auto), layout(64));
    let peer = wait(decode.engine.connect(killed.addr)).unwrap();
    let receiving =
        decode.engine.grant(peer, GrantSpec::new(ROOM).pages(KV, [0, 1, 2, 3])).unwrap();
    killed.tell("open 7");
    killed.tell("write 7");
    killed.hear("wrote 7");
    let start = Instant::now();
    killed.kill();
    let failure = wait(receiving.done()).unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(1) * SLACK, "after {:?}", start.elapsed());
    assert_eq!((failure.kind, failure.seen_by), (kind, Role::Receiver));
    assert_eq!((failure.peer, failure.peer_addr.unwrap()), (Some(peer), killed.addr.to_string()));
    assert_eq!((failure.landed.page_writes, failure.landed.bytes), (4 * WRITES, 4 * PAGE_BYTES));
    let causes = failure.causes.join(": ");
    assert!(causes.contains(&format!("nobody listens at {} any more", killed.addr)), "{causes}");
    assert_pages(&decode, SALT, (0..4).map(|page| (page, page)));
    let again = decode.engine.grant(peer, GrantSpec::new(ROOM));
    assert_eq!(again.unwrap_err(), GrantError::NoPeer(peer));
    // A decode node is killed: it does not come back.
    let prefill = Node::start(config(IoMode::Auto).listen(local()), layout(64));
    let mut killed = Process::start();
    killed.tell(&format!("connect {}", prefill.engine.listen_addr().unwrap()));
    killed.hear("connected");
    killed.tell("grant 7");
    let sending = prefill.engine.open(ROOM, OpenOptions::default()).unwrap();
    wait(sending.granted()).unwrap();
    wait(sending.write(Chunk::new(KV, [0, 1], 0..2))).unwrap();
    until("the pages have landed", || sending.report().landed.page_writes == 2 * WRITES);
    let start = Instant::now();
    killed.kill();
    let failure = wait(sending.done()).unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(1) * SLACK, "after {:?}", start.elapsed());
    assert_eq!((failure.kind, failure.seen_by), (kind, Role::Sender));
    assert_eq!((failure.peer, failure.landed.bytes), (Some(killed.id), 2 * PAGE_BYTES));
    assert!(failure.causes.join(": ").contains("did not come back within 500 ms"), "{failure}");
    wait(sending.released());
    // Both live, and the path between them is cut for good: each can only speak for itself.
    let link = Link::new();
    let (sending, receiving) = link.room(ROOM);
    land((&sending, &receiving), 0..1);
    link.proxy.refuse(true);
    link.proxy.cut_everything();
    let says = |by| Says { kind, by, cause: "did not come back within 500 ms", pages: 1 };
    link.known.assert_says(&wait(sending.done()).unwrap_err(), says(Role::Sender));
    link.known.assert_says(&wait(receiving.done()).unwrap_err(), says(Role::Receiver));
    // The path is there again, and with it the same two peers.
    link.proxy.refuse(false);
    link.meet_again();
    let carried = link.carry();
    a_peer_of_another_release_did_not_come_back();
    Some(carried)
}

/// In the middle of a rollout another release answers at the peer's address.
fn a_peer_of_another_release_did_not_come_back() {
    let link = Link::new();
    let (sending, receiving) = link.room(ROOM);
    let newer = TcpListener::bind(local()).unwrap();
    link.proxy.lead_to(newer.local_addr().unwrap());
    std::thread::spawn(move || {
        for mut stream in newer.incoming().flatten() {
            let mut preamble = [0; 7];
            if stream.read_exact(&mut preamble).is_ok() {
                preamble[5..].copy_from_slice(&9999u16.to_le_bytes());
                let _ = stream.write_all(&preamble);
            }
        }
    });
    link.proxy.cut_everything();
    for failure in [wait(sending.done()).unwrap_err(), wait(receiving.done()).unwrap_err()] {
        assert_eq!(failure.kind, FailureKind::PeerDied, "{failure}");
        assert!(failure.causes.join(": ").contains("did not come back within"), "{failure}");
    }
    let other = Node::start(config(IoMode::Auto), layout(8));
    let error = wait(other.engine.connect(link.proxy.addr())).unwrap_err();
    assert!(error.to_string().contains("protocol version 9999 there"), "{error}");
}

pub fn a_peer_restarted_at_its_address_is_known_as_another_and_the_request_goes_to_that(
    kind: FailureKind,
) -> Option<Carried> {
    let patient = || config(IoMode::Auto).reconnect_grace_ms(30_000u64);
    // A prefill node behind a stable address, as a Service has it, is replaced.
    let (mut old, mut new) = (Process::start(), Process::start());
    let proxy = Tamper::to(old.addr);
    let decode = Node::start(patient(), layout(64));
    let peer = wait(decode.engine.connect(proxy.addr())).unwrap();
    let spec = || GrantSpec::new(ROOM).pages(KV, [0, 1, 2, 3]);
    let receiving = decode.engine.grant(peer, spec()).unwrap();
    old.tell("open 7");
    old.tell("write 7");
    old.hear("wrote 7");
    proxy.lead_to(new.addr);
    old.kill();
    let failure = wait(receiving.done()).unwrap_err();
    assert_eq!((failure.kind, failure.seen_by), (kind, Role::Receiver));
    assert_eq!((failure.peer, failure.landed.bytes), (Some(old.id), 4 * PAGE_BYTES));
    assert_eq!(failure.peer_addr, Some(proxy.addr().to_string()));
    assert_eq!(failure.causes[0], format!("incarnation {} answers at its address", new.id));
    assert_eq!(wait(decode.engine.connect(proxy.addr())).unwrap(), new.id);
    wait(receiving.released());
    decode.fill(0..64, 0);
    new.tell("open 7");
    let receiving = decode.engine.grant(new.id, spec()).unwrap();
    new.tell("write 7");
    new.hear("wrote 7");
    new.tell("finish 7");
    wait(receiving.done()).unwrap();
    new.hear("end 7 done");
    assert_pages(&decode, SALT, (0..4).map(|page| (page, page)));
    // A decode node is restarted at its own address, and dials in again.
    let prefill = Node::start(patient().listen(local()), layout(64));
    prefill.paint(SALT);
    let addr = prefill.engine.listen_addr().unwrap();
    let mut old = Process::start();
    old.tell(&format!("connect {addr}"));
    old.hear("connected");
    old.tell("grant 7");
    let sending = prefill.engine.open(ROOM, OpenOptions::default()).unwrap();
    wait(sending.granted()).unwrap();
    old.kill();
    let mut new = Process::start_at(old.addr);
    new.tell(&format!("connect {addr}"));
    new.hear("connected");
    let failure = wait(sending.done()).unwrap_err();
    assert_eq!((failure.kind, failure.seen_by), (kind, Role::Sender));
    assert_eq!((failure.peer, failure.landed.bytes), (Some(old.id), 0));
    assert_eq!(failure.causes[0], format!("incarnation {} answers at its address", new.id));
    Some(send_to(&prefill, &mut new))
}

/// Sends [`ROOM`] to a process, which checks what has landed.
fn send_to(prefill: &Node, process: &mut Process) -> Carried {
    process.tell("wipe");
    let sending = prefill.engine.open(ROOM, OpenOptions::default()).unwrap();
    process.tell("grant 7");
    wait(sending.write(Chunk::new(KV, [0, 1, 2, 3], 0..4))).unwrap();
    sending.finish(bytes::Bytes::new()).unwrap();
    process.hear("end 7 done");
    process.tell("check");
    process.hear("checked");
    wait(sending.done()).unwrap();
    Carried
}

pub fn a_stopped_peer_is_silent_and_hears_the_same_words_when_it_goes_on(
    kind: FailureKind,
) -> Option<Carried> {
    let silent_ms = 1000;
    let listening = config(IoMode::Auto).peer_silent_ms(silent_ms).listen(local());
    let prefill = Node::start(listening, layout(64));
    prefill.paint(SALT);
    let mut stopped = Process::start();
    stopped.tell(&format!("connect {}", prefill.engine.listen_addr().unwrap()));
    stopped.hear("connected");
    stopped.tell("grant 7");
    let sending = prefill.engine.open(ROOM, OpenOptions::default()).unwrap();
    wait(sending.write(Chunk::new(KV, [0], 0..1))).unwrap();
    until("the page has landed", || sending.report().landed.page_writes == WRITES);
    let at = prefill.engine.peers()[0].addr;
    stopped.stop();
    let start = Instant::now();
    let failure = wait(sending.done()).unwrap_err();
    let longest = Duration::from_millis(silent_ms) * SLACK;
    assert!(start.elapsed() < longest, "it took {:?}", start.elapsed());
    assert_eq!((failure.kind, failure.seen_by), (kind, Role::Sender));
    assert_eq!((failure.peer, failure.landed.bytes), (Some(stopped.id), PAGE_BYTES));
    assert_eq!(failure.causes, [format!("nothing was heard of {at} for {silent_ms} ms")]);
    let health = &prefill.engine.peers()[0].health;
    let silent = matches!(health, PeerHealth::Gone { kind: FailureKind::PeerSilent, .. });
    assert!(silent, "{health:?}");
    // Source pages are not held by a peer that is stopped.
    wait(sending.released());
    stopped.go_on();
    assert_eq!(stopped.hear("end 7"), failure.to_string());
    Some(send_to(&prefill, &mut stopped))
}

/// Cuts the session, ends [`ROOM`] on the decode side meanwhile, and lets so many other rooms end
/// there that its end is remembered no more.
fn forgotten() -> (Link, kvferry::SendRoom, kvferry::RecvRoom) {
    let link = Link::with(|config| config.reconnect_grace_ms(60_000u64));
    let busy = Node::start(config(IoMode::Auto).listen(local()), layout(8));
    let elsewhere = wait(link.decode.engine.connect(busy.engine.listen_addr().unwrap())).unwrap();
    let (sending, receiving) = link.room(ROOM);
    land((&sending, &receiving), 0..1);
    link.proxy.refuse(true);
    link.proxy.cut_control();
    until("the session is lost", || {
        let health = |peer: &kvferry::PeerInfo| peer.health == PeerHealth::Reconnecting;
        link.decode.engine.peers().iter().any(health)
    });
    receiving.abort("the client hung up");
    wait(receiving.done()).unwrap_err();
    // As many ends as an engine remembers.
    for batch in 0..16u64 {
        let grant = |room| {
            let spec = GrantSpec::new(RoomId(1000 + batch * 1024 + room));
            link.decode.engine.grant(elsewhere, spec).unwrap()
        };
        let rooms: Vec<_> = (0..1024).map(grant).collect();
        rooms.iter().for_each(|room| room.abort("to be remembered"));
        rooms.iter().for_each(|room| drop(wait(room.done()).unwrap_err()));
    }
    (link, sending, receiving)
}

fn hung_up(link: &Link, receiving: &kvferry::RecvRoom) {
    let says = Says {
        kind: FailureKind::Aborted,
        by: Role::Receiver,
        cause: "aborted by the decode side: the client hung up",
        pages: 1,
    };
    link.known.assert_says(&wait(receiving.done()).unwrap_err(), says);
}

pub fn a_room_that_ended_while_its_session_was_lost_and_is_remembered_no_more_was_forgotten(
    kind: FailureKind,
) -> Option<Carried> {
    let (link, sending, receiving) = forgotten();
    link.proxy.refuse(false);
    let says = Says {
        kind,
        by: Role::Sender,
        cause: "the receiver did not renew the grant after reconnecting",
        pages: 1,
    };
    link.known.assert_says(&wait(sending.done()).unwrap_err(), says);
    hung_up(&link, &receiving);
    Some(link.carry())
}

pub fn an_id_that_is_granted_again_while_the_sender_has_its_earlier_epoch_is_busy(
    kind: FailureKind,
) -> Option<Carried> {
    let (link, sending, receiving) = forgotten();
    let again = link.grant(GrantSpec::new(ROOM).pages(KV, [8]));
    link.proxy.refuse(false);
    let busy = wait(again.done()).unwrap_err();
    let reporter = link.prefill.engine.incarnation();
    assert_eq!((busy.kind, busy.seen_by, busy.reporter), (kind, Role::Sender, reporter), "{busy}");
    assert_eq!(busy.causes, ["an earlier epoch of this room id is still live on the sender"]);
    let there = &link.prefill.engine.peers()[0];
    assert_eq!(
        (busy.peer, busy.peer_addr),
        (Some(there.incarnation), Some(there.addr.to_string()))
    );
    assert_eq!((busy.room, busy.landed.bytes), (ROOM, 0));
    assert!(busy.epoch > receiving.failure().unwrap().epoch);
    hung_up(&link, &receiving);
    assert_eq!(wait(sending.done()).unwrap_err().kind, FailureKind::PeerForgot);
    Some(link.carry())
}
