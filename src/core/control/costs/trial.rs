//! The trial of a replica: the rounds that measure what a verify request costs there, before any
//! measurement can predict a gain.
//!
//! A guessed cost and the pace of a first few plain tokens, which may be that of a busy moment, are
//! no reason to spend more than a trial. So it ends after two rounds, and speculation goes on only
//! after the plain pace was measured again behind it. There is none where several requests are in
//! flight: the plain steps of the others measure the pace all the time.

use serde::{Deserialize, Serialize};

/// Rounds of a trial: the first one pays for the switch, the next one shows what a round costs.
pub const TRIAL_ROUNDS: u32 = 2;
/// Plain steps behind it that measure the pace again.
const STEPS: f64 = 4.0;
/// Share of a step by which a plain token counts that does not show the pace: without other tokens,
/// the measurement is given up in the end.
const UNSURE: f64 = 0.125;

/// The progress of the trial.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum Trial {
    /// It goes on, or has not begun: rounds so far.
    Rounds(u32),
    /// Its rounds are over: plain steps since then.
    Steps(f64),
    /// Measurements predict the gain from now on.
    Done,
}

impl Default for Trial {
    fn default() -> Self {
        Self::Rounds(0)
    }
}

impl Trial {
    /// Notes a round of one of `ours` requests, the `number`th in a row; returns true if the pace
    /// is to be measured again behind it.
    pub fn round(&mut self, number: u32, ours: usize) -> bool {
        let Self::Rounds(rounds) = self else { return false };
        if ours > 1 {
            *self = Self::Done;
            return false;
        }
        *rounds += 1;
        let ends = number >= TRIAL_ROUNDS || *rounds >= TRIAL_ROUNDS;
        if ends {
            *self = Self::Steps(0.0);
        }
        ends
    }

    /// Notes plain steps that show the pace.
    pub fn stepped(&mut self, steps: f64) {
        if let Self::Steps(before) = self {
            *before += steps;
            if *before >= STEPS {
                *self = Self::Done;
            }
        }
    }

    /// Notes plain tokens that do not show the pace.
    pub fn unsure(&mut self, tokens: usize) {
        self.stepped(tokens as f64 * UNSURE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_rounds_end_it_and_the_pace_is_measured_behind_them() {
        let mut trial = Trial::default();
        trial.stepped(100.0);
        assert_eq!(trial, Trial::Rounds(0), "plain steps before it do not count");
        assert!(!trial.round(1, 1) && trial.round(2, 1));
        trial.stepped(3.0);
        assert_eq!(trial, Trial::Steps(3.0));
        trial.stepped(1.0);
        assert_eq!(trial, Trial::Done);
        assert!(!trial.round(9, 1));
    }

    #[test]
    fn outputs_that_end_within_a_round_do_not_repeat_it_for_ever() {
        let mut trial = Trial::default();
        assert!(!trial.round(1, 1) && trial.round(1, 1));
        let mut several = Trial::default();
        assert!(!several.round(1, 4), "the steps of the others show the pace");
        assert_eq!(several, Trial::Done);
    }

    #[test]
    fn without_a_step_that_shows_the_pace_it_is_given_up() {
        let mut trial = Trial::Steps(0.0);
        trial.unsure(31);
        assert_ne!(trial, Trial::Done);
        trial.unsure(1);
        assert_eq!(trial, Trial::Done);
    }
}
