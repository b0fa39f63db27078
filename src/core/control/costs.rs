//! Costs of requests in seconds: lines through what was measured, assumed only where there is no
//! measurement.
//!
//! The pace of plain decoding is stored per concurrency of the engine; the time of a verify request
//! per method, size of the context and concurrency. Old measurements fade, by newer ones and by
//! time, so that a cost that was high once is measured again.

mod concurrency;
mod drafts;
mod first_tokens;
mod lines;
mod pace;
mod shared;
mod verify;

use serde::{Deserialize, Serialize};

use std::sync::Arc;

pub use concurrency::{ConcurrencyBucket, SIZES as CONCURRENCIES};
use drafts::Drafts;
use first_tokens::FirstTokens;
pub use first_tokens::{DELAY_ALLOWED, Sent};
pub use pace::Disturbance;
use pace::Pace;
pub use shared::SharedCosts;
pub use verify::{CONTEXTS, Shared, VerifyLine};
use verify::{Verify, VerifyKey};

use super::learnt_costs::{PlainCosts, VerifyCosts};
use super::mean::Mean;
use super::prior::Prior;
use crate::words::VerifyMethod;
use foretell_control::regret_budget::RegretBudget;

/// Assumed time of a token of the model drafter before any was timed, in plain tokens.
const DRAFT: f64 = 0.15;
/// Seconds in which measurements of verify requests lose half their weight: a cost that was high
/// once is tried again, within what the regret budget allows.
const FADES: f64 = 120.0;
/// Seconds after which that is reckoned.
const FADED: f64 = 2.0;
/// Most of a switch that counts, in plain tokens.
const SWITCH: f64 = 50.0;
/// Weight of a verify request in the mean of its load.
const USUAL: f64 = 0.05;

/// Verification method and context of a round: with the concurrency, the key of its cost.
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
    /// No measurement: 1.05 plain tokens, and 0.06 more for each draft token.
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

/// The mean load with which verify requests share the engine. By the load of the moment instead of
/// it `friendly-sixteen-clients` reaches 0.83 of the best fixed length.
#[derive(Clone, Copy, Debug, Default)]
struct Usual {
    concurrent: f64,
    waits: f64,
}

/// The measured costs of one replica, seconds.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Costs {
    /// Present concurrency of the engine.
    #[serde(skip)]
    concurrency: ConcurrencyBucket,
    pace: Pace,
    verify: Verify,
    #[serde(default)]
    first_tokens: FirstTokens,
    /// Verification method and context of the last verify request.
    #[serde(skip)]
    last: Option<Way>,
    /// Seconds that have not been reckoned in [`FADES`] yet.
    #[serde(skip)]
    unfaded: f64,
    /// The usual load of verify requests, by concurrency.
    #[serde(skip)]
    usual: [Usual; CONCURRENCIES],
    /// Share of the verify requests of each method that decided nothing, by
    /// [`VerifyMethod::index`].
    undecided: [Mean<8>; VerifyMethod::ALL.len()],
    /// Times of the model drafters.
    drafts: Drafts,
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
        self.verify.take_prior(&prior.verify, self.plain_token_expected());
    }

    /// Makes measurements weigh less by `idle` seconds.
    pub fn age(&mut self, idle: f64) {
        let share = FADES / (FADES + idle);
        self.pace.fade(share);
        self.verify.fade(share);
    }

    /// Notes that `seconds` have passed.
    pub fn passed(&mut self, seconds: f64) {
        self.unfaded += seconds.clamp(0.0, FADES);
        if self.unfaded > FADED {
            let seconds = std::mem::take(&mut self.unfaded);
            self.verify.fade(0.5_f64.powf(seconds / FADES));
        }
    }

    /// Sets the number of requests that the engine computes at present.
    pub fn set_concurrency(&mut self, requests: usize) {
        self.concurrency = ConcurrencyBucket::of(requests);
    }

    /// The present concurrency.
    pub fn concurrency(&self) -> ConcurrencyBucket {
        self.concurrency
    }

    /// Notes `tokens` plain tokens of one of `ours` requests that came `seconds` after the ones
    /// before.
    pub fn note_plain(&mut self, seconds: f64, tokens: usize, ours: usize, by: Disturbance) {
        self.pace.note(self.concurrency, seconds, tokens, ours, by);
    }

    /// Notes the first verify request after plain decoding: its time beyond the expected one is the
    /// cost of switching.
    pub fn entered(&mut self, way: Way, nodes: usize, shared: Shared, seconds: f64) {
        let extra = seconds - self.line(way).seconds(nodes, shared);
        self.pace.entered(self.concurrency, extra.min(SWITCH * self.plain_token_expected()));
    }

    /// Notes the seconds of a verify request with `nodes` draft tokens.
    pub fn verified(&mut self, way: Way, nodes: usize, shared: Shared, seconds: f64) {
        self.last = Some(way);
        if let Some(usual) = self.usual.get_mut(self.concurrency.index()) {
            usual.concurrent += (shared.concurrent - usual.concurrent) * USUAL;
            usual.waits += (shared.waits - usual.waits) * USUAL;
        }
        self.pace.verified(self.concurrency, seconds);
        let (key, token) = (self.key(way), self.plain_token_expected());
        let pace = &self.pace;
        self.verify.note(key, nodes, shared, seconds, token, &|at| pace.token_of(at));
    }

    /// The usual seconds of a verify request at this concurrency; `None` before some were measured.
    pub fn usual_verify(&self) -> Option<f64> {
        self.pace.usual_verify(self.concurrency)
    }

    /// Notes if a verify request of a method decided at least one token.
    pub fn decided(&mut self, method: VerifyMethod, anything: bool) {
        if let Some(share) = self.undecided.get_mut(method.index()) {
            share.note(f64::from(u8::from(!anything)));
        }
    }

    /// Notes a draft of `tokens` tokens in `seconds`, by the model drafter with this number
    /// ([`crate::control::Control::model`]).
    pub fn drafted(&mut self, model: u8, tokens: usize, seconds: f64) {
        self.drafts.drafted(model, tokens, seconds);
    }

    /// Notes the seconds of a shadow pass of a model drafter. `read`: it had read the prompt
    /// before.
    pub fn shadowed(&mut self, model: u8, seconds: f64, read: bool) {
        self.drafts.shadowed(model, seconds, read);
    }

    /// Seconds per plain token; `None` before four were timed.
    pub fn plain_token(&self) -> Option<f64> {
        self.pace.token(self.concurrency)
    }

    /// The costs that were measured at each concurrency.
    pub(super) fn learnt_plain(&self) -> impl Iterator<Item = PlainCosts> {
        let costs = |at: ConcurrencyBucket| {
            Some(PlainCosts {
                requests: at.name(),
                token_seconds: self.pace.token_of(at)?,
                switch_in_seconds: self.pace.switch_in(at),
                switch_out_seconds: self.pace.resumed(at),
            })
        };
        ConcurrencyBucket::all().filter_map(costs)
    }

    /// The lines of verify requests that were measured.
    pub(super) fn learnt_verify(&self) -> impl Iterator<Item = VerifyCosts> {
        self.verify.measured(self.plain_token_expected()).map(|(key, line)| {
            let (method, context) = key.shown();
            VerifyCosts {
                method,
                context,
                requests: key.concurrency().name(),
                base_seconds: line.base,
                token_seconds: line.node,
                concurrent_token_seconds: line.concurrent,
                wait_seconds: line.wait,
                measurements: line.weight,
            }
        })
    }

    /// Seconds by which a draft token of another verify request of ours lengthens those of the
    /// last kind; 0 before there was one.
    pub fn concurrent(&self) -> f64 {
        self.last.map_or(0.0, |way| self.line(way).concurrent)
    }

    /// The load with which a verify request is expected to share the engine. At first nothing:
    /// those of its kind that can speculate begin together.
    pub fn shares(&self) -> Shared {
        let Usual { concurrent, waits } =
            self.usual.get(self.concurrency.index()).copied().unwrap_or_default();
        Shared { concurrent, waits, ..Shared::default() }
    }

    /// The cost of verify requests here.
    pub fn line(&self, way: Way) -> VerifyLine {
        let pace = &self.pace;
        self.verify.line(self.key(way), self.plain_token_expected(), &|at| pace.token_of(at))
    }

    /// Expected seconds until a round with `nodes` draft tokens is verified: its request, and with
    /// the probability that it decides nothing another one by the fallback.
    pub fn verify(&self, way: Way, nodes: usize, shared: Shared) -> f64 {
        let undecided = self.undecided.get(way.method.index()).and_then(|share| share.known()).unwrap_or(0.0);
        let retry = match way.fallback {
            Some(method) if undecided > 0.0 => {
                undecided * self.line(Way::by(method, way.context)).seconds(nodes, shared)
            }
            _ => 0.0,
        };
        self.line(way).seconds(nodes, shared) + retry
    }

    /// The state when a client's request is sent, while `drafted` tokens of our verify requests
    /// are in flight; `None` between rounds.
    pub fn sent(&self, drafted: Option<usize>) -> Sent {
        self.first_tokens.sent(self.concurrency, drafted)
    }

    /// Notes the first token of a client's request with `prompt` tokens, `seconds` after it was
    /// sent.
    pub fn first_token(&mut self, sent: Sent, prompt: usize, seconds: f64) {
        let token = self.plain_token_expected();
        self.first_tokens.note(sent, prompt, seconds, token);
    }

    /// Expected seconds in which the engine reads a prompt of ours.
    pub fn prompt(&self) -> f64 {
        self.first_tokens.prompt(self.concurrency)
    }

    /// Tokens of our verify requests that may be in flight so that they delay first tokens by no
    /// more than the share `ours` of the delay that is allowed by `ratio`: that of the times to
    /// first tokens with and without drafts. `node`: seconds by which one lengthens other verify
    /// requests.
    pub fn room(&self, ratio: f64, ours: f64, node: f64) -> f64 {
        self.first_tokens.room(self.concurrency, ratio, ours, node)
    }

    /// Capacity of the regret budget at this concurrency, seconds.
    pub fn regret_capacity(&self) -> f64 {
        let token = self.plain_token_expected();
        let trial = self.last.map_or(token, |way| {
            let waits = Shared { waits: 1.0, ..Shared::default() };
            self.switch_in() + (self.line(way).seconds(0, waits) - token).max(0.0)
        });
        RegretBudget::capacity(token, trial + self.switch_out())
    }

    /// Basis of the expected cost of verify requests by this method and context.
    pub fn basis(&self, way: Way) -> Basis {
        let key = self.key(way);
        if self.verify.is_measured(key) {
            Basis::Measured
        } else if self.verify.is_probed(key) {
            Basis::Probe
        } else {
            Basis::Guess
        }
    }

    fn key(&self, way: Way) -> VerifyKey {
        VerifyKey::new(way.method, way.context, self.concurrency)
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
        let prior = || self.prior.as_ref().and_then(|prior| prior.switch_in);
        self.pace.switch_in(self.concurrency).or_else(prior).unwrap_or_else(|| self.plain_token_expected())
    }

    /// Expected extra seconds of switching from speculation to plain decoding; a plain token's time
    /// before it was measured or probed.
    pub fn switch_out(&self) -> f64 {
        let prior = || self.prior.as_ref().and_then(|prior| prior.switch_out);
        self.pace.resumed(self.concurrency).or_else(prior).unwrap_or_else(|| self.plain_token_expected())
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
