//! Rounds in flight: the next verify call is sent before the verdict of the one before it is there, on the assumption
//! that this brings a certain run of tokens. Where round trips are long, one of them is saved as often as that comes true.
//!
//! It is exact for the same reason as one call at a time: which call decides a place is settled before anything of it is
//! sampled. The earlier call decides every place of its draft and the one behind it; the next call's prefix holds a guess of
//! that one, and it counts only if every token of its prefix came true. What it says before its turn is kept unread: it
//! changes no timeout, no retry and no other call; and it is dropped, unread, where its prefix did not come true.

use super::Session;
use super::leap::Call;
use crate::session::Action;
use crate::session::accept::Walk;
use crate::session::pilot::{AHEAD_MAX, Ahead, Turn};
use crate::units::{Tick, TokenId};

impl<W: Walk> Session<W> {
    /// Sends verify calls ahead, as many as pay.
    pub(super) fn look_ahead(&mut self, now: Tick) {
        while self.may_look_ahead(now) {
            let before: Vec<TokenId> = self.assumed().collect();
            let stand = self.stand(true);
            let Some(last) = self.flight.calls.back() else { return };
            let next = self.pilot.ahead(self.output.tokens(), &before, &last.draft, stand, now);
            let goes_on = |ahead: &Ahead| !ahead.assumed.iter().any(|&token| self.output.may_end_with(token));
            let Some(Ahead { assumed, draft }) = next.filter(goes_on) else { return };
            if let Some(first) = self.flight.calls.front_mut() {
                first.turn = first.turn.accompanied();
            }
            self.summary.ahead.sent += 1;
            self.send(Call { place: 0, draft, modelled: 0, assumed, turn: Turn::Promoted }, now, now);
        }
    }

    /// Whether one more call may be sent ahead: not behind a miss, where the text has just turned out other than assumed, and
    /// not behind a place that its first plan could not decide.
    fn may_look_ahead(&self, now: Tick) -> bool {
        let forced = self.rules.gamma_fixed.is_some();
        let most = self.rules.ahead.unwrap_or(if forced { 0 } else { AHEAD_MAX });
        let calls = &self.flight.calls;
        let calm = calls.front().is_some_and(|first| forced || first.turn != Turn::AfterMiss);
        let first_plan = calls.back().is_some_and(|last| last.place == 0);
        (1..=most).contains(&calls.len()) && calm && first_plan && self.forbidden(now).is_none()
    }

    /// What the calls under way assume, beyond the output.
    fn assumed(&self) -> impl Iterator<Item = TokenId> {
        self.flight.calls.iter().flat_map(|call| &call.assumed).copied()
    }

    /// A round has brought these tokens. The next call under way goes on if they are what it assumed; else all of them are
    /// dropped, and what comes next is chosen anew.
    pub(super) fn next_round(&mut self, brought: &[TokenId], now: Tick) {
        let goes_on = self.flight.calls.front().is_some_and(|next| next.assumed == brought);
        if !goes_on || self.forbidden(now).is_some() {
            self.missed = !self.flight.calls.is_empty();
            self.drop_calls();
            let step = self.step(true, now);
            return self.leap(step, now, now);
        }
        self.summary.ahead.used += 1;
        let Some(next) = self.flight.calls.front_mut() else { return };
        next.assumed.clear();
        (next.began, next.until) = (now, now.after(self.rules.verify_timeout));
        match next.early.take() {
            Some(answer) => {
                if let Some(next) = self.flight.calls.pop_front() {
                    self.verified(next, answer, now);
                }
            }
            None => self.look_ahead(now),
        }
    }

    /// Cancels every verify call under way. What they may have said already is not looked at.
    pub(super) fn drop_calls(&mut self) {
        while let Some(call) = self.flight.calls.pop_front() {
            self.act(Action::Cancel(call.id));
            if let Some(presence) = &mut self.presence {
                presence.call_ends();
            }
            self.pilot.discarded(call.draft.len());
        }
    }
}
