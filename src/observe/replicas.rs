//! Metrics of the replicas, read from the fleet on every scrape.
//!
//! Requests are counted in the replica itself, which costs almost nothing, and the series of a removed replica
//! disappear.

use std::sync::Arc;

use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{GaugeVec, IntCounterVec, IntGaugeVec, Opts};

use crate::fleet::{Fleet, Replica};

/// Collects the metrics of a fleet.
pub struct ReplicaMetrics {
    fleet: Arc<Fleet>,
    /// Always at zero: only the descriptions are used.
    described: Families,
}

/// The metrics of one scrape.
struct Families {
    up: IntGaugeVec,
    breaker: IntGaugeVec,
    transitions: IntCounterVec,
    calls: IntCounterVec,
    in_flight: IntGaugeVec,
    errors: IntCounterVec,
    retries: IntCounterVec,
    load: GaugeVec,
    load_age: GaugeVec,
}

impl ReplicaMetrics {
    /// Of this fleet.
    ///
    /// # Errors
    /// A metric has an invalid description, which is a bug.
    pub fn new(fleet: Arc<Fleet>) -> Result<Self, prometheus::Error> {
        Ok(Self { fleet, described: Families::new()? })
    }
}

impl Collector for ReplicaMetrics {
    fn desc(&self) -> Vec<&Desc> {
        let all = self.described.all().into_iter();
        all.flat_map(Collector::desc).chain(self.fleet.connects().desc()).collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let Ok(families) = Families::new() else { return Vec::new() };
        self.fleet.each(|replica| families.show(replica));
        let all = families.all().into_iter();
        all.flat_map(Collector::collect).chain(self.fleet.connects().collect()).collect()
    }
}

impl Families {
    fn new() -> Result<Self, prometheus::Error> {
        let counters =
            |name: &str, help: &str, labels: &[&str]| IntCounterVec::new(Opts::new(name, help), labels);
        let levels = |name: &str, help: &str| IntGaugeVec::new(Opts::new(name, help), &["replica"]);
        Ok(Self {
            up: levels("foretell_replica_up", "Whether the last call, or health check, reached it.")?,
            breaker: levels("foretell_replica_breaker_state", "0 closed, 1 half open, 2 open.")?,
            transitions: counters(
                "foretell_replica_breaker_transitions_total",
                "Changes of the breaker.",
                &["replica", "to"],
            )?,
            calls: counters(
                "foretell_replica_requests_total",
                "Calls to it, Foretell's own included.",
                &["replica"],
            )?,
            in_flight: levels("foretell_replica_requests_in_flight", "Calls under way.")?,
            errors: counters(
                "foretell_replica_errors_total",
                "Calls that got no whole answer, or a server error that the request had not earned.",
                &["replica", "kind"],
            )?,
            retries: counters(
                "foretell_replica_retries_total",
                "Requests that got no byte from it and were sent again, or not for want of budget.",
                &["replica", "result"],
            )?,
            load: GaugeVec::new(
                Opts::new("foretell_replica_load", "What its engine says about its load."),
                &["replica", "signal"],
            )?,
            load_age: GaugeVec::new(
                Opts::new("foretell_replica_load_age_seconds", "How long ago its engine said so."),
                &["replica"],
            )?,
        })
    }

    fn all(&self) -> [&dyn Collector; 9] {
        [
            &self.up,
            &self.breaker,
            &self.transitions,
            &self.calls,
            &self.in_flight,
            &self.errors,
            &self.retries,
            &self.load,
            &self.load_age,
        ]
    }

    fn show(&self, replica: &Replica) {
        let label = replica.label();
        let counters = replica.counters();
        self.up.with_label_values(&[label]).set(i64::from(replica.is_up()));
        self.breaker.with_label_values(&[label]).set(replica.breaker() as i64);
        self.calls.with_label_values(&[label]).inc_by(counters.calls);
        let in_flight = i64::try_from(replica.in_flight()).unwrap_or(i64::MAX);
        self.in_flight.with_label_values(&[label]).set(in_flight);
        for (state, count) in counters.breaker_transitions {
            self.transitions.with_label_values(&[label, state.name()]).inc_by(count);
        }
        for (kind, count) in counters.errors {
            self.errors.with_label_values(&[label, kind]).inc_by(count);
        }
        self.retries.with_label_values(&[label, "sent"]).inc_by(counters.retries);
        self.retries.with_label_values(&[label, "no_budget"]).inc_by(counters.retries_refused);
        self.load(label, replica);
    }

    fn load(&self, label: &str, replica: &Replica) {
        let Some(load) = replica.load() else { return };
        let signals = [
            ("running", Some(f64::from(load.running))),
            ("waiting", Some(f64::from(load.waiting))),
            ("kv", load.kv_usage),
        ];
        for (signal, value) in signals {
            let Some(value) = value else { continue };
            self.load.with_label_values(&[label, signal]).set(value);
        }
        self.load_age.with_label_values(&[label]).set(load.at.elapsed().as_secs_f64());
    }
}
