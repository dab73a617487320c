//! RDMA through `libibverbs`, which is looked for at run time: what this host can do with it, and
//! safe handles to do it with.
//!
//! Three questions, each answered by one module and all together by [`HostReport::probe`]:
//!
//! | question | answer |
//! |---|---|
//! | Which devices, ports and GIDs does the kernel show? | [`inventory`], from sysfs |
//! | Can `libibverbs` be loaded, and does it see the devices? | [`library`], by `dlopen` |
//! | May this process lock enough memory to register it? | [`memlock`] |
//!
//! [`gid`] ranks the entries of a GID table, so that nobody has to guess an index.
//!
//! With the feature `rdma`, which is on by default and needs CMake and libclang to build, devices are
//! opened, memory is registered, and queue pairs move bytes: a `Context` is where that begins.
//! Programs link against no RDMA library either way.
//!
//! A handle holds what it was made from, so that things are destroyed in the right order whatever
//! order handles are dropped in; all of them may be used from any thread, and none panics. Whatever
//! is given to a safe function, a NIC only touches memory that was moved in, or registered by
//! `unsafe` calls.
//!
//! ```
//! let report = kvferry_verbs::HostReport::probe();
//! match &report.inventory {
//!     Ok(inventory) => println!("{} RDMA devices", inventory.devices.len()),
//!     Err(error) => println!("{error}"),
//! }
//! ```

pub mod gid;
pub mod inventory;
pub mod library;
pub mod memlock;
#[cfg(feature = "rdma")]
mod rdma;
mod sysfs;

pub use gid::{Gid, GidClass, GidEntry, GidType, rank_gids};
pub use inventory::{Device, Inventory, InventoryError, LinkLayer, PhysicalState, Port, PortState};
pub use library::{Library, LibraryError};
pub use memlock::{Memlock, MemlockError};
#[cfg(feature = "rdma")]
pub use rdma::{
    Access, AddressVector, AsyncEvent, Batch, BatchError, Capacities, Completion,
    CompletionChannel, Context, Cq, DeviceAttributes, GlobalRoute, InitAttributes, Mr, Mtu, Pd,
    PortAttributes, PostError, PostFault, Qp, QpAttributes, QpOptions, QpState, Recv,
    RtrAttributes, RtsAttributes, Sge, Srq, SrqOptions, VerbsError, Work, WorkError, WorkOpcode,
    WorkStatus, WrFlags,
};
pub use sysfs::{Fault, FaultKind};

/// Everything this crate can say about the host it runs on.
#[derive(Debug)]
#[non_exhaustive]
pub struct HostReport {
    /// The kernel's view.
    pub inventory: Result<Inventory, InventoryError>,
    /// The user-space library's view.
    pub library: Result<LibraryReport, LibraryError>,
    /// What this process may lock, and so register.
    pub memlock: Memlock,
}

/// What a usable `libibverbs` said.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LibraryReport {
    /// Names of the devices the library has a provider for; never empty. A device of the
    /// [`Inventory`] that is missing here has no provider package installed.
    pub devices: Vec<String>,
    /// Whether the library can register dma-buf memory (rdma-core 34 or later).
    pub dmabuf: bool,
}

impl HostReport {
    /// Asks all three questions. Never fails as a whole: each answer carries its own error.
    #[must_use]
    pub fn probe() -> Self {
        let library = Library::open().and_then(|library| {
            Ok(LibraryReport { devices: library.devices()?, dmabuf: library.supports_dmabuf() })
        });
        Self { inventory: Inventory::host(), library, memlock: Memlock::of_this_process() }
    }
}
