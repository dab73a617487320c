//! What all engines of a run share: time, chance, wires, and who may read and write which pages.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use super::super::{Event, Gate, PeerIndex, RoomTag};
use super::lanes::{EndState, Wire};
use super::memory::Memory;
use crate::failure::{FailureKind, Landed};
use crate::ids::Epoch;
use crate::memory::{PageMap, PageSlice, Pool};
use crate::plan::{Pieces, Strip, Strips};
use crate::sim::agenda::Agenda;
use crate::sim::dice::Dice;
use crate::sim::trace::Trace;
use crate::wire::frame::{DataFrame, RejectReason};

/// What goes wrong on wires, as ratios of the frames unless said otherwise.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WireFaults {
    /// Longest usual delay of a step on a lane, in microseconds.
    pub(crate) delay_us: u64,
    /// Longest time that closing an end takes, in microseconds.
    pub(crate) reap_us: u64,
    /// Steps that take a hundred times as long.
    pub(crate) slow: f32,
    /// Late copies of completions, of rooms that are over.
    pub(crate) duplicate: f32,
    /// Posts that are accepted and not begun for long.
    pub(crate) partial_post: f32,
    /// Most frames a lane takes, begun and not.
    pub(crate) window: usize,
    /// Error completions, by kind.
    pub(crate) local_protection: f32,
    pub(crate) remote_access: f32,
    pub(crate) receiver_not_ready: f32,
    pub(crate) retry_exceeded: f32,
}

/// Something that is due on a wire. `end` is where the frames concerned come from.
#[derive(Debug)]
pub(super) enum Step {
    /// The sending end goes on: it begins a frame, or reads a part of one.
    Transmit { wire: usize, end: usize },
    /// The next part of what is on the way arrives.
    Arrive { wire: usize, end: usize },
    /// An answer to a frame arrives back at `end`.
    Answer { wire: usize, end: usize },
    /// An end finds out that it has to close.
    Close { wire: usize, end: usize, cause: &'static str },
    /// An end that closes is quiet.
    Reaped { wire: usize, end: usize },
    /// A completion of a room that is over is said once more.
    Stale { engine: usize, event: Box<Event> },
}

/// What an engine will find at its next poll.
#[derive(Debug)]
pub(super) enum Note {
    Event(Event),
    /// A write has landed; it is to be counted.
    Landed {
        wire: usize,
        end: usize,
        frame: DataFrame,
    },
    /// An end is down.
    Down {
        wire: usize,
        end: usize,
    },
}

#[derive(Debug)]
pub(super) struct EngineWorld {
    pub(super) alive: bool,
    pub(super) notes: VecDeque<Note>,
    /// Ends that stand or close.
    pub(super) ends: Vec<(usize, usize)>,
    pub(super) retracting: Vec<(PeerIndex, RoomTag)>,
    pub(super) revoking: Vec<(PeerIndex, u32, Epoch)>,
}

/// Pages granted to a room, and how frames are laid out in them.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    pub(crate) map: Arc<PageMap>,
    pub(crate) pages: Arc<[u32]>,
    pub(crate) slice: PageSlice,
    pub(crate) planes: u32,
    pub(crate) first_layer: u32,
    /// The room is over and its pages are somebody else's.
    pub(crate) released: bool,
}

impl Target {
    pub(super) fn strips(&self, frame: &DataFrame) -> Strips {
        let pieces = Pieces {
            layer: u32::from(frame.layer) - self.first_layer,
            planes: self.planes,
            count: frame.count,
            first: frame.first,
            len: frame.pieces,
        };
        let (map, pages) = (Arc::clone(&self.map), Arc::clone(&self.pages));
        Strips::new(map, pages, frame.at as usize, self.slice, pieces)
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) now_us: u64,
    pub(crate) guarded: bool,
    pub(crate) faults: WireFaults,
    pub(crate) trace: Trace,
    pub(crate) violation: Option<String>,
    /// Engines for which something has come.
    pub(crate) wakes: Vec<usize>,
    /// Pages granted, by receiving engine and epoch.
    pub(crate) targets: BTreeMap<(usize, Epoch), Target>,
    /// Rooms whose sources are their callers' again, by receiving engine and epoch.
    pub(crate) sources_released: BTreeSet<(usize, Epoch)>,
    /// Rooms whose write ended in an error that they are to blame for.
    pub(crate) culprits: BTreeSet<(usize, Epoch, &'static str)>,
    /// Lane ends that went down with writes unanswered, by both engines.
    pub(crate) lossy_downs: BTreeMap<(usize, usize), u32>,
    pub(super) dice: Dice,
    pub(super) memory: Memory,
    pub(super) agenda: Agenda<Step>,
    pub(super) engines: Vec<EngineWorld>,
    pub(super) wires: Vec<Wire>,
}

impl World {
    pub(crate) fn new(guarded: bool, faults: WireFaults, dice: Dice, trace: Trace) -> Self {
        Self {
            now_us: 0,
            guarded,
            faults,
            trace,
            violation: None,
            wakes: Vec::new(),
            targets: BTreeMap::new(),
            sources_released: BTreeSet::new(),
            culprits: BTreeSet::new(),
            lossy_downs: BTreeMap::new(),
            dice,
            memory: Memory::default(),
            agenda: Agenda::new(),
            engines: Vec::new(),
            wires: Vec::new(),
        }
    }

    pub(crate) fn add_engine(&mut self, pool: Pool) -> usize {
        self.memory.add(pool);
        self.engines.push(EngineWorld {
            alive: true,
            notes: VecDeque::new(),
            ends: Vec::new(),
            retracting: Vec::new(),
            revoking: Vec::new(),
        });
        self.engines.len() - 1
    }

    pub(crate) fn next_at(&self) -> Option<u64> {
        self.agenda.next_at()
    }

    pub(crate) fn fingerprint(&self) -> u64 {
        self.dice.fingerprint()
    }

    /// Does the next thing that is due on a wire.
    pub(crate) fn step(&mut self) {
        match self.agenda.take() {
            Some(Step::Transmit { wire, end }) => self.transmit(wire, end),
            Some(Step::Arrive { wire, end }) => self.arrive(wire, end),
            Some(Step::Answer { wire, end }) => self.answered(wire, end),
            Some(Step::Close { wire, end, cause }) => self.begin_close(wire, end, cause, None),
            Some(Step::Reaped { wire, end }) => self.reaped(wire, end),
            Some(Step::Stale { engine, event }) => self.tell(engine, Note::Event(*event)),
            None => {}
        }
    }

    pub(super) fn violate(&mut self, what: String) {
        self.violation.get_or_insert(what);
    }

    pub(super) fn later(&mut self, delay_us: u64, step: Step) {
        self.agenda.enter(self.now_us + delay_us, step);
    }

    /// How long a step on a wire takes.
    pub(super) fn delay_us(&mut self) -> u64 {
        let usual = self.dice.between(1, self.faults.delay_us);
        if self.dice.chance(self.faults.slow) { usual * 100 } else { usual }
    }

    pub(super) fn tell(&mut self, engine: usize, note: Note) {
        if self.engines[engine].alive {
            self.engines[engine].notes.push_back(note);
            self.wakes.push(engine);
        }
    }

    pub(super) fn note(&mut self, engine: usize, key: u64, what: std::fmt::Arguments<'_>) {
        self.trace.note(self.now_us, engine, key, what);
    }

    pub(super) fn poll(
        &mut self,
        engine: usize,
        gate: &mut impl Gate,
        events: &mut Vec<Event>,
    ) -> bool {
        let before = events.len();
        let mut progress = false;
        if self.guarded {
            for (wire, end) in self.engines[engine].ends.clone() {
                progress |= self.receive(wire, end, gate);
            }
        }
        // Completions are polled in batches; the rest waits.
        let batch = self.dice.between(1, 64);
        for _ in 0..batch {
            let Some(note) = self.engines[engine].notes.pop_front() else { break };
            progress = true;
            match note {
                Note::Event(event) => events.push(event),
                Note::Landed { wire, end, frame } => self.count(wire, end, &frame, gate),
                Note::Down { wire, end } => self.report_down(wire, end, events),
            }
        }
        self.settle(engine, events);
        progress || events.len() > before
    }

    /// Says which rooms that were given up nothing touches any more.
    fn settle(&mut self, engine: usize, events: &mut Vec<Event>) {
        let mut retracting = std::mem::take(&mut self.engines[engine].retracting);
        retracting.retain(|&(peer, tag)| {
            let busy = self.stop_reading(engine, peer, tag);
            if !busy {
                events.push(Event::SourceQuiet { tag });
                self.repeat_late(engine, tag);
            }
            busy
        });
        self.engines[engine].retracting.append(&mut retracting);
        for (peer, slot, epoch) in std::mem::take(&mut self.engines[engine].revoking) {
            self.stop_placing(engine, peer, slot, epoch);
            events.push(Event::TargetQuiet { slot, epoch });
            if self.dice.chance(self.faults.duplicate) {
                let delay = self.dice.between(100, 50_000);
                let event = Box::new(Event::TargetQuiet { slot, epoch });
                self.later(delay, Step::Stale { engine, event });
            }
        }
    }

    /// Has some completion of a room that is over said again, late.
    fn repeat_late(&mut self, engine: usize, tag: RoomTag) {
        for _ in 0..4 {
            if !self.dice.chance(self.faults.duplicate) {
                continue;
            }
            let landed = Landed { page_writes: 1, bytes: 64 };
            let event = match self.dice.pick(4) {
                0 => Event::Sent { tag },
                1 => Event::Acked { tag, landed },
                2 => Event::Rejected { tag, lane: 0, reason: RejectReason::Revoked },
                _ => Event::SourceQuiet { tag },
            };
            let delay = self.dice.between(100, 50_000);
            self.later(delay, Step::Stale { engine, event: Box::new(event) });
        }
    }

    /// Checks that a room's sources may still be read.
    pub(super) fn check_source(&mut self, to: usize, frame: &DataFrame) {
        if self.sources_released.contains(&(to, frame.epoch)) {
            self.violate(format!(
                "sources of the room of engine {to} epoch {} are read after their release",
                frame.epoch
            ));
        }
    }

    /// Where a frame goes, if it may go there.
    pub(super) fn target_strips(&mut self, engine: usize, frame: &DataFrame) -> Vec<Strip> {
        let epoch = frame.epoch;
        match self.targets.get(&(engine, epoch)) {
            Some(target) if !target.released => target.strips(frame).collect(),
            known => {
                let what = if known.is_some() { "were released" } else { "were never granted" };
                let text =
                    format!("bytes of epoch {epoch} land in pages of engine {engine} that {what}");
                self.violate(text);
                Vec::new()
            }
        }
    }

    pub(super) fn blame(&mut self, to: usize, epoch: Epoch, kind: FailureKind) {
        self.culprits.insert((to, epoch, kind.slug()));
    }

    /// An engine is gone, with its memory and its ends.
    pub(crate) fn end_engine(&mut self, engine: usize) {
        for (wire, end) in std::mem::take(&mut self.engines[engine].ends) {
            self.take_down(wire, end);
        }
        for wire in 0..self.wires.len() {
            for end in 0..2 {
                let at = &self.wires[wire].ends[end];
                if at.engine == engine && at.state == EndState::Expected {
                    self.abandon(wire, end);
                }
            }
        }
        self.engines[engine].alive = false;
        self.engines[engine].notes.clear();
    }
}
