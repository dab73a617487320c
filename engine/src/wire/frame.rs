//! Frame headers of a data lane: 64 bytes, little-endian, each with its own checksum.
//!
//! A data frame names a range of a chunk's piece order (see [`crate::plan`]) in positions of the
//! grant, never addresses: a write outside the grant cannot even be said. Its payload follows: the
//! pieces' bytes in order.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::ids::Epoch;

/// Bytes of every frame header.
pub(crate) const HEADER_BYTES: usize = 64;
/// Largest payload of a frame that is more than one piece, in bytes. Large enough that headers and
/// system calls vanish, small enough that rooms take turns every few hundred microseconds.
pub(crate) const FRAME_BYTES: u64 = 1 << 20;

const FRAME_MAGIC: [u8; 2] = *b"kv";

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Frame {
    /// Page writes; the payload follows.
    Data(DataFrame),
    /// Every data frame up to `seq` has been placed or answered by a reject.
    Ack {
        /// Number of the data frame.
        seq: u64,
    },
    /// A data frame was drained and not placed.
    Reject {
        /// Number of the data frame.
        seq: u64,
        /// Room slot the frame named.
        slot: u32,
        /// Epoch the frame named.
        epoch: Epoch,
        /// Why.
        reason: RejectReason,
    },
}

/// Which page writes a data frame carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DataFrame {
    /// Number of this frame on its lane, from 1.
    pub(crate) seq: u64,
    /// The receiver's slot of the room.
    pub(crate) slot: u32,
    /// The room's epoch.
    pub(crate) epoch: Epoch,
    /// The receiver's pool.
    pub(crate) pool: u8,
    /// First layer of the chunk, by its number in the model.
    pub(crate) layer: u16,
    /// Layers of the chunk.
    pub(crate) layers: u16,
    /// The chunk's first position in the grant's page list.
    pub(crate) at: u32,
    /// Positions in the chunk.
    pub(crate) count: u32,
    /// First piece of this frame.
    pub(crate) first: u32,
    /// Pieces in this frame.
    pub(crate) pieces: u32,
    /// Bytes that follow the header.
    pub(crate) payload_bytes: u32,
}

/// Why a frame was not placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RejectReason {
    /// No such room here, or its grant was revoked.
    Revoked,
    /// The room stands, and the frame names something that its grant does not cover.
    Outside,
}

/// A header that is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum FrameError {
    #[error("not a frame header: the lane is out of step")]
    Magic,
    #[error("header checksum is wrong: the lane is out of step or its bytes were changed")]
    Checksum,
    #[error("unknown frame kind {0}")]
    Kind(u8),
    #[error("unknown reject reason {0}")]
    Reason(u8),
}

const KIND_DATA: u8 = 1;
const KIND_ACK: u8 = 2;
const KIND_REJECT: u8 = 3;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct Raw {
    magic: [u8; 2],
    kind: u8,
    /// Pool of a data frame, reason of a reject.
    detail: u8,
    slot: U32,
    seq: U64,
    epoch: U64,
    layer: U16,
    layers: U16,
    at: U32,
    count: U32,
    first: U32,
    pieces: U32,
    payload_bytes: U32,
    reserved: [u8; 12],
    /// CRC-32C of everything before it.
    checksum: U32,
}

const _: () = assert!(size_of::<Raw>() == HEADER_BYTES);

impl Frame {
    /// The header's bytes.
    pub(crate) fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut raw = Raw::new_zeroed();
        raw.magic = FRAME_MAGIC;
        match *self {
            Self::Data(data) => {
                raw.kind = KIND_DATA;
                raw.detail = data.pool;
                raw.slot = data.slot.into();
                raw.seq = data.seq.into();
                raw.epoch = data.epoch.0.into();
                raw.layer = data.layer.into();
                raw.layers = data.layers.into();
                raw.at = data.at.into();
                raw.count = data.count.into();
                raw.first = data.first.into();
                raw.pieces = data.pieces.into();
                raw.payload_bytes = data.payload_bytes.into();
            }
            Self::Ack { seq } => {
                raw.kind = KIND_ACK;
                raw.seq = seq.into();
            }
            Self::Reject { seq, slot, epoch, reason } => {
                raw.kind = KIND_REJECT;
                raw.detail = match reason {
                    RejectReason::Revoked => 1,
                    RejectReason::Outside => 2,
                };
                raw.slot = slot.into();
                raw.seq = seq.into();
                raw.epoch = epoch.0.into();
            }
        }
        raw.checksum = checksum(&raw).into();
        zerocopy::transmute!(raw)
    }

    /// Puts the magic and the checksum of arbitrary bytes right.
    #[cfg(feature = "fuzzing")]
    pub(crate) fn seal(bytes: &mut [u8; HEADER_BYTES]) {
        bytes[..2].copy_from_slice(&FRAME_MAGIC);
        let mut raw: Raw = zerocopy::transmute!(*bytes);
        raw.checksum = checksum(&raw).into();
        *bytes = zerocopy::transmute!(raw);
    }

    /// # Errors
    /// [`FrameError`] for bytes that are not a header of this version. The lane cannot go on: where
    /// the next header begins is unknown.
    pub(crate) fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, FrameError> {
        let raw: Raw = zerocopy::transmute!(*bytes);
        if raw.magic != FRAME_MAGIC {
            return Err(FrameError::Magic);
        }
        if raw.checksum.get() != checksum(&raw) {
            return Err(FrameError::Checksum);
        }
        let (seq, slot, epoch) = (raw.seq.get(), raw.slot.get(), Epoch(raw.epoch.get()));
        match raw.kind {
            KIND_DATA => Ok(Self::Data(DataFrame {
                seq,
                slot,
                epoch,
                pool: raw.detail,
                layer: raw.layer.get(),
                layers: raw.layers.get(),
                at: raw.at.get(),
                count: raw.count.get(),
                first: raw.first.get(),
                pieces: raw.pieces.get(),
                payload_bytes: raw.payload_bytes.get(),
            })),
            KIND_ACK => Ok(Self::Ack { seq }),
            KIND_REJECT => {
                let reason = match raw.detail {
                    1 => RejectReason::Revoked,
                    2 => RejectReason::Outside,
                    other => return Err(FrameError::Reason(other)),
                };
                Ok(Self::Reject { seq, slot, epoch, reason })
            }
            other => Err(FrameError::Kind(other)),
        }
    }
}

fn checksum(raw: &Raw) -> u32 {
    crc32c::crc32c(&raw.as_bytes()[..HEADER_BYTES - 4])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn data() -> DataFrame {
        DataFrame {
            seq: 9,
            slot: 3,
            epoch: Epoch(1 << 40),
            pool: 2,
            layer: 7,
            layers: 30,
            at: 5,
            count: 16,
            first: 100,
            pieces: 12,
            payload_bytes: 12 * 65536,
        }
    }

    #[test]
    fn every_frame_is_read_back_as_it_was_written() {
        let reject = |reason| Frame::Reject { seq: 4, slot: 8, epoch: Epoch(2), reason };
        for frame in [
            Frame::Data(data()),
            Frame::Ack { seq: u64::MAX },
            reject(RejectReason::Revoked),
            reject(RejectReason::Outside),
        ] {
            assert_eq!(Frame::decode(&frame.encode()), Ok(frame));
        }
    }

    proptest! {
        #[test]
        fn a_header_with_any_bit_changed_is_refused(bit in 0usize..HEADER_BYTES * 8) {
            let mut bytes = Frame::Data(data()).encode();
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(Frame::decode(&bytes).is_err());
        }

        #[test]
        fn any_bytes_decode_to_a_frame_or_a_typed_error(bytes in prop::array::uniform32(any::<u8>())) {
            let mut header = [0u8; HEADER_BYTES];
            header[..32].copy_from_slice(&bytes);
            let _ = Frame::decode(&header);
        }
    }
}
