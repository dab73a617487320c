//! Real weights, from a GGUF file.

use std::fs::File;
use std::io::{BufReader, Read, Seek};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::quantized::{GgmlDType, QMatMul, QTensor};
use candle_core::{Device, Tensor};

use super::weights::Source;
use super::{Model, ModelConfig, Tokenizer};

/// Formats that candle multiplies without SIMD. They are requantized to Q8_0 when loaded (an error
/// under 1 % a product): five times faster prefill, twice as fast decode.
const NO_KERNEL: [GgmlDType; 3] = [GgmlDType::Q4_1, GgmlDType::Q5_0, GgmlDType::Q5_1];

impl Model {
    /// Loads a model of architecture `llama` from a GGUF file, with its tokenizer. Matrices stay
    /// quantized.
    ///
    /// The file's query and key rows are permuted for interleaved rotary pairs (as llama.cpp's
    /// converter leaves them), which is how [`forward`](Self::forward) rotates.
    ///
    /// # Errors
    /// A file that cannot be read or is not GGUF; another architecture; rotary scaling; a missing
    /// or misshapen tensor; a tokenizer [`Tokenizer::from_gguf`] refuses.
    pub fn load_gguf(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let read = || Self::read_gguf(BufReader::new(File::open(path)?));
        read().with_context(|| format!("load GGUF model {}", path.display()))
    }

    fn read_gguf(mut file: impl Read + Seek) -> Result<Self> {
        let content = Content::read(&mut file)?;
        let config = config(&content)?;
        let tokenizer = Tokenizer::from_gguf(&content)?;
        Self::from_source(config, tokenizer, &mut Gguf { content, file })
    }
}

/// Reads the shape of the model from the file's metadata.
fn config(content: &Content) -> Result<ModelConfig> {
    let optional = |key: &str| content.metadata.get(key);
    let value = |key: &str| optional(key).with_context(|| format!("metadata {key} is missing"));
    let size = |key: &str| -> Result<usize> {
        Ok(usize::try_from(value(key)?.to_u64().with_context(|| format!("metadata {key}"))?)?)
    };
    let arch = value("general.architecture")?.to_string()?;
    ensure!(
        arch == "llama",
        "architecture {arch} is not supported: use a model of architecture llama"
    );

    let (hidden, heads) = (size("llama.embedding_length")?, size("llama.attention.head_count")?);
    ensure!(heads > 0, "metadata llama.attention.head_count is zero");
    let size_or = |key, default| if optional(key).is_some() { size(key) } else { Ok(default) };
    let head_dim = size_or("llama.attention.key_length", hidden / heads)?;
    let scaling = optional("llama.rope.scaling.type")
        .is_some_and(|v| v.to_string().is_ok_and(|s| s != "none"));
    ensure!(
        !scaling && !content.tensor_infos.contains_key("rope_freqs.weight"),
        "rotary scaling is not supported: use a model trained without it"
    );
    let rotated = size_or("llama.rope.dimension_count", head_dim)?;
    ensure!(
        rotated == head_dim,
        "rotating {rotated} of {head_dim} elements of a head is not supported"
    );
    Ok(ModelConfig {
        layers: size("llama.block_count")?,
        hidden,
        heads,
        kv_heads: size_or("llama.attention.head_count_kv", heads)?,
        head_dim,
        ffn: size("llama.feed_forward_length")?,
        vocab: value("tokenizer.ggml.tokens")?.to_vec()?.len(),
        context: size("llama.context_length")?,
        rope_base: optional("llama.rope.freq_base").map_or(Ok(10_000.0), Value::to_f32)?,
        norm_eps: value("llama.attention.layer_norm_rms_epsilon")?.to_f32()?,
        eos: value("tokenizer.ggml.eos_token_id")?.to_u32()?,
    })
}

/// The tensors of an open file.
struct Gguf<R> {
    content: Content,
    file: R,
}

impl<R: Read + Seek> Gguf<R> {
    fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<QTensor> {
        let tensor = self.content.tensor(&mut self.file, name, &Device::Cpu)?;
        let found = tensor.shape().dims();
        ensure!(found == shape, "tensor {name} has shape {found:?}, the metadata says {shape:?}");
        Ok(tensor)
    }
}

impl<R: Read + Seek> Source for Gguf<R> {
    fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<QMatMul> {
        let mut tensor = self.tensor(name, &[rows, cols])?;
        if NO_KERNEL.contains(&tensor.dtype()) {
            tensor = QTensor::quantize(&tensor.dequantize(&Device::Cpu)?, GgmlDType::Q8_0)?;
        }
        Ok(QMatMul::from_qtensor(tensor)?)
    }

    fn has(&self, name: &str) -> bool {
        self.content.tensor_infos.contains_key(name)
    }

    fn norm(&mut self, name: &str, len: usize) -> Result<Tensor> {
        Ok(self.tensor(name, &[len])?.dequantize(&Device::Cpu)?)
    }
}

#[cfg(test)]
mod tests;
