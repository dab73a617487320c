//! The receiving half of a lane: headers are checked, payload goes straight to its pages.
//!
//! One operation covers what is left of a frame's payload, scattered over its pages, and the header
//! behind it. Not waiting for all of it keeps the kernel's buffer draining; the next operation goes
//! on where this one ended.

use std::collections::VecDeque;

use super::driver::{OpMemoryBox, STRIPS_PER_OP};
use super::filler::SCRATCH_BYTES;
use super::strips::{Queued, StripQueue};
use crate::ids::Epoch;
use crate::memory::PAGE_BYTES_MAX;
use crate::plan::Strips;
use crate::room::links::{REJECTED_MAX, Tally};
use crate::wire::frame::{DataFrame, FRAME_BYTES, Frame, FrameError, HEADER_BYTES, RejectReason};

/// Longest payload a frame may announce; a longer one is a lane out of step or a hostile peer.
const PAYLOAD_BYTES_MAX: u64 =
    if PAGE_BYTES_MAX > FRAME_BYTES { PAGE_BYTES_MAX } else { FRAME_BYTES };

#[derive(Debug)]
pub(super) struct Receive {
    memory: OpMemoryBox,
    strips: StripQueue,
    frame: Option<Incoming>,
    header_bytes: usize,
    pub(super) in_flight: bool,
    last_seq: u64,
    /// The latest frames that were drained.
    drained: VecDeque<u64>,
}

#[derive(Debug)]
struct Incoming {
    frame: DataFrame,
    target: Target,
    /// Payload bytes that have not come yet.
    left: u64,
    /// Payload bytes of `left` that are not laid out in strips yet.
    unplanned: u64,
}

#[derive(Debug)]
enum Target {
    Pages(Strips),
    /// Revoked while an operation into its pages was in flight: they are kept mapped until it ends.
    Leaving(#[expect(dead_code, reason = "held, not looked at")] Strips),
    Scratch(RejectReason),
}

/// What a piece of the stream turned out to be.
#[derive(Debug)]
pub(super) enum Arrived {
    /// A header that is not a data frame's.
    Answer(Frame),
    /// A data frame's header: ask the gate, then [`Receive::begin`].
    Header(DataFrame),
    /// A whole data frame, placed.
    Placed(DataFrame),
    /// A whole data frame, drained.
    Drained(DataFrame, RejectReason),
}

/// The stream makes no sense from here on.
#[derive(Debug, thiserror::Error)]
pub(super) enum StreamError {
    #[error(transparent)]
    Header(#[from] FrameError),
    #[error("data frame {got} came where {want} was due")]
    Sequence { got: u64, want: u64 },
    #[error("a frame announces {0} bytes")]
    Payload(u64),
}

impl Receive {
    pub(super) fn new() -> Self {
        Self {
            memory: OpMemoryBox::new(),
            strips: StripQueue::new(),
            frame: None,
            header_bytes: 0,
            in_flight: false,
            last_seq: 0,
            drained: VecDeque::with_capacity(REJECTED_MAX),
        }
    }

    /// The next operation; there is always one.
    pub(super) fn next(&mut self, scratch: u64) -> *mut libc::msghdr {
        self.plan(scratch);
        let header = self.frame.as_ref().is_none_or(|incoming| incoming.unplanned == 0)
            && !self.strips.is_full();
        let header = header.then(|| {
            (
                self.memory.header_addr(0) + self.header_bytes as u64,
                HEADER_BYTES - self.header_bytes,
            )
        });
        self.in_flight = true;
        let strips = self.strips.iter().map(|strip| (strip.addr, strip.bytes)).chain(header);
        // SAFETY: the pump calls this only when no receive is in flight.
        unsafe { self.memory.fill(strips) }
    }

    fn plan(&mut self, scratch: u64) {
        let Some(incoming) = &mut self.frame else { return };
        while incoming.unplanned > 0 && !self.strips.is_full() {
            let (addr, bytes) = match &mut incoming.target {
                // The gate checked that the strips are as long as the payload.
                Target::Pages(strips) => match strips.next() {
                    Some(strip) => (strip.addr, strip.bytes),
                    None => break,
                },
                Target::Leaving(_) | Target::Scratch(_) => {
                    (scratch, incoming.unplanned.min(SCRATCH_BYTES as u64))
                }
            };
            incoming.unplanned -= bytes;
            self.strips.push(Queued { addr, bytes: bytes as usize, owner: None, header: false });
        }
        debug_assert!(self.strips.iter().count() <= STRIPS_PER_OP);
    }

    /// Accounts for bytes of the operation that ended; what is left of them is left in `moved`. Called
    /// again, after what it returned was handled, until it returns nothing: an operation can end a
    /// frame and bring the next header.
    pub(super) fn advance(&mut self, moved: &mut usize) -> Result<Option<Arrived>, StreamError> {
        if let Some(incoming) = &mut self.frame {
            let part = (*moved).min(usize::try_from(incoming.left).unwrap_or(usize::MAX));
            self.strips.advance(part);
            incoming.left -= part as u64;
            *moved -= part;
            if incoming.left > 0 {
                return Ok(None);
            }
            let Some(done) = self.frame.take() else { return Ok(None) };
            return Ok(Some(match done.target {
                Target::Pages(_) => Arrived::Placed(done.frame),
                Target::Leaving(_) => self.drained(done.frame, RejectReason::Revoked),
                Target::Scratch(reason) => self.drained(done.frame, reason),
            }));
        }
        self.header_bytes += std::mem::take(moved);
        if self.header_bytes < HEADER_BYTES {
            return Ok(None);
        }
        self.header_bytes = 0;
        // SAFETY: the operation that received it has ended, and the next one is not started.
        let header = unsafe { self.memory.header(0) };
        let frame = Frame::decode(&header)?;
        let Frame::Data(data) = frame else { return Ok(Some(Arrived::Answer(frame))) };
        let want = self.last_seq + 1;
        if data.seq != want {
            return Err(StreamError::Sequence { got: data.seq, want });
        }
        if u64::from(data.payload_bytes) > PAYLOAD_BYTES_MAX {
            return Err(StreamError::Payload(data.payload_bytes.into()));
        }
        self.last_seq = want;
        Ok(Some(Arrived::Header(data)))
    }

    fn drained(&mut self, frame: DataFrame, reason: RejectReason) -> Arrived {
        if self.drained.len() == REJECTED_MAX {
            self.drained.pop_front();
        }
        self.drained.push_back(frame.seq);
        Arrived::Drained(frame, reason)
    }

    /// What came on the lane. Only at its end: a frame under way does not count.
    pub(super) fn tally(&self) -> Tally {
        let under_way = u64::from(self.frame.is_some());
        Tally {
            completed: self.last_seq - under_way,
            rejected: self.drained.iter().copied().collect(),
        }
    }

    /// The gate's word on the frame whose header just came.
    pub(super) fn begin(&mut self, frame: DataFrame, admitted: Result<Strips, RejectReason>) {
        let bytes = u64::from(frame.payload_bytes);
        let target = match admitted {
            Ok(strips) => Target::Pages(strips),
            Err(reason) => Target::Scratch(reason),
        };
        self.frame = Some(Incoming { frame, target, left: bytes, unplanned: bytes });
    }

    /// Whether the frame being received is of this room and goes to its pages.
    pub(super) fn writes(&self, slot: u32, epoch: Epoch) -> bool {
        self.frame.as_ref().is_some_and(|incoming| {
            let of_room = incoming.frame.slot == slot && incoming.frame.epoch == epoch;
            let to_pages = matches!(incoming.target, Target::Pages(_))
                || matches!(incoming.target, Target::Leaving(_)) && self.in_flight;
            of_room && to_pages
        })
    }

    /// Sends the rest of a room's frame to scratch. Says whether the operation in flight must be
    /// cancelled for it.
    pub(super) fn revoke(&mut self, slot: u32, epoch: Epoch) -> bool {
        if !self.writes(slot, epoch) {
            return false;
        }
        if let Some(incoming) = &mut self.frame {
            let scratch = Target::Scratch(RejectReason::Revoked);
            incoming.target = match std::mem::replace(&mut incoming.target, scratch) {
                Target::Pages(strips) => Target::Leaving(strips),
                other => other,
            };
        }
        self.leave();
        self.in_flight
    }

    /// The operation in flight has ended and been accounted for.
    pub(super) fn leave(&mut self) {
        if self.in_flight {
            return;
        }
        if let Some(incoming) = &mut self.frame
            && matches!(incoming.target, Target::Leaving(_))
        {
            self.strips.clear();
            incoming.unplanned = incoming.left;
            incoming.target = Target::Scratch(RejectReason::Revoked);
        }
    }
}
