//! Metrics of the client side, read from its counters on every scrape: connections, requests
//! refused because of their head, and memory used on behalf of clients.

use std::sync::Arc;

use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{IntCounter, IntCounterVec, IntGauge};

use super::make;
use crate::http::connections::Connections;
use crate::http::memory::Memory;
use foretell_core::words::metric;

/// Collects the metrics of connections and memory.
pub struct EdgeMetrics {
    memory: Arc<Memory>,
    connections: Arc<Connections>,
    /// Always at zero: only the descriptions are used.
    described: Families,
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

impl EdgeMetrics {
    /// A collector for this memory budget and these connections.
    ///
    /// # Errors
    /// A metric has an invalid description, which is a bug.
    pub fn new(memory: Arc<Memory>, connections: Arc<Connections>) -> Result<Self, prometheus::Error> {
        Ok(Self { memory, connections, described: Families::new()? })
    }
}

impl Collector for EdgeMetrics {
    fn desc(&self) -> Vec<&Desc> {
        self.described.all().into_iter().flat_map(Collector::desc).collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let Ok(families) = Families::new() else { return Vec::new() };
        families.show(&self.memory, &self.connections);
        families.all().into_iter().flat_map(Collector::collect).collect()
    }
}

impl Families {
    fn new() -> Result<Self, prometheus::Error> {
        Ok(Self {
            memory: make::level(metric::MEMORY)?,
            memory_limit: make::level(metric::MEMORY_LIMIT)?,
            connections: make::level(metric::CONNECTIONS)?,
            connections_limit: make::level(metric::CONNECTIONS_LIMIT)?,
            evicted: make::counter(metric::CONNECTIONS_EVICTED)?,
            failed: make::counter(metric::CONNECTIONS_FAILED)?,
            refused: make::counters(metric::REFUSED)?,
        })
    }

    fn all(&self) -> [&dyn Collector; 7] {
        [
            &self.memory,
            &self.memory_limit,
            &self.connections,
            &self.connections_limit,
            &self.evicted,
            &self.failed,
            &self.refused,
        ]
    }

    fn show(&self, memory: &Memory, connections: &Connections) {
        let level = |gauge: &IntGauge, value: u64| gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
        level(&self.memory, memory.used());
        level(&self.memory_limit, memory.limit());
        level(&self.connections, connections.open() as u64);
        level(&self.connections_limit, connections.limit() as u64);
        self.evicted.inc_by(connections.evicted());
        self.failed.inc_by(connections.failed());
        for (refusal, count) in connections.refused() {
            self.refused.with_label_values(&[refusal.code()]).inc_by(count);
        }
    }
}
