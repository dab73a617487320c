//! Control messages: postcard in frames of a 32-bit little-endian length and that many bytes.
//!
//! The handshake has its own messages and its own, smaller bound, for it speaks to strangers. Every
//! session message is idempotent: after a reconnect each side says again what stands.

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::failure::{Failure, Landed};
use crate::ids::{Epoch, Incarnation, LaneId, Role, RoomId};
use crate::memory::{LayoutMismatch, POOLS_MAX, PoolCard};
use crate::room::links::{REJECTED_MAX, Tally};
use crate::wire::rails::RailsCard;

/// Largest handshake frame in bytes: sixteen pool cards and some text, with room to spare.
pub(crate) const HELLO_FRAME_BYTES_MAX: usize = 16 << 10;
/// Largest session frame in bytes: a grant of [`GRANT_PAGES_MAX`] pages at five bytes each, and an
/// aux row of [`AUX_BYTES_MAX`].
pub(crate) const CONTROL_FRAME_BYTES_MAX: usize = 8 << 20;
/// Opaque bytes a grant can carry: a cached prefix's length, a sampling seed, a tag.
pub const GRANT_NOTE_BYTES_MAX: usize = 256;
/// Pages in one grant, over all its pools: a million tokens in one-token pages.
pub const GRANT_PAGES_MAX: usize = 1 << 20;
/// Extents that a checksum can cover: sixty-four layers of a thousand pieces of a chunked prefill.
pub(crate) const CHECKSUM_EXTENTS_MAX: usize = 1 << 16;
/// Longest description of an end of a lane in bytes: a queue pair and a few GIDs.
pub(crate) const LANE_END_BYTES_MAX: usize = 512;
/// Longest aux row in bytes: a first token, top-k logprobs and a hidden state fit many times over.
pub const AUX_BYTES_MAX: usize = 1 << 20;

/// What each side says of itself first. It goes to strangers, so it says nothing of memory: the pools
/// follow once the other side has proved itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub(crate) incarnation: Incarnation,
    /// Name for logs, as configured.
    pub(crate) name: String,
    /// Fresh random bytes that the other side's proof covers.
    pub(crate) nonce: [u8; 32],
    /// Whether this side has a secret. A side that has one talks to nobody without.
    pub(crate) has_secret: bool,
    /// Lanes this side would open.
    pub(crate) lanes: u16,
    /// What this side can carry pages by.
    pub(crate) carriers: Carriers,
    /// How this side does I/O on TCP lanes, for the peer's table.
    pub(crate) io: LaneIo,
    /// Silence after which this side gives the other up, in milliseconds: the other side speaks that
    /// much more often.
    pub(crate) silent_ms: u64,
    /// The port this side listens on, when it does: how it may be dialed back.
    pub(crate) listen_port: Option<u16>,
}

/// What an engine can carry pages by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Carriers {
    Tcp,
    /// RDMA, and TCP where that cannot be.
    RdmaOrTcp,
    /// RDMA and nothing else.
    RdmaOnly,
}

impl Carriers {
    /// Whether the two sides may try RDMA.
    ///
    /// # Errors
    /// One side takes nothing else and the other has none.
    pub(crate) fn agree(self, theirs: Self) -> Result<bool, Refusal> {
        match (self, theirs) {
            (Self::Tcp, Self::RdmaOnly) => Err(Refusal::NoRdma("this side has none".to_owned())),
            (Self::RdmaOnly, Self::Tcp) => Err(Refusal::NoRdma("the peer has none".to_owned())),
            (ours, theirs) => Ok(ours != Self::Tcp && theirs != Self::Tcp),
        }
    }
}

/// How an engine moves the bytes of its lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum LaneIo {
    /// io_uring: batched, completion driven.
    IoUring,
    /// Non-blocking sockets and epoll, where io_uring is refused or not wanted.
    Epoll,
}

impl std::fmt::Display for LaneIo {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::IoUring => "io_uring",
            Self::Epoll => "epoll",
        })
    }
}

/// Handshake messages, in the order they are sent: the dialer's hello, the listener's answer, the
/// dialer's proof, the listener's welcome. Either side may refuse instead.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Greeting {
    Hello(Hello),
    /// The listener's hello, and its proof over both hellos.
    Answer {
        hello: Hello,
        proof: [u8; 32],
    },
    /// The dialer's proof over both hellos, and its pools: the listener has proved itself.
    Proof {
        proof: [u8; 32],
        pools: Vec<PoolCard>,
    },
    /// The session stands. The listener's pools.
    Welcome {
        pools: Vec<PoolCard>,
    },
    Refused(Refusal),
}

/// Why a peer will not talk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The peer speaks another protocol version.
    #[error(
        "protocol version {theirs} there, {ours} here; run the same release of kvferry on both sides"
    )]
    Version {
        /// Version of the side that is told.
        ours: u16,
        /// Version of the side that refuses.
        theirs: u16,
    },
    /// The secrets differ, or only one side has one.
    #[error("authentication failed: {0}; give both sides the same secret")]
    Secret(String),
    /// The layouts do not fit.
    #[error(transparent)]
    Layout(#[from] LayoutMismatch),
    /// The peer is draining or shutting down.
    #[error("the peer is draining and takes no new sessions; connect to another one")]
    Draining,
    /// An engine was given its own address.
    #[error("this address is the engine's own; give it the peer's")]
    Itself,
    /// The peer has as many sessions as it allows.
    #[error("the peer has no room for another session (limit {0}); raise its max_peers")]
    Full(u32),
    /// A session of these two engines stands already, and this one lost the tie.
    #[error("a session between the two engines stands already")]
    Duplicate,
    /// One side requires RDMA and the other has none.
    #[error(
        "RDMA is required and cannot be used with this peer: {0}; see both engines' rdma() report, or do not require it"
    )]
    NoRdma(String),
    /// What was sent is not a greeting.
    #[error("malformed greeting: {0}")]
    Malformed(String),
}

/// Session messages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Message {
    /// Receiver to sender: these pages of this room epoch may be written.
    Grant(Grant),
    /// Sender to receiver: everything is posted; this much was sent.
    Finished {
        room: RoomId,
        epoch: Epoch,
        sent: Landed,
        aux: Bytes,
        /// Of what was sent, when the grant asked for it.
        checksum: Option<Box<Checksum>>,
    },
    /// Receiver to sender: everything has landed. The room is done.
    Landed { room: RoomId, epoch: Epoch, landed: Landed },
    /// Either way: the room has failed. `to` is the role of whoever is told.
    Failed { room: RoomId, epoch: Epoch, to: Role, failure: Box<Failure> },
    /// Sender to receiver, after a failure: no byte of this epoch is on its way any more.
    Drained { epoch: Epoch },
    /// Either way: a lane is down and quiet here. Close it, and say what was counted.
    LaneLost { lane: LaneId },
    /// The answer: this end is down and quiet too, and counted this; `None` if it is not known any more.
    LaneTally { lane: LaneId, tally: Option<Tally> },
    /// Either way, after a session came up: everything that stands has been said again. A room whose
    /// grant was not is forgotten there.
    Sync,
    /// Either way: this side takes no more rooms.
    Drain,
    /// Either way: this side goes away on purpose.
    Bye { reason: String },
    /// Either way: alive.
    Heartbeat,
    /// Dialer to listener: tokens for this many lanes, please.
    LaneRequest { lanes: u16 },
    /// Listener to dialer: one-time tokens, one a lane.
    LaneTokens { tokens: Vec<[u8; 32]> },
    /// Either way, first in a session of two engines that have RDMA: rails and memory.
    Rails(Box<RailsCard>),
    /// Dialer to listener: one end of an RDMA lane, in the fabric's words.
    LaneOffer { lane: LaneId, offer: Bytes },
    /// Listener to dialer: the other end, which stands.
    LaneAnswer { lane: LaneId, answer: Bytes },
    /// Listener to dialer: there will be no other end.
    LaneRefused { lane: LaneId, cause: String },
    /// Dialer to listener: the first end stands too.
    LaneReady { lane: LaneId },
}

/// The decode side's permission for one room epoch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Grant {
    pub(crate) room: RoomId,
    pub(crate) epoch: Epoch,
    /// The receiver's slot of the room, named by every frame.
    pub(crate) slot: u32,
    /// Time left of the room's deadline when this was sent.
    pub(crate) deadline_ms: u64,
    pub(crate) pools: Vec<GrantedPool>,
    /// Longest aux row the receiver takes.
    pub(crate) aux_bytes: u32,
    /// Opaque bytes of the receiver's caller.
    pub(crate) note: Bytes,
    /// Whether the sender is to say a checksum of what it sent.
    pub(crate) checksum: bool,
}

/// A checksum of a room's bytes, and which bytes those are, in order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Checksum {
    /// XXH3 (64 bits) of the source bytes, in the order of `extents` and, in each, in piece order.
    pub(crate) xxh3: u64,
    pub(crate) extents: Vec<Extent>,
}

/// Page writes of a room, named as a data frame names them: all pieces of a chunk, or of several that
/// follow one another layer by layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Extent {
    /// The receiver's pool.
    pub(crate) pool: u8,
    /// First layer, by its number in the model.
    pub(crate) layer: u16,
    pub(crate) layers: u16,
    /// First position in the grant's page list.
    pub(crate) at: u32,
    /// Positions.
    pub(crate) count: u32,
}

/// Granted pages of one pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct GrantedPool {
    /// Index of the pool in the receiver's list.
    pub(crate) pool: u8,
    /// Pages, by index in the receiver's pool; writes name them by position in this list.
    pub(crate) pages: Vec<u32>,
}

/// A message that cannot be, or a frame of the wrong length.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum MessageError {
    #[error("frame of {bytes} bytes, more than the {max} allowed")]
    TooLong { bytes: usize, max: usize },
    #[error("cannot be decoded: {0}")]
    Decode(#[from] postcard::Error),
    #[error("{0} bytes left over behind the message")]
    Trailing(usize),
    #[error("{what}: {given}, more than the {max} allowed")]
    Bound { what: &'static str, given: usize, max: usize },
    #[error("{0}")]
    Invalid(String),
}

/// A length-prefixed frame with `value` in it.
///
/// # Errors
/// [`MessageError::TooLong`] when the value does not fit `max` bytes.
pub(crate) fn encode<T: Serialize>(value: &T, max: usize) -> Result<Vec<u8>, MessageError> {
    let mut frame = postcard::to_extend(value, vec![0; 4])?;
    let bytes = frame.len() - 4;
    match u32::try_from(bytes) {
        Ok(length) if bytes <= max => frame[..4].copy_from_slice(&length.to_le_bytes()),
        _ => return Err(MessageError::TooLong { bytes, max }),
    }
    Ok(frame)
}

fn decode<T: for<'de> Deserialize<'de>>(body: &[u8]) -> Result<T, MessageError> {
    let (value, rest) = postcard::take_from_bytes(body)?;
    if rest.is_empty() { Ok(value) } else { Err(MessageError::Trailing(rest.len())) }
}

impl Greeting {
    /// Decodes a handshake frame's body and checks every bound.
    pub(crate) fn decode(body: &[u8]) -> Result<Self, MessageError> {
        if body.len() > HELLO_FRAME_BYTES_MAX {
            return Err(MessageError::TooLong { bytes: body.len(), max: HELLO_FRAME_BYTES_MAX });
        }
        let greeting: Self = decode(body)?;
        match &greeting {
            Self::Hello(hello) | Self::Answer { hello, .. } => {
                bound("name bytes", hello.name.len(), NAME_BYTES_MAX)?;
            }
            Self::Proof { pools, .. } | Self::Welcome { pools } => {
                bound("pools", pools.len(), POOLS_MAX)?;
                for card in pools {
                    card.check().map_err(MessageError::Invalid)?;
                }
            }
            Self::Refused(_) => {}
        }
        Ok(greeting)
    }
}

/// Longest engine name in bytes.
pub const NAME_BYTES_MAX: usize = 64;

impl Message {
    /// Decodes a session frame's body and checks every bound.
    pub(crate) fn decode(body: &[u8]) -> Result<Self, MessageError> {
        if body.len() > CONTROL_FRAME_BYTES_MAX {
            return Err(MessageError::TooLong { bytes: body.len(), max: CONTROL_FRAME_BYTES_MAX });
        }
        let mut message: Self = decode(body)?;
        match &mut message {
            Self::Grant(grant) => {
                bound("granted pools", grant.pools.len(), POOLS_MAX)?;
                bound(
                    "granted pages",
                    grant.pools.iter().map(|pool| pool.pages.len()).sum(),
                    GRANT_PAGES_MAX,
                )?;
                bound("note bytes", grant.note.len(), GRANT_NOTE_BYTES_MAX)?;
                bound("granted aux bytes", grant.aux_bytes as usize, AUX_BYTES_MAX)?;
            }
            Self::Finished { aux, checksum, .. } => {
                bound("aux bytes", aux.len(), AUX_BYTES_MAX)?;
                let extents = checksum.as_ref().map_or(0, |checksum| checksum.extents.len());
                bound("checksum extents", extents, CHECKSUM_EXTENTS_MAX)?;
            }
            Self::LaneTally { tally: Some(tally), .. } => {
                bound("rejected frames", tally.rejected.len(), REJECTED_MAX)?;
            }
            Self::Failed { failure, .. } => {
                // Kept and shown, so its texts are cut rather than refused.
                failure.bound();
            }
            Self::LaneTokens { tokens } => {
                bound("lanes", tokens.len(), crate::config::LANES_MAX as usize)?
            }
            Self::LaneRequest { lanes } => {
                bound("lanes", usize::from(*lanes), crate::config::LANES_MAX as usize)?
            }
            Self::Bye { reason: text } | Self::LaneRefused { cause: text, .. } => {
                bound("reason bytes", text.len(), crate::failure::CAUSE_BYTES_MAX)?
            }
            Self::Rails(card) => card.check()?,
            Self::LaneOffer { offer: end, .. } | Self::LaneAnswer { answer: end, .. } => {
                bound("lane bytes", end.len(), LANE_END_BYTES_MAX)?
            }
            Self::Landed { .. }
            | Self::Drained { .. }
            | Self::LaneLost { .. }
            | Self::LaneTally { tally: None, .. }
            | Self::LaneReady { .. }
            | Self::Sync
            | Self::Drain
            | Self::Heartbeat => {}
        }
        Ok(message)
    }
}

fn bound(what: &'static str, given: usize, max: usize) -> Result<(), MessageError> {
    if given > max { Err(MessageError::Bound { what, given, max }) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn body(message: &Message) -> Vec<u8> {
        encode(message, CONTROL_FRAME_BYTES_MAX).unwrap().split_off(4)
    }

    #[test]
    fn a_message_is_read_back_as_it_was_written() {
        let message = Message::Grant(Grant {
            room: RoomId(7),
            epoch: Epoch(3),
            slot: 1,
            deadline_ms: 1000,
            pools: vec![GrantedPool { pool: 0, pages: vec![5, 1, 9] }],
            aux_bytes: 64,
            note: Bytes::from_static(b"prefix=32"),
            checksum: true,
        });
        assert_eq!(Message::decode(&body(&message)), Ok(message));
    }

    #[test]
    fn a_message_over_its_bound_is_refused_by_name() {
        let finished = |len| Message::Finished {
            room: RoomId(1),
            epoch: Epoch(1),
            sent: Landed::default(),
            aux: Bytes::from(vec![0; len]),
            checksum: None,
        };
        assert!(Message::decode(&body(&finished(AUX_BYTES_MAX))).is_ok());
        let error = Message::decode(&body(&finished(AUX_BYTES_MAX + 1))).unwrap_err();
        assert_eq!(
            error,
            MessageError::Bound { what: "aux bytes", given: AUX_BYTES_MAX + 1, max: AUX_BYTES_MAX }
        );
    }

    #[test]
    fn bytes_behind_a_message_are_refused() {
        let mut bytes = body(&Message::Heartbeat);
        bytes.push(0);
        assert_eq!(Message::decode(&bytes), Err(MessageError::Trailing(1)));
    }

    proptest! {
        #[test]
        fn any_bytes_decode_to_a_message_or_a_typed_error(bytes in prop::collection::vec(any::<u8>(), 0..512)) {
            let _ = Message::decode(&bytes);
            let _ = Greeting::decode(&bytes);
        }
    }
}
