//! The next step: which drafter, how far, or ride.

use std::sync::Arc;

use super::seat::{Asked, Seat, leading};
use super::{BITE, CLASS_TOKENS, EVIDENCE, Pilot, Stand, Step};
use crate::control::costs::Basis;
use crate::control::{Class, Learnt, Outlook, Prices, Quote, Rounds, Value, best_cut, dither};
use crate::draft::{Budget, Tree};
use crate::units::{Tick, TokenId};
use crate::words::RideReason;

/// Share of the spread of a cost by which a trial may hope that it is lower than its mean.
const HOPE: f64 = 0.7;
/// First draft tokens, real and virtual, that the acceptance gate judges by.
const REFUSED_OF: f64 = 200.0;
/// Rounds in the shadow that tell what leaping would have brought.
const WOULD_OF: f64 = 4.0;
/// Share of a ridden token's time that reading the prompt may take while the client waits.
const READ_MOST: f64 = 0.5;
/// A round may always take as long as so many ridden tokens.
const GAP_TOKENS: f64 = 2.0;

impl Pilot {
    /// Chooses the next step. The caller has checked that nothing forbids leaping.
    pub fn choose(&mut self, output: &[TokenId], stand: Stand, now: Tick) -> Step {
        if let Some(fixed) = self.gamma_fixed {
            return self.forced(output, fixed, stand);
        }
        self.feed(output, stand.done, BITE);
        if !self.caught_up(stand.done) || (!stand.leaping && stand.done < self.not_before) || self.has_lost()
        {
            return Step::Ride(RideReason::NoGain);
        }
        let control = Arc::clone(&self.control);
        let (step, budget) = control.with(|learnt| {
            let budget = self.budget(stand, learnt);
            if learnt.switchback.rides(now, &mut self.dice) {
                return (Step::Ride(RideReason::Switchback), budget);
            }
            (self.weigh(budget, stand, learnt, now), budget)
        });
        self.dithered(step, budget)
    }

    /// The largest draft whose cost can be foretold and that keeps the client waiting no longer than it may.
    fn budget(&self, stand: Stand, learnt: &Learnt) -> Budget {
        let way = self.way();
        let most = stand.room.nodes.min(self.gamma_max).min(learnt.costs.reach(way));
        let gap = self.gap_most.max(GAP_TOKENS * learnt.costs.ride_token_expected());
        let nodes = (0..=most).rev().find(|&nodes| learnt.costs.verify(way, nodes) <= gap);
        Budget { nodes: nodes.unwrap_or(0), depth: stand.room.depth }
    }

    fn weigh(&self, budget: Budget, stand: Stand, learnt: &mut Learnt, now: Tick) -> Step {
        let Some(token) = learnt.costs.ride_token() else { return Step::Ride(RideReason::NoGain) };
        let alone = learnt.crowd.requests() <= 1;
        let pace =
            if stand.leaping && alone { learnt.costs.pace_is_overdue() } else { learnt.costs.pace_is_old() };
        if pace {
            return Step::Ride(RideReason::Switchback);
        }
        if learnt.crowd.others() > 0 && !learnt.budget.is_open() {
            return Step::Ride(RideReason::Budget);
        }
        if learnt.switchback.is_closed(now)
            || !learnt.account.is_open()
            || (budget.nodes == 0 && stand.room.nodes > 0)
        {
            return Step::Ride(RideReason::GateLatency);
        }
        let outlook = |seat: Option<&Seat>| self.outlook(seat, token, stand, learnt, now);
        let first = self.seats.iter().find(|seat| seat.inline().is_some());
        let lookups = self.looked_up(budget);
        let rate = outlook(first).rate();
        let (mut draft, quote) = self.cut(&lookups, budget, rate, learnt);
        let nothing = draft.is_empty();
        let led = leading(&self.seats, &draft, 0).and_then(|place| self.seats.get(place));
        let lookup = (led.is_some() || stand.leaping)
            .then(|| (quote, outlook(led)))
            .filter(|(quote, outlook)| self.worth(*quote, led, outlook, stand, learnt));
        let reads = |asked: &Asked| asked.warm || self.reads_quickly(token, learnt);
        let model = self.model().filter(|(seat, asked)| reads(asked) && seat.health.is_well(stand.done));
        let asks = model.is_some();
        let model = model.and_then(|(seat, _)| {
            let outlook = outlook(Some(seat));
            let offer = self.model_offer(budget.nodes.min(budget.depth), outlook.rate(), learnt)?;
            self.worth(offer, Some(seat), &outlook, stand, learnt).then_some((offer, outlook))
        });
        match (lookup, model) {
            (Some((lookup, known)), Some((model, other))) => {
                let rate = known.rate().max(other.rate());
                if model.surplus(rate) > lookup.surplus(rate) {
                    return Step::Draft(model.nodes);
                }
                draft.truncate(lookup.nodes);
                Step::Verify(draft)
            }
            (None, Some((model, _))) => Step::Draft(model.nodes),
            (Some((lookup, _)), None) => {
                draft.truncate(lookup.nodes);
                Step::Verify(draft)
            }
            (None, None) if nothing && !asks => Step::Ride(RideReason::NoDraft),
            (None, None) if self.refused(learnt) => Step::Ride(RideReason::GateAcceptance),
            (None, None) => Step::Ride(RideReason::NoGain),
        }
    }

    /// Whether the model drafter reads a prompt in less time than a ridden token takes: then its first draft may be waited
    /// for. Otherwise it reads while the request rides.
    fn reads_quickly(&self, token: f64, learnt: &Learnt) -> bool {
        learnt.costs.reading().is_some_and(|seconds| seconds < READ_MOST * token)
    }

    /// Whether hardly any first token of any drafter is accepted. Virtual rounds go on, so it is seen when that changes.
    fn refused(&self, learnt: &Learnt) -> bool {
        let refused = |seat: &Seat| {
            let (accepted, tried) = learnt.survival.first_tokens(self.heat, seat.id.source);
            tried >= REFUSED_OF && accepted < self.acceptance_least * tried
        };
        !self.seats.is_empty() && self.seats.iter().all(refused)
    }

    /// Whether a round of the drafter in this seat pays, as far as is known.
    fn worth(
        &self,
        quote: Quote,
        seat: Option<&Seat>,
        outlook: &Outlook,
        stand: Stand,
        learnt: &Learnt,
    ) -> bool {
        if stand.leaping {
            return outlook.goes_on(quote, self.stay, self.streak.map_or(0, |streak| streak.gap));
        }
        let known = |seat: &Seat| learnt.survival.evidence(self.heat, seat.id.source) >= EVIDENCE;
        seat.is_some_and(known) && outlook.begins(quote, self.margin)
    }

    /// What leaping with the drafter in a seat is judged by.
    fn outlook(&self, seat: Option<&Seat>, token: f64, stand: Stand, learnt: &Learnt, now: Tick) -> Outlook {
        let costs = &learnt.costs;
        let hope =
            if learnt.account.allows_trials() { HOPE * costs.verify_spread(self.way(), now) } else { 0.0 };
        Outlook {
            token,
            value: self.value(seat, learnt),
            empty: self.round_cost(0, learnt),
            switch_in: costs.switch_in(),
            switch_out: costs.switch_out(),
            rest: learnt.expected_rest(stand.done).min(stand.rest.map_or(f64::MAX, |rest| rest as f64)),
            hope,
        }
    }

    /// The rounds of the drafter in this seat: the session's own, and its class's beside them.
    fn value(&self, seat: Option<&Seat>, learnt: &Learnt) -> Value {
        let Some(seat) = seat else { return Value::default() };
        let costs = &learnt.costs;
        let prices = Prices {
            verify: &|nodes| self.round_cost(nodes, learnt),
            draft: costs.draft_token(),
            token: costs.ride_token_expected(),
            switches: costs.switch_in() + costs.switch_out(),
        };
        let class = Class { source: seat.id.source, heat: self.heat, kind: self.kind };
        let others =
            learnt.classes.of(class).map(|rounds: &Rounds| rounds.value(&prices)).unwrap_or_default();
        let per_round = others.tokens / others.rounds.max(1e-6);
        seat.rounds.value(&prices).with(&others, (CLASS_TOKENS / per_round.max(1.0)).max(2.0))
    }

    /// How many times as fast leaping would have been in an output of so many tokens, by its own virtual rounds with the
    /// better drafter: 1 where it would not have leapt. Also what that rests on. `None` if there were too few rounds.
    pub fn would_gain(&self, tokens: usize) -> Option<(f64, Basis)> {
        self.control.with(|learnt| {
            let token = learnt.costs.ride_token()?;
            let known = |seat: &&Seat| seat.rounds.count() >= WOULD_OF;
            let rates =
                self.seats.iter().filter(known).filter_map(|seat| self.value(Some(seat), learnt).rate());
            let rate = rates.max_by(f64::total_cmp)?;
            let riding = tokens as f64 * token;
            let gain = riding / (tokens as f64 / rate + learnt.costs.switch_in());
            let gain = if gain < 1.0 + self.margin { 1.0 } else { gain };
            Some((gain, learnt.costs.basis(self.way())))
        })
    }

    /// The tokens per second that leaping with this drafter reaches in the long run, at least those of riding.
    pub(super) fn rate(&self, seat: Option<&Seat>, learnt: &Learnt) -> f64 {
        let riding = 1.0 / learnt.costs.ride_token_expected();
        self.value(seat, learnt).rate().unwrap_or(0.0).max(riding)
    }

    /// Seconds of a round with so many nodes, and those that it costs the other requests that the engine computes.
    pub(super) fn round_cost(&self, nodes: usize, learnt: &Learnt) -> f64 {
        learnt.costs.verify(self.way(), nodes) + self.neighbours(nodes, learnt)
    }

    /// Seconds that the other requests wait, all together, because so many nodes are computed beside them. Ours leap as
    /// well as this one, so that only the nodes count; those of others lose whatever a round takes beyond a step.
    pub(super) fn neighbours(&self, nodes: usize, learnt: &Learnt) -> f64 {
        let (costs, way) = (&learnt.costs, self.way());
        let ours = learnt.crowd.ours().saturating_sub(1) as f64 * costs.per_node(way) * nodes as f64;
        let beyond = (costs.verify(way, nodes) - costs.ride_token_expected()).max(0.0);
        ours + learnt.crowd.others() as f64 * beyond
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
            if self.gamma_fixed.is_some() {
                return self.merged(&drafts, budget, learnt).tree;
            }
            let budget = self.budget(Stand { room: budget, ..stand }, learnt);
            let merged = self.merged(&drafts, budget, learnt);
            let rate = self.rate(self.model().map(|(seat, _)| seat), learnt);
            let quote = best_cut(&merged.survival, rate, |nodes| self.round_cost(nodes, learnt));
            let mut draft = merged.tree;
            draft.truncate(quote.nodes.max(1));
            draft
        })
    }

    /// The drafts of all lookups.
    fn looked_up(&self, budget: Budget) -> Vec<Tree> {
        self.lookups().map(|lookup| lookup.draft(budget)).collect()
    }
}
