//! The decode side's prefix cache: pages of earlier prompts, kept for later ones that begin alike.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::pages::Page;

/// Whole chunks of earlier prompts and the pages that hold their K/V.
///
/// Prompts are kept up to a boundary of the chunk schedule, not of a page: the bits of a row depend
/// on the chunk it was computed in, and up to there the chunks of all prompts that begin alike are
/// the same. So a prompt continued from here gives the tokens that one process alone computes.
#[derive(Debug)]
pub struct PrefixCache {
    /// Oldest use first.
    entries: VecDeque<Entry>,
    chunk_tokens: usize,
    page_tokens: usize,
    pages_max: usize,
}

#[derive(Debug)]
struct Entry {
    tokens: Vec<u32>,
    pages: Vec<Arc<Page>>,
}

impl PrefixCache {
    /// An empty cache of at most `pages_max` pages; `chunk_tokens` must be whole pages.
    #[must_use]
    pub const fn new(chunk_tokens: usize, page_tokens: usize, pages_max: usize) -> Self {
        Self { entries: VecDeque::new(), chunk_tokens, page_tokens, pages_max }
    }

    /// The pages of the longest cached beginning of a prompt, in order.
    pub fn find(&mut self, prompt: &[u32]) -> Vec<Arc<Page>> {
        let alike = |entry: &Entry| {
            let same = entry.tokens.iter().zip(prompt).take_while(|(a, b)| a == b).count();
            same / self.chunk_tokens * self.chunk_tokens / self.page_tokens
        };
        let best = self.entries.iter().map(alike).enumerate().max_by_key(|&(_, pages)| pages);
        let Some((at, pages)) = best.filter(|&(_, pages)| pages > 0) else { return Vec::new() };
        let Some(entry) = self.entries.remove(at) else { return Vec::new() };
        let found = entry.pages[..pages].to_vec();
        self.entries.push_back(entry);
        found
    }

    /// Keeps the whole chunks of a prompt whose K/V are in `pages`. The longest unused go first when
    /// there are too many.
    pub fn keep(&mut self, prompt: &[u32], pages: &[Arc<Page>]) {
        let tokens = prompt.len() / self.chunk_tokens * self.chunk_tokens;
        let count = tokens / self.page_tokens;
        if count == 0 || count > self.pages_max {
            return;
        }
        self.entries.retain(|entry| !prompt[..tokens].starts_with(&entry.tokens));
        self.entries
            .push_back(Entry { tokens: prompt[..tokens].to_vec(), pages: pages[..count].to_vec() });
        // Pages that entries share count for each: an upper bound is enough.
        while self.entries.iter().map(|entry| entry.pages.len()).sum::<usize>() > self.pages_max {
            self.entries.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pages::FreeList;

    fn pages(list: &FreeList, count: usize) -> Vec<Arc<Page>> {
        kvferry::block_on(list.take(count)).unwrap().into_iter().map(Arc::new).collect()
    }

    fn numbers(pages: &[Arc<Page>]) -> Vec<u32> {
        pages.iter().map(|page| page.number()).collect()
    }

    #[test]
    fn longest_common_beginning_is_found_in_whole_chunks() {
        let list = FreeList::ascending(64);
        let mut cache = PrefixCache::new(8, 4, 32);
        let prompt: Vec<u32> = (0..30).collect();
        let held = pages(&list, 8);
        cache.keep(&prompt, &held);
        assert_eq!(numbers(&cache.find(&prompt)), [0, 1, 2, 3, 4, 5]);
        let mut other = prompt.clone();
        other[20] = 999;
        assert_eq!(numbers(&cache.find(&other)), [0, 1, 2, 3]);
        assert!(cache.find(&prompt[1..]).is_empty() && cache.find(&prompt[..7]).is_empty());
    }

    #[test]
    fn kept_pages_stay_bounded_and_longest_unused_go_first() {
        let list = FreeList::ascending(64);
        let mut cache = PrefixCache::new(4, 4, 4);
        let prompt = |first: u32| (first..first + 8).collect::<Vec<_>>();
        for first in [100, 200] {
            cache.keep(&prompt(first), &pages(&list, 2));
        }
        assert_eq!(cache.find(&prompt(100)).len(), 2);
        cache.keep(&prompt(300), &pages(&list, 2));
        assert!(cache.find(&prompt(200)).is_empty());
        assert_eq!((cache.find(&prompt(100)).len(), list.available()), (2, 60));
        cache.keep(&(0..99).collect::<Vec<_>>(), &pages(&list, 25));
        assert_eq!(list.available(), 60, "more than the cache may keep is not kept");
    }
}
