//! Promises about real devices: two of them that reach each other, as `KVFERRY_RDMA` names them.
//!
//! `KVFERRY_RDMA` is a list of pairs, `a1:b1,a2:b2`; the first is used, port 1 of both. Without it
//! every test says so and does nothing. On Soft-RoCE everything runs; on a real NIC, whose cable the
//! tests leave alone, all but the port that goes down. Statuses that differ between devices and
//! kernels are printed, and any of those that are known is accepted.
#![cfg(feature = "rdma")]

mod data;
mod local;
mod memory;
mod objects;
mod peers;
mod port;
mod queues;
mod receives;
mod refused;
mod rig;
