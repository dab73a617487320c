//! Lanes between two fabrics on one thread, over both drivers, with a gate that does as it is told.

use std::collections::HashMap;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::driver::Driver;
use super::epoll::Epoll;
use super::*;
use crate::ids::Epoch;
use crate::memory::{AllocOptions, PageMap, PageSlice, Pool, PoolLayout};
use crate::plan::{Pieces, Runs, Strips};
use crate::wire::frame::{DataFrame, HEADER_BYTES, RejectReason};
use crate::worker::wake::Wakeup;

const PEER: PeerIndex = PeerIndex(0);
const PATIENCE: Duration = Duration::from_secs(20);

fn epoll() -> Epoll {
    Epoll::new(Arc::new(Wakeup::new().unwrap())).unwrap()
}

#[cfg(feature = "io-uring")]
fn uring() -> Option<uring::Uring> {
    match uring::Uring::new(Arc::new(Wakeup::new().unwrap())) {
        Ok((uring, _)) => Some(uring),
        Err(why) => {
            println!("SKIPPED over io_uring: {why}");
            None
        }
    }
}

/// Runs a test over every driver there is here.
macro_rules! each_driver {
    ($($(#[$doc:meta])* fn $name:ident($link:ident) $body:block)+) => {$(
        #[test]
        fn $name() {
            fn test<D: Driver>(mut $link: Bench<D>) $body
            test(Bench::new(epoll, ZeroCopy::Off));
            #[cfg(feature = "io-uring")]
            if uring().is_some() {
                test(Bench::new(|| uring().unwrap(), ZeroCopy::Off));
                test(Bench::new(|| uring().unwrap(), ZeroCopy::Try));
            }
        }
    )+};
}

struct Room {
    map: Arc<PageMap>,
    pages: Arc<[u32]>,
    slice: PageSlice,
}

#[derive(Default)]
struct TestGate {
    rooms: HashMap<u32, Room>,
    placed: Vec<DataFrame>,
}

impl Gate for TestGate {
    fn admit(&mut self, _: PeerIndex, frame: &DataFrame) -> Result<Strips, RejectReason> {
        let room = self.rooms.get(&frame.slot).ok_or(RejectReason::Revoked)?;
        let pieces = Pieces {
            layer: 0,
            planes: 1,
            count: frame.count,
            first: frame.first,
            len: frame.pieces,
        };
        Ok(Strips::new(
            Arc::clone(&room.map),
            Arc::clone(&room.pages),
            frame.at as usize,
            room.slice,
            pieces,
        ))
    }

    fn placed(&mut self, frame: &DataFrame) {
        self.placed.push(*frame);
    }
}

/// Two fabrics joined by one lane, and a pool on each side.
struct Bench<D: Driver> {
    tx: TcpFabric<D>,
    rx: TcpFabric<D>,
    gate: TestGate,
    sent: Vec<Event>,
    received: Vec<Event>,
}

const PAGES: u32 = 8;

fn pool(page_bytes: u32) -> Pool {
    Pool::allocate(
        PoolLayout::opaque("kv", 0..1, PAGES, page_bytes),
        AllocOptions { huge_pages: false },
    )
    .unwrap()
}

fn whole(page_bytes: u32) -> PageSlice {
    PageSlice { offset: 0, row_bytes: page_bytes.into(), stride: page_bytes.into(), rows: 1 }
}

fn tag(slot: u32) -> RoomTag {
    RoomTag { slot, generation: 0 }
}

fn fill(pool: &Pool, page: u32, byte: u8) {
    let (region, at) = pool.locate(0, 0, page).unwrap();
    region.write_at(at, &vec![byte; pool.layout().page_bytes() as usize]).unwrap();
}

fn content(pool: &Pool, page: u32) -> Vec<u8> {
    let (region, at) = pool.locate(0, 0, page).unwrap();
    let mut out = vec![0; pool.layout().page_bytes() as usize];
    region.read_at(at, &mut out).unwrap();
    out
}

fn lane(number: u16, stream: TcpStream) -> NewLane {
    let link = Link::Tcp { stream, leaves_host: false };
    NewLane { id: LaneId(number.into()), number, link, say: None }
}

fn socket_pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let dialed = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (accepted, _) = listener.accept().unwrap();
    dialed.set_nonblocking(true).unwrap();
    accepted.set_nonblocking(true).unwrap();
    (dialed, accepted)
}

impl<D: Driver> Bench<D> {
    fn new(driver: impl Fn() -> D, zero_copy: ZeroCopy) -> Self {
        let (tx_end, rx_end) = socket_pair();
        let mut tx = TcpFabric::new(driver(), zero_copy);
        let mut rx = TcpFabric::new(driver(), zero_copy);
        tx.add_lane(PEER, lane(1, tx_end));
        rx.add_lane(PEER, lane(2, rx_end));
        Self { tx, rx, gate: TestGate::default(), sent: Vec::new(), received: Vec::new() }
    }

    fn allow(&mut self, slot: u32, pool: &Pool, pages: &[u32]) {
        let slice = whole(pool.layout().page_bytes() as u32);
        self.gate
            .rooms
            .insert(slot, Room { map: Arc::clone(&pool.map), pages: pages.into(), slice });
    }

    /// Posts `pages` of a pool to the first positions of a room, in one frame.
    fn post(&mut self, slot: u32, pool: &Pool, pages: &[u32]) {
        let page_bytes = pool.layout().page_bytes() as u32;
        let count = pages.len() as u32;
        let pieces = Pieces { layer: 0, planes: 1, count, first: 0, len: count };
        let strips =
            || Strips::new(Arc::clone(&pool.map), pages.into(), 0, whole(page_bytes), pieces);
        let frame = DataFrame {
            seq: 0,
            slot,
            epoch: Epoch(1),
            pool: 0,
            layer: 0,
            layers: 1,
            at: 0,
            count,
            first: 0,
            pieces: count,
            payload_bytes: count * page_bytes,
        };
        self.tx.post(
            PEER,
            Posting {
                tag: tag(slot),
                again: false,
                tries: 0,
                frame,
                runs: Runs::new(strips(), strips()).unwrap(),
            },
        );
    }

    fn poll_tx(&mut self) {
        self.tx.poll(&mut TestGate::default(), &mut self.sent);
    }

    fn poll_rx(&mut self) {
        self.rx.poll(&mut self.gate, &mut self.received);
    }

    fn until(&mut self, what: &str, done: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !done(self) {
            self.poll_tx();
            self.poll_rx();
            assert!(
                Instant::now() < deadline,
                "waited too long for {what}: {:?} {:?}",
                self.sent,
                self.received
            );
        }
    }

    fn acked(&self, slot: u32) -> usize {
        self.sent
            .iter()
            .filter(|event| matches!(event, Event::Acked { tag: t, .. } if *t == tag(slot)))
            .count()
    }

    fn rejected(&self, slot: u32) -> bool {
        self.sent
            .iter()
            .any(|event| matches!(event, Event::Rejected { tag: t, .. } if *t == tag(slot)))
    }
}

fn down(events: &[Event]) -> &DownLane {
    let down = events.iter().find_map(|event| match event {
        Event::LaneDown(down) => Some(&**down),
        _ => None,
    });
    down.expect("no lane is down")
}

/// The cause with which a fabric's lane went down.
fn lane_down(events: &[Event]) -> Option<&str> {
    events.iter().find_map(|event| match event {
        Event::LaneDown(down) => Some(down.cause.as_str()),
        _ => None,
    })
}

each_driver! {
    fn a_frame_is_placed_then_acknowledged(link) {
        let (from, to) = (pool(4096), pool(4096));
        (0..PAGES).for_each(|page| fill(&from, page, page as u8 + 1));
        link.allow(3, &to, &[7, 0, 2]);
        link.post(3, &from, &[1, 2, 5]);
        link.until("the acknowledgement", |link| link.acked(3) == 1);
        assert_eq!(link.gate.placed.len(), 1);
        for (page, byte) in [(7, 2), (0, 3), (2, 6), (1, 0)] {
            assert_eq!(content(&to, page), vec![byte; 4096], "page {page}");
        }
    }

    fn a_frame_without_a_grant_is_drained_and_answered_and_the_lane_lives_on(link) {
        let (from, to) = (pool(300_000), pool(300_000));
        (0..PAGES).for_each(|page| fill(&from, page, 9));
        link.allow(3, &to, &[0]);
        link.post(4, &from, &[1, 2, 3]);
        link.post(3, &from, &[1]);
        link.until("both answers", |link| link.rejected(4) && link.acked(3) == 1);
        assert_eq!(link.acked(4), 0);
        assert_eq!(content(&to, 0), vec![9; 300_000]);
        assert_eq!(content(&to, 1), vec![0; 300_000]);
        assert!(lane_down(&link.sent).is_none());
    }

    fn nothing_lands_in_pages_after_their_revocation_is_quiet_and_the_lane_lives_on(link) {
        let big = 32 << 20;
        let (from, to) = (pool(big), pool(big));
        fill(&from, 0, 7);
        link.allow(3, &to, &[1]);
        link.post(3, &from, &[0]);
        let started = |link: &Bench<D>| link.rx.lanes.iter().flatten().any(|lane| lane.receive.writes(3, Epoch(1)));
        link.until("the frame's header", started);
        link.poll_tx();
        link.poll_rx();
        link.rx.revoke(PEER, 3, Epoch(1));
        link.gate.rooms.clear();
        // The sender is silent meanwhile: the receiver does this alone.
        let deadline = Instant::now() + PATIENCE;
        while !link.received.iter().any(|event| matches!(event, Event::TargetQuiet { slot: 3, .. })) {
            link.poll_rx();
            assert!(Instant::now() < deadline, "the revocation never got quiet");
        }
        let before = content(&to, 1);
        fill(&to, 1, 0xaa);
        link.allow(4, &to, &[2]);
        link.post(4, &from, &[0]);
        link.until("the rejection and the next room", |link| link.rejected(3) && link.acked(4) == 1);
        assert!(before.iter().filter(|&&byte| byte == 7).count() < big as usize, "all of it landed before");
        assert_eq!(content(&to, 1), vec![0xaa; big as usize], "bytes landed in a page that was quiet");
        assert_eq!(content(&to, 2), vec![7; big as usize]);
    }

    fn nothing_is_read_from_pages_after_their_retraction_is_quiet_and_the_lane_lives_on(link) {
        let big = 32 << 20;
        let (from, to) = (pool(big), pool(big));
        fill(&from, 0, 7);
        fill(&from, 1, 5);
        link.allow(3, &to, &[1]);
        link.post(3, &from, &[0]);
        let zero_copy = link.tx.zero_copy == ZeroCopy::Try;
        // The receiver is silent: the socket's buffers fill, the rest of the frame waits in the fabric.
        for _ in 0..50 {
            link.poll_tx();
            std::thread::sleep(Duration::from_millis(1));
        }
        link.tx.retract(PEER, tag(3), false);
        let deadline = Instant::now() + PATIENCE;
        while !link.sent.iter().any(|event| matches!(event, Event::SourceQuiet { .. })) {
            link.poll_tx();
            if zero_copy {
                // Pages that the kernel holds are let go when the peer takes them.
                link.poll_rx();
            }
            assert!(Instant::now() < deadline, "the retraction never got quiet");
        }
        fill(&from, 0, 0xaa);
        link.allow(4, &to, &[2]);
        link.post(4, &from, &[1]);
        link.until("the next room", |link| link.acked(4) == 1);
        let landed = content(&to, 1);
        assert!(!landed.contains(&0xaa), "a page was read after it was quiet");
        assert!(landed.contains(&7) && landed.contains(&0), "the frame was not cut");
        assert_eq!(content(&to, 2), vec![5; big as usize]);
        assert!(!link.sent.iter().any(|event| matches!(event, Event::Sent { tag: t } if *t == tag(3))),
            "a frame that was filled up was reported as sent");
    }

    fn a_frame_that_was_not_begun_is_not_sent_after_its_retraction(link) {
        let (from, to) = (pool(4096), pool(4096));
        link.allow(3, &to, &[1]);
        link.allow(4, &to, &[2]);
        link.post(3, &from, &[0]);
        link.tx.retract(PEER, tag(3), false);
        link.post(4, &from, &[0]);
        link.until("the next room", |link| link.acked(4) == 1);
        assert_eq!(link.gate.placed.len(), 1);
    }

    fn more_small_frames_than_the_window_all_arrive_in_order(link) {
        let (from, to) = (pool(64), pool(64));
        link.allow(3, &to, &[1]);
        let deadline = Instant::now() + PATIENCE;
        let mut posted = 0;
        while link.acked(3) < 1000 {
            while posted < 1000 && link.tx.has_room(PEER) {
                link.post(3, &from, &[0]);
                posted += 1;
            }
            link.poll_tx();
            link.poll_rx();
            assert!(Instant::now() < deadline, "{} of 1000 acknowledged", link.acked(3));
        }
        assert!(link.gate.placed.iter().map(|frame| frame.seq).eq(1..=1000));
        assert_eq!(link.sent.iter().filter(|event| matches!(event, Event::Sent { .. })).count(), 1000);
    }

    fn a_lane_that_goes_down_tells_what_was_not_acknowledged(link) {
        let (from, to) = (pool(1 << 18), pool(1 << 18));
        link.allow(3, &to, &[1]);
        link.post(3, &from, &[0]);
        link.post(4, &from, &[0]);
        link.poll_tx();
        link.rx.close_peer(PEER, "a test");
        link.until("both ends to be down", |link| lane_down(&link.sent).is_some() && lane_down(&link.received).is_some());
        let lost: Vec<_> = down(&link.sent).lost.iter().map(|(seq, posting)| (*seq, posting.tag.slot)).collect();
        assert_eq!(lost, [(1, 3), (2, 4)]);
        assert_eq!(lane_down(&link.received), Some("a test"));
        assert!(!link.tx.has_room(PEER));
    }

    fn a_room_that_was_given_up_keeps_nothing_of_its_pool(link) {
        let from = pool(4096);
        for _ in 0..4 {
            link.post(3, &from, &[0]);
        }
        link.poll_tx();
        link.poll_tx();
        link.tx.retract(PEER, tag(3), false);
        let deadline = Instant::now() + PATIENCE;
        while Arc::strong_count(&from.map) > 1 {
            link.poll_tx();
            // What the kernel holds is let go when the peer takes it.
            link.poll_rx();
            assert!(Instant::now() < deadline, "its pool is kept");
        }
    }

    fn dropping_a_fabric_waits_until_the_kernel_holds_none_of_its_pages(link) {
        let from = pool(16 << 20);
        link.post(3, &from, &[0]);
        link.poll_tx();
        link.poll_tx();
        let Bench { tx, rx, .. } = link;
        drop(tx);
        drop(rx);
        assert_eq!(Arc::strong_count(&from.map), 1, "the kernel was not waited for");
    }
}

/// A fabric whose peer is a bare socket.
fn against_socket(bytes: &[u8]) -> String {
    let (mut dialed, accepted) = socket_pair();
    let mut rx = TcpFabric::new(epoll(), ZeroCopy::Off);
    rx.add_lane(PEER, lane(1, accepted));
    dialed.write_all(bytes).unwrap();
    let (mut gate, mut events) = (TestGate::default(), Vec::new());
    let deadline = Instant::now() + PATIENCE;
    loop {
        rx.poll(&mut gate, &mut events);
        if let Some(cause) = lane_down(&events) {
            return cause.to_owned();
        }
        assert!(Instant::now() < deadline, "the lane stays up");
    }
}

#[test]
fn a_lane_out_of_step_is_closed_with_what_was_wrong() {
    assert!(against_socket(&[0x5a; HEADER_BYTES]).contains("out of step"));
    let data = DataFrame {
        seq: 2,
        slot: 0,
        epoch: Epoch(1),
        pool: 0,
        layer: 0,
        layers: 1,
        at: 0,
        count: 1,
        first: 0,
        pieces: 1,
        payload_bytes: 0,
    };
    assert!(against_socket(&Frame::Data(data).encode()).contains("frame 2 came where 1 was due"));
    let huge = DataFrame { seq: 1, payload_bytes: u32::MAX, ..data };
    assert!(against_socket(&Frame::Data(huge).encode()).contains("announces 4294967295 bytes"));
    assert!(against_socket(&Frame::Ack { seq: 1 }.encode()).contains("the last one sent is 0"));
    let reject = Frame::Reject { seq: 7, slot: 0, epoch: Epoch(1), reason: RejectReason::Revoked };
    assert!(against_socket(&reject.encode()).contains("the last one sent is 0"));
}

#[test]
fn a_peer_that_sends_on_without_reading_its_answers_loses_the_lane_not_our_memory() {
    let frames: Vec<u8> = (1..=5000)
        .flat_map(|seq| {
            let frame = DataFrame {
                seq,
                slot: 9,
                epoch: Epoch(1),
                pool: 0,
                layer: 0,
                layers: 1,
                at: 0,
                count: 1,
                first: 0,
                pieces: 1,
                payload_bytes: 0,
            };
            Frame::Data(frame).encode()
        })
        .collect();
    // Its receive buffer is small, so that answers back up.
    let (dialed, accepted) = socket_pair();
    rustix::net::sockopt::set_socket_recv_buffer_size(&dialed, 2048).unwrap();
    rustix::net::sockopt::set_socket_send_buffer_size(&accepted, 2048).unwrap();
    let mut rx = TcpFabric::new(epoll(), ZeroCopy::Off);
    rx.add_lane(PEER, lane(1, accepted));
    let (mut gate, mut events) = (TestGate::default(), Vec::new());
    let mut left = &frames[..];
    let deadline = Instant::now() + PATIENCE;
    while lane_down(&events).is_none() {
        if let Ok(sent) = (&dialed).write(left) {
            left = &left[sent..];
        }
        rx.poll(&mut gate, &mut events);
        assert!(Instant::now() < deadline, "the lane stays up, {} bytes left", left.len());
    }
    assert!(lane_down(&events).unwrap().contains("without reading"), "{events:?}");
}

/// A driver whose kernel refuses zero-copy sends.
struct Refusing {
    driver: Epoll,
    refused: Vec<Done>,
}

impl Driver for Refusing {
    const SPINS: bool = false;

    fn add(&mut self, lane: u32, fd: RawFd) -> Result<(), Errno> {
        self.driver.add(lane, fd)
    }

    fn remove(&mut self, lane: u32, fd: RawFd) {
        self.driver.remove(lane, fd);
    }

    fn can_zero_copy(&self) -> bool {
        true
    }

    unsafe fn start(
        &mut self,
        lane: u32,
        fd: RawFd,
        direction: Direction,
        ticket: u32,
        message: *mut libc::msghdr,
    ) {
        if direction == Direction::SendZeroCopy {
            // What 6.1 answers to a request for usage reports.
            let outcome = Outcome::Failed { errno: Errno::INVAL, more: false };
            self.refused.push(Done { lane, direction, ticket, outcome });
        } else {
            // SAFETY: handed on to the caller.
            unsafe { self.driver.start(lane, fd, direction, ticket, message) };
        }
    }

    fn cancel(&mut self, lane: u32, direction: Direction, ticket: u32) {
        self.driver.cancel(lane, direction, ticket);
    }

    fn reap(&mut self, done: &mut Vec<Done>) {
        done.append(&mut self.refused);
        self.driver.reap(done);
    }

    fn watch(&mut self, fd: OwnedFd) {
        self.driver.watch(fd);
    }

    fn sleep(&mut self, timeout: Duration) {
        self.driver.sleep(timeout);
    }
}

#[test]
fn a_lane_whose_zero_copy_sends_are_refused_sends_plain_and_loses_nothing() {
    let make = || Refusing { driver: epoll(), refused: Vec::new() };
    let mut link = Bench::new(make, ZeroCopy::Try);
    let (from, to) = (pool(256 << 10), pool(256 << 10));
    fill(&from, 0, 7);
    link.allow(3, &to, &[1]);
    link.post(3, &from, &[0]);
    link.until("the acknowledgement", |link| link.acked(3) == 1);
    assert_eq!(content(&to, 1), vec![7; 256 << 10]);
    assert!(lane_down(&link.sent).is_none());
}

#[test]
fn a_lane_that_always_has_something_to_read_does_not_keep_the_others_from_being_seen() {
    let (busy_end, busy) = socket_pair();
    let (other_end, other) = socket_pair();
    let mut rx = TcpFabric::new(epoll(), ZeroCopy::Off);
    rx.add_lane(PeerIndex(0), lane(1, busy));
    rx.add_lane(PeerIndex(1), lane(2, other));
    let (mut gate, mut events) = (TestGate::default(), Vec::new());
    // Both receives wait; from here on the busy lane is never empty.
    rx.poll(&mut gate, &mut events);
    rx.poll(&mut gate, &mut events);
    busy_end.set_nonblocking(false).unwrap();
    let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let writer = {
        let stop = Arc::clone(&stop);
        std::thread::spawn(move || {
            let mut busy_end = &busy_end;
            for seq in 1.. {
                let frame = DataFrame {
                    seq,
                    slot: 9,
                    epoch: Epoch(1),
                    pool: 0,
                    layer: 0,
                    layers: 1,
                    at: 0,
                    count: 1,
                    first: 0,
                    pieces: 1,
                    payload_bytes: 1 << 20,
                };
                let header = Frame::Data(frame).encode();
                let done =
                    busy_end.write_all(&header).and_then(|()| busy_end.write_all(&[0; 1 << 20]));
                if done.is_err() || stop.load(std::sync::atomic::Ordering::Relaxed) {
                    return;
                }
            }
        })
    };
    let deadline = Instant::now() + PATIENCE;
    (&other_end).write_all(&[0x5a; HEADER_BYTES]).unwrap();
    while !events.iter().any(|event| matches!(event, Event::LaneDown(down) if down.number == 2)) {
        rx.poll(&mut gate, &mut events);
        assert!(Instant::now() < deadline, "the other lane is not seen");
    }
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    drop(rx);
    writer.join().unwrap();
}
