//! The weights of a model, and the seeded ones.

use anyhow::{Result, ensure};
use candle_core::quantized::QMatMul;
use candle_core::{DType, Device, Tensor};

use super::{ModelConfig, Tokenizer};

/// A model on the CPU: weights, rotary tables, tokenizer. Immutable; it keeps no K/V.
pub struct Model {
    pub(super) config: ModelConfig,
    pub(super) tokenizer: Tokenizer,
    pub(super) embedding: QMatMul,
    pub(super) layers: Vec<Layer>,
    pub(super) norm: Tensor,
    pub(super) head: QMatMul,
    /// Cosines and sines of the rotary angles, `[context, 1, head_dim / 2]`.
    pub(super) rope: (Tensor, Tensor),
}

/// One transformer layer; matrices are `[out, in]`.
pub(super) struct Layer {
    pub(super) attn_norm: Tensor,
    pub(super) q: QMatMul,
    pub(super) k: QMatMul,
    pub(super) v: QMatMul,
    pub(super) o: QMatMul,
    pub(super) ffn_norm: Tensor,
    pub(super) gate: QMatMul,
    pub(super) up: QMatMul,
    pub(super) down: QMatMul,
}

/// Gives tensors by their GGUF name.
pub(super) trait Source {
    /// A matrix of `[rows, cols]`.
    fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<QMatMul>;
    /// Whether there is a tensor of that name.
    fn has(&self, name: &str) -> bool;
    /// The scale of an RMS norm.
    fn norm(&mut self, name: &str, len: usize) -> Result<Tensor>;
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Model")
            .field("config", &self.config)
            .field("tokenizer", &self.tokenizer)
            .finish_non_exhaustive()
    }
}

impl Model {
    /// A model with made-up weights: the same `config` and `seed` give the same bits in every
    /// process.
    ///
    /// Its text is gibberish in lower-case letters, but every token of it depends on the whole
    /// prompt. Tokens are bytes. Ready in well under a second for [`ModelConfig::tiny`].
    ///
    /// # Errors
    /// A `config` that [`ModelConfig::check`] refuses, or whose vocabulary has no room for the
    /// bytes and [`eos`](ModelConfig::eos).
    pub fn seeded(config: ModelConfig, seed: u64) -> Result<Self> {
        ensure!(
            config.vocab >= 256,
            "model config: a vocabulary of bytes needs 256 tokens, not {}",
            config.vocab
        );
        let mut source = Seeded { state: seed, eos: config.eos as usize };
        Self::from_source(config, Tokenizer::Bytes, &mut source)
    }

    /// Collects the weights of `config` from `source`.
    pub(super) fn from_source(
        config: ModelConfig,
        tokenizer: Tokenizer,
        source: &mut dyn Source,
    ) -> Result<Self> {
        config.check()?;
        ensure!(
            (config.eos as usize) < config.vocab,
            "model config: eos {} is not in the vocabulary of {} tokens",
            config.eos,
            config.vocab
        );
        let ModelConfig { hidden, ffn, vocab, .. } = config;
        let (q_row, kv_row) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
        let layer = |l: usize, source: &mut dyn Source| -> Result<Layer> {
            Ok(Layer {
                attn_norm: source.norm(&format!("blk.{l}.attn_norm.weight"), hidden)?,
                q: source.matrix(&format!("blk.{l}.attn_q.weight"), q_row, hidden)?,
                k: source.matrix(&format!("blk.{l}.attn_k.weight"), kv_row, hidden)?,
                v: source.matrix(&format!("blk.{l}.attn_v.weight"), kv_row, hidden)?,
                o: source.matrix(&format!("blk.{l}.attn_output.weight"), hidden, q_row)?,
                ffn_norm: source.norm(&format!("blk.{l}.ffn_norm.weight"), hidden)?,
                gate: source.matrix(&format!("blk.{l}.ffn_gate.weight"), ffn, hidden)?,
                up: source.matrix(&format!("blk.{l}.ffn_up.weight"), ffn, hidden)?,
                down: source.matrix(&format!("blk.{l}.ffn_down.weight"), hidden, ffn)?,
            })
        };
        let embedding = source.matrix("token_embd.weight", vocab, hidden)?;
        Ok(Self {
            layers: (0..config.layers).map(|l| layer(l, source)).collect::<Result<_>>()?,
            norm: source.norm("output_norm.weight", hidden)?,
            head: match source.has("output.weight") {
                true => source.matrix("output.weight", vocab, hidden)?,
                false => embedding.clone(), // tied
            },
            embedding,
            rope: rope_tables(&config)?,
            tokenizer,
            config,
        })
    }

    /// The shape of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The tokenizer its weights belong to.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }
}

/// Cosine and sine of every position's rotary angles.
fn rope_tables(config: &ModelConfig) -> Result<(Tensor, Tensor)> {
    let half = config.head_dim / 2;
    let frequency =
        |i: usize| f64::from(config.rope_base).powf(-2.0 * i as f64 / config.head_dim as f64);
    let frequencies: Vec<f64> = (0..half).map(frequency).collect();
    let table = |f: fn(f64) -> f64| -> Result<Tensor> {
        let angles =
            (0..config.context).flat_map(|t| frequencies.iter().map(move |w| f(t as f64 * w)));
        let table = Tensor::from_iter(angles, &Device::Cpu)?.to_dtype(DType::F32)?;
        Ok(table.reshape((config.context, 1, half))?)
    };
    Ok((table(f64::cos)?, table(f64::sin)?))
}

/// SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): a few lines that no library upgrade can change the
/// output of.
struct Seeded {
    state: u64,
    eos: usize,
}

impl Seeded {
    /// Uniform in [-1, 1): 24 bits, so the conversion is exact.
    fn uniform(&mut self) -> f32 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        (z >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}

impl Source for Seeded {
    fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<QMatMul> {
        // Rows keep the variance of their input, but queries and keys are made larger: a softmax
        // over small scores averages the whole prompt away.
        let gain = if name.contains("attn_q") || name.contains("attn_k") { GAIN_QK } else { 1.0 };
        let scale =
            if name.starts_with("token_embd") { 1.0 } else { gain * (3.0 / cols as f32).sqrt() };
        let mut values: Vec<f32> = (0..rows * cols).map(|_| scale * self.uniform()).collect();
        if name == "output.weight" {
            // What a terminal can show: letters and the space; now and then the end; nothing else.
            for (token, row) in values.chunks_exact_mut(cols).enumerate() {
                let spoken = u8::try_from(token).is_ok_and(|b| b == b' ' || b.is_ascii_lowercase());
                let weight = if token == self.eos { 0.75 } else { f32::from(u8::from(spoken)) };
                row.iter_mut().for_each(|x| *x *= weight);
            }
        }
        Ok(QMatMul::Tensor(Tensor::from_vec(values, (rows, cols), &Device::Cpu)?))
    }

    fn has(&self, _name: &str) -> bool {
        true
    }

    fn norm(&mut self, _name: &str, len: usize) -> Result<Tensor> {
        Ok(Tensor::from_vec(vec![1f32; len], len, &Device::Cpu)?)
    }
}

/// Standard deviation of seeded query and key elements; scores have about its square. Found by
/// trial: one foreign page among 19, in either plane of any layer, then changes nearly every text
/// within 32 tokens.
const GAIN_QK: f32 = 2.5;
