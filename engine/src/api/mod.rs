//! What callers hold: the engine, and handles of rooms.
//!
//! Everything a caller hands in is checked on the caller's thread, with typed errors; the worker gets
//! only what it can do. Nothing here is on the hot path but [`send::SendRoom::try_write`].

pub(crate) mod block_on;
pub(crate) mod engine;
pub(crate) mod group;
pub(crate) mod handle;
pub(crate) mod recv;
mod registry;
pub(crate) mod send;
pub(crate) mod start;
