//! Foretell's reports about itself: metrics, recent requests, the log.
//!
//! Every request ends in one [`Finished`] record, and every view is made from it, so they cannot
//! disagree.

pub mod body;
pub mod coverage;
pub mod edge;
pub mod history;
pub mod inject;
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
pub use metrics::{DraftKind, DraftLoss, InFlight, Metrics};
pub use record::Record;

use coverage::Coverage;
use coverage::streak::{Change, Streak};
use foretell_core::session::Balance;
use foretell_core::words::{Conditions, Ledger, Reason, VerifyMethod};
use foretell_wire::openai::{Api, Path};
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
    pub drafter: &'static str,
    /// Time spent drafting.
    pub draft: Duration,
    /// Time from sending the verify request to its result.
    pub verify: Duration,
    pub conditions: Conditions,
}

impl Round {
    /// A round inside a step of the engine: no separate request, and no separate time.
    pub fn injected(round: foretell_drafts::joins::Round) -> Self {
        let (drafted, accepted) = (round.drafted, round.accepted);
        let (number, at, draft, verify) = (0, Duration::ZERO, Duration::ZERO, Duration::ZERO);
        let (drafter, conditions) = (round.drafter.name(), round.conditions);
        Self { drafted, accepted, depth: drafted, number, at, drafter, draft, verify, conditions }
    }

    /// True if the engine verified it inside its step.
    pub fn is_injected(&self) -> bool {
        self.number == 0
    }
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

/// Where a request was sent.
#[derive(Clone, Debug, Default)]
pub struct Upstream {
    /// Name of the backend; empty if none was chosen.
    pub backend: String,
    /// Name of the replica; empty if none was chosen.
    pub replica: String,
    /// The backend's `x-request-id`, if it differs from the request's id.
    pub request_id: Option<String>,
}

/// Tokens of a request; 0 where the number is not known.
#[derive(Clone, Copy, Debug, Default)]
pub struct TokenUsage {
    pub prompt_tokens: u32,
    pub output_tokens: u32,
    /// `output_tokens` is an estimate.
    pub is_estimate: bool,
}

/// Times of an answer, measured from accepting the request.
#[derive(Clone, Copy, Debug, Default)]
pub struct Timing {
    /// Time that Foretell has added to the time to the first token; `None` without a session, or if
    /// nothing was sent.
    pub added: Option<Duration>,
    /// First byte of the answer's body.
    pub first_byte: Option<Duration>,
    /// First part of the output; a client that does not stream gets it later.
    pub first_token: Option<Duration>,
    /// End of the answer.
    pub duration: Duration,
}

/// The rounds of a request and their cost.
#[derive(Clone, Debug, Default)]
pub struct Speculation {
    /// Every round, in order.
    pub rounds: Vec<Round>,
    pub calls: Calls,
    /// Drift caused by lossy acceptance.
    pub drift: Ledger,
    /// Time won and lost.
    pub balance: Balance,
}

/// The record of a finished request, without any text of its prompt or answer.
#[derive(Clone, Debug)]
pub struct Finished {
    /// The client's `x-request-id`, or one made by Foretell.
    pub id: String,
    /// When the request was accepted.
    pub time: SystemTime,
    pub upstream: Upstream,
    /// Model id as sent by the client, if it is known.
    pub model: Option<String>,
    /// API of the request; `None` if it does not generate text.
    pub route: Option<Api>,
    pub path: Path,
    /// Reason for which it was not speculated on, or not to the end.
    pub reason: Option<Reason>,
    /// Name of the parameter or header that is the reason.
    pub parameter: Option<String>,
    /// `name@revision` of the policy that applied.
    pub policy: Option<String>,
    /// Status sent to the client; 499 if the client disconnected before one was known.
    pub status: u16,
    pub speculation: Speculation,
    /// The request belongs to the control group.
    pub in_control_group: bool,
    /// Its drafters read texts of other clients, so the client does not get the counts of its
    /// rounds.
    pub reads_others: bool,
    pub usage: TokenUsage,
    pub timing: Timing,
    /// `None` if it has no spans.
    pub trace: Option<Trace>,
    /// It has no line in the log, unless it fails.
    pub unsampled: bool,
    /// The client disconnected before the end of the answer.
    pub client_gone: bool,
    /// Cause of a missing or incomplete answer; `None` also if the client disconnected.
    pub error: Option<String>,
}

impl Finished {
    /// True if it was served as a completion, independent of the client's API.
    pub fn is_completion(&self) -> bool {
        matches!(self.route, Some(Api::Completion(_))) || self.path != Path::Passthrough
    }

    /// A record in which only these two fields are set.
    #[must_use]
    pub fn new(path: Path, backend: impl Into<String>) -> Self {
        Self {
            id: String::new(),
            time: SystemTime::now(),
            upstream: Upstream { backend: backend.into(), ..Upstream::default() },
            model: None,
            route: None,
            path,
            reason: None,
            parameter: None,
            policy: None,
            status: 499,
            speculation: Speculation::default(),
            in_control_group: false,
            reads_others: false,
            usage: TokenUsage::default(),
            timing: Timing::default(),
            trace: None,
            unsampled: false,
            client_gone: false,
            error: None,
        }
    }

    /// True if a part of its answer was sent and the rest is missing; its status may be good.
    pub fn broke_off(&self) -> bool {
        self.error.is_some() && self.timing.first_byte.is_some()
    }

    /// The name of its policy, without the revision; empty without one.
    pub fn policy_name(&self) -> &str {
        self.policy.as_deref().and_then(|policy| policy.split('@').next()).unwrap_or_default()
    }

    /// Tokens drafted in all rounds together.
    pub fn drafted(&self) -> u32 {
        self.speculation.rounds.iter().map(|round| round.drafted).sum()
    }

    /// Tokens accepted in all rounds together.
    pub fn accepted(&self) -> u32 {
        self.speculation.rounds.iter().map(|round| round.accepted).sum()
    }

    /// True if the request or the service has failed: always logged.
    pub fn has_failed(&self) -> bool {
        self.error.is_some() || self.status >= 500
    }

    /// Mean acceptance length, tokens per round: the accepted ones and the backend's next; `None`
    /// without a round.
    pub fn mean_acceptance_length(&self) -> Option<f64> {
        let rounds = self.speculation.rounds.len();
        (rounds > 0).then(|| 1.0 + f64::from(self.accepted()) / rounds as f64)
    }

    /// Mean seconds per output token after the first; `None` for fewer than two tokens, and for an
    /// answer that was passed through: its tokens may be estimated, and a JSON answer shows no
    /// pace.
    pub fn seconds_per_token(&self) -> Option<f64> {
        if self.path == Path::Passthrough {
            return None;
        }
        let first = self.timing.first_token?;
        let rest = self.usage.output_tokens.checked_sub(1).filter(|rest| *rest > 0)?;
        Some(self.timing.duration.saturating_sub(first).as_secs_f64() / f64::from(rest))
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
    /// Cause for which requests are not recorded although they should be.
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

    /// The trace of a request with these fields, and true if it has a line in the log even if it
    /// succeeds.
    fn begin(&self, headers: &HeaderMap) -> (bool, Option<Trace>) {
        let decision = self.sampling.of(headers);
        let has_spans = decision.spans && self.collector.is_some();
        (decision.line, has_spans.then(|| Trace::continued(&decision.parent)))
    }

    /// For values that do not come from finished requests.
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Sets the cause for which requests are not recorded; `None` if they are.
    pub fn note_recording(&self, fault: Option<String>) {
        *self.recording_fault.lock() = fault;
    }

    /// Cause for which requests are not recorded although they should be.
    pub fn recording_fault(&self) -> Option<String> {
        self.recording_fault.lock().clone()
    }

    pub fn recent(&self) -> &Recent {
        &self.recent
    }

    pub fn totals(&self) -> &Totals {
        &self.totals
    }

    /// Output tokens by path and reason.
    pub fn coverage(&self) -> &Coverage {
        &self.coverage
    }

    /// Warns if no output of a minute of traffic was eligible, and counts it.
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
                tracing::info!("requests are eligible");
            }
        }
    }

    /// The warning that no output of a minute of traffic was eligible; `None` otherwise.
    pub fn nothing_eligible(&self) -> Option<String> {
        self.streak.lock().problem(Instant::now())
    }

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
            collector.take(trace::spans(&finished, trace));
        }
        if finished.route.is_some() {
            self.recent.push(finished);
        }
    }
}
