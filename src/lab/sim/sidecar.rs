//! State of one Foretell process: its controller, its control group, and the engine's last load
//! report.

use std::sync::Arc;

use serde::{Deserialize, Deserializer};

use super::permit::Permit;
use super::values::{DAY, seconds};
use foretell_core::control::Control;
use foretell_core::control::gates::Signal;
use foretell_core::control::groups::Groups;
use foretell_core::session::{Permission, Rules, Summary};
use foretell_core::units::{SplitMix64, Tick};
use foretell_core::words::PlainReason;

/// Load reports of the engine.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SignalSpec {
    /// Seconds between two reports; `None` if it never reports.
    #[serde(deserialize_with = "some_seconds::<_, 1_000>")]
    pub every: Option<f64>,
    /// Age of a report when it arrives, seconds.
    #[serde(deserialize_with = "seconds::<_, 0, DAY>")]
    pub age: f64,
    /// Second after which no report arrives.
    #[serde(deserialize_with = "some_seconds::<_, 0>")]
    pub until: Option<f64>,
}

fn some_seconds<'de, D: Deserializer<'de>, const MIN: u64>(source: D) -> Result<Option<f64>, D::Error> {
    seconds::<D, MIN, DAY>(source).map(Some)
}

impl Default for SignalSpec {
    fn default() -> Self {
        Self::USUAL
    }
}

impl SignalSpec {
    /// Twice a second, without delay.
    pub const USUAL: Self = Self { every: Some(0.5), age: 0.0, until: None };
    /// Never.
    pub const ABSENT: Self = Self { every: None, age: 0.0, until: None };
}

/// A load report of an engine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reported {
    /// Time at which it was taken.
    pub at: Tick,
    /// Running sequences.
    pub running: usize,
    /// Waiting requests.
    pub waiting: usize,
    /// Share of the KV memory in use.
    pub kv: f64,
    /// Most sequences, where the engine reports that.
    pub limit: Option<u32>,
}

/// The group that a request was assigned to at random.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drawn {
    in_control_group: bool,
    closed: bool,
}

/// One Foretell process in front of the engine.
#[derive(Debug)]
pub struct Sidecar {
    /// Its learnt state.
    pub control: Arc<Control>,
    permit: Permit,
    groups: Groups,
    rng: SplitMix64,
    /// The last report, and at that time the sequences of the verify requests of this process, and
    /// its calls.
    reported: Option<(Reported, usize, usize)>,
    /// Sequences of its verify requests in flight.
    pub verifying: usize,
}

impl Sidecar {
    /// One without learnt state; `seed` seeds the draws of its control group.
    pub fn new(permit: Permit, seed: u64) -> Self {
        let control = Arc::new(Control::new());
        control.with(|learnt| learnt.allow_slots(permit.slots));
        let (groups, rng) = (Groups::default(), SplitMix64::new(SplitMix64::mix(seed)));
        Self { control, permit, groups, rng, reported: None, verifying: 0 }
    }

    /// True if the policy drafts by a model.
    pub fn has_model(&self) -> bool {
        self.permit.has_model
    }

    /// The rules of the next request, and its group.
    pub fn rules(&mut self, now: Tick) -> (Rules, Drawn) {
        let (start, floor) = (self.permit.holdback.start, self.permit.holdback.floor);
        let in_control_group = self.groups.draws_control_group(start, floor, &mut self.rng);
        let closed = self.groups.is_closed(now);
        let mut rules = Rules { control_group: in_control_group, ..self.permit.rules.clone() };
        if closed && rules.gamma_fixed.is_none() && rules.permission == Permission::Speculate {
            rules.permission = Permission::Shadow(PlainReason::GateControl);
        }
        (rules, Drawn { in_control_group, closed })
    }

    /// Adds a finished request to the comparison of the groups.
    pub fn ended(&mut self, drawn: Drawn, summary: &Summary, now: Tick) {
        if let Some(seconds) = summary.token_seconds
            && !drawn.closed
        {
            self.groups.note(drawn.in_control_group, seconds, self.permit.control_gate, now);
        }
    }

    /// Takes a load report.
    pub fn set_load(&mut self, report: Reported) {
        let calls = self.control.with(|learnt| learnt.concurrency.ours());
        self.reported = Some((report, self.verifying, calls));
    }

    /// The gate that is closed now, if any.
    pub fn closed(&self, now: Tick) -> Option<PlainReason> {
        let signal = self.reported.map(|(report, verifying, calls)| Signal {
            running: report.running as u32,
            waiting: report.waiting as u32,
            kv_usage: Some(report.kv),
            limit: report.limit,
            verifying: verifying as u32,
            calls: calls as u32,
            age: now - report.at,
        });
        if let Some(signal) = &signal {
            self.control.with(|learnt| learnt.set_signal(signal));
        }
        self.permit.gates.closed(true, signal.as_ref())
    }
}
