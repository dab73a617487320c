//! The simulator's own test: the engine is broken on purpose, in one way after the other, and each must
//! be found. The same seeds are clean while it is whole.

use std::time::{Duration, Instant};

use kvferry::sim::{Mutation, Preset, Scenario, run, with_mutation};

/// For all of it.
const BUDGET: Duration = Duration::from_secs(90);
/// Seeds tried against one mutation.
const SEEDS: u64 = 3000;

/// Where a mutation can do harm.
fn presets(mutation: Mutation) -> &'static [Preset] {
    use Mutation as M;
    match mutation {
        M::DoneBeforeLanded | M::CountBeforePlacing | M::FinishedEarly => &[Preset::Calm],
        M::BlameAll => &[Preset::Errors],
        M::SenderDeadlineIgnored | M::ReceiverDeadlineIgnored => &[Preset::Fickle],
        M::OldVerdictTaken | M::GrantNotWithdrawn => &[Preset::Fickle, Preset::Sessions],
        M::TalliesNotAskedAgain
        | M::VerdictsNotRepeated
        | M::PeerNotRevived
        | M::DrainedOfForgotten => &[Preset::Sessions, Preset::Silent],
        M::EndedStaysReady => &[Preset::Fickle, Preset::Flaps],
        M::NeverFence => &[Preset::Sessions, Preset::Silent],
        _ => &[Preset::Lossy, Preset::Flaps, Preset::Brutal],
    }
}

/// What makes a mutation's harm likely: it needs several things at once.
fn tune(mutation: Mutation, scenario: &mut Scenario) {
    use Mutation as M;
    let faults = &mut scenario.faults;
    match mutation {
        // Writes are held up on an old lane while a new one comes up and another goes down.
        M::DownTooSoon => {
            scenario.guarded = false;
            scenario.both_ways = false;
            scenario.lanes = 4;
            scenario.fence_after_ms = 500;
            (faults.freeze, faults.lane_down, faults.stall) = (0.5, 0.5, 0.3);
            faults.abort = 0.7;
        }
        // Writes are held up on a lane whose sending end is down, and their room is given up.
        M::DrainedUnaccounted => {
            scenario.guarded = false;
            scenario.both_ways = false;
            (faults.lane_down, faults.abort, faults.reap_us) = (0.8, 0.6, 40_000);
        }
        // A lane is used and lost at one end before it is up at the other.
        M::LaneUpAfterTally => {
            scenario.guarded = true;
            faults.lane_down = 1.0;
        }
        // A full lane keeps a room waiting; it is given up, and its slot goes to a room of another peer.
        M::EndedStaysReady => {
            (scenario.prefill, scenario.decode, scenario.rooms) = (1, 3, 24);
            (scenario.rush_us, scenario.frame_bytes, faults.window) = (10_000, 128, 1);
            faults.abort = 0.7;
        }
        // A peer is back within the time that its lanes take to be down.
        M::PeerNotRevived | M::DrainedOfForgotten => {
            scenario.guarded = false;
            scenario.both_ways = false;
            (scenario.grace_ms, scenario.pace_us) = (1, 2000);
            (faults.give_up, faults.abort, faults.freeze) = (0.5, 0.5, 0.2);
            faults.delay_us = 200;
            faults.reap_us = if mutation == M::PeerNotRevived { 40_000 } else { 2000 };
        }
        _ => {}
    }
}

fn scenarios(mutation: Mutation) -> impl Iterator<Item = (u64, Scenario)> {
    let presets = presets(mutation);
    (0..SEEDS).map(move |seed| {
        let mut scenario = Scenario::of(presets[(seed % presets.len() as u64) as usize], seed);
        tune(mutation, &mut scenario);
        (seed, scenario)
    })
}

/// A mutation's trial: the first seed that shows it, with what it breaks, and seeds that break something
/// without it.
fn trial(mutation: Mutation) -> (Option<(u64, Scenario, String)>, Vec<String>) {
    let mut dirty = Vec::new();
    for (seed, scenario) in scenarios(mutation) {
        dirty.extend(run(seed, &scenario).err().map(|violation| violation.to_string()));
        if let Err(violation) = with_mutation(mutation, || run(seed, &scenario)) {
            return (Some((seed, scenario, violation.what)), dirty);
        }
    }
    (None, dirty)
}

#[test]
fn every_mutation_is_caught_and_only_mutations_are() {
    // What a mutation breaks may be an assertion.
    std::panic::set_hook(Box::new(|_| {}));
    let start = Instant::now();
    let (mut missed, mut accused) = (Vec::new(), Vec::new());
    for &mutation in Mutation::ALL {
        let began = Instant::now();
        let (caught, dirty) = trial(mutation);
        let took = began.elapsed();
        match caught {
            Some((seed, scenario, what)) => {
                let (name, preset) = (mutation.name(), scenario.preset.name());
                println!("{name}: {preset} seed {seed} ({took:.1?}): {what}");
            }
            None => {
                println!("{}: NOT CAUGHT in {SEEDS} seeds ({took:.1?})", mutation.name());
                missed.push(mutation.name());
            }
        }
        accused.extend(dirty);
    }
    let _ = std::panic::take_hook();
    assert!(missed.is_empty(), "not caught: {missed:?}");
    assert!(accused.is_empty(), "clean code is accused: {}", accused.join("\n\n"));
    let took = start.elapsed();
    assert!(took < BUDGET, "{} mutations took {took:?}", Mutation::ALL.len());
}
