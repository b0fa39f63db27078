//! Rounds: a draft is requested, verified, and its accepted tokens join the context. Every fault
//! ends in plain decoding.

use std::time::Duration;

use super::Session;
use super::flight::{Drafting, Verifying};
use crate::control::Presence;
use crate::draft::Tree;
use crate::session::accept::{Accepted, Judged, Walk};
use crate::session::controller::{Drift, NextStep, VerifyTiming};
use crate::session::{Action, Event, Fault, Judging};
use crate::units::Tick;
use crate::words::{Conditions, PlainReason, Put, VerifyResult};

/// Patience for a draft, in times of a plain token: where drafter and backend share their cores,
/// the first draft waits for the rest of the cancelled plain request.
const PATIENCE: f64 = 2.0;
/// Maximum time of a plain token for that calculation, in seconds.
const PATIENCE_PACE: f64 = 1.0;

impl<W: Walk> Session<W> {
    /// Executes a step of the controller. `began` is the start of the round, for its cost.
    pub(super) fn take_step(&mut self, step: NextStep, began: Tick, now: Tick) {
        match step {
            NextStep::Plain(reason) => {
                self.controller.leave(self.output.tokens().len(), now);
                if let Some(presence) = &mut self.presence {
                    presence.speculates(false);
                }
                self.decode_plainly(reason, true, now);
            }
            NextStep::Draft(gamma) => {
                self.drop_shadow();
                let min_survival = self.controller.min_worth(gamma);
                let id = self.act(Action::Draft { gamma, min_survival });
                let until = now.after(self.patience());
                self.flight.draft = Some(Drafting { id, since: now, gamma, until });
            }
            NextStep::Verify(draft) => {
                self.verify(draft, 0, began, now);
                // Where other drafters pay from the first tokens on, the model would never read
                // the prompt.
                if !self.controller.has_read() {
                    self.shadow_pass(now);
                }
            }
        }
    }

    /// Patience for a draft. While the drafter reads the prompt, and with `gamma.fixed`, it is the
    /// timeout of a verify request: the client waits meanwhile, so a drafter that hangs must not
    /// delay it.
    fn patience(&self) -> Duration {
        if !self.controller.has_read() {
            return self.resources.timeouts.draft.unwrap_or(self.resources.timeouts.verify);
        }
        let by_pace = || {
            if self.rules.gamma_fixed.is_some() {
                return self.resources.timeouts.verify;
            }
            let pace = self.controller.control().with(|learnt| learnt.costs.plain_token_expected());
            Duration::from_secs_f64(PATIENCE * pace.min(PATIENCE_PACE))
        };
        self.resources.timeouts.draft.unwrap_or_else(by_pace)
    }

    /// The draft is too late for its round, which goes on with the drafts of the lookups, if there
    /// are any. The drafter is queried for the next round that it is expected to be worth; one that
    /// took as long as the timeout of a verify request is considered hung, and is not queried for a
    /// while.
    pub(super) fn draft_late(&mut self, late: Drafting, now: Tick) {
        let hangs = now >= late.since.after(self.resources.timeouts.verify);
        if hangs || !self.controller.has_read() {
            self.controller.model_failed(self.output.tokens().len());
        }
        let (began, worth) = self.controller.waited(late.gamma, late.since, now);
        let draft = self.controller.combine(Tree::default(), self.state(true));
        self.verify(draft, worth, began, now);
    }

    pub(super) fn verify(&mut self, draft: Tree, modelled: usize, began: Tick, now: Tick) {
        self.verify_by(0, draft, modelled, began, now);
    }

    /// Sends the draft to the backend by the method at this index of the list; beyond its end,
    /// decodes one token plainly.
    fn verify_by(&mut self, position: usize, draft: Tree, modelled: usize, began: Tick, now: Tick) {
        let Some(&method) = self.rules.methods.get(position) else {
            return self.plain_after_fault(PlainReason::Undecided, now);
        };
        self.summary.reason = None;
        debug_assert!(self.flight.call.is_none(), "one verify request at a time");
        let draft = draft.within(self.resources.vocabulary);
        if let Some(presence) = &mut self.presence {
            presence.calls(draft.len());
        }
        let id = self.act(Action::Verify(draft.clone(), method));
        let until = now.after(self.resources.timeouts.verify);
        let conditions = self.conditions();
        self.flight.call = Some(Verifying { id, until, began, draft, modelled, position, conditions });
    }

    /// True if drafts depend on the target's noise in more ways than through the model drafter's
    /// draws of their tokens.
    fn coupled(&self) -> bool {
        self.resources.shares_noise && !self.rules.lookups.is_empty()
    }

    /// Present load, and the tolerance of the acceptance rule there.
    fn conditions(&self) -> Conditions {
        let load = self.controller.control().with(|learnt| learnt.concurrency.load());
        let (accept, temperature) = (&self.rules.accept, self.temperature);
        let tolerance = if accept.is_lossy() { accept.tolerance.at(temperature, load) } else { 0.0 };
        Conditions { temperature, load, tolerance }
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
                self.controller.read();
                // A chain that ends early, at an end of text, took a step for each of its tokens,
                // and no more. An empty one was waited for all the same.
                let steps = if model.is_empty() { gamma } else { model.len() };
                let began = self.controller.drafted(steps, since, now);
                let draft = self.controller.combine(model, self.state(true));
                self.verify(draft, steps, began, now);
            }
            Err(_) => self.draft_failed(now),
        }
    }

    /// The drafter failed, and is not queried for a while: the round goes on with the drafts of the
    /// lookups, if there are any.
    pub(super) fn draft_failed(&mut self, now: Tick) {
        self.controller.model_failed(self.output.tokens().len());
        let draft = self.controller.combine(Tree::default(), self.state(true));
        if draft.is_empty() {
            return self.plain_after_fault(PlainReason::DraftFault, now);
        }
        self.verify(draft, 0, now, now);
    }

    pub(super) fn verifying(&mut self, event: Event, now: Tick) {
        let answer = match event {
            Event::VerifyResult(result) => Ok(result),
            Event::Fault(fault) => Err(fault),
            _ => return,
        };
        if let Err(Fault::RetryAfter(pause)) = answer {
            // The engine accepts no more of them.
            self.backoff.until = Some(now.after(pause));
        }
        let Some(call) = self.flight.call.take() else { return };
        match answer {
            Ok(result) => self.judged(call, &result, now),
            Err(Fault::RetryAfter(_)) => self.take_step(NextStep::Plain(PlainReason::RetryAfter), now, now),
            // The context only grows, so no later round will fit.
            Err(Fault::TooLong) => {
                self.plain_after_fault(PlainReason::ContextTooLong, now);
                self.backoff.until_tokens = usize::MAX;
            }
            Err(_) => self.verify_failed(now),
        }
    }

    fn judged(&mut self, call: Verifying, result: &VerifyResult, now: Tick) {
        let Some(accepted) = self.walked(&call, result) else { return self.verify_failed(now) };
        let decided = !accepted.tokens.is_empty();
        self.timed_call(&call, result, decided, now);
        let Verifying { id, mut draft, modelled, position, conditions, .. } = call;
        if !decided {
            return self.verify_by(position + 1, draft, modelled, now, now);
        }
        self.watch_marks(&accepted.tokens);
        if let Some(proposal) = &result.proposal {
            self.controller.observe_proposal(proposal, self.output.tokens().len());
        }
        // Nodes that the dialect did not send are neither rejected nor computed.
        if let Some(put) = result.put {
            draft.truncate(put.nodes);
        }
        let delta = self.output.extend(&accepted.tokens, accepted.ends);
        let sent = accepted.nodes.iter().filter(|node| **node < draft.len()).count().min(delta.tokens.len());
        let (drafted, depth) = (draft.len() as u32, draft.depth() as u32);
        self.summary.round(Judging { call: id, drafted, accepted: sent as u32, depth, conditions });
        self.summary.drift = self.judge.ledger();
        self.emit(delta);
        self.controller.round(&draft, &accepted, modelled, now);
        if self.output.finish().is_some() {
            self.controller.leave(self.output.tokens().len(), now);
            return self.finish(self.output.finish());
        }
        let step = self.step(true, now);
        self.take_step(step, now, now);
    }

    /// Walks the draft of a verify request. `None` if the result cannot be used: an id outside the
    /// vocabulary must not join the context, because no plain request could continue from it.
    fn walked(&mut self, call: &Verifying, result: &VerifyResult) -> Option<Accepted> {
        let output = self.output.tokens().len();
        let relaxes = call.conditions.tolerance > 0.0 && self.rules.accept.is_lossy();
        let rest = self.output.rest();
        let drift = if relaxes { self.controller.drift(&call.draft, output, rest) } else { Drift::default() };
        let round = Judged {
            draft: &call.draft,
            result,
            context: self.context(),
            output,
            tolerance: call.conditions.tolerance,
            coupled: self.coupled(),
            expected: drift.expected,
            price: drift.price,
            worth: &drift.worth,
            free: &|tokens| self.output.is_free_behind(tokens),
        };
        let before = self.judge.ledger().charged;
        let accepted = self.judge.walk(&round);
        if relaxes {
            let tokens = accepted.as_ref().map_or(0, |accepted| accepted.tokens.len());
            self.controller.drifted(self.judge.ledger().charged - before, tokens, drift.expected);
        }
        accepted.filter(|accepted| accepted.is_within(self.resources.vocabulary))
    }

    /// Notes the time of a verify request.
    fn timed_call(&mut self, call: &Verifying, result: &VerifyResult, decided: bool, now: Tick) {
        let Verifying { began, draft, modelled, position, .. } = call;
        let concurrent = self.presence.as_mut().map_or(0, Presence::call_ends);
        let by_method = || Some(Put { method: *self.rules.methods.get(*position)?, nodes: draft.len() });
        if let Some(put) = result.put.or_else(by_method) {
            let seconds = now.seconds_since(*began);
            let planned = draft.len();
            let timing = VerifyTiming { put, planned, seconds, concurrent, modelled: *modelled, decided };
            self.controller.called(&timing, now);
        }
    }

    pub(super) fn verify_failed(&mut self, now: Tick) {
        self.controller.verify_failed(self.output.tokens().len(), now);
        self.plain_after_fault(PlainReason::VerifyFault, now);
    }

    /// A verify request has not been answered in time. On a busy engine, where requests were
    /// expected to take long concurrent with others, the cause is load; else it is a fault.
    pub(super) fn verify_late(&mut self, now: Tick) {
        if !self.controller.is_busy(self.resources.timeouts.verify) {
            return self.verify_failed(now);
        }
        self.controller.verify_late(now);
        self.plain_after_fault(PlainReason::GateLoad, now);
    }

    pub(super) fn plain_after_fault(&mut self, reason: PlainReason, now: Tick) {
        self.backoff.reason = Some(reason);
        self.backoff.until_tokens = self.controller.not_before().max(self.output.tokens().len() + 1);
        self.take_step(NextStep::Plain(reason), now, now);
    }
}
