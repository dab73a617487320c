//! Leaf: memory that stands in for pages which may no longer be touched.
//!
//! A frame whose room was given up half-way must still be as long as its header said, or the lane
//! would be out of step. What is left of it is sent from [`zeros`] and received into [`Scratch`].

use std::sync::OnceLock;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

use crate::memory::PAGE_BYTES_MAX;
use crate::wire::frame::FRAME_BYTES;

/// Longest strip that can have to be replaced: a run never leaves its frame.
pub(super) const FILLER_BYTES: u64 =
    if PAGE_BYTES_MAX > FRAME_BYTES { PAGE_BYTES_MAX } else { FRAME_BYTES };
/// Bytes drained at once into scratch.
pub(super) const SCRATCH_BYTES: usize = 256 << 10;

/// Address of [`FILLER_BYTES`] of zeros, or `None` when the address space has no such range. Only
/// ever read, so that the kernel backs all of it with its one zero page.
pub(super) fn zeros() -> Option<u64> {
    static ZEROS: OnceLock<Option<u64>> = OnceLock::new();
    *ZEROS.get_or_init(|| {
        // SAFETY: a fresh private mapping at an address of the kernel's choosing overlaps nothing.
        let map = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                FILLER_BYTES as usize,
                ProtFlags::READ,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        };
        map.ok().map(|addr| addr as u64)
    })
}

/// Memory that is received into and never read. Shared by all lanes of a worker.
#[derive(Debug)]
pub(super) struct Scratch(Box<[std::cell::UnsafeCell<u8>]>);

impl Scratch {
    pub(super) fn new() -> Self {
        Self((0..SCRATCH_BYTES).map(|_| std::cell::UnsafeCell::new(0)).collect())
    }

    /// Nothing to receive into.
    pub(super) fn none() -> Self {
        Self(Box::new([]))
    }

    pub(super) fn addr(&self) -> u64 {
        self.0.as_ptr() as u64
    }
}
