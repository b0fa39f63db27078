//! The budget of draft tokens that an engine computes in vain because they are rejected.
//!
//! It applies only where the engine also computes requests of others, which gain nothing by them:
//! there the rejected tokens may be no more than a share of those that the engine generates. The
//! cost of our own requests for each other is part of the cost of a round. The more of it is used,
//! the surer a draft token must be, so that drafts get shorter before none may be sent at all.

/// Maximum number of rejected tokens that may be saved up.
const MAX: f64 = 64.0;
/// Maximum overdraft: rounds of many sessions may be in flight when it runs out.
const DEEPEST: f64 = 32.0;

/// Rejected draft tokens that one replica may still compute while requests of others are in flight,
/// shared by all its sessions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Budget {
    /// Rejected tokens allowed per generated one.
    share: f64,
    left: f64,
}

impl Default for Budget {
    fn default() -> Self {
        Self { share: 0.25, left: MAX }
    }
}

impl Budget {
    /// Sets the number of rejected tokens allowed per generated one.
    pub fn allow(&mut self, share: f64) {
        self.share = share;
    }

    /// Notes tokens that the engine generated: each adds the allowed share to the budget.
    pub fn generated(&mut self, tokens: f64) {
        self.left = (self.left + self.share * tokens).min(MAX);
    }

    /// Notes tokens that were computed and rejected while another request waited for the engine.
    pub fn refused(&mut self, tokens: usize) {
        self.left = (self.left - tokens as f64).max(-DEEPEST);
    }

    /// Price of a draft node in tokens, 0 to 1: the used share of what may be saved up. A node is
    /// sent if its survival probability is worth this as well as its time.
    pub fn price(&self) -> f64 {
        (1.0 - self.left / MAX).clamp(0.0, 1.0)
    }

    /// True if a session may begin to speculate: the budget is above 0.
    pub fn may_begin(&self) -> bool {
        self.left > 0.0
    }

    /// True if a session that speculates may go on: it may overdraw by up to 16 tokens, so that it
    /// need not leave at once.
    pub fn may_go_on(&self) -> bool {
        self.left > -DEEPEST / 2.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejected_tokens_are_at_most_a_share_of_those_generated() {
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
    fn accepted_drafts_cost_nothing_and_a_share_of_zero_allows_no_more_than_was_saved() {
        let mut budget = Budget::default();
        (0..1_000).for_each(|_| budget.generated(9.0));
        assert!(budget.may_begin() && budget.price() < 1e-9);
        budget.allow(0.0);
        (0..10).for_each(|_| budget.refused(8));
        budget.generated(1e6);
        assert!(!budget.may_begin() && (budget.price() - 1.0).abs() < 1e-9);
    }
}
