//! One replica: a queue, continuous batching in steps, a prefix cache, and memory that ends.
//!
//! A step takes every running sequence: one token of each that decodes, then prompts in chunks up to the step's token
//! limit, in the order in which they were admitted. A verify call is a prompt whose last tokens are the draft; the step
//! that computes its last token answers it. What is cancelled stays in the step that is running.

use std::collections::{HashMap, VecDeque};

use super::later;
use super::profile::{Batch, Curve, Jitter, Paced, Shape};
use crate::units::Tick;

/// Names a job.
pub type JobId = u64;

/// What an engine is asked to do.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Job {
    /// Its name.
    pub id: JobId,
    /// The text it belongs to: calls for the same text share its prefix in the cache.
    pub text: u64,
    /// Tokens of the context.
    pub context: usize,
    /// What is wanted.
    pub work: Work,
}

/// What is wanted of a job.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Work {
    /// So many tokens, one by one.
    Stream(usize),
    /// A draft judged.
    Verify(Verify),
}

/// A draft to be judged.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Verify {
    /// Drafted tokens.
    pub nodes: usize,
    /// Sequences that it takes.
    pub sequences: usize,
    /// Tokens computed behind the context, over all sequences.
    pub computed: usize,
    /// How many of the drafted tokens are the true text, and so stay useful in the cache.
    pub followed: usize,
}

/// How the engine is set up.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineSpec {
    /// Pace and sizes.
    pub shape: Shape,
    /// What disturbs its steps.
    pub jitter: Jitter,
    /// Whether what has been computed for a text is kept for its next call.
    pub prefix_cache: bool,
    /// Seconds from a cancel's arrival until the sequence is gone.
    pub cancel: f64,
}

impl EngineSpec {
    /// A paced server: no jitter, a prefix cache of single tokens, and room for everything.
    pub fn paced(paced: Paced) -> Self {
        let shape = Shape { pace: Curve::Paced(paced), sequences: 64, kv: 1 << 24, chunk: 1 << 20, block: 1 };
        Self { shape, jitter: Jitter::NONE, prefix_cache: true, cancel: 0.0 }
    }
}

/// A token or a verdict that the engine has produced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Produced {
    /// The job.
    pub job: JobId,
    /// Which token of its ride, counted from 0; 0 for a verdict.
    pub number: usize,
    /// Nothing more comes of the job.
    pub last: bool,
}

#[derive(Clone, Debug)]
struct Running {
    job: Job,
    /// Tokens to be computed before the next output.
    left: usize,
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

/// What the engine has computed so far, in tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Computed {
    /// In all.
    pub all: u64,
    /// For sequences that had been cancelled before their step ended.
    pub wasted: u64,
    /// Steps.
    pub steps: u64,
}

/// One replica.
#[derive(Debug)]
pub struct Engine {
    spec: EngineSpec,
    seed: u64,
    waiting: VecDeque<Job>,
    running: Vec<Running>,
    /// Prefixes of texts that nothing runs for.
    cached: HashMap<u64, Cached>,
    cached_tokens: usize,
    /// Sequences and KV tokens of what runs.
    sequences: usize,
    kv: usize,
    stepping: bool,
    /// Calls that the last step left waiting.
    left_waiting: usize,
    computed: Computed,
}

impl Engine {
    /// An idle engine.
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
            left_waiting: 0,
            computed: Computed::default(),
        }
    }

    /// Takes a job; [`Engine::start`] begins it.
    pub fn submit(&mut self, job: Job) {
        self.waiting.push_back(job);
    }

    /// Drops a job. In a step that is running it is computed to the end.
    pub fn cancel(&mut self, id: JobId, now: Tick) {
        self.waiting.retain(|job| job.id != id);
        let Some(place) = self.running.iter().position(|running| running.job.id == id) else { return };
        if self.stepping {
            if let Some(running) = self.running.get_mut(place) {
                running.gone = true;
            }
        } else {
            self.end(place, now);
        }
    }

    /// Sequences that run.
    pub fn running(&self) -> usize {
        self.sequences
    }

    /// Calls that found no room when the last step began. Those that have come since are not counted yet, as an engine
    /// that reports after each step counts.
    pub fn waiting(&self) -> usize {
        self.left_waiting
    }

    /// Share of the KV memory that running sequences use.
    pub fn kv_usage(&self) -> f64 {
        self.kv as f64 / self.spec.shape.kv.max(1) as f64
    }

    /// What it has computed.
    pub fn computed(&self) -> Computed {
        self.computed
    }

    /// Whether a step is running.
    pub fn is_stepping(&self) -> bool {
        self.stepping
    }

    /// Whether a step could begin.
    pub fn has_work(&self) -> bool {
        !self.stepping && (!self.running.is_empty() || !self.waiting.is_empty())
    }

    /// Admits what there is room for and begins a step, if none is running and there is something to compute: when it
    /// ends.
    pub fn start(&mut self, now: Tick) -> Option<Tick> {
        if self.stepping {
            return None;
        }
        while let Some(job) = self.waiting.front().copied().filter(|job| self.has_room(job)) {
            self.waiting.pop_front();
            self.admit(job);
        }
        self.left_waiting = self.waiting.len();
        let batch = self.take()?;
        self.stepping = true;
        self.computed.steps += 1;
        self.computed.all += batch.tokens as u64;
        let seconds = self.spec.shape.pace.seconds(batch) * self.spec.jitter.factor(self.seed, now);
        Some(later(now, seconds))
    }

    fn has_room(&self, job: &Job) -> bool {
        let (sequences, kv) = (self.sequences + sequences(job), self.kv + reserve(job));
        self.running.is_empty() || (sequences <= self.spec.shape.sequences && kv <= self.spec.shape.kv)
    }

    fn admit(&mut self, job: Job) {
        let known = if self.spec.prefix_cache { self.known(job.text) } else { 0 };
        let block = self.spec.shape.block.max(1);
        // The last token is computed in any case: its row is what is wanted.
        let known = (known.min(job.context.saturating_sub(1)) / block) * block;
        let fresh = job.context - known;
        let left = match job.work {
            Work::Stream(_) => fresh,
            Work::Verify(verify) => fresh * verify.sequences + verify.computed,
        };
        self.sequences += sequences(&job);
        self.kv += reserve(&job);
        self.make_room();
        self.running.push(Running { job, left, taken: 0, made: 0, gone: false });
    }

    /// Tokens of a text that are in memory: kept from earlier, or held by a call that still runs. What was kept is the
    /// new call's from now on.
    fn known(&mut self, text: u64) -> usize {
        let running = self.running.iter().filter(|running| running.job.text == text);
        let held = running.map(Running::in_memory).max().unwrap_or(0);
        self.forget(text).max(held)
    }

    fn forget(&mut self, text: u64) -> usize {
        let known = self.cached.remove(&text).map_or(0, |cached| cached.tokens);
        self.cached_tokens -= known;
        known
    }

    /// Drops the prefixes that were used longest ago, until what runs has its memory.
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
                if (running.left > 1) != prompts {
                    continue;
                }
                running.taken = running.left.min(budget);
                budget -= running.taken;
                if running.taken > 0 {
                    running.join(&mut batch);
                }
            }
        }
        (batch.tokens > 0).then_some(batch)
    }

    /// The step that is running has ended: what it has produced goes to `out`. Call [`Engine::start`] then.
    pub fn step_ended(&mut self, now: Tick, out: &mut Vec<Produced>) {
        self.stepping = false;
        let mut place = 0;
        while let Some(running) = self.running.get_mut(place) {
            let taken = std::mem::take(&mut running.taken);
            running.left -= taken;
            if running.gone {
                self.computed.wasted += taken as u64;
            }
            let over = running.gone || (running.left == 0 && taken > 0 && self.produce(place, out));
            if over { self.end(place, now) } else { place += 1 }
        }
    }

    /// One more output of this job; whether it was the last.
    fn produce(&mut self, place: usize, out: &mut Vec<Produced>) -> bool {
        let Some(running) = self.running.get_mut(place) else { return true };
        let number = running.made;
        running.made += 1;
        running.left = 1;
        let last = match running.job.work {
            Work::Stream(tokens) => running.made >= tokens,
            Work::Verify(_) => true,
        };
        out.push(Produced { job: running.job.id, number, last });
        last
    }

    fn end(&mut self, place: usize, now: Tick) {
        let running = self.running.remove(place);
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
        if self.taken < self.left {
            return;
        }
        batch.outputs += sequences;
        match self.job.work {
            // A fan-out is so many plain sequences.
            Work::Verify(verify) if verify.sequences == 1 => {
                batch.drafted = Some(batch.drafted.unwrap_or(0).max(verify.nodes));
            }
            Work::Verify(_) | Work::Stream(_) => {}
        }
    }

    /// Tokens of the true text whose KV rows it has computed or taken over.
    fn in_memory(&self) -> usize {
        match (self.made, self.job.work) {
            (0, _) => self.job.context.saturating_sub(self.left),
            (made, Work::Stream(_)) => self.job.context + made - 1,
            (_, Work::Verify(verify)) => self.job.context + verify.followed,
        }
    }
}

fn sequences(job: &Job) -> usize {
    match job.work {
        Work::Stream(_) => 1,
        Work::Verify(verify) => verify.sequences,
    }
}

/// KV tokens kept for a job from its admission on: all that it may need.
fn reserve(job: &Job) -> usize {
    match job.work {
        Work::Stream(tokens) => job.context + tokens,
        Work::Verify(verify) => job.context + verify.computed,
    }
}

#[cfg(test)]
mod tests;
