//! What has been learnt, and what it says to do next: survival of drafts, costs of calls, leap or ride.
//!
//! PURE. One [`Control`] per (epoch, policy), shared by all its sessions behind a short lock: sessions tell
//! it what they saw and ask it what to expect. Every observation decays, so a wrong belief is corrected
//! within a handful of rounds.

pub mod chooser;
pub mod costs;
pub mod gates;
pub mod prospect;
pub mod run;
pub mod survival;

pub use chooser::{Quote, Terms, best_cut, dither, pays};
pub use costs::Costs;
pub use prospect::Prior;
pub use run::Run;
pub use survival::{Heat, Survival, Tuning};

use parking_lot::Mutex;

use crate::draft::Source;
use crate::units::Tick;
use crate::words::{Plan, RideReason};

/// Everything learnt about one (epoch, policy).
#[derive(Debug, Default)]
pub struct Learnt {
    /// How likely drafted tokens are accepted.
    pub survival: Survival,
    /// What calls cost.
    pub costs: Costs,
    /// Mean output length in tokens, and how many outputs it is from.
    length: (f64, f64),
    gate: Option<RideReason>,
}

impl Learnt {
    /// Tokens that an output of `done` tokens may still be expected to have.
    pub fn expected_rest(&self, done: usize) -> f64 {
        let (mean, seen) = self.length;
        let length = (mean * seen + Self::LENGTH_PRIOR * 2.0) / (seen + 2.0);
        (length - done as f64).max(Self::REST_LEAST)
    }

    /// Output length before any was seen.
    const LENGTH_PRIOR: f64 = 256.0;
    /// However long an output is already, this much more is expected.
    const REST_LEAST: f64 = 32.0;

    /// Notes that an output ended after `tokens`.
    pub fn output_ended(&mut self, tokens: usize) {
        let (mean, seen) = self.length;
        let seen = (seen + 1.0).min(64.0);
        self.length = (mean + (tokens as f64 - mean) / seen, seen);
    }

    /// A live reason not to leap now.
    pub fn gate(&self) -> Option<RideReason> {
        self.gate
    }
}

/// The shared store of one (epoch, policy). Time spent under its lock is microseconds.
#[derive(Debug, Default)]
pub struct Control {
    learnt: Mutex<Learnt>,
}

/// A look at what has been learnt, for status pages and metrics. Times in seconds.
#[derive(Clone, Debug, PartialEq)]
pub struct Picture {
    /// Time per token while riding, once measured.
    pub ride_token: Option<f64>,
    /// Expected time of a verify call by number of draft nodes, from 0; measured plans only.
    pub verify: Vec<(Plan, Vec<f64>)>,
    /// Time of the model drafter per drafted token, once measured.
    pub draft_token: Option<f64>,
    /// Cost of switching from ride to leap.
    pub switch_in: f64,
    /// Cost of switching from leap to ride.
    pub switch_out: f64,
    /// Accepted and tried first tokens per source, decayed.
    pub first_tokens: Vec<(Source, f64, f64)>,
    /// The gate that is closed now.
    pub gate: Option<RideReason>,
}

impl Control {
    /// A store that knows nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Reads or writes what has been learnt. Keep it short: all sessions of the policy wait for it.
    pub fn with<T>(&self, work: impl FnOnce(&mut Learnt) -> T) -> T {
        work(&mut self.learnt.lock())
    }

    /// Closes the gate with a reason, or opens it.
    pub fn set_gate(&self, gate: Option<RideReason>) {
        self.with(|learnt| learnt.gate = gate);
    }

    /// Tells how long a cancelled backend call took to be gone (seconds).
    pub fn observe_cancel(&self, seconds: f64, now: Tick) {
        self.with(|learnt| learnt.costs.cancelled(seconds, now));
    }

    /// A copy of the main figures.
    pub fn picture(&self) -> Picture {
        self.with(|learnt| Picture {
            ride_token: learnt.costs.ride_token(),
            verify: Plan::ALL
                .into_iter()
                .filter(|&plan| learnt.costs.verify_measured(plan))
                .map(|plan| {
                    (plan, (0..=costs::NODES_MAX).map(|nodes| learnt.costs.verify(plan, nodes)).collect())
                })
                .collect(),
            draft_token: learnt.costs.draft_token_measured(),
            switch_in: learnt.costs.switch_in(),
            switch_out: learnt.costs.switch_out(),
            first_tokens: Source::ALL
                .iter()
                .map(|&source| {
                    let (accepted, tried) = learnt.survival.first_tokens(source);
                    (source, accepted, tried)
                })
                .collect(),
            gate: learnt.gate,
        })
    }
}
