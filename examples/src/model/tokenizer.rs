//! Text to tokens and back.

use anyhow::{Context, Error, Result, bail};
use candle_core::quantized::gguf_file::Content;
use candle_core::quantized::tokenizer::TokenizerFromGguf;
use tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;

/// The tokenizer of a model.
#[derive(Debug)]
pub enum Tokenizer {
    /// A token is a byte.
    Bytes,
    /// Byte-level BPE of a GGUF file.
    Bpe(Box<tokenizers::Tokenizer>),
}

impl Tokenizer {
    /// Builds the tokenizer a GGUF file describes: byte-level BPE whose pre-tokenizer is `smollm`
    /// or `gpt-2`.
    ///
    /// # Errors
    /// Another kind of tokenizer, or metadata that does not make one.
    pub fn from_gguf(content: &Content) -> Result<Self> {
        let pre = content
            .metadata
            .get("tokenizer.ggml.pre")
            .context("metadata tokenizer.ggml.pre is missing")?;
        let byte_level = ByteLevel::new(false, true, true);
        let split: PreTokenizerWrapper = match pre.to_string()?.as_str() {
            "gpt-2" => byte_level.into(),
            // Digits stand alone, then as GPT-2.
            "smollm" => Sequence::new(vec![Digits::new(true).into(), byte_level.into()]).into(),
            other => {
                bail!("pre-tokenizer {other} is not supported: use a model with smollm or gpt-2")
            }
        };
        let mut bpe = tokenizers::Tokenizer::from_gguf(content)?;
        bpe.with_pre_tokenizer(Some(split));
        Ok(Self::Bpe(Box::new(bpe)))
    }

    /// The tokens of `text`; the names of special tokens (`<|im_start|>`…) in it become those
    /// tokens.
    ///
    /// # Errors
    /// Text that the vocabulary cannot spell.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        match self {
            Self::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Self::Bpe(bpe) => {
                Ok(bpe.encode_fast(text, true).map_err(Error::from_boxed)?.get_ids().to_vec())
            }
        }
    }

    /// The text of `tokens`, without special ones. Bytes that are no UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// None of its own; those of the BPE decoder.
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        match self {
            Self::Bytes => {
                let bytes: Vec<u8> =
                    tokens.iter().filter_map(|&token| u8::try_from(token).ok()).collect();
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            Self::Bpe(bpe) => bpe.decode(tokens, true).map_err(Error::from_boxed),
        }
    }

    /// What to encode so that an instruction-tuned model answers `user_text`: ChatML with the
    /// system line of SmolLM2-Instruct's own template. The text itself, for a vocabulary without
    /// ChatML's special tokens.
    pub fn chat_prompt(&self, user_text: &str) -> String {
        match self {
            Self::Bpe(bpe) if bpe.token_to_id("<|im_start|>").is_some() => format!(
                "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n\
                 <|im_start|>user\n{user_text}<|im_end|>\n<|im_start|>assistant\n"
            ),
            _ => user_text.to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_back_as_the_text_they_were() {
        let text = "naïve 北京 <|im_start|>\n";
        assert_eq!(Tokenizer::Bytes.decode(&Tokenizer::Bytes.encode(text).unwrap()).unwrap(), text);
        assert_eq!(Tokenizer::Bytes.decode(&[104, 105, 257, 0xff]).unwrap(), "hi\u{fffd}");
        assert_eq!(Tokenizer::Bytes.chat_prompt(text), text);
    }
}
