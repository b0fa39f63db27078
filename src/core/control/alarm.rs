//! Alarms about acceptance: findings for the operator, independent of speed.
//!
//! A collapse is an attack on the drafters, or a model that was changed behind the same name. A
//! plateau, an output that repeats itself, is a fault of the output's quality: drafters predict it
//! best.

use serde::{Deserialize, Serialize};

use super::survival::TemperatureBucket;
use crate::draft::DrafterId;

/// First draft tokens of the short average.
const FAST: f64 = 100.0;
/// First draft tokens of the long average.
const SLOW: f64 = 2_000.0;
/// Minimum number of them for an alarm.
const MIN: f64 = 500.0;
/// Minimum acceptance that can collapse.
const WORTH: f64 = 0.3;
/// It has collapsed below this share of the long average ...
const FALLEN: f64 = 0.4;
/// ... and has recovered above this one.
const RISEN: f64 = 0.7;

/// An alarm for the operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Alarm {
    /// A drafter's acceptance of first draft tokens, averaged over about 100, has fallen below 0.4
    /// of its average over about 2,000.
    Collapse,
    /// An output repeats itself ([`crate::words::looping::loops`]).
    Plateau,
}

impl Alarm {
    /// Every alarm.
    pub const ALL: [Self; 2] = [Self::Collapse, Self::Plateau];

    /// The name in metrics and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Collapse => "collapse",
            Self::Plateau => "plateau",
        }
    }

    /// The finding in words for the operator.
    pub const fn says(self) -> &'static str {
        match self {
            Self::Collapse => {
                "drafts that used to be accepted are rejected: another model, or text made to be unpredictable"
            }
            Self::Plateau => "an output repeats itself",
        }
    }
}

/// Acceptance of one drafter at one temperature, as a short and a long average.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Watched {
    seen: f64,
    fast: f64,
    slow: f64,
    collapsed: bool,
}

impl Watched {
    /// Notes if a first token was accepted; returns true at a collapse.
    fn observe(&mut self, accepted: bool) -> bool {
        self.seen += 1.0;
        let hit = f64::from(u8::from(accepted));
        self.fast += (hit - self.fast) / self.seen.min(FAST);
        // During a collapse the long average is kept, so that the usual acceptance is not
        // forgotten.
        if !self.collapsed {
            self.slow += (hit - self.slow) / self.seen.min(SLOW);
        }
        let ratio = self.fast / self.slow.max(1e-9);
        if self.collapsed {
            self.collapsed = ratio < RISEN;
            return false;
        }
        self.collapsed = self.seen >= MIN && self.slow >= WORTH && ratio < FALLEN;
        self.collapsed
    }
}

/// Detects collapses of acceptance, for every drafter and temperature bucket of an epoch.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Watch {
    /// By [`DrafterId::row`], as many as were needed so far.
    watched: Vec<[Watched; TemperatureBucket::COUNT]>,
    /// Collapses that were not reported yet.
    untold: u32,
}

impl Watch {
    /// Notes if the first token of a draft was accepted.
    pub fn observe(&mut self, bucket: TemperatureBucket, drafter: DrafterId, accepted: bool) {
        if self.watched.len() <= drafter.row() {
            self.watched.resize(drafter.row() + 1, Default::default());
        }
        let watched = self.watched.get_mut(drafter.row()).and_then(|heats| heats.get_mut(bucket.index()));
        if watched.is_some_and(|watched| watched.observe(accepted)) {
            self.untold += 1;
        }
    }

    /// True if acceptance has collapsed since the last call.
    pub fn take(&mut self) -> bool {
        std::mem::take(&mut self.untold) > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::SplitMix64;

    fn fed(watch: &mut Watch, rng: &mut SplitMix64, share: f64, tokens: usize) {
        for _ in 0..tokens {
            let accepted = rng.unit() < share;
            watch.observe(TemperatureBucket::Greedy, DrafterId::model(0), accepted);
        }
    }

    #[test]
    fn a_collapse_is_reported_once_and_again_after_a_recovery() {
        let (mut watch, mut rng) = (Watch::default(), SplitMix64::new(3));
        fed(&mut watch, &mut rng, 0.7, 5_000);
        assert!(!watch.take());
        fed(&mut watch, &mut rng, 0.1, 5_000);
        assert!(watch.take() && !watch.take());
        fed(&mut watch, &mut rng, 0.7, 2_000);
        assert!(!watch.take());
        fed(&mut watch, &mut rng, 0.1, 300);
        assert!(watch.take());
    }

    #[test]
    fn noise_low_acceptance_and_a_beginning_are_no_collapse() {
        for (seed, share) in [(1, 0.9), (2, 0.5), (3, 0.32), (4, 0.1)] {
            let (mut watch, mut rng) = (Watch::default(), SplitMix64::new(seed));
            fed(&mut watch, &mut rng, share, 50_000);
            assert!(!watch.take(), "{share}");
        }
        let (mut watch, mut rng) = (Watch::default(), SplitMix64::new(5));
        fed(&mut watch, &mut rng, 0.9, 100);
        fed(&mut watch, &mut rng, 0.1, 300);
        assert!(!watch.take(), "nothing is usual yet");
    }
}
