//! Counts of items that were dropped instead of waiting, read from their source on every scrape.

use std::fmt;

use prometheus::IntCounter;
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;

use crate::observe::make;
use foretell_core::words::metric::Counter;

/// Collects such a count.
pub(super) struct Dropped {
    metric: Counter,
    count: Box<dyn Fn() -> u64 + Send + Sync>,
    /// Always at zero: only the description is used.
    described: IntCounter,
}

impl fmt::Debug for Dropped {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Dropped({})", self.metric.0.name)
    }
}

impl Dropped {
    /// Shows the value of `count` as `metric`.
    pub(super) fn new(
        metric: Counter,
        count: impl Fn() -> u64 + Send + Sync + 'static,
    ) -> Result<Self, prometheus::Error> {
        Ok(Self { metric, count: Box::new(count), described: make::counter(metric)? })
    }
}

impl Collector for Dropped {
    fn desc(&self) -> Vec<&Desc> {
        self.described.desc()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let Ok(now) = make::counter(self.metric) else { return Vec::new() };
        now.inc_by((self.count)());
        now.collect()
    }
}
