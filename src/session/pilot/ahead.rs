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
        if let Some(fixed) = self.gamma_fixed {
            return self.behind(before, last, fixed, stand.room, |_, rest| rest.len());
        }
        let control = std::sync::Arc::clone(&self.control);
        let (anyway, left_out) = (self.dice.one_in(TRY_ANYWAY), self.dice.one_in(LEAVE_OUT));
        control.with(|learnt| {
            if left_out || self.has_lost() || self.gate(stand, learnt, now).is_some() {
                return None;
            }
            let tariff = self.tariff(learnt, None);
            let rate = self.rate(self.seats.first(), &tariff, learnt);
            self.behind(before, last, self.gamma_max, stand.room, |alive, rest| {
                let nodes = tariff.cut(rest, rate, false).nodes;
                let pays = learnt.ahead_pays(self.way(), nodes, alive);
                if pays || (anyway && alive > 0.5) { nodes } else { 0 }
            })
        })
    }

    /// The chain behind what is under way. `length` says how much of it to send, by the probability that all before it
    /// comes true and the survival of its nodes given that.
    fn behind(
        &self,
        before: &[TokenId],
        last: &Tree,
        gamma: usize,
        room: Budget,
        length: impl FnOnce(f64, &[f64]) -> usize,
    ) -> Option<Ahead> {
        let reach = before.len() + last.len() + 1 + gamma;
        let budget = Budget { nodes: reach.min(room.nodes), depth: reach.min(room.depth) };
        let chain = self.control.with(|learnt| self.chain(budget, learnt));
        let tokens: Vec<TokenId> = chain.0.nodes().iter().map(|node| node.token).collect();
        let behind = tokens.strip_prefix(before)?;
        let guess = before.len() + last.depth_of(behind);
        let (alive, rest) = chain.1.get(guess..)?.split_first()?;
        let rest: Vec<f64> = rest.iter().take(gamma).map(|survival| survival / alive.max(1e-9)).collect();
        let nodes = length(*alive, &rest).min(rest.len());
        let mut draft = Tree::default();
        for (index, node) in chain.0.nodes().iter().skip(guess + 1).take(nodes).enumerate() {
            draft.push(Node { parent: index.checked_sub(1), ..node.clone() });
        }
        let assumed = tokens.get(before.len()..=guess)?.to_vec();
        (!draft.is_empty()).then_some(Ahead { assumed, draft })
    }

    /// The likeliest chain of all lookups, and the survival of its nodes.
    fn chain(&self, budget: Budget, learnt: &Learnt<'_>) -> (Tree, Vec<f64>) {
        let merged = self.merged_as(Shape::Chain, &self.looked_up(budget), budget, learnt);
        (merged.tree, merged.survival)
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
