//! What has been learnt, and what it says to do next: survival of drafts, costs of calls, leap or ride.
//!
//! PURE. One [`Control`] per epoch, shared by all its sessions behind a short lock: sessions note what they saw and
//! ask what to expect. Every observation decays, so a wrong belief is corrected within a handful of rounds.

pub mod chooser;
pub mod costs;
pub mod gates;
pub mod prospect;
pub mod run;
pub mod shelf;
pub mod state;
pub mod survival;

pub use chooser::{Quote, Terms, best_cut, dither, pays};
pub use costs::{Costs, Way};
pub use prospect::Prior;
pub use run::Run;
pub use shelf::Shelf;
pub use state::{EpochState, PolicyState, ReplicaState};
pub use survival::{Heat, Survival, Tuning};

use parking_lot::Mutex;

use crate::draft::Source;
use crate::units::Tick;
use crate::words::{Plan, RideReason};

/// What sessions read and write: the state of their replica and of its epoch.
#[derive(Debug)]
pub struct Learnt<'a> {
    /// How likely drafted tokens are accepted.
    pub survival: &'a mut Survival,
    /// What calls cost.
    pub costs: &'a mut Costs,
    length: &'a mut state::Length,
    gate: &'a mut Option<RideReason>,
}

impl Learnt<'_> {
    /// Tokens that an output of `done` tokens may still be expected to have.
    pub fn expected_rest(&self, done: usize) -> f64 {
        self.length.expected_rest(done)
    }

    /// Notes that an output ended after `tokens`.
    pub fn output_ended(&mut self, tokens: usize) {
        self.length.ended(tokens);
    }

    /// A live reason not to leap now.
    pub fn gate(&self) -> Option<RideReason> {
        *self.gate
    }
}

/// The shared state of one epoch of a replica. Time spent under its lock is microseconds.
#[derive(Debug, Default)]
pub struct Control {
    states: Mutex<(ReplicaState, EpochState)>,
}

/// A look at what has been learnt, for status pages and metrics. Times in seconds.
#[derive(Clone, Debug, PartialEq)]
pub struct Picture {
    /// Time per token while riding, once measured.
    pub ride_token: Option<f64>,
    /// Expected time of a verify call by plan and by number of draft nodes, from 0; where it was measured, for a
    /// context of so many tokens.
    pub verify: Vec<(Way, Vec<f64>)>,
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

    /// Reads or writes what has been learnt. Keep it short: all sessions of the replica wait for it.
    pub fn with<T>(&self, work: impl FnOnce(&mut Learnt<'_>) -> T) -> T {
        let (replica, epoch) = &mut *self.states.lock();
        work(&mut Learnt {
            survival: &mut epoch.survival,
            costs: &mut replica.costs,
            length: &mut epoch.length,
            gate: &mut replica.gate,
        })
    }

    /// Closes the gate with a reason, or opens it.
    pub fn set_gate(&self, gate: Option<RideReason>) {
        self.with(|learnt| *learnt.gate = gate);
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
                .flat_map(|plan| contexts().map(move |context| Way::by(plan, context)))
                .filter(|&way| learnt.costs.verify_measured(way))
                .map(|way| {
                    (way, (0..=costs::NODES_MAX).map(|nodes| learnt.costs.verify(way, nodes)).collect())
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
            gate: learnt.gate(),
        })
    }
}

/// A context of every size that is told apart.
fn contexts() -> impl Iterator<Item = usize> {
    std::iter::once(0).chain(costs::CONTEXTS)
}
