//! Frames from one end of a wire to the other: posted, begun, on the way, answered.

use std::collections::VecDeque;

use super::super::{Event, PeerIndex, Posting, RoomTag};
use super::lanes::{EndState, Wire};
use super::memory;
use super::world::{Note, Step, World};
use crate::ids::Epoch;
use crate::plan::Strip;
use crate::wire::frame::{DataFrame, RejectReason};

/// Guarded: parts that a stream holds before its sender has to wait.
const STREAM_PARTS: usize = 3;

/// Frames of one direction.
#[derive(Debug, Default)]
pub(super) struct Flow {
    /// Accepted, not begun.
    pub(super) waiting: VecDeque<Posting>,
    /// Begun and unanswered, in order.
    pub(super) flights: VecDeque<Flight>,
    begun: u64,
    /// Parts that are on the way, in order. A flight's parts are entered when they are read (guarded) or
    /// when it is begun (unguarded: they are read when they land).
    pub(super) on_wire: VecDeque<Parcel>,
    /// The last answer that was heard, and the last that ever will be.
    pub(super) acked: u64,
    pub(super) ack_limit: u64,
    transmit_due: bool,
    pub(super) arrive_due: bool,
    /// Answers on their way back, in order; each has a step of its own.
    pub(super) answers: VecDeque<(u64, Option<RejectReason>)>,
}

#[derive(Debug)]
pub(super) struct Flight {
    pub(super) seq: u64,
    pub(super) posting: Posting,
    source: Vec<Strip>,
    /// Said to have left, and when that will be said.
    sent: bool,
    pub(super) say_sent: SaySent,
    /// Guarded: bytes that have been read, and whether what is left is filler.
    read: u64,
    filler: Filler,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SaySent {
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
            self.memory.gather(&strips)
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
    pub(super) fn say_sent(&mut self, wire: usize, end: usize, at: usize) {
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
    pub(super) fn read(&mut self, wire: usize, end: usize, at: usize) -> Vec<u8> {
        let flow = &self.wires[wire].flows[end];
        let parcel = &flow.on_wire[at];
        let flight = flow.flights.iter().find(|flight| flight.seq == parcel.frame.seq);
        let Some(flight) = flight else { return vec![0; parcel.len as usize] };
        let strips = memory::part(&flight.source, parcel.offset, parcel.len);
        let (to, frame) = (self.wires[wire].ends[1 - end].engine, parcel.frame);
        self.check_source(to, &frame);
        self.memory.gather(&strips)
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
