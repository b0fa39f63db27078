//! The next step: the drafter, the length of the draft, or plain decoding.

use std::sync::Arc;

use super::slot::{ModelDrafter, SessionDrafter, counted_for};
use super::streak::Streak;
use super::{CLASS_TOKENS, EVIDENCE, NextStep, PROMPT_CHUNK_TOKENS, SessionState, SpeculationController};
use crate::control::costs::Basis;
use crate::control::gates;
use crate::control::{Class, Measurements, Outlook, Quote, RoundCosts, Value};
use crate::draft::{Budget, DrafterId, Tree};
use crate::units::TokenId;
use crate::words::{PlainReason, VerifyMethod};

/// Minimum rounds in the shadow for a projected speedup.
const PROJECTED_OF: f64 = 4.0;
/// Share of a plain token's time that reading the prompt may take while the client waits.
const MAX_READ: f64 = 0.5;

struct ChoiceInputs<'a, 'b> {
    state: SessionState,
    budget: Budget,
    round_costs: RoundCosts,
    /// The drafts of the lookups.
    drafts: &'a [Tree],
    learnt: &'a Measurements<'b>,
}

/// A round that pays, with the outlook by which it is judged.
type Offer = (Quote, Outlook);

impl SpeculationController {
    /// Chooses the next step. The caller has checked that nothing forbids speculation. The lookups
    /// search while no other session of the replica waits for its measurements.
    pub fn choose(&mut self, output: &[TokenId], state: SessionState) -> NextStep {
        if let Some(fixed) = self.rules.gamma_fixed {
            return self.forced(output, fixed, state);
        }
        self.feed(output, state.done, PROMPT_CHUNK_TOKENS);
        if self.slots.is_empty() {
            return NextStep::Plain(PlainReason::NoDraft);
        }
        let early = !state.speculating && state.done < self.not_before;
        if !self.caught_up(state.done) || early || self.streak.is_some_and(Streak::has_lost) {
            return NextStep::Plain(PlainReason::NoGain);
        }
        let control = Arc::clone(&self.control);
        let open = control.with(|learnt| {
            if let Some(reason) = self.gate(state, learnt) {
                return Err(reason);
            }
            let round_costs = self.round_costs(learnt);
            Ok((self.budget(state, &round_costs, learnt), round_costs))
        });
        let (budget, round_costs) = match open {
            Ok(open) => open,
            Err(reason) => return NextStep::Plain(reason),
        };
        let drafts = self.looked_up(budget);
        control
            .with(|learnt| self.weigh(&ChoiceInputs { state, budget, round_costs, drafts: &drafts, learnt }))
    }

    /// Reason why no session may speculate on this replica now; `None` if one may.
    pub(super) fn gate(&mut self, state: SessionState, learnt: &mut Measurements) -> Option<PlainReason> {
        gates::closed(learnt, state.speculating, self.rules.first_token).next().map(|(reason, _)| reason)
    }

    /// Present costs.
    pub(super) fn round_costs(&self, learnt: &Measurements) -> RoundCosts {
        RoundCosts::new(learnt, self.way(), self.model.number)
    }

    /// The largest draft that pauses the client's stream for at
    /// most `max_gap`. No nodes at all if even an empty round takes longer.
    fn budget(&self, state: SessionState, round_costs: &RoundCosts, learnt: &Measurements) -> Budget {
        let way = self.way();
        let sequences =
            if way.method == VerifyMethod::FanOut { learnt.concurrency.fan_out_nodes() } else { usize::MAX };
        let allowed = learnt.nodes_allowed(self.rules.first_token).min(learnt.tried(way)).min(sequences);
        let most = state.room.nodes.min(self.rules.gamma_max).min(allowed).min(self.room());
        Budget { nodes: round_costs.within_gap(most, self.max_gap).unwrap_or(0), depth: state.room.depth }
    }

    fn weigh(&self, inputs: &ChoiceInputs<'_, '_>) -> NextStep {
        let ChoiceInputs { state, budget, .. } = *inputs;
        if budget.nodes == 0 && state.room.nodes > 0 {
            return NextStep::Plain(PlainReason::MaxGap);
        }
        let (mut draft, lookup) = self.lookup_offer(inputs);
        let (queries_model, model) = self.model_drafter_offer(inputs);
        match (lookup, model) {
            (Some((lookup, known)), Some((model, other))) => {
                let rate = known.rate().max(other.rate());
                if model.surplus(rate) > lookup.surplus(rate) {
                    return NextStep::Draft(model.nodes);
                }
                draft.truncate(lookup.nodes);
                NextStep::Verify(draft)
            }
            (None, Some((model, _))) => NextStep::Draft(model.nodes),
            (Some((lookup, _)), None) => {
                draft.truncate(lookup.nodes);
                NextStep::Verify(draft)
            }
            (None, None) if draft.is_empty() && !queries_model => NextStep::Plain(PlainReason::NoDraft),
            (None, None) if self.refused(inputs.learnt) => NextStep::Plain(PlainReason::GateAcceptance),
            (None, None) => NextStep::Plain(PlainReason::NoGain),
        }
    }

    /// The draft of the lookups, and its value if it pays.
    fn lookup_offer(&self, inputs: &ChoiceInputs<'_, '_>) -> (Tree, Option<Offer>) {
        let ChoiceInputs { budget, round_costs, drafts, learnt, .. } = inputs;
        let counted = counted_for(&self.slots, 0).and_then(|position| self.slots.get(position));
        let outlook = self.outlook(counted, inputs);
        let (draft, quote) = self.cut(drafts, *budget, outlook.rate(), round_costs, learnt);
        let first = draft.nodes().first().map(|node| node.votes.first().drafter);
        let worth = self.worth(quote, first, &outlook, inputs);
        (draft, worth.then_some((quote, outlook)))
    }

    /// True if the model drafter may be queried, and the expected value of its draft if that pays.
    fn model_drafter_offer(&self, inputs: &ChoiceInputs<'_, '_>) -> (bool, Option<Offer>) {
        let ChoiceInputs { state, budget, round_costs, learnt, .. } = inputs;
        let reads = |drafter: &ModelDrafter| drafter.warm || self.reads_quickly(round_costs.token, learnt);
        let model = self.model().filter(|(slot, drafter)| reads(drafter) && slot.health.is_well(state.done));
        let offer = model.and_then(|(slot, _)| {
            let outlook = self.outlook(Some(slot), inputs);
            let nodes = budget.nodes.min(budget.depth);
            let offer = self.model_offer(nodes, outlook.rate(), round_costs, learnt)?;
            self.worth(offer, Some(slot.id), &outlook, inputs).then_some((offer, outlook))
        });
        (model.is_some(), offer)
    }

    /// True if the model drafter reads a prompt in less than [`MAX_READ`] of a plain token's time:
    /// then its first draft may be waited for. Otherwise it reads while the request is decoded
    /// plainly.
    fn reads_quickly(&self, token: f64, learnt: &Measurements) -> bool {
        learnt.costs.reading(self.model.number).is_some_and(|seconds| seconds < MAX_READ * token)
    }

    /// True if hardly any first token of any drafter is accepted. Virtual rounds go on, so a change
    /// is seen.
    fn refused(&self, learnt: &Measurements) -> bool {
        let drafters = self.slots.iter().map(|slot| (self.bucket, slot.id));
        learnt.survival.all_refused(drafters, self.rules.min_acceptance)
    }

    /// True if a round whose first token this drafter proposes pays, by the present measurements.
    fn worth(
        &self,
        quote: Quote,
        first: Option<DrafterId>,
        outlook: &Outlook,
        inputs: &ChoiceInputs<'_, '_>,
    ) -> bool {
        if inputs.state.speculating {
            return outlook.goes_on(quote, self.rules.margin, self.streak.map_or(0, |streak| streak.gap));
        }
        let known = |drafter| inputs.learnt.survival.evidence(self.bucket, drafter) >= EVIDENCE;
        first.is_some_and(known) && outlook.begins(quote, self.rules.margin)
    }

    fn outlook(&self, slot: Option<&SessionDrafter>, inputs: &ChoiceInputs<'_, '_>) -> Outlook {
        let ChoiceInputs { state, round_costs, learnt, .. } = inputs;
        Outlook {
            token: round_costs.token,
            value: slot.map(|slot| self.value(slot, round_costs, learnt)).unwrap_or_default(),
            empty: round_costs.round(0),
            switch_in: round_costs.switch_in,
            switch_out: round_costs.switch_out,
            rest: learnt.expected_remainder(state.done).min(state.rest.map_or(f64::MAX, |rest| rest as f64)),
        }
    }

    /// The rounds of the drafter in this slot: this session's, combined with those of its class.
    fn value(&self, slot: &SessionDrafter, round_costs: &RoundCosts, learnt: &Measurements) -> Value {
        let class = Class::new(slot.id, self.bucket, self.rules.kind);
        let others = learnt.classes.of(class).map(|rounds| rounds.value(round_costs)).unwrap_or_default();
        let per_round = others.tokens / others.rounds.max(1e-6);
        slot.rounds.value(round_costs).with(&others, (CLASS_TOKENS / per_round.max(1.0)).max(2.0))
    }

    /// Projected speedup for an output of `tokens` tokens, by the virtual rounds of the best
    /// drafter: 1 where it would not have been speculated on. Also its basis. `None` if there were
    /// too few rounds.
    pub fn projected_speedup(&self, tokens: usize) -> Option<(f64, Basis)> {
        self.control.with(|learnt| {
            let token = learnt.costs.plain_token()?;
            let round_costs = self.round_costs(learnt);
            let known = self.slots.iter().filter(|slot| slot.rounds.count() >= PROJECTED_OF);
            let rate =
                known.filter_map(|slot| slot.rounds.value(&round_costs).rate()).max_by(f64::total_cmp)?;
            let plain_seconds = tokens as f64 * token;
            let gain = plain_seconds / (tokens as f64 / rate + round_costs.switch_in);
            Some((if gain < 1.0 + self.rules.margin { 1.0 } else { gain }, round_costs.basis))
        })
    }

    /// Tokens per second that speculation with this drafter reaches in the long run, at least those
    /// of plain decoding.
    pub(super) fn rate(
        &self,
        slot: Option<&SessionDrafter>,
        round_costs: &RoundCosts,
        learnt: &Measurements,
    ) -> f64 {
        let value = slot.map(|slot| self.value(slot, round_costs, learnt)).unwrap_or_default();
        value.long_run_rate(round_costs.token)
    }

    /// `gamma.fixed`: a draft of at most `fixed` nodes, whatever it may yield.
    fn forced(&mut self, output: &[TokenId], fixed: usize, state: SessionState) -> NextStep {
        self.feed(output, state.done, usize::MAX);
        let nodes = fixed.min(state.room.nodes).min(self.room());
        let budget = Budget { nodes, depth: state.room.depth };
        let gamma = nodes.min(budget.depth);
        if gamma > 0 && self.model().is_some_and(|(slot, _)| slot.health.is_well(state.done)) {
            return NextStep::Draft(gamma);
        }
        let drafts = self.looked_up(budget);
        NextStep::Verify(self.control.with(|learnt| self.merged(&drafts, budget, learnt)).tree)
    }

    /// The draft to verify once the model drafter has answered: merged with the drafts of the
    /// lookups, cut by the cost of a verify request. The cost of the model's draft is spent
    /// already.
    pub fn combine(&self, model: Tree, state: SessionState) -> Tree {
        let model = model.by(self.model);
        let most = self.rules.gamma_fixed.unwrap_or(self.rules.gamma_max);
        let budget = Budget { nodes: most.min(state.room.nodes), depth: state.room.depth };
        let drafts: Vec<Tree> = std::iter::once(model).chain(self.looked_up(budget)).collect();
        self.control.with(|learnt| {
            if self.rules.gamma_fixed.is_some() {
                return self.merged(&drafts, budget, learnt).tree;
            }
            let round_costs = self.round_costs(learnt);
            let budget = self.budget(SessionState { room: budget, ..state }, &round_costs, learnt);
            let rate = self.model_rate(&round_costs, learnt);
            let (mut draft, quote) = self.cut(&drafts, budget, rate, &round_costs, learnt);
            draft.truncate(quote.nodes.max(1));
            draft
        })
    }

    /// The drafts of all lookups.
    pub(super) fn looked_up(&self, budget: Budget) -> Vec<Tree> {
        self.lookups().map(|lookup| lookup.draft(self.context.text(), budget)).collect()
    }
}
