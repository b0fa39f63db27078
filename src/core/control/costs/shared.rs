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
use crate::units::Tick;

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
    /// Share of verify requests that decided nothing, by verification method.
    undecided: BTreeMap<usize, Sum>,
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
        add_all(&mut self.undecided, &other.undecided);
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
        for sum in self.undecided.values_mut() {
            *sum = sum.within(sum.1 * keep);
        }
    }

    /// True if nothing was measured.
    pub fn is_empty(&self) -> bool {
        self.verify.is_empty() && self.pace.is_empty() && self.undecided.is_empty()
    }

    /// These costs, and those of other processes of the same model where nothing was measured of
    /// this one: with the weight of a probe, and without their pace, since another machine may be
    /// another kind of machine.
    #[must_use]
    pub fn or_probed(mut self, siblings: &Self) -> Self {
        for (key, moments) in &siblings.verify {
            self.verify.entry(*key).or_insert_with(|| moments.within(SIBLINGS));
        }
        for (index, sum) in &siblings.undecided {
            self.undecided.entry(*index).or_insert_with(|| sum.within(SIBLINGS));
        }
        self
    }
}

impl Costs {
    /// The local measurements, with their weights at `now`, as they are shared.
    pub(in crate::control) fn local(&self, now: Tick) -> SharedCosts {
        let undecided = self.undecided.iter().map(|belief| belief.shared(now)).enumerate();
        SharedCosts {
            pace: self.pace.local(),
            verify: self.verify.local(),
            undecided: undecided.filter(|(_, sum)| sum.1 > 0.0).collect(),
        }
    }

    /// Replaces the measurements that others lent.
    pub(in crate::control) fn lend(&mut self, lent: &SharedCosts) {
        self.pace.lend(&lent.pace);
        self.verify.lend(&lent.verify, self.plain_token_expected());
        for (at, belief) in self.undecided.iter_mut().enumerate() {
            belief.lend(lent.undecided.get(&at).copied().unwrap_or_default());
        }
    }
}
