//! A stand-in for libibverbs inside one process.
//!
//! Tests of RDMA code need errors that no healthy NIC gives, at moments that no healthy NIC
//! chooses. Here a [`World`] of invented devices answers the C functions of libibverbs, for any
//! number of engines and threads of one process: `RC` queue pairs that move bytes, keep order, fill
//! up, run out of receives, break and flush as the InfiniBand specification says and as drivers
//! have been seen to do. What goes wrong, and when, is written in a script.
//!
//! It is a stand-in, not a NIC: it shows what code does with the answers it gets. No rate and no
//! latency may ever be taken from it; only the instructions its *caller* spends may be counted.
//!
//! ```
//! use kvferry_verbs_standin::{Fault, Pick, World, WorldOptions, sys};
//!
//! let world = World::new(WorldOptions::pair());
//! // What a loader of libibverbs asks for by name; a null pointer says that it is missing.
//! assert!(!world.resolve("ibv_open_device").is_null());
//! // The third write of the first device is refused by its peer.
//! let refused = world.script(
//!     Pick::any().device(0).opcode(sys::ibv_wr_opcode::IBV_WR_RDMA_WRITE).nth(3),
//!     Fault::fail(sys::ibv_wc_status::IBV_WC_REM_ACCESS_ERR),
//! );
//! // ... the code under test runs on `world.device_names()` ...
//! assert_eq!(world.fired(refused), 0);
//! assert!(world.leaks().is_empty());
//! ```
//!
//! # Which world a C function belongs to
//! A C function has no closure. `ibv_get_device_list` lists the devices of *every* world that is
//! alive, and everything else hangs off a device; so tests that run side by side open their devices
//! by name, and no two devices of a process share one (`standin3_0` is the first device of world 3).
//!
//! # What is simplified
//! - `RC` only; no atomics, no memory windows, no `SQD` state, one P_Key.
//! - A message moves whole or not at all, except for what a script or a missing receive leaves half
//!   done. A request whose PSN is not the expected one is never answered, also where a real
//!   responder would take it for a duplicate.
//! - Closing a device with objects alive is refused with `EBUSY`, where the kernel would destroy them.
//! - Memory that is unmapped while it is registered crashes the process instead of being pinned.

mod clock;
mod cq;
mod device;
mod execute;
mod ffi;
mod memory;
mod modify;
mod options;
mod qp;
mod queue;
mod respond;
mod script;
mod state;
mod world;

/// The types and constants of libibverbs, as `ibverbs-sys` has them; none of its functions.
pub use ibverbs_sys as sys;

pub use cq::POISON;
pub use ffi::resolve;
pub use options::{
    DeviceOptions, Gid, Limits, Mode, PortOptions, Statuses, UnknownRoute, WorldOptions,
};
pub use qp::VENDOR_ERR;
pub use script::{Call, Fault, Pick, RuleId};
pub use world::{QpView, World};
