//! What this host's GPUs can do for a NIC, found through the CUDA driver, which is loaded at run
//! time: nothing of CUDA is needed to build or to start.
//!
//! | question | answer |
//! |---|---|
//! | Is there a driver, and which devices? | [`Driver`], [`Device`] |
//! | Whose memory does this address point to? | [`PointerKind`] |
//! | Must the receiver flush before a GPU may read what a NIC wrote? | [`flush_policy`] |
//! | How far is this NIC from this GPU, and which CPUs are near it? | [`topology`], from sysfs |
//!
//! ```
//! match kvferry_gpu::Driver::open() {
//!     Ok(driver) => {
//!         for device in driver.devices()? {
//!             println!("{} {} {}", device.ordinal, device.pci_address, device.name);
//!         }
//!     }
//!     Err(error) => println!("no GPU: {error}"),
//! }
//! # Ok::<(), kvferry_gpu::GpuError>(())
//! ```

mod device;
mod driver;
mod error;
mod flush;
mod pointer;
pub mod topology;

pub use device::{Device, GpuDirect};
pub use driver::Driver;
pub use error::GpuError;
pub use flush::{Flush, FlushOptions, WritesOrdering, flush_policy};
pub use pointer::PointerKind;
pub use topology::{Distance, Locality, PciAddress, TopologyError};
