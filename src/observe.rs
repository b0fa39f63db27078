//! What Foretell tells about itself: metrics, recent requests, the log, the admin API.
//!
//! Every request ends in one [`Finished`] record, and every view is made from it, so they cannot disagree.

pub mod body;
pub mod edge;
pub mod log;
pub mod metrics;
pub mod recent;
pub mod record;
pub mod replicas;

use std::time::{Duration, SystemTime};

pub use body::Recorded;
pub use metrics::{DraftKind, DraftLoss, Held, Metrics};
pub use record::Record;

use crate::openai::{Path, Route};
use crate::words::Ledger;
use recent::Recent;

/// One leap of a request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Round {
    /// Tokens drafted.
    pub drafted: u32,
    /// Tokens accepted.
    pub accepted: u32,
    /// Who drafted.
    pub drafter: &'static str,
    /// Time spent drafting.
    pub draft: Duration,
    /// Time until the verdict.
    pub verify: Duration,
}

/// A request that has come to its end. Never holds text of a prompt or an answer.
#[derive(Clone, Debug)]
pub struct Finished {
    /// `x-request-id` of the client, or Foretell's own.
    pub id: String,
    /// `x-request-id` of the backend's answer, if it is another one.
    pub backend_id: Option<String>,
    /// When the request was accepted.
    pub time: SystemTime,
    /// Name of the backend.
    pub backend: String,
    /// Model id as sent, where known.
    pub model: Option<String>,
    /// Which completion route, if one.
    pub route: Option<Route>,
    /// The way it went.
    pub path: Path,
    /// Why it did not leap, or not to the end.
    pub reason: Option<&'static str>,
    /// The request's parameter that forbade it.
    pub parameter: Option<String>,
    /// `name@revision` of the policy.
    pub policy: Option<String>,
    /// Status sent to the client; 499 if the client left before one was known.
    pub status: u16,
    /// Every leap.
    pub rounds: Vec<Round>,
    /// What judging them has cost in drift.
    pub drift: Ledger,
    /// Output tokens, where known.
    pub output_tokens: u32,
    /// From accepting the request to the first byte of the answer's body.
    pub first_byte: Option<Duration>,
    /// From accepting the request to the end of the answer.
    pub duration: Duration,
    /// The client left before the end.
    pub client_gone: bool,
    /// Why there was no answer, or why it ended suddenly, if that was not the client's doing.
    pub error: Option<String>,
}

impl Finished {
    /// A record with nothing but the way it went.
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
            output_tokens: 0,
            first_byte: None,
            duration: Duration::ZERO,
            client_gone: false,
            error: None,
        }
    }

    /// Tokens drafted in all rounds.
    pub fn drafted(&self) -> u32 {
        self.rounds.iter().map(|round| round.drafted).sum()
    }

    /// Tokens accepted in all rounds.
    pub fn accepted(&self) -> u32 {
        self.rounds.iter().map(|round| round.accepted).sum()
    }

    /// Seconds per output token after the first.
    pub fn seconds_per_token(&self) -> Option<f64> {
        let first = self.first_byte?;
        let rest = self.output_tokens.checked_sub(1).filter(|rest| *rest > 0)?;
        Some(self.duration.saturating_sub(first).as_secs_f64() / f64::from(rest))
    }
}

/// Where finished requests go.
#[derive(Debug)]
pub struct Observer {
    metrics: Metrics,
    recent: Recent,
}

impl Observer {
    /// Empty views.
    ///
    /// # Errors
    /// Two metrics of one name, which would be a fault of this crate.
    pub fn new() -> Result<Self, prometheus::Error> {
        Ok(Self { metrics: Metrics::new()?, recent: Recent::default() })
    }

    /// The metrics, for what is not tied to the end of a request.
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// The last completions.
    pub fn recent(&self) -> &Recent {
        &self.recent
    }

    /// Takes a finished request into every view. To be called once per request.
    pub fn finish(&self, finished: Finished) {
        self.metrics.finish(&finished);
        log::finished(&finished);
        if finished.route.is_some() {
            self.recent.push(finished);
        }
    }
}
