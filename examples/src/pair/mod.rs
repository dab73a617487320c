//! The driver: starts the processes, feeds prompts to both sides, checks what they say against a
//! reference computed here, and shows faults with real signals.
//!
//! ```text
//! plan: which rooms, which prompts ─▶ stage: children, lines in and out ─▶ check: the reference
//!                                          ▲                                  │
//!            fault, stop: signals, and what was promised of them     show: table, text, JSON
//! ```

mod check;
mod child;
mod fault;
mod kernel;
mod plan;
mod run;
mod show;
mod stage;
mod stop;

use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Parser, ValueEnum};

use crate::flags::{Fabric, Io, ModelArgs, ZeroCopySends};
use check::Checker;
use plan::Planner;
use stage::Stage;

/// The variable that says how many threads compute.
const COMPUTE_THREADS: &str = "RAYON_NUM_THREADS";

/// Layers of ballast with stop-decode: as many layers as large models have, and rooms of which the
/// sockets' buffers hold a small part.
const STOP_BALLAST_LAYERS: u32 = 64;

/// What to let go wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Fault {
    /// A decode process is killed (SIGKILL): its rooms fail within a second, the others finish.
    KillDecode,
    /// A decode process is stopped (SIGSTOP) with its rooms under way. Those that prefill gives up are
    /// released there while it stands still, and their pages overwritten and used again; continued, it
    /// has none of that. Stopped for longer, its rooms fail for its silence, and it learns of it.
    StopDecode,
    /// As kill-decode; then a new decode process is served the same room ids by the same prefill.
    RestartDecode,
    /// The decode side gives one room up under way: it alone fails, with the same words on both
    /// sides.
    BadRoom,
}

/// Flags of `pd-pair`.
#[derive(Clone, Debug, Parser)]
#[command(
    version,
    about = "Starts a prefill and a decode process, feeds both the same prompts, and checks that every \
             token equals what one process alone generates. Exits non-zero if anything is wrong."
)]
pub struct PairArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Rooms to run. From 6 on, three of them reuse a room id, a cached prefix, a whole cached prompt.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u64).range(1..=4096))]
    rooms: u64,
    /// A file of prompts, one a line: a room each, instead of the built-in ones.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["rooms", "fault"])]
    prompts: Option<PathBuf>,
    /// Most tokens to generate for each prompt.
    #[arg(long, default_value_t = 24, value_parser = clap::value_parser!(u32).range(1..))]
    max_new: u32,
    /// What to let go wrong; exits zero if it ended as promised.
    #[arg(long, value_enum)]
    fault: Option<Fault>,
    /// Print lines of JSON instead of the table: one a room from each side, and a summary.
    #[arg(long)]
    json: bool,
    /// What carries pages.
    #[arg(long, value_enum, default_value_t = Fabric::Auto)]
    fabric: Fabric,
    /// A NIC port for prefill; may be given several times.
    #[arg(long = "prefill-rail", value_name = "DEVICE[:PORT]")]
    prefill_rails: Vec<String>,
    /// A NIC port for decode; may be given several times.
    #[arg(long = "decode-rail", value_name = "DEVICE[:PORT]")]
    decode_rails: Vec<String>,
    /// How TCP lanes are driven.
    #[arg(long, value_enum, default_value_t = Io::Auto)]
    io: Io,
    /// When lanes are sent from the pages without a copy into the kernel.
    #[arg(long, value_enum, default_value_t = ZeroCopySends::Auto)]
    zero_copy: ZeroCopySends,
    /// Data connections between the two.
    #[arg(long, default_value_t = 2)]
    lanes: u16,
    /// File with a secret for the children; at least 16 bytes.
    #[arg(long)]
    secret_file: Option<PathBuf>,
    /// Serve metrics to Prometheus: prefill here, decode processes on the ports after it. With port 0
    /// all take free ones.
    #[arg(long)]
    metrics_addr: Option<SocketAddr>,
    /// Silence after which a peer counts as lost, in milliseconds; 3000, with stop-decode 4000, with
    /// other faults 1000.
    #[arg(long)]
    peer_silent_ms: Option<u64>,
    /// How long pages of a room that has ended may wait for the peer before it is fenced off, in
    /// milliseconds.
    #[arg(long, default_value_t = 500)]
    fence_after_ms: u64,
    /// Pause between the chunks of a prompt, in milliseconds; 100 with a fault other than stop-decode,
    /// else 0.
    #[arg(long)]
    pace_ms: Option<u64>,
    /// Longest wait for the rooms of a step, in seconds. The engines' own deadlines are shorter.
    #[arg(long, default_value_t = 150)]
    timeout_s: u64,
}

impl PairArgs {
    /// Silence allowed, in milliseconds. Short with a fault; but when a process is stopped longer than a
    /// release may take, slack included, so that it is not the silence that brings it about.
    fn peer_silent_ms(&self) -> u64 {
        self.peer_silent_ms.unwrap_or(match self.fault {
            None => 3000,
            Some(Fault::StopDecode) => 4000,
            Some(_) => 1000,
        })
    }

    /// Pause between chunks. With a fault long enough that it finds rooms in their middle; rooms of a
    /// process that is stopped are held there.
    fn pace_ms(&self) -> u64 {
        self.pace_ms.unwrap_or(match self.fault {
            None | Some(Fault::StopDecode) => 0,
            Some(_) => 100,
        })
    }

    /// Where metrics are served. What is counted when a process is stopped is shown.
    fn metrics_addr(&self) -> Option<SocketAddr> {
        let stop = self.fault == Some(Fault::StopDecode);
        self.metrics_addr.or_else(|| stop.then(|| (Ipv4Addr::LOCALHOST, 0).into()))
    }

    fn ballast_layers(&self) -> u32 {
        let stop = self.fault == Some(Fault::StopDecode);
        self.model.ballast_layers.unwrap_or(if stop { STOP_BALLAST_LAYERS } else { 0 })
    }

    const fn patience(&self) -> Duration {
        Duration::from_secs(self.timeout_s)
    }
}

/// Runs the pair.
///
/// # Errors
/// Anything that did not go as promised.
pub fn run(args: &PairArgs) -> Result<()> {
    with_one_thread()?;
    let model = args.model.load()?;
    let planner = Planner::new(args, &model)?;
    let (stage, claims) = match args.fault {
        None => (plain(args, &planner)?, Vec::new()),
        Some(fault) => fault::run(fault, args, &planner)?,
    };
    // The children have ended: their cores are free for the reference.
    let (runs, readys) = stage.finish()?;
    show::progress("computing the same prompts in this process alone");
    let checked = Checker::new(&model, args).check(&runs)?;
    if args.json {
        show::json(&runs, &checked, args.fault, &claims)?;
    } else {
        show::table(&runs, &checked, &readys);
        show::texts(&runs, &model);
        show::failures(&runs);
        claims.iter().for_each(|claim| println!("as promised: {claim}"));
    }
    checked.verdict()
}

/// Starts this process anew with one compute thread, unless the environment says how many. Several
/// spin for each other, which on busy cores takes many times longer; and they are counted before the
/// first line of `main` could change it.
fn with_one_thread() -> Result<()> {
    if std::env::var_os(COMPUTE_THREADS).is_some() {
        return Ok(());
    }
    let mut again = std::process::Command::new(std::env::current_exe()?);
    let error = again.args(std::env::args_os().skip(1)).env(COMPUTE_THREADS, "1").exec();
    Err(error).context("starting anew with one compute thread")
}

/// Every room done: those that depend on nothing first, then those that build on them.
fn plain<'a>(args: &'a PairArgs, planner: &Planner<'_>) -> Result<Stage<'a>> {
    let mut stage = Stage::start(args, 1)?;
    for step in planner.steps() {
        let rooms = step.into_iter().map(|plan| stage.feed(plan, 0)).collect::<Result<Vec<_>>>()?;
        stage.until(
            args.patience(),
            "every room to be done, released and its text there",
            |stage| rooms.iter().all(|&run| stage.run(run).is_complete()),
        )?;
    }
    Ok(stage)
}
