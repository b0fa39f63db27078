//! Chooses between speculation and plain decoding, and the draft length: the tokens of a round
//! against its time, at the value of a second.
//!
//! The choice does not depend on the sample: everything here is a function of the context and of
//! drafts made from it, and drafts are one-hot and verified by sample-and-match, so any cut of them
//! is exact.

use super::rounds::Value;

/// Expected tokens and cost of a round.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Quote {
    /// Draft nodes to verify.
    pub nodes: usize,
    /// Expected tokens, the bonus token included.
    pub tokens: f64,
    /// Expected seconds of the round.
    pub seconds: f64,
}

impl Quote {
    /// Seconds won over plain decoding, where a plain token takes `token` seconds; negative if
    /// lost.
    pub fn gain(self, token: f64) -> f64 {
        self.tokens * token - self.seconds
    }

    /// Tokens beyond those that the same seconds yield at `rate` tokens per second.
    pub fn surplus(self, rate: f64) -> f64 {
        self.tokens - rate * self.seconds
    }
}

/// The cut with the largest surplus of tokens over those that its seconds yield elsewhere, at
/// `rate` tokens per second: the rate reached in the long run. A cut for its best rate alone would
/// make certain drafts too short. `survival`: survival probabilities, 0 to 1, indexed by node, best
/// first; `seconds(n)`: seconds of a round with n nodes. Ties go to the shorter cut, which may have
/// no nodes.
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

/// True if `seconds` with speculation are faster by the share `margin` (0.10: 10 %) than the
/// `plain` seconds of plain decoding.
pub fn is_faster(plain: f64, seconds: f64, margin: f64) -> bool {
    plain >= seconds * (1.0 + margin)
}

/// True if `seconds` with speculation instead of `plain` seconds win the cost of the `switches`
/// there and back, seconds.
pub fn wins_switches(plain: f64, seconds: f64, switches: f64) -> bool {
    plain - seconds >= switches
}

/// Default of the predicted gain over plain decoding that is required to start, as a share.
pub const MARGIN: f64 = 0.10;
/// The part of it that is required to go on.
const TO_GO_ON: f64 = 0.5;

/// Inputs of the choice between speculation and plain decoding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outlook {
    /// Seconds per plain token.
    pub token: f64,
    /// Yield of speculation: rounds of the session and of its class.
    pub value: Value,
    /// Seconds of a round without draft nodes, which yields one token.
    pub empty: f64,
    /// Extra seconds of switching from plain decoding to speculation.
    pub switch_in: f64,
    /// Extra seconds of switching back.
    pub switch_out: f64,
    /// Expected number of tokens still to come.
    pub rest: f64,
}

impl Outlook {
    /// Tokens per second in the long run: those of speculation where it is faster than plain
    /// decoding.
    pub fn rate(&self) -> f64 {
        self.value.long_run_rate(self.token)
    }

    /// True if it pays to leave plain decoding for this round and those expected to follow it: they
    /// must be faster than plain decoding by the share `margin` (0.10: 10 %), and win the cost of
    /// switching there and back.
    pub fn begins(&self, quote: Quote, margin: f64) -> bool {
        if quote.nodes == 0 || quote.gain(self.token) <= 0.0 {
            return false;
        }
        let (tokens, seconds) = self.ahead(quote);
        let plain = tokens * self.token;
        is_faster(plain, seconds, margin) && wins_switches(plain, seconds, self.switch_in + self.switch_out)
    }

    /// Tokens and seconds of this round and of those that follow until speculation ends: with the
    /// output, or at the next gap that is better decoded plainly.
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

    /// True if gaps between drafts are passed faster by empty rounds than by plain decoding.
    fn stays_through_gaps(&self) -> bool {
        self.value.gap * (self.empty - self.token) <= self.switch_in + self.switch_out
    }

    /// True if a session that speculates goes on with this round. `margin`: as in [`Self::begins`],
    /// half of which is required; `gap`: consecutive empty rounds before this one.
    pub fn goes_on(&self, quote: Quote, margin: f64, gap: usize) -> bool {
        let (tokens, seconds) = (self.value.tokens + quote.tokens, self.value.seconds + quote.seconds);
        let rate = tokens / seconds.max(1e-9);
        // Leaving must be worth the switch, which is seldom so close to the end.
        let loss = self.rest * ((1.0 + TO_GO_ON * margin) / rate - self.token);
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

#[cfg(test)]
mod tests {
    use super::*;

    const VALUE: Value =
        Value { rounds: 10.0, tokens: 30.0, seconds: 1.5, drafted: (30.0, 1.5), between_gaps: 1e6, gap: 0.0 };
    /// A plain token takes 0.1 s; speculation is twice as fast.
    const OUTLOOK: Outlook =
        Outlook { token: 0.1, value: VALUE, empty: 0.13, switch_in: 0.1, switch_out: 0.1, rest: 100.0 };
    const ROUND: Quote = Quote { nodes: 4, tokens: 3.0, seconds: 0.15 };
    const NOTHING: Quote = Quote { nodes: 0, tokens: 1.0, seconds: 0.13 };

    #[test]
    fn the_cut_stops_where_a_node_costs_more_than_it_yields() {
        let quote = best_cut(&[0.9, 0.8, 0.05, 0.01], 1.0, |nodes| 1.0 + 0.1 * nodes as f64);
        assert_eq!(quote.nodes, 2);
        assert!((quote.surplus(1.0) - (2.7 - 1.2)).abs() < 1e-12);
        assert_eq!(best_cut(&[0.01], 1.0, |nodes| 1.0 + nodes as f64).nodes, 0);
    }

    #[test]
    fn certain_text_is_drafted_while_a_node_yields_more_than_its_seconds_yield_elsewhere() {
        let survival: Vec<f64> = (1..=32).map(|depth| 0.97_f64.powi(depth)).collect();
        let cost = |nodes: usize| 1.35 + 0.01 * nodes as f64;
        assert_eq!(best_cut(&survival, 10.0, cost).nodes, 32);
        assert!(best_cut(&survival, 60.0, cost).nodes < 20);
    }

    #[test]
    fn speculation_begins_where_the_stretch_ahead_wins_more_than_the_switches_cost() {
        assert!(OUTLOOK.begins(ROUND, 0.10));
        assert!(!Outlook { rest: 3.0, ..OUTLOOK }.begins(ROUND, 0.10), "too little is left");
        assert!(!OUTLOOK.begins(ROUND, 1.5), "the margin");
        assert!(!OUTLOOK.begins(NOTHING, 0.10), "nothing to begin with");
        let rare = Value { between_gaps: 1.0, gap: 20.0, ..VALUE };
        assert!(!Outlook { value: rare, ..OUTLOOK }.begins(ROUND, 0.10), "one round between long gaps");
    }

    #[test]
    fn short_gaps_are_passed_by_empty_rounds_and_long_ones_by_plain_decoding() {
        assert!(OUTLOOK.goes_on(ROUND, 0.10, 0));
        let short = Outlook { value: Value { gap: 3.0, ..VALUE }, ..OUTLOOK };
        assert!(short.goes_on(NOTHING, 0.10, 0));
        assert!(!short.goes_on(NOTHING, 0.10, 14), "that gap is longer than any should be");
        assert!(!Outlook { value: Value { gap: 30.0, ..VALUE }, ..OUTLOOK }.goes_on(NOTHING, 0.10, 0));
    }

    #[test]
    fn slow_speculation_is_left_unless_the_end_is_near() {
        let losing = Outlook { value: Value { seconds: 4.0, ..VALUE }, ..OUTLOOK };
        let weak = Quote { nodes: 1, tokens: 1.1, seconds: 0.14 };
        assert!(!losing.goes_on(weak, 0.10, 0));
        assert!(Outlook { rest: 2.0, ..losing }.goes_on(weak, 0.10, 0));
    }
}
