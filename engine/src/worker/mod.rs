//! The worker: one thread that owns its lanes and rooms. Nothing on it is shared.
//!
//! One turn: take what callers and the control plane put in the queues, let the fabric complete and
//! place, step the rooms, post what fits, send what is to be said. Time is handed in, so that a turn
//! can be driven by a clock or by a simulation.

#[cfg(feature = "sim")]
pub(crate) mod census;
mod lanes;
pub(crate) mod mail;
mod peers;
mod receiving;
pub(crate) mod run;
mod sending;
mod slots;
pub(crate) mod stats;
pub(crate) mod submit;
#[cfg(test)]
mod tests;
mod timers;
mod verdicts;
mod verify;
pub(crate) mod wake;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use tokio::sync::{mpsc, oneshot};

use self::mail::{PeerUp, ToControl, ToWorker};
use self::peers::{Peer, Peers};
use self::receiving::{Grants, Receiving};
use self::sending::Sending;
use self::stats::{SharedStats, Stats};
use self::submit::Submission;
pub(crate) use self::timers::Timer;
use self::timers::Timers;
use self::verdicts::Verdicts;
use crate::fabric::{Event, Fabric, PeerIndex};
use crate::failure::{Failure, FailureKind};
use crate::ids::{Epoch, Incarnation, Micros, Role};
use crate::memory::{PageMap, PoolId};
use crate::mutations::{self, Mutation};
use crate::room::cell::{NO_SLOT, RoomCell};
use crate::room::receiver::ReceiverEvent;
use crate::room::sender::SenderEvent;
use crate::wire::frame::FRAME_BYTES;
use crate::wire::message::Message;

/// Submissions taken in one turn: enough to empty a burst, few enough that lanes are looked at every
/// few hundred microseconds.
const SUBMISSIONS_PER_TURN: usize = 512;
/// Mail of the control plane that may wait for the worker; more holds the sessions back. A turn takes
/// all that was there when it began.
pub(crate) const MAIL: usize = 4096;

/// Callers reserve a place for a room before they submit it.
const TABLE_FULL: &str = "the engine's room table is full, which was checked before; report it";

/// Where a worker's work comes from and goes to.
#[derive(Debug)]
pub(crate) struct Queues {
    pub(crate) submissions: mpsc::Receiver<Submission>,
    pub(crate) inbox: mpsc::Receiver<ToWorker>,
    pub(crate) control: mpsc::Sender<ToControl>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Worker<F: Fabric> {
    identity: Incarnation,
    fabric: F,
    queues: Queues,
    /// Our pools; `None` once forgotten.
    pools: Vec<Option<Arc<PageMap>>>,
    /// Pages of each pool as callers see it; 0 once forgotten.
    pool_pages: Arc<[AtomicU32]>,
    peers: Peers,
    sending: Sending,
    receiving: Receiving,
    timers: Timers,
    verdicts: Verdicts,
    /// Peers with rooms that have frames to post.
    posting: Vec<PeerIndex>,
    events: Vec<Event>,
    due: Vec<Timer>,
    to_control: VecDeque<ToControl>,
    idle_waiters: Vec<(Option<Incarnation>, oneshot::Sender<()>)>,
    /// Grants that find no open room are refused.
    draining: bool,
    stopping: bool,
    limits: Limits,
    /// Bytes hashed for checksums in this turn.
    hashed_bytes: u64,
    /// Largest payload of a frame that is more than one page write.
    frame_bytes: u64,
    stats: Stats,
    shared_stats: Arc<SharedStats>,
}

/// What a worker is told of the engine's settings.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) max_rooms: usize,
    pub(crate) max_peers: usize,
    /// How long a room's pages may wait for the peer before it is fenced off.
    pub(crate) fence_after_ms: u64,
}

impl<F: Fabric> Worker<F> {
    pub(crate) fn new(
        identity: Incarnation,
        fabric: F,
        queues: Queues,
        (pools, pool_pages): (Vec<Arc<PageMap>>, Arc<[AtomicU32]>),
        limits: Limits,
        shared_stats: Arc<SharedStats>,
    ) -> Self {
        let Limits { max_rooms, max_peers, .. } = limits;
        Self {
            limits,
            identity,
            fabric,
            queues,
            pools: pools.into_iter().map(Some).collect(),
            pool_pages,
            // Peers that are given up keep their place until their lanes are down.
            peers: Peers::new(max_peers.saturating_mul(2)),
            sending: Sending::new(max_rooms),
            receiving: Receiving::new(max_rooms),
            timers: Timers::default(),
            verdicts: Verdicts::default(),
            posting: Vec::new(),
            events: Vec::with_capacity(256),
            due: Vec::new(),
            to_control: VecDeque::new(),
            idle_waiters: Vec::new(),
            draining: false,
            stopping: false,
            hashed_bytes: 0,
            frame_bytes: FRAME_BYTES,
            stats: Stats::default(),
            shared_stats,
        }
    }

    /// One turn. Says whether anything happened.
    pub(crate) fn turn(&mut self, now: Micros) -> bool {
        // Mail first, all of it: a caller that was told of a peer may grant to it at once.
        let mut progress = self.take_mail(now);
        progress |= self.take_submissions(now);
        progress |= self.poll(now);
        progress |= self.fire_timers(now);
        progress |= self.verify_some(now);
        progress |= self.post_all(now);
        progress |= self.flush();
        self.stats.busy_turns += u64::from(progress);
        progress
    }

    /// When a turn is due even if nothing else happens.
    pub(crate) fn next_deadline(&mut self) -> Option<Micros> {
        let (sending, receiving) = (&self.sending, &self.receiving);
        self.timers.next(|timer| match timer {
            Timer::Send { slot, generation } => {
                sending.rooms.generation(slot) == generation
                    && sending.rooms.get(slot).is_some_and(|r| r.core.is_live())
            }
            Timer::Receive { slot, generation } => {
                receiving.rooms.generation(slot) == generation
                    && receiving.rooms.get(slot).is_some_and(|r| r.core.is_live())
            }
            Timer::SendFence { slot, generation } => {
                sending.rooms.generation(slot) == generation && sending.rooms.get(slot).is_some()
            }
            Timer::ReceiveFence { slot, generation } => {
                receiving.rooms.generation(slot) == generation
                    && receiving.rooms.get(slot).is_some()
            }
        })
    }

    /// Whether the worker was told to stop, every room is released, and peers were told of theirs.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stopping
            && (self.sending.rooms.is_empty() && self.receiving.rooms.is_empty()
                || self.fabric.is_stuck())
            && !self.has_backlog()
    }

    pub(crate) fn fabric_mut(&mut self) -> &mut F {
        &mut self.fabric
    }

    pub(crate) fn note_sleep(&mut self) {
        self.stats.sleeps += 1;
        self.publish_stats();
    }

    pub(crate) fn publish_stats(&self) {
        self.shared_stats.publish(&self.stats);
    }

    fn take_submissions(&mut self, now: Micros) -> bool {
        let mut taken = false;
        for _ in 0..SUBMISSIONS_PER_TURN {
            let Ok(submission) = self.queues.submissions.try_recv() else { break };
            taken = true;
            match submission {
                Submission::Open { cell, peer, deadline } => self.open(now, cell, peer, deadline),
                Submission::Write { cell, chunk } => self.write(now, &cell, chunk),
                Submission::Finish { cell, aux } => self.finish(now, &cell, aux),
                Submission::Grant(order) => self.grant(now, *order),
                Submission::Abort { cell, kind, cause } => self.abort(now, &cell, kind, cause),
                Submission::WhenIdle { peer, reply } => {
                    self.idle_waiters.push((peer, reply));
                    self.answer_idle();
                }
                Submission::DropPool { pool, reply } => {
                    let _ = reply.send(self.drop_pool(pool));
                }
                Submission::Drain { peer } => self.drain(peer),
                Submission::Stop => self.stop(now),
            }
        }
        taken
    }

    fn take_mail(&mut self, now: Micros) -> bool {
        let mut taken = false;
        for _ in 0..MAIL {
            let Ok(mail) = self.queues.inbox.try_recv() else { break };
            taken = true;
            match mail {
                ToWorker::PeerUp(up) => self.peer_up(now, up),
                ToWorker::Message { peer, message } => {
                    if let Some(index) = self.peers.find(peer) {
                        self.message(now, index, message);
                    } else {
                        self.stats.late_events += 1;
                    }
                }
                ToWorker::PeerDown { peer } => {
                    if let Some(index) = self.peers.find(peer) {
                        if let Some(known) = self.peers.get_mut(index) {
                            known.session_down();
                        }
                        self.fabric.session_down(index);
                    }
                }
                ToWorker::PeerGone { peer, kind, causes } => {
                    self.peer_gone(now, peer, kind, &causes)
                }
                ToWorker::LaneUp { peer, lane } => self.lane_up(peer, lane),
                ToWorker::RailDown { rail, cause } => self.fabric.close_rail(rail, &cause),
            }
        }
        taken
    }

    fn peer_up(&mut self, now: Micros, up: PeerUp) {
        let PeerUp { peer, addr, pairings, outbox } = up;
        let known = self.peers.find(peer).or_else(|| self.peers.revive(peer));
        let (index, known) = match known {
            Some(index) => (index, true),
            None => match self.peers.insert(peer, addr.to_string(), pairings.clone()) {
                Some(index) => (index, false),
                None => return self.expel(peer, "the worker's peer table is full"),
            },
        };
        let Some(entry) = self.peers.get_mut(index) else { return };
        if !entry.is_same(&pairings) {
            // Its rooms were checked against the layouts it had.
            return self.expel(peer, "it came back with other layouts than it had");
        }
        entry.session_up(now, addr.to_string(), outbox);
        // Ends before beginnings: an id that is used again must have ended first. A peer that was given
        // up and comes back, having been stopped, hears what became of its rooms.
        let told: Vec<Message> = self.verdicts.of(peer).cloned().collect();
        for message in told {
            if !mutations::is(Mutation::VerdictsNotRepeated) {
                self.peers.tell(index, message);
            }
        }
        if known {
            self.resume_senders(index);
            self.resume_receivers(now, index);
            let questions: Vec<_> =
                self.peers.get(index).into_iter().flat_map(|peer| peer.links.questions()).collect();
            for lane in questions {
                if !mutations::is(Mutation::TalliesNotAskedAgain) {
                    self.peers.tell(index, Message::LaneLost { lane });
                }
            }
        }
        self.peers.tell(index, Message::Sync);
    }

    fn expel(&mut self, peer: Incarnation, cause: &str) {
        self.to_control.push_back(ToControl::Expel { peer, cause: cause.to_owned() });
    }

    fn message(&mut self, now: Micros, peer: PeerIndex, message: Message) {
        match message {
            Message::Grant(grant) => self.granted(now, peer, grant),
            Message::Finished { room, epoch, sent, aux, checksum } => {
                self.told_finished(now, peer, (room, epoch), sent, aux, checksum);
            }
            Message::Landed { room, epoch, .. } => {
                self.sender_told(now, peer, (room, epoch), Ok(()));
            }
            Message::Failed { room, epoch, to, mut failure } => {
                // Whatever it says of itself, it is about this room.
                (failure.room, failure.epoch) = (room, epoch);
                match to {
                    Role::Sender => self.sender_told(now, peer, (room, epoch), Err(*failure)),
                    Role::Receiver => self.receiver_told_failed(now, peer, (room, epoch), *failure),
                }
            }
            Message::Drained { epoch } => self.told_drained(now, peer, epoch),
            Message::LaneLost { lane } => self.told_lane_lost(peer, lane),
            Message::LaneTally { lane, tally } => {
                self.told_lane_tally(now, peer, lane, tally.as_ref());
            }
            Message::Sync => self.senders_synced(now, peer),
            Message::Rails(card) => {
                if let Some(known) = self.peers.get_mut(peer) {
                    known.locate(&card.pools);
                }
            }
            Message::LaneReady { lane } => self.fabric.lane_ready(peer, lane),
            // The control plane's own; it does not forward them.
            Message::Drain
            | Message::Bye { .. }
            | Message::Heartbeat
            | Message::LaneRequest { .. }
            | Message::LaneTokens { .. }
            | Message::LaneOffer { .. }
            | Message::LaneAnswer { .. }
            | Message::LaneRefused { .. } => self.stats.late_events += 1,
        }
    }

    fn peer_gone(&mut self, now: Micros, peer: Incarnation, kind: FailureKind, causes: &[String]) {
        let Some(index) = self.peers.find(peer) else { return };
        self.fail_senders_of(now, index, kind, causes);
        self.fail_receivers_of(now, index, kind, causes);
        self.peers.give_up(index);
        self.fabric.close_peer(index, "the peer is gone");
        self.bury(index);
    }

    /// Removes a peer that is given up, once its lanes are down and its rooms released.
    fn bury(&mut self, index: PeerIndex) {
        let over = self.peers.get(index).is_some_and(|peer| peer.gone && peer.links.none_stand());
        if over && !self.rooms_with(index) {
            self.posting.retain(|&posting| posting != index);
            self.peers.remove(index);
        }
    }

    fn rooms_with(&self, index: PeerIndex) -> bool {
        self.sending
            .rooms
            .iter()
            .any(|(_, room)| room.bound.as_ref().is_some_and(|bound| bound.peer == index))
            || self.receiving.rooms.iter().any(|(_, room)| room.peer == index)
    }

    fn poll(&mut self, now: Micros) -> bool {
        let mut events = std::mem::take(&mut self.events);
        let mut gate = Grants {
            receiving: &mut self.receiving,
            peers: &self.peers,
            stats: &mut self.stats,
            now,
        };
        let progress = self.fabric.poll(&mut gate, &mut events);
        self.after_poll(now);
        for event in events.drain(..) {
            self.event(now, event);
        }
        self.events = events;
        progress
    }

    fn event(&mut self, now: Micros, event: Event) {
        match event {
            Event::Sent { tag } => {
                if self.sending.rooms.get_exact(tag.slot, tag.generation).is_some() {
                    self.step_sender(now, tag.slot, SenderEvent::Sent, Vec::new());
                }
            }
            Event::Acked { tag, landed } => {
                self.stats.bytes_sent += landed.bytes;
                if self.sending.rooms.get_exact(tag.slot, tag.generation).is_some() {
                    self.step_sender(now, tag.slot, SenderEvent::Acked(landed), Vec::new());
                }
            }
            Event::Rejected { tag, lane, reason } => self.rejected(now, tag, Some(lane), reason),
            Event::Unsendable { tag, status, addr } => self.unsendable(now, tag, status, addr),
            Event::LaneOpen { peer, number } => {
                if let Some(peer) = self.peers.get(peer).map(|known| known.incarnation) {
                    self.to_control.push_back(ToControl::LaneOpen { peer, lane: number });
                }
            }
            Event::LaneDown(down) => self.lane_down(now, *down),
            Event::Returned { peer, posting } => {
                let tag = posting.tag;
                let live = self.sending.rooms.get_exact(tag.slot, tag.generation);
                if live.is_some_and(|room| room.core.may_replay() && !room.is_suspect()) {
                    self.post_first(peer, *posting);
                }
            }
            Event::SourceQuiet { tag } => self.source_quiet(now, tag),
            Event::TargetQuiet { slot, epoch } => self.target_quiet(now, slot, epoch),
        }
    }

    fn fire_timers(&mut self, now: Micros) -> bool {
        let mut due = std::mem::take(&mut self.due);
        self.timers.take_due(now, &mut due);
        let fired = !due.is_empty();
        for timer in due.drain(..) {
            match timer {
                Timer::Send { slot, generation } => self.sender_tick(now, slot, generation),
                Timer::Receive { slot, generation } => self.receiver_tick(now, slot, generation),
                Timer::SendFence { slot, generation } => {
                    self.sender_fence_tick(now, slot, generation);
                }
                Timer::ReceiveFence { slot, generation } => {
                    self.receiver_fence_tick(now, slot, generation);
                }
            }
        }
        self.due = due;
        fired
    }

    /// Sends what waits for the control plane and for sessions.
    fn flush(&mut self) -> bool {
        let mut sent = false;
        while let Some(mail) = self.to_control.pop_front() {
            match self.queues.control.try_send(mail) {
                Ok(()) => sent = true,
                Err(mpsc::error::TrySendError::Full(mail)) => {
                    self.to_control.push_front(mail);
                    break;
                }
                // Nobody listens any more: the engine is going away.
                Err(mpsc::error::TrySendError::Closed(_)) => {}
            }
        }
        for peer in std::mem::take(&mut self.peers.deaf) {
            self.expel(peer, "it does not read what it is answered");
            sent = true;
        }
        sent |= self.peers.flush();
        if self.stopping {
            self.answer_idle();
        }
        sent
    }

    /// Whether something waits for a queue to have room; nobody wakes the worker for that.
    pub(crate) fn has_backlog(&self) -> bool {
        self.peers.has_backlog() || !self.to_control.is_empty()
    }

    fn abort(&mut self, now: Micros, cell: &RoomCell, kind: FailureKind, cause: String) {
        let slot = cell.slot.load(Ordering::Relaxed);
        if slot == NO_SLOT {
            return;
        }
        match cell.role {
            Role::Sender => {
                if self.sending.rooms.get(slot).is_some_and(|room| std::ptr::eq(&*room.cell, cell))
                {
                    self.step_sender(now, slot, SenderEvent::Fault(kind), vec![cause]);
                }
            }
            Role::Receiver => {
                if self
                    .receiving
                    .rooms
                    .get(slot)
                    .is_some_and(|room| std::ptr::eq(&*room.cell, cell))
                {
                    self.step_receiver(now, slot, ReceiverEvent::Fault(kind), vec![cause]);
                }
            }
        }
    }

    fn stop(&mut self, now: Micros) {
        self.stopping = true;
        let causes = vec!["the engine was shut down".to_owned()];
        for slot in self.sending.rooms.indices() {
            let event = SenderEvent::Fault(FailureKind::Shutdown);
            self.step_sender(now, slot, event, causes.clone());
        }
        for slot in self.receiving.rooms.indices() {
            let event = ReceiverEvent::Fault(FailureKind::Shutdown);
            self.step_receiver(now, slot, event, causes.clone());
        }
    }

    /// Ends the worker: what is still queued is answered, lanes are closed, and every room that is
    /// left, which only a panic leaves, is ended and released. Says whether the kernel let go of all
    /// memory.
    pub(crate) fn close(&mut self, now: Micros, cause: &str) -> bool {
        self.stopping = true;
        self.queues.submissions.close();
        while self.take_submissions(now) {}
        let closed = self.fabric.close();
        let sending = self.sending.rooms.iter().map(|(_, room)| Arc::clone(&room.cell));
        let receiving = self.receiving.rooms.iter().map(|(_, room)| Arc::clone(&room.cell));
        for cell in sending.chain(receiving).collect::<Vec<_>>() {
            self.end_only(now, &cell, FailureKind::Shutdown, cause);
            // What the kernel still holds is never said to be quiet.
            if closed {
                cell.release();
            }
        }
        self.flush();
        closed
    }

    /// Ends a room outside its state machine: one that has no place in the tables.
    fn end_unstarted(&mut self, now: Micros, cell: &Arc<RoomCell>, kind: FailureKind, cause: &str) {
        self.end_only(now, cell, kind, cause);
        cell.release();
    }

    fn end_only(&mut self, now: Micros, cell: &Arc<RoomCell>, kind: FailureKind, cause: &str) {
        let failure = self.failure(cell, cell.role, kind, None, vec![cause.to_owned()]);
        cell.end(Err(failure), now.0);
        self.tell_ended(Arc::clone(cell));
    }

    /// Takes no more rooms of a peer, or of any.
    fn drain(&mut self, peer: Option<Incarnation>) {
        let index = peer.and_then(|peer| self.peers.find(peer));
        match (peer, index.and_then(|index| self.peers.get_mut(index))) {
            (None, _) => self.draining = true,
            (Some(_), Some(peer)) => peer.draining = true,
            (Some(_), None) => return,
        }
        self.refuse_waiting(index);
    }

    /// Forgets a pool unless rooms use it; gives their number.
    fn drop_pool(&mut self, pool: PoolId) -> usize {
        let sending = self.sending.rooms.iter().filter(|(_, room)| {
            room.cell
                .bound()
                .is_some_and(|bound| bound.pools.iter().any(|granted| granted.pool == pool))
        });
        let users = sending.count() + self.receivers_using(pool);
        if users == 0
            && let Some(map) = self.pools.get_mut(pool.index())
        {
            let gone = map.take();
            if let Some(pages) = self.pool_pages.get(pool.index()) {
                pages.store(0, Ordering::Release);
            }
            if let Some(gone) = gone {
                let others: Vec<&PageMap> = self.pools.iter().flatten().map(|map| &**map).collect();
                self.fabric.forget_pool(&gone, &others);
            }
        }
        users
    }

    /// Answers those who wait for rooms to be over, and buries peers.
    fn after_release(&mut self) {
        if !self.peers.any_gone() {
            return self.answer_idle();
        }
        let gone = |(index, peer): (PeerIndex, &Peer)| peer.gone.then_some(index);
        let gone: Vec<PeerIndex> = self.peers.iter().filter_map(gone).collect();
        for index in gone {
            self.bury(index);
        }
        self.answer_idle();
    }

    fn answer_idle(&mut self) {
        for (peer, reply) in std::mem::take(&mut self.idle_waiters) {
            let busy = match peer {
                // Who waits for this ends the sessions next: peers are told of their rooms before.
                None => {
                    !self.sending.rooms.is_empty()
                        || !self.receiving.rooms.is_empty()
                        || self.stopping && self.peers.has_backlog()
                }
                // Given up or not: its rooms are over only when they are released.
                Some(peer) => self
                    .peers
                    .iter()
                    .any(|(at, known)| known.incarnation == peer && self.rooms_with(at)),
            };
            if !busy {
                let _ = reply.send(());
            } else if !reply.is_closed() {
                self.idle_waiters.push((peer, reply));
            }
        }
    }

    fn tell_ended(&mut self, cell: Arc<RoomCell>) {
        self.to_control.push_back(ToControl::Ended(cell));
    }

    /// Frames of a sending room that were posted again.
    fn retries_of(&self, cell: &RoomCell) -> u32 {
        let room = self.sending.rooms.get(cell.slot.load(Ordering::Relaxed));
        room.filter(|room| std::ptr::eq(&*room.cell, cell)).map_or(0, |room| room.replayed)
    }

    /// A failure of a room as this engine sees it.
    fn failure(
        &self,
        cell: &RoomCell,
        role: Role,
        kind: FailureKind,
        lane: Option<u16>,
        causes: Vec<String>,
    ) -> Failure {
        let bound = cell.bound();
        let mut failure = Failure {
            kind,
            room: cell.room,
            epoch: bound.map_or(Epoch(0), |bound| bound.epoch),
            seen_by: role,
            reporter: self.identity,
            peer: bound.map(|bound| bound.peer),
            peer_addr: bound.map(|bound| bound.peer_addr.clone()),
            lane,
            landed: cell.landed(),
            retries: self.retries_of(cell),
            causes,
        };
        failure.bound();
        failure
    }
}
