//! Metrics of the drafters' memory over requests.

use prometheus::{IntCounterVec, IntGauge};

use super::Maker;
use crate::draft::memory::{Events, Holdings};

/// The metrics of all shelves together.
#[derive(Debug)]
pub struct MemoryMetrics {
    bytes: IntGauge,
    tokens: IntGauge,
    texts: IntGauge,
    successors: IntGauge,
    events: IntCounterVec,
}

impl MemoryMetrics {
    pub(super) fn new(new: &Maker) -> Result<Self, prometheus::Error> {
        let metrics = Self {
            bytes: new.level("foretell_remembered_bytes", "Bytes that earlier texts and successors take, for drafters to look up.")?,
            tokens: new.level("foretell_remembered_tokens", "Tokens of these texts.")?,
            texts: new.level("foretell_remembered_texts", "Texts that are remembered.")?,
            successors: new.level("foretell_remembered_successors", "Tokens whose likely successors are remembered, over all tenants.")?,
            events: new.counters(
                "foretell_remembered_texts_total",
                "Texts that were learnt, known already, evicted for room, expired, or dropped because too many came.",
                &["event"],
            )?,
        };
        for event in ["learnt", "known", "evicted", "expired", "dropped"] {
            metrics.events.with_label_values(&[event]);
        }
        Ok(metrics)
    }

    /// A text was not learnt because too many came at once.
    pub fn dropped(&self) {
        self.events.with_label_values(&["dropped"]).inc();
    }

    /// What is held now, and what has happened since the start.
    pub fn holds(&self, held: Holdings, events: Events) {
        let level = |gauge: &IntGauge, value: usize| gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
        level(&self.bytes, held.bytes);
        level(&self.tokens, held.tokens);
        level(&self.texts, held.texts);
        level(&self.successors, held.successors);
        let Events { learnt, known, evicted, expired } = events;
        for (event, count) in
            [("learnt", learnt), ("known", known), ("evicted", evicted), ("expired", expired)]
        {
            let counter = self.events.with_label_values(&[event]);
            counter.inc_by(count.saturating_sub(counter.get()));
        }
    }
}
