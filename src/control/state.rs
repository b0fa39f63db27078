//! What is kept of a replica and of an epoch.
//!
//! They live apart because they end apart: another model behind a replica says nothing about what its calls cost.

use serde::{Deserialize, Serialize};

use std::collections::HashMap;
use std::time::Duration;

use super::account::Account;
use super::budget::Budget;
use super::costs::{CROWDS, Costs};
use super::gates::Signal;
use super::hedge::Hedges;
use super::rounds::Rounds;
use super::survival::{Heat, Survival};
use super::switchback::Switchback;
use crate::draft::DrafterId;

/// What has been learnt about one replica.
#[derive(Debug, Default)]
pub struct ReplicaState {
    /// What its calls cost.
    pub costs: Costs,
    /// What leaping may still lose there, by crowd.
    pub accounts: Accounts,
    /// The requests that its engine computes.
    pub crowd: Crowd,
    /// What may be computed for nothing while others wait for the engine.
    pub budget: Budget,
    /// Its ride-only windows.
    pub switchback: Switchback,
}

/// The accounts of one replica, by the size of its crowd.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Accounts([Account; CROWDS]);

impl Accounts {
    /// The account of a size of crowd.
    pub fn of(&mut self, size: usize) -> &mut Account {
        let [first, others @ ..] = &mut self.0;
        let others_len = others.len();
        match size.checked_sub(1) {
            Some(other) => others.get_mut(other.min(others_len - 1)).unwrap_or(first),
            None => first,
        }
    }
}

/// A report older than this says nothing of who computes now.
const STALE: Duration = Duration::from_secs(2);

/// An engine that reports no limit of requests is taken to compute at least so many at once.
const AT_ONCE: usize = 8;

/// How many requests an engine computes at once: ours, and those of others that it reports.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Crowd {
    ours: usize,
    leaping: usize,
    others: usize,
    /// Most that it computed while nothing waited, and the limit that it reports.
    most: usize,
    limit: Option<u32>,
    /// Share of the engine's KV memory in use; 0 where it does not report that.
    kv: f64,
    /// Requests other than our verify calls wait.
    waits: bool,
    /// Our verify calls: under way, and all that began.
    under_way: Calls,
    begun: Calls,
}

/// Verify calls, and their draft nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Calls {
    calls: usize,
    nodes: usize,
}

/// A verify call of ours that is under way.
#[derive(Clone, Copy, Debug)]
pub struct UnderWay {
    nodes: usize,
    /// What was under way when it began, itself included.
    with: Calls,
    /// What had begun by then.
    after: Calls,
}

impl Crowd {
    /// One more of ours.
    pub fn enter(&mut self) {
        self.ours += 1;
    }

    /// One of ours less.
    pub fn leave(&mut self) {
        self.ours = self.ours.saturating_sub(1);
    }

    /// One of ours leaps, or (`false`) rides again.
    pub fn leaps(&mut self, leaps: bool) {
        self.leaping = if leaps { self.leaping + 1 } else { self.leaping.saturating_sub(1) };
    }

    /// A verify call of ours with so many draft nodes begins.
    pub fn call_begins(&mut self, nodes: usize) -> UnderWay {
        for calls in [&mut self.under_way, &mut self.begun] {
            (calls.calls, calls.nodes) = (calls.calls.wrapping_add(1), calls.nodes.wrapping_add(nodes));
        }
        UnderWay { nodes, with: self.under_way, after: self.begun }
    }

    /// It ends. Returns the draft nodes that the calls had on average that were under way at any time with it, itself
    /// included.
    pub fn call_ends(&mut self, call: UnderWay) -> f64 {
        let UnderWay { nodes, with, after } = call;
        self.under_way.calls = self.under_way.calls.saturating_sub(1);
        self.under_way.nodes = self.under_way.nodes.saturating_sub(nodes);
        let calls = with.calls + self.begun.calls.wrapping_sub(after.calls);
        let all = with.nodes + self.begun.nodes.wrapping_sub(after.nodes);
        all as f64 / calls.max(1) as f64
    }

    /// Whether none of ours leaps: what is ridden now shows the pace that riding alone has.
    pub fn rides(&self) -> bool {
        self.leaping == 0
    }

    /// Whether requests ride beside one of ours that leaps, or would if it did.
    pub fn has_riders_beside(&self) -> bool {
        self.others > 0 || self.ours > self.leaping.max(1)
    }

    /// The engine has reported its load. What it reports beyond the sequences of our own calls at that time is of others.
    pub fn hear(&mut self, signal: &Signal) {
        if signal.age > STALE {
            return;
        }
        let reported = signal.running.saturating_add(signal.waiting) as usize;
        // Each of ours that leaps has a verify call under way, or several, of one sequence or several each.
        let rounds = self.leaping.max(self.under_way.calls).min(signal.own as usize);
        let sequences = (signal.calls as usize).saturating_sub(rounds) + signal.own as usize;
        self.others = reported.saturating_sub(sequences);
        self.waits = signal.waiting > signal.own;
        self.kv = signal.kv_usage.unwrap_or(0.0);
        self.limit = signal.limit;
        if !self.waits {
            self.most = self.most.max(self.requests());
        }
    }

    /// How busy the engine is, 0 to 1: the largest of its KV usage, its requests ÷ its limit (else ÷ the most that it
    /// computed while nothing waited), and 1 where something waits.
    pub fn load(&self) -> f64 {
        let limit = self.limit.map_or(self.most.max(AT_ONCE), |limit| limit.max(1) as usize);
        let busy = (self.ours + self.others) as f64 / limit as f64;
        if self.waits { 1.0 } else { busy.max(self.kv).clamp(0.0, 1.0) }
    }

    /// All requests, at least one.
    pub fn requests(&self) -> usize {
        (self.ours + self.others).max(1)
    }

    /// Requests of ours that leap.
    pub fn leaping(&self) -> usize {
        self.leaping
    }

    /// Requests of ours.
    pub fn ours(&self) -> usize {
        self.ours
    }

    /// Requests that are not ours.
    pub fn others(&self) -> usize {
        self.others
    }
}

/// What has been learnt about one epoch: a model behind a replica, since it started.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct EpochState {
    /// How likely drafted tokens are accepted.
    pub survival: Survival,
    /// How long outputs become.
    pub length: Length,
    /// Rounds by class of requests.
    pub classes: Classes,
    /// Which of several models drafts.
    pub hedges: Hedges,
    /// The names of the models that have drafted, by their numbers.
    pub models: Vec<String>,
}

/// Requests that are likely to be alike: the same drafter, temperature and kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Class {
    drafter: DrafterId,
    heat: Heat,
    kind: u64,
}

impl Class {
    /// The requests of a drafter and a temperature; `kind` is a number for everything else that requests are told apart by:
    /// policy and route.
    pub const fn new(drafter: DrafterId, heat: Heat, kind: u64) -> Self {
        Self { drafter: drafter.learnt_as(), heat, kind }
    }

    /// The drafter.
    pub const fn drafter(self) -> DrafterId {
        self.drafter
    }

    /// The temperature.
    pub const fn heat(self) -> Heat {
        self.heat
    }
}

/// Rounds of requests, real and virtual, by class.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Classes {
    #[serde(with = "super::pairs")]
    rounds: HashMap<Class, Rounds>,
}

impl Classes {
    /// Most classes that are kept.
    const MOST: usize = 512;
    /// Rounds that a class remembers.
    const MEMORY: f64 = 300.0;

    /// Notes a round of a class; see [`Rounds::push`]. Where there are too many classes the one with the fewest rounds makes room.
    pub fn push(&mut self, class: Class, nodes: usize, modelled: usize, tokens: usize) {
        if self.rounds.len() >= Self::MOST && !self.rounds.contains_key(&class) {
            let fewest = self.rounds.iter().min_by(|a, b| a.1.count().total_cmp(&b.1.count()));
            if let Some(fewest) = fewest.map(|(class, _)| *class) {
                self.rounds.remove(&fewest);
            }
        }
        let rounds = self.rounds.entry(class).or_insert_with(|| Rounds::remembering(Self::MEMORY));
        rounds.push(nodes, modelled, tokens);
    }

    /// The rounds of a class; `None` before the first.
    pub fn of(&self, class: Class) -> Option<&Rounds> {
        self.rounds.get(&class)
    }
}

/// Mean length of outputs, in tokens.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Length {
    mean: f64,
    seen: f64,
}

impl Length {
    /// Mean length before any output was seen.
    const PRIOR: f64 = 256.0;
    /// However long an output is already, this much more is expected.
    const REST_LEAST: f64 = 32.0;
    /// Outputs that the mean remembers.
    const MEMORY: f64 = 64.0;

    /// Tokens that an output of `done` tokens may still be expected to have.
    pub fn expected_rest(&self, done: usize) -> f64 {
        let length = (self.mean * self.seen + Self::PRIOR * 2.0) / (self.seen + 2.0);
        (length - done as f64).max(Self::REST_LEAST)
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
    fn outputs_are_expected_to_be_as_long_as_they_were() {
        let mut length = Length::default();
        assert!((length.expected_rest(0) - 256.0).abs() < 1e-9);
        (0..64).for_each(|_| length.ended(1_000));
        assert!((900.0..1_000.0).contains(&length.expected_rest(0)));
        assert!((length.expected_rest(5_000) - 32.0).abs() < 1e-9);
    }

    #[test]
    fn a_call_is_beside_those_that_were_under_way_when_it_began_and_those_that_began_before_it_ended() {
        let mut crowd = Crowd::default();
        let first = crowd.call_begins(4);
        let second = crowd.call_begins(8);
        assert!((crowd.call_ends(first) - 6.0).abs() < 1e-9);
        let third = crowd.call_begins(0);
        assert!((crowd.call_ends(second) - 4.0).abs() < 1e-9);
        assert!((crowd.call_ends(third) - 4.0).abs() < 1e-9);
        let alone = crowd.call_begins(3);
        assert!((crowd.call_ends(alone) - 3.0).abs() < 1e-9);
    }
}
