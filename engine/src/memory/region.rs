//! Regions: memory the engine reads from and places bytes in.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::{Arc, RwLock};

use super::map::Mapping;

/// Memory the engine may read from and place bytes in, while any room uses it.
///
/// A region owns its memory or has it vouched for. A plain borrow cannot be taken: a borrowed guard
/// can be leaked in safe code, and bytes would land in memory that its owner believes free. So owned
/// memory moves in and comes back by [`Region::into_vec`], and raw memory is `unsafe` to name.
///
/// Clones are handles to the same region; its memory lives until the last one, and the last room
/// that uses it, is gone.
#[derive(Clone, Debug)]
pub struct Region(Arc<Inner>);

struct Inner {
    addr: NonNull<u8>,
    bytes: usize,
    backing: Backing,
    /// Orders `read_at` and `write_at` of different threads. The engine does not take it: it touches
    /// only granted pages, aux slots and pages being written, which a correct caller leaves alone.
    access: RwLock<()>,
}

impl std::fmt::Debug for Inner {
    /// Where and what, never the content: it is large, and it changes.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = match &self.backing {
            Backing::Mapped(_) => "memfd",
            Backing::Owned(_) => "owned",
            Backing::Vouched => "vouched",
        };
        let (addr, bytes) = (self.addr, self.bytes);
        f.debug_struct("Region")
            .field("addr", &addr)
            .field("bytes", &bytes)
            .field("kind", &kind)
            .finish()
    }
}

enum Backing {
    Mapped(Mapping),
    Owned(Vec<u8>),
    Vouched,
}

// SAFETY: `addr` points to memory that the backing owns or that a caller vouched for. Callers reach it
// through this file under `access`; the engine touches granted pages, aux slots and queued source pages,
// which a correct caller leaves alone meanwhile.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

/// What a region's memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RegionKind {
    /// A memfd of the engine's, in explicit huge pages or not.
    Memfd {
        /// Whether explicit huge pages back it.
        huge: bool,
    },
    /// Memory moved in by its owner.
    Owned,
    /// Memory the caller vouches for.
    Vouched,
}

/// How [`Region::allocate`] gets memory.
#[derive(Clone, Copy, Debug)]
pub struct AllocOptions {
    /// Try explicit huge pages first (they must be reserved: `vm.nr_hugepages`), then ask for
    /// transparent ones. On by default: KV pools are large and walked at random.
    pub huge_pages: bool,
}

impl Default for AllocOptions {
    fn default() -> Self {
        Self { huge_pages: true }
    }
}

/// Memory could not be had.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot map {bytes} bytes: {source}; ask for less, or raise the memory limit of this process or container"
)]
pub struct AllocError {
    /// Bytes asked for.
    pub bytes: usize,
    /// What the kernel said.
    pub source: std::io::Error,
}

/// A range that does not lie in its region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("range {offset}+{len} is outside the region of {bytes} bytes")]
pub struct RegionRangeError {
    /// First byte asked for.
    pub offset: usize,
    /// Bytes asked for.
    pub len: usize,
    /// Bytes the region has.
    pub bytes: usize,
}

/// A region's memory cannot be handed out; the region is handed back unchanged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IntoVecError {
    /// It is still used.
    #[error(
        "the region is still used by {users} pools, rooms or handles; deregister and drop them first"
    )]
    Busy {
        /// The region, still valid.
        region: Region,
        /// Other holders at the time of asking.
        users: usize,
    },
    /// It was not moved in by [`Region::from_vec`].
    #[error("the region's memory was not moved in; drop the region to let it go")]
    NotOwned {
        /// The region, still valid.
        region: Region,
    },
}

impl Region {
    /// Allocates zeroed, page-aligned, memfd-backed memory.
    ///
    /// # Errors
    /// [`AllocError`] when the kernel refuses.
    pub fn allocate(bytes: usize, options: AllocOptions) -> Result<Self, AllocError> {
        let mapping = Mapping::new(bytes, options.huge_pages)
            .map_err(|errno| AllocError { bytes, source: errno.into() })?;
        Ok(Self(Arc::new(Inner {
            addr: mapping.addr(),
            bytes,
            backing: Backing::Mapped(mapping),
            access: RwLock::new(()),
        })))
    }

    /// Moves memory the caller owns into a region. [`Region::into_vec`] gives it back.
    #[must_use]
    pub fn from_vec(mut memory: Vec<u8>) -> Self {
        let addr = NonNull::new(memory.as_mut_ptr()).unwrap_or(NonNull::dangling());
        let bytes = memory.len();
        Self(Arc::new(Inner {
            addr,
            bytes,
            backing: Backing::Owned(memory),
            access: RwLock::new(()),
        }))
    }

    /// Names memory that lives as long as the process, such as a leaked pool.
    #[must_use]
    pub fn from_static(memory: &'static mut [u8]) -> Self {
        let (addr, bytes) = (NonNull::from(&mut *memory).cast(), memory.len());
        Self(Arc::new(Inner { addr, bytes, backing: Backing::Vouched, access: RwLock::new(()) }))
    }

    /// Names memory the caller vouches for, such as a pool that an inference engine allocated.
    ///
    /// # Safety
    /// `addr` must point to `bytes` bytes of readable and writable CPU memory that stay mapped until
    /// every clone of the region is dropped and every room that used it is released. As long, nobody
    /// may hold a Rust reference to any of those bytes, nor name them by another region.
    #[must_use]
    pub unsafe fn from_raw(addr: NonNull<u8>, bytes: usize) -> Self {
        Self(Arc::new(Inner { addr, bytes, backing: Backing::Vouched, access: RwLock::new(()) }))
    }

    /// Bytes of the region.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.bytes
    }

    /// Whether the region has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.bytes == 0
    }

    /// Where the region begins. Dereferencing it is the caller's `unsafe`: bytes of granted pages
    /// change under it.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.0.addr.as_ptr()
    }

    /// What the memory is.
    #[must_use]
    pub fn kind(&self) -> RegionKind {
        match &self.0.backing {
            Backing::Mapped(mapping) => RegionKind::Memfd { huge: mapping.is_huge() },
            Backing::Owned(_) => RegionKind::Owned,
            Backing::Vouched => RegionKind::Vouched,
        }
    }

    /// The memfd behind an allocated region, to be mapped by another process.
    #[must_use]
    pub fn memfd(&self) -> Option<BorrowedFd<'_>> {
        match &self.0.backing {
            Backing::Mapped(mapping) => Some(mapping.fd().as_fd()),
            Backing::Owned(_) | Backing::Vouched => None,
        }
    }

    /// Copies bytes out of the region.
    ///
    /// # Errors
    /// [`RegionRangeError`] when the range is outside; nothing is copied.
    pub fn read_at(&self, offset: usize, out: &mut [u8]) -> Result<(), RegionRangeError> {
        let from = self.check(offset, out.len())?.start;
        let _shared = self.0.access.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        // SAFETY: the range was checked to lie in the region; `out` is a fresh exclusive borrow, so it
        // cannot overlap memory that the region owns; safe writers are held off by `access`.
        unsafe {
            std::ptr::copy_nonoverlapping(self.as_ptr().add(from), out.as_mut_ptr(), out.len())
        };
        Ok(())
    }

    /// Copies bytes into the region.
    ///
    /// # Errors
    /// [`RegionRangeError`] when the range is outside; nothing is copied.
    pub fn write_at(&self, offset: usize, bytes: &[u8]) -> Result<(), RegionRangeError> {
        let to = self.check(offset, bytes.len())?.start;
        let _exclusive = self.0.access.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        // SAFETY: the range was checked to lie in the region; safe readers and writers are held off by
        // `access`; `bytes` cannot overlap the region, whose memory nobody holds a reference to.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.as_ptr().add(to), bytes.len())
        };
        Ok(())
    }

    /// Gives memory moved in by [`Region::from_vec`] back to its owner.
    ///
    /// # Errors
    /// [`IntoVecError::Busy`] while a pool, a room or another handle uses it,
    /// [`IntoVecError::NotOwned`] for memory of another kind.
    pub fn into_vec(self) -> Result<Vec<u8>, IntoVecError> {
        if !matches!(self.0.backing, Backing::Owned(_)) {
            return Err(IntoVecError::NotOwned { region: self });
        }
        match Arc::try_unwrap(self.0) {
            Ok(Inner { backing: Backing::Owned(memory), .. }) => Ok(memory),
            Ok(other) => Err(IntoVecError::NotOwned { region: Self(Arc::new(other)) }),
            Err(shared) => {
                let users = Arc::strong_count(&shared).saturating_sub(1).max(1);
                Err(IntoVecError::Busy { region: Self(shared), users })
            }
        }
    }

    /// As [`Region::write_at`], for the engine: into an aux slot, which is the engine's while granted,
    /// so that the lock, which a caller may hold for long, is not taken.
    pub(crate) fn place_at(&self, offset: usize, bytes: &[u8]) -> Result<(), RegionRangeError> {
        let to = self.check(offset, bytes.len())?.start;
        // SAFETY: the range was checked to lie in the region; the slot is granted, so its owner leaves
        // it alone until the room has ended; `bytes` is the worker's own and cannot overlap it.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.as_ptr().add(to), bytes.len());
        };
        Ok(())
    }

    /// Whether both are the same memory.
    #[cfg(feature = "rdma")]
    pub(crate) fn is(&self, other: &Self) -> bool {
        self.0.addr == other.0.addr && self.0.bytes == other.0.bytes
    }

    pub(crate) fn check(
        &self,
        offset: usize,
        len: usize,
    ) -> Result<Range<usize>, RegionRangeError> {
        match offset.checked_add(len) {
            Some(end) if end <= self.0.bytes => Ok(offset..end),
            _ => Err(RegionRangeError { offset, len, bytes: self.0.bytes }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocated_memory_is_zeroed_page_aligned_and_has_a_memfd() {
        let region = Region::allocate(10_000, AllocOptions::default()).unwrap();
        assert_eq!(region.len(), 10_000);
        assert_eq!(region.as_ptr() as usize % 4096, 0);
        let mut out = vec![1u8; 10_000];
        region.read_at(0, &mut out).unwrap();
        assert!(out.iter().all(|&b| b == 0));
        assert!(region.memfd().is_some());
    }

    #[test]
    fn owned_memory_comes_back_to_its_owner_with_what_was_written() {
        let region = Region::from_vec(vec![0; 16]);
        region.write_at(4, b"page").unwrap();
        assert_eq!(&region.into_vec().unwrap()[4..8], b"page");
    }

    #[test]
    fn a_used_region_is_not_given_back_and_stays_valid() {
        let region = Region::from_vec(vec![7; 16]);
        let user = region.clone();
        let error = region.into_vec().unwrap_err();
        assert!(!format!("{error:?}").contains("7, 7"), "its content is printed");
        let IntoVecError::Busy { region, users: 1 } = error else { panic!("{error}") };
        drop(user);
        assert_eq!(region.into_vec().unwrap(), vec![7; 16]);
    }

    #[test]
    fn a_range_outside_the_region_is_refused_whatever_its_numbers() {
        let region = Region::from_vec(vec![0; 16]);
        for (offset, len) in [(0, 17), (16, 1), (usize::MAX, 1), (1, usize::MAX)] {
            assert!(region.check(offset, len).is_err(), "{offset}+{len}");
        }
        assert!(region.check(16, 0).is_ok());
    }
}
