//! A decoder-only transformer of the Llama family, computed on the CPU over **paged** K/V.
//!
//! The model of the prefill/decode examples. It never owns a KV cache: every K and V row it
//! computes is written to the pages of a [`KvStore`], and every row it attends to is read back from
//! there. So a decode node continues a prompt it has never computed, from pages that were carried
//! to it, and a wrong page gives wrong tokens.
//!
//! Two sources of weights: [`Model::seeded`] makes a small deterministic model in memory,
//! [`Model::load_gguf`] reads real ones. The same chunk schedule gives bit-identical logits in
//! every process on the same kind of CPU.
//!
//! The threads of candle's quantized products spin at a barrier, so two processes on the same cores
//! slow each other's decode down tenfold: give each its share with `RAYON_NUM_THREADS`, set before
//! it starts. The number of threads changes no bit.
//!
//! ```text
//! tokens ─ chunks ─▶ forward ─ layer l: K, V rows ─▶ KvStore pages ─ on_layer(l) ─▶ ship them
//!                       ▲                                 │
//!                       └────── rows of all positions ────┘
//! ```

mod config;
mod forward;
mod generate;
mod gguf;
mod kv;
mod tokenizer;
mod weights;

#[cfg(test)]
mod tests;

pub use config::ModelConfig;
pub use generate::{argmax, chunks, decode, generate, prefill};
pub use kv::{KvGeometry, KvSequence, KvStore, Plane, VecStore};
pub use tokenizer::Tokenizer;
pub use weights::Model;
