//! What it brings to send a verify call before the one that it rests on is answered.
//!
//! It saves the part of a round trip in which the engine waits for the next call, and it costs the engine's time where what
//! was assumed did not come true: then the next call waits for one that nobody needs any more. Before that is measured, a
//! round is taken to idle by what an empty one takes beyond a ridden token, and the engine to compute one call at a time.

use serde::{Deserialize, Serialize};

use super::Belief;
use crate::units::Tick;

/// Least share of a round in which the engine idles for a call ahead to be tried.
const IDLE_LEAST: f64 = 0.10;
/// Least share of a round that must be won.
const MARGIN: f64 = 0.03;
/// A round counts at most as so many times what it takes by itself: one hiccup is not a trend.
const MOST: f64 = 3.0;

/// What the time of a verify call says of the costs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Turn {
    /// What such a call takes by itself.
    #[default]
    Alone,
    /// What it takes if the next one is sent while it is under way.
    Accompanied,
    /// What it takes behind one that nobody needed.
    AfterMiss,
    /// What it takes if the model drafter drafts for the next round while it is under way.
    Sketched,
    /// What is left of it when the call before it has been answered.
    Promoted,
}

impl Turn {
    /// With another call sent behind it.
    #[must_use]
    pub const fn accompanied(self) -> Self {
        match self {
            Self::Alone => Self::Accompanied,
            other => other,
        }
    }
}

impl Turn {
    /// With the model drafter at work beside it.
    #[must_use]
    pub const fn sketched(self) -> Self {
        match self {
            Self::Alone => Self::Sketched,
            other => other,
        }
    }
}

/// Times of rounds that overlap, as shares of what such a round takes by itself.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct Overlap {
    accompanied: Belief,
    missed: Belief,
    sketched: Belief,
    promoted: Belief,
}

/// A call that could be sent ahead.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Offer {
    /// Probability that what it assumes comes true.
    pub alive: f64,
    /// Seconds of its round by itself, and those in which the engine idles then.
    pub seconds: f64,
    pub idle: f64,
}

impl Overlap {
    /// Notes a call that took so many times what it takes by itself.
    pub(super) fn observe(&mut self, turn: Turn, times: f64, now: Tick) {
        let belief = match turn {
            Turn::Alone => return,
            Turn::Accompanied => &mut self.accompanied,
            Turn::Sketched => &mut self.sketched,
            Turn::AfterMiss => &mut self.missed,
            Turn::Promoted => &mut self.promoted,
        };
        if times.is_finite() {
            belief.count(times.clamp(0.0, MOST), now);
        }
    }

    /// Whether a draft for the next round is expected to win more than it costs: with probability `alive` it fits, and then
    /// saves this share of a round.
    pub(super) fn sketch_pays(&self, alive: f64, saved: f64) -> bool {
        let longer = (self.sketched.known().unwrap_or(1.0) - 1.0).max(0.0);
        alive * saved - longer > MARGIN
    }

    /// Whether the call is expected to win more than it costs.
    pub(super) fn pays(&self, offer: &Offer) -> bool {
        let Offer { alive, seconds, idle } = *offer;
        let idle = (idle / seconds.max(1e-9)).clamp(0.0, 1.0);
        if idle < IDLE_LEAST {
            return false;
        }
        let promoted = self.promoted.known().unwrap_or(1.0 - idle);
        let missed = self.missed.known().unwrap_or((2.0 - 2.0 * idle).max(1.0));
        let accompanied = self.accompanied.known().unwrap_or(1.0);
        let won = alive * (1.0 - promoted);
        let lost = (1.0 - alive) * (missed - 1.0).max(0.0);
        won - lost - (accompanied - 1.0).max(0.0) > MARGIN
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(alive: f64, idle: f64) -> Offer {
        Offer { alive, seconds: 0.1, idle }
    }

    #[test]
    fn before_anything_is_measured_it_is_tried_where_round_trips_are_long() {
        let fresh = Overlap::default();
        let pays = |alive, idle| fresh.pays(&offer(alive, idle));
        assert!(pays(0.9, 0.02) && pays(0.2, 0.08), "nothing is lost while the engine idles");
        assert!(!pays(0.99, 0.005), "the engine is busy all the time");
        assert!(!pays(0.2, 0.02), "a miss would hold up the next call");
    }

    #[test]
    fn what_is_measured_counts_and_one_hiccup_does_not_end_it() {
        let mut seen = Overlap::default();
        let now = Tick(0);
        (0..8).for_each(|_| seen.observe(Turn::Promoted, 0.5, now));
        seen.observe(Turn::Promoted, 90.0, now);
        assert!(seen.pays(&offer(0.95, 0.08)));
        (0..8).for_each(|_| seen.observe(Turn::Accompanied, 1.6, now));
        assert!(!seen.pays(&offer(0.95, 0.08)), "it holds up the call before it");
        seen.observe(Turn::Alone, 9.0, now);
        seen.observe(Turn::Promoted, f64::NAN, now);
        assert_eq!(Turn::AfterMiss.accompanied(), Turn::AfterMiss);
    }
}
