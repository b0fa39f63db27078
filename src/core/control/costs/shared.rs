//! Costs of an engine's process as sidecars share them.
//!
//! Times of model drafters are omitted, since they depend on the machine of the sidecar, and so is
//! all that depends on its requests.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::pace::KNOWN;
use super::table::TableKey;
use super::{Belief, Costs, PRIOR_WEIGHT};
use crate::control::belief::IDLE_HALF_WEIGHT;
use crate::control::shared::{Sum, add_all};
use crate::units::Tick;

/// Seconds and their weight, by concurrency bucket or verification method.
type ByIndex = BTreeMap<usize, Sum>;

/// Measured costs of an engine's process, as they are shared.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SharedCosts {
    /// Seconds of plain tokens, and tokens.
    pace: ByIndex,
    /// Seconds of verify requests, by key of the table and number of draft nodes.
    #[serde(with = "crate::control::pairs")]
    verify: BTreeMap<TableKey, ByIndex>,
    /// Share of verify requests that decided nothing.
    undecided: ByIndex,
    switch_in: ByIndex,
    switch_out: ByIndex,
}

impl SharedCosts {
    /// Adds the measurements of another sidecar.
    pub fn add(&mut self, other: &Self) {
        add_all(&mut self.pace, &other.pace);
        for (key, times) in other.verify.iter().filter(|(key, _)| key.is_valid()) {
            add_all(self.verify.entry(*key).or_default(), times);
        }
        add_all(&mut self.undecided, &other.undecided);
        add_all(&mut self.switch_in, &other.switch_in);
        add_all(&mut self.switch_out, &other.switch_out);
    }

    /// Reduces the weights by `idle` seconds without a measurement; a pace stays known.
    pub fn age(&mut self, idle: f64) {
        let keep = IDLE_HALF_WEIGHT / (IDLE_HALF_WEIGHT + idle.max(0.0));
        for pace in self.pace.values_mut() {
            *pace = pace.within((pace.1 * keep).max(KNOWN));
        }
        let tables = self.verify.values_mut();
        let tables = tables.chain([&mut self.undecided, &mut self.switch_in, &mut self.switch_out]);
        for sum in tables.flat_map(BTreeMap::values_mut) {
            *sum = sum.within(sum.1 * keep);
        }
    }

    /// True if nothing was measured.
    pub fn is_empty(&self) -> bool {
        let tables = [&self.pace, &self.undecided, &self.switch_in, &self.switch_out];
        self.verify.is_empty() && tables.iter().all(|table| table.is_empty())
    }

    /// These costs, and those of other processes of the same model where nothing was measured of
    /// this one: with the weight of a probe, and without their pace, since another machine may be
    /// another kind of machine.
    #[must_use]
    pub fn or_probed(mut self, siblings: &Self) -> Self {
        for (key, times) in &siblings.verify {
            fill(self.verify.entry(*key).or_default(), times);
        }
        fill(&mut self.undecided, &siblings.undecided);
        fill(&mut self.switch_in, &siblings.switch_in);
        fill(&mut self.switch_out, &siblings.switch_out);
        self
    }
}

fn fill(sums: &mut ByIndex, siblings: &ByIndex) {
    for (index, sum) in siblings {
        sums.entry(*index).or_insert_with(|| sum.within(PRIOR_WEIGHT));
    }
}

fn shared(beliefs: &[Belief], now: Tick) -> ByIndex {
    let sums = beliefs.iter().map(|belief| belief.shared(now)).enumerate();
    sums.filter(|(_, sum)| sum.1 > 0.0).collect()
}

fn lend(beliefs: &mut [Belief], lent: &ByIndex) {
    for (at, belief) in beliefs.iter_mut().enumerate() {
        belief.lend(lent.get(&at).copied().unwrap_or_default());
    }
}

impl Costs {
    /// The local measurements, with their weights at `now`, as they are shared.
    pub(in crate::control) fn local(&self, now: Tick) -> SharedCosts {
        SharedCosts {
            pace: self.pace.shared(now),
            verify: self.verify.measured().map(|(key, means)| (key, shared(means, now))).collect(),
            undecided: shared(&self.undecided, now),
            switch_in: shared(&self.switch_in, now),
            switch_out: shared(&self.switch_out, now),
        }
    }

    /// Replaces the measurements that others lent.
    pub(in crate::control) fn lend(&mut self, lent: &SharedCosts, now: Tick) {
        self.pace.lend(&lent.pace);
        lend(&mut self.undecided, &lent.undecided);
        lend(&mut self.switch_in, &lent.switch_in);
        lend(&mut self.switch_out, &lent.switch_out);
        let token = self.plain_token_expected();
        self.verify.lend(&lent.verify, token, now);
    }
}
