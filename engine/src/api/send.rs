//! The prefill side of a room.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;

use super::handle::{HandleCore, RoomHandle, RoomReport};
use crate::failure::Failure;
use crate::ids::{Epoch, Incarnation, RoomId, RoomState};
use crate::memory::PoolId;
use crate::room::cell::{Bound, RoomCell};
use crate::wire::message::{AUX_BYTES_MAX, CHECKSUM_EXTENTS_MAX};
use crate::worker::submit::{self, Submission};

/// How a sending room is opened.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct OpenOptions {
    /// Only this peer's grant is taken. `None`: whichever peer grants the room.
    pub peer: Option<Incarnation>,
    /// How long to wait for a grant; the engine's `grant_timeout_ms` when `None`.
    pub grant_timeout: Option<Duration>,
}

impl OpenOptions {
    /// Takes only this peer's grant.
    #[must_use]
    pub const fn peer(mut self, peer: Incarnation) -> Self {
        self.peer = Some(peer);
        self
    }

    /// How long to wait for a grant.
    #[must_use]
    pub const fn grant_timeout(mut self, timeout: Duration) -> Self {
        self.grant_timeout = Some(timeout);
        self
    }
}

/// A sending room could not be opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// A room of this id is live: wait for its end or abort it first.
    #[error("room {0} is live already; wait for its end, or abort it")]
    Live(RoomId),
    /// `max_rooms` rooms are live or unreleased.
    #[error("{0} rooms are live, as many as max_rooms allows; let some end, or raise it")]
    TooMany(u32),
    /// The worker's queue is full.
    #[error("the queue is full; try again later")]
    Full,
    /// A group of no rooms.
    #[error("a group needs at least one room")]
    EmptyGroup,
    /// The engine is draining or shut down.
    #[error("the engine takes no more rooms: it is draining or shut down")]
    Draining,
}

/// A chunk's page writes: for each layer and plane, source page `src[i]` goes to the granted position
/// `dst.start + i`.
#[derive(Clone, Debug)]
pub struct Chunk {
    pool: PoolId,
    src: Arc<[u32]>,
    dst: Range<u32>,
    layers: Option<Range<u32>>,
}

impl Chunk {
    /// Source pages of a pool, and the positions of the grant's page list they go to.
    pub fn new(pool: PoolId, src: impl Into<Arc<[u32]>>, dst: Range<u32>) -> Self {
        Self { pool, src: src.into(), dst, layers: None }
    }

    /// Only these layers, by their number in the model. Without it: every layer both sides hold.
    #[must_use]
    pub fn layers(mut self, layers: Range<u32>) -> Self {
        self.layers = Some(layers);
        self
    }
}

/// A chunk or a finish was not taken; nothing of it will be sent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WriteError {
    /// Only from `try_` calls: `max_queued_chunks` wait, or the worker's queue is full. Try later.
    #[error("the queue is full; try again later, or await write()")]
    Full,
    /// Only from `try_` calls: no grant has come. Try later.
    #[error("the room is not granted yet; poll its state, or await granted()")]
    NotGranted,
    /// The room has ended.
    #[error("the room has ended: {}", .0.as_ref().map_or_else(|| "done".to_owned(), ToString::to_string))]
    Ended(Option<Box<Failure>>),
    /// `finish` was called before.
    #[error("the room was finished; write every chunk before finish()")]
    Finished,
    /// Source pages and positions are not equally many.
    #[error("{src} source pages for {dst} positions")]
    UnequalLengths {
        /// Source pages.
        src: usize,
        /// Positions.
        dst: usize,
    },
    /// The grant has no pages of this pool, or the two sides share no layers or heads of it.
    #[error("nothing of pool {0:?} is granted, or the two sides share no layers of it")]
    PoolNotGranted(PoolId),
    /// Positions behind the granted ones.
    #[error("positions {from}..{to} of a grant of {granted} pages")]
    OutsideGrant {
        /// First position.
        from: u32,
        /// Past the last.
        to: u32,
        /// Positions granted.
        granted: u32,
    },
    /// Layers that the two sides do not both hold.
    #[error("layers {from}..{to}, the two sides share {shared_from}..{shared_to}")]
    OutsideLayers {
        /// First layer asked for.
        from: u32,
        /// Past the last.
        to: u32,
        /// First layer both hold.
        shared_from: u32,
        /// Past the last layer both hold.
        shared_to: u32,
    },
    /// A source page that the pool does not have.
    #[error("source page {page} of a pool of {pages}")]
    NoSuchPage {
        /// Page asked for.
        page: u32,
        /// Pages of the pool.
        pages: u32,
    },
    /// More page writes in one chunk than can be numbered; split it.
    #[error("a chunk of {0} page writes; split it")]
    TooLarge(u64),
    /// More chunks than a checksum can cover.
    #[error("more than 65536 chunks of a room whose checksum is compared; write larger chunks")]
    TooManyChunks,
    /// The aux row is longer than the slot that was granted.
    #[error("an aux row of {bytes} bytes, {granted} granted")]
    AuxTooLong {
        /// Bytes of the row.
        bytes: usize,
        /// Bytes granted.
        granted: usize,
    },
    /// The engine is shut down.
    #[error("the engine is shut down")]
    Stopped,
}

/// What was granted.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Granted {
    /// The decode engine.
    pub peer: Incarnation,
    /// The room's epoch.
    pub epoch: Epoch,
    /// Opaque bytes of the decode side's caller.
    pub note: Bytes,
    /// Longest aux row taken.
    pub aux_bytes: u32,
    /// Pages, by pool.
    pub pools: Vec<GrantedPages>,
}

/// What was granted of one pool.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct GrantedPages {
    /// The pool, by our number.
    pub pool: PoolId,
    /// Positions that can be written.
    pub positions: u32,
    /// Layers that both sides hold, by their number in the model.
    pub layers: Range<u32>,
}

/// A sending room. Dropping it before it has ended gives it up.
#[derive(Debug)]
pub struct SendRoom {
    pub(super) core: HandleCore,
    /// Whether `finish` was called. Held while something is submitted, so that no chunk is taken
    /// behind the finish. It is this room's alone.
    finished: Mutex<bool>,
}

impl SendRoom {
    pub(super) const fn new(core: HandleCore) -> Self {
        Self { core, finished: Mutex::new(false) }
    }

    /// The room's id.
    #[must_use]
    pub fn id(&self) -> RoomId {
        self.core.cell.room
    }

    /// What was granted, once it was.
    #[must_use]
    pub fn try_granted(&self) -> Option<Granted> {
        self.core.cell.bound().map(granted)
    }

    /// Waits for the grant.
    ///
    /// # Errors
    /// The room's failure, if it ends before: [`crate::FailureKind::GrantTimeout`] when none comes.
    pub async fn granted(&self) -> Result<Granted, Failure> {
        let decided = |cell: &RoomCell| match (cell.verdict(), cell.bound()) {
            (Some(Err(failure)), _) => Some(Err(failure.clone())),
            (_, Some(bound)) => Some(Ok(granted(bound))),
            _ => None,
        };
        self.core.cell.wait_for(decided).await
    }

    /// Queues a chunk, if it can be queued now. Its source pages must not change until the room is
    /// released. A chunk of no pages is taken and sends nothing.
    ///
    /// # Errors
    /// [`WriteError`]; [`WriteError::Full`] and [`WriteError::NotGranted`] pass with time.
    pub fn try_write(&self, chunk: &Chunk) -> Result<(), WriteError> {
        let Some(chunk) = self.checked(chunk)? else { return Ok(()) };
        let shared = self.core.shared.upgrade().ok_or(WriteError::Stopped)?;
        let finished = self.finished();
        if *finished {
            return Err(WriteError::Finished);
        }
        let cell = &self.core.cell;
        let waiting = cell.take_place(shared.config.max_queued_chunks).ok_or(WriteError::Full)?;
        // Those that wait are counted before those that were posted: one that moves meanwhile counts twice.
        let chunks = u64::from(waiting) + cell.chunks();
        let summed = cell.bound().is_some_and(|bound| bound.checksum);
        if summed && chunks >= CHECKSUM_EXTENTS_MAX as u64 {
            cell.chunk_dropped();
            return Err(WriteError::TooManyChunks);
        }
        let submission = Submission::Write { cell: Arc::clone(cell), chunk };
        shared.submit(submission).inspect_err(|_| cell.chunk_dropped())
    }

    fn finished(&self) -> MutexGuard<'_, bool> {
        self.finished.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a chunk, waiting for the grant and for room in the queue.
    ///
    /// # Errors
    /// [`WriteError`], never [`WriteError::Full`] or [`WriteError::NotGranted`].
    pub async fn write(&self, chunk: Chunk) -> Result<(), WriteError> {
        loop {
            match self.try_write(&chunk) {
                Err(WriteError::NotGranted) => {
                    self.granted()
                        .await
                        .map_err(|failure| WriteError::Ended(Some(Box::new(failure))))?;
                }
                Err(WriteError::Full) => self.wait_for_room().await?,
                done => return done,
            }
        }
    }

    async fn wait_for_room(&self) -> Result<(), WriteError> {
        let (limit, queue) = {
            let shared = self.core.shared.upgrade().ok_or(WriteError::Stopped)?;
            (shared.config.max_queued_chunks, shared.submissions())
        };
        if self.core.cell.queued_chunks.load(Ordering::SeqCst) < limit {
            // The worker's queue is what was full: wait for a place in it, and give it back.
            return queue.reserve().await.map(drop).map_err(|_| WriteError::Stopped);
        }
        let has_room = |cell: &RoomCell| {
            let room =
                cell.queued_chunks.load(Ordering::SeqCst) < limit || cell.state().is_terminal();
            room.then_some(())
        };
        self.core.cell.wait_for_room(has_room).await;
        Ok(())
    }

    /// Says that every chunk was handed in, with the aux row (empty for none). Returns at once; the
    /// room is done when the receiver says so.
    ///
    /// # Errors
    /// [`WriteError`], never [`WriteError::Full`].
    pub fn finish(&self, aux: Bytes) -> Result<(), WriteError> {
        self.check_live()?;
        let granted =
            self.core.cell.bound().map_or(AUX_BYTES_MAX, |bound| bound.aux_bytes as usize);
        if aux.len() > granted {
            return Err(WriteError::AuxTooLong { bytes: aux.len(), granted });
        }
        let shared = self.core.shared.upgrade().ok_or(WriteError::Stopped)?;
        let mut finished = self.finished();
        if std::mem::replace(&mut *finished, true) {
            return Err(WriteError::Finished);
        }
        let cell = Arc::clone(&self.core.cell);
        shared.submit_soon(Submission::Finish { cell, aux });
        Ok(())
    }

    /// Waits for the room's end. A sender is done only when the receiver said that all has landed.
    ///
    /// # Errors
    /// The room's failure, the same on both sides.
    pub async fn done(&self) -> Result<RoomReport, Failure> {
        self.core.verdict().await?;
        Ok(self.core.report())
    }

    /// Waits until nothing is read from the room's source pages any more. Of a room that is live, that
    /// is after its end.
    pub async fn released(&self) {
        self.core.released().await;
    }

    fn check_live(&self) -> Result<(), WriteError> {
        match self.core.cell.verdict() {
            Some(Err(failure)) => Err(WriteError::Ended(Some(Box::new(failure.clone())))),
            Some(Ok(())) => Err(WriteError::Ended(None)),
            None if *self.finished() => Err(WriteError::Finished),
            None => Ok(()),
        }
    }

    /// Checks a chunk against the grant and the pool; `None` for one without pages.
    fn checked(&self, chunk: &Chunk) -> Result<Option<submit::Chunk>, WriteError> {
        self.check_live()?;
        let bound = self.core.cell.bound().ok_or(WriteError::NotGranted)?;
        let positions = chunk.dst.end.saturating_sub(chunk.dst.start);
        if chunk.src.len() != positions as usize {
            return Err(WriteError::UnequalLengths {
                src: chunk.src.len(),
                dst: positions as usize,
            });
        }
        let granted = bound
            .pools
            .iter()
            .find(|granted| granted.pool == chunk.pool && !granted.layers.is_empty());
        let granted = granted.ok_or(WriteError::PoolNotGranted(chunk.pool))?;
        if chunk.dst.end > granted.positions {
            let (from, to, granted) = (chunk.dst.start, chunk.dst.end, granted.positions);
            return Err(WriteError::OutsideGrant { from, to, granted });
        }
        let layers = chunk.layers.clone().unwrap_or_else(|| granted.layers.clone());
        let shared_layers = &granted.layers;
        if layers.is_empty() || layers.start < shared_layers.start || layers.end > shared_layers.end
        {
            return Err(WriteError::OutsideLayers {
                from: layers.start,
                to: layers.end,
                shared_from: shared_layers.start,
                shared_to: shared_layers.end,
            });
        }
        let shared = self.core.shared.upgrade().ok_or(WriteError::Stopped)?;
        let pages = shared.pool_pages(chunk.pool).ok_or(WriteError::PoolNotGranted(chunk.pool))?;
        if let Some(&page) = chunk.src.iter().find(|&&page| page >= pages) {
            return Err(WriteError::NoSuchPage { page, pages });
        }
        let rows = u64::from(layers.end - layers.start) * u64::from(granted.planes);
        let page_writes = rows * chunk.src.len() as u64;
        if page_writes > u64::from(u32::MAX) {
            return Err(WriteError::TooLarge(page_writes));
        }
        if chunk.src.is_empty() {
            return Ok(None);
        }
        Ok(Some(submit::Chunk {
            pool: chunk.pool,
            layers,
            src: Arc::clone(&chunk.src),
            at: chunk.dst.start,
        }))
    }
}

fn granted(bound: &Bound) -> Granted {
    Granted {
        peer: bound.peer,
        epoch: bound.epoch,
        note: bound.note.clone(),
        aux_bytes: bound.aux_bytes,
        pools: bound
            .pools
            .iter()
            .map(|pool| GrantedPages {
                pool: pool.pool,
                positions: pool.positions,
                layers: pool.layers.clone(),
            })
            .collect(),
    }
}

impl RoomHandle for SendRoom {
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
        self.core.abort(format!("aborted by the prefill side: {reason}"));
    }
}
