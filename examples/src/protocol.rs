//! The lines of JSON that drive `prefill` and `decode`, and that they answer with.
//!
//! One object a line on stdin, one a line on stdout; logs go to stderr.
//!
//! ```text
//! to prefill   {"cmd":"prefill","room":7,"prompt":"Once upon a time"}
//! to decode    {"cmd":"decode","room":7,"prompt":"Once upon a time","max_new":24}
//! to both      {"cmd":"abort","room":7,"reason":"the client hung up"}
//!              {"cmd":"peers"}
//! to prefill   {"cmd":"resume","room":7}     one that was told with "hold":true
//! to decode    {"cmd":"scan"}
//! to both      {"cmd":"quit"}        as the end of stdin: live rooms end first
//! ```
//!
//! Both sides get a prompt of the same text (or the same `"tokens":[…]`) and the same room id, in
//! either order. Every command about a room is answered by events of that room; one that cannot be
//! followed is answered by an `error` and changes nothing.
//!
//! ```text
//! {"event":"ready",…}     first of all: where it listens, how it does I/O
//! {"event":"granted",…}   decode: these pages, after so many cached tokens
//! {"event":"sourced",…}   prefill: so many pages hold the prompt
//! {"event":"held",…}      prefill: the first chunk is handed in; the rest waits for "resume", the end
//!                         for another one
//! {"event":"chunk",…}     prefill: a chunk's pages are handed to the engine
//! {"event":"room",…}      both: the room has ended, done or failed; once a room
//! {"event":"released",…}  both: no byte of it is read or placed any more; after its end
//! {"event":"text",…}      decode: the text that was generated on from the carried pages
//! {"event":"peers",…}     answer to "peers"
//! {"event":"scanned",…}   answer to "scan"
//! {"event":"error",…}     a command was refused, and why
//! ```
//!
//! Prefill overwrites the pages of a room the moment they are released. If that promise were broken, and
//! something still read them, a `scan` on the decode side would find what it overwrote them with.

use std::io::Write;
use std::net::SocketAddr;
use std::sync::Mutex;

use kvferry::{Failure, RoomReport};
use serde::{Deserialize, Serialize};

/// Longest command line taken, in bytes: a prompt of the longest context, well escaped.
pub const LINE_BYTES_MAX: u64 = 1 << 20;

/// What a process can be told.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "cmd", rename_all = "snake_case")]
pub enum Command {
    /// To prefill: opens the room, computes the prompt and sends its pages.
    Prefill {
        /// Id of the room.
        room: u64,
        /// What to compute.
        #[serde(flatten)]
        prompt: Prompt,
        /// Hand in the first chunk, the others only when told to resume, and the end when told again.
        #[serde(default)]
        hold: bool,
    },
    /// To prefill: goes on with a room that was to be held.
    Resume {
        /// Id of the room.
        room: u64,
    },
    /// To decode: grants pages to the room and generates on when it is done.
    Decode {
        /// Id of the room.
        room: u64,
        /// What will have been computed.
        #[serde(flatten)]
        prompt: Prompt,
        /// Most tokens to generate; the process's `--max-new` without it.
        max_new: Option<u32>,
    },
    /// Gives a live room up.
    Abort {
        /// Id of the room.
        room: u64,
        /// Why; both sides are told.
        reason: String,
    },
    /// Asks for the peers.
    Peers,
    /// To decode: looks through every page that a room ever had here for what prefill overwrites
    /// released pages with.
    Scan,
    /// Takes no more commands, lets live rooms end, and exits.
    Quit,
}

/// A prompt, as text or as tokens. Text is wrapped in the model's chat template if it has one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Prompt {
    /// Text.
    #[serde(rename = "prompt")]
    Text(String),
    /// Tokens as they are.
    Tokens(Vec<u32>),
}

/// What a process says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// It takes commands from now on.
    Ready(Ready),
    /// Pages were granted.
    Granted {
        /// Id of the room.
        room: u64,
        /// Its pages by their number here, in the order of the grant's positions.
        pages: Vec<u32>,
        /// Tokens before them that are here already.
        cached_tokens: u32,
        /// How many of the pages an earlier room had that failed.
        again: usize,
    },
    /// Pages were taken for a prompt.
    Sourced {
        /// Id of the room.
        room: u64,
        /// How many.
        pages: usize,
        /// How many of them an earlier room had that failed.
        again: usize,
    },
    /// The first chunk is handed in; the rest waits for the command to resume.
    Held {
        /// Id of the room.
        room: u64,
    },
    /// All layers of a chunk are in the engine's hands.
    Chunk {
        /// Id of the room.
        room: u64,
        /// The chunk, counted from 1.
        chunk: usize,
        /// Chunks of the prompt.
        of: usize,
    },
    /// A room has ended.
    Room(RoomLine),
    /// A room's pages are nobody else's any more.
    Released {
        /// Id of the room.
        room: u64,
        /// Its epoch, if it was granted.
        epoch: Option<u64>,
        /// On prefill, of a room that was given up here: microseconds from then to its release.
        after_abort_us: Option<u64>,
        /// On prefill: pages overwritten at that moment.
        overwritten: usize,
    },
    /// What was generated.
    Text {
        /// Id of the room.
        room: u64,
        /// New tokens, the first one from prefill; without the one that ends the text.
        tokens: Vec<u32>,
        /// The same as text.
        text: String,
    },
    /// The peers there are.
    Peers {
        /// One by one.
        peers: Vec<PeerLine>,
    },
    /// What a scan found.
    Scanned(Scan),
    /// A command was not followed.
    Error {
        /// The room concerned, if one is.
        room: Option<u64>,
        /// What was wrong.
        message: String,
    },
}

/// What a process is, when it is ready.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ready {
    /// Its name.
    pub name: String,
    /// Process id.
    pub pid: u32,
    /// The engine's incarnation.
    pub incarnation: String,
    /// Where peers reach it.
    pub listen: Option<SocketAddr>,
    /// How lanes are driven: `io_uring` or `epoll`.
    pub io: String,
    /// Its rails for RDMA, the best GID of each beside it; none where it has no RDMA.
    pub rails: Vec<String>,
    /// Where its metrics are served.
    pub metrics: Option<SocketAddr>,
    /// The kernel can send from the pages without a copy.
    pub can_zero_copy: bool,
}

/// What a scan of the pages that rooms had found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scan {
    /// Rooms done here so far, each with the very bytes that were sent, by its checksum.
    pub exact_rooms: usize,
    /// Pages that a room ever had here.
    pub pages: usize,
    /// Those of them that were taken again after a room that had them failed.
    pub again: usize,
    /// Those of them with a byte of what prefill overwrites released pages with.
    pub poisoned: usize,
}

/// How a room ended, as one side has it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RoomLine {
    /// Id of the room.
    pub room: u64,
    /// Its epoch, if it was granted.
    pub epoch: Option<u64>,
    /// `sender` or `receiver`.
    pub role: String,
    /// `done` or `failed`.
    pub verdict: String,
    /// The kind of a failure.
    pub kind: Option<String>,
    /// Its first cause, and what lies under it.
    pub cause: Option<String>,
    /// The whole line for a person: kind, peer, cause, what landed, what to do.
    pub line: Option<String>,
    /// The other engine's incarnation.
    pub peer: Option<String>,
    /// Where that is.
    pub peer_addr: Option<String>,
    /// What carried the pages.
    pub fabric: Option<String>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Pages granted.
    pub pages: u64,
    /// Page writes landed: a page of one layer's K or V counts one.
    pub page_writes: u64,
    /// Bytes landed.
    pub bytes: u64,
    /// Microseconds from opening to the grant.
    pub waited_us: u64,
    /// Microseconds from the grant to the end.
    pub granted_us: u64,
    /// Microseconds from the first write or arrival to the end.
    pub transfer_us: u64,
}

impl RoomLine {
    /// The line of a room that has ended.
    #[must_use]
    pub fn new(report: &RoomReport, prompt_tokens: usize) -> Self {
        let failure = report.failure.as_ref();
        Self {
            room: report.room.0,
            epoch: report.epoch.map(|epoch| epoch.0),
            role: report.role.to_string(),
            verdict: if failure.is_some() { "failed" } else { "done" }.to_owned(),
            kind: failure.map(|failure| failure.kind.to_string()),
            cause: failure.map(|failure| failure.causes.join(": ")),
            line: failure.map(Failure::to_string),
            peer: report.peer.map(|peer| peer.to_string()),
            peer_addr: report.peer_addr.clone(),
            fabric: report.fabric.map(|fabric| fabric.to_string()),
            prompt_tokens,
            pages: report.granted_pages,
            page_writes: report.landed.page_writes,
            bytes: report.landed.bytes,
            waited_us: report.waited_us,
            granted_us: report.granted_us,
            transfer_us: report.transfer_us,
        }
    }

    /// Whether every byte landed.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.verdict == "done"
    }
}

/// A peer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PeerLine {
    /// Its name.
    pub name: String,
    /// Its incarnation.
    pub incarnation: String,
    /// Where it is.
    pub addr: SocketAddr,
    /// How it is.
    pub health: String,
    /// What carries its pages.
    pub fabric: String,
    /// Why that is not RDMA, when it is not.
    pub why_not_rdma: Option<String>,
    /// Lanes that stand.
    pub lanes: usize,
    /// What each of them runs over.
    pub paths: Vec<String>,
}

/// Where events go: stdout, a line each.
#[derive(Debug, Default)]
pub struct Output(Mutex<()>);

impl Output {
    /// Says an event. Whoever listened may be gone: then nobody is told.
    pub fn say(&self, event: &Event) {
        let Ok(mut line) = serde_json::to_vec(event) else { return };
        line.push(b'\n');
        let _whole = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut stdout = std::io::stdout().lock();
        if let Err(error) = stdout.write_all(&line).and_then(|()| stdout.flush()) {
            tracing::debug!("nobody reads stdout: {error}");
        }
    }

    /// Says that a command was not followed.
    pub fn refuse(&self, room: Option<u64>, error: &anyhow::Error) {
        self.say(&Event::Error { room, message: format!("{error:#}") });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_of_the_documentation_are_understood() {
        let doc = include_str!("protocol.rs");
        let lines = doc.lines().filter_map(|line| {
            let line = line.strip_prefix("//! ")?;
            let start = line.find("{\"cmd\"")?;
            Some(&line[start..=line.rfind('}')?])
        });
        let commands: Vec<Command> =
            lines.map(|line| serde_json::from_str(line).expect(line)).collect();
        assert_eq!(commands.len(), 7);
        let Command::Decode { room: 7, prompt: Prompt::Text(text), max_new: Some(24) } =
            &commands[1]
        else {
            panic!("{:?}", commands[1])
        };
        assert_eq!(text, "Once upon a time");
    }

    #[test]
    fn what_is_no_command_is_refused_with_words() {
        for line in [
            "",
            "{}",
            "7",
            r#"{"cmd":"prefill","room":7}"#,
            r#"{"cmd":"prefill","room":-7,"prompt":"a"}"#,
            r#"{"cmd":"fly"}"#,
            r#"{"cmd":"abort","room":7}"#,
        ] {
            let error = serde_json::from_str::<Command>(line).unwrap_err();
            assert!(!error.to_string().is_empty(), "{line}");
        }
    }
}
