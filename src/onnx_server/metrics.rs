//! Metrics of the ONNX server.

use std::time::Duration;

use prometheus::{
    Encoder, Gauge, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, Opts, Registry,
    TextEncoder,
};

/// Kind of a model run, after its costliest part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// One token per sequence.
    Decode,
    /// At least one draft was verified.
    Verify,
    /// No draft, but at least one sequence with several tokens.
    Prefill,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Decode => "decode",
            Self::Verify => "verify",
            Self::Prefill => "prefill",
        }
    }
}

/// The target's metrics, in a registry of their own.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    /// Number of jobs that have a lane.
    pub(super) running: IntGauge,
    /// Number of jobs that wait for a lane.
    pub(super) waiting: IntGauge,
    /// Most jobs that can have a lane at once.
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
        let counter = |name: &str, help: &str| -> Result<IntCounter, prometheus::Error> {
            let counter = IntCounter::new(format!("foretell_target_{name}"), help)?;
            registry.register(Box::new(counter.clone()))?;
            Ok(counter)
        };
        let gauge = |name: &str, help: &str| -> Result<IntGauge, prometheus::Error> {
            let gauge = IntGauge::new(format!("foretell_target_{name}"), help)?;
            registry.register(Box::new(gauge.clone()))?;
            Ok(gauge)
        };
        let kv_usage =
            Gauge::new("foretell_target_kv_usage_ratio", "Share of the cache that running requests use")?;
        registry.register(Box::new(kv_usage.clone()))?;
        let buckets = prometheus::exponential_buckets(0.000_5, 2.0, 14)?;
        let options = HistogramOpts::new("foretell_target_step_seconds", "Duration of one run of the model");
        let step_seconds = HistogramVec::new(options.buckets(buckets), &["kind"])?;
        registry.register(Box::new(step_seconds.clone()))?;
        let answered =
            Opts::new("foretell_target_requests_total", "Requests answered, streams when they begin");
        let requests = IntCounterVec::new(answered, &["route", "status"])?;
        registry.register(Box::new(requests.clone()))?;
        Ok(Self {
            running: gauge("requests_running", "Sequences that have a lane")?,
            waiting: gauge("requests_waiting", "Sequences that wait for a lane")?,
            limit: gauge("requests_limit", "Most sequences that can have a lane at once")?,
            kv_usage,
            prompt_tokens: counter("prompt_tokens_total", "Prompt tokens of sequences that got a lane")?,
            cached_tokens: counter("cached_tokens_total", "Prompt tokens that were in the cache already")?,
            generated_tokens: counter("generated_tokens_total", "Tokens generated")?,
            computed_tokens: counter("computed_tokens_total", "Tokens that went through the model")?,
            verify_drafted: counter("verify_drafted_tokens_total", "Draft tokens judged by /v1/verify")?,
            verify_accepted: counter("verify_accepted_tokens_total", "Draft tokens confirmed by /v1/verify")?,
            dropped: counter(
                "requests_dropped_total",
                "Running sequences nobody waited for: client gone, or stop string found",
            )?,
            requests,
            step_seconds,
            registry,
        })
    }

    /// Counts a run of the model, with its duration and number of tokens.
    pub(super) fn step(&self, kind: Kind, took: Duration, tokens: usize) {
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
