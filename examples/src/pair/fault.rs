//! Faults, with real signals to processes started here, and what was promised of each.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use rustix::process::Signal;

use super::plan::{Planner, What};
use super::run::{Run, Side};
use super::stage::Stage;
use super::{Fault, PairArgs, stop};

/// A dead peer is known dead within this.
pub(super) const DEAD_WITHIN: Duration = Duration::from_secs(1);
/// What a busy machine may take longer than promised, as a factor.
pub(super) const SLACK: u32 = 5;
/// The decode process that is hurt, and the one that is not.
pub(super) const VICTIM: usize = 0;
pub(super) const BYSTANDER: usize = 1;
/// Rooms of each of the two: what `--rooms` says is shared between them, and needs two of each.
pub(super) const ROOMS_MIN: u64 = 4;

/// The rooms of a fault, by their number among the runs.
struct Cast {
    /// Concerned by it.
    doomed: Vec<usize>,
    /// Not concerned.
    others: Vec<usize>,
}

/// Lets a fault happen. The claims are what was seen of what was promised.
pub(super) fn run<'a>(
    fault: Fault,
    args: &'a PairArgs,
    planner: &Planner<'_>,
) -> Result<(Stage<'a>, Vec<String>)> {
    match fault {
        Fault::KillDecode => {
            let (mut stage, cast) = two_decodes(args, planner)?;
            let claims = kill(&mut stage, &cast)?;
            let claims = others_finish(args, &mut stage, &cast.others, claims)?;
            Ok((stage, claims))
        }
        Fault::StopDecode => stop::run(args, planner),
        Fault::RestartDecode => restart(args, planner),
        Fault::BadRoom => bad_room(args, planner),
    }
}

/// Two decode processes with rooms in flight, every other room to the one that will be hurt.
fn two_decodes<'a>(args: &'a PairArgs, planner: &Planner<'_>) -> Result<(Stage<'a>, Cast)> {
    let mut stage = Stage::start(args, 2)?;
    let rooms = args.rooms.max(ROOMS_MIN);
    let mut cast = Cast { doomed: Vec::new(), others: Vec::new() };
    for room in 1..=rooms {
        let (what, decode) =
            if room % 2 == 1 { (What::Doomed, VICTIM) } else { (What::Plain, BYSTANDER) };
        for plan in planner.plain(room..=room, what)? {
            let run = stage.feed(plan, decode)?;
            if decode == VICTIM { &mut cast.doomed } else { &mut cast.others }.push(run);
        }
    }
    in_flight(args, &mut stage, &cast.doomed)?;
    Ok((stage, cast))
}

/// Waits until all of them are granted, and one is in the middle of its transfer.
fn in_flight(args: &PairArgs, stage: &mut Stage<'_>, rooms: &[usize]) -> Result<()> {
    let under_way = |run: &Run| run.chunks.0 > 0 && run.chunks.0 < run.chunks.1;
    stage.until(args.patience(), "rooms to be under way", |stage| {
        let mut runs = rooms.iter().map(|&room| stage.run(room));
        runs.clone().all(|run| run.granted.is_some()) && runs.any(under_way)
    })
}

/// SIGKILL: every room of the process fails on the prefill side.
fn kill(stage: &mut Stage<'_>, cast: &Cast) -> Result<Vec<String>> {
    let at = stage.signal(VICTIM, Signal::KILL)?;
    let words = "prefill to fail the rooms of the killed process";
    Ok(vec![prefill_fails(stage, &cast.doomed, at, DEAD_WITHIN, "peer-died", words)?])
}

/// SIGKILL, and a new process in its place: served the same ids by the same prefill.
fn restart<'a>(args: &'a PairArgs, planner: &Planner<'_>) -> Result<(Stage<'a>, Vec<String>)> {
    let (mut stage, cast) = two_decodes(args, planner)?;
    let mut claims = kill(&mut stage, &cast)?;
    let decode = stage.add_decode()?;
    let mut again = Vec::new();
    for &run in &cast.doomed {
        let mut plan = stage.run(run).plan.clone();
        plan.what = What::Reused;
        again.push(stage.feed(plan, decode)?);
    }
    stage.until(args.patience(), "the new process to be served", |stage| {
        all(stage, &again, Run::is_complete)
    })?;
    claims.push(format!(
        "a new decode process was served the same {} room ids, prefill was not restarted",
        again.len()
    ));
    let claims = others_finish(args, &mut stage, &cast.others, claims)?;
    Ok((stage, claims))
}

/// One room is given up by the decode side under way; both say the same of it.
fn bad_room<'a>(args: &'a PairArgs, planner: &Planner<'_>) -> Result<(Stage<'a>, Vec<String>)> {
    let mut stage = Stage::start(args, 1)?;
    let rooms = args.rooms.max(ROOMS_MIN);
    let bad = 2;
    let (mut cast, mut at) = (Cast { doomed: Vec::new(), others: Vec::new() }, Instant::now());
    for room in 1..=rooms {
        let what = if room == bad { What::Doomed } else { What::Plain };
        for plan in planner.plain(room..=room, what)? {
            let run = stage.feed(plan, VICTIM)?;
            if room == bad { &mut cast.doomed } else { &mut cast.others }.push(run);
        }
    }
    in_flight(args, &mut stage, &cast.doomed)?;
    for &run in &cast.doomed {
        at = Instant::now();
        stage.abort(run, "the client hung up")?;
    }
    let words = "prefill to fail the room that decode gave up";
    let mut claims =
        vec![prefill_fails(&mut stage, &cast.doomed, at, DEAD_WITHIN, "aborted", words)?];
    stage.until(
        DEAD_WITHIN * SLACK,
        "decode to fail and release the room it gave up",
        |stage| all(stage, &cast.doomed, |run| failed_and_released(&run.receiver)),
    )?;
    same_words(&stage, &cast.doomed)?;
    claims.push("both sides say the same of it".to_owned());
    let claims = others_finish(args, &mut stage, &cast.others, claims)?;
    Ok((stage, claims))
}

/// Waits until prefill has failed and released the rooms, all with `kind`, and says how long after
/// `at` the last one failed.
pub(super) fn prefill_fails(
    stage: &mut Stage<'_>,
    rooms: &[usize],
    at: Instant,
    promised: Duration,
    kind: &str,
    words: &str,
) -> Result<String> {
    let left = (promised * SLACK).saturating_sub(at.elapsed());
    stage.until(left, words, |stage| all(stage, rooms, |run| run.sender.line.is_some()))?;
    let mut last = at;
    for &room in rooms {
        let run = stage.run(room);
        let failed = run.sender.failed();
        let Some((line, heard)) = failed else {
            anyhow::bail!("room {} is done, with a peer that was not there", run.plan.room)
        };
        // Of a room whose every page was sent the receiver may know a better end than the sender.
        let unknown = line.kind.as_deref() == Some("verdict-unknown")
            && line.cause.as_ref().is_some_and(|cause| cause.contains(kind));
        ensure!(
            unknown || line.kind.as_deref() == Some(kind),
            "room {} failed with {:?}, not {kind}: {:?}",
            run.plan.room,
            line.kind,
            line.cause
        );
        last = last.max(heard);
    }
    stage.until(promised * SLACK, "prefill to release the failed rooms", |stage| {
        all(stage, rooms, |run| run.sender.release.is_some())
    })?;
    Ok(format!(
        "{} of {} rooms failed on prefill with {kind}, the last after {} ms (promised: {} ms); all were released",
        rooms.len(),
        rooms.len(),
        (last - at).as_millis(),
        promised.as_millis()
    ))
}

/// Both sides say the same of each of the rooms, which failed.
pub(super) fn same_words(stage: &Stage<'_>, rooms: &[usize]) -> Result<()> {
    for &run in rooms {
        let words = |side: &Side| side.failed().and_then(|(line, _)| line.line.clone());
        let (sent, received) = (words(&stage.run(run).sender), words(&stage.run(run).receiver));
        ensure!(sent == received, "two failures of one room:\n  {sent:?}\n  {received:?}");
    }
    Ok(())
}

/// Waits for the rooms that the fault does not concern.
fn others_finish(
    args: &PairArgs,
    stage: &mut Stage<'_>,
    others: &[usize],
    mut claims: Vec<String>,
) -> Result<Vec<String>> {
    stage.until(args.patience(), "the other rooms to be done", |stage| {
        all(stage, others, Run::is_complete)
    })?;
    claims.push(format!("all {} other rooms were done", others.len()));
    Ok(claims)
}

pub(super) fn failed_and_released(side: &Side) -> bool {
    side.failed().is_some() && side.release.is_some()
}

pub(super) fn all(stage: &Stage<'_>, rooms: &[usize], is: impl Fn(&Run) -> bool) -> bool {
    rooms.iter().all(|&room| is(stage.run(room)))
}
