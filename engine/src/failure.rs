//! Why a room failed: one kind, its first cause in words, and what to do about it.
//!
//! The side that sees the fault first writes the [`Failure`]; the other side is sent the same value
//! and reports the same words. `docs/failures.md` has an entry a kind.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::ids::{Epoch, Incarnation, Role, RoomId};

/// Longest text of one cause, in bytes. A peer's words are cut to this before they are kept.
pub const CAUSE_BYTES_MAX: usize = 512;
/// Most links of a cause chain kept: deeper ones say nothing more to an operator.
pub const CAUSES_MAX: usize = 8;

macro_rules! kinds {
    ($($(#[doc = $doc:literal])+ $name:ident => $slug:literal, $retry:literal, $remedy:literal;)+) => {
        /// What kind of thing ended a room. One kind for each thing a caller or operator can act on.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[non_exhaustive]
        pub enum FailureKind {
            $($(#[doc = $doc])+ $name,)+
        }

        impl FailureKind {
            /// Every kind, in the order of `docs/failures.md`.
            pub const ALL: &'static [Self] = &[$(Self::$name),+];

            /// The kind's name in log lines, metrics labels, and as an anchor in `docs/failures.md`.
            #[must_use]
            pub const fn slug(self) -> &'static str {
                match self { $(Self::$name => $slug),+ }
            }

            /// What to do about it, in one sentence.
            #[must_use]
            pub const fn remedy(self) -> &'static str {
                match self { $(Self::$name => $remedy),+ }
            }

            /// Whether the same request may be tried again at once, as a new epoch of the same room
            /// id, without anybody acting first.
            #[must_use]
            pub const fn is_retryable(self) -> bool {
                match self { $(Self::$name => $retry),+ }
            }
        }
    };
}

kinds! {
    /// One side's caller gave the room up.
    Aborted => "aborted", true,
        "nothing is wrong with the engine; see the reason the caller gave";
    /// The peer's process is gone: its session closed and did not come back within the grace.
    PeerDied => "peer-died", false,
        "restart the peer, or send the request to another one; its log says why it went";
    /// Another incarnation answers where the peer was: it was restarted.
    PeerRestarted => "peer-restarted", true,
        "send the request again: the new incarnation is already connected or will be";
    /// The peer's process exists and says nothing: stopped, frozen, or cut off by the network.
    PeerSilent => "peer-silent", false,
        "check whether the peer is stopped, swapping or partitioned; raise peer_silent_ms if it was only slow";
    /// After a reconnect the peer no longer knows this room.
    PeerForgot => "peer-forgot", true,
        "send the request again; if it repeats, report it: both sides should have kept the room";
    /// The peer is going away on purpose and takes no more rooms.
    PeerDraining => "peer-draining", false,
        "send the request to another peer; this one was told to drain or shut down";
    /// No grant arrived before the sender's bootstrap deadline.
    GrantTimeout => "grant-timeout", true,
        "check that the decode side received the request and had pages free to grant";
    /// The room's deadline passed before it ended.
    DeadlineExceeded => "deadline-exceeded", true,
        "compare the bytes landed with the deadline: raise it, or find out who was slow";
    /// Everything was sent, and the receiver's verdict could not be learned.
    VerdictUnknown => "verdict-unknown", true,
        "treat the request as not delivered; the cause below says why the verdict was lost";
    /// The receiver was written to under a grant that it had revoked or never gave.
    GrantRevoked => "grant-revoked", true,
        "the receiver ended this room first; its report has the cause";
    /// A write named pages, layers or bytes that its grant does not cover.
    OutsideGrant => "outside-grant", false,
        "the two sides disagree about the layout or the page counts: compare both sides' pools";
    /// What arrived and what the sender says it sent are not the same.
    CountMismatch => "count-mismatch", false,
        "report it with both sides' logs: bytes were lost or sent twice";
    /// The bytes that landed are not those that were sent.
    ChecksumMismatch => "checksum-mismatch", true,
        "check that nothing writes the source or the granted pages during the transfer; if nothing does, suspect memory or network hardware";
    /// The aux row does not fit the aux slot that was granted.
    AuxTooLong => "aux-too-long", false,
        "grant an aux slot at least as long as the row the sender writes";
    /// The sender has no place for another grant that waits for its room to be opened.
    GrantRefused => "grant-refused", false,
        "open rooms on the prefill side before their grants come, or raise its max_rooms";
    /// A pool that the room needs was deregistered.
    PoolGone => "pool-gone", false,
        "grant and write only pools that are registered; deregister when their rooms have ended";
    /// The receiver granted a room id whose earlier epoch is still live on the sender.
    RoomBusy => "room-busy", true,
        "end the earlier room of this id on the sender first, or use another id";
    /// Lanes kept going down with writes of this room under way on them.
    LaneLost => "lane-lost", true,
        "send the request again; if lanes keep going down, look at the path between the two hosts";
    /// The NIC may not read the source pages of a write.
    LocalAccess => "local-access", false,
        "check that the source pool is registered with this NIC and was not freed; the cause has the status";
    /// The receiver's NIC refused a write: its key or its range.
    RemoteAccess => "remote-access", false,
        "check that the receiver's pool is registered and was not freed; the cause has the status";
    /// The receiver's NIC could not carry out a write.
    RemoteOperation => "remote-operation", true,
        "look at the receiving host's NIC and kernel log; send the request again";
    /// The receiver's NIC had no receive to take a write's notice, again and again.
    ReceiverNotReady => "receiver-not-ready", true,
        "the receiving engine does not keep up or hangs: look at its worker's CPU; send the request again";
    /// The peer sent something that the protocol does not allow.
    ProtocolViolation => "protocol-violation", false,
        "run the same version of kvferry on both sides; report it if they are the same";
    /// This engine, or the peer's, was shut down under the room.
    Shutdown => "shutdown", false,
        "send the request to another peer; give shutdown() a longer deadline to let rooms finish";
}

impl fmt::Display for FailureKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.slug())
    }
}

/// How much of a room had landed, as the side that reports it knows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Landed {
    /// Page writes placed: one page of one layer and one of K or V counts one.
    pub page_writes: u64,
    /// Bytes placed.
    pub bytes: u64,
}

/// Why a room failed, as the side that saw it first tells it. Both sides report this value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// What kind of failure.
    pub kind: FailureKind,
    /// The room.
    pub room: RoomId,
    /// The room's epoch; 0 when it failed before it was granted.
    pub epoch: Epoch,
    /// The side that saw it first.
    pub seen_by: Role,
    /// The engine that saw it first.
    pub reporter: Incarnation,
    /// The engine at the other end of the room, when one was known.
    pub peer: Option<Incarnation>,
    /// The peer's address, for whoever has to go there.
    pub peer_addr: Option<String>,
    /// The lane concerned, when one is.
    pub lane: Option<u16>,
    /// What had landed when it failed: placed (receiver) or acknowledged (sender).
    pub landed: Landed,
    /// Writes that were tried again before giving up.
    pub retries: u32,
    /// The first cause, then what lies under it, outermost first. Never empty.
    pub causes: Vec<String>,
}

impl Failure {
    /// What to do about it.
    #[must_use]
    pub const fn remedy(&self) -> &'static str {
        self.kind.remedy()
    }

    /// Cuts the texts to [`CAUSE_BYTES_MAX`] and [`CAUSES_MAX`]: what a peer sends is kept no longer
    /// than that.
    pub(crate) fn bound(&mut self) {
        self.causes.truncate(CAUSES_MAX);
        if self.causes.is_empty() {
            self.causes.push("no cause given".to_owned());
        }
        self.causes.iter_mut().for_each(cut);
        if let Some(addr) = self.peer_addr.as_mut() {
            cut(addr);
        }
    }
}

/// Cuts a text to [`CAUSE_BYTES_MAX`] at a character boundary, and keeps it on one line.
fn cut(text: &mut String) {
    if text.len() > CAUSE_BYTES_MAX {
        let end = (0..=CAUSE_BYTES_MAX).rev().find(|&i| text.is_char_boundary(i)).unwrap_or(0);
        text.truncate(end);
    }
    if text.contains(char::is_control) {
        *text = text.replace(char::is_control, " ");
    }
}

impl fmt::Display for Failure {
    /// One line: kind, peer, cause, what landed, remedy, and where to read more.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "room {} epoch {} failed: {}", self.room, self.epoch, self.kind)?;
        match (self.peer, self.peer_addr.as_deref()) {
            (Some(peer), Some(addr)) => write!(f, " [peer {peer} at {addr}")?,
            (Some(peer), None) => write!(f, " [peer {peer}")?,
            (None, _) => write!(f, " [no peer yet")?,
        }
        if let Some(lane) = self.lane {
            write!(f, ", lane {lane}")?;
        }
        write!(f, ", seen by {} {}]: {}", self.seen_by, self.reporter, self.causes.join(": "))?;
        write!(
            f,
            "; landed {} page writes, {} bytes; retries {}; to do: {} (docs/failures.md#{})",
            self.landed.page_writes,
            self.landed.bytes,
            self.retries,
            self.remedy(),
            self.kind.slug()
        )
    }
}

impl std::error::Error for Failure {}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn failure(cause: &str) -> Failure {
        Failure {
            kind: FailureKind::PeerDied,
            room: RoomId(7),
            epoch: Epoch(3),
            seen_by: Role::Sender,
            reporter: Incarnation(1 << 96),
            peer: Some(Incarnation(2 << 96)),
            peer_addr: Some("127.0.0.1:9".to_owned()),
            lane: None,
            landed: Landed { page_writes: 2, bytes: 8192 },
            retries: 0,
            causes: vec![cause.to_owned(), "connection refused".to_owned()],
        }
    }

    #[test]
    fn a_failure_prints_one_line_with_kind_peer_cause_landed_remedy_and_where_to_read() {
        let line = failure("session closed").to_string();
        assert_eq!(
            line,
            "room 7 epoch 3 failed: peer-died [peer 00000002 at 127.0.0.1:9, seen by sender 00000001]: \
             session closed: connection refused; landed 2 page writes, 8192 bytes; retries 0; \
             to do: restart the peer, or send the request to another one; its log says why it went \
             (docs/failures.md#peer-died)"
        );
    }

    #[test]
    fn a_peers_words_are_cut_to_their_bound_and_kept_on_one_line() {
        let mut hostile = failure(&"é\n".repeat(5000));
        hostile.causes.extend((0..100).map(|i| i.to_string()));
        hostile.bound();
        assert_eq!(hostile.causes.len(), CAUSES_MAX);
        assert!(hostile.causes.iter().all(|c| c.len() <= CAUSE_BYTES_MAX && !c.contains('\n')));
    }

    #[test]
    fn every_kind_has_its_entry_in_the_failures_document_and_its_line_leads_there() {
        let doc = include_str!("../../docs/failures.md");
        let entries = doc.split("\n## ").skip(1).map(|entry| entry.split_once("\n\n").unwrap());
        let entries: HashMap<&str, &str> = entries.collect();
        assert_eq!(
            entries.len(),
            FailureKind::ALL.len(),
            "docs/failures.md has an entry for no kind"
        );
        for &kind in FailureKind::ALL {
            let slug = kind.slug();
            let entry = entries.get(slug);
            let entry =
                entry.unwrap_or_else(|| panic!("docs/failures.md has no entry `## {slug}`"));
            let paragraphs = entry.split("\n\n").filter_map(|text| text.strip_prefix("**"));
            let named: Vec<_> = paragraphs.filter_map(|text| text.split_once("**")).collect();
            let names: Vec<&str> = named.iter().map(|(name, _)| *name).collect();
            let want = ["Means", "Triggered by", "Common situations", "Check", "Retry"];
            assert_eq!(names, want, "the entry {slug} of docs/failures.md");
            let items = |mark| entry.lines().filter(|line| line.starts_with(mark)).count();
            assert!((2..=4).contains(&items("- ")), "{slug}: situations");
            assert!(items("1. ") == 1 && items("2. ") == 1, "{slug}: steps of the check");
            // Two of them go on as lists.
            assert_eq!(named.iter().filter(|(_, text)| text.is_empty()).count(), 2, "{slug}");
            let line = Failure { kind, ..failure("a test") }.to_string();
            assert!(line.ends_with(&format!(" (docs/failures.md#{slug})")), "{line}");
        }
    }
}
