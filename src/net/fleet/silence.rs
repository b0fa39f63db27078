//! Limits the time for which an answer is silent.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::{Instant, Sleep};

/// Limits the wait for the next byte. The time during which the reader does not read is not
/// counted: a slow client does not make the backend silent.
pub(super) struct Silence {
    limit: Duration,
    /// Start of the current wait; `None`: nobody waits.
    since: Option<Instant>,
    /// Fires at the end of the earliest wait since it was set.
    timer: Option<Pin<Box<Sleep>>>,
}

impl Silence {
    pub(super) fn new(limit: Duration) -> Self {
        Self { limit, since: None, timer: None }
    }

    /// Ends the wait: a byte was received.
    pub(super) fn broken(&mut self) {
        self.since = None;
    }

    /// Begins or continues the wait. Ready, with the time limit, once that has passed.
    pub(super) fn lasts(&mut self, cx: &mut Context<'_>) -> Poll<Duration> {
        let end = *self.since.get_or_insert_with(Instant::now) + self.limit;
        let timer = self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(end)));
        // A timer that fires too early is cheaper than one that is reset for every chunk.
        while timer.as_mut().poll(cx).is_ready() {
            if Instant::now() >= end {
                return Poll::Ready(self.limit);
            }
            timer.as_mut().reset(end);
        }
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn only_time_spent_waiting_for_a_byte_counts() {
        let mut silence = Silence::new(Duration::from_secs(10));
        let mut over = || silence.lasts(&mut Context::from_waker(Waker::noop())).is_ready();
        assert!(!over());
        tokio::time::advance(Duration::from_secs(9)).await;
        assert!(!over());
        silence.broken();
        // Nobody reads.
        tokio::time::advance(Duration::from_mins(1)).await;
        let mut over = || silence.lasts(&mut Context::from_waker(Waker::noop())).is_ready();
        assert!(!over());
        tokio::time::advance(Duration::from_secs(9)).await;
        assert!(!over());
        tokio::time::advance(Duration::from_secs(2)).await;
        assert!(over());
    }
}
