//! What is to happen when, in virtual microseconds.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

/// Things to happen, earliest first; those of one time in the order they were entered.
#[derive(Debug)]
pub(crate) struct Agenda<T> {
    order: BinaryHeap<Reverse<(u64, u64)>>,
    what: BTreeMap<u64, T>,
    entered: u64,
}

impl<T> Agenda<T> {
    pub(crate) const fn new() -> Self {
        Self { order: BinaryHeap::new(), what: BTreeMap::new(), entered: 0 }
    }

    pub(crate) fn enter(&mut self, at_us: u64, what: T) {
        self.order.push(Reverse((at_us, self.entered)));
        self.what.insert(self.entered, what);
        self.entered += 1;
    }

    pub(crate) fn next_at(&self) -> Option<u64> {
        self.order.peek().map(|Reverse((at, _))| *at)
    }

    pub(crate) fn take(&mut self) -> Option<T> {
        let Reverse((_, number)) = self.order.pop()?;
        self.what.remove(&number)
    }
}
