//! Metrics of lossy accept rules: how far outputs drifted from the target's own law, and where a rule was not relaxed.

use prometheus::{CounterVec, IntCounterVec};

use super::{Finished, Maker};
use crate::words::Ledger;

/// The metrics of all outputs together.
#[derive(Debug)]
pub(super) struct DriftMetrics {
    tv: CounterVec,
    substitutions: IntCounterVec,
    places: IntCounterVec,
}

impl DriftMetrics {
    pub(super) fn new(new: &Maker) -> Result<Self, prometheus::Error> {
        Ok(Self {
            tv: new.sums(
                "foretell_drift_tv_total",
                "Total variation charged to outputs, by policy: a bound on how far they are from the target's own law.",
                &["policy"],
            )?,
            substitutions: new.counters(
                "foretell_drift_substitutions_total",
                "Tokens that the target had not chosen.",
                &["policy"],
            )?,
            places: new.counters(
                "foretell_drift_places_total",
                "Places with a draft token under a lossy rule: relaxed, or exact because probabilities are unknown or a limit of drift is reached.",
                &["outcome"],
            )?,
        })
    }

    pub(super) fn finish(&self, finished: &Finished, policy: &str) {
        let drift = finished.drift;
        if drift == Ledger::default() {
            return;
        }
        self.tv.with_label_values(&[policy]).inc_by(drift.tv);
        self.substitutions.with_label_values(&[policy]).inc_by(u64::from(drift.substitutions));
        for (outcome, places) in
            [("relaxed", drift.relaxed), ("unknown", drift.unknown), ("limited", drift.limited)]
        {
            self.places.with_label_values(&[outcome]).inc_by(u64::from(places));
        }
    }
}
