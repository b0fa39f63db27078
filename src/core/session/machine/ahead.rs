//! Work for the next round while one is in flight: verifying ahead, and drafting ahead with the
//! model drafter.
//!
//! Verify ahead: the next verify request is sent before the result of the one before it has
//! arrived, on the assumption that it yields a certain run of tokens. Where round trips are long,
//! one of them is saved whenever that comes true.
//!
//! It is exact for the same reason as one request at a time: the request that decides a position is
//! settled before anything at it is sampled. The earlier request decides every position of its
//! draft and the one behind it; the next request's prefix holds a guess of that one, and it counts
//! only if every token of its prefix came true. A result before its turn is kept unread: it changes
//! no timeout, no retry and no other request; and it is dropped, unread, where its prefix did not
//! come true.
//!
//! Draft ahead: a draft for the next round is requested while the verify request of this one is in
//! flight, on the same kind of assumption. A draft decides nothing, so one that fits is as good as
//! one that was requested afterwards.

use super::Session;
use super::flight::DraftingAhead;
use super::round::Call;
use crate::draft::{Draft, Tree};
use crate::session::accept::Walk;
use crate::session::controller::{AHEAD_MAX, Ahead, Step, Turn};
use crate::session::{Action, Event};
use crate::units::{Tick, TokenId};

impl<W: Walk> Session<W> {
    /// Sends verify requests ahead, as many as pay.
    pub(super) fn look_ahead(&mut self, now: Tick) {
        while self.may_look_ahead(now) {
            let before: Vec<TokenId> = self.assumed().collect();
            let state = self.state(true);
            let Some(last) = self.flight.calls.back() else { return };
            let next = self.controller.ahead(self.output.tokens(), &before, &last.draft, state, now);
            let ends = |&token: &TokenId| token >= self.rules.vocabulary || self.output.may_end_with(token);
            let goes_on = |ahead: &Ahead| !ahead.assumed.iter().any(ends);
            let Some(Ahead { assumed, draft }) = next.filter(goes_on) else { return };
            if let Some(first) = self.flight.calls.front_mut() {
                first.turn = first.turn.accompanied();
            }
            self.summary.ahead.sent += 1;
            self.send(
                Call { position: 0, draft: draft.into(), modelled: 0, assumed, turn: Turn::Promoted },
                now,
                now,
            );
        }
    }

    /// True if one more verify request may be sent ahead: not behind a miss, where the text has
    /// just differed from the assumption, and not behind a position that its first method could not
    /// decide.
    fn may_look_ahead(&self, now: Tick) -> bool {
        let forced = self.rules.gamma_fixed.is_some();
        let most = self.rules.ahead.unwrap_or(if forced { 0 } else { AHEAD_MAX });
        let calls = &self.flight.calls;
        let calm = calls.front().is_some_and(|first| forced || first.turn != Turn::AfterMiss);
        // Random numbers drawn for a sampled draft belong to its own round.
        let first_method = !self.rules.samples && calls.back().is_some_and(|last| last.position == 0);
        (1..=most).contains(&calls.len()) && calm && first_method && self.forbidden(now).is_none()
    }

    /// Tokens that the verify requests in flight assume, beyond the output.
    fn assumed(&self) -> impl Iterator<Item = TokenId> {
        self.flight.calls.iter().flat_map(|call| &call.assumed).copied()
    }

    /// A round has yielded these tokens. The next verify request in flight goes on if they match
    /// its assumption; else all of them are dropped, and the next step is chosen again.
    pub(super) fn next_round(&mut self, brought: &[TokenId], now: Tick) {
        let goes_on = self.flight.calls.front().is_some_and(|next| next.assumed == brought);
        if !goes_on || self.forbidden(now).is_some() {
            self.missed = !self.flight.calls.is_empty();
            self.drop_calls();
            return self.begin_round(brought, now);
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

    /// Begins a round after one that has yielded these tokens, by the draft made ahead for it if
    /// that fits.
    fn begin_round(&mut self, brought: &[TokenId], now: Tick) {
        let asked = self.take_ahead_draft();
        let was_asked = asked.is_some();
        let ahead_draft: Option<Tree> = asked.and_then(|ahead_draft| ahead_draft.behind(brought));
        if was_asked {
            self.controller.drafted_ahead(ahead_draft.is_some());
        }
        let step = self.step(true, now);
        match (step, ahead_draft) {
            (Step::Draft(_) | Step::Verify(_), Some(chain)) => {
                let modelled = chain.len();
                let draft = self.controller.combine(chain.into(), self.state(true));
                self.verify(draft, modelled, now, now);
            }
            (step, _) => self.take_step(step, now, now),
        }
    }

    /// Requests the draft of the next round from the model drafter, where it drafted for the round
    /// in flight and that pays.
    pub(super) fn ahead_draft(&mut self) {
        let rules = &self.rules;
        let [call] = self.flight.calls.make_contiguous() else { return };
        let may = !rules.samples
            && rules.drafts_ahead
            && (rules.gamma_fixed.is_none() || rules.ahead.is_some_and(|most| most > 0));
        if !may || call.modelled == 0 || call.position > 0 || self.flight.ahead_draft.is_some() {
            return;
        }
        let assumed = call.draft.first_path();
        let goes_on = !assumed.iter().any(|&token| self.output.may_end_with(token));
        let state = self.state(true);
        let room = state.room.depth.min(state.room.nodes).saturating_sub(assumed.len() + 1);
        let gamma = self.controller.ahead_draft(room, state.done).filter(|_| goes_on);
        let Some((gamma, call)) = gamma.zip(self.flight.calls.front_mut()) else { return };
        call.turn = call.turn.drafted_ahead();
        let min_survival = self.controller.min_worth(gamma);
        let id = self.act(Action::Draft { gamma: gamma + 1, min_survival, assumed: assumed.clone() });
        self.flight.ahead_draft = Some(DraftingAhead { id, assumed, chain: None });
    }

    /// The model drafter has answered for the next round.
    pub(super) fn drafted_ahead(&mut self, event: Event) {
        match (event, &mut self.flight.ahead_draft) {
            (Event::Draft(Draft::Tree(chain)), Some(ahead_draft)) => ahead_draft.chain = Some(chain),
            (Event::Fault(_), _) => {
                self.flight.ahead_draft = None;
                self.controller.model_failed(self.output.tokens().len());
            }
            _ => {}
        }
    }

    /// Removes the draft ahead from the actions in flight, and cancels it if it has not arrived.
    pub(super) fn take_ahead_draft(&mut self) -> Option<DraftingAhead> {
        let ahead_draft = self.flight.ahead_draft.take()?;
        if ahead_draft.chain.is_none() {
            self.act(Action::Cancel(ahead_draft.id));
        }
        Some(ahead_draft)
    }

    /// Cancels every verify request in flight. Results that have arrived already are not read.
    pub(super) fn drop_calls(&mut self) {
        while let Some(call) = self.flight.calls.pop_front() {
            self.act(Action::Cancel(call.id));
            if let Some(presence) = &mut self.presence {
                presence.call_ends();
            }
            self.controller.discarded(call.draft.len());
        }
    }
}
