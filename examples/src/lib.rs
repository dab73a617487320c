//! The parts of the PD pair: a prefill and a decode process that each embed kvferry, and a driver
//! that starts both, feeds them the same prompts and checks every token.
//!
//! ```text
//!            pd-pair ([`pair`]): lines of JSON ([`protocol`]) to both, and from both
//!               /                                        \
//!    prefill ([`prefill`])                          decode ([`decode`])
//!    computes a prompt chunk by chunk,              grants pages of its own, waits for the
//!    writes each layer's pages as they come         room, generates on from the carried pages
//!               \                                        /
//!        [`model`] over [`store`] (a kvferry pool), pages from a [`pages`] free list
//! ```
//!
//! What the two sides' callers tell each other through a room is in [`carried`]; what both
//! processes share in [`node`] (the engine's start, the command loop) and [`flags`].

pub mod carried;
pub mod compute;
pub mod decode;
pub mod flags;
pub mod model;
pub mod node;
pub mod pages;
pub mod pair;
pub mod prefill;
pub mod prefix;
pub mod protocol;
pub mod store;
