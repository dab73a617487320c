//! Ways of moving bytes.
//!
//! A fabric posts frames, places what arrives where the [`Gate`] lets it, and says what became of
//! both. It knows lanes and memory, no rooms: which write comes next, and whose failure an error is,
//! is decided above. A worker is monomorphised over its fabric; nothing on the hot path is `dyn`.

#[cfg_attr(not(feature = "rdma"), path = "rdma/absent.rs")]
pub(crate) mod rdma;
mod routed;
#[cfg(feature = "sim")]
pub(crate) mod sim;
pub(crate) mod tcp;

pub(crate) use self::routed::Routed;

use std::net::TcpStream;
use std::time::Duration;

use crate::failure::{FailureKind, Landed};
use crate::ids::{Epoch, LaneId};
use crate::memory::PageMap;
use crate::plan::{Runs, Strips};
use crate::room::links::Tally;
use crate::wire::frame::{DataFrame, RejectReason};
use crate::wire::message::Message;

/// A peer, by its place in the worker's table. Reused only after all its lanes are down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct PeerIndex(pub(crate) u32);

/// A sending room, by its slot in the worker's table and the slot's generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RoomTag {
    pub(crate) slot: u32,
    pub(crate) generation: u32,
}

/// A lane to be adopted.
#[derive(Debug)]
pub(crate) struct NewLane {
    /// Its name on both sides.
    pub(crate) id: LaneId,
    /// Its name here, for people.
    pub(crate) number: u16,
    pub(crate) link: Link,
    /// What the peer is told once the fabric has the lane, and so behind every revocation.
    pub(crate) say: Option<Message>,
}

/// What a lane is made of, by fabric.
#[derive(Debug)]
pub(crate) enum Link {
    /// A connected, non-blocking stream.
    Tcp { stream: TcpStream, leaves_host: bool },
    /// A queue pair that can send and receive.
    #[cfg_attr(not(feature = "rdma"), expect(dead_code, reason = "there are none"))]
    Rdma(Box<rdma::RdmaLink>),
    /// A link of a simulated world.
    #[cfg(feature = "sim")]
    Sim(sim::Link),
}

/// A frame to be written: which page writes, and the memory they are read from.
#[derive(Debug)]
pub(crate) struct Posting {
    pub(crate) tag: RoomTag,
    /// It had left whole on a lane that went down: its room may have been said to be finished.
    pub(crate) again: bool,
    /// Lanes that went down with it.
    pub(crate) tries: u32,
    /// The sequence number is the lane's to fill in.
    pub(crate) frame: DataFrame,
    pub(crate) runs: Runs,
}

impl Posting {
    pub(crate) fn landed(&self) -> Landed {
        Landed {
            page_writes: u64::from(self.frame.pieces),
            bytes: u64::from(self.frame.payload_bytes),
        }
    }
}

/// How a write ended that did not succeed, in the words of verbs (`ibv_wc_status`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(
    not(any(feature = "sim", feature = "rdma")),
    expect(dead_code, reason = "streams have no completion errors")
)]
pub(crate) enum WorkStatus {
    /// The source is not registered for this (`LOC_PROT_ERR`).
    LocalProtection,
    /// The receiver's key or range is wrong (`REM_ACCESS_ERR`).
    RemoteAccess,
    /// The receiver had nothing to receive into, again and again (`RNR_RETRY_EXC_ERR`).
    RnrRetryExceeded,
    /// Nothing was answered, again and again (`RETRY_EXC_ERR`).
    RetryExceeded,
    /// The receiver's NIC could not do it (`REM_OP_ERR`, `REM_INV_REQ_ERR`).
    RemoteOperation,
}

impl WorkStatus {
    /// What the room whose write it was fails with; `None` when its write is not to blame.
    pub(crate) const fn blames_room(self) -> Option<FailureKind> {
        match self {
            Self::LocalProtection => Some(FailureKind::LocalAccess),
            Self::RemoteAccess => Some(FailureKind::RemoteAccess),
            Self::RnrRetryExceeded => Some(FailureKind::ReceiverNotReady),
            Self::RemoteOperation => Some(FailureKind::RemoteOperation),
            Self::RetryExceeded => None,
        }
    }
}

/// A lane that is closed; nothing of it is in flight here.
#[derive(Debug)]
pub(crate) struct DownLane {
    pub(crate) peer: PeerIndex,
    pub(crate) id: LaneId,
    pub(crate) number: u16,
    pub(crate) cause: String,
    /// The first write that ended in an error which its room is to blame for.
    pub(crate) culprit: Option<(RoomTag, WorkStatus)>,
    /// Frames sent, in part or whole, and unanswered: whether they were placed is not known. By their
    /// number on the lane.
    pub(crate) lost: Vec<(u64, Posting)>,
    /// What was received on it.
    pub(crate) tally: Tally,
}

/// What became of things.
#[derive(Debug)]
pub(crate) enum Event {
    /// A frame has left whole: nothing of it can be replaced by filler any more.
    Sent { tag: RoomTag },
    /// A frame was placed by the peer.
    Acked { tag: RoomTag, landed: Landed },
    /// A frame was drained by the peer and not placed.
    Rejected { tag: RoomTag, lane: u16, reason: RejectReason },
    /// A frame names memory that this NIC or the peer's does not know, at this address. It is given up.
    #[cfg_attr(not(feature = "rdma"), expect(dead_code, reason = "streams know no keys"))]
    Unsendable { tag: RoomTag, status: WorkStatus, addr: u64 },
    /// A lane went down before this frame was begun: it can be posted again.
    Returned { peer: PeerIndex, posting: Box<Posting> },
    /// A lane carries frames from now on. Not said of lanes that do from the start.
    #[cfg_attr(not(feature = "rdma"), expect(dead_code, reason = "streams do from the start"))]
    LaneOpen { peer: PeerIndex, number: u16 },
    /// A lane is closed. Everything else about it came before.
    LaneDown(Box<DownLane>),
    /// After [`Fabric::retract`]: nothing will be read from the room's pages any more. On a fabric that is
    /// not guarded, also: no write of the room is on its way, but on lanes that are down here. That a
    /// write has left says nothing of that.
    SourceQuiet { tag: RoomTag },
    /// After [`Fabric::revoke`]: nothing that this side has a hand in is placed in the room's pages any
    /// more. On a fabric that is not guarded, the peer may still write.
    TargetQuiet { slot: u32, epoch: Epoch },
}

/// The receiving side's say over what may be placed.
pub(crate) trait Gate {
    /// Checks a frame against the grants, before a byte of it is placed. Gives the memory it goes to.
    ///
    /// # Errors
    /// Why it may not be placed; it is then drained and answered.
    fn admit(&mut self, peer: PeerIndex, frame: &DataFrame) -> Result<Strips, RejectReason>;

    /// A frame that was admitted has been placed, all of it.
    fn placed(&mut self, frame: &DataFrame);
}

/// Moves frames between this worker and its peers.
pub(crate) trait Fabric {
    /// Whether the gate is asked before a byte of a peer is placed. Where it is not, what the peer was
    /// allowed to write it can write until it says that it is done, or every lane to it is down. True of
    /// the lanes that stand now.
    fn is_guarded(&self, peer: PeerIndex) -> bool;

    /// Adopts a connected lane. On a fabric that is not guarded, whoever sets lanes up tells the peer of one
    /// over the session and after this, so that a peer that can write through it has heard of every
    /// revocation before; and a lane whose writes are never answered goes down by itself.
    fn add_lane(&mut self, peer: PeerIndex, lane: NewLane);

    /// The peer's end of a lane stands: the lane may be proved and then carry frames.
    fn lane_ready(&mut self, _peer: PeerIndex, _lane: LaneId) {}

    /// The session is lost, and with it perhaps what was to be said of lanes that wait for the peer's end.
    fn session_down(&mut self, _peer: PeerIndex) {}

    /// Begins to close every lane of a rail.
    fn close_rail(&mut self, _rail: u8, _cause: &str) {}

    /// Begins to close a lane; [`Event::LaneDown`] follows. Nothing is read from or placed in pages
    /// through it then, whatever the peer does.
    fn close_lane(&mut self, peer: PeerIndex, lane: LaneId, cause: &str);

    /// Begins to close every lane of a peer.
    fn close_peer(&mut self, peer: PeerIndex, cause: &str);

    /// Whether a lane of the peer would take another frame now.
    fn has_room(&self, peer: PeerIndex) -> bool;

    /// Queues a frame on the lane of the peer that has the most room. Only after [`Fabric::has_room`].
    fn post(&mut self, peer: PeerIndex, posting: Posting);

    /// Starts what was queued since the last poll, all at once.
    fn kick(&mut self) {}

    /// Closes the lanes of a peer through which pages could be touched that were to be quiet by now: a
    /// room's sources, or what the peer may write. Says how many.
    fn fence(&mut self, peer: PeerIndex, source: Option<RoomTag>, cause: &str) -> usize;

    /// Stops reading from the pages of a room with a peer; [`Event::SourceQuiet`] follows. Of a room that is
    /// `done` everything has landed: what is still being sent of it does not matter.
    fn retract(&mut self, peer: PeerIndex, tag: RoomTag, done: bool);

    /// Stops placing in the pages of a room with a peer; [`Event::TargetQuiet`] follows. The gate must
    /// refuse the room from now on.
    fn revoke(&mut self, peer: PeerIndex, slot: u32, epoch: Epoch);

    /// Starts what can be started and reaps what has completed, without blocking. Says whether
    /// anything happened.
    fn poll(&mut self, gate: &mut impl Gate, events: &mut Vec<Event>) -> bool;

    /// A pool is deregistered: what only it is in is not to be touched any more.
    fn forget_pool(&mut self, _map: &PageMap, _others: &[&PageMap]) {}

    /// Whether something of a lane may be read or written for ever, so that rooms which wait for it are never
    /// quiet: an engine that ends does not wait for them.
    fn is_stuck(&self) -> bool {
        false
    }

    /// Closes every lane and waits until nothing of them is in flight. Says whether that could be: if
    /// not, the kernel may still read and write what the caller must then never free.
    fn close(&mut self) -> bool;

    /// Sleeps until something completes, the worker is woken, or the time is over.
    fn sleep(&mut self, timeout: Duration);

    /// Whether polling costs no system call now, so that spinning before sleeping is worth it.
    fn spins(&self) -> bool;
}
