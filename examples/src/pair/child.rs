//! A child process: lines of JSON to it and from it, signals, and no way to outlive its parent's
//! interest.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::process::{ChildStdin, ExitStatus, Stdio};
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

use crate::protocol::{Command, Event};

/// How often an ending child is looked at.
const LOOK: Duration = Duration::from_millis(5);
/// What the children log without `RUST_LOG`: failed rooms are shown by the driver already.
const LOGGED: &str = "warn,kvferry::observe=error";

/// What was heard from a child.
#[derive(Debug)]
pub(super) struct Said {
    pub(super) child: usize,
    pub(super) what: What,
}

#[derive(Debug)]
pub(super) enum What {
    Event(Box<Event>),
    /// Not an event.
    Nonsense(String),
    /// Its stdout has ended.
    Closed,
}

/// A child. Dropping it kills it, and waits for it.
#[derive(Debug)]
pub(super) struct Child {
    pub(super) name: String,
    process: std::process::Child,
    stdin: Option<ChildStdin>,
}

impl Child {
    /// Starts the program beside this one. What it says goes to `heard`, as of child `number`.
    pub(super) fn start(
        number: usize,
        program: &str,
        name: &str,
        args: Vec<OsString>,
        heard: Sender<Said>,
    ) -> Result<Self> {
        let path = std::env::current_exe()?.with_file_name(program);
        let mut command = std::process::Command::new(&path);
        command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped());
        // More would spin for each other, and slow all processes down.
        command.env(super::COMPUTE_THREADS, "1");
        if std::env::var_os("RUST_LOG").is_none() {
            command.env("RUST_LOG", LOGGED);
        }
        let mut process = command.spawn().with_context(|| {
            format!(
                "cannot start {}: build it with cargo build --package kvferry-examples --bins",
                path.display()
            )
        })?;
        let (stdin, stdout) = (process.stdin.take(), process.stdout.take());
        let child = Self { name: name.to_owned(), process, stdin };
        let stdout = stdout.context("a child without stdout")?;
        std::thread::Builder::new().name(format!("from {name}")).spawn(move || {
            let said = |what| heard.send(Said { child: number, what }).is_ok();
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                let what = serde_json::from_str(&line)
                    .map_or(What::Nonsense(line), |event| What::Event(Box::new(event)));
                if !said(what) {
                    return;
                }
            }
            said(What::Closed);
        })?;
        Ok(child)
    }

    pub(super) fn tell(&mut self, command: &Command) -> Result<()> {
        let mut line = serde_json::to_vec(command)?;
        line.push(b'\n');
        let stdin = self.stdin.as_mut().context("its stdin was closed")?;
        stdin
            .write_all(&line)
            .and_then(|()| stdin.flush())
            .with_context(|| format!("telling {}", self.name))
    }

    /// Sends a signal: to a process that was started here and not waited for, so the id is its own.
    pub(super) fn signal(&self, signal: Signal) -> Result<()> {
        kill_process(Pid::from_child(&self.process), signal)
            .with_context(|| format!("signalling {}", self.name))
    }

    /// Closes its stdin: it ends when its rooms have.
    pub(super) fn close(&mut self) {
        self.stdin = None;
    }

    /// Waits for its end.
    pub(super) fn wait(&mut self, within: Duration) -> Result<ExitStatus> {
        let start = Instant::now();
        loop {
            if let Some(status) = self.process.try_wait()? {
                return Ok(status);
            }
            if start.elapsed() > within {
                bail!("{} did not end within {within:?} of its stdin's end", self.name);
            }
            std::thread::sleep(LOOK);
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // SIGKILL ends a stopped process, too. One that has been waited for is left alone.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
