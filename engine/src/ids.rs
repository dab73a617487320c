//! The names things go by: rooms, epochs, incarnations.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The caller's name for one request's transfer. Ids are reused; a reused id is a new [`Epoch`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RoomId(pub u64);

impl fmt::Display for RoomId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl From<u64> for RoomId {
    fn from(id: u64) -> Self {
        Self(id)
    }
}

/// One life of a room id. Drawn by the decode engine when it grants, counted up from 1, never
/// reused within an incarnation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Epoch(pub u64);

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A random 128-bit id that an engine draws at start. A restarted peer is a different peer: nothing
/// said to or by the old one holds for the new.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Incarnation(pub u128);

impl Incarnation {
    /// Draws a new one from the operating system's random source.
    ///
    /// # Errors
    /// The operating system's, when it has no randomness to give.
    pub fn draw() -> Result<Self, getrandom::Error> {
        let mut bytes = [0u8; 16];
        getrandom::fill(&mut bytes)?;
        Ok(Self(u128::from_le_bytes(bytes)))
    }
}

impl fmt::Display for Incarnation {
    /// The first 32 bits: enough to tell apart the peers of one engine in a log line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}", self.0 >> 96)
    }
}

impl fmt::Debug for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// One life of a lane, known by the same name at both ends: drawn from its one-time token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct LaneId(pub(crate) u64);

/// Which end of a room an engine is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Role {
    /// The prefill side: owns the source pages.
    Sender,
    /// The decode side: owns the granted pages, and the room's verdict.
    Receiver,
}

impl Role {
    /// The other end.
    #[must_use]
    pub const fn other(self) -> Self {
        match self {
            Self::Sender => Self::Receiver,
            Self::Receiver => Self::Sender,
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sender => "sender",
            Self::Receiver => "receiver",
        })
    }
}

/// Where a room stands. The numbers are SGLang's `KVPoll`: schedulers reduce them by minimum over
/// ranks, so that one rank's `Failed` wins and `Success` needs all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[repr(u8)]
pub enum RoomState {
    /// Ended: failed, with its first cause in the report.
    Failed = 0,
    /// Opened; the other side is not known to be ready.
    Bootstrapping = 1,
    /// Granted; nothing written yet.
    WaitingForInput = 2,
    /// Pages are travelling, or the verdict is awaited.
    Transferring = 3,
    /// Ended: every byte that was counted has landed.
    Success = 4,
}

impl RoomState {
    /// Whether the room has ended. A room that has never changes again.
    #[must_use]
    pub const fn is_terminal(self) -> bool {
        matches!(self, Self::Failed | Self::Success)
    }

    pub(crate) const fn from_u8(value: u8) -> Self {
        match value {
            0 => Self::Failed,
            1 => Self::Bootstrapping,
            2 => Self::WaitingForInput,
            3 => Self::Transferring,
            _ => Self::Success,
        }
    }
}

/// Microseconds since the engine started. The room core and the worker know time only as this
/// number, handed in by whoever drives them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub(crate) struct Micros(pub(crate) u64);

impl Micros {
    pub(crate) const fn after_ms(self, ms: u64) -> Self {
        Self(self.0.saturating_add(ms.saturating_mul(1000)))
    }

    pub(crate) const fn since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}
