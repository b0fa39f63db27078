//! A streak of rounds, and when it ends whatever the next round may yield.

use crate::units::Tick;

/// Plain tokens that a streak may lose from its best moment on before it ends: a sequential test,
/// so that a run of bad luck does not end a session that pays, and a change of text does.
const MAX_LOSS: f64 = 20.0;
/// Rounds of a streak that starts where no verify request was measured: the first one pays for the
/// switch, and one of the other two may have met a hiccup.
const TRIAL: u32 = 3;

/// Consecutive rounds, from leaving plain decoding to returning to it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Streak {
    /// End of the last round, or start of the streak.
    pub since: Tick,
    pub rounds: u32,
    /// Consecutive empty rounds.
    pub gap: usize,
    /// Plain tokens lost since the best moment of the streak: the CUSUM of its losses.
    pub lost: f64,
    /// The first verify request has been answered: its time shows the cost of switching.
    pub switched: bool,
    /// Started where no verify request was measured: it goes on until one is.
    pub trial: bool,
}

impl Streak {
    pub const fn new(now: Tick, trial: bool) -> Self {
        Self { since: now, rounds: 0, gap: 0, lost: 0.0, switched: false, trial }
    }

    pub fn ended_round(&mut self, empty: bool) {
        self.rounds += 1;
        self.gap = if empty { self.gap + 1 } else { 0 };
    }

    /// True while it goes on to measure the cost of a verify request.
    pub fn tries(self) -> bool {
        self.trial && self.rounds < TRIAL
    }

    /// True if it has lost more than chance explains. A trial goes on until it has a measurement.
    pub fn has_lost(self) -> bool {
        self.lost >= MAX_LOSS && !self.tries()
    }
}
