//! Leap or ride, and how far: what a round brings against what it takes, at the value of a second.
//!
//! Deciding is free of the sample: everything here is a function of the past and of drafts made from it, and
//! drafts are one-hot and verified by sample-and-match, so any cut of them is exact.

use super::rounds::Value;
use crate::units::Dice;

/// What a round is expected to bring and to cost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Quote {
    /// Draft nodes to verify.
    pub nodes: usize,
    /// Expected tokens, the bonus included.
    pub tokens: f64,
    /// Expected seconds.
    pub seconds: f64,
}

impl Quote {
    /// Seconds won over riding, where a ridden token takes `token` seconds; negative if lost.
    pub fn gain(self, token: f64) -> f64 {
        self.tokens * token - self.seconds
    }

    /// Tokens beyond those that the same seconds bring at `rate` tokens per second.
    pub fn surplus(self, rate: f64) -> f64 {
        self.tokens - rate * self.seconds
    }
}

/// The cut with the most tokens beyond those that its seconds bring elsewhere, at `rate` tokens per second: the rate
/// that is reached in the long run. A cut for its own best rate would make sure drafts too short. `survival` is by node,
/// best first; `seconds(n)` is the cost of a round with n nodes. Ties go to the shorter.
pub fn best_cut(survival: &[f64], rate: f64, seconds: impl Fn(usize) -> f64) -> Quote {
    let mut best = Quote { nodes: 0, tokens: 1.0, seconds: seconds(0) };
    let mut tokens = 1.0;
    for (index, survival) in survival.iter().enumerate() {
        tokens += survival;
        let quote = Quote { nodes: index + 1, tokens, seconds: seconds(index + 1) };
        if quote.surplus(rate) > best.surplus(rate) + 1e-9 {
            best = quote;
        }
    }
    best
}

/// What leaping is judged by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outlook {
    /// Seconds of a ridden token.
    pub token: f64,
    /// What leaping has brought and would bring: rounds of the session and of its class.
    pub value: Value,
    /// Seconds of an empty round.
    pub empty: f64,
    /// Extra seconds of going from ride to leap, and of going back.
    pub switch_in: f64,
    /// The same of going back.
    pub switch_out: f64,
    /// Tokens that are expected to come yet.
    pub rest: f64,
}

impl Outlook {
    /// Tokens per second in the long run: those of leaping where it is faster than riding.
    pub fn rate(&self) -> f64 {
        self.value.rate().unwrap_or(0.0).max(1.0 / self.token)
    }

    /// Whether it pays to leave a ride for this round and those that may be expected to follow it: they must be faster
    /// than riding by `margin`, and win what it costs to switch there and back.
    pub fn begins(&self, quote: Quote, margin: f64) -> bool {
        if quote.nodes == 0 || quote.gain(self.token) <= 0.0 {
            return false;
        }
        let (tokens, seconds) = self.ahead(quote);
        tokens * self.token >= seconds * (1.0 + margin)
            && tokens * self.token - seconds >= self.switch_in + self.switch_out
    }

    /// Tokens and seconds of this round and of those that follow until leaping ends: with the output, or where the
    /// next gap is better ridden.
    fn ahead(&self, quote: Quote) -> (f64, f64) {
        let rest = (self.rest - quote.tokens).max(0.0);
        let (tokens, seconds) = if self.stays_through_gaps() {
            (self.value.tokens, self.value.seconds)
        } else {
            self.value.drafted
        };
        if tokens <= 0.0 || seconds <= 0.0 {
            return (quote.tokens, quote.seconds);
        }
        let per_round = (tokens / self.value.rounds.max(1e-6)).max(1.0);
        let most = if self.stays_through_gaps() {
            f64::MAX
        } else {
            (self.value.between_gaps - 1.0).max(0.0) * per_round
        };
        let more = rest.min(most);
        (quote.tokens + more, quote.seconds + more * seconds / tokens)
    }

    /// Whether gaps between drafts are better passed by empty rounds than by riding.
    fn stays_through_gaps(&self) -> bool {
        self.value.gap * (self.empty - self.token) <= self.switch_in + self.switch_out
    }

    /// Whether a session that leaps goes on with this round. `gap`: empty rounds in a row before it.
    pub fn goes_on(&self, quote: Quote, stay: f64, gap: usize) -> bool {
        let (tokens, seconds) = (self.value.tokens + quote.tokens, self.value.seconds + quote.seconds);
        let rate = tokens / seconds.max(1e-9);
        // Leaving must be worth the switch: close to the end it seldom is.
        let loss = self.rest * ((1.0 + stay) / rate - self.token);
        if loss > self.switch_out {
            return false;
        }
        if quote.nodes > 0 && quote.gain(self.token) >= 0.0 {
            return true;
        }
        let each = self.empty - self.token;
        let spent = gap as f64 * each;
        let switches = self.switch_in + self.switch_out;
        let near_end = self.rest * each <= self.switch_out;
        each <= 0.0 || near_end || (self.stays_through_gaps() && spent <= 2.0 * switches)
    }
}

/// In one round of twenty one node more or less, so that the cost table learns its neighbours.
pub fn dither(dice: &mut Dice, nodes: usize, most: usize) -> usize {
    if nodes == 0 || !dice.one_in(20) {
        return nodes;
    }
    if dice.one_in(2) { (nodes + 1).min(most) } else { (nodes - 1).max(1) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VALUE: Value =
        Value { rounds: 10.0, tokens: 30.0, seconds: 1.5, drafted: (30.0, 1.5), between_gaps: 1e6, gap: 0.0 };
    /// A ridden token takes 0.1 s; leaping is twice as fast.
    const OUTLOOK: Outlook =
        Outlook { token: 0.1, value: VALUE, empty: 0.13, switch_in: 0.1, switch_out: 0.1, rest: 100.0 };
    const ROUND: Quote = Quote { nodes: 4, tokens: 3.0, seconds: 0.15 };
    const NOTHING: Quote = Quote { nodes: 0, tokens: 1.0, seconds: 0.13 };

    #[test]
    fn the_cut_stops_where_a_node_costs_more_than_it_brings() {
        let quote = best_cut(&[0.9, 0.8, 0.05, 0.01], 1.0, |nodes| 1.0 + 0.1 * nodes as f64);
        assert_eq!(quote.nodes, 2);
        assert!((quote.surplus(1.0) - (2.7 - 1.2)).abs() < 1e-12);
        assert_eq!(best_cut(&[0.01], 1.0, |nodes| 1.0 + nodes as f64).nodes, 0);
    }

    #[test]
    fn sure_text_is_drafted_as_far_as_a_node_brings_more_than_its_seconds_bring_elsewhere() {
        let survival: Vec<f64> = (1..=32).map(|depth| 0.97_f64.powi(depth)).collect();
        let cost = |nodes: usize| 1.35 + 0.01 * nodes as f64;
        assert_eq!(best_cut(&survival, 10.0, cost).nodes, 32);
        assert!(best_cut(&survival, 60.0, cost).nodes < 20);
    }

    #[test]
    fn a_ride_is_left_where_the_stretch_ahead_wins_more_than_the_switches_cost() {
        assert!(OUTLOOK.begins(ROUND, 0.10));
        assert!(!Outlook { rest: 3.0, ..OUTLOOK }.begins(ROUND, 0.10), "too little is left");
        assert!(!OUTLOOK.begins(ROUND, 1.5), "the margin");
        assert!(!OUTLOOK.begins(NOTHING, 0.10), "nothing to begin with");
        let rare = Value { between_gaps: 1.0, gap: 20.0, ..VALUE };
        assert!(!Outlook { value: rare, ..OUTLOOK }.begins(ROUND, 0.10), "one round between long gaps");
    }

    #[test]
    fn short_gaps_are_passed_by_empty_rounds_and_long_ones_are_ridden() {
        assert!(OUTLOOK.goes_on(ROUND, 0.05, 0));
        let short = Outlook { value: Value { gap: 3.0, ..VALUE }, ..OUTLOOK };
        assert!(short.goes_on(NOTHING, 0.05, 0));
        assert!(!short.goes_on(NOTHING, 0.05, 14), "that gap is longer than any should be");
        assert!(!Outlook { value: Value { gap: 30.0, ..VALUE }, ..OUTLOOK }.goes_on(NOTHING, 0.05, 0));
    }

    #[test]
    fn leaping_that_brings_less_is_left_unless_the_end_is_near() {
        let losing = Outlook { value: Value { seconds: 4.0, ..VALUE }, ..OUTLOOK };
        let weak = Quote { nodes: 1, tokens: 1.1, seconds: 0.14 };
        assert!(!losing.goes_on(weak, 0.05, 0));
        assert!(Outlook { rest: 2.0, ..losing }.goes_on(weak, 0.05, 0));
    }

    #[test]
    fn dither_is_rare_and_stays_in_bounds() {
        let mut dice = Dice::new(7);
        let moved = (0..2_000).filter(|_| dither(&mut dice, 4, 4) != 4).count();
        assert!((20..110).contains(&moved), "{moved}");
        assert!((0..200).all(|_| (1..=3).contains(&dither(&mut dice, 1, 3))));
    }
}
