//! Notifications to the service manager (systemd's `Type=notify` and `Type=notify-reload`): that
//! the process is ready, reloads its configuration, and drains; and, with a watchdog, that it still
//! runs.
//!
//! Everything goes to the datagram socket that `NOTIFY_SOCKET` names. Without that variable nothing
//! is done.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use sd_notify::NotifyState;

/// State of the notifications to the service manager.
#[derive(Debug, Default)]
pub struct Manager {
    /// Reloads that have begun and not ended.
    reloads: Mutex<usize>,
}

impl Manager {
    /// No notification has been sent yet. If the manager has a watchdog (`WATCHDOG_USEC`), it is
    /// notified regularly from now on, as long as the runtime of the caller runs tasks.
    pub fn watching() -> Arc<Self> {
        if let Some(within) = sd_notify::watchdog_enabled().filter(|within| !within.is_zero()) {
            tokio::spawn(alive(within / 2));
        }
        Arc::default()
    }

    /// Every listener is open; `status` is shown by the manager next to the state.
    pub fn ready(&self, status: &str) {
        let reloads = self.reloads.lock();
        if *reloads == 0 {
            notify(&[NotifyState::Ready, NotifyState::Status(status)]);
        }
    }

    /// The configuration is about to be reread. [`Self::reloaded`] must follow.
    pub fn reloading(&self) {
        let mut reloads = self.reloads.lock();
        *reloads += 1;
        let Ok(now) = NotifyState::monotonic_usec_now() else { return };
        notify(&[NotifyState::Reloading, now]);
    }

    /// A reload has ended. If another one has begun meanwhile, only the end of the last one is
    /// notified.
    pub fn reloaded(&self, status: &str) {
        let mut reloads = self.reloads.lock();
        *reloads = reloads.saturating_sub(1);
        if *reloads == 0 {
            notify(&[NotifyState::Ready, NotifyState::Status(status)]);
        }
    }

    /// The process drains.
    pub fn stopping(&self) {
        // Serialized with the end of a reload.
        let _reloads = self.reloads.lock();
        notify(&[NotifyState::Stopping, NotifyState::Status("draining")]);
    }
}

/// Notifies the manager regularly that the process runs.
async fn alive(every: Duration) {
    let mut ticks = tokio::time::interval(every);
    loop {
        ticks.tick().await;
        notify(&[NotifyState::Watchdog]);
    }
}

/// A failed notification is only logged.
fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!(%error, "the service manager cannot be notified (NOTIFY_SOCKET)");
    }
}
