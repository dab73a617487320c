//! A room that was fed to both sides, and what they have said of it so far.

use std::time::{Duration, Instant};

use super::plan::Plan;
use crate::protocol::RoomLine;

/// What one side said of a room.
#[derive(Clone, Debug, Default)]
pub(super) struct Side {
    /// How it ended there, and when that was heard.
    pub(super) line: Option<(RoomLine, Instant)>,
    pub(super) release: Option<Release>,
    /// Of its pages here, those that an earlier room had which failed.
    pub(super) again: usize,
}

/// A room was released on a side.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Release {
    /// On prefill, of a room given up there: from then to its release, as prefill measured it.
    pub(super) after_abort: Option<Duration>,
    /// On prefill: pages overwritten at that moment.
    pub(super) overwritten: usize,
}

/// What the decode side granted.
#[derive(Clone, Debug)]
pub(super) struct Granted {
    pub(super) pages: Vec<u32>,
    /// Tokens cached before them.
    pub(super) cached: u32,
}

/// A room that was fed to both sides.
#[derive(Clone, Debug)]
pub(super) struct Run {
    pub(super) plan: Plan,
    /// Which decode process it went to.
    pub(super) decode: usize,
    pub(super) sender: Side,
    pub(super) receiver: Side,
    pub(super) granted: Option<Granted>,
    /// Prefill has handed its first chunk in, and holds the rest back.
    pub(super) held: bool,
    /// Chunks handed to the engine, and all there are.
    pub(super) chunks: (usize, usize),
    pub(super) text: Option<(Vec<u32>, String)>,
}

impl Run {
    pub(super) fn new(plan: Plan, decode: usize) -> Self {
        Self {
            plan,
            decode,
            sender: Side::default(),
            receiver: Side::default(),
            granted: None,
            held: false,
            chunks: (0, 0),
            text: None,
        }
    }

    /// Done and released on both sides, and its text is there.
    pub(super) fn is_complete(&self) -> bool {
        let done = |side: &Side| side.is_done() && side.release.is_some();
        done(&self.sender) && done(&self.receiver) && self.text.is_some()
    }

    /// What prefill said of it, or the decode side.
    pub(super) const fn side(&mut self, prefill: bool) -> &mut Side {
        if prefill { &mut self.sender } else { &mut self.receiver }
    }

    /// What has not been heard of it.
    pub(super) fn missing(&self) -> String {
        let side = |name: &str, side: &Side| match &side.line {
            None => format!("{name}'s end, "),
            Some(_) if side.release.is_none() => format!("{name}'s release, "),
            Some((line, _)) => match &line.cause {
                Some(cause) => format!("(failed on {name}: {cause}), "),
                None => String::new(),
            },
        };
        let text = if self.text.is_none() { "the text" } else { "" };
        side("prefill", &self.sender) + &side("decode", &self.receiver) + text
    }
}

impl Side {
    pub(super) fn is_done(&self) -> bool {
        self.line.as_ref().is_some_and(|(line, _)| line.is_done())
    }

    /// The line of a room that failed here.
    pub(super) fn failed(&self) -> Option<(&RoomLine, Instant)> {
        self.line.as_ref().filter(|(line, _)| !line.is_done()).map(|(line, at)| (line, *at))
    }
}
