//! A draft behind the tokens that the verify requests in flight are assumed to yield.
//!
//! The lookups are queried for a longer chain: it has to repeat the drafts in flight, its next
//! token is the guess of the token that ends the last request's result, and the rest is the draft
//! of the request to be sent ahead.

use super::{PROMPT_CHUNK_TOKENS, SessionState, SpeculationController};
use crate::control::Measurements;
use crate::draft::{Budget, Node, Tree};
use crate::units::{Tick, TokenId};
use crate::words::Shape;

/// Explores one in 64 opportunities that were rejected for their cost, to correct a stale cost
/// estimate.
const TRY_ANYWAY: u64 = 64;
/// Skips one in 16 that pay, so that requests by themselves are measured, too.
const LEAVE_OUT: u64 = 16;

/// The verify requests in flight: the assumption of the last of them, its draft, and the room that
/// limit and context leave.
#[derive(Clone, Copy)]
struct InFlight<'a> {
    before: &'a [TokenId],
    last: &'a Tree,
    room: Budget,
}

/// Maximum verify requests sent ahead of a result: the probability that all their assumptions come
/// true falls with each of them.
pub const AHEAD_MAX: usize = 3;

/// A verify request to be sent ahead.
#[derive(Clone, Debug, PartialEq)]
pub struct Ahead {
    /// Tokens that the request before it has to yield: accepted nodes of its draft, and one more
    /// token.
    pub assumed: Vec<TokenId>,
    /// The draft behind them.
    pub draft: Tree,
}

/// Share of the drafts made ahead in a session that fitted, decayed.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct AheadDrafts {
    made: f64,
    fitted: f64,
}

impl AheadDrafts {
    /// Decay per draft.
    const KEEP: f64 = 0.95;

    fn count(&mut self, fits: bool) {
        self.made = self.made * Self::KEEP + 1.0;
        self.fitted = self.fitted * Self::KEEP + f64::from(u8::from(fits));
    }

    /// The probability that the next one fits; one half before any was made.
    fn share(self) -> f64 {
        (self.fitted + 1.0) / (self.made + 2.0)
    }
}

impl SpeculationController {
    /// The verify request to be sent behind one whose draft is `last` and that itself assumes
    /// `before`; `None` where none pays.
    pub fn ahead(
        &mut self,
        output: &[TokenId],
        before: &[TokenId],
        last: &Tree,
        state: SessionState,
        now: Tick,
    ) -> Option<Ahead> {
        self.feed(output, state.done, PROMPT_CHUNK_TOKENS);
        if !self.caught_up(state.done) || !self.way().method.may_overlap() {
            return None;
        }
        let control = std::sync::Arc::clone(&self.control);
        let under_way = InFlight { before, last, room: state.room };
        control.with(|learnt| match self.gamma_fixed {
            Some(fixed) => self.behind(&under_way, fixed, learnt, |_, rest| rest.len()),
            None => self.paying(&under_way, state, learnt, now),
        })
    }

    /// The verify request to be sent ahead, if it pays.
    fn paying(
        &mut self,
        under_way: &InFlight<'_>,
        state: SessionState,
        learnt: &mut Measurements<'_>,
        now: Tick,
    ) -> Option<Ahead> {
        let (anyway, left_out) = (self.rng.chance(TRY_ANYWAY), self.rng.chance(LEAVE_OUT));
        if left_out
            || Self::has_other_requests(learnt)
            || self.has_lost()
            || self.gate(state, learnt, now).is_some()
        {
            return None;
        }
        let round_costs = self.round_costs(learnt, false);
        let rate = self.rate(self.slots.first(), &round_costs, learnt);
        self.behind(under_way, self.gamma_max, learnt, |alive, rest| {
            let nodes = round_costs.cut(rest, rate, false).nodes;
            let pays = learnt.costs.ahead_pays(self.way(), nodes, alive);
            if pays || (anyway && alive > 0.5) { nodes } else { 0 }
        })
    }

    /// True if other requests want engine or drafter, too: then there is no idle time to be used,
    /// and work in vain is taken from them.
    fn has_other_requests(learnt: &Measurements<'_>) -> bool {
        learnt.concurrency.requests() > 1
    }

    /// The chain behind the drafts in flight. `length` returns the number of its nodes to send,
    /// from the probability that all tokens before it come true and the survival probabilities of
    /// its nodes given that.
    fn behind(
        &self,
        under_way: &InFlight<'_>,
        gamma: usize,
        learnt: &Measurements<'_>,
        length: impl FnOnce(f64, &[f64]) -> usize,
    ) -> Option<Ahead> {
        let InFlight { before, last, room } = *under_way;
        let reach = before.len() + last.len() + 1 + gamma;
        let budget = Budget { nodes: reach.min(room.nodes), depth: reach.min(room.depth) };
        let chain = self.merged_as(Shape::Chain, &self.looked_up(budget), budget, learnt);
        let tokens: Vec<TokenId> = chain.tree.nodes().iter().map(|node| node.token).collect();
        let behind = tokens.strip_prefix(before)?;
        let guess = before.len() + last.depth_of(behind);
        let (alive, rest) = chain.survival.get(guess..)?.split_first()?;
        let rest: Vec<f64> = rest.iter().take(gamma).map(|survival| survival / alive.max(1e-9)).collect();
        let nodes = length(*alive, &rest).min(rest.len());
        let mut draft = Tree::default();
        for (index, node) in chain.tree.nodes().iter().skip(guess + 1).take(nodes).enumerate() {
            draft.push(Node { parent: index.checked_sub(1), ..node.clone() });
        }
        let assumed = tokens.get(before.len()..=guess)?.to_vec();
        (!draft.is_empty()).then_some(Ahead { assumed, draft })
    }

    /// Number of tokens, at most `room`, that the model drafter should draft ahead during this
    /// round; `None` where that does not pay.
    pub fn ahead_draft(&mut self, room: usize, done: usize) -> Option<usize> {
        if !self.model().is_some_and(|(slot, _)| slot.health.is_well(done)) {
            return None;
        }
        if let Some(fixed) = self.gamma_fixed {
            return Some(fixed.min(room)).filter(|&gamma| gamma > 0);
        }
        if self.rng.chance(LEAVE_OUT) {
            return None;
        }
        let alive = self.ahead_drafts.share();
        self.control.with(|learnt| {
            if Self::has_other_requests(learnt) {
                return None;
            }
            let round_costs = self.round_costs(learnt, true);
            let rate = self.model_rate(&round_costs, learnt);
            let gamma = self.model_offer(self.gamma_max.min(room), rate, &round_costs, learnt)?.nodes;
            let waited = gamma as f64 * learnt.costs.draft_token(self.model.number);
            learnt.costs.ahead_draft_pays(self.way(), gamma, alive, waited).then_some(gamma)
        })
    }

    /// Counts a draft made ahead for a round, and if it fitted.
    pub fn drafted_ahead(&mut self, fits: bool) {
        self.ahead_drafts.count(fits);
    }

    /// A verify request with `nodes` draft nodes was dropped unread.
    pub fn discarded(&self, nodes: usize) {
        if self.is_chosen() {
            self.control.with(|learnt| learnt.rejected(self.way(), nodes + 1));
        }
    }
}
