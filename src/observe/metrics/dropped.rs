//! The metric `foretell_log_dropped_total`, read from the log writer on every scrape.

use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{IntCounter, Opts};

use crate::observe::log;

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
    IntCounter::with_opts(Opts::new(
        "foretell_log_dropped_total",
        "Lines of the log that were dropped because too many waited or they could not be written.",
    ))
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
