//! The promises, checked after every turn of every engine.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::model;
use super::node::AUX_BYTES;
use super::run::{Run, Task};
use crate::ids::{Epoch, Micros, Role, RoomState};
use crate::room::cell::RoomCell;

/// How much later a sender lets a room's deadline pass than its receiver.
const LEAD_MS: u64 = 100;
/// How long it then waits for a verdict that it asks for.
const VERDICT_MS: u64 = 1000;
/// What turns, lanes that close and explanations take.
const SLACK_MS: u64 = 100;

impl Run {
    /// Looks at every room of an engine that is not released.
    pub(super) fn check_rooms(&mut self, node: usize) -> Result<(), String> {
        for index in self.nodes[node].rooms.clone() {
            self.check_state(index)?;
            if self.rooms[index].cell.is_released() {
                self.released(index)?;
            }
        }
        self.check_bounds(node)
    }

    fn check_state(&mut self, index: usize) -> Result<(), String> {
        let now = self.nodes[self.rooms[index].node].clock(self.now_us);
        let room = &mut self.rooms[index];
        let (before, after) = (room.state, room.cell.state());
        if before != after {
            let forward = !before.is_terminal() && (after.is_terminal() || after > before);
            if !forward {
                return Err(format!("handle {index} goes from {before:?} back to {after:?}"));
            }
            room.state = after;
        }
        if room.role == Role::Sender && room.bound_at.is_none() && room.cell.bound().is_some() {
            self.bound(index, now)?;
        }
        let room = &mut self.rooms[index];
        match (&room.verdict, room.cell.verdict()) {
            (None, Some(verdict)) => {
                room.verdict = Some(verdict.clone());
                room.ended_at = Some(now);
                self.judged(index)?;
            }
            (Some(before), Some(after)) if before != after => {
                return Err(format!("handle {index} changes its verdict"));
            }
            (Some(_), None) => return Err(format!("handle {index} loses its verdict")),
            _ => {}
        }
        Ok(())
    }

    /// A sender sees its grant.
    fn bound(&mut self, index: usize, now: Micros) -> Result<(), String> {
        let room = &mut self.rooms[index];
        let Some(bound) = room.cell.bound() else { return Ok(()) };
        let Some(&peer) = self.by_incarnation.get(&bound.peer) else {
            return Err(format!("handle {index} is bound to nobody"));
        };
        if room.peer.is_some_and(|wanted| wanted != peer) {
            return Err(format!(
                "handle {index} is bound to engine {peer}, which it did not ask for"
            ));
        }
        let epoch = bound.epoch;
        (room.bound_at, room.peer, room.epoch) = (Some(now), Some(peer), Some(epoch));
        let (node, id) = (room.node, room.id);
        if let Some(other) = self.senders.insert((peer, epoch), index) {
            return Err(format!("handles {other} and {index} are both bound to epoch {epoch}"));
        }
        let granted = self.receivers.get(&(peer, epoch)).map(|&other| &self.rooms[other]);
        if granted.is_none_or(|granted| granted.id != id || granted.peer != Some(node)) {
            return Err(format!("handle {index} is bound to an epoch that is not its room's"));
        }
        self.note(node, 50, format_args!("handle {index} is bound to engine {peer} epoch {epoch}"));
        let delay = self.dice.between(1, 3000);
        self.later(delay, Task::Call(index));
        Ok(())
    }

    /// A room has ended: is that so, and may it?
    fn judged(&mut self, index: usize) -> Result<(), String> {
        let room = &self.rooms[index];
        let (node, role) = (room.node, room.role);
        let text = match &room.verdict {
            Some(Err(failure)) => failure.kind.slug(),
            _ => "done",
        };
        *self.stats.ends.entry(text).or_default() += 1;
        self.note(node, 51, format_args!("the {role}'s handle {index} ends: {text}"));
        match (&self.rooms[index].verdict, role) {
            (Some(Ok(())), Role::Receiver) => self.check_landed(index)?,
            (Some(Ok(())), Role::Sender) => {
                let other = self.other_side(index).map(|other| &self.rooms[other]);
                let done = other.and_then(|other| other.cell.verdict()).is_some_and(Result::is_ok);
                if !done {
                    return Err(format!("sender's handle {index} is done, its receiver is not"));
                }
            }
            _ => self.check_failure(index)?,
        }
        self.check_agreement(index)
    }

    pub(super) fn other_side(&self, index: usize) -> Option<usize> {
        let room = &self.rooms[index];
        match room.role {
            Role::Sender => self.receivers.get(&(room.peer?, room.epoch?)).copied(),
            Role::Receiver => self.senders.get(&(room.node, room.epoch?)).copied(),
        }
    }

    /// Every byte that the sender counted is where it belongs, and nothing else was touched.
    fn check_landed(&self, index: usize) -> Result<(), String> {
        let room = &self.rooms[index];
        let Some(sender) = self.other_side(index).map(|sender| &self.rooms[sender]) else {
            return Err(format!("receiver's handle {index} is done, and nobody was bound to it"));
        };
        if !sender.finished {
            return Err(format!("receiver's handle {index} is done before its sender finished"));
        }
        let node = &self.nodes[room.node];
        let peer = &self.nodes[sender.node];
        let (pool, bytes) = (&node.pool, node.pool.layout.page_bytes());
        let pairing = crate::memory::pair_all(&[node.card()], &[peer.card()]);
        let slice = pairing.map_err(|error| error.to_string())?[0].local;
        let mut want: BTreeMap<(u32, u32, u32), Vec<u8>> = BTreeMap::new();
        for &(layer, plane, page, ref strips) in &sender.expected {
            let page = want.entry((layer, plane, page));
            let page = page.or_insert_with(|| vec![model::SENTINEL; bytes as usize]);
            model::paste(page, slice, strips);
        }
        let untouched = vec![model::SENTINEL; bytes as usize];
        let mut wrong = None;
        model::each_page(pool, &room.pages, |layer, plane, page| {
            let at = (layer, plane, page);
            let (is, want) = (model::read(pool, at), want.get(&at).unwrap_or(&untouched));
            if is != *want {
                let first = is.iter().zip(want).position(|(is, want)| is != want).unwrap_or(0);
                let what = match is[first] {
                    model::SENTINEL => "was not written",
                    model::POISON => "holds what came after the source's release",
                    0 => "holds filler or nothing",
                    _ => "holds something else",
                };
                wrong.get_or_insert_with(|| format!("byte {first} of page {at:?} {what}"));
            }
        });
        if let Some(wrong) = wrong {
            return Err(format!("receiver's handle {index} is done, but {wrong}"));
        }
        if room.cell.aux() != Some(&sender.aux) {
            return Err(format!("receiver's handle {index} is done with another aux row"));
        }
        if let Some(slot) = room.aux_slot {
            let mut row = vec![0; sender.aux.len()];
            let read = node.aux.read_at(slot * AUX_BYTES, &mut row);
            if read.is_err() || row != sender.aux {
                return Err(format!("the aux slot of handle {index} holds something else"));
            }
        }
        Ok(())
    }

    /// *Finished* is said when every frame has left: one that is filled up after its room was given up
    /// must not be of a room that is said to be finished.
    pub(super) fn check_left(&mut self, node: usize, to: usize, epoch: Epoch) {
        let mut world = self.world.borrow_mut();
        let left = world.not_left(node, to, epoch);
        if left > 0 {
            let text =
                format!("engine {node} says epoch {epoch} finished with {left} frames to leave");
            world.violation.get_or_insert(text);
        }
    }

    /// A room's end is reported to the control plane, once.
    pub(super) fn ended(&mut self, node: usize, cell: &Arc<RoomCell>) -> Result<(), String> {
        let same = |room: &&mut super::callers::Room| Arc::ptr_eq(&room.cell, cell);
        let Some(room) = self.rooms.iter_mut().find(same) else {
            return Err(format!("engine {node} ends a room that nobody opened"));
        };
        room.ended_notices += 1;
        if room.ended_notices > 1 {
            return Err(format!("engine {node} ends room {} twice", room.id));
        }
        Ok(())
    }

    /// A room's pages are the caller's again: it uses them at once.
    fn released(&mut self, index: usize) -> Result<(), String> {
        let room = &mut self.rooms[index];
        if room.verdict.is_none() {
            return Err(format!("handle {index} is released before it has ended"));
        }
        room.released = true;
        let (node, peer, epoch) = (room.node, room.peer, room.epoch);
        let (role, pages, slot) = (room.role, Arc::clone(&room.pages), room.aux_slot.take());
        let at = &mut self.nodes[node];
        at.rooms.retain(|&other| other != index);
        at.free.extend_from_slice(&pages);
        at.aux_free.extend(slot);
        let mut world = self.world.borrow_mut();
        match (role, peer, epoch) {
            (Role::Receiver, _, Some(epoch)) => {
                if let Some(target) = world.targets.get_mut(&(node, epoch)) {
                    target.released = true;
                }
            }
            (Role::Sender, Some(peer), Some(epoch)) => {
                world.sources_released.insert((peer, epoch));
            }
            _ => {}
        }
        drop(world);
        let with = if role == Role::Sender { model::POISON } else { model::SENTINEL };
        model::paint(&self.nodes[node].pool, &pages, with);
        self.note(node, 52, format_args!("the {role}'s handle {index} is released"));
        Ok(())
    }

    /// No room is live behind its deadline, none unreleased behind its fence.
    pub(super) fn check_bounds(&self, node: usize) -> Result<(), String> {
        let at = &self.nodes[node];
        let now = at.clock(self.now_us);
        let fence_ms = self.scenario.fence_after_ms;
        for &index in &at.rooms {
            let room = &self.rooms[index];
            // What is due while an engine is stopped is done when it goes on.
            let late = |due: Micros, more_ms: u64| {
                now > Micros(due.0.max(at.excused_us)).after_ms(more_ms + SLACK_MS)
            };
            match (room.ended_at, room.bound_at, room.role) {
                (Some(ended), _, _) if late(ended.after_ms(fence_ms), 0) => {
                    return Err(format!(
                        "handle {index} is not released {fence_ms} ms after its end"
                    ));
                }
                (None, None, _) if late(room.deadline, 0) => {
                    return Err(format!("handle {index} is live behind its deadline"));
                }
                (None, Some(bound), Role::Sender) => {
                    let granted =
                        self.other_side(index).map_or(0, |other| self.rooms[other].timeout_ms);
                    if late(bound.after_ms(granted + LEAD_MS), VERDICT_MS) {
                        return Err(format!("sender's handle {index} is live behind its deadline"));
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// What must be so when everything is over.
    pub(super) fn farewell(&self) -> Result<(), String> {
        for (index, room) in self.rooms.iter().enumerate() {
            if room.orphaned || self.nodes[room.node].for_ever {
                continue;
            }
            if room.verdict.is_none() || !room.released {
                return Err(format!("handle {index} is not over at the end"));
            }
            if self.nodes[room.node].is_alive() && room.ended_notices != 1 {
                let notices = room.ended_notices;
                return Err(format!("the end of handle {index} was reported {notices} times"));
            }
            let done = room.state == RoomState::Success;
            if self.scenario.must_succeed() && !done {
                return Err(format!("handle {index} failed though nothing went wrong"));
            }
        }
        Ok(())
    }
}
