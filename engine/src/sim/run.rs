//! One run: the order in which everything happens.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use super::Stats;
use super::agenda::Agenda;
use super::callers::Room;
use super::control::Pair;
use super::dice::Dice;
use super::node::Node;
use super::plans::Plan;
use super::scenario::Scenario;
use super::trace::Trace;
use crate::fabric::sim::{CloseAt, World};
use crate::ids::{Epoch, Incarnation};
use crate::worker::census::Census;

/// Longest sleep of an idle worker, as of the real one.
const SLEEP_US: u64 = 500_000;
/// How long after the troubles everything must be over: the longest deadlines, and what the promises
/// allow behind them.
const PATIENCE_US: u64 = 12_000_000;
/// Between two looks at rooms whose engine does nothing.
const AUDIT_US: u64 = 20_000;
/// How long tables may take to be empty once every room is released, beside what sessions take to come
/// back or to be given up.
const TIDY_US: u64 = 2_000_000;
/// Steps of a run that goes round in circles.
const STEPS_MAX: u64 = 3_000_000;

/// Something that is to happen, other than on a wire.
#[derive(Debug)]
pub(super) enum Task {
    Turn(usize),
    Open(usize),
    Grant(usize),
    Call(usize),
    Abort(usize),
    Connect(usize),
    SideUp { pair: usize, session: usize, side: usize },
    SideDown { pair: usize, session: usize, side: usize },
    Deliver { pair: usize, session: usize, from: usize },
    GiveUp { pair: usize, side: usize, life: u64 },
    Silence { pair: usize, side: usize, life: u64 },
    Dial(usize),
    LaneArrives { pair: usize, wire: usize, end: usize },
    Cut { wire: usize, end: usize },
    Trouble,
    TroubleOver,
    Resume(usize),
    Leave { node: usize, at_latest_us: u64 },
    Reborn(usize),
    Audit,
}

/// See the module.
pub(super) struct Run {
    pub(super) scenario: Scenario,
    pub(super) world: Rc<RefCell<World>>,
    pub(super) dice: Dice,
    agenda: Agenda<Task>,
    pub(super) now_us: u64,
    pub(super) nodes: Vec<Node>,
    /// The engine that is at each place now.
    pub(super) slots: Vec<usize>,
    pub(super) pairs: Vec<Pair>,
    pub(super) plans: Vec<Plan>,
    pub(super) rooms: Vec<Room>,
    pub(super) by_incarnation: BTreeMap<Incarnation, usize>,
    /// Rooms by receiving engine and epoch: the receiver's, and the sender's that was bound to it.
    pub(super) receivers: BTreeMap<(usize, Epoch), usize>,
    pub(super) senders: BTreeMap<(usize, Epoch), usize>,
    /// Nothing goes wrong any more.
    pub(super) is_over: bool,
    over_at_us: u64,
    released_at_us: Option<u64>,
    pub(super) stats: Stats,
}

impl Run {
    pub(super) fn new(seed: u64, scenario: &Scenario, traced: bool) -> Self {
        let mut dice = Dice::new(seed);
        let world =
            World::new(scenario.guarded, scenario.wire_faults(), dice.fork(), Trace::new(traced));
        let mut run = Self {
            scenario: scenario.clone(),
            world: Rc::new(RefCell::new(world)),
            dice,
            agenda: Agenda::new(),
            now_us: 0,
            nodes: Vec::new(),
            slots: Vec::new(),
            pairs: Vec::new(),
            plans: Vec::new(),
            rooms: Vec::new(),
            by_incarnation: BTreeMap::new(),
            receivers: BTreeMap::new(),
            senders: BTreeMap::new(),
            is_over: false,
            over_at_us: 0,
            released_at_us: None,
            stats: Stats::default(),
        };
        for slot in 0..scenario.prefill + scenario.decode {
            run.slots.push(usize::MAX);
            run.add_node(slot);
        }
        run.plan_rooms();
        let over_us = scenario.trouble_ms * 1000;
        run.later(over_us, Task::TroubleOver);
        run.later(3000, Task::Trouble);
        run.later(AUDIT_US, Task::Audit);
        run
    }

    /// An engine takes a place, and meets those on the other side.
    pub(super) fn add_node(&mut self, slot: usize) {
        let Scenario { prefill, layouts, fence_after_ms, frame_bytes, .. } = self.scenario;
        let unequal = if slot < prefill { 0 } else { layouts };
        let node = Node::new(&self.world, slot, unequal, fence_after_ms, frame_bytes);
        let index = self.nodes.len();
        self.by_incarnation.insert(node.incarnation, index);
        self.nodes.push(node);
        self.slots[slot] = index;
        let others = self.slots.clone();
        for (place, other) in others.into_iter().enumerate() {
            if other != usize::MAX && (place < prefill) != (slot < prefill) {
                let (sender, receiver) =
                    if slot < prefill { (index, other) } else { (other, index) };
                self.meet(sender, receiver);
            }
        }
        self.wake(index);
    }

    pub(super) fn later(&mut self, delay_us: u64, task: Task) {
        self.agenda.enter(self.now_us + delay_us, task);
    }

    pub(super) fn note(&mut self, engine: usize, key: u64, what: std::fmt::Arguments<'_>) {
        self.world.borrow_mut().trace.note(self.now_us, engine, key, what);
    }

    pub(super) fn trace(&self) -> String {
        self.world.try_borrow().map_or_else(|_| String::new(), |world| world.trace.text())
    }

    /// Plays until every room is over and every table empty.
    pub(super) fn play(&mut self) -> Result<Stats, String> {
        loop {
            let (task, wire) = (self.agenda.next_at(), self.world.borrow().next_at());
            let wire_first = wire.is_some_and(|wire| task.is_none_or(|task| wire <= task));
            let Some(at) = (if wire_first { wire } else { task }) else {
                return Err("nothing is left to happen".to_owned());
            };
            self.now_us = at;
            self.world.borrow_mut().now_us = at;
            self.stats.steps += 1;
            if wire_first {
                self.world.borrow_mut().step();
            } else if let Some(task) = self.agenda.take()
                && self.task(task)?
            {
                return Ok(self.finish());
            }
            let wakes = std::mem::take(&mut self.world.borrow_mut().wakes);
            for node in wakes {
                self.wake(node);
            }
            if let Some(what) = self.world.borrow_mut().violation.take() {
                return Err(what);
            }
            if self.stats.steps > STEPS_MAX {
                return Err("the run goes round in circles".to_owned());
            }
        }
    }

    fn finish(&mut self) -> Stats {
        let world = self.world.borrow();
        let chance = self.dice.fingerprint() ^ world.fingerprint().rotate_left(32);
        self.stats.hash = world.trace.hash() ^ chance;
        drop(world);
        self.stats.virtual_us = self.now_us;
        for node in 0..self.nodes.len() {
            self.count_worker(node);
        }
        self.stats.clone()
    }

    /// Adds a worker's counters; once, before it is gone.
    pub(super) fn count_worker(&mut self, node: usize) {
        if let Some(worker) = &self.nodes[node].worker {
            let counters = worker.counters();
            self.stats.replays += counters.frames_replayed;
            self.stats.fences += counters.fences;
            self.stats.late += counters.late_events;
            self.stats.lanes_lost += counters.lanes_lost;
        }
    }

    /// Does a task. Says whether the run is over.
    fn task(&mut self, task: Task) -> Result<bool, String> {
        match task {
            Task::Turn(node) => self.turn(node)?,
            Task::Open(plan) => self.open(plan),
            Task::Grant(plan) => self.grant(plan),
            Task::Call(room) => self.call(room),
            Task::Abort(room) => self.abort(room),
            Task::Connect(pair) => self.connect(pair),
            Task::SideUp { pair, session, side } => self.side_up(pair, session, side),
            Task::SideDown { pair, session, side } => self.side_down(pair, session, side),
            Task::Deliver { pair, session, from } => self.deliver(pair, session, from)?,
            Task::GiveUp { pair, side, life } => self.give_up(pair, side, life),
            Task::Silence { pair, side, life } => self.silence(pair, side, life),
            Task::Dial(pair) => self.dial(pair),
            Task::LaneArrives { pair, wire, end } => self.lane_arrives(pair, wire, end),
            Task::Cut { wire, end } => self.world.borrow_mut().cut(wire, CloseAt::One(end)),
            Task::Trouble => self.trouble(),
            Task::TroubleOver => {
                self.over_at_us = self.now_us;
                self.trouble_over();
            }
            Task::Resume(node) => self.resume(node),
            Task::Leave { node, at_latest_us } => self.leave(node, at_latest_us)?,
            Task::Reborn(slot) => self.reborn(slot),
            Task::Audit => return self.audit(),
        }
        Ok(false)
    }

    /// Lets a worker turn soon: something has come for it.
    pub(super) fn wake(&mut self, node: usize) {
        let at = self.now_us + self.dice.between(1, 60);
        self.turn_at(node, at);
    }

    fn turn_at(&mut self, node: usize, at_us: u64) {
        if at_us < self.nodes[node].turn_at_us {
            self.nodes[node].turn_at_us = at_us;
            self.agenda.enter(at_us, Task::Turn(node));
        }
    }

    fn turn(&mut self, index: usize) -> Result<(), String> {
        let now_us = self.now_us;
        let node = &mut self.nodes[index];
        if node.turn_at_us != now_us || node.stalled {
            return Ok(());
        }
        node.turn_at_us = u64::MAX;
        let clock = node.clock(now_us);
        let Some(worker) = &mut node.worker else { return Ok(()) };
        let progress = worker.turn(clock);
        let (due, backlog) = (worker.next_deadline(), worker.has_backlog());
        let skew_us = node.skew_us;
        if progress {
            self.note(index, 20, format_args!("turns"));
        }
        self.after_turn(index)?;
        let next = if progress {
            // Now and then a worker is descheduled for a while.
            let pause = !self.is_over && self.dice.chance(0.01);
            self.dice.between(1, if pause { 20_000 } else { 40 })
        } else {
            let due_us = due.map_or(SLEEP_US, |due| due.0.saturating_sub(now_us + skew_us));
            due_us.min(if backlog { 1000 } else { SLEEP_US }).max(1)
        };
        self.turn_at(index, now_us + next);
        Ok(())
    }

    /// What callers and the control plane of an engine see once it has turned.
    pub(super) fn after_turn(&mut self, node: usize) -> Result<(), String> {
        self.take_reports(node)?;
        self.pump(node);
        self.check_rooms(node)
    }

    /// Which rooms are not over, and what was not even begun.
    fn unfinished(&self) -> String {
        let mut text = "not over long after the troubles:".to_owned();
        for (index, room) in self.rooms.iter().enumerate() {
            if !room.released && !room.orphaned {
                text += &format!(" the {}'s handle {index} ({:?})", room.role, room.state);
            }
        }
        text
    }

    /// Looks at rooms whose engine may do nothing at all, and at whether the run is over.
    fn audit(&mut self) -> Result<bool, String> {
        self.later(AUDIT_US, Task::Audit);
        for node in 0..self.nodes.len() {
            if self.nodes[node].is_alive() && !self.nodes[node].stalled {
                self.check_bounds(node)?;
            }
        }
        if !self.is_over {
            return Ok(false);
        }
        let mine = |node: &Node| node.is_alive() && !node.for_ever;
        let left: usize =
            self.nodes.iter().filter(|node| mine(node)).map(|node| node.rooms.len()).sum();
        if left > 0 || self.plans_are_due() {
            if self.now_us > self.over_at_us + PATIENCE_US {
                return Err(self.unfinished());
            }
            return Ok(false);
        }
        let since = *self.released_at_us.get_or_insert(self.now_us);
        let census = |node: &Node| node.worker.as_ref().map(crate::worker::Worker::census);
        let untidy = |node: &&Node| mine(node) && census(node) != Some(Census::default());
        let untidy = self.nodes.iter().find(untidy);
        let settled = self.sessions_are_settled();
        if untidy.is_none() && settled {
            return self.farewell().map(|()| true);
        }
        let Scenario { grace_ms, silent_ms, .. } = self.scenario;
        if self.now_us > since + TIDY_US + 3000 * (grace_ms + silent_ms) {
            return Err(match untidy {
                Some(node) => {
                    let (name, census) = (node.incarnation, census(node));
                    format!("tables of engine {name} are not empty at the end: {census:?}")
                }
                None => {
                    format!("two engines do not find each other again: {}", self.sessions_text())
                }
            });
        }
        Ok(false)
    }
}
