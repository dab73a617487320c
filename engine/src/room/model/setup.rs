//! What is searched: the rooms, the lanes, the faults, and the rule that is broken on purpose.

use super::promises::Show;
use super::world::Faults;

/// A room, as its two callers mean it. Two with the same id, page or source come one after the other.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub(super) id: u8,
    pub(super) page: u8,
    pub(super) source: u8,
    /// One or two writes, each of one cell of the page.
    pub(super) frames: u8,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Setup {
    pub(super) plans: &'static [Plan],
    /// Lanes that stand from the beginning; the control plane wants that many.
    pub(super) lanes: u8,
    /// Lanes that can come up later.
    pub(super) spare_lanes: u8,
    pub(super) faults: Faults,
    pub(super) ticks: Ticks,
    /// Whether posting, beginning and leaving are steps of their own, and asking to finish is.
    pub(super) fine: bool,
    /// Whether the fabric asks before it places.
    pub(super) guarded: bool,
    /// Whether receivers compare a checksum.
    pub(super) verify: bool,
    pub(super) channel: Channel,
    pub(super) broken: Option<Rule>,
    /// How the machines are broken.
    #[cfg(feature = "sim")]
    pub(super) mutation: Option<crate::mutations::Mutation>,
    /// What must be possible.
    pub(super) shows: &'static [Show],
}

impl Setup {
    /// Whether only lanes and sessions fail, and no deadline passes without need: rooms need not fail.
    pub(super) fn costs_no_room(&self) -> bool {
        let Faults { aborts, crashes, give_ups, lanes, sessions } = self.faults;
        (aborts, crashes, give_ups) == (0, [0, 0], 0)
            && self.ticks == Ticks::WhenStuck
            && self.channel == Channel::Session
            && (lanes < self.lanes || sessions == 0 && lanes <= self.spare_lanes)
    }

    /// Runs something with the machines broken as they are to be.
    pub(super) fn with_mutation<T>(&self, run: impl FnOnce() -> T) -> T {
        #[cfg(feature = "sim")]
        if let Some(mutation) = self.mutation {
            return crate::mutations::with_mutation(mutation, run);
        }
        run()
    }
}

/// When deadlines pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ticks {
    /// At any time.
    Any,
    /// When nothing else can happen: a room that ends by a deadline then had no other way.
    WhenStuck,
}

/// How words travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Channel {
    /// In order within a session; lost when it breaks.
    Session,
    /// In any order, any number of times.
    Chaos,
}

/// Rules that the protocol cannot do without.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rule {
    /// An ended room's pages wait for *drained*, or for the lanes that stood to be down.
    WaitForWrites,
    /// *Drained* is not said while the fate of a write on a lost lane is unknown.
    DrainedAfterTally,
    /// *Drained* is not said of an epoch that an earlier entry of the peer had: its writes are not known.
    DrainedByWhoSent,
    /// A peer that comes back while lanes of it still close, or rooms wait, is the one that was given up.
    ReturnToItsEntry,
    /// A source is quiet, on a fabric that is not guarded, when its writes are acknowledged.
    QuietWhenAcknowledged,
    /// Writes of a lost lane are sent again when the peer has said what it counted, not before.
    ReplayAfterTally,
    /// The question about a lane is answered when this end is closed.
    AnswerAfterClosing,
    /// A lane is used when what the receiver said before it came up there has been heard.
    LanesAfterWords,
    /// A peer that keeps an ended room's pages is fenced off in time.
    Fence,
    /// Words are heard in the order in which they were said.
    WordsInOrder,
    /// Words are about an epoch, not about a room id.
    WordsNameEpochs,
    /// Only a standing room's writes are sent again.
    ReplayStandingRooms,
    /// Grants, verdicts asked for and questions are said again when a session comes back.
    SayAgain,
    /// A frame that is sent again is never filled up: its room may have been said to be finished.
    FillNoFrameAgain,
}
