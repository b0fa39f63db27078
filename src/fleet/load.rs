//! How busy a replica is, by its engine's own figures.

use std::time::Duration;

use tokio::time::Instant;

use crate::control::gates::Signal;

/// Older figures are ignored.
pub const STALE: Duration = Duration::from_secs(2);

/// The load that an engine reported. The reader of its metrics sets it by
/// [`Replica::set_load`](super::Replica::set_load).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Load {
    /// Requests being computed.
    pub running: u32,
    /// Requests waiting for a place.
    pub waiting: u32,
    /// Share of the KV cache in use, 0 to 1; `None` where the engine does not report it.
    pub kv_usage: Option<f64>,
    /// Most requests that it computes at once; `None` if it does not report that.
    pub limit: Option<u32>,
    /// Sequences of our own verify calls that were under way then.
    pub verifying: u32,
    /// Calls of ours that were under way then.
    pub calls: u32,
    /// When it was reported.
    pub at: Instant,
}

/// A [`Load`] and how many of our own calls were under way when it was set.
#[derive(Clone, Copy, Debug)]
pub(super) struct Told {
    pub(super) load: Load,
    pub(super) ours: usize,
}

impl Load {
    /// The figures as the gates take them.
    pub fn signal(&self) -> Signal {
        let Self { running, waiting, kv_usage, limit, verifying, calls, at } = *self;
        Signal { running, waiting, kv_usage, limit, own: verifying, calls, age: at.elapsed() }
    }
}

impl Told {
    /// Requests at the engine now: those that it reported, and those of our own that have begun or ended since.
    pub(super) fn requests(&self, in_flight: usize) -> usize {
        let said = self.load.running as usize + self.load.waiting as usize;
        (said + in_flight).saturating_sub(self.ours)
    }

    pub(super) fn is_fresh(&self) -> bool {
        self.load.at.elapsed() < STALE
    }
}
