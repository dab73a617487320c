//! Chunked prefill and greedy decode.

use std::ops::Range;

use anyhow::{Context, Result, ensure};

use super::{KvSequence, KvStore, Model};

/// The chunks in which a prompt is computed, as ranges of its tokens.
///
/// Every chunk but the last ends on a page boundary, so that what is carried is whole pages:
/// `chunk_tokens` is rounded down to pages, but is at least one. `cached_prefix` tokens, whose K/V
/// are in place already, are skipped: rounded down to whole pages, and short of the prompt's last
/// token, which must be computed for its logits. The first range starts where the skipped prefix
/// ends. Zero page tokens count as one; an empty prompt has no chunks.
pub fn chunks(
    prompt_len: usize,
    chunk_tokens: usize,
    cached_prefix: usize,
    page_tokens: usize,
) -> Vec<Range<usize>> {
    let page = page_tokens.max(1);
    let step = (chunk_tokens / page).max(1) * page;
    let first = cached_prefix.min(prompt_len.saturating_sub(1)) / page * page;
    (first..prompt_len).step_by(step).map(|at| at..prompt_len.min(at + step)).collect()
}

/// Computes the chunks of `schedule` (see [`chunks`]) and returns the logits of the prompt's last
/// token.
///
/// K/V of the tokens before the first chunk must be in the pages of `seq`; what `seq.len` was does
/// not matter. `on_layer(chunk, layer)` runs as soon as that chunk's K/V of that layer are in the
/// pages, `chunk` counting from 0.
///
/// # Errors
/// A schedule that is empty, has gaps or does not end with the prompt; otherwise as
/// [`Model::forward`].
pub fn prefill(
    model: &Model,
    prompt: &[u32],
    schedule: &[Range<usize>],
    seq: &mut KvSequence,
    store: &dyn KvStore,
    on_layer: &mut dyn FnMut(usize, usize) -> Result<()>,
) -> Result<Vec<f32>> {
    seq.len =
        schedule.first().context("nothing to compute: the prompt or its schedule is empty")?.start;
    let mut logits = Vec::new();
    for (i, chunk) in schedule.iter().enumerate() {
        let tokens = prompt.get(chunk.clone()).filter(|_| chunk.start == seq.len);
        let tokens = tokens.with_context(|| {
            format!("chunk {chunk:?} does not follow position {} of the prompt", seq.len)
        })?;
        logits = model.forward(tokens, seq, store, &mut |layer| on_layer(i, layer))?;
    }
    ensure!(
        seq.len == prompt.len(),
        "the schedule ends at {} of a prompt of {} tokens",
        seq.len,
        prompt.len()
    );
    Ok(logits)
}

/// Continues greedily after a prompt whose K/V are in the pages of `seq`, of which `first` is the
/// first new token.
///
/// Each new token, `first` included, is handed to `on_token`, at most `max_new`; the end-of-text
/// token is not, and ends it. Each step writes K/V of the token before, so `seq` needs pages for
/// `seq.len + max_new - 1` tokens.
///
/// # Errors
/// As [`Model::forward`], and whatever `on_token` returns.
pub fn decode(
    model: &Model,
    first: u32,
    seq: &mut KvSequence,
    store: &dyn KvStore,
    max_new: usize,
    on_token: &mut dyn FnMut(u32) -> Result<()>,
) -> Result<()> {
    let mut token = first;
    for left in (0..max_new).rev() {
        if token == model.config.eos {
            break;
        }
        on_token(token)?;
        if left > 0 {
            token = argmax(&model.forward(&[token], seq, store, &mut |_| Ok(()))?)?;
        }
    }
    Ok(())
}

/// Prefill and greedy decode in one process: the reference for the two-process examples.
///
/// # Errors
/// As [`prefill`] and [`decode`].
pub fn generate(
    model: &Model,
    prompt: &[u32],
    schedule: &[Range<usize>],
    seq: &mut KvSequence,
    store: &dyn KvStore,
    max_new: usize,
) -> Result<Vec<u32>> {
    let first = argmax(&prefill(model, prompt, schedule, seq, store, &mut |_, _| Ok(()))?)?;
    let mut tokens = Vec::with_capacity(max_new);
    decode(model, first, seq, store, max_new, &mut |token| {
        tokens.push(token);
        Ok(())
    })?;
    Ok(tokens)
}

/// The most likely token: the first of the largest logits.
///
/// # Errors
/// No logits, or one that is not a number: the K/V read were not what was written.
pub fn argmax(logits: &[f32]) -> Result<u32> {
    ensure!(logits.iter().all(|x| !x.is_nan()), "logits are not numbers: K/V pages were corrupted");
    let best = logits.iter().enumerate().reduce(|best, x| if x.1 > best.1 { x } else { best });
    Ok(u32::try_from(best.context("no logits")?.0)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_the_prompt_and_all_but_the_last_end_on_a_page() {
        for prompt in 0..40 {
            for step in 0..20 {
                for cached in 0..45 {
                    let all = chunks(prompt, step, cached, 4);
                    let Some(first) = all.first() else {
                        assert_eq!(prompt, 0);
                        continue;
                    };
                    assert!(first.start <= cached && first.start % 4 == 0);
                    assert!(
                        first.start + 4 > cached.min(prompt - 1),
                        "a whole cached page is computed again"
                    );
                    assert_eq!(all.last().unwrap().end, prompt);
                    assert!(all.iter().all(|c| !c.is_empty() && c.len() <= step.max(4)));
                    assert!(all.windows(2).all(|w| w[0].end == w[1].start && w[0].end % 4 == 0));
                }
            }
        }
    }
}
