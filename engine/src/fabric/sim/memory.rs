//! Leaf: the copies that a simulated NIC or kernel makes.

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

/// Reads strips, one after the other.
///
/// # Safety
/// They lie in pools that are alive, and nobody holds a reference into them.
pub(super) unsafe fn gather(strips: &[Strip]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(strips.iter().map(|strip| strip.bytes as usize).sum());
    for strip in strips {
        // SAFETY: the caller vouches for the strip; the borrow ends with the copy.
        let source = unsafe {
            std::slice::from_raw_parts(strip.addr as *const u8, strip.bytes as usize)
        };
        bytes.extend_from_slice(source);
    }
    bytes
}

/// Writes strips, one after the other, with as many bytes as they have.
///
/// # Safety
/// As of [`gather`]; `bytes` does not lie in a pool.
pub(super) unsafe fn scatter(strips: &[Strip], mut bytes: &[u8]) {
    for strip in strips {
        let (now, later) = bytes.split_at((strip.bytes as usize).min(bytes.len()));
        // SAFETY: the caller vouches for the strip, and it is at least as long as `now`.
        unsafe {
            std::ptr::copy_nonoverlapping(now.as_ptr(), strip.addr as *mut u8, now.len());
        }
        bytes = later;
    }
}
