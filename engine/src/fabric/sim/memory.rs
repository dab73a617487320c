//! Leaf: the copies that a simulated NIC or kernel makes.

use std::ops::Range;

use crate::memory::Pool;
use crate::plan::Strip;

/// Bytes `offset..offset + len` of a list of strips, as strips.
pub(super) fn part(strips: &[Strip], mut offset: u64, mut len: u64) -> Vec<Strip> {
    let mut part = Vec::new();
    for strip in strips {
        if offset >= strip.bytes {
            offset -= strip.bytes;
            continue;
        }
        let bytes = (strip.bytes - offset).min(len);
        if bytes == 0 {
            break;
        }
        part.push(Strip { addr: strip.addr + offset, bytes });
        len -= bytes;
        offset = 0;
    }
    part
}

/// The pools of all engines: what a simulated NIC or kernel may read and write.
#[derive(Debug, Default)]
pub(super) struct Memory {
    pools: Vec<(Range<u64>, Pool)>,
}

impl Memory {
    /// Takes a pool in, for good.
    pub(super) fn add(&mut self, pool: Pool) {
        // A pool that was allocated lies in one region.
        if let Some((region, _)) = pool.locate(0, 0, 0) {
            let first = region.as_ptr() as u64;
            self.pools.push((first..first + region.len() as u64, pool));
        }
    }

    /// A strip's memory.
    fn at(&self, strip: &Strip) -> *mut u8 {
        let end = strip.addr.saturating_add(strip.bytes);
        let inside =
            |(range, _): &(Range<u64>, Pool)| range.start <= strip.addr && end <= range.end;
        assert!(self.pools.iter().any(inside), "{strip:?} lies in no pool");
        strip.addr as *mut u8
    }

    /// Reads strips, one after the other.
    pub(super) fn gather(&self, strips: &[Strip]) -> Vec<u8> {
        let mut bytes = vec![0; strips.iter().map(|strip| strip.bytes as usize).sum()];
        let mut to = bytes.as_mut_slice();
        for strip in strips {
            let (now, later) = to.split_at_mut(strip.bytes as usize);
            // SAFETY: the strip was checked to lie in a pool, which is kept here and so alive; nobody
            // holds a reference into it, and a simulation has one thread; `now` is as long, and ours.
            unsafe { std::ptr::copy_nonoverlapping(self.at(strip), now.as_mut_ptr(), now.len()) };
            to = later;
        }
        bytes
    }

    /// Writes strips, one after the other, with as many bytes as there are.
    pub(super) fn scatter(&self, strips: &[Strip], mut bytes: &[u8]) {
        for strip in strips {
            let (now, later) = bytes.split_at((strip.bytes as usize).min(bytes.len()));
            // SAFETY: as above; the strip is at least as long as `now`.
            unsafe { std::ptr::copy_nonoverlapping(now.as_ptr(), self.at(strip), now.len()) };
            bytes = later;
        }
    }
}
