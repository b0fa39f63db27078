//! The model's thread: continuous batching over lanes.
//!
//! One thread owns the model, so it needs no locks. In each turn it drops jobs whose receivers are
//! gone, gives lanes to waiting jobs, runs all short pieces in one batch (decode steps, drafts,
//! ends of prompts), and then a limited piece of the long prompts. So a long prompt delays the
//! other jobs by one piece at a time.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread;
use std::time::Instant;

use crate::forward::{Behind, Feed, Forward, Lane, Logits, ModelConfig};
use crate::target::active::{Active, Next, Piece};
use crate::target::job::{Failure, Job};
use crate::target::metrics::{Kind, Metrics};
use crate::target::prefix::{Lanes, common};

/// Longest piece that shares a run with decode steps, tokens; a run pads every lane to its longest
/// piece.
const SHORT: usize = 32;
/// Prompt tokens per turn while other jobs wait for their next token.
const CHUNK_SHARED: usize = 128;
/// Prompt tokens per turn while no other job does.
const CHUNK_ALONE: usize = 512;
/// A job waits if a running one will compute at least this many more of its tokens than the lanes
/// hold.
const WORTH_WAITING: usize = 32;

/// Handle of the model's thread. Dropping the last one ends the thread.
#[derive(Clone, Debug)]
pub struct Engine {
    jobs: Sender<Vec<Job>>,
    config: Arc<ModelConfig>,
}

impl Engine {
    /// Starts the thread that runs the model.
    ///
    /// # Errors
    /// The system cannot create a thread.
    pub fn start(model: Box<dyn Forward>, metrics: Arc<Metrics>) -> std::io::Result<Self> {
        let (jobs, queue) = channel();
        let config = Arc::new(model.config().clone());
        metrics.limit.set(config.lanes as i64);
        let scheduler = Scheduler {
            model,
            metrics,
            lanes: Lanes::default(),
            waiting: VecDeque::new(),
            active: Vec::new(),
        };
        thread::Builder::new().name("model".to_owned()).spawn(move || scheduler.serve(&queue))?;
        Ok(Self { jobs, config })
    }

    /// Properties of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Sends jobs to the thread; jobs sent together are taken up together. Returns `false` if the
    /// thread has ended; the receivers of the jobs then see their channels closed.
    pub fn submit(&self, jobs: Vec<Job>) -> bool {
        self.jobs.send(jobs).is_ok()
    }
}

struct Scheduler {
    model: Box<dyn Forward>,
    metrics: Arc<Metrics>,
    lanes: Lanes,
    waiting: VecDeque<Job>,
    active: Vec<Active>,
}

impl Scheduler {
    fn serve(mut self, queue: &Receiver<Vec<Job>>) {
        loop {
            loop {
                match queue.try_recv() {
                    Ok(jobs) => self.waiting.extend(jobs),
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => return,
                }
            }
            if !self.waiting.is_empty() || !self.active.is_empty() {
                self.turn();
                continue;
            }
            self.model.rest();
            match queue.recv() {
                Ok(jobs) => self.waiting.extend(jobs),
                Err(_) => return,
            }
        }
    }

    fn turn(&mut self) {
        self.forget();
        self.admit();
        self.report();
        let (short, long): (Vec<usize>, Vec<usize>) = (0..self.active.len())
            .partition(|&at| self.active.get(at).is_some_and(|job| job.pending() <= SHORT));
        let chunk = if short.is_empty() { CHUNK_ALONE } else { CHUNK_SHARED };
        let mut over = self.step(&short, usize::MAX);
        over.extend(self.step(&long, chunk));
        over.sort_unstable_by_key(|&(at, _)| std::cmp::Reverse(at));
        for (at, next) in over {
            // In order of arrival: the first long prompt is the one that gets the budget.
            let job = self.active.remove(at);
            self.end(job, next);
        }
        self.report();
    }

    /// Drops the jobs whose receivers are gone and frees their lanes.
    fn forget(&mut self) {
        self.waiting.retain(|job| !job.is_gone());
        let active = std::mem::take(&mut self.active).into_iter();
        let (gone, active): (Vec<_>, Vec<_>) = active.partition(|active| active.job.is_gone());
        self.active = active;
        for job in gone {
            self.metrics.dropped.inc();
            job.count(&self.metrics);
            self.lanes.free(job.slot);
        }
    }

    /// Gives lanes to waiting jobs in order of arrival. A job lets others go first while a running
    /// job computes a long common prefix.
    fn admit(&mut self) {
        let mut later = VecDeque::new();
        while let Some(job) = self.waiting.pop_front() {
            if self.is_worth_waiting(&job) {
                later.push_back(job);
                continue;
            }
            match self.lanes.acquire(self.model.as_mut(), job.wanted(), job.reusable()) {
                Ok(Some((slot, cached))) => {
                    self.metrics.prompt_tokens.inc_by(job.wanted().len() as u64);
                    self.metrics.cached_tokens.inc_by(cached as u64);
                    self.active.push(Active::new(slot, cached, job));
                }
                Ok(None) => {
                    later.push_back(job);
                    break;
                }
                Err(error) => job.fail(error.to_string().into()),
            }
        }
        later.append(&mut self.waiting);
        self.waiting = later;
    }

    fn is_worth_waiting(&self, job: &Job) -> bool {
        let (wanted, most) = (job.wanted(), job.reusable());
        let promised = self.active.iter().map(|active| common(&active.tokens, wanted).min(most)).max();
        let held = self.lanes.held(wanted, most);
        promised.is_some_and(|promised| promised > held + WORTH_WAITING)
    }

    /// Runs one batch of these jobs, with at most `budget` tokens of their sequences. Returns the
    /// finished jobs with their results.
    fn step(&mut self, jobs: &[usize], mut budget: usize) -> Vec<(usize, Result<Next, Failure>)> {
        let mut batch: Vec<(usize, Lane, Piece)> = Vec::with_capacity(jobs.len());
        for &at in jobs {
            let Some(active) = self.active.get(at) else { continue };
            let Some(lane) = self.lanes.lane(active.slot) else { continue };
            if budget == 0 {
                break;
            }
            let piece = active.piece(budget);
            budget = budget.saturating_sub(piece.tokens.len());
            batch.push((at, lane, piece));
        }
        if batch.is_empty() {
            return Vec::new();
        }
        self.run(&batch)
    }

    fn run(&mut self, batch: &[(usize, Lane, Piece)]) -> Vec<(usize, Result<Next, Failure>)> {
        let feeds: Vec<Feed<'_>> = batch.iter().map(|(_, lane, piece)| piece.feed(*lane)).collect();
        let started = Instant::now();
        let logits = self.model.run(&feeds);
        self.metrics.step(
            kind_of(batch),
            started.elapsed(),
            feeds.iter().map(|feed| feed.tokens.len()).sum(),
        );
        let mut outcomes = Vec::new();
        for (feed, (at, _, piece)) in batch.iter().enumerate() {
            let Some(active) = self.active.get_mut(*at) else { continue };
            let next = match &logits {
                Ok(logits) => {
                    self.lanes.append(active.slot, &piece.tokens);
                    active.take(piece, logits, feed)
                }
                Err(error) => Err(error.to_string().into()),
            };
            outcomes.push((*at, next));
        }
        // Only tokens that the head drafts behind wait for it.
        self.report_tokens(batch, |active| active.opening().is_none());
        if let Ok(logits) = &logits {
            self.propose(batch, logits);
        }
        self.report_tokens(batch, |_| true);
        outcomes.retain(|(_, next)| !matches!(next, Ok(Next::Continue)));
        outcomes
    }

    /// Reports the last tokens of the jobs of a batch that `is_due` selects.
    fn report_tokens(&mut self, batch: &[(usize, Lane, Piece)], is_due: impl Fn(&Active) -> bool) {
        for (at, _, _) in batch {
            if let Some(active) = self.active.get_mut(*at).filter(|active| is_due(active)) {
                active.report();
            }
        }
    }

    /// Lets the head draft, in one run, for all jobs of a batch that ask for it.
    fn propose(&mut self, batch: &[(usize, Lane, Piece)], logits: &Logits) {
        let asks = batch.iter().enumerate().filter_map(|(feed, (at, _, _))| {
            let (row, token) = self.active.get(*at)?.opening()?;
            Some((*at, Behind { taps: logits.taps(feed, row)?, token }))
        });
        let (asked, behind): (Vec<usize>, Vec<Behind<'_>>) = asks.unzip();
        if behind.is_empty() {
            return;
        }
        let started = Instant::now();
        let proposed = self.model.propose(&behind);
        self.metrics.step(Kind::Draft, started.elapsed(), 0);
        for (at, steps) in asked.into_iter().zip(proposed) {
            if let Some(active) = self.active.get_mut(at) {
                active.propose(steps);
            }
        }
    }

    /// Sends the answer first and tidies up the lane afterwards.
    fn end(&mut self, job: Active, next: Result<Next, Failure>) {
        let slot = job.slot;
        match next {
            Ok(Next::Commit { base, path }) => {
                job.finish(&self.metrics);
                match self.lanes.commit(self.model.as_mut(), slot, base, &path) {
                    Ok(()) => self.lanes.free(slot),
                    Err(error) => {
                        tracing::error!(%error, "an accepted branch could not be kept");
                        self.lanes.discard(self.model.as_mut(), slot);
                    }
                }
            }
            Ok(Next::Continue | Next::Done) => {
                job.finish(&self.metrics);
                self.lanes.free(slot);
            }
            Err(why) => {
                if let Failure::Run(why) = &why {
                    tracing::error!(%why, "a run of the model failed");
                }
                job.count(&self.metrics);
                self.lanes.discard(self.model.as_mut(), slot);
                job.job.fail(why);
            }
        }
    }

    fn report(&self) {
        let config = self.model.config();
        let capacity = (config.lanes * config.context).max(1);
        self.metrics.running.set(self.active.len() as i64);
        self.metrics.waiting.set(self.waiting.len() as i64);
        self.metrics.kv_usage.set(self.lanes.busy_tokens() as f64 / capacity as f64);
    }
}

fn kind_of(batch: &[(usize, Lane, Piece)]) -> Kind {
    if batch.iter().any(|(_, _, piece)| piece.has_draft()) {
        Kind::Verify
    } else if batch.iter().all(|(_, _, piece)| piece.tokens.len() == 1) {
        Kind::Decode
    } else {
        Kind::Prefill
    }
}
