//! The budget of an engine's time that is spent on rejected draft tokens.
//!
//! It applies only where the engine also computes requests of others, which gain nothing by them:
//! there rejected draft tokens may take no more than a share of the time. Tokens that are accepted
//! cost others nothing, for plain decoding would have computed as many. The more of the budget is
//! used, the surer a draft token must be, so that drafts get shorter before none may be sent at
//! all. What our requests cost each other is part of the cost of a round.

/// Share of the time that rejected draft tokens may take.
const SHARE: f64 = 0.02;
/// Seconds of which that much may be saved up.
const SAVED: f64 = 5.0;
/// Maximum that may be saved up, seconds.
const MAX: f64 = SHARE * SAVED;
/// Overdraft at which a session that speculates stops, seconds: it need not leave at once.
const OVERDRAFT: f64 = MAX / 4.0;
/// Maximum debt, seconds: a wrong measurement closes the budget for a minute.
const DEEPEST: f64 = SHARE * 60.0;

/// Seconds that an engine may still spend on rejected draft tokens while requests of others are in
/// flight, shared by all sessions of its replica.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Budget {
    remaining: f64,
}

impl Default for Budget {
    fn default() -> Self {
        Self { remaining: MAX }
    }
}

impl Budget {
    /// Notes the passing of time, seconds: the allowed share of it is added.
    pub fn passed(&mut self, seconds: f64) {
        self.remaining = (self.remaining + SHARE * seconds.max(0.0)).min(MAX);
    }

    /// Notes seconds that were spent on rejected tokens next to requests of others.
    pub fn wasted(&mut self, seconds: f64) {
        self.remaining = (self.remaining - seconds).max(-DEEPEST);
    }

    /// Price of a draft node in tokens, 0 to 1: the used share of what may be saved up. A node is
    /// sent if its survival probability is worth this as well as its time.
    pub fn price(&self) -> f64 {
        (1.0 - self.remaining / MAX).clamp(0.0, 1.0)
    }

    /// True if a session may begin to speculate: the budget is above 0.
    pub fn may_begin(&self) -> bool {
        self.remaining > 0.0
    }

    /// True if a session that speculates may go on.
    pub fn may_go_on(&self) -> bool {
        self.remaining > -OVERDRAFT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wasted_stays_within_its_share_of_the_time() {
        let mut budget = Budget::default();
        let (mut wasted, mut passed) = (0.0, 0.0);
        for each in [0.003, 0.4] {
            for _ in 0..100_000 {
                if budget.may_begin() {
                    budget.wasted(each);
                    wasted += each;
                }
                budget.passed(0.02);
                passed += 0.02;
            }
            let share = wasted / passed;
            assert!((0.019..0.021).contains(&share), "{share}");
        }
    }

    #[test]
    fn the_price_rises_with_what_is_used_and_a_session_may_overdraw() {
        let mut budget = Budget::default();
        budget.passed(1e9);
        assert!(budget.may_begin() && budget.price() < 1e-9);
        budget.wasted(MAX / 2.0);
        assert!((budget.price() - 0.5).abs() < 1e-9);
        budget.wasted(MAX / 2.0);
        assert!(!budget.may_begin() && budget.may_go_on() && (budget.price() - 1.0).abs() < 1e-9);
        budget.wasted(OVERDRAFT);
        assert!(!budget.may_go_on());
        budget.wasted(f64::INFINITY);
        budget.passed(61.0);
        assert!(budget.may_begin(), "after a minute at the latest");
    }
}
