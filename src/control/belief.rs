//! A mean and its weight: what is believed of one quantity, and how firmly.
//!
//! Measurements pull the mean, and the more of them there were lately the less each one does. Rest takes from the weight
//! and never moves the mean: after an hour without a call the last figure is still the best guess, but a weak one,
//! and the next measurement counts for much.

use serde::{Deserialize, Serialize};

use crate::units::Tick;

/// Measurements that a mean remembers: it adapts within a handful.
const MEMORY: f64 = 8.0;
/// A measurement counts at most this multiple of a settled mean: one hiccup is not a trend.
const OUTLIER: f64 = 3.0;
/// Measurements that make a mean a settled one.
const SETTLED: f64 = 3.0;
/// Seconds of rest after which what was measured weighs half.
const REST: f64 = 120.0;

/// The mean of a quantity (seconds, or a share) that forgets what is old.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Belief {
    mean: f64,
    /// Measurements that the mean rests on, at the time of the last one.
    weight: f64,
    /// When it was last measured.
    at: Tick,
}

impl Belief {
    /// Notes a measured time, seconds. What is no time is ignored.
    pub fn observe(&mut self, seconds: f64, now: Tick) {
        self.observe_of(seconds, 0.0, now);
    }

    /// As [`Self::observe`], for a time that may well be zero and is, where it is not, of the order of `scale` seconds.
    pub fn observe_of(&mut self, seconds: f64, scale: f64, now: Tick) {
        if !seconds.is_finite() || seconds < 0.0 {
            return;
        }
        let settled = self.weight(now) >= SETTLED;
        self.count(if settled { seconds.min(self.mean.max(scale) * OUTLIER) } else { seconds }, now);
    }

    /// Notes a measured value that has no outliers, for instance a share.
    pub fn count(&mut self, value: f64, now: Tick) {
        self.weight = (self.weight(now).max(0.0) + 1.0).min(MEMORY);
        self.mean += (value - self.mean) / self.weight;
        self.at = self.at.max(now);
    }

    /// It is no more than this, as is known from elsewhere.
    pub fn bound(&mut self, most: f64) {
        self.mean = self.mean.min(most);
    }

    /// The mean; `None` before the first measurement.
    pub fn known(&self) -> Option<f64> {
        (self.weight > 0.0).then_some(self.mean)
    }

    /// When it was last measured.
    pub fn at(&self) -> Tick {
        self.at
    }

    /// Measurements that the mean rests on now: rest makes them fewer, never none.
    pub fn weight(&self, now: Tick) -> f64 {
        self.weight * REST / (REST + now.seconds_since(self.at))
    }

    /// Makes `now` the origin of time: the mean is as certain as it is now.
    pub fn age(&mut self, now: Tick) {
        (self.weight, self.at) = (self.weight(now), Tick::default());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(seconds: u64) -> Tick {
        Tick(seconds * 1_000_000)
    }

    #[test]
    fn after_a_rest_a_measurement_counts_for_much_and_before_it_for_little() {
        let mut steady = Belief::default();
        (0..20).for_each(|_| steady.observe(0.040, at(0)));
        let mut rested = steady;
        steady.observe(0.080, at(1));
        rested.observe(0.080, at(3_600));
        assert!(steady.known().unwrap() < 0.046 && rested.known().unwrap() > 0.070, "{steady:?} {rested:?}");
    }

    #[test]
    fn what_was_zero_can_grow_again() {
        let mut belief = Belief::default();
        (0..8).for_each(|_| belief.observe_of(0.0, 0.02, at(0)));
        (0..12).for_each(|_| belief.observe_of(0.05, 0.02, at(1)));
        assert!(belief.known().unwrap() > 0.03, "{belief:?}");
    }

    #[test]
    fn a_change_is_learnt_within_a_handful_and_one_hiccup_is_no_trend() {
        let mut belief = Belief::default();
        (0..20).for_each(|_| belief.observe(0.010, at(0)));
        belief.observe(5.0, at(0));
        assert!(belief.known().unwrap() < 0.014, "{belief:?}");
        (0..12).for_each(|_| belief.observe(0.030, at(1)));
        assert!(belief.known().unwrap() > 0.025, "{belief:?}");
    }
}
