//! Emulates the costs of another machine: each run of a model takes as long as it would take there.
//!
//! The gain of speculation depends on the cost of a verify request in plain steps, and a small
//! model on a laptop has neither the costs of a large one on a GPU nor the same costs on every
//! laptop. So a run computes and then sleeps until its time is over: the tokens are real, the costs
//! are given, and concurrent work loses no processor time. The next run of a busy model begins when
//! the last one was due, so that late wake-ups do not add up. On a GPU prompts are read in the
//! steps that decode, so there a run takes the time by which it makes the step of its turn longer.
//! `foretell-lab sim` plays its engines by the same [`Curve`]s; the controller knows none of them.

pub mod curve;
pub mod profile;
mod text;

use std::time::{Duration, Instant};

use crate::forward::{Behind, Feed, Forward, HeadDraft, Lane, Logits, ModelConfig, ModelError, Rows};
use foretell_core::units::Tick;

use curve::{Batch, Curve, Steps};
use profile::Profile;
pub use text::NoPace;

/// Run times on the emulated machine. Text: `profile=h100-8b`, or
/// `step=60ms,base=1.35,node=0.025,growth=0.02,prompt=0.1ms`, of which all but `step` are optional;
/// `slow=10` makes each run take ten times as long.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pace {
    costs: Costs,
    /// Factor of every run time.
    slow: f64,
}

/// Where the run times come from.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Costs {
    Profile(Profile),
    Steps(Steps),
}

impl Pace {
    /// Adds a run to a step: its feeds, each with the number of tokens that its lane has already.
    /// Returns the time that it takes.
    pub fn run<'a>(&self, step: &mut Batch, feeds: impl Iterator<Item = (Feed<'a>, usize)>) -> Duration {
        if self.step_tokens().is_none() {
            *step = Batch::default();
        }
        let before = if step.tokens == 0 { 0.0 } else { self.seconds(*step) };
        feeds.for_each(|(feed, cached)| join(step, &feed, cached));
        Duration::from_secs_f64((self.seconds(*step) - before).max(0.0) * self.slow)
    }

    /// Number of tokens of a step that prompts share with all other work; `None` if each run is a
    /// step.
    fn step_tokens(&self) -> Option<usize> {
        match self.costs {
            Costs::Profile(profile) => profile.is_gpu().then(|| profile.step_tokens()),
            Costs::Steps(_) => None,
        }
    }

    fn seconds(&self, batch: Batch) -> f64 {
        match self.costs {
            Costs::Profile(profile) => profile.curve().seconds(batch),
            Costs::Steps(steps) => Curve::Steps(steps).seconds(batch),
        }
    }
}

/// Adds a feed to a step, with the number of tokens that its lane has already.
fn join(batch: &mut Batch, feed: &Feed<'_>, cached: usize) {
    let (tokens, output) = (feed.tokens.len(), usize::from(feed.rows != Rows::None));
    batch.sequences += 1;
    batch.tokens += tokens;
    batch.context += cached + tokens;
    batch.outputs += output;
    // The token that a step or a draft begins with is no prompt.
    batch.read += tokens.saturating_sub(feed.draft.unwrap_or(0)).saturating_sub(output);
    batch.drafted = batch.drafted.max(feed.draft);
}

/// A clock that can be waited on.
pub trait Clock: Send {
    /// The current time.
    fn now(&self) -> Tick;
    /// Returns at that time, or at once if it has passed.
    fn wait_until(&mut self, moment: Tick);
}

/// The system's clock, from its first moment on.
struct SystemClock(Instant);

impl Clock for SystemClock {
    fn now(&self) -> Tick {
        Tick(u64::try_from(self.0.elapsed().as_micros()).unwrap_or(u64::MAX))
    }

    fn wait_until(&mut self, moment: Tick) {
        std::thread::sleep(moment - self.now());
    }
}

/// A model whose runs take the time given by a [`Pace`], or their actual time where that is longer.
pub struct Paced {
    model: Box<dyn Forward>,
    pace: Pace,
    clock: Box<dyn Clock>,
    step: Batch,
    /// Time at which the last run was due to end, if the model has been busy since.
    due: Option<Tick>,
}

impl Paced {
    /// The model at this pace, on the system's clock.
    pub fn new(model: Box<dyn Forward>, pace: Pace) -> Self {
        Self::by(model, pace, Box::new(SystemClock(Instant::now())))
    }

    pub fn by(model: Box<dyn Forward>, pace: Pace, clock: Box<dyn Clock>) -> Self {
        Self { model, pace, clock, step: Batch::default(), due: None }
    }
}

impl Forward for Paced {
    fn config(&self) -> &ModelConfig {
        self.model.config()
    }

    fn reserve(&mut self) -> Option<Lane> {
        self.model.reserve()
    }

    fn release(&mut self, lane: Lane) {
        self.model.release(lane);
    }

    fn len(&self, lane: Lane) -> usize {
        self.model.len(lane)
    }

    fn rewind(&mut self, lane: Lane, len: usize) {
        self.model.rewind(lane, len);
    }

    fn commit(&mut self, lane: Lane, base: usize, path: &[usize]) -> Result<(), ModelError> {
        self.model.commit(lane, base, path)
    }

    fn fork(&mut self, from: Lane, to: Lane, len: usize) -> Result<(), ModelError> {
        self.model.fork(from, to, len)
    }

    fn begin_turn(&mut self) -> Option<usize> {
        self.step = Batch::default();
        self.pace.step_tokens()
    }

    fn run(&mut self, feeds: &[Feed<'_>]) -> Result<Logits, ModelError> {
        let begun = self.due.unwrap_or_else(|| self.clock.now());
        let cached = |feed: &Feed<'_>| self.model.len(feed.lane);
        let takes = self.pace.run(&mut self.step, feeds.iter().map(|feed| (*feed, cached(feed))));
        let logits = self.model.run(feeds);
        // If the model was slower than its pace, later runs do not catch up.
        let due = begun.after(takes).max(self.clock.now());
        self.clock.wait_until(due);
        self.due = Some(due);
        logits
    }

    fn propose(&mut self, behind: &[Behind<'_>]) -> Vec<HeadDraft> {
        let begun = self.clock.now();
        let proposed = self.model.propose(behind);
        // The pace does not know a head: its time is added as it is here.
        let took = Duration::from_secs_f64(self.clock.now().seconds_since(begun));
        self.due = self.due.map(|due| due.after(took));
        proposed
    }

    fn rest(&mut self) {
        self.due = None;
        self.model.rest();
    }
}

#[cfg(test)]
mod tests;
