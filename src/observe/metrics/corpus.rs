//! Metrics of the corpus over requests.

use prometheus::{IntCounterVec, IntGauge};

use super::Maker;
use crate::make;
use foretell_core::draft::corpus::{Events, Holdings};
use foretell_metrics as metric;

/// The metrics of all tenants' texts together.
#[derive(Debug)]
pub struct CorpusMetrics {
    bytes: IntGauge,
    tokens: IntGauge,
    texts: IntGauge,
    events: IntCounterVec,
    recorded: IntCounterVec,
}

impl CorpusMetrics {
    pub(super) fn new(new: &Maker) -> Result<Self, prometheus::Error> {
        let metrics = Self {
            bytes: new.register(make::int_gauge(metric::CORPUS_BYTES))?,
            tokens: new.register(make::int_gauge(metric::CORPUS_TOKENS))?,
            texts: new.register(make::int_gauge(metric::CORPUS_TEXTS))?,
            events: new.register(make::counters(metric::CORPUS_EVENTS))?,
            recorded: new.register(make::counters(metric::RECORDED))?,
        };
        for result in ["written", "dropped", "failed"] {
            metrics.recorded.with_label_values(&[result]);
        }
        for event in ["learnt", "known", "evicted", "expired", "dropped"] {
            metrics.events.with_label_values(&[event]);
        }
        Ok(metrics)
    }

    /// Counts a text that was dropped because too many came.
    pub fn dropped(&self) {
        self.events.with_label_values(&["dropped"]).inc();
    }

    /// Counts a request that was to be recorded, by result: `written`, `dropped` or `failed`.
    pub fn recorded(&self, result: &str) {
        self.recorded.with_label_values(&[result]).inc();
    }

    /// Sets the current sizes, and the counts of events since the start.
    pub fn set(&self, sizes: Holdings, events: Events) {
        make::set(&self.bytes, sizes.bytes as u64);
        make::set(&self.tokens, sizes.tokens as u64);
        make::set(&self.texts, sizes.texts as u64);
        let Events { learnt, known, evicted, expired } = events;
        for (event, count) in
            [("learnt", learnt), ("known", known), ("evicted", evicted), ("expired", expired)]
        {
            let counter = self.events.with_label_values(&[event]);
            counter.inc_by(count.saturating_sub(counter.get()));
        }
    }
}
