//! What callers ask of the worker. Everything in a submission has been checked by the caller's
//! thread; the worker only does it.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::oneshot;

use crate::failure::FailureKind;
use crate::ids::{Epoch, Incarnation, Micros};
use crate::memory::{PoolId, Region};
use crate::room::cell::RoomCell;

/// Submissions that may wait for the worker; a full queue is back-pressure.
pub(crate) const SUBMISSIONS: usize = 4096;

/// See the module.
#[derive(Debug)]
pub(crate) enum Submission {
    /// A sending room, for this peer or for whichever grants it.
    Open { cell: Arc<RoomCell>, peer: Option<Incarnation>, deadline: Micros },
    /// A chunk of a sending room.
    Write { cell: Arc<RoomCell>, chunk: Chunk },
    /// Nothing more will be written.
    Finish { cell: Arc<RoomCell>, aux: Bytes },
    /// A receiving room: its grant.
    Grant(Box<GrantOrder>),
    /// Give a room up.
    Abort { cell: Arc<RoomCell>, kind: FailureKind, cause: String },
    /// Answer when no room with this peer (or with any) is live or unreleased.
    WhenIdle { peer: Option<Incarnation>, reply: oneshot::Sender<()> },
    /// Forget a pool, unless rooms use it: answers how many do.
    DropPool { pool: PoolId, reply: oneshot::Sender<usize> },
    /// Take no more rooms of this peer, or of any.
    Drain { peer: Option<Incarnation> },
    /// Fail every room that is left, and stop.
    Stop,
}

/// Page writes of one pool: for each layer, for each plane, `src[i]` to the granted position `at + i`.
#[derive(Debug)]
pub(crate) struct Chunk {
    pub(crate) pool: PoolId,
    /// By their number in the model. Not empty.
    pub(crate) layers: Range<u32>,
    /// Not empty.
    pub(crate) src: Arc<[u32]>,
    pub(crate) at: u32,
}

/// A grant to be given.
#[derive(Debug)]
pub(crate) struct GrantOrder {
    pub(crate) cell: Arc<RoomCell>,
    pub(crate) peer: Incarnation,
    pub(crate) epoch: Epoch,
    pub(crate) deadline: Micros,
    pub(crate) pools: Vec<(PoolId, Arc<[u32]>)>,
    pub(crate) aux: Option<AuxSlot>,
    /// Longest aux row taken.
    pub(crate) aux_bytes: u32,
    pub(crate) note: Bytes,
    /// Whether a checksum is compared before the room is done.
    pub(crate) checksum: bool,
}

/// Where a room's aux row is put.
#[derive(Clone, Debug)]
pub struct AuxSlot {
    /// Region that holds it.
    pub region: Region,
    /// First byte.
    pub offset: usize,
    /// Longest row, in bytes.
    pub len: usize,
}
