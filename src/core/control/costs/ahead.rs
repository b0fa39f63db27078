//! Gain of verifying ahead: sending a verify request before the result that it builds on.
//!
//! It saves the part of a round trip in which the engine waits for the next request, and costs the
//! engine's time where the assumption did not come true: then the next request waits for one that
//! is no longer needed. Before that is measured, the engine is assumed to idle in a round for the
//! time that an empty round takes beyond a plain token, and to compute one request at a time.

use serde::{Deserialize, Serialize};

use super::Belief;
use crate::units::Tick;

/// Minimum share of a round in which the engine idles for a verify request to be sent ahead.
const MIN_IDLE_SHARE: f64 = 0.10;
/// Minimum share of a round that must be won.
const MARGIN: f64 = 0.03;
/// Maximum time of a round that counts, as a multiple of its time by itself: one hiccup is not a
/// trend.
const MAX: f64 = 3.0;

/// The situation in which a verify request was timed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Turn {
    /// By itself.
    #[default]
    Alone,
    /// With the next one sent while it was in flight.
    Accompanied,
    /// Behind one whose assumption had not come true.
    AfterMiss,
    /// With the model drafter drafting ahead while it was in flight.
    DraftedAhead,
    /// Sent ahead, and timed from the answer to the request before it.
    Promoted,
}

impl Turn {
    /// This situation once another request is sent behind it: `Alone` becomes `Accompanied`, any
    /// other stays.
    #[must_use]
    pub const fn accompanied(self) -> Self {
        match self {
            Self::Alone => Self::Accompanied,
            other => other,
        }
    }
}

impl Turn {
    /// This situation once the model drafter drafts concurrently: `Alone` becomes `DraftedAhead`,
    /// any other stays.
    #[must_use]
    pub const fn drafted_ahead(self) -> Self {
        match self {
            Self::Alone => Self::DraftedAhead,
            other => other,
        }
    }
}

/// Times of rounds that overlap, as shares of the time that such a round takes by itself.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct Overlap {
    accompanied: Belief,
    missed: Belief,
    drafted_ahead: Belief,
    promoted: Belief,
}

/// A verify request that could be sent ahead.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Offer {
    /// Probability, 0 to 1, that its assumption comes true.
    pub alive: f64,
    /// Seconds of its round by itself.
    pub seconds: f64,
    /// Seconds of that round in which the engine idles.
    pub idle: f64,
}

impl Overlap {
    /// Notes a request that took `times` times as long as by itself; a factor counts as at most 3.
    pub(super) fn observe(&mut self, turn: Turn, times: f64, now: Tick) {
        let belief = match turn {
            Turn::Alone => return,
            Turn::Accompanied => &mut self.accompanied,
            Turn::DraftedAhead => &mut self.drafted_ahead,
            Turn::AfterMiss => &mut self.missed,
            Turn::Promoted => &mut self.promoted,
        };
        if times.is_finite() {
            belief.count(times.clamp(0.0, MAX), now);
        }
    }

    /// True if drafting ahead is expected to win more than it costs: with probability `alive` the
    /// draft fits, and then saves the share `saved` of a round.
    pub(super) fn ahead_draft_pays(&self, alive: f64, saved: f64) -> bool {
        let longer = (self.drafted_ahead.known().unwrap_or(1.0) - 1.0).max(0.0);
        alive * saved - longer > MARGIN
    }

    /// True if the request is expected to win more than it costs.
    pub(super) fn pays(&self, offer: &Offer) -> bool {
        let Offer { alive, seconds, idle } = *offer;
        let idle = (idle / seconds.max(1e-9)).clamp(0.0, 1.0);
        if idle < MIN_IDLE_SHARE {
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
    fn without_measurements_it_is_tried_where_round_trips_are_long() {
        let fresh = Overlap::default();
        let pays = |alive, idle| fresh.pays(&offer(alive, idle));
        assert!(pays(0.9, 0.02) && pays(0.2, 0.08), "nothing is lost while the engine idles");
        assert!(!pays(0.99, 0.005), "the engine is busy all the time");
        assert!(!pays(0.2, 0.02), "a miss would delay the next request");
    }

    #[test]
    fn measurements_count_and_one_hiccup_does_not_end_it() {
        let mut seen = Overlap::default();
        let now = Tick(0);
        (0..8).for_each(|_| seen.observe(Turn::Promoted, 0.5, now));
        seen.observe(Turn::Promoted, 90.0, now);
        assert!(seen.pays(&offer(0.95, 0.08)));
        (0..8).for_each(|_| seen.observe(Turn::Accompanied, 1.6, now));
        assert!(!seen.pays(&offer(0.95, 0.08)), "it delays the request before it");
        seen.observe(Turn::Alone, 9.0, now);
        seen.observe(Turn::Promoted, f64::NAN, now);
        assert_eq!(Turn::AfterMiss.accompanied(), Turn::AfterMiss);
    }
}
