//! How a connection begins, and frames read from a stream that is not trusted.

use std::io;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::time::Instant;

use crate::wire::{MAGIC, PROTOCOL_VERSION};

/// Bytes of a preamble: magic, kind, version.
pub(super) const PREAMBLE_BYTES: usize = 7;
/// A frame's body is read in steps of at most this many bytes: memory follows the bytes that came,
/// not the length that was claimed.
const READ_STEP_BYTES: usize = 64 << 10;
/// Bytes in front of a frame's body: its length, little-endian.
const LENGTH_BYTES: usize = 4;

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Control,
    Lane,
}

impl Kind {
    const fn byte(self) -> u8 {
        match self {
            Self::Control => 1,
            Self::Lane => 2,
        }
    }
}

/// A connection that does not begin as it should.
#[derive(Debug, thiserror::Error)]
pub(super) enum PreambleError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("what answers does not speak the protocol (magic {0:02x?})")]
    Magic([u8; 4]),
    #[error("unknown kind of connection {0}")]
    Kind(u8),
    #[error("protocol version {0}")]
    Version(u16),
}

pub(super) fn preamble(kind: Kind) -> [u8; PREAMBLE_BYTES] {
    let [m0, m1, m2, m3] = MAGIC;
    let [v0, v1] = PROTOCOL_VERSION.to_le_bytes();
    [m0, m1, m2, m3, kind.byte(), v0, v1]
}

fn parse(bytes: [u8; PREAMBLE_BYTES]) -> Result<(Kind, u16), PreambleError> {
    let [m0, m1, m2, m3, kind, v0, v1] = bytes;
    let magic = [m0, m1, m2, m3];
    if magic != MAGIC {
        return Err(PreambleError::Magic(magic));
    }
    let kind = match kind {
        1 => Kind::Control,
        2 => Kind::Lane,
        other => return Err(PreambleError::Kind(other)),
    };
    Ok((kind, u16::from_le_bytes([v0, v1])))
}

/// The dialer's half: says what it wants and reads the listener's answer.
pub(super) async fn open(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    kind: Kind,
) -> Result<(), PreambleError> {
    stream.write_all(&preamble(kind)).await?;
    let mut bytes = [0; PREAMBLE_BYTES];
    stream.read_exact(&mut bytes).await?;
    match parse(bytes)? {
        (_, version) if version != PROTOCOL_VERSION => Err(PreambleError::Version(version)),
        (answered, _) if answered != kind => Err(PreambleError::Kind(answered.byte())),
        _ => Ok(()),
    }
}

/// The listener's half. A dialer of another version is answered too, so that both sides can name it;
/// what does not begin with our magic gets no answer.
pub(super) async fn accept(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
) -> Result<Kind, PreambleError> {
    let mut bytes = [0; PREAMBLE_BYTES];
    stream.read_exact(&mut bytes).await?;
    let (kind, version) = parse(bytes)?;
    stream.write_all(&preamble(kind)).await?;
    if version == PROTOCOL_VERSION { Ok(kind) } else { Err(PreambleError::Version(version)) }
}

/// A frame that cannot be had.
#[derive(Debug, thiserror::Error)]
pub(super) enum FrameError {
    #[error("the session was closed by the peer")]
    Closed,
    #[error("the session was closed by the peer in the middle of a message")]
    Truncated,
    #[error("a message of {bytes} bytes, more than the {max} allowed")]
    TooLong { bytes: usize, max: usize },
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Reads length-prefixed frames. Dropping [`FrameReader::next`] midway loses nothing.
#[derive(Debug)]
pub(super) struct FrameReader<R> {
    io: R,
    buffer: BytesMut,
    received: u64,
}

impl<R: AsyncRead + Unpin> FrameReader<R> {
    pub(super) fn new(io: R) -> Self {
        Self { io, buffer: BytesMut::new(), received: 0 }
    }

    /// Bytes that ever came: whether this moves tells whether the peer lives.
    pub(super) const fn received(&self) -> u64 {
        self.received
    }

    /// The next frame's body.
    pub(super) async fn next(&mut self, max: usize) -> Result<Bytes, FrameError> {
        loop {
            let missing = match self.buffer.first_chunk::<LENGTH_BYTES>() {
                None => LENGTH_BYTES - self.buffer.len(),
                Some(length) => {
                    let bytes = u32::from_le_bytes(*length) as usize;
                    if bytes > max {
                        return Err(FrameError::TooLong { bytes, max });
                    }
                    let end = LENGTH_BYTES + bytes;
                    if self.buffer.len() >= end {
                        let frame = self.buffer.split_to(end).freeze();
                        return Ok(frame.slice(LENGTH_BYTES..));
                    }
                    end - self.buffer.len()
                }
            };
            self.buffer.reserve(missing.min(READ_STEP_BYTES));
            match self.io.read_buf(&mut self.buffer).await? {
                0 if self.buffer.is_empty() => return Err(FrameError::Closed),
                0 => return Err(FrameError::Truncated),
                bytes => self.received += bytes as u64,
            }
        }
    }

    /// Reads and forgets until the peer closes, so that what was last written to it is not lost to a
    /// reset.
    pub(super) async fn linger(&mut self, longest: Duration) {
        let deadline = Instant::now() + longest;
        loop {
            self.buffer.clear();
            self.buffer.reserve(LENGTH_BYTES);
            match tokio::time::timeout_at(deadline, self.io.read_buf(&mut self.buffer)).await {
                Ok(Ok(bytes)) if bytes > 0 => {}
                _ => return,
            }
        }
    }
}

/// Both halves of a control connection, behind its preamble.
#[derive(Debug)]
pub(super) struct Wire {
    pub(super) reader: FrameReader<OwnedReadHalf>,
    pub(super) writer: OwnedWriteHalf,
}

impl Wire {
    pub(super) fn new(stream: TcpStream) -> Self {
        let (reader, writer) = stream.into_split();
        Self { reader: FrameReader::new(reader), writer }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn frames_are_read_whole_however_the_bytes_come() {
        let (mut near, far) = tokio::io::duplex(3);
        let mut reader = FrameReader::new(far);
        let body = vec![7; 300];
        let sent = [&300u32.to_le_bytes()[..], &body, &0u32.to_le_bytes()].concat();
        let writer = tokio::spawn(async move { near.write_all(&sent).await });
        assert_eq!(reader.next(300).await.unwrap(), body);
        assert_eq!(reader.next(300).await.unwrap(), Bytes::new());
        assert_eq!(reader.received(), 308);
        writer.await.unwrap().unwrap();
        assert!(matches!(reader.next(300).await, Err(FrameError::Closed)));
    }

    #[tokio::test]
    async fn a_claimed_length_takes_no_memory_before_the_bytes_are_there() {
        let (mut near, far) = tokio::io::duplex(64);
        let mut reader = FrameReader::new(far);
        near.write_all(&(1u32 << 30).to_le_bytes()).await.unwrap();
        near.write_all(b"few").await.unwrap();
        drop(near);
        assert!(matches!(reader.next(1 << 30).await, Err(FrameError::Truncated)));
        assert!(reader.buffer.capacity() <= 2 * READ_STEP_BYTES);
    }

    #[tokio::test]
    async fn a_frame_over_its_bound_is_refused_by_its_length_alone() {
        let length = u32::MAX.to_le_bytes();
        let mut reader = FrameReader::new(&length[..]);
        let Err(FrameError::TooLong { bytes, max: 9 }) = reader.next(9).await else {
            panic!("read a frame longer than allowed")
        };
        assert_eq!(bytes, u32::MAX as usize);
    }
}
