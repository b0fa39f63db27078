//! The metrics registry. Names and labels are a stable interface (dashboards use them). Label values come from fixed
//! lists; the number of model labels is limited.

mod drafts;
mod drift;
mod dropped;
mod memory;
mod models;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prometheus::core::Collector;
use prometheus::{
    CounterVec, Encoder, Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec,
    IntGauge, Opts, Registry, TextEncoder,
};

use self::drafts::DraftCounts;
pub use self::drafts::{DraftKind, DraftLoss};
use self::drift::DriftMetrics;
use self::dropped::DroppedLines;
pub use self::memory::MemoryMetrics;
use self::models::ModelLabels;
use super::Finished;
use crate::control::Alarm;
use crate::openai::Path;
use crate::session::SentAhead;

const OVERHEAD: [f64; 14] =
    [5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1];
const FIRST_TOKEN: [f64; 16] =
    [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0];
const PER_TOKEN: [f64; 17] =
    [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5];
const DURATION: [f64; 14] =
    [0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0];
const CALL: [f64; 14] = [1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5];
const GAMMA: [f64; 10] = [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0];

/// A stage of Foretell's own work, label of `foretell_overhead_seconds`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Parsing and judging a request body.
    Parse,
}

impl Stage {
    const fn name(self) -> &'static str {
        match self {
            Self::Parse => "parse",
        }
    }
}

/// Result of sending OpenAI's `prediction` along with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prediction {
    /// The service accepted the request.
    Sent,
    /// The service refused the request, which was then sent without the prediction.
    Refused,
}

/// Keeps a gauge one higher until it is dropped.
#[derive(Debug)]
pub struct Held(IntGauge);

impl Held {
    fn new(gauge: &IntGauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// All metrics of the process.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    models: ModelLabels,
    requests: IntCounterVec,
    in_flight: IntGauge,
    streams: IntGauge,
    disconnects: IntCounter,
    overhead: HistogramVec,
    first_token: HistogramVec,
    per_token: HistogramVec,
    duration: HistogramVec,
    leaps: IntCounter,
    draft_tokens: IntCounter,
    accepted_tokens: IntCounter,
    accepted_per_position: IntCounterVec,
    verify: Histogram,
    draft: Histogram,
    gamma: Histogram,
    ahead: IntCounterVec,
    drafts: DraftCounts,
    rides: IntCounterVec,
    bypass: IntCounterVec,
    predictions: IntCounterVec,
    alarms: IntCounterVec,
    config_info: GaugeVec,
    synchronized: IntGauge,
    config_success: Gauge,
    reloads: IntCounterVec,
    drift: DriftMetrics,
    /// The drafters' memory over requests.
    pub memory: MemoryMetrics,
    resident: IntGauge,
    descriptors: IntGauge,
}

impl Metrics {
    /// A registry with every metric at zero.
    ///
    /// # Errors
    /// Two metrics have the same name, which is a bug.
    pub fn new() -> Result<Self, prometheus::Error> {
        let new = Maker { registry: Registry::new() };
        let build = new.gauges("foretell_build_info", "Version of this process.", &["version"])?;
        build.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1.0);
        let metrics = Self {
            models: ModelLabels::default(),
            requests: new.counters(
                "foretell_requests_total",
                "Finished requests.",
                &["model", "route", "policy", "path", "code_class"],
            )?,
            in_flight: new.level("foretell_requests_in_flight", "Requests being answered.")?,
            streams: new.level("foretell_streams_in_flight", "Event streams being sent.")?,
            disconnects: new.counter("foretell_client_disconnects_total", "Clients that left early.")?,
            overhead: new.histograms(
                "foretell_overhead_seconds",
                "Own work by stage.",
                "stage",
                &OVERHEAD,
            )?,
            first_token: new.histograms(
                "gen_ai_server_time_to_first_token_seconds",
                "Time to the first byte of the answer's body.",
                "path",
                &FIRST_TOKEN,
            )?,
            per_token: new.histograms(
                "gen_ai_server_time_per_output_token_seconds",
                "Time per output token after the first.",
                "path",
                &PER_TOKEN,
            )?,
            duration: new.histograms(
                "gen_ai_server_request_duration_seconds",
                "Time from request to end of answer.",
                "path",
                &DURATION,
            )?,
            leaps: new.counter("foretell_leaps_total", "Rounds leapt.")?,
            draft_tokens: new.counter("foretell_leap_draft_tokens_total", "Tokens drafted in leaps.")?,
            accepted_tokens: new
                .counter("foretell_leap_accepted_tokens_total", "Drafted tokens accepted.")?,
            accepted_per_position: new.counters(
                "foretell_leap_accepted_tokens_per_pos_total",
                "Drafted tokens accepted, by place in the draft.",
                &["position"],
            )?,
            verify: new.histogram("foretell_leap_verify_seconds", "Time of a verify call.", &CALL)?,
            draft: new.histogram("foretell_leap_draft_seconds", "Time to draft.", &OVERHEAD)?,
            gamma: new.histogram("foretell_gamma", "Draft tokens sent in one round.", &GAMMA)?,
            ahead: new.counters(
                "foretell_leap_ahead_total",
                "Verify calls sent before the call was answered that they rest on: used where what they assumed came true, else dropped unread.",
                &["result"],
            )?,
            drafts: DraftCounts::new(&new.registry)?,
            rides: new.counters(
                "foretell_rides_total",
                "Eligible requests that rode, or rode to the end after leaping.",
                &["reason"],
            )?,
            bypass: new.counters("foretell_bypass_total", "Requests that may not leap.", &["reason"])?,
            alarms: new.counters(
                "foretell_alarms_total",
                "Collapses of acceptance, and outputs that repeat themselves.",
                &["kind"],
            )?,
            predictions: new.counters(
                "foretell_predictions_total",
                "Requests to hosted services that were given a prediction.",
                &["result"],
            )?,
            config_info: new.gauges("foretell_config_info", "Running configuration.", &["version"])?,
            synchronized: new.level("foretell_config_synchronized", "0 if the files could not be taken.")?,
            config_success: new.gauge(
                "foretell_config_last_success_timestamp_seconds",
                "When a configuration was last taken.",
            )?,
            reloads: new.counters("foretell_config_reloads_total", "Reloads.", &["result"])?,
            drift: DriftMetrics::new(&new)?,
            memory: MemoryMetrics::new(&new)?,
            resident: new.level("process_resident_memory_bytes", "Resident memory.")?,
            descriptors: new.level("process_open_fds", "Open file descriptors.")?,
            registry: new.registry,
        };
        metrics.synchronized.set(1);
        // Known from the start, so that a rule that watches its rise has a zero to begin with.
        for alarm in Alarm::ALL {
            metrics.alarms.with_label_values(&[alarm.name()]);
        }
        metrics.register(DroppedLines::new()?)?;
        Ok(metrics)
    }

    /// Counts a request that was sent with a prediction.
    pub fn prediction(&self, result: Prediction) {
        let result = match result {
            Prediction::Sent => "sent",
            Prediction::Refused => "refused",
        };
        self.predictions.with_label_values(&[result]).inc();
    }

    /// Counts an alarm.
    pub fn alarm(&self, alarm: Alarm) {
        self.alarms.with_label_values(&[alarm.name()]).inc();
    }

    /// All metrics in the Prometheus text format.
    pub fn text(&self) -> String {
        self.resident.set(resident_bytes().and_then(|bytes| i64::try_from(bytes).ok()).unwrap_or(0));
        self.descriptors.set(open_descriptors().and_then(|count| i64::try_from(count).ok()).unwrap_or(0));
        let mut text = Vec::new();
        if let Err(error) = TextEncoder::new().encode(&self.registry.gather(), &mut text) {
            tracing::warn!(%error, "metrics cannot be written");
        }
        String::from_utf8(text).unwrap_or_default()
    }

    /// Adds a collector of another part of the process.
    ///
    /// # Errors
    /// A metric with one of its names exists already.
    pub fn register(&self, collector: impl Collector + 'static) -> Result<(), prometheus::Error> {
        self.registry.register(Box::new(collector))
    }

    /// Names models of the configuration; each always has a `model` label value of its own.
    pub fn configured_models<'a>(&self, names: impl IntoIterator<Item = &'a str>) {
        self.models.configured(names);
    }

    /// Counts a request as in flight until the result is dropped.
    pub fn hold_request(&self) -> Held {
        Held::new(&self.in_flight)
    }

    /// Counts an event stream as in flight until the result is dropped.
    pub fn hold_stream(&self) -> Held {
        Held::new(&self.streams)
    }

    /// Counts a request to a drafter model.
    pub fn draft_asked(&self, kind: DraftKind) {
        self.drafts.asked(kind);
    }

    /// Counts a request to a drafter model whose answer was lost.
    pub fn draft_lost(&self, kind: DraftKind, cause: DraftLoss) {
        self.drafts.lost(kind, cause);
    }

    /// Records the duration of a stage of Foretell's own work.
    pub fn overhead(&self, stage: Stage, took: Duration) {
        self.overhead.with_label_values(&[stage.name()]).observe(took.as_secs_f64());
    }

    /// Records the result of a reload: `taken` if it succeeded; `synchronized` if all that the files say is in force;
    /// `version` is the configuration now in force.
    pub fn configured(&self, version: &str, taken: bool, synchronized: bool) {
        self.config_info.reset();
        self.config_info.with_label_values(&[version]).set(1.0);
        self.synchronized.set(i64::from(synchronized));
        self.reloads.with_label_values(&[if taken { "success" } else { "failure" }]).inc();
        if taken {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            self.config_success.set(now.as_secs_f64());
        }
    }

    pub(super) fn finish(&self, finished: &Finished) {
        let good = (200..300).contains(&finished.status);
        let model = self.models.label(finished.model.as_deref().unwrap_or(""), good);
        let route = finished.route.map_or("other", crate::openai::Route::name);
        let policy = finished.policy.as_deref().unwrap_or("");
        let policy = policy.split('@').next().unwrap_or_default();
        let path = finished.path.name();
        let class = code_class(finished.status);
        self.requests.with_label_values(&[&*model, route, policy, path, class]).inc();
        if finished.client_gone {
            self.disconnects.inc();
        }
        if let Some(first) = finished.first_byte {
            self.first_token.with_label_values(&[path]).observe(first.as_secs_f64());
        }
        if let Some(seconds) = finished.seconds_per_token() {
            self.per_token.with_label_values(&[path]).observe(seconds);
        }
        self.duration.with_label_values(&[path]).observe(finished.duration.as_secs_f64());
        match (finished.path, finished.reason) {
            (Path::Bypassed | Path::Relayed, Some(reason)) => {
                self.bypass.with_label_values(&[reason]).inc();
            }
            (Path::Ridden | Path::Speculated, Some(reason)) => self.rides.with_label_values(&[reason]).inc(),
            _ => {}
        }
        self.rounds(finished);
        self.drift.finish(finished, policy);
    }

    fn rounds(&self, finished: &Finished) {
        let SentAhead { sent, used } = finished.ahead;
        for (result, calls) in [("used", used), ("dropped", sent.saturating_sub(used))] {
            self.ahead.with_label_values(&[result]).inc_by(u64::from(calls));
        }
        for round in &finished.rounds {
            self.leaps.inc();
            self.draft_tokens.inc_by(u64::from(round.drafted));
            self.accepted_tokens.inc_by(u64::from(round.accepted));
            for position in 0..round.accepted.min(32) {
                self.accepted_per_position.with_label_values(&[position.to_string()]).inc();
            }
            self.verify.observe(round.verify.as_secs_f64());
            self.draft.observe(round.draft.as_secs_f64());
            self.gamma.observe(f64::from(round.drafted));
        }
    }
}

const fn code_class(status: u16) -> &'static str {
    match status {
        100..=199 => "1xx",
        200..=299 => "2xx",
        300..=399 => "3xx",
        400..=499 => "4xx",
        _ => "5xx",
    }
}

/// Resident memory of this process, bytes; `None` where `/proc` does not tell it.
pub fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().trim_end_matches("kB").trim().parse().ok()?;
    Some(kib * 1024)
}

fn open_descriptors() -> Option<usize> {
    Some(std::fs::read_dir("/proc/self/fd").ok()?.count())
}

struct Maker {
    registry: Registry,
}

impl Maker {
    fn registered<C: Collector + Clone + 'static>(&self, metric: C) -> Result<C, prometheus::Error> {
        self.registry.register(Box::new(metric.clone()))?;
        Ok(metric)
    }

    fn counter(&self, name: &str, help: &str) -> Result<IntCounter, prometheus::Error> {
        self.registered(IntCounter::new(name, help)?)
    }

    fn counters(&self, name: &str, help: &str, labels: &[&str]) -> Result<IntCounterVec, prometheus::Error> {
        self.registered(IntCounterVec::new(Opts::new(name, help), labels)?)
    }

    fn sums(&self, name: &str, help: &str, labels: &[&str]) -> Result<CounterVec, prometheus::Error> {
        self.registered(CounterVec::new(Opts::new(name, help), labels)?)
    }

    fn level(&self, name: &str, help: &str) -> Result<IntGauge, prometheus::Error> {
        self.registered(IntGauge::new(name, help)?)
    }

    fn gauge(&self, name: &str, help: &str) -> Result<Gauge, prometheus::Error> {
        self.registered(Gauge::new(name, help)?)
    }

    fn gauges(&self, name: &str, help: &str, labels: &[&str]) -> Result<GaugeVec, prometheus::Error> {
        self.registered(GaugeVec::new(Opts::new(name, help), labels)?)
    }

    fn histogram(&self, name: &str, help: &str, buckets: &[f64]) -> Result<Histogram, prometheus::Error> {
        self.registered(Histogram::with_opts(HistogramOpts::new(name, help).buckets(buckets.to_vec()))?)
    }

    fn histograms(
        &self,
        name: &str,
        help: &str,
        label: &str,
        buckets: &[f64],
    ) -> Result<HistogramVec, prometheus::Error> {
        let options = HistogramOpts::new(name, help).buckets(buckets.to_vec());
        self.registered(HistogramVec::new(options, &[label])?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::Round;

    fn value(text: &str, line: &str) -> Option<f64> {
        text.lines().find_map(|found| found.strip_prefix(line)?.trim().parse().ok())
    }

    #[test]
    fn a_finished_request_shows_in_every_metric_it_touches() {
        let metrics = Metrics::new().unwrap();
        let round = |drafted, accepted| Round {
            drafted,
            accepted,
            drafter: "prompt_lookup",
            draft: Duration::from_micros(7),
            verify: Duration::from_millis(3),
        };
        metrics.finish(&Finished {
            model: Some("m".to_owned()),
            route: Some(crate::openai::Route::Chat),
            policy: Some("ide@12345678".to_owned()),
            status: 200,
            rounds: vec![round(4, 2), round(3, 0)],
            ahead: SentAhead { sent: 3, used: 2 },
            output_tokens: 5,
            first_byte: Some(Duration::from_millis(2)),
            duration: Duration::from_millis(10),
            ..Finished::new(Path::Speculated, "b")
        });
        let text = metrics.text();
        let line = "foretell_requests_total{code_class=\"2xx\",model=\"m\",path=\"speculated\",policy=\"ide\",route=\"chat\"}";
        assert_eq!(value(&text, line), Some(1.0));
        assert_eq!(value(&text, "foretell_leaps_total"), Some(2.0));
        assert_eq!(value(&text, "foretell_leap_draft_tokens_total"), Some(7.0));
        assert_eq!(value(&text, "foretell_leap_accepted_tokens_total"), Some(2.0));
        let ahead = |result| value(&text, &format!("foretell_leap_ahead_total{{result=\"{result}\"}}"));
        assert_eq!((ahead("used"), ahead("dropped")), (Some(2.0), Some(1.0)));
        assert_eq!(value(&text, "foretell_leap_accepted_tokens_per_pos_total{position=\"1\"}"), Some(1.0));
        assert_eq!(
            value(&text, "gen_ai_server_time_per_output_token_seconds_sum{path=\"speculated\"}"),
            Some(0.002)
        );
        assert!(value(&text, "process_resident_memory_bytes").unwrap() > 0.0);
    }

    #[test]
    fn lines_of_the_log_that_were_dropped_are_counted() {
        assert!(value(&Metrics::new().unwrap().text(), "foretell_log_dropped_total").is_some());
    }

    #[test]
    fn what_is_held_is_counted_until_it_is_dropped() {
        let metrics = Metrics::new().unwrap();
        let held = metrics.hold_request();
        assert_eq!(value(&metrics.text(), "foretell_requests_in_flight"), Some(1.0));
        drop(held);
        assert_eq!(value(&metrics.text(), "foretell_requests_in_flight"), Some(0.0));
    }
}
