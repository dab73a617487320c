//! The strips of memory that a lane's stream will cover next, in order.

use std::collections::VecDeque;

use super::driver::STRIPS_PER_OP;
use crate::fabric::RoomTag;

/// A strip, and what it belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Queued {
    pub(super) addr: u64,
    pub(super) bytes: usize,
    /// The room whose pages it is in; none for headers, filler and scratch.
    pub(super) owner: Option<RoomTag>,
    /// Whether it is (the rest of) a header.
    pub(super) header: bool,
}

/// A bounded queue of strips. Bytes are taken from its front as the kernel moves them.
#[derive(Debug)]
pub(super) struct StripQueue {
    strips: VecDeque<Queued>,
    bytes: u64,
    headers: usize,
}

impl StripQueue {
    pub(super) fn new() -> Self {
        Self { strips: VecDeque::with_capacity(STRIPS_PER_OP), bytes: 0, headers: 0 }
    }

    pub(super) fn is_full(&self) -> bool {
        self.strips.len() == STRIPS_PER_OP
    }

    pub(super) fn is_empty(&self) -> bool {
        self.strips.is_empty()
    }

    pub(super) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Headers not wholly taken yet.
    pub(super) const fn headers(&self) -> usize {
        self.headers
    }

    /// Only when not full.
    pub(super) fn push(&mut self, strip: Queued) {
        debug_assert!(!self.is_full(), "pushed into a full strip queue");
        self.bytes += strip.bytes as u64;
        self.headers += usize::from(strip.header);
        self.strips.push_back(strip);
    }

    /// Takes `moved` bytes from the front.
    pub(super) fn advance(&mut self, mut moved: usize) {
        self.bytes -= moved as u64;
        while let Some(front) = self.strips.front_mut().filter(|_| moved > 0) {
            if moved < front.bytes {
                front.addr += moved as u64;
                front.bytes -= moved;
                return;
            }
            moved -= front.bytes;
            self.headers -= usize::from(front.header);
            self.strips.pop_front();
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Queued> {
        self.strips.iter()
    }

    /// Points every strip of a room at `filler`, which is at least as long.
    pub(super) fn disown(&mut self, tag: RoomTag, filler: u64) {
        for strip in self.strips.iter_mut().filter(|strip| strip.owner == Some(tag)) {
            strip.addr = filler;
            strip.owner = None;
        }
    }

    pub(super) fn clear(&mut self) {
        self.strips.clear();
        self.bytes = 0;
        self.headers = 0;
    }
}
