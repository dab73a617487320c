//! The decode side of a room.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::handle::{HandleCore, RoomHandle, RoomReport};
use crate::failure::Failure;
use crate::ids::{Incarnation, RoomId, RoomState};
use crate::memory::{PoolId, RegionRangeError};
use crate::wire::message::{AUX_BYTES_MAX, GRANT_NOTE_BYTES_MAX, GRANT_PAGES_MAX};
use crate::worker::submit::AuxSlot;

/// A grant to be given: which of this engine's pages a room may be written to.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct GrantSpec {
    /// The room.
    pub room: RoomId,
    /// Pages by pool; the sender writes them by their position in these lists.
    pub pools: Vec<(PoolId, Arc<[u32]>)>,
    /// Where the aux row is put, besides being handed out with the end. Without a slot any row of up
    /// to [`AUX_BYTES_MAX`] is taken.
    pub aux: Option<AuxSlot>,
    /// Opaque bytes for the sender's caller, up to [`GRANT_NOTE_BYTES_MAX`].
    pub note: Bytes,
    /// Time until the room must have ended, a day at most; the engine's `room_timeout_ms` when `None`.
    pub timeout: Option<Duration>,
    /// Compare a checksum (XXH3, 64 bits) of what was sent with what has landed before the room is done.
    /// Each side reads the pages once more, at some GB/s of its worker's time. A room of it writes each
    /// position once; pages are written by nobody else.
    pub checksum: bool,
}

impl GrantSpec {
    /// A grant of no pages yet.
    #[must_use]
    pub const fn new(room: RoomId) -> Self {
        Self {
            room,
            pools: Vec::new(),
            aux: None,
            note: Bytes::new(),
            timeout: None,
            checksum: false,
        }
    }

    /// Grants pages of a pool. Once a pool.
    #[must_use]
    pub fn pages(mut self, pool: PoolId, pages: impl Into<Arc<[u32]>>) -> Self {
        self.pools.push((pool, pages.into()));
        self
    }

    /// Names the place for the aux row.
    #[must_use]
    pub fn aux(mut self, slot: AuxSlot) -> Self {
        self.aux = Some(slot);
        self
    }

    /// Opaque bytes for the sender's caller.
    #[must_use]
    pub fn note(mut self, note: impl Into<Bytes>) -> Self {
        self.note = note.into();
        self
    }

    /// Compares a checksum before the room is done; see [`GrantSpec::checksum`].
    #[must_use]
    pub const fn checksum(mut self, checksum: bool) -> Self {
        self.checksum = checksum;
        self
    }

    /// Time until the room must have ended.
    #[must_use]
    pub const fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }
}

/// A grant was not given; nothing was told to anybody.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GrantError {
    /// No such peer, or it is gone. [`crate::Engine::peers`] tells why.
    #[error("peer {0} is not connected; see peers() for why, and connect again")]
    NoPeer(Incarnation),
    /// The peer takes no more rooms.
    #[error("peer {0} is draining; grant to another one")]
    PeerDraining(Incarnation),
    /// A room of this id with this peer is live.
    #[error("room {0} is live already with this peer; wait for its end, or abort it")]
    Live(RoomId),
    /// `max_rooms` rooms are live or unreleased.
    #[error("{0} rooms are live, as many as max_rooms allows; let some end, or raise it")]
    TooMany(u32),
    /// A pool that was never added, or was deregistered.
    #[error("there is no pool {0:?}; add it before the engine starts")]
    NoSuchPool(PoolId),
    /// A pool is named twice.
    #[error("pool {0:?} is named twice; give all its pages in one list")]
    PoolTwice(PoolId),
    /// A page that the pool does not have.
    #[error("page {page} of a pool of {pages}")]
    NoSuchPage {
        /// Page asked for.
        page: u32,
        /// Pages of the pool.
        pages: u32,
    },
    /// A page is granted twice: two writes would race for it.
    #[error("page {0} is named twice")]
    PageTwice(u32),
    /// More pages than one grant takes.
    #[error("{0} pages, more than the 1048576 of one grant; use larger pages")]
    TooManyPages(usize),
    /// The note is too long.
    #[error("a note of {0} bytes, at most 256 travel with a grant")]
    NoteTooLong(usize),
    /// The aux slot is not in its region.
    #[error("the aux slot does not fit: {0}")]
    AuxOutside(#[from] RegionRangeError),
    /// A group of no peers.
    #[error("a group needs at least one peer")]
    EmptyGroup,
    /// The worker's queue is full.
    #[error("the queue is full; try again later")]
    Full,
    /// The engine is draining or shut down.
    #[error("the engine takes no more rooms: it is draining or shut down")]
    Draining,
}

impl GrantSpec {
    /// Checks what can be checked without the peer.
    pub(super) fn check(&self, pages_of: impl Fn(PoolId) -> Option<u32>) -> Result<(), GrantError> {
        if self.note.len() > GRANT_NOTE_BYTES_MAX {
            return Err(GrantError::NoteTooLong(self.note.len()));
        }
        let total = self.pools.iter().map(|(_, pages)| pages.len()).sum();
        if total > GRANT_PAGES_MAX {
            return Err(GrantError::TooManyPages(total));
        }
        for (index, (pool, list)) in self.pools.iter().enumerate() {
            if self.pools[..index].iter().any(|(other, _)| other == pool) {
                return Err(GrantError::PoolTwice(*pool));
            }
            let pages = pages_of(*pool).ok_or(GrantError::NoSuchPool(*pool))?;
            let mut seen = vec![0u64; pages.div_ceil(64) as usize];
            for &page in list.iter() {
                if page >= pages {
                    return Err(GrantError::NoSuchPage { page, pages });
                }
                let (word, bit) = (&mut seen[page as usize / 64], 1 << (page % 64));
                if *word & bit != 0 {
                    return Err(GrantError::PageTwice(page));
                }
                *word |= bit;
            }
        }
        if let Some(slot) = &self.aux {
            slot.region.check(slot.offset, slot.len)?;
        }
        Ok(())
    }

    pub(super) fn aux_bytes(&self) -> u32 {
        self.aux.as_ref().map_or(AUX_BYTES_MAX, |slot| slot.len.min(AUX_BYTES_MAX)) as u32
    }
}

/// A room that is done, as the receiver has it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Received {
    /// The aux row; empty when there was none.
    pub aux: Bytes,
    /// How it went.
    pub report: RoomReport,
}

/// A receiving room. Dropping it before it has ended gives it up.
#[derive(Debug)]
pub struct RecvRoom {
    pub(super) core: HandleCore,
}

impl RecvRoom {
    /// The room's id.
    #[must_use]
    pub fn id(&self) -> RoomId {
        self.core.cell.room
    }

    /// The end, if it has come: every byte that the sender counted is in its page, and the aux row in
    /// its slot.
    ///
    /// # Errors
    /// The room's failure, the same on both sides.
    pub fn try_done(&self) -> Option<Result<Received, Failure>> {
        let verdict = self.core.cell.verdict()?.clone();
        Some(verdict.map(|()| Received {
            aux: self.core.cell.aux().cloned().unwrap_or_default(),
            report: self.core.report(),
        }))
    }

    /// Waits for the end.
    ///
    /// # Errors
    /// The room's failure, the same on both sides.
    pub async fn done(&self) -> Result<Received, Failure> {
        self.core.verdict().await?;
        let aux = self.core.cell.aux().cloned().unwrap_or_default();
        Ok(Received { aux, report: self.core.report() })
    }

    /// Waits until nothing can land in the room's pages any more. Of a room that is live, that is
    /// after its end.
    pub async fn released(&self) {
        self.core.released().await;
    }
}

impl RoomHandle for RecvRoom {
    fn state(&self) -> RoomState {
        self.core.cell.state()
    }

    fn failure(&self) -> Option<&Failure> {
        self.core.failure()
    }

    fn is_released(&self) -> bool {
        self.core.cell.is_released()
    }

    fn report(&self) -> RoomReport {
        self.core.report()
    }

    fn abort(&self, reason: &str) {
        self.core.abort(format!("aborted by the decode side: {reason}"));
    }
}
