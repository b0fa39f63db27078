//! The metric `foretell_log_dropped_total`, read from the log writer on every scrape.

use prometheus::IntCounter;
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;

use crate::observe::{log, make};
use crate::words::metric;

/// Collects the number of dropped log lines.
pub(super) struct DroppedLines {
    /// Always at zero: only the description is used.
    described: IntCounter,
}

impl DroppedLines {
    pub(super) fn new() -> Result<Self, prometheus::Error> {
        Ok(Self { described: counter()? })
    }
}

fn counter() -> Result<IntCounter, prometheus::Error> {
    make::counter(metric::LOG_DROPPED)
}

impl Collector for DroppedLines {
    fn desc(&self) -> Vec<&Desc> {
        self.described.desc()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let Ok(now) = counter() else { return Vec::new() };
        now.inc_by(log::dropped());
        now.collect()
    }
}
