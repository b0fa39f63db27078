//! Metrics of the current state, read on every scrape: gates, modes, drafters, and whether the
//! process drains.

use std::sync::{Arc, Weak};

use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{IntCounterVec, IntGauge, IntGaugeVec};

use super::drafters::Drafters;
use super::gates::GateWatch;
use crate::fleet::identity::Identities;
use crate::observe::make;
use foretell_core::words::{Gate, Mode, metric};
use foretell_engines::policy::part::ModelState;
use foretell_engines::policy::{Drafter, PolicySet, Vocabulary};

/// Collects them. Its sources hold the registry that holds this, so they are held weakly: otherwise
/// neither would ever be dropped.
pub struct LiveMetrics {
    gates: Weak<GateWatch>,
    identities: Weak<Identities>,
    drafters: Arc<Drafters>,
    /// Always empty: only the descriptions are used.
    described: Families,
}

/// The metrics of one scrape.
struct Families {
    open: IntGaugeVec,
    changes: IntCounterVec,
    mode: IntGaugeVec,
    draining: IntGauge,
    queue: IntGaugeVec,
    mismatch: IntGaugeVec,
}

impl Families {
    fn new() -> Result<Self, prometheus::Error> {
        Ok(Self {
            open: make::levels(metric::GATE_OPEN)?,
            changes: make::counters(metric::GATE_TRANSITIONS)?,
            mode: make::levels(metric::MODE)?,
            draining: make::level(metric::DRAINING)?,
            queue: make::levels(metric::DRAFTER_QUEUE)?,
            mismatch: make::levels(metric::TOKENIZER_MISMATCH)?,
        })
    }

    fn all(&self) -> [&dyn Collector; 6] {
        [&self.open, &self.changes, &self.mode, &self.draining, &self.queue, &self.mismatch]
    }
}

impl LiveMetrics {
    /// A collector for these parts of a running proxy.
    ///
    /// # Errors
    /// A metric has an invalid description, which is a bug.
    pub fn new(
        gates: &Arc<GateWatch>,
        identities: &Arc<Identities>,
        drafters: Arc<Drafters>,
    ) -> Result<Self, prometheus::Error> {
        let (gates, identities) = (Arc::downgrade(gates), Arc::downgrade(identities));
        Ok(Self { gates, identities, drafters, described: Families::new()? })
    }

    fn gates(families: &Families, gates: &GateWatch) {
        for at in gates.look() {
            for gate in Gate::ALL {
                let open = at.open.get(gate.position()).copied().unwrap_or(true);
                families.open.with_label_values(&[&*at.policy, &at.replica, gate.name()]).set(open.into());
            }
        }
        for (gate, changes) in Gate::ALL.into_iter().zip(gates.changes()) {
            for (to, count) in ["open", "closed"].into_iter().zip(changes) {
                families.changes.with_label_values(&[gate.name(), to]).inc_by(count);
            }
        }
    }

    fn modes(families: &Families, gates: &GateWatch) {
        let shared = gates.shared();
        for backend in shared.fleet.names() {
            let now = shared.modes.of(backend);
            for mode in Mode::ALL {
                families.mode.with_label_values(&[backend, mode.name()]).set((mode == now).into());
            }
        }
        families.draining.set(shared.life.is_draining().into());
    }

    fn drafters(&self, families: &Families, policies: &PolicySet, identities: &Identities) {
        for (name, waiting) in self.drafters.waiting() {
            families.queue.with_label_values(&[&*name]).set(i64::try_from(waiting).unwrap_or(i64::MAX));
        }
        let known = identities.all();
        for drafter in policies.policies().iter().flat_map(|policy| &policy.drafters) {
            let Drafter::Model { model, vocabulary: Vocabulary::Same } = drafter else { continue };
            let differs = known.iter().filter_map(|(_, identity)| identity.as_deref()).any(|identity| {
                matches!(self.drafters.state(model, identity), ModelState::OtherVocabulary(_))
            });
            let gauge = families.mismatch.with_label_values(&[&**model]);
            gauge.set(gauge.get().max(differs.into()));
        }
    }
}

impl Collector for LiveMetrics {
    fn desc(&self) -> Vec<&Desc> {
        self.described.all().into_iter().flat_map(Collector::desc).collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let (Some(gates), Some(identities)) = (self.gates.upgrade(), self.identities.upgrade()) else {
            return Vec::new();
        };
        let Ok(families) = Families::new() else { return Vec::new() };
        Self::gates(&families, &gates);
        Self::modes(&families, &gates);
        self.drafters(&families, &gates.policies().current(), &identities);
        families.all().into_iter().flat_map(Collector::collect).collect()
    }
}
