//! An engine in a process of its own, to be stopped, continued and killed, told what to do by lines.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

use kvferry::{Chunk, GrantSpec, Incarnation, IoMode, OpenOptions, PeerHealth, RoomId};
use rustix::process::{Pid, Signal, kill_process};

use crate::common::{KV, Node, PATIENCE, config, layout, local, wait};
use crate::link::{assert_pages, until};

/// Set in the child: where it listens.
const LISTEN: &str = "KVFERRY_TEST_LISTEN";
/// What lines for the parent begin with; the test harness prints too.
const MARK: &str = "engine: ";
/// The test of this binary that is the child.
const MAIN: &str = "process::an_engine_that_is_told_what_to_do";
/// What its source pages are painted with, and those of whoever sends to it.
pub const SALT: u8 = 5;
/// Its pages of a room.
const PAGES: [u32; 4] = [0, 1, 2, 3];

fn say(words: &str) {
    println!("{MARK}{words}");
    std::io::stdout().flush().unwrap();
}

/// The child. Its other end is this process's parent.
#[test]
fn an_engine_that_is_told_what_to_do() {
    let Ok(listen) = std::env::var(LISTEN) else { return };
    let listen: SocketAddr = listen.parse().unwrap();
    let config = config(IoMode::Auto).listen(listen).reconnect_grace_ms(60_000u64);
    let node = Node::start(config, layout(64));
    node.paint(SALT);
    say(&format!("listens {}", node.engine.listen_addr().unwrap()));
    say(&format!("is {}", node.engine.incarnation().0));
    let mut sending = HashMap::new();
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let (what, with) = line.split_once(' ').unwrap_or((&line, ""));
        let room = || RoomId(with.parse().unwrap());
        match what {
            "connect" => {
                wait(node.engine.connect(with.parse::<SocketAddr>().unwrap())).unwrap();
                say("connected");
            }
            "open" => {
                let room = room();
                let opened = node.engine.open(room, OpenOptions::default()).unwrap();
                sending.insert(room, std::sync::Arc::new(opened));
            }
            "write" => {
                let room = &sending[&room()];
                wait(room.write(Chunk::new(KV, PAGES, 0..4))).unwrap();
                let landed = || kvferry::RoomHandle::report(&**room).landed.page_writes;
                until("the pages have landed", || landed() == 24);
                say(&format!("wrote {}", room.id()));
            }
            "finish" => {
                let room = sending[&room()].clone();
                room.finish(bytes::Bytes::new()).unwrap();
                std::thread::spawn(move || ended(room.id(), wait(room.done()).map(drop)));
            }
            "grant" => {
                let up = |peer: &kvferry::PeerInfo| peer.health == PeerHealth::Up;
                let peer = node.engine.peers().into_iter().find(up).unwrap().incarnation;
                let spec = GrantSpec::new(room()).pages(KV, PAGES);
                let room = node.engine.grant(peer, spec).unwrap();
                std::thread::spawn(move || ended(room.id(), wait(room.done()).map(drop)));
            }
            "wipe" => node.fill(0..64, 0),
            "check" => {
                assert_pages(&node, SALT, PAGES.map(|page| (page, page)));
                say("checked");
            }
            other => panic!("what is {other}?"),
        }
    }
}

fn ended(room: RoomId, end: Result<(), kvferry::Failure>) {
    let words = end.map_or_else(|failure| failure.to_string(), |()| "done".to_owned());
    say(&format!("end {room} {words}"));
}

/// The parent's end.
pub struct Process {
    child: Child,
    stdin: ChildStdin,
    lines: Receiver<String>,
    pub addr: SocketAddr,
    pub id: Incarnation,
}

impl Process {
    pub fn start() -> Self {
        Self::start_at(local())
    }

    pub fn start_at(listen: SocketAddr) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([MAIN, "--exact", "--nocapture", "--test-threads=1"])
            .env(LISTEN, listen.to_string())
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
        let mut process = Self { child, stdin, lines, addr: listen, id: Incarnation(0) };
        process.addr = process.hear("listens").parse().unwrap();
        process.id = Incarnation(process.hear("is").parse().unwrap());
        process
    }

    pub fn tell(&mut self, line: &str) {
        writeln!(self.stdin, "{line}").unwrap();
    }

    /// The rest of the next line, which must begin so.
    pub fn hear(&mut self, begin: &str) -> String {
        let line = self.lines.recv_timeout(PATIENCE);
        let line = line.unwrap_or_else(|_| panic!("never heard {begin:?}"));
        line.strip_prefix(begin)
            .unwrap_or_else(|| panic!("not {begin:?}: {line}"))
            .trim()
            .to_owned()
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub fn stop(&self) {
        self.signal(Signal::STOP);
        // The signal takes effect at once or a little later; the state tells.
        let stat = format!("/proc/{}/stat", self.child.id());
        let deadline = Instant::now() + PATIENCE;
        while !std::fs::read_to_string(&stat).unwrap().contains(") T ") {
            assert!(Instant::now() < deadline, "the child does not stop");
            std::thread::yield_now();
        }
    }

    pub fn go_on(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
