//! A streak of rounds, and when it ends whatever the next round may yield.

use crate::units::Tick;

/// Plain tokens that a streak may lose from its best moment on before it ends: a sequential test,
/// so that a run of bad luck does not end a session that pays, and a change of text does. Without
/// it one cell of the grid (edits, 1.5 and 0.1 steps) reaches 0.93 of the best fixed length.
const MAX_LOSS: f64 = 20.0;

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
}

impl Streak {
    pub const fn new(now: Tick) -> Self {
        Self { since: now, rounds: 0, gap: 0, lost: 0.0, switched: false }
    }

    pub fn ended_round(&mut self, empty: bool) {
        self.rounds += 1;
        self.gap = if empty { self.gap + 1 } else { 0 };
    }

    /// True if it has lost more than chance explains.
    pub fn has_lost(self) -> bool {
        self.lost >= MAX_LOSS
    }
}
