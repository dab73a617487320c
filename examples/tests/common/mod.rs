//! Runs the real binaries, with a watch over them.
#![allow(dead_code, missing_docs, reason = "each test binary uses its own part of the harness")]

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use serde_json::Value;

/// Far longer than anything here takes; a run that reaches it hangs, and says what it had said.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// A process that does not outlive its test.
pub(crate) struct Watched(pub(crate) Child);

impl Drop for Watched {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Watched {
    pub(crate) fn wait(&mut self) -> Option<ExitStatus> {
        let start = Instant::now();
        while start.elapsed() < PATIENCE {
            if let Some(status) = self.0.try_wait().unwrap() {
                return Some(status);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        None
    }
}

/// What a run of `pd-pair` said.
pub(crate) struct Said {
    pub(crate) ok: bool,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Said {
    /// The run went well.
    #[track_caller]
    pub(crate) fn well(self) -> Self {
        assert!(self.ok, "stdout:\n{}\nstderr:\n{}", self.stdout, self.stderr);
        self
    }

    /// Every line of JSON.
    pub(crate) fn json(&self) -> Vec<Value> {
        self.stdout.lines().map(|line| serde_json::from_str(line).expect(line)).collect()
    }

    /// Rows of the table, by their cells.
    pub(crate) fn rows(&self) -> Vec<Vec<String>> {
        let rows = self.stdout.lines().filter(|line| line.starts_with("| ")).skip(1);
        rows.map(|row| row.split('|').map(|cell| cell.trim().to_owned()).collect()).collect()
    }

    /// Rooms whose row says that they are done with equal tokens.
    pub(crate) fn done(&self) -> usize {
        let equal = |row: &Vec<String>| row.iter().any(|cell| cell == "done, tokens equal");
        self.rows().iter().filter(|row| equal(row)).count()
    }
}

/// Runs `pd-pair`.
pub(crate) fn pair(args: &[&str]) -> Said {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pd-pair"));
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = Watched(command.spawn().unwrap());
    let reader = |mut from: Box<dyn Read + Send>| {
        std::thread::spawn(move || {
            let mut said = Vec::new();
            let _ = from.read_to_end(&mut said);
            String::from_utf8(said).unwrap()
        })
    };
    let stdout = reader(Box::new(child.0.stdout.take().unwrap()));
    let stderr = reader(Box::new(child.0.stderr.take().unwrap()));
    let status = child.wait();
    drop(child);
    let (stdout, stderr) = (stdout.join().unwrap(), stderr.join().unwrap());
    let status = status.unwrap_or_else(|| panic!("pd-pair {args:?} hangs:\n{stdout}\n{stderr}"));
    Said { ok: status.success(), stdout, stderr }
}

/// A `prefill` or `decode` process, driven by its lines.
pub(crate) struct Node {
    process: Watched,
    events: Receiver<Value>,
    /// What it said when it was ready.
    pub(crate) ready: Value,
}

impl Node {
    pub(crate) fn prefill(args: &[&str]) -> Self {
        Self::start(
            env!("CARGO_BIN_EXE_prefill"),
            &[&["--listen", "127.0.0.1:0"][..], args].concat(),
        )
    }

    pub(crate) fn decode(prefill: &Self, args: &[&str]) -> Self {
        let at = ["--connect", prefill.ready["listen"].as_str().unwrap()];
        Self::start(env!("CARGO_BIN_EXE_decode"), &[&at[..], args].concat())
    }

    fn start(program: &str, args: &[&str]) -> Self {
        let mut command = Command::new(program);
        command.args(args).env("RAYON_NUM_THREADS", "1");
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = Watched(command.spawn().unwrap());
        let stdout = BufReader::new(process.0.stdout.take().unwrap());
        let (heard, events) = channel();
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                let _ = heard.send(serde_json::from_str(&line).expect(&line));
            }
        });
        let mut node = Self { process, events, ready: Value::Null };
        node.ready = node.hear("ready");
        node
    }

    /// Sends a line as it is.
    pub(crate) fn say(&mut self, line: &str) {
        let stdin = self.process.0.stdin.as_mut().unwrap();
        stdin.write_all(format!("{line}\n").as_bytes()).unwrap();
    }

    /// The next event of a kind; others are passed over.
    pub(crate) fn hear(&self, event: &str) -> Value {
        loop {
            let heard = self.events.recv_timeout(PATIENCE);
            let heard = heard.unwrap_or_else(|_| panic!("no {event} was heard"));
            if heard["event"] == event {
                return heard;
            }
        }
    }

    /// Ends its stdin and waits for its end.
    pub(crate) fn end(mut self) -> ExitStatus {
        self.process.0.stdin = None;
        self.process.wait().expect("it does not end with its stdin")
    }
}
