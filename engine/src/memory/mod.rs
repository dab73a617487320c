//! Memory that pages live in, and how pages lie in it.
//!
//! A [`Region`] is memory the engine may read from and place bytes in. A [`PoolLayout`] says how KV
//! pages lie; a [`Pool`] is a layout laid over regions. Chunks and grants name pages by index; only
//! this module turns an index into an address.

mod checksum;
mod layout;
mod map;
mod pool;
mod region;

pub(crate) use checksum::{PageHash, Walk};
pub use layout::{Dtype, HeadOrder, LayoutError, LayoutMismatch, Planes, PoolLayout};
pub(crate) use layout::{PageSlice, Pairing, PoolCard, pair_all};
pub(crate) use pool::PageMap;
pub use pool::{PageArray, Pool, PoolId};
pub use region::{AllocError, AllocOptions, IntoVecError, Region, RegionKind, RegionRangeError};

/// Most pools in one engine: target, draft and a handful of state pools, with room to spare.
pub const POOLS_MAX: usize = 16;
/// Longest pool name in bytes.
pub const POOL_NAME_BYTES_MAX: usize = 32;
/// Most layers in one pool; frames carry layer numbers in 16 bits.
pub const LAYERS_MAX: u32 = 4096;
/// Largest page (of one layer, one plane) in bytes. A frame carries whole pages, and one frame is
/// the grain of fairness between rooms.
pub const PAGE_BYTES_MAX: u64 = 64 << 20;
