//! Riding: tokens come in, the pace is measured, and at each of them the session may leave.

use std::time::Duration;

use super::Session;
use super::flight::Ride;
use crate::session::accept::Walk;
use crate::session::pilot::Step;
use crate::session::{Action, Doubted, Event, Fault, Finish, RidePlan, Tail};
use crate::units::{Tick, TokenId};
use crate::words::RideReason;

/// Longest pause asked for by the backend that a session without a ride waits for.
const PAUSE_MAX: Duration = Duration::from_secs(10);
/// Pauses in a row that it waits for.
const PAUSES_MAX: u32 = 6;
/// Tokens of one continued ride where cancelling is slow.
const SEGMENT_SLOW: u32 = 16;
/// Tokens of one continued ride where no limit of the output is known.
const SEGMENT_OPEN: u32 = 512;

impl<W: Walk> Session<W> {
    pub(super) fn riding(&mut self, event: Event, now: Tick) {
        let Some(ride) = self.flight.ride else { return };
        match event {
            Event::Prompt(ids) => self.know_prompt(ids),
            Event::Token { tokens, text, tail } => self.token(ride, tokens, text, tail, now),
            Event::Doubt => self.doubts(Doubted::Prompt),
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

    fn doubts(&mut self, ids: Doubted) {
        self.doubt.get_or_insert(ids);
    }

    pub(super) fn know_prompt(&mut self, ids: Vec<TokenId>) {
        if let Some(known) = self.pilot.prompt() {
            if known != ids {
                self.doubts(Doubted::Prompt);
            }
        } else {
            self.output.set_prompt_len(ids.len());
            self.pilot.know_prompt(ids);
        }
    }

    /// Tokens of a ride. At the last ones there is nothing to choose: the backend has ended the output, perhaps by a
    /// rule that is not known here.
    pub(super) fn token(&mut self, ride: Ride, tokens: Vec<TokenId>, text: String, tail: Tail, now: Tick) {
        let from = self.output.tokens().len();
        let count = tokens.len();
        let ride = self.timed(ride, count, now);
        self.watch_marks(&tokens);
        if ride.first {
            let delta = self.output.ride(tokens, text);
            self.brought(delta, Action::Passed);
        } else {
            let delta = self.output.extend(&tokens, tail == Tail::Stop);
            self.emit(delta);
        }
        if count == 0 {
            return;
        }
        self.broken = 0;
        if self.output.finish().is_some() {
            // The first ride ends by the backend's own final event, with the reason that it gives.
            if !ride.first {
                self.finish(self.output.finish());
            }
            return;
        }
        if self.trusted() {
            self.pilot.ridden(self.output.tokens(), from, now);
        }
        if tail != Tail::Open {
            return;
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

    /// Ends leaping for good where one of these tokens has a meaning of its own: what a parser of the backend's would
    /// make of the tokens behind it is not known by their ids.
    pub(super) fn watch_marks(&mut self, tokens: &[TokenId]) {
        if tokens.iter().any(|&token| self.is_mark(token)) {
            self.doubts(Doubted::Output);
        }
    }

    /// Whether a parser of the backend's may take this token out of the text.
    fn is_mark(&self, token: TokenId) -> bool {
        self.marks.binary_search(&token).is_ok() && !self.output.is_end_of_text(token)
    }

    /// Notes the pace of riding.
    pub(super) fn timed(&mut self, mut ride: Ride, tokens: usize, now: Tick) -> Ride {
        if tokens > 0 {
            match ride.last {
                Some(last) => {
                    self.pilot.control().with(|learnt| learnt.rode(now.seconds_since(last), tokens, now));
                }
                None if ride.after_leap => self.pilot.left(now.seconds_since(ride.since), now),
                None => {}
            }
            ride.last = Some(now);
            ride.brought = ride.brought.saturating_add(tokens as u32);
        }
        self.flight.ride = Some(ride);
        ride
    }

    pub(super) fn leave_ride(&mut self, ride: Ride) {
        self.flight.ride = None;
        self.act(Action::Cancel(ride.id));
        self.drop_shadow();
        if ride.first {
            let held = self.output.take_over();
            self.emit(held);
        }
    }

    pub(super) fn ride_ended(&mut self, ride: Ride, finish: Finish, now: Tick) {
        self.flight.ride = None;
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
    pub(super) fn ride_broke(&mut self, ride: Ride, now: Tick) {
        self.flight.ride = None;
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
    pub(super) fn ride_on(&mut self, reason: RideReason, after_leap: bool, now: Tick) {
        self.summary.reason = Some(reason);
        let slow = self.pilot.control().with(|learnt| learnt.costs.cancels_slowly());
        let segment = self.rules.segment.unwrap_or(if slow { SEGMENT_SLOW } else { u32::MAX }).max(1);
        let rest = self.output.rest().map_or(SEGMENT_OPEN, |rest| rest as u32);
        let asked = rest.min(segment).max(1);
        let id = self.act(Action::Ride(RidePlan::Continue { max_tokens: asked }));
        self.flight.ride =
            Some(Ride { id, first: false, asked, brought: 0, since: now, last: None, after_leap });
    }

    /// The backend asked for a pause and nothing else is under way: wait it out, if it is short.
    pub(super) fn wait(&mut self, pause: Duration, now: Tick) {
        self.flight.ride = None;
        self.broken += 1;
        if pause > PAUSE_MAX || self.broken > PAUSES_MAX {
            return self.finish(None);
        }
        self.pause = Some(now.after(pause));
        self.summary.reason = Some(RideReason::RetryAfter);
        self.wait = Some(now.after(pause));
    }
}
