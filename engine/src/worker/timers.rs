//! Deadlines of rooms, earliest first.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::ids::Micros;

/// Deadlines of rooms that have ended are dropped when there are this many and more than half of all
/// are stale.
const STALE_MIN: usize = 1024;

/// Whose deadline it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Timer {
    Send {
        slot: u32,
        generation: u32,
    },
    Receive {
        slot: u32,
        generation: u32,
    },
    /// A sending room's pages should be quiet.
    SendFence {
        slot: u32,
        generation: u32,
    },
    /// A receiving room's pages should be quiet.
    ReceiveFence {
        slot: u32,
        generation: u32,
    },
}

/// A heap of deadlines. A room may have several; the room knows which one holds.
#[derive(Debug, Default)]
pub(super) struct Timers {
    heap: BinaryHeap<Reverse<(Micros, Timer)>>,
    compact_at: usize,
}

impl Timers {
    pub(super) fn set(&mut self, at: Micros, timer: Timer) {
        if at != Micros(u64::MAX) {
            self.heap.push(Reverse((at, timer)));
        }
    }

    pub(super) fn take_due(&mut self, now: Micros, due: &mut Vec<Timer>) {
        while let Some(&Reverse((at, timer))) = self.heap.peek() {
            if at > now {
                break;
            }
            self.heap.pop();
            due.push(timer);
        }
    }

    /// The earliest deadline that `stands`; drops those before it that do not, and all others when
    /// they are many.
    pub(super) fn next(&mut self, stands: impl Fn(Timer) -> bool) -> Option<Micros> {
        if self.heap.len() > self.compact_at.max(STALE_MIN) {
            self.heap.retain(|&Reverse((_, timer))| stands(timer));
            self.heap.shrink_to(STALE_MIN);
            self.compact_at = self.heap.len() * 2;
        }
        while let Some(&Reverse((at, timer))) = self.heap.peek() {
            if stands(timer) {
                return Some(at);
            }
            self.heap.pop();
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn timer(slot: u32) -> Timer {
        Timer::Send { slot, generation: 0 }
    }

    #[test]
    fn deadlines_come_due_in_order_and_once() {
        let mut timers = Timers::default();
        for at in [3, 1, 2] {
            timers.set(Micros(at), timer(at as u32));
        }
        let mut due = Vec::new();
        timers.take_due(Micros(2), &mut due);
        assert_eq!(due, [timer(1), timer(2)]);
        assert_eq!(timers.next(|_| true), Some(Micros(3)));
    }

    #[test]
    fn deadlines_of_ended_rooms_do_not_pile_up() {
        let mut timers = Timers::default();
        for at in 0..10_000 {
            timers.set(Micros(at), timer(at as u32));
        }
        assert_eq!(
            timers.next(|timer| timer == Timer::Send { slot: 9_999, generation: 0 }),
            Some(Micros(9_999))
        );
        assert_eq!(timers.heap.len(), 1);
        assert!(timers.heap.capacity() <= STALE_MIN * 2);
    }
}
