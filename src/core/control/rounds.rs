//! Rounds, real and virtual, of a class of requests or of one: the yield of speculation over a
//! stretch.
//!
//! Rounds are stored as the nodes they computed and the tokens they yielded, without durations:
//! a virtual round took no time, and a cost that is measured later revalues the rounds before it.
//! Costs are lines, so sums are enough. Positions without a draft are distinguished from rounds
//! with one: a session may pass them with empty rounds, or decode plainly until there is a draft,
//! whichever is less expensive.

use serde::{Deserialize, Serialize};

use super::round_costs::RoundCosts;
use super::shared::MAX;

/// Sums over rounds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "[f64; 7]", into = "[f64; 7]")]
pub struct Sums {
    /// Rounds with a draft, their nodes, the tokens that the model drafter computed for them, and
    /// the tokens that they yielded.
    drafted: f64,
    nodes: f64,
    modelled: f64,
    tokens: f64,
    /// Positions without a draft, which yield one token each, and the tokens that the model drafter
    /// computed for them in vain.
    empty: f64,
    in_vain: f64,
    /// Stretches of such positions.
    gaps: f64,
}

impl From<[f64; 7]> for Sums {
    fn from([drafted, nodes, modelled, tokens, empty, in_vain, gaps]: [f64; 7]) -> Self {
        Self { drafted, nodes, modelled, tokens, empty, in_vain, gaps }
    }
}

impl From<Sums> for [f64; 7] {
    fn from(sums: Sums) -> Self {
        let Sums { drafted, nodes, modelled, tokens, empty, in_vain, gaps } = sums;
        [drafted, nodes, modelled, tokens, empty, in_vain, gaps]
    }
}

impl Sums {
    /// These and `share` of others.
    #[must_use]
    fn plus(self, other: Self, share: f64) -> Self {
        Self {
            drafted: self.drafted + share * other.drafted,
            nodes: self.nodes + share * other.nodes,
            modelled: self.modelled + share * other.modelled,
            tokens: self.tokens + share * other.tokens,
            empty: self.empty + share * other.empty,
            in_vain: self.in_vain + share * other.in_vain,
            gaps: self.gaps + share * other.gaps,
        }
    }

    /// Adds those of another sidecar. Invalid ones are ignored: they may come from outside.
    pub fn add(&mut self, other: Self) {
        let Self { drafted, nodes, modelled, tokens, empty, in_vain, gaps } = other;
        let valid = |sum: f64| (0.0..MAX).contains(&sum);
        if [drafted, nodes, modelled, tokens, empty, in_vain, gaps].into_iter().all(valid) {
            *self = self.plus(other, 1.0);
        }
    }

    fn count(&self) -> f64 {
        self.drafted + self.empty
    }
}

/// Decayed statistics of rounds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rounds {
    sums: Sums,
    /// The last round had no draft.
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

    fn sums(self) -> Sums {
        let (nodes, modelled, tokens) = (self.nodes as f64, self.modelled as f64, self.tokens as f64);
        if self.nodes == 0 {
            return Sums { empty: 1.0, in_vain: modelled, ..Sums::default() };
        }
        Sums { drafted: 1.0, nodes, modelled, tokens, ..Sums::default() }
    }
}

/// Yield of rounds at given costs, decayed.
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
        Self { sums: Sums::default(), in_gap: false, keep: 1.0 - 1.0 / rounds.max(2.0) }
    }

    pub fn push(&mut self, round: Round) {
        let mut older = Sums::default().plus(self.sums, self.keep.powf(round.weight));
        if round.nodes == 0 && !self.in_gap {
            older.gaps += 1.0;
        }
        self.in_gap = round.nodes == 0;
        self.sums = older.plus(round.sums(), round.weight);
    }

    /// The sums, as they are shared.
    pub(super) fn shared(&self) -> Sums {
        self.sums
    }

    /// These rounds and `lent`, which counts for at most as many as are wanting to `memory`.
    #[must_use]
    pub(super) fn filled(self, lent: Sums, memory: f64) -> Self {
        let share = ((memory - self.count()).max(0.0) / lent.count().max(1e-9)).min(1.0);
        Self { sums: self.sums.plus(lent, share), ..self }
    }

    /// Number of rounds, decayed.
    pub fn count(&self) -> f64 {
        self.sums.count()
    }

    /// The value of the rounds. Gaps are charged as empty rounds or as plain decoding with its
    /// switches, whichever is less expensive.
    pub fn value(&self, costs: &RoundCosts) -> Value {
        let Sums { drafted, nodes, modelled, tokens, empty, in_vain, gaps } = self.sums;
        let mean = |sum: f64, of: f64| sum / of.max(1e-9);
        let seconds = drafted * costs.drafted(mean(nodes, drafted), mean(modelled, drafted));
        let round = costs.drafted(0.0, 0.0);
        // What the model drafter drafted for them in vain was waited for before it was known to be.
        let in_vain = empty * (costs.drafted(0.0, mean(in_vain, empty)) - round).max(0.0);
        let staying = empty * (round - costs.token).max(0.0);
        let leaving = gaps * (costs.switch_in + costs.switch_out);
        Value {
            rounds: drafted + empty,
            tokens: tokens + empty,
            seconds: seconds + empty * costs.token + in_vain + staying.min(leaving),
            drafted: (tokens, seconds),
            between_gaps: if gaps > 1e-6 { drafted / gaps } else { f64::MAX },
            gap: if gaps > 1e-6 { empty / gaps } else { 0.0 },
        }
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

    /// A plain token takes 0.1 s, a switch 0.1 s; a round `base`, `node` more for each node, and a
    /// token of the model drafter 1 ms.
    fn costs(base: f64, node: f64) -> RoundCosts {
        RoundCosts::of(0.1, base, node, 0.001)
    }

    #[test]
    fn rounds_are_valued_at_the_given_costs() {
        let mut rounds = Rounds::remembering(1e9);
        rounds.push(Round::new(4, 4, 5));
        rounds.push(Round::new(4, 0, 3));
        let inexpensive = rounds.value(&costs(0.1, 0.0));
        assert!(
            (inexpensive.tokens - 8.0).abs() < 1e-6 && (inexpensive.seconds - 0.204).abs() < 1e-6,
            "{inexpensive:?}"
        );
        let expensive = rounds.value(&costs(0.0, 0.1));
        assert!((expensive.rate().unwrap() - 8.0 / 0.804).abs() < 1e-6, "{expensive:?}");
    }

    #[test]
    fn positions_without_a_draft_cost_the_minimum_of_staying_and_leaving() {
        let mut rounds = Rounds::remembering(1e9);
        for _ in 0..2 {
            rounds.push(Round::new(4, 0, 5));
            (0..10).for_each(|_| rounds.push(Round::new(0, 0, 1)));
        }
        let value = rounds.value(&costs(0.15, 0.0));
        assert!((value.between_gaps - 1.0).abs() < 1e-6 && (value.gap - 10.0).abs() < 1e-6, "{value:?}");
        assert!((value.seconds - (0.3 + 2.0 + 0.4)).abs() < 1e-6, "leaving twice costs less: {value:?}");
        let staying = rounds.value(&costs(0.101, 0.0));
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
        let (seen, all) = (seen.value(&costs(0.1, 0.0)), all.value(&costs(0.1, 0.0)));
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
        let own = own.value(&costs(0.1, 0.0));
        assert!(own.tokens / own.rounds < 1.4, "{own:?}");
        let mut class = Rounds::remembering(300.0);
        (0..1_000).for_each(|_| class.push(Round::new(4, 0, 5)));
        let both = Value::default().with(&class.value(&costs(0.1, 0.0)), 8.0);
        assert!((both.rounds - 8.0).abs() < 1e-6 && (both.tokens - 40.0).abs() < 1e-6, "{both:?}");
    }

    #[test]
    fn sums_from_outside_are_added_if_they_can_be_sums() {
        let mut sums = Sums::default();
        let other = Sums::from([1.0, 4.0, 0.0, 3.0, 2.0, 0.0, 1.0]);
        sums.add(other);
        for figure in [f64::NAN, -1.0, 1e300] {
            sums.add(Sums { tokens: figure, ..other });
        }
        assert_eq!(sums, other);
    }
}
