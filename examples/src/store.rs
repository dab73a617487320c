//! The model's K/V over a kvferry pool: what the engine carries is what the model reads.

use anyhow::{Context, Result};
use kvferry::{AllocOptions, Dtype, HeadOrder, Planes, Pool, PoolLayout, Region};
use zerocopy::IntoBytes;

use crate::model::{KvGeometry, KvStore, ModelConfig, Plane};

/// A [`KvStore`] whose pages are a [`Pool`]'s: layers × {K, V} × pages, f32, token-major.
#[derive(Debug)]
pub struct PoolStore {
    pool: Pool,
    geometry: KvGeometry,
}

impl PoolStore {
    /// Allocates a pool of `pages` pages of `page_tokens` tokens for a model.
    ///
    /// # Errors
    /// A shape that no pool has, or no memory for it.
    pub fn allocate(config: &ModelConfig, pages: u32, page_tokens: u32) -> Result<Self> {
        let geometry = config.pool(pages as usize, page_tokens as usize);
        let heads = u32::try_from(config.kv_heads)?;
        let layout = PoolLayout {
            name: "kv".to_owned(),
            layers: 0..u32::try_from(config.layers)?,
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
        Ok(Self { pool, geometry })
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
        for (layer, plane) in (0..self.geometry.layers).flat_map(|l| [(l, Plane::K), (l, Plane::V)])
        {
            for &page in pages {
                self.read(layer, plane, page, 0, &mut rows);
                checksum = crc32c::crc32c_append(checksum, rows.as_bytes());
            }
        }
        checksum
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
        let pool = PoolStore::allocate(&config, 3, 4).unwrap();
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
        let pool = PoolStore::allocate(&ModelConfig::tiny(), 3, 4).unwrap();
        pool.write(5, Plane::V, 1, 0, &[1.0]);
        assert_ne!(pool.checksum(&[0, 1]), pool.checksum(&[1, 0]));
        assert_eq!(pool.checksum(&[0, 1]), pool.checksum(&[2, 1]));
        assert_eq!(pool.checksum(&[]), 0);
    }
}
