//! Alarms about acceptance: what an operator wants to hear of, whatever it means for speed.
//!
//! A collapse is an attack on the drafters, or a model that was changed behind the same name. A plateau, an output that
//! repeats itself, is a fault of the output's quality: drafters guess it best.

use serde::{Deserialize, Serialize};

use super::survival::Heat;
use crate::draft::DrafterId;

/// First draft tokens that the present is judged by.
const FAST: f64 = 100.0;
/// First draft tokens that are the past.
const SLOW: f64 = 2_000.0;
/// Fewest of them before anything is said.
const LEAST: f64 = 500.0;
/// Lowest acceptance that can collapse.
const WORTH: f64 = 0.3;
/// It has collapsed below this share of what it was ...
const FALLEN: f64 = 0.4;
/// ... and has risen again above this one.
const RISEN: f64 = 0.7;

/// Something to be heard of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Alarm {
    /// The acceptance of a drafter has fallen to a fraction of what it was.
    Collapse,
    /// An output repeats itself.
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

    /// What has been seen, in words for the operator.
    pub const fn says(self) -> &'static str {
        match self {
            Self::Collapse => {
                "drafts that used to be accepted are refused: another model, or text made to be unguessable"
            }
            Self::Plateau => "an output repeats itself",
        }
    }
}

/// Acceptance of one drafter at one temperature, over two stretches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Watched {
    seen: f64,
    fast: f64,
    slow: f64,
    collapsed: bool,
}

impl Watched {
    /// Notes whether a first token was accepted; whether that is a collapse.
    fn observe(&mut self, accepted: bool) -> bool {
        self.seen += 1.0;
        let hit = f64::from(u8::from(accepted));
        self.fast += (hit - self.fast) / self.seen.min(FAST);
        // While it is collapsed the past stays what it was, so that what is usual is not forgotten.
        if !self.collapsed {
            self.slow += (hit - self.slow) / self.seen.min(SLOW);
        }
        let ratio = self.fast / self.slow.max(1e-9);
        if self.collapsed {
            self.collapsed = ratio < RISEN;
            return false;
        }
        self.collapsed = self.seen >= LEAST && self.slow >= WORTH && ratio < FALLEN;
        self.collapsed
    }
}

/// Watches every drafter of an epoch.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Watch {
    /// By [`DrafterId::row`], as many as were needed so far.
    watched: Vec<[Watched; Heat::COUNT]>,
    /// Collapses that nobody has been told of.
    untold: u32,
}

impl Watch {
    /// Notes whether the first token of a draft was accepted.
    pub fn observe(&mut self, heat: Heat, drafter: DrafterId, accepted: bool) {
        if self.watched.len() <= drafter.row() {
            self.watched.resize(drafter.row() + 1, Default::default());
        }
        let watched = self.watched.get_mut(drafter.row()).and_then(|heats| heats.get_mut(heat.index()));
        if watched.is_some_and(|watched| watched.observe(accepted)) {
            self.untold += 1;
        }
    }

    /// Whether acceptance has collapsed since this was asked last.
    pub fn take(&mut self) -> bool {
        std::mem::take(&mut self.untold) > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Dice;

    fn fed(watch: &mut Watch, dice: &mut Dice, share: f64, tokens: usize) {
        for _ in 0..tokens {
            let accepted = dice.unit() < share;
            watch.observe(Heat::Greedy, DrafterId::model(0), accepted);
        }
    }

    #[test]
    fn a_collapse_is_told_once_and_again_after_it_has_risen() {
        let (mut watch, mut dice) = (Watch::default(), Dice::new(3));
        fed(&mut watch, &mut dice, 0.7, 5_000);
        assert!(!watch.take());
        fed(&mut watch, &mut dice, 0.1, 5_000);
        assert!(watch.take() && !watch.take());
        fed(&mut watch, &mut dice, 0.7, 2_000);
        assert!(!watch.take());
        fed(&mut watch, &mut dice, 0.1, 300);
        assert!(watch.take());
    }

    #[test]
    fn noise_low_acceptance_and_a_beginning_are_no_collapse() {
        for (seed, share) in [(1, 0.9), (2, 0.5), (3, 0.32), (4, 0.1)] {
            let (mut watch, mut dice) = (Watch::default(), Dice::new(seed));
            fed(&mut watch, &mut dice, share, 50_000);
            assert!(!watch.take(), "{share}");
        }
        let (mut watch, mut dice) = (Watch::default(), Dice::new(5));
        fed(&mut watch, &mut dice, 0.9, 100);
        fed(&mut watch, &mut dice, 0.1, 300);
        assert!(!watch.take(), "nothing is usual yet");
    }
}
