//! What arrives at the far end of a wire, what is answered, and what ends in an error instead.

use super::super::{Event, WorkStatus};
use super::flow::{Flight, SaySent};
use super::lanes::EndState;
use super::memory;
use super::world::{Note, Step, World};
use crate::wire::frame::{DataFrame, RejectReason};

/// How long an unguarded write is tried on a lane that says nothing, in microseconds.
const RETRY_US: u64 = 20_000;

impl World {
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
            self.memory.scatter(&strips, &bytes);
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
        let beyond =
            receiver.state == EndState::Down && seq > self.wires[wire].flows[end].ack_limit;
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
            [WorkStatus::RemoteAccess, WorkStatus::RemoteOperation][self.dice.pick(2)]
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
            self.memory.scatter(&strips, &bytes);
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
        self.begin_close(wire, end, &format!("a write ended in {status:?}"), culprit);
        true
    }
}
