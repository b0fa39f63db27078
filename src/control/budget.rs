//! The budget of tokens that an engine computes for nothing: draft tokens that were refused.
//!
//! It binds only where the engine computes requests of others too, which gain nothing by them: there the tokens that are
//! refused may be no more than a share of those that the engine generates. What our own requests cost each other is a
//! part of the cost of a round.

/// Refused tokens that may be saved up.
const MOST: f64 = 64.0;
/// The deepest that it sinks: rounds of many sessions may be under way when it runs out.
const DEEPEST: f64 = 32.0;

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
    pub fn generated(&mut self, tokens: f64) {
        self.left = (self.left + self.share * tokens).min(MOST);
    }

    /// Notes tokens that were computed and refused while somebody waited for the engine.
    pub fn refused(&mut self, tokens: usize) {
        self.left = (self.left - tokens as f64).max(-DEEPEST);
    }

    /// Whether a session may begin to leap.
    pub fn may_begin(&self) -> bool {
        self.left > 0.0
    }

    /// Whether a session that leaps may go on: it may overdraw a little, so that it need not leave at once.
    pub fn may_go_on(&self) -> bool {
        self.left > -DEEPEST / 2.0
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
            if budget.may_begin() {
                budget.generated(2.0);
                budget.refused(7);
                (refused, generated) = (refused + 7, generated + 2);
            }
            budget.generated(3.0);
            generated += 3;
        }
        let share = f64::from(refused) / f64::from(generated);
        assert!((0.2..0.27).contains(&share), "{share}");
    }

    #[test]
    fn drafts_that_are_accepted_cost_nothing_and_a_share_of_zero_allows_nothing_beyond_what_was_saved() {
        let mut budget = Budget::default();
        (0..1_000).for_each(|_| budget.generated(9.0));
        assert!(budget.may_begin());
        budget.allow(0.0);
        (0..10).for_each(|_| budget.refused(8));
        budget.generated(1e6);
        assert!(!budget.may_begin());
    }
}
