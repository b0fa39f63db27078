//! The next step: which drafter, how far, or ride.

use std::sync::Arc;

use super::seat::{Asked, Seat, leading};
use super::{BITE, CLASS_TOKENS, EVIDENCE, Pilot, Stand, Step};
use crate::control::costs::Basis;
use crate::control::{Class, Learnt, Outlook, Quote, Tariff, Value, dither};
use crate::draft::{Budget, Draft, Tree};
use crate::units::{Tick, TokenId};
use crate::words::RideReason;

/// Rounds in the shadow that tell what leaping would have brought.
const WOULD_OF: f64 = 4.0;
/// Share of a ridden token's time that reading the prompt may take while the client waits.
const READ_MOST: f64 = 0.5;
/// A round may always take as long as so many ridden tokens.
const GAP_TOKENS: f64 = 2.0;

/// What a choice is made by.
struct Scene<'a, 'b> {
    stand: Stand,
    budget: Budget,
    tariff: Tariff,
    learnt: &'a Learnt<'b>,
}

/// A round that pays, and what it is judged by.
type Offer = (Quote, Outlook);

impl Pilot {
    /// Chooses the next step. The caller has checked that nothing forbids leaping.
    pub fn choose(&mut self, output: &[TokenId], stand: Stand, now: Tick) -> Step {
        if let Some(fixed) = self.gamma_fixed {
            return self.forced(output, fixed, stand);
        }
        self.feed(output, stand.done, BITE);
        if self.seats.is_empty() {
            return Step::Ride(RideReason::NoDraft);
        }
        let early = !stand.leaping && stand.done < self.not_before;
        if !self.caught_up(stand.done) || early || self.has_lost() {
            return Step::Ride(RideReason::NoGain);
        }
        let control = Arc::clone(&self.control);
        let (step, budget) = control.with(|learnt| {
            let gate = self.gate(stand, learnt, now);
            let tariff = self.tariff(learnt, (!stand.leaping).then_some(now));
            let budget = self.budget(stand, &tariff, learnt);
            let step = match gate {
                Some(reason) => Step::Ride(reason),
                None => self.weigh(&Scene { stand, budget, tariff, learnt }),
            };
            (step, budget)
        });
        self.dithered(step, budget)
    }

    /// Why nobody may leap on this replica now; `None` if somebody may.
    pub(super) fn gate(&mut self, stand: Stand, learnt: &mut Learnt, now: Tick) -> Option<RideReason> {
        if learnt.costs.ride_token().is_none() {
            return Some(RideReason::NoGain);
        }
        let goes_on = stand.leaping && learnt.crowd.requests() <= 1;
        let costs = &learnt.costs;
        let measures = if goes_on { costs.pace_is_overdue() } else { costs.pace_is_old() };
        if measures || learnt.switchback.rides(now, &mut self.dice) {
            return Some(RideReason::Switchback);
        }
        let (account, budget) = (&learnt.account, &learnt.budget);
        let (solvent, within) = if stand.leaping {
            (account.may_go_on(), budget.may_go_on())
        } else {
            (account.may_begin(learnt.crowd.leaping()), budget.may_begin())
        };
        if learnt.crowd.others() > 0 && !within {
            return Some(RideReason::Budget);
        }
        (!solvent || learnt.switchback.is_closed(now)).then_some(RideReason::GateLatency)
    }

    /// Today's prices; `hope`: as low as they may be at this moment.
    pub(super) fn tariff(&self, learnt: &Learnt, hope: Option<Tick>) -> Tariff {
        Tariff::new(learnt, self.way(), self.model.number, hope)
    }

    /// The largest draft whose cost can be foretold and that keeps the client waiting no longer than it may. No nodes at
    /// all if even an empty round would.
    fn budget(&self, stand: Stand, tariff: &Tariff, learnt: &Learnt) -> Budget {
        let most = stand.room.nodes.min(self.gamma_max).min(learnt.costs.reach(self.way()));
        let wait = self.gap_most.max(GAP_TOKENS * tariff.token);
        Budget { nodes: tariff.within(most, wait).unwrap_or(0), depth: stand.room.depth }
    }

    fn weigh(&self, scene: &Scene<'_, '_>) -> Step {
        let Scene { stand, budget, .. } = *scene;
        if budget.nodes == 0 && stand.room.nodes > 0 {
            return Step::Ride(RideReason::GateLatency);
        }
        let (mut draft, lookup) = self.lookup_offer(scene);
        let (asks, model) = self.asked_offer(scene);
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
            (None, None) if draft.is_empty() && !asks => Step::Ride(RideReason::NoDraft),
            (None, None) if self.refused(scene.learnt) => Step::Ride(RideReason::GateAcceptance),
            (None, None) => Step::Ride(RideReason::NoGain),
        }
    }

    /// The draft of the lookups, and what it is worth if it pays.
    fn lookup_offer(&self, scene: &Scene<'_, '_>) -> (Tree, Option<Offer>) {
        let Scene { stand, budget, tariff, learnt } = scene;
        let first = self.seats.iter().find(|seat| seat.inline().is_some());
        let rate = self.outlook(first, scene).rate();
        let (draft, quote) = self.cut(&self.looked_up(*budget), *budget, rate, tariff, learnt);
        let led = leading(&self.seats, &draft, 0).and_then(|place| self.seats.get(place));
        let judged = led.is_some() || stand.leaping;
        let offer = judged.then(|| (quote, self.outlook(led, scene)));
        (draft, offer.filter(|(quote, outlook)| self.worth(*quote, led, outlook, scene)))
    }

    /// Whether the model drafter may be asked, and what its draft is expected to be worth if that pays.
    fn asked_offer(&self, scene: &Scene<'_, '_>) -> (bool, Option<Offer>) {
        let Scene { stand, budget, tariff, learnt } = scene;
        let reads = |asked: &Asked| asked.warm || self.reads_quickly(tariff.token, learnt);
        let model = self.model().filter(|(seat, asked)| reads(asked) && seat.health.is_well(stand.done));
        let offer = model.and_then(|(seat, _)| {
            let outlook = self.outlook(Some(seat), scene);
            let nodes = budget.nodes.min(budget.depth);
            let offer = self.model_offer(nodes, outlook.rate(), tariff, learnt)?;
            self.worth(offer, Some(seat), &outlook, scene).then_some((offer, outlook))
        });
        (model.is_some(), offer)
    }

    /// Whether the model drafter reads a prompt in less time than a ridden token takes: then its first draft may be waited
    /// for. Otherwise it reads while the request rides.
    fn reads_quickly(&self, token: f64, learnt: &Learnt) -> bool {
        learnt.costs.reading(self.model.number).is_some_and(|seconds| seconds < READ_MOST * token)
    }

    /// Whether hardly any first token of any drafter is accepted. Virtual rounds go on, so it is seen when that changes.
    fn refused(&self, learnt: &Learnt) -> bool {
        let refused = |seat: &Seat| learnt.survival.is_refused(self.heat, seat.id, self.acceptance_least);
        !self.seats.is_empty() && self.seats.iter().all(refused)
    }

    /// Whether a round of the drafter in this seat pays, as far as is known.
    fn worth(&self, quote: Quote, seat: Option<&Seat>, outlook: &Outlook, scene: &Scene<'_, '_>) -> bool {
        if scene.stand.leaping {
            return self.streak.is_some_and(|streak| streak.tries())
                || outlook.goes_on(quote, self.stay, self.streak.map_or(0, |streak| streak.gap));
        }
        let known = |seat: &Seat| scene.learnt.survival.evidence(self.heat, seat.id) >= EVIDENCE;
        seat.is_some_and(known) && outlook.begins(quote, self.margin)
    }

    /// What leaping with the drafter in a seat is judged by.
    fn outlook(&self, seat: Option<&Seat>, scene: &Scene<'_, '_>) -> Outlook {
        let Scene { stand, tariff, learnt, .. } = scene;
        Outlook {
            token: tariff.token,
            value: seat.map(|seat| self.value(seat, tariff, learnt)).unwrap_or_default(),
            empty: tariff.round(0),
            switch_in: tariff.switch_in,
            switch_out: tariff.switch_out,
            rest: learnt.expected_rest(stand.done).min(stand.rest.map_or(f64::MAX, |rest| rest as f64)),
        }
    }

    /// The rounds of the drafter in this seat: the session's own, and its class's beside them.
    fn value(&self, seat: &Seat, tariff: &Tariff, learnt: &Learnt) -> Value {
        let class = Class::new(seat.id, self.heat, self.kind);
        let others = learnt.classes.of(class).map(|rounds| tariff.value(rounds)).unwrap_or_default();
        let per_round = others.tokens / others.rounds.max(1e-6);
        tariff.value(&seat.rounds).with(&others, (CLASS_TOKENS / per_round.max(1.0)).max(2.0))
    }

    /// How many times as fast leaping would have been in an output of so many tokens, by its own virtual rounds with the
    /// better drafter: 1 where it would not have leapt. Also what that rests on. `None` if there were too few rounds.
    pub fn would_gain(&self, tokens: usize) -> Option<(f64, Basis)> {
        self.control.with(|learnt| {
            let token = learnt.costs.ride_token()?;
            let tariff = self.tariff(learnt, None);
            let known = self.seats.iter().filter(|seat| seat.rounds.count() >= WOULD_OF);
            let rate = known.filter_map(|seat| tariff.value(&seat.rounds).rate()).max_by(f64::total_cmp)?;
            let riding = tokens as f64 * token;
            let gain = riding / (tokens as f64 / rate + tariff.switch_in);
            Some((if gain < 1.0 + self.margin { 1.0 } else { gain }, tariff.basis))
        })
    }

    /// The tokens per second that leaping with this drafter reaches in the long run, at least those of riding.
    pub(super) fn rate(&self, seat: Option<&Seat>, tariff: &Tariff, learnt: &Learnt) -> f64 {
        let leaping = seat.and_then(|seat| self.value(seat, tariff, learnt).rate());
        leaping.unwrap_or(0.0).max(1.0 / tariff.token)
    }

    /// Seconds that requests of others lose by a round with so many nodes, all together.
    pub(super) fn lost_by_others(&self, nodes: usize, learnt: &Learnt) -> f64 {
        let beyond = learnt.costs.verify(self.way(), nodes) - learnt.costs.ride_token_expected();
        learnt.crowd.others() as f64 * beyond.max(0.0)
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
    /// what a verify call costs. What the model's draft cost is spent already. A sampled one goes as it is.
    pub fn combine(&self, model: Draft, stand: Stand) -> Draft {
        match model.by(self.model) {
            Draft::Tree(model) => self.merge_with_lookups(model, stand).into(),
            sampled @ Draft::Sampled(_) => sampled,
        }
    }

    fn merge_with_lookups(&self, model: Tree, stand: Stand) -> Tree {
        let most = self.gamma_fixed.unwrap_or(self.gamma_max);
        let budget = Budget { nodes: most.min(stand.room.nodes), depth: stand.room.depth };
        let drafts: Vec<Tree> = std::iter::once(model).chain(self.looked_up(budget)).collect();
        self.control.with(|learnt| {
            if self.gamma_fixed.is_some() {
                return self.merged(&drafts, budget, learnt).tree;
            }
            let tariff = self.tariff(learnt, None);
            let budget = self.budget(Stand { room: budget, ..stand }, &tariff, learnt);
            let merged = self.merged(&drafts, budget, learnt);
            let rate = self.rate(self.model().map(|(seat, _)| seat), &tariff, learnt);
            let quote = tariff.cut(&merged.survival, rate, false);
            let mut draft = merged.tree;
            draft.truncate(quote.nodes.max(1));
            draft
        })
    }

    /// The drafts of all lookups.
    pub(super) fn looked_up(&self, budget: Budget) -> Vec<Tree> {
        self.lookups().map(|lookup| lookup.draft(budget)).collect()
    }
}
