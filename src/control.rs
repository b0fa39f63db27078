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

/// Everything learnt about one (epoch, policy).
#[derive(Debug, Default)]
pub struct Learnt {
    /// How likely drafted tokens are accepted.
    pub survival: Survival,
    /// What calls cost.
    pub costs: Costs,
    /// Mean output length in tokens, and how many outputs it is from.
    length: (f64, f64),
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
}

/// The shared store of one (epoch, policy). Time spent under its lock is microseconds.
#[derive(Debug, Default)]
pub struct Control {
    learnt: Mutex<Learnt>,
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
}
