//! Pools: a layout laid over regions, and the address arithmetic of pages.

use std::ptr::NonNull;
use std::sync::Arc;

use super::layout::{LayoutError, PoolCard, PoolLayout};
use super::region::{AllocOptions, Region};

/// A pool's place in its engine, in the order pools were added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PoolId(pub(crate) u8);

impl PoolId {
    /// The pool that was added first; most engines have no other.
    pub const FIRST: Self = Self(0);

    pub(crate) const fn index(self) -> usize {
        self.0 as usize
    }
}

/// Where the pages of one layer and one plane lie.
#[derive(Clone, Debug)]
pub struct PageArray {
    /// Region that holds them.
    pub region: Region,
    /// Byte of the region where page 0 begins.
    pub offset: u64,
    /// Bytes from a page to the next: the page bytes, or more when pages of several layers are
    /// interleaved (page-first layouts).
    pub stride: u64,
}

/// KV pages: a [`PoolLayout`] laid over regions.
#[derive(Clone, Debug)]
pub struct Pool {
    pub(crate) layout: PoolLayout,
    pub(crate) map: Arc<PageMap>,
    arrays: Vec<PageArray>,
}

impl Pool {
    /// Allocates memory for a whole pool: page arrays one after the other, K layers then V layers.
    ///
    /// # Errors
    /// [`LayoutError::Field`] for a layout out of range, [`LayoutError::Alloc`] without memory.
    pub fn allocate(layout: PoolLayout, options: AllocOptions) -> Result<Self, LayoutError> {
        layout.validate()?;
        let array_bytes = layout.page_bytes() * u64::from(layout.pages);
        let bytes = array_bytes
            .checked_mul(layout.array_count() as u64)
            .and_then(|bytes| usize::try_from(bytes).ok())
            .unwrap_or(usize::MAX);
        let region = Region::allocate(bytes, options)?;
        let arrays = (0..layout.array_count() as u64)
            .map(|i| PageArray {
                region: region.clone(),
                offset: i * array_bytes,
                stride: layout.page_bytes(),
            })
            .collect();
        Self::new(layout, arrays)
    }

    /// Lays a layout over page arrays: all K layers, then all V layers (one list when there is one
    /// plane), as inference engines list their pools.
    ///
    /// # Errors
    /// [`LayoutError`] when the layout is out of range, an array is missing, or one does not lie in
    /// its region.
    pub fn new(layout: PoolLayout, arrays: Vec<PageArray>) -> Result<Self, LayoutError> {
        layout.validate()?;
        if arrays.len() != layout.array_count() {
            let (given, want) = (arrays.len(), layout.array_count());
            return Err(LayoutError::Arrays { pool: layout.name, given, want });
        }
        let page_bytes = layout.page_bytes();
        for (index, array) in arrays.iter().enumerate() {
            if array.stride < page_bytes {
                return Err(LayoutError::Field {
                    pool: layout.name,
                    field: "stride",
                    value: array.stride.to_string(),
                    want: format!("at least the page's {page_bytes} bytes (array {index})"),
                });
            }
            let end = array
                .stride
                .checked_mul(u64::from(layout.pages) - 1)
                .and_then(|last| last.checked_add(page_bytes))
                .and_then(|len| len.checked_add(array.offset))
                .unwrap_or(u64::MAX);
            if end > array.region.len() as u64 {
                let (offset, bytes) = (array.offset, array.region.len() as u64);
                return Err(LayoutError::OutsideRegion {
                    pool: layout.name,
                    array: index,
                    offset,
                    end,
                    bytes,
                });
            }
        }
        let map = Arc::new(PageMap::of_arrays(&layout, &arrays));
        Ok(Self { layout, map, arrays })
    }

    /// Lays a layout over raw memory, as lists of `(pointer, bytes)` (all K layers, then all V
    /// layers), pages one after the other in each.
    ///
    /// # Safety
    /// Each entry must satisfy [`Region::from_raw`].
    ///
    /// # Errors
    /// As [`Pool::new`].
    pub unsafe fn from_raw_arrays(
        layout: PoolLayout,
        arrays: &[(NonNull<u8>, usize)],
    ) -> Result<Self, LayoutError> {
        let stride = layout.page_bytes();
        let arrays = arrays
            .iter()
            .map(|&(addr, bytes)| {
                // SAFETY: the caller vouches for every entry.
                let region = unsafe { Region::from_raw(addr, bytes) };
                PageArray { region, offset: 0, stride }
            })
            .collect();
        Self::new(layout, arrays)
    }

    /// The layout.
    #[must_use]
    pub const fn layout(&self) -> &PoolLayout {
        &self.layout
    }

    /// The page array of a plane and a layer (counted from the pool's first), and the byte of its
    /// region where `page` begins. `None` when there is no such page.
    #[must_use]
    pub fn locate(&self, layer: u32, plane: u32, page: u32) -> Option<(&Region, usize)> {
        if layer >= self.layout.layer_count()
            || plane >= self.layout.planes.count()
            || page >= self.layout.pages
        {
            return None;
        }
        let array = self.arrays.get((plane * self.layout.layer_count() + layer) as usize)?;
        let offset = array.offset + u64::from(page) * array.stride;
        Some((&array.region, usize::try_from(offset).ok()?))
    }

    pub(crate) fn card(&self) -> PoolCard {
        let stride = self.arrays.first().map_or(0, |array| array.stride);
        let uniform = self.arrays.iter().all(|array| array.stride == stride);
        PoolCard { layout: self.layout.clone(), page_stride: if uniform { stride } else { 0 } }
    }
}

/// Addresses of page arrays, and the regions that keep them alive. Whatever holds a map (a room, an
/// operation in flight) holds the memory.
#[derive(Debug)]
pub(crate) struct PageMap {
    /// Address and stride of each array: `[plane][layer]`.
    arrays: Vec<(u64, u64)>,
    layers: u32,
    #[cfg_attr(not(feature = "rdma"), expect(dead_code, reason = "held, not looked at"))]
    regions: Vec<Region>,
}

impl PageMap {
    fn of_arrays(layout: &PoolLayout, arrays: &[PageArray]) -> Self {
        let addresses = arrays
            .iter()
            .map(|array| (array.region.as_ptr() as u64 + array.offset, array.stride))
            .collect();
        let regions = arrays.iter().map(|array| array.region.clone()).collect();
        Self { arrays: addresses, layers: layout.layer_count(), regions }
    }

    /// A map of a peer's pool: invented addresses that are contiguous exactly where the peer's pages
    /// are, so that runs can be planned without knowing where its memory lies. A `stride` of 0 says
    /// that its arrays differ: pages then never touch.
    pub(crate) fn of_peer(
        layers: u32,
        planes: u32,
        pages: u32,
        stride: u64,
        page_bytes: u64,
    ) -> Self {
        let stride = if stride == 0 { page_bytes.saturating_add(1) } else { stride };
        let span = stride.saturating_mul(u64::from(pages)).saturating_add(1);
        let arrays = (0..u64::from(layers) * u64::from(planes))
            .map(|i| (span.saturating_mul(i), stride))
            .collect();
        Self { arrays, layers, regions: Vec::new() }
    }

    /// A map of a peer's pool where its memory lies: base and stride of each array.
    pub(crate) const fn of_peer_arrays(layers: u32, arrays: Vec<(u64, u64)>) -> Self {
        Self { arrays, layers, regions: Vec::new() }
    }

    #[cfg(feature = "rdma")]
    pub(crate) const fn layers(&self) -> u32 {
        self.layers
    }

    /// Base and stride of each array.
    #[cfg(feature = "rdma")]
    pub(crate) fn arrays(&self) -> &[(u64, u64)] {
        &self.arrays
    }

    /// The memory that the pages are in.
    #[cfg(feature = "rdma")]
    pub(crate) fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// Address of a page. Layer is counted from the pool's first. Indices are checked where chunks and
    /// grants enter the engine.
    #[inline]
    pub(crate) fn address(&self, layer: u32, plane: u32, page: u32) -> u64 {
        let (base, stride) = self.arrays[(plane * self.layers + layer) as usize];
        base.wrapping_add(u64::from(page).wrapping_mul(stride))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_addresses_its_pages_as_its_arrays_say() {
        let layout = PoolLayout::opaque("kv", 3..5, 4, 64);
        let region = Region::from_vec(vec![0; 1024]);
        // Page-first: the two layers' pages interleaved.
        let arrays = vec![
            PageArray { region: region.clone(), offset: 0, stride: 128 },
            PageArray { region: region.clone(), offset: 64, stride: 128 },
        ];
        let pool = Pool::new(layout, arrays).unwrap();
        assert_eq!(pool.map.address(1, 0, 3), region.as_ptr() as u64 + 64 + 3 * 128);
        assert_eq!(pool.locate(1, 0, 3).unwrap().1, 64 + 3 * 128);
        assert!(
            pool.locate(2, 0, 0).is_none()
                && pool.locate(0, 1, 0).is_none()
                && pool.locate(0, 0, 4).is_none()
        );
        assert_eq!(pool.card().page_stride, 128);
    }

    #[test]
    fn lists_of_pointers_are_k_layers_then_v_layers() {
        let mut layout = PoolLayout::opaque("kv", 0..2, 3, 64);
        layout.planes = crate::memory::Planes::KeyValue;
        let mut memory: Vec<Vec<u8>> = (0..4).map(|_| vec![0; 3 * 64]).collect();
        let lists: Vec<_> = memory
            .iter_mut()
            .map(|array| (NonNull::new(array.as_mut_ptr()).unwrap(), array.len()))
            .collect();
        // SAFETY: the vectors outlive the pool, and nobody looks at them while it exists.
        let pool = unsafe { Pool::from_raw_arrays(layout.clone(), &lists) }.unwrap();
        let (value, second) = (1, 1);
        assert_eq!(pool.map.address(second, value, 2), lists[3].0.as_ptr() as u64 + 2 * 64);
        // SAFETY: as above.
        let error = unsafe { Pool::from_raw_arrays(layout, &[(lists[0].0, 64); 4]) }.unwrap_err();
        assert!(
            matches!(error, LayoutError::OutsideRegion { array: 0, end: 192, bytes: 64, .. }),
            "{error}"
        );
    }

    #[test]
    fn arrays_that_do_not_fit_are_refused_naming_the_first() {
        let layout = PoolLayout::opaque("kv", 0..2, 4, 64);
        let region = Region::from_vec(vec![0; 511]);
        let array = |offset, stride| PageArray { region: region.clone(), offset, stride };
        let error = Pool::new(layout.clone(), vec![array(0, 64), array(256, 64)]).unwrap_err();
        assert!(
            matches!(error, LayoutError::OutsideRegion { array: 1, end: 512, bytes: 511, .. }),
            "{error}"
        );
        let error = Pool::new(layout.clone(), vec![array(0, 63), array(0, 64)]).unwrap_err();
        assert!(matches!(error, LayoutError::Field { field: "stride", .. }), "{error}");
        let error = Pool::new(layout.clone(), vec![array(0, u64::MAX), array(0, 64)]).unwrap_err();
        assert!(matches!(error, LayoutError::OutsideRegion { array: 0, .. }), "{error}");
        let error = Pool::new(layout, vec![array(0, 64)]).unwrap_err();
        assert!(matches!(error, LayoutError::Arrays { given: 1, want: 2, .. }), "{error}");
    }
}
