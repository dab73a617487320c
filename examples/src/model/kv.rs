//! Paged K/V: where the rows live, and which pages a sequence has.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use anyhow::{Result, ensure};

/// K or V.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Plane {
    /// Keys, rotary positions already applied.
    K,
    /// Values.
    V,
}

/// The shape of a pool: `layers` × {K, V} × `pages` × `page_tokens` rows of `row()` floats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvGeometry {
    /// Transformer layers.
    pub layers: usize,
    /// Pages of each plane of each layer.
    pub pages: usize,
    /// Tokens whose rows one page holds.
    pub page_tokens: usize,
    /// K/V heads in a row.
    pub kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
}

impl KvGeometry {
    /// Floats in one token's row.
    pub fn row(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Floats in one page of one plane of one layer.
    pub fn page(&self) -> usize {
        self.page_tokens * self.row()
    }

    /// Pages a sequence of `tokens` needs.
    pub fn pages_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.page_tokens.max(1))
    }
}

/// Where the K/V pages of one pool live, as f32, token-major rows: `[token][kv_head][head_dim]`.
///
/// [`Model::forward`](super::Model::forward) checks pages and sizes against
/// [`geometry`](Self::geometry) first, so an implementation sees only rows that lie within one page
/// of its pool. Calls come from one thread at a time.
pub trait KvStore {
    /// The shape of the pool; it never changes.
    fn geometry(&self) -> KvGeometry;

    /// Places whole rows in `page`, the first at `token_offset`.
    fn write(&self, layer: usize, plane: Plane, page: u32, token_offset: usize, rows: &[f32]);

    /// Fills `rows` from `page`, the first from `token_offset`.
    fn read(&self, layer: usize, plane: Plane, page: u32, token_offset: usize, rows: &mut [f32]);
}

/// A pool in this process's memory: the reference, and the store of tests.
#[derive(Debug)]
pub struct VecStore {
    geometry: KvGeometry,
    floats: Mutex<Vec<f32>>,
}

impl VecStore {
    /// A pool of zeroed pages.
    pub fn new(geometry: KvGeometry) -> Self {
        let floats = vec![0.0; geometry.layers * 2 * geometry.pages * geometry.page()];
        Self { geometry, floats: Mutex::new(floats) }
    }

    fn range(
        &self,
        layer: usize,
        plane: Plane,
        page: u32,
        token_offset: usize,
        len: usize,
    ) -> Range<usize> {
        let g = &self.geometry;
        let plane = layer * 2 + usize::from(plane == Plane::V);
        let start = (plane * g.pages + page as usize) * g.page() + token_offset * g.row();
        start..start + len
    }
}

impl KvStore for VecStore {
    fn geometry(&self) -> KvGeometry {
        self.geometry
    }

    fn write(&self, layer: usize, plane: Plane, page: u32, token_offset: usize, rows: &[f32]) {
        let range = self.range(layer, plane, page, token_offset, rows.len());
        self.floats.lock().unwrap_or_else(PoisonError::into_inner)[range].copy_from_slice(rows);
    }

    fn read(&self, layer: usize, plane: Plane, page: u32, token_offset: usize, rows: &mut [f32]) {
        let range = self.range(layer, plane, page, token_offset, rows.len());
        rows.copy_from_slice(&self.floats.lock().unwrap_or_else(PoisonError::into_inner)[range]);
    }
}

/// The block table of one sequence: token `t` has its rows in page `pages[t / page_tokens]`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KvSequence {
    /// Its pages, in order; more than `len` needs is fine.
    pub pages: Vec<u32>,
    /// Tokens whose K/V are in the pages of every layer.
    pub len: usize,
}

impl KvSequence {
    /// An empty sequence that may fill these pages.
    pub fn new(pages: impl IntoIterator<Item = u32>) -> Self {
        Self { pages: pages.into_iter().collect(), len: 0 }
    }

    /// Refuses to hold `tokens` in too few pages, or in pages that are not the pool's.
    pub(super) fn check(&self, tokens: usize, geometry: &KvGeometry) -> Result<()> {
        let needed = geometry.pages_for(tokens);
        ensure!(
            self.pages.len() >= needed,
            "{tokens} tokens need {needed} pages of {} tokens, the sequence has {}: give it more",
            geometry.page_tokens,
            self.pages.len()
        );
        for &page in &self.pages[..needed] {
            ensure!(
                (page as usize) < geometry.pages,
                "page {page} is not in the pool of {} pages",
                geometry.pages
            );
        }
        Ok(())
    }

    /// Writes the rows of the tokens from `start` on.
    pub(super) fn write(
        &self,
        store: &dyn KvStore,
        layer: usize,
        plane: Plane,
        start: usize,
        rows: &[f32],
    ) {
        let g = store.geometry();
        let mut rest = rows;
        for (page, offset, tokens) in self.spans(start, rows.len() / g.row(), g.page_tokens) {
            let (head, tail) = rest.split_at(tokens * g.row());
            store.write(layer, plane, page, offset, head);
            rest = tail;
        }
    }

    /// Reads the rows of the first `tokens` tokens.
    pub(super) fn read(
        &self,
        store: &dyn KvStore,
        layer: usize,
        plane: Plane,
        tokens: usize,
    ) -> Vec<f32> {
        let g = store.geometry();
        let mut rows = vec![0.0; tokens * g.row()];
        let mut rest = rows.as_mut_slice();
        for (page, offset, tokens) in self.spans(0, tokens, g.page_tokens) {
            let (head, tail) = rest.split_at_mut(tokens * g.row());
            store.read(layer, plane, page, offset, head);
            rest = tail;
        }
        rows
    }

    /// The pieces, each within one page, of `tokens` tokens from `start`: (page, token offset in
    /// it, tokens).
    fn spans(
        &self,
        start: usize,
        tokens: usize,
        page_tokens: usize,
    ) -> impl Iterator<Item = (u32, usize, usize)> {
        let end = start + tokens;
        let mut at = start;
        std::iter::from_fn(move || {
            let offset = at % page_tokens;
            let page = *self.pages.get(at / page_tokens)?;
            let tokens = (page_tokens - offset).min(end - at);
            at += tokens;
            (tokens > 0).then_some((page, offset, tokens))
        })
    }
}
