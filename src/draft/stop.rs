//! Where a model drafter stops: at a place that is so open that its next token is hardly ever accepted.
//!
//! AdaEDL (arXiv 2410.18351): 1 − √(λ·H(q)) bounds from below how often a token of q is accepted, as the drafter itself can
//! tell, H in nats. It reads the law of the next token and no token that is drawn from it, so sampled drafts stay exact
//! under it: what is verified does not depend on what was drawn there.

/// When to stop.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stop {
    /// Weight of the entropy; its authors take 0.2 to 0.5.
    pub lambda: f64,
    /// Least that the bound on acceptance may be.
    pub least: f64,
}

impl Stop {
    /// Whether a token is drafted from a law of this entropy, nats.
    pub fn goes_on(self, entropy: f64) -> bool {
        1.0 - (self.lambda * entropy.max(0.0)).sqrt() >= self.least
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_goes_on_where_the_law_is_narrow() {
        let stop = Stop { lambda: 0.25, least: 0.5 };
        assert!(stop.goes_on(0.0) && stop.goes_on(1.0));
        assert!(!stop.goes_on(1.01));
    }
}
