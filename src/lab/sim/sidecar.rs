//! What one Foretell knows: its controller, and the load that the engine reported to it last.

use std::sync::Arc;
use std::time::Duration;

use crate::control::Control;
use crate::control::gates::{LoadGates, Signal};
use crate::units::Tick;
use crate::words::RideReason;

/// How the engine reports its load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SignalSpec {
    /// Seconds between two reports; `None` if it never reports.
    pub every: Option<f64>,
    /// Seconds that a report is old when it arrives.
    pub age: f64,
    /// From this second on no report comes any more.
    pub until: Option<f64>,
}

impl SignalSpec {
    /// Twice a second, at once.
    pub const USUAL: Self = Self { every: Some(0.5), age: 0.0, until: None };
    /// Never.
    pub const ABSENT: Self = Self { every: None, age: 0.0, until: None };
}

/// What an engine reports.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reported {
    /// When it was true.
    pub at: Tick,
    /// Sequences that run.
    pub running: usize,
    /// Calls that wait.
    pub waiting: usize,
    /// Share of the KV memory in use.
    pub kv: f64,
}

/// One Foretell before the engine.
#[derive(Debug)]
pub struct Sidecar {
    /// What it has learnt.
    pub control: Arc<Control>,
    gates: LoadGates,
    /// The last report, and how many sequences of its own verify calls were under way then.
    reported: Option<(Reported, usize)>,
    /// Sequences of its verify calls that are under way.
    pub verifying: usize,
}

impl Sidecar {
    /// One that knows nothing.
    pub fn new(gates: LoadGates) -> Self {
        Self { control: Arc::new(Control::new()), gates, reported: None, verifying: 0 }
    }

    /// Takes a report.
    pub fn hear(&mut self, report: Reported) {
        self.reported = Some((report, self.verifying));
    }

    /// The gate that is closed now, if any.
    pub fn closed(&self, now: Tick) -> Option<RideReason> {
        let signal = self.reported.map(|(report, own)| Signal {
            running: report.running as u32,
            waiting: report.waiting as u32,
            kv_usage: Some(report.kv),
            own: own as u32,
            age: now - report.at,
        });
        self.gates.closed(signal.as_ref())
    }
}

/// The gates of a policy that sets none.
pub const GATES: LoadGates = LoadGates { waiting: 0, kv: 0.9, stale: Duration::from_secs(2) };
