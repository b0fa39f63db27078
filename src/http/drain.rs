//! Stopping without hurting anyone: say that no more is wanted, wait until that is heard, then finish.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::watch;

use crate::http::listen::Stop;

/// How long the steps of stopping take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DrainTimes {
    /// From "not ready" to closing the listeners: as long as a load balancer needs to notice.
    pub delay: Duration,
    /// From closing the listeners to cutting what is still open.
    pub grace: Duration,
}

impl Default for DrainTimes {
    fn default() -> Self {
        Self { delay: Duration::from_secs(5), grace: Duration::from_mins(2) }
    }
}

/// Where the process stands between start and stop.
#[derive(Debug)]
pub struct Lifecycle {
    listening: AtomicBool,
    draining: watch::Sender<bool>,
    empty: watch::Sender<bool>,
    /// What the listeners wait for.
    pub stop: Stop,
}

impl Default for Lifecycle {
    fn default() -> Self {
        Self {
            listening: AtomicBool::new(false),
            draining: watch::Sender::new(false),
            empty: watch::Sender::new(false),
            stop: Stop::default(),
        }
    }
}

impl Lifecycle {
    /// Listeners are open.
    pub fn listening(&self) {
        self.listening.store(true, Ordering::Release);
    }

    /// Whether new requests are wanted.
    pub fn is_ready(&self) -> bool {
        self.listening.load(Ordering::Acquire) && !self.is_draining()
    }

    /// Whether stopping has begun.
    pub fn is_draining(&self) -> bool {
        *self.draining.borrow()
    }

    /// Begins to stop. Not ready from this moment on.
    pub fn drain(&self) {
        self.draining.send_replace(true);
    }

    /// Waits until stopping begins.
    pub async fn draining(&self) {
        let _ = self.draining.subscribe().wait_for(|draining| *draining).await;
    }

    /// Waits until the last answer has been sent or cut.
    pub async fn emptied(&self) {
        let _ = self.empty.subscribe().wait_for(|empty| *empty).await;
    }

    /// Everything has been answered: whoever waits for the drain goes on.
    pub fn set_empty(&self) {
        self.empty.send_replace(true);
    }

    /// Plays the steps of stopping: keeps accepting for `delay`, unless nobody has been there for so long, then lets
    /// what is open end within `grace`, then cuts it. Ends early when `done` does.
    pub async fn steps(
        &self,
        times: DrainTimes,
        quiet: impl Fn(Duration) -> bool,
        done: impl Future<Output = ()>,
    ) {
        self.draining().await;
        if !quiet(times.delay) {
            tokio::time::sleep(times.delay).await;
        }
        self.stop.accept.cancel();
        if tokio::time::timeout(times.grace, done).await.is_err() {
            self.stop.cut.cancel();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_listeners_stay_open_for_the_delay_and_are_cut_after_the_grace() {
        let life = Lifecycle::default();
        life.listening();
        assert!(life.is_ready());
        let times = DrainTimes { delay: Duration::from_secs(5), grace: Duration::from_mins(2) };
        let start = tokio::time::Instant::now();
        life.drain();
        assert!(!life.is_ready());
        let accept = async {
            life.stop.accept.cancelled().await;
            start.elapsed()
        };
        let cut = async {
            life.stop.cut.cancelled().await;
            start.elapsed()
        };
        let ((), accept, cut) =
            tokio::join!(life.steps(times, |_| false, std::future::pending()), accept, cut);
        assert_eq!(accept.as_secs(), 5);
        assert_eq!(cut.as_secs(), 125);
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_cut_when_all_has_ended() {
        let life = Lifecycle::default();
        life.drain();
        life.steps(DrainTimes::default(), |_| false, std::future::ready(())).await;
        assert!(life.stop.accept.is_cancelled() && !life.stop.cut.is_cancelled());
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_is_waited_for_where_nobody_has_been() {
        let life = Lifecycle::default();
        life.drain();
        let start = tokio::time::Instant::now();
        let times = DrainTimes::default();
        life.steps(times, |delay| delay == times.delay, std::future::ready(())).await;
        assert_eq!(start.elapsed(), Duration::ZERO);
    }
}
