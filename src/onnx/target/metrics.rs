//! Metrics of the ONNX server.

use std::time::Duration;

use prometheus::core::Collector;
use prometheus::{
    Encoder, Gauge, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, Opts, Registry,
    TextEncoder,
};

use foretell_metrics::{self as metric, Counter, Metric};

/// RunKind of a model run, by its costliest part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RunKind {
    /// One token per sequence.
    Decode,
    /// At least one draft was verified.
    Verify,
    /// No draft, but at least one sequence with several tokens.
    Prefill,
    /// A run of the head.
    Draft,
}

impl RunKind {
    fn name(self) -> &'static str {
        match self {
            Self::Decode => "decode",
            Self::Verify => "verify",
            Self::Prefill => "prefill",
            Self::Draft => "draft",
        }
    }
}

/// The target's metrics, in a separate registry.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    /// Number of jobs that have a lane.
    pub(super) running: IntGauge,
    /// Number of jobs that wait for a lane.
    pub(super) waiting: IntGauge,
    /// Maximum number of jobs that can have a lane at once.
    pub(super) limit: IntGauge,
    /// Share of the cache that running jobs use, 0 to 1.
    pub(super) kv_usage: Gauge,
    pub(super) prompt_tokens: IntCounter,
    pub(super) cached_tokens: IntCounter,
    pub(super) generated_tokens: IntCounter,
    pub(super) computed_tokens: IntCounter,
    pub(super) verify_drafted: IntCounter,
    pub(super) verify_accepted: IntCounter,
    pub(super) dropped: IntCounter,
    requests: IntCounterVec,
    step_seconds: HistogramVec,
}

impl Metrics {
    /// All metrics, registered.
    ///
    /// # Errors
    /// Two metrics have the same name.
    pub fn new() -> Result<Self, prometheus::Error> {
        let registry = Registry::new();
        let options = |metric: Metric| Opts::new(metric.name, metric.help);
        let counter =
            |Counter(metric): Counter| registered(&registry, IntCounter::with_opts(options(metric)));
        let level = |metric::Gauge(metric): metric::Gauge| {
            registered(&registry, IntGauge::with_opts(options(metric)))
        };
        let step = metric::TARGET_STEP;
        let steps = HistogramOpts::new(step.metric.name, step.metric.help).buckets(step.buckets.to_vec());
        let Counter(requests) = metric::TARGET_REQUESTS;
        let metric::Gauge(kv) = metric::TARGET_KV;
        Ok(Self {
            running: level(metric::TARGET_RUNNING)?,
            waiting: level(metric::TARGET_WAITING)?,
            limit: level(metric::TARGET_LIMIT)?,
            kv_usage: registered(&registry, Gauge::with_opts(options(kv)))?,
            prompt_tokens: counter(metric::TARGET_PROMPT)?,
            cached_tokens: counter(metric::TARGET_CACHED)?,
            generated_tokens: counter(metric::TARGET_GENERATED)?,
            computed_tokens: counter(metric::TARGET_COMPUTED)?,
            verify_drafted: counter(metric::TARGET_DRAFTED)?,
            verify_accepted: counter(metric::TARGET_ACCEPTED)?,
            dropped: counter(metric::TARGET_DROPPED)?,
            requests: registered(&registry, IntCounterVec::new(options(requests), requests.labels))?,
            step_seconds: registered(&registry, HistogramVec::new(steps, step.metric.labels))?,
            registry,
        })
    }

    /// Counts a run of the model, with its duration and number of tokens.
    pub(super) fn step(&self, kind: RunKind, took: Duration, tokens: usize) {
        self.step_seconds.with_label_values(&[kind.name()]).observe(took.as_secs_f64());
        self.computed_tokens.inc_by(tokens as u64);
    }

    /// Counts an answered request.
    pub(super) fn answered(&self, route: &str, status: http::StatusCode) {
        self.requests.with_label_values(&[route, status.as_str()]).inc();
    }

    /// All metrics in the Prometheus text format.
    pub(super) fn text(&self) -> Vec<u8> {
        let mut text = Vec::new();
        if let Err(error) = TextEncoder::new().encode(&self.registry.gather(), &mut text) {
            tracing::error!(%error, "metrics could not be written");
        }
        text
    }
}

/// Adds a metric to the registry.
fn registered<C: Collector + Clone + 'static>(
    registry: &Registry,
    metric: Result<C, prometheus::Error>,
) -> Result<C, prometheus::Error> {
    let metric = metric?;
    registry.register(Box::new(metric.clone()))?;
    Ok(metric)
}
