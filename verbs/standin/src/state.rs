//! The state of a world, behind its one lock, and which work is next.

use std::time::Instant;

use crate::device::Device;
use crate::options::Mode;
use crate::qp::Qp;
use crate::script::{CallRule, Rule};

/// Numbered things. A number is never given twice.
#[derive(Debug)]
pub(crate) struct Table<T> {
    first: u32,
    items: Vec<Option<T>>,
    alive: u32,
}

impl<T> Table<T> {
    pub(crate) const fn new(first: u32) -> Self {
        Self { first, items: Vec::new(), alive: 0 }
    }

    pub(crate) fn next_number(&self) -> u32 {
        self.first + self.items.len() as u32
    }

    pub(crate) fn insert(&mut self, item: T) -> u32 {
        let number = self.next_number();
        self.items.push(Some(item));
        self.alive += 1;
        number
    }

    pub(crate) fn remove(&mut self, number: u32) -> Option<T> {
        let item = self.items.get_mut(number.checked_sub(self.first)? as usize)?.take()?;
        self.alive -= 1;
        Some(item)
    }

    pub(crate) fn get(&self, number: u32) -> Option<&T> {
        self.items.get(number.checked_sub(self.first)? as usize)?.as_ref()
    }

    pub(crate) fn get_mut(&mut self, number: u32) -> Option<&mut T> {
        self.items.get_mut(number.checked_sub(self.first)? as usize)?.as_mut()
    }

    pub(crate) const fn alive(&self) -> u32 {
        self.alive
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        (self.first..).zip(&self.items).filter_map(|(number, item)| Some((number, item.as_ref()?)))
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.items.iter_mut().flatten()
    }
}

/// Names a QP of the world: numbers are a device's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct QpRef {
    pub(crate) device: usize,
    pub(crate) qp_num: u32,
}

pub(crate) struct State {
    pub(crate) devices: Vec<Device>,
    pub(crate) rules: Vec<Rule>,
    pub(crate) call_rules: Vec<CallRule>,
    /// QPs with work that was not finished when it was posted.
    pub(crate) waiting: Vec<QpRef>,
    pub(crate) dice: fastrand::Rng,
    /// Destructions refused since something was still in use.
    pub(crate) refused_destructions: u64,
    pub(crate) clock_runs: bool,
    /// When time last executed a deferred request.
    pub(crate) last_tick: Instant,
}

impl State {
    pub(crate) fn qp(&self, at: QpRef) -> Option<&Qp> {
        self.devices[at.device].qps.get(at.qp_num).map(|qp| &**qp)
    }

    pub(crate) fn qp_mut(&mut self, at: QpRef) -> Option<&mut Qp> {
        self.devices[at.device].qps.get_mut(at.qp_num).map(|qp| &mut **qp)
    }

    /// Something was posted on a QP: executes it, or leaves it for later.
    pub(crate) fn kick(&mut self, at: QpRef) {
        if self.devices[at.device].options.mode == Mode::Immediate {
            while self.run_one(at) {}
        }
        self.note(at);
    }

    /// Remembers a QP that has unfinished work.
    fn note(&mut self, at: QpRef) {
        let Some(qp) = self.qp_mut(at) else { return };
        if qp.has_work() && !std::mem::replace(&mut qp.is_noted, true) {
            self.waiting.push(at);
        }
    }

    /// Something changed that work may have waited for.
    pub(crate) fn push_along(&mut self) {
        if self.waiting.is_empty() {
            return;
        }
        let now = Instant::now();
        for at in self.waiting.clone() {
            if self.devices[at.device].options.mode == Mode::Immediate {
                while self.run_one(at) {}
            }
            self.give_up_if_late(at, || now);
        }
        self.forget_finished();
    }

    /// Executes up to `requests` deferred requests, of QPs drawn by the dice; how many it was.
    pub(crate) fn step(&mut self, requests: usize) -> usize {
        let mut able = self.waiting.clone();
        able.retain(|at| self.devices[at.device].options.mode != Mode::Immediate);
        let mut executed = 0;
        while executed < requests && !able.is_empty() {
            let drawn = self.dice.usize(..able.len());
            if self.run_one(able[drawn]) {
                executed += 1;
            } else {
                able.swap_remove(drawn);
            }
        }
        self.forget_finished();
        executed
    }

    /// What a poll moves along.
    pub(crate) fn poll_moves(&mut self) {
        let per_poll = self.devices.iter().map(|device| match device.options.mode {
            Mode::Immediate => 0,
            Mode::Deferred { per_poll, .. } => per_poll,
        });
        let per_poll = per_poll.max().unwrap_or(0);
        self.step(per_poll);
        self.push_along();
    }

    /// What time moves along: one deferred request, and what has waited long enough.
    pub(crate) fn tick(&mut self, now: Instant) {
        let idle = self.waiting.iter().filter_map(|&at| self.idle_wake(at)).min();
        if idle.is_some_and(|idle| idle <= now) {
            self.last_tick = now;
            self.step(1);
        }
        self.push_along();
    }

    fn forget_finished(&mut self) {
        let mut waiting = std::mem::take(&mut self.waiting);
        waiting.retain(|&at| {
            let Some(qp) = self.qp_mut(at) else { return false };
            qp.is_noted = qp.has_work();
            qp.is_noted
        });
        // Nothing was noted meanwhile; the list keeps its memory.
        self.waiting = waiting;
    }

    /// Completes what has waited for an answer or a receive until now.
    pub(crate) fn expire_all(&mut self) {
        for at in self.waiting.clone() {
            if self.deadline(at).is_some() {
                self.give_up(at);
            }
        }
        self.forget_finished();
    }

    /// When a QP has waited long enough; a script that holds it holds its time as well.
    pub(crate) fn deadline(&self, at: QpRef) -> Option<Instant> {
        let qp = self.qp(at).filter(|qp| !qp.is_held && !self.devices[at.device].fatal)?;
        qp.wait.until()
    }

    fn idle_wake(&self, at: QpRef) -> Option<Instant> {
        match self.devices[at.device].options.mode {
            Mode::Deferred { idle: Some(idle), .. } if self.qp(at)?.is_able() => {
                Some(self.last_tick + idle)
            }
            _ => None,
        }
    }

    /// When somebody has to look again though nobody polls.
    pub(crate) fn next_wake(&self) -> Option<Instant> {
        let wakes = self
            .waiting
            .iter()
            .filter_map(|&at| [self.deadline(at), self.idle_wake(at)].into_iter().flatten().min());
        wakes.min()
    }

    /// Everything that is alive, for people.
    pub(crate) fn leaks(&self) -> Vec<String> {
        let mut leaks = Vec::new();
        for device in &self.devices {
            let name = &device.name;
            let kinds = [
                ("open context", device.contexts.alive()),
                ("protection domain", device.pds.alive()),
                ("memory region", device.mrs.alive()),
                ("completion channel", device.channels.alive()),
                ("completion queue", device.cqs.alive()),
                ("shared receive queue", device.srqs.alive()),
            ];
            for (kind, count) in kinds.into_iter().filter(|(_, count)| *count > 0) {
                leaks.push(format!("{name}: {count} × {kind}"));
            }
            for (qp_num, qp) in device.qps.iter() {
                leaks.push(format!("{name}: QP {qp_num:#x} in state {}", qp.state));
            }
        }
        leaks
    }
}
