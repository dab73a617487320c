//! The shape of a model.

use anyhow::{Result, ensure};

use super::KvGeometry;

/// The shape of a Llama-family model. Sizes are element counts.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Transformer layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// K/V heads; each serves `heads / kv_heads` query heads (grouped-query attention).
    pub kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Inner width of the gated feed-forward.
    pub ffn: usize,
    /// Tokens in the vocabulary.
    pub vocab: usize,
    /// Most positions a sequence may have.
    pub context: usize,
    /// Base of the rotary frequencies.
    pub rope_base: f32,
    /// Epsilon of the RMS norms.
    pub norm_eps: f32,
    /// The token that ends a text.
    pub eos: u32,
}

impl ModelConfig {
    /// The shape of the built-in model: 6 layers, 2 K/V heads of 32, a vocabulary of bytes and two
    /// specials.
    pub fn tiny() -> Self {
        Self {
            layers: 6,
            hidden: 192,
            heads: 6,
            kv_heads: 2,
            head_dim: 32,
            ffn: 512,
            vocab: 258,
            context: 8192,
            // Low, so that over a few hundred tokens all but the slowest pairs turn: position
            // matters.
            rope_base: 1_000.0,
            norm_eps: 1e-5,
            eos: 257,
        }
    }

    /// The shape of a K/V pool for this model.
    pub fn pool(&self, pages: usize, page_tokens: usize) -> KvGeometry {
        let Self { layers, kv_heads, head_dim, .. } = *self;
        KvGeometry { layers, pages, page_tokens, kv_heads, head_dim }
    }

    /// Refuses a shape no model can have.
    ///
    /// # Errors
    /// Names the field that is zero, odd or does not divide.
    pub fn check(&self) -> Result<()> {
        for (name, value) in [
            ("layers", self.layers),
            ("hidden", self.hidden),
            ("heads", self.heads),
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("ffn", self.ffn),
            ("vocab", self.vocab),
            ("context", self.context),
        ] {
            ensure!(value > 0, "model config: {name} is zero");
        }
        ensure!(
            self.heads.is_multiple_of(self.kv_heads),
            "model config: {} heads do not divide among {} kv_heads",
            self.heads,
            self.kv_heads
        );
        ensure!(
            self.head_dim.is_multiple_of(2),
            "model config: rotary positions need an even head_dim, not {}",
            self.head_dim
        );
        Ok(())
    }
}
