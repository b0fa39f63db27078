//! The model's thread: continuous batching over lanes.
//!
//! One thread owns the model, so it needs no locks. In each turn it drops jobs whose receivers are
//! gone, gives lanes to waiting jobs, runs all short pieces in one batch (decode steps, drafts,
//! ends of prompts), and then a limited piece of the long prompts. So a long prompt delays the
//! other jobs by one piece at a time. Where the model says that a turn is one step, as on a GPU,
//! the long prompts get what the others leave of its tokens.
//!
//! A client that verifies comes back with its next draft right after an answer. Two such clients
//! would take turns, each in separate runs, so a turn of verify requests alone begins a little
//! later if those of the last turn are about to come back.
//!
//! What a grammar allows is found on other threads. A job whose grammar has not determined yet what
//! may follow its last token sits out turns, so a hostile grammar delays nothing but its output.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::thread;
use std::time::{Duration, Instant};

use crate::forward::{Behind, Feed, Forward, Lane, Logits, ModelConfig};
use crate::target::active::{Active, Next, Piece};
use crate::target::job::{Failure, Job};
use crate::target::metrics::{Metrics, RunKind};
use crate::target::prefix::{Lanes, common};

/// Longest piece that shares a run with decode steps, tokens; a run pads every lane to its longest
/// piece.
const SHORT: usize = 32;
/// Prompt tokens per turn while other jobs wait for their next token.
const CHUNK_SHARED: usize = 128;
/// Prompt tokens per turn while no other job does, and none did in the turn before: between two
/// verify requests of a client there is a turn without it.
const CHUNK_ALONE: usize = 512;
/// Longest wait for the next verify requests of clients whose last ones were just answered.
const COMES_BACK: Duration = Duration::from_millis(5);
/// The same, as a share of the last turn.
const COMES_BACK_SHARE: f64 = 0.2;
/// After waits in vain, each skips twice as many turns as the one before, up to this many.
const MOST_SKIPPED: u32 = 32;
/// Longest wait for grammars while other jobs are ready: a usual one takes a tenth of this.
const GRAMMARS: Duration = Duration::from_millis(1);
/// Time between two looks at grammars that say nothing.
const SILENT: Duration = Duration::from_millis(100);
/// A job waits if a running one will compute at least this many more of its tokens than are in the
/// lanes.
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
            had_short: false,
            verified: 0,
            shares_steps: false,
            took: Duration::ZERO,
            in_vain: 0,
            skip: 0,
        };
        thread::Builder::new().name("model".to_owned()).spawn(move || scheduler.serve(&queue))?;
        Ok(Self { jobs, config })
    }

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
    /// The last turn had short pieces, and the model did not rest since.
    had_short: bool,
    /// Verify requests that the last turn answered.
    verified: usize,
    /// A turn is one step, as on a GPU: an engine there does not wait.
    shares_steps: bool,
    /// Duration of the last turn.
    took: Duration,
    /// Number of such turns that begin without waiting, after the last wait was in vain.
    in_vain: u32,
    skip: u32,
}

impl Scheduler {
    fn serve(mut self, queue: &Receiver<Vec<Job>>) {
        while self.take_waiting(queue) {
            // Those that wait already, and those that are about to come back.
            let clients = self.waiting.len() + std::mem::take(&mut self.verified);
            if self.waiting.is_empty() && self.ready().is_empty() {
                self.model.rest();
                self.had_short = false;
                match self.receive(queue) {
                    Ok(jobs) => self.waiting.extend(jobs),
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => return,
                }
            }
            self.wait_for_others(queue, clients);
            self.wait_for_grammars(queue);
            self.turn();
        }
    }

    /// Waits for jobs, or for a grammar.
    fn receive(&self, queue: &Receiver<Vec<Job>>) -> Result<Vec<Job>, RecvTimeoutError> {
        if self.active.is_empty() {
            return queue.recv().map_err(|_| RecvTimeoutError::Disconnected);
        }
        queue.recv_timeout(SILENT)
    }

    /// The jobs that can take part in a run.
    fn ready(&mut self) -> Vec<usize> {
        let ready = self.active.iter_mut().enumerate().filter_map(|(at, job)| job.is_ready().then_some(at));
        ready.collect()
    }

    /// Lets the grammars of the last turn's tokens say what may follow, if that takes no time to
    /// speak of.
    fn wait_for_grammars(&mut self, queue: &Receiver<Vec<Job>>) {
        let until = Instant::now() + GRAMMARS.min(self.took.mul_f64(COMES_BACK_SHARE));
        while (1..self.active.len()).contains(&self.ready().len()) {
            let wait = until.saturating_duration_since(Instant::now());
            let Ok(jobs) = queue.recv_timeout(wait) else { return };
            self.waiting.extend(jobs);
        }
    }

    /// Takes the jobs that have come; false if no more can come.
    fn take_waiting(&mut self, queue: &Receiver<Vec<Job>>) -> bool {
        loop {
            match queue.try_recv() {
                Ok(jobs) => self.waiting.extend(jobs),
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
    }

    /// Waits for the verify requests of these clients, whose last ones were just answered, if there
    /// is nothing to run but other verify requests.
    fn wait_for_others(&mut self, queue: &Receiver<Vec<Job>>, clients: usize) {
        let is_verify = |job: &Job| matches!(job, Job::Verify(_));
        if self.shares_steps || !self.active.is_empty() {
            return;
        }
        let complete = clients.min(self.model.config().lanes);
        if self.waiting.len() >= complete {
            return;
        }
        if self.skip > 0 {
            self.skip -= 1;
            return;
        }
        // The time of waiting is not the model's.
        self.model.rest();
        let until = Instant::now() + COMES_BACK.min(self.took.mul_f64(COMES_BACK_SHARE));
        while self.waiting.len() < complete && self.waiting.iter().all(is_verify) {
            let wait = until.saturating_duration_since(Instant::now());
            let Ok(jobs) = queue.recv_timeout(wait) else {
                self.in_vain = (2 * self.in_vain).clamp(1, MOST_SKIPPED);
                self.skip = self.in_vain;
                return;
            };
            self.waiting.extend(jobs);
        }
        self.in_vain = 0;
    }

    fn turn(&mut self) {
        let began = Instant::now();
        self.forget();
        self.admit();
        self.report();
        let ready = self.ready();
        if ready.is_empty() {
            return;
        }
        let (short, long): (Vec<usize>, Vec<usize>) =
            ready.into_iter().partition(|&at| self.active.get(at).is_some_and(|job| job.pending() <= SHORT));
        let had_short = std::mem::replace(&mut self.had_short, !short.is_empty());
        let tokens = self.model.begin_turn();
        self.shares_steps = tokens.is_some();
        let chunk = match tokens {
            Some(tokens) => tokens.saturating_sub(self.pending(&short)).max(1),
            None if short.is_empty() && !had_short => CHUNK_ALONE,
            None => CHUNK_SHARED,
        };
        let mut over = self.step(&short, usize::MAX);
        over.extend(self.step(&long, chunk));
        over.sort_unstable_by_key(|&(at, _)| std::cmp::Reverse(at));
        for (at, next) in over {
            // In order of arrival: the first long prompt is the one that gets the budget.
            let job = self.active.remove(at);
            self.verified += usize::from(matches!(job.job, Job::Verify(_)));
            self.end(job, next);
        }
        self.took = began.elapsed();
        self.report();
    }

    /// Tokens that these jobs are still to compute.
    fn pending(&self, jobs: &[usize]) -> usize {
        jobs.iter().filter_map(|&at| self.active.get(at)).map(Active::pending).sum()
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
        let cached = self.lanes.longest_match(wanted, most);
        promised.is_some_and(|promised| promised > cached + WORTH_WAITING)
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

    /// Lets the head draft, in one run, for all jobs of a batch that request it.
    fn propose(&mut self, batch: &[(usize, Lane, Piece)], logits: &Logits) {
        let openings = batch.iter().enumerate().filter_map(|(feed, (at, _, _))| {
            let (row, token, draws) = self.active.get(*at)?.opening()?;
            Some((*at, Behind { taps: logits.taps(feed, row)?, token, draws }))
        });
        let (jobs, behind): (Vec<usize>, Vec<Behind<'_>>) = openings.unzip();
        if behind.is_empty() {
            return;
        }
        let started = Instant::now();
        let proposed = self.model.propose(&behind);
        self.metrics.step(RunKind::Draft, started.elapsed(), 0);
        for (at, steps) in jobs.into_iter().zip(proposed) {
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
                        tracing::error!(%error, "an accepted branch could not be committed");
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

fn kind_of(batch: &[(usize, Lane, Piece)]) -> RunKind {
    if batch.iter().any(|(_, _, piece)| piece.has_draft()) {
        RunKind::Verify
    } else if batch.iter().all(|(_, _, piece)| piece.tokens.len() == 1) {
        RunKind::Decode
    } else {
        RunKind::Prefill
    }
}
