//! The state machine: which actions are under way, what each event does to them, and how every fault ends.
//!
//! Two rules keep it exact. A token that was read is the past: it is emitted, whatever happens next. And an
//! action that was cancelled is forgotten: later events of it are ignored. All else is bookkeeping.

mod ahead;
mod decide;
mod flight;
mod leap;
mod ride;

use std::collections::VecDeque;
use std::sync::Arc;

use self::flight::{Flight, Kind, Ride, Shadowing};
use super::accept::{Judge, Walk};
use super::output::Output;
use super::pilot::Pilot;
use super::start::{Permission, Rules, Start};
use super::{Action, ActionId, Delta, Doubted, Event, Fault, Finish, RidePlan, Stopped, Summary, footprint};
use crate::control::{Control, Presence};
use crate::draft::Successors;
use crate::units::{Tick, TokenId};
use crate::words::{RideReason, looping};

/// Last tokens of an output that are looked at for repetition, and fewest that can show it.
const LOOP_OF: usize = 512;
const LOOP_LEAST: usize = 128;
/// Fewest tokens after the first piece of output that a pace is told of.
const PACED_LEAST: usize = 8;

/// The state machine of one request. `W` judges its rounds: [`Judge`], unless a test plants a bug there.
pub struct Session<W: Walk = Judge> {
    rules: Rules,
    marks: Arc<[TokenId]>,
    output: Output,
    pilot: Pilot,
    judge: W,
    flight: Flight,
    temperature: f64,
    /// The backend asked for a pause until then, and no ride is under way.
    wait: Option<Tick>,
    /// The ids of this request cannot be trusted.
    doubt: Option<Doubted>,
    /// Why the gates do not allow leaping now; `None` if they do.
    closed: Option<RideReason>,
    /// No leap before this: the backend asked for a pause.
    pause: Option<Tick>,
    /// After a fault: no leap before so many output tokens, for this reason.
    fault_until: usize,
    fault_reason: RideReason,
    /// The last round did not bring what the call behind it had assumed.
    missed: bool,
    /// Rides in a row that broke off without a token.
    broken: u32,
    over: bool,
    /// When the last event came.
    now: Tick,
    /// When the first output went out, and how many tokens it was; when the last did.
    paced: Option<(Tick, usize, Tick)>,
    queue: VecDeque<(ActionId, Action)>,
    next_id: u64,
    summary: Summary,
    /// It counts as one of the crowd until it is over.
    presence: Option<Presence>,
}

impl Session {
    /// Begins with the first ride. `now` counts from the origin that all sessions of `control` share.
    pub fn new(start: Start, control: Arc<Control>, now: Tick) -> Self {
        let judge = Judge::new(start.rules.accept.clone(), start.noise);
        Self::judged_by(judge, start, control, now)
    }
}

impl<W: Walk> Session<W> {
    /// As [`Session::new`], with rounds judged by `judge`.
    pub fn judged_by(judge: W, start: Start, control: Arc<Control>, now: Tick) -> Self {
        let presence = Some(Presence::new(Arc::clone(&control)));
        let pilot = Pilot::new(control, &start.rules, start.temperature, start.seed);
        let mut session = Self {
            rules: start.rules,
            marks: start.marks,
            output: Output::new(start.ending, start.limit, start.decode),
            pilot,
            judge,
            flight: Flight::default(),
            temperature: start.temperature,
            wait: None,
            doubt: None,
            closed: None,
            pause: None,
            fault_until: 0,
            fault_reason: RideReason::VerifyFault,
            missed: false,
            broken: 0,
            over: false,
            now,
            paced: None,
            queue: VecDeque::new(),
            next_id: ActionId::WORLD.0,
            summary: Summary::default(),
            presence,
        };
        if let Some(prompt) = start.prompt {
            session.know_prompt(prompt);
        }
        session.summary.reason = session.forbidden(now).or(Some(RideReason::NoGain));
        let id = session.act(Action::Ride(RidePlan::First));
        session.flight.ride = Some(Ride {
            id,
            first: true,
            asked: u32::MAX,
            brought: 0,
            since: now,
            last: None,
            after_leap: false,
        });
        session
    }

    /// Takes an event. `answers` names the action that it answers, [`ActionId::WORLD`] for events that answer none.
    /// Events of actions that are not under way are ignored.
    pub fn handle(&mut self, answers: ActionId, event: Event, now: Tick) {
        self.now = now;
        match event {
            Event::ClientGone => return self.finish(None),
            Event::Timeout => return self.expire(now),
            Event::Mode(closed) => {
                self.closed = closed;
                return;
            }
            // Whatever came next might be another model's.
            Event::Fault(Fault::Changed | Fault::Lost) if self.flight.kind(answers).is_some() => {
                return self.finish(None);
            }
            _ => {}
        }
        match self.flight.kind(answers) {
            Some(Kind::Ride) => self.riding(event, now),
            Some(Kind::Draft) => self.drafting(event, now),
            Some(Kind::Sketch) => self.sketched(event),
            Some(Kind::Verify) => self.verifying(answers, event, now),
            Some(Kind::Shadow) => self.shadowed(&event, now),
            None => {}
        }
    }

    /// Whether the request has ended; only what it leaves behind is still to be done.
    pub fn is_over(&self) -> bool {
        self.over
    }

    /// The next thing to do, in order; `None` when there is nothing until the next event.
    pub fn poll(&mut self) -> Option<(ActionId, Action)> {
        self.queue.pop_front()
    }

    /// Ids of the prompt; empty until they are known.
    pub fn prompt(&self) -> &[TokenId] {
        self.pilot.prompt().unwrap_or_default()
    }

    /// The output so far: every token that is the past.
    pub fn output(&self) -> &[TokenId] {
        self.output.tokens()
    }

    /// Bytes that it holds, held against `limits.memory`: what its lookups have allocated, and an estimate of the rest.
    pub fn bytes(&self) -> u64 {
        footprint(self.prompt().len() + self.output().len()) + self.pilot.lookup_bytes() as u64
    }

    /// What was learnt of successors, if a drafter of this request learns them.
    pub fn successors(&self) -> Option<&Successors> {
        self.pilot.successors()
    }

    /// What ended the output before its limit.
    pub fn stopped(&self) -> Option<&Stopped> {
        self.output.stopped()
    }

    /// Whether acceptance in its epoch has collapsed since any session was asked last.
    pub fn acceptance_collapsed(&self) -> bool {
        self.pilot.control().with(|learnt| learnt.survival.watch.take())
    }

    /// How the request has gone so far.
    pub fn summary(&self) -> &Summary {
        &self.summary
    }

    /// When [`Event::Timeout`] is due; `None` if nothing under way has a deadline.
    pub fn deadline(&self) -> Option<Tick> {
        self.flight.deadline().into_iter().chain(self.wait).min()
    }

    /// Ends the actions whose deadline has passed at `now`.
    fn expire(&mut self, now: Tick) {
        if let Some(late) = self.flight.draft.take_if(|draft| draft.until <= now) {
            self.act(Action::Cancel(late.id));
            self.draft_late(late, now);
        }
        if let Some(late) = self.flight.calls.pop_front_if(|call| call.until <= now) {
            self.act(Action::Cancel(late.id));
            self.verify_late(&late, now);
        }
        if self.wait.take_if(|until| *until <= now).is_some() {
            self.ride_on(RideReason::RetryAfter, false, now);
        }
    }

    /// While riding: asks the model drafter what it would have chosen, when that is due.
    fn shadow_pass(&mut self, now: Tick) {
        if self.flight.shadow.is_some() || !self.trusted() {
            return;
        }
        if let Some(from) = self.pilot.shadow_due(self.output.tokens().len()) {
            let id = self.act(Action::Shadow { from });
            self.flight.shadow = Some(Shadowing { id, since: now, from });
        }
    }

    fn shadowed(&mut self, event: &Event, now: Tick) {
        let Some(Shadowing { since, from, .. }) = self.flight.shadow.take() else { return };
        match event {
            Event::Shadow(choices) => {
                self.pilot.shadowed(self.output.tokens(), from, choices, now.seconds_since(since), now);
            }
            _ => self.pilot.model_failed(self.output.tokens().len()),
        }
    }

    fn drop_shadow(&mut self) {
        if let Some(shadow) = self.flight.shadow.take() {
            self.act(Action::Cancel(shadow.id));
        }
    }

    fn finish(&mut self, finish: Option<Finish>) {
        let under_way = self.flight.land();
        (self.wait, self.presence) = (None, None);
        if std::mem::replace(&mut self.over, true) {
            return;
        }
        for id in under_way {
            self.act(Action::Cancel(id));
        }
        let tokens = self.output.tokens().len();
        if finish.is_some() {
            self.pilot.control().with(|learnt| learnt.output_ended(tokens));
        }
        self.summary.finish = finish;
        self.summary.loops = self.loops();
        let shadows = matches!(self.rules.permission, Permission::Shadow(_)) || self.rules.holdback;
        if finish.is_some() && shadows && !self.summary.speculated {
            self.summary.would_gain = self.pilot.would_gain(self.output.tokens().len());
        }
        self.summary.balance = self.pilot.balance();
        self.summary.doubted = self.doubt.or((!self.output.agrees()).then_some(Doubted::Output));
        self.summary.token_seconds = finish.and_then(|_| self.token_seconds());
        let summary = self.summary.clone();
        self.act(Action::Finish(summary));
    }

    /// Seconds per token as its client saw them, where the session was free to leap or was held back from it by lot.
    fn token_seconds(&self) -> Option<f64> {
        let free = self.rules.permission == Permission::Leap && self.rules.gamma_fixed.is_none();
        let (first, begun, last) = self.paced.filter(|_| free)?;
        let tokens = self.output.tokens().len().saturating_sub(begun);
        (tokens >= PACED_LEAST).then(|| last.seconds_since(first) / tokens as f64)
    }

    /// Whether the output repeats itself, by its last tokens.
    fn loops(&self) -> bool {
        let output = self.output.tokens();
        let last = output.get(output.len().saturating_sub(LOOP_OF)..).unwrap_or_default();
        let repeats = output.len() >= LOOP_LEAST && looping::loops(&[], last);
        // What is copied from the prompt is no loop; a long prompt is looked through only where it matters.
        repeats && looping::loops(self.prompt(), last)
    }

    fn act(&mut self, action: Action) -> ActionId {
        self.next_id += 1;
        let id = ActionId(self.next_id);
        self.queue.push_back((id, action));
        id
    }

    fn emit(&mut self, delta: Delta) {
        self.brought(delta, Action::Emit);
    }

    /// Notes that output goes out, by this action.
    fn brought(&mut self, delta: Delta, by: fn(Delta) -> Action) {
        let tokens = self.output.tokens().len();
        self.summary.output_tokens = tokens as u32;
        if !delta.tokens.is_empty() {
            let (first, begun, _) = self.paced.unwrap_or((self.now, tokens, self.now));
            self.paced = Some((first, begun, self.now));
        }
        if !delta.tokens.is_empty() || !delta.text.is_empty() {
            self.act(by(delta));
        }
    }
}
