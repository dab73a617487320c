//! Frames from one end of a wire to the other: posted, begun, on the way, answered.

use std::collections::VecDeque;

use super::super::{Event, PeerIndex, Posting, RoomTag, WorkStatus};
use super::lanes::{EndState, Wire};
use super::memory;
use super::world::{Note, Step, World};
use crate::ids::Epoch;
use crate::plan::Strip;
use crate::wire::frame::{DataFrame, RejectReason};

/// How long an unguarded write is tried on a lane that says nothing, in microseconds.
const RETRY_US: u64 = 20_000;

/// Guarded: parts that a stream holds before its sender has to wait.
const STREAM_PARTS: usize = 3;

/// Frames of one direction.
#[derive(Debug, Default)]
pub(super) struct Flow {
    /// Accepted, not begun.
    pub(super) waiting: VecDeque<Posting>,
    /// Begun and unanswered, in order.
    flights: VecDeque<Flight>,
    begun: u64,
    /// Parts that are on the way, in order. A flight's parts are entered when they are read (guarded) or
    /// when it is begun (unguarded: they are read when they land).
    pub(super) on_wire: VecDeque<Parcel>,
    /// The last answer that was heard, and the last that ever will be.
    pub(super) acked: u64,
    pub(super) ack_limit: u64,
    transmit_due: bool,
    arrive_due: bool,
    /// Answers on their way back, in order; each has a step of its own.
    answers: VecDeque<(u64, Option<RejectReason>)>,
}

#[derive(Debug)]
struct Flight {
    seq: u64,
    posting: Posting,
    source: Vec<Strip>,
    /// Said to have left, and when that will be said.
    sent: bool,
    say_sent: SaySent,
    /// Guarded: bytes that have been read, and whether what is left is filler.
    read: u64,
    filler: Filler,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SaySent {
    Begun,
    Landed,
    Answered,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Filler {
    No,
    /// Asked for; a read that is under way may still happen.
    Asked,
    Yes,
}

/// A part of a frame.
#[derive(Debug)]
pub(super) struct Parcel {
    pub(super) frame: DataFrame,
    pub(super) offset: u64,
    pub(super) len: u64,
    /// Its bytes, once they are read.
    pub(super) bytes: Option<Vec<u8>>,
}

impl Parcel {
    pub(super) const fn is_first(&self) -> bool {
        self.offset == 0
    }

    pub(super) fn is_last(&self) -> bool {
        self.offset + self.len == u64::from(self.frame.payload_bytes)
    }
}

impl Flow {
    /// The lane is gone: the frames that were begun and not answered.
    pub(super) fn abandon(&mut self) -> Vec<(u64, Posting)> {
        let lost = self.flights.drain(..).map(|flight| {
            let mut posting = flight.posting;
            posting.again |= flight.sent;
            (flight.seq, posting)
        });
        lost.collect()
    }
}

impl World {
    pub(super) fn has_room(&self, engine: usize, peer: PeerIndex) -> bool {
        self.engines[engine].ends.iter().any(|&(wire, end)| self.takes(wire, end, peer))
    }

    /// Frames of a room that were posted for the first time and have not left.
    pub(crate) fn not_left(&self, engine: usize, to: usize, epoch: Epoch) -> usize {
        let first_time = |posting: &Posting| posting.frame.epoch == epoch && !posting.again;
        let of_wire = |&(wire, end): &(usize, usize)| {
            let Wire { ends, flows, .. } = &self.wires[wire];
            let flow = &flows[end];
            let waiting = flow.waiting.iter().filter(|posting| first_time(posting)).count();
            let begun = |flight: &&Flight| first_time(&flight.posting) && !flight.sent;
            let under_way = flow.flights.iter().filter(begun).count();
            if ends[1 - end].engine == to { waiting + under_way } else { 0 }
        };
        self.engines[engine].ends.iter().map(of_wire).sum()
    }

    fn takes(&self, wire: usize, end: usize, peer: PeerIndex) -> bool {
        let (at, flow) = (&self.wires[wire].ends[end], &self.wires[wire].flows[end]);
        at.state == EndState::Up
            && at.peer == peer
            && flow.waiting.len() + flow.flights.len() < self.faults.window
    }

    pub(super) fn post(&mut self, engine: usize, peer: PeerIndex, posting: Posting) {
        let ends = self.engines[engine].ends.iter().copied();
        let open: Vec<_> = ends.filter(|&(wire, end)| self.takes(wire, end, peer)).collect();
        if open.is_empty() {
            return self.violate(format!("engine {engine} posts to a peer without room"));
        }
        let (wire, end) = open[self.dice.pick(open.len())];
        self.wires[wire].flows[end].waiting.push_back(posting);
        self.schedule_transmit(wire, end);
    }

    fn schedule_transmit(&mut self, wire: usize, end: usize) {
        if std::mem::replace(&mut self.wires[wire].flows[end].transmit_due, true) {
            return;
        }
        let mut delay = self.delay_us();
        if self.dice.chance(self.faults.partial_post) {
            delay += self.dice.between(1000, 30_000);
        }
        self.later(delay, Step::Transmit { wire, end });
    }

    pub(super) fn schedule_arrival(&mut self, wire: usize, end: usize) {
        let flow = &mut self.wires[wire].flows[end];
        if flow.on_wire.is_empty() || std::mem::replace(&mut flow.arrive_due, true) {
            return;
        }
        let delay = self.delay_us();
        self.later(delay, Step::Arrive { wire, end });
    }

    pub(super) fn transmit(&mut self, wire: usize, end: usize) {
        self.wires[wire].flows[end].transmit_due = false;
        if self.wires[wire].ends[end].state != EndState::Up {
            return;
        }
        // A stream that nobody reads holds its sender back, in the middle of a frame if need be.
        let flow = &self.wires[wire].flows[end];
        let ahead = flow.on_wire.len() + self.wires[wire].ends[1 - end].stream.len();
        if self.guarded && ahead >= STREAM_PARTS {
            return self.schedule_transmit(wire, end);
        }
        let flow = &mut self.wires[wire].flows[end];
        let unread = |flight: &Flight| flight.read < u64::from(flight.posting.frame.payload_bytes);
        match flow.flights.iter().position(unread).filter(|_| self.guarded) {
            Some(at) => self.read_part(wire, end, at),
            None => {
                let Some(posting) = flow.waiting.pop_front() else { return };
                self.begin(wire, end, posting);
            }
        }
        let flow = &self.wires[wire].flows[end];
        if !flow.waiting.is_empty() || self.guarded && flow.flights.iter().any(unread) {
            self.schedule_transmit(wire, end);
        }
    }

    fn begin(&mut self, wire: usize, end: usize, posting: Posting) {
        let say_sent = [SaySent::Begun, SaySent::Landed, SaySent::Answered][self.dice.pick(3)];
        let cuts = self.dice.pick(3);
        let flow = &mut self.wires[wire].flows[end];
        flow.begun += 1;
        let seq = flow.begun;
        let source = posting.runs.clone().map(|run| Strip { addr: run.src, bytes: run.bytes });
        let source: Vec<Strip> = source.collect();
        let frame = DataFrame { seq, ..posting.frame };
        let engine = self.wires[wire].ends[end].engine;
        let (id, epoch, again) = (self.wires[wire].id, frame.epoch, posting.again);
        let bytes = frame.payload_bytes;
        self.note(
            engine,
            seq << 8 | 5,
            format_args!("{id:?} begins frame {seq} of epoch {epoch}, {bytes} bytes, {again}"),
        );
        let sent = self.wires[wire].flows[end].flights.len();
        self.wires[wire].flows[end].flights.push_back(Flight {
            seq,
            posting,
            source,
            sent: false,
            say_sent,
            read: 0,
            filler: Filler::No,
        });
        if self.guarded {
            return;
        }
        let total = u64::from(frame.payload_bytes);
        let mut offset = 0;
        for cut in (0..=cuts).rev() {
            let left = total - offset;
            let len = if cut == 0 { left } else { self.dice.between(0, left) };
            if len > 0 {
                let parcel = Parcel { frame, offset, len, bytes: None };
                self.wires[wire].flows[end].on_wire.push_back(parcel);
            }
            offset += len;
        }
        if say_sent == SaySent::Begun {
            self.say_sent(wire, end, sent);
        }
        self.schedule_arrival(wire, end);
    }

    /// Guarded: the next part of a frame goes into the stream.
    fn read_part(&mut self, wire: usize, end: usize, at: usize) {
        let flight = &self.wires[wire].flows[end].flights[at];
        let (offset, total) = (flight.read, u64::from(flight.posting.frame.payload_bytes));
        let left = total - offset;
        let len = if self.dice.chance(0.4) { self.dice.between(1, left) } else { left };
        let flight = &self.wires[wire].flows[end].flights[at];
        let frame = DataFrame { seq: flight.seq, ..flight.posting.frame };
        let strips = memory::part(&flight.source, offset, len);
        let bytes = if flight.filler == Filler::Yes {
            vec![0; len as usize]
        } else {
            let to = self.wires[wire].ends[1 - end].engine;
            self.check_source(to, &frame);
            // SAFETY: the strips come from the posting's pages, whose pool the world keeps.
            unsafe { memory::gather(&strips) }
        };
        let flow = &mut self.wires[wire].flows[end];
        flow.flights[at].read += len;
        flow.on_wire.push_back(Parcel { frame, offset, len, bytes: Some(bytes) });
        if offset + len == total {
            self.say_sent(wire, end, at);
        }
        self.schedule_arrival(wire, end);
    }

    /// A frame has left whole, said once in its life.
    fn say_sent(&mut self, wire: usize, end: usize, at: usize) {
        let engine = self.wires[wire].ends[end].engine;
        let flight = &mut self.wires[wire].flows[end].flights[at];
        if flight.filler != Filler::No || std::mem::replace(&mut flight.sent, true) {
            return;
        }
        if !flight.posting.again {
            let tag = flight.posting.tag;
            self.tell(engine, Note::Event(Event::Sent { tag }));
        }
    }

    /// Reads what is still to be read of the first `keep` parts on the way; the others are lost.
    pub(super) fn capture(&mut self, wire: usize, end: usize, keep: usize) {
        self.wires[wire].flows[end].on_wire.truncate(keep);
        for at in 0..self.wires[wire].flows[end].on_wire.len() {
            if self.wires[wire].flows[end].on_wire[at].bytes.is_none() {
                let bytes = self.read(wire, end, at);
                self.wires[wire].flows[end].on_wire[at].bytes = Some(bytes);
            }
        }
        self.schedule_arrival(wire, end);
    }

    /// Reads the source of a part on the way.
    fn read(&mut self, wire: usize, end: usize, at: usize) -> Vec<u8> {
        let flow = &self.wires[wire].flows[end];
        let parcel = &flow.on_wire[at];
        let flight = flow.flights.iter().find(|flight| flight.seq == parcel.frame.seq);
        let Some(flight) = flight else { return vec![0; parcel.len as usize] };
        let strips = memory::part(&flight.source, parcel.offset, parcel.len);
        let (to, frame) = (self.wires[wire].ends[1 - end].engine, parcel.frame);
        self.check_source(to, &frame);
        // SAFETY: as of `read_part`.
        unsafe { memory::gather(&strips) }
    }

    pub(super) fn arrive(&mut self, wire: usize, end: usize) {
        self.wires[wire].flows[end].arrive_due = false;
        let frozen = self.wires[wire].frozen_until_us.saturating_sub(self.now_us);
        if frozen > 0 {
            if !self.guarded && frozen > RETRY_US {
                let cause = "transport retry counter exceeded";
                self.later(RETRY_US, Step::Close { wire, end, cause });
            }
            self.wires[wire].flows[end].arrive_due = true;
            return self.later(frozen, Step::Arrive { wire, end });
        }
        match self.wires[wire].ends[1 - end].state {
            // It waits in the network until the other end is there.
            EndState::Expected => return,
            EndState::Down | EndState::Never => {
                self.wires[wire].flows[end].on_wire.clear();
                let delay = if self.guarded { 0 } else { self.dice.between(500, RETRY_US) };
                let cause = "nothing is answered any more";
                return self.later(delay, Step::Close { wire, end, cause });
            }
            EndState::Up | EndState::Closing => {}
        }
        if !self.guarded && self.fails(wire, end) {
            return;
        }
        let bytes = match self.wires[wire].flows[end].on_wire.front_mut() {
            None => return,
            Some(parcel) => parcel.bytes.take(),
        };
        let bytes = bytes.unwrap_or_else(|| self.read(wire, end, 0));
        let Some(mut parcel) = self.wires[wire].flows[end].on_wire.pop_front() else { return };
        let to = self.wires[wire].ends[1 - end].engine;
        if self.guarded {
            parcel.bytes = Some(bytes);
            self.wires[wire].ends[1 - end].stream.push_back(parcel);
            self.absorb(wire, 1 - end);
            self.wakes.push(to);
        } else {
            let strips = self.target_strips(to, &parcel.frame);
            let strips = memory::part(&strips, parcel.offset, parcel.len);
            // SAFETY: the strips come from the receiver's grant, whose pool the world keeps.
            unsafe { memory::scatter(&strips, &bytes) };
            if parcel.is_last() {
                self.landed(wire, end, parcel.frame);
            }
        }
        self.schedule_arrival(wire, end);
    }

    /// Unguarded: a frame has landed whole.
    fn landed(&mut self, wire: usize, end: usize, frame: DataFrame) {
        let to = self.wires[wire].ends[1 - end].engine;
        let (id, seq, epoch) = (self.wires[wire].id, frame.seq, frame.epoch);
        self.note(to, seq << 8 | 6, format_args!("{id:?} frame {seq} of epoch {epoch} has landed"));
        self.tell(to, Note::Landed { wire, end: 1 - end, frame });
        let flights = &self.wires[wire].flows[end].flights;
        let landed = |flight: &Flight| flight.seq == seq && flight.say_sent == SaySent::Landed;
        let at = flights.iter().position(landed);
        if let (Some(at), EndState::Up) = (at, self.wires[wire].ends[end].state) {
            self.say_sent(wire, end, at);
        }
        self.answer(wire, end, seq, None);
    }

    /// Sends an answer back to `end`, behind those before it.
    pub(super) fn answer(
        &mut self,
        wire: usize,
        end: usize,
        seq: u64,
        reject: Option<RejectReason>,
    ) {
        let delay = self.delay_us();
        self.wires[wire].flows[end].answers.push_back((seq, reject));
        self.later(delay, Step::Answer { wire, end });
    }

    pub(super) fn answered(&mut self, wire: usize, end: usize) {
        let frozen = self.wires[wire].frozen_until_us;
        if frozen > self.now_us {
            return self.agenda.enter(frozen, Step::Answer { wire, end });
        }
        let Some((seq, reject)) = self.wires[wire].flows[end].answers.pop_front() else { return };
        let receiver = &self.wires[wire].ends[1 - end];
        let beyond = receiver.state == EndState::Down && seq > self.wires[wire].flows[end].ack_limit;
        if self.wires[wire].ends[end].state != EndState::Up || beyond {
            return;
        }
        let engine = self.wires[wire].ends[end].engine;
        let number = self.wires[wire].ends[end].number;
        if self.wires[wire].flows[end].flights.front().is_none_or(|flight| flight.seq != seq) {
            return;
        }
        self.say_sent(wire, end, 0);
        let flow = &mut self.wires[wire].flows[end];
        let Some(flight) = flow.flights.pop_front() else { return };
        flow.acked = seq;
        let (tag, landed) = (flight.posting.tag, flight.posting.landed());
        let event = match reject {
            None => Event::Acked { tag, landed },
            Some(reason) => Event::Rejected { tag, lane: number, reason },
        };
        self.tell(engine, Note::Event(event));
    }

    /// Whether the write that is next on a lane ends in an error, and what comes of that.
    fn fails(&mut self, wire: usize, end: usize) -> bool {
        let flow = &self.wires[wire].flows[end];
        let Some(parcel) = flow.on_wire.front().filter(|parcel| parcel.is_first()) else {
            return false;
        };
        if self.wires[wire].ends[end].state != EndState::Up {
            return false;
        }
        let frame = parcel.frame;
        let Some(flight) = flow.flights.iter().find(|flight| flight.seq == frame.seq) else {
            return false;
        };
        let (tag, whole) = (flight.posting.tag, parcel.is_last());
        let faults = self.faults;
        let status = if self.dice.chance(faults.local_protection) {
            WorkStatus::LocalProtection
        } else if self.dice.chance(faults.remote_access) {
            WorkStatus::RemoteAccess
        } else if self.dice.chance(faults.receiver_not_ready) {
            WorkStatus::RnrRetryExceeded
        } else if self.dice.chance(faults.retry_exceeded) {
            WorkStatus::RetryExceeded
        } else {
            return false;
        };
        let to = self.wires[wire].ends[1 - end].engine;
        // Some of it may have landed; of a write whose answer was lost, all of it may have.
        let lands = match status {
            WorkStatus::RnrRetryExceeded => !whole && self.dice.chance(0.5),
            WorkStatus::RetryExceeded => self.dice.chance(0.5),
            _ => false,
        };
        if lands {
            let bytes = self.read(wire, end, 0);
            let strips = self.target_strips(to, &frame);
            let strips = memory::part(&strips, 0, bytes.len() as u64);
            // SAFETY: as of `arrive`.
            unsafe { memory::scatter(&strips, &bytes) };
            if whole {
                self.tell(to, Note::Landed { wire, end: 1 - end, frame });
            }
        }
        if let Some(kind) = status.blames_room() {
            self.blame(to, frame.epoch, kind);
        }
        self.wires[wire].flows[end].on_wire.clear();
        let culprit = status.blames_room().is_some().then_some((tag, status));
        let (id, epoch) = (self.wires[wire].id, frame.epoch);
        let engine = self.wires[wire].ends[end].engine;
        self.note(engine, 7, format_args!("{id:?}: frame of epoch {epoch} ends in {status:?}"));
        self.begin_close(wire, end, "completion with an error", culprit);
        true
    }

    /// Begins to let go of a room's sources: what is not begun is dropped.
    pub(super) fn retract(&mut self, engine: usize, peer: PeerIndex, tag: RoomTag) {
        for (wire, end) in self.engines[engine].ends.clone() {
            if self.wires[wire].ends[end].peer != peer {
                continue;
            }
            let flow = &mut self.wires[wire].flows[end];
            flow.waiting.retain(|posting| posting.tag != tag);
            let unread = flow.flights.iter_mut().find(|flight| {
                flight.posting.tag == tag
                    && flight.read < u64::from(flight.posting.frame.payload_bytes)
            });
            if let Some(flight) = unread.filter(|_| self.guarded) {
                if flight.posting.again {
                    // The receiver may have been told to count it, so filler would pass for its bytes.
                    let cause = "a room was given up in the middle of a frame that is sent again";
                    self.begin_close(wire, end, cause, None);
                } else {
                    flight.filler = Filler::Asked;
                }
            }
        }
        self.engines[engine].retracting.push((peer, tag));
        self.wakes.push(engine);
    }

    /// Whether a room's sources may still be read. Guarded, not once it was looked at.
    pub(super) fn stop_reading(&mut self, engine: usize, peer: PeerIndex, tag: RoomTag) -> bool {
        let guarded = self.guarded;
        let mut busy = false;
        for (wire, end) in self.engines[engine].ends.clone() {
            if self.wires[wire].ends[end].peer != peer {
                continue;
            }
            for flight in &mut self.wires[wire].flows[end].flights {
                if flight.posting.tag != tag {
                    continue;
                }
                if guarded && flight.filler == Filler::Asked {
                    flight.filler = Filler::Yes;
                }
                busy |= !guarded;
            }
        }
        busy
    }
}
