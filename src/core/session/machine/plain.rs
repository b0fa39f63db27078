//! Plain decoding: tokens come in, the pace is measured, and at each of them the session may start
//! to speculate.

use std::time::Duration;

use super::flight::{PlainFlight, PlainScope};
use super::{Interruptions, Session};
use crate::control::Awaited;
use crate::session::accept::Walk;
use crate::session::controller::NextStep;
use crate::session::{Action, Doubted, Event, Fault, Finish, Parsed, PlainRequest, Tail};
use crate::units::{Tick, TokenId};
use crate::words::PlainReason;

/// Longest pause requested by the backend that a session without a plain request waits for.
const PAUSE_MAX: Duration = Duration::from_secs(10);
/// Maximum consecutive pauses that it waits for.
const PAUSES_MAX: u32 = 6;
/// Tokens of one continued plain request where cancelling is slow.
const SEGMENT_SLOW: u32 = 16;
/// Tokens of one continued plain request where no limit of the output is known.
const SEGMENT_OPEN: u32 = 512;

impl<W: Walk> Session<W> {
    pub(super) fn plain_event(&mut self, event: Event, now: Tick) {
        let Some(plain) = self.flight.plain else { return };
        match event {
            Event::Prompt(ids) => self.know_prompt(ids),
            Event::Token { tokens, parsed, tail } => self.token(plain, tokens, parsed, tail, now),
            Event::Proposal(proposal) => {
                self.controller.observe_proposal(&proposal, self.output.tokens().len());
            }
            Event::Doubt => self.doubts(Doubted::Prompt),
            Event::Rendered { prompt, constrained } => {
                self.know_prompt(prompt);
                self.constrained = constrained;
            }
            Event::PlainEnded(finish) => self.plain_ended(plain, finish, now),
            Event::Fault(Fault::RetryAfter(pause)) if plain.scope == PlainScope::Rest => {
                self.wait(pause, now);
            }
            Event::Fault(_) => self.plain_broke(plain, now),
            Event::Draft(_)
            | Event::Shadow(_)
            | Event::VerifyResult(_)
            | Event::ClientGone
            | Event::Timeout
            | Event::Mode(_) => {}
        }
    }

    fn doubts(&mut self, ids: Doubted) {
        self.doubt.get_or_insert(ids);
    }

    pub(super) fn know_prompt(&mut self, ids: Vec<TokenId>) {
        if let Some(known) = self.controller.prompt() {
            if known != ids {
                self.doubts(Doubted::Prompt);
            }
        } else {
            self.output.set_prompt(&ids);
            self.controller.know_prompt(ids);
        }
    }

    /// Takes tokens of a plain request. After the last ones no step is chosen: the backend has
    /// ended the output, perhaps by a rule that is not known here.
    pub(super) fn token(
        &mut self,
        plain: PlainFlight,
        tokens: Vec<TokenId>,
        parsed: Parsed,
        tail: Tail,
        now: Tick,
    ) {
        let from = self.output.tokens().len();
        let count = tokens.len();
        if let Some(presence) = &mut self.presence {
            presence.has_come(Some(now));
        }
        let plain = self.timed(plain, count, now);
        self.watch_marks(&tokens);
        if plain.scope == PlainScope::Client {
            let delta = self.output.plain(tokens, parsed, tail == Tail::Stop);
            self.watch_parser(false);
            self.release(delta, Action::Passed);
        } else {
            let delta = self.output.extend(&tokens, tail == Tail::Stop);
            self.emit(delta);
        }
        if count == 0 {
            return;
        }
        self.interruptions = Interruptions::default();
        if self.output.finish().is_some() {
            // The first plain request ends by the backend's final event, which carries the reason.
            if plain.scope != PlainScope::Client {
                self.finish(self.output.finish());
            }
            return;
        }
        if self.trusted() {
            self.controller.note_plain(self.output.tokens(), from);
        }
        if tail != Tail::Open {
            return;
        }
        match self.step(false, now) {
            NextStep::Plain(reason) if plain.scope == PlainScope::FirstToken => {
                self.decode_plainly(reason, false, now);
            }
            NextStep::Plain(reason) => {
                self.summary.reason = Some(reason);
                self.shadow_pass(now);
            }
            step => {
                self.leave_plain(plain);
                self.controller.enter(now);
                self.take_step(step, now, now);
            }
        }
    }

    /// Ends speculation for good where one of these tokens has a special meaning: the effect of the
    /// backend's parser on the tokens behind it is not known by their ids.
    pub(super) fn watch_marks(&mut self, tokens: &[TokenId]) {
        if tokens.iter().any(|&token| self.is_mark(token)) {
            self.doubts(Doubted::Output);
        }
    }

    /// Ends speculation for good where the backend's parser has given other parts.
    fn watch_parser(&mut self, ended: bool) {
        if self.output.is_misparsed(ended) {
            self.summary.misparsed = self.summary.misparsed.or_else(|| self.output.difference());
            self.doubts(Doubted::Parser);
        }
    }

    /// True if a parser of the backend may take this token out of the text.
    fn is_mark(&self, token: TokenId) -> bool {
        self.marks.binary_search(&token).is_ok() && !self.output.is_end_of_text(token)
    }

    /// Notes the plain pace.
    pub(super) fn timed(&mut self, mut plain: PlainFlight, tokens: usize, now: Tick) -> PlainFlight {
        if tokens > 0 {
            match plain.last {
                Some(last) => {
                    self.controller
                        .control()
                        .with(|learnt| learnt.note_plain(now.seconds_since(last), tokens, now));
                }
                None if plain.scope != PlainScope::Rest => self.first_token(now.seconds_since(plain.since)),
                None => {
                    let seconds = now.seconds_since(plain.since);
                    self.controller.continued(seconds, tokens, plain.after_rounds, now);
                }
            }
            plain.last = Some(now);
            plain.received = plain.received.saturating_add(tokens as u32);
        }
        self.flight.plain = Some(plain);
        plain
    }

    /// Notes the time to the client's first token, once its prompt is known.
    fn first_token(&self, seconds: f64) {
        if let (Some(presence), Some(prompt)) = (&self.presence, self.controller.prompt()) {
            presence.first_token(prompt.len(), seconds);
        }
    }

    pub(super) fn leave_plain(&mut self, plain: PlainFlight) {
        self.flight.plain = None;
        self.act(Action::Cancel(plain.id));
        if self.controller.has_read() {
            self.drop_shadow();
        }
        if plain.scope == PlainScope::Client {
            let withheld = self.output.take_over();
            self.emit(withheld);
        }
    }

    pub(super) fn plain_ended(&mut self, plain: PlainFlight, finish: Finish, now: Tick) {
        self.flight.plain = None;
        if plain.scope == PlainScope::Client {
            if self.summary.reason == Some(PlainReason::NoGain) && !self.trusted() {
                self.summary.reason = Some(PlainReason::UntrustedIds);
            }
            self.watch_parser(true);
            let alike = self.doubt.is_none() && self.output.level();
            if alike {
                self.summary.parsed = self.output.parts();
            }
            return self.finish(Some(finish));
        }
        if finish == Finish::Length && plain.received >= plain.most {
            return match self.step(false, now) {
                NextStep::Plain(reason) => self.decode_plainly(reason, false, now),
                step => {
                    self.controller.enter(now);
                    self.take_step(step, now, now);
                }
            };
        }
        let withheld = self.output.end(finish);
        self.emit(withheld);
        self.finish(self.output.finish());
    }

    /// True if the output can go on exactly from its tokens after the plain request in flight.
    fn goes_on_from(&self, plain: PlainFlight) -> bool {
        let exact = self.trusted() && !self.constrained && !self.rules.methods.is_empty();
        let possible = plain.scope != PlainScope::Client || (exact && self.output.level());
        possible && self.interruptions.broken == 0 && !self.output.tokens().is_empty()
    }

    /// True if the output can go on exactly from its tokens, should the plain request in flight
    /// break off; false if none is in flight.
    pub fn may_continue(&self) -> bool {
        self.flight.plain.is_some_and(|plain| self.goes_on_from(plain))
    }

    /// True if the output has ended by the rules that are known here.
    pub fn is_complete(&self) -> bool {
        self.output.finish().is_some()
    }

    /// A plain request broke off. The tokens read so far stay; continues from there once, if that
    /// can be done exactly.
    pub(super) fn plain_broke(&mut self, plain: PlainFlight, now: Tick) {
        let goes_on = self.goes_on_from(plain);
        self.flight.plain = None;
        self.interruptions.broken += 1;
        if !goes_on {
            return self.finish(None);
        }
        if plain.scope == PlainScope::Client {
            if self.output.finish().is_some() {
                return self.finish(self.output.finish());
            }
            let withheld = self.output.take_over();
            self.emit(withheld);
        }
        self.decode_plainly(PlainReason::UpstreamError, false, now);
    }

    /// Continues plainly from the complete context, by token ids.
    pub(super) fn decode_plainly(&mut self, reason: PlainReason, after_rounds: bool, now: Tick) {
        self.summary.reason = Some(reason);
        let slow = self.controller.control().with(|learnt| learnt.costs.cancels_slowly());
        let segment = self.rules.segment.unwrap_or(if slow { SEGMENT_SLOW } else { u32::MAX }).max(1);
        let rest = self.output.rest().map_or(SEGMENT_OPEN, |rest| rest as u32);
        let most = rest.min(segment).max(1);
        let id = self.act(Action::Plain(PlainRequest::Continue { max_tokens: most }));
        if let Some(presence) = self.presence.as_mut()
            && after_rounds
        {
            presence.awaits(Awaited::Continuation);
        }
        let scope = PlainScope::Rest;
        self.flight.plain =
            Some(PlainFlight { id, scope, most, received: 0, since: now, last: None, after_rounds });
    }

    /// The backend requested a pause and nothing else is in flight: waits for its end, if it is
    /// short.
    pub(super) fn wait(&mut self, pause: Duration, now: Tick) {
        self.flight.plain = None;
        self.interruptions.pauses += 1;
        if pause > PAUSE_MAX || self.interruptions.pauses > PAUSES_MAX {
            return self.finish(None);
        }
        self.backoff.until = Some(now.after(pause));
        self.summary.reason = Some(PlainReason::RetryAfter);
        self.resume_at = Some(now.after(pause));
    }
}
