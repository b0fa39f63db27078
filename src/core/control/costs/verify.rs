//! The time of verify requests: a line in the request's draft tokens and in what it shares the
//! engine with, for each method, size of the context and concurrency.

use std::collections::BTreeMap;

use foretell_control::line::{Line, Moments};
use serde::{Deserialize, Serialize};

use super::concurrency::ConcurrencyBucket;
use super::lines::{Key, Lines};
use crate::control::prior::Probed;
use crate::words::VerifyMethod;

/// Bounds between the sizes of contexts, in tokens: below the first, and from each one on.
pub const CONTEXTS: [usize; 5] = [128, 512, 2_048, 8_192, 32_768];
/// Assumed cost before any request was measured, in plain tokens: of a request, of each draft
/// token, of the wait for a running step.
pub(super) const GUESS: [f64; 3] = [1.05, 0.06, 1.0];
/// Assumed cost of each draft token that is sent as a separate sequence, in plain tokens.
const SEQUENCE: f64 = 0.5;
/// The part of a draft token's cost that one of any other request in the step has too.
const COMMON: f64 = 0.01;
/// How far off these may be, in plain tokens: of a request, of each draft token beyond what it
/// costs in any request, of the wait, of each draft token in any request, of a token that a model
/// drafted meanwhile, of a prompt that is read.
const SCALE: [f64; 6] = [4.0, 0.06, 1.0, 0.01, 0.1, 10.0];
/// Error of a measurement, in plain tokens: of a request alone, and of one among others, whose
/// steps hold more than is known here.
const NOISE: (f64, f64) = (0.3, 1.0);
/// Weight of a measurement while the engine read a prompt: however long that took.
const READING: f64 = 0.03;
/// Measurements after which one weighs half.
const HALF_LIFE: f64 = 90.0;
/// Weight of a probe's measurement, which is the shortest of several, in usual ones.
const SURE: f64 = 4.0;
/// A draft token costs at least this share of a plain one.
const LEAST: f64 = 0.002;

/// The load with which a verify request shared the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Shared {
    /// Tokens of our other verify requests in flight.
    pub concurrent: f64,
    /// 1 where plain requests are in flight, whose step it waits for; between 0 and 1 as likely.
    pub waits: f64,
    /// Tokens that a model drafted while the engine computed for others.
    pub modelled: usize,
    /// The engine read a prompt meanwhile.
    pub reading: bool,
}

/// The line that a request belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct VerifyKey {
    method: usize,
    size: usize,
    concurrency: ConcurrencyBucket,
}

impl VerifyKey {
    /// Key of a request by this method with `context` tokens of context.
    pub fn new(method: VerifyMethod, context: usize, concurrency: ConcurrencyBucket) -> Self {
        let size = CONTEXTS.iter().filter(|&&edge| context >= edge).count();
        Self { method: method.index(), size, concurrency }
    }

    /// True if it is the key of a request: keys of others come from outside.
    pub fn is_valid(self) -> bool {
        self.method < VerifyMethod::ALL.len() && self.size <= CONTEXTS.len() && self.concurrency.is_valid()
    }

    fn method(self) -> Option<VerifyMethod> {
        VerifyMethod::ALL.get(self.method).copied()
    }

    pub const fn concurrency(self) -> ConcurrencyBucket {
        self.concurrency
    }

    /// Method and context for an operator.
    pub fn shown(self) -> (&'static str, String) {
        let from = self.size.checked_sub(1).and_then(|before| CONTEXTS.get(before)).copied().unwrap_or(0);
        let to = CONTEXTS.get(self.size).map_or(String::new(), |next| (next - 1).to_string());
        (VerifyMethod::ALL.get(self.method).map_or("", |method| method.name()), format!("{from}-{to}"))
    }
}

impl Key for VerifyKey {
    fn distance(self, other: Self) -> Option<usize> {
        let same = self.method == other.method;
        same.then(|| {
            2 * ConcurrencyBucket::distance(self.concurrency, other.concurrency)
                + self.size.abs_diff(other.size)
        })
    }
}

/// Seconds of a verify request by what it depends on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct VerifyLine {
    /// Without draft tokens.
    pub base: f64,
    /// Of each draft token.
    pub node: f64,
    /// Of the wait for the running step of plain requests.
    pub wait: f64,
    /// Of each draft token of ours in flight with it.
    pub concurrent: f64,
    /// Saved by each token that a model drafts while the engine computes for others. Without it
    /// `friendly-sixteen-l4` reaches 0.91 of the best fixed length.
    pub saved: f64,
    /// A request takes no less: a plain token, if that is known.
    least: f64,
    /// Measurements of the kind that it is of; 0 where it is assumed.
    pub weight: f64,
}

impl VerifyLine {
    /// The assumption where nothing was measured.
    pub fn guess(token: f64, method: Option<VerifyMethod>) -> Self {
        let [base, node, wait] = GUESS.map(|tokens| tokens * token);
        let node = if method == Some(VerifyMethod::FanOut) { SEQUENCE * token } else { node };
        Self { base, node, wait, concurrent: COMMON * token, saved: 0.0, least: 0.0, weight: 0.0 }
    }

    /// Expected seconds of a request with `nodes` draft tokens that shares the engine so.
    pub fn seconds(&self, nodes: usize, shared: Shared) -> f64 {
        let wait = shared.waits * (self.wait - self.saved * shared.modelled as f64);
        let empty = self.base + wait + self.concurrent * shared.concurrent;
        empty.max(self.least) + self.node * nodes as f64
    }

    fn of(line: &Line, token: f64) -> Self {
        let [base, node, wait, concurrent, modelled] = line.coefficients::<5>();
        Self {
            base,
            node: (node + concurrent).max(LEAST * token),
            wait,
            concurrent: concurrent.max(0.0),
            saved: (-modelled).max(0.0),
            least: 0.0,
            weight: line.weight(),
        }
    }

    /// The same where everything takes `factor` times as long.
    #[must_use]
    fn times(self, factor: f64) -> Self {
        let Self { base, node, wait, concurrent, saved, least, weight } = self;
        let [base, node, wait, concurrent, saved] =
            [base, node, wait, concurrent, saved].map(|seconds| seconds * factor);
        Self { base, node, wait, concurrent, saved, least, weight }
    }

    fn begun(self, token: f64, key: VerifyKey) -> Line {
        let Self { base, node, wait, concurrent, saved, .. } = self;
        let mean = [base, (node - concurrent).max(0.0), wait, concurrent, -saved, token];
        let [base, each, rest @ ..] = SCALE;
        let each = if key.method() == Some(VerifyMethod::FanOut) { SEQUENCE } else { each };
        let noise = if key.concurrency == ConcurrencyBucket::default() { NOISE.0 } else { NOISE.1 };
        let [wait, common, modelled, reading] = rest;
        let scale = [base, each, wait, common, modelled, reading].map(|tokens| tokens * token);
        Line::new(mean, scale, noise * token, HALF_LIFE)
    }
}

/// Seconds of verify requests, by key.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Verify {
    lines: Lines<VerifyKey>,
    /// The measurements of a probe.
    #[serde(skip)]
    probed: Lines<VerifyKey>,
}

fn features(nodes: usize, shared: Shared) -> [f64; 6] {
    [
        1.0,
        nodes as f64,
        shared.waits,
        shared.concurrent + nodes as f64,
        shared.waits * shared.modelled as f64,
        f64::from(u8::from(shared.reading)),
    ]
}

/// Seconds per plain token at a concurrency, if known.
pub(super) type Paces<'a> = &'a dyn Fn(ConcurrencyBucket) -> Option<f64>;

impl Verify {
    /// Notes a request with `nodes` draft tokens that took `seconds`, where a plain token takes
    /// `token` seconds.
    pub fn note(
        &mut self,
        key: VerifyKey,
        nodes: usize,
        shared: Shared,
        seconds: f64,
        token: f64,
        paces: Paces<'_>,
    ) {
        let new = self.lines.get(key).is_none().then(|| self.line(key, token, paces).begun(token, key));
        let guess = || VerifyLine::guess(token, key.method()).begun(token, key);
        let line = self.lines.of(key, |_| new.unwrap_or_else(guess));
        line.note(features(nodes, shared), seconds, if shared.reading { READING } else { 1.0 });
    }

    /// The cost of a request; measurements at another concurrency are scaled by the paces of both.
    pub fn line(&self, key: VerifyKey, token: f64, paces: Paces<'_>) -> VerifyLine {
        let measured = self.lines.nearest(key, |line| line.weight() > 0.0);
        let probed = || self.probed.nearest(key, |_| true);
        let exact = measured.is_some_and(|(near, _)| near == key);
        let exactly_probed = || self.probed.get(key).map(|line| (key, line));
        let known = if exact { measured } else { exactly_probed().or(measured).or_else(probed) };
        let Some((near, line)) = known else { return VerifyLine::guess(token, key.method()) };
        let scale = || Some(paces(key.concurrency)? / paces(near.concurrency)?);
        let factor = if near.concurrency == key.concurrency { 1.0 } else { scale().unwrap_or(1.0) };
        let least = paces(key.concurrency).unwrap_or(0.0);
        VerifyLine { least, ..VerifyLine::of(line, token).times(factor) }
    }

    /// Takes the result of a probe.
    pub fn take_prior(&mut self, rounds: &[Probed], token: f64) {
        for &Probed { method, context, nodes, seconds } in rounds {
            let key = VerifyKey::new(method, context, ConcurrencyBucket::default());
            let guess = VerifyLine::guess(token, Some(method));
            let line = self.probed.of(key, |_| guess.begun(token, key));
            line.weigh(features(nodes, Shared::default()), seconds, SURE);
        }
    }

    /// True if requests of this key were measured here, or by other sidecars.
    pub fn is_measured(&self, key: VerifyKey) -> bool {
        self.lines.get(key).is_some_and(|line| line.local().weight > 0.0 || line.weight() >= 1.0)
    }

    /// True if a probe measured requests of this method, or another process of the model did.
    pub fn is_probed(&self, key: VerifyKey) -> bool {
        self.probed.nearest(key, |_| true).is_some() || self.lines.nearest(key, |_| true).is_some()
    }

    /// All that was measured.
    pub fn measured(&self, token: f64) -> impl Iterator<Item = (VerifyKey, VerifyLine)> {
        self.lines.iter().map(move |(key, line)| (key, VerifyLine::of(line, token)))
    }

    /// Makes all measurements weigh this share of what they did.
    pub fn fade(&mut self, share: f64) {
        self.lines.fade(share);
    }

    pub fn local(&self) -> BTreeMap<VerifyKey, Moments> {
        self.lines.local()
    }

    pub fn lend(&mut self, lent: &BTreeMap<VerifyKey, Moments>, token: f64) {
        self.lines.lend(lent, |key| VerifyLine::guess(token, key.method()).begun(token, key));
    }
}
