//! The primitives of what worker and callers share without a lock. In tests under `--cfg kvferry_loom`
//! they are loom's, so that `ci/loom` tries every order in which threads can use them.

#[cfg(all(test, kvferry_loom))]
mod model;

#[cfg(all(test, kvferry_loom))]
pub(crate) use self::model::*;

#[cfg(not(all(test, kvferry_loom)))]
pub(crate) use {
    std::sync::OnceLock,
    std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering, fence},
    tokio::sync::Notify,
};
