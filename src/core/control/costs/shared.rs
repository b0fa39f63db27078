//! Costs of an engine's process as sidecars share them.
//!
//! Times of model drafters are omitted, since they depend on the machine of the sidecar, and so is
//! all that depends on its requests.

use std::collections::BTreeMap;

use foretell_control::line::Moments;
use serde::{Deserialize, Serialize};

use super::pace::KNOWN;
use super::verify::VerifyKey;
use super::{Costs, FADES};
use crate::control::shared::{Sum, add_all};

/// Weight of the measurements of another process of the same model, in measurements.
const SIBLINGS: f64 = 0.5;
/// Most lines in a sum: those of others come from outside.
const LINES: usize = 1_024;

/// Measured costs of an engine's process, as they are shared.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SharedCosts {
    /// Seconds of clean plain steps, and steps, by concurrency.
    pace: BTreeMap<usize, Sum>,
    #[serde(with = "crate::control::pairs")]
    verify: BTreeMap<VerifyKey, Moments>,
}

impl SharedCosts {
    /// Adds the measurements of another sidecar.
    pub fn add(&mut self, other: &Self) {
        add_all(&mut self.pace, &other.pace);
        for (key, moments) in other.verify.iter().filter(|(key, _)| key.is_valid()) {
            if self.verify.len() < LINES || self.verify.contains_key(key) {
                self.verify.entry(*key).or_default().merge(moments);
            }
        }
    }

    /// Reduces the weights by `idle` seconds without a measurement.
    pub fn age(&mut self, idle: f64) {
        let keep = FADES / (FADES + idle.max(0.0));
        for pace in self.pace.values_mut() {
            *pace = pace.within((pace.1 * keep).max(KNOWN));
        }
        for moments in self.verify.values_mut() {
            *moments = moments.within(moments.weight * keep);
        }
    }

    /// True if nothing was measured.
    pub fn is_empty(&self) -> bool {
        self.verify.is_empty() && self.pace.is_empty()
    }

    /// These costs, and those of other processes of the same model where nothing was measured of
    /// this one: with the weight of a probe, and without their pace, since another machine may be
    /// another kind of machine.
    #[must_use]
    pub fn or_probed(mut self, siblings: &Self) -> Self {
        for (key, moments) in &siblings.verify {
            self.verify.entry(*key).or_insert_with(|| moments.within(SIBLINGS));
        }
        self
    }
}

impl Costs {
    /// The local measurements, as they are shared.
    pub(in crate::control) fn local(&self) -> SharedCosts {
        SharedCosts { pace: self.pace.local(), verify: self.verify.local() }
    }

    /// Replaces the measurements that others lent.
    pub(in crate::control) fn lend(&mut self, lent: &SharedCosts) {
        self.pace.lend(&lent.pace);
        self.verify.lend(&lent.verify, self.plain_token_expected());
    }
}
