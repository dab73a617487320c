//! What every room's handle can tell.

use std::sync::Arc;
use std::sync::Weak;

use crate::api::engine::Shared;
use crate::failure::{Failure, FailureKind, Landed};
use crate::ids::{Epoch, Incarnation, Role, RoomId, RoomState};
use crate::peers::FabricInfo;
use crate::room::cell::RoomCell;
use crate::worker::submit::Submission;

/// A room as its caller sees it. Nothing here waits. A state is read from a few atomics; a report also
/// looks the peer up.
pub trait RoomHandle {
    /// Where the room stands, as SGLang's `KVPoll` numbers it.
    fn state(&self) -> RoomState;

    /// Why the room failed, once it has.
    fn failure(&self) -> Option<&Failure>;

    /// Whether nothing is read from or placed in the room's pages any more. False while it is live.
    fn is_released(&self) -> bool;

    /// What is known of the room now; of a room that has ended, all there is to know.
    fn report(&self) -> RoomReport;

    /// Gives the room up. It fails with [`FailureKind::Aborted`] on both sides unless it has ended or,
    /// for a sender that has finished, the receiver's verdict says otherwise.
    fn abort(&self, reason: &str);
}

/// Reads the states of many rooms, in order, into `states` (which is cleared first).
pub fn poll_many<'a, H: RoomHandle + ?Sized + 'a>(
    rooms: impl IntoIterator<Item = &'a H>,
    states: &mut Vec<RoomState>,
) {
    states.clear();
    states.extend(rooms.into_iter().map(RoomHandle::state));
}

/// The least of the rooms' states, as schedulers reduce them over ranks: one `Failed` wins, `Success`
/// needs all. `None` of no rooms.
pub fn min_state<'a, H: RoomHandle + ?Sized + 'a>(
    rooms: impl IntoIterator<Item = &'a H>,
) -> Option<RoomState> {
    rooms.into_iter().map(RoomHandle::state).min()
}

/// What happened to a room.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RoomReport {
    /// The room.
    pub room: RoomId,
    /// Its epoch, once granted.
    pub epoch: Option<Epoch>,
    /// Which end this is.
    pub role: Role,
    /// The other engine, once known.
    pub peer: Option<Incarnation>,
    /// Where the other engine is.
    pub peer_addr: Option<String>,
    /// What carries the pages, once the peer is known.
    pub fabric: Option<FabricInfo>,
    /// Where it stands.
    pub state: RoomState,
    /// Why it failed, if it has.
    pub failure: Option<Failure>,
    /// Granted pages over all pools, counted as positions.
    pub granted_pages: u64,
    /// Placed (receiver) or acknowledged as placed (sender).
    pub landed: Landed,
    /// Chunks wholly posted (sender).
    pub chunks: u64,
    /// Microseconds from opening to the grant.
    pub waited_us: u64,
    /// Microseconds from the grant to the end (or now).
    pub granted_us: u64,
    /// Microseconds from the first write or arrival to the end (or now).
    pub transfer_us: u64,
}

/// The part that both kinds of handle share. Dropping it gives up a room that has not ended.
#[derive(Debug)]
pub(super) struct HandleCore {
    pub(super) cell: Arc<RoomCell>,
    pub(super) shared: Weak<Shared>,
}

impl HandleCore {
    pub(super) fn report(&self) -> RoomReport {
        let cell = &self.cell;
        let bound = cell.bound();
        let shared = self.shared.upgrade();
        let now_us = shared.as_ref().map_or(0, |shared| shared.now().0);
        let (waited_us, granted_us, transfer_us) = cell.timings_us(now_us);
        let fabric = bound.zip(shared).and_then(|(bound, shared)| shared.fabric_of(bound.peer));
        RoomReport {
            room: cell.room,
            epoch: bound.map(|bound| bound.epoch),
            role: cell.role,
            peer: bound.map(|bound| bound.peer),
            peer_addr: bound.map(|bound| bound.peer_addr.clone()),
            fabric,
            state: cell.state(),
            failure: self.failure().cloned(),
            granted_pages: bound
                .map_or(0, |bound| bound.pools.iter().map(|pool| u64::from(pool.positions)).sum()),
            landed: cell.landed(),
            chunks: cell.chunks(),
            waited_us,
            granted_us,
            transfer_us,
        }
    }

    pub(super) fn failure(&self) -> Option<&Failure> {
        self.cell.verdict().and_then(|verdict| verdict.as_ref().err())
    }

    pub(super) fn abort(&self, cause: String) {
        if self.cell.state().is_terminal() {
            return;
        }
        if let Some(shared) = self.shared.upgrade() {
            let cell = Arc::clone(&self.cell);
            shared.submit_soon(Submission::Abort { cell, kind: FailureKind::Aborted, cause });
        }
    }

    pub(super) async fn verdict(&self) -> Result<(), Failure> {
        self.cell.wait_for(|cell| cell.verdict().cloned()).await
    }

    pub(super) async fn released(&self) {
        self.cell.wait_for(|cell| cell.is_released().then_some(())).await;
    }
}

impl Drop for HandleCore {
    fn drop(&mut self) {
        self.cell.give_up();
        self.abort("its handle was dropped before it ended".to_owned());
        if let Some(shared) = self.shared.upgrade() {
            shared.registry.tidy(self.cell.role, self.cell.room);
        }
    }
}
