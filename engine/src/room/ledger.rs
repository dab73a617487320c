//! The ledger of a link: what was posted on it, in order, until it is acknowledged.
//!
//! One acknowledgement retires everything before it, and when a link goes down the ledger tells
//! whose writes were still under way.

use std::collections::VecDeque;

/// Frames posted on a link and not yet acknowledged, numbered from 1.
#[derive(Clone, Debug)]
pub(crate) struct Ledger<T> {
    entries: VecDeque<Entry<T>>,
    /// Number of the entry at the front.
    first: u64,
    capacity: usize,
}

#[derive(Clone, Debug)]
struct Entry<T> {
    what: T,
    rejected: bool,
}

/// An answer to something that was never posted, or was answered before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "an answer to frame {seq}, which was answered before or never sent; the last one sent is {last}"
)]
pub(crate) struct NeverPosted {
    pub(crate) seq: u64,
    pub(crate) last: u64,
}

impl<T> Ledger<T> {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { entries: VecDeque::new(), first: 1, capacity }
    }

    /// How many more can be posted before an acknowledgement is needed.
    pub(crate) fn free(&self) -> usize {
        self.capacity - self.entries.len()
    }

    /// Enters the next frame and gives its number. Only when [`Ledger::free`] is not 0.
    pub(crate) fn post(&mut self, what: T) -> u64 {
        debug_assert!(self.free() > 0, "posted beyond the window");
        self.entries.push_back(Entry { what, rejected: false });
        self.last()
    }

    fn last(&self) -> u64 {
        self.first + self.entries.len() as u64 - 1
    }

    /// A frame that is not acknowledged yet.
    pub(crate) fn get_mut(&mut self, seq: u64) -> Option<&mut T> {
        let index = usize::try_from(seq.checked_sub(self.first)?).ok()?;
        self.entries.get_mut(index).map(|entry| &mut entry.what)
    }

    /// Every frame that is not acknowledged yet.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.entries.iter_mut().map(|entry| &mut entry.what)
    }

    /// Marks a frame as not placed; it is not reported as acknowledged later. Once a frame.
    pub(crate) fn reject(&mut self, seq: u64) -> Result<&T, NeverPosted> {
        let last = self.last();
        let index = seq.checked_sub(self.first).and_then(|index| usize::try_from(index).ok());
        match index.and_then(|index| self.entries.get_mut(index)).filter(|entry| !entry.rejected) {
            Some(entry) => {
                entry.rejected = true;
                Ok(&entry.what)
            }
            None => Err(NeverPosted { seq, last }),
        }
    }

    /// Retires every frame up to `seq`, handing over those that were placed. An old acknowledgement
    /// changes nothing.
    pub(crate) fn acknowledge(
        &mut self,
        seq: u64,
        mut placed: impl FnMut(T),
    ) -> Result<(), NeverPosted> {
        if seq > self.last() {
            return Err(NeverPosted { seq, last: self.last() });
        }
        while self.first <= seq {
            let Some(entry) = self.entries.pop_front() else { break };
            self.first += 1;
            if !entry.rejected {
                placed(entry.what);
            }
        }
        Ok(())
    }

    /// Takes what is still unanswered, with its numbers: the lane is gone.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = (u64, T)> {
        let numbers = self.first..;
        self.first += self.entries.len() as u64;
        let unanswered = |(_, entry): &(u64, Entry<T>)| !entry.rejected;
        numbers.zip(self.entries.drain(..)).filter(unanswered).map(|(n, entry)| (n, entry.what))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ack(ledger: &mut Ledger<char>, seq: u64) -> Result<String, NeverPosted> {
        let mut placed = String::new();
        ledger.acknowledge(seq, |what| placed.push(what)).map(|()| placed)
    }

    #[test]
    fn one_acknowledgement_retires_all_before_it_once() {
        let mut ledger = Ledger::new(4);
        assert_eq!([ledger.post('a'), ledger.post('b'), ledger.post('c')], [1, 2, 3]);
        assert_eq!(ack(&mut ledger, 2).unwrap(), "ab");
        assert_eq!(ack(&mut ledger, 2).unwrap(), "");
        assert_eq!(ack(&mut ledger, 1).unwrap(), "");
        assert_eq!(ledger.free(), 3);
        assert_eq!(ledger.post('d'), 4);
        assert_eq!(ack(&mut ledger, 4).unwrap(), "cd");
    }

    #[test]
    fn a_rejected_frame_is_never_reported_as_placed() {
        let mut ledger = Ledger::new(4);
        ledger.post('a');
        ledger.post('b');
        assert_eq!(ledger.reject(1), Ok(&'a'));
        assert_eq!(ack(&mut ledger, 2).unwrap(), "b");
    }

    #[test]
    fn an_acknowledgement_of_what_was_never_posted_is_an_error_and_retires_nothing() {
        let mut ledger = Ledger::new(4);
        ledger.post('a');
        assert_eq!(ack(&mut ledger, 2), Err(NeverPosted { seq: 2, last: 1 }));
        assert!(ledger.reject(2).is_err() && ledger.reject(0).is_err());
        assert!(ledger.reject(1).is_ok() && ledger.reject(1).is_err(), "rejected twice");
        ledger.post('b');
        assert_eq!(ack(&mut ledger, 2).unwrap(), "b");
    }

    #[test]
    fn a_lost_link_tells_what_was_under_way() {
        let mut ledger = Ledger::new(4);
        ledger.post('a');
        ledger.post('b');
        ack(&mut ledger, 1).unwrap();
        ledger.post('c');
        assert!(ledger.reject(2).is_ok());
        assert_eq!(ledger.drain().collect::<Vec<_>>(), [(3, 'c')]);
        assert_eq!(ledger.post('d'), 4);
    }
}
