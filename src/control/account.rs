//! The account of what leaping has cost a replica: the bound on what being wrong may cost.
//!
//! It is kept in ridden tokens. Every round adds the tokens that it brought and takes off those that riding would have
//! brought in the same time, switches between riding and leaping included. Riding refills it by a small share. Where it
//! is empty nobody leaps on this replica: so what leaping loses is at most what it began with, that share, and the rounds
//! that were under way when it ran out (of which no more than 80 tokens are held against it), whatever was believed. A stall
//! that riding would have met as well is no loss of leaping's: of those no more than a few tokens are held against it.

use serde::{Deserialize, Serialize};

use super::Round;
use crate::units::Tick;

/// Ridden tokens that a replica may lose before anything was won.
const START: f64 = 10.0;
/// The most that wins can put by, ridden tokens.
const MOST: f64 = 40.0;
/// The deepest that it sinks: many sessions may be in a round when it runs out, and it must fill up again some day.
const LEAST: f64 = -80.0;
/// It refills half as fast for each time in a row that it ran out, so many times ...
const STRIKES_MOST: i32 = 4;
/// ... until it holds so much again.
const RECOVERED: f64 = 20.0;
/// Share of the ridden tokens that refills it.
const REFILL: f64 = 0.007;
/// Leaping begins only with at least so much, and with so much more for each session that leaps already: each needs a few
/// rounds to earn what its switch has cost.
const BEGIN: f64 = 4.0;
const BEGIN_EACH: f64 = 0.25;
/// Who leaps may go on down to here.
const GO_ON: f64 = -10.0;
/// A round counts at most as so many ridden tokens more than it brought: a stalled engine or network is not what leaping
/// costs.
const PAUSE_TOKENS: f64 = 24.0;
/// A round has stalled that took so many times what was expected of it, and so many ridden tokens more than it brought.
const STALL: f64 = 3.0;
const STALL_TOKENS: f64 = 8.0;
/// So many stalls count as no more than that: riding would have met them as well. One is forgotten with so many rounds
/// that did not stall.
const STALLS: f64 = 2.0;
const FORGOTTEN: f64 = 1.0 / 64.0;

/// The account of one replica and one size of its crowd, shared by all sessions: what leaping loses in a crowd says nothing
/// of what it brings to one alone.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Account {
    credit: f64,
    /// Times in a row that it ran out.
    strikes: i32,
    /// Stalls that are not forgotten yet.
    #[serde(default)]
    stalls: f64,
    /// When the last one ended.
    #[serde(skip)]
    stalled: Option<Tick>,
}

impl Default for Account {
    fn default() -> Self {
        Self { credit: START, strikes: 0, stalls: 0.0, stalled: None }
    }
}

impl Account {
    /// Notes `tokens` that were ridden.
    pub fn rode(&mut self, tokens: usize) {
        let refill = REFILL * tokens as f64 * 0.5_f64.powi(self.strikes);
        self.credit = (self.credit + refill).min(self.credit.max(START));
    }

    /// Notes that leaping brought `tokens` in `seconds`, where a ridden token takes `pace` seconds. Returns the ridden
    /// tokens won, negative if lost.
    pub fn leapt(&mut self, tokens: f64, seconds: f64, round: Round, now: Tick, pace: f64) -> f64 {
        let pace = pace.max(1e-9);
        let counted = self.counted(tokens, seconds, round.expected, now, pace);
        if counted >= seconds {
            self.stalls = (self.stalls - FORGOTTEN).max(0.0);
        }
        self.book(tokens - (counted + round.lost) / pace)
    }

    /// Notes that one of ours that rides got `tokens` in `seconds` while others of ours leapt, where a ridden token takes
    /// `pace` seconds: leaping has to win that as well. Returns the ridden tokens won, negative if lost.
    ///
    /// Its tokens forget no stall: a crowd rides through many of them in the time of one round.
    pub fn rode_beside(&mut self, tokens: f64, seconds: f64, now: Tick, pace: f64) -> f64 {
        let pace = pace.max(1e-9);
        let counted = self.counted(tokens, seconds, tokens * pace, now, pace);
        self.book(tokens - counted / pace)
    }

    /// Books `won` ridden tokens, negative if lost, and returns them.
    fn book(&mut self, won: f64) -> f64 {
        if won.is_finite() {
            let before = self.credit;
            self.credit = (self.credit + won).clamp(LEAST, MOST);
            if before > GO_ON && self.credit <= GO_ON {
                self.strikes = (self.strikes + 1).min(STRIKES_MOST);
            } else if self.credit >= RECOVERED {
                self.strikes = 0;
            }
            return won;
        }
        0.0
    }

    /// How much of the `seconds` of a round counts.
    fn counted(&mut self, tokens: f64, seconds: f64, expected: f64, now: Tick, pace: f64) -> f64 {
        let ordinary = (STALL * expected).max((tokens + STALL_TOKENS) * pace);
        if seconds <= ordinary {
            return seconds;
        }
        // All requests stall together: that is one stall, and was counted with the first of them.
        let same = self.stalled.is_some_and(|stalled| now.seconds_since(stalled) < seconds);
        self.stalled = Some(now);
        if !same {
            self.stalls = self.stalls.floor() + 1.0;
        }
        match (self.stalls <= STALLS, same) {
            (true, true) => expected.max(tokens * pace),
            (true, false) => ordinary,
            (false, _) => seconds.min(ordinary.max((tokens + PAUSE_TOKENS) * pace)),
        }
    }

    /// Whether a session may begin to leap, where `leaping` do.
    pub fn may_begin(&self, leaping: usize) -> bool {
        self.credit >= (BEGIN + BEGIN_EACH * leaping as f64).min(MOST)
    }

    /// Whether a session that leaps may go on.
    pub fn may_go_on(&self) -> bool {
        self.credit > GO_ON
    }

    /// Ridden tokens left.
    pub fn credit(&self) -> f64 {
        self.credit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rounds that take as long as was expected, where a ridden token takes a tenth of a second.
    fn leapt(account: &mut Account, tokens: f64, seconds: f64) -> f64 {
        account.leapt(tokens, seconds, Round { expected: seconds, lost: 0.0 }, Tick(0), 0.1)
    }

    #[test]
    fn whatever_is_believed_a_hundredth_is_the_most_that_can_be_lost() {
        let (mut account, mut lost, mut ridden, mut leaping) = (Account::default(), 0.0, 0.0, false);
        for _ in 0..100_000 {
            leaping = if leaping { account.may_go_on() } else { account.may_begin(0) };
            if leaping {
                lost -= leapt(&mut account, 1.0, 0.4);
            }
            account.rode(1);
            ridden += 1.0;
        }
        assert!(lost <= START - GO_ON + REFILL * ridden + 3.0, "{lost} of {ridden}");
    }

    #[test]
    fn wins_are_put_by_up_to_a_limit_and_pay_for_losses_later() {
        let mut account = Account::default();
        (0..100).for_each(|_| {
            leapt(&mut account, 5.0, 0.2);
        });
        assert!((account.credit() - MOST).abs() < 1e-9 && account.may_begin(100));
        (0..39).for_each(|_| {
            leapt(&mut account, 1.0, 0.2);
        });
        assert!(account.may_go_on() && !account.may_begin(0));
        (0..12).for_each(|_| {
            leapt(&mut account, 1.0, 0.2);
        });
        assert!(!account.may_go_on());
    }

    #[test]
    fn who_loses_again_and_again_is_tried_more_and_more_rarely_and_a_win_ends_that() {
        let mut account = Account::default();
        let rides = |account: &mut Account| {
            {
                let seconds = 0.1 * (account.credit() - GO_ON);
                leapt(account, 0.0, seconds)
            };
            let ridden = (1..100_000).find(|_| {
                account.rode(1);
                account.may_begin(0)
            });
            ridden.expect("some day")
        };
        let (first, second) = (rides(&mut account), rides(&mut account));
        assert!((1.9..2.1).contains(&(f64::from(second) / f64::from(first))), "{first} {second}");
        leapt(&mut account, 40.0, 0.1);
        assert_eq!(account.strikes, 0);
    }

    #[test]
    fn riding_fills_it_up_to_where_it_began_and_takes_nothing_that_was_won() {
        let mut account = Account::default();
        leapt(&mut account, 0.0, 5.0);
        assert!(!account.may_go_on());
        (0..1_000).for_each(|_| account.rode(1_000));
        assert!((account.credit() - START).abs() < 1e-9);
        leapt(&mut account, 20.0, 0.1);
        account.rode(1);
        assert!((account.credit() - START - 19.0).abs() < 1e-9);
    }

    #[test]
    fn a_stall_now_and_then_counts_little_and_one_after_the_other_counts_in_full() {
        let mut now = 0;
        let mut stall = |account: &mut Account, after: u64| {
            now += after;
            account.leapt(1.0, 9.0, Round { expected: 0.2, lost: 0.0 }, Tick(now * 1_000_000), 0.1).round()
                as i64
        };
        let mut account = Account::default();
        for _ in 0..100 {
            assert_eq!(stall(&mut account, 10), -8);
            assert_eq!(stall(&mut account, 0), -1, "another request met the same one");
            (0..64).for_each(|_| {
                leapt(&mut account, 2.0, 0.2);
            });
        }
        let each: Vec<i64> = (0..4).map(|_| stall(&mut account, 10)).collect();
        assert_eq!(each, [-8, -8, -24, -24]);
    }
}
