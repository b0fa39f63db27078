//! Where a model drafter stops: where it is so unsure that one more token costs more than it is likely to bring.
//!
//! It takes what the drafter's own law says of a place for the chance that the token there is accepted, and the product of these
//! for the chance that a chain survives to a place. It reads the law of the next token and no token that is drawn from it, so
//! sampled drafts stay exact under it: whether a place is verified does not depend on what was drawn there.

/// Weight of the entropy, where tokens are drawn. The authors take 0.2 to 0.5, for a bound; with 0.3 places that it gave a chance
/// of 0.05 to survive did so 45 times in a hundred (bundled models, temperature 0.8). This one is an estimate, not a bound.
const LAMBDA: f64 = 0.1;
/// How often the likeliest token is refused where the next one is as likely, and how fast that falls with the distance of their
/// logits: fitted to 5,700 places of three workloads at temperature 0 (docs/results.md, "Drafts that end where the model is
/// unsure").
const MISSED: f64 = 0.75;
const SURER: f64 = 0.62;

/// The chance that a token is accepted which is drawn from a law with this entropy, nats, with the target's noise or to be
/// tested: 1 − √(λ·H) (`AdaEDL`, arXiv 2410.18351).
pub fn chance_by_entropy(entropy: f64) -> f64 {
    (1.0 - (LAMBDA * entropy.max(0.0)).sqrt()).max(0.0)
}

/// The chance that the likeliest token is the target's likeliest, where its logit exceeds the best of the others by `margin`.
pub fn chance_by_margin(margin: f64) -> f64 {
    1.0 - MISSED * (-SURER * margin.max(0.0)).exp()
}

/// Follows a draft and says where it ends.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stop {
    least: f64,
    alive: f64,
}

impl Stop {
    /// For a draft whose tokens are worth their cost if they survive with at least this chance.
    pub fn new(least: f64) -> Self {
        Self { least, alive: 1.0 }
    }

    /// Whether a token is drafted at the next place, where it is accepted with this chance. The first always is: who asks has
    /// decided to draft.
    pub fn goes_on(&mut self, chance: f64) -> bool {
        let first = self.alive >= 1.0;
        self.alive *= chance;
        // A sure place leaves the next one as it is.
        self.alive = self.alive.min(1.0 - f64::EPSILON);
        first || self.alive >= self.least
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn length(least: f64, entropies: &[f64]) -> usize {
        let mut stop = Stop::new(least);
        entropies.iter().take_while(|&&entropy| stop.goes_on(chance_by_entropy(entropy))).count()
    }

    #[test]
    fn a_draft_goes_on_while_it_is_likely_to_survive() {
        // 1 − √0.1 = 0.684, and its square is 0.468.
        assert_eq!(length(0.46, &[1.0; 4]), 2);
        assert_eq!(length(0.47, &[1.0; 4]), 1);
        assert_eq!(length(0.5, &[20.0; 4]), 1, "one token always");
        assert_eq!(length(0.9, &[0.0; 4]), 4, "sure places");
        assert_eq!(length(0.6, &[0.0, 2.0, 0.0]), 1);
    }

    #[test]
    fn a_likeliest_token_is_the_target_s_the_more_often_the_farther_the_next_one_is() {
        // Mean margins and the shares of tokens accepted there, all three workloads together.
        for (margin, accepted) in
            [(0.05, 0.28), (0.38, 0.40), (0.74, 0.51), (1.25, 0.67), (2.47, 0.87), (4.86, 0.98)]
        {
            let chance = chance_by_margin(margin);
            assert!((chance - accepted).abs() < 0.05, "{margin}: {chance} instead of {accepted}");
        }
    }
}
