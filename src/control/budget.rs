//! The budget of tokens that an engine computes for nothing: draft tokens that were refused.
//!
//! It binds only where somebody waits for the same engine: requests of others, or of ours that ride. There the tokens
//! that are refused may be no more than a share of those that the engine generates.

/// Refused tokens that may be saved up.
const MOST: f64 = 64.0;

/// The budget of one replica, shared by all its sessions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Budget {
    /// Refused tokens allowed for each generated one.
    share: f64,
    left: f64,
}

impl Default for Budget {
    fn default() -> Self {
        Self { share: 0.25, left: MOST }
    }
}

impl Budget {
    /// Sets how many refused tokens are allowed for each generated one.
    pub fn allow(&mut self, share: f64) {
        self.share = share;
    }

    /// Notes tokens that the engine generated.
    pub fn generated(&mut self, tokens: usize) {
        self.left = (self.left + self.share * tokens as f64).min(MOST);
    }

    /// Notes a round that drafted `nodes` and brought `tokens`.
    pub fn verified(&mut self, nodes: usize, tokens: usize) {
        self.generated(tokens);
        self.left = (self.left - (nodes + 1).saturating_sub(tokens) as f64).max(-MOST);
    }

    /// Whether a round may be made.
    pub fn is_open(&self) -> bool {
        self.left > 0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_tokens_are_at_most_a_share_of_those_generated() {
        let mut budget = Budget::default();
        let (mut refused, mut generated) = (0, 0);
        for _ in 0..10_000 {
            if budget.is_open() {
                budget.verified(8, 2);
                (refused, generated) = (refused + 7, generated + 2);
            }
            budget.generated(3);
            generated += 3;
        }
        let share = f64::from(refused) / f64::from(generated);
        assert!((0.2..0.27).contains(&share), "{share}");
    }

    #[test]
    fn drafts_that_are_accepted_cost_nothing_and_a_share_of_zero_allows_nothing_beyond_what_was_saved() {
        let mut budget = Budget::default();
        (0..1_000).for_each(|_| budget.verified(8, 9));
        assert!(budget.is_open());
        budget.allow(0.0);
        (0..10).for_each(|_| budget.verified(8, 1));
        budget.generated(1_000_000);
        assert!(!budget.is_open());
    }
}
