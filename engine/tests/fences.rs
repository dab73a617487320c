//! Release means quiet: what is rewritten or handed out again at that very moment is never touched.
#![allow(missing_docs, reason = "tests document themselves by name")]

mod common;

use std::time::{Duration, Instant};

use common::child::{self, Decode};
use common::proxy::{Kind, Proxy};
use common::{KV, Node, layout, local, painted, wait};
use kvferry::{
    Chunk, EngineConfig, FailureKind, GrantSpec, Incarnation, IoMode, OpenOptions, RoomHandle,
    SendRoom, ZeroCopy,
};
use rustix::process::Signal;

/// Pages of each pool: with 6 KiB a page (three layers of K and V), far more than sockets buffer.
const PAGES: u32 = 8192;
/// Pages of a large room.
const ROOM: u32 = 4000;
/// What source pages are rewritten with; no painted byte is even.
const POISON: u8 = 0xfe;
const FENCE_AFTER: Duration = Duration::from_millis(500);
/// What the release may take beyond the fence.
const RELEASE: Duration = Duration::from_millis(200);
/// Promised deadlines are asserted with this much slack on real processes.
const SLACK: u32 = 5;

/// Every way in which lanes are driven.
fn each_io(test: impl Fn(EngineConfig)) {
    test(child::settings(IoMode::Auto));
    test(child::settings(IoMode::Epoll));
    test(child::settings(IoMode::Auto).zero_copy(ZeroCopy::Try));
}

fn open(node: &Node, room: u64) -> SendRoom {
    let sending = node.engine.open(room.into(), OpenOptions::default()).unwrap();
    wait(sending.granted()).unwrap();
    sending
}

fn poison(node: &Node, pages: std::ops::Range<u32>) {
    node.fill(pages, POISON);
}

/// Waits until a room is released, and says how long it took.
fn released(room: &SendRoom) -> Duration {
    let start = Instant::now();
    wait(room.released());
    start.elapsed()
}

fn write(room: &SendRoom, pages: std::ops::Range<u32>) {
    let count = pages.len() as u32;
    wait(room.write(Chunk::new(KV, pages.collect::<Vec<u32>>(), 0..count))).unwrap();
}

#[test]
fn decode_process() {
    child::decode_main(PAGES);
}

#[test]
fn sources_rewritten_at_their_release_never_reach_a_receiver_that_was_stopped() {
    each_io(|config| {
        let prefill = Node::start(config.listen(local()), layout(PAGES));
        prefill.paint(3);
        let mut decode = Decode::start("decode_process", prefill.engine.listen_addr().unwrap());
        decode.grant(1, 0, ROOM);
        decode.grant(2, ROOM, 100);
        let (doomed, neighbour) = (open(&prefill, 1), open(&prefill, 2));
        decode.signal(Signal::STOP);
        write(&doomed, 0..ROOM);
        write(&neighbour, ROOM..ROOM + 100);
        neighbour.finish(bytes::Bytes::new()).unwrap();
        // Until the sockets are full, and the rest waits.
        std::thread::sleep(Duration::from_millis(50));
        doomed.abort("the client hung up");
        let took = released(&doomed);
        poison(&prefill, 0..ROOM);
        assert!(took < (FENCE_AFTER + RELEASE) * SLACK, "release took {took:?}");
        decode.signal(Signal::CONT);
        assert_eq!(decode.hear("end 1 "), "aborted");
        decode.hear("released 1");
        wait(neighbour.done()).unwrap();
        assert_eq!(decode.hear("end 2 "), "done");
        assert_eq!(decode.pages_with(POISON), 0, "rewritten bytes landed");
    });
}

#[test]
fn sources_of_a_killed_receiver_are_released_and_its_rooms_failed() {
    each_io(|config| {
        let prefill = Node::start(config.listen(local()), layout(PAGES));
        let mut decode = Decode::start("decode_process", prefill.engine.listen_addr().unwrap());
        decode.grant(1, 0, ROOM);
        let doomed = open(&prefill, 1);
        decode.signal(Signal::STOP);
        write(&doomed, 0..ROOM);
        decode.signal(Signal::KILL);
        assert_eq!(wait(doomed.done()).unwrap_err().kind, FailureKind::PeerDied);
        released(&doomed);
    });
}

/// Two engines of this process with a proxy between them.
struct Bridged {
    prefill: Node,
    decode: Node,
    proxy: Proxy,
    peer: Incarnation,
}

fn bridged(config: EngineConfig) -> Bridged {
    let prefill = Node::start(config.clone().listen(local()), layout(PAGES));
    let decode = Node::start(config, layout(PAGES));
    let proxy = Proxy::to(prefill.engine.listen_addr().unwrap());
    let peer = wait(decode.engine.connect(proxy.addr())).unwrap();
    prefill.paint(5);
    Bridged { prefill, decode, proxy, peer }
}

impl Bridged {
    fn grant(&self, room: u64, pages: std::ops::Range<u32>) -> kvferry::RecvRoom {
        let spec = GrantSpec::new(room.into()).pages(KV, pages.collect::<Vec<u32>>());
        self.decode.engine.grant(self.peer, spec).unwrap()
    }

    /// Page `dst + i` must be the sender's painted page `src + i`.
    fn assert_landed(&self, salt: u8, src: u32, dst: u32, count: u32) {
        for i in 0..count {
            for layer in 0..3 {
                let want = painted(layer, 1, src + i, salt, 1024);
                assert!(self.decode.page(layer, 1, dst + i) == want, "page {} differs", dst + i);
            }
        }
    }
}

#[test]
fn sources_rewritten_at_their_release_never_arrive_when_stalled_lanes_go_on() {
    each_io(|config| {
        let link = bridged(config);
        let (doomed_there, other_there) = (link.grant(1, 0..ROOM), link.grant(2, ROOM..ROOM + 64));
        let (doomed, other) = (open(&link.prefill, 1), open(&link.prefill, 2));
        link.proxy.stall_only(Kind::Lane);
        write(&doomed, 0..ROOM);
        write(&other, ROOM..ROOM + 64);
        std::thread::sleep(Duration::from_millis(50));
        doomed.abort("the client hung up");
        let took = released(&doomed);
        poison(&link.prefill, 0..ROOM);
        assert!(took < (FENCE_AFTER + RELEASE) * SLACK, "release took {took:?}");
        assert_eq!(wait(doomed_there.done()).unwrap_err().kind, FailureKind::Aborted);
        wait(doomed_there.released());
        link.decode.fill(0..ROOM, 0xaa);
        link.proxy.resume();
        other.finish(bytes::Bytes::new()).unwrap();
        wait(other.done()).unwrap();
        wait(other_there.done()).unwrap();
        link.assert_landed(5, ROOM, ROOM, 64);
        for page in 0..ROOM {
            assert!(link.decode.page(0, 0, page).iter().all(|&byte| byte == 0xaa), "page {page}");
        }
    });
}

#[test]
fn sources_rewritten_at_their_release_never_land_though_the_receiver_has_not_heard_of_the_end() {
    each_io(|config| {
        let link = bridged(config);
        let doomed_there = link.grant(1, 0..ROOM);
        let doomed = open(&link.prefill, 1);
        link.proxy.stall();
        write(&doomed, 0..ROOM);
        std::thread::sleep(Duration::from_millis(50));
        doomed.abort("the client hung up");
        let took = released(&doomed);
        poison(&link.prefill, 0..ROOM);
        assert!(took < (FENCE_AFTER + RELEASE) * SLACK, "release took {took:?}");
        // Whatever is still on the lanes lands in pages that are granted as far as this side knows.
        link.proxy.resume_only(Kind::Lane);
        let landed = || doomed_there.report().landed;
        let (mut before, mut quiet_since) = (landed(), Instant::now());
        while quiet_since.elapsed() < Duration::from_millis(200) {
            if landed() != before {
                (before, quiet_since) = (landed(), Instant::now());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        for page in 0..ROOM {
            assert!(!link.decode.page(0, 0, page).contains(&POISON), "page {page} was rewritten");
        }
        link.proxy.resume();
        assert_eq!(wait(doomed_there.done()).unwrap_err().kind, FailureKind::Aborted);
    });
}

#[test]
fn pages_handed_out_again_at_their_release_hold_only_the_next_rooms_bytes() {
    each_io(|config| {
        let link = bridged(config.clone());
        // A second sender whose lanes do not stall.
        let second = Node::start(config.listen(local()), layout(PAGES));
        second.paint(9);
        let other = wait(link.decode.engine.connect(second.engine.listen_addr().unwrap())).unwrap();
        let doomed_there = link.grant(1, 0..ROOM);
        let doomed = open(&link.prefill, 1);
        write(&doomed, 0..ROOM / 2);
        link.proxy.stall_only(Kind::Lane);
        write(&doomed, 0..ROOM);
        doomed_there.abort("the pages are needed");
        wait(doomed_there.released());
        let spec = GrantSpec::new(1.into()).pages(KV, (0..ROOM).collect::<Vec<u32>>());
        let again_there = link.decode.engine.grant(other, spec).unwrap();
        let again = open(&second, 1);
        write(&again, 0..ROOM);
        again.finish(bytes::Bytes::new()).unwrap();
        wait(again_there.done()).unwrap();
        link.proxy.resume();
        assert_eq!(wait(doomed.done()).unwrap_err().kind, FailureKind::Aborted);
        wait(doomed.released());
        // What was held back has been through the lanes when this room is done.
        let last_there = link.grant(3, ROOM..ROOM + 1);
        let last = open(&link.prefill, 3);
        write(&last, 0..1);
        last.finish(bytes::Bytes::new()).unwrap();
        wait(last_there.done()).unwrap();
        link.assert_landed(9, 0, 0, ROOM);
    });
}

#[test]
fn rooms_outlive_lanes_that_are_cut_under_them_again_and_again() {
    each_io(|config| {
        let link = bridged(config.lanes(4u16));
        let rooms: Vec<_> = (0..8u32)
            .map(|room| {
                let there = link.grant(room.into(), room * 1000..room * 1000 + 1000);
                (open(&link.prefill, room.into()), there)
            })
            .collect();
        for (room, (sending, _)) in (0..).zip(&rooms) {
            link.proxy.cut_one(Kind::Lane);
            write(sending, room * 1000..room * 1000 + 1000);
            if room % 3 == 1 {
                link.proxy.cut(Kind::Control);
            }
            if room % 4 == 2 {
                link.proxy.cut(Kind::Lane);
            }
            sending.finish(bytes::Bytes::new()).unwrap();
        }
        for (sending, receiving) in &rooms {
            let sent = wait(sending.done()).unwrap();
            let received = wait(receiving.done()).unwrap();
            assert_eq!((sent.landed.page_writes, received.report.landed.page_writes), (6000, 6000));
        }
        link.assert_landed(5, 0, 0, 8000);
    });
}

#[test]
fn one_room_whose_grant_is_revoked_under_its_senders_feet_fails_alone_among_32() {
    each_io(|config| {
        let link = bridged(config);
        let rooms: Vec<_> = (0..33u32)
            .map(|room| {
                let there = link.grant(room.into(), room * 200..room * 200 + 200);
                (open(&link.prefill, room.into()), there)
            })
            .collect();
        const BAD: usize = 16;
        link.proxy.stall_only(Kind::Lane);
        for (room, (sending, _)) in (0..).zip(&rooms) {
            write(sending, room * 200..room * 200 + 200);
            sending.finish(bytes::Bytes::new()).unwrap();
        }
        rooms[BAD].1.abort("the pages are needed");
        wait(rooms[BAD].1.released());
        link.decode.fill(BAD as u32 * 200..BAD as u32 * 200 + 200, 0xaa);
        link.proxy.resume();
        for (room, (sending, receiving)) in (0u32..).zip(&rooms) {
            let (ours, theirs) = (wait(sending.done()), wait(receiving.done()));
            if room as usize == BAD {
                let (ours, theirs) = (ours.unwrap_err(), theirs.unwrap_err());
                assert_eq!(ours.kind, FailureKind::Aborted);
                assert_eq!(ours.to_string(), theirs.to_string());
                continue;
            }
            ours.unwrap();
            theirs.unwrap();
            link.assert_landed(5, room * 200, room * 200, 200);
        }
        let page = link.decode.page(0, 0, BAD as u32 * 200 + 7);
        assert!(page.iter().all(|&byte| byte == 0xaa), "bytes landed after the release");
    });
}

#[test]
fn one_room_whose_checksum_is_wrong_fails_alone_among_32_and_says_both_values() {
    let link = bridged(child::settings(IoMode::Auto));
    let grant = |room: u32| {
        let pages: Vec<u32> = (room * 200..room * 200 + 200).collect();
        let spec = GrantSpec::new(u64::from(room).into()).pages(KV, pages).checksum(true);
        link.decode.engine.grant(link.peer, spec).unwrap()
    };
    let rooms: Vec<_> =
        (0..33u32).map(|room| (grant(room), open(&link.prefill, room.into()))).collect();
    const BAD: u32 = 20;
    for (room, (_, sending)) in (0..).zip(&rooms) {
        write(sending, room * 200..room * 200 + 200);
    }
    let deadline = Instant::now() + common::PATIENCE;
    while rooms[BAD as usize].0.report().landed.page_writes < 1200 {
        assert!(Instant::now() < deadline, "the pages do not land");
        std::thread::yield_now();
    }
    // Somebody writes a granted page before the room is done.
    link.decode.fill(BAD * 200 + 150..BAD * 200 + 151, POISON);
    for (room, (receiving, sending)) in (0u32..).zip(&rooms) {
        sending.finish(bytes::Bytes::new()).unwrap();
        let (ours, theirs) = (wait(sending.done()), wait(receiving.done()));
        if room != BAD {
            assert!(ours.is_ok() && theirs.is_ok(), "room {room}: {ours:?} {theirs:?}");
            continue;
        }
        let (ours, theirs) = (ours.unwrap_err(), theirs.unwrap_err());
        assert_eq!(ours.kind, FailureKind::ChecksumMismatch);
        assert_eq!(ours.to_string(), theirs.to_string());
        let values = ours.causes[0].split(' ').filter(|word| word.trim_matches(',').len() == 16);
        assert_eq!(values.count(), 2, "{}", ours.causes[0]);
    }
}
