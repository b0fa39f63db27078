//! Busy time of the network threads, read from their runtimes on every scrape.

use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{Counter, IntGauge, Opts};
use tokio::runtime::Handle;

use crate::observe::make;
use foretell_core::words::metric;

/// Collects the metrics of these runtimes.
#[derive(Debug)]
pub(super) struct RuntimeMetrics {
    runtimes: Vec<Handle>,
    /// Always at zero: only the descriptions are used.
    described: (Counter, IntGauge),
}

fn families() -> Result<(Counter, IntGauge), prometheus::Error> {
    let metric::Counter(busy) = metric::BUSY;
    Ok((Counter::with_opts(Opts::new(busy.name, busy.help))?, make::level(metric::WORKERS)?))
}

impl RuntimeMetrics {
    pub(super) fn new(runtimes: Vec<Handle>) -> Result<Self, prometheus::Error> {
        Ok(Self { runtimes, described: families()? })
    }
}

impl Collector for RuntimeMetrics {
    fn desc(&self) -> Vec<&Desc> {
        let (busy, workers) = &self.described;
        busy.desc().into_iter().chain(workers.desc()).collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let Ok((busy, workers)) = families() else { return Vec::new() };
        for runtime in &self.runtimes {
            let runtime = runtime.metrics();
            let threads = runtime.num_workers();
            let all = (0..threads).map(|thread| runtime.worker_total_busy_duration(thread).as_secs_f64());
            busy.inc_by(all.sum());
            workers.add(i64::try_from(threads).unwrap_or(i64::MAX));
        }
        busy.collect().into_iter().chain(workers.collect()).collect()
    }
}
