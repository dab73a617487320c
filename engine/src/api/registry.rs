//! Which room ids are live, so that one is not opened twice.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::ids::{Incarnation, Role, RoomId};
use crate::room::cell::RoomCell;

/// Places for entries that are kept when there are none.
const ENTRIES_KEPT: usize = 1024;

type Entry = (Option<Incarnation>, Weak<RoomCell>);

/// Rooms by id. Touched when a room is opened and when its handle is dropped.
#[derive(Debug, Default)]
pub(super) struct Registry(Mutex<HashMap<(Role, RoomId), Vec<Entry>>>);

impl Registry {
    /// Enters new rooms of one id, unless a live one stands in their way: of the same peer, or (for
    /// senders) of whichever peer grants.
    pub(super) fn enter(
        &self,
        role: Role,
        room: RoomId,
        rooms: &[(Option<Incarnation>, Arc<RoomCell>)],
    ) -> bool {
        let mut table = self.lock();
        let entries = table.entry((role, room)).or_default();
        entries.retain(|(_, cell)| is_live(cell));
        let clash = entries.iter().any(|(held, _)| {
            rooms.iter().any(|(peer, _)| held.is_none() || peer.is_none() || held == peer)
        });
        if !clash {
            entries.extend(rooms.iter().map(|(peer, cell)| (*peer, Arc::downgrade(cell))));
        }
        !clash
    }

    /// Forgets what is not live of an id.
    pub(super) fn tidy(&self, role: Role, room: RoomId) {
        let mut table = self.lock();
        if let Some(entries) = table.get_mut(&(role, room)) {
            entries.retain(|(_, cell)| is_live(cell));
            if entries.is_empty() {
                table.remove(&(role, room));
            }
        }
        // A burst of rooms leaves no table of its size behind.
        if table.capacity() > ENTRIES_KEPT && table.len() < table.capacity() / 8 {
            table.shrink_to_fit();
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<(Role, RoomId), Vec<Entry>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_live(cell: &Weak<RoomCell>) -> bool {
    cell.upgrade().is_some_and(|cell| cell.holds_its_id())
}
