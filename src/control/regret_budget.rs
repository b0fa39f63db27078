//! The regret budget of a replica: the limit of the cost of wrong decisions for speculation.
//!
//! Its unit is the second of every request: what one of n requests in flight loses counts as an nth
//! of it. So the budget of requests that speculate together is that of each of them, and what they
//! win together, though none would alone, is seen: returns increase with concurrency, because a
//! verify request among plain ones waits for their step. Every round adds the time of its tokens in
//! plain decoding and subtracts the round's, switches included; plain requests next to one that is
//! speculated on do the same. It is refilled by a small share of the time. While it is empty no
//! request is speculated on, so the loss of speculation is at most its capacity, that share, and
//! the rounds in flight when it ran out, whatever the estimates were. A stall counts as at most a
//! quarter of the capacity more.

use serde::{Deserialize, Serialize};

/// Minimum capacity, plain tokens.
pub const TOKENS: f64 = 10.0;
/// Capacity in losses of a trial: the switches to speculation and back, and a round that yields one
/// token. Where round trips are long that is more than [`TOKENS`].
const TRIALS: f64 = 2.0;
/// Maximum that wins save up, in capacities: texts that repeat themselves now and then win much at
/// once and lose in between.
const SAVED: f64 = 6.0;
/// Maximum debt, in capacities: losses of the rounds in flight when it ran out. A longer stall
/// would have met plain decoding as well.
pub const OVERDRAFT: f64 = 0.25;
/// Share of the time that refills it.
pub const REFILL: f64 = 0.01;

/// The regret budget of one replica and one concurrency bucket, seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RegretBudget {
    /// Seconds lost and not refilled; negative where wins were saved up.
    #[serde(default)]
    used: f64,
}

impl RegretBudget {
    /// Capacity, where a plain token takes `token` seconds and a trial may lose `trial` seconds.
    pub fn capacity(token: f64, trial: f64) -> f64 {
        (TOKENS * token).max(TRIALS * trial)
    }

    /// Notes that `seconds` have passed.
    pub fn passed(&mut self, seconds: f64, capacity: f64) {
        let refilled = self.used - REFILL * seconds.max(0.0);
        self.set(refilled.max(self.used.min(0.0)), capacity);
    }

    /// Books `won` seconds, negative if lost.
    pub fn book(&mut self, won: f64, capacity: f64) {
        self.set(self.used - won, capacity);
    }

    fn set(&mut self, used: f64, capacity: f64) {
        if used.is_finite() && capacity.is_finite() {
            // What is owed stays owed where the capacity has shrunk.
            let most = ((1.0 + OVERDRAFT) * capacity).max(self.used);
            self.used = used.clamp(-SAVED * capacity, most);
        }
    }

    /// True if a session may begin to speculate: the loss of a trial remains.
    pub fn may_begin(&self, capacity: f64) -> bool {
        self.used <= capacity * (1.0 - 1.0 / TRIALS)
    }

    /// True if a session that speculates may go on.
    pub fn may_go_on(&self, capacity: f64) -> bool {
        self.used < capacity
    }

    /// Remaining seconds.
    pub fn remaining(&self, capacity: f64) -> f64 {
        (capacity - self.used).max(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Plain tokens of a tenth of a second; a trial loses less than five of them.
    const CAPACITY: f64 = 1.0;

    #[test]
    fn the_capacity_covers_ten_tokens_or_two_trials() {
        assert!((RegretBudget::capacity(0.1, 0.2) - 1.0).abs() < 1e-9);
        assert!((RegretBudget::capacity(0.015, 0.24) - 0.48).abs() < 1e-9);
    }

    #[test]
    fn at_most_a_hundredth_of_the_time_is_lost_whatever_is_estimated() {
        let (mut budget, mut lost, mut time, mut speculating) = (RegretBudget::default(), 0.0, 0.0, false);
        for _ in 0..100_000 {
            speculating = if speculating { budget.may_go_on(CAPACITY) } else { budget.may_begin(CAPACITY) };
            let seconds = if speculating { 0.4 } else { 0.1 };
            if speculating {
                budget.book(0.1 - seconds, CAPACITY);
                lost += seconds - 0.1;
            }
            budget.passed(seconds, CAPACITY);
            time += seconds;
        }
        assert!(lost <= CAPACITY + REFILL * time + 0.3, "{lost} of {time}");
        assert!(lost > 0.9 * REFILL * time, "it is tried again: {lost} of {time}");
    }

    #[test]
    fn wins_are_saved_up_to_a_limit_and_pay_for_losses_later() {
        let mut budget = RegretBudget::default();
        (0..100).for_each(|_| budget.book(0.3, CAPACITY));
        assert!((budget.remaining(CAPACITY) - (1.0 + SAVED) * CAPACITY).abs() < 1e-9);
        budget.passed(10.0, CAPACITY);
        assert!(
            (budget.remaining(CAPACITY) - (1.0 + SAVED) * CAPACITY).abs() < 1e-9,
            "time adds nothing to them"
        );
        budget.book(-SAVED - 0.6, CAPACITY);
        assert!(budget.may_go_on(CAPACITY) && !budget.may_begin(CAPACITY));
        budget.book(-9.0, CAPACITY);
        assert!(!budget.may_go_on(CAPACITY));
        budget.passed(70.0, CAPACITY);
        assert!(!budget.may_begin(CAPACITY) && budget.may_go_on(CAPACITY));
        budget.passed(6.0, CAPACITY);
        assert!(budget.may_begin(CAPACITY), "of a long stall no more than the overdraft is owed");
        budget.book(f64::NAN, CAPACITY);
        assert!(budget.may_begin(CAPACITY));
    }

    #[test]
    fn what_is_owed_stays_owed_where_the_capacity_shrinks() {
        let mut budget = RegretBudget::default();
        budget.book(-20.0, 20.0);
        budget.passed(100.0, CAPACITY);
        assert!((budget.used - 19.0).abs() < 1e-9 && !budget.may_go_on(CAPACITY), "{budget:?}");
        budget.book(-20.0, CAPACITY);
        assert!(
            (budget.used - 19.0).abs() < 1e-9,
            "no more than the overdraft is owed beyond it: {budget:?}"
        );
    }
}
