//! Registered memory.

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, PoisonError};

use ibverbs_sys as sys;

use super::access::Access;
use super::error::VerbsError;
use super::pd::Pd;
use super::pieces::{pieces, within};

/// Memory that the NIC may use. Clones are the same region; it is deregistered when the last of
/// them is gone, or by [`Mr::revoke`].
#[derive(Clone)]
pub struct Mr(Arc<Inner>);

/// A stretch of registered memory, for a work request: plain data. Nothing unsafe can be done with
/// one that is wrong: the NIC checks key and range, and fails the work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Sge {
    /// Where it begins.
    pub addr: u64,
    /// Its bytes.
    pub bytes: u32,
    /// The key it is registered under.
    pub lkey: u32,
}

struct Inner {
    /// Null once it is deregistered.
    raw: Mutex<*mut sys::ibv_mr>,
    addr: u64,
    bytes: u64,
    lkey: u32,
    rkey: u32,
    /// Memory that was moved in: never seen as a slice while the NIC may write it.
    memory: Option<NonNull<[u8]>>,
    pd: Pd,
}

// SAFETY: the region is used through libibverbs' functions alone, which may be called from any
// thread, and its pointer is behind a lock. Memory that was moved in is of integers and is only
// copied from.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Mr {
    /// Where it begins, as peers and work requests name it. Of a dma-buf that is the `iova` it was
    /// registered under.
    #[must_use]
    pub fn addr(&self) -> u64 {
        self.0.addr
    }

    /// Its bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.0.bytes
    }

    /// The key for own work requests.
    #[must_use]
    pub fn lkey(&self) -> u32 {
        self.0.lkey
    }

    /// The key for peers.
    #[must_use]
    pub fn rkey(&self) -> u32 {
        self.0.rkey
    }

    /// `bytes` bytes of it from `offset`, for a work request.
    ///
    /// # Errors
    /// [`VerbsError::OutOfRange`].
    pub fn sge(&self, offset: u64, bytes: u32) -> Result<Sge, VerbsError> {
        within(offset, bytes.into(), self.0.bytes)?;
        Ok(Sge { addr: self.0.addr + offset, bytes, lkey: self.0.lkey })
    }

    /// Copies from memory that was moved in, from `offset`. Bytes that a NIC is writing meanwhile
    /// may be old or new.
    ///
    /// # Errors
    /// [`VerbsError::OutOfRange`]; memory that was not moved in has no bytes to read.
    pub fn read(&self, offset: usize, into: &mut [u8]) -> Result<(), VerbsError> {
        let len = self.0.memory.map_or(0, NonNull::len);
        within(offset as u64, into.len() as u64, len as u64)?;
        if let Some(memory) = self.0.memory {
            // SAFETY: the range was checked above, the memory lives as long as `self`, and no
            // reference to it exists.
            unsafe {
                let from = memory.cast::<u8>().add(offset);
                ptr::copy_nonoverlapping(from.as_ptr(), into.as_mut_ptr(), into.len());
            }
        }
        Ok(())
    }

    /// Deregisters it now: from here on work with its keys, of peers as well, fails with a
    /// protection error. Memory that was moved in stays until the last clone is gone. Revoking
    /// again does nothing, unless [`Mr::is_registered`] says that it failed.
    pub fn revoke(&self) {
        self.0.deregister();
    }

    /// Whether the NIC may still use it: it was not revoked, or the device would not let go of it.
    #[must_use]
    pub fn is_registered(&self) -> bool {
        !self.0.raw.lock().unwrap_or_else(PoisonError::into_inner).is_null()
    }
}

impl Inner {
    fn deregister(&self) {
        let mut raw = self.raw.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the region is registered, its domain is held, and it is forgotten below.
        if !raw.is_null() && unsafe { (self.pd.context().functions().ibv_dereg_mr)(*raw) } == 0 {
            *raw = ptr::null_mut();
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.deregister();
        let raw = self.raw.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(memory) = self.memory
            && raw.is_null()
        {
            // SAFETY: it came from a box, is given back once, and no NIC uses it any more. What a
            // device would not let go of is leaked instead.
            drop(unsafe { Box::from_raw(memory.as_ptr()) });
        }
    }
}

impl fmt::Debug for Mr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mr")
            .field("device", &self.0.pd.context().name())
            .field("addr", &format_args!("{:#x}", self.0.addr))
            .field("bytes", &self.0.bytes)
            .field("lkey", &format_args!("{:#x}", self.0.lkey))
            .field("rkey", &format_args!("{:#x}", self.0.rkey))
            .finish()
    }
}

pub(crate) fn register_owned(pd: &Pd, memory: Box<[u8]>, access: Access) -> Result<Mr, VerbsError> {
    let bytes = memory.len();
    // SAFETY: a box is never null.
    let memory = unsafe { NonNull::new_unchecked(Box::into_raw(memory)) };
    let addr = memory.cast::<u8>().as_ptr();
    // SAFETY: the memory is given back only after it is deregistered, and no reference to it exists
    // meanwhile.
    match unsafe { register(pd, addr, bytes, access, Some(memory)) } {
        Ok(mr) => Ok(mr),
        Err(error) => {
            // SAFETY: it came from a box, and nothing was registered.
            drop(unsafe { Box::from_raw(memory.as_ptr()) });
            Err(error)
        }
    }
}

/// # Safety
/// As [`Pd::register_raw`].
pub(crate) unsafe fn register_raw(
    pd: &Pd,
    addr: *mut u8,
    bytes: usize,
    access: Access,
) -> Result<Mr, VerbsError> {
    // SAFETY: as the caller promises.
    unsafe { register(pd, addr, bytes, access, None) }
}

/// # Safety
/// As [`Pd::register_raw`].
pub(crate) unsafe fn register_chunked(
    pd: &Pd,
    addr: *mut u8,
    bytes: usize,
    access: Access,
    max_bytes: u64,
) -> Result<Vec<Mr>, VerbsError> {
    pieces(addr as u64, bytes as u64, max_bytes, rustix::param::page_size() as u64)?
        .into_iter()
        .map(|(at, bytes)| {
            let addr = addr.wrapping_add((at - addr as u64) as usize);
            // SAFETY: as the caller promises of the whole.
            unsafe { register(pd, addr, bytes as usize, access, None) }
        })
        .collect()
}

/// # Safety
/// As [`Pd::register_raw`]; `memory`, if any, is at `addr`, came from a box, and is the region's
/// from here on if it succeeds.
unsafe fn register(
    pd: &Pd,
    addr: *mut u8,
    bytes: usize,
    access: Access,
    memory: Option<NonNull<[u8]>>,
) -> Result<Mr, VerbsError> {
    let functions = pd.context().functions();
    let (name, raw) = if access.has_optional() {
        let iova = addr as u64;
        // SAFETY: as the caller promises. The older function refuses optional bits, so the header
        // calls this one for them (`__ibv_reg_mr` of <infiniband/verbs.h>).
        let raw = unsafe {
            (functions.ibv_reg_mr_iova2)(pd.raw(), addr.cast(), bytes, iova, access.bits())
        };
        ("ibv_reg_mr_iova2", raw)
    } else {
        let bits = access.bits().cast_signed();
        // SAFETY: as the caller promises.
        ("ibv_reg_mr", unsafe { (functions.ibv_reg_mr)(pd.raw(), addr.cast(), bytes, bits) })
    };
    adopt(pd, name, raw, addr as u64, bytes, memory)
}

pub(crate) fn register_dmabuf(
    pd: &Pd,
    fd: BorrowedFd<'_>,
    offset: u64,
    bytes: usize,
    iova: u64,
    access: Access,
) -> Result<Mr, VerbsError> {
    const NAME: &str = "ibv_reg_dmabuf_mr";
    let Some(register) = pd.context().functions().ibv_reg_dmabuf_mr else {
        let why = "libibverbs has no such function; install rdma-core 34 or later".to_owned();
        return Err(VerbsError::Unsupported { operation: NAME, why });
    };
    let bits = access.bits().cast_signed();
    // SAFETY: the domain is there and the descriptor is open; the kernel holds the buffer itself.
    let raw = unsafe { register(pd.raw(), offset, bytes, iova, fd.as_raw_fd(), bits) };
    adopt(pd, NAME, raw, iova, bytes, None)
}

fn adopt(
    pd: &Pd,
    name: &'static str,
    raw: *mut sys::ibv_mr,
    addr: u64,
    bytes: usize,
    memory: Option<NonNull<[u8]>>,
) -> Result<Mr, VerbsError> {
    let bytes = bytes as u64;
    if raw.is_null() {
        return Err(VerbsError::register(name, bytes, io::Error::last_os_error()));
    }
    // SAFETY: the region is there, and its keys do not change.
    let (lkey, rkey) = unsafe { ((*raw).lkey, (*raw).rkey) };
    let (raw, pd) = (Mutex::new(raw), pd.clone());
    Ok(Mr(Arc::new(Inner { raw, addr, bytes, lkey, rkey, memory, pd })))
}
