//! Requests: rooms that one engine is to open and another to grant, in either order, each by the checks of
//! the public API.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;

use super::callers::Room;
use super::control::Life;
use super::model;
use super::node::AUX_BYTES;
use super::run::{Run, Task};
use crate::fabric::sim::Target;
use crate::ids::{Epoch, Role, RoomId, RoomState};
use crate::memory::PoolId;
use crate::room::cell::RoomCell;
use crate::worker::submit::{AuxSlot, GrantOrder, Submission};

/// Times a caller tries to open or to grant.
const TRIES: u32 = 12;

/// A request: a room that one engine is to open and another to grant.
pub(super) struct Plan {
    from: usize,
    to: usize,
    id: RoomId,
    pages: u64,
    /// The sender names the receiver.
    named: bool,
    checksum: bool,
    aux: bool,
    timeout_ms: u64,
    grant_timeout_ms: u64,
    open: Call,
    grant: Call,
    /// The request of the same id before it, which must be over on both sides.
    after: Option<usize>,
}

/// One side's part of a plan.
struct Call {
    tries: u32,
    room: Option<usize>,
}
impl Run {
    pub(super) fn plan_rooms(&mut self) {
        let scenario = self.scenario.clone();
        let faults = scenario.faults;
        for index in 0..scenario.rooms {
            let mut from = self.dice.pick(scenario.prefill);
            let mut to = scenario.prefill + self.dice.pick(scenario.decode);
            if scenario.both_ways && self.dice.chance(0.5) {
                std::mem::swap(&mut from, &mut to);
            }
            let id = RoomId(self.dice.between(1, scenario.ids));
            let hasty = self.dice.chance(faults.hasty);
            let timeout_ms = if hasty { (1, 40) } else { (300, 2000) };
            let after = self.plans.iter().rposition(|plan| plan.id == id);
            let one_sided = self.dice.chance(faults.one_sided);
            let silent_side = self.dice.pick(2);
            let call = |side| Call {
                tries: if one_sided && silent_side == side { 0 } else { TRIES },
                room: None,
            };
            let calm = scenario.must_succeed();
            let plan = Plan {
                from,
                to,
                id,
                pages: self.dice.between(0, 6),
                named: calm || self.dice.chance(0.7),
                checksum: self.dice.chance(0.3),
                aux: self.dice.chance(0.5),
                timeout_ms: if calm {
                    60_000
                } else {
                    self.dice.between(timeout_ms.0, timeout_ms.1)
                },
                grant_timeout_ms: if calm {
                    60_000
                } else {
                    self.dice.between(timeout_ms.0, timeout_ms.1)
                },
                open: call(0),
                grant: call(1),
                after: after.filter(|_| calm),
            };
            self.plans.push(plan);
            let first = self.dice.between(0, scenario.rush_us);
            let apart = self.dice.between(0, 8000);
            let (open, grant) = if self.dice.chance(0.5) { (0, apart) } else { (apart, 0) };
            self.later(first + open, Task::Open(index));
            self.later(first + grant, Task::Grant(index));
        }
    }

    /// Whether a caller is still about to do something.
    pub(super) fn plans_are_due(&self) -> bool {
        self.scenario.must_succeed()
            && self.plans.iter().any(|plan| plan.open.room.is_none() || plan.grant.room.is_none())
    }

    fn try_again(&mut self, plan: usize, task: Task) {
        let call = match task {
            Task::Open(_) => &mut self.plans[plan].open,
            _ => &mut self.plans[plan].grant,
        };
        let patient = self.scenario.must_succeed();
        if patient || !self.is_over && call.tries > 1 {
            call.tries -= u32::from(!patient);
            let delay = self.dice.between(500, 30_000);
            self.later(delay, task);
        } else {
            call.tries = 0;
        }
    }

    /// Whether an id is taken on an engine, as the registry says it.
    fn is_taken(&self, node: usize, role: Role, id: RoomId, peer: Option<usize>) -> bool {
        self.nodes[node].rooms.iter().map(|&room| &self.rooms[room]).any(|room| {
            let same = room.role == role && room.id == id && room.cell.holds_its_id();
            same && (room.peer.is_none() || peer.is_none() || room.peer == peer)
        })
    }

    fn is_after(&self, plan: usize) -> bool {
        let Some(earlier) = self.plans[plan].after.map(|after| &self.plans[after]) else {
            return true;
        };
        [&earlier.open, &earlier.grant]
            .iter()
            .all(|call| call.room.is_some_and(|room| self.rooms[room].verdict.is_some()))
    }

    fn take_pages(&mut self, node: usize, count: u64) -> Option<Arc<[u32]>> {
        let free = &mut self.nodes[node].free;
        if free.len() < count as usize {
            return None;
        }
        self.dice.shuffle(free);
        Some(free.split_off(free.len() - count as usize).into())
    }

    fn new_room(&mut self, room: Room) -> usize {
        let index = self.rooms.len();
        self.nodes[room.node].rooms.push(index);
        if self.dice.chance(self.scenario.faults.abort) {
            let delay = self.dice.between(0, 60_000);
            self.later(delay, Task::Abort(index));
        }
        self.rooms.push(room);
        index
    }

    fn room(&self, plan: usize, node: usize, role: Role, pages: Arc<[u32]>, ms: u64) -> Room {
        let at = &self.nodes[node];
        at.unreleased.fetch_add(1, Ordering::Relaxed);
        let (id, now) = (self.plans[plan].id, at.clock(self.now_us));
        Room {
            node,
            role,
            id,
            cell: RoomCell::new(id, role, now.0, &at.unreleased),
            peer: None,
            pages,
            epoch: None,
            deadline: now.after_ms(ms),
            timeout_ms: ms,
            aborted: false,
            finished: false,
            aux: Bytes::new(),
            todo: None,
            expected: Vec::new(),
            aux_slot: None,
            state: RoomState::Bootstrapping,
            verdict: None,
            bound_at: None,
            ended_at: None,
            ended_notices: 0,
            released: false,
            orphaned: false,
        }
    }

    pub(super) fn submit(&mut self, node: usize, submission: Submission) {
        if self.nodes[node].submissions.try_send(submission).is_err() {
            let text = format!("the simulation overran the queue of engine {node}");
            self.world.borrow_mut().violation.get_or_insert(text);
        }
        self.wake(node);
    }

    pub(super) fn open(&mut self, plan: usize) {
        let Plan { from, to, id, pages, named, grant_timeout_ms, ref open, .. } = self.plans[plan];
        if open.tries == 0 {
            return;
        }
        let (node, peer) = (self.slots[from], named.then_some(self.slots[to]));
        let at = &self.nodes[node];
        let refused = !at.is_running()
            || at.draining
            || peer.is_some_and(|peer| at.drained.contains(&peer))
            || self.is_taken(node, Role::Sender, id, peer)
            || !self.is_after(plan);
        let Some(pages) = (if refused { None } else { self.take_pages(node, pages) }) else {
            return self.try_again(plan, Task::Open(plan));
        };
        let mut room = self.room(plan, node, Role::Sender, pages, grant_timeout_ms);
        room.peer = peer;
        let (pool, uid) = (&self.nodes[node].pool, self.rooms.len() as u64);
        let (bytes, first) = (pool.layout.page_bytes(), pool.layout.layers.start);
        model::each_page(pool, &room.pages, |layer, plane, page| {
            let content = model::content(uid, first + layer, plane, page, bytes);
            model::write(pool, (layer, plane, page), &content);
        });
        let (cell, deadline) = (Arc::clone(&room.cell), room.deadline);
        let peer = peer.map(|peer| self.nodes[peer].incarnation);
        let index = self.new_room(room);
        self.plans[plan].open.room = Some(index);
        self.note(node, 40, format_args!("opens room {id} (handle {index}, to {peer:?})"));
        self.submit(node, Submission::Open { cell, peer, deadline });
    }

    pub(super) fn grant(&mut self, plan: usize) {
        let Plan { from, to, id, pages, checksum, aux, timeout_ms, ref grant, .. } =
            self.plans[plan];
        if grant.tries == 0 {
            return;
        }
        let (node, peer) = (self.slots[to], self.slots[from]);
        let at = &self.nodes[node];
        let knows = self.pair_of(node, peer).is_some_and(|(pair, side)| {
            matches!(self.pairs[pair].sides[side].life, Life::Up | Life::Down)
        });
        let refused = !at.is_running()
            || !knows
            || at.draining
            || self.nodes[peer].draining
            || at.drained.contains(&peer)
            || self.is_taken(node, Role::Receiver, id, Some(peer))
            || !self.is_after(plan);
        let Some(pages) = (if refused { None } else { self.take_pages(node, pages) }) else {
            return self.try_again(plan, Task::Grant(plan));
        };
        let Some(pairing) = self.pairing(node, peer) else { return };
        let mut room = self.room(plan, node, Role::Receiver, pages, timeout_ms);
        let at = &mut self.nodes[node];
        model::paint(&at.pool, &room.pages, model::SENTINEL);
        let epoch = Epoch(at.next_epoch);
        at.next_epoch += 1;
        let slot = if aux { at.aux_free.pop() } else { None };
        (room.peer, room.epoch, room.aux_slot) = (Some(peer), Some(epoch), slot);
        let target = Target {
            map: Arc::clone(&at.pool.map),
            pages: Arc::clone(&room.pages),
            slice: pairing.local,
            planes: pairing.planes,
            first_layer: pairing.first_layer,
            released: false,
        };
        self.world.borrow_mut().targets.insert((node, epoch), target);
        let aux = slot.map(|slot| AuxSlot {
            region: at.aux.clone(),
            offset: slot * AUX_BYTES,
            len: AUX_BYTES,
        });
        let order = GrantOrder {
            cell: Arc::clone(&room.cell),
            peer: self.nodes[peer].incarnation,
            epoch,
            deadline: room.deadline,
            pools: vec![(PoolId::FIRST, Arc::clone(&room.pages))],
            aux,
            aux_bytes: AUX_BYTES as u32,
            note: Bytes::new(),
            checksum,
        };
        let index = self.new_room(room);
        self.receivers.insert((node, epoch), index);
        self.plans[plan].grant.room = Some(index);
        self.note(
            node,
            41,
            format_args!("grants room {id} epoch {epoch} (handle {index}) to engine {peer}"),
        );
        self.submit(node, Submission::Grant(Box::new(order)));
    }
}
