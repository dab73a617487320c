//! Run planning: from page indices to stretches of memory, lazily.
//!
//! A chunk is an ordered list of page writes ("pieces"): for each layer, for each plane, for each
//! position. Both ends know the order, so a frame need only name a range of it. [`Strips`] walks one
//! side's memory in that order; [`Runs`] walks both sides at once and yields what is contiguous on
//! both. Neither allocates: a 100,000-page chunk costs no 100,000-entry list.

use std::sync::Arc;

use crate::memory::{PageMap, PageSlice};

/// A stretch of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Strip {
    pub(crate) addr: u64,
    pub(crate) bytes: u64,
}

/// A stretch that is contiguous at the source and at the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) src: u64,
    pub(crate) dst: u64,
    pub(crate) bytes: u64,
}

/// The two sides of a chunk do not have the same bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("source and destination differ: {src_bytes} bytes against {dst_bytes}")]
pub(crate) struct LengthMismatch {
    pub(crate) src_bytes: u64,
    pub(crate) dst_bytes: u64,
}

/// Order of a chunk's page writes, and a range of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pieces {
    /// First layer, counted from the pool's first.
    pub(crate) layer: u32,
    /// Planes of each layer.
    pub(crate) planes: u32,
    /// Positions in the chunk; never 0.
    pub(crate) count: u32,
    /// First piece of the range.
    pub(crate) first: u32,
    /// Pieces in the range.
    pub(crate) len: u32,
}

/// One side's memory of a range of pieces, as maximal contiguous strips in piece order.
#[derive(Clone, Debug)]
pub(crate) struct Strips {
    map: Arc<PageMap>,
    pages: Arc<[u32]>,
    /// Where the chunk's position 0 is in `pages`.
    base: usize,
    slice: PageSlice,
    layer: u32,
    plane: u32,
    planes: u32,
    position: u32,
    count: u32,
    row: u32,
    pieces_left: u32,
    /// A strip read ahead to see whether the next touches it.
    held: Option<Strip>,
}

impl Strips {
    /// `pages[base..base + pieces.count]` must exist, and its indices and the layers must be in the
    /// map: chunks and grants are checked where they enter the engine, frames where they arrive.
    pub(crate) fn new(
        map: Arc<PageMap>,
        pages: Arc<[u32]>,
        base: usize,
        slice: PageSlice,
        pieces: Pieces,
    ) -> Self {
        let row_of_layers = pieces.first / pieces.count;
        let mut strips = Self {
            map,
            pages,
            base,
            slice,
            layer: pieces.layer + row_of_layers / pieces.planes,
            plane: row_of_layers % pieces.planes,
            planes: pieces.planes,
            position: pieces.first % pieces.count,
            count: pieces.count,
            row: 0,
            pieces_left: pieces.len,
            held: None,
        };
        strips.held = strips.row();
        strips
    }

    /// Bytes of the whole range, before any was taken.
    fn bytes_left(&self) -> u64 {
        let rows = u64::from(self.pieces_left) * u64::from(self.slice.rows) - u64::from(self.row);
        self.held.map_or(0, |strip| strip.bytes) + rows * self.slice.row_bytes
    }

    /// The next strip of a single page, and a step of the cursor.
    #[inline]
    fn row(&mut self) -> Option<Strip> {
        if self.pieces_left == 0 {
            return None;
        }
        let page = self.pages[self.base + self.position as usize];
        // Wrapping: a peer's addresses are invented, from what it says of its layout.
        let addr = self
            .map
            .address(self.layer, self.plane, page)
            .wrapping_add(self.slice.offset)
            .wrapping_add(u64::from(self.row) * self.slice.stride);
        self.row += 1;
        if self.row == self.slice.rows {
            self.row = 0;
            self.pieces_left -= 1;
            self.position += 1;
            if self.position == self.count {
                self.position = 0;
                self.plane += 1;
                if self.plane == self.planes {
                    self.plane = 0;
                    self.layer += 1;
                }
            }
        }
        Some(Strip { addr, bytes: self.slice.row_bytes })
    }
}

impl Iterator for Strips {
    type Item = Strip;

    #[inline]
    fn next(&mut self) -> Option<Strip> {
        let mut strip = self.held.take()?;
        while let Some(next) = self.row() {
            if strip.addr.wrapping_add(strip.bytes) != next.addr {
                self.held = Some(next);
                break;
            }
            strip.bytes += next.bytes;
        }
        Some(strip)
    }
}

/// Both sides' memory of a range of pieces, as maximal runs in piece order.
#[derive(Clone, Debug)]
pub(crate) struct Runs {
    src: Strips,
    dst: Strips,
    src_strip: Option<Strip>,
    dst_strip: Option<Strip>,
}

impl Runs {
    /// # Errors
    /// [`LengthMismatch`] when the two sides do not have the same bytes; nothing is planned.
    pub(crate) fn new(mut src: Strips, mut dst: Strips) -> Result<Self, LengthMismatch> {
        let (src_bytes, dst_bytes) = (src.bytes_left(), dst.bytes_left());
        if src_bytes != dst_bytes {
            return Err(LengthMismatch { src_bytes, dst_bytes });
        }
        let (src_strip, dst_strip) = (src.next(), dst.next());
        Ok(Self { src, dst, src_strip, dst_strip })
    }
}

impl Iterator for Runs {
    type Item = Run;

    #[inline]
    fn next(&mut self) -> Option<Run> {
        let (src, dst) = (self.src_strip?, self.dst_strip?);
        let bytes = src.bytes.min(dst.bytes);
        let rest = |strip: Strip, more: &mut Strips| {
            if strip.bytes == bytes {
                more.next()
            } else {
                Some(Strip { addr: strip.addr.wrapping_add(bytes), bytes: strip.bytes - bytes })
            }
        };
        self.src_strip = rest(src, &mut self.src);
        self.dst_strip = rest(dst, &mut self.dst);
        Some(Run { src: src.addr, dst: dst.addr, bytes })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PAGES: u32 = 12;
    const LAYERS: u32 = 3;

    fn side(planes: u32, stride: u64, page_bytes: u64) -> Arc<PageMap> {
        Arc::new(PageMap::of_peer(LAYERS, planes, PAGES, stride, page_bytes))
    }

    /// The address of every byte of a range, in piece order: what no planner may change.
    fn bytes_of(map: &PageMap, pages: &[u32], slice: PageSlice, pieces: Pieces) -> Vec<u64> {
        let mut out = Vec::new();
        for piece in pieces.first..pieces.first + pieces.len {
            let (row, position) = (piece / pieces.count, piece % pieces.count);
            let (layer, plane) = (pieces.layer + row / pieces.planes, row % pieces.planes);
            for strip in 0..u64::from(slice.rows) {
                let at = map.address(layer, plane, pages[position as usize])
                    + slice.offset
                    + strip * slice.stride;
                out.extend(at..at + slice.row_bytes);
            }
        }
        out
    }

    fn whole(page_bytes: u64) -> PageSlice {
        PageSlice { offset: 0, row_bytes: page_bytes, stride: page_bytes, rows: 1 }
    }

    #[test]
    fn pages_contiguous_on_both_sides_become_one_run() {
        let map = side(1, 64, 64);
        let strips = |pages: &[u32]| {
            let pieces = Pieces {
                layer: 0,
                planes: 1,
                count: pages.len() as u32,
                first: 0,
                len: pages.len() as u32,
            };
            Strips::new(Arc::clone(&map), pages.into(), 0, whole(64), pieces)
        };
        let runs: Vec<_> =
            Runs::new(strips(&[3, 4, 5, 6]), strips(&[7, 8, 9, 1])).unwrap().collect();
        assert_eq!(
            runs,
            [Run { src: 3 * 64, dst: 7 * 64, bytes: 192 }, Run { src: 6 * 64, dst: 64, bytes: 64 }]
        );
    }

    #[test]
    fn sides_of_unequal_length_are_refused_with_both_lengths() {
        let map = side(1, 64, 64);
        let strips = |len| {
            let pieces = Pieces { layer: 0, planes: 1, count: 4, first: 0, len };
            Strips::new(Arc::clone(&map), vec![0, 1, 2, 3].into(), 0, whole(64), pieces)
        };
        let error = Runs::new(strips(4), strips(3)).unwrap_err();
        assert_eq!(error, LengthMismatch { src_bytes: 256, dst_bytes: 192 });
    }

    prop_compose! {
        /// A slice of a 48-byte page that holds 24 bytes, in one strip or several.
        fn slice()(rows in prop::sample::select(vec![1u32, 2, 4]), offset in 0u64..4) -> PageSlice {
            PageSlice { offset, row_bytes: 24 / u64::from(rows), stride: 44 / u64::from(rows), rows }
        }
    }

    proptest! {
        #[test]
        fn runs_move_every_byte_to_its_place_once_and_are_maximal(
            src_pages in prop::collection::vec(0..PAGES, 1..9),
            dst_seed in prop::collection::vec(0..PAGES, 9),
            src_slice in slice(),
            dst_slice in slice(),
            src_stride in prop::sample::select(vec![0u64, 48, 64]),
            dst_stride in prop::sample::select(vec![0u64, 48, 64]),
            planes in 1u32..3,
            cut in (0.0f64..1.0, 0.0f64..1.0),
        ) {
            let count = src_pages.len() as u32;
            let dst_pages = &dst_seed[..src_pages.len()];
            let total = LAYERS * planes * count;
            let first = ((f64::from(total) * cut.0) as u32).min(total - 1);
            let len = (f64::from(total - first) * cut.1).ceil() as u32;
            let pieces = Pieces { layer: 0, planes, count, first, len };
            let (src, dst) = (side(planes, src_stride, 48), side(planes, dst_stride, 48));
            let runs: Vec<Run> = Runs::new(
                Strips::new(Arc::clone(&src), src_pages.clone().into(), 0, src_slice, pieces),
                Strips::new(Arc::clone(&dst), dst_pages.into(), 0, dst_slice, pieces),
            ).unwrap().collect();

            let expand = |pick: fn(&Run) -> u64| -> Vec<u64> {
                runs.iter().flat_map(|run| pick(run)..pick(run) + run.bytes).collect()
            };
            prop_assert_eq!(expand(|run| run.src), bytes_of(&src, &src_pages, src_slice, pieces));
            prop_assert_eq!(expand(|run| run.dst), bytes_of(&dst, dst_pages, dst_slice, pieces));
            prop_assert!(runs.windows(2).all(|pair| {
                pair[0].src + pair[0].bytes != pair[1].src || pair[0].dst + pair[0].bytes != pair[1].dst
            }), "two runs that touch on both sides were not merged");
        }
    }
}
