//! The prefill engine's rooms: `worker::sending` without pages, texts and clocks.

use super::setup::Rule;
use super::world::{
    Bound, End, FENCE_AT, Frame, GRANT_DEADLINE, Lane, Life, LostFrame, NOW, SENDER_DEADLINE,
    SendRoom, Turn, Verdict, WaitingGrant, Word, World, Wrong, epoch, side,
};
use crate::failure::{FailureKind, Landed};
use crate::ids::{Micros, Role};
use crate::room::release::{PeerWrites, Release, ReleaseEvent, ReleaseReaction};
use crate::room::sender::{Sender, SenderEvent, SenderReaction};

const HERE: Role = Role::Sender;

impl World {
    pub(super) fn send_room(&mut self, room: u8) -> Option<&mut SendRoom> {
        self.sending[usize::from(room)].as_mut()
    }

    /// `Sending::by_epoch`.
    fn room_of(&self, peer: u8, life: Life) -> Option<u8> {
        let is = |room: &Option<SendRoom>| {
            let bound = room.as_ref().and_then(|room| room.bound);
            bound.is_some_and(|bound| (bound.peer, bound.life) == (peer, life))
        };
        self.sending.iter().position(is).map(|room| room as u8)
    }
}

impl Turn<'_> {
    fn id_of(&self, life: Life) -> u8 {
        self.setup.plans[usize::from(self.world.plan_of(life))].id
    }

    /// `Worker::open`.
    pub(super) fn open(&mut self, room: u8) {
        self.world.witness.senders[usize::from(room)].0 = Verdict::Live;
        self.world.sending[usize::from(room)] = Some(SendRoom {
            core: Sender::new(GRANT_DEADLINE),
            bound: None,
            posted: 0,
            finish_asked: false,
            suspect: false,
            asked: false,
            release: Release::new(),
        });
        let id = self.setup.plans[usize::from(room)].id;
        let fits = self.world.waiting.iter().position(|grant| self.id_of(grant.life) == id);
        if let Some(at) = fits {
            let grant = self.world.waiting.remove(at);
            self.bind(room, grant);
        }
    }

    /// `Worker::granted`.
    pub(super) fn granted(&mut self, peer: u8, life: Life) {
        let known = self.world.peer(HERE, peer);
        known.latest = known.latest.max(epoch(life));
        let grant = WaitingGrant { peer, life, session: self.world.engines[side(HERE)].session };
        if let Some(room) = self.world.room_of(peer, life) {
            if let Some(room) = self.world.send_room(room) {
                room.bound = Some(grant);
            }
            return;
        }
        if let Some(verdict) = self.find_verdict(HERE, peer, life) {
            self.tell(HERE, peer, verdict);
            return self.say_drained(peer, life);
        }
        let id = self.id_of(life);
        let rooms = 0..self.setup.plans.len() as u8;
        let of_id: Vec<u8> =
            rooms.filter(|&room| self.setup.plans[usize::from(room)].id == id).collect();
        let live = |turn: &Self, room: u8, bound: bool| {
            let room = turn.world.sending[usize::from(room)].as_ref();
            room.is_some_and(|room| room.core.is_live() && room.bound.is_some() == bound)
        };
        if let Some(&room) = of_id.iter().find(|&&room| live(self, room, false)) {
            return self.bind(room, grant);
        }
        if of_id.iter().any(|&room| live(self, room, true)) {
            self.tell(HERE, peer, Word::Failed { life, to: Role::Receiver });
            return self.say_drained(peer, life);
        }
        let plan_of =
            |grant: &WaitingGrant| self.world.witness.receivers[usize::from(grant.life)].0;
        let same = |other: &WaitingGrant| {
            other.peer == peer && self.setup.plans[usize::from(plan_of(other))].id == id
        };
        let stay = self.world.waiting.iter().filter(|other| !same(other)).copied().collect();
        self.world.waiting = stay;
        self.world.waiting.push(grant);
    }

    /// `Worker::bind`; the caller sees the grant, and hands in all it has.
    fn bind(&mut self, room: u8, grant: Bound) {
        self.world.witness.senders[usize::from(room)].1 = Some(grant.life);
        if let Some(room) = self.world.send_room(room) {
            room.bound = Some(grant);
        }
        let granted = SenderEvent::Granted { epoch: epoch(grant.life), deadline: SENDER_DEADLINE };
        self.step_sender(NOW, room, granted);
        let frames = u64::from(self.setup.plans[usize::from(room)].frames);
        self.step_sender(NOW, room, SenderEvent::Queued(writes(frames)));
        if !self.setup.fine {
            self.finish(room);
        }
    }

    /// `Worker::finish`.
    pub(super) fn finish(&mut self, room: u8) {
        if let Some(room) = self.world.send_room(room) {
            room.finish_asked = true;
        }
        self.step_sender(NOW, room, SenderEvent::FinishAsked);
    }

    /// `Worker::post_one`.
    pub(super) fn post(&mut self, room: u8, lane: u8) {
        let Some(state) = self.world.send_room(room) else { return };
        let (cell, bound) = (state.posted, state.bound);
        state.posted += 1;
        if let Some(Bound { life, .. }) = bound {
            self.put(lane, Frame { room, life, cell, again: false, filler: false });
            self.step_sender(NOW, room, SenderEvent::Posted { page_writes: 1 });
            self.hurry(lane);
        }
    }

    /// `Worker::sender_told`.
    pub(super) fn sender_told(&mut self, peer: u8, life: Life, landed: bool) {
        let mut found = self.world.room_of(peer, life);
        let mut said_of = life;
        if self.setup.broken == Some(Rule::WordsNameEpochs) {
            let of_id = self.world.sending.iter().flatten().filter_map(|room| room.bound);
            if let Some(bound) = of_id.max_by_key(|bound| bound.life) {
                (found, said_of) = (self.world.room_of(bound.peer, bound.life), bound.life);
            }
        }
        let Some(room) = found else {
            self.world.waiting.retain(|grant| (grant.peer, grant.life) != (peer, life));
            if !landed {
                self.say_drained(peer, life);
            }
            return;
        };
        let event = match landed {
            true => SenderEvent::ToldLanded(epoch(said_of)),
            false => SenderEvent::ToldFailed(epoch(said_of)),
        };
        self.step_sender(NOW, room, event);
    }

    /// `Worker::step_sender` and `react_sender`.
    pub(super) fn step_sender(&mut self, now: Micros, room: u8, event: SenderEvent) {
        let Some(state) = self.world.send_room(room) else { return };
        let reaction = state.core.on(now, event);
        let Some(Bound { peer, life, .. }) = state.bound else {
            if let SenderReaction::Fail(_) = reaction {
                self.end_sender(room, Verdict::Failed);
            }
            return;
        };
        let failed = Word::Failed { life, to: Role::Receiver };
        match reaction {
            SenderReaction::Nothing | SenderReaction::Late => {}
            SenderReaction::SendFinished(sent) => {
                self.tell(HERE, peer, Word::Finished { life, sent: sent.page_writes });
            }
            SenderReaction::AskVerdict(_) => {
                state.asked = true;
                self.tell(HERE, peer, failed);
            }
            SenderReaction::Done => {
                self.keep_verdict(HERE, peer, life, Word::Drained { life });
                self.end_sender(room, Verdict::Done);
            }
            SenderReaction::FailAsTold => self.end_sender(room, Verdict::Failed),
            SenderReaction::Fail(_) | SenderReaction::FailUnknown(_) => {
                self.tell(HERE, peer, failed.clone());
                self.keep_verdict(HERE, peer, life, failed);
                let unknown = matches!(reaction, SenderReaction::FailUnknown(_));
                self.end_sender(room, if unknown { Verdict::Unknown } else { Verdict::Failed });
            }
        }
    }

    /// `Worker::end_sender`.
    fn end_sender(&mut self, room: u8, verdict: Verdict) {
        let witness = &mut self.world.witness.senders[usize::from(room)].0;
        let before = std::mem::replace(witness, verdict);
        if before != Verdict::Live {
            self.wrong(Wrong::EndedTwice);
        }
        self.retract(room);
        let Some(state) = self.world.send_room(room) else { return };
        state.release.on(NOW, ReleaseEvent::Ended { peer: PeerWrites::Over, fence_at: FENCE_AT });
        if let Some(bound) = state.bound {
            self.world.peer(HERE, bound.peer).returned.retain(|frame| frame.room != room);
        }
    }

    /// Whether the fabric still reads a room's source. One that is not guarded must not say that it does
    /// not before it knows that its writes are over, for *drained* follows from it.
    fn reads(&self, room: u8) -> bool {
        let acknowledged =
            self.setup.broken != Some(Rule::QuietWhenAcknowledged) && !self.setup.guarded;
        let reads = |lane: &Lane| {
            let begun = |&(_, frame, left): &(u64, Frame, bool)| {
                frame.room == room && (acknowledged || !left)
            };
            lane.ends[side(HERE)].peer().is_some()
                && (lane.waiting.iter().any(|frame| frame.room == room)
                    || lane.ledger.iter().any(begun))
        };
        self.world.lanes.iter().any(reads)
    }

    /// `Worker::source_quiet` of every room of which that is so: releases happen as soon as they can.
    pub(super) fn settle_sources(&mut self) {
        for room in 0..self.setup.plans.len() as u8 {
            let ended = self.world.send_room(room).is_some_and(|room| !room.core.is_live());
            if !ended || self.reads(room) {
                continue;
            }
            let Some(state) = self.world.send_room(room) else { continue };
            if state.release.on(NOW, ReleaseEvent::QuietHere) != ReleaseReaction::Quiet {
                continue;
            }
            let bound = state.bound;
            self.world.sending[usize::from(room)] = None;
            let Some(Bound { peer, life, .. }) = bound else { continue };
            if self.setup.broken != Some(Rule::ReplayStandingRooms) {
                let lost = self.world.peer(HERE, peer).links.lost_mut();
                lost.filter(|frame| frame.life() == life)
                    .for_each(|frame| *frame = LostFrame::Over(life));
            }
            if self.world.witness.senders[usize::from(room)].0 != Verdict::Done {
                self.say_drained(peer, life);
            }
        }
    }

    /// `Worker::sender_fence_tick`.
    pub(super) fn sender_fence_tick(&mut self, room: u8) {
        let Some(state) = self.world.send_room(room) else { return };
        let reaction = state.release.on(FENCE_AT, ReleaseEvent::Tick);
        if let (ReleaseReaction::Fence, Some(bound)) = (reaction, state.bound) {
            self.fence(HERE, bound.peer);
        }
    }

    /// `Worker::fail_senders_of`.
    pub(super) fn fail_senders_of(&mut self, peer: u8, kind: FailureKind) {
        for room in 0..self.setup.plans.len() as u8 {
            let bound = self.world.send_room(room).and_then(|room| room.bound);
            if bound.is_some_and(|bound| bound.peer == peer) {
                self.step_sender(NOW, room, SenderEvent::Fault(kind));
            }
        }
        self.world.waiting.retain(|grant| grant.peer != peer);
    }

    /// `Worker::resume_senders`.
    pub(super) fn resume_senders(&mut self, peer: u8) {
        for room in 0..self.setup.plans.len() as u8 {
            let Some(state) = self.world.send_room(room) else { continue };
            let Some(bound) = state.bound.filter(|bound| bound.peer == peer) else { continue };
            let (Some(sent), asked) = (state.core.awaits_verdict(), state.asked) else { continue };
            let life = bound.life;
            self.tell(HERE, peer, Word::Finished { life, sent: sent.page_writes });
            if asked {
                self.tell(HERE, peer, Word::Failed { life, to: Role::Receiver });
            }
        }
    }

    /// `Worker::senders_synced`.
    pub(super) fn senders_synced(&mut self, peer: u8) {
        let session = self.world.engines[side(HERE)].session;
        for room in 0..self.setup.plans.len() as u8 {
            let Some(state) = self.world.send_room(room) else { continue };
            let forgotten = |bound: Bound| bound.peer == peer && bound.session != session;
            if state.core.may_post() && state.bound.is_some_and(forgotten) {
                self.step_sender(NOW, room, SenderEvent::Fault(FailureKind::PeerForgot));
            }
        }
        self.world.waiting.retain(|grant| grant.peer != peer || grant.session == session);
    }

    /// `Worker::say_drained`.
    pub(super) fn say_drained(&mut self, peer: u8, life: Life) {
        let known = self.world.peer(HERE, peer);
        let forgotten =
            epoch(life) <= known.forgotten && self.setup.broken != Some(Rule::DrainedByWhoSent);
        let held = known.links.holds(|frame| frame.life() == life)
            && self.setup.broken != Some(Rule::DrainedAfterTally);
        if !forgotten && !held && self.world.room_of(peer, life).is_none() {
            self.tell(HERE, peer, Word::Drained { life });
        }
    }

    /// The prefill engine crashes: nobody reads its sources any more.
    pub(super) fn lose_senders(&mut self) {
        for (room, (verdict, _)) in self.world.witness.senders.iter_mut().enumerate() {
            if self.world.sending[room].take().is_some() && *verdict == Verdict::Live {
                *verdict = Verdict::Lost;
            }
        }
        self.world.waiting.clear();
    }

    /// Lanes of a peer that take another frame.
    pub(super) fn open_lanes(world: &World, peer: u8) -> impl Iterator<Item = u8> {
        let open = move |lane: &Lane| lane.ends[side(HERE)] == End::Up { peer };
        let lanes = world.lanes.iter().enumerate().filter(move |(_, lane)| open(lane));
        lanes.map(|(lane, _)| lane as u8)
    }
}

/// Writes of one byte each.
pub(super) const fn writes(count: u64) -> Landed {
    Landed { page_writes: count, bytes: count }
}
