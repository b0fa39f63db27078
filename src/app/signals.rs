//! Signals that the process handles.
//!
//! `SIGTERM` and `SIGINT` ask it to stop. `SIGHUP`, `SIGUSR1` and `SIGUSR2`, which would end it by default, are logged
//! and ignored.

use std::io;
use std::time::{Duration, Instant};

use tokio::signal::unix::{Signal, SignalKind, signal};

/// Signals within this time of the first one count as one: GNU `timeout` and shells send a signal both to the process
/// and to its process group.
pub const SAME_WISH: Duration = Duration::from_secs(1);

/// A request that the process stop, by its signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    /// `SIGTERM`, sent by a service manager.
    Terminate,
    /// `SIGINT`, sent from a terminal.
    Interrupt,
}

/// The signals caught since this was created.
#[derive(Debug)]
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
    user1: Signal,
    user2: Signal,
}

impl Signals {
    /// Starts catching the signals. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// The system refuses to register a handler.
    pub fn catch() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
            user1: signal(SignalKind::user_defined1())?,
            user2: signal(SignalKind::user_defined2())?,
        })
    }

    /// Waits for a stop signal at least [`SAME_WISH`] from now; earlier ones repeat the first.
    pub async fn later_wish(&mut self) {
        let first = Instant::now();
        loop {
            self.wish().await;
            if first.elapsed() >= SAME_WISH {
                return;
            }
        }
    }

    /// Waits for the next stop signal; the others are logged.
    pub async fn wish(&mut self) -> Wish {
        loop {
            let ignored = tokio::select! {
                _ = self.terminate.recv() => return Wish::Terminate,
                _ = self.interrupt.recv() => return Wish::Interrupt,
                _ = self.hangup.recv() => "SIGHUP",
                _ = self.user1.recv() => "SIGUSR1",
                _ = self.user2.recv() => "SIGUSR2",
            };
            match ignored {
                "SIGHUP" => tracing::warn!(
                    "SIGHUP is ignored: POST /api/reload of the admin API reads the policies again"
                ),
                ignored => tracing::warn!("{ignored} is ignored"),
            }
        }
    }
}
