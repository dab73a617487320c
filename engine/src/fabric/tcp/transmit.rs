//! The sending half of a lane: frames and answers become a stream of strips.

use std::collections::VecDeque;

use rustix::io::Errno;

use super::driver::{Direction, HEADERS_PER_LANE, OpMemoryBox};
use super::filler::FILLER_BYTES;
use super::strips::{Queued, StripQueue};
use crate::fabric::{Posting, RoomTag};
use crate::failure::Landed;
use crate::plan::Runs;
use crate::room::ledger::{Ledger, NeverPosted};
use crate::room::links::REJECTED_MAX;
use crate::wire::frame::{FRAME_BYTES, Frame, HEADER_BYTES};

/// Frames a lane may have sent and not had acknowledged. With frames of 1 MiB, four times the
/// bandwidth-delay product of a 100 Gb/s path of 5 ms.
pub(super) const WINDOW_FRAMES: usize = 256;
/// Frames that may wait on a lane. A few, so that small ones share an operation.
const WAITING_FRAMES: usize = 16;
/// Bytes that may wait on a lane beyond the frame being sent: the next room's turn is never further
/// away than this.
const WAITING_BYTES: u64 = FRAME_BYTES;
/// Payload of one operation at which no further frame is added to it.
const OPERATION_BYTES: u64 = FRAME_BYTES;
/// Smallest operation that is worth a zero-copy send: below it, pinning pages and a notification cost
/// more than copying (crossover about 3 KB since Linux 6.10, 10 KB and more before).
const ZERO_COPY_BYTES_MIN: u64 = 64 << 10;
/// Zero-copy sends whose notification is outstanding; further ones are copied.
const ZERO_COPY_SENDS: usize = 32;
/// Notifications in a row saying "copied" after which a lane stops asking for zero copy.
const COPIED_MAX: u32 = 4;

/// Any more of them would not fit in the answer about a lane that is down.
const _: () = assert!(WINDOW_FRAMES <= REJECTED_MAX);

/// A frame that was begun.
#[derive(Debug)]
struct Begun {
    tag: RoomTag,
    landed: Landed,
    /// With all its runs, as long as it may have to be sent again. A room that was given up keeps nothing
    /// of its pools here.
    posting: Option<Posting>,
    /// It has left whole.
    left: bool,
}

/// What is to be done to stop reading a room's pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Retracted {
    Nothing,
    /// Cancel the operation in flight.
    Cancel,
    /// Close the lane: the rest of a frame may not be filled up.
    Close,
}

#[derive(Debug)]
pub(super) struct Transmit {
    memory: OpMemoryBox,
    strips: StripQueue,
    waiting: VecDeque<Posting>,
    waiting_bytes: u64,
    /// The frame whose header is queued and whose payload is not yet, all of it.
    filling: Option<Filling>,
    ledger: Ledger<Begun>,
    /// Payload bytes of the frames in the ledger that were not rejected.
    unacked_bytes: u64,
    /// Rejects to be sent; at most a window of them.
    rejects: VecDeque<Frame>,
    /// Highest data frame of the peer's to acknowledge, if it was not yet.
    ack: Option<u64>,
    /// Headers ever queued; the slot of each is its number modulo [`HEADERS_PER_LANE`].
    headers: u64,
    /// What is in `strips` and `filling`, frame by frame.
    leaving: VecDeque<Leaving>,
    /// The operation in flight.
    in_flight: Option<InFlight>,
    /// Rooms that were retracted while their strips were in flight.
    disowned: Vec<RoomTag>,
    /// Whether to ask for zero copy at all.
    zero_copy: bool,
    copied_in_a_row: u32,
    next_ticket: u32,
    zero_copy_sends: VecDeque<ZeroCopySend>,
    /// Owner lists to be used again.
    spare_owners: Vec<Vec<RoomTag>>,
}

/// A frame on its way into the socket.
#[derive(Clone, Copy, Debug)]
struct Leaving {
    /// Whose it is, and its number; none for answers and for frames that are filled up.
    data: Option<(RoomTag, u64)>,
    /// Bytes that have not left.
    bytes: u64,
    /// It is sent again, so its room may have been said to be finished.
    again: bool,
}

/// How the operation in flight was started, and whether it has been asked to end.
#[derive(Clone, Copy, Debug)]
struct InFlight {
    direction: Direction,
    ticket: u32,
    cancelling: bool,
}

#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "one a lane, moved once a frame; a box would be an allocation"
)]
enum Filling {
    Pages { tag: RoomTag, runs: Runs },
    Zeros { bytes: u64 },
}

/// A zero-copy send whose pages the kernel may still read.
#[derive(Debug)]
struct ZeroCopySend {
    ticket: u32,
    owners: Vec<RoomTag>,
    /// Number of the oldest header it may hold.
    first_header: u64,
    notified: bool,
}

/// A send to be started.
pub(super) struct Operation {
    pub(super) message: *mut libc::msghdr,
    pub(super) direction: Direction,
    pub(super) ticket: u32,
}

impl Transmit {
    pub(super) fn new(zero_copy: bool) -> Self {
        Self {
            memory: OpMemoryBox::new(),
            strips: StripQueue::new(),
            waiting: VecDeque::with_capacity(WAITING_FRAMES),
            waiting_bytes: 0,
            filling: None,
            ledger: Ledger::new(WINDOW_FRAMES),
            unacked_bytes: 0,
            rejects: VecDeque::with_capacity(WINDOW_FRAMES),
            ack: None,
            headers: 0,
            leaving: VecDeque::with_capacity(HEADERS_PER_LANE),
            in_flight: None,
            disowned: Vec::new(),
            zero_copy,
            copied_in_a_row: 0,
            next_ticket: 0,
            zero_copy_sends: VecDeque::with_capacity(ZERO_COPY_SENDS),
            spare_owners: Vec::with_capacity(ZERO_COPY_SENDS),
        }
    }

    pub(super) fn has_room(&self) -> bool {
        self.waiting.len() < WAITING_FRAMES
            && self.waiting_bytes < WAITING_BYTES
            && self.ledger.free() > self.waiting.len()
    }

    /// Bytes that stand before a frame posted now.
    /// What is not acknowledged counts: a lane that a fault has silenced must not look empty.
    pub(super) const fn backlog(&self) -> u64 {
        self.waiting_bytes + self.unacked_bytes
    }

    /// The peer has placed, or answered, every frame up to `seq`.
    pub(super) fn acknowledge(
        &mut self,
        seq: u64,
        mut placed: impl FnMut(RoomTag, Landed),
    ) -> Result<(), NeverPosted> {
        let unacked = &mut self.unacked_bytes;
        self.ledger.acknowledge(seq, |begun| {
            *unacked -= begun.landed.bytes;
            placed(begun.tag, begun.landed);
        })
    }

    /// The peer has not placed a frame. Tells whose it was.
    pub(super) fn reject(&mut self, seq: u64) -> Result<RoomTag, NeverPosted> {
        let begun = self.ledger.reject(seq)?;
        self.unacked_bytes -= begun.landed.bytes;
        Ok(begun.tag)
    }

    pub(super) fn post(&mut self, posting: Posting) {
        self.waiting_bytes += u64::from(posting.frame.payload_bytes);
        self.waiting.push_back(posting);
    }

    /// Notes an answer to a frame of the peer's. Says whether it could: a peer that keeps to its window
    /// never has more frames unanswered than that.
    pub(super) fn answer(&mut self, seq: u64, reject: Option<Frame>) -> bool {
        if self.rejects.len() >= WINDOW_FRAMES {
            return false;
        }
        self.rejects.extend(reject);
        self.ack = Some(seq);
        true
    }

    /// The next operation, when there is anything to send and none is in flight.
    pub(super) fn next(&mut self) -> Option<Operation> {
        if self.in_flight.is_some() {
            return None;
        }
        self.fill();
        if self.strips.is_empty() {
            return None;
        }
        let (mut direction, mut ticket) = (Direction::Send, 0);
        if self.zero_copy
            && self.strips.bytes() >= ZERO_COPY_BYTES_MIN
            && self.zero_copy_sends.len() < ZERO_COPY_SENDS
        {
            self.next_ticket = (self.next_ticket + 1) & 0x00ff_ffff;
            (direction, ticket) = (Direction::SendZeroCopy, self.next_ticket);
            let mut owners = self.spare_owners.pop().unwrap_or_default();
            owners.extend(self.strips.iter().filter_map(|strip| strip.owner));
            owners.dedup();
            let first_header = self.headers - self.strips.headers() as u64;
            self.zero_copy_sends.push_back(ZeroCopySend {
                ticket,
                owners,
                first_header,
                notified: false,
            });
        }
        let strips = self.strips.iter().map(|strip| (strip.addr, strip.bytes));
        // SAFETY: no send is in flight, as was checked above.
        let message = unsafe { self.memory.fill(strips) };
        self.in_flight = Some(InFlight { direction, ticket, cancelling: false });
        Some(Operation { message, direction, ticket })
    }

    /// The operation to be cancelled so that nothing is in flight soon, unless it has been already.
    pub(super) fn cancel(&mut self) -> Option<(Direction, u32)> {
        let op = self.in_flight.as_mut().filter(|op| !op.cancelling)?;
        op.cancelling = true;
        Some((op.direction, op.ticket))
    }

    pub(super) const fn is_in_flight(&self) -> bool {
        self.in_flight.is_some()
    }

    /// Whether every header slot is held by strips not sent, or by zero-copy sends under way.
    fn headers_are_held(&self) -> bool {
        let unsent = self.headers - self.strips.headers() as u64;
        let oldest =
            self.zero_copy_sends.front().map_or(unsent, |send| send.first_header.min(unsent));
        self.headers - oldest >= HEADERS_PER_LANE as u64
    }

    /// Lays out headers and payload for the next operation.
    fn fill(&mut self) {
        while !self.strips.is_full() {
            match &mut self.filling {
                Some(Filling::Pages { tag, runs }) => match runs.next() {
                    Some(run) => {
                        let (addr, bytes, owner) = (run.src, run.bytes as usize, Some(*tag));
                        self.strips.push(Queued { addr, bytes, owner, header: false });
                    }
                    None => self.filling = None,
                },
                Some(Filling::Zeros { bytes: 0 }) => self.filling = None,
                Some(Filling::Zeros { bytes }) => {
                    let part = (*bytes).min(FILLER_BYTES);
                    *bytes -= part;
                    let addr = super::filler::zeros().unwrap_or_default();
                    self.strips.push(Queued {
                        addr,
                        bytes: part as usize,
                        owner: None,
                        header: false,
                    });
                }
                None => {
                    if self.headers_are_held() {
                        return;
                    }
                    if let Some(reject) = self.rejects.pop_front() {
                        self.push_header(reject, None);
                    } else if let Some(seq) = self.ack.take() {
                        self.push_header(Frame::Ack { seq }, None);
                    } else if self.strips.bytes() < OPERATION_BYTES
                        && let Some(posting) = self.waiting.pop_front()
                    {
                        self.waiting_bytes -= u64::from(posting.frame.payload_bytes);
                        let (tag, again, mut frame) = (posting.tag, posting.again, posting.frame);
                        self.unacked_bytes += u64::from(frame.payload_bytes);
                        self.filling = Some(Filling::Pages { tag, runs: posting.runs.clone() });
                        let (landed, posting) = (posting.landed(), Some(posting));
                        frame.seq = self.ledger.post(Begun { tag, landed, posting, left: false });
                        self.push_header(Frame::Data(frame), Some((tag, again)));
                    } else {
                        return;
                    }
                }
            }
        }
    }

    fn push_header(&mut self, frame: Frame, room: Option<(RoomTag, bool)>) {
        let slot = (self.headers % HEADERS_PER_LANE as u64) as usize;
        self.headers += 1;
        // SAFETY: `fill` gets here only when no send is in flight and this slot is held by none of
        // the zero-copy sends whose notification is outstanding (`headers_are_held`).
        unsafe { self.memory.set_header(slot, frame.encode()) };
        let addr = self.memory.header_addr(slot);
        self.strips.push(Queued { addr, bytes: HEADER_BYTES, owner: None, header: true });
        let (seq, payload_bytes) = match frame {
            Frame::Data(data) => (data.seq, u64::from(data.payload_bytes)),
            _ => (0, 0),
        };
        self.leaving.push_back(Leaving {
            data: room.map(|(tag, _)| (tag, seq)),
            bytes: HEADER_BYTES as u64 + payload_bytes,
            again: room.is_some_and(|(_, again)| again),
        });
    }

    /// The operation in flight has ended, having moved `bytes`; with `held`, a notification follows.
    /// Tells of every frame that has left whole.
    pub(super) fn ended(&mut self, bytes: usize, held: bool, mut sent: impl FnMut(RoomTag)) {
        let op = self.in_flight.take();
        self.strips.advance(bytes);
        let mut moved = bytes as u64;
        while let Some(leaving) = self.leaving.front_mut() {
            let part = moved.min(leaving.bytes);
            leaving.bytes -= part;
            moved -= part;
            if leaving.bytes > 0 {
                break;
            }
            if let Some((tag, seq)) = leaving.data {
                if let Some(begun) = self.ledger.get_mut(seq) {
                    begun.left = true;
                }
                // A frame sent again was reported when it left the first time.
                if !leaving.again {
                    sent(tag);
                }
            }
            self.leaving.pop_front();
        }
        if op.is_some_and(|op| op.direction == Direction::SendZeroCopy)
            && !held
            && let Some(send) = self.zero_copy_sends.back_mut()
        {
            send.notified = true;
        }
        self.retire_zero_copy();
        for tag in self.disowned.drain(..) {
            self.strips.disown(tag, super::filler::zeros().unwrap_or_default());
        }
    }

    /// A zero-copy send's pages are free.
    pub(super) fn notified(&mut self, ticket: u32, copied: bool) {
        if let Some(send) = self.zero_copy_sends.iter_mut().find(|send| send.ticket == ticket) {
            send.notified = true;
        }
        self.retire_zero_copy();
        self.copied_in_a_row = if copied { self.copied_in_a_row + 1 } else { 0 };
        if self.zero_copy && self.copied_in_a_row >= COPIED_MAX {
            self.zero_copy = false;
            tracing::debug!("zero-copy sends are copied by the kernel on this lane; switched off");
        }
    }

    fn retire_zero_copy(&mut self) {
        // Header slots are a ring, so they are given back in order.
        while let Some(mut send) = self.zero_copy_sends.pop_front_if(|send| send.notified) {
            send.owners.clear();
            self.spare_owners.push(send.owners);
        }
    }

    /// Stops reading a room's pages. What is left of the frames of one that is `done` does not matter.
    pub(super) fn retract(&mut self, tag: RoomTag, done: bool) -> Retracted {
        let waiting_bytes = &mut self.waiting_bytes;
        self.waiting.retain(|posting| {
            if posting.tag == tag {
                *waiting_bytes -= u64::from(posting.frame.payload_bytes);
            }
            posting.tag != tag
        });
        for begun in self.ledger.iter_mut().filter(|begun| begun.tag == tag) {
            begun.posting = None;
        }
        // The receiver may have been told to count it, so filler would pass for its bytes.
        let of_room = |leaving: &Leaving| {
            leaving.again && leaving.data.is_some_and(|(owner, _)| owner == tag)
        };
        if !done && self.leaving.iter().any(of_room) {
            return Retracted::Close;
        }
        self.disown_unplanned(tag);
        if self.strips.iter().any(|strip| strip.owner == Some(tag)) {
            if self.in_flight.is_some() {
                self.disowned.push(tag);
                return Retracted::Cancel;
            }
            self.strips.disown(tag, super::filler::zeros().unwrap_or_default());
        }
        Retracted::Nothing
    }

    /// Replaces what is left of a room's frames, but for what is laid out in strips, by filler. Its peer
    /// counts that as arrived; the room has failed, and was not said to be finished, so nobody will
    /// call it done.
    fn disown_unplanned(&mut self, tag: RoomTag) {
        for leaving in &mut self.leaving {
            leaving.data = leaving.data.filter(|(owner, _)| *owner != tag);
        }
        if let Some(Filling::Pages { tag: filling, runs }) = &mut self.filling
            && *filling == tag
        {
            self.filling = Some(Filling::Zeros { bytes: runs.map(|run| run.bytes).sum() });
        }
    }

    /// Whether the kernel, or a later operation, may still read the room's pages.
    pub(super) fn reads(&self, tag: RoomTag) -> bool {
        self.strips.iter().any(|strip| strip.owner == Some(tag))
            || self.waiting.iter().any(|posting| posting.tag == tag)
            || matches!(&self.filling, Some(Filling::Pages { tag: filling, .. }) if *filling == tag)
            || self.zero_copy_sends.iter().any(|send| !send.notified && send.owners.contains(&tag))
    }

    /// Whether the kernel holds pages of zero-copy sends.
    pub(super) fn holds_pages(&self) -> bool {
        !self.zero_copy_sends.is_empty()
    }

    /// The lane is gone: the frames that were begun and not answered, by number, and those not begun. Of
    /// rooms that were given up there are none: what is on its way of them is refused.
    pub(super) fn abandon(&mut self) -> (Vec<(u64, Posting)>, Vec<Posting>) {
        self.strips.clear();
        self.filling = None;
        let lost = self.ledger.drain().filter_map(|(seq, begun)| {
            let mut posting = begun.posting?;
            posting.again |= begun.left;
            Some((seq, posting))
        });
        (lost.collect(), self.waiting.drain(..).collect())
    }

    /// A zero-copy send was refused with this error. Says whether a plain one may not be: then the
    /// lane sends plain from now on.
    pub(super) fn give_up_zero_copy(&mut self, errno: Errno) -> bool {
        let refused =
            matches!(errno, Errno::INVAL | Errno::OPNOTSUPP | Errno::NOMEM | Errno::NOBUFS);
        if refused && self.zero_copy {
            self.zero_copy = false;
            tracing::debug!(%errno, "zero-copy sends are refused on this lane; switched off");
        }
        refused
    }
}
