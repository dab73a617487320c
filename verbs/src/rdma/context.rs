//! An open device.

use std::ffi::{CStr, c_int};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use ibverbs_sys as sys;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use super::attributes::{DeviceAttributes, PortAttributes};
use super::channel::CompletionChannel;
use super::cq::Cq;
use super::error::{VerbsError, check};
use super::event::AsyncEvent;
use super::ffi::Functions;
use super::gids;
use super::pd::Pd;
use crate::gid::GidEntry;
use crate::library::{Library, LibraryError};

/// An open device. Clones are the same one; it is closed when the last of them and everything made
/// from it are gone.
///
/// All handles of this layer may be used from any thread: libibverbs is thread-safe, unless a
/// variable such as `MLX5_SINGLE_THREADED` in the environment of the process asks it not to be.
#[derive(Clone)]
pub struct Context(Arc<Inner>);

struct Inner {
    library: Library,
    raw: NonNull<sys::ibv_context>,
    name: String,
    guid: u64,
}

// SAFETY: the context is used through libibverbs' functions alone, which may be called from any
// thread (libibverbs' README and `ibv_open_device(3)`), and its fields that are read here do not
// change while it is open.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Context {
    /// Opens the device called `device`, as [`Library::devices`] spells it.
    ///
    /// # Errors
    /// [`VerbsError::Library`] if the library cannot list devices, [`VerbsError::NoSuchDevice`] if
    /// none is called so, [`VerbsError::NotPermitted`] if this process may not open it.
    pub fn open(library: &Library, device: &str) -> Result<Self, VerbsError> {
        let functions = library.functions();
        let raw = open_by_name(library, device)?;
        let mut inner = Inner { library: library.clone(), raw, name: device.to_owned(), guid: 0 };
        // SAFETY: the descriptor belongs to the open context, which outlives the borrow.
        let events = unsafe { BorrowedFd::borrow_raw((*raw.as_ptr()).async_fd) };
        // `next_async_event` must not block.
        fcntl_getfl(events)
            .and_then(|flags| fcntl_setfl(events, flags | OFlags::NONBLOCK))
            .map_err(|errno| VerbsError::os("fcntl of the event descriptor", errno.into()))?;
        inner.guid = u64::from_be(query(functions, raw)?.node_guid);
        Ok(Self(Arc::new(inner)))
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Its GUID, 0 if it has none: the same for all its ports, different for every device.
    #[must_use]
    pub fn guid(&self) -> u64 {
        self.0.guid
    }

    /// The library it was opened with.
    #[must_use]
    pub fn library(&self) -> &Library {
        &self.0.library
    }

    /// What the device can do.
    ///
    /// # Errors
    /// [`VerbsError::DeviceGone`] or [`VerbsError::Os`].
    pub fn attributes(&self) -> Result<DeviceAttributes, VerbsError> {
        query(self.functions(), self.0.raw).map(|raw| DeviceAttributes::from_raw(&raw))
    }

    /// The state of a port now. Ports are counted from 1.
    ///
    /// # Errors
    /// [`VerbsError::NoSuchPort`], [`VerbsError::DeviceGone`] or [`VerbsError::Os`].
    pub fn port(&self, port: u8) -> Result<PortAttributes, VerbsError> {
        let mut raw = sys::ibv_port_attr::default();
        // SAFETY: the context is open. The function fills the older, shorter structure that `raw`
        // begins with (`struct _compat_ibv_port_attr` of libibverbs/verbs.c: up to `flags`).
        let code =
            unsafe { (self.functions().ibv_query_port)(self.raw(), port, (&raw mut raw).cast()) };
        check(code).map_err(|source| match source.kind() {
            io::ErrorKind::InvalidInput => {
                VerbsError::NoSuchPort { device: self.name().to_owned(), port, source }
            }
            _ => VerbsError::os("ibv_query_port", source),
        })?;
        Ok(PortAttributes::from_raw(&raw, self.name(), port))
    }

    /// The used entries of a port's GID table, by index; give them to
    /// [`rank_gids`](crate::rank_gids).
    ///
    /// # Errors
    /// As [`Context::port`].
    pub fn gid_table(&self, port: u8) -> Result<Vec<GidEntry>, VerbsError> {
        gids::table(self, port)
    }

    /// Readable when [`Context::next_async_event`] has something to say.
    #[must_use]
    pub fn async_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor belongs to the context, which is open as long as `self` lives.
        unsafe { BorrowedFd::borrow_raw((*self.raw()).async_fd) }
    }

    /// What the device has to say, if anything; never waits. The event has been acknowledged, so it
    /// does not hold up the destruction of what it is about.
    ///
    /// # Errors
    /// [`VerbsError::DeviceGone`] or [`VerbsError::Os`].
    pub fn next_async_event(&self) -> Result<Option<AsyncEvent>, VerbsError> {
        AsyncEvent::next(self)
    }

    /// A protection domain: memory and queue pairs of different ones cannot be used together.
    ///
    /// # Errors
    /// [`VerbsError::Exhausted`], [`VerbsError::DeviceGone`] or [`VerbsError::Os`].
    pub fn allocate_pd(&self) -> Result<Pd, VerbsError> {
        Pd::allocate(self)
    }

    /// A channel on which completion queues tell of completions.
    ///
    /// # Errors
    /// [`VerbsError::Os`], where the process has no file descriptor left.
    pub fn completion_channel(&self) -> Result<CompletionChannel, VerbsError> {
        CompletionChannel::create(self)
    }

    /// A completion queue of at least `depth` entries.
    ///
    /// # Errors
    /// [`VerbsError::BeyondLimits`] if `depth` is 0 or above `max_cqe`,
    /// [`VerbsError::Exhausted`] if there are no more queues.
    pub fn create_cq(
        &self,
        depth: u32,
        channel: Option<&CompletionChannel>,
    ) -> Result<Cq, VerbsError> {
        Cq::create(self, depth, channel)
    }

    pub(crate) fn raw(&self) -> *mut sys::ibv_context {
        self.0.raw.as_ptr()
    }

    pub(crate) fn functions(&self) -> &Functions {
        self.0.library.functions()
    }

    /// The table of functions that posting and polling go through, as the inline functions of
    /// `<infiniband/verbs.h>` do.
    #[inline]
    pub(crate) fn ops(&self) -> &sys::ibv_context_ops {
        // SAFETY: the context is open as long as `self` lives, and its provider sets the table
        // before `ibv_open_device` returns.
        unsafe { &(*self.raw()).ops }
    }

    /// Whether both are the same open device: objects of two cannot be used together.
    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: everything made from the context holds it, so nothing of it is left; it is closed
        // once. The result says nothing that could still be acted on.
        unsafe { (self.library.functions().ibv_close_device)(self.raw.as_ptr()) };
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Context").field(&self.0.name).finish()
    }
}

impl AsFd for Context {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.async_fd()
    }
}

fn query(
    functions: &Functions,
    context: NonNull<sys::ibv_context>,
) -> Result<sys::ibv_device_attr, VerbsError> {
    let mut raw = sys::ibv_device_attr::default();
    // SAFETY: the context is open, and the function fills the structure.
    let code = unsafe { (functions.ibv_query_device)(context.as_ptr(), &raw mut raw) };
    check(code).map_err(|source| VerbsError::os("ibv_query_device", source))?;
    Ok(raw)
}

fn open_by_name(library: &Library, device: &str) -> Result<NonNull<sys::ibv_context>, VerbsError> {
    let functions = library.functions();
    let mut count: c_int = 0;
    // SAFETY: the function takes a pointer to an int it may write.
    let list = unsafe { (functions.ibv_get_device_list)(&raw mut count) };
    if list.is_null() {
        return Err(LibraryError::list_failed(io::Error::last_os_error()).into());
    }
    let mut opened = None;
    for index in 0..usize::try_from(count).unwrap_or(0) {
        // SAFETY: the list holds `count` device pointers and has not been freed.
        let entry = unsafe { *list.add(index) };
        if entry.is_null() {
            break;
        }
        // SAFETY: the device is of the list, and its name lives as long as that.
        let name = unsafe {
            let name = (functions.ibv_get_device_name)(entry);
            if name.is_null() { continue } else { CStr::from_ptr(name) }
        };
        if name.to_string_lossy() == device {
            // SAFETY: as above. The open context holds the device itself.
            let context = unsafe { (functions.ibv_open_device)(entry) };
            opened = Some(NonNull::new(context).ok_or_else(io::Error::last_os_error));
            break;
        }
    }
    // SAFETY: the list came from the library, is freed once, and no pointer into it is kept.
    unsafe { (functions.ibv_free_device_list)(list) };
    match opened {
        Some(Ok(context)) => Ok(context),
        Some(Err(source)) => Err(VerbsError::os("ibv_open_device", source)),
        None => {
            let have = library.devices()?;
            Err(VerbsError::NoSuchDevice { device: device.to_owned(), have })
        }
    }
}
