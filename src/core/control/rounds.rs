//! Rounds, real and virtual, of a class of requests or of one: the yield of speculation over a
//! stretch.
//!
//! Rounds are stored as the nodes they computed and the tokens they yielded, without durations:
//! a virtual round took no time, and a cost that is measured later revalues the rounds before it.
//! Positions without a draft are distinguished from rounds with one: a session may pass them with
//! empty rounds, or decode plainly until there is a draft, whichever is less expensive.

use serde::{Deserialize, Serialize};

use std::collections::BTreeMap;

use super::shared::{self, SharedRounds};

/// Maximum draft nodes with a separate entry; larger drafts share the last.
const NODES: usize = 32;

/// Decayed sums over rounds with the same number of nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Sum {
    rounds: f64,
    tokens: f64,
    /// Tokens that the model drafter computed for them.
    modelled: f64,
}

/// Decayed statistics of rounds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rounds {
    /// By number of nodes. The first stands for positions without a draft: one token each.
    sums: Vec<Sum>,
    /// Number of gaps, which are stretches of positions without a draft.
    gaps: f64,
    /// The last round was such a position.
    in_gap: bool,
    /// Factor for the old sums when one more round is added.
    keep: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Round {
    /// Nodes verified; without any it is a position without a draft.
    pub nodes: usize,
    /// Tokens that the model drafter computed for it.
    pub modelled: usize,
    /// Tokens that it added to the context.
    pub tokens: usize,
    /// Number of rounds like it that it stands for: 1, or more where it is the only one seen of a
    /// stretch of text.
    pub weight: f64,
}

impl Round {
    /// A round that stands for itself.
    pub const fn new(nodes: usize, modelled: usize, tokens: usize) -> Self {
        Self { nodes, modelled, tokens, weight: 1.0 }
    }
}

/// Prices by which rounds are valued, in seconds.
pub struct Prices<'a> {
    /// Price of a round with this many nodes, for which the model drafter computed this many
    /// tokens.
    pub round: &'a dyn Fn(usize, f64) -> f64,
    pub token: f64,
    /// Price of switching from speculation to plain decoding and back.
    pub switches: f64,
}

/// Yield of rounds at given prices, decayed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Value {
    /// Rounds and positions without a draft, decayed.
    pub rounds: f64,
    pub tokens: f64,
    /// Seconds that they would take.
    pub seconds: f64,
    /// Tokens of rounds with a draft, and their seconds.
    pub drafted: (f64, f64),
    /// Mean number of rounds with a draft between two gaps; `f64::MAX` without a gap.
    pub between_gaps: f64,
    /// Mean length of a gap, tokens; 0 without a gap.
    pub gap: f64,
}

impl Rounds {
    /// Statistics that decay over about `rounds` rounds.
    pub fn remembering(rounds: f64) -> Self {
        Self {
            sums: vec![Sum::default(); NODES + 1],
            gaps: 0.0,
            in_gap: false,
            keep: 1.0 - 1.0 / rounds.max(2.0),
        }
    }

    pub fn push(&mut self, round: Round) {
        let Round { nodes, modelled, tokens, weight } = round;
        let keep = self.keep.powf(weight);
        for sum in &mut self.sums {
            sum.rounds *= keep;
            sum.tokens *= keep;
            sum.modelled *= keep;
        }
        self.gaps *= keep;
        if nodes == 0 && !self.in_gap {
            self.gaps += 1.0;
        }
        self.in_gap = nodes == 0;
        if let Some(sum) = self.sums.get_mut(nodes.min(NODES)) {
            sum.rounds += weight;
            sum.tokens += weight * tokens as f64;
            sum.modelled += weight * modelled as f64;
        }
    }

    pub(super) fn shared(&self) -> SharedRounds {
        let mut shared = SharedRounds { gaps: self.gaps, ..SharedRounds::default() };
        for (nodes, sum) in self.sums.iter().enumerate().filter(|(_, sum)| sum.rounds > 1e-3) {
            shared.tokens.insert(nodes, shared::Sum(sum.tokens, sum.rounds));
            if sum.modelled > 0.0 {
                shared.modelled.insert(nodes, shared::Sum(sum.modelled, sum.rounds));
            }
        }
        shared
    }

    pub(super) fn lent(shared: &SharedRounds) -> Self {
        let mut lent = Self { gaps: shared.gaps, ..Self::remembering(f64::MAX) };
        for (nodes, sum) in lent.sums.iter_mut().enumerate() {
            let of = |sums: &BTreeMap<usize, shared::Sum>| sums.get(&nodes).copied().unwrap_or_default();
            let (tokens, modelled) = (of(&shared.tokens), of(&shared.modelled));
            (sum.tokens, sum.rounds, sum.modelled) = (tokens.0, tokens.1, modelled.0);
        }
        lent
    }

    /// These rounds and `lent`, which counts for at most as many as are wanting to `memory`.
    #[must_use]
    pub(super) fn filled(&self, lent: &Self, memory: f64) -> Self {
        let share = ((memory - self.count()).max(0.0) / lent.count().max(1e-9)).min(1.0);
        let mut filled = self.clone();
        filled.gaps += share * lent.gaps;
        for (sum, lent) in filled.sums.iter_mut().zip(&lent.sums) {
            sum.rounds += share * lent.rounds;
            sum.tokens += share * lent.tokens;
            sum.modelled += share * lent.modelled;
        }
        filled
    }

    /// Number of rounds, decayed.
    pub fn count(&self) -> f64 {
        self.sums.iter().map(|sum| sum.rounds).sum()
    }

    /// The value of the rounds at `prices`. Gaps are charged as empty rounds or as plain decoding
    /// with its switches, whichever is less expensive.
    pub fn value(&self, prices: &Prices<'_>) -> Value {
        let mut value = Value::default();
        let mut drafted = 0.0;
        for (nodes, sum) in self.sums.iter().enumerate().skip(1).filter(|(_, sum)| sum.rounds > 1e-6) {
            drafted += sum.rounds;
            value.drafted.0 += sum.tokens;
            value.drafted.1 += sum.rounds * (prices.round)(nodes, sum.modelled / sum.rounds);
        }
        let (empty, modelled) = self.sums.first().map_or((0.0, 0.0), |sum| (sum.rounds, sum.modelled));
        let round = (prices.round)(0, 0.0);
        // What the model drafted for them in vain was waited for before it was known to be.
        let in_vain = empty * ((prices.round)(0, modelled / empty.max(1e-9)) - round).max(0.0);
        let staying = empty * (round - prices.token).max(0.0);
        let leaving = self.gaps * prices.switches;
        value.rounds = drafted + empty;
        value.tokens = value.drafted.0 + empty;
        value.seconds = value.drafted.1 + empty * prices.token + in_vain + staying.min(leaving);
        value.between_gaps = if self.gaps > 1e-6 { drafted / self.gaps } else { f64::MAX };
        value.gap = if self.gaps > 1e-6 { empty / self.gaps } else { 0.0 };
        value
    }
}

impl Value {
    /// Tokens per second; `None` without rounds.
    pub fn rate(&self) -> Option<f64> {
        (self.rounds > 1e-6).then(|| self.tokens / self.seconds.max(1e-9))
    }

    /// Tokens per second in the long run where a plain token takes `token` seconds: at least those
    /// of plain decoding.
    pub fn long_run_rate(&self, token: f64) -> f64 {
        self.rate().unwrap_or(0.0).max(1.0 / token)
    }

    /// This value combined with another one, which counts for at most `weight` rounds.
    #[must_use]
    pub fn with(&self, other: &Self, weight: f64) -> Self {
        let share = if other.rounds > 1e-6 { (weight / other.rounds).min(1.0) } else { 0.0 };
        let add = |ours: f64, other: f64| ours + share * other;
        let mean = |ours: f64, theirs: f64| {
            let (ours, theirs) = (ours.min(1e6), theirs.min(1e6));
            let theirs_weigh = share * other.rounds;
            let all = self.rounds + theirs_weigh;
            if all > 1e-6 { (ours * self.rounds + theirs * theirs_weigh) / all } else { ours }
        };
        Self {
            rounds: add(self.rounds, other.rounds),
            tokens: add(self.tokens, other.tokens),
            seconds: add(self.seconds, other.seconds),
            drafted: (add(self.drafted.0, other.drafted.0), add(self.drafted.1, other.drafted.1)),
            between_gaps: mean(self.between_gaps, other.between_gaps),
            gap: mean(self.gap, other.gap),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prices(round: &dyn Fn(usize, f64) -> f64, switches: f64) -> Prices<'_> {
        Prices { round, token: 0.1, switches }
    }

    #[test]
    fn rounds_are_valued_at_the_given_prices() {
        let mut rounds = Rounds::remembering(1e9);
        rounds.push(Round::new(4, 4, 5));
        rounds.push(Round::new(4, 0, 3));
        let inexpensive = rounds.value(&prices(&|_, modelled| 0.1 + 0.001 * modelled, 0.2));
        assert!(
            (inexpensive.tokens - 8.0).abs() < 1e-6 && (inexpensive.seconds - 0.204).abs() < 1e-6,
            "{inexpensive:?}"
        );
        let expensive = rounds.value(&prices(&|nodes, modelled| 0.1 * nodes as f64 + 0.001 * modelled, 0.2));
        assert!((expensive.rate().unwrap() - 8.0 / 0.804).abs() < 1e-6, "{expensive:?}");
    }

    #[test]
    fn positions_without_a_draft_cost_the_minimum_of_staying_and_leaving() {
        let mut rounds = Rounds::remembering(1e9);
        for _ in 0..2 {
            rounds.push(Round::new(4, 0, 5));
            (0..10).for_each(|_| rounds.push(Round::new(0, 0, 1)));
        }
        let value = rounds.value(&prices(&|_, _| 0.15, 0.2));
        assert!((value.between_gaps - 1.0).abs() < 1e-6 && (value.gap - 10.0).abs() < 1e-6, "{value:?}");
        assert!((value.seconds - (0.3 + 2.0 + 0.4)).abs() < 1e-6, "leaving twice costs less: {value:?}");
        let staying = rounds.value(&prices(&|_, _| 0.101, 0.2));
        assert!((staying.seconds - (0.202 + 2.0 + 0.02)).abs() < 1e-6, "{staying:?}");
    }

    #[test]
    fn a_round_seen_of_a_stretch_counts_as_often_as_the_stretch_has_such_rounds() {
        // Copies and other text alternate every 30 tokens; of each stretch one round is seen.
        let (mut seen, mut all) = (Rounds::remembering(1e9), Rounds::remembering(1e9));
        for tokens in [5, 1].repeat(20) {
            let round = Round::new(4, 0, tokens);
            seen.push(Round { weight: 30.0 / tokens as f64, ..round });
            (0..30 / tokens).for_each(|_| all.push(round));
        }
        let flat = |_: usize, _: f64| 0.1;
        let (seen, all) = (seen.value(&prices(&flat, 0.0)), all.value(&prices(&flat, 0.0)));
        assert!((seen.tokens / seen.rounds - 10.0 / 6.0).abs() < 1e-6, "{seen:?}");
        assert!(
            (seen.rounds - all.rounds).abs() < 1e-3 && (seen.tokens - all.tokens).abs() < 1e-3,
            "{all:?}"
        );
    }

    #[test]
    fn old_rounds_decay_and_a_class_weighs_no_more_than_its_weight() {
        let mut own = Rounds::remembering(16.0);
        (0..200).for_each(|_| own.push(Round::new(4, 0, 5)));
        (0..40).for_each(|_| own.push(Round::new(4, 0, 1)));
        let flat = |_: usize, _: f64| 0.1;
        let own = own.value(&prices(&flat, 0.0));
        assert!(own.tokens / own.rounds < 1.4, "{own:?}");
        let mut class = Rounds::remembering(300.0);
        (0..1_000).for_each(|_| class.push(Round::new(4, 0, 5)));
        let both = Value::default().with(&class.value(&prices(&flat, 0.0)), 8.0);
        assert!((both.rounds - 8.0).abs() < 1e-6 && (both.tokens - 40.0).abs() < 1e-6, "{both:?}");
    }
}
