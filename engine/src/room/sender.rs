//! The sending side of a room.
//!
//! ```text
//! Waiting ──granted──▶ Flowing ──all sent, finish asked──▶ Finished ──landed──▶ done
//!    │                    │                                   │
//!    └──fault─────────────┴──fault──▶ failed                  ├─told failed──▶ failed
//!                                                             └─fault──▶ Closing ──told, or too late──▶ …
//! ```
//!
//! Until `Finished` is sent the receiver cannot call the room done, so a fault here ends it at once.
//! From then on the verdict is the receiver's: a fault asks for it, and a verdict that cannot be
//! learned is `VerdictUnknown`, never a guess.

use crate::failure::{FailureKind, Landed};
use crate::ids::{Epoch, Micros, RoomState};
use crate::mutations::{self, Mutation};

/// How long a sender that wants out waits for the receiver's verdict. A message there and back takes
/// microseconds to milliseconds; a peer that takes longer is on its way to being lost anyway, and whoever
/// wants out wants the pages back, for which the default limit is the same (`fence_after_ms`).
pub(crate) const VERDICT_WAIT_MS: u64 = 500;

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Sender {
    phase: Phase,
    deadline: Micros,
    /// Page writes and bytes handed in so far.
    queued: (u64, u64),
    /// Page writes posted so far, of those queued.
    posted: u64,
    /// Frames posted that have not left.
    leaving: u32,
    acked: (u64, u64),
    finish_asked: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Phase {
    Waiting,
    Flowing(Epoch),
    Finished(Epoch),
    Closing(Epoch),
    Ended(RoomState),
}

/// What happens to a sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SenderEvent {
    /// A grant was matched to this room.
    Granted { epoch: Epoch, deadline: Micros },
    /// The caller handed in a chunk.
    Queued(Landed),
    /// A frame of this many page writes was posted.
    Posted { page_writes: u64 },
    /// A frame has left.
    Sent,
    /// A frame was acknowledged as placed.
    Acked(Landed),
    /// The caller will hand in nothing more.
    FinishAsked,
    /// The receiver says that everything has landed.
    ToldLanded(Epoch),
    /// The receiver says that the room has failed.
    ToldFailed(Epoch),
    /// Something is wrong on this side.
    Fault(FailureKind),
    /// Time has passed.
    Tick,
}

/// What is to be done about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SenderReaction {
    /// Nothing.
    Nothing,
    /// Nothing: it came too late or twice, and is to be counted.
    Late,
    /// Tell the receiver that everything was sent.
    SendFinished(Landed),
    /// Tell the receiver of this fault and wait for its verdict.
    AskVerdict(FailureKind),
    /// The room is done.
    Done,
    /// The room has failed as the receiver said.
    FailAsTold,
    /// The room has failed; tell the receiver.
    Fail(FailureKind),
    /// The room has failed, its verdict unknown because of an earlier fault or this one.
    FailUnknown(FailureKind),
}

impl Sender {
    pub(crate) const fn new(grant_deadline: Micros) -> Self {
        Self {
            phase: Phase::Waiting,
            deadline: grant_deadline,
            queued: (0, 0),
            posted: 0,
            leaving: 0,
            acked: (0, 0),
            finish_asked: false,
        }
    }

    pub(crate) const fn state(&self) -> RoomState {
        match self.phase {
            Phase::Waiting => RoomState::Bootstrapping,
            Phase::Flowing(_) if self.queued.0 == 0 && !self.finish_asked => {
                RoomState::WaitingForInput
            }
            Phase::Flowing(_) | Phase::Finished(_) | Phase::Closing(_) => RoomState::Transferring,
            Phase::Ended(state) => state,
        }
    }

    /// When a [`SenderEvent::Tick`] will end something; no state is without.
    pub(crate) const fn deadline(&self) -> Micros {
        self.deadline
    }

    /// What the receiver is known to have placed.
    pub(crate) const fn acked(&self) -> Landed {
        Landed { page_writes: self.acked.0, bytes: self.acked.1 }
    }

    /// Whether the receiver has been told that everything was sent, and owes a verdict.
    pub(crate) const fn awaits_verdict(&self) -> Option<Landed> {
        match self.phase {
            Phase::Finished(_) | Phase::Closing(_) => {
                Some(Landed { page_writes: self.queued.0, bytes: self.queued.1 })
            }
            _ => None,
        }
    }

    /// What was sent in all, of a room that is done.
    pub(crate) const fn total(&self) -> Option<Landed> {
        match self.phase {
            Phase::Ended(RoomState::Success) => {
                Some(Landed { page_writes: self.queued.0, bytes: self.queued.1 })
            }
            _ => None,
        }
    }

    pub(crate) const fn is_live(&self) -> bool {
        !matches!(self.phase, Phase::Ended(_))
    }

    /// Whether frames may still be posted.
    pub(crate) const fn may_post(&self) -> bool {
        matches!(self.phase, Phase::Flowing(_))
    }

    /// Whether frames that went down with a lane may be posted again.
    pub(crate) const fn may_replay(&self) -> bool {
        matches!(self.phase, Phase::Flowing(_) | Phase::Finished(_))
    }

    pub(crate) fn on(&mut self, now: Micros, event: SenderEvent) -> SenderReaction {
        use SenderReaction as Do;
        if let Phase::Ended(_) = self.phase {
            return match event {
                SenderEvent::Tick | SenderEvent::Sent | SenderEvent::Acked(_) => Do::Nothing,
                _ => Do::Late,
            };
        }
        match event {
            SenderEvent::Granted { epoch, deadline } => {
                if self.phase != Phase::Waiting {
                    return Do::Late;
                }
                self.phase = Phase::Flowing(epoch);
                self.deadline = deadline;
                self.finish_if_all_left()
            }
            SenderEvent::Queued(landed) => {
                if self.finish_asked {
                    return Do::Late;
                }
                self.queued.0 += landed.page_writes;
                self.queued.1 += landed.bytes;
                Do::Nothing
            }
            SenderEvent::Posted { page_writes } => {
                self.posted += page_writes;
                self.leaving += 1;
                Do::Nothing
            }
            SenderEvent::Sent => {
                self.leaving = self.leaving.saturating_sub(1);
                self.finish_if_all_left()
            }
            SenderEvent::Acked(landed) => {
                self.acked.0 += landed.page_writes;
                self.acked.1 += landed.bytes;
                if mutations::is(Mutation::DoneBeforeLanded)
                    && matches!(self.phase, Phase::Finished(_))
                    && self.acked == self.queued
                {
                    self.end(RoomState::Success);
                    return Do::Done;
                }
                Do::Nothing
            }
            SenderEvent::FinishAsked => {
                if std::mem::replace(&mut self.finish_asked, true) {
                    return Do::Late;
                }
                self.finish_if_all_left()
            }
            SenderEvent::ToldLanded(epoch) => match self.phase {
                Phase::Finished(mine) | Phase::Closing(mine)
                    if mine == epoch || mutations::is(Mutation::OldVerdictTaken) =>
                {
                    self.end(RoomState::Success);
                    Do::Done
                }
                _ => Do::Late,
            },
            SenderEvent::ToldFailed(epoch) => match self.phase {
                Phase::Flowing(mine) | Phase::Finished(mine) | Phase::Closing(mine)
                    if mine == epoch || mutations::is(Mutation::OldVerdictTaken) =>
                {
                    self.end(RoomState::Failed);
                    Do::FailAsTold
                }
                _ => Do::Late,
            },
            SenderEvent::Fault(kind) => self.fault(now, kind),
            SenderEvent::Tick
                if now < self.deadline || mutations::is(Mutation::SenderDeadlineIgnored) =>
            {
                Do::Nothing
            }
            SenderEvent::Tick => match self.phase {
                Phase::Waiting => self.fault(now, FailureKind::GrantTimeout),
                Phase::Closing(_) => {
                    self.end(RoomState::Failed);
                    Do::FailUnknown(FailureKind::DeadlineExceeded)
                }
                _ => self.fault(now, FailureKind::DeadlineExceeded),
            },
        }
    }

    fn finish_if_all_left(&mut self) -> SenderReaction {
        match self.phase {
            Phase::Flowing(epoch)
                if self.finish_asked
                    && self.posted == self.queued.0
                    && (self.leaving == 0 || mutations::is(Mutation::FinishedEarly)) =>
            {
                self.phase = Phase::Finished(epoch);
                SenderReaction::SendFinished(Landed {
                    page_writes: self.queued.0,
                    bytes: self.queued.1,
                })
            }
            _ => SenderReaction::Nothing,
        }
    }

    fn fault(&mut self, now: Micros, kind: FailureKind) -> SenderReaction {
        match self.phase {
            Phase::Finished(epoch) if !ends_the_peer(kind) => {
                self.phase = Phase::Closing(epoch);
                self.deadline = now.after_ms(VERDICT_WAIT_MS);
                SenderReaction::AskVerdict(kind)
            }
            Phase::Closing(_) if !ends_the_peer(kind) => SenderReaction::Late,
            Phase::Finished(_) | Phase::Closing(_) => {
                self.end(RoomState::Failed);
                SenderReaction::FailUnknown(kind)
            }
            Phase::Waiting | Phase::Flowing(_) => {
                self.end(RoomState::Failed);
                SenderReaction::Fail(kind)
            }
            Phase::Ended(_) => SenderReaction::Late,
        }
    }

    fn end(&mut self, state: RoomState) {
        self.phase = Phase::Ended(state);
        self.deadline = Micros(u64::MAX);
    }
}

/// Whether nobody is left to ask for a verdict.
const fn ends_the_peer(kind: FailureKind) -> bool {
    matches!(
        kind,
        FailureKind::PeerDied
            | FailureKind::PeerRestarted
            | FailureKind::PeerSilent
            | FailureKind::PeerForgot
            | FailureKind::Shutdown
            | FailureKind::ProtocolViolation
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const EPOCH: Epoch = Epoch(5);
    const LATER: Micros = Micros(10_000_000);
    const CHUNK: Landed = Landed { page_writes: 4, bytes: 400 };

    fn flowing() -> Sender {
        let mut room = Sender::new(LATER);
        room.on(Micros(0), SenderEvent::Granted { epoch: EPOCH, deadline: LATER });
        room.on(Micros(0), SenderEvent::Queued(CHUNK));
        room.on(Micros(0), SenderEvent::Posted { page_writes: 4 });
        room
    }

    fn finished() -> Sender {
        let mut room = flowing();
        room.on(Micros(0), SenderEvent::Sent);
        assert_eq!(
            room.on(Micros(0), SenderEvent::FinishAsked),
            SenderReaction::SendFinished(CHUNK)
        );
        room
    }

    #[test]
    fn the_states_are_walked_forward_to_success() {
        let mut room = Sender::new(LATER);
        assert_eq!(room.state(), RoomState::Bootstrapping);
        room.on(Micros(0), SenderEvent::Granted { epoch: EPOCH, deadline: LATER });
        assert_eq!(room.state(), RoomState::WaitingForInput);
        room.on(Micros(0), SenderEvent::Queued(CHUNK));
        assert_eq!(room.state(), RoomState::Transferring);
        let mut room = finished();
        assert_eq!(room.on(Micros(1), SenderEvent::ToldLanded(EPOCH)), SenderReaction::Done);
        assert_eq!(room.state(), RoomState::Success);
    }

    #[test]
    fn finished_is_not_said_before_every_frame_has_left() {
        let mut room = flowing();
        assert_eq!(room.on(Micros(0), SenderEvent::FinishAsked), SenderReaction::Nothing);
        assert_eq!(room.on(Micros(0), SenderEvent::Sent), SenderReaction::SendFinished(CHUNK));
        assert_eq!(room.on(Micros(0), SenderEvent::FinishAsked), SenderReaction::Late);
    }

    #[test]
    fn a_room_with_nothing_to_write_still_finishes() {
        let mut room = Sender::new(LATER);
        assert_eq!(room.on(Micros(0), SenderEvent::FinishAsked), SenderReaction::Nothing);
        let reaction = room.on(Micros(0), SenderEvent::Granted { epoch: EPOCH, deadline: LATER });
        assert_eq!(reaction, SenderReaction::SendFinished(Landed::default()));
    }

    #[test]
    fn acknowledgements_alone_never_make_a_sender_done() {
        let mut room = flowing();
        room.on(Micros(0), SenderEvent::Sent);
        room.on(Micros(0), SenderEvent::Acked(CHUNK));
        assert_eq!(room.acked(), CHUNK);
        assert_eq!(room.state(), RoomState::Transferring);
        assert_eq!(room.on(Micros(0), SenderEvent::ToldLanded(EPOCH)), SenderReaction::Late);
    }

    #[test]
    fn a_fault_before_finished_ends_the_room_at_once() {
        let mut room = flowing();
        let reaction = room.on(Micros(0), SenderEvent::Fault(FailureKind::Aborted));
        assert_eq!(reaction, SenderReaction::Fail(FailureKind::Aborted));
        assert_eq!(room.state(), RoomState::Failed);
    }

    #[test]
    fn a_fault_after_finished_asks_for_the_verdict_and_takes_whichever_comes() {
        let ask = SenderReaction::AskVerdict(FailureKind::Aborted);
        for (told, end) in [
            (SenderEvent::ToldLanded(EPOCH), SenderReaction::Done),
            (SenderEvent::ToldFailed(EPOCH), SenderReaction::FailAsTold),
        ] {
            let mut room = finished();
            assert_eq!(room.on(Micros(0), SenderEvent::Fault(FailureKind::Aborted)), ask);
            assert_eq!(room.on(Micros(1), told), end);
        }
    }

    #[test]
    fn a_verdict_that_cannot_be_learned_is_unknown_never_done() {
        let mut room = finished();
        let reaction = room.on(Micros(0), SenderEvent::Fault(FailureKind::PeerDied));
        assert_eq!(reaction, SenderReaction::FailUnknown(FailureKind::PeerDied));

        let mut room = finished();
        room.on(Micros(0), SenderEvent::Fault(FailureKind::Aborted));
        let late = Micros(VERDICT_WAIT_MS * 1000);
        assert!(matches!(room.on(late, SenderEvent::Tick), SenderReaction::FailUnknown(_)));
        assert_eq!(room.on(late, SenderEvent::ToldLanded(EPOCH)), SenderReaction::Late);
        assert_eq!(room.state(), RoomState::Failed);
    }

    #[test]
    fn every_state_has_a_deadline_that_ends_it() {
        let mut waiting = Sender::new(Micros(10));
        assert_eq!(waiting.on(Micros(9), SenderEvent::Tick), SenderReaction::Nothing);
        assert_eq!(
            waiting.on(Micros(10), SenderEvent::Tick),
            SenderReaction::Fail(FailureKind::GrantTimeout)
        );
        let mut flowing = flowing();
        assert_eq!(
            flowing.on(LATER, SenderEvent::Tick),
            SenderReaction::Fail(FailureKind::DeadlineExceeded)
        );
        let mut finished = finished();
        assert_eq!(
            finished.on(LATER, SenderEvent::Tick),
            SenderReaction::AskVerdict(FailureKind::DeadlineExceeded)
        );
        assert!(finished.deadline() > LATER && finished.deadline() < Micros(u64::MAX));
    }

    #[test]
    fn an_old_epoch_and_anything_after_the_end_change_nothing() {
        let mut room = finished();
        let before = room.clone();
        assert_eq!(room.on(Micros(0), SenderEvent::ToldLanded(Epoch(4))), SenderReaction::Late);
        assert_eq!(room.on(Micros(0), SenderEvent::ToldFailed(Epoch(4))), SenderReaction::Late);
        assert_eq!(room, before);
        room.on(Micros(0), SenderEvent::ToldLanded(EPOCH));
        let ended = room.clone();
        for event in [
            SenderEvent::ToldFailed(EPOCH),
            SenderEvent::Fault(FailureKind::PeerDied),
            SenderEvent::Queued(CHUNK),
            SenderEvent::Granted { epoch: Epoch(6), deadline: LATER },
            SenderEvent::Tick,
        ] {
            assert!(matches!(
                room.on(LATER, event),
                SenderReaction::Late | SenderReaction::Nothing
            ));
            assert_eq!(room, ended);
        }
    }
}
