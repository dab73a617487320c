//! Ways to break the engine on purpose, so that what watches over it can be tested. Only with the
//! feature `sim`; without it [`is`] is a constant and nothing of this is left.

macro_rules! mutations {
    ($($(#[doc = $doc:literal])+ $name:ident => $text:literal,)+) => {
        /// A fault in the engine, made on purpose.
        #[cfg_attr(not(feature = "sim"), expect(unreachable_pub, reason = "shown by the simulator"))]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Mutation {
            $($(#[doc = $doc])+ $name,)+
        }

        #[cfg(feature = "sim")]
        impl Mutation {
            /// Every mutation.
            pub const ALL: &'static [Self] = &[$(Self::$name),+];

            /// Its name in reports.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$name => $text),+ }
            }
        }
    };
}

mutations! {
    /// A frame is let in by its slot alone.
    EpochUnchecked => "drop the epoch check",
    /// A frame is counted when it is let in, before its bytes are placed.
    CountBeforePlacing => "count before placing",
    /// A receiver's pages are released as soon as this side is quiet.
    ReleaseUndrained => "release a receiver before it is drained",
    /// A sender's pages are released as soon as its room has ended.
    ReleaseSourceEarly => "release a source before it is quiet",
    /// Frames of a lane that went down are sent again at once.
    ReplayBeforeTally => "replay before the old lane's tally has come",
    /// Frames are sent again whatever has become of their room.
    ReplayEnded => "replay frames of a room that has ended",
    /// The last frame that was counted on a lane is sent again.
    TallyOffByOne => "count an arrival twice",
    /// A sender is done when everything was acknowledged.
    DoneBeforeLanded => "the sender is done before it is told landed",
    /// *Drained* is said of frames whose lane's other end may stand.
    DrainedUnaccounted => "say drained with frames unaccounted on a lost lane",
    /// A silent peer is waited for without end.
    NeverFence => "never fence",
    /// A sender's deadline passes without consequence.
    SenderDeadlineIgnored => "ignore a sender's deadline",
    /// A receiver's deadline passes without consequence.
    ReceiverDeadlineIgnored => "ignore a receiver's deadline",
    /// Old events are credited to whatever room has the slot now.
    GenerationIgnored => "ignore a generation",
    /// A lane of which it was said that nothing came on it comes up all the same.
    LaneUpAfterTally => "a lane comes up after it was given a zero tally",
    /// Every room with writes on a lane is blamed for the error of one.
    BlameAll => "blame every room of a lane for one culprit",
    /// The receiver's words about an earlier epoch are taken for this one's.
    OldVerdictTaken => "take landed or failed of an old epoch",
    /// Tallies are asked for once, whatever becomes of the session.
    TalliesNotAskedAgain => "forget to ask again for tallies after a reconnect",
    /// *Finished* is said as soon as the caller says so.
    FinishedEarly => "finish before all frames have left",
    /// An end that was told while the session was down is not told again.
    VerdictsNotRepeated => "forget to say verdicts again after a reconnect",
    /// A grant that was given up still waits for its room.
    GrantNotWithdrawn => "keep a grant that was withdrawn",
    /// The lanes that stood when a room ended count as down when the last of them stands.
    DownTooSoon => "take one old lane's end for all",
    /// A lane's tally is told while this end still stands.
    TallyBeforeDown => "answer with a tally before the lane is down",
    /// A room that has ended stays in its peer's queue of those with frames to post.
    EndedStaysReady => "leave an ended room's slot in the queue of its peer",
    /// A peer that is back before its lanes were down is taken for a new one.
    PeerNotRevived => "forget the lanes of a peer that comes back",
    /// *Drained* is said of epochs whose lanes were forgotten.
    DrainedOfForgotten => "say drained of what was forgotten with a peer",
}

#[cfg(feature = "sim")]
thread_local! {
    static ACTIVE: std::cell::Cell<Option<Mutation>> = const { std::cell::Cell::new(None) };
}

/// Whether the engine is broken in this way, on this thread.
#[cfg(feature = "sim")]
pub(crate) fn is(mutation: Mutation) -> bool {
    ACTIVE.get() == Some(mutation)
}

/// Never.
#[cfg(not(feature = "sim"))]
#[inline]
pub(crate) const fn is(_: Mutation) -> bool {
    false
}

/// Runs something with the engine broken in one way, on this thread.
#[cfg(feature = "sim")]
pub fn with_mutation<T>(mutation: Mutation, run: impl FnOnce() -> T) -> T {
    struct Mend;
    impl Drop for Mend {
        fn drop(&mut self) {
            ACTIVE.set(None);
        }
    }
    ACTIVE.set(Some(mutation));
    let _mend = Mend;
    run()
}
