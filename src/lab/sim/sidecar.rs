//! What one Foretell knows: its controller, its control group, and the load that the engine reported to it last.

use std::sync::Arc;

use super::permit::Permit;
use crate::control::Control;
use crate::control::gates::Signal;
use crate::control::groups::Groups;
use crate::session::{Permission, Rules, Summary};
use crate::units::{Dice, Tick};
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

/// The group that a request was drawn into.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drawn {
    held_back: bool,
    closed: bool,
}

/// One Foretell before the engine.
#[derive(Debug)]
pub struct Sidecar {
    /// What it has learnt.
    pub control: Arc<Control>,
    permit: Permit,
    groups: Groups,
    dice: Dice,
    /// The last report, and how many sequences of its own verify calls were under way then.
    reported: Option<(Reported, usize, usize)>,
    /// Sequences of its verify calls that are under way.
    pub verifying: usize,
}

impl Sidecar {
    /// One that knows nothing; `seed` draws its control group.
    pub fn new(permit: Permit, seed: u64) -> Self {
        let control = Arc::new(Control::new());
        control.with(|learnt| learnt.impose(permit.imposed));
        let (groups, dice) = (Groups::default(), Dice::new(Dice::mix(seed)));
        Self { control, permit, groups, dice, reported: None, verifying: 0 }
    }

    /// The rules of the next request, and its group.
    pub fn rules(&mut self, now: Tick) -> (Rules, Drawn) {
        let (start, floor) = (self.permit.holdback.start, self.permit.holdback.floor);
        let held_back = self.groups.holds_back(start, floor, &mut self.dice);
        let closed = self.groups.is_closed(now);
        let mut rules = Rules { holdback: held_back, ..self.permit.rules.clone() };
        if closed && rules.gamma_fixed.is_none() && rules.permission == Permission::Leap {
            rules.permission = Permission::Shadow(RideReason::GateLatency);
        }
        (rules, Drawn { held_back, closed })
    }

    /// Compares a request that has ended with those of the other group.
    pub fn ended(&mut self, drawn: Drawn, summary: &Summary, now: Tick) {
        if let Some(seconds) = summary.token_seconds.filter(|_| !drawn.closed) {
            self.groups.note(drawn.held_back, seconds, self.permit.latency, now);
        }
    }

    /// Takes a report.
    pub fn hear(&mut self, report: Reported) {
        let calls = self.control.with(|learnt| learnt.crowd.ours());
        self.reported = Some((report, self.verifying, calls));
    }

    /// The gate that is closed now, if any.
    pub fn closed(&self, now: Tick) -> Option<RideReason> {
        let signal = self.reported.map(|(report, own, calls)| Signal {
            running: report.running as u32,
            waiting: report.waiting as u32,
            kv_usage: Some(report.kv),
            limit: None,
            own: own as u32,
            calls: calls as u32,
            age: now - report.at,
        });
        if let Some(signal) = &signal {
            self.control.with(|learnt| learnt.crowd_changes(|crowd| crowd.hear(signal)));
        }
        self.permit.gates.closed(true, signal.as_ref())
    }
}
