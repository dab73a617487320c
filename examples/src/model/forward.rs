//! The forward pass of one chunk, over paged K/V.

use anyhow::{Context, Result, ensure};
use candle_core::{Device, Module, Tensor};
use candle_nn::ops::{rms_norm, softmax_last_dim};
use candle_nn::rotary_emb::rope_i;

use super::{KvGeometry, KvSequence, KvStore, Model, Plane};

/// Query rows attended at once: bounds the score matrix (`heads * 128 * context` floats, 37 MB at 9
/// heads and 8192 positions) and lets early rows skip the keys they may not see.
const ATTENTION_ROWS: usize = 128;

/// Some of the chunk's query rows, and the keys they may see.
struct Block {
    first: usize,
    rows: usize,
    visible: usize,
    /// 0 where a row may look, -inf where the key is later than the row: `[rows, visible]`. One row
    /// needs none.
    mask: Option<Tensor>,
}

impl Model {
    /// Computes `tokens` as the positions from `seq.len` on, and returns the logits of the last one
    /// (`vocab` floats).
    ///
    /// K and V rows of the chunk are written to the pages of `seq`; `on_layer(l)` runs as soon as
    /// those of layer `l` are all there, before the layer's attention, so that a caller can ship
    /// them while the rest is computed. K and V of earlier positions are read from the pages.
    /// `seq.len` grows by `tokens.len()` on success only; after an error the rows beyond `seq.len`
    /// are undefined and the call may be repeated.
    ///
    /// # Errors
    /// No tokens, or a token outside the vocabulary; more positions than the context; a `store` of
    /// another shape; too few pages in `seq` or pages outside the pool; whatever `on_layer`
    /// returns.
    pub fn forward(
        &self,
        tokens: &[u32],
        seq: &mut KvSequence,
        store: &dyn KvStore,
        on_layer: &mut dyn FnMut(usize) -> Result<()>,
    ) -> Result<Vec<f32>> {
        let c = &self.config;
        let (start, rows) = (seq.len, tokens.len());
        let total = start + rows;
        self.check(tokens, total, &store.geometry())?;
        seq.check(total, &store.geometry())?;

        let blocks = blocks(start, rows)?;
        let cos = self.rope.0.narrow(0, start, rows)?;
        let sin = self.rope.1.narrow(0, start, rows)?;
        // Token-major throughout: each row is a batch of its own with one position, as the pages
        // have it.
        let rope =
            |x: Tensor, heads: usize| rope_i(&x.reshape((rows, heads, 1, c.head_dim))?, &cos, &sin);

        let mut x = self.embedding.embedding(&Tensor::new(tokens, &Device::Cpu)?)?;
        for (l, layer) in self.layers.iter().enumerate() {
            let h = rms_norm(&x, &layer.attn_norm, c.norm_eps)?;
            let k = rope(layer.k.forward(&h)?, c.kv_heads)?;
            seq.write(store, l, Plane::K, start, &k.flatten_all()?.to_vec1()?);
            seq.write(store, l, Plane::V, start, &layer.v.forward(&h)?.flatten_all()?.to_vec1()?);
            on_layer(l).with_context(|| format!("K/V of layer {l}, positions {start}..{total}"))?;

            let q = rope(layer.q.forward(&h)?, c.heads)?;
            let shape = (total, c.kv_heads, c.head_dim);
            let k = Tensor::from_vec(seq.read(store, l, Plane::K, total), shape, &Device::Cpu)?;
            let v = Tensor::from_vec(seq.read(store, l, Plane::V, total), shape, &Device::Cpu)?;
            x = (x + layer.o.forward(&self.attend(&q, &k, &v, &blocks)?)?)?;

            let h = rms_norm(&x, &layer.ffn_norm, c.norm_eps)?;
            let gated = (layer.gate.forward(&h)?.silu()? * layer.up.forward(&h)?)?;
            x = (x + layer.down.forward(&gated)?)?;
        }
        seq.len = total;
        let last = rms_norm(&x.narrow(0, rows - 1, 1)?, &self.norm, c.norm_eps)?;
        Ok(self.head.forward(&last)?.flatten_all()?.to_vec1()?)
    }

    /// Grouped-query attention of `q` (`[rows, heads, 1, head_dim]`) over `k` and `v` (`[total,
    /// kv_heads, head_dim]`): `[rows, heads * head_dim]`.
    fn attend(&self, q: &Tensor, k: &Tensor, v: &Tensor, blocks: &[Block]) -> Result<Tensor> {
        let c = &self.config;
        let group = c.heads / c.kv_heads;
        let scale = 1.0 / (c.head_dim as f64).sqrt();
        let q = (q.reshape((q.dim(0)?, c.kv_heads, group, c.head_dim))? * scale)?
            .permute((1, 2, 0, 3))?;
        let (k, v) = (k.permute((1, 2, 0))?, v.transpose(0, 1)?);
        let mut out = Vec::with_capacity(blocks.len());
        for &Block { first, rows, visible, ref mask } in blocks {
            let q = q.narrow(2, first, rows)?.reshape((c.kv_heads, group * rows, c.head_dim))?;
            let mut scores = q.matmul(&k.narrow(2, 0, visible)?)?;
            if let Some(mask) = mask {
                scores = scores.reshape((c.heads, rows, visible))?.broadcast_add(mask)?;
            }
            let scores = softmax_last_dim(&scores)?.reshape((c.kv_heads, group * rows, visible))?;
            let mixed = scores.matmul(&v.narrow(1, 0, visible)?)?;
            let mixed = mixed.reshape((c.heads, rows, c.head_dim))?.transpose(0, 1)?;
            out.push(mixed.reshape((rows, c.heads * c.head_dim))?);
        }
        Ok(Tensor::cat(&out, 0)?)
    }

    /// Refuses what cannot be computed, before any page is touched.
    fn check(&self, tokens: &[u32], total: usize, pool: &KvGeometry) -> Result<()> {
        let c = &self.config;
        ensure!(!tokens.is_empty(), "no tokens to compute");
        for &token in tokens {
            ensure!(
                (token as usize) < c.vocab,
                "token {token} is not in the vocabulary of {} tokens",
                c.vocab
            );
        }
        ensure!(
            total <= c.context,
            "{total} positions exceed the model's context of {}: shorten the prompt",
            c.context
        );
        ensure!(
            (pool.layers, pool.kv_heads, pool.head_dim) == (c.layers, c.kv_heads, c.head_dim)
                && pool.page_tokens > 0,
            "the KV pool ({pool:?}) does not fit a model of {} layers, {} kv_heads, head_dim {}",
            c.layers,
            c.kv_heads,
            c.head_dim
        );
        Ok(())
    }
}

/// Cuts a chunk of `rows` query rows from position `start`.
fn blocks(start: usize, rows: usize) -> Result<Vec<Block>> {
    let block = |first: usize| -> Result<Block> {
        let rows = ATTENTION_ROWS.min(rows - first);
        let visible = start + first + rows;
        let causal = (visible - rows..visible).flat_map(|row| {
            (0..visible).map(move |key| if key <= row { 0.0 } else { f32::NEG_INFINITY })
        });
        let mask = match rows {
            1 => None,
            _ => Some(Tensor::from_iter(causal, &Device::Cpu)?.reshape((rows, visible))?),
        };
        Ok(Block { first, rows, visible, mask })
    };
    (0..rows).step_by(ATTENTION_ROWS).map(block).collect()
}
