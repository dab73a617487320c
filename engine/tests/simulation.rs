//! The engine in simulation: thousands of seeds, every promise checked after every step.

use std::time::{Duration, Instant};

use kvferry::sim::{Preset, Scenario, Stats, run};

/// Seeds that are run however slow the machine is, and how long more are.
const SEEDS_MIN: u64 = 1000;
const SEEDS_MAX: u64 = 6000;
const BUDGET: Duration = Duration::from_secs(40);

/// A panic in a run is a violation, and shown as one.
fn quiet() {
    std::panic::set_hook(Box::new(|info| {
        if std::thread::current().name().is_some_and(|name| name.starts_with("simulation")) {
            return;
        }
        eprintln!("{info}");
    }));
}

/// Runs seeds on two threads, each its own part, as long as the budget lasts.
fn run_all() -> (u64, Stats) {
    let start = Instant::now();
    let part = move |part: u64| {
        let (mut seeds, mut total) = (0, Stats::default());
        for seed in (0..SEEDS_MAX).filter(|seed| seed % 2 == part) {
            if seeds >= SEEDS_MIN / 2 && start.elapsed() > BUDGET {
                break;
            }
            match run(seed, &Scenario::any(seed)) {
                Ok(stats) => total.add(&stats),
                Err(violation) => return Err(violation),
            }
            seeds += 1;
        }
        Ok((seeds, total))
    };
    let threads: Vec<_> = (0..2)
        .map(|index| {
            let name = format!("simulation-{index}");
            std::thread::Builder::new().name(name).spawn(move || part(index)).unwrap()
        })
        .collect();
    let (mut seeds, mut total) = (0, Stats::default());
    for thread in threads {
        match thread.join().unwrap() {
            Ok((more, stats)) => {
                seeds += more;
                total.add(&stats);
            }
            Err(violation) => panic!("{violation}"),
        }
    }
    (seeds, total)
}

#[test]
fn every_promise_holds_whatever_goes_wrong() {
    quiet();
    let (seeds, total) = run_all();
    let hours = total.virtual_us as f64 / 3.6e9;
    println!(
        "{seeds} seeds, {hours:.2} virtual hours, {} steps; {} frames replayed, {} fences, {} lanes \
         lost, {} late; rooms by end: {:?}",
        total.steps, total.replays, total.fences, total.lanes_lost, total.late, total.ends
    );
    assert!(seeds >= SEEDS_MIN, "only {seeds} seeds were run");
    // What is watched must have happened.
    for kind in [
        "done",
        "aborted",
        "peer-died",
        "peer-silent",
        "peer-restarted",
        "peer-draining",
        "grant-timeout",
        "deadline-exceeded",
        "verdict-unknown",
        "local-access",
        "remote-access",
        "remote-operation",
        "receiver-not-ready",
        "shutdown",
    ] {
        assert!(total.ends.contains_key(kind), "no room ended in {kind}");
    }
    assert!(total.replays > 0 && total.fences > 0 && total.late > 0);
}

#[test]
fn the_same_seed_gives_the_same_run() {
    for preset in Preset::ALL {
        for seed in 0..3 {
            let scenario = Scenario::of(preset, seed);
            let (first, second) = (run(seed, &scenario), run(seed, &scenario));
            assert_eq!(first.unwrap(), second.unwrap(), "{} {seed}", preset.name());
        }
    }
}
