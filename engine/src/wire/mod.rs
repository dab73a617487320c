//! What travels: control messages between engines, and the frames of data lanes.
//!
//! Everything here is decoding of untrusted bytes into checked values. Nothing panics, allocates more
//! than its named bound, or believes a length before the bytes are there.

pub(crate) mod frame;
pub(crate) mod message;
pub(crate) mod rails;

/// Version of everything on the wire. Peers of another version are refused by name.
pub(crate) const PROTOCOL_VERSION: u16 = 3;
/// First bytes of a connection.
pub(crate) const MAGIC: [u8; 4] = *b"KVFY";
