//! The protocol of rooms, searched: every order of events between a prefill and a decode engine.
//!
//! The machines are the engine's own ([`Sender`](super::sender::Sender), `Receiver`, `Release`, `Links`).
//! What the worker does around them is stated again in the model, function by function; the network,
//! the callers, the clock and the faults are free to do what they can. `stateright` visits every state
//! and checks the promises of each one (`model/promises.rs`). Each promise is also seen to fail when a
//! rule that keeps it is broken.
//!
//! What bounds the search, so that it ends:
//!
//! - one or two rooms of one or two writes, two lanes and at most two more, few faults of each kind;
//! - deadlines pass when nothing else can happen, but for two searches in which they pass at any time:
//!   they would multiply the states of the others by ten. Aborts, which end a room as deadlines do, come
//!   at any time;
//! - beginning a write, knowing that it has left and asking to finish are steps of their own only in the
//!   searches called *fine*;
//! - a lane lands whole frames and counts them as they land. A part of a frame can spoil no page that the
//!   whole cannot, and an end of a lane is down only when what came on it is counted;
//! - pages and sources are quiet at the first moment that the protocol allows. Later ones change nothing:
//!   their next use is a step of its own;
//! - what takes thousands of rooms or lanes (verdicts and tallies that are dropped), draining and
//!   shutting down are left to the simulator.

mod control;
mod lanes;
mod paths;
mod promises;
mod receiving;
mod sending;
mod setup;
mod steps;
mod turns;
mod world;

use std::collections::BTreeSet;
use std::time::Instant;

use stateright::{Checker, HasDiscoveries, Model};

use self::promises::{HARMLESS, LANDED, SOURCE_QUIET, Show, TARGET_QUIET, VERDICT};
use self::setup::{Channel, Plan, Rule, Setup, Ticks};
use self::steps::Step;
use self::world::Faults;

const NONE: Faults = Faults { aborts: 0, lanes: 0, sessions: 0, crashes: [0, 0], give_ups: 0 };

/// One room.
const ONE: Setup = Setup {
    plans: &[Plan { id: 1, page: 0, source: 0, frames: 2 }],
    lanes: 2,
    spare_lanes: 0,
    faults: NONE,
    ticks: Ticks::WhenStuck,
    fine: false,
    guarded: false,
    verify: false,
    channel: Channel::Session,
    broken: None,
    #[cfg(feature = "sim")]
    mutation: None,
    shows: &[Show::Done],
};

/// Two rooms side by side.
const APART: Setup = Setup {
    plans: &[
        Plan { id: 1, page: 0, source: 0, frames: 1 },
        Plan { id: 2, page: 1, source: 1, frames: 1 },
    ],
    ..ONE
};

/// A room, and a new epoch of its id in the same page and from the same source.
const REUSE: Setup = Setup {
    plans: &[
        Plan { id: 1, page: 0, source: 0, frames: 1 },
        Plan { id: 1, page: 0, source: 0, frames: 1 },
    ],
    ..ONE
};

/// As [`REUSE`], with two writes in the first room.
const REUSE_OF_TWO: Setup = Setup {
    plans: &[
        Plan { id: 1, page: 0, source: 0, frames: 2 },
        Plan { id: 1, page: 0, source: 0, frames: 1 },
    ],
    ..ONE
};

/// A room, and a new epoch of its id in other pages, so that it need not wait for their release.
const SAME_ID: Setup = Setup {
    plans: &[
        Plan { id: 1, page: 0, source: 0, frames: 1 },
        Plan { id: 1, page: 1, source: 1, frames: 1 },
    ],
    ..ONE
};

/// Visits every state of a setup.
fn search(name: &str, setup: Setup) {
    let begun = Instant::now();
    let checker = setup.checker().threads(2).spawn_bfs().join();
    let (states, depth) = (checker.unique_state_count(), checker.max_depth());
    println!("{name}: {states} states, depth {depth}, {:?}", begun.elapsed());
    assert!(checker.is_done(), "{name}: not all states were visited");
    checker.assert_properties();
}

#[test]
fn rooms_end_once_and_done_means_landed_whoever_aborts_them() {
    let shows = &[Show::Done, Show::BothFail, Show::VerdictAskedFor];
    let faults = Faults { aborts: 2, ..NONE };
    search("one room, two aborts, fine", Setup { faults, fine: true, shows, ..ONE });
    search("two rooms, two aborts", Setup { faults, shows, ..APART });
    search("an id used again, two aborts", Setup { faults, shows, ..SAME_ID });
    let faults = Faults { aborts: 1, ..NONE };
    search("one room, an abort, checksums", Setup { faults, verify: true, shows, ..ONE });
}

#[test]
fn rooms_end_whenever_their_deadlines_pass() {
    let (shows, ticks) = (&[Show::Done, Show::BothFail, Show::Unknown, Show::Fence], Ticks::Any);
    search("one room, any deadline, fine", Setup { ticks, fine: true, shows, ..ONE });
    let faults = Faults { aborts: 1, ..NONE };
    search("a page used again, any deadline", Setup { ticks, lanes: 1, faults, shows, ..REUSE });
}

#[test]
fn lost_lanes_cost_no_room_and_nothing_is_counted_twice() {
    let shows = &[Show::Done, Show::Replay];
    let one = Faults { lanes: 1, ..NONE };
    let fine = Setup { faults: one, spare_lanes: 1, fine: true, shows, ..ONE };
    search("one room, a lost end of a lane, fine", fine);
    search(
        "two rooms, a lost end of a lane",
        Setup { faults: one, spare_lanes: 1, shows, ..APART },
    );
    let two = Faults { lanes: 2, ..NONE };
    search("one room, two lost ends of lanes", Setup { faults: two, spare_lanes: 2, shows, ..ONE });
}

#[test]
fn broken_sessions_cost_no_room() {
    let sessions = Faults { sessions: 2, ..NONE };
    search("two rooms, two broken sessions", Setup { faults: sessions, ..APART });
    let shows = &[Show::Done, Show::Replay];
    let faults = Faults { sessions: 1, lanes: 1, ..NONE };
    let both = Setup { faults, spare_lanes: 1, shows, ..ONE };
    search("one room, a broken session and a lost end of a lane", both);
}

#[test]
fn rooms_end_once_when_sessions_break_on_their_failures() {
    let shows = &[Show::Done, Show::BothFail, Show::VerdictAskedFor];
    let faults = Faults { sessions: 1, aborts: 1, ..NONE };
    search("two rooms, a broken session, an abort", Setup { faults, shows, ..APART });
    search("an id used again, a broken session, an abort", Setup { faults, shows, ..SAME_ID });
    let faults = Faults { sessions: 2, aborts: 1, ..NONE };
    search("one room, two broken sessions, an abort", Setup { faults, shows, ..ONE });
}

#[test]
fn a_page_used_again_holds_nothing_of_the_epoch_before() {
    let shows = &[Show::Done, Show::BothFail, Show::LateWrite, Show::LaterEpochDone, Show::Replay];
    let faults = Faults { aborts: 1, lanes: 1, ..NONE };
    let lanes = Setup { faults, spare_lanes: 1, shows, ..REUSE_OF_TWO };
    search("a page used again, an abort, a lost end of a lane", lanes);
    let faults = Faults { aborts: 1, lanes: 1, sessions: 1, ..NONE };
    let all = Setup { faults, shows, ..REUSE };
    search("a page used again, an abort, a lost end of a lane, a broken session", all);
}

#[test]
fn an_engine_that_crashes_and_comes_back_leaves_no_room_open_and_no_write_behind() {
    let shows = &[Show::LateWrite, Show::LaterEpochDone, Show::BothFail];
    let prefill = Faults { crashes: [1, 0], aborts: 1, ..NONE };
    let crash = Setup { faults: prefill, spare_lanes: 1, shows, ..REUSE_OF_TWO };
    search("a page used again, the prefill engine crashes, an abort", crash);
    let shows = &[Show::LaterEpochDone, Show::Unknown, Show::BothFail];
    let decode = Faults { crashes: [0, 1], aborts: 1, ..NONE };
    let crash = Setup { faults: decode, spare_lanes: 1, shows, ..REUSE_OF_TWO };
    search("a page used again, the decode engine crashes, an abort", crash);
    let shows = &[Show::LateWrite, Show::LaterEpochDone];
    let session = Faults { crashes: [1, 0], sessions: 1, ..NONE };
    let crash = Setup { faults: session, spare_lanes: 1, shows, ..REUSE };
    search("a page used again, the prefill engine crashes, a broken session", crash);
    let both = Faults { crashes: [1, 1], ..NONE };
    search("two rooms, both engines crash", Setup { faults: both, spare_lanes: 2, ..APART });
}

#[test]
fn a_peer_that_was_given_up_though_it_lives_hears_of_it_and_leaves_no_write_behind() {
    let shows = &[Show::Done, Show::BothFail, Show::Unknown, Show::Fence];
    let faults = Faults { give_ups: 1, ..NONE };
    search("one room, a peer given up, fine", Setup { faults, fine: true, shows, ..ONE });
    let shows = &[Show::LateWrite, Show::LaterEpochDone, Show::Fence];
    let one_lane = Setup { faults, lanes: 1, spare_lanes: 1, shows, ..REUSE_OF_TWO };
    search("a page used again, a peer given up", one_lane);
}

/// On `tcp` writes are asked for, sources are quiet when they have left, and rests are filled up.
#[test]
fn a_guarded_fabric_keeps_the_promises_though_it_fills_frames_up() {
    let shows = &[Show::Done, Show::BothFail, Show::Replay];
    let faults = Faults { aborts: 1, lanes: 1, ..NONE };
    let fine = Setup { faults, guarded: true, fine: true, shows, ..ONE };
    search("guarded: one room, an abort, a lost end of a lane, fine", fine);
    search("guarded: a page used again", Setup { faults, guarded: true, ..REUSE_OF_TWO });
    let shows = &[Show::Done, Show::Unknown, Show::Replay];
    let faults = Faults { give_ups: 1, lanes: 1, ..NONE };
    let given_up =
        Setup { faults, guarded: true, fine: true, lanes: 1, spare_lanes: 1, shows, ..ONE };
    search("guarded: one room, a peer given up, a lost end of a lane, fine", given_up);
}

/// More than a session allows: it keeps words in order. Without a guard that order is needed, see
/// [`every_rule_is_needed`].
#[test]
fn words_in_any_order_and_any_number_break_no_promise_of_a_guarded_fabric() {
    let shows = &[Show::Done, Show::BothFail, Show::VerdictAskedFor];
    let (channel, guarded) = (Channel::Chaos, true);
    let faults = Faults { aborts: 1, lanes: 1, ..NONE };
    search("chaos: one room", Setup { channel, guarded, faults, shows, ..ONE });
    let faults = Faults { aborts: 1, ..NONE };
    search("chaos: a page used again", Setup { channel, guarded, faults, shows, ..REUSE });
}

#[test]
#[ignore = "a quarter of an hour on two cores, optimised: more faults at once than the other searches have"]
fn more_faults_at_once() {
    let faults = Faults { aborts: 1, lanes: 1, sessions: 1, ..NONE };
    let more = Setup { faults, spare_lanes: 1, ..REUSE };
    search("a page used again, an abort, a lost end of a lane, a broken session", more);
    let faults = Faults { lanes: 2, sessions: 1, ..NONE };
    search("one room, two lost ends, a broken session", Setup { faults, spare_lanes: 1, ..ONE });
    let faults = Faults { lanes: 2, ..NONE };
    search("one room, two lost ends, fine", Setup { faults, spare_lanes: 2, fine: true, ..ONE });
    let faults = Faults { give_ups: 1, ..NONE };
    search("a page used again, a peer given up", Setup { faults, spare_lanes: 2, ..REUSE });
    let faults = Faults { give_ups: 2, aborts: 1, ..NONE };
    search("one room, a peer given up twice, an abort", Setup { faults, ..ONE });
    let faults = Faults { give_ups: 1, lanes: 1, ..NONE };
    let more = Setup { faults, spare_lanes: 1, ..REUSE };
    search("a page used again, a peer given up, a lost end of a lane", more);
}

/// With this, what is true of states in which nothing more happens is true of every path.
#[test]
fn no_path_goes_round() {
    let faults = Faults { aborts: 1, sessions: 1, ..NONE };
    let all = [
        Setup { ticks: Ticks::Any, lanes: 1, ..ONE },
        Setup { faults, ..REUSE },
        Setup { faults: Faults { lanes: 1, ..NONE }, spare_lanes: 1, fine: true, ..ONE },
        Setup { faults: Faults { crashes: [1, 1], ..NONE }, spare_lanes: 1, ..ONE },
        Setup { faults: Faults { give_ups: 1, ..NONE }, ..ONE },
    ];
    for setup in all {
        println!("{} states, no path goes round", paths::visit_and_find_no_cycle(&setup));
    }
}

/// Each rule, a setup in which it is needed, and the promise that does not hold without it.
fn rules() -> Vec<(Rule, Setup, &'static str)> {
    let abort = Setup { faults: Faults { aborts: 1, ..NONE }, ..ONE };
    let lane = Setup { faults: Faults { lanes: 1, ..NONE }, ..ONE };
    let abort_and_lane = Setup { faults: Faults { aborts: 1, lanes: 1, ..NONE }, ..ONE };
    let session = Faults { sessions: 1, ..NONE };
    let give_up = Setup { faults: Faults { give_ups: 1, ..NONE }, ..ONE };
    let abort_and_give_up = Setup { faults: Faults { aborts: 1, give_ups: 1, ..NONE }, ..ONE };
    let filled = Faults { give_ups: 1, lanes: 1, ..NONE };
    let filled = Setup { faults: filled, guarded: true, fine: true, ..ONE };
    vec![
        (Rule::WaitForWrites, abort, TARGET_QUIET),
        (Rule::DrainedAfterTally, abort_and_lane, TARGET_QUIET),
        (Rule::DrainedByWhoSent, give_up, TARGET_QUIET),
        (Rule::ReturnToItsEntry, abort_and_give_up, TARGET_QUIET),
        (Rule::QuietWhenAcknowledged, abort, TARGET_QUIET),
        (Rule::ReplayAfterTally, lane, LANDED),
        (Rule::ReplayAfterTally, lane, TARGET_QUIET),
        (Rule::AnswerAfterClosing, lane, LANDED),
        (Rule::LanesAfterWords, Setup { lanes: 1, spare_lanes: 1, ..abort_and_lane }, TARGET_QUIET),
        (Rule::WordsInOrder, Setup { channel: Channel::Chaos, ..abort }, TARGET_QUIET),
        (Rule::WordsNameEpochs, Setup { faults: session, ..REUSE }, VERDICT),
        (Rule::ReplayStandingRooms, abort_and_lane, SOURCE_QUIET),
        (Rule::SayAgain, Setup { faults: session, ..ONE }, HARMLESS),
        (Rule::FillNoFrameAgain, filled, LANDED),
        (Rule::Fence, give_up, promises::ENDS),
    ]
}

/// The steps to a state in which a promise does not hold, if there is one.
fn breaks(setup: Setup, promise: &'static str) -> Option<Vec<Step>> {
    let found = HasDiscoveries::AnyOf(BTreeSet::from([promise]));
    let checker = setup.checker().finish_when(found).spawn_bfs().join();
    Some(checker.discovery(promise)?.into_actions())
}

#[test]
fn every_rule_is_needed() {
    for (rule, setup, promise) in rules() {
        let setup = Setup { broken: Some(rule), shows: &[], ..setup };
        let steps = breaks(setup, promise);
        let steps = steps.unwrap_or_else(|| panic!("{promise:?} holds without {rule:?}"));
        println!("without {rule:?}: not {promise:?}, after {} steps: {steps:?}", steps.len());
    }
}

/// The machines broken, not what is around them.
#[cfg(feature = "sim")]
#[test]
fn a_broken_machine_breaks_a_promise() {
    use crate::mutations::Mutation;

    let lane = Setup { faults: Faults { lanes: 1, ..NONE }, ..ONE };
    let filled = Faults { give_ups: 1, ..NONE };
    let filled = Setup { faults: filled, guarded: true, fine: true, ..ONE };
    let abort_and_lane = Setup { faults: Faults { aborts: 1, lanes: 1, ..NONE }, ..ONE };
    let give_up = Setup { faults: Faults { give_ups: 1, ..NONE }, ..ONE };
    let crash = Setup { faults: Faults { crashes: [1, 0], ..NONE }, ..ONE };
    for (mutation, setup, promise) in [
        (Mutation::DoneBeforeLanded, abort_and_lane, VERDICT),
        (Mutation::FinishedEarly, filled, LANDED),
        (Mutation::TallyOffByOne, lane, LANDED),
        (Mutation::DownTooSoon, Setup { spare_lanes: 1, ..abort_and_lane }, TARGET_QUIET),
        (Mutation::SenderDeadlineIgnored, give_up, promises::ENDS),
        (Mutation::ReceiverDeadlineIgnored, crash, promises::ENDS),
        (Mutation::NeverFence, give_up, promises::ENDS),
    ] {
        let setup = Setup { mutation: Some(mutation), shows: &[], ..setup };
        let steps = breaks(setup, promise);
        let steps = steps.unwrap_or_else(|| panic!("{promise:?} holds with {mutation:?}"));
        println!("with {mutation:?}: not {promise:?}, after {} steps: {steps:?}", steps.len());
    }
}
