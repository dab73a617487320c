//! A decode engine in a process of its own, to be stopped, continued and killed.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use kvferry::{EngineConfig, GrantSpec};
use rustix::process::{Pid, Signal, kill_process};

use super::{KV, Node, PATIENCE, config, layout, wait};

/// Set in the child: the address to connect to.
const ADDR: &str = "KVFERRY_TEST_DECODE_OF";
/// What lines for the parent begin with; the test harness prints too.
const MARK: &str = "decode: ";

/// The settings of both sides.
pub fn settings(io: kvferry::IoMode) -> EngineConfig {
    config(io).peer_silent_ms(30_000u64)
}

/// To be called by a test of the name given to [`Decode::start`]. Does nothing in the parent.
pub fn decode_main(pages: u32) {
    let Ok(addr) = std::env::var(ADDR) else { return };
    let node = Node::start(settings(kvferry::IoMode::Auto), layout(pages));
    let peer = wait(node.engine.connect(addr.parse::<SocketAddr>().unwrap())).unwrap();
    let say = |words: String| {
        println!("{MARK}{words}");
        std::io::stdout().flush().unwrap();
    };
    say("connected".to_owned());
    let mut rooms = HashMap::new();
    let (heard, lines) = channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lines() {
            let Ok(line) = line else { break };
            if heard.send(line).is_err() {
                break;
            }
        }
    });
    loop {
        let line = match lines.recv_timeout(Duration::from_millis(1)) {
            Ok(line) => line,
            Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => break,
            Err(std::sync::mpsc::RecvTimeoutError::Timeout) => String::new(),
        };
        let words: Vec<u64> = line.split(' ').filter_map(|word| word.parse().ok()).collect();
        match (line.split(' ').next().unwrap_or_default(), &words[..]) {
            ("grant", &[room, first, count]) => {
                let pages: Vec<u32> = (first as u32..(first + count) as u32).collect();
                let spec = GrantSpec::new(room.into()).pages(KV, pages);
                rooms.insert(room, (node.engine.grant(peer, spec).unwrap(), false));
            }
            ("scan", &[byte]) => {
                let holding = (0..pages).filter(|&page| {
                    (0..3).any(|layer| node.page(layer, 0, page).contains(&(byte as u8)))
                });
                say(format!("scan {}", holding.count()));
            }
            _ => {}
        }
        rooms.retain(|room, (receiving, told)| {
            if let (Some(end), false) = (receiving.try_done(), *told) {
                *told = true;
                say(format!(
                    "end {room} {}",
                    end.map_or_else(|failure| failure.kind.slug(), |_| "done")
                ));
            }
            let released = kvferry::RoomHandle::is_released(receiving);
            if released {
                say(format!("released {room}"));
            }
            !released
        });
    }
}

/// The parent's end.
pub struct Decode {
    child: Child,
    stdin: ChildStdin,
    lines: Receiver<String>,
    seen: Vec<String>,
}

impl Decode {
    /// Runs `test` of this binary again, as a decode engine that connects to `addr`.
    pub fn start(test: &str, addr: SocketAddr) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([test, "--exact", "--nocapture", "--test-threads=1"])
            .env(ADDR, addr.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdin = child.stdin.take().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let (heard, lines) = channel();
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                if let Some(at) = line.find(MARK) {
                    let _ = heard.send(line[at + MARK.len()..].to_owned());
                }
            }
        });
        let mut decode = Self { child, stdin, lines, seen: Vec::new() };
        decode.hear("connected");
        decode
    }

    pub fn grant(&mut self, room: u64, first: u32, count: u32) {
        writeln!(self.stdin, "grant {room} {first} {count}").unwrap();
    }

    /// Waits for a line that begins so, seen before or to come, and gives the rest of it.
    pub fn hear(&mut self, begin: &str) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(line) = self.seen.iter().find(|line| line.starts_with(begin)) {
                return line[begin.len()..].trim().to_owned();
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let line = self.lines.recv_timeout(left);
            self.seen.push(
                line.unwrap_or_else(|_| panic!("never heard {begin:?}, only {:?}", self.seen)),
            );
        }
    }

    /// Pages of the child's pool that hold this byte.
    pub fn pages_with(&mut self, byte: u8) -> u32 {
        self.seen.retain(|line| !line.starts_with("scan "));
        writeln!(self.stdin, "scan {byte}").unwrap();
        self.hear("scan ").parse().unwrap()
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
        if signal == Signal::STOP {
            // The signal takes effect at once or a little later; the state tells.
            let stat = format!("/proc/{}/stat", self.child.id());
            let deadline = Instant::now() + PATIENCE;
            while !std::fs::read_to_string(&stat).unwrap().contains(") T ") {
                assert!(Instant::now() < deadline, "the child does not stop");
                std::thread::yield_now();
            }
        }
    }
}

impl Drop for Decode {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
