//! Busy time of the network threads, read from their runtimes on every scrape.

use prometheus::core::Collector;
use prometheus::{Counter, Opts};
use tokio::runtime::Handle;

use crate::make::{self, AtScrape, Made};
use foretell_metrics as metric;

pub(super) fn collector(runtimes: Vec<Handle>) -> Made<impl Collector> {
    let make = |all: &mut make::Families| {
        let metric::Counter(busy) = metric::BUSY;
        let busy = all.with(Counter::with_opts(Opts::new(busy.name, busy.help)))?;
        Ok((busy, all.with(make::int_gauge(metric::WORKERS))?))
    };
    AtScrape::new(make, move |(busy, workers)| {
        for runtime in &runtimes {
            let runtime = runtime.metrics();
            let threads = runtime.num_workers();
            let all = (0..threads).map(|thread| runtime.worker_total_busy_duration(thread).as_secs_f64());
            busy.inc_by(all.sum());
            workers.add(i64::try_from(threads).unwrap_or(i64::MAX));
        }
        Some(())
    })
}
