//! The next step: which drafter, how far, or ride.

use std::sync::Arc;

use super::seat::{Seat, leading};
use super::{BITE, EVIDENCE, Pilot, Stand, Step};
use crate::control::{Learnt, Quote, Run, Terms, best_cut, dither, pays};
use crate::draft::{Budget, Tree};
use crate::units::{Tick, TokenId};
use crate::words::RideReason;

impl Pilot {
    /// Chooses the next step. The caller has checked that nothing forbids leaping.
    pub fn choose(&mut self, output: &[TokenId], stand: Stand, now: Tick) -> Step {
        if let Some(fixed) = self.gamma_fixed {
            return self.forced(output, fixed, stand);
        }
        self.feed(output, stand.done, BITE);
        if !self.caught_up(stand.done) || (!stand.leaping && stand.done < self.not_before) {
            return Step::Ride(RideReason::NoGain);
        }
        if self.control.with(|learnt| learnt.costs.pace_is_old()) {
            return Step::Ride(RideReason::Switchback);
        }
        let room = stand.room.nodes.min(self.gamma_max);
        let budget = Budget { nodes: room, depth: stand.room.depth };
        let control = Arc::clone(&self.control);
        let step = control.with(|learnt| {
            learnt.costs.fade(now);
            self.weigh(budget, stand, learnt)
        });
        self.dithered(step, budget)
    }

    fn weigh(&self, budget: Budget, stand: Stand, learnt: &Learnt) -> Step {
        let rest = learnt.expected_rest(stand.done).min(stand.rest.map_or(f64::MAX, |rest| rest as f64));
        let terms =
            Terms { way: self.way(), margin: self.margin, stay: self.stay, leaping: stand.leaping, rest };
        let (mut draft, quote) = self.cut(&self.looked_up(budget), budget, learnt);
        let nothing = draft.is_empty();
        let known =
            |seat: &Seat| stand.leaping || learnt.survival.evidence(self.heat, seat.id.source) >= EVIDENCE;
        let led = leading(&self.seats, &draft, 0).and_then(|place| self.seats.get(place));
        // Without anybody who answers at once, an empty round may still be the cheapest way to stay in a leap.
        let nobody = Run::default();
        let run = match led {
            Some(seat) => known(seat).then_some(&seat.run),
            None => stand.leaping.then_some(&nobody),
        };
        let lookup = run.filter(|run| self.worth(quote, run, learnt, terms)).map(|_| quote);
        let model =
            self.model().filter(|(seat, asked)| asked.warm && seat.health.is_well(stand.done) && known(seat));
        let asks = model.is_some();
        let model = model.and_then(|(seat, _)| {
            let offer = self.model_offer(budget.nodes.min(budget.depth), learnt)?;
            self.worth(offer, &seat.run, learnt, terms).then_some(offer)
        });
        match (lookup, model) {
            (Some(lookup), Some(model)) if model.rate() > lookup.rate() => Step::Draft(model.nodes),
            (None, Some(model)) => Step::Draft(model.nodes),
            (Some(lookup), _) => {
                draft.truncate(lookup.nodes);
                Step::Verify(draft)
            }
            (None, None) if nothing && !asks => Step::Ride(RideReason::NoDraft),
            (None, None) => Step::Ride(RideReason::NoGain),
        }
    }

    /// Whether a quote pays; a first trial gets a second round, because the first one also paid for the switch.
    fn worth(&self, quote: Quote, run: &Run, learnt: &Learnt, terms: Terms) -> bool {
        let second = self.streak.is_some_and(|streak| streak.trial && streak.rounds < 2);
        (second && quote.nodes > 0) || pays(quote, run, learnt, terms)
    }

    fn dithered(&mut self, step: Step, budget: Budget) -> Step {
        match step {
            Step::Verify(mut draft) => {
                let nodes = dither(&mut self.dice, draft.len(), budget.nodes);
                if nodes > draft.len() {
                    let longer =
                        self.control.with(|learnt| self.merged(&self.looked_up(budget), budget, learnt));
                    draft = longer.tree;
                }
                draft.truncate(nodes);
                Step::Verify(draft)
            }
            Step::Draft(gamma) => Step::Draft(dither(&mut self.dice, gamma, budget.nodes.min(budget.depth))),
            Step::Ride(reason) => Step::Ride(reason),
        }
    }

    /// `gamma.fixed`: a draft of at most so many nodes, whatever it may bring.
    fn forced(&mut self, output: &[TokenId], fixed: usize, stand: Stand) -> Step {
        self.feed(output, stand.done, usize::MAX);
        let nodes = fixed.min(stand.room.nodes);
        let budget = Budget { nodes, depth: stand.room.depth };
        let gamma = nodes.min(budget.depth);
        if gamma > 0 && self.model().is_some_and(|(seat, _)| seat.health.is_well(stand.done)) {
            return Step::Draft(gamma);
        }
        Step::Verify(self.control.with(|learnt| self.merged(&self.looked_up(budget), budget, learnt)).tree)
    }

    /// The draft to verify once the model drafter has answered: merged with the drafts of the lookups, cut by
    /// what a verify call costs. What the model's draft cost is spent already.
    pub fn combine(&self, model: Tree, stand: Stand) -> Tree {
        let most = self.gamma_fixed.unwrap_or(self.gamma_max);
        let budget = Budget { nodes: most.min(stand.room.nodes), depth: stand.room.depth };
        let drafts: Vec<Tree> = std::iter::once(model).chain(self.looked_up(budget)).collect();
        self.control.with(|learnt| {
            let merged = self.merged(&drafts, budget, learnt);
            let mut draft = merged.tree;
            if self.gamma_fixed.is_none() {
                let quote = best_cut(&merged.survival, |nodes| learnt.costs.verify(self.way(), nodes));
                draft.truncate(quote.nodes.max(1));
            }
            draft
        })
    }

    /// The drafts of all lookups.
    fn looked_up(&self, budget: Budget) -> Vec<Tree> {
        self.lookups().map(|lookup| lookup.draft(budget)).collect()
    }
}
