//! Metrics of the drafts service, read from it on every scrape.

use std::sync::Arc;

use prometheus::core::Collector;
use prometheus::{Counter, IntCounter, IntGauge};

use super::make::{self, AtScrape, Made};
use foretell_core::words::metric;
use foretell_drafts::service::{Engines, Service};

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
    steps: IntCounter,
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
            steps: all.with(make::counter(metric::INJECT_STEPS))?,
            late: all.with(make::counter(metric::INJECT_LATE))?,
            waited: all.with(make::sum(metric::INJECT_WAITED))?,
            saved: all.with(make::sum(metric::INJECT_SAVED))?,
            wasted: all.with(make::sum(metric::INJECT_WASTED))?,
        })
    }

    fn show(&self, sum: &Engines) {
        make::set(&self.engines, sum.engines as u64);
        make::set(&self.rows, sum.rows as u64);
        self.steps.inc_by(sum.steps);
        self.late.inc_by(sum.late);
        self.waited.inc_by(sum.waited as f64 * 1e-6);
        self.saved.inc_by(sum.saved);
        self.wasted.inc_by(sum.wasted);
    }
}
