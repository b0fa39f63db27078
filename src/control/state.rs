//! What is kept of a replica, of an epoch and of a policy.
//!
//! They live apart because they end apart: an edit of a policy says nothing about what a replica's calls cost, or
//! how likely its model's tokens are to be guessed.

use super::costs::Costs;
use super::survival::Survival;
use crate::units::Dice;

/// What has been learnt about one replica.
#[derive(Debug, Default)]
pub struct ReplicaState {
    /// What its calls cost.
    pub costs: Costs,
}

/// What has been learnt about one epoch: a model behind a replica, since it started.
#[derive(Debug, Default)]
pub struct EpochState {
    /// How likely drafted tokens are accepted.
    pub survival: Survival,
    /// How long outputs become.
    pub length: Length,
}

/// What is kept of one policy, whatever its revision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PolicyState {
    requests: u64,
}

impl PolicyState {
    /// Requests after which the share of those held back has halved.
    const HALF: f64 = 100.0;

    /// Draws whether the next request is in the control group: a share that begins at `start`, halves with every
    /// hundred requests of the policy, and ends at `floor`.
    pub fn holds_back(&mut self, start: f64, floor: f64, dice: &mut Dice) -> bool {
        self.requests += 1;
        let share = start * 0.5_f64.powf(self.requests as f64 / Self::HALF);
        dice.unit() < floor.max(share)
    }
}

/// Mean length of outputs, in tokens.
#[derive(Clone, Copy, Debug, Default)]
pub struct Length {
    mean: f64,
    seen: f64,
}

impl Length {
    /// Mean length before any output was seen.
    const PRIOR: f64 = 256.0;
    /// However long an output is already, this much more is expected.
    const REST_LEAST: f64 = 32.0;
    /// Outputs that the mean remembers.
    const MEMORY: f64 = 64.0;

    /// Tokens that an output of `done` tokens may still be expected to have.
    pub fn expected_rest(&self, done: usize) -> f64 {
        let length = (self.mean * self.seen + Self::PRIOR * 2.0) / (self.seen + 2.0);
        (length - done as f64).max(Self::REST_LEAST)
    }

    /// Notes that an output ended after `tokens`.
    pub fn ended(&mut self, tokens: usize) {
        self.seen = (self.seen + 1.0).min(Self::MEMORY);
        self.mean += (tokens as f64 - self.mean) / self.seen;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_control_group_shrinks_from_its_start_to_its_floor() {
        let (mut state, mut dice) = (PolicyState::default(), Dice::new(5));
        let mut held =
            |requests: usize| (0..requests).filter(|_| state.holds_back(0.2, 0.01, &mut dice)).count();
        let (first, rest) = (held(100), held(5_000));
        // Means 14.4 of the first hundred, and 60 of the rest, of which the last 4,600 have one in a hundred.
        assert!((5..=25).contains(&first) && (35..=90).contains(&rest), "{first} {rest}");
        assert!((0..100).all(|_| !PolicyState::default().holds_back(0.0, 0.0, &mut dice)));
        assert!((0..100).all(|_| PolicyState::default().holds_back(1.0, 1.0, &mut dice)));
    }

    #[test]
    fn the_same_dice_draw_the_same_group() {
        let draws = |seed: u64| {
            let (mut state, mut dice) = (PolicyState::default(), Dice::new(seed));
            (0..200).map(|_| state.holds_back(0.5, 0.1, &mut dice)).collect::<Vec<_>>()
        };
        assert_eq!(draws(1), draws(1));
        assert_ne!(draws(1), draws(2));
    }

    #[test]
    fn outputs_are_expected_to_be_as_long_as_they_were() {
        let mut length = Length::default();
        assert!((length.expected_rest(0) - 256.0).abs() < 1e-9);
        (0..64).for_each(|_| length.ended(1_000));
        assert!((900.0..1_000.0).contains(&length.expected_rest(0)));
        assert!((length.expected_rest(5_000) - 32.0).abs() < 1e-9);
    }
}
