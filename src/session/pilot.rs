//! The drafting and deciding side of a session: feeds the drafters, scores drafts, chooses the next step.
//!
//! It sees the past and the clock that it is handed, and answers with a step. It emits nothing.

mod ahead;
mod choose;
mod model;
mod seat;

use std::sync::Arc;
use std::time::Duration;

use self::ahead::Sketches;
pub use self::ahead::{AHEAD_MAX, Ahead};
use self::seat::{Asked, Seat, leading};
use super::Balance;
use super::accept::Accepted;
use super::shadow::VirtualRound;
use super::start::{Permission, Rules};
pub use crate::control::costs::Turn;
use crate::control::{Beside, Class, Control, Heat, Learnt, Quote, Round, Tariff, Tuning, Way};
use crate::draft::{Budget, DrafterId, Feedback, Lookup, Origin, Successors, Told, Tree, merge};
use crate::units::{Dice, Tick, TokenId};
use crate::words::{Plan, Put, RideReason, Shape, Verdict};

/// What to do next.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Ride, for this reason.
    Ride(RideReason),
    /// Verify this draft.
    Verify(Tree),
    /// Ask the model drafter for so many tokens first.
    Draft(usize),
}

/// The state of the session when a step is chosen.
#[derive(Clone, Copy, Debug)]
pub struct Stand {
    /// Whether it is leaping already.
    pub leaping: bool,
    /// Most nodes and depth that limit and context leave.
    pub room: Budget,
    /// Tokens that may still come; `None` without a limit.
    pub rest: Option<usize>,
    /// Output tokens so far.
    pub done: usize,
}

/// A verify call that was answered.
#[derive(Clone, Copy, Debug)]
pub struct Took {
    /// How it was made.
    pub put: Put,
    /// Seconds since the ride was left or the call before it ended.
    pub seconds: f64,
    /// What else was going on.
    pub beside: Beside,
    /// It decided something.
    pub decided: bool,
    /// What its time says of the costs.
    pub turn: Turn,
}

/// Rounds in a row, from leaving a ride to the next one.
#[derive(Clone, Copy, Debug)]
struct Streak {
    /// When the last round ended, or the streak began.
    since: Tick,
    rounds: u32,
    /// Empty rounds in a row.
    gap: usize,
    /// Ridden tokens lost since the best moment of the streak: the CUSUM of its losses.
    lost: f64,
    /// The first verify call has been answered: its time shows the cost of switching.
    switched: bool,
    /// Begun where no verify call was measured: it goes on until one is.
    trial: bool,
}

impl Streak {
    /// Whether it goes on to find out what a verify call costs.
    fn tries(&self) -> bool {
        self.trial && self.rounds < TRIAL
    }
}

/// First tokens of a source that must have been observed (decayed count) before it is trusted.
const EVIDENCE: f64 = 4.0;
/// Prompt tokens learnt at one token event, so that a long prompt delays no token by much.
const BITE: usize = 1024;
/// After `n` failed calls in a row, `PENANCE << n` tokens are ridden.
const PENANCE: usize = 16;
/// Ridden tokens that a streak may lose from its best moment on before it ends: a sequential test, so that a run of bad
/// luck does not end a session that pays, and a change of text does.
const LOSS_MOST: f64 = 8.0;
/// Share of a verify call's timeout from which on an engine is busy whose calls are expected to take so long.
const BUSY: f64 = 0.125;
/// Rounds of a streak that begins where no verify call was measured: the first one pays for the switch, and of the other two
/// one may have met a hiccup.
const TRIAL: u32 = 3;
/// Rounds that a session remembers of its own.
const MEMORY: f64 = 24.0;
/// Tokens of a class that weigh as much as its rounds do beside a session's own.
const CLASS_TOKENS: f64 = 16.0;

/// The pilot of one session.
pub struct Pilot {
    control: Arc<Control>,
    heat: Heat,
    /// Verify plans, best first.
    plans: Vec<Plan>,
    /// The drafters, in the policy's order.
    seats: Vec<Seat>,
    /// The model that drafts for this session, if one does.
    model: DrafterId,
    prompt: Option<Vec<TokenId>>,
    /// Tokens of prompt and output that the lookups have learnt.
    fed: usize,
    /// A number for the kind of the request, by which classes are told apart.
    kind: u64,
    gamma_max: usize,
    gamma_fixed: Option<usize>,
    acceptance_least: f64,
    margin: f64,
    stay: f64,
    /// Longest round, seconds: longer the client does not wait between two pieces of text.
    gap_most: f64,
    tuning: Tuning,
    dice: Dice,
    streak: Option<Streak>,
    sketches: Sketches,
    /// What leaping has won and lost so far.
    balance: Balance,
    /// Failed verify calls in a row, at most 5.
    faults: u32,
    /// No leap before so many output tokens.
    not_before: usize,
}

impl Pilot {
    /// A pilot that knows what `control` knows and nothing of this request.
    pub fn new(control: Arc<Control>, rules: &Rules, temperature: f64, seed: u64) -> Self {
        let drafts = !matches!(rules.permission, Permission::Ride(_));
        Self {
            control,
            heat: rules.heat(temperature),
            plans: rules.plans.clone(),
            seats: if drafts { Seat::all(rules) } else { Vec::new() },
            model: DrafterId::model(rules.model.unwrap_or_default()),
            prompt: None,
            fed: 0,
            gamma_max: rules.gamma_max,
            gamma_fixed: rules.gamma_fixed,
            kind: rules.kind,
            acceptance_least: rules.acceptance_least,
            margin: rules.margin,
            stay: rules.stay,
            gap_most: rules.gap_most.map_or(f64::MAX, |most| most.as_secs_f64()),
            tuning: Tuning::default(),
            dice: Dice::new(seed),
            streak: None,
            sketches: Sketches::default(),
            balance: Balance::default(),
            faults: 0,
            not_before: 0,
        }
    }

    /// The lookups, which answer at once.
    fn lookups(&self) -> impl Iterator<Item = &dyn Lookup> {
        self.seats.iter().filter_map(|seat| Some(seat.inline()?.lookup.as_ref()))
    }

    /// The seat of the model drafter, if there is one.
    fn model(&self) -> Option<(&Seat, &Asked)> {
        self.seats.iter().find_map(|seat| Some((seat, seat.asked()?)))
    }

    fn model_mut(&mut self) -> Option<&mut Seat> {
        self.seats.iter_mut().find(|seat| seat.asked().is_some())
    }

    fn asked_mut(&mut self) -> Option<&mut Asked> {
        self.seats.iter_mut().find_map(Seat::asked_mut)
    }

    /// What was learnt, shared by all sessions of the epoch.
    pub fn control(&self) -> &Control {
        &self.control
    }

    /// Plan, fallback and context size of the next round.
    pub(super) fn way(&self) -> Way {
        let plan = self.plans.first().copied().unwrap_or(Plan::FanOut);
        Way { plan, fallback: self.plans.get(1).copied(), context: self.fed }
    }

    /// Sets the prompt. It is learnt in bites, at the token events that follow.
    pub fn know_prompt(&mut self, prompt: Vec<TokenId>) {
        self.prompt = Some(prompt);
    }

    /// Ids of the prompt, if known.
    pub fn prompt(&self) -> Option<&[TokenId]> {
        self.prompt.as_deref()
    }

    /// Learns from ridden tokens: advances virtual rounds and feeds the drafters. `from` is the index of the first
    /// new token.
    pub fn ridden(&mut self, output: &[TokenId], from: usize, now: Tick) {
        if self.prompt.is_none() || self.lookups().next().is_none() || self.gamma_fixed.is_some() {
            return;
        }
        self.feed(output, from, BITE);
        for (index, &token) in output.iter().enumerate().skip(from) {
            self.follow(token);
            self.feed(output, index + 1, BITE);
            if self.caught_up(index + 1) {
                self.begin_virtual(now);
            }
        }
    }

    /// The virtual round of every seat goes on with a ridden token.
    fn follow(&mut self, token: TokenId) {
        let (control, heat, tuning) = (&self.control, self.heat, &mut self.tuning);
        let mut over: Vec<(usize, usize, usize)> = Vec::new();
        for (place, seat) in self.seats.iter_mut().enumerate() {
            let Some(inline) = seat.inline_mut() else { continue };
            let Some(mut round) = inline.virtual_round.take() else { continue };
            let (draft, parent, depth) = round.place();
            score(control, tuning, heat, draft, parent, depth, token);
            match round.follow(token) {
                None => inline.virtual_round = Some(round),
                Some(tokens) => {
                    over.push((place, round.planned, if round.planned == 0 { 1 } else { tokens }));
                }
            }
        }
        for (place, planned, tokens) in over {
            self.note(place, planned, 0, tokens);
        }
    }

    /// Notes a round, real or virtual, for the drafter in this seat and for its class.
    fn note(&mut self, place: usize, nodes: usize, modelled: usize, tokens: usize) {
        let Some(seat) = self.seats.get_mut(place) else { return };
        seat.rounds.push(nodes, modelled, tokens);
        let class = Class::new(seat.id, self.heat, self.kind);
        self.control.with(|learnt| learnt.classes.push(class, nodes, modelled, tokens));
    }

    /// A virtual round for every seat that answers at once and has none.
    fn begin_virtual(&mut self, now: Tick) {
        let budget = Budget { nodes: self.gamma_max, depth: self.gamma_max };
        for place in 0..self.seats.len() {
            let idle =
                self.seats.get(place).and_then(Seat::inline).filter(|inline| inline.virtual_round.is_none());
            let Some(draft) = idle.map(|inline| inline.lookup.draft(budget)) else { continue };
            let (mut draft, quote) = self.control.with(|learnt| {
                // What would be sent, hoping for the best: otherwise a cost that was too high once were never tried again.
                let tariff = self.tariff(learnt, Some(now));
                let rate = self.rate(self.seats.get(place), &tariff, learnt);
                self.cut(&[draft], budget, rate, &tariff, learnt)
            });
            draft.truncate(quote.nodes.max(4));
            if let Some(inline) = self.seats.get_mut(place).and_then(Seat::inline_mut) {
                inline.virtual_round = Some(VirtualRound::new(draft, quote.nodes));
            }
        }
    }

    /// The drafts merged within `budget`, and their best cut where the seconds of a round are worth `rate` tokens each.
    fn cut(
        &self,
        drafts: &[Tree],
        budget: Budget,
        rate: f64,
        tariff: &Tariff,
        learnt: &Learnt,
    ) -> (Tree, Quote) {
        let merged = self.merged(drafts, budget, learnt);
        let quote = tariff.cut(&merged.survival, rate, false);
        (merged.tree, quote)
    }

    fn merged(&self, drafts: &[Tree], budget: Budget, learnt: &Learnt) -> merge::Merged {
        self.merged_as(self.way().plan.shape(), drafts, budget, learnt)
    }

    fn merged_as(&self, shape: Shape, drafts: &[Tree], budget: Budget, learnt: &Learnt) -> merge::Merged {
        merge::merge(drafts, budget, shape, |vote, company, depth| {
            let expected = learnt.survival.conditional(self.heat, vote, company, depth);
            self.tuning.adjust(vote.drafter, expected)
        })
    }

    /// Feeds the drafters with the past up to output token `until`, at most `most` tokens.
    fn feed(&mut self, output: &[TokenId], until: usize, most: usize) {
        let Some(prompt) = &self.prompt else { return };
        let end = (prompt.len() + until).min(self.fed.saturating_add(most));
        let slices = [
            (Origin::Prompt, prompt.get(self.fed.min(prompt.len())..end.min(prompt.len()))),
            (
                Origin::Output,
                output.get(self.fed.saturating_sub(prompt.len())..end.saturating_sub(prompt.len())),
            ),
        ];
        for (origin, tokens) in slices {
            let Some(tokens) = tokens.filter(|tokens| !tokens.is_empty()) else { continue };
            for inline in self.seats.iter_mut().filter_map(Seat::inline_mut) {
                inline.lookup.observe(&Feedback { tokens, origin });
            }
        }
        self.fed = self.fed.max(end);
    }

    /// The lookups hear what the target said of a draft that follows `output`, in a verdict that is used.
    pub fn hear(&mut self, draft: &Tree, verdict: &Verdict, output: &[TokenId]) {
        let Some(&after) = output.last().or(self.prompt.as_ref().and_then(|prompt| prompt.last())) else {
            return;
        };
        for inline in self.seats.iter_mut().filter_map(Seat::inline_mut) {
            inline.lookup.hear(&Told { after, draft, verdict });
        }
    }

    /// Bytes that the lookups hold for this session.
    pub fn lookup_bytes(&self) -> usize {
        self.lookups().map(Lookup::bytes).sum()
    }

    /// What was learnt of successors, if a drafter of this session learns them.
    pub fn successors(&self) -> Option<&Successors> {
        self.lookups().find_map(Lookup::successors)
    }

    fn caught_up(&self, done: usize) -> bool {
        self.prompt.as_ref().is_some_and(|prompt| self.fed == prompt.len() + done)
    }

    /// Learns from a real round that ended at `now`: its draft and what was accepted.
    pub fn round(&mut self, draft: &Tree, accepted: &Accepted, modelled: usize, now: Tick) {
        let mut place = None;
        for (depth, &token) in accepted.tokens.iter().enumerate() {
            score(&self.control, &mut self.tuning, self.heat, draft, place, depth, token);
            place = draft.child(place, token);
        }
        let tokens = accepted.tokens.len();
        if let Some(place) = leading(&self.seats, draft, modelled) {
            self.note(place, draft.len(), modelled, tokens);
        }
        self.faults = 0;
        let round = self.control.with(|learnt| {
            if learnt.crowd.others() > 0 {
                learnt.budget.refused((draft.len() + 1).saturating_sub(tokens));
            }
            let expected = learnt.costs.verify(self.way(), draft.len())
                + modelled as f64 * learnt.costs.draft_token(self.model.number);
            Round { expected, lost: self.lost_by_others(draft.len(), learnt) }
        });
        self.booked(tokens, round, now);
        if let Some(streak) = &mut self.streak {
            streak.rounds += 1;
            streak.gap = if draft.is_empty() { streak.gap + 1 } else { 0 };
        }
    }

    /// Books the time since the last round ended, which brought `tokens`, to the account of the replica.
    fn booked(&mut self, tokens: usize, round: Round, now: Tick) {
        let Some(streak) = &mut self.streak else { return };
        let seconds = now.seconds_since(std::mem::replace(&mut streak.since, now));
        let (won, saved) = self.control.with(|learnt| {
            let won = learnt.leapt(tokens, seconds, round, now);
            (won, learnt.to_ride(won))
        });
        streak.lost = (streak.lost - won).max(0.0);
        self.balance.book(saved);
    }

    /// Learns what the first token of a ride took that followed a leap, seconds.
    pub fn left(&mut self, seconds: f64, now: Tick) {
        self.balance.book(self.control.with(|learnt| {
            let won = learnt.left(seconds, now);
            learnt.to_ride(won)
        }));
    }

    /// What leaping has won and lost so far.
    pub fn balance(&self) -> Balance {
        self.balance
    }

    /// Whether the streak has lost more than chance explains. A trial goes on until it has shown something.
    fn has_lost(&self) -> bool {
        self.streak.is_some_and(|streak| streak.lost >= LOSS_MOST && !streak.tries())
    }

    /// Learns what a verify call cost: by the plan and with the nodes that it was really made with.
    pub fn called(&mut self, took: &Took, now: Tick) {
        let Took { put, seconds, beside, decided, turn } = *took;
        let (way, nodes) = (Way::by(put.plan, self.fed), put.nodes);
        let streak = self.streak.as_mut();
        let first = streak.is_some_and(|streak| !std::mem::replace(&mut streak.switched, true));
        self.control.with(|learnt| {
            learnt.costs.decided(put.plan, decided, now);
            if first {
                learnt.costs.entered(way, nodes, seconds, now);
            } else if turn == Turn::Alone {
                learnt.costs.verified(way, nodes, seconds, now);
                learnt.costs.shared(way, nodes, seconds, beside);
            } else {
                learnt.costs.overlapped(way, nodes, seconds, turn, now);
            }
        });
    }

    /// Learns what a draft of the model drafter cost; returns when the round is to be timed from. The first
    /// draft after a ride waits for what the ride left behind: what it took beyond the expected is the cost
    /// of switching, and so belongs to the round.
    pub fn drafted(&mut self, tokens: usize, since: Tick, now: Tick) -> Tick {
        let first = self.streak.is_some_and(|streak| streak.rounds == 0);
        let seconds = now.seconds_since(since);
        self.control.with(|learnt| {
            if first {
                let expected = learnt.costs.draft_token(self.model.number) * tokens as f64;
                return since.after(Duration::from_secs_f64(expected.min(seconds)));
            }
            learnt.costs.drafted(self.model.number, tokens, seconds, now);
            now
        })
    }

    /// Learns from a draft that did not come in time: it costs at least what was waited for it. Returns when the round
    /// is to be timed from, and how many tokens of the drafter's the wait was worth.
    pub fn waited(&mut self, tokens: usize, since: Tick, now: Tick) -> (Tick, usize) {
        let began = self.drafted(tokens, since, now);
        let token = self.control.with(|learnt| learnt.costs.draft_token(self.model.number));
        let worth = (now.seconds_since(since) / token.max(1e-9)).min(1e6) as usize;
        (began, worth.max(1))
    }

    /// Whether the engine computes other requests beside this one, so many that a call of so many nodes was expected to
    /// take an eighth of its timeout.
    pub fn is_busy(&self, nodes: usize, timeout: Duration) -> bool {
        let way = self.way();
        self.control.with(|learnt| {
            let expected = learnt.costs.verify(way, nodes);
            learnt.crowd.requests() > 1 && expected >= BUSY * timeout.as_secs_f64()
        })
    }

    /// The model drafter has answered, so it has read the prompt.
    pub fn read(&mut self) {
        if let Some(asked) = self.asked_mut() {
            asked.warm = true;
        }
    }

    /// Whether the model drafter has read the prompt.
    pub fn has_read(&self) -> bool {
        self.model().is_some_and(|(_, asked)| asked.warm)
    }

    /// Notes that leaping begins.
    pub fn enter(&mut self, now: Tick) {
        self.seats.iter_mut().filter_map(Seat::inline_mut).for_each(|inline| inline.virtual_round = None);
        let trial = !self.control.with(|learnt| learnt.costs.verify_measured(self.way()));
        self.streak = Some(Streak { since: now, rounds: 0, gap: 0, lost: 0.0, switched: false, trial });
    }

    /// Leaping ends. What was waited for in vain since the last round is lost.
    pub fn leave(&mut self, done: usize, now: Tick) {
        self.booked(0, Round::default(), now);
        if self.has_lost() {
            self.not_before = self.not_before.max(done + PENANCE);
        }
        self.streak = None;
    }

    /// A verify call failed: no leap for a while, longer with every failure in a row.
    pub fn verify_failed(&mut self, done: usize, now: Tick) {
        self.booked(0, Round::default(), now);
        self.streak = None;
        self.faults = (self.faults + 1).min(5);
        self.not_before = done + (PENANCE << self.faults);
    }

    /// A verify call came too late because the engine is busy: the time is lost, and that is all.
    pub fn verify_late(&mut self, nodes: usize, waited: f64, now: Tick) {
        let way = self.way();
        // It takes at least as long; if less was believed, that was wrong.
        self.control.with(|learnt| {
            if learnt.costs.verify(way, nodes) < waited {
                learnt.costs.verified(way, nodes, waited, now);
            }
        });
        self.booked(0, Round::default(), now);
        self.streak = None;
    }

    /// The number of output tokens before which the session must not leap.
    pub fn not_before(&self) -> usize {
        self.not_before
    }

    /// The model drafter failed: it is not asked for a while, longer with every failure.
    pub fn model_failed(&mut self, done: usize) {
        if let Some(seat) = self.model_mut() {
            seat.health.failed(done);
        }
    }
}

/// Notes for every child of `place`, and for every drafter that proposed it, whether it is the `token` that came.
fn score(
    control: &Control,
    tuning: &mut Tuning,
    heat: Heat,
    draft: &Tree,
    place: Option<usize>,
    depth: usize,
    token: TokenId,
) {
    for node in draft.nodes().iter().filter(|node| node.parent == place) {
        let (accepted, company) = (node.token == token, node.company);
        for vote in node.votes.by_source() {
            let expected = control.with(|learnt| {
                let expected = learnt.survival.conditional(heat, vote, company, depth);
                learnt.survival.observe(heat, vote, company, depth, accepted);
                expected
            });
            tuning.observe(vote.drafter, expected, accepted);
        }
    }
}
