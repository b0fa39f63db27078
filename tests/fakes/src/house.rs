//! Common state of every engine: a model, a cache, a pace, gauges, a start time, and the state that
//! tests may read and change.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{OwnedRwLockWriteGuard, OwnedSemaphorePermit, RwLock, Semaphore};

use super::cache::Cache;
use super::fault::Faults;
use super::http::Request;
use super::toy::{self, Temper, Toy};

/// Simulated durations, all zero by default.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pace {
    /// One step of the engine, for any batch.
    pub step: Duration,
    /// Each token that is computed in a step.
    pub per_token: Duration,
    /// From a client's disconnect to the end of its sequences.
    pub cancel: Duration,
}

/// Defaults of the server's operator or model for parameters that a request leaves out.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Defaults {
    pub temperature: Option<f64>,
    pub top_p: Option<f64>,
    pub top_k: Option<i64>,
    pub min_p: Option<f64>,
    pub repetition_penalty: Option<f64>,
    /// Taken by vLLM from 0.32 on.
    pub presence_penalty: Option<f64>,
    /// As [`Self::presence_penalty`].
    pub frequency_penalty: Option<f64>,
    pub max_new_tokens: Option<u64>,
    /// Limits a request that sets its own limit, too (vLLM: `--override-generation-config`).
    pub caps: bool,
}

/// Simulated load of other clients, added to the real one in the gauges.
#[derive(Clone, Copy, Debug, Default)]
pub struct Load {
    pub running: usize,
    pub waiting: usize,
    pub kv: f64,
}

/// Counters of a server.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// Calls by path.
    pub calls: BTreeMap<String, usize>,
    /// The path and `traceparent` of every call that has one, in their order.
    pub traced: Vec<(String, String)>,
    pub connections: usize,
    /// Sequences begun.
    pub sequences: usize,
    /// Prompt tokens: received, cached, and computed.
    pub prompt: usize,
    pub cached: usize,
    /// Total computed tokens: uncached prompt tokens, and output tokens fed back.
    pub computed: usize,
    pub generated: usize,
    pub finished: usize,
    /// Calls whose client disconnected before the answer was complete.
    pub cancelled: usize,
}

impl Tally {
    pub fn calls_of(&self, path: &str) -> usize {
        self.calls.get(path).copied().unwrap_or(0)
    }
}

/// Configuration of a server.
#[derive(Clone, Debug)]
pub struct Setup {
    pub model: String,
    pub temper: Temper,
    /// Folder of the tokenizer and the chat template.
    pub words: PathBuf,
    pub defaults: Defaults,
    pub pace: Pace,
    /// Longest context.
    pub max_len: usize,
    /// Maximum number of running sequences; others wait.
    pub max_running: usize,
    /// Tokens per block or page of the cache.
    pub block: usize,
    /// Total number of blocks.
    pub blocks: usize,
    /// A reasoning parser moves the text before this marker to `reasoning_content`.
    pub reasoning_end: Option<String>,
    /// A tool parser takes the text between these markers as the arguments of a call, if a request
    /// has tools.
    pub tool_call: Option<(String, String)>,
    /// The tool parser is vLLM's `hermes`; `None`: it is not.
    pub hermes: Option<Hermes>,
    /// Texts that the model writes after certain prompts.
    pub scripts: Vec<Script>,
}

/// How the parser `hermes` works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hermes {
    /// As in the versions that were read.
    AsRead,
    /// It leaves the brace of the call at the end of the arguments.
    LeavesBrace,
}

/// A text that the model writes, after which it ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Script {
    /// The end of the prompt after which it is written.
    pub after: String,
    pub text: String,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            model: "toy".to_owned(),
            temper: Temper::default(),
            words: toy::folder(),
            defaults: Defaults::default(),
            pace: Pace::default(),
            max_len: 40_960,
            max_running: 256,
            block: 16,
            blocks: 16_384,
            reasoning_end: None,
            tool_call: None,
            hermes: None,
            scripts: Vec::new(),
        }
    }
}

pub struct House {
    pub setup: Setup,
    pub toy: Toy,
    pub cache: Mutex<Cache>,
    pub pace: Mutex<Pace>,
    pub defaults: Mutex<Defaults>,
    pub pretend: Mutex<Load>,
    pub faults: Faults,
    tally: Mutex<Tally>,
    /// Every request since they were last taken, if a test records them.
    requests: Mutex<Option<Vec<Request>>>,
    /// The tally at the last start: an engine's own counters start from it.
    base: Mutex<Tally>,
    /// Hundredths of a second from 1970 to the last start, the resolution of Linux.
    started: AtomicU64,
    /// Number of weight reloads while it ran.
    reloads: AtomicUsize,
    pub running: Arc<AtomicUsize>,
    waiting: AtomicUsize,
    slots: Arc<Semaphore>,
    /// Held by each running step; a question to the scheduler waits until none runs.
    stepping: Arc<RwLock<()>>,
    steps: AtomicUsize,
    dead: AtomicBool,
    fatal: Mutex<Vec<String>>,
}

impl House {
    pub fn new(setup: Setup) -> Arc<Self> {
        Arc::new(Self {
            toy: Toy::of(&setup.words, setup.temper.clone()).with_scripts(&setup.scripts),
            cache: Mutex::new(Cache::new(setup.block, setup.blocks)),
            pace: Mutex::new(setup.pace),
            defaults: Mutex::new(setup.defaults.clone()),
            pretend: Mutex::default(),
            faults: Faults::default(),
            tally: Mutex::default(),
            requests: Mutex::default(),
            base: Mutex::default(),
            started: AtomicU64::new(now()),
            reloads: AtomicUsize::new(0),
            running: Arc::default(),
            waiting: AtomicUsize::new(0),
            slots: Arc::new(Semaphore::new(setup.max_running)),
            stepping: Arc::default(),
            steps: AtomicUsize::new(0),
            dead: AtomicBool::new(false),
            fatal: Mutex::default(),
            setup,
        })
    }

    pub fn tally(&self) -> Tally {
        self.tally.lock().clone()
    }

    pub fn note(&self, change: impl FnOnce(&mut Tally)) {
        change(&mut self.tally.lock());
    }

    /// Records requests from now on.
    pub fn keep_requests(&self) {
        self.requests.lock().get_or_insert_default();
    }

    /// The requests since the last call.
    pub fn take_requests(&self) -> Vec<Request> {
        self.requests.lock().as_mut().map(std::mem::take).unwrap_or_default()
    }

    pub(crate) fn came(&self, request: &Request) {
        if let Some(requests) = self.requests.lock().as_mut() {
            requests.push(request.clone());
        }
    }

    /// A counter since the last start, as in the engine's own metrics.
    pub fn since_start(&self, counter: impl Fn(&Tally) -> usize) -> usize {
        counter(&self.tally.lock()) - counter(&self.base.lock())
    }

    /// Hundredths of a second from 1970 to the last start.
    pub fn started(&self) -> u64 {
        self.started.load(Ordering::SeqCst)
    }

    /// Sets the start time.
    pub fn start_at(&self, hundredths: u64) {
        self.started.store(hundredths, Ordering::SeqCst);
    }

    /// Replaces the weights under the same name, in the same process.
    pub fn reload(&self) {
        self.reloads.fetch_add(1, Ordering::SeqCst);
    }

    pub fn reloads(&self) -> usize {
        self.reloads.load(Ordering::SeqCst)
    }

    /// The version of the weights, as named by the operator.
    pub fn weight_version(&self) -> String {
        match self.reloads() {
            0 => "default".to_owned(),
            reloads => format!("v{reloads}"),
        }
    }

    /// Starts a new process: a later start time, an empty cache, counters from zero, alive again.
    pub fn renew(&self) {
        self.started.fetch_max(now(), Ordering::SeqCst);
        self.started.fetch_add(1, Ordering::SeqCst);
        self.cache.lock().clear();
        *self.base.lock() = self.tally();
        self.dead.store(false, Ordering::SeqCst);
    }

    /// Records a call that would kill the real engine.
    pub fn kill_by(&self, what: &str) {
        self.fatal.lock().push(what.to_owned());
        self.dead.store(true, Ordering::SeqCst);
    }

    pub fn is_dead(&self) -> bool {
        self.dead.load(Ordering::SeqCst)
    }

    /// The calls that would have killed or corrupted the real engine. Tests assert that there are
    /// none.
    pub fn fatal(&self) -> Vec<String> {
        self.fatal.lock().clone()
    }

    /// Running sequences, as shown in the gauges.
    pub fn running(&self) -> usize {
        self.running.load(Ordering::SeqCst) + self.pretend.lock().running
    }

    pub fn waiting(&self) -> usize {
        self.waiting.load(Ordering::SeqCst) + self.pretend.lock().waiting
    }

    pub fn kv_usage(&self) -> f64 {
        self.pretend.lock().kv.max(if self.running.load(Ordering::SeqCst) > 0 {
            self.cache.lock().usage()
        } else {
            0.0
        })
    }

    /// Acquires a slot for each of `sequences` sequences; waits until they are free.
    pub async fn admit(self: &Arc<Self>, sequences: usize) -> Slots {
        let wanted = sequences.min(self.setup.max_running) as u32;
        let queued = Queued::new(self, sequences);
        let permit = Arc::clone(&self.slots).acquire_many_owned(wanted).await.expect("never closed");
        drop(queued);
        self.running.fetch_add(sequences, Ordering::SeqCst);
        Slots(Some(Taken { house: Arc::clone(self), sequences, _permit: permit }))
    }

    /// Waits until the running steps have ended. No step begins while the result is held: a step
    /// that takes long, as others see it.
    pub async fn scheduler(&self) -> OwnedRwLockWriteGuard<()> {
        Arc::clone(&self.stepping).write_owned().await
    }

    /// Number of steps so far.
    pub fn steps(&self) -> usize {
        self.steps.load(Ordering::SeqCst)
    }

    /// Running sequences of real requests.
    pub fn really_running(&self) -> usize {
        self.running.load(Ordering::SeqCst)
    }

    /// One step of the engine that computes `tokens` tokens.
    pub async fn compute(&self, tokens: usize) {
        self.note(|tally| tally.computed += tokens);
        self.steps.fetch_add(1, Ordering::SeqCst);
        let _step = self.stepping.read().await;
        let pace = *self.pace.lock();
        let wait = pace.step + pace.per_token * tokens as u32;
        if !wait.is_zero() {
            tokio::time::sleep(wait).await;
        }
    }
}

struct Queued<'a>(&'a House, usize);

impl<'a> Queued<'a> {
    fn new(house: &'a House, sequences: usize) -> Self {
        house.waiting.fetch_add(sequences, Ordering::SeqCst);
        Self(house, sequences)
    }
}

impl Drop for Queued<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(self.1, Ordering::SeqCst);
    }
}

/// Slots in the running batch; released on drop, after the cancellation time if the sequences are
/// not finished.
pub struct Slots(Option<Taken>);

impl Slots {
    /// Releases the slots of finished sequences at once.
    pub fn done(mut self) {
        self.0 = None;
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        let Some(taken) = self.0.take() else { return };
        let wait = taken.house.pace.lock().cancel;
        if !wait.is_zero() {
            tokio::spawn(async move {
                tokio::time::sleep(wait).await;
                drop(taken);
            });
        }
    }
}

/// Slots that are released at once on drop, also while a runtime shuts down and no task can wait.
struct Taken {
    house: Arc<House>,
    sequences: usize,
    _permit: OwnedSemaphorePermit,
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.house.running.fetch_sub(self.sequences, Ordering::SeqCst);
    }
}

fn now() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    since.as_millis() as u64 / 10
}
