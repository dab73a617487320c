//! Which room may fail with what, and whether both sides say the same.

use super::callers::Room;
use super::run::Run;
use crate::failure::{Failure, FailureKind};
use crate::ids::Role;

/// Lanes that a room may lose; one more ends it.
const LANES_LOST_MAX: u32 = 16;

impl Run {
    /// A room fails only for reasons that concern it.
    pub(super) fn check_failure(&self, index: usize) -> Result<(), String> {
        let room = &self.rooms[index];
        let Some(Err(failure)) = &room.verdict else { return Ok(()) };
        let wrong = |why: &str| Err(format!("handle {index} fails, but {why}: {failure}"));
        let Some(&reporter) = self.by_incarnation.get(&failure.reporter) else {
            return wrong("nobody said so");
        };
        let own = reporter == room.node;
        if !own && Some(reporter) != room.peer {
            return wrong("somebody else said so");
        }
        if failure.room != room.id {
            return wrong("it is another room's");
        }
        if self.scenario.must_succeed() {
            return wrong("nothing went wrong");
        }
        // The room as whoever saw it first has it.
        let seen = if own { Some(room) } else { self.other_side(index).map(|at| &self.rooms[at]) };
        if self.may_fail(room, seen, reporter, failure) { Ok(()) } else { wrong("not for that") }
    }

    fn may_fail(
        &self,
        room: &Room,
        seen: Option<&Room>,
        reporter: usize,
        failure: &Failure,
    ) -> bool {
        use FailureKind as Kind;
        let at = &self.nodes[reporter];
        let now = at.clock(self.now_us);
        let own = reporter == room.node;
        let other = if own { room.peer } else { Some(room.node) };
        let gave_up = |kind| other.is_some_and(|other| at.gone.contains(&(other, kind)));
        let (receiver, epoch) = match room.role {
            Role::Receiver => (Some(room.node), room.epoch),
            Role::Sender => (room.peer, room.epoch),
        };
        let received = receiver.zip(epoch).and_then(|key| self.receivers.get(&key));
        let received = received.map(|&index| &self.rooms[index]);
        match failure.kind {
            Kind::Aborted => seen.is_some_and(|seen| seen.aborted),
            // A grant to a peer that is gone by the time it is given fails as its death would.
            Kind::PeerDied => {
                gave_up(failure.kind)
                    || own
                        && room.role == Role::Receiver
                        && other.is_some_and(|other| at.gone.iter().any(|&(peer, _)| peer == other))
            }
            Kind::PeerRestarted | Kind::PeerSilent => gave_up(failure.kind),
            Kind::Shutdown => at.stopping || gave_up(failure.kind),
            Kind::PeerDraining => at.draining || at.drained.contains(&room.node),
            Kind::GrantTimeout => own && room.role == Role::Sender && now >= room.deadline,
            // The sender's clock may have jumped; the grant's time is the receiver's.
            Kind::DeadlineExceeded => received.is_some_and(|received| {
                at.jumped || self.nodes[received.node].clock(self.now_us) >= received.deadline
            }),
            Kind::VerdictUnknown => {
                failure.seen_by == Role::Sender && seen.is_some_and(|seen| seen.finished)
            }
            Kind::GrantRevoked => {
                self.scenario.guarded
                    && failure.seen_by == Role::Sender
                    && received.is_some_and(|received| received.cell.state().is_terminal())
            }
            Kind::RoomBusy => {
                !own && self.rooms.iter().any(|busy| {
                    busy.node == reporter
                        && busy.role == Role::Sender
                        && busy.id == room.id
                        && busy.peer == Some(room.node)
                        && busy.epoch != room.epoch
                })
            }
            // One lane after the other, or the receiver had given the sender up in between and knows
            // nothing of what came on the lanes it had.
            Kind::LaneLost => other.is_some_and(|other| {
                let lost = &self.world.borrow().lossy_downs;
                lost.get(&(reporter, other)).is_some_and(|&lost| lost > LANES_LOST_MAX)
                    || self.nodes[other].gone.iter().any(|&(peer, _)| peer == reporter)
            }),
            Kind::LocalAccess
            | Kind::RemoteAccess
            | Kind::RemoteOperation
            | Kind::ReceiverNotReady => {
                let key = receiver.zip(epoch);
                key.is_some_and(|(receiver, epoch)| {
                    let culprit = (receiver, epoch, failure.kind.slug());
                    self.world.borrow().culprits.contains(&culprit)
                })
            }
            // Nothing here lies, forgets, or changes bytes.
            _ => false,
        }
    }

    /// Both sides of a room say the same, where one has told the other.
    pub(super) fn check_agreement(&self, index: usize) -> Result<(), String> {
        let Some(other) = self.other_side(index) else { return Ok(()) };
        let (sender, receiver) = match self.rooms[index].role {
            Role::Sender => (index, other),
            Role::Receiver => (other, index),
        };
        let (sends, receives) = (&self.rooms[sender], &self.rooms[receiver]);
        let disagree =
            |why: &str| Err(format!("handles {sender} and {receiver} of one room: {why}"));
        match (&sends.verdict, &receives.verdict) {
            (Some(Err(failure)), Some(Ok(()))) if failure.kind != FailureKind::VerdictUnknown => {
                disagree(&format!("the receiver is done, the sender: {failure}"))
            }
            (Some(Ok(())), Some(Err(failure))) => {
                disagree(&format!("the sender is done, the receiver: {failure}"))
            }
            (Some(Err(ours)), Some(Err(theirs))) => {
                let first_hand = |failure: &Failure, room: &Room| {
                    failure.reporter == self.nodes[room.node].incarnation
                };
                // Each saw something for itself, or one had asked for the other's word and not got it.
                let apart = first_hand(ours, sends) && first_hand(theirs, receives);
                let unheard = ours.kind == FailureKind::VerdictUnknown;
                if ours == theirs || apart || unheard {
                    return Ok(());
                }
                disagree(&format!("different words: {ours} / {theirs}"))
            }
            _ => Ok(()),
        }
    }
}
