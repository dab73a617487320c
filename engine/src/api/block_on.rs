//! Waiting for a future on a thread that has no runtime.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Waits for one of this crate's futures on the current thread, which may have any runtime or none.
/// It blocks the thread: async callers await instead.
pub fn block_on<F: Future>(future: F) -> F::Output {
    drive(future, None)
        .unwrap_or_else(|| unreachable!("without a deadline a future is driven to its end"))
}

/// As [`block_on`], for at most `timeout`; `None` when it passes first.
pub fn block_on_timeout<F: Future>(future: F, timeout: Duration) -> Option<F::Output> {
    drive(future, Instant::now().checked_add(timeout))
}

fn drive<F: Future>(future: F, deadline: Option<Instant>) -> Option<F::Output> {
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return Some(output);
        }
        match deadline.map(|deadline| deadline.saturating_duration_since(Instant::now())) {
            None => std::thread::park(),
            Some(Duration::ZERO) => return None,
            Some(left) => std::thread::park_timeout(left),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_future_woken_by_another_thread_is_driven_to_its_end() {
        let (tx, rx) = tokio::sync::oneshot::channel();
        let thread = std::thread::spawn(move || tx.send(7));
        assert_eq!(block_on(rx), Ok(7));
        thread.join().unwrap().unwrap();
    }

    #[test]
    fn a_future_that_never_ends_is_given_up_at_the_timeout() {
        assert_eq!(block_on_timeout(std::future::pending::<()>(), Duration::from_millis(1)), None);
    }
}
