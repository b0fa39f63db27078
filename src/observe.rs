//! What Foretell reports about itself: metrics, recent requests, the log.
//!
//! Every request ends in one [`Finished`] record, and every view is made from it, so they cannot disagree.

pub mod body;
pub mod edge;
pub mod history;
pub mod log;
pub mod metrics;
pub mod recent;
pub mod record;
pub mod replicas;
pub mod totals;

use std::time::{Duration, SystemTime};

use tokio::time::Instant;

pub use body::Recorded;
pub use metrics::{DraftKind, DraftLoss, Held, Metrics};
pub use record::Record;

use crate::openai::{Path, Route};
use crate::session::SentAhead;
use crate::words::Ledger;
use history::History;
use recent::Recent;
use totals::Totals;

/// One round of a request: a draft and its verify call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Round {
    /// Number of tokens drafted.
    pub drafted: u32,
    /// Number of drafted tokens accepted.
    pub accepted: u32,
    /// Name of the drafter.
    pub drafter: &'static str,
    /// Time spent drafting.
    pub draft: Duration,
    /// Time from sending the verify call to its verdict.
    pub verify: Duration,
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
    /// Model id as sent by the client, if it is known.
    pub model: Option<String>,
    /// API route; `None` if the request is not a completion.
    pub route: Option<Route>,
    /// How it was served.
    pub path: Path,
    /// Why it did not leap, or stopped leaping before the end.
    pub reason: Option<&'static str>,
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
    /// Verify calls sent before the call that they rest on was answered.
    pub ahead: SentAhead,
    /// Number of output tokens; 0 if it is not known.
    pub output_tokens: u32,
    /// Time from accepting the request to the first byte of the answer's body.
    pub first_byte: Option<Duration>,
    /// Time from accepting the request to the end of the answer.
    pub duration: Duration,
    /// The client left before the end of the answer.
    pub client_gone: bool,
    /// Why there was no answer or why it ended early; `None` if neither, or if the client left.
    pub error: Option<String>,
}

impl Finished {
    /// A record in which only these two fields are set.
    #[must_use]
    pub fn new(path: Path, backend: impl Into<String>) -> Self {
        Self {
            id: String::new(),
            backend_id: None,
            time: SystemTime::now(),
            backend: backend.into(),
            model: None,
            route: None,
            path,
            reason: None,
            parameter: None,
            policy: None,
            status: 499,
            rounds: Vec::new(),
            drift: Ledger::default(),
            ahead: SentAhead::default(),
            output_tokens: 0,
            first_byte: None,
            duration: Duration::ZERO,
            client_gone: false,
            error: None,
        }
    }

    /// Tokens drafted in all rounds together.
    pub fn drafted(&self) -> u32 {
        self.rounds.iter().map(|round| round.drafted).sum()
    }

    /// Tokens accepted in all rounds together.
    pub fn accepted(&self) -> u32 {
        self.rounds.iter().map(|round| round.accepted).sum()
    }

    /// Mean seconds per output token after the first; `None` for fewer than two tokens.
    pub fn seconds_per_token(&self) -> Option<f64> {
        let first = self.first_byte?;
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
    history: History,
    /// When the process began to observe.
    started: (SystemTime, Instant),
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
            history: History::default(),
            started: (SystemTime::now(), Instant::now()),
        })
    }

    /// The metrics, for values that do not come from finished requests.
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// The latest completions.
    pub fn recent(&self) -> &Recent {
        &self.recent
    }

    /// What all requests add up to.
    pub fn totals(&self) -> &Totals {
        &self.totals
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
        log::finished(&finished);
        if finished.route.is_some() {
            self.recent.push(finished);
        }
    }
}
