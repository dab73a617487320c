//! Failures that come on the way: words that are lost, lanes that go down, frames and pages that change.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvferry::{Chunk, FailureKind, GrantSpec, IoMode, PoolLayout, Role, RoomHandle};

use crate::common::{KV, Node, config, local, wait};
use crate::link::{Carried, Link, ROOM, Says, assert_pages, land, until};
use crate::tamper::{self, Do, Gate, To, at, is_data, put, rewrite};

/// Writes pages 0 to 3 and finishes.
fn send(sending: &kvferry::SendRoom) {
    wait(sending.write(Chunk::new(KV, [0, 1, 2, 3], 0..4))).unwrap();
    // The room may have failed by now.
    let _ = sending.finish(bytes::Bytes::new());
}

pub fn a_verdict_that_is_lost_on_the_way_is_unknown_to_the_sender_and_stands_at_the_receiver(
    kind: FailureKind,
) -> Option<Carried> {
    let link = Link::with(|config| config.peer_silent_ms(1000u64));
    let says = |pages, cause| Says { kind, by: Role::Sender, cause, pages };
    // The receiver's word is lost; what the sender gave up was done.
    link.proxy.messages(|_, body| match body[0] {
        tamper::LANDED => Do::Drop,
        _ => Do::Forward,
    });
    let (sending, receiving) = link.room(ROOM);
    send(&sending);
    let received = wait(receiving.done()).unwrap();
    until("all is acknowledged", || sending.report().landed == received.report.landed);
    sending.abort("no answer for a while");
    let unknown = wait(sending.done()).unwrap_err();
    let cause = "everything was sent and the receiver did not answer: aborted: aborted by the \
                 prefill side: no answer for a while";
    link.known.assert_says(&unknown, says(4, cause));
    link.proxy.be_honest();
    link.carry();
    assert_eq!(sending.failure(), Some(&unknown));
    // The peer goes silent between the last write and the answer: neither can hear the other.
    let (sending, receiving) = link.room(ROOM);
    land((&sending, &receiving), 0..4);
    let gate = Gate::closed();
    let (held, lanes_held) = (gate.clone(), gate.clone());
    link.proxy.messages(move |_, _| {
        held.pass();
        Do::Forward
    });
    link.proxy.frames(move |_, _| {
        lanes_held.pass();
        Do::Forward
    });
    link.proxy.refuse(true);
    sending.finish(bytes::Bytes::new()).unwrap();
    let silent = "nothing was heard of";
    let ours = wait(sending.done()).unwrap_err();
    link.known.assert_says(&ours, says(4, "the receiver did not answer: peer-silent: nothing was"));
    let theirs = wait(receiving.done()).unwrap_err();
    let seen = Says { kind: FailureKind::PeerSilent, by: Role::Receiver, cause: silent, pages: 4 };
    link.known.assert_says(&theirs, seen);
    gate.open();
    link.proxy.be_honest();
    link.proxy.refuse(false);
    link.meet_again();
    Some(link.carry())
}

pub fn a_write_under_a_grant_that_was_revoked_is_refused_and_its_reason_may_come_late(
    kind: FailureKind,
) -> Option<Carried> {
    let link = Link::new();
    let (sending, receiving) = link.room(ROOM);
    let gate = Gate::closed();
    let held = gate.clone();
    link.proxy.messages(move |to, body| {
        if to == To::Listener && body[0] == tamper::FAILED {
            held.pass();
        }
        Do::Forward
    });
    receiving.abort("the client hung up");
    let theirs = wait(receiving.done()).unwrap_err();
    wait(sending.write(Chunk::new(KV, [0], 0..1))).unwrap();
    let ours = wait(sending.done()).unwrap_err();
    let says = Says {
        kind,
        by: Role::Sender,
        cause: "the receiver refused a write: the grant is revoked",
        pages: 0,
    };
    link.known.assert_says(&ours, says);
    assert!(ours.lane.is_some_and(|lane| ours.to_string().contains(&format!(", lane {lane},"))));
    let says = Says {
        kind: FailureKind::Aborted,
        by: Role::Receiver,
        cause: "aborted by the decode side: the client hung up",
        pages: 0,
    };
    link.known.assert_says(&theirs, says);
    gate.open();
    let carried = link.carry();
    assert_eq!((sending.failure(), receiving.failure()), (Some(&ours), Some(&theirs)));
    assert_pages_empty(&link.decode, 0..4);
    Some(carried)
}

fn assert_pages_empty(node: &Node, pages: std::ops::Range<u32>) {
    for page in pages {
        assert_eq!(node.page(0, 0, page), vec![0; 1024], "page {page} was written");
    }
}

pub fn a_frame_that_names_what_was_not_granted_fails_its_room_and_nothing_of_it_is_placed(
    kind: FailureKind,
) -> Option<Carried> {
    type Change = fn(&mut tamper::Header);
    let changes: [(&str, Change); 5] = [
        ("a frame names a pool that was not granted", |header| put(header, at::POOL, &[1])),
        ("a frame names layers that the two sides do not share", |header| {
            put(header, at::LAYER, &[2]);
        }),
        ("a frame names positions behind the granted ones", |header| {
            put(header, at::POSITION, &[1]);
        }),
        ("a frame names page writes that its chunk does not have", |header| {
            put(header, at::PIECES, &[25]);
        }),
        ("a frame's payload is not as long as its page writes", |header| {
            put(header, at::PAYLOAD_BYTES, &1024u32.to_le_bytes());
        }),
    ];
    let link = Link::new();
    link.prefill.paint(1);
    for (cause, change) in changes {
        let (sending, receiving) = link.room(ROOM);
        let (other, neighbour) = link.room_of(GrantSpec::new(8.into()).pages(KV, [9]));
        link.proxy.frames(move |_, header| {
            if is_data(header) {
                change(header);
            }
            Do::Forward
        });
        send(&sending);
        let says = Says { kind, by: Role::Receiver, cause, pages: 0 };
        link.known.assert_both_say((&sending, &receiving), says);
        wait(receiving.released());
        link.proxy.be_honest();
        assert_pages_empty(&link.decode, 0..4);
        land((&other, &neighbour), 0..1);
        other.finish(bytes::Bytes::new()).unwrap();
        wait(neighbour.done()).unwrap();
        wait(other.done()).unwrap();
        link.carry();
        link.prefill.paint(1);
    }
    Some(Carried)
}

pub fn a_room_whose_counts_do_not_agree_fails_whatever_has_landed(
    kind: FailureKind,
) -> Option<Carried> {
    let link = Link::new();
    link.proxy.messages(|_, body| {
        if body[0] == tamper::FINISHED {
            rewrite(body, |(_, _, _, page_writes, bytes): &mut (u8, u64, u64, u64, u64)| {
                (*page_writes, *bytes) = (*page_writes - 6, *bytes - 6 * 1024);
            });
        }
        Do::Forward
    });
    let (sending, receiving) = link.room(ROOM);
    send(&sending);
    let says = Says {
        kind,
        by: Role::Receiver,
        cause: "24 page writes and 24576 bytes arrived, other numbers were sent",
        pages: 4,
    };
    link.known.assert_both_say((&sending, &receiving), says);
    link.proxy.be_honest();
    Some(link.carry())
}

pub fn a_source_page_that_changes_under_its_transfer_and_a_bit_that_turns_on_the_way_are_found(
    kind: FailureKind,
) -> Option<Carried> {
    // One page is one frame, and larger than what the sockets on the way can hold: when it is posted
    // its end has not left.
    const BYTES: u32 = 48 << 20;
    let large = PoolLayout::opaque("kv", 0..1, 2, BYTES);
    let start = |config| Node::start(config, large.clone());
    let link =
        Link::between(start(config(IoMode::Auto).listen(local())), start(config(IoMode::Auto)));
    let spec = || GrantSpec::new(ROOM).pages(KV, [1]).checksum(true);
    let gate = Gate::closed();
    let held = gate.clone();
    link.proxy.frames(move |_, header| {
        if is_data(header) {
            held.pass();
        }
        Do::Forward
    });
    let (sending, receiving) = link.room_of(spec());
    wait(sending.write(Chunk::new(KV, [0], 0..1))).unwrap();
    sending.finish(bytes::Bytes::new()).unwrap();
    until("the page is posted", || sending.report().chunks == 1);
    let (region, at) = link.prefill.pool.locate(0, 0, 0).unwrap();
    region.write_at(at + BYTES as usize - 1, &[9]).unwrap();
    gate.open();
    let assert_found = |sending: &kvferry::SendRoom, receiving: &kvferry::RecvRoom| {
        let ours = wait(sending.done()).unwrap_err();
        assert_eq!(ours.to_string(), wait(receiving.done()).unwrap_err().to_string());
        assert_eq!((ours.kind, ours.seen_by), (kind, Role::Receiver));
        assert_eq!((ours.landed.page_writes, ours.landed.bytes), (1, u64::from(BYTES)));
        assert!(ours.causes[0].contains("the bytes sent have XXH3 "), "{ours}");
        assert!(ours.causes[0].contains(", those that landed "), "{ours}");
    };
    assert_found(&sending, &receiving);
    wait(receiving.released());
    // What TCP's checksum does not find: a bit turned over by something between the hosts.
    link.proxy.frames(|_, header| if is_data(header) { Do::Spoil } else { Do::Forward });
    let again = |chunk| {
        let (sending, receiving) = link.room_of(spec());
        wait(sending.write(chunk)).unwrap();
        sending.finish(bytes::Bytes::new()).unwrap();
        (sending, receiving)
    };
    let (sending, receiving) = again(Chunk::new(KV, [0], 0..1));
    assert_found(&sending, &receiving);
    wait(receiving.released());
    link.proxy.be_honest();
    let (_sending, receiving) = again(Chunk::new(KV, [0], 0..1));
    wait(receiving.done()).unwrap();
    let (mut source, mut target) = (vec![0; BYTES as usize], vec![0; BYTES as usize]);
    region.read_at(at, &mut source).unwrap();
    let (region, at) = link.decode.pool.locate(0, 0, 1).unwrap();
    region.read_at(at, &mut target).unwrap();
    assert!(source == target && source[BYTES as usize - 1] == 9, "other bytes have landed");
    Some(Carried)
}

pub fn a_room_that_loses_lane_after_lane_or_whose_writes_nobody_remembers_fails_with_that(
    kind: FailureKind,
) -> Option<Carried> {
    let says = |cause| Says { kind, by: Role::Sender, cause, pages: 0 };
    let link = Link::with(|config| config.lanes(24u16));
    until("all lanes stand", || link.prefill.engine.peers()[0].lanes.len() == 24);
    let cut_data = |_: To, header: &mut tamper::Header| match is_data(header) {
        true => Do::Cut,
        false => Do::Forward,
    };
    link.proxy.frames(cut_data);
    let pages: Vec<u32> = (0..32).collect();
    let (sending, receiving) = link.room_of(GrantSpec::new(ROOM).pages(KV, pages));
    // A frame each, and each on the lane that has the least before it.
    for page in 0..32 {
        wait(sending.write(Chunk::new(KV, [page], page..page + 1))).unwrap();
    }
    let cause = "a write was sent again 16 times, and its lane went down each time";
    let failure = link.known.assert_both_say((&sending, &receiving), says(cause));
    assert!(failure.retries >= 16, "{failure}");
    link.proxy.be_honest();
    link.carry();
    // One lane, and a peer that does not remember how far it counted.
    let link = Link::new();
    link.proxy.frames(cut_data);
    link.proxy.messages(|to, body| {
        if to == To::Listener && body[0] == tamper::LANE_TALLY {
            // Its last field is an option.
            let ((number, lane), _) = postcard::take_from_bytes::<(u8, u64)>(body).unwrap();
            *body = postcard::to_stdvec(&(number, lane, None::<u8>)).unwrap();
        }
        Do::Forward
    });
    let (sending, receiving) = link.room(ROOM);
    wait(sending.write(Chunk::new(KV, [0], 0..1))).unwrap();
    let cause = "the peer does not know which of them it placed";
    link.known.assert_both_say((&sending, &receiving), says(cause));
    link.proxy.be_honest();
    Some(link.carry())
}

pub fn what_the_protocol_does_not_allow_fails_the_rooms_it_concerns_and_the_peers_go_on(
    kind: FailureKind,
) -> Option<Carried> {
    let says = |cause| Says { kind, by: Role::Sender, cause, pages: 0 };
    let link = Link::with(|config| config.reconnect_grace_ms(20_000u64));
    // A grant of pages that its pool does not have: only its room is concerned.
    link.proxy.messages(|_, body| {
        if body[0] == tamper::GRANT {
            type Grant = (u8, u64, u64, u32, u64, Vec<(u8, Vec<u32>)>);
            rewrite(body, |grant: &mut Grant| grant.5[0].1[0] = 64);
        }
        Do::Forward
    });
    let sending = link.open(ROOM);
    let receiving = link.grant(GrantSpec::new(ROOM).pages(KV, [0]));
    let theirs = wait(receiving.done()).unwrap_err();
    link.known.assert_says(&theirs, says("grant names page 64 of a pool of 64"));
    link.proxy.be_honest();
    link.carry_with(&sending);
    // A message that is none: the session ends with it, and every room that it had.
    let (sending, receiving) = link.room(ROOM);
    let spoiled = AtomicBool::new(false);
    link.proxy.messages(move |_, body| {
        if body[0] == tamper::GRANT && !spoiled.swap(true, Ordering::SeqCst) {
            body[0] = 100;
        }
        Do::Forward
    });
    let (other, survivor) = (link.open(8.into()), link.grant(GrantSpec::new(8.into())));
    link.known.assert_both_say((&sending, &receiving), says("malformed message"));
    // The room whose grant was spoiled was not known there yet: it is granted anew.
    other.finish("aux".into()).unwrap();
    wait(survivor.done()).unwrap();
    Some(link.carry())
}

#[test]
fn a_frame_that_is_no_frame_costs_its_lane_and_no_room() {
    let link = Link::new();
    link.prefill.paint(1);
    let (sending, receiving) = link.room(ROOM);
    let spoiled = Arc::new(AtomicBool::new(false));
    let once = Arc::clone(&spoiled);
    link.proxy.frames(move |_, header| {
        if is_data(header) && !once.swap(true, Ordering::SeqCst) {
            // Without its checksum put right.
            header[at::POSITION] ^= 1;
        }
        Do::Forward
    });
    send(&sending);
    let received = wait(receiving.done()).unwrap();
    assert_eq!(received.report.landed, wait(sending.done()).unwrap().landed);
    assert_pages(&link.decode, 1, (0..4).map(|page| (page, page)));
    assert!(spoiled.load(Ordering::SeqCst));
}
