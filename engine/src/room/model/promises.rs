//! The promises as properties of a state, by their number in the design; and what must be possible.

use stateright::Property;

use super::setup::{Channel, Setup};
use super::steps::Step;
use super::world::{Frame, Verdict, World, Wrong};

pub(super) const ENDS_ONCE: &str = "1: a room ends once at a side";
pub(super) const ENDS: &str = "1, 5: every room ends and is released, whatever happens";
pub(super) const LANDED: &str = "2: done means landed";
pub(super) const VERDICT: &str = "2: the sender's end is the receiver's verdict, or unknown";
pub(super) const HARMLESS: &str = "4: lost lanes and sessions cost no room";
pub(super) const TARGET_QUIET: &str = "5: nothing lands in released pages";
pub(super) const SOURCE_QUIET: &str = "5: nothing is read from released pages";
pub(super) const FORWARD: &str = "6: never backwards, and nothing changes after the end";

fn is(world: &World, wrongs: &[Wrong]) -> bool {
    world.witness.wrong.is_some_and(|wrong| wrongs.contains(&wrong))
}

/// Whether nothing more happens unless a fault makes it.
fn rests(setup: &Setup, world: &World) -> bool {
    let mut steps = Vec::new();
    setup.progress(world, &mut steps);
    world.witness.wrong.is_none() && steps.iter().all(|step| step.is_fault())
}

impl Step {
    pub(super) const fn is_fault(&self) -> bool {
        matches!(
            self,
            Self::AbortSender { .. }
                | Self::AbortReceiver { .. }
                | Self::LaneDown { fault: true, .. }
                | Self::SessionDown { fault: true, .. }
                | Self::PeerGone { fault: true, .. }
                | Self::Crash { .. }
        )
    }
}

fn all_over(world: &World) -> bool {
    let over = |verdict: Verdict| verdict != Verdict::Live;
    world.witness.senders.iter().all(|(verdict, _)| over(*verdict))
        && world.witness.receivers.iter().all(|(_, verdict)| over(*verdict))
        && world.sending.iter().all(Option::is_none)
        && world.receiving.is_empty()
}

fn all_done(world: &World) -> bool {
    world.witness.senders.iter().all(|(verdict, _)| *verdict == Verdict::Done)
        && world.witness.receivers.iter().all(|(_, verdict)| *verdict == Verdict::Done)
}

/// A sender that knows its verdict has the receiver's.
fn verdicts_agree(world: &World) -> bool {
    world.witness.senders.iter().all(|(verdict, life)| {
        let receivers = life.map(|life| world.witness.receivers[usize::from(life)].1);
        match (verdict, receivers) {
            (Verdict::Done, told) => told == Some(Verdict::Done),
            (Verdict::Failed, Some(told)) => told != Verdict::Done,
            _ => true,
        }
    })
}

/// What is read, or will be, is of rooms that are not released.
fn sources_stand(world: &World) -> bool {
    let released = |frame: &Frame| world.sending[usize::from(frame.room)].is_none();
    world.lanes.iter().filter(|lane| lane.ends[0].peer().is_some()).all(|lane| {
        let leaving = lane.ledger.iter().filter(|(.., left)| !left).map(|(_, frame, _)| frame);
        !leaving.chain(&lane.waiting).any(released)
    })
}

pub(super) fn promises(setup: &Setup) -> Vec<Property<Setup>> {
    let mut promises = vec![
        Property::always(ENDS_ONCE, |_, world| !is(world, &[Wrong::EndedTwice])),
        Property::always(LANDED, |_, world| !is(world, &[Wrong::DoneWithoutItsBytes])),
        Property::always(VERDICT, |_, world| verdicts_agree(world)),
        Property::always(SOURCE_QUIET, |_, world| {
            !is(world, &[Wrong::ReadAfterRelease]) && sources_stand(world)
        }),
        Property::always(FORWARD, |_, world| {
            !is(world, &[Wrong::Backwards, Wrong::ChangedAfterTheEnd])
        }),
        Property::always(TARGET_QUIET, |_, world| !is(world, &[Wrong::LandedAfterRelease])),
    ];
    if setup.channel == Channel::Session {
        promises
            .push(Property::always(ENDS, |setup, world| !rests(setup, world) || all_over(world)));
    }
    if setup.costs_no_room() {
        promises.push(Property::always(HARMLESS, |setup, world| {
            !rests(setup, world) || all_done(world)
        }));
    }
    promises.extend(setup.shows.iter().map(|show| show.property()));
    promises
}

/// What must be possible, or the search shows nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Show {
    Done,
    BothFail,
    Unknown,
    VerdictAskedFor,
    Replay,
    Fence,
    /// A page is used again, and a write of the epoch before has not landed and will not.
    LateWrite,
    LaterEpochDone,
}

impl Show {
    fn property(self) -> Property<Setup> {
        let (name, seen): (_, fn(&Setup, &World) -> bool) = match self {
            Self::Done => ("all rooms are done", |_, world| all_done(world)),
            Self::BothFail => ("both sides fail", |_, world| {
                world.witness.senders.iter().any(|(verdict, life)| {
                    let life = life.map(|life| world.witness.receivers[usize::from(life)].1);
                    (*verdict, life) == (Verdict::Failed, Some(Verdict::Failed))
                })
            }),
            Self::Unknown => ("a verdict is unknown", |_, world| {
                world.witness.senders.iter().any(|(verdict, _)| *verdict == Verdict::Unknown)
            }),
            Self::VerdictAskedFor => ("a verdict is asked for", |_, world| {
                world.sending.iter().flatten().any(|room| room.asked)
            }),
            Self::Replay => ("a write is on its way again", |_, world| {
                world.lanes.iter().flat_map(|lane| &lane.wire).any(|frame| frame.again)
            }),
            Self::Fence => {
                ("a peer is fenced off", |_, world| world.receiving.iter().any(|room| room.fenced))
            }
            Self::LateWrite => ("a write of the epoch before is late", |setup, world| {
                let is_late = |frame: &Frame| {
                    let page = setup.plans[usize::from(world.plan_of(frame.life))].page;
                    world.owner(setup, page).is_some_and(|owner| owner != frame.life)
                };
                world.lanes.iter().flat_map(|lane| &lane.wire).any(is_late)
            }),
            Self::LaterEpochDone => ("a later epoch is done", |_, world| {
                let later = world.witness.receivers.get(1);
                later.is_some_and(|(_, verdict)| *verdict == Verdict::Done)
            }),
        };
        Property::sometimes(name, seen)
    }
}
