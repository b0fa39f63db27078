//! One replica: a queue, continuous batching in steps, a prefix cache, and limited KV memory.
//!
//! A step takes every running sequence: one token of each that decodes, then prompts in chunks up
//! to the step's token limit, in the order in which they were admitted. A verify request is a
//! prompt whose last tokens are the draft; the step that computes its last token answers it. A
//! cancelled job stays in the running step until it ends.

use std::collections::{HashMap, VecDeque};

use serde::Deserialize;

use super::later;
use super::profile::{Jitter, Shape};
use super::values::seconds;
use foretell_core::units::Tick;
use foretell_onnx::pace::curve::{Batch, Curve, Steps};

pub type JobId = u64;

/// A request as the engine receives it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Job {
    pub id: JobId,
    /// The text it belongs to: jobs for the same text share its prefix in the cache.
    pub text: u64,
    pub context: usize,
    pub work: Work,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Work {
    /// This number of tokens, one by one.
    Stream(usize),
    /// The verification of a draft.
    Verify(Verify),
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Verify {
    /// Drafted tokens.
    pub nodes: usize,
    pub sequences: usize,
    /// Tokens computed after the context, over all sequences.
    pub computed: usize,
    /// Number of drafted tokens that match the true text, and so stay useful in the cache.
    pub followed: usize,
    /// Rows of log-probabilities in the answer.
    pub rows: usize,
}

#[derive(Clone, Debug, PartialEq)]
pub struct EngineSpec {
    /// Pace and sizes.
    pub shape: Shape,
    /// Disturbances of its steps.
    pub jitter: Jitter,
    /// True if the KV rows of a text are stored for its next job.
    pub prefix_cache: bool,
    /// Changes of pace, each with the moment from which it applies.
    pub changes: Vec<(Tick, Curve)>,
    /// Seconds from a cancel's arrival until the sequence is gone.
    pub cancel: f64,
    /// Its API server.
    pub front: Front,
}

/// Time of the process that answers HTTP, which handles one thing after the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Front {
    /// Seconds to take in a request.
    #[serde(deserialize_with = "seconds::<_, 0, 1>")]
    pub request: f64,
    /// Seconds to send an output.
    #[serde(deserialize_with = "seconds::<_, 0, 1>")]
    pub event: f64,
    /// Seconds for each row of log-probabilities: a `score` request returns one for every token of
    /// its context and draft.
    #[serde(deserialize_with = "seconds::<_, 0, 1>")]
    pub row: f64,
}

impl EngineSpec {
    /// A paced server: no jitter, a prefix cache of single tokens, and room for everything.
    pub fn paced(steps: Steps) -> Self {
        let shape = Shape { pace: Curve::Steps(steps), sequences: 64, kv: 1 << 24, chunk: 1 << 20, block: 1 };
        Self {
            shape,
            jitter: Jitter::NONE,
            prefix_cache: true,
            changes: Vec::new(),
            cancel: 0.0,
            front: Front::default(),
        }
    }
}

/// A token or a verification result that the engine has produced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Produced {
    pub job: JobId,
    /// Index of the token in its plain request, counted from 0; 0 for a verification result.
    pub number: usize,
    /// The job's last output.
    pub last: bool,
    /// Rows of log-probabilities in it.
    pub rows: usize,
}

#[derive(Clone, Debug)]
struct Running {
    job: Job,
    /// Tokens to be computed before the next output.
    remaining: usize,
    /// Tokens in the step that is running.
    taken: usize,
    made: usize,
    gone: bool,
}

#[derive(Clone, Copy, Debug)]
struct Cached {
    tokens: usize,
    used: Tick,
}

/// Tokens that the engine has computed so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Computed {
    pub all: u64,
    /// For sequences that had been cancelled before their step ended.
    pub wasted: u64,
    pub steps: u64,
}

#[derive(Debug)]
pub struct Engine {
    spec: EngineSpec,
    seed: u64,
    waiting: VecDeque<Job>,
    running: Vec<Running>,
    /// Prefixes of texts without a running job.
    cached: HashMap<u64, Cached>,
    cached_tokens: usize,
    /// Sequences of the running jobs; `kv` is their KV tokens.
    sequences: usize,
    kv: usize,
    stepping: bool,
    /// Jobs that the last step had no room for.
    without_room: usize,
    computed: Computed,
}

impl Engine {
    pub fn new(spec: EngineSpec, seed: u64) -> Self {
        Self {
            spec,
            seed,
            waiting: VecDeque::new(),
            running: Vec::new(),
            cached: HashMap::new(),
            cached_tokens: 0,
            sequences: 0,
            kv: 0,
            stepping: false,
            without_room: 0,
            computed: Computed::default(),
        }
    }

    /// Takes a job; [`Engine::start`] begins it.
    pub fn submit(&mut self, job: Job) {
        self.waiting.push_back(job);
    }

    /// Drops a job. In the running step it is still computed.
    pub fn cancel(&mut self, id: JobId, now: Tick) {
        self.waiting.retain(|job| job.id != id);
        let Some(position) = self.running.iter().position(|running| running.job.id == id) else { return };
        if self.stepping {
            if let Some(running) = self.running.get_mut(position) {
                running.gone = true;
            }
        } else {
            self.end(position, now);
        }
    }

    /// Number of running sequences.
    pub fn running(&self) -> usize {
        self.sequences
    }

    /// Jobs that found no room when the last step began. Later ones are not counted yet, as in an
    /// engine that reports after each step.
    pub fn waiting(&self) -> usize {
        self.without_room
    }

    /// Share of the KV memory that running sequences use.
    pub fn kv_usage(&self) -> f64 {
        self.kv as f64 / self.spec.shape.kv.max(1) as f64
    }

    /// Tokens computed so far.
    pub fn computed(&self) -> Computed {
        self.computed
    }

    /// True if a step is running.
    pub fn is_stepping(&self) -> bool {
        self.stepping
    }

    /// True if a step could begin.
    pub fn has_work(&self) -> bool {
        !self.stepping && (!self.running.is_empty() || !self.waiting.is_empty())
    }

    /// Admits the jobs that there is room for and begins a step, if none is running and there is
    /// something to compute; returns the time at which it ends.
    pub fn start(&mut self, now: Tick) -> Option<Tick> {
        if self.stepping {
            return None;
        }
        while let Some(job) = self.waiting.front().copied().filter(|job| self.has_room(job)) {
            self.waiting.pop_front();
            self.admit(job);
        }
        self.without_room = self.waiting.len();
        let batch = self.take()?;
        self.stepping = true;
        self.computed.steps += 1;
        self.computed.all += batch.tokens as u64;
        let changed = self.spec.changes.iter().rev().find(|change| change.0 <= now);
        let pace = changed.map_or(&self.spec.shape.pace, |change| &change.1);
        let seconds = pace.seconds(batch) * self.spec.jitter.factor(self.seed, now);
        Some(later(now, seconds))
    }

    fn has_room(&self, job: &Job) -> bool {
        let (sequences, kv) = (self.sequences + sequences(job), self.kv + reserve(job));
        self.running.is_empty() || (sequences <= self.spec.shape.sequences && kv <= self.spec.shape.kv)
    }

    fn admit(&mut self, job: Job) {
        let known = if self.spec.prefix_cache { self.known(job.text) } else { 0 };
        let block = self.spec.shape.block.max(1);
        // The last token is always computed, because its row is the output.
        let known = (known.min(job.context.saturating_sub(1)) / block) * block;
        let fresh = job.context - known;
        let remaining = match job.work {
            Work::Stream(_) => fresh,
            Work::Verify(verify) => fresh * verify.sequences + verify.computed,
        };
        self.sequences += sequences(&job);
        self.kv += reserve(&job);
        self.make_room();
        self.running.push(Running { job, remaining, taken: 0, made: 0, gone: false });
    }

    /// Tokens of a text that are in KV memory: cached from earlier, or of a running job. Cached
    /// rows are taken over by the new job.
    fn known(&mut self, text: u64) -> usize {
        let running = self.running.iter().filter(|running| running.job.text == text);
        let by_jobs = running.map(Running::in_memory).max().unwrap_or(0);
        self.forget(text).max(by_jobs)
    }

    fn forget(&mut self, text: u64) -> usize {
        let known = self.cached.remove(&text).map_or(0, |cached| cached.tokens);
        self.cached_tokens -= known;
        known
    }

    /// Evicts the least recently used prefixes until the running jobs fit into memory.
    fn make_room(&mut self) {
        while self.cached_tokens + self.kv > self.spec.shape.kv {
            let Some((&oldest, _)) = self.cached.iter().min_by_key(|(text, cached)| (cached.used, **text))
            else {
                return;
            };
            self.forget(oldest);
        }
    }

    /// The tokens of the next step; `None` if nothing runs.
    fn take(&mut self) -> Option<Batch> {
        let mut batch = Batch::default();
        let mut budget = self.spec.shape.chunk.max(1);
        for prompts in [false, true] {
            for running in &mut self.running {
                if (running.remaining > 1) != prompts {
                    continue;
                }
                running.taken = running.remaining.min(budget);
                budget -= running.taken;
                if running.taken > 0 {
                    running.join(&mut batch);
                }
            }
        }
        (batch.tokens > 0).then_some(batch)
    }

    /// Ends the running step and appends its outputs to `out`. Call [`Engine::start`] afterwards.
    pub fn step_ended(&mut self, now: Tick, out: &mut Vec<Produced>) {
        self.stepping = false;
        let mut position = 0;
        while let Some(running) = self.running.get_mut(position) {
            let taken = std::mem::take(&mut running.taken);
            running.remaining -= taken;
            if running.gone {
                self.computed.wasted += taken as u64;
            }
            let over = running.gone || (running.remaining == 0 && taken > 0 && self.produce(position, out));
            if over { self.end(position, now) } else { position += 1 }
        }
    }

    /// Adds one output of this job; true if it was the last.
    fn produce(&mut self, position: usize, out: &mut Vec<Produced>) -> bool {
        let Some(running) = self.running.get_mut(position) else { return true };
        let number = running.made;
        running.made += 1;
        running.remaining = 1;
        let (last, rows) = match running.job.work {
            Work::Stream(tokens) => (running.made >= tokens, 0),
            Work::Verify(verify) => (true, verify.rows),
        };
        out.push(Produced { job: running.job.id, number, last, rows });
        last
    }

    fn end(&mut self, position: usize, now: Tick) {
        let running = self.running.remove(position);
        self.sequences -= sequences(&running.job);
        self.kv -= reserve(&running.job);
        if self.spec.prefix_cache {
            let tokens = running.in_memory().max(self.forget(running.job.text));
            self.cached.insert(running.job.text, Cached { tokens, used: now });
            self.cached_tokens += tokens;
            self.make_room();
        }
    }
}

impl Running {
    /// Adds its part of a step.
    fn join(&self, batch: &mut Batch) {
        let sequences = sequences(&self.job);
        batch.tokens += self.taken;
        batch.sequences += sequences;
        batch.context += self.job.context + self.made;
        if self.taken < self.remaining {
            batch.read += self.taken;
            return;
        }
        batch.outputs += sequences;
        batch.read += self.taken.saturating_sub(sequences + drafted(&self.job));
        match self.job.work {
            // A fan-out counts as `sequences` plain sequences.
            Work::Verify(verify) if verify.sequences == 1 => {
                batch.drafted = Some(batch.drafted.unwrap_or(0).max(verify.nodes));
            }
            Work::Verify(_) | Work::Stream(_) => {}
        }
    }

    /// Tokens of the true text whose KV rows it has computed or taken over.
    fn in_memory(&self) -> usize {
        match (self.made, self.job.work) {
            (0, _) => self.job.context.saturating_sub(self.remaining),
            (made, Work::Stream(_)) => self.job.context + made - 1,
            (_, Work::Verify(verify)) => self.job.context + verify.followed,
        }
    }
}

/// Tokens of its draft that are computed.
fn drafted(job: &Job) -> usize {
    match job.work {
        Work::Stream(_) => 0,
        Work::Verify(verify) => verify.computed,
    }
}

fn sequences(job: &Job) -> usize {
    match job.work {
        Work::Stream(_) => 1,
        Work::Verify(verify) => verify.sequences,
    }
}

/// KV tokens reserved for a job at its admission: the maximum that it may need.
fn reserve(job: &Job) -> usize {
    match job.work {
        Work::Stream(tokens) => job.context + tokens,
        Work::Verify(verify) => job.context + verify.computed,
    }
}

#[cfg(test)]
mod tests;
