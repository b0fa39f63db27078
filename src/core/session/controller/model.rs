//! Shadow passes of the model drafter: its choices, requested during plain decoding.

use super::{EVIDENCE, SpeculationController, score};
use crate::control::{Measurements, Quote, Round, RoundCosts};
use crate::draft::{Features, Tree};
use crate::session::shadow::ShadowSchedule;
use crate::units::TokenId;

impl SpeculationController {
    /// The first output index to request from the model drafter; `None` if no pass is due after
    /// `done` output tokens. The first pass also lets the drafter read the prompt, so it comes
    /// early where drafts are likely to pay, and seldom where earlier requests show that they are
    /// not.
    pub fn shadow_due(&mut self, done: usize) -> Option<usize> {
        let (slot, drafter) = self.model()?;
        let (warm, explored, due) = (drafter.warm, drafter.explored, drafter.shadow.due(done));
        if self.rules.gamma_fixed.is_some() || self.prompt.is_none() || !slot.health.is_well(done) {
            return None;
        }
        if warm && due.is_none() {
            return None;
        }
        let (known, promising, hopeless, earned) = self.control.with(|learnt| {
            let round_costs = self.round_costs(learnt);
            let known = learnt.survival.evidence(self.bucket, self.model) >= EVIDENCE;
            let earned = ShadowSchedule::earned_by(
                learnt.costs.shadow_pass(self.model.number),
                learnt.costs.plain_token(),
            );
            let promising = self.promising(1.0 + self.rules.margin, &round_costs, learnt);
            (known, promising, self.hopeless(&round_costs), earned)
        });
        if !warm && known && promising {
            return Some(done.saturating_sub(ShadowSchedule::CHUNK));
        }
        let from = due?;
        if hopeless {
            self.model_drafter_mut()?.shadow.wait(done, 256);
            return None;
        }
        if !warm && !explored && known && done < earned {
            let explored = self.rng.chance(32);
            let drafter = self.model_drafter_mut()?;
            drafter.explored = explored;
            if !explored {
                drafter.shadow.wait(done, earned - done);
                return None;
            }
        }
        Some(from)
    }

    /// True if the model drafter is expected to be more than `times` as fast as plain decoding.
    fn promising(&self, times: f64, round_costs: &RoundCosts, learnt: &Measurements) -> bool {
        let rate = self.model_rate(round_costs, learnt);
        let offer = self.model_offer(self.rules.gamma_max, rate, round_costs, learnt);
        offer.is_some_and(|offer| offer.tokens * round_costs.token > times * offer.seconds)
    }

    /// True if the model drafter could not pay even if nine of ten of its tokens were accepted.
    fn hopeless(&self, round_costs: &RoundCosts) -> bool {
        let survival: Vec<f64> = (1..=self.rules.gamma_max).map(|depth| 0.9_f64.powi(depth as i32)).collect();
        let quote = round_costs.cut(&survival, 1.0 / round_costs.token, true);
        quote.tokens * round_costs.token < (1.0 + self.rules.margin) * quote.seconds
    }

    /// Tokens per second that speculation with the model drafter reaches in the long run.
    pub(super) fn model_rate(&self, round_costs: &RoundCosts, learnt: &Measurements) -> f64 {
        self.rate(self.model().map(|(slot, _)| slot), round_costs, learnt)
    }

    /// Minimum survival probability with which one more token of a draft of at most `gamma` is
    /// worth its time; 0 with `gamma.fixed`.
    pub fn min_worth(&self, gamma: usize) -> f64 {
        if self.rules.gamma_fixed.is_some() {
            return 0.0;
        }
        self.control.with(|learnt| {
            let round_costs = self.round_costs(learnt);
            round_costs.min_survival(self.model_rate(&round_costs, learnt), gamma, true)
        })
    }

    /// Takes a shadow pass of `seconds`: the model drafter's choices at the output positions
    /// `from..`, `None` where its choice is no token of the target's.
    pub fn shadowed(&mut self, output: &[TokenId], from: usize, choices: &[Option<TokenId>], seconds: f64) {
        let gamma = self
            .control
            .with(|learnt| {
                let round_costs = self.round_costs(learnt);
                self.model_offer(
                    self.rules.gamma_max,
                    self.model_rate(&round_costs, learnt),
                    &round_costs,
                    learnt,
                )
            })
            .map_or(0, |quote| quote.nodes)
            .clamp(1, self.rules.gamma_max.max(1));
        // A choice that is no token of the target's is certainly not the one that came.
        let choice = |(choice, &token): (&Option<TokenId>, &TokenId)| (choice.unwrap_or(!token), token);
        let pairs: Vec<(TokenId, TokenId)> =
            choices.iter().zip(output.iter().skip(from)).map(choice).collect();
        let hits: Vec<bool> = pairs.iter().map(|(choice, token)| choice == token).collect();
        let mut rest = pairs.as_slice();
        for run in rounds(&hits, gamma) {
            let (round, behind) = rest.split_at(rest.len().min(run + 1));
            for (depth, &(choice, token)) in round.iter().take(gamma).enumerate() {
                let draft = Tree::chain(&[choice], self.model, Features::default());
                score(&self.control, &mut self.tuning, self.bucket, &draft, None, depth, token);
            }
            self.count(Round::new(gamma, gamma, run + 1));
            rest = behind;
        }
        let (promising, earned) = self.control.with(|learnt| {
            learnt.costs.shadowed(self.model.number, seconds, self.has_read());
            let earned = ShadowSchedule::earned_by(
                learnt.costs.shadow_pass(self.model.number),
                learnt.costs.plain_token(),
            );
            (self.promising(1.0, &self.round_costs(learnt), learnt), earned)
        });
        self.read();
        if let Some(drafter) = self.model_drafter_mut() {
            drafter.shadow.passed(output.len(), promising, earned);
        }
    }

    /// The best length of a model draft by its expected yield, where a second is worth `rate`
    /// tokens; `None` if no length pays.
    pub(super) fn model_offer(
        &self,
        gamma_max: usize,
        rate: f64,
        round_costs: &RoundCosts,
        learnt: &Measurements,
    ) -> Option<Quote> {
        if self.model().is_none() || gamma_max == 0 {
            return None;
        }
        let adjust = |known| self.tuning.adjust(self.model, known);
        let survival = learnt.survival.chain(self.bucket, self.model, gamma_max, adjust);
        Some(round_costs.cut(&survival, rate, true)).filter(|quote| quote.nodes > 0)
    }
}

/// The rounds that drafts of at most `gamma` tokens make of a text: for each the number of accepted
/// draft tokens. One more token comes with each.
fn rounds(hits: &[bool], gamma: usize) -> Vec<usize> {
    let (mut rounds, mut rest) = (Vec::new(), hits);
    while !rest.is_empty() {
        let run = rest.iter().take(gamma).take_while(|hit| **hit).count();
        rounds.push(run);
        rest = rest.get(run + 1..).unwrap_or_default();
    }
    rounds
}
