//! Metrics of lossy accept rules: drift of outputs from the target's distribution, and positions
//! at which a rule was not relaxed.

use prometheus::{CounterVec, IntCounterVec};

use super::{Finished, Maker};
use crate::make;
use foretell_core::words::Ledger;
use foretell_metrics as metric;

/// The metrics of all outputs together.
#[derive(Debug)]
pub(super) struct DriftMetrics {
    tv: CounterVec,
    substitutions: IntCounterVec,
    positions: IntCounterVec,
}

impl DriftMetrics {
    pub(super) fn new(new: &Maker) -> Result<Self, prometheus::Error> {
        Ok(Self {
            tv: new.register(make::sums(metric::DRIFT_TV))?,
            substitutions: new.register(make::counters(metric::SUBSTITUTIONS))?,
            positions: new.register(make::counters(metric::DRIFT_POSITIONS))?,
        })
    }

    pub(super) fn finish(&self, finished: &Finished, policy: &str) {
        let drift = finished.speculation.drift;
        if drift == Ledger::default() {
            return;
        }
        self.tv.with_label_values(&[policy]).inc_by(drift.charged);
        self.substitutions.with_label_values(&[policy]).inc_by(u64::from(drift.substitutions));
        for (outcome, positions) in
            [("relaxed", drift.relaxed), ("unknown", drift.unknown), ("limited", drift.limited)]
        {
            self.positions.with_label_values(&[outcome]).inc_by(u64::from(positions));
        }
    }
}
