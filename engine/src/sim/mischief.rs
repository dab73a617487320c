//! What goes wrong beside single frames: lanes, ports, sessions, whole engines.

use super::control::Life;
use super::run::{Run, Task};
use crate::fabric::sim::{CloseAt, WireFaults};
use crate::failure::FailureKind;

impl Run {
    /// A moment for trouble of every kind.
    pub(super) fn trouble(&mut self) {
        if self.is_over {
            return;
        }
        let next = self.dice.between(500, self.scenario.pace_us);
        self.later(next, Task::Trouble);
        let faults = self.scenario.faults;
        let pair = self.dice.pick(self.pairs.len());
        let nodes = self.pairs[pair].nodes;
        let node = nodes[self.dice.pick(2)];
        let side = self.dice.pick(2);
        if self.dice.chance(faults.lane_down) {
            let standing = self.world.borrow().standing(nodes);
            if !standing.is_empty() {
                let wire = standing[self.dice.pick(standing.len())];
                let ends = [CloseAt::One(0), CloseAt::One(1), CloseAt::Both];
                let at = ends[self.dice.pick(3)];
                self.note(nodes[0], 60, format_args!("TROUBLE: wire {wire} is cut: {at:?}"));
                self.world.borrow_mut().cut(wire, at);
            }
        }
        if self.dice.chance(faults.freeze) {
            let standing = self.world.borrow().standing(nodes);
            if !standing.is_empty() {
                let wire = standing[self.dice.pick(standing.len())];
                let longest = [5_000, 60_000, 1_500_000][self.dice.pick(3)];
                let for_us = self.dice.between(1000, longest);
                self.note(nodes[0], 61, format_args!("TROUBLE: wire {wire} frozen {for_us} µs"));
                self.world.borrow_mut().freeze(wire, for_us);
            }
        }
        if self.dice.chance(faults.port_flap) {
            self.note(nodes[0], 62, format_args!("TROUBLE: all wires of {nodes:?} are cut"));
            let standing = self.world.borrow().standing(nodes);
            for wire in standing {
                self.world.borrow_mut().cut(wire, CloseAt::Both);
            }
        }
        if self.dice.chance(faults.control_loss) {
            self.break_session(pair);
        }
        if self.dice.chance(faults.give_up) && self.pairs[pair].sides[side].life == Life::Up {
            let life = self.pairs[pair].sides[side].lives;
            self.silence(pair, side, life);
        }
        if self.dice.chance(faults.clock_jump) && self.nodes[node].is_alive() {
            let jump_us = self.dice.between(1000, 400_000);
            self.note(node, 63, format_args!("TROUBLE: its clock jumps {jump_us} µs"));
            let at = &mut self.nodes[node];
            at.skew_us += jump_us;
            (at.jumped, at.excused_us) = (true, self.now_us + at.skew_us);
            self.wake(node);
        }
        if self.dice.chance(faults.drain) && self.nodes[node].is_running() {
            let other = if node == nodes[0] { nodes[1] } else { nodes[0] };
            let peer = if self.dice.chance(0.7) { Some(other) } else { None };
            self.drain(node, peer);
        }
        if self.dice.chance(faults.stall) && self.nodes[node].is_running() {
            self.stall(node);
        }
        if self.dice.chance(faults.crash) && self.nodes[node].is_alive() {
            self.note(node, 64, format_args!("TROUBLE: it crashes"));
            self.crash(node);
        }
        if self.dice.chance(faults.shutdown) && self.nodes[node].is_running() {
            self.note(node, 65, format_args!("TROUBLE: it is shut down"));
            self.stop(node);
            let at_latest_us = self.now_us + 1_000_000;
            self.later(1000, Task::Leave { node, at_latest_us });
        }
    }

    /// An engine does nothing for a while; its peers may lose patience.
    fn stall(&mut self, node: usize) {
        let for_ever = self.dice.chance(self.scenario.faults.stall_for_ever);
        let longest = [20_000, 200_000, 1_500_000][self.dice.pick(3)];
        let for_us = self.dice.between(1000, longest);
        self.note(
            node,
            66,
            format_args!("TROUBLE: it stops for {for_us} µs, for ever: {for_ever}"),
        );
        self.nodes[node].stalled = true;
        self.nodes[node].for_ever = for_ever;
        if !for_ever {
            self.later(for_us, Task::Resume(node));
        }
        let silent_us = self.scenario.silent_ms * 1000;
        for at in 0..self.nodes[node].pairs.len() {
            let pair = self.nodes[node].pairs[at];
            let side = usize::from(self.pairs[pair].nodes[0] == node);
            let life = self.pairs[pair].sides[side].lives;
            if for_ever || for_us > silent_us {
                let delay = silent_us + self.dice.between(0, silent_us / 6);
                self.later(delay, Task::Silence { pair, side, life });
            }
        }
    }

    pub(super) fn resume(&mut self, node: usize) {
        let at = &mut self.nodes[node];
        if !at.stalled {
            return;
        }
        at.stalled = false;
        at.turn_at_us = u64::MAX;
        at.excused_us = self.now_us + at.skew_us;
        self.note(node, 67, format_args!("goes on"));
        self.wake(node);
    }

    /// An engine is gone without a word.
    fn crash(&mut self, node: usize) {
        self.bury(node);
        for at in 0..self.nodes[node].pairs.len() {
            let pair = self.nodes[node].pairs[at];
            self.break_session(pair);
        }
        let delay = self.dice.between(1000, self.scenario.grace_ms * 2000);
        self.later(delay, Task::Reborn(self.nodes[node].slot));
    }

    /// An engine's memory is gone, and what it had to say.
    fn bury(&mut self, node: usize) {
        self.count_worker(node);
        let at = &mut self.nodes[node];
        at.worker = None;
        at.stalled = false;
        for index in std::mem::take(&mut at.rooms) {
            self.rooms[index].orphaned = true;
        }
        self.world.borrow_mut().end_engine(node);
    }

    /// An engine that was told to stop says goodbye once its rooms are released.
    pub(super) fn leave(&mut self, node: usize, at_latest_us: u64) -> Result<(), String> {
        let now_us = self.now_us;
        let at = &mut self.nodes[node];
        let clock = at.clock(now_us);
        let Some(worker) = &mut at.worker else { return Ok(()) };
        if at.stalled || !worker.is_stopped() && now_us < at_latest_us {
            let delay = 2000;
            self.later(delay, Task::Leave { node, at_latest_us });
            return Ok(());
        }
        worker.close(clock, "the engine was shut down");
        self.take_reports(node)?;
        self.pump(node);
        self.check_rooms(node)?;
        for at in 0..self.nodes[node].pairs.len() {
            let pair = self.nodes[node].pairs[at];
            // The farewell comes behind everything said before, or not at all.
            self.say_goodbye(pair, node);
        }
        self.bury(node);
        let delay = self.dice.between(1000, self.scenario.grace_ms * 2000);
        self.later(delay, Task::Reborn(self.nodes[node].slot));
        Ok(())
    }

    /// Another engine comes in the place of one that is gone.
    pub(super) fn reborn(&mut self, slot: usize) {
        let old = self.slots[slot];
        if self.nodes[old].is_alive() {
            return;
        }
        for at in 0..self.nodes[old].pairs.len() {
            let pair = self.nodes[old].pairs[at];
            let side = usize::from(self.pairs[pair].nodes[0] == old);
            if matches!(self.pairs[pair].sides[side].life, Life::Up | Life::Down) {
                self.gone(pair, side, FailureKind::PeerRestarted);
            }
        }
        self.add_node(slot);
    }

    /// From here on nothing goes wrong any more.
    pub(super) fn trouble_over(&mut self) {
        self.is_over = true;
        let mut world = self.world.borrow_mut();
        let WireFaults { delay_us, reap_us, window, .. } = world.faults;
        world.faults = WireFaults { delay_us, reap_us, window, ..WireFaults::default() };
        drop(world);
        for node in 0..self.nodes.len() {
            if self.nodes[node].stalled && !self.nodes[node].for_ever {
                self.resume(node);
            }
        }
        self.note(0, 68, format_args!("TROUBLE IS OVER"));
    }
}
