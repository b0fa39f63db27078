//! Metrics of the replicas, read from the fleet on every scrape.
//!
//! Requests are counted in the replica itself, which costs almost nothing, and the series of a
//! removed replica disappear.

use std::sync::Arc;

use prometheus::core::Collector;
use prometheus::{GaugeVec, IntCounterVec, IntGaugeVec};

use super::make::{self, AtScrape, Made};
use foretell_metrics as metric;
use foretell_net::fleet::{Fleet, Replica};
use foretell_wire::openai::Route;

/// A collector for this fleet.
///
/// # Errors
/// A metric has an invalid description, which is a bug.
pub fn collector(fleet: Arc<Fleet>) -> Made<impl Collector> {
    let connects = fleet.connects().clone();
    let make = move |all: &mut make::Families| {
        all.with(Ok(connects.clone()))?;
        Families::new(all)
    };
    AtScrape::new(make, move |families| {
        fleet.each(|replica| families.show(replica));
        Some(())
    })
}

/// The metrics of one scrape.
struct Families {
    up: IntGaugeVec,
    unreadable: IntGaugeVec,
    silent: IntGaugeVec,
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

impl Families {
    fn new(all: &mut make::Families) -> Made<Self> {
        Ok(Self {
            up: all.with(make::int_gauges(metric::REPLICA_UP))?,
            unreadable: all.with(make::int_gauges(metric::REPLICA_UNREADABLE))?,
            silent: all.with(make::int_gauges(metric::REPLICA_SILENT))?,
            breaker: all.with(make::int_gauges(metric::BREAKER_STATE))?,
            transitions: all.with(make::counters(metric::BREAKER_TRANSITIONS))?,
            calls: all.with(make::counters(metric::REPLICA_REQUESTS))?,
            in_flight: all.with(make::int_gauges(metric::REPLICA_IN_FLIGHT))?,
            errors: all.with(make::counters(metric::REPLICA_ERRORS))?,
            retries: all.with(make::counters(metric::REPLICA_RETRIES))?,
            load: all.with(make::gauges(metric::REPLICA_LOAD))?,
            load_age: all.with(make::gauges(metric::REPLICA_LOAD_AGE))?,
            probes: all.with(make::counters(metric::PROBES))?,
        })
    }

    fn show(&self, replica: &Replica) {
        let label = replica.label();
        let counters = replica.counters();
        self.up.with_label_values(&[label]).set(i64::from(replica.is_up()));
        for route in [Route::Completions, Route::Chat] {
            let unreadable = replica.first_calls().passes_through(route);
            self.unreadable.with_label_values(&[label, route.name()]).set(i64::from(unreadable));
        }
        self.silent.with_label_values(&[label]).set(i64::from(replica.is_silent()));
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
