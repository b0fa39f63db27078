//! The state machine: which action is under way, what each event does to it, and how every fault ends.
//!
//! Two rules keep it exact. A token that was read is the past: it is emitted, whatever happens next. And an
//! action that was cancelled is forgotten with everything it may yet say. All else is bookkeeping.

mod decide;
mod leap;
mod ride;

use std::collections::VecDeque;
use std::sync::Arc;

use super::accept::{Judge, Walk};
use super::output::Output;
use super::pilot::Pilot;
use super::start::{Rules, Start};
use super::{Action, ActionId, Delta, Event, Finish, RidePlan, Stopped, Summary};
use crate::control::Control;
use crate::draft::Tree;
use crate::units::{Tick, TokenId};
use crate::words::RideReason;

/// A ride under way.
#[derive(Clone, Copy, Debug)]
struct Ride {
    id: ActionId,
    /// The client's own request; the backend's own text goes out.
    first: bool,
    /// Tokens asked for (continued rides).
    asked: u32,
    brought: u32,
    since: Tick,
    /// When the last token came.
    last: Option<Tick>,
    /// Follows a leap, so its first token tells what the switch cost.
    after_leap: bool,
}

/// What the session waits for.
#[derive(Clone, Debug)]
enum Phase {
    Ride(Ride),
    Draft {
        id: ActionId,
        since: Tick,
        gamma: usize,
        until: Option<Tick>,
    },
    Verify {
        id: ActionId,
        since: Tick,
        began: Tick,
        draft: Tree,
        modelled: usize,
        /// Which of the plans is tried.
        place: usize,
    },
    /// The backend asked for a pause and no ride is under way.
    Wait {
        until: Tick,
    },
    Over,
}

/// The state machine of one request. `W` judges its rounds: [`Judge`], unless a test plants a bug there.
pub struct Session<W: Walk = Judge> {
    rules: Rules,
    marks: Arc<[TokenId]>,
    output: Output,
    pilot: Pilot,
    judge: W,
    phase: Phase,
    /// The model drafter's shadow pass under way: id, since, first place.
    shadow: Option<(ActionId, Tick, usize)>,
    /// The ids of this request cannot be trusted.
    doubt: bool,
    /// Why leaping is not allowed now.
    closed: Option<RideReason>,
    /// No leap before this, because the backend said so.
    pause: Option<Tick>,
    /// After a fault: no leap before so many output tokens, for this reason.
    fault_until: usize,
    fault_reason: RideReason,
    /// Rides in a row that broke off without a token.
    broken: u32,
    over: bool,
    queue: VecDeque<(ActionId, Action)>,
    next_id: u64,
    summary: Summary,
}

impl Session {
    /// Begins with the first ride. `now` counts from the origin that all sessions of `control` share.
    pub fn new(start: Start, control: Arc<Control>, now: Tick) -> Self {
        let judge = Judge::new(start.rules.rule, start.noise);
        Self::judged_by(judge, start, control, now)
    }
}

impl<W: Walk> Session<W> {
    /// As [`Session::new`], with rounds judged by `judge`.
    pub fn judged_by(judge: W, start: Start, control: Arc<Control>, now: Tick) -> Self {
        let pilot = Pilot::new(control, &start.rules, start.temperature, start.seed);
        let mut session = Self {
            rules: start.rules,
            marks: start.marks,
            output: Output::new(start.ending, start.limit, start.decode),
            pilot,
            judge,
            phase: Phase::Over,
            shadow: None,
            doubt: false,
            closed: None,
            pause: None,
            fault_until: 0,
            fault_reason: RideReason::VerifyFault,
            broken: 0,
            over: false,
            queue: VecDeque::new(),
            next_id: ActionId::WORLD.0,
            summary: Summary {
                finish: None,
                speculated: false,
                reason: None,
                rounds: 0,
                drafted: 0,
                accepted: 0,
                output_tokens: 0,
            },
        };
        if let Some(prompt) = start.prompt {
            session.know_prompt(prompt);
        }
        session.summary.reason = session.forbidden(now).or(Some(RideReason::NoGain));
        let id = session.act(Action::Ride(RidePlan::First));
        session.phase = Phase::Ride(Ride {
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

    /// Takes an event. `answers` names the action that it answers, [`ActionId::WORLD`] for events of the
    /// world. Events of actions that are not under way are dropped unseen.
    pub fn handle(&mut self, answers: ActionId, event: Event, now: Tick) {
        match event {
            Event::ClientGone => return self.finish(None),
            Event::Timeout => return self.expire(now),
            Event::Mode(closed) => {
                self.closed = closed;
                return;
            }
            event if self.shadow.is_some_and(|shadow| shadow.0 == answers) => {
                return self.shadowed(&event, now);
            }
            _ => {}
        }
        match &self.phase {
            Phase::Ride(ride) if ride.id == answers => {
                let ride = *ride;
                self.riding(ride, event, now);
            }
            &Phase::Draft { id, since, gamma, .. } if id == answers => {
                self.drafting(since, gamma, event, now);
            }
            Phase::Verify { id, .. } if *id == answers => self.verifying(event, now),
            _ => {}
        }
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

    /// What ended the output before its limit.
    pub fn stopped(&self) -> Option<&Stopped> {
        self.output.stopped()
    }

    /// How the request has gone so far.
    pub fn summary(&self) -> &Summary {
        &self.summary
    }

    /// When [`Event::Timeout`] is wanted.
    pub fn deadline(&self) -> Option<Tick> {
        match &self.phase {
            Phase::Verify { since, .. } => Some(since.after(self.rules.verify_timeout)),
            Phase::Draft { until, .. } => *until,
            Phase::Wait { until } => Some(*until),
            Phase::Ride(_) | Phase::Over => None,
        }
    }

    fn expire(&mut self, now: Tick) {
        if self.deadline().is_none_or(|deadline| now < deadline) {
            return;
        }
        match std::mem::replace(&mut self.phase, Phase::Over) {
            Phase::Draft { id, since, gamma, .. } => {
                self.act(Action::Cancel(id));
                self.draft_late(since, gamma, now);
            }
            Phase::Verify { id, .. } => {
                self.act(Action::Cancel(id));
                self.verify_failed(now);
            }
            Phase::Wait { .. } => self.ride_on(RideReason::RetryAfter, false, now),
            phase @ (Phase::Ride(_) | Phase::Over) => self.phase = phase,
        }
    }

    /// While riding: asks the model drafter what it would have chosen, when that is due.
    fn shadow_pass(&mut self, now: Tick) {
        if self.shadow.is_some() || !self.trusted() {
            return;
        }
        if let Some(from) = self.pilot.shadow_due(self.output.tokens().len()) {
            let id = self.act(Action::Shadow { from });
            self.shadow = Some((id, now, from));
        }
    }

    fn shadowed(&mut self, event: &Event, now: Tick) {
        let Some((_, since, from)) = self.shadow.take() else { return };
        match event {
            Event::Shadow(choices) => {
                self.pilot.shadowed(self.output.tokens(), from, choices, now.seconds_since(since));
            }
            _ => self.pilot.model_failed(self.output.tokens().len()),
        }
    }

    fn drop_shadow(&mut self) {
        if let Some((id, _, _)) = self.shadow.take() {
            self.act(Action::Cancel(id));
        }
    }

    fn finish(&mut self, finish: Option<Finish>) {
        let under_way = match std::mem::replace(&mut self.phase, Phase::Over) {
            Phase::Ride(ride) => Some(ride.id),
            Phase::Draft { id, .. } | Phase::Verify { id, .. } => Some(id),
            Phase::Wait { .. } | Phase::Over => None,
        };
        if std::mem::replace(&mut self.over, true) {
            return;
        }
        if let Some(id) = under_way {
            self.act(Action::Cancel(id));
        }
        self.drop_shadow();
        let tokens = self.output.tokens().len();
        if finish.is_some() {
            self.pilot.control().with(|learnt| learnt.output_ended(tokens));
        }
        self.summary.finish = finish;
        let summary = self.summary.clone();
        self.act(Action::Finish(summary));
    }

    fn act(&mut self, action: Action) -> ActionId {
        self.next_id += 1;
        let id = ActionId(self.next_id);
        self.queue.push_back((id, action));
        id
    }

    fn emit(&mut self, delta: Delta) {
        self.summary.output_tokens = self.output.tokens().len() as u32;
        if !delta.tokens.is_empty() || !delta.text.is_empty() {
            self.act(Action::Emit(delta));
        }
    }
}
