//! The processes on stage, what they were told, and what they have said so far.

use std::ffi::OsString;
use std::fmt::Write;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use rustix::process::Signal;

use super::PairArgs;
use super::child::{Child, Said, What};
use super::plan::Plan;
use super::run::{Granted, Release, Run};
use super::show::progress;
use crate::flags::Fabric;
use crate::protocol::{Command, Event, Prompt, Ready, Scan};

/// Longest start of a process: it loads its model and connects.
const START: Duration = Duration::from_secs(60);
/// Longest end of a process whose rooms have ended.
const END: Duration = Duration::from_secs(10);
/// The prefill process among the children; decode processes follow.
const PREFILL: usize = 0;

/// The processes, and the rooms they were fed.
pub(super) struct Stage<'a> {
    args: &'a PairArgs,
    children: Vec<Child>,
    readys: Vec<Option<Ready>>,
    /// What a scan that was asked for last has found.
    scans: Vec<Option<Scan>>,
    /// Children that were killed here: their end is no surprise.
    killed: Vec<bool>,
    hears: Receiver<Said>,
    heard: Sender<Said>,
    runs: Vec<Run>,
}

impl<'a> Stage<'a> {
    /// Starts a prefill process and some decode processes that connect to it.
    pub(super) fn start(args: &'a PairArgs, decodes: usize) -> Result<Self> {
        let (heard, hears) = channel();
        let mut stage = Self {
            args,
            children: Vec::new(),
            readys: Vec::new(),
            scans: Vec::new(),
            killed: Vec::new(),
            hears,
            heard,
            runs: Vec::new(),
        };
        let pace = args.pace_ms().to_string();
        stage.add("prefill", "prefill", &["--listen", "127.0.0.1:0", "--pace-ms", &pace])?;
        for _ in 0..decodes {
            stage.add_decode()?;
        }
        Ok(stage)
    }

    /// Starts one more decode process; returns its number.
    pub(super) fn add_decode(&mut self) -> Result<usize> {
        let listen = self.prefill()?.listen.context("prefill does not listen")?.to_string();
        let number = self.children.len() - 1;
        let name = format!("decode-{number}");
        let max_new = self.args.max_new.to_string();
        self.add("decode", &name, &["--connect", &listen, "--max-new", &max_new])?;
        Ok(number)
    }

    fn add(&mut self, program: &str, name: &str, own: &[&str]) -> Result<()> {
        let number = self.children.len();
        let args = self.child_args(number, name, own);
        self.children.push(Child::start(number, program, name, args, self.heard.clone())?);
        self.readys.push(None);
        self.scans.push(None);
        self.killed.push(false);
        self.until(START, "it to be ready", |stage| stage.readys[number].is_some())
            .with_context(|| format!("starting {name}"))?;
        if let Some(ready) = &self.readys[number] {
            let metrics = ready
                .metrics
                .map_or(String::new(), |at| format!(", metrics at http://{at}/metrics"));
            let carries = match (&ready.rails[..], self.args.fabric) {
                ([], _) | (_, Fabric::Tcp) => format!("tcp over {}", ready.io),
                (rails, _) => format!("rdma over {}", rails.join(", ")),
            };
            progress(&format!("{name} is ready: pid {}, {carries}{metrics}", ready.pid));
        }
        Ok(())
    }

    fn child_args(&self, number: usize, name: &str, own: &[&str]) -> Vec<OsString> {
        let (pair, model) = (self.args, &self.args.model);
        let mut args: Vec<OsString> = own.iter().map(OsString::from).collect();
        let mut flag = |name: &str, value: OsString| args.extend([name.into(), value]);
        flag("--name", name.into());
        flag("--fabric", word(&pair.fabric));
        let rails = if number == PREFILL { &pair.prefill_rails } else { &pair.decode_rails };
        rails.iter().for_each(|rail| flag("--rail", rail.into()));
        flag("--io", word(&pair.io));
        flag("--zero-copy", word(&pair.zero_copy));
        flag("--lanes", pair.lanes.to_string().into());
        flag("--peer-silent-ms", pair.peer_silent_ms().to_string().into());
        flag("--fence-after-ms", pair.fence_after_ms.to_string().into());
        flag("--seed", model.seed.to_string().into());
        flag("--pages", model.pages.to_string().into());
        flag("--page-tokens", model.page_tokens.to_string().into());
        flag("--chunk-tokens", model.chunk_tokens.to_string().into());
        flag("--ballast-layers", pair.ballast_layers().to_string().into());
        if let Some(path) = &model.model {
            flag("--model", path.into());
        }
        if let Some(path) = &pair.secret_file {
            flag("--secret-file", path.into());
        }
        if let Some(mut addr) = pair.metrics_addr() {
            if addr.port() != 0 {
                addr.set_port(addr.port().wrapping_add(number as u16));
            }
            flag("--metrics-addr", addr.to_string().into());
        }
        args
    }

    pub(super) fn run(&self, run: usize) -> &Run {
        &self.runs[run]
    }

    /// Tells both sides of a room; returns its number among the runs.
    pub(super) fn feed(&mut self, plan: Plan, decode: usize) -> Result<usize> {
        let (room, prompt) = (plan.room, Prompt::Text(plan.prompt.clone()));
        self.children[PREFILL].tell(&Command::Prefill { room, prompt, hold: false })?;
        self.feed_decode(plan, decode)
    }

    /// Tells both sides of a room of which prefill holds back all but the first chunk, and waits until it
    /// has come so far.
    pub(super) fn feed_held(&mut self, plan: Plan, decode: usize) -> Result<usize> {
        let (room, prompt) = (plan.room, Prompt::Text(plan.prompt.clone()));
        let run = self.feed_decode(plan, decode)?;
        self.until(self.args.patience(), "a grant", |stage| stage.runs[run].granted.is_some())?;
        self.children[PREFILL].tell(&Command::Prefill { room, prompt, hold: true })?;
        self.until(self.args.patience(), "a first chunk", |stage| stage.runs[run].held)?;
        Ok(run)
    }

    fn feed_decode(&mut self, plan: Plan, decode: usize) -> Result<usize> {
        let (room, prompt) = (plan.room, Prompt::Text(plan.prompt.clone()));
        self.runs.push(Run::new(plan, decode));
        self.children[decode + 1].tell(&Command::Decode { room, prompt, max_new: None })?;
        Ok(self.runs.len() - 1)
    }

    /// Has prefill hand in all chunks of rooms that it holds back, and waits until it has.
    pub(super) fn resume(&mut self, runs: &[usize]) -> Result<()> {
        self.resume_to_end(runs)?;
        self.until(self.args.patience(), "all chunks to be handed in", |stage| {
            runs.iter().all(|&run| {
                let (chunk, of) = stage.runs[run].chunks;
                of > 0 && chunk == of
            })
        })
    }

    /// Has prefill end rooms of which it has handed all chunks in.
    pub(super) fn resume_to_end(&mut self, runs: &[usize]) -> Result<()> {
        runs.iter().try_for_each(|&run| {
            let room = self.runs[run].plan.room;
            self.children[PREFILL].tell(&Command::Resume { room })
        })
    }

    /// Has the decode side of a room give it up.
    pub(super) fn abort(&mut self, run: usize, reason: &str) -> Result<()> {
        let Run { plan: Plan { room, .. }, decode, .. } = self.runs[run];
        self.children[decode + 1].tell(&Command::Abort { room, reason: reason.to_owned() })
    }

    /// Has prefill give a room up.
    pub(super) fn abort_on_prefill(&mut self, run: usize, reason: &str) -> Result<()> {
        let room = self.runs[run].plan.room;
        self.children[PREFILL].tell(&Command::Abort { room, reason: reason.to_owned() })
    }

    /// Has a decode process look through its pages.
    pub(super) fn scan(&mut self, decode: usize) -> Result<Scan> {
        let child = decode + 1;
        self.scans[child] = None;
        self.children[child].tell(&Command::Scan)?;
        self.until(self.args.patience(), "a scan", |stage| stage.scans[child].is_some())?;
        self.scans[child].context("no scan")
    }

    /// What prefill was when it was ready.
    pub(super) fn prefill(&self) -> Result<&Ready> {
        self.readys[PREFILL].as_ref().context("prefill is not ready")
    }

    /// Sends a signal to a decode process; returns when.
    pub(super) fn signal(&mut self, decode: usize, signal: Signal) -> Result<Instant> {
        let child = decode + 1;
        self.killed[child] |= signal == Signal::KILL;
        let name = match signal {
            Signal::KILL => "SIGKILL",
            Signal::STOP => "SIGSTOP",
            _ => "SIGCONT",
        };
        progress(&format!("{} gets {name}", self.children[child].name));
        let now = Instant::now();
        self.children[child].signal(signal)?;
        Ok(now)
    }

    /// Listens until `met`.
    ///
    /// # Errors
    /// Whatever `what` was is not met within the time; a process ended, refused a command or spoke
    /// nonsense; a room ended twice.
    pub(super) fn until(
        &mut self,
        within: Duration,
        what: &str,
        met: impl Fn(&Self) -> bool,
    ) -> Result<()> {
        let start = Instant::now();
        while !met(self) {
            match self.hears.recv_timeout(within.saturating_sub(start.elapsed())) {
                Ok(said) => self.hear(said)?,
                Err(RecvTimeoutError::Timeout) => {
                    bail!("waited {within:?} for {what}{}", self.missing())
                }
                Err(RecvTimeoutError::Disconnected) => bail!("every process has ended"),
            }
        }
        Ok(())
    }

    fn missing(&self) -> String {
        let mut missing = String::new();
        for run in self.runs.iter().filter(|run| !run.is_complete()) {
            let _ = write!(
                missing,
                "\n  room {} with {}: {}/{} chunks; missing: {}",
                run.plan.room,
                self.children[run.decode + 1].name,
                run.chunks.0,
                run.chunks.1,
                run.missing()
            );
        }
        missing
    }

    fn hear(&mut self, Said { child, what }: Said) -> Result<()> {
        let name = &self.children[child].name;
        let event = match what {
            What::Event(event) => *event,
            What::Nonsense(line) => bail!("{name} said what is no event: {line}"),
            What::Closed if self.killed[child] => return Ok(()),
            What::Closed => bail!("{name} ended{}", self.missing()),
        };
        let runs = &mut self.runs;
        match event {
            Event::Ready(ready) => self.readys[child] = Some(ready),
            Event::Granted { room, pages, cached_tokens: cached, again } => {
                let run = newest(runs, room)?;
                run.granted = Some(Granted { pages, cached });
                run.receiver.again = again;
            }
            Event::Sourced { room, again, .. } => newest(runs, room)?.sender.again = again,
            Event::Held { room } => newest(runs, room)?.held = true,
            Event::Chunk { room, chunk, of } => newest(runs, room)?.chunks = (chunk, of),
            Event::Room(line) => {
                let run = newest(runs, line.room)?;
                progress(&format!("room {} {} on {name}", line.room, line.verdict));
                let may_fail = run.plan.what.may_fail();
                let side = run.side(child == PREFILL);
                ensure!(side.line.is_none(), "room {} ended twice on {name}", line.room);
                if let (Some(failure), false) = (&line.line, may_fail) {
                    bail!("a room that nothing was done to, on {name}: {failure}");
                }
                side.line = Some((line, Instant::now()));
            }
            Event::Released { room, after_abort_us, overwritten, .. } => {
                let side = newest(runs, room)?.side(child == PREFILL);
                ensure!(side.line.is_some(), "room {room} was released on {name} before its end");
                let after_abort = after_abort_us.map(Duration::from_micros);
                side.release = Some(Release { after_abort, overwritten });
            }
            Event::Text { room, tokens, text } => newest(runs, room)?.text = Some((tokens, text)),
            Event::Scanned(scan) => self.scans[child] = Some(scan),
            Event::Peers { .. } => {}
            Event::Error { room, message } => match room {
                Some(room) => bail!("{name}, room {room}: {message}"),
                None => bail!("{name}: {message}"),
            },
        }
        Ok(())
    }

    /// Lets the processes end, decode first; returns the rooms and what the processes were.
    pub(super) fn finish(mut self) -> Result<(Vec<Run>, Vec<Ready>)> {
        for number in (0..self.children.len()).rev() {
            let child = &mut self.children[number];
            child.close();
            let status = child.wait(END)?;
            ensure!(
                self.killed[number] || status.success(),
                "{} ended with {status}; its errors are above",
                child.name
            );
        }
        // What they said last.
        while let Ok(said) = self.hears.try_recv() {
            if !matches!(said.what, What::Closed) {
                self.hear(said)?;
            }
        }
        Ok((self.runs, self.readys.into_iter().flatten().collect()))
    }
}

/// A value of a flag, as it is said on the command line.
fn word(value: &impl ValueEnum) -> OsString {
    value.to_possible_value().map_or_else(OsString::new, |value| value.get_name().into())
}

/// The newest run of a room id: the one before it has ended and been released.
fn newest(runs: &mut [Run], room: u64) -> Result<&mut Run> {
    let run = runs.iter_mut().rfind(|run| run.plan.room == room);
    run.with_context(|| format!("it speaks of room {room}, which nobody asked for"))
}
