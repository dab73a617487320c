//! How receiving rooms end: the verdict, told and remembered, and the release of their pages.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::fabric::{Fabric, PeerIndex};
use crate::failure::{Failure, FailureKind, Landed};
use crate::ids::{Epoch, Micros, Role};
use crate::room::cell::NO_SLOT;
use crate::room::receiver::{ReceiverEvent, ReceiverReaction};
use crate::room::release::ReleaseEvent;
use crate::wire::message::Message;
use crate::worker::{Timer, Worker};

fn wrong_counts(landed: Landed) -> String {
    let Landed { page_writes, bytes } = landed;
    format!("{page_writes} page writes and {bytes} bytes arrived, other numbers were sent")
}

impl<F: Fabric> Worker<F> {
    pub(in crate::worker) fn step_receiver(
        &mut self,
        now: Micros,
        slot: u32,
        event: ReceiverEvent,
        causes: Vec<String>,
    ) {
        let Some(room) = self.receiving.rooms.get_mut(slot) else { return };
        let before = room.core.state();
        let reaction = room.core.on(now, event);
        let failure = match reaction {
            ReceiverReaction::Fail(kind) => {
                let cell = Arc::clone(&room.cell);
                let landed = room.core.arrived();
                let causes = if causes.is_empty() {
                    vec![match kind {
                        FailureKind::DeadlineExceeded => {
                            format!("the deadline passed in state {before:?}")
                        }
                        FailureKind::CountMismatch => wrong_counts(landed),
                        kind => kind.slug().to_owned(),
                    }]
                } else {
                    causes
                };
                Some(self.failure(&cell, Role::Receiver, kind, None, causes))
            }
            _ => None,
        };
        self.react_receiver(now, slot, reaction, failure);
    }

    pub(super) fn react_receiver(
        &mut self,
        now: Micros,
        slot: u32,
        reaction: ReceiverReaction,
        failure: Option<Failure>,
    ) {
        let Some(room) = self.receiving.rooms.get_mut(slot) else { return };
        let (id, epoch, peer) = (room.cell.room, room.core.epoch(), room.peer);
        let landed = room.core.arrived();
        let failed = |failure: Failure| Message::Failed {
            room: id,
            epoch,
            to: Role::Sender,
            failure: Box::new(failure),
        };
        let (verdict, tell) = match (reaction, failure) {
            (ReceiverReaction::Nothing, _) => return room.cell.advance(room.core.state()),
            (ReceiverReaction::Late, _) => {
                self.stats.late_events += 1;
                return;
            }
            (ReceiverReaction::Verify, _) => {
                self.receiving.verifying.push_back((slot, epoch));
                return;
            }
            (ReceiverReaction::Repeat, _) => return self.answer_unknown(peer, id, epoch),
            (ReceiverReaction::Done(landed), _) => {
                (Ok(()), Some(Message::Landed { room: id, epoch, landed }))
            }
            (ReceiverReaction::FailAsTold { answer }, Some(failure)) => {
                let message = failed(failure.clone());
                (Err(failure), answer.then_some(message))
            }
            (ReceiverReaction::Fail(kind), failure) => {
                let cell = Arc::clone(&room.cell);
                let failure = failure.unwrap_or_else(|| {
                    self.failure(&cell, Role::Receiver, kind, None, vec![wrong_counts(landed)])
                });
                (Err(failure.clone()), Some(failed(failure)))
            }
            (ReceiverReaction::FailAsTold { .. }, None) => return,
        };
        if let Some(known) = self.peers.get(peer) {
            let keep = match (&tell, &verdict) {
                (Some(message), _) => Some(message.clone()),
                (None, Err(failure)) => Some(failed(failure.clone())),
                (None, Ok(())) => None,
            };
            if let Some(message) = keep {
                self.verdicts.keep(known.incarnation, epoch, Role::Receiver, message);
            }
        }
        // Shown here before it is told there: a caller that hears of the end from the peer finds it.
        if let Some(room) = self.receiving.rooms.get(slot) {
            room.cell.end(verdict, now.0);
            let cell = Arc::clone(&room.cell);
            self.tell_ended(cell);
        }
        if let Some(message) = tell {
            self.peers.tell(peer, message);
        }
        let done = matches!(reaction, ReceiverReaction::Done(_));
        let (writes, fence_at) =
            (self.peer_writes(peer, done), now.after_ms(self.limits.fence_after_ms));
        if let Some(room) = self.receiving.rooms.get_mut(slot) {
            room.verify = None;
            room.release.on(now, ReleaseEvent::Ended { peer: writes, fence_at });
        }
        let generation = self.receiving.rooms.generation(slot);
        self.timers.set(fence_at, Timer::ReceiveFence { slot, generation });
        self.fabric.revoke(peer, slot, epoch);
    }

    /// This side places nothing in the room's pages any more.
    pub(in crate::worker) fn target_quiet(&mut self, now: Micros, slot: u32, epoch: Epoch) {
        if self.receiving.rooms.get(slot).is_some_and(|room| room.core.epoch() == epoch) {
            self.step_release(now, slot, ReleaseEvent::QuietHere);
        }
    }

    /// The sender says that nothing of the epoch is on its way any more.
    pub(in crate::worker) fn told_drained(&mut self, now: Micros, peer: PeerIndex, epoch: Epoch) {
        match self.slot_of(peer, epoch) {
            Some(slot) => self.step_release(now, slot, ReleaseEvent::Drained),
            None => {
                // Most are released before: here nothing is placed without a grant.
                let incarnation = self.peers.get(peer).map(|peer| peer.incarnation);
                let over = incarnation.is_some_and(|incarnation| {
                    self.verdicts.find(incarnation, epoch, Role::Receiver).is_some()
                });
                self.stats.late_events += u64::from(!over);
            }
        }
    }

    /// A lane of the peer is down: so may be the last one that an ended room waits for.
    pub(in crate::worker) fn release_receivers_of(&mut self, now: Micros, peer: PeerIndex) {
        let Some(known) = self.peers.get(peer) else { return };
        let down = known.links.down_before();
        for slot in self.receiving.rooms.indices() {
            if self.receiving.rooms.get(slot).is_some_and(|room| room.peer == peer) {
                self.step_release(now, slot, ReleaseEvent::LanesDownBefore(down));
            }
        }
    }

    pub(in crate::worker) fn receiver_fence_tick(
        &mut self,
        now: Micros,
        slot: u32,
        generation: u32,
    ) {
        if self.receiving.rooms.get_exact(slot, generation).is_some() {
            self.step_release(now, slot, ReleaseEvent::Tick);
        }
    }

    fn step_release(&mut self, now: Micros, slot: u32, event: ReleaseEvent) {
        let Some(room) = self.receiving.rooms.get_mut(slot) else { return };
        let (peer, reaction) = (room.peer, room.release.on(now, event));
        if !self.react_release(peer, None, reaction) {
            return;
        }
        if let Some(room) = self.receiving.rooms.remove(slot) {
            self.receiving.by_epoch.remove(&room.core.epoch());
            room.cell.slot.store(NO_SLOT, Ordering::Relaxed);
            room.cell.release();
        }
        self.after_release();
    }

    pub(in crate::worker) fn fail_receivers_of(
        &mut self,
        now: Micros,
        peer: PeerIndex,
        kind: FailureKind,
        causes: &[String],
    ) {
        for slot in self.receiving.rooms.indices() {
            if self.receiving.rooms.get(slot).is_some_and(|room| room.peer == peer) {
                self.step_receiver(now, slot, ReceiverEvent::Fault(kind), causes.to_vec());
            }
        }
    }
}
