//! What the callers of the two sides tell each other through a room: opaque bytes to the engine.

use anyhow::{Context, Result};
use bytes::Bytes;

/// Travels with the grant: what the decode side has already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrantNote {
    /// Tokens of the prompt whose K/V are on the decode side: whole pages. Position 0 of the grant
    /// is the page after them.
    pub cached_tokens: u32,
}

impl GrantNote {
    /// The note: the count in little-endian.
    #[must_use]
    pub fn to_bytes(self) -> Bytes {
        Bytes::copy_from_slice(&self.cached_tokens.to_le_bytes())
    }

    /// # Errors
    /// Bytes that are no note.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let cached = bytes.try_into().ok().with_context(|| {
            format!("a grant note of {} bytes, not 4: not a decode of this pair", bytes.len())
        })?;
        Ok(Self { cached_tokens: u32::from_le_bytes(cached) })
    }
}

/// The aux row: travels with the end of a room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AuxRow {
    /// The room, so that a row of another one is noticed.
    pub room: u64,
    /// Tokens of the prompt as the prefill side counted them.
    pub prompt_tokens: u32,
    /// The first new token.
    pub first: u32,
    /// CRC-32C of the carried pages ([`PoolStore::checksum`](crate::store::PoolStore::checksum)).
    /// Tokens alone would not show two pages in each other's place: with rotary positions in K,
    /// attention does not ask where a row lies.
    pub checksum: u32,
}

impl AuxRow {
    /// The row: its fields in order, little-endian.
    #[must_use]
    pub fn to_bytes(self) -> Bytes {
        let Self { room, prompt_tokens, first, checksum } = self;
        let mut row = room.to_le_bytes().to_vec();
        row.extend([prompt_tokens, first, checksum].map(u32::to_le_bytes).concat());
        row.into()
    }

    /// # Errors
    /// Bytes that are no such row.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let row: &[u8; 20] = bytes.try_into().ok().with_context(|| {
            format!("an aux row of {} bytes, not 20: not a prefill of this pair", bytes.len())
        })?;
        let [room @ .., p0, p1, p2, p3, f0, f1, f2, f3, c0, c1, c2, c3] = *row;
        Ok(Self {
            room: u64::from_le_bytes(room),
            prompt_tokens: u32::from_le_bytes([p0, p1, p2, p3]),
            first: u32::from_le_bytes([f0, f1, f2, f3]),
            checksum: u32::from_le_bytes([c0, c1, c2, c3]),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn note_and_row_come_back_as_they_were_and_others_are_refused() {
        let row =
            AuxRow { room: u64::MAX - 3, prompt_tokens: 0x0102_0304, first: 257, checksum: 9 };
        assert_eq!(AuxRow::from_bytes(&row.to_bytes()).unwrap(), row);
        let note = GrantNote { cached_tokens: 4096 };
        assert_eq!(GrantNote::from_bytes(&note.to_bytes()).unwrap(), note);
        for bytes in [&b""[..], &b"abc"[..], &[0; 17][..]] {
            assert!(AuxRow::from_bytes(bytes).is_err() && GrantNote::from_bytes(bytes).is_err());
        }
    }
}
