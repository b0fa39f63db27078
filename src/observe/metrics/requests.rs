//! Metrics of requests of all paths.

use std::time::Duration;

use prometheus::{Histogram, HistogramVec, IntCounter, IntCounterVec, IntGauge};

use super::models::{ModelLabels, OTHER as OTHER_MODEL};
use super::{InFlight, Maker};
use crate::{Finished, make};
use foretell_core::words::{PassthroughReason, Reason};
use foretell_metrics as metric;
use foretell_wire::openai::{Api, Path, Route};

/// The route of requests for anything but text.
const OTHER: &str = "other";
/// The class of answers that failed.
const FAILED: &str = "5xx";
/// The reason of a request that no replica answered.
const UNREACHABLE: &str = PassthroughReason::Unreachable.name();
/// The reason of a request by an API that is not speculated on.
const ROUTE: &str = PassthroughReason::Route.name();

#[derive(Debug)]
pub(super) struct RequestMetrics {
    pub(super) models: ModelLabels,
    finished: IntCounterVec,
    in_flight: IntGauge,
    streams: IntGauge,
    disconnects: IntCounter,
    broken: IntCounter,
    first_token: HistogramVec,
    added: Histogram,
    ttft: HistogramVec,
    e2e: HistogramVec,
    /// Speculated, plain, passed through.
    gaps: [Histogram; 3],
    per_token: HistogramVec,
    duration: HistogramVec,
    tokens: IntCounterVec,
    control_group: IntCounterVec,
}

impl RequestMetrics {
    pub(super) fn new(new: &Maker) -> Result<Self, prometheus::Error> {
        let gaps = new.register(make::histograms(metric::INTER_TOKEN_LATENCY))?;
        let metrics = Self {
            ttft: new.register(make::histograms(metric::TTFT))?,
            e2e: new.register(make::histograms(metric::E2E_LATENCY))?,
            gaps: [Path::Speculated, Path::Plain, Path::Passthrough]
                .map(|path| gaps.with_label_values(&[path.name()])),
            models: ModelLabels::default(),
            finished: new.register(make::counters(metric::REQUESTS))?,
            in_flight: new.register(make::int_gauge(metric::IN_FLIGHT))?,
            streams: new.register(make::int_gauge(metric::STREAMS))?,
            disconnects: new.register(make::counter(metric::DISCONNECTS))?,
            broken: new.register(make::counter(metric::BROKEN))?,
            first_token: new.register(make::histograms(metric::TIME_TO_FIRST_TOKEN))?,
            added: new.register(make::histogram(metric::ADDED_TTFT))?,
            per_token: new.register(make::histograms(metric::TIME_PER_TOKEN))?,
            duration: new.register(make::histograms(metric::REQUEST_DURATION))?,
            tokens: new.register(make::counters(metric::OUTPUT_TOKENS))?,
            control_group: new.register(make::counters(metric::CONTROL_GROUP_REQUESTS))?,
        };
        metrics.finished.with_label_values(&["", OTHER, "", Path::Passthrough.name(), UNREACHABLE, FAILED]);
        for model in ["", OTHER_MODEL] {
            metrics.begin(model);
        }
        Ok(metrics)
    }

    pub(super) fn configured<'a>(&self, models: impl IntoIterator<Item = &'a str>) {
        let models: Vec<&str> = models.into_iter().collect();
        self.models.configured(models.iter().copied());
        for model in models {
            self.begin(model);
        }
    }

    /// Starts the series of a model's server errors in an outage at zero: `increase()` does not see
    /// the first errors of a series that begins with them.
    fn begin(&self, model: &str) {
        for route in [Route::Completions, Route::Chat] {
            for reason in PassthroughReason::ALL {
                self.finished.with_label_values(&[
                    model,
                    route.name(),
                    "",
                    Path::Passthrough.name(),
                    reason.name(),
                    FAILED,
                ]);
            }
        }
        for (api, reason) in Api::PASSTHROUGH.into_iter().flat_map(|api| [(api, ROUTE), (api, UNREACHABLE)]) {
            self.finished.with_label_values(&[
                model,
                api.name(),
                "",
                Path::Passthrough.name(),
                reason,
                FAILED,
            ]);
        }
    }

    pub(super) fn begin_request(&self) -> InFlight {
        InFlight::new(&self.in_flight)
    }

    pub(super) fn in_flight(&self) -> i64 {
        self.in_flight.get()
    }

    pub(super) fn begin_stream(&self) -> InFlight {
        InFlight::new(&self.streams)
    }

    pub(super) fn gap(&self, path: Path, gap: Duration) {
        let [speculated, plain, passthrough] = &self.gaps;
        let histogram = match path {
            Path::Speculated => speculated,
            Path::Plain => plain,
            Path::Passthrough => passthrough,
        };
        histogram.observe(gap.as_secs_f64());
    }

    pub(super) fn finish(&self, finished: &Finished, policy: &str) {
        let good = (200..300).contains(&finished.status);
        let model = self.models.label(finished.model.as_deref().unwrap_or(""), good);
        let route = finished.route.map_or(OTHER, Api::name);
        let path = finished.path.name();
        let class = code_class(finished.status);
        let reason = finished.reason.map_or("", Reason::name);
        self.finished.with_label_values(&[&*model, route, policy, path, reason, class]).inc();
        if good {
            self.finished.with_label_values(&[&*model, route, policy, path, reason, FAILED]);
            if finished.is_completion() {
                self.finished.with_label_values(&[
                    &*model,
                    route,
                    "",
                    Path::Passthrough.name(),
                    UNREACHABLE,
                    FAILED,
                ]);
                if !policy.is_empty() {
                    for path in [Path::Plain, Path::Speculated] {
                        self.finished.with_label_values(&[&*model, route, policy, path.name(), "", FAILED]);
                    }
                }
            }
        }
        if finished.client_gone {
            self.disconnects.inc();
        }
        if finished.broke_off() {
            self.broken.inc();
        }
        self.times(finished, path);
        self.tokens(finished);
        if finished.in_control_group {
            self.control_group.with_label_values(&[policy]).inc();
        }
    }

    fn times(&self, finished: &Finished, path: &str) {
        if finished.is_completion() {
            if let Some(first) = finished.timing.first_byte {
                self.ttft.with_label_values(&[path]).observe(first.as_secs_f64());
            }
            self.e2e.with_label_values(&[path]).observe(finished.timing.duration.as_secs_f64());
        }
        if let Some(first) = finished.timing.first_byte {
            self.first_token.with_label_values(&[path]).observe(first.as_secs_f64());
        }
        if let Some(added) = finished.timing.added {
            self.added.observe(added.as_secs_f64());
        }
        if let Some(seconds) = finished.seconds_per_token() {
            self.per_token.with_label_values(&[path]).observe(seconds);
        }
        self.duration.with_label_values(&[path]).observe(finished.timing.duration.as_secs_f64());
    }

    fn tokens(&self, finished: &Finished) {
        let Some(route) = finished.route else { return };
        let reason = finished.reason.map_or("", Reason::name);
        let labels = [finished.path.name(), reason, route.name()];
        self.tokens.with_label_values(&labels).inc_by(u64::from(finished.usage.output_tokens));
    }
}

const fn code_class(status: u16) -> &'static str {
    match status {
        100..=199 => "1xx",
        200..=299 => "2xx",
        300..=399 => "3xx",
        400..=499 => "4xx",
        _ => FAILED,
    }
}
