//! Metrics of the client side, read from its counters on every scrape: connections, requests
//! refused because of their head, and memory used on behalf of clients.

use std::sync::Arc;

use prometheus::core::Collector;
use prometheus::{IntCounter, IntCounterVec, IntGauge};

use super::make::{self, AtScrape, Made};
use foretell_metrics as metric;
use foretell_net::http::connections::Connections;
use foretell_net::http::memory::Memory;

/// A collector for this memory budget and these connections.
///
/// # Errors
/// A metric has an invalid description, which is a bug.
pub fn collector(memory: Arc<Memory>, connections: Arc<Connections>) -> Made<impl Collector> {
    AtScrape::new(Families::new, move |families| {
        families.show(&memory, &connections);
        Some(())
    })
}

struct Families {
    memory: IntGauge,
    memory_limit: IntGauge,
    connections: IntGauge,
    connections_limit: IntGauge,
    evicted: IntCounter,
    failed: IntCounter,
    refused: IntCounterVec,
}

impl Families {
    fn new(all: &mut make::Families) -> Made<Self> {
        Ok(Self {
            memory: all.with(make::int_gauge(metric::MEMORY))?,
            memory_limit: all.with(make::int_gauge(metric::MEMORY_LIMIT))?,
            connections: all.with(make::int_gauge(metric::CONNECTIONS))?,
            connections_limit: all.with(make::int_gauge(metric::CONNECTIONS_LIMIT))?,
            evicted: all.with(make::counter(metric::CONNECTIONS_EVICTED))?,
            failed: all.with(make::counter(metric::CONNECTIONS_FAILED))?,
            refused: all.with(make::counters(metric::REFUSED))?,
        })
    }

    fn show(&self, memory: &Memory, connections: &Connections) {
        make::set(&self.memory, memory.used());
        make::set(&self.memory_limit, memory.limit());
        make::set(&self.connections, connections.open() as u64);
        make::set(&self.connections_limit, connections.limit() as u64);
        self.evicted.inc_by(connections.evicted());
        self.failed.inc_by(connections.failed());
        for (refusal, count) in connections.refused() {
            self.refused.with_label_values(&[refusal.code()]).inc_by(count);
        }
    }
}
