//! The model's K/V over a kvferry pool: what the engine carries is what the model reads.
//!
//! Behind the model's layers a pool may have *ballast*: layers that nothing computes, filled with made-up
//! numbers and carried as the others are. With them the rooms of a small model weigh what a large one's
//! do.

use std::ops::Range;

use anyhow::{Context, Result};
use kvferry::{AllocOptions, Dtype, HeadOrder, Planes, Pool, PoolLayout, Region};
use zerocopy::IntoBytes;

use crate::model::{KvGeometry, KvStore, ModelConfig, Plane};
use crate::pages::splitmix64;

/// What prefill overwrites pages with once they are released: a signalling NaN that no model computes and
/// no ballast has, so that a single one of them elsewhere is a page that was read too late.
pub const POISON: u32 = 0x7fa5_0dd5;

/// A [`KvStore`] whose pages are a [`Pool`]'s: layers × {K, V} × pages, f32, token-major.
#[derive(Debug)]
pub struct PoolStore {
    pool: Pool,
    /// The model's layers; those of the ballast follow.
    geometry: KvGeometry,
    ballast_layers: usize,
}

impl PoolStore {
    /// Allocates a pool of `pages` pages of `page_tokens` tokens for a model, with so many layers of
    /// ballast.
    ///
    /// # Errors
    /// A shape that no pool has, or no memory for it.
    pub fn allocate(
        config: &ModelConfig,
        pages: u32,
        page_tokens: u32,
        ballast_layers: u32,
    ) -> Result<Self> {
        let geometry = config.pool(pages as usize, page_tokens as usize);
        let heads = u32::try_from(config.kv_heads)?;
        let layout = PoolLayout {
            name: "kv".to_owned(),
            layers: 0..u32::try_from(config.layers)?.saturating_add(ballast_layers),
            planes: Planes::KeyValue,
            pages,
            page_tokens,
            dtype: Dtype::F32,
            total_heads: heads,
            heads: 0..heads,
            head_bytes: u32::try_from(config.head_dim * size_of::<f32>())?,
            order: HeadOrder::TokenMajor,
        };
        let pool = Pool::allocate(layout, AllocOptions::default()).context("the KV pool")?;
        Ok(Self { pool, geometry, ballast_layers: ballast_layers as usize })
    }

    /// The pool, to be added to an engine.
    #[must_use]
    pub const fn pool(&self) -> &Pool {
        &self.pool
    }

    /// CRC-32C of all bytes of these pages, in their order: layer by layer, K before V.
    #[must_use]
    pub fn checksum(&self, pages: &[u32]) -> u32 {
        let mut rows = vec![0.0; self.geometry.page()];
        let mut checksum = 0;
        for (layer, plane) in self.planes(0..self.layers()) {
            for &page in pages {
                self.read(layer, plane, page, 0, &mut rows);
                checksum = crc32c::crc32c_append(checksum, rows.as_bytes());
            }
        }
        checksum
    }

    /// The layers of the ballast, by their number in the pool.
    #[must_use]
    pub const fn ballast(&self) -> Range<usize> {
        self.geometry.layers..self.layers()
    }

    /// Fills the ballast of these pages with finite numbers of a seed.
    pub fn fill_ballast(&self, pages: &[u32], seed: u64) {
        let (mut rows, mut state) = (vec![0.0; self.geometry.page()], seed);
        for (layer, plane) in self.planes(self.ballast()) {
            for &page in pages {
                // Without its highest exponent bit a float is finite.
                let made_up = || f32::from_bits(splitmix64(&mut state) as u32 & !(1 << 30));
                rows.fill_with(made_up);
                self.write(layer, plane, page, 0, &rows);
            }
        }
    }

    /// Puts one value in every float of these pages.
    pub fn fill(&self, pages: &[u32], value: f32) {
        let rows = vec![value; self.geometry.page()];
        for (layer, plane) in self.planes(0..self.layers()) {
            pages.iter().for_each(|&page| self.write(layer, plane, page, 0, &rows));
        }
    }

    /// How many of these pages have [`POISON`] in any layer.
    #[must_use]
    pub fn poisoned(&self, pages: &[u32]) -> usize {
        let mut rows = vec![0.0f32; self.geometry.page()];
        let mut is_poisoned = |page: u32| {
            self.planes(0..self.layers()).any(|(layer, plane)| {
                self.read(layer, plane, page, 0, &mut rows);
                rows.iter().any(|float| float.to_bits() == POISON)
            })
        };
        pages.iter().filter(|&&page| is_poisoned(page)).count()
    }

    const fn layers(&self) -> usize {
        self.geometry.layers + self.ballast_layers
    }

    fn planes(&self, layers: Range<usize>) -> impl Iterator<Item = (usize, Plane)> + use<> {
        layers.flat_map(|layer| [(layer, Plane::K), (layer, Plane::V)])
    }

    /// The region of a page, and the byte of it where the row of `token_offset` begins.
    fn locate(
        &self,
        layer: usize,
        plane: Plane,
        page: u32,
        token_offset: usize,
    ) -> (&Region, usize) {
        let located = self.pool.locate(layer as u32, u32::from(plane == Plane::V), page);
        let (region, offset) = located.expect("the model checks pages against the geometry");
        (region, offset + token_offset * self.geometry.row() * size_of::<f32>())
    }
}

impl KvStore for PoolStore {
    fn geometry(&self) -> KvGeometry {
        self.geometry
    }

    fn write(&self, layer: usize, plane: Plane, page: u32, token_offset: usize, rows: &[f32]) {
        let (region, offset) = self.locate(layer, plane, page, token_offset);
        region.write_at(offset, rows.as_bytes()).expect("rows lie within their page");
    }

    fn read(&self, layer: usize, plane: Plane, page: u32, token_offset: usize, rows: &mut [f32]) {
        let (region, offset) = self.locate(layer, plane, page, token_offset);
        region.read_at(offset, rows.as_mut_bytes()).expect("rows lie within their page");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::VecStore;

    #[test]
    fn rows_of_every_place_come_back_as_from_plain_memory() {
        let config = ModelConfig::tiny();
        let pool = PoolStore::allocate(&config, 3, 4, 0).unwrap();
        let plain = VecStore::new(config.pool(3, 4));
        let row = pool.geometry().row();
        let places = (0..config.layers).flat_map(|layer| {
            [Plane::K, Plane::V]
                .into_iter()
                .flat_map(move |plane| (0..3).map(move |page| (layer, plane, page)))
        });
        for (i, (layer, plane, page)) in places.clone().enumerate() {
            let rows: Vec<f32> = (0..2 * row).map(|x| (i * 1000 + x) as f32).collect();
            pool.write(layer, plane, page, 1, &rows);
            plain.write(layer, plane, page, 1, &rows);
        }
        for (layer, plane, page) in places {
            let (mut a, mut b) = (vec![1.0; 4 * row], vec![2.0; 4 * row]);
            pool.read(layer, plane, page, 0, &mut a);
            plain.read(layer, plane, page, 0, &mut b);
            assert_eq!(a, b);
        }
    }

    #[test]
    fn pages_in_each_others_place_have_another_checksum() {
        let pool = PoolStore::allocate(&ModelConfig::tiny(), 3, 4, 0).unwrap();
        pool.write(5, Plane::V, 1, 0, &[1.0]);
        assert_ne!(pool.checksum(&[0, 1]), pool.checksum(&[1, 0]));
        assert_eq!(pool.checksum(&[0, 1]), pool.checksum(&[2, 1]));
        assert_eq!(pool.checksum(&[]), 0);
    }

    #[test]
    fn one_poisoned_float_in_any_layer_is_found_and_ballast_is_never_taken_for_it() {
        let pool = PoolStore::allocate(&ModelConfig::tiny(), 3, 4, 2).unwrap();
        pool.fill_ballast(&[0, 1, 2], 7);
        assert_eq!((pool.ballast(), pool.poisoned(&[0, 1, 2])), (6..8, 0));
        assert_ne!(pool.checksum(&[0]), pool.checksum(&[1]), "made-up numbers of their own");
        for (layer, page) in [(0, 0), (7, 2)] {
            pool.write(layer, Plane::V, page, 3, &[f32::from_bits(POISON)]);
        }
        assert_eq!((pool.poisoned(&[0, 1, 2]), pool.poisoned(&[1])), (2, 0));
        pool.fill(&[0, 1, 2], f32::from_bits(POISON));
        assert_eq!(pool.poisoned(&[0, 1, 2]), 3);
        pool.fill(&[1], 0.0);
        assert_eq!(pool.poisoned(&[1]), 0);
    }
}
