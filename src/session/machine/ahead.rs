//! What is done for the next round while one is under way: verify calls sent ahead, and the model drafter's sketch.
//!
//! Rounds in flight: the next verify call is sent before the verdict of the one before it is there, on the assumption
//! that this brings a certain run of tokens. Where round trips are long, one of them is saved as often as that comes true.
//!
//! It is exact for the same reason as one call at a time: which call decides a place is settled before anything of it is
//! sampled. The earlier call decides every place of its draft and the one behind it; the next call's prefix holds a guess of
//! that one, and it counts only if every token of its prefix came true. What it says before its turn is kept unread: it
//! changes no timeout, no retry and no other call; and it is dropped, unread, where its prefix did not come true.
//!
//! A sketch is a draft for the next round that is asked for while the verify call of this one is under way, on the same
//! kind of assumption. A draft decides nothing, so that one that fits is as good as one that was asked for afterwards.

use super::Session;
use super::flight::Sketching;
use super::leap::Call;
use crate::draft::{Draft, Tree};
use crate::session::accept::Walk;
use crate::session::pilot::{AHEAD_MAX, Ahead, Step, Turn};
use crate::session::{Action, Event};
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
            self.send(
                Call { place: 0, draft: draft.into(), modelled: 0, assumed, turn: Turn::Promoted },
                now,
                now,
            );
        }
    }

    /// Whether one more call may be sent ahead: not behind a miss, where the text has just turned out other than assumed, and
    /// not behind a place that its first plan could not decide.
    fn may_look_ahead(&self, now: Tick) -> bool {
        let forced = self.rules.gamma_fixed.is_some();
        let most = self.rules.ahead.unwrap_or(if forced { 0 } else { AHEAD_MAX });
        let calls = &self.flight.calls;
        let calm = calls.front().is_some_and(|first| forced || first.turn != Turn::AfterMiss);
        // What is drawn for a sampled draft belongs to its own round.
        let first_plan = !self.rules.samples && calls.back().is_some_and(|last| last.place == 0);
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

    /// Begins a round after one that has brought these tokens, by the sketch that was made for it if that fits.
    fn begin_round(&mut self, brought: &[TokenId], now: Tick) {
        let asked = self.take_sketch();
        let was_asked = asked.is_some();
        let sketch: Option<Tree> = asked.and_then(|sketch| sketch.behind(brought));
        if was_asked {
            self.pilot.sketched(sketch.is_some());
        }
        let step = self.step(true, now);
        match (step, sketch) {
            (Step::Draft(_) | Step::Verify(_), Some(chain)) => {
                let modelled = chain.len();
                let draft = self.pilot.combine(chain.into(), self.stand(true));
                self.verify(draft, modelled, now, now);
            }
            (step, _) => self.leap(step, now, now),
        }
    }

    /// Asks the model drafter for the draft of the next round, where it drafted for the one under way and that pays.
    pub(super) fn sketch(&mut self, now: Tick) {
        let rules = &self.rules;
        let [call] = self.flight.calls.make_contiguous() else { return };
        let may = !rules.samples
            && rules.drafts_ahead
            && (rules.gamma_fixed.is_none() || rules.ahead.is_some_and(|most| most > 0));
        if !may || call.modelled == 0 || call.place > 0 || self.flight.sketch.is_some() {
            return;
        }
        let assumed = call.draft.first_path();
        let goes_on = !assumed.iter().any(|&token| self.output.may_end_with(token));
        let stand = self.stand(true);
        let room = stand.room.depth.min(stand.room.nodes).saturating_sub(assumed.len() + 1);
        let gamma = self.pilot.sketch(room, stand.done, now).filter(|_| goes_on);
        let Some((gamma, call)) = gamma.zip(self.flight.calls.front_mut()) else { return };
        call.turn = call.turn.sketched();
        let least = self.pilot.least_worth(gamma);
        let id = self.act(Action::Draft { gamma: gamma + 1, least, assumed: assumed.clone() });
        self.flight.sketch = Some(Sketching { id, assumed, chain: None });
    }

    /// The model drafter has answered for the next round.
    pub(super) fn sketched(&mut self, event: Event) {
        match (event, &mut self.flight.sketch) {
            (Event::Draft(Draft::Tree(chain)), Some(sketch)) => sketch.chain = Some(chain),
            (Event::Fault(_), _) => {
                self.flight.sketch = None;
                self.pilot.model_failed(self.output.tokens().len());
            }
            _ => {}
        }
    }

    /// Takes the sketch off the actions under way, and cancels what is left of it.
    pub(super) fn take_sketch(&mut self) -> Option<Sketching> {
        let sketch = self.flight.sketch.take()?;
        if sketch.chain.is_none() {
            self.act(Action::Cancel(sketch.id));
        }
        Some(sketch)
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
