//! The worker: one thread that owns its lanes and rooms. Nothing on it is shared.
//!
//! One turn: take what callers and the control plane put in the queues, let the fabric complete and
//! place, step the rooms, post what fits, send what is to be said. Time is handed in, so that a turn
//! can be driven by a clock or by a simulation.

pub(crate) mod mail;
mod peers;
mod receiving;
pub(crate) mod run;
mod sending;
mod slots;
pub(crate) mod stats;
pub(crate) mod submit;
mod timers;
mod verdicts;
pub(crate) mod wake;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tokio::sync::{mpsc, oneshot};

use self::mail::{PeerUp, ToControl, ToWorker};
use self::peers::{Peer, Peers};
use self::receiving::{Grants, Receiving};
use self::sending::Sending;
use self::slots::Slots;
use self::stats::{SharedStats, Stats};
use self::submit::Submission;
pub(crate) use self::timers::Timer;
use self::timers::Timers;
use self::verdicts::Verdicts;
use crate::fabric::{Event, Fabric, PeerIndex};
use crate::failure::{Failure, FailureKind};
use crate::ids::{Epoch, Incarnation, Micros, Role};
use crate::memory::{PageMap, PoolId};
use crate::room::cell::{NO_SLOT, RoomCell};
use crate::room::receiver::ReceiverEvent;
use crate::room::sender::SenderEvent;
use crate::wire::message::Message;

/// Submissions taken in one turn: enough to empty a burst, few enough that lanes are looked at every
/// few hundred microseconds.
const SUBMISSIONS_PER_TURN: usize = 512;
/// Mail of the control plane that may wait for the worker; more holds the sessions back. A turn takes
/// all that was there when it began.
pub(crate) const MAIL: usize = 4096;

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
    stopping: bool,
    stats: Stats,
    shared_stats: Arc<SharedStats>,
}

impl<F: Fabric> Worker<F> {
    pub(crate) fn new(
        identity: Incarnation,
        fabric: F,
        queues: Queues,
        pools: Vec<Arc<PageMap>>,
        max_rooms: usize,
        max_peers: usize,
        shared_stats: Arc<SharedStats>,
    ) -> Self {
        Self {
            identity,
            fabric,
            queues,
            pools: pools.into_iter().map(Some).collect(),
            // Peers that are given up keep their place until their lanes are down.
            peers: Peers(Slots::new(max_peers.saturating_mul(2))),
            sending: Sending::new(max_rooms),
            receiving: Receiving::new(max_rooms),
            timers: Timers::default(),
            verdicts: Verdicts::default(),
            posting: Vec::new(),
            events: Vec::with_capacity(256),
            due: Vec::new(),
            to_control: VecDeque::new(),
            idle_waiters: Vec::new(),
            stopping: false,
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
        })
    }

    /// Whether the worker was told to stop and every room is released.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stopping
            && self.sending.rooms.is_empty()
            && self.receiving.rooms.is_empty()
            && self.to_control.is_empty()
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
                    if let Some(peer) =
                        self.peers.find(peer).and_then(|index| self.peers.get_mut(index))
                    {
                        peer.session_down();
                    }
                }
                ToWorker::PeerGone { peer, kind, causes } => {
                    self.peer_gone(now, peer, kind, &causes)
                }
                ToWorker::LaneUp { peer, lane, stream, leaves_host } => match self.peers.find(peer)
                {
                    Some(index) => {
                        if let Some(peer) = self.peers.get_mut(index) {
                            peer.lanes += 1;
                        }
                        self.fabric.add_lane(index, lane, stream, leaves_host);
                    }
                    None => {
                        let cause = "its peer is gone".to_owned();
                        self.to_control.push_back(ToControl::LaneDown { peer, lane, cause });
                    }
                },
            }
        }
        taken
    }

    fn peer_up(&mut self, now: Micros, up: PeerUp) {
        let PeerUp { peer, addr, pairings, outbox } = up;
        let (index, known) = match self.peers.find(peer) {
            Some(index) => (index, true),
            None => match self.peers.0.insert(Peer::new(peer, addr.to_string())) {
                Ok((index, _)) => (PeerIndex(index), false),
                Err(_) => {
                    let cause = "the worker's peer table is full".to_owned();
                    self.to_control.push_back(ToControl::Expel { peer, cause });
                    return;
                }
            },
        };
        if let Some(peer) = self.peers.get_mut(index) {
            peer.addr = addr.to_string();
            peer.session_up(pairings, outbox);
        }
        if known {
            self.resume_receivers(now, index);
            self.resume_senders(index);
            let told: Vec<Message> = self.verdicts.of(peer).cloned().collect();
            for message in told {
                self.peers.tell(index, message);
            }
        }
        self.peers.tell(index, Message::Sync);
    }

    fn message(&mut self, now: Micros, peer: PeerIndex, message: Message) {
        match message {
            Message::Grant(grant) => self.granted(now, peer, grant),
            Message::Finished { epoch, sent, aux, .. } => {
                self.told_finished(now, peer, epoch, sent, aux)
            }
            Message::Landed { epoch, .. } => self.sender_told(now, peer, epoch, Ok(())),
            Message::Failed { epoch, to: Role::Sender, failure, .. } => {
                self.sender_told(now, peer, epoch, Err(*failure));
            }
            Message::Failed { epoch, to: Role::Receiver, failure, .. } => {
                self.receiver_told_failed(now, peer, epoch, *failure);
            }
            // On lanes nothing lands without a grant, so the receiver need not wait for this.
            Message::Drained { .. } => {}
            Message::Sync => self.senders_synced(now, peer),
            // The control plane's own; it does not forward them.
            Message::Drain
            | Message::Bye { .. }
            | Message::Heartbeat
            | Message::LaneRequest { .. }
            | Message::LaneTokens { .. } => self.stats.late_events += 1,
        }
    }

    fn peer_gone(&mut self, now: Micros, peer: Incarnation, kind: FailureKind, causes: &[String]) {
        let Some(index) = self.peers.find(peer) else { return };
        self.fail_senders_of(now, index, kind, causes);
        self.fail_receivers_of(now, index, kind, causes);
        self.verdicts.forget(peer);
        if let Some(peer) = self.peers.get_mut(index) {
            peer.session_down();
            peer.gone = true;
        }
        self.fabric.close_peer(index, "the peer is gone");
        self.bury(index);
    }

    /// Removes a peer that is given up, once its lanes are down and its rooms released.
    fn bury(&mut self, index: PeerIndex) {
        let over = self.peers.get(index).is_some_and(|peer| peer.gone && peer.lanes == 0);
        if over && !self.rooms_with(index) {
            self.posting.retain(|&posting| posting != index);
            self.peers.0.remove(index.0);
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
            Event::Rejected { tag, lane, reason } => self.rejected(now, tag, lane, reason),
            Event::Lost { tag, lane } => {
                let cause = "the lane went down with writes of this room under way".to_owned();
                self.suspect(now, tag, lane, FailureKind::LaneLost, cause);
            }
            Event::LaneDown { peer, lane, cause } => {
                if let Some(known) = self.peers.get_mut(peer) {
                    known.lanes = known.lanes.saturating_sub(1);
                    let peer = known.incarnation;
                    self.to_control.push_back(ToControl::LaneDown { peer, lane, cause });
                }
                self.bury(peer);
            }
            Event::SourceQuiet { tag } => {
                self.source_quiet(tag);
                self.after_release();
            }
            Event::TargetQuiet { slot, epoch } => {
                self.target_quiet(slot, epoch);
                self.after_release();
            }
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
        for peer in self.peers.0.iter_mut().filter(|peer| peer.has_backlog()) {
            sent |= peer.flush();
        }
        sent
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
            self.step_sender(now, slot, SenderEvent::Fault(FailureKind::Shutdown), causes.clone());
        }
        for slot in self.receiving.rooms.indices() {
            self.step_receiver(
                now,
                slot,
                ReceiverEvent::Fault(FailureKind::Shutdown),
                causes.clone(),
            );
        }
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
            && let Some(pool) = self.pools.get_mut(pool.index())
        {
            *pool = None;
        }
        users
    }

    /// Answers those who wait for rooms to be over, and buries peers.
    fn after_release(&mut self) {
        let gone: Vec<u32> =
            self.peers.0.iter().filter(|(_, peer)| peer.gone).map(|(index, _)| index).collect();
        for index in gone {
            self.bury(PeerIndex(index));
        }
        self.answer_idle();
    }

    fn answer_idle(&mut self) {
        for (peer, reply) in std::mem::take(&mut self.idle_waiters) {
            let busy = match peer {
                None => !self.sending.rooms.is_empty() || !self.receiving.rooms.is_empty(),
                Some(peer) => self.peers.find(peer).is_some_and(|index| self.rooms_with(index)),
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
        Failure {
            kind,
            room: cell.room,
            epoch: bound.map_or(Epoch(0), |bound| bound.epoch),
            seen_by: role,
            reporter: self.identity,
            peer: bound.map(|bound| bound.peer),
            peer_addr: bound.map(|bound| bound.peer_addr.clone()),
            lane,
            landed: cell.landed(),
            retries: 0,
            causes,
        }
        .bounded()
    }
}
