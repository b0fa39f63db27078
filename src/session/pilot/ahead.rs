//! A draft behind what the verify calls under way are assumed to bring.
//!
//! The lookups are asked for a chain that is so much longer: it has to repeat what is under way, its next token is the guess
//! of what the last call's verdict ends with, and the rest is the draft of the call to be sent ahead.

use super::{BITE, Pilot, Stand};
use crate::control::Learnt;
use crate::draft::{Budget, Node, Tree};
use crate::units::{Tick, TokenId};
use crate::words::Shape;

/// Of so many chances that are not taken for what they cost, one is: costs that were high once may be so no more.
const TRY_ANYWAY: u64 = 64;
/// Of so many that pay one is left out, so that calls by themselves are measured, too.
const LEAVE_OUT: u64 = 16;

/// The calls under way: what the last of them assumes, its draft, and what room limit and context leave.
#[derive(Clone, Copy)]
struct UnderWay<'a> {
    before: &'a [TokenId],
    last: &'a Tree,
    room: Budget,
}

/// Most calls that are sent ahead of a verdict: what all of them assume comes true ever less often.
pub const AHEAD_MAX: usize = 3;

/// A verify call to be sent ahead.
#[derive(Clone, Debug, PartialEq)]
pub struct Ahead {
    /// What the call before it has to bring: accepted nodes of its draft, and one more token.
    pub assumed: Vec<TokenId>,
    /// What is drafted behind that.
    pub draft: Tree,
}

/// How often the sketches of a session fitted, lately.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sketches {
    made: f64,
    fitted: f64,
}

impl Sketches {
    /// Decay per sketch.
    const KEEP: f64 = 0.95;

    fn count(&mut self, fits: bool) {
        self.made = self.made * Self::KEEP + 1.0;
        self.fitted = self.fitted * Self::KEEP + f64::from(u8::from(fits));
    }

    /// The chance that the next one fits; one half before any was made.
    fn share(self) -> f64 {
        (self.fitted + 1.0) / (self.made + 2.0)
    }
}

impl Pilot {
    /// The call to be sent behind one whose draft is `last` and that itself assumes `before`; `None` where none pays.
    pub fn ahead(
        &mut self,
        output: &[TokenId],
        before: &[TokenId],
        last: &Tree,
        stand: Stand,
        now: Tick,
    ) -> Option<Ahead> {
        self.feed(output, stand.done, BITE);
        if !self.caught_up(stand.done) || !self.way().plan.may_overlap() {
            return None;
        }
        let control = std::sync::Arc::clone(&self.control);
        let under_way = UnderWay { before, last, room: stand.room };
        control.with(|learnt| match self.gamma_fixed {
            Some(fixed) => self.behind(&under_way, fixed, learnt, |_, rest| rest.len()),
            None => self.paying(&under_way, stand, learnt, now),
        })
    }

    /// The call to be sent ahead, if it pays.
    fn paying(
        &mut self,
        under_way: &UnderWay<'_>,
        stand: Stand,
        learnt: &mut Learnt<'_>,
        now: Tick,
    ) -> Option<Ahead> {
        let (anyway, left_out) = (self.dice.one_in(TRY_ANYWAY), self.dice.one_in(LEAVE_OUT));
        if left_out
            || Self::is_in_company(learnt)
            || self.has_lost()
            || self.gate(stand, learnt, now).is_some()
        {
            return None;
        }
        let tariff = self.tariff(learnt, None);
        let rate = self.rate(self.seats.first(), &tariff, learnt);
        self.behind(under_way, self.gamma_max, learnt, |alive, rest| {
            let nodes = tariff.cut(rest, rate, false).nodes;
            let pays = learnt.costs.ahead_pays(self.way(), nodes, alive);
            if pays || (anyway && alive > 0.5) { nodes } else { 0 }
        })
    }

    /// Whether other requests want engine or drafter, too: then there is no idle time to be used, and what is done for nothing
    /// is taken from them.
    fn is_in_company(learnt: &Learnt<'_>) -> bool {
        learnt.crowd.requests() > 1
    }

    /// The chain behind what is under way. `length` says how much of it to send, by the probability that all before it
    /// comes true and the survival of its nodes given that.
    fn behind(
        &self,
        under_way: &UnderWay<'_>,
        gamma: usize,
        learnt: &Learnt<'_>,
        length: impl FnOnce(f64, &[f64]) -> usize,
    ) -> Option<Ahead> {
        let UnderWay { before, last, room } = *under_way;
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

    /// How many tokens the model drafter is to draft for the next round while this one is under way; `None` where that does
    /// not pay.
    pub fn sketch(&mut self, room: usize, done: usize, now: Tick) -> Option<usize> {
        if !self.model().is_some_and(|(seat, _)| seat.health.is_well(done)) {
            return None;
        }
        if let Some(fixed) = self.gamma_fixed {
            return Some(fixed.min(room)).filter(|&gamma| gamma > 0);
        }
        if self.dice.one_in(LEAVE_OUT) {
            return None;
        }
        let alive = self.sketches.share();
        self.control.with(|learnt| {
            if Self::is_in_company(learnt) {
                return None;
            }
            let tariff = self.tariff(learnt, Some(now));
            let rate = self.model_rate(&tariff, learnt);
            let gamma = self.model_offer(self.gamma_max.min(room), rate, &tariff, learnt)?.nodes;
            let waited = gamma as f64 * learnt.costs.draft_token(self.model.number);
            learnt.costs.sketch_pays(self.way(), gamma, alive, waited).then_some(gamma)
        })
    }

    /// A sketch was made for a round, which it fits or not.
    pub fn sketched(&mut self, fits: bool) {
        self.sketches.count(fits);
    }

    /// A verify call with so many draft nodes was dropped unread.
    pub fn discarded(&self, nodes: usize) {
        self.control.with(|learnt| {
            if learnt.crowd.others() > 0 {
                learnt.budget.refused(nodes + 1);
            }
        });
    }
}
