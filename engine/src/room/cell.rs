//! What a room's handle and the worker share. The worker writes, handles read; reading never waits.

#[cfg(all(test, kvferry_loom))]
mod loom_tests;

use std::sync::Arc;

use bytes::Bytes;

use crate::failure::{Failure, Landed};
use crate::ids::{Epoch, Incarnation, Role, RoomId, RoomState};
use crate::memory::PoolId;
use crate::sync::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Notify, OnceLock, Ordering, fence};

/// See the module.
#[derive(Debug)]
pub(crate) struct RoomCell {
    pub(crate) room: RoomId,
    pub(crate) role: Role,
    /// The worker's slot of the room, once it has one.
    pub(crate) slot: AtomicU32,
    /// Chunks handed in that are not wholly posted.
    pub(crate) queued_chunks: AtomicU32,
    /// Until the verdict is there, which is the end.
    state: AtomicU8,
    /// Nothing is read from or placed in the room's pages any more.
    released: AtomicBool,
    page_writes: AtomicU64,
    bytes: AtomicU64,
    chunks: AtomicU64,
    opened_us: u64,
    granted_us: AtomicU64,
    first_us: AtomicU64,
    ended_us: AtomicU64,
    bound: OnceLock<Bound>,
    verdict: OnceLock<Result<(), Failure>>,
    aux: OnceLock<Bytes>,
    changed: Notify,
    /// Somebody waits for room to hand in a chunk.
    wants_room: AtomicBool,
    /// Its handle was dropped: nobody can ask for it any more, and its id may be used again.
    given_up: AtomicBool,
    unreleased: Unreleased,
    /// Whether this room is counted there.
    counted: AtomicBool,
}

/// An engine's count of rooms that are not released.
pub(crate) type Unreleased = Arc<AtomicU32>;

/// What a room learns when both sides are known to each other.
#[derive(Clone, Debug)]
pub(crate) struct Bound {
    pub(crate) peer: Incarnation,
    pub(crate) peer_addr: String,
    pub(crate) epoch: Epoch,
    pub(crate) note: Bytes,
    /// Whether the receiver compares a checksum.
    pub(crate) checksum: bool,
    /// Longest aux row that the receiver takes.
    pub(crate) aux_bytes: u32,
    pub(crate) pools: Vec<BoundPool>,
}

/// What may be written of one pool.
#[derive(Clone, Debug)]
pub(crate) struct BoundPool {
    pub(crate) pool: PoolId,
    /// Positions granted.
    pub(crate) positions: u32,
    /// Layers that both sides hold.
    pub(crate) layers: std::ops::Range<u32>,
    pub(crate) planes: u32,
}

const NEVER: u64 = u64::MAX;
pub(crate) const NO_SLOT: u32 = u32::MAX;

impl RoomCell {
    /// A room that was counted in `unreleased` and is until it is released.
    pub(crate) fn new(room: RoomId, role: Role, now_us: u64, unreleased: &Unreleased) -> Arc<Self> {
        Arc::new(Self {
            room,
            role,
            slot: AtomicU32::new(NO_SLOT),
            queued_chunks: AtomicU32::new(0),
            state: AtomicU8::new(RoomState::Bootstrapping as u8),
            released: AtomicBool::new(false),
            page_writes: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            chunks: AtomicU64::new(0),
            opened_us: now_us,
            granted_us: AtomicU64::new(NEVER),
            first_us: AtomicU64::new(NEVER),
            ended_us: AtomicU64::new(NEVER),
            bound: OnceLock::new(),
            verdict: OnceLock::new(),
            aux: OnceLock::new(),
            changed: Notify::new(),
            wants_room: AtomicBool::new(false),
            given_up: AtomicBool::new(false),
            unreleased: Arc::clone(unreleased),
            counted: AtomicBool::new(true),
        })
    }

    pub(crate) fn state(&self) -> RoomState {
        // The verdict is the end, so that whoever sees one of the two sees the other.
        match self.verdict.get() {
            Some(Ok(())) => RoomState::Success,
            Some(Err(_)) => RoomState::Failed,
            None => RoomState::from_u8(self.state.load(Ordering::Acquire)),
        }
    }

    /// Whether the room's id is taken by it.
    pub(crate) fn holds_its_id(&self) -> bool {
        !self.given_up.load(Ordering::Acquire) && !self.state().is_terminal()
    }

    pub(crate) fn give_up(&self) {
        self.given_up.store(true, Ordering::Release);
    }

    pub(crate) fn is_released(&self) -> bool {
        self.released.load(Ordering::Acquire)
    }

    pub(crate) fn bound(&self) -> Option<&Bound> {
        self.bound.get()
    }

    pub(crate) fn verdict(&self) -> Option<&Result<(), Failure>> {
        self.verdict.get()
    }

    pub(crate) fn aux(&self) -> Option<&Bytes> {
        self.aux.get()
    }

    pub(crate) fn landed(&self) -> Landed {
        Landed {
            page_writes: self.page_writes.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
        }
    }

    pub(crate) fn chunks(&self) -> u64 {
        self.chunks.load(Ordering::Relaxed)
    }

    /// Waits until `ready` says so. The check comes after enlisting, so no change is missed.
    pub(crate) async fn wait_for<T>(&self, ready: impl Fn(&Self) -> Option<T>) -> T {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            if let Some(value) = ready(self) {
                return value;
            }
            changed.await;
        }
    }

    /// As [`RoomCell::wait_for`], for room in the chunk queue: asks the worker to say so.
    pub(crate) async fn wait_for_room<T>(&self, ready: impl Fn(&Self) -> Option<T>) -> T {
        self.wait_for(|cell| {
            cell.wants_room.store(true, Ordering::Relaxed);
            // Pairs with the fence in `chunk_dropped`: either `ready` sees that a chunk was dropped, or
            // the worker sees that somebody waits for it.
            fence(Ordering::SeqCst);
            ready(cell)
        })
        .await
    }

    /// Microseconds (opened to granted, granted to end, first byte to end), as far as they have come.
    pub(crate) fn timings_us(&self, now_us: u64) -> (u64, u64, u64) {
        let at = |time: &AtomicU64| match time.load(Ordering::Relaxed) {
            NEVER => None,
            time => Some(time),
        };
        let end = at(&self.ended_us).unwrap_or(now_us);
        let granted = at(&self.granted_us);
        let since = |from: Option<u64>| from.map_or(0, |from| end.saturating_sub(from));
        (
            granted.unwrap_or(end).saturating_sub(self.opened_us),
            since(granted),
            since(at(&self.first_us)),
        )
    }

    /// Takes a place in the chunk queue, if fewer than `limit` are taken, and says how many were. One
    /// that is not to be had is not counted even for a moment: a writer that looked then would wait for
    /// nothing.
    pub(crate) fn take_place(&self, limit: u32) -> Option<u32> {
        let add = |queued| (queued < limit).then(|| queued + 1);
        self.queued_chunks.fetch_update(Ordering::Acquire, Ordering::Relaxed, add).ok()
    }

    // What follows is the worker's.

    pub(crate) fn bind(&self, bound: Bound, now_us: u64) {
        self.granted_us.store(now_us, Ordering::Relaxed);
        if self.bound.set(bound).is_ok() {
            self.changed.notify_waiters();
        }
    }

    /// Shows the state that the room's core is in; the core only moves forward. An end is not shown: its
    /// verdict does that.
    pub(crate) fn advance(&self, state: RoomState) {
        if !state.is_terminal() && self.state.load(Ordering::Relaxed) != state as u8 {
            self.state.store(state as u8, Ordering::Release);
            self.changed.notify_waiters();
        }
    }

    pub(crate) fn count(&self, landed: Landed) {
        self.page_writes.store(landed.page_writes, Ordering::Relaxed);
        self.bytes.store(landed.bytes, Ordering::Relaxed);
    }

    pub(crate) fn mark_first(&self, now_us: u64) {
        let _ = self.first_us.compare_exchange(NEVER, now_us, Ordering::Relaxed, Ordering::Relaxed);
    }

    pub(crate) fn chunk_posted(&self) {
        self.chunks.fetch_add(1, Ordering::Relaxed);
        self.chunk_dropped();
    }

    /// A chunk waits no longer, posted or not; or its place is given back by who took it.
    pub(crate) fn chunk_dropped(&self) {
        // Released: whoever finds it waiting no longer finds it among the posted, if it was.
        self.queued_chunks.fetch_sub(1, Ordering::Release);
        fence(Ordering::SeqCst);
        if self.wants_room.load(Ordering::Relaxed) && self.wants_room.swap(false, Ordering::Relaxed)
        {
            self.changed.notify_waiters();
        }
    }

    pub(crate) fn keep_aux(&self, aux: Bytes) {
        let _ = self.aux.set(aux);
    }

    /// Ends the room. Only the first verdict counts.
    pub(crate) fn end(&self, verdict: Result<(), Failure>, now_us: u64) {
        let _ = self.ended_us.compare_exchange(NEVER, now_us, Ordering::Relaxed, Ordering::Relaxed);
        if self.verdict.set(verdict).is_ok() {
            self.changed.notify_waiters();
        }
    }

    pub(crate) fn release(&self) {
        if self.counted.swap(false, Ordering::Relaxed) {
            // Counted out first: whoever sees the release may open another room in its place.
            self.unreleased.fetch_sub(1, Ordering::Relaxed);
            self.released.store(true, Ordering::Release);
            self.changed.notify_waiters();
        }
    }
}
