//! The processes on stage, what they were told, and what they have said so far.

use std::ffi::OsString;
use std::fmt::Write;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::Signal;

use super::PairArgs;
use super::child::{Child, Said, What};
use super::plan::{self, Plan};
use super::show::progress;
use crate::protocol::{Command, Event, Prompt, Ready, RoomLine};

/// Longest start of a process: it loads its model and connects.
const START: Duration = Duration::from_secs(60);
/// Longest end of a process whose rooms have ended.
const END: Duration = Duration::from_secs(10);
/// The prefill process among the children; decode processes follow.
const PREFILL: usize = 0;

/// What one side said of a room.
#[derive(Clone, Debug, Default)]
pub(super) struct Side {
    /// How it ended there, and when that was heard.
    pub(super) line: Option<(RoomLine, Instant)>,
    pub(super) released: bool,
}

/// A room that was fed to both sides.
#[derive(Clone, Debug)]
pub(super) struct Run {
    pub(super) plan: Plan,
    /// Which decode process it went to.
    pub(super) decode: usize,
    pub(super) sender: Side,
    pub(super) receiver: Side,
    /// Granted pages, and tokens cached before them.
    pub(super) granted: Option<(Vec<u32>, u32)>,
    /// Chunks handed to the engine, and all there are.
    pub(super) chunks: (usize, usize),
    pub(super) text: Option<(Vec<u32>, String)>,
}

impl Run {
    /// Done and released on both sides, and its text is there.
    pub(super) fn is_complete(&self) -> bool {
        let done = |side: &Side| side.is_done() && side.released;
        done(&self.sender) && done(&self.receiver) && self.text.is_some()
    }

    /// The side that a child is of it.
    const fn side(&mut self, child: usize) -> &mut Side {
        if child == PREFILL { &mut self.sender } else { &mut self.receiver }
    }

    fn missing(&self) -> String {
        let side = |name: &str, side: &Side| match &side.line {
            None => format!("{name}'s end, "),
            Some(_) if !side.released => format!("{name}'s release, "),
            Some((line, _)) => match &line.cause {
                Some(cause) => format!("(failed on {name}: {cause}), "),
                None => String::new(),
            },
        };
        let text = if self.text.is_none() { "the text" } else { "" };
        side("prefill", &self.sender) + &side("decode", &self.receiver) + text
    }
}

impl Side {
    pub(super) fn is_done(&self) -> bool {
        self.line.as_ref().is_some_and(|(line, _)| line.is_done())
    }

    /// The line of a room that failed here.
    pub(super) fn failed(&self) -> Option<(&RoomLine, Instant)> {
        self.line.as_ref().filter(|(line, _)| !line.is_done()).map(|(line, at)| (line, *at))
    }
}

/// The processes, and the rooms they were fed.
pub(super) struct Stage<'a> {
    args: &'a PairArgs,
    children: Vec<Child>,
    readys: Vec<Option<Ready>>,
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
        let (children, readys, killed, runs) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let mut stage = Self { args, children, readys, killed, hears, heard, runs };
        let pace = args.pace_ms().to_string();
        stage.add("prefill", "prefill", &["--listen", "127.0.0.1:0", "--pace-ms", &pace])?;
        for _ in 0..decodes {
            stage.add_decode()?;
        }
        Ok(stage)
    }

    /// Starts one more decode process; returns its number.
    pub(super) fn add_decode(&mut self) -> Result<usize> {
        let listen = self.readys[PREFILL].as_ref().and_then(|ready| ready.listen);
        let listen = listen.context("prefill does not listen")?.to_string();
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
        self.killed.push(false);
        self.until(START, "it to be ready", |stage| stage.readys[number].is_some())
            .with_context(|| format!("starting {name}"))?;
        if let Some(ready) = &self.readys[number] {
            let metrics = ready
                .metrics
                .map_or(String::new(), |at| format!(", metrics at http://{at}/metrics"));
            progress(&format!("{name} is ready: pid {}, {}{metrics}", ready.pid, ready.io));
        }
        Ok(())
    }

    fn child_args(&self, number: usize, name: &str, own: &[&str]) -> Vec<OsString> {
        let (pair, model) = (self.args, &self.args.model);
        let io = clap::ValueEnum::to_possible_value(&pair.io);
        let io = io.map_or(String::new(), |io| io.get_name().to_owned());
        let mut args: Vec<OsString> = own.iter().map(OsString::from).collect();
        let mut flag = |name: &str, value: OsString| args.extend([name.into(), value]);
        flag("--name", name.into());
        flag("--io", io.into());
        flag("--lanes", pair.lanes.to_string().into());
        flag("--peer-silent-ms", pair.peer_silent_ms().to_string().into());
        flag("--seed", model.seed.to_string().into());
        flag("--pages", model.pages.to_string().into());
        flag("--page-tokens", model.page_tokens.to_string().into());
        flag("--chunk-tokens", model.chunk_tokens.to_string().into());
        if let Some(path) = &model.model {
            flag("--model", path.into());
        }
        if let Some(path) = &pair.secret_file {
            flag("--secret-file", path.into());
        }
        if let Some(mut addr) = pair.metrics_addr {
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
        let run = Run {
            plan,
            decode,
            sender: Side::default(),
            receiver: Side::default(),
            granted: None,
            chunks: (0, 0),
            text: None,
        };
        self.runs.push(run);
        self.children[PREFILL].tell(&Command::Prefill { room, prompt: prompt.clone() })?;
        self.children[decode + 1].tell(&Command::Decode { room, prompt, max_new: None })?;
        Ok(self.runs.len() - 1)
    }

    /// Has the decode side of a room give it up.
    pub(super) fn abort(&mut self, run: usize, reason: &str) -> Result<()> {
        let Run { plan: Plan { room, .. }, decode, .. } = self.runs[run];
        self.children[decode + 1].tell(&Command::Abort { room, reason: reason.to_owned() })
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
            Event::Granted { room, pages, cached_tokens } => {
                newest(runs, room)?.granted = Some((pages, cached_tokens));
            }
            Event::Chunk { room, chunk, of } => newest(runs, room)?.chunks = (chunk, of),
            Event::Room(line) => {
                let run = newest(runs, line.room)?;
                progress(&format!("room {} {} on {name}", line.room, line.verdict));
                let doomed = run.plan.what == plan::What::Doomed;
                let side = run.side(child);
                ensure!(side.line.is_none(), "room {} ended twice on {name}", line.room);
                if let (Some(failure), false) = (&line.line, doomed) {
                    bail!("a room that nothing was done to, on {name}: {failure}");
                }
                side.line = Some((line, Instant::now()));
            }
            Event::Released { room, .. } => {
                let side = newest(runs, room)?.side(child);
                ensure!(side.line.is_some(), "room {room} was released on {name} before its end");
                side.released = true;
            }
            Event::Text { room, tokens, text } => newest(runs, room)?.text = Some((tokens, text)),
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

/// The newest run of a room id: the one before it has ended and been released.
fn newest(runs: &mut [Run], room: u64) -> Result<&mut Run> {
    let run = runs.iter_mut().rfind(|run| run.plan.room == room);
    run.with_context(|| format!("it speaks of room {room}, which nobody asked for"))
}
