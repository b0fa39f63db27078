//! Metrics of the replicas, read from the fleet on every scrape.
//!
//! Requests are counted in the replica itself, which costs almost nothing, and the series of a
//! removed replica disappear.

use std::sync::Arc;

use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{GaugeVec, IntCounterVec, IntGaugeVec};

use super::make;
use crate::fleet::{Fleet, Replica};
use foretell_core::words::metric;

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
    probes: IntCounterVec,
}

impl ReplicaMetrics {
    /// A collector for this fleet.
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
        Ok(Self {
            up: make::levels(metric::REPLICA_UP)?,
            breaker: make::levels(metric::BREAKER_STATE)?,
            transitions: make::counters(metric::BREAKER_TRANSITIONS)?,
            calls: make::counters(metric::REPLICA_REQUESTS)?,
            in_flight: make::levels(metric::REPLICA_IN_FLIGHT)?,
            errors: make::counters(metric::REPLICA_ERRORS)?,
            retries: make::counters(metric::REPLICA_RETRIES)?,
            load: make::gauges(metric::REPLICA_LOAD)?,
            load_age: make::gauges(metric::REPLICA_LOAD_AGE)?,
            probes: make::counters(metric::PROBES)?,
        })
    }

    fn all(&self) -> [&dyn Collector; 10] {
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
            &self.probes,
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
        for (probed, count) in counters.probes {
            self.probes.with_label_values(&[label, probed.name()]).inc_by(count);
        }
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
