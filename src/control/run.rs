//! The last rounds of one request, real or virtual: what leaping brings over a stretch, not at one place.
//!
//! Rounds are kept as what they computed and brought, not as how long they took: a virtual round took no
//! time, and a cost learnt later revalues the rounds before it.

use std::collections::VecDeque;

use super::costs::{Costs, Way};

/// Rounds remembered.
const ROUNDS: usize = 24;
/// Weight of a round against the one after it.
const KEEP: f64 = 0.93;

#[derive(Clone, Copy, Debug)]
struct Round {
    nodes: usize,
    modelled: usize,
    tokens: usize,
}

/// The rounds of one way of drafting.
#[derive(Debug, Default)]
pub struct Run {
    rounds: VecDeque<Round>,
}

impl Run {
    /// Notes a round: nodes verified, tokens the model drafter drafted, tokens that became the past.
    pub fn push(&mut self, nodes: usize, modelled: usize, tokens: usize) {
        if self.rounds.len() == ROUNDS {
            self.rounds.pop_back();
        }
        self.rounds.push_front(Round { nodes, modelled, tokens });
    }

    /// Decayed sums over the rounds at today's costs: (tokens, seconds).
    pub fn sums(&self, way: Way, costs: &Costs) -> (f64, f64) {
        let mut weight = 1.0;
        self.rounds.iter().fold((0.0, 0.0), |(tokens, seconds), round| {
            weight *= KEEP;
            let took = costs.verify(way, round.nodes) + round.modelled as f64 * costs.draft_token();
            (tokens + weight * round.tokens as f64, seconds + weight * took)
        })
    }

    /// Rounds remembered, at most 24.
    pub fn len(&self) -> usize {
        self.rounds.len()
    }

    /// Whether no round was noted.
    pub fn is_empty(&self) -> bool {
        self.rounds.is_empty()
    }
}
