//! A replica's load, by its engine's figures.

use std::time::Duration;

use tokio::time::Instant;

use foretell_core::control::gates::Signal;

/// Older figures are ignored.
pub const STALE: Duration = Duration::from_secs(2);

/// The load that an engine reported. The reader of its metrics sets it by
/// [`Replica::set_load`](super::Replica::set_load).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Load {
    /// Requests being computed.
    pub running: u32,
    /// Requests in the queue.
    pub waiting: u32,
    /// Share of the KV cache in use, 0 to 1; `None` where the engine does not report it.
    pub kv_usage: Option<f64>,
    /// Maximum number of requests computed at once; `None` if it does not report that.
    pub limit: Option<u32>,
    /// Sequences of Foretell's verify requests under way at that time.
    pub verifying: u32,
    /// Foretell's calls under way at that time.
    pub calls: u32,
    /// Time of the report.
    pub at: Instant,
}

/// A [`Load`] and the number of Foretell's calls under way when it was set.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReportedLoad {
    pub(super) load: Load,
    pub(super) ours: usize,
}

impl Load {
    /// The figures as the gates take them.
    pub fn signal(&self) -> Signal {
        let Self { running, waiting, kv_usage, limit, verifying, calls, at } = *self;
        Signal { running, waiting, kv_usage, limit, verifying, calls, age: at.elapsed() }
    }
}

impl ReportedLoad {
    /// Requests at the engine now: the reported ones, adjusted by Foretell's that have begun or
    /// ended since.
    pub(super) fn requests(&self, in_flight: usize) -> usize {
        let reported = self.load.running as usize + self.load.waiting as usize;
        (reported + in_flight).saturating_sub(self.ours)
    }

    pub(super) fn is_fresh(&self) -> bool {
        self.load.at.elapsed() < STALE
    }
}
