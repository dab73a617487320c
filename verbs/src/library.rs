//! Is `libibverbs` there, and does it see devices? Loaded at run time, so that programs built
//! with this crate start on hosts that have never heard of RDMA.

use std::ffi::{CStr, OsStr, OsString, c_char, c_int, c_void};
use std::fmt;
use std::io;
use std::sync::Arc;

use thiserror::Error;

/// Most devices taken from the library's list: a bound on a number that comes from outside.
const MAX_DEVICES: usize = 1024;

/// The exported functions an RDMA fabric calls. Posting and polling are not among them: they are
/// inline in the C headers and go through the table of an open device.
pub(crate) const REQUIRED_SYMBOLS: [&str; 26] = [
    "ibv_get_device_list",
    "ibv_free_device_list",
    "ibv_get_device_name",
    "ibv_open_device",
    "ibv_close_device",
    "ibv_query_device",
    "ibv_query_port",
    "ibv_alloc_pd",
    "ibv_dealloc_pd",
    "ibv_reg_mr",
    "ibv_reg_mr_iova2",
    "ibv_dereg_mr",
    "ibv_create_comp_channel",
    "ibv_destroy_comp_channel",
    "ibv_create_cq",
    "ibv_destroy_cq",
    "ibv_get_cq_event",
    "ibv_ack_cq_events",
    "ibv_create_srq",
    "ibv_destroy_srq",
    "ibv_create_qp",
    "ibv_modify_qp",
    "ibv_query_qp",
    "ibv_destroy_qp",
    "ibv_get_async_event",
    "ibv_ack_async_event",
];

/// Since rdma-core 34 (symbol version `IBVERBS_1.12`).
const DMABUF_SYMBOL: &str = "ibv_reg_dmabuf_mr";

type GetDeviceList = unsafe extern "C" fn(*mut c_int) -> *mut *mut c_void;
type FreeDeviceList = unsafe extern "C" fn(*mut *mut c_void);
type GetDeviceName = unsafe extern "C" fn(*mut c_void) -> *const c_char;

/// A loaded `libibverbs` with every function a fabric needs. Clones are the same library.
///
/// The library stays loaded for the rest of the process: the providers it loads register
/// themselves with it and are never unloaded either.
#[derive(Clone)]
pub struct Library(Arc<Inner>);

struct Inner {
    name: OsString,
    get_device_list: GetDeviceList,
    free_device_list: FreeDeviceList,
    get_device_name: GetDeviceName,
    dmabuf: bool,
    #[cfg(feature = "rdma")]
    functions: crate::rdma::Functions,
}

/// Why RDMA cannot be used through `libibverbs`.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LibraryError {
    /// It is not installed, or one of its own dependencies is not.
    #[error(
        "cannot load {}: {}; install rdma-core's user-space libraries (packages libibverbs1 and \
         ibverbs-providers, or libibverbs)",
        name.display(),
        root_cause(source)
    )]
    NoLibrary {
        /// The library asked for.
        name: OsString,
        /// What the loader said.
        source: libloading::Error,
    },
    /// It is too old, or not libibverbs.
    #[error(
        "{} has no function {symbol}; install rdma-core 28 or later, or a vendor stack of that age",
        library.display()
    )]
    MissingSymbol {
        /// The library.
        library: OsString,
        /// The missing function.
        symbol: &'static str,
    },
    /// The kernel has no RDMA subsystem loaded, or this container cannot see it.
    #[error(
        "the kernel offers no RDMA: load the NIC's driver and ib_uverbs (modprobe ib_uverbs), or \
         pass /dev/infiniband into the container"
    )]
    NoKernelSupport,
    /// The list of devices could not be had for another reason.
    #[error("libibverbs cannot list devices: {source}; check access to /sys/class/infiniband")]
    ListFailed {
        /// What the library left in `errno`.
        source: io::Error,
    },
    /// The library works and sees nothing.
    #[error(
        "libibverbs sees no RDMA device: if /sys/class/infiniband lists one, install its provider \
         (package ibverbs-providers) and pass /dev/infiniband into the container"
    )]
    NoDevices,
}

impl LibraryError {
    /// The error for a list of devices that could not be had.
    pub(crate) fn list_failed(source: io::Error) -> Self {
        match source.raw_os_error() {
            Some(code) if code == rustix::io::Errno::NOSYS.raw_os_error() => Self::NoKernelSupport,
            _ => Self::ListFailed { source },
        }
    }
}

impl Library {
    /// Name under which the loader knows the library.
    pub const NAME: &str = "libibverbs.so.1";

    /// Loads [`Library::NAME`].
    ///
    /// # Errors
    /// [`LibraryError::NoLibrary`] or [`LibraryError::MissingSymbol`].
    pub fn open() -> Result<Self, LibraryError> {
        // SAFETY: the name is that of libibverbs' stable ABI, version 1.
        unsafe { Self::open_named(Self::NAME) }
    }

    /// Loads the library called `name`, a name the loader looks up or a path.
    ///
    /// # Errors
    /// [`LibraryError::NoLibrary`] if it cannot be loaded, [`LibraryError::MissingSymbol`] if it
    /// lacks a function a fabric needs.
    ///
    /// # Safety
    /// Loading a library runs its initialisers, and its functions are called by their names: what
    /// `name` leads to must keep the ABI of libibverbs wherever it exports one of its names.
    pub unsafe fn open_named(name: impl AsRef<OsStr>) -> Result<Self, LibraryError> {
        let name = name.as_ref();
        // SAFETY: the caller vouches for the library's initialisers.
        let library = unsafe { libloading::Library::new(name) }
            .map_err(|source| LibraryError::NoLibrary { name: name.to_owned(), source })?;
        let find = |symbol: &str| {
            // SAFETY: only the address is looked up; nothing is called or read through it.
            let found = unsafe { library.get::<*const c_void>(symbol) };
            found.map_or(std::ptr::null(), |found| *found)
        };
        // SAFETY: the caller vouches for the ABI of what the library exports.
        let loaded = unsafe { Self::from_resolver(name, find) }?;
        // Never unloaded (see the type's documentation), so the addresses stay valid.
        std::mem::forget(library);
        Ok(loaded)
    }

    /// A library that is part of this program already: `resolve` gives the address of the function
    /// of a name, or null. `name` is what errors call it.
    ///
    /// # Errors
    /// [`LibraryError::MissingSymbol`] if it lacks a function a fabric needs.
    ///
    /// # Safety
    /// Whatever `resolve` gives for a name of libibverbs must be a function with the ABI of that
    /// one, for the rest of the process.
    pub unsafe fn from_resolver(
        name: impl AsRef<OsStr>,
        resolve: impl Fn(&str) -> *const c_void,
    ) -> Result<Self, LibraryError> {
        let name = name.as_ref();
        let find = |symbol: &'static str| {
            let found = resolve(symbol);
            let missing = || LibraryError::MissingSymbol { library: name.to_owned(), symbol };
            if found.is_null() { Err(missing()) } else { Ok(found) }
        };
        for symbol in REQUIRED_SYMBOLS {
            find(symbol)?;
        }
        // SAFETY: none is null, and the types are those of <infiniband/verbs.h>, whose ABI the
        // caller vouches for, with `struct ibv_device *` as an opaque pointer.
        let inner = unsafe {
            Inner {
                name: name.to_owned(),
                get_device_list: std::mem::transmute::<*const c_void, GetDeviceList>(find(
                    "ibv_get_device_list",
                )?),
                free_device_list: std::mem::transmute::<*const c_void, FreeDeviceList>(find(
                    "ibv_free_device_list",
                )?),
                get_device_name: std::mem::transmute::<*const c_void, GetDeviceName>(find(
                    "ibv_get_device_name",
                )?),
                dmabuf: find(DMABUF_SYMBOL).is_ok(),
                #[cfg(feature = "rdma")]
                functions: crate::rdma::Functions::resolve(find)?,
            }
        };
        Ok(Self(Arc::new(inner)))
    }

    /// The name it was loaded by.
    #[must_use]
    pub fn name(&self) -> &OsStr {
        &self.0.name
    }

    #[cfg(feature = "rdma")]
    pub(crate) fn functions(&self) -> &crate::rdma::Functions {
        &self.0.functions
    }

    /// Whether it can register dma-buf memory. The kernel and the NIC must be able to as well.
    #[must_use]
    pub fn supports_dmabuf(&self) -> bool {
        self.0.dmabuf
    }

    /// Names of the devices the library has a provider for; never empty.
    ///
    /// # Errors
    /// [`LibraryError::NoDevices`] if there is none, [`LibraryError::NoKernelSupport`] or
    /// [`LibraryError::ListFailed`] if the library cannot tell.
    pub fn devices(&self) -> Result<Vec<String>, LibraryError> {
        let mut count: c_int = 0;
        // SAFETY: the function takes a pointer to an int it may write.
        let list = unsafe { (self.0.get_device_list)(&raw mut count) };
        if list.is_null() {
            return Err(LibraryError::list_failed(io::Error::last_os_error()));
        }
        let count = usize::try_from(count).unwrap_or(0).min(MAX_DEVICES);
        let mut names = Vec::with_capacity(count);
        for index in 0..count {
            // SAFETY: the list holds `count` device pointers and has not been freed.
            let device = unsafe { *list.add(index) };
            if device.is_null() {
                break; // The list also ends with a null.
            }
            // SAFETY: the device comes from the list, which is still held.
            let name = unsafe { (self.0.get_device_name)(device) };
            if !name.is_null() {
                // SAFETY: the name is a C string that lives as long as the list.
                let name = unsafe { CStr::from_ptr(name) };
                names.push(name.to_string_lossy().into_owned());
            }
        }
        // SAFETY: the list came from the library, is freed once, and no pointer into it is kept.
        unsafe { (self.0.free_device_list)(list) };
        if names.is_empty() { Err(LibraryError::NoDevices) } else { Ok(names) }
    }
}

/// What the loader said: `source` alone only says that it failed.
fn root_cause(source: &libloading::Error) -> String {
    std::error::Error::source(source).map_or_else(|| source.to_string(), ToString::to_string)
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Library")
            .field("name", &self.0.name)
            .field("dmabuf", &self.0.dmabuf)
            .finish_non_exhaustive()
    }
}
