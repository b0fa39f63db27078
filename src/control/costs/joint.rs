//! What a draft node adds to verify calls that share an engine.
//!
//! A table of own drafts cannot tell: sessions that are alike draft alike, so calls with many nodes run beside calls with
//! many nodes. This is the slope, by least squares, of a call's time over the mean nodes of all our calls that were under
//! way together: what every call takes longer if each has one node more.

use serde::{Deserialize, Serialize};

use super::pace::{Crowd, SIZES};

/// Calls that the slope remembers.
const MEMORY: f64 = 128.0;
/// Calls, real and decayed, before a slope is believed.
const LEAST: f64 = 16.0;
/// Variance of the mean nodes that is added: without it calls that are all alike would show a slope of pure noise.
const RIDGE: f64 = 1.0;
/// A call counts at most this multiple of the mean: one hiccup is not a trend.
const OUTLIER: f64 = 3.0;

/// Decayed moments of nodes and seconds.
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
        let seconds = if self.weight >= LEAST { seconds.min(OUTLIER * self.seconds) } else { seconds };
        let keep = 1.0 - 1.0 / MEMORY;
        self.weight = self.weight * keep + 1.0;
        let (beyond_nodes, beyond_seconds) = (nodes - self.nodes, seconds - self.seconds);
        self.nodes += beyond_nodes / self.weight;
        self.seconds += beyond_seconds / self.weight;
        self.spread = self.spread * keep + beyond_nodes * (nodes - self.nodes);
        self.common = self.common * keep + beyond_nodes * (seconds - self.seconds);
    }

    fn slope(&self) -> Option<f64> {
        (self.weight >= LEAST).then(|| (self.common / (self.spread + RIDGE * self.weight)).max(0.0))
    }
}

/// Seconds for each node more in every call, by crowd.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Joint {
    crowds: [Moments; SIZES],
}

impl Joint {
    /// Notes a call of `seconds` beside calls that had `nodes` on average, itself included.
    pub(super) fn observe(&mut self, crowd: Crowd, nodes: f64, seconds: f64) {
        if let Some(moments) = self.crowds.get_mut(crowd.index()).filter(|_| seconds.is_finite()) {
            moments.observe(nodes, seconds);
        }
    }

    /// The slope; `None` before it can be told.
    pub(super) fn slope(&self, crowd: Crowd) -> Option<f64> {
        self.crowds.get(crowd.index())?.slope()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slope_is_that_of_all_calls_together_and_needs_calls_that_differ() {
        let (crowd, mut joint) = (Crowd::of(8), Joint::default());
        (0..15).for_each(|_| joint.observe(crowd, 8.0, 0.03));
        assert_eq!(joint.slope(crowd), None);
        (0..200).for_each(|call| joint.observe(crowd, 8.0, 0.03 + 0.01 * f64::from(call % 2)));
        assert!(joint.slope(crowd).is_some_and(|slope| slope < 1e-6), "{joint:?}");
        for call in 0..200 {
            let nodes = f64::from(call % 17);
            joint.observe(crowd, nodes, 0.02 + 0.002 * nodes);
        }
        assert!((0.0017..0.0021).contains(&joint.slope(crowd).unwrap_or(0.0)), "{joint:?}");
        assert_eq!(joint.slope(Crowd::of(1)), None);
    }
}
