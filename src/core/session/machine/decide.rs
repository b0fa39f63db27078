//! Decides if the session may speculate now. The controller decides if it pays.

use super::Session;
use super::flight::PlainScope;
use crate::draft::{Budget, Tree};
use crate::session::Doubted;
use crate::session::accept::Walk;
use crate::session::controller::{NextStep, SessionState};
use crate::session::start::Permission;
use crate::units::{Tick, TokenId};
use crate::words::PlainReason;

impl<W: Walk> Session<W> {
    pub(super) fn step(&mut self, speculating: bool, now: Tick) -> NextStep {
        if let Some(reason) = self.forbidden(now) {
            return NextStep::Plain(reason);
        }
        let state = self.state(speculating);
        if state.room.depth == 0 && self.rules.gamma_fixed.is_none() {
            // The last token is not worth a switch either way, and does not change the reason for
            // the plain tokens before it.
            let before = self.summary.reason.unwrap_or(PlainReason::NoGain);
            return if speculating { NextStep::Verify(Tree::default()) } else { NextStep::Plain(before) };
        }
        match self.controller.choose(self.output.tokens(), state) {
            NextStep::Plain(reason) => NextStep::Plain(reason),
            // Only where it is what prevents a round: it passes with the next tokens.
            _ if self.is_text_withheld() => NextStep::Plain(PlainReason::WithheldText),
            step => step,
        }
    }

    /// True if the backend of the first plain request has not sent all the text of its tokens.
    fn is_text_withheld(&self) -> bool {
        self.flight.plain.is_some_and(|plain| plain.scope == PlainScope::Client) && !self.output.level()
    }

    pub(super) fn state(&self, speculating: bool) -> SessionState {
        let rest = self.output.rest();
        let depth = rest.map_or(usize::MAX, |rest| rest.saturating_sub(1));
        let room = Budget { nodes: self.rules.context_max.saturating_sub(self.context() + 1), depth };
        SessionState { speculating, room, rest, done: self.output.tokens().len() }
    }

    pub(super) fn context(&self) -> usize {
        self.controller.prompt().map_or(0, <[TokenId]>::len) + self.output.tokens().len()
    }

    /// True if the ids are certain, so that continuing by them is the same request.
    pub(super) fn trusted(&self) -> bool {
        self.doubt.is_none() && self.output.agrees() && self.controller.prompt().is_some()
    }

    /// Reason why the session may not speculate now, whatever a round would yield.
    pub(super) fn forbidden(&self, now: Tick) -> Option<PlainReason> {
        if let Permission::Plain(reason) | Permission::Shadow(reason) = self.rules.permission {
            return Some(reason);
        }
        let forced = self.rules.gamma_fixed.is_some();
        if let Some(reason) = self.closed.filter(|&reason| !forced || reason.applies_when_forced()) {
            return Some(reason);
        }
        if self.rules.control_group && !forced {
            return Some(PlainReason::ControlGroup);
        }
        if self.rules.methods.is_empty() {
            return Some(PlainReason::NoVerifyMethod);
        }
        if self.constrained {
            return Some(PlainReason::Grammar);
        }
        if self.doubt == Some(Doubted::Parser) {
            return Some(PlainReason::Parser);
        }
        if !self.trusted() {
            return Some(PlainReason::UntrustedIds);
        }
        if self.backoff.until.is_some_and(|until| now < until) {
            return Some(PlainReason::RetryAfter);
        }
        if self.output.tokens().len() < self.backoff.until_tokens {
            return self.backoff.reason;
        }
        if self.context() + 1 > self.rules.context_max {
            return Some(PlainReason::ContextTooLong);
        }
        None
    }
}
