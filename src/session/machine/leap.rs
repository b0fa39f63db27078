//! Leaping: a draft is asked for, verified, and what was accepted becomes the past. Every fault ends in a ride.

use std::time::Duration;

use super::Session;
use super::flight::{Drafting, Verifying};
use crate::control::{Beside, Presence};
use crate::draft::Tree;
use crate::session::accept::{Judged, Rule, Walk};
use crate::session::pilot::Step;
use crate::session::{Action, Event, Fault};
use crate::units::Tick;
use crate::words::{Put, RideReason, Verdict};

/// How long a draft is waited for, in times of a ridden token: where drafter and backend share their cores, the
/// first one waits for what the ride left behind.
const PATIENCE: f64 = 2.0;
/// Longest time of a ridden token that patience is reckoned by, in seconds.
const PATIENCE_PACE: f64 = 1.0;

impl<W: Walk> Session<W> {
    /// Does a leaping step. `began` is when the round began, for its cost.
    pub(super) fn leap(&mut self, step: Step, began: Tick, now: Tick) {
        match step {
            Step::Ride(reason) => {
                self.pilot.leave(self.output.tokens().len(), now);
                if let Some(presence) = &mut self.presence {
                    presence.leaps(false);
                }
                self.ride_on(reason, true, now);
            }
            Step::Draft(gamma) => {
                let id = self.act(Action::Draft { gamma });
                let until = now.after(self.patience());
                self.flight.draft = Some(Drafting { id, since: now, gamma, until });
            }
            Step::Verify(draft) => self.verify(draft, 0, began, now),
        }
    }

    /// How long a draft is waited for. While the drafter reads the prompt, and with `gamma.fixed`, it is as long as a
    /// verify call may take: the client waits meanwhile, so a drafter that hangs must not hold it up.
    fn patience(&self) -> Duration {
        if !self.pilot.has_read() {
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
        let draft = self.pilot.combine(Tree::default(), self.stand(true));
        self.verify(draft, worth, began, now);
    }

    pub(super) fn verify(&mut self, draft: Tree, modelled: usize, began: Tick, now: Tick) {
        self.verify_by(0, draft, modelled, began, now);
    }

    /// Puts the draft to the backend by the plan at this place of the list; beyond its end, rides one token.
    fn verify_by(&mut self, place: usize, draft: Tree, modelled: usize, began: Tick, now: Tick) {
        let Some(&plan) = self.rules.plans.get(place) else {
            return self.fault_ride(RideReason::NoDraft, now);
        };
        self.summary.reason = None;
        if let Some(presence) = &mut self.presence {
            presence.calls(draft.len());
        }
        let id = self.act(Action::Verify(draft.clone(), plan));
        let until = now.after(self.rules.verify_timeout);
        debug_assert!(self.flight.verify.is_none(), "one verify call at a time");
        let tolerance = self.tolerance();
        self.flight.verify = Some(Verifying { id, until, began, draft, modelled, place, tolerance });
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

    pub(super) fn verifying(&mut self, event: Event, now: Tick) {
        let answer = match event {
            Event::Verdict(verdict) => Ok(verdict),
            Event::Fault(fault) => Err(fault),
            _ => return,
        };
        let Some(call) = self.flight.verify.take() else { return };
        match answer {
            Ok(verdict) => self.judged(call, &verdict, now),
            Err(Fault::RetryAfter(pause)) => self.verify_paused(pause, now),
            // The context only grows, so no later round will fit.
            Err(Fault::TooLong) => {
                self.fault_ride(RideReason::ContextTooLong, now);
                self.fault_until = usize::MAX;
            }
            Err(_) => self.verify_failed(now),
        }
    }

    fn judged(&mut self, call: Verifying, verdict: &Verdict, now: Tick) {
        let Verifying { began, draft, modelled, place, tolerance, .. } = call;
        let round = Judged {
            draft: &draft,
            verdict,
            context: self.context(),
            output: self.output.tokens().len(),
            tolerance,
            coupled: self.coupled(),
            free: &|tokens| self.output.is_free_behind(tokens),
        };
        let accepted = self.judge.walk(&round);
        // An id outside the vocabulary must not become the past: no ride could go on from there.
        let Some(accepted) = accepted.filter(|accepted| accepted.is_within(self.rules.vocabulary)) else {
            return self.verify_failed(now);
        };
        let decided = !accepted.tokens.is_empty();
        let nodes = self.presence.as_mut().and_then(Presence::call_ends).unwrap_or(draft.len() as f64);
        let put =
            verdict.put.or_else(|| Some(Put { plan: *self.rules.plans.get(place)?, nodes: draft.len() }));
        if let Some(put) = put {
            self.pilot.called(put, now.seconds_since(began), Beside { nodes, modelled }, decided, now);
        }
        if !decided {
            return self.verify_by(place + 1, draft, modelled, now, now);
        }
        self.pilot.hear(&draft, verdict, self.output.tokens());
        let delta = self.output.extend(&accepted.tokens, accepted.ends);
        self.summary.speculated = true;
        self.summary.rounds += 1;
        self.summary.drafted += draft.len() as u32;
        self.summary.drift = self.judge.ledger();
        self.summary.accepted += accepted.nodes.len().min(delta.tokens.len()) as u32;
        self.emit(delta);
        self.pilot.round(&draft, &accepted, modelled, now);
        if self.output.finish().is_some() {
            self.pilot.leave(self.output.tokens().len(), now);
            return self.finish(self.output.finish());
        }
        let step = self.step(true, now);
        self.leap(step, now, now);
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

    pub(super) fn verify_paused(&mut self, pause: Duration, now: Tick) {
        self.pause = Some(now.after(pause));
        self.leap(Step::Ride(RideReason::RetryAfter), now, now);
    }

    pub(super) fn fault_ride(&mut self, reason: RideReason, now: Tick) {
        self.fault_reason = reason;
        self.fault_until = self.pilot.not_before().max(self.output.tokens().len() + 1);
        self.leap(Step::Ride(reason), now, now);
    }
}
