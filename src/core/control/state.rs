//! The state of a replica and of an engine start.
//!
//! They are separate because they end separately: another model behind a replica does not change
//! the costs of its requests.

use serde::{Deserialize, Serialize};

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use super::budget::Budget;
use super::costs::Costs;
use super::drift::DriftPrices;
use super::gates::Signal;
use super::rounds::{Round, Rounds, Sums};
use super::shared::Sum;
use super::survival::{Survival, TemperatureBucket};
use crate::draft::DrafterId;
use crate::units::Tick;
use foretell_control::regret_budget::RegretBudget;

/// The measurements of one replica.
#[derive(Debug, Default)]
pub struct ReplicaState {
    /// Costs of its requests.
    pub costs: Costs,
    /// Seconds that speculation may still lose.
    pub regret_budget: RegretBudget,
    /// The requests that its engine computes.
    pub concurrency: Concurrency,
    /// Seconds that rejected draft tokens may still take there next to requests of others.
    pub budget: Budget,
}

/// Reports older than this are ignored: they do not show the present concurrency.
const STALE: Duration = Duration::from_secs(2);

/// Prompts whose ends are stored.
const READ: usize = 64;
/// Assumed minimum concurrency of an engine that reports no limit of requests.
const AT_ONCE: usize = 8;

/// Work of an engine before the next token of a plain request, beyond a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Awaited {
    /// It reads the prompt.
    Prompt,
    /// It continues after rounds, of which one may not have ended yet.
    Continuation,
}

/// Requests whose next token takes longer than a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Waiting {
    requests: usize,
    /// When the last of them came.
    last: Option<Tick>,
}

impl Waiting {
    /// True if there was one within the last `seconds`.
    fn within(&self, seconds: f64, now: Tick) -> bool {
        self.requests > 0 || self.last.is_some_and(|last| now.seconds_since(last) < seconds)
    }
}

/// Number of requests that an engine computes at once: ours, and those of others that it reports.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Concurrency {
    ours: usize,
    speculating: usize,
    others: usize,
    /// Maximum that it computed while nothing waited, and the limit that it reports.
    most: usize,
    limit: Option<u32>,
    /// Share of the engine's KV memory in use; 0 where it does not report that.
    kv: f64,
    /// Requests other than our verify requests wait.
    waits: bool,
    /// Our verify requests in flight, and their tokens: draft nodes, and one more for each.
    in_flight: usize,
    drafted: usize,
    /// Our requests whose prompt the engine reads, and those that it continues after rounds.
    reading: Waiting,
    continuing: Waiting,
    /// When the last prompts had been read.
    read: VecDeque<Tick>,
    /// Share of the free sequences, 0 to 1, that verify requests may take while others run.
    slots: f64,
}

impl Concurrency {
    /// Adds one request of ours.
    pub fn enter(&mut self) {
        self.ours += 1;
    }

    /// Removes one request of ours.
    pub fn leave(&mut self) {
        self.ours = self.ours.saturating_sub(1);
    }

    /// Notes that one more of our requests is speculated on, or (`false`) one less.
    pub fn speculates(&mut self, speculates: bool) {
        self.speculating = if speculates { self.speculating + 1 } else { self.speculating.saturating_sub(1) };
    }

    /// Notes that a verify request of ours with `nodes` nodes is sent.
    pub fn call_begins(&mut self, nodes: usize) {
        self.in_flight += 1;
        self.drafted += nodes + 1;
    }

    /// Notes that one with `nodes` nodes has ended.
    pub fn call_ends(&mut self, nodes: usize) {
        self.in_flight = self.in_flight.saturating_sub(1);
        self.drafted = self.drafted.saturating_sub(nodes + 1);
    }

    /// As [`Self::drafted`]; `None` between the rounds of those that are speculated on.
    pub fn drafted_now(&self) -> Option<usize> {
        (self.drafted > 0 || self.all_plain()).then_some(self.drafted)
    }

    /// Tokens of our verify requests in flight: draft nodes, and one more for each request.
    pub fn drafted(&self) -> usize {
        self.drafted
    }

    /// Notes that a plain request of ours was sent whose next token takes longer than a step.
    pub fn begins(&mut self, awaited: Awaited) {
        self.waiting(awaited).requests += 1;
    }

    /// Notes that this token came at `now`, or (`None`) that it was given up.
    pub fn ends(&mut self, awaited: Awaited, now: Option<Tick>) {
        let waiting = self.waiting(awaited);
        waiting.requests = waiting.requests.saturating_sub(1);
        waiting.last = waiting.last.max(now);
        if let (Awaited::Prompt, Some(now)) = (awaited, now) {
            if self.read.len() == READ {
                self.read.pop_front();
            }
            self.read.push_back(now);
        }
    }

    fn waiting(&mut self, awaited: Awaited) -> &mut Waiting {
        match awaited {
            Awaited::Prompt => &mut self.reading,
            Awaited::Continuation => &mut self.continuing,
        }
    }

    /// True if the engine read a prompt of ours within the last `seconds`, so that what it did
    /// meanwhile took longer than usual.
    pub fn read_within(&self, seconds: f64, now: Tick) -> bool {
        self.reading.within(seconds, now)
    }

    /// Prompts of ours that the engine finished reading within the last `seconds`, at most 64.
    pub fn prompts_within(&self, seconds: f64, now: Tick) -> usize {
        self.read.iter().rev().take_while(|read| now.seconds_since(**read) < seconds).count()
    }

    /// True if it began to continue a request of ours after rounds within the last `seconds`.
    pub fn continued_within(&self, seconds: f64, now: Tick) -> bool {
        self.continuing.within(seconds, now)
    }

    /// Lets verify requests take the share `slots`, 0 to 1, of the sequences that are free.
    pub fn allow(&mut self, slots: f64) {
        self.slots = slots;
    }

    /// Draft nodes of one verify request that takes a sequence for each of them: the share that is
    /// allowed of the free sequences, divided among our requests that are speculated on; at least
    /// one. Not bounded where there are no requests of others, or the engine reports no limit.
    pub fn fan_out_nodes(&self) -> usize {
        if self.others == 0 {
            return usize::MAX;
        }
        let Some(limit) = self.limit else { return usize::MAX };
        let free = (limit as usize).saturating_sub(self.requests());
        let each = self.slots * free as f64 / self.speculating.max(1) as f64;
        (each as usize).max(1)
    }

    /// True if none of our requests is speculated on: plain tokens then show the pace of plain
    /// decoding alone.
    pub fn all_plain(&self) -> bool {
        self.speculating == 0
    }

    /// True if requests are decoded plainly concurrent with one of ours that is speculated on, or
    /// would be if it were.
    pub fn has_plain_neighbours(&self) -> bool {
        self.others > 0 || self.ours > self.speculating.max(1)
    }

    /// Takes a load report of the engine, unless it is older than two seconds. Requests beyond the
    /// our sequences at that time belong to others.
    pub fn set_signal(&mut self, signal: &Signal) {
        if signal.age > STALE {
            return;
        }
        let reported = signal.running.saturating_add(signal.waiting) as usize;
        // Each of ours that is speculated on has one or several verify requests in flight, of one
        // or several sequences each.
        let rounds = self.speculating.max(self.in_flight).min(signal.verifying as usize);
        let sequences = (signal.calls as usize).saturating_sub(rounds) + signal.verifying as usize;
        self.others = reported.saturating_sub(sequences);
        self.waits = signal.waiting > signal.verifying;
        self.kv = signal.kv_usage.unwrap_or(0.0);
        self.limit = signal.limit;
        if !self.waits {
            self.most = self.most.max(self.requests());
        }
    }

    /// Load of the engine, 0 to 1: the maximum of its KV usage and its requests ÷ its limit
    /// (without a limit ÷ the maximum that it computed while nothing waited); 1 where something
    /// waits.
    pub fn load(&self) -> f64 {
        let limit = self.limit.map_or(self.most.max(AT_ONCE), |limit| limit.max(1) as usize);
        let busy = (self.ours + self.others) as f64 / limit as f64;
        if self.waits { 1.0 } else { busy.max(self.kv).clamp(0.0, 1.0) }
    }

    /// Our requests in flight that are speculated on.
    pub fn speculating(&self) -> usize {
        self.speculating
    }

    /// Requests in flight, ours and those of others, at least one.
    pub fn requests(&self) -> usize {
        (self.ours + self.others).max(1)
    }

    /// Our requests in flight.
    pub fn ours(&self) -> usize {
        self.ours
    }

    /// Requests in flight that are not ours, by the last load report; 0 before the first.
    pub fn others(&self) -> usize {
        self.others
    }
}

/// The measurements of one engine start: of the same process, model and version.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct EngineStartState {
    /// Survival probabilities of drafted tokens.
    pub survival: Survival,
    /// Mean length of outputs, tokens.
    pub length: Length,
    /// Rounds by class of requests.
    pub classes: Classes,
    /// Prices of drift, by policy and route.
    #[serde(default)]
    pub drift: DriftPrices,
    /// Names of the models that have drafted, indexed by their numbers.
    pub models: Vec<String>,
}

/// Requests that are expected to be alike: the same drafter, temperature bucket and kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Class {
    drafter: DrafterId,
    bucket: TemperatureBucket,
    kind: u64,
}

impl Class {
    /// The requests of a drafter and a temperature; `kind` is a number for all else that
    /// distinguishes requests: policy and route.
    pub const fn new(drafter: DrafterId, bucket: TemperatureBucket, kind: u64) -> Self {
        Self { drafter: drafter.learnt_as(), bucket, kind }
    }

    /// The drafter, by the id under which its acceptance is learnt.
    pub const fn drafter(self) -> DrafterId {
        self.drafter
    }

    /// The temperature bucket.
    pub const fn bucket(self) -> TemperatureBucket {
        self.bucket
    }

    /// The number for all else.
    pub const fn kind(self) -> u64 {
        self.kind
    }
}

/// Rounds of requests, real and virtual, by class.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Classes {
    #[serde(with = "super::pairs")]
    rounds: HashMap<Class, Rounds>,
    /// Rounds of others, which fill up the memory that local ones leave free.
    #[serde(skip)]
    lent: HashMap<Class, Sums>,
}

impl Classes {
    /// Maximum number of classes.
    const MAX: usize = 512;
    /// Decay of a class's measurements, in rounds.
    const MEMORY: f64 = 300.0;

    /// Notes a round of a class; see [`Rounds::push`]. Above the maximum the class with the fewest
    /// rounds is dropped.
    pub fn push(&mut self, class: Class, round: Round) {
        if self.rounds.len() >= Self::MAX && !self.rounds.contains_key(&class) {
            let fewest = self.rounds.iter().min_by(|a, b| a.1.count().total_cmp(&b.1.count()));
            if let Some(fewest) = fewest.map(|(class, _)| *class) {
                self.rounds.remove(&fewest);
            }
        }
        let rounds = self.rounds.entry(class).or_insert_with(|| Rounds::remembering(Self::MEMORY));
        rounds.push(round);
    }

    /// The rounds of a class; `None` before the first.
    pub fn of(&self, class: Class) -> Option<Rounds> {
        let local = self.rounds.get(&class).copied();
        let Some(lent) = self.lent.get(&class) else { return local };
        let fresh = || Rounds::remembering(Self::MEMORY);
        Some(local.unwrap_or_else(fresh).filled(*lent, Self::MEMORY))
    }

    /// The local rounds of every class.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&Class, &Rounds)> {
        self.rounds.iter()
    }

    /// Replaces the rounds of others.
    pub(super) fn lend(&mut self, lent: HashMap<Class, Sums>) {
        self.lent = lent;
    }
}

/// Mean length of outputs, in tokens.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Length {
    mean: f64,
    seen: f64,
    /// Tokens of others' outputs, and outputs, which fill up the memory that local ones leave free.
    #[serde(skip)]
    lent: Sum,
}

impl Length {
    /// Mean length before any output was seen, tokens.
    const PRIOR: f64 = 256.0;
    /// Minimum of expected further tokens, however long an output is already.
    const MIN_REMAINDER: f64 = 32.0;
    /// Decay of the mean, in outputs.
    const MEMORY: f64 = 64.0;

    /// Expected number of tokens still to come of an output of `done` tokens, at least 32.
    pub fn expected_remainder(&self, done: usize) -> f64 {
        let Sum(tokens, outputs) = self.lent.within(Self::MEMORY - self.seen);
        let (tokens, outputs) = (self.mean * self.seen + tokens, self.seen + outputs);
        let length = (tokens + Self::PRIOR * 2.0) / (outputs + 2.0);
        (length - done as f64).max(Self::MIN_REMAINDER)
    }

    /// The local outputs, as they are shared.
    pub(super) fn shared(&self) -> Sum {
        Sum(self.mean * self.seen, self.seen)
    }

    /// Replaces the outputs of others.
    pub(super) fn lend(&mut self, lent: Sum) {
        self.lent = lent;
    }

    #[cfg(test)]
    pub(super) fn spoil(&mut self, mean: f64) {
        self.mean = mean;
    }

    /// Notes that an output ended after `tokens`.
    pub fn ended(&mut self, tokens: usize) {
        self.seen = (self.seen.max(0.0) + 1.0).min(Self::MEMORY);
        self.mean += (tokens as f64 - self.mean) / self.seen;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_are_expected_to_have_the_mean_length_of_earlier_ones() {
        let mut length = Length::default();
        assert!((length.expected_remainder(0) - 256.0).abs() < 1e-9);
        (0..64).for_each(|_| length.ended(1_000));
        assert!((900.0..1_000.0).contains(&length.expected_remainder(0)));
        assert!((length.expected_remainder(5_000) - 32.0).abs() < 1e-9);
    }

    #[test]
    fn fan_out_beside_others_takes_its_share_of_the_free_sequences() {
        let mut concurrency = Concurrency::default();
        concurrency.allow(0.5);
        let signal = Signal {
            running: 4,
            waiting: 0,
            kv_usage: None,
            limit: Some(20),
            verifying: 0,
            calls: 0,
            age: Duration::ZERO,
        };
        assert_eq!(concurrency.fan_out_nodes(), usize::MAX, "before a report");
        concurrency.set_signal(&signal);
        assert_eq!(concurrency.fan_out_nodes(), 8, "half of sixteen");
        concurrency.speculates(true);
        concurrency.speculates(true);
        assert_eq!(concurrency.fan_out_nodes(), 4, "for each of two");
        concurrency.set_signal(&Signal { running: 20, ..signal });
        assert_eq!(concurrency.fan_out_nodes(), 1, "one is always allowed");
        concurrency.set_signal(&Signal { running: 2, verifying: 2, calls: 2, ..signal });
        assert_eq!(concurrency.fan_out_nodes(), usize::MAX, "nobody else");
        concurrency.set_signal(&Signal { limit: None, ..signal });
        assert_eq!(concurrency.fan_out_nodes(), usize::MAX, "the engine reports no limit");
    }
}
