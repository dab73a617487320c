//! Leaf: anonymous memory from a memfd, mapped shared.

use std::ptr::NonNull;

use rustix::fd::OwnedFd;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

/// Huge page size asked for: 2 MiB, the default of x86-64 and of Arm with 4 KiB pages.
pub(super) const HUGE_PAGE_BYTES: usize = 2 << 20;

/// A shared mapping of a memfd, unmapped on drop.
#[derive(Debug)]
pub(super) struct Mapping {
    addr: NonNull<u8>,
    bytes: usize,
    fd: OwnedFd,
    huge: bool,
}

// SAFETY: the mapping is plain memory owned by this value; moving or sharing the pointer between
// threads is sound because every access through it is unsafe and argued for where it is made.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `bytes` of zeroed memory, rounded up to whole (huge) pages. With `huge`, explicit huge
    /// pages are tried first, and plain pages advised for transparent ones are taken otherwise.
    pub(super) fn new(bytes: usize, huge: bool) -> Result<Self, Errno> {
        if huge && let Ok(mapping) = Self::with_flags(bytes, HUGE_PAGE_BYTES, MemfdFlags::HUGETLB) {
            return Ok(mapping);
        }
        let mapping = Self::with_flags(bytes, rustix::param::page_size(), MemfdFlags::empty())?;
        if huge {
            // SAFETY: the range is exactly the mapping just made; the advice changes no content.
            // A kernel without transparent huge pages for shared memory refuses: nothing is lost.
            let _ = unsafe {
                madvise(mapping.addr.as_ptr().cast(), mapping.bytes, Advice::LinuxHugepage)
            };
        }
        Ok(mapping)
    }

    fn with_flags(bytes: usize, page_bytes: usize, flags: MemfdFlags) -> Result<Self, Errno> {
        let bytes = bytes.max(1).checked_next_multiple_of(page_bytes).ok_or(Errno::NOMEM)?;
        let fd = memfd_create("kvferry", flags | MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&fd, bytes as u64)?;
        // Whoever is handed the fd must not be able to pull the memory from under the mapping.
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        // SAFETY: a fresh mapping at an address of the kernel's choosing overlaps nothing.
        let addr = unsafe {
            mmap(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &fd,
                0,
            )?
        };
        let addr = NonNull::new(addr.cast()).ok_or(Errno::NOMEM)?;
        Ok(Self { addr, bytes, fd, huge: flags.contains(MemfdFlags::HUGETLB) })
    }

    pub(super) const fn addr(&self) -> NonNull<u8> {
        self.addr
    }

    pub(super) const fn is_huge(&self) -> bool {
        self.huge
    }

    pub(super) const fn fd(&self) -> &OwnedFd {
        &self.fd
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `with_flags` with this address and length, and the value
        // that owns it is going away: no region refers to it any more.
        let _ = unsafe { munmap(self.addr.as_ptr().cast(), self.bytes) };
    }
}
