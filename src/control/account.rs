//! The account of what leaping has cost a replica: the bound on what being wrong may cost.
//!
//! It is kept in ridden tokens. Every round adds the tokens that it brought and takes off those that riding would have
//! brought in the same time, switches between riding and leaping included. Riding refills it by a small share. Where it
//! is empty nobody leaps on this replica: so all that leaping can ever lose is what it began with, that share, and the
//! rounds that were under way when it ran out, whatever was believed.

use serde::{Deserialize, Serialize};

/// Ridden tokens that a replica may lose before anything was won.
const START: f64 = 10.0;
/// The most that wins can put by, ridden tokens.
const MOST: f64 = 40.0;
/// The deepest that it sinks: many sessions may be in a round when it runs out, and it must fill up again some day.
const LEAST: f64 = -40.0;
/// Share of the ridden tokens that refills it.
const REFILL: f64 = 0.007;
/// Uncertain choices are made only while there is at least this much of [`START`].
const CURIOUS: f64 = 0.4;

/// The account of one replica, shared by all its sessions.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Account {
    credit: f64,
}

impl Default for Account {
    fn default() -> Self {
        Self { credit: START }
    }
}

impl Account {
    /// Notes `tokens` that were ridden.
    pub fn rode(&mut self, tokens: usize) {
        self.credit = (self.credit + REFILL * tokens as f64).min(MOST.min(self.credit.max(START)));
    }

    /// Notes that leaping brought `tokens` in `seconds`, where a ridden token takes `pace` seconds. Returns the ridden
    /// tokens won, negative if lost.
    pub fn leapt(&mut self, tokens: f64, seconds: f64, pace: f64) -> f64 {
        let won = tokens - seconds / pace.max(1e-9);
        if won.is_finite() {
            self.credit = (self.credit + won).clamp(LEAST, MOST);
            return won;
        }
        0.0
    }

    /// Whether leaping may begin or go on.
    pub fn is_open(&self) -> bool {
        self.credit > 0.0
    }

    /// Whether there is enough for a choice that may well be wrong.
    pub fn allows_trials(&self) -> bool {
        self.credit >= START * CURIOUS
    }

    /// Ridden tokens left.
    pub fn credit(&self) -> f64 {
        self.credit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_is_believed_a_hundredth_is_the_most_that_can_be_lost() {
        let (mut account, mut lost, mut ridden) = (Account::default(), 0.0, 0.0);
        for _ in 0..100_000 {
            if account.is_open() {
                lost -= account.leapt(1.0, 0.4, 0.1);
            }
            account.rode(1);
            ridden += 1.0;
        }
        assert!(lost <= START + REFILL * ridden + 3.0, "{lost} of {ridden}");
    }

    #[test]
    fn wins_are_put_by_up_to_a_limit_and_pay_for_losses_later() {
        let mut account = Account::default();
        (0..100).for_each(|_| {
            account.leapt(5.0, 0.2, 0.1);
        });
        assert!((account.credit() - MOST).abs() < 1e-9 && account.allows_trials());
        (0..39).for_each(|_| {
            account.leapt(1.0, 0.2, 0.1);
        });
        assert!(account.is_open() && !account.allows_trials());
        account.leapt(1.0, 0.2, 0.1);
        assert!(!account.is_open());
    }

    #[test]
    fn riding_fills_it_up_to_where_it_began_and_takes_nothing_that_was_won() {
        let mut account = Account::default();
        account.leapt(0.0, 5.0, 0.1);
        assert!(!account.is_open());
        (0..100).for_each(|_| account.rode(1_000));
        assert!((account.credit() - START).abs() < 1e-9);
        account.leapt(20.0, 0.1, 0.1);
        account.rode(1);
        assert!((account.credit() - START - 19.0).abs() < 1e-9);
    }
}
