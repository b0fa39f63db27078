//! Signals that the process handles.
//!
//! `SIGTERM` and `SIGINT` ask it to stop, `SIGHUP` to read policies and config file again.
//! `SIGUSR1` and `SIGUSR2`, which would end it by default, are logged and ignored.

use std::io;
use std::time::{Duration, Instant};

use tokio::signal::unix::{Signal, SignalKind, signal};

/// Signals within this time of the first one count as one: GNU `timeout` and shells send a signal
/// both to the process and to its process group.
pub const SAME_WISH: Duration = Duration::from_secs(1);

/// The request that a signal stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    /// `SIGTERM`, sent by a service manager.
    Terminate,
    /// `SIGINT`, sent from a terminal.
    Interrupt,
    /// `SIGHUP`, sent by an operator or a service manager: read the configuration again.
    Reload,
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

    /// Waits for the next stop signal, where a reload is not possible: before the proxy has
    /// started, and in a target.
    pub async fn stop(&mut self) -> Wish {
        loop {
            match self.wish().await {
                Wish::Reload => tracing::warn!("SIGHUP is ignored now"),
                stop => return stop,
            }
        }
    }

    /// Waits for a stop signal at least [`SAME_WISH`] from now; earlier ones repeat the first.
    pub async fn later_wish(&mut self) {
        let first = Instant::now();
        loop {
            self.stop().await;
            if first.elapsed() >= SAME_WISH {
                return;
            }
        }
    }

    /// Waits for the next signal that asks for something; the others are logged.
    pub async fn wish(&mut self) -> Wish {
        loop {
            let ignored = tokio::select! {
                _ = self.terminate.recv() => return Wish::Terminate,
                _ = self.interrupt.recv() => return Wish::Interrupt,
                _ = self.hangup.recv() => return Wish::Reload,
                _ = self.user1.recv() => "SIGUSR1",
                _ = self.user2.recv() => "SIGUSR2",
            };
            tracing::warn!("{ignored} is ignored");
        }
    }
}
