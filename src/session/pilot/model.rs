//! The shadow of the model drafter: what it would have chosen, asked for while riding.

use super::{EVIDENCE, Pilot, score};
use crate::control::hedge::rounds;
use crate::control::{Learnt, Quote, Tariff};
use crate::draft::{Features, Tree};
use crate::session::shadow::ShadowPlan;
use crate::units::{Tick, TokenId};

impl Pilot {
    /// The first output index that the model drafter is to be asked for, if a pass is due. The first pass
    /// also lets the drafter read the prompt, so it comes early where drafts are likely to pay, and seldom
    /// where earlier requests show that they are not.
    pub fn shadow_due(&mut self, done: usize) -> Option<usize> {
        let (seat, asked) = self.model()?;
        let (warm, explored, due) = (asked.warm, asked.explored, asked.shadow.due(done));
        if self.gamma_fixed.is_some() || self.prompt.is_none() || !seat.health.is_well(done) {
            return None;
        }
        if warm && due.is_none() {
            return None;
        }
        let (known, promising, hopeless, earned) = self.control.with(|learnt| {
            let tariff = self.tariff(learnt, None);
            let known = learnt.survival.evidence(self.heat, self.model) >= EVIDENCE;
            let earned =
                ShadowPlan::earned_by(learnt.costs.shadow_pass(self.model.number), learnt.costs.ride_token());
            let promising = self.promising(1.0 + self.margin, &tariff, learnt);
            (known, promising, self.hopeless(&tariff), earned)
        });
        if !warm && known && promising {
            return Some(done.saturating_sub(ShadowPlan::CHUNK));
        }
        let from = due?;
        if hopeless {
            self.asked_mut()?.shadow.wait(done, 256);
            return None;
        }
        if !warm && !explored && known && done < earned {
            let explored = self.dice.one_in(32);
            let asked = self.asked_mut()?;
            asked.explored = explored;
            if !explored {
                asked.shadow.wait(done, earned - done);
                return None;
            }
        }
        Some(from)
    }

    /// Whether the model drafter is expected to be more than `times` as fast as riding.
    fn promising(&self, times: f64, tariff: &Tariff, learnt: &Learnt) -> bool {
        let rate = self.model_rate(tariff, learnt);
        let offer = self.model_offer(self.gamma_max, rate, tariff, learnt);
        offer.is_some_and(|offer| offer.tokens * tariff.token > times * offer.seconds)
    }

    /// Whether the model drafter could not pay even if nine of ten of its tokens were accepted.
    fn hopeless(&self, tariff: &Tariff) -> bool {
        let survival: Vec<f64> = (1..=self.gamma_max).map(|depth| 0.9_f64.powi(depth as i32)).collect();
        let quote = tariff.cut(&survival, 1.0 / tariff.token, true);
        quote.tokens * tariff.token < (1.0 + self.margin) * quote.seconds
    }

    /// The tokens per second that leaping with the model drafter reaches in the long run.
    pub(super) fn model_rate(&self, tariff: &Tariff, learnt: &Learnt) -> f64 {
        self.rate(self.model().map(|(seat, _)| seat), tariff, learnt)
    }

    /// The least chance of being accepted with which one more token of a draft of at most so many is worth its time.
    pub fn least_worth(&self, gamma: usize) -> f64 {
        if self.gamma_fixed.is_some() {
            return 0.0;
        }
        self.control.with(|learnt| {
            let tariff = self.tariff(learnt, None);
            self.model_rate(&tariff, learnt) * tariff.one_more(gamma)
        })
    }

    /// Learns from a shadow pass of `seconds`: the model drafter's own choices at the output places `from..`.
    pub fn shadowed(
        &mut self,
        output: &[TokenId],
        from: usize,
        choices: &[Option<TokenId>],
        seconds: f64,
        now: Tick,
    ) {
        let gamma = self
            .control
            .with(|learnt| {
                let tariff = self.tariff(learnt, None);
                self.model_offer(self.gamma_max, self.model_rate(&tariff, learnt), &tariff, learnt)
            })
            .map_or(0, |quote| quote.nodes)
            .clamp(1, self.gamma_max.max(1));
        // What is no token of the target's is certainly not the one that came.
        let choice = |(choice, &token): (&Option<TokenId>, &TokenId)| (choice.unwrap_or(!token), token);
        let pairs: Vec<(TokenId, TokenId)> =
            choices.iter().zip(output.iter().skip(from)).map(choice).collect();
        let hits: Vec<bool> = pairs.iter().map(|(choice, token)| choice == token).collect();
        let place = self.seats.iter().position(|seat| seat.asked().is_some());
        let mut rest = pairs.as_slice();
        for run in rounds(&hits, gamma) {
            let (round, behind) = rest.split_at(rest.len().min(run + 1));
            for (depth, &(choice, token)) in round.iter().take(gamma).enumerate() {
                let draft = Tree::chain(&[choice], self.model, Features::default());
                score(&self.control, &mut self.tuning, self.heat, &draft, None, depth, token);
            }
            if let Some(place) = place {
                self.note(place, gamma, gamma, run + 1);
            }
            rest = behind;
        }
        let (promising, earned) = self.control.with(|learnt| {
            learnt.costs.shadowed(self.model.number, seconds, self.has_read(), now);
            let earned =
                ShadowPlan::earned_by(learnt.costs.shadow_pass(self.model.number), learnt.costs.ride_token());
            (self.promising(1.0, &self.tariff(learnt, None), learnt), earned)
        });
        self.read();
        if let Some(asked) = self.asked_mut() {
            asked.shadow.passed(output.len(), promising, earned);
        }
    }

    /// The best length of a model draft by what is expected of it, where a second is worth `rate` tokens; `None` if no
    /// length is.
    pub(super) fn model_offer(
        &self,
        gamma_max: usize,
        rate: f64,
        tariff: &Tariff,
        learnt: &Learnt,
    ) -> Option<Quote> {
        if self.model().is_none() || gamma_max == 0 {
            return None;
        }
        let adjust = |known| self.tuning.adjust(self.model, known);
        let survival = learnt.survival.chain(self.heat, self.model, gamma_max, adjust);
        Some(tariff.cut(&survival, rate, true)).filter(|quote| quote.nodes > 0)
    }
}
