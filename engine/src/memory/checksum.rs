//! Leaf: checksums of pages, taken by the CPU from where they lie.

use xxhash_rust::xxh3::Xxh3;

use crate::plan::{Strip, Strips};

/// Bytes copied out of a page at once: they stay in the first-level cache until they are hashed.
const BLOCK_BYTES: usize = 16 << 10;

/// A checksum under way: XXH3, 64 bits, of bytes in the order they are given.
#[derive(Clone)]
pub(crate) struct PageHash(Box<Xxh3>);

impl std::fmt::Debug for PageHash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PageHash({:#018x})", self.value())
    }
}

impl PageHash {
    pub(crate) fn new() -> Self {
        Self(Box::new(Xxh3::new()))
    }

    pub(crate) fn value(&self) -> u64 {
        self.0.digest()
    }

    /// Takes in at most `limit` bytes. Gives how many it took, fewer only at the end.
    pub(crate) fn take(&mut self, from: &mut Walk, limit: u64) -> u64 {
        let mut block = [0u8; BLOCK_BYTES];
        let mut taken = 0;
        while taken < limit
            && let Some(strip) = from.rest.take().or_else(|| from.strips.next())
        {
            let part = strip.bytes.min(BLOCK_BYTES as u64).min(limit - taken);
            // SAFETY: the address is of a strip of `from`, whose map keeps its regions' memory alive, and
            // which names only pages that were checked against it; `part` is no longer than the strip
            // and the block. A caller that writes the page meanwhile, against the contract of a live
            // room, gets a checksum of whatever was read.
            unsafe {
                let page = strip.addr as *const u8;
                std::ptr::copy_nonoverlapping(page, block.as_mut_ptr(), part as usize);
            }
            self.0.update(&block[..part as usize]);
            taken += part;
            let rest = Strip { addr: strip.addr + part, bytes: strip.bytes - part };
            from.rest = Some(rest).filter(|rest| rest.bytes > 0);
        }
        taken
    }
}

/// Strips of this engine's own memory, and what is left of the one that is being read.
#[derive(Debug)]
pub(crate) struct Walk {
    strips: Strips,
    rest: Option<Strip>,
}

impl Walk {
    pub(crate) const fn new(strips: Strips) -> Self {
        Self { strips, rest: None }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::memory::{AllocOptions, PageSlice, Pool, PoolLayout};
    use crate::plan::Pieces;

    #[test]
    fn the_checksum_is_xxh3_of_the_pages_in_order_however_it_is_taken() {
        let layout = PoolLayout::opaque("kv", 0..1, 8, 40_000);
        let pool = Pool::allocate(layout, AllocOptions { huge_pages: false }).unwrap();
        let pages = [6u32, 2, 3];
        let mut plain = Vec::new();
        for page in pages {
            let (region, at) = pool.locate(0, 0, page).unwrap();
            let content: Vec<u8> = (0..40_000u32).map(|i| ((i * (page + 1)) >> 3) as u8).collect();
            region.write_at(at, &content).unwrap();
            plain.extend(content);
        }
        let want = xxhash_rust::xxh3::xxh3_64(&plain);
        let slice = PageSlice { offset: 0, row_bytes: 40_000, stride: 40_000, rows: 1 };
        let pieces = Pieces { layer: 0, planes: 1, count: 3, first: 0, len: 3 };
        for limit in [7, 50_000, u64::MAX] {
            let strips = Strips::new(Arc::clone(&pool.map), pages.into(), 0, slice, pieces);
            let (mut walk, mut hash) = (Walk::new(strips), PageHash::new());
            while hash.take(&mut walk, limit) > 0 {}
            assert_eq!(hash.value(), want, "{limit} bytes at a time");
        }
    }
}
