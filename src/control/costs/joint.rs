//! What drafts change where requests share an engine, by least squares over their verify calls.
//!
//! A table of own drafts cannot tell what a node costs the others: sessions that are alike draft alike, so calls with many
//! nodes run beside calls with many nodes. The slope of a call's time over the mean nodes of all our calls that were under
//! way together can: it is what every call takes longer if each has one node more. And who drafts while the engine computes
//! for another waits less for it afterwards: the slope over the tokens that were drafted before the call tells how much less.

use serde::{Deserialize, Serialize};

use super::pace::{Crowd, SIZES};

/// Calls that the slope remembers.
const MEMORY: f64 = 128.0;
/// Calls, real and decayed, before a slope is believed.
const LEAST: f64 = 16.0;
/// Variance of the mean nodes that is added: without it calls that are all alike would show a slope of pure noise.
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
        (self.weight >= LEAST).then(|| self.common / (self.spread + RIDGE * self.weight))
    }
}

/// Seconds for each node or drafted token more, by crowd.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Joint {
    crowds: [Moments; SIZES],
}

impl Joint {
    /// Notes a call that took `seconds`, or took them beyond what was expected.
    pub(super) fn observe(&mut self, crowd: Crowd, nodes: f64, seconds: f64) {
        if let Some(moments) = self.crowds.get_mut(crowd.index()).filter(|_| seconds.is_finite()) {
            moments.observe(nodes, seconds);
        }
    }

    /// The slope; `None` before it can be told.
    pub(super) fn slope(&self, crowd: Crowd) -> Option<f64> {
        self.crowds.get(crowd.index())?.slope()
    }

    /// Nodes or drafted tokens of a call on average.
    pub(super) fn mean(&self, crowd: Crowd) -> f64 {
        self.crowds.get(crowd.index()).map_or(0.0, |moments| moments.nodes)
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
