//! The room core: what a room is allowed to do next.
//!
//! [`sender`] and [`receiver`] are pure state machines: an event and the time go in, a reaction comes
//! out. They know no I/O, clock, lock or memory. Everything they promise (a room ends once, done means
//! landed, never backwards) is theirs alone, so that it can be tested and searched exhaustively.
//! [`ledger`] is the order of what was posted on a lane, [`links`] what becomes of it when the lane goes
//! down, [`release`] when a room's pages are quiet; [`cell`] is what a room's handle sees.

pub(crate) mod cell;
pub(crate) mod ledger;
pub(crate) mod links;
#[cfg(test)]
mod model;
pub(crate) mod receiver;
pub(crate) mod release;
pub(crate) mod sender;
