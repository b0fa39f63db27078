//! Seconds fitted by least squares, by the engine's concurrency: those of a verify request to
//! the tokens drafted before it, or to the draft tokens in flight with it, and those of a first
//! token to the draft tokens in flight.
//!
//! A session that drafts while the engine computes for another waits less for it afterwards: the
//! slope of a request's time over the tokens that were drafted before it is that saving.

use serde::{Deserialize, Serialize};

use super::pace::{ConcurrencyBucket, SIZES};

/// Usual decay of a fit, in measurements.
const MEMORY: f64 = 128.0;
/// Minimum number of measurements, real and decayed, for a slope.
const MIN: f64 = 16.0;
/// Ridge term added to the variance of each input: without it measurements that are all alike would
/// show a slope of pure noise.
const RIDGE: f64 = 1.0;

/// Decayed moments of two inputs and of seconds.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Moments {
    weight: f64,
    inputs: [f64; 2],
    seconds: f64,
    /// Sums of squared deviations of each input, and of the products of both.
    spread: [f64; 2],
    both: f64,
    /// Sums of the products of each input's deviation and that of the seconds, and of the squares
    /// of the latter.
    common: [f64; 2],
    squares: f64,
}

/// A fit of seconds to two inputs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Fit {
    /// Mean seconds where the first input is 0.
    pub base: f64,
    /// Seconds per unit of each input, and the mean of the second.
    pub slopes: [f64; 2],
    second: f64,
    /// Mean seconds.
    pub mean: f64,
    /// Standard error of the first slope.
    pub error: f64,
}

impl Fit {
    /// Expected seconds for these inputs.
    pub(super) fn at(&self, inputs: [f64; 2]) -> f64 {
        self.base + self.slopes[0] * inputs[0] + self.slopes[1] * (inputs[1] - self.second)
    }
}

impl Moments {
    fn observe(&mut self, inputs: [f64; 2], seconds: f64, memory: f64) {
        let keep = 1.0 - 1.0 / memory;
        self.weight = self.weight * keep + 1.0;
        let [x, z] = inputs;
        let before = [x - self.inputs[0], z - self.inputs[1], seconds - self.seconds];
        self.inputs = [self.inputs[0] + before[0] / self.weight, self.inputs[1] + before[1] / self.weight];
        self.seconds += before[2] / self.weight;
        let after = [x - self.inputs[0], z - self.inputs[1], seconds - self.seconds];
        let add = |sum: &mut f64, product: f64| *sum = *sum * keep + product;
        add(&mut self.spread[0], before[0] * after[0]);
        add(&mut self.spread[1], before[1] * after[1]);
        add(&mut self.both, before[0] * after[1]);
        add(&mut self.common[0], before[0] * after[2]);
        add(&mut self.common[1], before[1] * after[2]);
        add(&mut self.squares, before[2] * after[2]);
    }

    fn fit(&self) -> Option<Fit> {
        if self.weight < MIN {
            return None;
        }
        let ridge = RIDGE * self.weight;
        let [first, second] = [self.spread[0] + ridge, self.spread[1] + ridge];
        let determinant = first * second - self.both * self.both;
        let slopes = [
            (second * self.common[0] - self.both * self.common[1]) / determinant,
            (first * self.common[1] - self.both * self.common[0]) / determinant,
        ];
        let unexplained = self.squares - slopes[0] * self.common[0] - slopes[1] * self.common[1];
        let error = (unexplained.max(0.0) / self.weight * second / determinant).sqrt();
        let base = self.seconds - slopes[0] * self.inputs[0];
        Some(Fit { base, slopes, second: self.inputs[1], mean: self.seconds, error })
    }
}

/// Fits of seconds, by concurrency bucket.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Joint {
    concurrencies: [Moments; SIZES],
    /// Decay of the fits, in measurements.
    memory: f64,
}

impl Default for Joint {
    fn default() -> Self {
        Self::remembering(MEMORY)
    }
}

impl Joint {
    /// Fits without measurements, which decay by `memory` measurements.
    pub(super) fn remembering(memory: f64) -> Self {
        Self { concurrencies: [Moments::default(); SIZES], memory }
    }

    /// Notes a measurement with these inputs: it took `seconds`, or this many seconds beyond the
    /// expected ones.
    pub(super) fn observe(&mut self, concurrency: ConcurrencyBucket, inputs: [f64; 2], seconds: f64) {
        if seconds.is_finite()
            && let Some(moments) = self.concurrencies.get_mut(concurrency.index())
        {
            moments.observe(inputs, seconds, self.memory);
        }
    }

    /// The fit; `None` with fewer than 16 measurements, decayed.
    pub(super) fn fit(&self, concurrency: ConcurrencyBucket) -> Option<Fit> {
        self.concurrencies.get(concurrency.index())?.fit()
    }

    /// Mean of the first input; 0 before the first measurement.
    pub(super) fn mean(&self, concurrency: ConcurrencyBucket) -> f64 {
        self.concurrencies.get(concurrency.index()).map_or(0.0, |moments| moments.inputs[0])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slope_covers_all_requests_together_and_needs_requests_that_differ() {
        let (concurrency, mut joint) = (ConcurrencyBucket::of(8), Joint::default());
        (0..15).for_each(|_| joint.observe(concurrency, [8.0, 0.0], 0.03));
        let slope = |joint: &Joint| joint.fit(concurrency).map(|fit| fit.slopes[0]);
        assert_eq!(slope(&joint), None);
        (0..200).for_each(|call| joint.observe(concurrency, [8.0, 0.0], 0.03 + 0.01 * f64::from(call % 2)));
        assert!(slope(&joint).is_some_and(|slope| slope < 1e-6), "{joint:?}");
        for call in 0..200 {
            let nodes = f64::from(call % 17);
            joint.observe(concurrency, [nodes, 0.0], 0.02 + 0.002 * nodes);
        }
        assert!((0.0017..0.0021).contains(&slope(&joint).unwrap_or(0.0)), "{joint:?}");
        assert_eq!(joint.fit(ConcurrencyBucket::of(1)), None);
    }

    #[test]
    fn two_inputs_are_told_apart_and_the_error_says_how_certain_the_first_slope_is() {
        let (concurrency, mut joint) = (ConcurrencyBucket::of(8), Joint::default());
        for call in 0..400 {
            // Both rise together for the most part.
            let (x, z) = (f64::from(call % 11), f64::from(call % 11 + 10 * (call % 3)));
            joint.observe(concurrency, [x, z], 0.1 + 0.001 * x + 0.004 * z);
        }
        let fit = joint.fit(concurrency).expect("a fit");
        assert!((fit.base - 0.16).abs() < 0.004, "{fit:?}");
        assert!((fit.slopes[0] - 0.001).abs() < 5e-4 && (fit.slopes[1] - 0.004).abs() < 5e-4, "{fit:?}");
        let certain = fit.error;
        (0..400).for_each(|call| joint.observe(concurrency, [0.0, f64::from(call % 3)], 0.1));
        assert!(joint.fit(concurrency).expect("a fit").error > certain, "nothing in flight tells nothing");
    }
}
