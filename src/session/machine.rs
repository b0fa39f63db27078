//! The state machine: which action is under way, what each event does to it, and how every fault ends.
//!
//! Two rules keep it exact. A token that was read is the past: it is emitted, whatever happens next. And an
//! action that was cancelled is forgotten with everything it may yet say. All else is bookkeeping.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::accept;
use super::output::Output;
use super::pilot::{Pilot, Stand, Step};
use super::start::{Permission, Rules, Start};
use super::{Action, ActionId, Delta, Event, Fault, Finish, RidePlan, RideReason, Summary, Verdict};
use crate::control::Control;
use crate::draft::{Budget, Tree};
use crate::units::{Tick, TokenId};

/// Longest pause asked for by the backend that a session without a ride sits out.
const PAUSE_MAX: Duration = Duration::from_secs(10);
/// Pauses in a row that it sits out.
const PAUSES_MAX: u32 = 6;
/// Tokens of one continued ride where cancelling is slow, and where no limit is known.
const SEGMENT_SLOW: u32 = 16;
const SEGMENT_OPEN: u32 = 512;

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
    },
    Verify {
        id: ActionId,
        since: Tick,
        began: Tick,
        draft: Tree,
        modelled: usize,
    },
    /// The backend asked for a pause and no ride is under way.
    Wait {
        until: Tick,
    },
    Over,
}

/// The state machine of one request.
pub struct Session {
    rules: Rules,
    output: Output,
    pilot: Pilot,
    phase: Phase,
    /// The model drafter's shadow pass under way: id, since, first place.
    shadow: Option<(ActionId, Tick, usize)>,
    /// The ids of this request cannot be trusted.
    doubt: bool,
    allowed: bool,
    /// No leap before this, because the backend said so.
    pause: Option<Tick>,
    /// After a fault: no leap before so many output tokens.
    fault_until: usize,
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
        let pilot = Pilot::new(control, &start.rules, start.temperature, start.seed);
        let mut session = Self {
            rules: start.rules,
            output: Output::new(start.ending, start.limit, start.decode),
            pilot,
            phase: Phase::Over,
            shadow: None,
            doubt: false,
            allowed: true,
            pause: None,
            fault_until: 0,
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
            Event::Mode(allowed) => {
                self.allowed = allowed;
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
            &Phase::Draft { id, since, gamma } if id == answers => self.drafting(since, gamma, event, now),
            Phase::Verify { id, .. } if *id == answers => self.verifying(event, now),
            _ => {}
        }
    }

    /// The next thing to do, in order; `None` when there is nothing until the next event.
    pub fn poll(&mut self) -> Option<(ActionId, Action)> {
        self.queue.pop_front()
    }

    /// When [`Event::Timeout`] is wanted.
    pub fn deadline(&self) -> Option<Tick> {
        match &self.phase {
            Phase::Draft { since, .. } => Some(since.after(self.rules.draft_timeout)),
            Phase::Verify { since, .. } => Some(since.after(self.rules.verify_timeout)),
            Phase::Wait { until } => Some(*until),
            Phase::Ride(_) | Phase::Over => None,
        }
    }

    // ---- riding ---------------------------------------------------------------------------------------

    fn riding(&mut self, ride: Ride, event: Event, now: Tick) {
        match event {
            Event::Prompt(ids) => self.know_prompt(ids),
            Event::Token { tokens, text } => self.token(ride, tokens, text, now),
            Event::Doubt => self.doubt = true,
            Event::RideEnded(finish) => self.ride_ended(ride, finish, now),
            Event::Fault(Fault::RetryAfter(pause)) if !ride.first => self.wait(pause, now),
            Event::Fault(_) => self.ride_broke(ride, now),
            Event::Draft(_)
            | Event::Shadow(_)
            | Event::Verdict(_)
            | Event::ClientGone
            | Event::Timeout
            | Event::Mode(_) => {}
        }
    }

    fn know_prompt(&mut self, ids: Vec<TokenId>) {
        match self.pilot.prompt() {
            Some(known) => self.doubt |= known != ids,
            None => {
                self.output.set_prompt_len(ids.len());
                self.pilot.know_prompt(ids);
            }
        }
    }

    fn token(&mut self, ride: Ride, tokens: Vec<TokenId>, text: String, now: Tick) {
        let from = self.output.tokens().len();
        let count = tokens.len();
        let ride = self.timed(ride, count, now);
        let delta = if ride.first { self.output.ride(tokens, text) } else { self.output.extend(&tokens) };
        self.emit(delta);
        if count == 0 {
            return;
        }
        self.broken = 0;
        if self.output.finish().is_some() {
            // The first ride is ended by the backend's own word, with its own reason.
            if !ride.first {
                self.finish(self.output.finish());
            }
            return;
        }
        if self.trusted() {
            self.pilot.ridden(self.output.tokens(), from);
        }
        match self.step(false, now) {
            Step::Ride(reason) => {
                self.summary.reason = Some(reason);
                self.shadow_pass(now);
            }
            step => {
                self.leave_ride(ride);
                self.pilot.enter(now);
                self.leap(step, now, now);
            }
        }
    }

    /// Notes the pace of riding.
    fn timed(&mut self, mut ride: Ride, tokens: usize, now: Tick) -> Ride {
        if tokens > 0 {
            self.pilot.control().with(|learnt| match ride.last {
                Some(last) => learnt.costs.rode(now.seconds_since(last), tokens),
                None if ride.after_leap => learnt.costs.left(now.seconds_since(ride.since)),
                None => {}
            });
            ride.last = Some(now);
            ride.brought = ride.brought.saturating_add(tokens as u32);
        }
        self.phase = Phase::Ride(ride);
        ride
    }

    fn leave_ride(&mut self, ride: Ride) {
        self.act(Action::Cancel(ride.id));
        self.drop_shadow();
        if ride.first {
            let held = self.output.take_over();
            self.emit(held);
        }
    }

    fn ride_ended(&mut self, ride: Ride, finish: Finish, now: Tick) {
        self.phase = Phase::Over;
        if ride.first {
            return self.finish(Some(finish));
        }
        if finish == Finish::Length && ride.brought >= ride.asked {
            return match self.step(false, now) {
                Step::Ride(reason) => self.ride_on(reason, false, now),
                step => {
                    self.drop_shadow();
                    self.pilot.enter(now);
                    self.leap(step, now, now);
                }
            };
        }
        let held = self.output.end(finish);
        self.emit(held);
        self.finish(Some(finish));
    }

    /// A ride broke off. What was read is the past; go on from there once, if that can be done exactly.
    fn ride_broke(&mut self, ride: Ride, now: Tick) {
        self.phase = Phase::Over;
        self.broken += 1;
        let possible = !ride.first || (self.trusted() && self.output.level() && !self.rules.plans.is_empty());
        if self.output.tokens().is_empty() || self.broken > 1 || !possible {
            return self.finish(None);
        }
        if ride.first {
            if self.output.finish().is_some() {
                return self.finish(self.output.finish());
            }
            let held = self.output.take_over();
            self.emit(held);
        }
        self.ride_on(RideReason::VerifyFault, false, now);
    }

    /// Rides on from the whole context, by token ids.
    fn ride_on(&mut self, reason: RideReason, after_leap: bool, now: Tick) {
        self.summary.reason = Some(reason);
        let slow = self.pilot.control().with(|learnt| learnt.costs.cancels_slowly());
        let segment = self.rules.segment.unwrap_or(if slow { SEGMENT_SLOW } else { u32::MAX }).max(1);
        let rest = self.output.rest().map_or(SEGMENT_OPEN, |rest| rest as u32);
        let asked = rest.min(segment).max(1);
        let id = self.act(Action::Ride(RidePlan::Continue { max_tokens: asked }));
        self.phase =
            Phase::Ride(Ride { id, first: false, asked, brought: 0, since: now, last: None, after_leap });
    }

    /// The backend asked for a pause and nothing else is under way: wait it out, if it is short.
    fn wait(&mut self, pause: Duration, now: Tick) {
        self.phase = Phase::Over;
        self.broken += 1;
        if pause > PAUSE_MAX || self.broken > PAUSES_MAX {
            return self.finish(None);
        }
        self.pause = Some(now.after(pause));
        self.summary.reason = Some(RideReason::RetryAfter);
        self.phase = Phase::Wait { until: now.after(pause) };
    }

    // ---- leaping --------------------------------------------------------------------------------------

    /// Does a leaping step. `began` is when the round began, for its cost.
    fn leap(&mut self, step: Step, began: Tick, now: Tick) {
        match step {
            Step::Ride(reason) => {
                self.pilot.leave(self.output.tokens().len(), now);
                self.ride_on(reason, true, now);
            }
            Step::Draft(gamma) => {
                let id = self.act(Action::Draft { gamma });
                self.phase = Phase::Draft { id, since: now, gamma };
            }
            Step::Verify(draft) => self.verify(draft, 0, began, now),
        }
    }

    fn verify(&mut self, draft: Tree, modelled: usize, began: Tick, now: Tick) {
        let Some(&plan) = self.rules.plans.first() else {
            return self.leap(Step::Ride(RideReason::NoDraft), began, now);
        };
        self.summary.reason = None;
        let id = self.act(Action::Verify(draft.clone(), plan));
        self.phase = Phase::Verify { id, since: now, began, draft, modelled };
    }

    fn drafting(&mut self, since: Tick, gamma: usize, event: Event, now: Tick) {
        match event {
            Event::Draft(model) => {
                let modelled = model.len();
                let began = self.pilot.drafted(gamma.max(modelled), since, now);
                let draft = self.pilot.combine(model, self.stand(true));
                self.verify(draft, modelled, began, now);
            }
            Event::Fault(Fault::RetryAfter(pause)) => self.verify_paused(pause, now),
            Event::Fault(_) => self.draft_failed(now),
            _ => {}
        }
    }

    fn draft_failed(&mut self, now: Tick) {
        let done = self.output.tokens().len();
        self.pilot.model_failed(done);
        self.fault_ride(RideReason::VerifyFault, now);
    }

    fn verifying(&mut self, event: Event, now: Tick) {
        match event {
            Event::Verdict(verdict) => self.judged(&verdict, now),
            Event::Fault(Fault::RetryAfter(pause)) => self.verify_paused(pause, now),
            Event::Fault(_) => self.verify_failed(now),
            _ => {}
        }
    }

    fn judged(&mut self, verdict: &Verdict, now: Tick) {
        let Phase::Verify { began, draft, modelled, .. } = std::mem::replace(&mut self.phase, Phase::Over)
        else {
            return;
        };
        let Some(accepted) = accept::walk(&draft, verdict) else { return self.verify_failed(now) };
        let delta = self.output.extend(&accepted.tokens);
        self.summary.speculated = true;
        self.summary.rounds += 1;
        self.summary.drafted += draft.len() as u32;
        self.summary.accepted += accepted.nodes.len().min(delta.tokens.len()) as u32;
        self.emit(delta);
        self.pilot.round(&draft, &accepted, now.seconds_since(began), modelled, now);
        if self.output.finish().is_some() {
            self.pilot.leave(self.output.tokens().len(), now);
            return self.finish(self.output.finish());
        }
        let step = self.step(true, now);
        self.leap(step, now, now);
    }

    fn verify_failed(&mut self, now: Tick) {
        self.pilot.verify_failed(self.output.tokens().len());
        self.fault_ride(RideReason::VerifyFault, now);
    }

    fn verify_paused(&mut self, pause: Duration, now: Tick) {
        self.pause = Some(now.after(pause));
        self.leap(Step::Ride(RideReason::RetryAfter), now, now);
    }

    fn fault_ride(&mut self, reason: RideReason, now: Tick) {
        self.fault_until = self.pilot.not_before().max(self.output.tokens().len() + 1);
        self.leap(Step::Ride(reason), now, now);
    }

    // ---- time, shadow, end ------------------------------------------------------------------------------

    fn expire(&mut self, now: Tick) {
        if self.deadline().is_none_or(|deadline| now < deadline) {
            return;
        }
        match std::mem::replace(&mut self.phase, Phase::Over) {
            Phase::Draft { id, .. } => {
                self.act(Action::Cancel(id));
                self.draft_failed(now);
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
        self.summary.output_tokens = tokens as u32;
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
        if !delta.tokens.is_empty() || !delta.text.is_empty() {
            self.act(Action::Emit(delta));
        }
    }

    // ---- the decision ----------------------------------------------------------------------------------

    fn step(&mut self, leaping: bool, now: Tick) -> Step {
        if let Some(reason) = self.forbidden(now) {
            return Step::Ride(reason);
        }
        let stand = self.stand(leaping);
        if stand.room.depth == 0 && self.rules.gamma_fixed.is_none() {
            // The last token is not worth a switch either way.
            return if leaping { Step::Verify(Tree::default()) } else { Step::Ride(RideReason::NoGain) };
        }
        self.pilot.choose(self.output.tokens(), stand, now)
    }

    fn stand(&self, leaping: bool) -> Stand {
        let rest = self.output.rest();
        let depth = rest.map_or(usize::MAX, |rest| rest.saturating_sub(1));
        let room = Budget { nodes: self.rules.context_max.saturating_sub(self.context() + 1), depth };
        Stand { leaping, room, rest, done: self.output.tokens().len() }
    }

    fn context(&self) -> usize {
        self.pilot.prompt().map_or(0, <[TokenId]>::len) + self.output.tokens().len()
    }

    /// Whether the ids are certain, so that going on by them is the same request.
    fn trusted(&self) -> bool {
        !self.doubt && self.output.agrees() && self.pilot.prompt().is_some()
    }

    /// Why the session may not leap now, whatever a leap would bring.
    fn forbidden(&self, now: Tick) -> Option<RideReason> {
        if let Permission::Ride(reason) | Permission::Shadow(reason) = self.rules.permission {
            return Some(reason);
        }
        let forced = self.rules.gamma_fixed.is_some();
        if !self.allowed {
            return Some(RideReason::Observe);
        }
        if self.rules.holdback && !forced {
            return Some(RideReason::Holdback);
        }
        if self.rules.plans.is_empty() || !self.trusted() {
            return Some(RideReason::NoDraft);
        }
        if matches!(&self.phase, Phase::Ride(ride) if ride.first) && !self.output.level() {
            return Some(RideReason::NoDraft);
        }
        if self.pause.is_some_and(|until| now < until) {
            return Some(RideReason::RetryAfter);
        }
        if self.output.tokens().len() < self.fault_until {
            return Some(RideReason::VerifyFault);
        }
        if self.context() + 1 > self.rules.context_max {
            return Some(RideReason::ContextTooLong);
        }
        let gate = self.pilot.control().with(|learnt| learnt.gate());
        gate.filter(|&gate| !forced || holds_when_forced(gate))
    }
}

/// Gates that even `gamma.fixed` keeps.
fn holds_when_forced(gate: RideReason) -> bool {
    match gate {
        RideReason::GateHealth
        | RideReason::GateMemory
        | RideReason::BackendSpeculates
        | RideReason::ContextTooLong
        | RideReason::VerifyFault
        | RideReason::RetryAfter
        | RideReason::Observe
        | RideReason::Client
        | RideReason::Policy
        | RideReason::Draining => true,
        RideReason::Holdback
        | RideReason::NoGain
        | RideReason::Budget
        | RideReason::GateLoad
        | RideReason::GateStale
        | RideReason::GateAcceptance
        | RideReason::GateLatency
        | RideReason::Shadow
        | RideReason::Switchback
        | RideReason::NoDraft => false,
    }
}
