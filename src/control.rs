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

/// What sessions read and write: the state of their replica and of its epoch.
#[derive(Debug)]
pub struct Learnt<'a> {
    /// How likely drafted tokens are accepted.
    pub survival: &'a mut Survival,
    /// What calls cost.
    pub costs: &'a mut Costs,
    length: &'a mut state::Length,
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
}

/// The shared state of one epoch of a replica. Time spent under its lock is microseconds.
#[derive(Debug, Default)]
pub struct Control {
    states: Mutex<(ReplicaState, EpochState)>,
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
        })
    }
}
