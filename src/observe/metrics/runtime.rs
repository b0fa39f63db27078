//! How busy the network threads are, read from the runtime on every scrape.

use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{Counter, IntGauge, Opts};
use tokio::runtime::Handle;

use crate::observe::make;
use crate::words::metric;

/// Collects the metrics of the runtime that a scrape is answered on; none outside of one.
#[derive(Debug)]
pub(super) struct RuntimeMetrics {
    /// Always at zero: only the descriptions are used.
    described: (Counter, IntGauge),
}

fn families() -> Result<(Counter, IntGauge), prometheus::Error> {
    let metric::Counter(busy) = metric::BUSY;
    Ok((Counter::with_opts(Opts::new(busy.name, busy.help))?, make::level(metric::WORKERS)?))
}

impl RuntimeMetrics {
    pub(super) fn new() -> Result<Self, prometheus::Error> {
        Ok(Self { described: families()? })
    }
}

impl Collector for RuntimeMetrics {
    fn desc(&self) -> Vec<&Desc> {
        let (busy, workers) = &self.described;
        busy.desc().into_iter().chain(workers.desc()).collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let (Ok((busy, workers)), Ok(handle)) = (families(), Handle::try_current()) else {
            return Vec::new();
        };
        let runtime = handle.metrics();
        let count = runtime.num_workers();
        let seconds = (0..count).map(|worker| runtime.worker_total_busy_duration(worker).as_secs_f64()).sum();
        busy.inc_by(seconds);
        workers.set(i64::try_from(count).unwrap_or(i64::MAX));
        busy.collect().into_iter().chain(workers.collect()).collect()
    }
}
