//! Which pages of a pool are free, and what they have been through.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Result, ensure};
use tokio::sync::Semaphore;

/// The free pages of a pool. Whoever waits for pages is served in the order of asking.
#[derive(Clone, Debug)]
pub struct FreeList(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    pages: u32,
    free: Mutex<Vec<u32>>,
    past: Mutex<Vec<Past>>,
    /// As many permits as there are free pages.
    permits: Semaphore,
}

/// What a page has been through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Past {
    Fresh,
    Used,
    /// The last room that had it failed.
    Failed,
    /// A room that had it failed, and it was taken again.
    Again,
}

/// A page in use; dropping it frees it. One that a room was granted or sends from is kept until the
/// room is released.
#[derive(Debug)]
pub struct Page {
    number: u32,
    list: Arc<Inner>,
}

impl Page {
    /// Its number in the pool.
    #[must_use]
    pub const fn number(&self) -> u32 {
        self.number
    }

    /// Notes that the room it was taken for failed.
    pub fn mark_failed(&self) {
        self.list.past()[self.number as usize] = Past::Failed;
    }

    /// Whether an earlier room had it, and failed.
    #[must_use]
    pub fn is_again(&self) -> bool {
        self.list.past()[self.number as usize] == Past::Again
    }
}

impl Inner {
    fn past(&self) -> MutexGuard<'_, Vec<Past>> {
        self.past.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        self.list.free.lock().unwrap_or_else(PoisonError::into_inner).push(self.number);
        self.list.permits.add_permits(1);
    }
}

impl FreeList {
    /// All pages of a pool of `pages`, lowest first.
    #[must_use]
    pub fn ascending(pages: u32) -> Self {
        Self::new((0..pages).rev().collect())
    }

    /// All pages of a pool of `pages`, in the random order of a seed: as the pages of an engine
    /// that has served for a while.
    #[must_use]
    pub fn shuffled(pages: u32, seed: u64) -> Self {
        let mut numbers: Vec<u32> = (0..pages).collect();
        let mut state = seed;
        for last in (1..numbers.len()).rev() {
            numbers.swap(last, (splitmix64(&mut state) % (last as u64 + 1)) as usize);
        }
        Self::new(numbers)
    }

    fn new(free: Vec<u32>) -> Self {
        let (permits, past) = (Semaphore::new(free.len()), vec![Past::Fresh; free.len()]);
        let (pages, free, past) = (free.len() as u32, Mutex::new(free), Mutex::new(past));
        Self(Arc::new(Inner { pages, free, past, permits }))
    }

    /// Takes `count` pages, waiting until they are free.
    ///
    /// # Errors
    /// More than the pool has.
    pub async fn take(&self, count: usize) -> Result<Vec<Page>> {
        let pages = self.0.pages;
        ensure!(
            count <= pages as usize,
            "{count} pages needed, the pool has {pages}: raise --pages"
        );
        self.0.permits.acquire_many(count as u32).await?.forget();
        let mut free = self.0.free.lock().unwrap_or_else(PoisonError::into_inner);
        let at = free.len() - count;
        let mut past = self.0.past();
        let page = |number| {
            let past = &mut past[number as usize];
            *past =
                if matches!(past, Past::Failed | Past::Again) { Past::Again } else { Past::Used };
            Page { number, list: Arc::clone(&self.0) }
        };
        Ok(free.drain(at..).rev().map(page).collect())
    }

    /// Every page that was ever taken, and how many of them were taken again after a room that had them
    /// failed.
    #[must_use]
    pub fn used(&self) -> (Vec<u32>, usize) {
        let past = self.0.past();
        let used = (0..self.0.pages).filter(|&page| past[page as usize] != Past::Fresh);
        (used.collect(), past.iter().filter(|&&past| past == Past::Again).count())
    }

    /// Pages free now.
    #[must_use]
    pub fn available(&self) -> usize {
        self.0.permits.available_permits()
    }
}

/// The next number of Vigna's splitmix64.
pub(crate) const fn splitmix64(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wait<F: Future>(future: F) -> Option<F::Output> {
        kvferry::block_on_timeout(future, std::time::Duration::from_millis(20))
    }

    fn numbers(pages: &[Page]) -> Vec<u32> {
        pages.iter().map(Page::number).collect()
    }

    #[test]
    fn shuffled_pages_are_all_the_pages_and_do_not_lie_side_by_side() {
        let list = FreeList::shuffled(256, 7);
        let mut taken = numbers(&wait(list.take(256)).unwrap().unwrap());
        let neighbours = taken.windows(2).filter(|w| w[1] == w[0] + 1).count();
        assert!(neighbours < 16, "{neighbours} of 255 follow each other");
        taken.sort_unstable();
        assert_eq!(taken, (0..256).collect::<Vec<_>>());
    }

    #[test]
    fn pages_come_back_to_whoever_waits_for_them() {
        let list = FreeList::ascending(4);
        let first = wait(list.take(3)).unwrap().unwrap();
        assert_eq!((numbers(&first), list.available()), (vec![0, 1, 2], 1));
        assert!(wait(list.take(2)).is_none(), "only one is free");
        drop(first);
        assert_eq!(wait(list.take(4)).unwrap().unwrap().len(), 4);
        assert_eq!(list.available(), 4);
    }

    #[test]
    fn pages_of_a_failed_room_are_known_when_they_are_taken_again() {
        let list = FreeList::ascending(8);
        let first = wait(list.take(4)).unwrap().unwrap();
        first[1..3].iter().for_each(Page::mark_failed);
        assert_eq!(list.used(), (vec![0, 1, 2, 3], 0));
        drop(first);
        let second = wait(list.take(5)).unwrap().unwrap();
        let again: Vec<u32> =
            second.iter().filter(|page| page.is_again()).map(Page::number).collect();
        assert_eq!(again.len(), 2);
        assert!(again.iter().all(|page| [1, 2].contains(page)), "{again:?}");
        drop(second);
        assert_eq!(list.used(), (vec![0, 1, 2, 3, 4], 2));
    }

    #[test]
    fn more_pages_than_the_pool_has_are_refused_at_once() {
        let error = wait(FreeList::ascending(4).take(5)).unwrap().unwrap_err();
        assert!(error.to_string().contains("raise --pages"), "{error}");
    }
}
