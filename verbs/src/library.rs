//! Is `libibverbs` there, and does it see devices? Loaded at run time, so that programs built
//! with this crate start on hosts that have never heard of RDMA.

use std::ffi::{CStr, OsStr, OsString, c_char, c_int, c_void};
use std::io;

use thiserror::Error;

/// Most devices taken from the library's list: a bound on a number that comes from outside.
const MAX_DEVICES: usize = 1024;

/// The exported functions an RDMA fabric calls. Posting and polling are not among them: they are
/// inline in the C headers and go through the table of an open device.
const REQUIRED_SYMBOLS: [&str; 27] = [
    "ibv_get_device_list",
    "ibv_free_device_list",
    "ibv_get_device_name",
    "ibv_open_device",
    "ibv_close_device",
    "ibv_query_device",
    "ibv_query_port",
    "ibv_query_gid",
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

/// A loaded `libibverbs` with every function a fabric needs.
///
/// The library stays loaded for the rest of the process: the providers it loads register
/// themselves with it and are never unloaded either.
#[derive(Debug)]
pub struct Library {
    name: OsString,
    get_device_list: GetDeviceList,
    free_device_list: FreeDeviceList,
    get_device_name: GetDeviceName,
    dmabuf: bool,
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
        for symbol in REQUIRED_SYMBOLS {
            // SAFETY: only the address is looked up; nothing is called or read through it.
            unsafe { symbol_of::<*const c_void>(&library, name, symbol) }?;
        }
        // SAFETY: the types below are those of <infiniband/verbs.h>, whose ABI the caller vouches
        // for, with `struct ibv_device *` as an opaque pointer.
        let loaded = unsafe {
            Self {
                name: name.to_owned(),
                get_device_list: symbol_of(&library, name, "ibv_get_device_list")?,
                free_device_list: symbol_of(&library, name, "ibv_free_device_list")?,
                get_device_name: symbol_of(&library, name, "ibv_get_device_name")?,
                dmabuf: symbol_of::<*const c_void>(&library, name, DMABUF_SYMBOL).is_ok(),
            }
        };
        // Never unloaded (see the type's documentation), so the addresses above stay valid.
        std::mem::forget(library);
        Ok(loaded)
    }

    /// The name it was loaded by.
    #[must_use]
    pub fn name(&self) -> &OsStr {
        &self.name
    }

    /// Whether it can register dma-buf memory. The kernel and the NIC must be able to as well.
    #[must_use]
    pub const fn supports_dmabuf(&self) -> bool {
        self.dmabuf
    }

    /// Names of the devices the library has a provider for; never empty.
    ///
    /// # Errors
    /// [`LibraryError::NoDevices`] if there is none, [`LibraryError::NoKernelSupport`] or
    /// [`LibraryError::ListFailed`] if the library cannot tell.
    pub fn devices(&self) -> Result<Vec<String>, LibraryError> {
        let mut count: c_int = 0;
        // SAFETY: the function takes a pointer to an int it may write.
        let list = unsafe { (self.get_device_list)(&raw mut count) };
        if list.is_null() {
            let source = io::Error::last_os_error();
            return Err(match source.raw_os_error() {
                Some(code) if code == rustix::io::Errno::NOSYS.raw_os_error() => {
                    LibraryError::NoKernelSupport
                }
                _ => LibraryError::ListFailed { source },
            });
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
            let name = unsafe { (self.get_device_name)(device) };
            if !name.is_null() {
                // SAFETY: the name is a C string that lives as long as the list.
                let name = unsafe { CStr::from_ptr(name) };
                names.push(name.to_string_lossy().into_owned());
            }
        }
        // SAFETY: the list came from the library, is freed once, and no pointer into it is kept.
        unsafe { (self.free_device_list)(list) };
        if names.is_empty() { Err(LibraryError::NoDevices) } else { Ok(names) }
    }
}

/// What the loader said: `source` alone only says that it failed.
fn root_cause(source: &libloading::Error) -> String {
    std::error::Error::source(source).map_or_else(|| source.to_string(), ToString::to_string)
}

/// The symbol as a `T`.
///
/// # Safety
/// `T` must be a pointer type that fits the symbol.
unsafe fn symbol_of<T: Copy>(
    library: &libloading::Library,
    name: &OsStr,
    symbol: &'static str,
) -> Result<T, LibraryError> {
    // SAFETY: as the caller promises.
    let found = unsafe { library.get::<T>(symbol) };
    found
        .map(|found| *found)
        .map_err(|_| LibraryError::MissingSymbol { library: name.to_owned(), symbol })
}
