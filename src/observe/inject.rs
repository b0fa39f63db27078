//! Metrics of the drafts service, read from it on every scrape.

use std::sync::Arc;

use prometheus::core::Collector;
use prometheus::{Counter, IntCounter, IntCounterVec, IntGauge};

use super::make::{self, AtScrape, Made};
use foretell_drafts::service::{Engines, Service};
use foretell_drafts::totals::{PerPosition, Steps};
use foretell_metrics as metric;

/// A collector for this service.
///
/// # Errors
/// A metric has an invalid description, which is a bug.
pub fn collector(service: Arc<Service>) -> Made<impl Collector> {
    AtScrape::new(Families::new, move |families| {
        families.show(&service.sum());
        Some(())
    })
}

struct Families {
    engines: IntGauge,
    rows: IntGauge,
    steps: IntCounterVec,
    drafted: IntCounterVec,
    accepted: IntCounterVec,
    late: IntCounter,
    waited: Counter,
    saved: Counter,
    wasted: Counter,
}

impl Families {
    fn new(all: &mut make::Families) -> Made<Self> {
        Ok(Self {
            engines: all.with(make::int_gauge(metric::INJECT_ENGINES))?,
            rows: all.with(make::int_gauge(metric::INJECT_ROWS))?,
            steps: all.with(make::counters(metric::INJECT_STEPS))?,
            drafted: all.with(make::counters(metric::INJECT_DRAFTED))?,
            accepted: all.with(make::counters(metric::INJECT_ACCEPTED))?,
            late: all.with(make::counter(metric::INJECT_LATE))?,
            waited: all.with(make::sum(metric::INJECT_WAITED))?,
            saved: all.with(make::sum(metric::INJECT_SAVED))?,
            wasted: all.with(make::sum(metric::INJECT_WASTED))?,
        })
    }

    fn show(&self, Engines { engines, totals }: &Engines) {
        make::set(&self.engines, *engines as u64);
        make::set(&self.rows, totals.rows as u64);
        let Steps { drafted, plain, skipped } = totals.steps;
        for (result, steps) in [("drafted", drafted), ("plain", plain), ("skipped", skipped)] {
            self.steps.with_label_values(&[result]).inc_by(steps);
        }
        by_position(&self.drafted, &totals.drafted);
        by_position(&self.accepted, &totals.accepted);
        self.late.inc_by(totals.late);
        self.waited.inc_by(totals.waited as f64 * 1e-6);
        self.saved.inc_by(totals.saved);
        self.wasted.inc_by(totals.wasted);
    }
}

fn by_position(counter: &IntCounterVec, tokens: &PerPosition) {
    for (position, count) in tokens.reached() {
        counter.with_label_values(&[position.to_string()]).inc_by(count);
    }
}
