//! Protection domains.

use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use ibverbs_sys as sys;

use super::access::Access;
use super::context::Context;
use super::error::VerbsError;
use super::mr::{self, Mr};
use super::qp::{Qp, QpOptions};
use super::srq::{Srq, SrqOptions};

/// A protection domain: what is made from it can be used together. Clones are the same one.
#[derive(Clone)]
pub struct Pd(Arc<Inner>);

struct Inner {
    raw: NonNull<sys::ibv_pd>,
    context: Context,
}

// SAFETY: the domain is used through libibverbs' functions alone, which may be called from any
// thread.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Pd {
    pub(crate) fn allocate(context: &Context) -> Result<Self, VerbsError> {
        // SAFETY: the context is open.
        let raw = unsafe { (context.functions().ibv_alloc_pd)(context.raw()) };
        let raw = NonNull::new(raw)
            .ok_or_else(|| VerbsError::create("ibv_alloc_pd", io::Error::last_os_error()))?;
        Ok(Self(Arc::new(Inner { raw, context: context.clone() })))
    }

    /// Registers memory that is moved in, and kept until it is deregistered.
    ///
    /// # Errors
    /// [`VerbsError::Memlock`] if it cannot be locked; [`VerbsError::BadMemory`] if `access` does
    /// not hold together or the memory is empty or too large for the device.
    pub fn register(&self, memory: impl Into<Box<[u8]>>, access: Access) -> Result<Mr, VerbsError> {
        mr::register_owned(self, memory.into(), access)
    }

    /// Registers memory that somebody else keeps.
    ///
    /// # Errors
    /// As [`Pd::register`].
    ///
    /// # Safety
    /// Until it is deregistered ([`Mr::is_registered`] says so) or the device is closed, the memory
    /// must stay mapped where it is, and it must be right for the NIC to read and, as `access`
    /// says, write it at any moment: for its own work requests of whatever keys, and for peers.
    pub unsafe fn register_raw(
        &self,
        addr: *mut u8,
        bytes: usize,
        access: Access,
    ) -> Result<Mr, VerbsError> {
        // SAFETY: as the caller promises.
        unsafe { mr::register_raw(self, addr, bytes, access) }
    }

    /// As [`Pd::register_raw`], in pieces of at most `max_bytes` bytes
    /// ([`DeviceAttributes::max_mr_size`](crate::DeviceAttributes::max_mr_size)), but of a page at
    /// least, that are cut where pages begin. Together they cover the memory, in order.
    ///
    /// # Errors
    /// As [`Pd::register`]; then nothing stays registered.
    ///
    /// # Safety
    /// As [`Pd::register_raw`].
    pub unsafe fn register_raw_chunked(
        &self,
        addr: *mut u8,
        bytes: usize,
        access: Access,
        max_bytes: u64,
    ) -> Result<Vec<Mr>, VerbsError> {
        // SAFETY: as the caller promises.
        unsafe { mr::register_chunked(self, addr, bytes, access, max_bytes) }
    }

    /// Registers `bytes` bytes of a dma-buf, from `offset`, under the addresses from `iova`, which
    /// must agree with `offset` within a page. The descriptor may be closed afterwards.
    ///
    /// # Errors
    /// [`VerbsError::Unsupported`] if the library, the kernel or the device cannot;
    /// [`VerbsError::BadMemory`] if range or access do not fit the buffer.
    pub fn register_dmabuf(
        &self,
        fd: BorrowedFd<'_>,
        offset: u64,
        bytes: usize,
        iova: u64,
        access: Access,
    ) -> Result<Mr, VerbsError> {
        mr::register_dmabuf(self, fd, offset, bytes, iova, access)
    }

    /// A receive queue that queue pairs share.
    ///
    /// # Errors
    /// [`VerbsError::BeyondLimits`] or [`VerbsError::Exhausted`].
    pub fn create_srq(&self, options: SrqOptions) -> Result<Srq, VerbsError> {
        Srq::create(self, options)
    }

    /// A queue pair of type RC.
    ///
    /// # Errors
    /// [`VerbsError::BeyondLimits`] or [`VerbsError::Exhausted`]; [`VerbsError::Foreign`] if one of
    /// the queues is of another device or domain.
    pub fn create_qp(&self, options: &QpOptions<'_>) -> Result<Qp, VerbsError> {
        Qp::create(self, options)
    }

    /// The device.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.0.context
    }

    pub(crate) fn raw(&self) -> *mut sys::ibv_pd {
        self.0.raw.as_ptr()
    }

    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: everything made from the domain holds it, so nothing uses it; it is given back
        // once. The result says nothing that could still be acted on.
        unsafe { (self.context.functions().ibv_dealloc_pd)(self.raw.as_ptr()) };
    }
}

impl fmt::Debug for Pd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pd").field("device", &self.0.context.name()).finish()
    }
}
