//! The state machine: the actions in flight, the effect of each event on them, and the end of every
//! fault.
//!
//! Two rules guarantee exactness. A token that was read belongs to the context: it is emitted,
//! whatever happens next. And an action that was cancelled is forgotten: later events of it are
//! ignored.

mod decide;
mod flight;
mod plain;
mod round;

use std::collections::VecDeque;
use std::sync::Arc;

use self::flight::{ActionKind, Flight, PlainFlight, PlainScope, Shadowing};
use super::accept::{Judge, Walk};
use super::controller::SpeculationController;
use super::output::Output;
use super::start::{Permission, Resources, Rules, Start};
use super::{
    Action, ActionId, Delta, Doubted, Event, Fault, Finish, PlainRequest, Stopped, Summary, footprint,
};
use crate::control::{Control, Presence};
use crate::units::{Tick, TokenId};
use crate::words::PlainReason;

/// Minimum tokens after the first piece of output for a reported pace.
const MIN_PACED: usize = 8;

/// Conditions under which the session must not speculate for now.
#[derive(Debug, Default)]
struct Backoff {
    /// Not before this: the backend requested a pause.
    until: Option<Tick>,
    /// After a fault: not before this many output tokens, for `reason`.
    until_tokens: usize,
    reason: Option<PlainReason>,
}

/// Consecutive plain requests that yielded no token.
#[derive(Debug, Default)]
struct Interruptions {
    /// Requests that broke off.
    broken: u32,
    /// Requests for which the backend requested a pause instead.
    pauses: u32,
}

/// The state machine of one request. `W` judges its rounds: [`Judge`], unless a test plants a bug
/// there.
pub struct Session<W: Walk = Judge> {
    rules: Arc<Rules>,
    resources: Resources,
    marks: Arc<[TokenId]>,
    output: Output,
    /// A grammar may constrain the backend's sampling.
    constrained: bool,
    controller: SpeculationController,
    judge: W,
    flight: Flight,
    temperature: f64,
    /// End of a pause that the backend requested, while no plain request is in flight.
    resume_at: Option<Tick>,
    /// The ids of this request cannot be trusted.
    doubt: Option<Doubted>,
    /// Reason why the gates do not allow speculation now; `None` if they do.
    closed: Option<PlainReason>,
    backoff: Backoff,
    interruptions: Interruptions,
    over: bool,
    /// Time of the last event.
    now: Tick,
    /// Time of the first output and its number of tokens; time of the last output.
    paced: Option<(Tick, usize, Tick)>,
    actions: Actions,
    summary: Summary,
    /// It counts in the concurrency until it is over.
    presence: Option<Presence>,
}

/// Actions that the runner has yet to take, and the id of the newest.
struct Actions {
    queue: VecDeque<(ActionId, Action)>,
    last_id: ActionId,
}

impl Session {
    /// Begins with the first plain request. `now` counts from the origin that all sessions of
    /// `control` share.
    pub fn new(start: Start, control: Arc<Control>, now: Tick) -> Self {
        let judge = Judge::new(start.rules.accept.clone(), start.noise);
        Self::judged_by(judge, start, control, now)
    }
}

impl<W: Walk> Session<W> {
    /// As [`Session::new`], with rounds judged by `judge`.
    pub fn judged_by(judge: W, start: Start, control: Arc<Control>, now: Tick) -> Self {
        let (presence, since) = start.sent.unwrap_or_else(|| (Presence::reading(Arc::clone(&control)), now));
        let rules = Arc::new(start.rules);
        let controller = SpeculationController::new(
            control,
            Arc::clone(&rules),
            &start.resources,
            start.temperature,
            start.seed,
        );
        let mut session = Self {
            rules,
            resources: start.resources,
            marks: start.marks,
            output: Output::new(start.ending, start.limit, start.decode, start.parser),
            constrained: start.unconfirmed,
            controller,
            judge,
            flight: Flight::default(),
            temperature: start.temperature,
            resume_at: None,
            doubt: None,
            closed: None,
            backoff: Backoff::default(),
            interruptions: Interruptions::default(),
            over: false,
            now,
            paced: None,
            actions: Actions { queue: VecDeque::new(), last_id: ActionId::WORLD },
            summary: Summary::default(),
            presence: Some(presence),
        };
        if let Some(prompt) = start.prompt {
            session.know_prompt(prompt);
        }
        // Only the answer reports the ids.
        let forbidden = session.forbidden(now).filter(|&reason| reason != PlainReason::UntrustedIds);
        session.summary.reason = forbidden.or(Some(PlainReason::NoGain));
        let id = session.act(Action::Plain(PlainRequest::First));
        session.flight.plain = Some(PlainFlight {
            id,
            scope: if start.first_token_alone { PlainScope::FirstToken } else { PlainScope::Client },
            most: u32::MAX,
            received: 0,
            since,
            last: None,
            after_rounds: false,
        });
        session
    }

    /// Takes an event. `answers` names the action that it answers, [`ActionId::WORLD`] for events
    /// that answer none. Events of actions that are not in flight are ignored.
    pub fn handle(&mut self, answers: ActionId, event: Event, now: Tick) {
        self.now = now;
        match event {
            Event::ClientGone => return self.finish(None),
            Event::Timeout => return self.expire(now),
            Event::Mode(closed) => {
                self.closed = closed;
                return;
            }
            // The next answer could be another model's.
            Event::Fault(Fault::Changed | Fault::Lost) if self.flight.kind(answers).is_some() => {
                return self.finish(None);
            }
            _ => {}
        }
        match self.flight.kind(answers) {
            Some(ActionKind::Plain) => self.plain_event(event, now),
            Some(ActionKind::Draft) => self.drafting(event, now),
            Some(ActionKind::Verify) => self.verifying(event, now),
            Some(ActionKind::Shadow) => self.shadowed(&event, now),
            None => {}
        }
    }

    /// True if the request has ended; only actions in the queue remain to be done.
    pub fn is_over(&self) -> bool {
        self.over
    }

    /// The next action, in order; `None` if there is none until the next event.
    pub fn poll(&mut self) -> Option<(ActionId, Action)> {
        self.actions.queue.pop_front()
    }

    /// Ids of the prompt; empty until they are known.
    pub fn prompt(&self) -> &[TokenId] {
        self.controller.prompt().unwrap_or_default()
    }

    /// The output so far: every token that was emitted.
    pub fn output(&self) -> &[TokenId] {
        self.output.tokens()
    }

    /// Output tokens that the backend counts as reasoning; `None` without a parser.
    pub fn reasoning_tokens(&self) -> Option<u64> {
        self.output.reasoning_tokens()
    }

    /// Bytes counted against `limits.memory`: allocations of its lookups, and an estimate of the
    /// rest.
    pub fn bytes(&self) -> u64 {
        footprint(self.prompt().len() + self.output().len()) + self.controller.lookup_bytes() as u64
    }

    /// The cause that ended the output before its limit; `None` while it goes on, and at the limit.
    pub fn stopped(&self) -> Option<&Stopped> {
        self.output.stopped()
    }

    /// The result of the request so far.
    pub fn summary(&self) -> &Summary {
        &self.summary
    }

    /// Due time of [`Event::Timeout`]; `None` if nothing in flight has a deadline.
    pub fn deadline(&self) -> Option<Tick> {
        self.flight.deadline().into_iter().chain(self.resume_at).min()
    }

    /// Ends the actions whose deadline has passed at `now`.
    fn expire(&mut self, now: Tick) {
        if let Some(late) = self.flight.draft.take_if(|draft| draft.until <= now) {
            self.act(Action::Cancel(late.id));
            self.draft_late(late, now);
        }
        if let Some(late) = self.flight.call.take_if(|call| call.until <= now) {
            self.act(Action::Cancel(late.id));
            self.verify_late(now);
        }
        if self.resume_at.take_if(|until| *until <= now).is_some() {
            self.decode_plainly(PlainReason::RetryAfter, false, now);
        }
    }

    /// Starts a shadow pass of the model drafter, if one is due: during plain decoding, and in
    /// rounds of other drafters until it has read the prompt.
    fn shadow_pass(&mut self, now: Tick) {
        if self.flight.shadow.is_some() || !self.trusted() {
            return;
        }
        if let Some(from) = self.controller.shadow_due(self.output.tokens().len()) {
            let id = self.act(Action::Shadow { from });
            self.flight.shadow = Some(Shadowing { id, since: now, from });
        }
    }

    fn shadowed(&mut self, event: &Event, now: Tick) {
        let Some(Shadowing { since, from, .. }) = self.flight.shadow.take() else { return };
        match event {
            Event::Shadow(choices) => {
                self.controller.shadowed(self.output.tokens(), from, choices, now.seconds_since(since));
            }
            _ => self.controller.model_failed(self.output.tokens().len()),
        }
    }

    fn drop_shadow(&mut self) {
        if let Some(shadow) = self.flight.shadow.take() {
            self.act(Action::Cancel(shadow.id));
        }
    }

    fn finish(&mut self, finish: Option<Finish>) {
        let under_way = self.flight.drain();
        self.resume_at = None;
        self.presence = None;
        if std::mem::replace(&mut self.over, true) {
            return;
        }
        for id in under_way {
            self.act(Action::Cancel(id));
        }
        let tokens = self.output.tokens().len();
        if finish.is_some() {
            self.controller.control().with(|learnt| learnt.output_ended(tokens));
        }
        self.summary.finish = finish;
        let shadows = matches!(self.rules.permission, Permission::Shadow(_)) || self.rules.control_group;
        if finish.is_some() && shadows && !self.summary.speculated {
            self.summary.projected_speedup = self.controller.projected_speedup(self.output.tokens().len());
        }
        self.summary.balance = self.controller.balance();
        self.summary.doubted = self.doubt.or((!self.output.agrees()).then_some(Doubted::Output));
        self.summary.token_seconds = finish.and_then(|_| self.token_seconds());
        let summary = self.summary.clone();
        self.act(Action::Finish(summary));
    }

    /// Seconds per token as its client received them, where the session might speculate or was in
    /// the control group.
    fn token_seconds(&self) -> Option<f64> {
        let free = self.rules.permission == Permission::Speculate && self.rules.gamma_fixed.is_none();
        let (first, begun, last) = self.paced?;
        if !free {
            return None;
        }
        let tokens = self.output.tokens().len().saturating_sub(begun);
        (tokens >= MIN_PACED).then(|| last.seconds_since(first) / tokens as f64)
    }

    fn act(&mut self, action: Action) -> ActionId {
        let id = ActionId(self.actions.last_id.0 + 1);
        self.actions.last_id = id;
        self.actions.queue.push_back((id, action));
        id
    }

    fn emit(&mut self, delta: Delta) {
        self.release(delta, Action::Emit);
    }

    /// Notes output that goes out by this action.
    fn release(&mut self, delta: Delta, by: fn(Delta) -> Action) {
        let tokens = self.output.tokens().len();
        self.summary.output_tokens = tokens as u32;
        if !delta.tokens.is_empty() {
            let (first, begun, _) = self.paced.unwrap_or((self.now, tokens, self.now));
            self.paced = Some((first, begun, self.now));
        }
        if !delta.tokens.is_empty() || !delta.parsed.is_empty() {
            self.act(by(delta));
        }
    }
}
