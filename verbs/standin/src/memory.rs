//! Registered memory, and the only place where bytes move.

use std::os::fd::BorrowedFd;

use ibverbs_sys as sys;
use rustix::mm::{MapFlags, ProtFlags};

use crate::queue::Wqe;
use crate::state::{QpRef, State};

/// The low bits of keys differ, so that a local key given for a remote one is no key at all.
const LKEY_TAG: u32 = 0xa;
const RKEY_TAG: u32 = 0xb;
const TAG_BITS: u32 = 8;

pub(crate) const LOCAL_WRITE: u32 = sys::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0;
pub(crate) const REMOTE_WRITE: u32 = sys::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0;
pub(crate) const REMOTE_READ: u32 = sys::ibv_access_flags::IBV_ACCESS_REMOTE_READ.0;
const REMOTE_ATOMIC: u32 = sys::ibv_access_flags::IBV_ACCESS_REMOTE_ATOMIC.0;
/// `IBV_ACCESS_OPTIONAL_RANGE` of `<infiniband/verbs.h>`: hints that a device may ignore, relaxed
/// ordering among them. This one ignores all.
const OPTIONAL: u32 = 0x3ff << 20;

/// A memory region.
#[derive(Debug)]
pub(crate) struct Mr {
    pub(crate) pd: u32,
    lkey: u32,
    rkey: u32,
    /// Where the memory is in this process; `iova` is what requests call that place.
    host: usize,
    iova: u64,
    bytes: u64,
    access: u32,
    mapping: Option<Mapping>,
}

/// A place in memory that a check has allowed. Only this module makes one, and only this module
/// follows one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Span {
    host: usize,
    bytes: usize,
}

impl Span {
    pub(crate) const fn bytes(self) -> u64 {
        self.bytes as u64
    }

    /// Its first `bytes`.
    pub(crate) fn first(self, bytes: u64) -> Self {
        Self { bytes: self.bytes.min(usize::try_from(bytes).unwrap_or(usize::MAX)), ..self }
    }
}

impl Mr {
    pub(crate) const fn new(pd: u32, host: usize, iova: u64, bytes: u64, access: u32) -> Self {
        Self { pd, lkey: 0, rkey: 0, host, iova, bytes, access, mapping: None }
    }

    /// Memory of the file behind a dma-buf.
    pub(crate) fn of_mapping(pd: u32, mapping: Mapping, iova: u64, access: u32) -> Self {
        let (host, bytes) = (mapping.host + mapping.skip, (mapping.bytes - mapping.skip) as u64);
        Self { mapping: Some(mapping), ..Self::new(pd, host, iova, bytes, access) }
    }

    pub(crate) const fn set_number(&mut self, number: u32) {
        self.lkey = number << TAG_BITS | LKEY_TAG;
        self.rkey = number << TAG_BITS | RKEY_TAG;
    }

    pub(crate) const fn keys(&self) -> (u32, u32) {
        (self.lkey, self.rkey)
    }

    /// Bytes that count as locked: a dma-buf is pinned by its exporter.
    pub(crate) const fn pinned_bytes(&self) -> u64 {
        if self.mapping.is_some() { 0 } else { self.bytes }
    }

    fn span(&self, pd: u32, addr: u64, bytes: u64, access: u32) -> Result<Span, Denied> {
        if self.pd != pd || self.access & access != access {
            return Err(Denied::Key);
        }
        let offset = addr.checked_sub(self.iova).ok_or(Denied::Range)?;
        if offset.checked_add(bytes).is_none_or(|end| end > self.bytes) {
            return Err(Denied::Range);
        }
        // Both lie inside the region, which is in memory.
        Ok(Span { host: self.host + offset as usize, bytes: bytes as usize })
    }
}

/// Why memory may not be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Denied {
    /// There is no such key for this protection domain and this kind of access.
    Key,
    /// Part of the range lies outside of the region.
    Range,
}

/// Checks the access bits of a registration (Linux, `include/rdma/ib_verbs.h`:
/// `ib_check_mr_access`: a region that peers write is one that its owner may write).
pub(crate) const fn check_access(access: u32) -> Result<(), i32> {
    let known = LOCAL_WRITE | REMOTE_WRITE | REMOTE_READ | REMOTE_ATOMIC | OPTIONAL;
    let remote_write = access & (REMOTE_WRITE | REMOTE_ATOMIC) != 0;
    if access & !known != 0 || remote_write && access & LOCAL_WRITE == 0 {
        Err(libc::EINVAL)
    } else {
        Ok(())
    }
}

/// Not of `rustix`, whose own look at the auxiliary vector Valgrind does not survive; instructions are
/// counted under it.
pub(crate) fn page_bytes() -> usize {
    // SAFETY: it takes a name and returns a number.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).expect("a page has a size")
}

/// Whether every page of the range is mapped; pinning would fail with `EFAULT` if not.
pub(crate) fn is_mapped(host: usize, bytes: usize) -> bool {
    const PAGES_AT_A_TIME: usize = 4096;
    let mut residency = [0; PAGES_AT_A_TIME];
    let page_bytes = page_bytes();
    let start = host & !(page_bytes - 1);
    let Some(end) = host.checked_add(bytes) else { return false };
    (start..end).step_by(PAGES_AT_A_TIME * page_bytes).all(|start| {
        let bytes = (end - start).min(PAGES_AT_A_TIME * page_bytes);
        let start = std::ptr::without_provenance_mut(start);
        // SAFETY: it looks at no memory (mincore(2)), and there is room for as many pages.
        unsafe { libc::mincore(start, bytes, residency.as_mut_ptr()) == 0 }
    })
}

/// A mapping of our own of the file behind a dma-buf.
#[derive(Debug)]
pub(crate) struct Mapping {
    host: usize,
    bytes: usize,
    /// From the page it starts on to the first byte asked for.
    skip: usize,
}

impl Mapping {
    /// Maps `bytes` of the file from `offset`. `EINVAL` if it ends before, as
    /// `drivers/infiniband/core/umem_dmabuf.c` of Linux says: `ib_umem_dmabuf_get_with_dma_device`.
    pub(crate) fn new(fd: BorrowedFd<'_>, offset: u64, bytes: usize) -> Result<Self, i32> {
        let skip = (offset % page_bytes() as u64) as usize;
        let end = offset.checked_add(bytes as u64).ok_or(libc::EINVAL)?;
        let file = rustix::fs::fstat(fd).map_err(|error| error.raw_os_error())?;
        if bytes == 0 || u64::try_from(file.st_size).unwrap_or(0) < end {
            return Err(libc::EINVAL);
        }
        let bytes = bytes.checked_add(skip).ok_or(libc::EINVAL)?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let start = offset - skip as u64;
        // SAFETY: a fresh mapping at an address that the kernel chooses disturbs no other memory.
        let host = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, fd, start)
        };
        let host = host.map_err(|_| libc::EINVAL)?.expose_provenance();
        Ok(Self { host, bytes, skip })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let host = std::ptr::with_exposed_provenance_mut(self.host);
        // SAFETY: the range is what `new` mapped. The MR that was made of it is gone, so no check
        // yields a span of it any more.
        let _ = unsafe { rustix::mm::munmap(host, self.bytes) };
    }
}

impl State {
    fn mr_of(&self, device: usize, key: u32) -> Option<&Mr> {
        self.devices[device].mrs.get(key >> TAG_BITS)
    }

    /// What a local key, an address and a length name.
    pub(crate) fn local_span(
        &self,
        device: usize,
        pd: u32,
        sge: sys::ibv_sge,
        access: u32,
    ) -> Result<Span, Denied> {
        let mr = self.mr_of(device, sge.lkey).filter(|mr| mr.lkey == sge.lkey);
        mr.ok_or(Denied::Key)?.span(pd, sge.addr, u64::from(sge.length), access)
    }

    /// What a peer's request names at the QP `at`. No bytes need no key (InfiniBand specification,
    /// 9.7.4.1.5).
    pub(crate) fn remote_span(&self, at: QpRef, wqe: &Wqe, access: u32) -> Result<Span, Denied> {
        if wqe.bytes == 0 {
            return Ok(Span { host: 0, bytes: 0 });
        }
        let pd = self.qp(at).ok_or(Denied::Key)?.pd;
        let mr = self.mr_of(at.device, wqe.rkey).filter(|mr| mr.rkey == wqe.rkey);
        mr.ok_or(Denied::Key)?.span(pd, wqe.remote_addr, wqe.bytes, access)
    }
    /// Moves the bytes of the next request of `at` to these places, which were checked under the
    /// lock that is held.
    pub(crate) fn gather(&self, at: QpRef, wqe: &Wqe, to: impl IntoIterator<Item = Span>) {
        let Some(qp) = self.qp(at).filter(|_| self.moves_bytes(at)) else { return };
        if wqe.is_inline() {
            let bytes = qp.sq.inline(qp.sq.executed);
            let from = Span { host: bytes.as_ptr().expose_provenance(), bytes: bytes.len() };
            // SAFETY: the source is the queue's own memory, borrowed here; the places are spans of
            // regions, and nothing was deregistered since, as that takes the lock.
            unsafe { copy([from], to) };
        } else {
            // SAFETY: all are spans of regions; nothing was deregistered since they were made.
            unsafe { copy(self.own_spans(at, 0), to) };
        }
    }

    /// Moves bytes from this place, checked under the lock that is held, to those of the next
    /// request of `at`.
    pub(crate) fn scatter(&self, at: QpRef, from: Span) {
        if self.moves_bytes(at) {
            // SAFETY: all are spans of regions; nothing was deregistered since they were made.
            unsafe { copy([from], self.own_spans(at, LOCAL_WRITE)) };
        }
    }

    fn own_spans(&self, at: QpRef, access: u32) -> impl Iterator<Item = Span> {
        self.qp(at).into_iter().flat_map(move |qp| {
            let sges = qp.sq.sges(qp.sq.executed).iter();
            sges.filter_map(move |&sge| self.local_span(at.device, qp.pd, sge, access).ok())
        })
    }

    fn moves_bytes(&self, at: QpRef) -> bool {
        self.devices[at.device].options.moves_bytes
    }
}

/// Copies from the one list of places to the other until one of them ends. They may overlap.
///
/// # Safety
/// The spans must have come from a check of a region that is still registered. Whoever registered
/// its memory promised, by the contract of `ibv_reg_mr`, that it stays mapped until then and that
/// peers may read and write it.
unsafe fn copy(from: impl IntoIterator<Item = Span>, to: impl IntoIterator<Item = Span>) {
    let (mut from, mut to) = (from.into_iter(), to.into_iter());
    let (Some(mut source), Some(mut target)) = (from.next(), to.next()) else { return };
    loop {
        let bytes = source.bytes.min(target.bytes);
        // SAFETY: both ranges lie inside registered memory, which the caller vouches for.
        unsafe {
            std::ptr::copy(
                std::ptr::with_exposed_provenance::<u8>(source.host),
                std::ptr::with_exposed_provenance_mut::<u8>(target.host),
                bytes,
            );
        }
        // At least one of the two is used up.
        let rest = |span: Span| Span { host: span.host + bytes, bytes: span.bytes - bytes };
        let rest = |span, list: &mut dyn Iterator<Item = Span>| match rest(span) {
            Span { bytes: 0, .. } => list.next(),
            more => Some(more),
        };
        match (rest(source, &mut from), rest(target, &mut to)) {
            (Some(next_source), Some(next_target)) => (source, target) = (next_source, next_target),
            _ => return,
        }
    }
}
