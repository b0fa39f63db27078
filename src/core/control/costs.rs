//! Costs of requests in seconds: measured and weighted, assumed only where there is no measurement.
//!
//! The plain pace is stored per concurrency of the engine; the time of a verify request per method
//! that was used, the size of the context, that concurrency and the number of draft nodes. Idle
//! time makes all of it less certain and forgets none of it, and measurements of requests that lost
//! time are stored as long and with the same weight as those of requests that won.

mod drafts;
mod first_tokens;
mod joint;
mod pace;
mod renewal;
mod shared;
mod table;

use serde::{Deserialize, Serialize};

use std::sync::Arc;

use drafts::Drafts;
use first_tokens::FirstTokens;
pub use first_tokens::{DELAY_ALLOWED, Sent};
use joint::Joint;
pub use pace::SIZES as CONCURRENCIES;
use pace::{ConcurrencyBucket, Pace};
use renewal::{Renewals, Renewed};
pub use shared::SharedCosts;
pub use table::{CONTEXTS, NODES_MAX};
use table::{TableKey, Verify};

use super::belief::Belief;
use super::learnt_costs::{DraftCosts, PlainCosts, VerifyCosts};
use super::prospect::Prior;
use super::regret_budget::RegretBudget;
use crate::units::Tick;
use crate::words::VerifyMethod;

/// Weight of a probe's result, in measurements.
const PRIOR_WEIGHT: f64 = 0.5;
/// Minimum slope of the verify table before two points are known, in plain tokens per node.
const SLOPE: f64 = 0.02;
/// Assumed cost of a draft node before any request was measured, in plain tokens.
const NODE: f64 = 0.06;
/// Assumed time of a token of the model drafter before any was timed, in plain tokens.
const DRAFT: f64 = 0.15;
/// A first request that takes this multiple of the expected time is not explained by the switch.
const EXPENSIVE: f64 = 6.0;
/// Maximum of a concurrent request's time that counts, as a multiple of the expected time: one
/// hiccup is not a trend.
const OUTLIER: f64 = 3.0;
/// Weight of a time in which the engine read a prompt of ours, or of a plain token while it began
/// to continue a request: costs are those of the steps between, unless there are hardly any.
pub(super) const READING: f64 = 0.1;
/// Draft nodes of a first round: the cost of larger drafts is explored in steps.
pub const REACH_FIRST: usize = 4;

/// Verification method and context of a round: with its nodes and the concurrency, the key of its
/// cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way {
    /// Verification method of the draft.
    pub method: VerifyMethod,
    /// Method used after it where it decides nothing; `None` if there is none.
    pub fallback: Option<VerifyMethod>,
    /// Tokens of the context.
    pub context: usize,
}

impl Way {
    /// This method without a fallback, with `context` tokens of context.
    pub const fn by(method: VerifyMethod, context: usize) -> Self {
        Self { method, fallback: None, context }
    }
}

/// Basis of the expected cost of verify requests, ordered from the weakest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Basis {
    /// No measurement: 1.05 plain tokens, and 0.06 more for each node.
    #[default]
    Guess,
    /// Verify requests that a probe timed.
    Probe,
    /// Verify requests of sessions.
    Measured,
}

impl Basis {
    /// The name in the admin API and in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Guess => "guess",
            Self::Probe => "probe",
            Self::Measured => "measured",
        }
    }
}

/// The measured costs of one replica, seconds.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Costs {
    /// Present concurrency of the engine, and if there are plain requests concurrent with one that
    /// is speculated on.
    #[serde(skip)]
    concurrency: ConcurrencyBucket,
    #[serde(skip)]
    plain_neighbours: bool,
    /// Some of the requests belong to others.
    #[serde(skip)]
    foreign: bool,
    /// Share of verify requests with concurrent plain requests, by concurrency.
    company: [Belief; pace::SIZES],
    pace: Pace,
    verify: Verify,
    /// Time that a drafted token takes from the wait for the engine.
    wait: Joint,
    /// Time of a verify request by the tokens of our others in flight.
    #[serde(default)]
    concurrent: Joint,
    /// Times to the first tokens.
    #[serde(default)]
    first_tokens: FirstTokens,
    /// Verification method and context of the last verify request.
    #[serde(skip)]
    last: Option<Way>,
    /// Share of the verify requests of each method that decided nothing, by
    /// [`VerifyMethod::index`].
    undecided: [Belief; VerifyMethod::ALL.len()],
    /// Times of the model drafters.
    drafts: Drafts,
    /// Extra seconds of switching from plain decoding to speculation, and back, by concurrency.
    switch_in: [Belief; pace::SIZES],
    switch_out: [Belief; pace::SIZES],
    /// Age of the plain pace, by concurrency.
    #[serde(default)]
    renewals: Renewals,
    /// Result of a probe, used where nothing is measured.
    #[serde(skip)]
    prior: Option<Arc<Prior>>,
}

impl Costs {
    /// Takes the result of a probe, unless it has been taken already.
    pub fn take_prior(&mut self, prior: &Arc<Prior>) {
        if self.prior.as_ref().is_some_and(|known| Arc::ptr_eq(known, prior)) {
            return;
        }
        self.prior = Some(Arc::clone(prior));
        let token = self.plain_token_expected();
        self.verify.take_prior(prior, token, Tick::default());
    }

    /// Makes `now` the origin of time, keeping the present certainty of all measurements.
    pub fn age(&mut self, now: Tick) {
        self.pace.age(now);
        self.verify.age(now);
        self.drafts.age(now);
        let by_concurrency = self.switch_in.iter_mut().chain(&mut self.switch_out).chain(&mut self.company);
        self.undecided.iter_mut().chain(by_concurrency).for_each(|belief| belief.age(now));
    }

    /// Sets the present state of the engine: requests in flight; if plain requests are concurrent
    /// with one that is speculated on; if requests of others are in flight (`foreign`).
    pub fn set_concurrency(&mut self, requests: usize, plain_neighbours: bool, foreign: bool) {
        (self.concurrency, self.plain_neighbours, self.foreign) =
            (ConcurrencyBucket::of(requests), plain_neighbours, foreign);
    }

    /// The present concurrency bucket, below [`CONCURRENCIES`].
    pub fn concurrency_size(&self) -> usize {
        self.concurrency.index()
    }

    /// Notes `tokens` plain tokens that came `seconds` after the ones before, of one of `ours`
    /// requests that are all decoded plainly: a step yields a token for each, so their first tokens
    /// make a pace known, and only some steps confirm it.
    pub fn note_plain(&mut self, seconds: f64, tokens: usize, ours: usize, now: Tick) {
        if tokens == 0 || !seconds.is_finite() {
            return;
        }
        let share = 1.0 / ours.max(1) as f64;
        let before = self.pace.token_of(self.concurrency);
        let renewal = self.renewals.of(self.concurrency);
        let renewed = renewal.stepped(seconds * share, tokens as f64 * share, before);
        if renewed == Renewed::Begun {
            self.pace.loosen(self.concurrency);
        }
        self.pace.note_plain(self.concurrency, seconds, tokens, now);
        if let Renewed::Replaced(measured) = renewed {
            self.pace.replace(self.concurrency, measured, now);
        }
    }

    /// Notes `tokens` plain tokens that came `seconds` after the ones before, while the engine read
    /// a prompt or began to continue a request after rounds.
    pub fn note_plain_reading(&mut self, seconds: f64, tokens: usize, now: Tick) {
        if tokens > 0 && seconds.is_finite() {
            self.plain_concurrent(tokens);
            self.pace.note_reading(self.concurrency, seconds, tokens, now);
        }
    }

    /// Notes `tokens` plain tokens that do not show the pace: concurrent with verify requests of
    /// others, or of an unstreamed answer. They count towards giving up its measurement.
    pub fn plain_concurrent(&mut self, tokens: usize) {
        let known = self.pace_is_known();
        self.renewals.of(self.concurrency).concurrent(tokens, known);
    }

    /// Notes seconds of speculation, by which the plain pace ages: in tokens of the shortest pace,
    /// since one that is too long would hardly age in its tokens.
    pub fn speculated(&mut self, seconds: f64) {
        let token = self.pace.lowest().unwrap_or_else(|| self.plain_token_expected());
        self.renewals.of(self.concurrency).speculated(seconds / token);
    }

    /// True if the next plain request is to remeasure the plain pace.
    pub fn pace_is_old(&self) -> bool {
        self.renewals.get(self.concurrency).is_old(self.pace_is_known())
    }

    /// True if that is so overdue that speculation should be interrupted for it.
    pub fn pace_is_overdue(&self) -> bool {
        self.renewals.get(self.concurrency).is_overdue(self.pace_is_known())
    }

    /// True if the pace here was measured, by us to the end or by other sidecars: a few tokens that
    /// came while prompts were read make a figure, but do not show it.
    fn pace_is_known(&self) -> bool {
        let measured = || {
            self.renewals.get(self.concurrency).is_measured()
                && self.pace.token_of(self.concurrency).is_some()
        };
        self.pace.is_lent(self.concurrency) || measured()
    }

    /// Notes the seconds of a verify request with `nodes` draft nodes in the middle of a streak of
    /// rounds.
    pub fn verified(&mut self, way: Way, nodes: usize, seconds: f64, now: Tick) {
        self.last = Some(way);
        let token = self.plain_token_expected();
        self.verify.observe(self.position(way), nodes, seconds, token, now);
        let plain_neighbours = f64::from(u8::from(self.plain_neighbours));
        if let Some(company) = self.company.get_mut(self.concurrency.index()) {
            company.count(plain_neighbours, now);
        }
    }

    /// Notes the seconds of a verify request with `nodes` draft nodes, while `concurrent` tokens of
    /// our others were in flight.
    pub fn verified_concurrent(&mut self, nodes: usize, concurrent: usize, seconds: f64) {
        self.concurrent.observe(self.concurrency, [concurrent as f64, nodes as f64], seconds);
    }

    /// Seconds by which a draft node of one verify request makes another one of ours longer; 0
    /// before that was measured. The request's nodes are fitted, too: those of others grow and
    /// shrink with them. Where the concurrency has no upper limit, there are more draft tokens in
    /// flight with more requests, whose tokens take time as well: that slope shows nothing.
    pub fn per_concurrent_node(&self) -> f64 {
        if self.concurrency.is_open() {
            return 0.0;
        }
        self.concurrent.fit(self.concurrency).map_or(0.0, |fit| fit.slopes[0].max(0.0))
    }

    /// Notes if a verify request of a method decided at least one token.
    pub fn decided(&mut self, method: VerifyMethod, anything: bool, now: Tick) {
        if let Some(share) = self.undecided.get_mut(method.index()) {
            share.count(f64::from(u8::from(!anything)), now);
        }
    }

    /// Notes the first verify request after plain decoding: its time beyond the expected one is the
    /// cost of switching. It does not show the time of requests in the middle of a streak, so a
    /// streak must go on to measure one. A first request that takes longer than any switch is
    /// itself that expensive, for instance because it reads the complete context.
    pub fn entered(&mut self, way: Way, nodes: usize, seconds: f64, now: Tick) {
        let expected = self.call(way, nodes);
        if !self.verify_measured(way) && seconds > EXPENSIVE * expected {
            return self.verified(way, nodes, seconds - expected, now);
        }
        let extra = (seconds - expected).max(0.0);
        let token = self.plain_token_expected();
        if let Some(belief) = self.switch_in.get_mut(self.concurrency.index()) {
            belief.observe_of(extra, token, now);
        }
    }

    /// Notes the first `tokens` of a plain request after a round, `seconds` after it was sent.
    pub fn resumed(&mut self, seconds: f64, tokens: usize, now: Tick) {
        let belief = self.switch_out.get_mut(self.concurrency.index());
        if let Some((token, belief)) = self.pace.token(self.concurrency).zip(belief) {
            belief.observe_of((seconds - tokens as f64 * token).max(0.0), token, now);
        }
    }

    /// Notes a draft of `tokens` tokens in `seconds`, by the model drafter with this number
    /// ([`crate::control::Control::model`]).
    pub fn drafted(&mut self, model: u8, tokens: usize, seconds: f64, now: Tick) {
        self.drafts.drafted(model, tokens, seconds, now);
    }

    /// Notes the seconds of a shadow pass of a model drafter. `read`: it had read the prompt
    /// before.
    pub fn shadowed(&mut self, model: u8, seconds: f64, read: bool, now: Tick) {
        self.drafts.shadowed(model, seconds, read, now);
    }

    /// Seconds per plain token; `None` before four were timed.
    pub fn plain_token(&self) -> Option<f64> {
        self.pace.token(self.concurrency)
    }

    /// The costs that were measured at each concurrency.
    pub(super) fn learnt_plain(&self) -> impl Iterator<Item = PlainCosts> {
        let all = ConcurrencyBucket::all().zip(&self.switch_in).zip(&self.switch_out);
        let costs = all.map(|((concurrency, switch_in), switch_out)| PlainCosts {
            requests: concurrency.name(),
            token_seconds: self.pace.token_of(concurrency),
            switch_in_seconds: switch_in.known(),
            switch_out_seconds: switch_out.known(),
        });
        costs.filter(|costs| costs.token_seconds.is_some())
    }

    /// The seconds of verify requests that were measured here, with their weight at `now`.
    pub(super) fn learnt_verify(&self, now: Tick) -> impl Iterator<Item = VerifyCosts> {
        self.verify.measured().map(move |(key, means)| {
            let measured = means.iter().enumerate().filter(|(_, mean)| mean.is_measured());
            let drafts = measured.filter_map(|(nodes, mean)| {
                Some(DraftCosts { nodes, seconds: mean.known()?, weight: mean.weight(now) })
            });
            VerifyCosts { drafts: drafts.collect(), ..key.shown() }
        })
    }

    /// Expected seconds until a round with `nodes` draft nodes is verified: its request, and with
    /// the probability that it decides nothing another one by the fallback.
    pub fn verify(&self, way: Way, nodes: usize) -> f64 {
        let undecided = self.undecided.get(way.method.index()).and_then(Belief::known).unwrap_or(0.0);
        let retry = match way.fallback {
            Some(method) if undecided > 0.0 => undecided * self.call(Way::by(method, way.context), nodes),
            _ => 0.0,
        };
        self.call(way, nodes) + retry
    }

    /// Expected seconds of one verify request. Measurements at another concurrency are scaled by
    /// the paces of both.
    fn call(&self, way: Way, nodes: usize) -> f64 {
        self.call_concurrent(way, nodes, self.plain_neighbours)
    }

    /// As [`Self::call`], with or without concurrent plain requests.
    fn call_concurrent(&self, way: Way, nodes: usize, plain_neighbours: bool) -> f64 {
        let token = self.plain_token_expected();
        let position = TableKey::new(way.method, way.context, self.concurrency, plain_neighbours);
        let known = self.verify.seconds(position, nodes, token);
        let wait = if plain_neighbours { token } else { 0.0 };
        let Some((seconds, concurrency)) = known else { return self.guess(nodes) + wait };
        if concurrency == self.concurrency {
            return seconds;
        }
        let paces = self.pace.token_of(self.concurrency).zip(self.pace.token_of(concurrency));
        seconds * paces.map_or(1.0, |(here, there)| here / there)
    }

    /// Notes the seconds of a verify request in the middle of a streak, for which the model drafter
    /// computed `modelled` tokens.
    pub fn shared(&mut self, way: Way, nodes: usize, seconds: f64, modelled: usize) {
        let expected = self.verify(way, nodes);
        let seconds = seconds.min(OUTLIER * expected);
        self.wait.observe(self.concurrency, [modelled as f64, 0.0], seconds - expected);
    }

    /// Seconds of the wait for the engine that a token of the model drafter saves because it is
    /// drafted while the engine computes for others, and the mean saving per measured request. Both
    /// are 0 with one request in flight, and before they are measured.
    pub fn saved_by_drafting(&self, model: u8) -> (f64, f64) {
        if self.concurrency == ConcurrencyBucket::default() {
            return (0.0, 0.0);
        }
        let Some(fit) = self.wait.fit(self.concurrency) else { return (0.0, 0.0) };
        let saved = (-fit.slopes[0]).clamp(0.0, self.draft_token(model));
        (saved, saved * self.wait.mean(self.concurrency))
    }

    /// The state when a client's request is sent, while `drafted` tokens of our verify requests
    /// are in flight; `None` between rounds.
    pub fn sent(&self, drafted: Option<usize>) -> Sent {
        self.first_tokens.sent(self.concurrency, drafted)
    }

    /// Notes the first token of a client's request with `prompt` tokens, `seconds` after it was
    /// sent.
    pub fn first_token(&mut self, sent: Sent, prompt: usize, seconds: f64) {
        self.first_tokens.observe(sent, prompt, seconds);
    }

    /// Tokens of our verify requests that may be in flight so that they delay first tokens by no
    /// more than the share `ours` of the delay that is allowed by `ratio`: that of the times to
    /// first tokens with and without drafts.
    pub fn room(&self, ratio: f64, ours: f64) -> f64 {
        self.first_tokens.room(self.concurrency, ratio, ours, self.per_concurrent_node())
    }

    /// Seconds that each draft node adds to a verify request, as measured; 0 before that is known.
    pub fn per_node(&self, way: Way) -> f64 {
        self.verify.slope(self.position(way)).unwrap_or(0.0)
    }

    /// Assumed cost of a verify request where nothing was measured.
    fn guess(&self, nodes: usize) -> f64 {
        self.plain_token_expected() * (1.05 + NODE * nodes as f64)
    }

    /// Expected seconds of a verify request for a session that begins to speculate. Sessions that
    /// decode plainly at the same time decide alike, so those that can speculate begin together,
    /// and without plain neighbours no request waits for a step in progress: the probability that
    /// plain neighbours remain is measured.
    pub fn beginning(&self, way: Way, nodes: usize) -> f64 {
        let stay = self.company.get(self.concurrency.index()).and_then(Belief::known).unwrap_or(0.0);
        let (concurrent, among) =
            (self.call_concurrent(way, nodes, true), self.call_concurrent(way, nodes, false));
        if self.plain_neighbours && !self.foreign {
            stay * concurrent + (1.0 - stay) * among
        } else {
            self.verify(way, nodes)
        }
    }

    /// Capacity of the regret budget at this concurrency, seconds.
    pub fn regret_capacity(&self) -> f64 {
        let token = self.plain_token_expected();
        let round = self.last.map_or(0.0, |way| (self.verify(way, 0) - token).max(0.0));
        RegretBudget::capacity(token, self.switch_in() + self.switch_out() + round)
    }

    /// Maximum draft nodes whose cost can be predicted from measurements: twice as many as the
    /// largest draft so far.
    pub fn reach(&self, way: Way) -> usize {
        self.verify.reach(self.position(way)).map_or(REACH_FIRST, |reach| (2 * reach).max(REACH_FIRST))
    }

    /// Basis of the expected cost of verify requests by this method and context.
    pub fn basis(&self, way: Way) -> Basis {
        match self.verify.reach(self.position(way)) {
            None => Basis::Guess,
            Some(_) if self.verify.is_measured(self.position(way)) => Basis::Measured,
            Some(_) => Basis::Probe,
        }
    }

    /// True if a verify request of this method with a context of this size was measured at this
    /// concurrency, by a session or a probe.
    pub fn verify_measured(&self, way: Way) -> bool {
        self.verify.is_known(self.position(way))
    }

    fn position(&self, way: Way) -> TableKey {
        TableKey::new(way.method, way.context, self.concurrency, self.plain_neighbours)
    }

    /// Expected seconds per token of a model drafter. Before that is measured, a guess bounded by
    /// the shadow passes: reading a few tokens at once takes no less than generating one.
    pub fn draft_token(&self, model: u8) -> f64 {
        let (times, guess) = (self.drafts.of(model), || self.plain_token_expected() * DRAFT);
        times.token.known().unwrap_or_else(|| times.chunk.known().unwrap_or(f64::MAX).min(guess()))
    }

    /// Expected seconds of a pass in which a model drafter reads the prompt; `None` before the
    /// first.
    pub fn reading(&self, model: u8) -> Option<f64> {
        self.drafts.of(model).reading.known()
    }

    /// Expected seconds of a shadow pass of a model drafter; `None` before the first.
    pub fn shadow_pass(&self, model: u8) -> Option<f64> {
        self.drafts.of(model).shadow.known()
    }

    /// Expected extra seconds of switching from plain decoding to speculation; a plain token's time
    /// before it was measured or probed.
    pub fn switch_in(&self) -> f64 {
        self.switch(&self.switch_in, self.prior.as_ref().and_then(|prior| prior.switch_in))
    }

    /// Expected extra seconds of switching from speculation to plain decoding; a plain token's time
    /// before it was measured or probed.
    pub fn switch_out(&self) -> f64 {
        self.switch(&self.switch_out, self.prior.as_ref().and_then(|prior| prior.switch_out))
    }

    /// The measurement at this concurrency, else at the nearest lower one: the queue of a high
    /// concurrency does not apply to a low one. Else the probe's result, else a plain token.
    fn switch(&self, measured: &[Belief], prior: Option<f64>) -> f64 {
        let mut smaller = measured.iter().take(self.concurrency.index() + 1).rev();
        smaller.find_map(Belief::known).or(prior).unwrap_or_else(|| self.plain_token_expected())
    }

    /// True if, by a probe, cancelling a plain request takes longer than three plain tokens, so
    /// that plain requests should be bounded in length.
    pub fn cancels_slowly(&self) -> bool {
        let cancel = self.prior.as_ref().and_then(|prior| prior.cancel);
        cancel.is_some_and(|cancel| cancel > 3.0 * self.plain_token_expected())
    }

    /// Seconds per plain token, measured here or by a probe; 0.02 before either.
    pub fn plain_token_expected(&self) -> f64 {
        let prior = || self.prior.as_ref()?.token;
        self.plain_token().or_else(prior).unwrap_or(0.02)
    }
}

#[cfg(test)]
mod tests;
