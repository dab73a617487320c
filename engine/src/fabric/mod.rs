//! Ways of moving bytes.
//!
//! A fabric posts frames, places what arrives where the [`Gate`] lets it, and says what became of
//! both. It knows lanes and memory, no rooms: which write comes next, and whose failure an error is,
//! is decided above. A worker is monomorphised over its fabric; nothing on the hot path is `dyn`.

pub(crate) mod tcp;

use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use crate::failure::Landed;
use crate::ids::Epoch;
use crate::plan::{Runs, Strips};
use crate::wire::frame::{DataFrame, RejectReason};

/// A peer, by its place in the worker's table. Reused only after all its lanes are down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct PeerIndex(pub(crate) u32);

/// A sending room, by its slot in the worker's table and the slot's generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RoomTag {
    pub(crate) slot: u32,
    pub(crate) generation: u32,
}

/// A frame to be written: which page writes, and the memory they are read from.
#[derive(Debug)]
pub(crate) struct Posting {
    pub(crate) tag: RoomTag,
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

/// What became of things.
#[derive(Debug)]
pub(crate) enum Event {
    /// A frame has left whole: nothing of it can be replaced by filler any more.
    Sent { tag: RoomTag },
    /// A frame was placed by the peer.
    Acked { tag: RoomTag, landed: Landed },
    /// A frame was drained by the peer and not placed.
    Rejected { tag: RoomTag, lane: u16, reason: RejectReason },
    /// A lane went down with this frame sent, in part or whole, and unacknowledged; whether it was
    /// placed is not known.
    Lost { tag: RoomTag, lane: u16, cause: Arc<str> },
    /// A lane went down before this frame was begun: it can be posted again.
    Returned { peer: PeerIndex, posting: Box<Posting> },
    /// A lane is closed; nothing of it is in flight. All its `Lost` came before.
    LaneDown { peer: PeerIndex, lane: u16, cause: String },
    /// After [`Fabric::retract`]: nothing will be read from the room's pages any more.
    SourceQuiet { tag: RoomTag },
    /// After [`Fabric::revoke`]: nothing will be placed in the room's pages any more.
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
    /// Adopts a connected lane.
    fn add_lane(&mut self, peer: PeerIndex, lane: u16, stream: TcpStream, leaves_host: bool);

    /// Begins to close every lane of a peer; a [`Event::LaneDown`] follows for each.
    fn close_peer(&mut self, peer: PeerIndex, cause: &str);

    /// Whether a lane of the peer would take another frame now.
    fn has_room(&self, peer: PeerIndex) -> bool;

    /// Queues a frame on the lane of the peer that has the most room. Only after [`Fabric::has_room`].
    fn post(&mut self, peer: PeerIndex, posting: Posting);

    /// Stops reading from the pages of a room with a peer; [`Event::SourceQuiet`] follows.
    fn retract(&mut self, peer: PeerIndex, tag: RoomTag);

    /// Stops placing in the pages of a room with a peer; [`Event::TargetQuiet`] follows. The gate must
    /// refuse the room from now on.
    fn revoke(&mut self, peer: PeerIndex, slot: u32, epoch: Epoch);

    /// Starts what can be started and reaps what has completed, without blocking. Says whether
    /// anything happened.
    fn poll(&mut self, gate: &mut impl Gate, events: &mut Vec<Event>) -> bool;

    /// Closes every lane and waits until nothing of them is in flight. Says whether that could be: if
    /// not, the kernel may still read and write what the caller must then never free.
    fn close(&mut self) -> bool;

    /// Sleeps until something completes, the worker is woken, or the time is over.
    fn sleep(&mut self, timeout: Duration);

    /// Whether polling costs no system call, so that spinning before sleeping is worth it.
    const SPINS: bool;
}
