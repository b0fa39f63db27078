//! Emulates the costs of another machine: each run of a model takes as long as it would take there.
//!
//! The gain of speculation depends on the cost of a verify request in plain steps, and a small
//! model on a laptop has neither the costs of a large one on a GPU nor the same costs on every
//! laptop. So a run computes and then sleeps until its time is over: the tokens are real, the costs
//! are given, and concurrent work loses no processor time. The next run of a busy model begins when
//! the last one was due, so that late wake-ups do not add up.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::time::{Duration, Instant};

use crate::forward::{Feed, Forward, Lane, Logits, ModelConfig, ModelError, Rows};
use foretell_core::units::Tick;

/// Run times on the emulated machine. Text:
/// `step=60ms,base=1.35,node=0.025,growth=0.02,prompt=0.1ms`; all but `step` are optional.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pace {
    /// Time of a plain step.
    pub step: Duration,
    /// Cost of a verify request without its drafted tokens, plain steps.
    pub base: f64,
    /// Cost that each drafted token adds to a verify request, plain steps.
    pub node: f64,
    /// Share by which a run is longer for each further sequence in it.
    pub growth: f64,
    /// Time to read one prompt token that is not in the cache; zero: no longer than the model
    /// itself takes.
    pub prompt: Duration,
}

impl Pace {
    /// Time of a run with these feeds: the costliest of its steps and verify requests, longer by
    /// `growth` for each further one, plus every prompt token that is read. The last token of a
    /// prompt is a plain step.
    pub fn run(&self, feeds: &[Feed<'_>]) -> Duration {
        let stepping = || feeds.iter().filter(|feed| feed.rows != Rows::None);
        let costliest = stepping().map(|feed| self.steps(feed)).fold(0.0, f64::max);
        let growth = 1.0 + self.growth * (stepping().count().saturating_sub(1)) as f64;
        let read: usize = feeds.iter().map(read).sum();
        self.step.mul_f64(costliest * growth) + self.prompt.mul_f64(read as f64)
    }

    /// Cost of a feed's step or verify request, plain steps.
    fn steps(&self, feed: &Feed<'_>) -> f64 {
        feed.draft.map_or(1.0, |drafted| self.base + self.node * drafted as f64)
    }
}

/// Prompt tokens that a feed reads: all but its draft and the token that its step begins with.
fn read(feed: &Feed<'_>) -> usize {
    let sequence = feed.tokens.len().saturating_sub(feed.draft.unwrap_or(0));
    sequence.saturating_sub(usize::from(feed.rows != Rows::None))
}

/// Error for a text that is not a [`Pace`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoPace {
    /// A part that is not `key=value` with a known key.
    #[error(
        "no such key, allowed step, base, node, growth, prompt (KEY=VALUE with commas between), got {0:?}"
    )]
    Key(String),
    /// A duplicate key.
    #[error("{0}: given twice")]
    Twice(&'static str),
    /// A value that is malformed or out of range.
    #[error("{key}: allowed {allowed}, got {got:?}")]
    Value {
        /// Its key.
        key: &'static str,
        /// Values that are allowed.
        allowed: &'static str,
        /// The value in the text.
        got: String,
    },
    /// No `step`.
    #[error("step is missing: how long a plain step takes, such as step=60ms")]
    NoStep,
}

impl FromStr for Pace {
    type Err = NoPace;

    fn from_str(text: &str) -> Result<Self, NoPace> {
        let (mut step, mut prompt) = (None, None);
        let (mut base, mut node, mut growth) = (None, None, None);
        for part in text.split(',') {
            let (key, value) = part.split_once('=').ok_or_else(|| NoPace::Key(part.to_owned()))?;
            match key {
                "step" => once("step", &mut step, duration("step", value)?)?,
                "base" => once("base", &mut base, number("base", value, 1.0..=100.0, "1 to 100")?)?,
                "node" => once("node", &mut node, number("node", value, 0.0..=100.0, "0 to 100")?)?,
                "growth" => once("growth", &mut growth, number("growth", value, 0.0..=100.0, "0 to 100")?)?,
                "prompt" => once("prompt", &mut prompt, duration("prompt", value)?)?,
                _ => return Err(NoPace::Key(part.to_owned())),
            }
        }
        let step = step.ok_or(NoPace::NoStep)?;
        if step.is_zero() {
            return Err(NoPace::Value { key: "step", allowed: "more than 0", got: "0".to_owned() });
        }
        Ok(Self {
            step,
            base: base.unwrap_or(1.0),
            node: node.unwrap_or(0.0),
            growth: growth.unwrap_or(0.0),
            prompt: prompt.unwrap_or_default(),
        })
    }
}

fn once<T>(key: &'static str, field: &mut Option<T>, value: T) -> Result<(), NoPace> {
    if field.replace(value).is_some() { Err(NoPace::Twice(key)) } else { Ok(()) }
}

/// A decimal number within a range. `parse` alone would take `inf`, `1e3` and `+1` too.
fn number(
    key: &'static str,
    text: &str,
    range: RangeInclusive<f64>,
    allowed: &'static str,
) -> Result<f64, NoPace> {
    let plain = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    let value = text.parse().ok().filter(|value| plain && range.contains(value));
    value.ok_or_else(|| NoPace::Value { key, allowed, got: text.to_owned() })
}

/// A duration up to a minute, such as `60ms`, `2.5ms`, `80us`, `1s`; rounded to microseconds.
fn duration(key: &'static str, text: &str) -> Result<Duration, NoPace> {
    let allowed = "a number with us, ms or s, up to 60s";
    let refused = || NoPace::Value { key, allowed, got: text.to_owned() };
    let (count, micros) = match text {
        _ if text.ends_with("us") => (text.strip_suffix("us"), 1.0),
        _ if text.ends_with("ms") => (text.strip_suffix("ms"), 1e3),
        _ => (text.strip_suffix('s'), 1e6),
    };
    let count = number(key, count.ok_or_else(refused)?, 0.0..=60e6, allowed).map_err(|_| refused())?;
    let micros = (count * micros).round();
    if micros > 60e6 { Err(refused()) } else { Ok(Duration::from_micros(micros as u64)) }
}

impl fmt::Display for Pace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |duration: Duration| duration.as_micros() as f64 / 1e3;
        let Self { base, node, growth, .. } = self;
        let (step, prompt) = (ms(self.step), ms(self.prompt));
        write!(f, "step={step}ms,base={base},node={node},growth={growth},prompt={prompt}ms")
    }
}

/// A clock that can be waited on.
pub trait Watch: Send {
    /// The current time.
    fn now(&self) -> Tick;
    /// Returns at that time, or at once if it has passed.
    fn wait_until(&mut self, moment: Tick);
}

/// The system's clock, from its first moment on.
struct SystemClock(Instant);

impl Watch for SystemClock {
    fn now(&self) -> Tick {
        Tick(u64::try_from(self.0.elapsed().as_micros()).unwrap_or(u64::MAX))
    }

    fn wait_until(&mut self, moment: Tick) {
        std::thread::sleep(moment - self.now());
    }
}

/// A model whose runs take the time given by a [`Pace`], or their own where that is longer.
pub struct Paced {
    model: Box<dyn Forward>,
    pace: Pace,
    watch: Box<dyn Watch>,
    /// Time at which the last run was due to end, if the model has been busy since.
    due: Option<Tick>,
}

impl Paced {
    /// The model at this pace, on the system's clock.
    pub fn new(model: Box<dyn Forward>, pace: Pace) -> Self {
        Self::by(model, pace, Box::new(SystemClock(Instant::now())))
    }

    /// The model at this pace, on any clock.
    pub fn by(model: Box<dyn Forward>, pace: Pace, watch: Box<dyn Watch>) -> Self {
        Self { model, pace, watch, due: None }
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

    fn run(&mut self, feeds: &[Feed<'_>]) -> Result<Logits, ModelError> {
        let begun = self.due.unwrap_or_else(|| self.watch.now());
        let logits = self.model.run(feeds);
        // If the model was slower than its pace, later runs do not catch up.
        let due = begun.after(self.pace.run(feeds)).max(self.watch.now());
        self.watch.wait_until(due);
        self.due = Some(due);
        logits
    }

    fn rest(&mut self) {
        self.due = None;
        self.model.rest();
    }
}

#[cfg(test)]
mod tests;
