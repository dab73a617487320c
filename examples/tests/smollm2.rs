//! Real weights: a text in English, equal on both ways.
#![allow(missing_docs, reason = "tests document themselves by name")]

mod common;

/// Names the GGUF file of SmolLM2-135M-Instruct.
const MODEL: &str = "KVFERRY_MODEL";

#[test]
fn smollm2_answers_in_english_and_equally_on_both_ways() {
    let Ok(model) = std::env::var(MODEL) else {
        eprintln!("skipped: {MODEL} names no GGUF file of SmolLM2-135M-Instruct");
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let prompts = dir.path().join("prompts");
    // Questions whose subject the answer repeats: which of two words that are equally good is chosen depends
    // on how the CPU rounds.
    let lines = "What is a dog?\nName three colours of the rainbow.\n";
    std::fs::write(&prompts, lines).unwrap();
    let args = ["--model", &model, "--prompts", prompts.to_str().unwrap(), "--max-new", "24"];
    let said = common::pair(&args).well();
    assert_eq!((said.rows().len(), said.done()), (2, 2), "{}", said.stdout);
    let answers: Vec<_> = said.stdout.lines().filter(|line| line.starts_with("  -> ")).collect();
    for (answer, word) in answers.iter().zip(["dog is a", "rainbow"]) {
        assert!(answer.contains(word), "no {word:?} in {answers:?}");
    }
}
