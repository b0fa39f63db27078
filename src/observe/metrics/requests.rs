//! Metrics of requests, whatever way they went.

use prometheus::{Histogram, HistogramVec, IntCounter, IntCounterVec, IntGauge};

use super::models::{ModelLabels, OTHER as OTHER_MODEL};
use super::{Held, Maker};
use crate::observe::{Finished, make};
use crate::openai::{Api, Path, Route};
use crate::words::{BypassReason, RideReason, metric};

/// The route of what does not ask for text.
const OTHER: &str = "other";
/// The class of answers that failed.
const FAILED: &str = "5xx";

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
    per_token: HistogramVec,
    duration: HistogramVec,
    tokens: IntCounterVec,
    rides: IntCounterVec,
    bypass: IntCounterVec,
    holdback: IntCounterVec,
}

impl RequestMetrics {
    pub(super) fn new(new: &Maker) -> Result<Self, prometheus::Error> {
        let metrics = Self {
            models: ModelLabels::default(),
            finished: new.kept(make::counters(metric::REQUESTS))?,
            in_flight: new.kept(make::level(metric::IN_FLIGHT))?,
            streams: new.kept(make::level(metric::STREAMS))?,
            disconnects: new.kept(make::counter(metric::DISCONNECTS))?,
            broken: new.kept(make::counter(metric::BROKEN))?,
            first_token: new.kept(make::histograms(metric::TIME_TO_FIRST_TOKEN))?,
            added: new.kept(make::histogram(metric::ADDED_TTFT))?,
            per_token: new.kept(make::histograms(metric::TIME_PER_TOKEN))?,
            duration: new.kept(make::histograms(metric::REQUEST_DURATION))?,
            tokens: new.kept(make::counters(metric::OUTPUT_TOKENS))?,
            rides: new.kept(make::counters(metric::RIDES))?,
            bypass: new.kept(make::counters(metric::BYPASS))?,
            holdback: new.kept(make::counters(metric::HOLDBACK))?,
        };
        for reason in RideReason::ALL {
            metrics.rides.with_label_values(&[reason.name()]);
        }
        for reason in BypassReason::ALL {
            metrics.bypass.with_label_values(&[reason.name()]);
        }
        metrics.finished.with_label_values(&["", OTHER, "", Path::Relayed.name(), FAILED]);
        for model in ["", OTHER_MODEL] {
            metrics.begin(model);
        }
        Ok(metrics)
    }

    /// Models of the configuration: each has a label of its own.
    pub(super) fn configured<'a>(&self, models: impl IntoIterator<Item = &'a str>) {
        let models: Vec<&str> = models.into_iter().collect();
        self.models.configured(models.iter().copied());
        for model in models {
            self.begin(model);
        }
    }

    /// Begins the server errors of a model at zero, for what comes in an outage: a rule that watches their rise does not
    /// see the first errors of a series that begins with them.
    fn begin(&self, model: &str) {
        for route in [Route::Completions, Route::Chat] {
            self.finished.with_label_values(&[model, route.name(), "", Path::Bypassed.name(), FAILED]);
        }
        for api in Api::RELAYED {
            self.finished.with_label_values(&[model, api.name(), "", Path::Relayed.name(), FAILED]);
        }
    }

    pub(super) fn hold(&self) -> Held {
        Held::new(&self.in_flight)
    }

    pub(super) fn hold_stream(&self) -> Held {
        Held::new(&self.streams)
    }

    pub(super) fn finish(&self, finished: &Finished, policy: &str) {
        let good = (200..300).contains(&finished.status);
        let model = self.models.label(finished.model.as_deref().unwrap_or(""), good);
        let route = finished.route.map_or(OTHER, Api::name);
        let path = finished.path.name();
        let class = code_class(finished.status);
        self.finished.with_label_values(&[&*model, route, policy, path, class]).inc();
        if good {
            self.finished.with_label_values(&[&*model, route, policy, path, FAILED]);
            if matches!(finished.route, Some(Api::Completion(_))) {
                self.finished.with_label_values(&[&*model, route, "", Path::Bypassed.name(), FAILED]);
                for path in [Path::Ridden, Path::Speculated].into_iter().filter(|_| !policy.is_empty()) {
                    self.finished.with_label_values(&[&*model, route, policy, path.name(), FAILED]);
                }
            }
        }
        if finished.client_gone {
            self.disconnects.inc();
        }
        if finished.error.is_some() && finished.first_byte.is_some() {
            self.broken.inc();
        }
        self.times(finished, path);
        match (finished.path, finished.reason) {
            (Path::Bypassed | Path::Relayed, Some(reason)) => {
                self.bypass.with_label_values(&[reason]).inc();
            }
            (Path::Ridden | Path::Speculated, Some(reason)) => self.rides.with_label_values(&[reason]).inc(),
            _ => {}
        }
        if finished.held_back {
            self.holdback.with_label_values(&[policy]).inc();
        }
    }

    fn times(&self, finished: &Finished, path: &str) {
        if let Some(first) = finished.first_byte {
            self.first_token.with_label_values(&[path]).observe(first.as_secs_f64());
        }
        if let Some(added) = finished.added {
            self.added.observe(added.as_secs_f64());
        }
        if let Some(seconds) = finished.seconds_per_token() {
            self.per_token.with_label_values(&[path]).observe(seconds);
        }
        self.duration.with_label_values(&[path]).observe(finished.duration.as_secs_f64());
        self.tokens.with_label_values(&[path]).inc_by(u64::from(finished.output_tokens));
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
