//! The wait for a shared engine that drafting saves, by least squares over verify requests.
//!
//! A session that drafts while the engine computes for another waits less for it afterwards: the
//! slope of a request's time over the tokens that were drafted before it is that saving.

use serde::{Deserialize, Serialize};

use super::pace::{ConcurrencyBucket, SIZES};

/// Decay of the slope, in requests.
const MEMORY: f64 = 128.0;
/// Minimum number of requests, real and decayed, for a slope.
const MIN: f64 = 16.0;
/// Ridge term added to the variance of the mean nodes: without it requests that are all alike would
/// show a slope of pure noise.
const RIDGE: f64 = 1.0;

/// Decayed moments of nodes, or drafted tokens, and seconds.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Moments {
    weight: f64,
    nodes: f64,
    seconds: f64,
    /// Sum of squared deviations of the nodes, and of the products of both deviations.
    spread: f64,
    common: f64,
}

impl Moments {
    fn observe(&mut self, nodes: f64, seconds: f64) {
        let keep = 1.0 - 1.0 / MEMORY;
        self.weight = self.weight * keep + 1.0;
        let (beyond_nodes, beyond_seconds) = (nodes - self.nodes, seconds - self.seconds);
        self.nodes += beyond_nodes / self.weight;
        self.seconds += beyond_seconds / self.weight;
        self.spread = self.spread * keep + beyond_nodes * (nodes - self.nodes);
        self.common = self.common * keep + beyond_nodes * (seconds - self.seconds);
    }

    fn slope(&self) -> Option<f64> {
        (self.weight >= MIN).then(|| self.common / (self.spread + RIDGE * self.weight))
    }
}

/// Slope of seconds over nodes, or over drafted tokens, by concurrency bucket.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Joint {
    concurrencies: [Moments; SIZES],
}

impl Joint {
    /// Notes a request with `nodes` nodes or drafted tokens that took `seconds`, or this many
    /// seconds beyond the expected ones.
    pub(super) fn observe(&mut self, concurrency: ConcurrencyBucket, nodes: f64, seconds: f64) {
        if let Some(moments) = self.concurrencies.get_mut(concurrency.index()).filter(|_| seconds.is_finite())
        {
            moments.observe(nodes, seconds);
        }
    }

    /// Seconds per additional node or drafted token; `None` with fewer than 16 requests, decayed.
    pub(super) fn slope(&self, concurrency: ConcurrencyBucket) -> Option<f64> {
        self.concurrencies.get(concurrency.index())?.slope()
    }

    /// Mean nodes or drafted tokens per request; 0 before the first.
    pub(super) fn mean(&self, concurrency: ConcurrencyBucket) -> f64 {
        self.concurrencies.get(concurrency.index()).map_or(0.0, |moments| moments.nodes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slope_covers_all_requests_together_and_needs_requests_that_differ() {
        let (concurrency, mut joint) = (ConcurrencyBucket::of(8), Joint::default());
        (0..15).for_each(|_| joint.observe(concurrency, 8.0, 0.03));
        assert_eq!(joint.slope(concurrency), None);
        (0..200).for_each(|call| joint.observe(concurrency, 8.0, 0.03 + 0.01 * f64::from(call % 2)));
        assert!(joint.slope(concurrency).is_some_and(|slope| slope < 1e-6), "{joint:?}");
        for call in 0..200 {
            let nodes = f64::from(call % 17);
            joint.observe(concurrency, nodes, 0.02 + 0.002 * nodes);
        }
        assert!((0.0017..0.0021).contains(&joint.slope(concurrency).unwrap_or(0.0)), "{joint:?}");
        assert_eq!(joint.slope(ConcurrencyBucket::of(1)), None);
    }
}
