//! What the two processes said, against what one process alone generates.

use std::collections::HashMap;

use anyhow::{Result, bail, ensure};

use super::PairArgs;
use super::plan::What;
use super::run::{Granted, Run};
use crate::model::{KvSequence, Model, VecStore, chunks, generate};

/// How a room came out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Done, and every token and the text are equal.
    Equal,
    /// Failed with this kind, as it was to.
    Failed(String),
    /// Anything else.
    Wrong(String),
}

impl std::fmt::Display for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Equal => f.write_str("done, tokens equal"),
            Self::Failed(kind) => write!(f, "failed: {kind}"),
            Self::Wrong(why) => write!(f, "WRONG: {why}"),
        }
    }
}

/// How all rooms came out, in their order.
pub(super) struct Checked(pub(super) Vec<Outcome>);

impl Checked {
    /// Whether everything is as promised.
    pub(super) fn verdict(&self) -> Result<()> {
        let wrong = self.0.iter().filter(|outcome| matches!(outcome, Outcome::Wrong(_))).count();
        ensure!(wrong == 0, "{wrong} of {} rooms went wrong", self.0.len());
        Ok(())
    }
}

/// Computes references, each prompt once.
pub(super) struct Checker<'a> {
    model: &'a Model,
    args: &'a PairArgs,
    known: HashMap<Vec<u32>, Vec<u32>>,
}

impl<'a> Checker<'a> {
    pub(super) fn new(model: &'a Model, args: &'a PairArgs) -> Self {
        Self { model, args, known: HashMap::new() }
    }

    /// Checks every room.
    ///
    /// # Errors
    /// Those of the reference's own computation.
    pub(super) fn check(mut self, runs: &[Run]) -> Result<Checked> {
        let mut outcomes = Vec::with_capacity(runs.len());
        for (at, run) in runs.iter().enumerate() {
            let outcome = match run.sender.failed() {
                Some((line, _)) if run.plan.what.may_fail() => {
                    Outcome::Failed(line.kind.clone().unwrap_or_default())
                }
                Some((line, _)) => Outcome::Wrong(line.cause.clone().unwrap_or_default()),
                None => {
                    let reference = self.reference(&run.plan.tokens)?;
                    match self.compare(run, &runs[..at], &reference) {
                        Ok(()) => Outcome::Equal,
                        Err(why) => Outcome::Wrong(format!("{why:#}")),
                    }
                }
            };
            outcomes.push(outcome);
        }
        Ok(Checked(outcomes))
    }

    /// What this process alone generates, with the same chunks and plain memory for its pages.
    fn reference(&mut self, tokens: &[u32]) -> Result<Vec<u32>> {
        if let Some(known) = self.known.get(tokens) {
            return Ok(known.clone());
        }
        let (args, max_new) = (&self.args.model, self.args.max_new as usize);
        let (page_tokens, chunk_tokens) = (args.page_tokens as usize, args.chunk_tokens as usize);
        let pages = (tokens.len() + max_new).div_ceil(page_tokens);
        let store = VecStore::new(self.model.config().pool(pages, page_tokens));
        let mut seq = KvSequence::new(0..u32::try_from(pages)?);
        let schedule = chunks(tokens.len(), chunk_tokens, 0, page_tokens);
        let new = generate(self.model, tokens, &schedule, &mut seq, &store, max_new)?;
        self.known.insert(tokens.to_vec(), new.clone());
        Ok(new)
    }

    fn compare(&self, run: &Run, earlier: &[Run], reference: &[u32]) -> Result<()> {
        let (Some((sent, _)), Some((received, _))) = (&run.sender.line, &run.receiver.line) else {
            bail!("a side did not say how it ended");
        };
        ensure!(sent.is_done() && received.is_done(), "it failed on one side");
        ensure!(
            run.sender.release.is_some() && run.receiver.release.is_some(),
            "it was not released"
        );
        ensure!(
            sent.epoch.is_some() && sent.epoch == received.epoch,
            "epoch {:?} on prefill, {:?} on decode",
            sent.epoch,
            received.epoch
        );
        self.compare_bytes(run)?;
        let before = earlier.iter().rfind(|other| other.plan.room == run.plan.room);
        if let Some((before, _)) = before.and_then(|before| before.sender.line.as_ref()) {
            let life = |peer: &Option<String>, epoch| (peer.clone(), epoch);
            ensure!(
                life(&before.peer, before.epoch) != life(&sent.peer, sent.epoch),
                "a reused id in the same epoch"
            );
        }
        let Some((tokens, text)) = &run.text else { bail!("no text") };
        ensure!(
            tokens == reference,
            "tokens {tokens:?}, one process alone generates {reference:?}"
        );
        ensure!(
            *text == self.model.tokenizer().decode(reference)?,
            "another text than of its tokens"
        );
        Ok(())
    }

    /// Both sides counted every page that was missing on the decode side, and no other.
    fn compare_bytes(&self, run: &Run) -> Result<()> {
        let Some(Granted { pages: granted, cached, .. }) = &run.granted else {
            bail!("nothing was granted")
        };
        let (config, args) = (self.model.config(), &self.args.model);
        let (prompt_tokens, cached) = (run.plan.tokens.len(), *cached as usize);
        let pages =
            prompt_tokens.div_ceil(args.page_tokens as usize) - cached / args.page_tokens as usize;
        let layers = config.layers + self.args.ballast_layers() as usize;
        let page_writes = (pages * layers * 2) as u64;
        let page_bytes = config.pool(1, args.page_tokens as usize).page() * size_of::<f32>();
        for (side, name) in [(&run.sender, "prefill"), (&run.receiver, "decode")] {
            let Some((line, _)) = &side.line else { bail!("{name} did not say how it ended") };
            let said = (line.prompt_tokens, line.pages, line.page_writes, line.bytes);
            let wanted =
                (prompt_tokens, pages as u64, page_writes, page_writes * page_bytes as u64);
            ensure!(
                said == wanted,
                "(tokens, pages, page writes, bytes) are {said:?} on {name}, not {wanted:?}"
            );
        }
        let in_order = granted.len() > 2 && granted.windows(2).all(|pair| pair[1] == pair[0] + 1);
        ensure!(!in_order, "the granted pages {granted:?} are numbered as the source's");
        match run.plan.what {
            What::CachedPrefix => {
                ensure!(cached > 0 && pages > 0, "{cached} tokens were cached, {pages} pages sent")
            }
            What::AuxAlone => ensure!(
                cached == prompt_tokens && pages == 0,
                "{cached} tokens were cached, {pages} pages sent"
            ),
            What::WholePages => {
                ensure!(prompt_tokens.is_multiple_of(args.page_tokens as usize), "not whole pages")
            }
            What::Plain | What::Reused | What::Doomed | What::Exposed => {}
        }
        Ok(())
    }
}
