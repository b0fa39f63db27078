//! The metrics registry. [`foretell_metrics`] lists the metrics; here they are counted.
//! Label values come from fixed lists or from the configuration; the number of model labels is
//! limited.

mod config;
mod corpus;
mod drafts;
mod drift;
mod models;
mod requests;
mod rounds;
mod runtime;

use std::time::Duration;

use prometheus::core::Collector;
use prometheus::process_collector::ProcessCollector;
use prometheus::{Encoder, HistogramVec, IntCounterVec, IntGauge, Registry, TextEncoder};

use tokio::runtime::Handle;

use self::config::ConfigMetrics;
pub use self::corpus::CorpusMetrics;
use self::drafts::DraftCounts;
pub use self::drafts::{DraftKind, DraftLoss};
use self::drift::DriftMetrics;
use self::requests::RequestMetrics;
use self::rounds::RoundMetrics;
use super::make::{self, AtScrape, Made};
use super::{Finished, trace};
use foretell_core::session::Doubted;
use foretell_metrics as metric;
pub use foretell_metrics::Stage;
use foretell_wire::openai::Path;

/// Counts a request or a stream as in flight until it is dropped.
#[derive(Debug)]
pub struct InFlight(IntGauge);

impl InFlight {
    fn new(gauge: &IntGauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// All metrics of the process.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    requests: RequestMetrics,
    rounds: RoundMetrics,
    drift: DriftMetrics,
    drafts: DraftCounts,
    overhead: HistogramVec,
    mismatches: IntCounterVec,
    nothing_eligible: IntGauge,
    config: ConfigMetrics,
    /// The corpus over requests.
    pub corpus: CorpusMetrics,
}

impl Metrics {
    /// A registry with every metric at zero.
    ///
    /// # Errors
    /// Two metrics have the same name, which is a bug.
    pub fn new() -> Result<Self, prometheus::Error> {
        let new = Maker { registry: Registry::new() };
        let metrics = Self {
            requests: RequestMetrics::new(&new)?,
            rounds: RoundMetrics::new(&new)?,
            drift: DriftMetrics::new(&new)?,
            drafts: DraftCounts::new(&new)?,
            overhead: new.register(make::histograms(metric::OVERHEAD))?,
            mismatches: new.register(make::counters(metric::MISMATCHES))?,
            nothing_eligible: new.register(make::int_gauge(metric::NOTHING_ELIGIBLE))?,
            config: ConfigMetrics::new(&new)?,
            corpus: CorpusMetrics::new(&new)?,
            registry: new.registry,
        };
        metrics.begin();
        metrics.register(dropped(metric::LOG_DROPPED, super::log::dropped)?)?;
        metrics.register(ProcessCollector::for_self())?;
        Ok(metrics)
    }

    /// Starts every series of a closed set of labels at zero, so that `increase()` sees its first
    /// rise.
    fn begin(&self) {
        for doubt in Doubted::ALL {
            self.mismatches.with_label_values(&[doubt.name()]);
        }
        for stage in Stage::ALL {
            self.overhead.with_label_values(&[stage.name()]);
        }
    }

    /// Adds the busy time of these network threads.
    ///
    /// # Errors
    /// Some have been added already.
    pub fn runtimes(&self, runtimes: Vec<Handle>) -> Result<(), prometheus::Error> {
        self.register(runtime::collector(runtimes)?)
    }

    /// Adds the number of spans that this collector has dropped.
    ///
    /// # Errors
    /// It has been added already.
    pub fn spans(&self, collector: trace::Collector) -> Result<(), prometheus::Error> {
        self.register(dropped(metric::SPANS_DROPPED, move || collector.dropped())?)
    }

    /// Counts a request whose token ids were found in doubt.
    pub fn doubted(&self, doubted: Doubted) {
        self.mismatches.with_label_values(&[doubted.name()]).inc();
    }

    /// `nothing`: no output of a minute of traffic was eligible.
    pub(super) fn nothing_eligible(&self, nothing: bool) {
        self.nothing_eligible.set(i64::from(nothing));
    }

    /// All metrics in the Prometheus text format.
    pub fn text(&self) -> String {
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

    /// Names models of the configuration; each always is a value of the label `model`.
    pub fn configured_models<'a>(&self, names: impl IntoIterator<Item = &'a str>) {
        self.requests.configured(names);
    }

    /// Counts a request as in flight until the result is dropped.
    pub fn begin_request(&self) -> InFlight {
        self.requests.begin_request()
    }

    /// Requests in flight now.
    pub fn requests_in_flight(&self) -> i64 {
        self.requests.in_flight()
    }

    /// Counts an event stream as in flight until the result is dropped.
    pub fn begin_stream(&self) -> InFlight {
        self.requests.begin_stream()
    }

    /// Records the time between two pieces of output on this path.
    pub fn gap(&self, path: Path, gap: Duration) {
        self.requests.gap(path, gap);
    }

    /// Counts a request to a drafter model.
    pub fn draft_requested(&self, kind: DraftKind) {
        self.drafts.requested(kind);
    }

    /// Counts a request to a drafter model whose answer was lost.
    pub fn draft_lost(&self, kind: DraftKind, cause: DraftLoss) {
        self.drafts.lost(kind, cause);
    }

    /// Records the duration of a stage of Foretell's work.
    pub fn overhead(&self, stage: Stage, took: Duration) {
        self.overhead.with_label_values(&[stage.name()]).observe(took.as_secs_f64());
    }

    /// Records the result of a reload. `taken`: it succeeded; `synchronized`: the files are in
    /// force; `version`: the configuration now in force.
    pub fn configured(&self, version: &str, taken: bool, synchronized: bool) {
        self.config.loaded(version, taken, synchronized);
    }

    pub(super) fn finish(&self, finished: &Finished) {
        let policy = finished.policy_name();
        self.requests.finish(finished, policy);
        self.rounds.finish(finished, policy);
        self.drift.finish(finished, policy);
    }
}

struct Maker {
    registry: Registry,
}

impl Maker {
    /// Adds a metric to the registry.
    fn register<C: Collector + Clone + 'static>(
        &self,
        metric: Result<C, prometheus::Error>,
    ) -> Result<C, prometheus::Error> {
        let metric = metric?;
        self.registry.register(Box::new(metric.clone()))?;
        Ok(metric)
    }
}

/// A collector of the number of items that were dropped instead of waiting.
fn dropped(metric: metric::Counter, count: impl Fn() -> u64 + Send + Sync + 'static) -> Made<impl Collector> {
    let make = move |all: &mut make::Families| all.with(make::counter(metric));
    AtScrape::new(make, move |dropped| {
        dropped.inc_by(count());
        Some(())
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::{Calls, Round, Speculation, Timing, TokenUsage};
    use foretell_core::session::Balance;
    use foretell_core::words::{Conditions, VerifyMethod};
    use foretell_wire::openai::Path;

    fn value(text: &str, line: &str) -> Option<f64> {
        text.lines().find_map(|found| found.strip_prefix(line)?.trim().parse().ok())
    }

    #[test]
    fn a_finished_request_shows_in_every_metric_it_touches() {
        let metrics = Metrics::new().unwrap();
        let round = |drafted, accepted| Round {
            drafted,
            accepted,
            depth: drafted,
            number: 1,
            at: Duration::ZERO,
            drafter: "prompt_lookup",
            draft: Duration::from_micros(7),
            verify: Duration::from_millis(3),
            conditions: Conditions { temperature: 0.7, load: 0.3, tolerance: 0.2 },
        };
        metrics.finish(&Finished {
            model: Some("m".to_owned()),
            route: Some(foretell_wire::openai::Route::Chat.into()),
            policy: Some("ide@12345678".to_owned()),
            status: 200,
            speculation: Speculation {
                rounds: vec![round(4, 2), round(3, 0)],
                calls: {
                    let mut calls = Calls { reported: 9, ..Calls::default() };
                    (0..2).for_each(|_| calls.sent(VerifyMethod::Score));
                    calls
                },
                balance: Balance { saved: 1.5, wasted: 0.0 },
                ..Speculation::default()
            },
            usage: TokenUsage { prompt_tokens: 700, output_tokens: 5, is_estimate: false },
            timing: Timing {
                added: None,
                first_byte: Some(Duration::from_millis(2)),
                first_token: Some(Duration::from_millis(2)),
                duration: Duration::from_millis(10),
            },
            ..Finished::new(Path::Speculated, "b")
        });
        let text = metrics.text();
        let line = "foretell_requests_total{code_class=\"2xx\",model=\"m\",path=\"speculated\",policy=\"ide\",reason=\"\",route=\"chat\"}";
        assert_eq!(value(&text, line), Some(1.0));
        let line = "foretell_output_tokens_total{path=\"speculated\",reason=\"\",route=\"chat\"}";
        assert_eq!(value(&text, line), Some(5.0));
        let of = r#"{drafter="prompt_lookup",policy="ide",prompt_bucket="<2k"}"#;
        let speculated = |name: &str| value(&text, &format!("{name}{of}"));
        assert_eq!(speculated("foretell_spec_decode_num_drafts_total"), Some(2.0));
        assert_eq!(speculated("foretell_spec_decode_num_draft_tokens_total"), Some(7.0));
        assert_eq!(speculated("foretell_spec_decode_num_accepted_tokens_total"), Some(2.0));
        let positions = |name: &str, position: u32| {
            let labels = format!("{{drafter=\"prompt_lookup\",position=\"{position}\"}}");
            value(&text, &format!("foretell_spec_decode_num_{name}_tokens_per_pos_total{labels}"))
        };
        assert_eq!([0, 1, 2].map(|position| positions("accepted", position)), [Some(1.0), Some(1.0), None]);
        assert_eq!([0, 2, 3].map(|position| positions("draft", position)), [Some(2.0), Some(2.0), Some(1.0)]);
        assert_eq!(value(&text, "foretell_saved_seconds_total{policy=\"ide\"}"), Some(1.5));
        let of = r#"{load="0.25-0.5",temperature="0.5-0.9"}"#;
        assert_eq!(value(&text, &format!("foretell_gamma_sum{of}")), Some(7.0));
        assert_eq!(value(&text, &format!("foretell_accepted_sum{of}")), Some(2.0));
        assert_eq!(value(&text, "foretell_tolerance{policy=\"ide\"}"), Some(0.2));
        assert_eq!(value(&text, "foretell_load{backend=\"b\"}"), Some(0.3));
        assert_eq!(value(&text, "foretell_verify_requests_total{backend=\"b\",method=\"score\"}"), Some(2.0));
        assert_eq!(
            value(&text, "foretell_extra_prefill_tokens_total{backend=\"b\",source=\"reported\"}"),
            Some(9.0)
        );
        assert_eq!(
            value(&text, "gen_ai_server_time_per_output_token_seconds_sum{path=\"speculated\"}"),
            Some(0.002)
        );
        assert!(value(&text, "process_resident_memory_bytes").unwrap() > 0.0);
    }

    #[tokio::test]
    async fn every_family_of_the_registry_is_in_the_list_with_its_type_and_labels() {
        let metrics = Metrics::new().unwrap();
        let round = Round {
            drafted: 1,
            accepted: 1,
            depth: 1,
            number: 1,
            at: Duration::ZERO,
            drafter: "suffix",
            draft: Duration::ZERO,
            verify: Duration::ZERO,
            conditions: Conditions::default(),
        };
        metrics.finish(&Finished {
            speculation: Speculation { rounds: vec![round], ..Speculation::default() },
            in_control_group: true,
            ..Finished::new(Path::Speculated, "b")
        });
        for family in metrics.registry.gather() {
            let listed = metric::all().find(|entry| entry.metric().name == family.name());
            let listed = listed.unwrap_or_else(|| panic!("{} is not in the list", family.name()));
            assert_eq!(
                format!("{:?}", family.get_field_type()).to_lowercase(),
                listed.kind(),
                "{}",
                family.name()
            );
            for series in family.get_metric() {
                let labels: BTreeSet<&str> =
                    series.get_label().iter().map(prometheus::proto::LabelPair::name).collect();
                assert_eq!(labels, listed.metric().labels.iter().copied().collect(), "{}", family.name());
            }
        }
    }

    /// Series of failures in an outage exist at zero before: from the start for every model of the
    /// configuration, and for any other from its first successful answer.
    #[test]
    fn server_errors_begin_at_zero_before_the_first_comes() {
        let metrics = Metrics::new().unwrap();
        metrics.configured_models(["named"]);
        let failed = |model: &str, route: &str, path: &str, policy: &str| {
            let reason = if path == "passthrough" { "unreachable" } else { "" };
            let labels = format!(
                "{{code_class=\"5xx\",model=\"{model}\",path=\"{path}\",policy=\"{policy}\",reason=\"{reason}\",route=\"{route}\"}}"
            );
            value(&metrics.text(), &format!("foretell_requests_total{labels}"))
        };
        for model in ["", "other", "named"] {
            for route in ["completions", "chat"] {
                assert_eq!(failed(model, route, "passthrough", ""), Some(0.0), "{model} {route}");
            }
            for route in ["responses", "messages"] {
                assert_eq!(failed(model, route, "passthrough", ""), Some(0.0), "{model} {route}");
            }
        }
        assert_eq!(failed("", "other", "passthrough", ""), Some(0.0));
        assert_eq!(failed("listed", "chat", "speculated", "p"), None);
        metrics.finish(&Finished {
            model: Some("listed".to_owned()),
            route: Some(foretell_wire::openai::Route::Chat.into()),
            policy: Some("p@1".to_owned()),
            status: 200,
            ..Finished::new(Path::Speculated, "b")
        });
        assert_eq!(failed("listed", "chat", "speculated", "p"), Some(0.0));
        assert_eq!(
            failed("listed", "chat", "passthrough", ""),
            Some(0.0),
            "the series of its failures while no replica answers"
        );
    }

    #[test]
    fn lines_of_the_log_that_were_dropped_are_counted() {
        assert!(value(&Metrics::new().unwrap().text(), "foretell_log_dropped_total").is_some());
    }

    #[test]
    fn a_held_gauge_falls_on_drop() {
        let metrics = Metrics::new().unwrap();
        let request = metrics.begin_request();
        assert_eq!(value(&metrics.text(), "foretell_requests_in_flight"), Some(1.0));
        drop(request);
        assert_eq!(value(&metrics.text(), "foretell_requests_in_flight"), Some(0.0));
    }
}
