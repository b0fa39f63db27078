//! How long an answer has brought nothing.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::{Instant, Sleep};

/// Limits the wait for the next byte. The time of a reader that does not read is not counted: a slow client does not
/// make the backend silent.
pub(super) struct Silence {
    most: Duration,
    /// When the current wait began; `None`: nobody waits.
    since: Option<Instant>,
    /// Fires at the earliest end that a wait had when it was set.
    timer: Option<Pin<Box<Sleep>>>,
}

impl Silence {
    pub(super) fn new(most: Duration) -> Self {
        Self { most, since: None, timer: None }
    }

    /// Ends the wait: something has come.
    pub(super) fn broken(&mut self) {
        self.since = None;
    }

    /// Begins or continues the wait. Ready, with the longest time, once that is over.
    pub(super) fn lasts(&mut self, cx: &mut Context<'_>) -> Poll<Duration> {
        let end = *self.since.get_or_insert_with(Instant::now) + self.most;
        let timer = self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(end)));
        // A timer that fires too early is cheaper than one that is set for every chunk.
        while timer.as_mut().poll(cx).is_ready() {
            if Instant::now() >= end {
                return Poll::Ready(self.most);
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
    async fn only_time_without_a_byte_counts_and_only_while_one_is_waited_for() {
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
