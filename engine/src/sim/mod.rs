//! The simulator: real workers, in virtual time, over a simulated fabric and control plane.
//!
//! ```text
//! callers (rooms)      control (sessions, lanes)      mischief (stalls, crashes, cuts)
//!      │ submissions        │ mail                          │
//!      ▼                    ▼                               ▼
//!   Worker<SimFabric> … one an engine, turned in random order … World (wires, pages, chance)
//!      │
//!   invariants, after every step
//! ```
//!
//! `run` plays one seed. Everything is decided by the seed and the scenario: the same two give the same
//! run, so a violation is found again, with its trace, by running them again.

pub(crate) mod agenda;
mod callers;
mod checks;
mod control;
pub(crate) mod dice;
mod kinds;
mod lanes;
mod mischief;
mod model;
mod node;
mod plans;
mod run;
mod scenario;
mod sessions;
pub(crate) mod trace;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

pub use self::scenario::{Faults, Preset, Scenario};
pub use crate::mutations::{Mutation, with_mutation};

/// What a run did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Handles of rooms by how they ended: `done`, or the failure's kind.
    pub ends: BTreeMap<&'static str, u64>,
    /// Virtual time, in microseconds.
    pub virtual_us: u64,
    /// Steps: turns of workers, things on wires and sessions, calls.
    pub steps: u64,
    /// Frames posted again after their lane went down.
    pub replays: u64,
    /// Times a peer was fenced off.
    pub fences: u64,
    /// Things that came too late or twice, and changed nothing.
    pub late: u64,
    /// Lane ends that went down.
    pub lanes_lost: u64,
    /// Hash of everything that happened, in order.
    pub hash: u64,
}

impl Stats {
    /// Adds another run's.
    pub fn add(&mut self, other: &Self) {
        for (end, count) in &other.ends {
            *self.ends.entry(end).or_default() += count;
        }
        self.virtual_us += other.virtual_us;
        self.steps += other.steps;
        self.replays += other.replays;
        self.fences += other.fences;
        self.late += other.late;
        self.lanes_lost += other.lanes_lost;
        self.hash = self.hash.rotate_left(1) ^ other.hash;
    }
}

/// A promise that was broken.
#[derive(Clone, Debug)]
pub struct Violation {
    /// The seed that shows it.
    pub seed: u64,
    /// The scenario, in words.
    pub scenario: String,
    /// Which promise, and how.
    pub what: String,
    /// The last things that happened.
    pub trace: String,
}

impl std::fmt::Display for Violation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { seed, scenario, what, trace } = self;
        writeln!(f, "seed {seed}: {what}\nscenario: {scenario}\n\n{trace}")?;
        writeln!(f, "seed {seed}: {what}")?;
        write!(f, "run it again: ci/soak --from {seed} --count 1")?;
        match scenario.split_once(' ') {
            Some((preset, _)) => write!(f, " --preset {preset}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Violation {}

/// Plays one seed of a scenario.
///
/// # Errors
/// The first promise that was broken, with a trace of what led to it.
pub fn run(seed: u64, scenario: &Scenario) -> Result<Stats, Box<Violation>> {
    let what = match play(seed, scenario, false) {
        Ok(stats) => return Ok(stats),
        Err((what, _)) => what,
    };
    // Once more, with a trace: the run is the same.
    let trace = play(seed, scenario, true).err();
    let (again, trace) =
        trace.unwrap_or_else(|| ("nothing, the second time".to_owned(), String::new()));
    let what = if again == what { what } else { format!("{what} (and then: {again})") };
    Err(Box::new(Violation { seed, scenario: scenario.to_string(), what, trace }))
}

/// One run; a panic anywhere in it is a violation.
fn play(seed: u64, scenario: &Scenario, traced: bool) -> Result<Stats, (String, String)> {
    let mut run = run::Run::new(seed, scenario, traced);
    let ended = catch_unwind(AssertUnwindSafe(|| run.play()));
    match ended {
        Ok(Ok(stats)) => Ok(stats),
        Ok(Err(what)) => Err((what, run.trace())),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|&text| text.to_owned()));
            Err((format!("panic: {}", text.unwrap_or_default()), run.trace()))
        }
    }
}
