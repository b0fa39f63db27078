//! The regret budget of a replica: the bound on the cost of wrong decisions for speculation.
//!
//! Its unit is the plain token. Every round adds its tokens and subtracts those that plain decoding
//! would have yielded in the same time, including the switches between the two. Plain tokens refill
//! it by a small share. While it is empty no request is speculated on at this replica, so the loss
//! of speculation is at most the initial budget, that share, and the rounds in flight when it ran
//! out (of which no more than 80 tokens are counted), whatever the estimates were. A stall that
//! plain decoding would have met as well is no loss of speculation: no more than a few tokens of it
//! are counted.

use serde::{Deserialize, Serialize};

use super::Round;
use crate::units::Tick;

/// Initial budget in plain tokens, which may be lost before any win.
const START: f64 = 10.0;
/// Maximum budget that wins can save up, plain tokens.
const MAX: f64 = 40.0;
/// Minimum budget: many sessions may be in a round when it runs out, and it must be possible to
/// refill it.
const MIN: f64 = -80.0;
/// For each time in a row that it ran out, up to this number, it refills half as fast ...
const MAX_STRIKES: i32 = 4;
/// ... until it reaches this budget again.
const RECOVERED: f64 = 20.0;
/// Share of the plain tokens that refills it.
const REFILL: f64 = 0.007;
/// Minimum budget for starting speculation, and the increment for each session that speculates
/// already: each needs a few rounds to win back the cost of its switch.
const BEGIN: f64 = 4.0;
const BEGIN_EACH: f64 = 0.25;
/// Sessions that speculate may go on down to this budget.
const GO_ON: f64 = -10.0;
/// Maximum duration counted for a round, in plain tokens beyond those that it yielded: a stalled
/// engine or network is no cost of speculation.
const PAUSE_TOKENS: f64 = 24.0;
/// A round has stalled if it took this multiple of its expected time, and this many plain tokens
/// more than it yielded.
const STALL: f64 = 3.0;
const STALL_TOKENS: f64 = 8.0;
/// This many stalls are counted at the threshold only: plain decoding would have met them as well.
/// A round that does not stall forgets this share of a stall.
const STALLS: f64 = 2.0;
const FORGOTTEN: f64 = 1.0 / 64.0;

/// The regret budget of one replica and one concurrency bucket, plain tokens, shared by all
/// sessions: losses at high concurrency do not apply to a single request.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RegretBudget {
    remaining: f64,
    /// Times in a row that it ran out.
    strikes: i32,
    /// Stalls that are not forgotten yet.
    #[serde(default)]
    stalls: f64,
    /// End of the last stall.
    #[serde(skip)]
    stalled: Option<Tick>,
}

impl Default for RegretBudget {
    fn default() -> Self {
        Self { remaining: START, strikes: 0, stalls: 0.0, stalled: None }
    }
}

impl RegretBudget {
    /// Notes `tokens` plain tokens, a small share of which refills the budget; half of it for each
    /// time in a row that it ran out.
    pub fn note_plain(&mut self, tokens: usize) {
        let refill = REFILL * tokens as f64 * 0.5_f64.powi(self.strikes);
        self.remaining = (self.remaining + refill).min(self.remaining.max(START));
    }

    /// Notes a round that yielded `tokens` in `seconds`, where a plain token takes `pace` seconds.
    /// Returns the plain tokens won, negative if lost.
    pub fn note_round(&mut self, tokens: f64, seconds: f64, round: Round, now: Tick, pace: f64) -> f64 {
        let pace = pace.max(1e-9);
        let counted = self.counted(tokens, seconds, round.expected, now, pace);
        if counted >= seconds {
            self.stalls = (self.stalls - FORGOTTEN).max(0.0);
        }
        self.book(tokens - (counted + round.lost) / pace)
    }

    /// Notes that a plain request of ours got `tokens` in `seconds` while others of ours were
    /// speculated on, where a plain token takes `pace` seconds: speculation has to win back that
    /// delay too. Returns the plain tokens won, negative if lost.
    ///
    /// Its tokens forget no stall: many concurrent plain requests pass many tokens in the time of
    /// one round.
    pub fn plain_concurrent(&mut self, tokens: f64, seconds: f64, now: Tick, pace: f64) -> f64 {
        let pace = pace.max(1e-9);
        let counted = self.counted(tokens, seconds, tokens * pace, now, pace);
        self.book(tokens - counted / pace)
    }

    /// Books `won` plain tokens, negative if lost, and returns them.
    fn book(&mut self, won: f64) -> f64 {
        if won.is_finite() {
            let before = self.remaining;
            self.remaining = (self.remaining + won).clamp(MIN, MAX);
            if before > GO_ON && self.remaining <= GO_ON {
                self.strikes = (self.strikes + 1).min(MAX_STRIKES);
            } else if self.remaining >= RECOVERED {
                self.strikes = 0;
            }
            return won;
        }
        0.0
    }

    /// The part of the `seconds` of a round that counts.
    fn counted(&mut self, tokens: f64, seconds: f64, expected: f64, now: Tick, pace: f64) -> f64 {
        let ordinary = (STALL * expected).max((tokens + STALL_TOKENS) * pace);
        if seconds <= ordinary {
            return seconds;
        }
        // All requests stall together: that is one stall, counted with the first of them.
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

    /// True if a session may begin to speculate, where `speculating` others do.
    pub fn may_begin(&self, speculating: usize) -> bool {
        self.remaining >= (BEGIN + BEGIN_EACH * speculating as f64).min(MAX)
    }

    /// True if a session that speculates may go on: it may overdraw by up to 10 plain tokens.
    pub fn may_go_on(&self) -> bool {
        self.remaining > GO_ON
    }

    /// Budget left, plain tokens; negative if overdrawn.
    pub fn remaining(&self) -> f64 {
        self.remaining
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rounds that take as long as expected, where a plain token takes a tenth of a second.
    fn note_round(regret_budget: &mut RegretBudget, tokens: f64, seconds: f64) -> f64 {
        regret_budget.note_round(tokens, seconds, Round { expected: seconds, lost: 0.0 }, Tick(0), 0.1)
    }

    #[test]
    fn at_most_a_hundredth_is_lost_whatever_is_estimated() {
        let (mut regret_budget, mut lost, mut plain, mut speculating) =
            (RegretBudget::default(), 0.0, 0.0, false);
        for _ in 0..100_000 {
            speculating = if speculating { regret_budget.may_go_on() } else { regret_budget.may_begin(0) };
            if speculating {
                lost -= note_round(&mut regret_budget, 1.0, 0.4);
            }
            regret_budget.note_plain(1);
            plain += 1.0;
        }
        assert!(lost <= START - GO_ON + REFILL * plain + 3.0, "{lost} of {plain}");
    }

    #[test]
    fn wins_are_saved_up_to_a_limit_and_pay_for_losses_later() {
        let mut regret_budget = RegretBudget::default();
        (0..100).for_each(|_| {
            note_round(&mut regret_budget, 5.0, 0.2);
        });
        assert!((regret_budget.remaining() - MAX).abs() < 1e-9 && regret_budget.may_begin(100));
        (0..39).for_each(|_| {
            note_round(&mut regret_budget, 1.0, 0.2);
        });
        assert!(regret_budget.may_go_on() && !regret_budget.may_begin(0));
        (0..12).for_each(|_| {
            note_round(&mut regret_budget, 1.0, 0.2);
        });
        assert!(!regret_budget.may_go_on());
    }

    #[test]
    fn repeated_losses_make_retries_rarer_and_a_win_ends_that() {
        let mut regret_budget = RegretBudget::default();
        let plain_tokens = |regret_budget: &mut RegretBudget| {
            {
                let seconds = 0.1 * (regret_budget.remaining() - GO_ON);
                note_round(regret_budget, 0.0, seconds)
            };
            let plain = (1..100_000).find(|_| {
                regret_budget.note_plain(1);
                regret_budget.may_begin(0)
            });
            plain.expect("some day")
        };
        let (first, second) = (plain_tokens(&mut regret_budget), plain_tokens(&mut regret_budget));
        assert!((1.9..2.1).contains(&(f64::from(second) / f64::from(first))), "{first} {second}");
        note_round(&mut regret_budget, 40.0, 0.1);
        assert_eq!(regret_budget.strikes, 0);
    }

    #[test]
    fn plain_tokens_refill_it_to_the_start_and_take_nothing_that_was_won() {
        let mut regret_budget = RegretBudget::default();
        note_round(&mut regret_budget, 0.0, 5.0);
        assert!(!regret_budget.may_go_on());
        (0..1_000).for_each(|_| regret_budget.note_plain(1_000));
        assert!((regret_budget.remaining() - START).abs() < 1e-9);
        note_round(&mut regret_budget, 20.0, 0.1);
        regret_budget.note_plain(1);
        assert!((regret_budget.remaining() - START - 19.0).abs() < 1e-9);
    }

    #[test]
    fn rare_stalls_count_little_and_frequent_ones_in_full() {
        let mut now = 0;
        let mut stall = |regret_budget: &mut RegretBudget, after: u64| {
            now += after;
            regret_budget
                .note_round(1.0, 9.0, Round { expected: 0.2, lost: 0.0 }, Tick(now * 1_000_000), 0.1)
                .round() as i64
        };
        let mut regret_budget = RegretBudget::default();
        for _ in 0..100 {
            assert_eq!(stall(&mut regret_budget, 10), -8);
            assert_eq!(stall(&mut regret_budget, 0), -1, "another request met the same one");
            (0..64).for_each(|_| {
                note_round(&mut regret_budget, 2.0, 0.2);
            });
        }
        let each: Vec<i64> = (0..4).map(|_| stall(&mut regret_budget, 10)).collect();
        assert_eq!(each, [-8, -8, -24, -24]);
    }
}
