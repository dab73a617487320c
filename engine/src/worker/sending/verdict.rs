//! How sending rooms end: suspicions, verdicts, release, and what is said again after a reconnect.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::WaitingGrant;
use crate::fabric::{Fabric, PeerIndex, RoomTag};
use crate::failure::{Failure, FailureKind, Landed};
use crate::ids::{Epoch, Micros, Role, RoomId, RoomState};
use crate::mutations::{self, Mutation};
use crate::room::cell::NO_SLOT;
use crate::room::release::{PeerWrites, ReleaseEvent, ReleaseReaction};
use crate::room::sender::{SenderEvent, SenderReaction};
use crate::wire::frame::RejectReason;
use crate::wire::message::Message;
use crate::worker::peers::{LostFrame, Peer};
use crate::worker::{Timer, Worker};

/// How long a fault seen on a lane waits for the words of the control plane: a dead peer closes its
/// lanes a moment before its session, a receiver's refusal overtakes its reason.
const EXPLAIN_WAIT_MS: u64 = 50;

impl<F: Fabric> Worker<F> {
    /// A frame was refused or lost on a lane: the room stops, and the control plane has a moment to
    /// say why.
    pub(in crate::worker) fn suspect(
        &mut self,
        now: Micros,
        tag: RoomTag,
        lane: Option<u16>,
        kind: FailureKind,
        causes: Vec<String>,
    ) {
        let Some(room) = self.sending.rooms.get_exact(tag.slot, tag.generation) else { return };
        if room.suspicion.is_some() || !room.core.is_live() {
            return;
        }
        let cell = Arc::clone(&room.cell);
        let failure = self.failure(&cell, Role::Sender, kind, lane, causes);
        let until = now.after_ms(EXPLAIN_WAIT_MS);
        if let Some(room) = self.sending.rooms.get_mut(tag.slot) {
            room.suspicion = Some((until, failure));
        }
        self.timers.set(until, Timer::Send { slot: tag.slot, generation: tag.generation });
    }

    pub(in crate::worker) fn rejected(
        &mut self,
        now: Micros,
        tag: RoomTag,
        lane: Option<u16>,
        reason: RejectReason,
    ) {
        let (kind, cause) = match reason {
            RejectReason::Revoked => {
                (FailureKind::GrantRevoked, "the receiver refused a write: the grant is revoked")
            }
            RejectReason::Outside => {
                (FailureKind::OutsideGrant, "the receiver refused a write: outside the grant")
            }
        };
        self.suspect(now, tag, lane, kind, vec![cause.to_owned()]);
    }

    pub(in crate::worker) fn sender_tick(&mut self, now: Micros, slot: u32, generation: u32) {
        let Some(room) = self.sending.rooms.get_exact(slot, generation) else { return };
        if let Some((until, _)) = &mut room.suspicion
            && *until <= now
        {
            // Without a session the peer is being looked for: what comes of that is the cause. One that
            // has just come back may still be saying what it was.
            let peer = room.bound.as_ref().and_then(|bound| self.peers.get(bound.peer));
            let may_explain = |peer: &Peer| {
                !peer.has_session() || peer.session_since.after_ms(EXPLAIN_WAIT_MS) > now
            };
            if peer.is_some_and(may_explain) {
                *until = now.after_ms(EXPLAIN_WAIT_MS);
            } else if let Some((_, failure)) = room.suspicion.clone() {
                self.step_sender_with(now, slot, SenderEvent::Fault(failure.kind), failure);
            }
        }
        self.step_sender(now, slot, SenderEvent::Tick, Vec::new());
        if let Some(room) = self.sending.rooms.get_exact(slot, generation)
            && room.core.is_live()
        {
            let suspicion = room.suspicion.as_ref().map_or(Micros(u64::MAX), |(until, _)| *until);
            let next = room.core.deadline().min(if suspicion > now {
                suspicion
            } else {
                Micros(u64::MAX)
            });
            self.timers.set(next, Timer::Send { slot, generation });
        }
    }

    /// The receiver's words about a room.
    pub(in crate::worker) fn sender_told(
        &mut self,
        now: Micros,
        peer: PeerIndex,
        (room, epoch): (RoomId, Epoch),
        told: Result<(), Failure>,
    ) {
        let of_epoch = self.sending.by_epoch.get(&(peer, epoch));
        let of_room = self.sending.by_room.get(&(peer, room));
        let of_room = of_room.filter(|_| mutations::is(Mutation::OldVerdictTaken));
        let Some(&slot) = of_epoch.or(of_room) else {
            // A grant that was never matched is withdrawn; anything else is late.
            let of_epoch =
                |waiting: &WaitingGrant| waiting.peer == peer && waiting.grant.epoch == epoch;
            if mutations::is(Mutation::GrantNotWithdrawn)
                || self.sending.take_grants(room, of_epoch).is_empty()
            {
                self.stats.late_events += 1;
            }
            if told.is_err() {
                self.say_drained(peer, epoch);
            }
            return;
        };
        match told {
            Ok(()) => self.step_sender(now, slot, SenderEvent::ToldLanded(epoch), Vec::new()),
            Err(failure) => {
                self.step_sender_with(now, slot, SenderEvent::ToldFailed(epoch), failure)
            }
        }
    }

    pub(in crate::worker) fn step_sender(
        &mut self,
        now: Micros,
        slot: u32,
        event: SenderEvent,
        causes: Vec<String>,
    ) {
        let Some(room) = self.sending.rooms.get_mut(slot) else { return };
        let reaction = room.core.on(now, event);
        if room.core.is_live() {
            room.cell.count(room.core.acked());
        }
        let failure = match reaction {
            SenderReaction::Nothing
            | SenderReaction::Late
            | SenderReaction::SendFinished(_)
            | SenderReaction::Done => None,
            SenderReaction::AskVerdict(kind)
            | SenderReaction::Fail(kind)
            | SenderReaction::FailUnknown(kind) => {
                let cell = Arc::clone(&room.cell);
                let causes = if causes.is_empty() {
                    vec![self.sender_deadline_cause(slot, kind)]
                } else {
                    causes
                };
                Some(self.failure(&cell, Role::Sender, kind, None, causes))
            }
            SenderReaction::FailAsTold => None,
        };
        self.react_sender(now, slot, reaction, failure);
    }

    /// As [`Self::step_sender`], with the failure ready-made.
    pub(in crate::worker) fn step_sender_with(
        &mut self,
        now: Micros,
        slot: u32,
        event: SenderEvent,
        failure: Failure,
    ) {
        let Some(room) = self.sending.rooms.get_mut(slot) else { return };
        let reaction = room.core.on(now, event);
        self.react_sender(now, slot, reaction, Some(failure));
    }

    fn sender_deadline_cause(&self, slot: u32, kind: FailureKind) -> String {
        let state = self.sending.rooms.get(slot).map(|room| room.cell.state());
        match (kind, state) {
            (FailureKind::GrantTimeout, _) => "no grant came before the deadline".to_owned(),
            (FailureKind::DeadlineExceeded, Some(state)) => {
                format!("the deadline passed in state {state:?}")
            }
            (kind, _) => kind.slug().to_owned(),
        }
    }

    fn react_sender(
        &mut self,
        now: Micros,
        slot: u32,
        reaction: SenderReaction,
        failure: Option<Failure>,
    ) {
        let Some(room) = self.sending.rooms.get_mut(slot) else { return };
        let room_id = room.cell.room;
        match reaction {
            SenderReaction::Nothing => room.cell.advance(room.core.state()),
            SenderReaction::Late => self.stats.late_events += 1,
            SenderReaction::SendFinished(sent) => {
                room.cell.advance(room.core.state());
                let aux = room.aux.clone();
                if let Some(bound) = &room.bound {
                    let (room, epoch, checksum) = (room_id, bound.epoch, room.checksum());
                    let message = Message::Finished { room, epoch, sent, aux, checksum };
                    self.peers.tell(bound.peer, message);
                }
            }
            SenderReaction::AskVerdict(_) => {
                room.asked.clone_from(&failure);
                let deadline = room.core.deadline();
                if let (Some(bound), Some(failure)) = (&room.bound, failure) {
                    let message = Message::Failed {
                        room: room_id,
                        epoch: bound.epoch,
                        to: Role::Receiver,
                        failure: Box::new(failure),
                    };
                    self.peers.tell(bound.peer, message);
                }
                let peer = room.bound.as_ref().map(|bound| bound.peer);
                let generation = self.sending.rooms.generation(slot);
                self.timers.set(deadline, Timer::Send { slot, generation });
                self.quiet_source(now, RoomTag { slot, generation }, peer);
            }
            SenderReaction::Done => {
                if let Some(bound) = &room.bound
                    && let Some(known) = self.peers.get(bound.peer)
                {
                    // Its epoch is over: a grant of it that is said again finds this.
                    let over = Message::Drained { epoch: bound.epoch };
                    self.verdicts.keep(known.incarnation, bound.epoch, Role::Sender, over);
                }
                let sent = room.core.acked();
                self.end_sender(now, slot, Ok(()), sent);
            }
            SenderReaction::FailAsTold => {
                let landed = room.core.acked();
                if let Some(failure) = failure {
                    self.end_sender(now, slot, Err(failure), landed);
                }
            }
            SenderReaction::Fail(_) => {
                let landed = room.core.acked();
                let Some(failure) = failure else { return };
                self.tell_failed(now, slot, &failure);
                self.end_sender(now, slot, Err(failure), landed);
            }
            SenderReaction::FailUnknown(kind) => {
                let landed = room.core.acked();
                let Some(mut failure) = failure else { return };
                let first = room.asked.take().unwrap_or_else(|| failure.clone());
                failure.kind = FailureKind::VerdictUnknown;
                let under = format!("{}: {}", first.kind, first.causes.join(": "));
                let outer = if first.kind == kind || kind == FailureKind::DeadlineExceeded {
                    "everything was sent and the receiver did not answer".to_owned()
                } else {
                    format!("everything was sent and the receiver cannot be asked ({kind})")
                };
                failure.causes = vec![outer, under];
                self.tell_failed(now, slot, &failure);
                self.end_sender(now, slot, Err(failure), landed);
            }
        }
    }

    /// Tells the receiver that the room has failed, and keeps it for when it asks again.
    fn tell_failed(&mut self, now: Micros, slot: u32, failure: &Failure) {
        let Some(room) = self.sending.rooms.get(slot) else { return };
        // Shown here before it is told there: a caller that hears of the end from the peer finds it.
        room.cell.count(room.core.acked());
        room.cell.end(Err(failure.clone()), now.0);
        let Some(bound) = &room.bound else { return };
        let (room, epoch, peer) = (room.cell.room, bound.epoch, bound.peer);
        let failure = Box::new(failure.clone());
        let message = Message::Failed { room, epoch, to: Role::Receiver, failure };
        self.peers.tell(peer, message.clone());
        if let Some(known) = self.peers.get(peer) {
            self.verdicts.keep(known.incarnation, epoch, Role::Sender, message);
        }
    }

    /// The room has ended: nothing of it is posted any more, and its pages are asked back.
    fn end_sender(&mut self, now: Micros, slot: u32, verdict: Result<(), Failure>, acked: Landed) {
        let generation = self.sending.rooms.generation(slot);
        let Some(room) = self.sending.rooms.get_mut(slot) else { return };
        for _ in room.chunks.drain(..) {
            room.cell.chunk_dropped();
        }
        if room.bound.is_none() {
            let id = room.cell.room;
            self.sending.stop_waiting(id, slot);
        }
        let Some(room) = self.sending.rooms.get_mut(slot) else { return };
        if verdict.is_ok() {
            // Landed covers what its last acknowledgements would have said.
            if let Some(total) = room.core.total() {
                room.cell.count(total);
            }
        } else {
            room.cell.count(acked);
        }
        room.cell.end(verdict, now.0);
        let cell = Arc::clone(&room.cell);
        let peer = room.bound.as_ref().map(|bound| bound.peer);
        self.tell_ended(cell);
        let tag = RoomTag { slot, generation };
        self.quiet_source(now, tag, peer);
        self.leave_if_over(tag);
    }

    /// Nothing of the room is posted any more: its pages are asked back from the fabric. Once a room; one
    /// that waits for its verdict after a fault has no use for them either.
    fn quiet_source(&mut self, now: Micros, tag: RoomTag, peer: Option<PeerIndex>) {
        let RoomTag { slot, generation } = tag;
        let Some(room) = self.sending.rooms.get_exact(slot, generation) else { return };
        if !room.release.is_live() {
            return;
        }
        let fence_at = now.after_ms(self.limits.fence_after_ms);
        room.release.on(now, ReleaseEvent::Ended { peer: PeerWrites::Over, fence_at });
        let done = matches!(room.core.state(), RoomState::Success);
        let was_ready = std::mem::replace(&mut room.ready, false);
        // Never granted, so nothing of it was ever given to a lane.
        let Some(peer) = peer else { return self.source_quiet(now, tag) };
        if let Some(known) = self.peers.get_mut(peer) {
            known.returned.retain(|posting| posting.tag != tag);
            // Its slot will be another room's, of another peer perhaps.
            if was_ready && !mutations::is(Mutation::EndedStaysReady) {
                known.ready.retain(|&other| other != slot);
            }
        }
        self.timers.set(fence_at, Timer::SendFence { slot, generation });
        self.fabric.retract(peer, tag, done);
        if mutations::is(Mutation::ReleaseSourceEarly) {
            self.source_quiet(now, tag);
        }
    }

    pub(in crate::worker) fn sender_fence_tick(&mut self, now: Micros, slot: u32, generation: u32) {
        let Some(room) = self.sending.rooms.get_exact(slot, generation) else { return };
        let reaction = room.release.on(now, ReleaseEvent::Tick);
        if let Some(peer) = room.bound.as_ref().map(|bound| bound.peer) {
            self.react_release(peer, Some(RoomTag { slot, generation }), reaction);
        }
    }

    /// The fabric reads the room's pages no more.
    pub(in crate::worker) fn source_quiet(&mut self, now: Micros, tag: RoomTag) {
        let Some(room) = self.sending.rooms.get_exact(tag.slot, tag.generation) else { return };
        if room.release.on(now, ReleaseEvent::QuietHere) == ReleaseReaction::Quiet {
            self.leave_if_over(tag);
        }
    }

    /// Releases a room that has ended and whose pages are quiet.
    fn leave_if_over(&mut self, tag: RoomTag) {
        let Some(room) = self.sending.rooms.get_exact(tag.slot, tag.generation) else { return };
        if room.core.is_live() || !room.release.is_quiet() {
            return;
        }
        let Some(room) = self.sending.rooms.remove(tag.slot) else { return };
        if let Some(bound) = &room.bound {
            self.sending.by_epoch.remove(&(bound.peer, bound.epoch));
            let key = (bound.peer, room.cell.room);
            if self.sending.by_room.get(&key) == Some(&tag.slot) {
                self.sending.by_room.remove(&key);
            }
            // What went down with a lane is not sent again: let go of the pools it names.
            if let Some(known) = self.peers.get_mut(bound.peer) {
                let of_room = |frame: &&mut LostFrame| {
                    frame.epoch() == bound.epoch && !mutations::is(Mutation::ReplayEnded)
                };
                known.links.lost_mut().filter(of_room).for_each(|frame| {
                    *frame = LostFrame::Over(bound.epoch);
                });
            }
            if room.cell.verdict().is_some_and(Result::is_err) {
                self.say_drained(bound.peer, bound.epoch);
            }
        }
        room.cell.slot.store(NO_SLOT, Ordering::Relaxed);
        room.cell.release();
        self.after_release();
    }

    /// Fails every sending room with a peer.
    pub(in crate::worker) fn fail_senders_of(
        &mut self,
        now: Micros,
        peer: PeerIndex,
        kind: FailureKind,
        causes: &[String],
    ) {
        for slot in self.sending.rooms.indices() {
            let concerned = self.sending.rooms.get(slot).is_some_and(|room| {
                room.bound.as_ref().is_some_and(|bound| bound.peer == peer)
                    || room.bound.is_none()
                        && room.wanted.is_some()
                        && room.wanted == self.peers.get(peer).map(|peer| peer.incarnation)
            });
            if concerned {
                self.step_sender(now, slot, SenderEvent::Fault(kind), causes.to_vec());
            }
        }
        self.sending.forget_grants(|waiting| waiting.peer == peer);
    }

    /// Says again what stands with a peer whose session came back.
    pub(in crate::worker) fn resume_senders(&mut self, peer: PeerIndex) {
        for slot in self.sending.rooms.indices() {
            let Some(room) = self.sending.rooms.get(slot) else { continue };
            let Some(bound) = room.bound.as_ref().filter(|bound| bound.peer == peer) else {
                continue;
            };
            let (id, epoch) = (room.cell.room, bound.epoch);
            let Some(sent) = room.core.awaits_verdict() else { continue };
            let (aux, asked, checksum) = (room.aux.clone(), room.asked.clone(), room.checksum());
            self.peers.tell(peer, Message::Finished { room: id, epoch, sent, aux, checksum });
            if let Some(failure) = asked {
                let failure = Box::new(failure);
                self.peers
                    .tell(peer, Message::Failed { room: id, epoch, to: Role::Receiver, failure });
            }
        }
    }

    /// The peer has said again everything that stands: grants that it did not are forgotten there.
    pub(in crate::worker) fn senders_synced(&mut self, now: Micros, peer: PeerIndex) {
        let Some(session) = self.peers.get(peer).map(|peer| peer.session) else { return };
        for slot in self.sending.rooms.indices() {
            let forgotten = self.sending.rooms.get(slot).is_some_and(|room| {
                room.core.may_post()
                    && room
                        .bound
                        .as_ref()
                        .is_some_and(|bound| bound.peer == peer && bound.session != session)
            });
            if forgotten {
                let causes =
                    vec!["the receiver did not renew the grant after reconnecting".to_owned()];
                self.step_sender(now, slot, SenderEvent::Fault(FailureKind::PeerForgot), causes);
            }
        }
        self.sending.forget_grants(|waiting| waiting.peer == peer && waiting.session != session);
    }
}
