//! A mean and its weight: the estimate of one quantity, and its certainty.
//!
//! Measurements pull the mean, and the more of them there were lately the less each one does. Idle
//! time reduces the weight and never moves the mean: after an hour without a request the last
//! figure is still the best estimate, but a weak one, and the next measurement weighs much.

use serde::{Deserialize, Serialize};

use super::shared::Sum;
use crate::units::Tick;

/// Decay of the mean, in measurements: it adapts within a handful.
const MEMORY: f64 = 8.0;
/// Maximum of a measurement that counts, as a multiple of a settled mean: one hiccup is not a
/// trend.
const OUTLIER: f64 = 3.0;
/// Measurements that make a mean settled.
const SETTLED: f64 = 3.0;
/// Seconds of idle time after which a measurement weighs half.
pub(super) const IDLE_HALF_WEIGHT: f64 = 120.0;

/// Mean of a quantity (seconds, or a share from 0 to 1) over about its last 8 measurements, and its
/// weight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Belief {
    mean: f64,
    /// Measurements that the mean is based on, at the time of the last one.
    weight: f64,
    /// Time of the last measurement.
    at: Tick,
    /// Measurements of others, which fill up the memory that local ones leave free.
    #[serde(skip)]
    lent: Sum,
}

impl Belief {
    /// Notes a measured time, seconds; it counts as at most three times a settled mean. Negative
    /// and non-finite times are ignored.
    pub fn observe(&mut self, seconds: f64, now: Tick) {
        if !seconds.is_finite() || seconds < 0.0 {
            return;
        }
        let most = match self.known() {
            Some(mean) if self.weight(now) >= SETTLED => mean * OUTLIER,
            _ => f64::INFINITY,
        };
        self.count(seconds.min(most), now);
    }

    /// Notes a value without a cap, for instance a share from 0 to 1.
    pub fn count(&mut self, value: f64, now: Tick) {
        self.weight = (self.local_weight(now).max(0.0) + 1.0).min(MEMORY);
        self.mean += (value - self.mean) / self.weight;
        self.at = self.at.max(now);
    }

    /// The mean; `None` before the first measurement.
    pub fn known(&self) -> Option<f64> {
        let Sum(total, weight) = self.filling();
        let local = self.weight.max(0.0);
        if weight > 0.0 {
            return Sum(self.mean * local + total, local + weight).mean();
        }
        (self.weight > 0.0).then_some(self.mean)
    }

    /// Measurements that the mean is based on at `now`, 0 to 8: half as many after 120 idle
    /// seconds, and never none once there was one.
    pub fn weight(&self, now: Tick) -> f64 {
        self.local_weight(now) + self.filling().1
    }

    /// The part of the measurements of others that counts.
    fn filling(&self) -> Sum {
        self.lent.within(MEMORY - self.weight)
    }

    /// The local measurements, with their weight at `now`, as they are shared.
    pub(super) fn shared(&self, now: Tick) -> Sum {
        let weight = self.local_weight(now);
        Sum(self.mean * weight, weight)
    }

    /// Replaces the measurements of others; returns true if they differ.
    pub(super) fn lend(&mut self, lent: Sum) -> bool {
        std::mem::replace(&mut self.lent, lent) != lent
    }

    fn local_weight(&self, now: Tick) -> f64 {
        self.weight * IDLE_HALF_WEIGHT / (IDLE_HALF_WEIGHT + now.seconds_since(self.at))
    }

    /// Makes `now` the origin of time, keeping the present certainty of the mean.
    pub fn age(&mut self, now: Tick) {
        (self.weight, self.at) = (self.local_weight(now), Tick::default());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(seconds: u64) -> Tick {
        Tick(seconds * 1_000_000)
    }

    #[test]
    fn after_idle_time_a_measurement_weighs_much_and_before_it_little() {
        let mut steady = Belief::default();
        (0..20).for_each(|_| steady.observe(0.040, at(0)));
        let mut idle = steady;
        steady.observe(0.080, at(1));
        idle.observe(0.080, at(3_600));
        assert!(steady.known().unwrap() < 0.046 && idle.known().unwrap() > 0.070, "{steady:?} {idle:?}");
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
