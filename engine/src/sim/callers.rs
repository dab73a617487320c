//! The callers' part: rooms opened and granted in either order, written in pieces, finished, given up.
//! They do what the public API does, with its checks, and no more.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;

use super::model;
use super::node::{AUX_BYTES, Node};
use super::run::{Run, Task};
use crate::failure::{Failure, FailureKind};
use crate::ids::{Epoch, Micros, Role, RoomId, RoomState};
use crate::memory::{Pairing, PoolId, pair_all};
use crate::room::cell::RoomCell;
use crate::worker::submit::{Chunk, Submission};

/// Chunks of a room that wait to be posted.
const QUEUED_CHUNKS: u32 = 4;
/// A handle of a room, and what is known of it.
pub(super) struct Room {
    pub(super) node: usize,
    pub(super) role: Role,
    pub(super) id: RoomId,
    pub(super) cell: Arc<RoomCell>,
    /// The engine at the other end, as far as it is known.
    pub(super) peer: Option<usize>,
    /// Source or granted pages.
    pub(super) pages: Arc<[u32]>,
    /// Receiver: always. Sender: once bound.
    pub(super) epoch: Option<Epoch>,
    /// Of the grant (receiver, by its clock) or for one (sender).
    pub(super) deadline: Micros,
    pub(super) timeout_ms: u64,
    pub(super) aborted: bool,
    pub(super) finished: bool,
    pub(super) aux: Bytes,
    /// What is still to be written: layers and positions.
    pub(super) todo: Option<VecDeque<(Range<u32>, Range<u32>)>>,
    /// What must be in the receiver's pages when all has landed: layer, plane, page, and its strips.
    pub(super) expected: Vec<(u32, u32, u32, Vec<u8>)>,
    pub(super) aux_slot: Option<usize>,
    // What was seen of it.
    pub(super) state: RoomState,
    pub(super) verdict: Option<Result<(), Failure>>,
    pub(super) bound_at: Option<Micros>,
    pub(super) ended_at: Option<Micros>,
    pub(super) ended_notices: u32,
    pub(super) released: bool,
    /// Its engine is gone, and with it everything it might have said.
    pub(super) orphaned: bool,
}

impl Run {
    /// What one engine has in common with another, as the one sees it.
    pub(super) fn pairing(&self, node: usize, peer: usize) -> Option<Pairing> {
        let card = Node::card;
        pair_all(&[card(&self.nodes[node])], &[card(&self.nodes[peer])]).ok()?.pop()
    }

    /// A sender's caller goes on: the next chunk, or the finish.
    pub(super) fn call(&mut self, index: usize) {
        let room = &self.rooms[index];
        let (node, over) = (room.node, room.cell.state().is_terminal() || room.finished);
        let Some(bound) = room.cell.bound().filter(|_| !over).cloned() else { return };
        if !self.nodes[node].is_running() {
            let delay = self.dice.between(1000, 10_000);
            return self.later(delay, Task::Call(index));
        }
        if self.rooms[index].todo.is_none() {
            let pool = &bound.pools[0];
            let sources = self.rooms[index].pages.len();
            let positions = if sources == 0 { 0 } else { pool.positions };
            self.rooms[index].todo = Some(self.cut_up(pool.layers.clone(), positions));
        }
        let room = &mut self.rooms[index];
        let next = room.todo.as_mut().and_then(VecDeque::pop_front);
        match next {
            Some(part) if room.cell.queued_chunks.load(Ordering::SeqCst) >= QUEUED_CHUNKS => {
                room.todo.get_or_insert_default().push_front(part);
            }
            Some((layers, positions)) => self.write(index, layers, positions),
            None => self.finish_room(index),
        }
        let slow = !self.scenario.must_succeed() && self.dice.chance(0.05);
        let delay = self.dice.between(0, if slow { 40_000 } else { 1500 });
        self.later(delay, Task::Call(index));
    }

    /// Cuts layers × positions into chunks, in any order; some rooms do not write all.
    fn cut_up(&mut self, layers: Range<u32>, positions: u32) -> VecDeque<(Range<u32>, Range<u32>)> {
        let mut parts = Vec::new();
        let mut layer = layers.start;
        while layer < layers.end && positions > 0 {
            let layer_end = self.dice.between(u64::from(layer) + 1, u64::from(layers.end)) as u32;
            let mut position = 0;
            while position < positions {
                let end = self.dice.between(u64::from(position) + 1, u64::from(positions)) as u32;
                if !self.dice.chance(0.1) {
                    parts.push((layer..layer_end, position..end));
                }
                position = end;
            }
            layer = layer_end;
        }
        self.dice.shuffle(&mut parts);
        parts.into()
    }

    fn write(&mut self, index: usize, layers: Range<u32>, positions: Range<u32>) {
        let room = &self.rooms[index];
        let (node, peer, epoch) = (room.node, room.peer, room.epoch);
        let (Some(peer), Some(epoch)) = (peer, epoch) else { return };
        let Some(pairing) = self.pairing(node, peer) else { return };
        let sources = room.pages.clone();
        let src: Arc<[u32]> =
            positions.clone().map(|_| sources[self.dice.pick(sources.len())]).collect();
        let Some(granted) = self.receivers.get(&(peer, epoch)).map(|&other| &self.rooms[other])
        else {
            return;
        };
        let granted = Arc::clone(&granted.pages);
        let theirs = self.nodes[peer].pool.layout.layers.start;
        let page_bytes = self.nodes[node].pool.layout.page_bytes();
        for layer in layers.clone() {
            for plane in 0..pairing.planes {
                for (at, position) in positions.clone().enumerate() {
                    let page = model::content(index as u64, layer, plane, src[at], page_bytes);
                    let bytes = model::cut(&page, pairing.local);
                    let to = granted[position as usize];
                    self.rooms[index].expected.push((layer - theirs, plane, to, bytes));
                }
            }
        }
        let cell = Arc::clone(&self.rooms[index].cell);
        cell.queued_chunks.fetch_add(1, Ordering::SeqCst);
        self.note(node, 42, format_args!("writes {layers:?} × {positions:?} of handle {index}"));
        let chunk = Chunk { pool: PoolId::FIRST, layers, src, at: positions.start };
        self.submit(node, Submission::Write { cell, chunk });
    }

    fn finish_room(&mut self, index: usize) {
        let length = self.dice.pick(AUX_BYTES + 1);
        let room = &mut self.rooms[index];
        room.finished = true;
        room.aux = (0..length).map(|byte| (byte + index) as u8).collect();
        let (node, cell, aux) = (room.node, Arc::clone(&room.cell), room.aux.clone());
        self.note(node, 43, format_args!("finishes handle {index}"));
        self.submit(node, Submission::Finish { cell, aux });
    }

    pub(super) fn abort(&mut self, index: usize) {
        let room = &mut self.rooms[index];
        if room.cell.state().is_terminal() || !self.nodes[room.node].is_running() {
            return;
        }
        room.aborted = true;
        let (node, cell) = (room.node, Arc::clone(&room.cell));
        self.note(node, 44, format_args!("gives handle {index} up"));
        let (kind, cause) = (FailureKind::Aborted, "a caller's whim".to_owned());
        self.submit(node, Submission::Abort { cell, kind, cause });
    }

    pub(super) fn drain(&mut self, node: usize, peer: Option<usize>) {
        let at = &mut self.nodes[node];
        match peer {
            None => at.draining = true,
            Some(peer) => at.drained.push(peer),
        }
        self.note(node, 45, format_args!("drains {peer:?}"));
        let peer = peer.map(|peer| self.nodes[peer].incarnation);
        self.submit(node, Submission::Drain { peer });
    }

    pub(super) fn stop(&mut self, node: usize) {
        self.nodes[node].draining = true;
        self.nodes[node].stopping = true;
        self.submit(node, Submission::Stop);
    }
}
