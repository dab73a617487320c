//! Wires and their two ends, each of which comes up, closes and goes down by itself.

use std::collections::VecDeque;

use super::super::{DownLane, Event, Link, NewLane, PeerIndex, RoomTag, WorkStatus};
use super::flow::Flow;
use super::receive::Incoming;
use super::world::{Note, Step, World};
use crate::ids::LaneId;
use crate::room::links::{REJECTED_MAX, Tally};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EndState {
    /// Not handed to its engine yet.
    Expected,
    Up,
    /// It takes nothing new; what is under way may still land.
    Closing,
    Down,
    /// It never came up, and will not.
    Never,
}

impl EndState {
    pub(super) const fn is_over(self) -> bool {
        matches!(self, Self::Down | Self::Never)
    }
}

/// Which ends of a wire a fault takes down.
#[derive(Clone, Copy, Debug)]
pub(crate) enum CloseAt {
    One(usize),
    Both,
}

#[derive(Debug)]
pub(super) struct End {
    pub(super) engine: usize,
    pub(super) peer: PeerIndex,
    pub(super) number: u16,
    pub(super) state: EndState,
    cause: String,
    culprit: Option<(RoomTag, WorkStatus)>,
    /// Frames received in order that were counted or rejected.
    pub(super) counted: u64,
    pub(super) rejected: VecDeque<u64>,
    /// Guarded: what has come and is not placed, and the frame being received.
    pub(super) stream: VecDeque<super::flow::Parcel>,
    pub(super) incoming: Option<Incoming>,
}

#[derive(Debug)]
pub(super) struct Wire {
    pub(super) id: LaneId,
    pub(super) ends: [End; 2],
    /// By the end that the frames come from.
    pub(super) flows: [Flow; 2],
    /// Nothing gets through before.
    pub(super) frozen_until_us: u64,
}

impl World {
    /// A wire between two engines; its ends are to be handed to them.
    pub(crate) fn add_wire(&mut self, engines: [usize; 2]) -> (usize, LaneId) {
        let wire = self.wires.len();
        let id = LaneId(1000 + wire as u64);
        let ends = engines.map(|engine| End {
            engine,
            peer: PeerIndex(u32::MAX),
            number: 0,
            state: EndState::Expected,
            cause: String::new(),
            culprit: None,
            counted: 0,
            rejected: VecDeque::new(),
            stream: VecDeque::new(),
            incoming: None,
        });
        let flows = [Flow::default(), Flow::default()];
        self.wires.push(Wire { id, ends, flows, frozen_until_us: 0 });
        (wire, id)
    }

    pub(crate) fn end_state(&self, wire: usize, end: usize) -> EndState {
        self.wires[wire].ends[end].state
    }

    pub(super) fn add_lane(&mut self, engine: usize, peer: PeerIndex, lane: NewLane) {
        let NewLane { id, number, link, .. } = lane;
        let Link::Sim(super::Link { wire, end }) = link else { return };
        let at = &mut self.wires[wire].ends[end];
        debug_assert_eq!((at.engine, at.state), (engine, EndState::Expected), "{id:?}");
        (at.peer, at.number, at.state) = (peer, number, EndState::Up);
        self.engines[engine].ends.push((wire, end));
        self.note(engine, 1, format_args!("lane {} ({id:?}) is up", number));
        if self.wires[wire].ends[1 - end].state.is_over() {
            self.notice(wire, end, "the other end is gone");
        }
        // What was sent before this end came up.
        self.schedule_arrival(wire, 1 - end);
    }

    /// An end will never come up.
    pub(crate) fn abandon(&mut self, wire: usize, end: usize) {
        let at = &mut self.wires[wire].ends[end];
        if at.state != EndState::Expected {
            return;
        }
        at.state = EndState::Never;
        self.wires[wire].flows[1 - end].on_wire.clear();
        if self.wires[wire].ends[1 - end].state == EndState::Up {
            self.notice(wire, 1 - end, "nobody answered at the other end");
        }
    }

    pub(super) fn close_lanes(
        &mut self,
        engine: usize,
        peer: PeerIndex,
        lane: Option<LaneId>,
        cause: &str,
    ) -> usize {
        let mut closed = 0;
        for (wire, end) in self.engines[engine].ends.clone() {
            let meant = self.wires[wire].ends[end].peer == peer
                && lane.is_none_or(|lane| self.wires[wire].id == lane);
            if meant {
                self.begin_close(wire, end, cause, None);
                closed += 1;
            }
        }
        closed
    }

    /// A fault takes a wire down.
    pub(crate) fn cut(&mut self, wire: usize, at: CloseAt) {
        let ends = match at {
            CloseAt::One(end) => vec![end],
            CloseAt::Both => vec![0, 1],
        };
        for end in ends {
            let delay = self.delay_us();
            self.later(delay, Step::Close { wire, end, cause: "port down" });
        }
    }

    /// Wires of two engines of which an end stands.
    pub(crate) fn standing(&self, engines: [usize; 2]) -> Vec<usize> {
        let stands =
            |&wire: &usize| self.wires[wire].ends.iter().any(|end| end.state == EndState::Up);
        self.wires_of(engines).filter(stands).collect()
    }

    /// Wires of two engines that stand or come up at both ends.
    pub(crate) fn whole(&self, engines: [usize; 2]) -> usize {
        let stands = |end: &End| matches!(end.state, EndState::Up | EndState::Expected);
        self.wires_of(engines).filter(|&wire| self.wires[wire].ends.iter().all(stands)).count()
    }

    /// Wires of two engines of which an end is not handed over.
    pub(crate) fn expected(&self, engines: [usize; 2], end: usize) -> Vec<usize> {
        let expected = |&wire: &usize| self.wires[wire].ends[end].state == EndState::Expected;
        self.wires_of(engines).filter(expected).collect()
    }

    fn wires_of(&self, engines: [usize; 2]) -> impl Iterator<Item = usize> {
        let between = move |index: &usize| {
            let ends = &self.wires[*index].ends;
            [ends[0].engine, ends[1].engine] == engines
        };
        (0..self.wires.len()).filter(between)
    }

    pub(crate) fn wire_id(&self, wire: usize) -> LaneId {
        self.wires[wire].id
    }

    pub(crate) fn freeze(&mut self, wire: usize, for_us: u64) {
        let until = self.now_us + for_us;
        self.wires[wire].frozen_until_us = self.wires[wire].frozen_until_us.max(until);
    }

    /// An end hears in a while that it has to close.
    pub(super) fn notice(&mut self, wire: usize, end: usize, cause: &'static str) {
        let delay = self.delay_us();
        self.later(delay, Step::Close { wire, end, cause });
    }

    pub(super) fn begin_close(
        &mut self,
        wire: usize,
        end: usize,
        cause: &str,
        culprit: Option<(RoomTag, WorkStatus)>,
    ) {
        let at = &mut self.wires[wire].ends[end];
        if at.state != EndState::Up {
            return;
        }
        at.state = EndState::Closing;
        cause.clone_into(&mut at.cause);
        at.culprit = culprit;
        let (engine, id) = (at.engine, self.wires[wire].id);
        self.note(engine, 2, format_args!("lane {id:?} closes: {cause}"));
        let delay = self.dice.between(5, self.faults.reap_us);
        self.later(delay, Step::Reaped { wire, end });
    }

    pub(super) fn reaped(&mut self, wire: usize, end: usize) {
        if self.wires[wire].ends[end].state != EndState::Closing {
            return;
        }
        let (engine, id) = (self.wires[wire].ends[end].engine, self.wires[wire].id);
        self.take_down(wire, end);
        self.engines[engine].ends.retain(|&other| other != (wire, end));
        self.note(engine, 3, format_args!("lane {id:?} is down here"));
        self.tell(engine, Note::Down { wire, end });
    }

    /// From now on nothing lands at this end, and what is read at it was read before.
    pub(super) fn take_down(&mut self, wire: usize, end: usize) {
        self.wires[wire].ends[end].state = EndState::Down;
        let other = self.wires[wire].ends[1 - end].state;
        let on_way = self.wires[wire].flows[end].on_wire.len();
        let keep = if other.is_over() { 0 } else { self.dice.pick(on_way + 1) };
        self.capture(wire, end, keep);
        self.wires[wire].flows[1 - end].on_wire.clear();
        self.cut_arrivals(wire, end);
        let at = &mut self.wires[wire].ends[end];
        at.stream.clear();
        at.incoming = None;
        // A stream tells its other end; a queue pair does not, but a port that is down is down for both.
        if other == EndState::Up && (self.guarded || self.dice.chance(0.3)) {
            self.notice(wire, 1 - end, "closed by the peer");
        }
    }

    /// Of what has landed and was not counted when an end went down, some is dropped: its completions
    /// were never seen. Not what the sender knows to have landed.
    fn cut_arrivals(&mut self, wire: usize, end: usize) {
        let engine = self.wires[wire].ends[end].engine;
        let landed = |note: &Note| match note {
            Note::Landed { wire: on, end: at, frame } if (*on, *at) == (wire, end) => {
                Some(frame.seq)
            }
            _ => None,
        };
        let last = self.engines[engine].notes.iter().filter_map(landed).max().unwrap_or(0);
        let known = self.wires[wire].flows[1 - end].acked.max(self.wires[wire].ends[end].counted);
        let keep =
            if self.dice.chance(0.6) { last.max(known) } else { self.dice.between(known, last) };
        self.engines[engine].notes.retain(|note| landed(note).is_none_or(|seq| seq <= keep));
        self.wires[wire].flows[1 - end].ack_limit = keep;
    }

    /// Everything about a lane that is down, in order.
    pub(super) fn report_down(&mut self, wire: usize, end: usize, events: &mut Vec<Event>) {
        let Wire { id, ends, flows, .. } = &mut self.wires[wire];
        let (at, flow) = (&mut ends[end], &mut flows[end]);
        let peer = at.peer;
        // The worker puts each before the one it had before.
        let returned = flow.waiting.drain(..).rev();
        events.extend(returned.map(|posting| Event::Returned { peer, posting: Box::new(posting) }));
        let lost = flow.abandon();
        let skip = at.rejected.len().saturating_sub(REJECTED_MAX);
        let tally = Tally {
            completed: at.counted,
            rejected: at.rejected.iter().copied().skip(skip).collect(),
        };
        let down = DownLane {
            peer,
            id: *id,
            number: at.number,
            cause: std::mem::take(&mut at.cause),
            culprit: at.culprit.take(),
            lost,
            tally,
        };
        let (engine, lost) = (at.engine, down.lost.len());
        let (seqs, completed) = (down.lost.first().map(|(seq, _)| *seq), down.tally.completed);
        let to = self.wires[wire].ends[1 - end].engine;
        if lost > 0 {
            *self.lossy_downs.entry((engine, to)).or_default() += 1;
        }
        let id = down.id;
        self.note(
            engine,
            4,
            format_args!("{id:?} reported down: {lost} lost from {seqs:?}, counted {completed}"),
        );
        events.push(Event::LaneDown(Box::new(down)));
    }
}
