//! Work that was, or was not, posted.

use std::io;

use rustix::io::Errno;
use thiserror::Error;

/// A chain of work requests was not posted, or only its beginning.
#[derive(Debug, Error)]
#[error("{posted} work requests were posted, and then: {source}")]
#[non_exhaustive]
pub struct PostError {
    /// How many of them, from the first, are posted all the same, and will complete.
    pub posted: usize,
    /// Why the next one was not.
    pub source: PostFault,
}

/// Why a work request was not posted.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PostFault {
    /// The queue is full: post again after completions.
    #[error("the queue is full")]
    Full,
    /// The queue takes no work: it is in the wrong state, or a request was malformed.
    #[error("the queue takes no work: {0}")]
    Refused(#[source] io::Error),
}

/// A work request does not fit into a batch, which stays as it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum BatchError {
    /// The batch holds as many as the queue.
    #[error("a batch holds {max} work requests; post it first")]
    Full {
        /// As many.
        max: u32,
    },
    /// It names too many stretches of memory.
    #[error("{given} stretches of memory in one work request, the queue pair takes {max}")]
    TooManySges {
        /// Given.
        given: usize,
        /// The queue pair's limit.
        max: u32,
    },
    /// Its inline data is too long.
    #[error("{given} bytes of inline data, the queue pair takes {max}")]
    InlineTooLong {
        /// Bytes given.
        given: usize,
        /// The queue pair's limit, in bytes.
        max: u32,
    },
}

impl PostError {
    /// Whether the queue was full.
    #[must_use]
    pub const fn is_full(&self) -> bool {
        matches!(self.source, PostFault::Full)
    }

    /// The error for what a post function returned, and where it stopped: `first` is the first
    /// request of an array of `count`, `bad` the one it refused.
    pub(crate) fn new<T>(code: i32, first: *const T, count: usize, bad: *const T) -> Self {
        // A provider that does not say which has posted none that anybody could rely on.
        let offset = (bad as usize).checked_sub(first as usize).map(|bytes| bytes / size_of::<T>());
        let posted = offset.filter(|&offset| offset < count).unwrap_or(0);
        Self { posted, source: PostFault::new(code) }
    }
}

impl PostFault {
    /// For a function that the provider, or the queue pair, does not have.
    #[cold]
    pub(crate) fn no_operation() -> Self {
        Self::Refused(Errno::OPNOTSUPP.into())
    }

    /// Error numbers, which some old providers return negated.
    pub(crate) fn new(code: i32) -> Self {
        let source = io::Error::from_raw_os_error(code.checked_abs().unwrap_or(i32::MAX));
        match Errno::from_io_error(&source) {
            Some(Errno::NOMEM) => Self::Full,
            _ => Self::Refused(source),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ptr;

    use super::*;

    #[test]
    fn what_was_posted_is_told_by_the_request_that_was_refused() {
        let requests = [0u64; 4];
        let first = requests.as_ptr();
        let posted = |bad| PostError::new(Errno::NOMEM.raw_os_error(), first, 4, bad).posted;
        assert_eq!(posted(&raw const requests[0]), 0);
        assert_eq!(posted(&raw const requests[3]), 3);
        assert_eq!(posted(ptr::null()), 0, "a provider that does not say");
        assert_eq!(posted(first.wrapping_add(4)), 0, "a provider that says nonsense");
    }

    #[test]
    fn a_full_queue_is_told_from_one_that_takes_no_work() {
        let fault = |code| PostFault::new(code);
        let (full, refused) = (Errno::NOMEM.raw_os_error(), Errno::INVAL.raw_os_error());
        assert!(matches!(fault(full), PostFault::Full));
        assert!(matches!(fault(-full), PostFault::Full));
        let PostFault::Refused(source) = fault(refused) else { panic!() };
        assert_eq!(source.raw_os_error(), Some(refused));
    }
}
