//! The room core: what a room is allowed to do next.
//!
//! [`sender`] and [`receiver`] are pure state machines: an event and the time go in, a reaction comes
//! out. They know no I/O, clock, lock or memory. Everything they promise (a room ends once, done means
//! landed, never backwards) is theirs alone, so that it can be tested and searched exhaustively.
//! [`ledger`] is the order of what was posted on a link; [`cell`] is what a room's handle sees.

pub(crate) mod cell;
pub(crate) mod ledger;
pub(crate) mod receiver;
pub(crate) mod sender;
