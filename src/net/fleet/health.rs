//! Health of a replica: unreachable, silent, breaker open, disabled by the operator.
//!
//! A successful request reads one atomic and writes none; the lock is taken only while something is
//! wrong, and never across an await. Every change of the state is one log line, with its cause.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use tokio::sync::watch;

use super::breaker::{Breaker, BreakerState};
use super::error::SendErrorKind;
use super::liveness::{Liveness, Look};
use crate::clock::Clock;
use crate::random::SharedSplitMix64;
use foretell_core::units::Tick;

/// Interval of the health checks of a replica that is down, before jitter.
const CHECK_EVERY: Duration = Duration::from_secs(2);

/// Restrictions on new requests to a replica, least first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum HealthState {
    Ready,
    /// It refuses no connection and answers nothing. Unlike the others it may still answer what is
    /// sent now.
    Silent,
    /// The last attempt to reach it failed.
    Down,
    /// Its breaker is open, or half open with a trial under way.
    Broken,
    Disabled,
}

impl HealthState {
    /// The name on the status page and in the admin API.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::Silent => "silent",
            Self::Down => "down",
            Self::Broken => "broken",
            Self::Disabled => "disabled",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastError {
    pub text: String,
    pub at: SystemTime,
}

impl LastError {
    pub fn age(&self) -> Duration {
        self.at.elapsed().unwrap_or_default()
    }
}

/// How a call ended, as far as it depends on the replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// A request that needs the model was answered to its end.
    Good,
    /// It has begun to answer.
    Answering,
    /// It answered, but with a refusal, or a request that does not need the model.
    Reached,
    /// No information: the client was at fault, or has disconnected.
    Undecided,
    Failed(Failing, String),
}

/// Kind of a replica's failure, for the label of the metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failing {
    /// No complete answer was received.
    Call(SendErrorKind),
    /// A 5xx that the request did not cause.
    Status,
}

impl Failing {
    /// Every label of `foretell_replica_errors_total{kind}`.
    const KINDS: [&'static str; 7] = [
        SendErrorKind::Connect.code(),
        SendErrorKind::Timeout.code(),
        SendErrorKind::Closed.code(),
        SendErrorKind::Protocol.code(),
        SendErrorKind::Request.code(),
        "server_error",
        SendErrorKind::Changed.code(),
    ];

    const fn index(self) -> usize {
        match self {
            Self::Call(SendErrorKind::Connect) => 0,
            Self::Call(SendErrorKind::Timeout) => 1,
            Self::Call(SendErrorKind::Closed) => 2,
            Self::Call(SendErrorKind::Protocol) => 3,
            Self::Call(SendErrorKind::Request) => 4,
            Self::Status => 5,
            Self::Call(SendErrorKind::Changed) => 6,
        }
    }
}

#[derive(Debug)]
pub(super) struct Health {
    /// The replica's name and address, for the log.
    label: String,
    url: String,
    breaker: Mutex<Breaker>,
    /// The breaker's state, readable without its lock.
    state: AtomicU8,
    /// The breaker is closed without a recent failure; readable without its lock.
    calm: AtomicBool,
    /// True if the last attempt to reach it succeeded.
    up: AtomicBool,
    /// True if it has answered a request, even with a refusal.
    answered: AtomicBool,
    disabled: AtomicBool,
    liveness: Liveness,
    last_error: Mutex<Option<LastError>>,
    /// Increases whenever it becomes reachable.
    returned: watch::Sender<u64>,
    /// Earliest time of the next health check, microseconds of `clock`.
    check_at: AtomicU64,
    /// Changes of the breaker, by new state.
    transitions: [AtomicU64; 3],
    errors: [AtomicU64; Failing::KINDS.len()],
    rng: SharedSplitMix64,
    clock: Clock,
}

impl Health {
    /// For the replica with this name and address, without restriction.
    pub(super) fn new(label: &str, url: &str) -> Self {
        Self {
            label: label.to_owned(),
            url: url.to_owned(),
            breaker: Mutex::default(),
            state: AtomicU8::new(0),
            calm: AtomicBool::new(true),
            up: AtomicBool::new(true),
            answered: AtomicBool::new(false),
            last_error: Mutex::default(),
            returned: watch::Sender::new(0),
            disabled: AtomicBool::new(false),
            liveness: Liveness::default(),
            check_at: AtomicU64::new(0),
            transitions: Default::default(),
            errors: Default::default(),
            rng: SharedSplitMix64::default(),
            clock: Clock::start(),
        }
    }

    /// True if the last attempt to reach it succeeded, and it answers.
    pub(super) fn is_up(&self) -> bool {
        self.connects() && !self.is_silent()
    }

    fn connects(&self) -> bool {
        self.up.load(Ordering::Relaxed)
    }

    /// True if it refuses no connection and answers nothing.
    pub(super) fn is_silent(&self) -> bool {
        self.liveness.is_silent()
    }

    /// Records that a byte of an answer was received.
    pub(super) fn byte_received(&self) {
        self.liveness.byte_received();
    }

    /// True if it has answered, and no later failure indicates that it would not answer now.
    pub(super) fn is_reachable(&self) -> bool {
        self.answered.load(Ordering::Relaxed) && self.is_up() && self.state() != BreakerState::Open
    }

    /// A counter that increases whenever it becomes reachable.
    pub(super) fn returns(&self) -> watch::Receiver<u64> {
        self.returned.subscribe()
    }

    pub(super) fn last_error(&self) -> Option<LastError> {
        self.last_error.lock().clone()
    }

    pub(super) fn note(&self, text: &str) {
        *self.last_error.lock() = Some(LastError { text: text.to_owned(), at: SystemTime::now() });
    }

    /// Records that it has answered.
    pub(super) fn reached(&self) {
        if !self.answered.load(Ordering::Relaxed) {
            self.answered.store(true, Ordering::Relaxed);
        }
        if !self.connects() && !self.up.swap(true, Ordering::Relaxed) {
            self.byte_received();
            tracing::info!(replica = self.label, url = self.url, "replica is up");
            self.returned.send_modify(|returned| *returned += 1);
        }
    }

    /// Records that it cannot be reached.
    pub(super) fn unreached(&self, cause: &str) {
        self.note(cause);
        self.postpone_check();
        if self.liveness.reset(self.clock.now()) {
            self.turned_by_silence(BreakerState::Closed);
        }
        if self.up.swap(false, Ordering::Relaxed) {
            tracing::warn!(replica = self.label, url = self.url, cause, "replica is down");
        }
    }

    pub(super) fn disable(&self, disabled: bool) {
        self.disabled.store(disabled, Ordering::Relaxed);
    }

    /// The state of the breaker, which silence opens, too.
    pub(super) fn state(&self) -> BreakerState {
        if self.is_silent() { BreakerState::Open } else { self.by_failures() }
    }

    fn by_failures(&self) -> BreakerState {
        let state = BreakerState::ALL.get(usize::from(self.state.load(Ordering::Relaxed)));
        state.copied().unwrap_or(BreakerState::Open)
    }

    /// The current restriction on requests.
    pub(super) fn health_state(&self) -> HealthState {
        if self.disabled.load(Ordering::Relaxed) {
            return HealthState::Disabled;
        }
        if self.is_silent() {
            return HealthState::Silent;
        }
        let admitted = match self.by_failures() {
            BreakerState::Closed => true,
            BreakerState::HalfOpen => self.breaker.lock().admits(self.clock.now()),
            BreakerState::Open => false,
        };
        match (admitted, self.connects()) {
            (false, _) => HealthState::Broken,
            (true, false) => HealthState::Down,
            (true, true) => HealthState::Ready,
        }
    }

    /// Records that a request was assigned to the replica.
    pub(super) fn chosen(&self) {
        if self.by_failures() == BreakerState::HalfOpen {
            self.breaker.lock().begin(self.clock.now());
        }
    }

    /// Records how a call has ended.
    pub(super) fn ended(&self, outcome: Outcome) {
        match outcome {
            Outcome::Good => {
                self.reached();
                if !self.calm.load(Ordering::Relaxed) {
                    self.change("", Breaker::succeeded);
                }
            }
            Outcome::Answering => {
                self.reached();
                if self.by_failures() != BreakerState::Closed {
                    let now = self.clock.now();
                    self.change("", |breaker| breaker.answering(now));
                }
            }
            Outcome::Reached | Outcome::Undecided => {
                if outcome == Outcome::Reached {
                    self.reached();
                }
                if self.by_failures() == BreakerState::HalfOpen {
                    self.change("", Breaker::undecided);
                }
            }
            Outcome::Failed(failing, cause) => {
                self.count(failing);
                if failing == Failing::Call(SendErrorKind::Connect) {
                    self.unreached(&cause);
                } else {
                    self.note(&cause);
                }
                self.failed(&cause);
            }
        }
    }

    /// Counts a failure without an effect on the health state.
    pub(super) fn count(&self, failing: Failing) {
        if let Some(count) = self.errors.get(failing.index()) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn failed(&self, cause: &str) {
        let (now, jitter) = (self.clock.now(), self.rng.fraction());
        self.change(cause, |breaker| breaker.failed(now, jitter));
    }

    fn change(&self, cause: &str, change: impl FnOnce(&mut Breaker)) {
        let mut breaker = self.breaker.lock();
        let before = breaker.state();
        change(&mut breaker);
        let after = breaker.state();
        self.calm.store(breaker.is_calm(), Ordering::Relaxed);
        self.state.store(after as u8, Ordering::Relaxed);
        drop(breaker);
        if before != after {
            self.turned(after);
            self.say(before, after, cause);
        }
    }

    /// Counts a change of the breaker by silence, which changes nothing where failures have opened
    /// it.
    fn turned_by_silence(&self, to: BreakerState) {
        if self.by_failures() == BreakerState::Closed {
            self.turned(to);
        }
    }

    /// Counts a change of the breaker.
    fn turned(&self, to: BreakerState) {
        if let Some(count) = self.transitions.get(to as usize) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Logs a change of the breaker. Only the first opening is a warning: failed trials are
    /// expected.
    fn say(&self, before: BreakerState, after: BreakerState, cause: &str) {
        let (replica, url) = (&self.label, &self.url);
        match (before, after) {
            (BreakerState::Closed, BreakerState::Open) => {
                tracing::warn!(replica, url, cause, "breaker is open: the replica failed repeatedly");
            }
            (_, BreakerState::Open) => {
                tracing::info!(replica, url, cause, "breaker stays open: the trial failed");
            }
            (_, BreakerState::HalfOpen) => {
                tracing::info!(replica, url, "breaker is half open: one request is a trial");
            }
            (_, BreakerState::Closed) => tracing::info!(replica, url, "breaker is closed"),
        }
    }

    /// True if a health check is due; if so, the next one is postponed.
    pub(super) fn wants_check(&self) -> bool {
        let due = match self.by_failures() {
            BreakerState::Open => self.breaker.lock().due(),
            BreakerState::Closed | BreakerState::HalfOpen if self.connects() => None,
            BreakerState::Closed | BreakerState::HalfOpen => Some(Tick(0)),
        };
        let now = self.clock.now();
        let wanted = due.is_some_and(|due| now >= due) && now.0 >= self.check_at.load(Ordering::Relaxed);
        if wanted {
            self.postpone_check();
        }
        wanted
    }

    /// Looks for signs of life: ends a silence, or requests a question. A replica that is down has
    /// health checks.
    pub(super) fn look(&self) -> Look {
        if !self.connects() {
            return Look::Nothing;
        }
        let look = self.liveness.look(self.clock.now());
        if look == Look::Returned {
            self.turned_by_silence(BreakerState::Closed);
            tracing::info!(replica = self.label, url = self.url, "replica answers");
            self.returned.send_modify(|returned| *returned += 1);
        }
        look
    }

    /// Records the end of a question that [`Self::look`] requested.
    pub(super) fn questioned(&self, unanswered: bool) {
        if self.liveness.question_ended(unanswered) {
            let cause = "it refuses no connection and answers nothing, neither questions nor requests";
            self.note(cause);
            self.turned_by_silence(BreakerState::Open);
            tracing::warn!(replica = self.label, url = self.url, cause, "replica is silent");
        }
    }

    fn postpone_check(&self) {
        let pause = CHECK_EVERY.mul_f64(0.75 + 0.5 * self.rng.fraction());
        self.check_at.store(self.clock.now().after(pause).0, Ordering::Relaxed);
    }

    /// Records the result of a health check.
    pub(super) fn checked(&self, healthy: bool) {
        if healthy {
            self.reached();
            self.change("", Breaker::healthy);
        } else if self.by_failures() == BreakerState::Open {
            self.failed("the health check failed");
        }
    }

    /// Number of the breaker's changes to each state.
    pub(super) fn transitions(&self) -> impl Iterator<Item = (BreakerState, u64)> {
        let counts = self.transitions.iter().map(|count| count.load(Ordering::Relaxed));
        BreakerState::ALL.into_iter().zip(counts)
    }

    /// Failures by the label of their kind.
    pub(super) fn errors(&self) -> impl Iterator<Item = (&'static str, u64)> {
        Failing::KINDS.into_iter().zip(self.errors.iter().map(|count| count.load(Ordering::Relaxed)))
    }
}
