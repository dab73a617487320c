//! The promises of the model, on the seeded weights.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::process::Command;

use anyhow::bail;

use super::*;

const PAGE_TOKENS: usize = 16;
const PAGES: u32 = 64;

/// A model, a prompt and pages for it.
struct Fixture {
    model: Model,
    prompt: Vec<u32>,
    store: VecStore,
    seq: KvSequence,
}

/// The prompt is longer than two attention blocks and ends within a page.
fn fixture(seed: u64) -> Fixture {
    let text = "A page is carried once, and read by every token after it. ".repeat(6);
    let model = Model::seeded(ModelConfig::tiny(), seed).unwrap();
    let store = VecStore::new(model.config().pool(PAGES as usize, PAGE_TOKENS));
    let prompt = model.tokenizer().encode(&text[..301]).unwrap();
    Fixture { model, prompt, store, seq: KvSequence::new(0..PAGES) }
}

impl Fixture {
    /// Logits after the prompt.
    fn prefill(&mut self, schedule: &[Range<usize>]) -> Vec<f32> {
        let Self { model, prompt, store, seq } = self;
        prefill(model, prompt, schedule, seq, store, &mut |_, _| Ok(())).unwrap()
    }

    fn chunks(&self, chunk_tokens: usize) -> Vec<Range<usize>> {
        chunks(self.prompt.len(), chunk_tokens, 0, PAGE_TOKENS)
    }

    /// Logits after one more token; the sequence stays as it is.
    fn step(&self, token: u32) -> Vec<f32> {
        self.model.forward(&[token], &mut self.seq.clone(), &self.store, &mut |_| Ok(())).unwrap()
    }

    /// The text of the prompt.
    fn generate(&mut self, max_new: usize) -> Vec<u32> {
        let schedule = self.chunks(64);
        let Self { model, prompt, store, seq } = self;
        generate(model, prompt, &schedule, seq, store, max_new).unwrap()
    }
}

fn assert_close(a: &[f32], b: &[f32]) {
    let worst = a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst < 1e-3, "logits differ by {worst}");
    assert_eq!(argmax(a).unwrap(), argmax(b).unwrap());
}

#[test]
fn one_seed_gives_one_model_and_another_seed_another() {
    let of = |seed| fixture(seed).prefill(&[0..128, 128..301]);
    assert_eq!(of(1), of(1));
    assert_ne!(of(1), of(2));
}

#[test]
fn numbering_of_pages_does_not_change_a_bit() {
    let (mut a, mut b) = (fixture(7), fixture(7));
    b.seq = KvSequence::new((0..PAGES).map(|page| (page * 37 + 11) % PAGES));
    assert_eq!(a.prefill(&a.chunks(64)), b.prefill(&b.chunks(64)));
    let texts = (a.generate(24), b.generate(24));
    assert_eq!(texts.0, texts.1);
    assert_eq!(a.step(1), b.step(1));
}

#[test]
fn every_chunk_schedule_computes_the_same_prompt() {
    let mut f = fixture(7);
    let whole = f.prefill(std::slice::from_ref(&(0..301)));
    for chunk_tokens in [16, 48, 128, 256] {
        assert_close(&whole, &f.prefill(&f.chunks(chunk_tokens)));
    }
    // One token at a time needs no causal mask: it proves the mask of the others.
    assert_close(&whole, &f.prefill(&(0..301).map(|at| at..at + 1).collect::<Vec<_>>()));
}

#[test]
fn cached_prefix_is_read_not_computed() {
    let mut f = fixture(7);
    let expected = f.prefill(&f.chunks(64));
    // The first 128 tokens' pages are shared, the others are new.
    let rest = chunks(f.prompt.len(), 64, 130, PAGE_TOKENS);
    assert_eq!(rest[0].start, 128);
    f.seq = KvSequence::new((0..8).chain(40..PAGES));
    f.prompt[..128].fill(0);
    assert_eq!(expected, f.prefill(&rest));
}

#[test]
fn one_corrupted_page_changes_the_tokens() {
    let mut f = fixture(7);
    let first = argmax(&f.prefill(&f.chunks(64))).unwrap();
    let text = || {
        let mut tokens = Vec::new();
        let mut push = |token| {
            tokens.push(token);
            Ok(())
        };
        decode(&f.model, first, &mut f.seq.clone(), &f.store, 32, &mut push).unwrap();
        tokens
    };
    let (good_logits, good_text) = (f.step(first), text());
    let page = f.store.geometry().page();
    for (layer, plane) in (0..6).flat_map(|l| [(l, Plane::K), (l, Plane::V)]) {
        // Page 1 as it is in another layer: plausible values, of the wrong place.
        let (mut right, mut wrong) = (vec![0.0; page], vec![0.0; page]);
        f.store.read(layer, plane, 1, 0, &mut right);
        f.store.read((layer + 1) % 6, plane, 1, 0, &mut wrong);
        f.store.write(layer, plane, 1, 0, &wrong);
        assert_ne!(good_logits, f.step(first), "{plane:?} of layer {layer}");
        assert_ne!(good_text, text(), "{plane:?} of layer {layer}");
        f.store.write(layer, plane, 1, 0, &right);
    }
    assert_eq!((good_logits, good_text), (f.step(first), text()));
}

#[test]
fn text_depends_on_the_first_byte_of_the_prompt_and_is_not_one_token() {
    let mut texts = Vec::new();
    for first in b"ABCD" {
        let mut f = fixture(7);
        f.prompt[0] = u32::from(*first);
        let text = f.generate(32);
        assert!(text.iter().collect::<HashSet<_>>().len() > 4, "{text:?}");
        assert!(!texts.contains(&text), "{first} gives the text of an earlier one");
        texts.push(text);
    }
}

#[test]
fn end_of_text_ends_the_text_and_is_no_part_of_it() {
    let endless = fixture(7).generate(32);
    let eos = endless[endless.len() / 2];
    let end = endless.iter().position(|&token| token == eos).unwrap();
    let mut f = fixture(7);
    f.model.config.eos = eos;
    assert_eq!(f.generate(32), endless[..end]);
}

#[test]
fn layer_is_announced_when_its_rows_are_in_the_pages() {
    let mut f = fixture(7);
    let schedule = f.chunks(160);
    let Fixture { model, prompt, store, seq } = &mut f;
    let written = |layer: usize, plane, token: usize| {
        let mut row = vec![0.0; store.geometry().row()];
        let page = u32::try_from(token / PAGE_TOKENS).unwrap();
        store.read(layer, plane, page, token % PAGE_TOKENS, &mut row);
        row.iter().all(|x| *x != 0.0)
    };
    let mut seen = Vec::new();
    prefill(model, prompt, &schedule, seq, store, &mut |chunk, layer| {
        let last = schedule[chunk].end - 1;
        for plane in [Plane::K, Plane::V] {
            assert!(schedule[chunk].clone().all(|token| written(layer, plane, token)));
            assert!(!written(layer, plane, last + 1));
            assert!(layer + 1 == model.config().layers || !written(layer + 1, plane, last));
        }
        seen.push((chunk, layer));
        Ok(())
    })
    .unwrap();
    assert_eq!(seen, (0..2).flat_map(|c| (0..6).map(move |l| (c, l))).collect::<Vec<_>>());
}

#[test]
fn bad_input_is_refused_with_what_to_do() {
    let Fixture { model, store, mut seq, .. } = fixture(7);
    let error = |tokens: &[u32], pages: Range<u32>| {
        let mut seq = KvSequence::new(pages);
        let error = model.forward(tokens, &mut seq, &store, &mut |_| Ok(())).unwrap_err();
        assert_eq!(seq.len, 0);
        error.to_string()
    };
    assert!(error(&[], 0..1).contains("no tokens"));
    assert!(error(&[258], 0..1).contains("token 258 is not in the vocabulary of 258"));
    assert!(error(&[1; 17], 0..1).contains("need 2 pages of 16 tokens, the sequence has 1"));
    assert!(error(&[1], PAGES..PAGES + 1).contains("page 64 is not in the pool of 64"));
    assert!(error(&[1; 8193], 0..PAGES).contains("shorten the prompt"));

    let other = VecStore::new(KvGeometry { kv_heads: 1, ..store.geometry() });
    let error =
        model.forward(&[1], &mut KvSequence::new(0..1), &other, &mut |_| Ok(())).unwrap_err();
    assert!(error.to_string().contains("does not fit"));
    let error = model
        .forward(&[1], &mut seq, &store, &mut |layer| bail!("link {layer} is down"))
        .unwrap_err();
    assert!(format!("{error:#}").contains("link 0 is down"));
    assert_eq!(seq.len, 0);

    let mut prefilled = |schedule: &[Range<usize>]| {
        prefill(&model, &[1; 8], schedule, &mut seq, &store, &mut |_, _| Ok(()))
            .unwrap_err()
            .to_string()
    };
    assert!(prefilled(&[]).contains("nothing to compute"));
    assert!(prefilled(&[0..4, 5..8]).contains("does not follow position 4"));
    assert!(prefilled(std::slice::from_ref(&(0..9))).contains("does not follow"));
    assert!(prefilled(std::slice::from_ref(&(0..7))).contains("ends at 7"));
    assert!(argmax(&[]).is_err() && argmax(&[0.0, f32::NAN]).is_err());
    for config in [
        ModelConfig { kv_heads: 4, ..ModelConfig::tiny() },
        ModelConfig { head_dim: 31, ..ModelConfig::tiny() },
        ModelConfig { layers: 0, ..ModelConfig::tiny() },
        ModelConfig { vocab: 100, ..ModelConfig::tiny() },
        ModelConfig { eos: 258, ..ModelConfig::tiny() },
    ] {
        assert!(Model::seeded(config, 1).unwrap_err().to_string().starts_with("model config: "));
    }
}

/// Set in a child process of the test below, which then only prints its fingerprint.
const CHILD: &str = "KVFERRY_TEST_FINGERPRINT";

#[test]
fn processes_and_thread_counts_agree_on_every_bit() {
    let fingerprint = || {
        let mut f = fixture(7);
        let mut logits = f.prefill(&f.chunks(96));
        let mut hash = DefaultHasher::new();
        for _ in 0..16 {
            logits.iter().for_each(|x| x.to_bits().hash(&mut hash));
            let token = [argmax(&logits).unwrap()];
            logits = f.model.forward(&token, &mut f.seq, &f.store, &mut |_| Ok(())).unwrap();
        }
        format!("fingerprint {:016x}", hash.finish())
    };
    let here = fingerprint();
    if std::env::var_os(CHILD).is_some() {
        println!("{here}");
        return;
    }
    assert_eq!(here, fingerprint());
    let (_, path) = module_path!().split_once("::").unwrap();
    for threads in ["1", "2", "5"] {
        let child = Command::new(std::env::current_exe().unwrap())
            .args([
                &format!("{path}::processes_and_thread_counts_agree_on_every_bit"),
                "--exact",
                "--nocapture",
            ])
            .envs([(CHILD, "1"), ("RAYON_NUM_THREADS", threads), ("CANDLE_NUM_THREADS", threads)])
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&child.stdout);
        assert!(said.contains(&here), "with {threads} threads: {said}, here: {here}");
    }
}
