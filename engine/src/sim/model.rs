//! What bytes should be where: the contents of pages, by the room whose they are.

use crate::memory::{Dtype, HeadOrder, PageSlice, Planes, Pool, PoolLayout};

/// What a receiver's pages hold before a room is granted them, and again when it is released.
pub(super) const SENTINEL: u8 = 0x5e;
/// What a sender's pages hold once their room is released.
pub(super) const POISON: u8 = 0xa5;

/// Pages of an engine.
pub(super) const PAGES: u32 = 32;

/// An engine's layout. `unequal`: 0 as all, 1 other layers, 2 half the heads, by its place.
pub(super) fn layout(unequal: u8, place: usize) -> PoolLayout {
    let (layers, heads) = match (unequal, place % 2) {
        (1, 0) => (1..3, 0..4),
        (1, _) => (0..2, 0..4),
        (2, 0) => (0..3, 0..2),
        (2, _) => (0..3, 2..4),
        _ => (0..3, 0..4),
    };
    PoolLayout {
        name: "kv".to_owned(),
        layers,
        planes: Planes::KeyValue,
        pages: PAGES,
        page_tokens: 2,
        dtype: Dtype::Bf16,
        total_heads: 4,
        heads,
        head_bytes: 8,
        order: HeadOrder::TokenMajor,
    }
}

/// The bytes of a source page of a room. Layer is the model's.
pub(super) fn content(room: u64, layer: u32, plane: u32, page: u32, bytes: u64) -> Vec<u8> {
    let mut word = room
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .wrapping_add(u64::from(layer) << 40 | u64::from(plane) << 36 | u64::from(page));
    let mut content = Vec::with_capacity(bytes as usize);
    while content.len() < bytes as usize {
        word = (word ^ word >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9).wrapping_add(0x1234_5677);
        content.extend_from_slice(&word.to_le_bytes());
    }
    content.truncate(bytes as usize);
    content
}

/// The bytes of a page that travel.
pub(super) fn cut(page: &[u8], slice: PageSlice) -> Vec<u8> {
    let strips = (0..u64::from(slice.rows)).map(|row| (slice.offset + row * slice.stride) as usize);
    strips.flat_map(|at| page[at..at + slice.row_bytes as usize].iter().copied()).collect()
}

/// Puts bytes that travelled where they belong in a page.
pub(super) fn paste(page: &mut [u8], slice: PageSlice, bytes: &[u8]) {
    for (row, strip) in bytes.chunks(slice.row_bytes as usize).enumerate() {
        let at = (slice.offset + row as u64 * slice.stride) as usize;
        page[at..at + strip.len()].copy_from_slice(strip);
    }
}

/// Runs over the pages of all layers and planes; layers counted from the pool's first.
pub(super) fn each_page(pool: &Pool, pages: &[u32], mut with: impl FnMut(u32, u32, u32)) {
    for layer in 0..pool.layout.layer_count() {
        for plane in 0..pool.layout.planes.count() {
            for &page in pages {
                with(layer, plane, page);
            }
        }
    }
}

/// Writes a whole page.
pub(super) fn write(pool: &Pool, (layer, plane, page): (u32, u32, u32), bytes: &[u8]) {
    if let Some((region, at)) = pool.locate(layer, plane, page) {
        let written = region.write_at(at, bytes);
        debug_assert!(written.is_ok(), "a page outside its region");
    }
}

/// Reads a whole page.
pub(super) fn read(pool: &Pool, (layer, plane, page): (u32, u32, u32)) -> Vec<u8> {
    let mut bytes = vec![0; pool.layout.page_bytes() as usize];
    if let Some((region, at)) = pool.locate(layer, plane, page) {
        let read = region.read_at(at, &mut bytes);
        debug_assert!(read.is_ok(), "a page outside its region");
    }
    bytes
}

/// Fills pages with one byte.
pub(super) fn paint(pool: &Pool, pages: &[u32], with: u8) {
    let bytes = vec![with; pool.layout.page_bytes() as usize];
    each_page(pool, pages, |layer, plane, page| write(pool, (layer, plane, page), &bytes));
}
