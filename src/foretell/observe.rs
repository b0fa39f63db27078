//! Foretell's reports about itself: metrics, recent requests, the log.
//!
//! Every request ends in one [`Finished`] record, and every view is made from it, so they cannot
//! disagree.

pub mod body;
pub mod coverage;
pub mod edge;
pub mod history;
pub mod log;
pub mod make;
pub mod metrics;
pub mod recent;
pub mod record;
pub mod replicas;
pub mod totals;
pub mod trace;

use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use tokio::time::Instant;

pub use body::Recorded;
pub use metrics::{DraftKind, DraftLoss, Held, Metrics};
pub use record::Record;

use coverage::Coverage;
use coverage::streak::{Change, Streak};
use foretell_core::session::Balance;
use foretell_core::words::{Ledger, Reason, VerifyMethod};
use foretell_engines::openai::{Api, Path};
use history::History;
use http::HeaderMap;
use recent::Recent;
use totals::Totals;
use trace::{Collector, Sampling, Trace};

/// One round of a request: a draft and its verify request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Round {
    /// Number of tokens drafted.
    pub drafted: u32,
    /// Number of drafted tokens accepted.
    pub accepted: u32,
    /// Length of its longest branch, tokens.
    pub depth: u32,
    /// Number of its verify request among the calls after the first.
    pub number: u32,
    /// Time from accepting the request to sending its verify request.
    pub at: Duration,
    /// Name of the drafter.
    pub drafter: &'static str,
    /// Time spent drafting.
    pub draft: Duration,
    /// Time from sending the verify request to its result.
    pub verify: Duration,
}

/// The verify requests of a request, and the tokens that they made its engine compute in vain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    /// Rounds sent, by position of their verification method in [`VerifyMethod::ALL`].
    sent: [u32; VerifyMethod::ALL.len()],
    /// Tokens computed beyond those that became output, if the engine reports how many it computed.
    pub reported: u64,
    /// The same if it does not: drafted tokens minus accepted ones.
    pub estimated: u64,
}

impl Calls {
    /// Counts a round that is sent.
    pub fn sent(&mut self, method: VerifyMethod) {
        if let Some(count) = self.sent.get_mut(method.index()) {
            *count += 1;
        }
    }

    /// Rounds sent by each verification method.
    pub fn by_method(&self) -> impl Iterator<Item = (VerifyMethod, &u32)> {
        VerifyMethod::ALL.into_iter().zip(&self.sent)
    }

    /// True if any round was sent.
    pub fn any(&self) -> bool {
        self.sent.iter().any(|&calls| calls > 0)
    }
}

/// The record of a finished request. It never holds text of a prompt or an answer.
#[derive(Clone, Debug)]
pub struct Finished {
    /// The client's `x-request-id`, or one made by Foretell.
    pub id: String,
    /// The backend's `x-request-id`, if it differs from `id`.
    pub backend_id: Option<String>,
    /// When the request was accepted.
    pub time: SystemTime,
    /// Name of the backend; empty if none was chosen.
    pub backend: String,
    /// Name of the replica that it was sent to; empty if none was.
    pub replica: String,
    /// Model id as sent by the client, if it is known.
    pub model: Option<String>,
    /// API of the request; `None` if it does not ask for text.
    pub route: Option<Api>,
    /// How it was served.
    pub path: Path,
    /// Reason for which it was not speculated on, or not to the end.
    pub reason: Option<Reason>,
    /// Name of the parameter or header that is the reason.
    pub parameter: Option<String>,
    /// `name@revision` of the policy that applied.
    pub policy: Option<String>,
    /// Status sent to the client; 499 if the client left before one was known.
    pub status: u16,
    /// Every round, in order.
    pub rounds: Vec<Round>,
    /// Drift caused by lossy acceptance.
    pub drift: Ledger,
    /// Its verify requests.
    pub calls: Calls,
    /// Time won and lost by its rounds.
    pub balance: Balance,
    /// It was in the control group.
    pub in_control_group: bool,
    /// Its drafters read texts of other clients, so the client does not get the counts of its
    /// rounds.
    pub reads_others: bool,
    /// Number of prompt tokens; 0 if it is not known.
    pub prompt_tokens: u32,
    /// Number of output tokens; 0 if it is not known.
    pub output_tokens: u32,
    /// That number is an estimate.
    pub estimated: bool,
    /// Time that Foretell has added to the time to the first token; `None` without a session, or if
    /// nothing was sent.
    pub added: Option<Duration>,
    /// Time from accepting the request to the first byte of the answer's body.
    pub first_byte: Option<Duration>,
    /// Time from accepting the request to the first part of its output, which a client that does
    /// not stream gets later.
    pub first_token: Option<Duration>,
    /// Time from accepting the request to the end of the answer.
    pub duration: Duration,
    /// Its trace; `None` if it has no spans.
    pub trace: Option<Trace>,
    /// It has no line in the log, unless it fails.
    pub unsampled: bool,
    /// The client left before the end of the answer.
    pub client_gone: bool,
    /// Cause of a missing or incomplete answer; `None` if there is none, or if the client left.
    pub error: Option<String>,
}

impl Finished {
    /// True if it was served as a completion, by whatever API the client asked.
    pub fn is_completion(&self) -> bool {
        matches!(self.route, Some(Api::Completion(_))) || self.path != Path::Passthrough
    }

    /// A record in which only these two fields are set.
    #[must_use]
    pub fn new(path: Path, backend: impl Into<String>) -> Self {
        Self {
            id: String::new(),
            backend_id: None,
            time: SystemTime::now(),
            backend: backend.into(),
            replica: String::new(),
            model: None,
            route: None,
            path,
            reason: None,
            parameter: None,
            policy: None,
            status: 499,
            rounds: Vec::new(),
            drift: Ledger::default(),
            calls: Calls::default(),
            balance: Balance::default(),
            in_control_group: false,
            reads_others: false,
            prompt_tokens: 0,
            output_tokens: 0,
            estimated: false,
            added: None,
            first_byte: None,
            first_token: None,
            duration: Duration::ZERO,
            trace: None,
            unsampled: false,
            client_gone: false,
            error: None,
        }
    }

    /// True if a part of its answer was sent and the rest is missing; its status may be good.
    pub fn broke_off(&self) -> bool {
        self.error.is_some() && self.first_byte.is_some()
    }

    /// The name of its policy, without the revision; empty without one.
    pub fn policy_name(&self) -> &str {
        self.policy.as_deref().and_then(|policy| policy.split('@').next()).unwrap_or_default()
    }

    /// Tokens drafted in all rounds together.
    pub fn drafted(&self) -> u32 {
        self.rounds.iter().map(|round| round.drafted).sum()
    }

    /// Tokens accepted in all rounds together.
    pub fn accepted(&self) -> u32 {
        self.rounds.iter().map(|round| round.accepted).sum()
    }

    /// True if the request or the service has failed: always logged.
    pub fn has_failed(&self) -> bool {
        self.error.is_some() || self.status >= 500
    }

    /// Mean acceptance length, tokens per round: the accepted ones and the backend's own; `None`
    /// without a round.
    pub fn mean_acceptance_length(&self) -> Option<f64> {
        let rounds = self.rounds.len();
        (rounds > 0).then(|| 1.0 + f64::from(self.accepted()) / rounds as f64)
    }

    /// Mean seconds per output token after the first; `None` for fewer than two tokens, and for an
    /// answer that was passed through: its tokens may be estimated, and a JSON answer shows no
    /// pace.
    pub fn seconds_per_token(&self) -> Option<f64> {
        let first = self.first_token.filter(|_| self.path != Path::Passthrough)?;
        let rest = self.output_tokens.checked_sub(1).filter(|rest| *rest > 0)?;
        Some(self.duration.saturating_sub(first).as_secs_f64() / f64::from(rest))
    }
}

/// Receives finished requests and updates every view.
#[derive(Debug)]
pub struct Observer {
    metrics: Metrics,
    recent: Recent,
    totals: Totals,
    coverage: Coverage,
    streak: Mutex<Streak>,
    history: History,
    /// When the process began to observe.
    started: (SystemTime, Instant),
    sampling: Sampling,
    collector: Option<Collector>,
    /// Why requests that are to be recorded are not.
    recording_fault: Mutex<Option<String>>,
}

impl Observer {
    /// Views without any request.
    ///
    /// # Errors
    /// Two metrics have the same name, which is a bug.
    pub fn new() -> Result<Self, prometheus::Error> {
        Ok(Self {
            metrics: Metrics::new()?,
            recent: Recent::default(),
            totals: Totals::default(),
            coverage: Coverage::default(),
            streak: Mutex::default(),
            history: History::default(),
            started: (SystemTime::now(), Instant::now()),
            sampling: Sampling::new(1.0),
            collector: None,
            recording_fault: Mutex::default(),
        })
    }

    /// With lines of the log, and spans, for this share of the requests; spans go to `collector`,
    /// if there is one.
    ///
    /// # Errors
    /// Two metrics have the same name, which is a bug.
    pub fn with_tracing(self, share: f64, collector: Option<Collector>) -> Result<Self, prometheus::Error> {
        if let Some(collector) = &collector {
            self.metrics.spans(collector.clone())?;
        }
        Ok(Self { sampling: Sampling::new(share), collector, ..self })
    }

    /// Decides whether a request with these fields has a line in the log if it succeeds, and begins
    /// its trace.
    fn begin(&self, headers: &HeaderMap) -> (bool, Option<Trace>) {
        let told = self.sampling.of(headers);
        (told.line, self.collector.as_ref().filter(|_| told.spans).map(|_| trace::begun(&told.parent)))
    }

    /// The metrics, for values that do not come from finished requests.
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Notes why requests are not recorded; `None`: they are.
    pub fn note_recording(&self, fault: Option<String>) {
        *self.recording_fault.lock() = fault;
    }

    /// Why requests that are to be recorded are not.
    pub fn recording_fault(&self) -> Option<String> {
        self.recording_fault.lock().clone()
    }

    /// The latest completions.
    pub fn recent(&self) -> &Recent {
        &self.recent
    }

    /// The sums over all requests.
    pub fn totals(&self) -> &Totals {
        &self.totals
    }

    /// Output tokens by the way in which they came about.
    pub fn coverage(&self) -> &Coverage {
        &self.coverage
    }

    /// Warns where no output of a minute of traffic was eligible, and counts it.
    fn note_streak(&self, finished: &Finished) {
        if finished.route.is_none() {
            return;
        }
        let change = self.streak.lock().finish(finished, Instant::now());
        match change {
            Change::None => {}
            Change::Begun(problem) => {
                self.metrics.nothing_eligible(true);
                tracing::warn!(problem, "nothing is eligible");
            }
            Change::Ended => {
                self.metrics.nothing_eligible(false);
                tracing::info!("requests are eligible again");
            }
        }
    }

    /// The problem that no output of a minute of traffic was eligible; `None` elsewhere.
    pub fn nothing_eligible(&self) -> Option<String> {
        self.streak.lock().problem(Instant::now())
    }

    /// The last quarter of an hour.
    pub fn history(&self) -> &History {
        &self.history
    }

    /// When the process began, and for how long it has run.
    pub fn started(&self) -> (SystemTime, Duration) {
        (self.started.0, self.started.1.elapsed())
    }

    /// Adds a finished request to every view; to be called once per request.
    pub fn finish(&self, finished: Finished) {
        self.metrics.finish(&finished);
        self.totals.finish(&finished);
        self.coverage.finish(&finished);
        self.note_streak(&finished);
        if !finished.unsampled || finished.has_failed() {
            log::finished(&finished);
        }
        if let (Some(collector), Some(trace)) = (&self.collector, &finished.trace) {
            collector.take(trace::told(&finished, trace));
        }
        if finished.route.is_some() {
            self.recent.push(finished);
        }
    }
}
