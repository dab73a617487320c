//! How long to wait before trying again.

use std::time::Duration;

use tokio::time::Instant;

/// First wait: a peer whose connection was cut, not its process, is back at once.
const BACKOFF_MIN: Duration = Duration::from_millis(10);
/// Longest wait: how late a peer that comes back may be noticed.
const BACKOFF_MAX: Duration = Duration::from_secs(1);
/// What held this long is not counted as a failure in a row.
const BACKOFF_FORGET: Duration = Duration::from_secs(5);

/// Doubling waits between a low and a high bound, each cut by up to a half at random so that peers
/// that lost the same engine do not come back in step.
#[derive(Debug)]
pub(super) struct Backoff {
    next: Duration,
    until: Option<Instant>,
}

impl Backoff {
    pub(super) const fn new() -> Self {
        Self { next: BACKOFF_MIN, until: None }
    }

    /// When to try again after a failure that is seen now.
    pub(super) fn retry_at(&mut self) -> Instant {
        let now = Instant::now();
        now + self.delay(now)
    }

    fn delay(&mut self, now: Instant) -> Duration {
        if self.until.is_some_and(|until| now.saturating_duration_since(until) > BACKOFF_FORGET) {
            self.next = BACKOFF_MIN;
        }
        let delay = jitter(self.next);
        self.next = (self.next * 2).min(BACKOFF_MAX);
        self.until = Some(now + delay);
        delay
    }
}

fn jitter(whole: Duration) -> Duration {
    let mut byte = [0];
    // Without randomness the wait is whole.
    let _ = getrandom::fill(&mut byte);
    whole - (whole / 2) * u32::from(byte[0]) / 255
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_a_second_and_begin_anew_after_a_quiet_time() {
        let mut backoff = Backoff::new();
        let mut now = Instant::now();
        let mut most = BACKOFF_MIN;
        for _ in 0..12 {
            let delay = backoff.delay(now);
            now += delay;
            assert!(delay <= most && delay >= most / 2, "{delay:?} of {most:?}");
            most = (most * 2).min(BACKOFF_MAX);
        }
        assert!(backoff.delay(now + 2 * BACKOFF_FORGET) <= BACKOFF_MIN);
    }
}
