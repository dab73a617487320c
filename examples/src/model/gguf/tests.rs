//! The loader, on files made in memory.

use std::io::Cursor;

use candle_core::DType;
use candle_core::quantized::gguf_file;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

use super::super::{KvSequence, VecStore, chunks, generate};
use super::*;

const SPECIALS: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];

/// A file of one layer with tied Q4_1 embeddings; `edit` changes its metadata.
fn file(edit: impl Fn(&mut Vec<(&str, Value)>)) -> Result<Model> {
    let text = |s: &str| Value::String(s.to_owned());
    let mut alphabet: Vec<_> = ByteLevel::alphabet().into_iter().collect();
    alphabet.sort_unstable();
    let mut tokens: Vec<_> = SPECIALS.iter().map(|s| text(s)).collect();
    tokens.extend(alphabet.iter().map(|c| Value::String(c.to_string())));
    tokens.extend([text("he"), text("12")]);
    let types =
        (0..tokens.len()).map(|i| Value::I32(if i < SPECIALS.len() { 3 } else { 1 })).collect();
    let vocab = tokens.len();
    let mut metadata = vec![
        ("general.architecture", text("llama")),
        ("llama.block_count", Value::U32(1)),
        ("llama.context_length", Value::U32(64)),
        ("llama.embedding_length", Value::U32(64)),
        ("llama.feed_forward_length", Value::U32(128)),
        ("llama.attention.head_count", Value::U32(4)),
        ("llama.attention.head_count_kv", Value::U32(2)),
        ("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-5)),
        ("llama.rope.freq_base", Value::F32(5e5)),
        ("tokenizer.ggml.model", text("gpt2")),
        ("tokenizer.ggml.pre", text("smollm")),
        ("tokenizer.ggml.tokens", Value::Array(tokens)),
        ("tokenizer.ggml.token_type", Value::Array(types)),
        ("tokenizer.ggml.merges", Value::Array(vec![text("h e"), text("1 2")])),
        ("tokenizer.ggml.eos_token_id", Value::U32(2)),
    ];
    edit(&mut metadata);

    let quantize = |values: Tensor, dtype| QTensor::quantize(&values, dtype).unwrap();
    let matrix = |rows: usize, cols: usize, dtype| {
        quantize(Tensor::randn(0f32, 0.3, (rows, cols), &Device::Cpu).unwrap(), dtype)
    };
    let norm = || quantize(Tensor::ones(64, DType::F32, &Device::Cpu).unwrap(), GgmlDType::F32);
    let q8 = GgmlDType::Q8_0;
    let tensors = [
        ("token_embd.weight", matrix(vocab, 64, GgmlDType::Q4_1)),
        ("output_norm.weight", norm()),
        ("blk.0.attn_norm.weight", norm()),
        ("blk.0.attn_q.weight", matrix(64, 64, q8)),
        ("blk.0.attn_k.weight", matrix(32, 64, q8)),
        ("blk.0.attn_v.weight", matrix(32, 64, GgmlDType::F32)),
        ("blk.0.attn_output.weight", matrix(64, 64, q8)),
        ("blk.0.ffn_norm.weight", norm()),
        ("blk.0.ffn_gate.weight", matrix(128, 64, q8)),
        ("blk.0.ffn_up.weight", matrix(128, 64, q8)),
        ("blk.0.ffn_down.weight", matrix(64, 128, q8)),
    ];
    let metadata: Vec<_> = metadata.iter().map(|(name, value)| (*name, value)).collect();
    let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (*name, tensor)).collect();
    let mut bytes = Cursor::new(Vec::new());
    gguf_file::write(&mut bytes, &metadata, &tensors).unwrap();
    Model::read_gguf(Cursor::new(bytes.into_inner()))
}

#[test]
fn shape_and_weights_come_from_the_file() {
    let model = file(|_| ()).unwrap();
    let c = model.config();
    assert_eq!((c.layers, c.heads, c.kv_heads, c.head_dim, c.ffn), (1, 4, 2, 16, 128));
    assert_eq!((c.vocab, c.context, c.rope_base, c.eos), (261, 64, 5e5, 2));
    let dtype = |m: &QMatMul| match m {
        QMatMul::QTensor(t) => t.dtype(),
        QMatMul::Tensor(_) | QMatMul::TensorF16(_) => GgmlDType::F32,
    };
    assert_eq!(dtype(&model.embedding), GgmlDType::Q8_0, "requantized");
    assert_eq!(dtype(&model.head), GgmlDType::Q8_0, "tied");
    assert_eq!(dtype(&model.layers[0].v), GgmlDType::F32);

    let (mut seq, store) = (KvSequence::new(0..4), VecStore::new(c.pool(4, 8)));
    let prompt = model.tokenizer().encode("the rest is computed").unwrap();
    generate(&model, &prompt, &chunks(prompt.len(), 8, 0, 8), &mut seq, &store, 8).unwrap();
    assert!(seq.len >= prompt.len());
}

#[test]
fn bpe_spells_every_text_and_knows_special_tokens() {
    let model = file(|_| ()).unwrap();
    let bpe = model.tokenizer();
    let text = " the  12 naïve\n北京's";
    assert_eq!(bpe.decode(&bpe.encode(text).unwrap()).unwrap(), text);
    assert_eq!(bpe.encode("he").unwrap(), [259]);
    assert_eq!(bpe.encode("12").unwrap().len(), 2, "smollm splits digits before it merges");
    // Of two values of one key, the later counts.
    let gpt2 = file(|m| m.push(("tokenizer.ggml.pre", Value::String("gpt-2".into())))).unwrap();
    assert_eq!(gpt2.tokenizer().encode("12").unwrap(), [260]);

    let chat = bpe.encode(&bpe.chat_prompt("he")).unwrap();
    assert_eq!(chat.iter().filter(|&&token| token == 1).count(), 3);
    assert_eq!(chat.iter().filter(|&&token| token == 2).count(), 2);
    assert!(chat.contains(&259));
    assert_eq!(bpe.decode(&[1, 259, 2]).unwrap(), "he", "special tokens are not text");
}

#[test]
fn files_it_cannot_run_are_refused_by_name() {
    let error = |key: &'static str, value: Option<Value>| {
        let edit = |m: &mut Vec<(&str, Value)>| {
            m.retain(|entry| entry.0 != key);
            m.extend(value.clone().map(|value| (key, value)));
        };
        format!("{:#}", file(edit).unwrap_err())
    };
    let text = |s: &str| Some(Value::String(s.to_owned()));
    assert!(error("general.architecture", text("qwen3")).contains("architecture qwen3"));
    assert!(error("llama.block_count", None).contains("llama.block_count is missing"));
    assert!(error("llama.block_count", Some(Value::U32(2))).contains("blk.1.attn_norm.weight"));
    assert!(
        error("llama.feed_forward_length", Some(Value::U32(96))).contains("has shape [128, 64]")
    );
    assert!(
        error("llama.attention.head_count", Some(Value::U32(0))).contains("head_count is zero")
    );
    assert!(error("llama.rope.scaling.type", text("yarn")).contains("rotary scaling"));
    assert!(error("llama.rope.dimension_count", Some(Value::U32(8))).contains("rotating 8 of 16"));
    assert!(error("tokenizer.ggml.pre", text("tekken")).contains("pre-tokenizer tekken"));
    assert!(error("tokenizer.ggml.model", text("llama")).contains("tokenizer model `llama`"));
    assert!(Model::read_gguf(Cursor::new(b"not a model".to_vec())).is_err());
    assert!(
        format!("{:#}", Model::load_gguf("/nowhere.gguf").unwrap_err()).contains("/nowhere.gguf")
    );
}

#[test]
#[ignore = "set KVFERRY_MODEL to the path of SmolLM2-135M-Instruct in GGUF"]
fn smollm2_answers_in_english() {
    let model = Model::load_gguf(std::env::var("KVFERRY_MODEL").unwrap()).unwrap();
    let c = model.config();
    // Questions whose subject the answer repeats: which of two words that are equally good is chosen depends
    // on how the CPU rounds.
    for (question, answer) in [
        ("What is a dog?", "dog is a"),
        ("Explain what a network card does, in one sentence.", "network"),
    ] {
        let prompt = model.tokenizer().encode(&model.tokenizer().chat_prompt(question)).unwrap();
        let (mut seq, store) = (KvSequence::new(0..16), VecStore::new(c.pool(16, 16)));
        let all = chunks(prompt.len(), 32, 0, 16);
        let tokens = generate(&model, &prompt, &all, &mut seq, &store, 48).unwrap();
        let text = model.tokenizer().decode(&tokens).unwrap();
        println!("{question} {text}");
        assert!(text.contains(answer), "{text}");
    }
}
