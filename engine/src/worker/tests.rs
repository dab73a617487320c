//! The worker against a fabric of the test's, in virtual time: what is said, when, and in what order.

use bytes::Bytes;
use tokio::sync::mpsc::{Receiver as Inbox, Sender as Outbox};

use super::submit::{Chunk, GrantOrder};
use super::*;
use crate::fabric::{DownLane, Gate, Link, NewLane, Posting, RoomTag, WorkStatus};
use crate::failure::Landed;
use crate::ids::{LaneId, RoomId, RoomState};
use crate::memory::{AllocOptions, Pairing, Pool, PoolCard, PoolLayout, pair_all};
use crate::room::cell::Unreleased;
use crate::room::links::Tally;
use crate::room::receiver::Receiver;
use crate::wire::frame::DataFrame;
use crate::wire::message::{Grant, GrantedPool};

/// Takes every frame, sends none, and is quiet at once.
#[derive(Default)]
struct Still {
    posted: Vec<Posting>,
    say: Vec<Event>,
    /// Frames that are placed at the next poll.
    place: Vec<DataFrame>,
    /// Not quiet at once: what would be said waits.
    busy: bool,
    waiting: Vec<Event>,
    unguarded: bool,
    /// No lane takes a frame.
    full: bool,
    posted_to: Vec<PeerIndex>,
    /// Why lanes were to be closed.
    closed: Vec<String>,
    /// What a lane that is lost next has counted.
    tally: Tally,
}

impl Still {
    fn quiet(&mut self, event: Event) {
        if self.busy { &mut self.waiting } else { &mut self.say }.push(event);
    }
}

impl Fabric for Still {
    fn is_guarded(&self, _: PeerIndex) -> bool {
        !self.unguarded
    }

    fn add_lane(&mut self, _: PeerIndex, _: NewLane) {}

    fn close_lane(&mut self, _: PeerIndex, _: LaneId, cause: &str) {
        self.closed.push(cause.to_owned());
    }

    fn close_peer(&mut self, _: PeerIndex, cause: &str) {
        self.closed.push(cause.to_owned());
    }

    fn has_room(&self, _: PeerIndex) -> bool {
        !self.full
    }

    fn post(&mut self, peer: PeerIndex, posting: Posting) {
        self.posted_to.push(peer);
        self.posted.push(posting);
    }

    fn fence(&mut self, peer: PeerIndex, _: Option<RoomTag>, cause: &str) -> usize {
        self.close_peer(peer, cause);
        1
    }

    fn retract(&mut self, _: PeerIndex, tag: RoomTag, _: bool) {
        self.quiet(Event::SourceQuiet { tag });
    }

    fn revoke(&mut self, _: PeerIndex, slot: u32, epoch: Epoch) {
        self.quiet(Event::TargetQuiet { slot, epoch });
    }

    fn poll(&mut self, gate: &mut impl Gate, events: &mut Vec<Event>) -> bool {
        for frame in self.place.drain(..) {
            if gate.admit(PeerIndex(0), &frame).is_ok() {
                gate.placed(&frame);
            }
        }
        let any = !self.say.is_empty();
        events.append(&mut self.say);
        any
    }

    fn close(&mut self) -> bool {
        true
    }

    fn spins(&self) -> bool {
        false
    }

    fn sleep(&mut self, _: std::time::Duration) {}
}

const PEER: Incarnation = Incarnation(7);
const LIMITS: Limits = Limits { max_rooms: 64, max_peers: 8, fence_after_ms: 500 };

struct Bench {
    worker: Worker<Still>,
    submissions: Outbox<Submission>,
    mail: Outbox<ToWorker>,
    control: Inbox<ToControl>,
    heard: Option<Inbox<Message>>,
    unreleased: Unreleased,
    now: Micros,
    pool: Pool,
}

fn card(layers: std::ops::Range<u32>) -> PoolCard {
    let layout = PoolLayout::opaque("kv", layers, 16, 64);
    PoolCard { page_stride: layout.page_bytes(), layout }
}

fn pairings(theirs: std::ops::Range<u32>) -> Vec<Pairing> {
    pair_all(&[card(0..4)], &[card(theirs)]).unwrap()
}

impl Bench {
    fn new() -> Self {
        let pool = Pool::allocate(card(0..4).layout, AllocOptions { huge_pages: false }).unwrap();
        let (submissions, take_submissions) = mpsc::channel(64);
        let (mail, inbox) = mpsc::channel(64);
        let (to_control, control) = mpsc::channel(64);
        let queues = Queues { submissions: take_submissions, inbox, control: to_control };
        let pages: Arc<[AtomicU32]> = [AtomicU32::new(16)].into();
        let pools = (vec![Arc::clone(&pool.map)], pages);
        let worker =
            Worker::new(Incarnation(1), Still::default(), queues, pools, LIMITS, Arc::default());
        let unreleased = Unreleased::default();
        let now = Micros(1);
        Self { worker, submissions, mail, control, heard: None, unreleased, now, pool }
    }

    fn turn(&mut self) {
        while self.worker.turn(self.now) {}
    }

    fn after_ms(&mut self, ms: u64) {
        self.now = self.now.after_ms(ms);
        self.turn();
    }

    fn peer_up(&mut self, theirs: std::ops::Range<u32>) {
        self.heard = Some(self.up(PEER, theirs));
    }

    fn up(&mut self, peer: Incarnation, theirs: std::ops::Range<u32>) -> Inbox<Message> {
        let (outbox, heard) = mpsc::channel(64);
        let addr = "127.0.0.1:1".parse().unwrap();
        let pairings = pairings(theirs);
        self.mail(ToWorker::PeerUp(PeerUp { peer, addr, pairings, outbox }));
        heard
    }

    fn mail(&mut self, mail: ToWorker) {
        self.mail.try_send(mail).unwrap();
        self.turn();
    }

    fn hear(&mut self, message: Message) {
        self.mail(ToWorker::Message { peer: PEER, message });
    }

    /// What was said to the peer since the last look.
    fn said(&mut self) -> Vec<Message> {
        let heard = self.heard.as_mut().unwrap();
        std::iter::from_fn(|| heard.try_recv().ok()).collect()
    }

    fn submit(&mut self, submission: Submission) {
        self.submissions.try_send(submission).unwrap();
        self.turn();
    }

    fn cell(&self, room: u64, role: Role) -> Arc<RoomCell> {
        self.unreleased.fetch_add(1, Ordering::Relaxed);
        RoomCell::new(RoomId(room), role, self.now.0, &self.unreleased)
    }

    fn open(&mut self, room: u64) -> Arc<RoomCell> {
        let cell = self.cell(room, Role::Sender);
        let deadline = self.now.after_ms(60_000);
        self.submit(Submission::Open { cell: Arc::clone(&cell), peer: None, deadline });
        cell
    }

    fn hear_grant(&mut self, room: u64, epoch: u64) {
        self.hear(Message::Grant(grant(room, epoch)));
    }

    fn write(&mut self, cell: &Arc<RoomCell>) {
        cell.queued_chunks.fetch_add(1, Ordering::Relaxed);
        let chunk = Chunk { pool: PoolId::FIRST, layers: 0..4, src: [3].into(), at: 0 };
        self.submit(Submission::Write { cell: Arc::clone(cell), chunk });
    }

    fn finish(&mut self, cell: &Arc<RoomCell>) {
        self.submit(Submission::Finish { cell: Arc::clone(cell), aux: Bytes::new() });
    }

    /// The fabric says of every frame posted so far that it has left.
    fn sent(&mut self) {
        let posted = std::mem::take(&mut self.worker.fabric.posted);
        self.worker
            .fabric
            .say
            .extend(posted.iter().map(|posting| Event::Sent { tag: posting.tag }));
        self.turn();
    }

    fn grant(&mut self, room: u64, epoch: u64) -> Arc<RoomCell> {
        let cell = self.cell(room, Role::Receiver);
        let order = GrantOrder {
            cell: Arc::clone(&cell),
            peer: PEER,
            epoch: Epoch(epoch),
            deadline: self.now.after_ms(60_000),
            pools: vec![(PoolId::FIRST, [3].into())],
            aux: None,
            aux_bytes: 64,
            note: Bytes::new(),
            checksum: false,
        };
        self.submit(Submission::Grant(Box::new(order)));
        cell
    }

    fn lane_up(&mut self, lane: u64) {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let link = Link::Tcp { stream, leaves_host: false };
        let lane = NewLane { id: LaneId(lane), number: lane as u16, link, say: None };
        self.mail(ToWorker::LaneUp { peer: PEER, lane });
    }

    /// A lane goes down with everything that is posted.
    fn lose_lane(&mut self, lane: u64, culprit: Option<(RoomTag, WorkStatus)>) {
        let (id, number, cause) = (LaneId(lane), lane as u16, "reset".to_owned());
        let posted = std::mem::take(&mut self.worker.fabric.posted);
        let lost = (1..).zip(posted).collect();
        let tally = self.worker.fabric.tally.clone();
        // Its place, also when it has been given up.
        let peer = PeerIndex(0);
        let down = DownLane { peer, id, number, cause, culprit, lost, tally };
        self.worker.fabric.say.push(Event::LaneDown(Box::new(down)));
        self.turn();
    }

    fn hear_tally(&mut self, lane: u64, tally: Option<Tally>) {
        self.hear(Message::LaneTally { lane: LaneId(lane), tally });
    }

    fn gone(&mut self, kind: FailureKind) {
        self.mail(ToWorker::PeerGone { peer: PEER, kind, causes: vec!["a test".to_owned()] });
    }
}

fn grant(room: u64, epoch: u64) -> Grant {
    Grant {
        room: RoomId(room),
        epoch: Epoch(epoch),
        slot: 0,
        deadline_ms: 60_000,
        pools: vec![GrantedPool { pool: 0, pages: vec![5] }],
        aux_bytes: 64,
        note: Bytes::new(),
        checksum: false,
    }
}

fn kind(cell: &RoomCell) -> Option<FailureKind> {
    cell.verdict().and_then(|verdict| verdict.as_ref().err()).map(|failure| failure.kind)
}

fn is_failed(message: &Message, of: u64, what: FailureKind) -> bool {
    matches!(message, Message::Failed { epoch, failure, .. } if epoch.0 == of && failure.kind == what)
}

#[test]
fn of_epochs_from_before_a_peer_was_given_up_nothing_is_said_to_be_drained() {
    let mut bench = Bench::new();
    bench.peer_up(0..4);
    bench.lane_up(1);
    let _cell = bench.open(1);
    bench.hear_grant(1, 5);
    bench.gone(FailureKind::PeerSilent);
    bench.lose_lane(1, None);
    // It comes back, and has not heard yet. What it was sent may still be on its way.
    bench.peer_up(0..4);
    bench.hear_grant(1, 5);
    let said = bench.said();
    assert!(said.iter().any(|message| is_failed(message, 5, FailureKind::PeerSilent)));
    assert!(!said.contains(&Message::Drained { epoch: Epoch(5) }), "{said:?}");
    bench.submit(Submission::Drain { peer: Some(PEER) });
    bench.hear_grant(2, 6);
    assert!(bench.said().contains(&Message::Drained { epoch: Epoch(6) }), "of a new one it is");
}

#[test]
fn a_peer_that_comes_back_while_its_old_lanes_close_can_write_until_they_are_down() {
    let mut bench = Bench::new();
    bench.worker.fabric.unguarded = true;
    bench.peer_up(0..4);
    bench.lane_up(1);
    bench.gone(FailureKind::PeerSilent);
    bench.peer_up(0..4);
    let cell = bench.grant(1, 1);
    let (given_up, cause) = (Arc::clone(&cell), "a test".to_owned());
    bench.submit(Submission::Abort { cell: given_up, kind: FailureKind::Aborted, cause });
    assert!(!cell.is_released(), "the old lane stands");
    bench.lose_lane(1, None);
    assert!(cell.is_released());
}

#[test]
fn a_room_that_takes_the_place_of_one_that_waited_to_post_posts_to_its_own_peer() {
    let mut bench = Bench::new();
    bench.peer_up(0..4);
    let other = Incarnation(8);
    let _heard = bench.up(other, 0..4);
    bench.worker.fabric.full = true;
    let first = bench.open(1);
    bench.hear_grant(1, 1);
    bench.write(&first);
    let cause = "a test".to_owned();
    bench.submit(Submission::Abort { cell: first, kind: FailureKind::Aborted, cause });
    let second = bench.open(2);
    bench.mail(ToWorker::Message { peer: other, message: Message::Grant(grant(2, 1)) });
    bench.write(&second);
    bench.worker.fabric.full = false;
    bench.turn();
    let theirs = bench.worker.peers.find(other).unwrap();
    assert_eq!(bench.worker.fabric.posted_to, [theirs]);
}

#[test]
fn a_lane_that_goes_down_is_asked_about_and_only_what_was_not_counted_is_sent_again() {
    let mut bench = Bench::new();
    bench.peer_up(0..4);
    bench.lane_up(1);
    let cell = bench.open(1);
    bench.hear_grant(1, 1);
    bench.write(&cell);
    bench.write(&cell);
    bench.said();
    bench.lose_lane(1, None);
    assert_eq!(bench.said(), [Message::LaneLost { lane: LaneId(1) }]);
    bench.after_ms(1000);
    assert!(bench.worker.fabric.posted.is_empty(), "sent again before the other end was closed");
    bench.hear_tally(1, Some(Tally { completed: 1, rejected: Vec::new() }));
    assert_eq!(cell.landed(), Landed { page_writes: 4, bytes: 256 });
    let again: Vec<_> = bench.worker.fabric.posted.iter().map(|posting| posting.frame).collect();
    assert_eq!(again.len(), 1);
    assert_eq!(kind(&cell), None);
    // The lost frame has left for good now, so the room can be finished.
    bench.sent();
    bench.finish(&cell);
    let sent = Landed { page_writes: 8, bytes: 512 };
    assert!(matches!(bench.said()[..], [Message::Finished { sent: s, .. }] if s == sent));
    bench.hear_tally(1, Some(Tally::default()));
    assert!(bench.worker.fabric.posted.is_empty(), "a late tally was taken");
}

#[test]
fn frames_of_a_room_that_was_said_to_be_finished_are_sent_again_and_leave_once() {
    let mut bench = Bench::new();
    bench.peer_up(0..4);
    bench.lane_up(1);
    let cell = bench.open(1);
    bench.hear_grant(1, 1);
    bench.write(&cell);
    let frames = std::mem::take(&mut bench.worker.fabric.posted);
    bench.worker.fabric.say.push(Event::Sent { tag: frames[0].tag });
    bench.worker.fabric.posted = frames;
    bench.finish(&cell);
    bench.worker.fabric.posted[0].again = true;
    bench.lose_lane(1, None);
    bench.hear_tally(1, Some(Tally::default()));
    assert!(bench.worker.fabric.posted[0].again);
    bench.said();
    bench.hear(Message::Landed { room: RoomId(1), epoch: Epoch(1), landed: Landed::default() });
    assert_eq!(cell.state(), RoomState::Success);
}

#[test]
fn a_lane_the_peer_knows_nothing_of_fails_its_rooms_and_both_sides_are_told() {
    let mut bench = Bench::new();
    bench.peer_up(0..4);
    bench.lane_up(1);
    let cell = bench.open(1);
    bench.hear_grant(1, 1);
    bench.write(&cell);
    // Not in the moment after the session came up, when the peer may still be saying what it was.
    bench.after_ms(1000);
    bench.lose_lane(1, None);
    bench.hear_tally(1, None);
    assert_eq!(kind(&cell), None, "believed before it could be explained");
    bench.said();
    bench.after_ms(51);
    assert_eq!(kind(&cell), Some(FailureKind::LaneLost));
    assert!(bench.said().iter().any(|message| is_failed(message, 1, FailureKind::LaneLost)));
}

#[test]
fn a_room_that_loses_lane_after_lane_fails_with_what_was_tried() {
    let mut bench = Bench::new();
    bench.peer_up(0..4);
    let cell = bench.open(1);
    bench.hear_grant(1, 1);
    bench.write(&cell);
    bench.after_ms(1000);
    for lane in 1..=17 {
        bench.lane_up(lane);
        bench.lose_lane(lane, None);
        bench.hear_tally(lane, Some(Tally::default()));
    }
    bench.after_ms(51);
    let failure = cell.verdict().cloned().unwrap().unwrap_err();
    assert_eq!((failure.kind, failure.retries), (FailureKind::LaneLost, 16));
}

#[test]
fn a_question_about_a_lane_is_repeated_on_every_session_until_it_is_answered() {
    let mut bench = Bench::new();
    bench.peer_up(0..4);
    bench.lane_up(1);
    let cell = bench.open(1);
    bench.hear_grant(1, 1);
    bench.write(&cell);
    bench.mail(ToWorker::PeerDown { peer: PEER });
    bench.lose_lane(1, None);
    let question = Message::LaneLost { lane: LaneId(1) };
    for _ in 0..2 {
        bench.peer_up(0..4);
        assert!(bench.said().contains(&question));
        bench.hear_grant(1, 1);
        bench.hear(Message::Sync);
        bench.mail(ToWorker::PeerDown { peer: PEER });
    }
    bench.peer_up(0..4);
    bench.hear_tally(1, Some(Tally::default()));
    assert_eq!(bench.worker.fabric.posted.len(), 1);
    bench.peer_up(0..4);
    assert!(!bench.said().contains(&question));
}

#[test]
fn a_peer_that_asks_is_answered_when_this_end_is_down_and_a_lane_not_up_yet_never_comes_up() {
    let mut bench = Bench::new();
    bench.peer_up(0..4);
    bench.lane_up(1);
    bench.said();
    bench.hear(Message::LaneLost { lane: LaneId(1) });
    assert_eq!(bench.said(), []);
    assert_eq!(bench.worker.fabric.closed, ["the peer closed it"]);
    bench.worker.fabric.tally = Tally { completed: 7, rejected: vec![3] };
    bench.lose_lane(1, None);
    let tally = Some(Tally { completed: 7, rejected: vec![3] });
    assert!(bench.said().contains(&Message::LaneTally { lane: LaneId(1), tally: tally.clone() }));
    bench.hear(Message::LaneLost { lane: LaneId(1) });
    assert_eq!(bench.said(), [Message::LaneTally { lane: LaneId(1), tally }]);
    bench.hear(Message::LaneLost { lane: LaneId(2) });
    let nothing = Some(Tally::default());
    assert_eq!(bench.said(), [Message::LaneTally { lane: LaneId(2), tally: nothing }]);
    bench.lane_up(2);
    let down = std::iter::from_fn(|| bench.control.try_recv().ok())
        .filter(|report| matches!(report, ToControl::LaneDown { lane: 2, .. }));
    assert_eq!(down.count(), 1);
}

#[test]
fn an_error_of_one_write_fails_its_room_alone_and_the_others_writes_go_again() {
    for (status, blamed) in [
        (WorkStatus::LocalProtection, FailureKind::LocalAccess),
        (WorkStatus::RemoteAccess, FailureKind::RemoteAccess),
        (WorkStatus::RnrRetryExceeded, FailureKind::ReceiverNotReady),
    ] {
        let mut bench = Bench::new();
        bench.peer_up(0..4);
        bench.lane_up(1);
        let (culprit, neighbour) = (bench.open(1), bench.open(2));
        bench.hear_grant(1, 1);
        bench.hear_grant(2, 2);
        bench.write(&culprit);
        bench.write(&neighbour);
        bench.after_ms(1000);
        let tag = bench.worker.fabric.posted[0].tag;
        bench.lose_lane(1, Some((tag, status)));
        bench.hear_tally(1, Some(Tally::default()));
        bench.after_ms(51);
        assert_eq!((kind(&culprit), kind(&neighbour)), (Some(blamed), None));
        let again: Vec<_> =
            bench.worker.fabric.posted.iter().map(|posting| posting.frame.epoch).collect();
        assert_eq!(again, [Epoch(2)]);
    }
    assert_eq!(WorkStatus::RetryExceeded.blames_room(), None, "the path is to blame");
}

#[test]
fn pages_that_are_not_quiet_in_time_are_fenced_off_on_both_sides() {
    let mut bench = Bench::new();
    bench.peer_up(0..4);
    bench.lane_up(1);
    bench.worker.fabric.busy = true;
    let (sending, receiving) = (bench.open(1), bench.grant(2, 9));
    bench.hear_grant(1, 1);
    bench.write(&sending);
    for cell in [&sending, &receiving] {
        let (cell, cause) = (Arc::clone(cell), "a test".to_owned());
        bench.submit(Submission::Abort { cell, kind: FailureKind::Aborted, cause });
    }
    bench.after_ms(499);
    assert!(bench.worker.fabric.closed.is_empty() && !sending.is_released());
    bench.after_ms(1);
    assert_eq!(bench.worker.fabric.closed.len(), 2, "once a room");
    assert!(bench.worker.fabric.closed[0].contains("fenced"));
    assert!(!sending.is_released() && !receiving.is_released(), "before the lanes are down");
    let waiting = std::mem::take(&mut bench.worker.fabric.waiting);
    bench.worker.fabric.say.extend(waiting);
    bench.turn();
    assert!(sending.is_released() && receiving.is_released());
    bench.after_ms(10_000);
    assert_eq!(bench.worker.fabric.closed.len(), 2, "fenced again");
}

#[test]
fn a_room_given_up_behind_its_finish_has_its_pages_back_no_later_than_any_other() {
    let mut bench = Bench::new();
    bench.peer_up(0..4);
    let cell = bench.open(1);
    bench.hear_grant(1, 1);
    bench.write(&cell);
    bench.sent();
    bench.finish(&cell);
    let (given_up, cause) = (Arc::clone(&cell), "a test".to_owned());
    bench.submit(Submission::Abort { cell: given_up, kind: FailureKind::Aborted, cause });
    bench.after_ms(499);
    assert_eq!(kind(&cell), None, "the receiver may still answer");
    bench.after_ms(1);
    assert_eq!((kind(&cell), cell.is_released()), (Some(FailureKind::VerdictUnknown), true));
}

#[test]
fn where_a_peer_can_write_unasked_pages_wait_for_its_word_or_for_its_lanes() {
    let failed = |bench: &mut Bench, epoch| {
        let cell = bench.grant(epoch, epoch);
        let cause = "a test".to_owned();
        let given_up = Arc::clone(&cell);
        let kind = FailureKind::Aborted;
        bench.submit(Submission::Abort { cell: given_up, kind, cause });
        cell
    };
    let mut bench = Bench::new();
    bench.worker.fabric.unguarded = true;
    bench.peer_up(0..4);
    assert!(failed(&mut bench, 1).is_released(), "no lane, no writes");
    bench.lane_up(1);
    let drained = failed(&mut bench, 2);
    assert!(!drained.is_released());
    bench.hear(Message::Drained { epoch: Epoch(2) });
    assert!(drained.is_released());
    let fenced = failed(&mut bench, 3);
    // A lane that comes up later carries nothing of it.
    bench.lane_up(2);
    bench.after_ms(500);
    assert_eq!(bench.worker.fabric.closed.len(), 1);
    bench.lose_lane(1, None);
    assert!(fenced.is_released());
}

#[test]
fn a_sender_says_drained_only_when_the_peers_end_of_its_lost_lanes_is_closed() {
    let mut bench = Bench::new();
    bench.peer_up(0..4);
    bench.lane_up(1);
    let cell = bench.open(1);
    bench.hear_grant(1, 1);
    bench.write(&cell);
    bench.lose_lane(1, None);
    let cause = "a test".to_owned();
    bench.submit(Submission::Abort { cell: Arc::clone(&cell), kind: FailureKind::Aborted, cause });
    assert!(cell.is_released(), "its own pages are quiet");
    let drained = Message::Drained { epoch: Epoch(1) };
    assert!(!bench.said().contains(&drained));
    bench.hear_tally(1, Some(Tally::default()));
    assert_eq!(bench.said(), [drained]);
    assert!(bench.worker.fabric.posted.is_empty(), "a room that has ended was sent again");
}

#[test]
fn a_peer_that_was_given_up_and_comes_back_hears_what_became_of_its_rooms() {
    let mut bench = Bench::new();
    bench.peer_up(0..4);
    let sending = bench.open(1);
    bench.hear_grant(1, 1);
    let receiving = bench.grant(2, 9);
    bench.gone(FailureKind::PeerSilent);
    assert_eq!(
        (kind(&sending), kind(&receiving)),
        (Some(FailureKind::PeerSilent), Some(FailureKind::PeerSilent))
    );
    bench.peer_up(0..4);
    let said = bench.said();
    assert!(said.iter().any(|message| is_failed(message, 1, FailureKind::PeerSilent)), "{said:?}");
    assert!(said.iter().any(|message| is_failed(message, 9, FailureKind::PeerSilent)), "{said:?}");
    // It had not heard yet, and says its grant again: that is no new grant.
    bench.hear_grant(1, 1);
    assert!(bench.said().iter().any(|message| is_failed(message, 1, FailureKind::PeerSilent)));
    let retry = bench.open(1);
    assert_eq!(retry.state(), RoomState::Bootstrapping, "bound to an epoch that has ended");
}

#[test]
fn after_a_reconnect_ends_are_said_before_grants_and_the_mark_last() {
    let mut bench = Bench::new();
    bench.peer_up(0..4);
    let first = bench.grant(7, 1);
    bench.hear(Message::Finished {
        room: RoomId(7),
        epoch: Epoch(1),
        sent: Landed::default(),
        aux: Bytes::new(),
        checksum: None,
    });
    assert_eq!(first.state(), RoomState::Success);
    bench.mail(ToWorker::PeerDown { peer: PEER });
    bench.grant(7, 2);
    bench.peer_up(0..4);
    let said = bench.said();
    let at = |what: fn(&Message) -> bool| said.iter().position(what);
    let landed = at(|message| matches!(message, Message::Landed { epoch: Epoch(1), .. })).unwrap();
    let granted =
        at(|message| matches!(message, Message::Grant(Grant { epoch: Epoch(2), .. }))).unwrap();
    assert!(landed < granted, "{said:?}");
    assert_eq!(said.last(), Some(&Message::Sync));
}

#[test]
fn a_grant_that_is_not_said_again_after_a_reconnect_is_forgotten() {
    let mut bench = Bench::new();
    bench.peer_up(0..4);
    let kept = bench.open(1);
    let forgotten = bench.open(2);
    bench.hear_grant(1, 1);
    bench.hear_grant(2, 2);
    bench.mail(ToWorker::PeerDown { peer: PEER });
    bench.peer_up(0..4);
    bench.hear_grant(1, 1);
    bench.hear(Message::Sync);
    assert_eq!((kind(&kept), kind(&forgotten)), (None, Some(FailureKind::PeerForgot)));
}

#[test]
fn a_peer_that_comes_back_with_other_layouts_is_expelled_and_its_rooms_stay_whole() {
    let mut bench = Bench::new();
    bench.peer_up(0..4);
    let cell = bench.open(1);
    bench.hear_grant(1, 1);
    bench.mail(ToWorker::PeerDown { peer: PEER });
    bench.peer_up(2..6);
    bench.write(&cell);
    let mut expelled = false;
    while let Ok(report) = bench.control.try_recv() {
        expelled |= matches!(report, ToControl::Expel { peer: PEER, .. });
    }
    assert!(expelled);
    assert_eq!(
        bench.worker.fabric.posted.len(),
        1,
        "posted against the layouts it was checked with"
    );
    assert!(bench.pool.layout.layers == (0..4));
}

#[test]
fn a_chunk_behind_the_finish_is_not_sent() {
    let mut bench = Bench::new();
    bench.peer_up(0..4);
    let cell = bench.open(1);
    bench.hear_grant(1, 1);
    bench.write(&cell);
    bench.finish(&cell);
    bench.write(&cell);
    assert_eq!(bench.worker.fabric.posted.len(), 1);
    bench.said();
    bench.sent();
    let said = bench.said();
    let sent = Landed { page_writes: 4, bytes: 256 };
    assert!(matches!(said[..], [Message::Finished { sent: s, .. }] if s == sent), "{said:?}");
    assert_eq!(cell.queued_chunks.load(Ordering::Relaxed), 0);
}

#[test]
fn a_grant_that_was_given_up_is_withdrawn_and_the_next_try_gets_its_own() {
    let mut bench = Bench::new();
    bench.peer_up(0..4);
    bench.hear_grant(1, 1);
    let cell = bench.cell(1, Role::Receiver);
    let causes = vec!["first try".to_owned()];
    let kind = FailureKind::Aborted;
    let mut failure = bench.worker.failure(&cell, Role::Receiver, kind, None, causes);
    failure.epoch = Epoch(1);
    let failure = Box::new(failure);
    bench.hear(Message::Failed { room: RoomId(1), epoch: Epoch(1), to: Role::Sender, failure });
    let retry = bench.open(1);
    assert_eq!(retry.state(), RoomState::Bootstrapping);
    bench.hear_grant(1, 2);
    assert_eq!(retry.bound().map(|bound| bound.epoch), Some(Epoch(2)));
}

#[test]
fn a_drain_refuses_the_grants_that_wait_and_those_that_come() {
    let mut bench = Bench::new();
    bench.peer_up(0..4);
    bench.hear_grant(1, 1);
    bench.said();
    bench.submit(Submission::Drain { peer: Some(PEER) });
    bench.hear_grant(2, 2);
    let said = bench.said();
    assert!(is_failed(&said[0], 1, FailureKind::PeerDraining), "{said:?}");
    assert!(is_failed(&said[2], 2, FailureKind::PeerDraining), "{said:?}");
    assert_eq!(bench.open(1).state(), RoomState::Bootstrapping);
}

#[test]
fn a_sender_that_asks_about_a_room_nobody_remembers_is_told_so() {
    let mut bench = Bench::new();
    bench.peer_up(0..4);
    bench.said();
    bench.hear(Message::Finished {
        room: RoomId(1),
        epoch: Epoch(77),
        sent: Landed::default(),
        aux: Bytes::new(),
        checksum: None,
    });
    assert!(bench.said().iter().any(|message| is_failed(message, 77, FailureKind::PeerForgot)));
}

#[test]
fn frames_a_lane_gives_back_are_posted_again_unless_their_room_has_ended() {
    let mut bench = Bench::new();
    bench.peer_up(0..4);
    let cell = bench.open(1);
    bench.hear_grant(1, 1);
    bench.write(&cell);
    let posting = bench.worker.fabric.posted.remove(0);
    bench
        .worker
        .fabric
        .say
        .push(Event::Returned { peer: PeerIndex(0), posting: Box::new(posting) });
    bench.turn();
    assert_eq!(bench.worker.fabric.posted.len(), 1);
    let posting = bench.worker.fabric.posted.remove(0);
    let cause = "a test".to_owned();
    bench.submit(Submission::Abort { cell, kind: FailureKind::Aborted, cause });
    bench
        .worker
        .fabric
        .say
        .push(Event::Returned { peer: PeerIndex(0), posting: Box::new(posting) });
    bench.turn();
    assert!(bench.worker.fabric.posted.is_empty());
}

#[test]
fn every_room_meets_its_deadline_though_nobody_says_anything() {
    let mut bench = Bench::new();
    bench.peer_up(0..4);
    let waiting = bench.open(1);
    let granted = bench.open(2);
    bench.hear_grant(2, 2);
    let finished = bench.open(3);
    bench.hear_grant(3, 3);
    bench.finish(&finished);
    let receiving = bench.grant(4, 4);
    bench.after_ms(60_101);
    assert_eq!(kind(&waiting), Some(FailureKind::GrantTimeout));
    assert_eq!(kind(&granted), Some(FailureKind::DeadlineExceeded));
    assert_eq!(kind(&receiving), Some(FailureKind::DeadlineExceeded));
    assert_eq!(kind(&finished), None, "the receiver is asked first");
    bench.after_ms(1001);
    assert_eq!(kind(&finished), Some(FailureKind::VerdictUnknown));
    for cell in [&waiting, &granted, &finished, &receiving] {
        assert!(cell.is_released());
    }
    assert_eq!(bench.unreleased.load(Ordering::Relaxed), 0);
}

#[test]
fn what_is_submitted_to_a_worker_that_stops_is_ended_and_released() {
    let mut bench = Bench::new();
    bench.peer_up(0..4);
    bench.submit(Submission::Stop);
    let cell = bench.open(1);
    assert_eq!((kind(&cell), cell.is_released()), (Some(FailureKind::Shutdown), true));
    let late = bench.cell(2, Role::Sender);
    let deadline = bench.now.after_ms(1);
    bench
        .submissions
        .try_send(Submission::Open { cell: Arc::clone(&late), peer: None, deadline })
        .unwrap();
    assert!(bench.worker.close(bench.now, "a test"));
    assert_eq!((kind(&late), late.is_released()), (Some(FailureKind::Shutdown), true));
    assert!(bench.submissions.try_send(Submission::Stop).is_err());
}

#[test]
fn a_worker_that_stops_first_tells_its_peers_of_all_their_rooms() {
    let mut bench = Bench::new();
    bench.peer_up(0..4);
    bench.said();
    for room in 0..40 {
        bench.open(room);
        bench.hear_grant(room, room + 1);
    }
    let (reply, mut idle) = oneshot::channel();
    bench.submit(Submission::Stop);
    bench.submit(Submission::WhenIdle { peer: None, reply });
    // Each is told twice, failed and drained: the session has no room for so much at once.
    assert!(idle.try_recv().is_err() && !bench.worker.is_stopped());
    let mut said = bench.said();
    bench.turn();
    said.extend(bench.said());
    let failed = |epoch| said.iter().any(|m| is_failed(m, epoch, FailureKind::Shutdown));
    assert!((1..=40).all(failed), "{said:?}");
    assert!(idle.try_recv().is_ok() && bench.worker.is_stopped());
}

#[test]
fn frames_outside_the_grant_fail_their_room_alone_on_both_sides() {
    let good = DataFrame {
        seq: 1,
        slot: 0,
        epoch: Epoch(1),
        pool: 0,
        layer: 0,
        layers: 4,
        at: 0,
        count: 1,
        first: 0,
        pieces: 4,
        payload_bytes: 256,
    };
    let bad = [
        DataFrame { pool: 1, ..good },
        DataFrame { layer: 4, ..good },
        DataFrame { layers: 5, ..good },
        DataFrame { layers: 0, ..good },
        DataFrame { at: 1, ..good },
        DataFrame { at: u32::MAX, count: u32::MAX, ..good },
        DataFrame { count: 0, ..good },
        DataFrame { first: 1, ..good },
        DataFrame { first: u32::MAX, pieces: u32::MAX, ..good },
        DataFrame { pieces: 0, payload_bytes: 0, ..good },
        DataFrame { payload_bytes: 255, ..good },
    ];
    for frame in bad {
        let mut bench = Bench::new();
        bench.peer_up(0..4);
        let (cell, neighbour) = (bench.grant(1, 1), bench.grant(2, 2));
        bench.worker.fabric.place.push(frame);
        bench.turn();
        assert_eq!(kind(&cell), Some(FailureKind::OutsideGrant), "{frame:?}");
        assert!(bench.said().iter().any(|message| is_failed(
            message,
            1,
            FailureKind::OutsideGrant
        )));
        assert_eq!(kind(&neighbour), None);
    }
    let mut bench = Bench::new();
    bench.peer_up(0..4);
    let cell = bench.grant(1, 1);
    bench.worker.fabric.place.push(good);
    bench.turn();
    assert_eq!(cell.landed(), Landed { page_writes: 4, bytes: 256 });
    assert!(Receiver::new(Epoch(1), Micros(1)).is_live());
}
