//! The service manager of the process (systemd's `Type=notify` and `Type=notify-reload`): it is told when the process is
//! ready, reads its configuration again, and drains; and, where it watches, that the process still runs.
//!
//! Everything goes to the datagram socket that `NOTIFY_SOCKET` names. Without that variable nothing is done.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use sd_notify::NotifyState;

/// What the service manager was told so far.
#[derive(Debug, Default)]
pub struct Manager {
    /// Reloads that have begun and not ended.
    reloads: Mutex<usize>,
}

impl Manager {
    /// A manager that was told nothing yet. If it wants to hear of the process regularly (`WATCHDOG_USEC`), it does from
    /// now on, for as long as the runtime of the caller has a thread that runs tasks.
    pub fn watching() -> Arc<Self> {
        if let Some(within) = sd_notify::watchdog_enabled().filter(|within| !within.is_zero()) {
            tokio::spawn(alive(within / 2));
        }
        Arc::default()
    }

    /// Every listener is open; `status` is what the manager shows beside the state.
    pub fn ready(&self, status: &str) {
        let reloads = self.reloads.lock();
        if *reloads == 0 {
            tell(&[NotifyState::Ready, NotifyState::Status(status)]);
        }
    }

    /// The configuration is about to be read again. [`Self::reloaded`] must follow.
    pub fn reloading(&self) {
        let mut reloads = self.reloads.lock();
        *reloads += 1;
        let Ok(now) = NotifyState::monotonic_usec_now() else { return };
        tell(&[NotifyState::Reloading, now]);
    }

    /// A reload has ended. If another one has begun meanwhile, the end of the last is told.
    pub fn reloaded(&self, status: &str) {
        let mut reloads = self.reloads.lock();
        *reloads = reloads.saturating_sub(1);
        if *reloads == 0 {
            tell(&[NotifyState::Ready, NotifyState::Status(status)]);
        }
    }

    /// The process drains.
    pub fn stopping(&self) {
        // In turn with the end of a reload.
        let _reloads = self.reloads.lock();
        tell(&[NotifyState::Stopping, NotifyState::Status("draining")]);
    }
}

/// Tells the manager again and again that the process runs.
async fn alive(every: Duration) {
    let mut ticks = tokio::time::interval(every);
    loop {
        ticks.tick().await;
        tell(&[NotifyState::Watchdog]);
    }
}

/// A manager that cannot be told is no reason to stop serving.
fn tell(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!(%error, "the service manager cannot be told (NOTIFY_SOCKET)");
    }
}
