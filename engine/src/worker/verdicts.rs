//! Verdicts of rooms that are gone from the tables, kept for peers that ask again.

use std::collections::{HashMap, VecDeque};

use crate::ids::{Epoch, Incarnation, Role};
use crate::wire::message::Message;

/// Verdicts kept. A peer asks again within a reconnect of the end; at 10,000 rooms a second this
/// covers a second and a half.
const VERDICTS: usize = 1 << 14;

/// The last verdicts, by whom they were told and which end of the room this engine was.
#[derive(Debug, Default)]
pub(super) struct Verdicts {
    order: VecDeque<(Incarnation, Epoch, Role)>,
    by_room: HashMap<(Incarnation, Epoch, Role), Message>,
}

impl Verdicts {
    pub(super) fn keep(&mut self, peer: Incarnation, epoch: Epoch, role: Role, message: Message) {
        if self.by_room.insert((peer, epoch, role), message).is_none() {
            self.order.push_back((peer, epoch, role));
        }
        if self.order.len() > VERDICTS
            && let Some(oldest) = self.order.pop_front()
        {
            self.by_room.remove(&oldest);
        }
    }

    pub(super) fn find(&self, peer: Incarnation, epoch: Epoch, role: Role) -> Option<&Message> {
        self.by_room.get(&(peer, epoch, role))
    }

    /// Everything that a peer was told, oldest first.
    pub(super) fn of(&self, peer: Incarnation) -> impl Iterator<Item = &Message> {
        self.order
            .iter()
            .filter(move |(told, _, _)| *told == peer)
            .filter_map(|key| self.by_room.get(key))
    }
}
