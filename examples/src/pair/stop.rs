//! SIGSTOP: a peer that stands still for a while, and one that does for too long.
//!
//! ```text
//! rooms to decode-0 are held after their first chunk
//! SIGSTOP, the rest is handed in ── lanes are full
//!   prefill gives all but one up ── released ── overwritten ── sent from for decode-1
//! SIGCONT ── the rooms fail there, the one goes on ── scan ── the same ids again ── scan
//! SIGSTOP ── more rooms fail for silence ── SIGCONT ── they fail there ── scan
//! ```

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;

use super::fault::{
    BYSTANDER, DEAD_WITHIN, ROOMS_MIN, SLACK, VICTIM, all, failed_and_released, prefill_fails,
    same_words,
};
use super::kernel;
use super::plan::{Plan, Planner, What};
use super::run::Run;
use super::stage::Stage;
use super::{PairArgs, ZeroCopySends};
use crate::protocol::Scan;

/// How much later than the fence a room may be released: the worker closes lanes, reaps what was in
/// flight on them, and wakes whoever waits.
const AFTER_FENCE: Duration = Duration::from_millis(200);
/// Counts how often a peer was fenced off.
const FENCES: &str = "kvferry_fences_total";

pub(super) fn run<'a>(
    args: &'a PairArgs,
    planner: &Planner<'_>,
) -> Result<(Stage<'a>, Vec<String>)> {
    let stage = Stage::start(args, 2)?;
    let mut stop = Stop { args, planner, stage, rooms: 0, claims: Vec::new() };
    stop.for_a_while()?;
    stop.for_too_long()?;
    stop.scan_all()?;
    stop.count_fences()?;
    Ok((stop.stage, stop.claims))
}

struct Stop<'a, 'p> {
    args: &'a PairArgs,
    planner: &'p Planner<'p>,
    stage: Stage<'a>,
    /// Ids given to rooms so far.
    rooms: u64,
    claims: Vec<String>,
}

impl Stop<'_, '_> {
    /// The process stands still, and continues before it counts as lost.
    fn for_a_while(&mut self) -> Result<()> {
        let rooms = self.args.rooms.max(ROOMS_MIN);
        let given_up = self.held(rooms / 2 - 1, What::Doomed)?;
        let kept = self.held(1, What::Exposed)?;
        let stopped = self.stage.signal(VICTIM, Signal::STOP)?;
        let others = self.get_stuck(&[&given_up[..], &kept].concat(), rooms - rooms / 2)?;
        self.give_up(&given_up)?;
        self.stage.resume_to_end(&kept)?;
        self.use_pages_again(&given_up, &others)?;

        let stopped_for = stopped.elapsed();
        let continued = self.stage.signal(VICTIM, Signal::CONT)?;
        self.stage.until(
            self.args.patience(),
            "the continued process to end its rooms",
            |stage| {
                let failed = |run: &Run| {
                    failed_and_released(&run.sender) && failed_and_released(&run.receiver)
                };
                all(stage, &given_up, failed)
                    && all(stage, &kept, |run| run.is_complete() || failed(run))
            },
        )?;
        same_words(&self.stage, &given_up)?;
        let kept = self.outcome_of_kept(kept[0], stopped_for)?;
        self.claims.push(format!(
            "continued after {} ms, it failed and released the same {} rooms {} ms later, with the same \
             words; the one that nobody gave up {kept}",
            stopped_for.as_millis(),
            given_up.len(),
            continued.elapsed().as_millis()
        ));
        let Scan { pages, .. } = self.scan(VICTIM)?;
        self.claims.push(format!(
            "none of the {pages} pages that rooms had there has a byte that prefill wrote after their release"
        ));
        self.serve_again(&given_up)
    }

    /// Rooms of the process that will be stopped, in the middle of their transfer.
    fn held(&mut self, count: u64, what: What) -> Result<Vec<usize>> {
        let plans = self.plans(count, what)?;
        plans.into_iter().map(|plan| self.stage.feed_held(plan, VICTIM)).collect()
    }

    fn others(&mut self, count: u64) -> Result<Vec<usize>> {
        let plans = self.plans(count, What::Plain)?;
        plans.into_iter().map(|plan| self.stage.feed(plan, BYSTANDER)).collect()
    }

    fn plans(&mut self, count: u64, what: What) -> Result<Vec<Plan>> {
        let first = self.rooms + 1;
        self.rooms += count;
        self.planner.plain(first..=self.rooms, what)
    }

    /// Has the rest of the rooms handed in, more than is read and more than the kernel takes; then
    /// rooms of the other process are under way as well.
    fn get_stuck(&mut self, rooms: &[usize], others: u64) -> Result<Vec<usize>> {
        self.stage.resume(rooms)?;
        let port = self.stage.prefill()?.listen.context("prefill does not listen")?.port();
        let queued = kernel::until_full(port, self.args.patience())?;
        // The process reads nothing, so what was handed in since it was stopped is here or there.
        let rest: u64 = rooms.iter().map(|&room| self.bytes_after_first_chunk(room)).sum();
        let held = queued.unsent + queued.unread;
        ensure!(
            rest > held,
            "the sockets' buffers hold all {} rooms: raise --ballast-layers or --rooms",
            rooms.len()
        );
        self.claims.push(format!(
            "stopped under way, it was sent {:.1} MB more of its {} rooms: {:.1} MB that the sockets' \
             buffers hold, {:.1} MB that they do not",
            rest as f64 / 1e6,
            rooms.len(),
            held as f64 / 1e6,
            (rest - held) as f64 / 1e6
        ));
        self.others(others)
    }

    /// Bytes of a room that are handed in after it was held.
    fn bytes_after_first_chunk(&self, room: usize) -> u64 {
        let (model, config) = (&self.args.model, self.planner.config());
        let pages = self.stage.run(room).granted.as_ref().map_or(0, |granted| granted.pages.len());
        let first = pages.min((model.chunk_tokens / model.page_tokens) as usize);
        let page_bytes = 2 * config.pool(1, model.page_tokens as usize).page() * size_of::<f32>();
        let layers = config.layers + self.args.ballast_layers() as usize;
        (page_bytes * (pages * layers - first * config.layers)) as u64
    }

    /// Prefill's scheduler hears that nobody wants the rooms any more.
    fn give_up(&mut self, rooms: &[usize]) -> Result<()> {
        for &room in rooms {
            self.stage.abort_on_prefill(room, "the client hung up")?;
        }
        self.stage.until(self.args.patience(), "prefill to release what it gave up", |stage| {
            all(stage, rooms, |run| failed_and_released(&run.sender))
        })?;
        let promised = Duration::from_millis(self.args.fence_after_ms) + AFTER_FENCE;
        let (mut slowest, mut overwritten) = (Duration::ZERO, 0);
        for &room in rooms {
            let Run { plan, sender, .. } = self.stage.run(room);
            let kind = sender.failed().and_then(|(line, _)| line.kind.as_deref());
            ensure!(kind == Some("aborted"), "room {} failed with {kind:?}", plan.room);
            let release = sender.release.unwrap_or_default();
            let after = release.after_abort.context("prefill did not measure its release")?;
            ensure!(
                after <= promised * SLACK,
                "room {} was released {after:?} after prefill gave it up, {promised:?} is promised",
                plan.room
            );
            let pages = plan.tokens.len().div_ceil(self.args.model.page_tokens as usize);
            ensure!(release.overwritten == pages, "{} pages overwritten", release.overwritten);
            slowest = slowest.max(after);
            overwritten += pages;
        }
        self.claims.push(format!(
            "{} of them that prefill gave up were released there, the last after {:.1} ms (promised: {} \
             ms), and their {overwritten} pages overwritten, while it stood still",
            rooms.len(),
            slowest.as_secs_f64() * 1e3,
            promised.as_millis()
        ));
        Ok(())
    }

    /// The pages are used for rooms of the other process, which is not concerned by any of this.
    fn use_pages_again(&mut self, given_up: &[usize], others: &[usize]) -> Result<()> {
        let later = self.others(given_up.len() as u64)?;
        self.stage.until(self.args.patience(), "the other rooms to be done", |stage| {
            all(stage, others, Run::is_complete) && all(stage, &later, Run::is_complete)
        })?;
        let again: usize = later.iter().map(|&run| self.stage.run(run).sender.again).sum();
        ensure!(again > 0, "no released page was used again");
        self.claims.push(format!(
            "all {} other rooms were done meanwhile, and {} more that were sent from {again} of those pages",
            others.len(),
            later.len()
        ));
        Ok(())
    }

    /// What became of the room that prefill did not give up. It is lost only to silence.
    fn outcome_of_kept(&self, kept: usize, stopped_for: Duration) -> Result<String> {
        let Some((line, _)) = self.stage.run(kept).sender.failed() else {
            return Ok("was done".to_owned());
        };
        // What was heard last may have been heard some heartbeats before the stop.
        let long = stopped_for * 2 > Duration::from_millis(self.args.peer_silent_ms());
        // As the cause, where all was sent and only the verdict is missing.
        let silent = line.line.as_ref().is_some_and(|line| line.contains("peer-silent"));
        ensure!(
            long && silent,
            "the room that nobody gave up failed, of a process stopped for {stopped_for:?}: {:?}",
            line.line
        );
        Ok("was lost to so long a silence".to_owned())
    }

    /// The same ids, into the pages that their first lives were granted.
    fn serve_again(&mut self, rooms: &[usize]) -> Result<()> {
        let mut again = Vec::new();
        for &room in rooms {
            let plan = Plan { what: What::Reused, ..self.stage.run(room).plan.clone() };
            again.push(self.stage.feed(plan, VICTIM)?);
        }
        self.stage.until(self.args.patience(), "the same ids to be served", |stage| {
            all(stage, &again, Run::is_complete)
        })?;
        let pages: usize = again.iter().map(|&run| self.stage.run(run).receiver.again).sum();
        ensure!(pages > 0, "no page of a failed room was granted again");
        self.claims.push(format!(
            "it was served the same {} room ids, into {pages} pages that they had been granted before",
            again.len()
        ));
        Ok(())
    }

    /// The process stands still until its rooms fail for it, and learns of that when it continues.
    fn for_too_long(&mut self) -> Result<()> {
        let rooms = self.held(self.args.rooms.max(ROOMS_MIN) / 2, What::Doomed)?;
        let stopped = self.stage.signal(VICTIM, Signal::STOP)?;
        self.stage.resume(&rooms)?;
        let silent = Duration::from_millis(self.args.peer_silent_ms());
        let words = "prefill to fail the rooms of the stopped process";
        let claim = prefill_fails(&mut self.stage, &rooms, stopped, silent, "peer-silent", words)?;
        self.claims.push(format!("stopped again for longer, {claim}"));
        let continued: Instant = self.stage.signal(VICTIM, Signal::CONT)?;
        let within = (silent + DEAD_WITHIN) * SLACK;
        self.stage.until(within, "the continued process to fail its rooms", |stage| {
            all(stage, &rooms, |run| failed_and_released(&run.receiver))
        })?;
        self.claims.push(format!(
            "continued, it failed the same {} rooms and released them {} ms later",
            rooms.len(),
            continued.elapsed().as_millis()
        ));
        Ok(())
    }

    /// Has a decode process look for what prefill overwrote released pages with.
    fn scan(&mut self, decode: usize) -> Result<Scan> {
        let scan = self.stage.scan(decode)?;
        ensure!(
            scan.poisoned == 0,
            "{} of {} pages on decode-{decode} have bytes that prefill wrote after their release",
            scan.poisoned,
            scan.pages
        );
        Ok(scan)
    }

    fn scan_all(&mut self) -> Result<()> {
        let (hurt, spared) = (self.scan(VICTIM)?, self.scan(BYSTANDER)?);
        self.claims.push(format!(
            "after all of it the same is true of the {} pages that rooms had on both, {} of which were \
             granted again; {} rooms done have the very bytes that were sent",
            hurt.pages + spared.pages,
            hurt.again + spared.again,
            hurt.exact_rooms + spared.exact_rooms
        ));
        Ok(())
    }

    fn count_fences(&mut self) -> Result<()> {
        let prefill = self.stage.prefill()?;
        let fences = kernel::counter(prefill.metrics.context("no metrics")?, FENCES)?;
        let sends = match self.args.zero_copy {
            ZeroCopySends::Try if prefill.can_zero_copy => "zero-copy sends were tried",
            ZeroCopySends::Try => "this kernel has no zero-copy sends",
            ZeroCopySends::Auto | ZeroCopySends::Off => "sends were copied",
        };
        self.claims.push(format!("{sends}; {FENCES} on prefill is {fences}"));
        Ok(())
    }
}
