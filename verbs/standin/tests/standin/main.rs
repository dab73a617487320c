//! The promises of the stand-in, each kept through the C functions as a caller finds them.

#![allow(unreachable_pub, reason = "one crate of many modules")]

mod common;

mod channels;
mod deferred;
mod devices;
mod errors;
mod memory;
mod modify;
mod queues;
mod receives;
mod scripts;
mod silence;
mod teardown;
mod threads;
mod transfer;
