//! Leap or ride, and how far: expected tokens over expected seconds against the ride's own pace.
//!
//! Deciding is free of the sample: everything here is a function of the past and of drafts made from it, and
//! drafts are one-hot and verified by sample-and-match, so any cut of them is exact.

use super::Learnt;
use super::costs::Way;
use super::run::Run;
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
    /// Tokens per second.
    pub fn rate(self) -> f64 {
        self.tokens / self.seconds.max(1e-9)
    }
}

/// The cut with the best rate: `survival` is by node, best first; `seconds(n)` is the cost of a round with n
/// nodes. Ties go to the shorter.
pub fn best_cut(survival: &[f64], seconds: impl Fn(usize) -> f64) -> Quote {
    let mut best = Quote { nodes: 0, tokens: 1.0, seconds: seconds(0) };
    let mut tokens = 1.0;
    for (index, survival) in survival.iter().enumerate() {
        tokens += survival;
        let quote = Quote { nodes: index + 1, tokens, seconds: seconds(index + 1) };
        if quote.rate() > best.rate() * (1.0 + 1e-9) {
            best = quote;
        }
    }
    best
}

/// The terms on which leaping is judged.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    /// How drafts are verified.
    pub way: Way,
    /// The rate must beat riding by this share to begin.
    pub margin: f64,
    /// The rate must beat riding by this share to go on.
    pub stay: f64,
    /// Whether the session is leaping already.
    pub leaping: bool,
    /// Tokens that are expected to come yet.
    pub rest: f64,
}

/// Whether leaping pays: a quote judged together with the rounds before it. To begin, the stretch ahead must also
/// earn twice the cost of switching there and back.
pub fn pays(quote: Quote, run: &Run, learnt: &Learnt, terms: Terms) -> bool {
    let costs = &learnt.costs;
    let Some(token) = costs.ride_token() else { return false };
    let (tokens, seconds) = run.sums(terms.way, costs);
    let rate = (tokens + quote.tokens) / (seconds + quote.seconds).max(1e-9);
    if terms.leaping {
        // Leaving must be worth the switch: close to the end it seldom is.
        let loss = terms.rest * ((1.0 + terms.stay) / rate - token);
        return loss <= costs.switch_out();
    }
    if rate * token < 1.0 + terms.margin {
        return false;
    }
    let saving = terms.rest * (token - 1.0 / rate);
    let switching = 2.0 * (costs.switch_in() + costs.switch_out());
    let now = quote.nodes > 0 && quote.rate() * token >= 1.0;
    now && saving >= switching
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

    #[test]
    fn the_cut_stops_where_a_node_costs_more_than_it_brings() {
        let quote = best_cut(&[0.9, 0.8, 0.05, 0.01], |nodes| 1.0 + 0.1 * nodes as f64);
        assert_eq!(quote.nodes, 2);
        assert!((quote.rate() - 2.7 / 1.2).abs() < 1e-12);
        assert_eq!(best_cut(&[0.01], |nodes| 1.0 + nodes as f64).nodes, 0);
    }

    #[test]
    fn dither_is_rare_and_stays_in_bounds() {
        let mut dice = Dice::new(7);
        let moved = (0..2_000).filter(|_| dither(&mut dice, 4, 4) != 4).count();
        assert!((20..110).contains(&moved), "{moved}");
        assert!((0..200).all(|_| (1..=3).contains(&dither(&mut dice, 1, 3))));
    }
}
