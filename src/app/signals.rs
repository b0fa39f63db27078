//! What the process does when it is sent a signal.
//!
//! `SIGTERM` and `SIGINT` ask it to end. All others that would end it by accident are written to the log and ignored.

use std::io;
use std::time::{Duration, Instant};

use tokio::signal::unix::{Signal, SignalKind, signal};

/// Signals within this time of the first one are the same wish: GNU `timeout` sends its signal to the process and to the
/// group that the process is in, and so do shells.
pub const SAME_WISH: Duration = Duration::from_secs(1);

/// A wish that the process end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    /// `SIGTERM`: whoever looks after the process.
    Terminate,
    /// `SIGINT`: somebody at a terminal.
    Interrupt,
}

/// The signals that are caught, from when this is made.
#[derive(Debug)]
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
    user1: Signal,
    user2: Signal,
}

impl Signals {
    /// Catches them from now on. Needs a runtime.
    ///
    /// # Errors
    /// The system refuses.
    pub fn catch() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
            user1: signal(SignalKind::user_defined1())?,
            user2: signal(SignalKind::user_defined2())?,
        })
    }

    /// After a first wish: waits for one that is not the same.
    pub async fn later_wish(&mut self) {
        let first = Instant::now();
        loop {
            self.wish().await;
            if first.elapsed() >= SAME_WISH {
                return;
            }
        }
    }

    /// Waits for the wish that the process end.
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
