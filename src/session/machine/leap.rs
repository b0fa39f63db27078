//! Leaping: a draft is asked for, verified, and what was accepted becomes the past. Every fault ends in a ride.

use std::time::Duration;

use super::Session;
use super::flight::{Drafting, Verifying};
use crate::control::{Beside, Presence};
use crate::draft::{Draft, Tree};
use crate::session::accept::{Accepted, Judged, Rule, Walk};
use crate::session::pilot::{Step, Took, Turn};
use crate::session::{Action, ActionId, Event, Fault, Judging};
use crate::units::{Tick, TokenId};
use crate::words::{Put, RideReason, Verdict};

/// How long a draft is waited for, in times of a ridden token: where drafter and backend share their cores, the
/// first one waits for what the ride left behind.
const PATIENCE: f64 = 2.0;
/// Longest time of a ridden token that patience is reckoned by, in seconds.
const PATIENCE_PACE: f64 = 1.0;

/// A verify call to be sent.
pub(super) struct Call {
    /// The index of its plan in the list of plans.
    pub place: usize,
    pub draft: Draft,
    /// Tokens that the model drafter computed for it.
    pub modelled: usize,
    /// What the call before it has to bring.
    pub assumed: Vec<TokenId>,
    pub turn: Turn,
}

impl<W: Walk> Session<W> {
    /// Does a leaping step. `began` is when the round began, for its cost.
    pub(super) fn leap(&mut self, step: Step, began: Tick, now: Tick) {
        match step {
            Step::Ride(reason) => {
                self.take_sketch();
                self.drop_calls();
                self.pilot.leave(self.output.tokens().len(), now);
                if let Some(presence) = &mut self.presence {
                    presence.leaps(false);
                }
                self.ride_on(reason, true, now);
            }
            Step::Draft(gamma) => {
                let least = self.pilot.least_worth(gamma);
                let id = self.act(Action::Draft { gamma, least, assumed: Vec::new() });
                let until = now.after(self.patience());
                self.flight.draft = Some(Drafting { id, since: now, gamma, until });
            }
            Step::Verify(draft) => self.verify(draft.into(), 0, began, now),
        }
    }

    /// How long a draft is waited for. While the drafter reads the prompt, and with `gamma.fixed`, it is as long as a
    /// verify call may take: the client waits meanwhile, so a drafter that hangs must not hold it up. So is a sampled
    /// draft: how long it takes depends on what was drawn, and what was drawn must not decide whether it is verified.
    fn patience(&self) -> Duration {
        if !self.pilot.has_read() || self.rules.samples {
            return self.rules.draft_timeout.unwrap_or(self.rules.verify_timeout);
        }
        let own = || {
            if self.rules.gamma_fixed.is_some() {
                return self.rules.verify_timeout;
            }
            let pace = self.pilot.control().with(|learnt| learnt.costs.ride_token_expected());
            Duration::from_secs_f64(PATIENCE * pace.min(PATIENCE_PACE))
        };
        self.rules.draft_timeout.unwrap_or_else(own)
    }

    /// The draft is too late for its round, which goes on with what the lookups have, if anything. The drafter is
    /// asked again for the next round that it is expected to be worth; one that took as long as a verify call may is
    /// taken to hang, and is not asked for a while.
    pub(super) fn draft_late(&mut self, late: Drafting, now: Tick) {
        let hangs = now >= late.since.after(self.rules.verify_timeout);
        if hangs || !self.pilot.has_read() {
            self.pilot.model_failed(self.output.tokens().len());
        }
        let (began, worth) = self.pilot.waited(late.gamma, late.since, now);
        let draft = self.pilot.combine(Tree::default().into(), self.stand(true));
        self.verify(draft, worth, began, now);
    }

    pub(super) fn verify(&mut self, draft: Draft, modelled: usize, began: Tick, now: Tick) {
        self.verify_by(0, draft, modelled, began, now);
    }

    /// Puts the draft to the backend by the plan at this place of the list; beyond its end, rides one token.
    fn verify_by(&mut self, place: usize, draft: Draft, modelled: usize, began: Tick, now: Tick) {
        if self.rules.plans.get(place).is_none() {
            return self.fault_ride(RideReason::NoDraft, now);
        }
        self.summary.reason = None;
        debug_assert!(self.flight.calls.is_empty(), "nothing continues the output but this call");
        let turn = if std::mem::take(&mut self.missed) { Turn::AfterMiss } else { Turn::Alone };
        self.send(Call { place, draft, modelled, assumed: Vec::new(), turn }, began, now);
        self.look_ahead(now);
        self.sketch(now);
    }

    /// Sends a verify call behind those that are under way.
    pub(super) fn send(&mut self, call: Call, began: Tick, now: Tick) {
        let Call { place, draft, modelled, assumed, turn } = call;
        let Some(&plan) = self.rules.plans.get(place) else { return };
        if let Some(presence) = &mut self.presence {
            presence.calls(draft.len());
        }
        let all = self.flight.calls.iter().flat_map(|call| &call.assumed).chain(&assumed).copied().collect();
        let id = self.act(Action::Verify(draft.clone(), plan, all));
        let until = now.after(self.rules.verify_timeout);
        let tolerance = self.tolerance();
        let early = None;
        self.flight.calls.push_back(Verifying {
            id,
            until,
            began,
            draft,
            modelled,
            place,
            tolerance,
            assumed,
            early,
            turn,
        });
    }

    /// Whether drafts depend on the target's noise in other ways than that the model drafter drew each token with it.
    fn coupled(&self) -> bool {
        let rules = &self.rules;
        rules.shares_noise && (rules.accept.rule == Rule::Fly || !rules.lookups.is_empty())
    }

    /// How far the accept rule may be relaxed now.
    fn tolerance(&self) -> f64 {
        if !self.rules.accept.is_lossy() {
            return 0.0;
        }
        let load = self.pilot.control().with(|learnt| learnt.crowd.load());
        self.rules.accept.tolerance.at(self.temperature, load)
    }

    pub(super) fn drafting(&mut self, event: Event, now: Tick) {
        let answer = match event {
            Event::Draft(model) => Ok(model),
            Event::Fault(fault) => Err(fault),
            _ => return,
        };
        let Some(Drafting { since, gamma, .. }) = self.flight.draft.take() else { return };
        match answer {
            Ok(model) => {
                self.pilot.read();
                // A chain that ends early, at an end of text, took a step for each token that it has, and no more. One that
                // says nothing was waited for all the same.
                let steps = if model.is_empty() { gamma } else { model.len() };
                let began = self.pilot.drafted(steps, since, now);
                let draft = self.pilot.combine(model, self.stand(true));
                self.verify(draft, steps, began, now);
            }
            Err(Fault::RetryAfter(pause)) => self.verify_paused(pause, now),
            Err(_) => self.draft_failed(now),
        }
    }

    pub(super) fn draft_failed(&mut self, now: Tick) {
        let done = self.output.tokens().len();
        self.pilot.model_failed(done);
        self.fault_ride(RideReason::VerifyFault, now);
    }

    pub(super) fn verifying(&mut self, id: ActionId, event: Event, now: Tick) {
        let answer = match event {
            Event::Verdict(verdict) => Ok(verdict),
            Event::Fault(fault) => Err(fault),
            _ => return,
        };
        if let Err(Fault::RetryAfter(pause)) = answer {
            // Whichever call it answers, the engine wants no more of them.
            self.pause = Some(now.after(pause));
        }
        if let Some((call, answer)) = self.flight.answered(id, answer) {
            self.verified(call, answer, now);
        }
    }

    /// The first call under way was answered.
    pub(super) fn verified(&mut self, call: Verifying, answer: Result<Verdict, Fault>, now: Tick) {
        match answer {
            Ok(verdict) => self.judged(call, &verdict, now),
            Err(Fault::RetryAfter(_)) => self.leap(Step::Ride(RideReason::RetryAfter), now, now),
            // The context only grows, so no later round will fit.
            Err(Fault::TooLong) => {
                self.fault_ride(RideReason::ContextTooLong, now);
                self.fault_until = usize::MAX;
            }
            Err(_) => self.verify_failed(now),
        }
    }

    fn judged(&mut self, call: Verifying, verdict: &Verdict, now: Tick) {
        let Some(accepted) = self.walked(&call, verdict) else { return self.verify_failed(now) };
        let decided = !accepted.tokens.is_empty();
        self.timed_call(&call, verdict, decided, now);
        let Verifying { id, draft, modelled, place, .. } = call;
        if !decided {
            self.drop_calls();
            return self.verify_by(place + 1, draft, modelled, now, now);
        }
        self.watch_marks(&accepted.tokens);
        self.pilot.hear(&draft, verdict, self.output.tokens());
        let delta = self.output.extend(&accepted.tokens, accepted.ends);
        let kept = accepted.nodes.len().min(delta.tokens.len());
        let (drafted, depth) = (draft.len() as u32, draft.depth() as u32);
        self.summary.round(Judging { call: id, drafted, accepted: kept as u32, depth });
        self.summary.drift = self.judge.ledger();
        self.emit(delta);
        self.pilot.round(&draft, &accepted, modelled, now);
        if self.output.finish().is_some() {
            self.pilot.leave(self.output.tokens().len(), now);
            return self.finish(self.output.finish());
        }
        self.next_round(&accepted.tokens, now);
    }

    /// Walks the draft of a call. `None` if the verdict cannot be used: an id outside the vocabulary must not become the
    /// past, no ride could go on from there.
    fn walked(&mut self, call: &Verifying, verdict: &Verdict) -> Option<Accepted> {
        let round = Judged {
            draft: &call.draft,
            verdict,
            context: self.context(),
            output: self.output.tokens().len(),
            tolerance: call.tolerance,
            coupled: self.coupled(),
            free: &|tokens| self.output.is_free_behind(tokens),
        };
        let accepted = self.judge.walk(&round);
        accepted.filter(|accepted| accepted.is_within(self.rules.vocabulary))
    }

    /// Notes what a call took.
    fn timed_call(&mut self, call: &Verifying, verdict: &Verdict, decided: bool, now: Tick) {
        let Verifying { began, draft, modelled, place, turn, .. } = call;
        let nodes = self.presence.as_mut().and_then(Presence::call_ends).unwrap_or(draft.len() as f64);
        let by_plan = || Some(Put { plan: *self.rules.plans.get(*place)?, nodes: draft.len() });
        if let Some(put) = verdict.put.or_else(by_plan) {
            let beside = Beside { nodes, modelled: *modelled };
            let took = Took { put, seconds: now.seconds_since(*began), beside, decided, turn: *turn };
            self.pilot.called(&took, now);
        }
    }

    pub(super) fn verify_failed(&mut self, now: Tick) {
        self.pilot.verify_failed(self.output.tokens().len(), now);
        self.fault_ride(RideReason::VerifyFault, now);
    }

    /// A verify call has not been answered in time. On an engine that is busy, so that calls were expected to take long
    /// beside other requests, that is load; else something is wrong.
    pub(super) fn verify_late(&mut self, late: &Verifying, now: Tick) {
        if !self.pilot.is_busy(late.draft.len(), self.rules.verify_timeout) {
            return self.verify_failed(now);
        }
        self.pilot.verify_late(late.draft.len(), now.seconds_since(late.began), now);
        self.fault_ride(RideReason::GateLoad, now);
    }

    fn verify_paused(&mut self, pause: Duration, now: Tick) {
        self.pause = Some(now.after(pause));
        self.leap(Step::Ride(RideReason::RetryAfter), now, now);
    }

    pub(super) fn fault_ride(&mut self, reason: RideReason, now: Tick) {
        self.fault_reason = reason;
        self.fault_until = self.pilot.not_before().max(self.output.tokens().len() + 1);
        self.leap(Step::Ride(reason), now, now);
    }
}
