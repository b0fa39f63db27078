//! Orderly shutdown: report "not ready", wait until load balancers notice, then finish the open
//! requests.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use schemars::JsonSchema;
use serde::Deserialize;
use tokio_util::sync::CancellationToken;

use crate::http::listen::Stop;
use foretell_policy::form::{As, Delay};

/// Durations of an orderly shutdown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(default)]
pub struct DrainTimes {
    /// Not ready, but still accepting. If not set, it ends as soon as no client is connected.
    #[serde(with = "As::<Delay>")]
    pub delay: Duration,
    /// True if the delay ends as soon as no client is connected. Set if the operator has not
    /// configured a delay.
    #[serde(skip)]
    pub early: bool,
    /// Time for open answers to end.
    #[serde(with = "As::<Delay>")]
    pub grace: Duration,
}

impl Default for DrainTimes {
    fn default() -> Self {
        Self { delay: Duration::from_secs(5), early: true, grace: Duration::from_mins(2) }
    }
}

/// State of the process between start and stop.
#[derive(Debug, Default)]
pub struct Lifecycle {
    listening: AtomicBool,
    draining: CancellationToken,
    empty: CancellationToken,
    hurried: CancellationToken,
    /// Stops the listeners.
    pub stop: Stop,
}

impl Lifecycle {
    /// Records that the listeners are open.
    pub fn listening(&self) {
        self.listening.store(true, Ordering::Release);
    }

    /// True if the process accepts new requests: listening, and not draining.
    pub fn is_ready(&self) -> bool {
        self.listening.load(Ordering::Acquire) && !self.is_draining()
    }

    /// True if the shutdown has begun.
    pub fn is_draining(&self) -> bool {
        self.draining.is_cancelled()
    }

    /// Begins the shutdown: from now on the process is not ready.
    pub fn drain(&self) {
        self.draining.cancel();
    }

    /// Skips the delay of the shutdown.
    pub fn hurry(&self) {
        self.hurried.cancel();
    }

    /// Waits until the shutdown begins.
    pub async fn draining(&self) {
        self.draining.cancelled().await;
    }

    /// Waits until every request has been answered or cut.
    pub async fn emptied(&self) {
        self.empty.cancelled().await;
    }

    /// Records that every request has been answered or cut, which ends [`Self::emptied`].
    pub fn set_empty(&self) {
        self.empty.cancel();
    }

    /// Runs the shutdown once it begins: accepts for `delay` (less if hurried, or with
    /// `early` once `none` completes), stops accepting, and cuts the open connections after `grace`
    /// unless `done` completes before.
    pub async fn steps(
        &self,
        times: DrainTimes,
        none: impl Future<Output = ()>,
        done: impl Future<Output = ()>,
    ) {
        self.draining().await;
        tokio::select! {
            () = tokio::time::sleep(times.delay) => {}
            () = self.hurried.cancelled() => {}
            () = none, if times.early => {}
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
        let times = DrainTimes { delay: Duration::from_secs(5), early: false, grace: Duration::from_mins(2) };
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
            tokio::join!(life.steps(times, std::future::pending(), std::future::pending()), accept, cut);
        assert_eq!(accept.as_secs(), 5);
        assert_eq!(cut.as_secs(), 125);
    }

    #[tokio::test(start_paused = true)]
    async fn the_delay_ends_early_without_clients_or_when_hurried() {
        let begun = tokio::time::Instant::now();
        let early = DrainTimes::default();
        let idle = Lifecycle::default();
        idle.drain();
        idle.steps(early, std::future::ready(()), std::future::ready(())).await;
        assert_eq!(begun.elapsed(), Duration::ZERO);

        let busy = Lifecycle::default();
        busy.drain();
        busy.steps(early, tokio::time::sleep(Duration::from_secs(2)), std::future::ready(())).await;
        assert_eq!(begun.elapsed().as_secs(), 2);

        let hurried = Lifecycle::default();
        hurried.drain();
        hurried.hurry();
        hurried
            .steps(DrainTimes { early: false, ..early }, std::future::pending(), std::future::ready(()))
            .await;
        assert_eq!(begun.elapsed().as_secs(), 2);

        let set = Lifecycle::default();
        set.drain();
        set.steps(DrainTimes { early: false, ..early }, std::future::ready(()), std::future::ready(())).await;
        assert_eq!(begun.elapsed().as_secs(), 7, "a configured delay is not cut short");
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_cut_when_all_has_ended() {
        let life = Lifecycle::default();
        life.drain();
        life.steps(DrainTimes::default(), std::future::pending(), std::future::ready(())).await;
        assert!(life.stop.accept.is_cancelled() && !life.stop.cut.is_cancelled());
    }
}
