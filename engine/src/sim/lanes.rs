//! Lanes as the control plane makes them: dialed while a session stands, handed to both ends.

use super::control::{Item, Life};
use super::run::{Run, Task};
use crate::fabric::sim::{EndState, Link as SimLink};
use crate::fabric::{Link, NewLane};
use crate::ids::LaneId;
use crate::worker::Worker;
use crate::worker::mail::ToWorker;

impl Run {
    pub(super) fn dial_later(&mut self, pair: usize) {
        if !std::mem::replace(&mut self.pairs[pair].dial_due, true) {
            let delay = self.dice.between(100, 10_000);
            self.later(delay, Task::Dial(pair));
        }
    }

    /// Dials the lanes that are missing.
    pub(super) fn dial(&mut self, pair: usize) {
        self.pairs[pair].dial_due = false;
        let nodes = self.pairs[pair].nodes;
        let Some(session) = self.standing_session(pair) else { return };
        if nodes.iter().any(|&node| !self.nodes[node].is_running()) {
            return self.dial_later(pair);
        }
        let standing = self.world.borrow().whole(nodes);
        let longest = if self.dice.chance(0.2) { 40_000 } else { 3000 };
        for _ in standing..self.scenario.lanes {
            let (wire, _) = self.world.borrow_mut().add_wire(nodes);
            // A receiver that cannot refuse a write must have its end up before the sender writes, and
            // the sender must have heard before that what the receiver said before it was.
            if self.scenario.guarded {
                let delay = self.dice.between(10, longest);
                self.later(delay, Task::LaneArrives { pair, wire, end: 0 });
            } else {
                self.pairs[pair].unsaid_lanes.push((wire, session));
            }
            let delay = self.dice.between(10, longest);
            self.later(delay, Task::LaneArrives { pair, wire, end: 1 });
        }
    }

    pub(super) fn lane_arrives(&mut self, pair: usize, wire: usize, end: usize) {
        let node = self.pairs[pair].nodes[end];
        let peer = self.nodes[self.pairs[pair].nodes[1 - end]].incarnation;
        if self.world.borrow().end_state(wire, end) != EndState::Expected {
            return;
        }
        let life = self.pairs[pair].sides[end].life;
        if !self.nodes[node].is_alive() || !matches!(life, Life::Up | Life::Down) {
            return self.world.borrow_mut().abandon(wire, end);
        }
        let at = &mut self.nodes[node];
        let number = at.next_lane;
        at.next_lane += 1;
        at.lanes.insert(number, (wire, end));
        let link = Link::Sim(SimLink { wire, end });
        let id: LaneId = self.world.borrow().wire_id(wire);
        self.mail(node, ToWorker::LaneUp { peer, lane: NewLane { id, number, link, say: None } });
        // Some do not stand for long.
        if !self.is_over && self.dice.chance(self.scenario.faults.lane_down * 0.3) {
            let delay = self.dice.between(100, 10_000);
            self.later(delay, Task::Cut { wire, end });
        }
    }

    /// Says lanes to the sending side once they are up at the receiving side, behind everything that the
    /// receiving side said before that.
    pub(super) fn say_lanes(&mut self, pair: usize) {
        let receiver = self.pairs[pair].nodes[1];
        let backlog = self.nodes[receiver].worker.as_ref().is_none_or(Worker::has_backlog);
        for (wire, session) in std::mem::take(&mut self.pairs[pair].unsaid_lanes) {
            let state = self.world.borrow().end_state(wire, 1);
            let stands = self.pairs[pair].sides[1].session == Some(session);
            if !stands || matches!(state, EndState::Down | EndState::Never | EndState::Closing) {
                self.world.borrow_mut().abandon(wire, 0);
            } else if state == EndState::Up && !backlog {
                self.send(pair, 1, Item::Lane(wire));
            } else {
                self.pairs[pair].unsaid_lanes.push((wire, session));
            }
        }
    }

    /// A side that gives the other up forgets the lanes it had not adopted.
    pub(super) fn abandon_lanes(&mut self, pair: usize, side: usize) {
        let nodes = self.pairs[pair].nodes;
        let on_way: Vec<(usize, usize)> = self.nodes[nodes[side]].lanes.values().copied().collect();
        let expected = self.world.borrow().expected(nodes, side);
        for wire in expected {
            // One that is in the worker's mail is refused there.
            if !on_way.contains(&(wire, side)) {
                self.world.borrow_mut().abandon(wire, side);
            }
        }
    }

    pub(super) fn lane_reported_down(&mut self, node: usize, lane: u16) -> Result<(), String> {
        let Some((wire, end)) = self.nodes[node].lanes.remove(&lane) else {
            return Err(format!("engine {node} reports lane {lane} down, which it does not have"));
        };
        self.note(node, 35, format_args!("reports lane {lane} down"));
        let refused = self.world.borrow().end_state(wire, end) == EndState::Expected;
        if refused {
            self.world.borrow_mut().abandon(wire, end);
        }
        let pairs = self.nodes[node].pairs.clone();
        pairs.into_iter().for_each(|pair| self.dial_later(pair));
        Ok(())
    }
}
