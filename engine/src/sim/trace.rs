//! What happened, for whoever has to understand a violation, and a hash of it, to compare two runs.

use std::collections::VecDeque;
use std::fmt::Arguments;

/// Lines kept.
const LINES: usize = 600;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Trace {
    lines: Option<VecDeque<String>>,
    hash: u64,
    pub(crate) events: u64,
}

impl Trace {
    /// With `on`, lines are kept; they are not even formatted otherwise.
    pub(crate) fn new(on: bool) -> Self {
        Self { lines: on.then(VecDeque::new), hash: 0, events: 0 }
    }

    /// Notes an event at a time, of an engine; `key` tells it from others in the hash.
    pub(crate) fn note(&mut self, at_us: u64, engine: usize, key: u64, what: Arguments<'_>) {
        self.events += 1;
        for value in [at_us, engine as u64, key] {
            self.hash = (self.hash.rotate_left(5) ^ value).wrapping_mul(0x517c_c1b7_2722_0a95);
        }
        if let Some(lines) = &mut self.lines {
            if lines.len() == LINES {
                lines.pop_front();
            }
            lines.push_back(format!("{:>12.3} ms  engine {engine}  {what}", at_us as f64 / 1000.0));
        }
    }

    pub(crate) const fn hash(&self) -> u64 {
        self.hash
    }

    pub(crate) fn text(&self) -> String {
        let lines = self.lines.iter().flatten();
        lines.fold(String::new(), |text, line| text + line + "\n")
    }
}
