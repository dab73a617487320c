//! The receiving side of a room. Its verdict is the room's.
//!
//! ```text
//! Open ──finished(counts)──▶ Finished ──arrivals reach the counts──▶ (Verifying ──▶) done
//!   └──────told failed, fault, deadline, wrong counts or checksum──────────────▶ failed
//! ```
//!
//! The finished message may overtake data; it waits for the counts. Data can never be late for it:
//! nothing is done before it has been placed.

use crate::failure::{FailureKind, Landed};
use crate::ids::{Epoch, Micros, RoomState};
use crate::mutations::{self, Mutation};

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Receiver {
    phase: Phase,
    epoch: Epoch,
    deadline: Micros,
    arrived: (u64, u64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Phase {
    Open,
    Finished {
        page_writes: u64,
        bytes: u64,
        verify: bool,
    },
    /// Everything has landed, and its checksum is being taken.
    Verifying,
    Ended(RoomState),
}

/// What happens to a receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReceiverEvent {
    /// A frame was placed.
    Placed(Landed),
    /// The sender says that it has sent this much, and nothing more. With `verify`, a checksum is to be
    /// compared before the room is done.
    ToldFinished { epoch: Epoch, sent: Landed, verify: bool },
    /// The checksum is right.
    Verified,
    /// The sender says that the room has failed.
    ToldFailed(Epoch),
    /// Something is wrong on this side.
    Fault(FailureKind),
    /// Time has passed.
    Tick,
}

/// What is to be done about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReceiverReaction {
    /// Nothing.
    Nothing,
    /// Nothing: it came too late or twice, and is to be counted.
    Late,
    /// Everything has landed: compare its checksum.
    Verify,
    /// The room is done: tell the sender that this much has landed.
    Done(Landed),
    /// The room has failed as the sender said. With `answer`, the sender waits for the verdict.
    FailAsTold { answer: bool },
    /// The room has failed; tell the sender.
    Fail(FailureKind),
    /// The room had ended: the sender asks for the verdict again.
    Repeat,
}

impl Receiver {
    pub(crate) const fn new(epoch: Epoch, deadline: Micros) -> Self {
        Self { phase: Phase::Open, epoch, deadline, arrived: (0, 0) }
    }

    pub(crate) const fn state(&self) -> RoomState {
        match self.phase {
            Phase::Open if self.arrived.0 == 0 => RoomState::WaitingForInput,
            Phase::Open | Phase::Finished { .. } | Phase::Verifying => RoomState::Transferring,
            Phase::Ended(state) => state,
        }
    }

    pub(crate) const fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// When a [`ReceiverEvent::Tick`] will end the room.
    pub(crate) const fn deadline(&self) -> Micros {
        self.deadline
    }

    /// What has been placed.
    pub(crate) const fn arrived(&self) -> Landed {
        Landed { page_writes: self.arrived.0, bytes: self.arrived.1 }
    }

    pub(crate) const fn is_live(&self) -> bool {
        !matches!(self.phase, Phase::Ended(_))
    }

    pub(crate) fn on(&mut self, now: Micros, event: ReceiverEvent) -> ReceiverReaction {
        use ReceiverReaction as Do;
        if let Phase::Ended(_) = self.phase {
            return match event {
                ReceiverEvent::ToldFinished { epoch, .. } | ReceiverEvent::ToldFailed(epoch)
                    if epoch == self.epoch =>
                {
                    Do::Repeat
                }
                ReceiverEvent::Tick => Do::Nothing,
                _ => Do::Late,
            };
        }
        match event {
            // Everything was there before: this is something else.
            ReceiverEvent::Placed(_) if self.phase == Phase::Verifying => {
                self.end(RoomState::Failed);
                Do::Fail(FailureKind::CountMismatch)
            }
            ReceiverEvent::Placed(landed) => {
                self.arrived.0 += landed.page_writes;
                self.arrived.1 += landed.bytes;
                self.judge()
            }
            ReceiverEvent::ToldFinished { epoch, .. } | ReceiverEvent::ToldFailed(epoch)
                if epoch != self.epoch =>
            {
                Do::Late
            }
            ReceiverEvent::ToldFinished { sent, verify, .. } => {
                if self.phase != Phase::Open {
                    return Do::Late;
                }
                let Landed { page_writes, bytes } = sent;
                self.phase = Phase::Finished { page_writes, bytes, verify };
                self.judge()
            }
            ReceiverEvent::Verified if self.phase == Phase::Verifying => {
                self.end(RoomState::Success);
                Do::Done(self.arrived())
            }
            ReceiverEvent::Verified => Do::Late,
            ReceiverEvent::ToldFailed(_) => {
                let answer = self.phase != Phase::Open;
                self.end(RoomState::Failed);
                Do::FailAsTold { answer }
            }
            ReceiverEvent::Fault(kind) => {
                self.end(RoomState::Failed);
                Do::Fail(kind)
            }
            ReceiverEvent::Tick
                if now < self.deadline || mutations::is(Mutation::ReceiverDeadlineIgnored) =>
            {
                Do::Nothing
            }
            ReceiverEvent::Tick => {
                self.end(RoomState::Failed);
                Do::Fail(FailureKind::DeadlineExceeded)
            }
        }
    }

    fn judge(&mut self) -> ReceiverReaction {
        let Phase::Finished { page_writes, bytes, verify } = self.phase else {
            return ReceiverReaction::Nothing;
        };
        if self.arrived == (page_writes, bytes) {
            if verify {
                self.phase = Phase::Verifying;
                return ReceiverReaction::Verify;
            }
            self.end(RoomState::Success);
            return ReceiverReaction::Done(self.arrived());
        }
        if self.arrived.0 > page_writes || self.arrived.1 > bytes || self.arrived.0 == page_writes {
            self.end(RoomState::Failed);
            return ReceiverReaction::Fail(FailureKind::CountMismatch);
        }
        ReceiverReaction::Nothing
    }

    fn end(&mut self, state: RoomState) {
        self.phase = Phase::Ended(state);
        self.deadline = Micros(u64::MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EPOCH: Epoch = Epoch(5);
    const LATER: Micros = Micros(1000);
    const FRAME: Landed = Landed { page_writes: 2, bytes: 200 };
    const SENT: ReceiverEvent =
        ReceiverEvent::ToldFinished { epoch: EPOCH, sent: ALL, verify: false };
    const ALL: Landed = Landed { page_writes: 4, bytes: 400 };

    fn open() -> Receiver {
        Receiver::new(EPOCH, LATER)
    }

    #[test]
    fn done_is_said_when_the_last_counted_byte_is_placed_whichever_comes_last() {
        let done = ReceiverReaction::Done(Landed { page_writes: 4, bytes: 400 });
        let mut data_last = open();
        assert_eq!(data_last.on(Micros(0), SENT), ReceiverReaction::Nothing);
        assert_eq!(
            data_last.on(Micros(0), ReceiverEvent::Placed(FRAME)),
            ReceiverReaction::Nothing
        );
        assert_eq!(data_last.state(), RoomState::Transferring);
        assert_eq!(data_last.on(Micros(0), ReceiverEvent::Placed(FRAME)), done);
        let mut message_last = open();
        message_last.on(Micros(0), ReceiverEvent::Placed(FRAME));
        message_last.on(Micros(0), ReceiverEvent::Placed(FRAME));
        assert_eq!(message_last.on(Micros(0), SENT), done);
        assert_eq!(message_last.state(), RoomState::Success);
    }

    #[test]
    fn an_empty_room_is_done_when_the_sender_says_so() {
        let finished =
            ReceiverEvent::ToldFinished { epoch: EPOCH, sent: Landed::default(), verify: false };
        assert_eq!(open().on(Micros(0), finished), ReceiverReaction::Done(Landed::default()));
    }

    #[test]
    fn more_than_was_sent_is_a_count_mismatch_never_done() {
        let mut room = open();
        for _ in 0..3 {
            room.on(Micros(0), ReceiverEvent::Placed(FRAME));
        }
        assert_eq!(room.on(Micros(0), SENT), ReceiverReaction::Fail(FailureKind::CountMismatch));
        let mut short_pages = open();
        short_pages.on(Micros(0), ReceiverEvent::Placed(Landed { page_writes: 4, bytes: 300 }));
        assert_eq!(
            short_pages.on(Micros(0), SENT),
            ReceiverReaction::Fail(FailureKind::CountMismatch)
        );
    }

    #[test]
    fn with_a_checksum_done_is_said_only_when_it_is_right() {
        let finished = ReceiverEvent::ToldFinished { epoch: EPOCH, sent: ALL, verify: true };
        let verifying = || {
            let mut room = open();
            room.on(Micros(0), ReceiverEvent::Placed(FRAME));
            assert_eq!(room.on(Micros(0), ReceiverEvent::Verified), ReceiverReaction::Late);
            room.on(Micros(0), finished);
            let last = room.on(Micros(0), ReceiverEvent::Placed(FRAME));
            assert_eq!((last, room.state()), (ReceiverReaction::Verify, RoomState::Transferring));
            room
        };
        assert_eq!(verifying().on(Micros(0), ReceiverEvent::Verified), ReceiverReaction::Done(ALL));
        let wrong = FailureKind::ChecksumMismatch;
        let mut room = verifying();
        assert_eq!(room.on(Micros(0), ReceiverEvent::Fault(wrong)), ReceiverReaction::Fail(wrong));
        assert_eq!(room.on(Micros(0), ReceiverEvent::Verified), ReceiverReaction::Late);
        let overdue = verifying().on(LATER, ReceiverEvent::Tick);
        assert_eq!(overdue, ReceiverReaction::Fail(FailureKind::DeadlineExceeded));
    }

    #[test]
    fn the_deadline_ends_a_room_that_nobody_finished() {
        let mut room = open();
        assert_eq!(room.on(Micros(999), ReceiverEvent::Tick), ReceiverReaction::Nothing);
        assert_eq!(
            room.on(LATER, ReceiverEvent::Tick),
            ReceiverReaction::Fail(FailureKind::DeadlineExceeded)
        );
    }

    #[test]
    fn a_sender_that_waits_for_the_verdict_is_answered() {
        let mut early = open();
        assert_eq!(
            early.on(Micros(0), ReceiverEvent::ToldFailed(EPOCH)),
            ReceiverReaction::FailAsTold { answer: false }
        );
        let mut waiting = open();
        waiting.on(Micros(0), SENT);
        assert_eq!(
            waiting.on(Micros(0), ReceiverEvent::ToldFailed(EPOCH)),
            ReceiverReaction::FailAsTold { answer: true }
        );
        assert_eq!(waiting.on(Micros(0), SENT), ReceiverReaction::Repeat);
    }

    #[test]
    fn an_old_epoch_and_late_data_change_nothing() {
        let mut room = open();
        let before = room.clone();
        assert_eq!(room.on(Micros(0), ReceiverEvent::ToldFailed(Epoch(4))), ReceiverReaction::Late);
        let old =
            ReceiverEvent::ToldFinished { epoch: Epoch(4), sent: Landed::default(), verify: false };
        assert_eq!(room.on(Micros(0), old), ReceiverReaction::Late);
        assert_eq!(room, before);
        room.on(Micros(0), ReceiverEvent::Fault(FailureKind::Aborted));
        let ended = room.clone();
        assert_eq!(room.on(Micros(0), ReceiverEvent::Placed(FRAME)), ReceiverReaction::Late);
        assert_eq!(
            room.on(Micros(0), ReceiverEvent::Fault(FailureKind::PeerDied)),
            ReceiverReaction::Late
        );
        assert_eq!(room.on(Micros(0), SENT), ReceiverReaction::Repeat);
        assert_eq!(room, ended);
    }
}
