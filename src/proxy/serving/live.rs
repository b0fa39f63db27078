//! Metrics of the current state, read on every scrape: gates, modes, drafters, and whether the
//! process drains.

use std::sync::Arc;

use prometheus::core::Collector;
use prometheus::{IntCounterVec, IntGauge, IntGaugeVec};

use super::drafters::Drafters;
use super::gates::GateWatch;
use foretell_core::words::{Gate, Mode};
use foretell_metrics as metric;
use foretell_net::fleet::identity::Identities;
use foretell_observe::make::{self, AtScrape, Made};
use foretell_policy::part::ModelState;
use foretell_policy::{Drafter, PolicySet, Vocabulary};

/// A collector for these parts of a running proxy. Their registry contains it, so its references to
/// them are weak: otherwise neither would ever be dropped.
///
/// # Errors
/// A metric has an invalid description, which is a bug.
pub fn collector(
    gates: &Arc<GateWatch>,
    identities: &Arc<Identities>,
    drafters: Arc<Drafters>,
) -> Made<impl Collector + use<>> {
    let (gates, identities) = (Arc::downgrade(gates), Arc::downgrade(identities));
    AtScrape::new(Families::new, move |families| {
        let (gates, identities) = (gates.upgrade()?, identities.upgrade()?);
        families.gates(&gates);
        families.modes(&gates);
        families.drafters(&drafters, &gates.policies().current(), &identities);
        Some(())
    })
}

/// The metrics of one scrape.
struct Families {
    open: IntGaugeVec,
    changes: IntCounterVec,
    mode: IntGaugeVec,
    draining: IntGauge,
    queue: IntGaugeVec,
    trained: IntGaugeVec,
    mismatch: IntGaugeVec,
}

impl Families {
    fn new(all: &mut make::Families) -> Made<Self> {
        Ok(Self {
            open: all.with(make::int_gauges(metric::GATE_OPEN))?,
            changes: all.with(make::counters(metric::GATE_TRANSITIONS))?,
            mode: all.with(make::int_gauges(metric::MODE))?,
            draining: all.with(make::int_gauge(metric::DRAINING))?,
            queue: all.with(make::int_gauges(metric::DRAFTER_QUEUE))?,
            trained: all.with(make::int_gauges(metric::DRAFTER_TRAINED))?,
            mismatch: all.with(make::int_gauges(metric::TOKENIZER_MISMATCH))?,
        })
    }

    fn gates(&self, gates: &GateWatch) {
        for at in gates.look() {
            for gate in Gate::ALL {
                let open = at.open.get(gate.position()).copied().unwrap_or(true);
                self.open.with_label_values(&[&*at.policy, &at.replica, gate.name()]).set(open.into());
            }
        }
        for (gate, changes) in Gate::ALL.into_iter().zip(gates.changes()) {
            for (to, count) in ["open", "closed"].into_iter().zip(changes) {
                self.changes.with_label_values(&[gate.name(), to]).inc_by(count);
            }
        }
    }

    fn modes(&self, gates: &GateWatch) {
        let shared = gates.shared();
        for backend in shared.fleet.names() {
            let now = shared.modes.of(backend);
            for mode in Mode::ALL {
                self.mode.with_label_values(&[backend, mode.name()]).set((mode == now).into());
            }
        }
        self.draining.set(shared.life.is_draining().into());
    }

    fn drafters(&self, drafters: &Drafters, policies: &PolicySet, identities: &Identities) {
        for (name, waiting) in drafters.waiting() {
            self.queue.with_label_values(&[&*name]).set(i64::try_from(waiting).unwrap_or(i64::MAX));
        }
        for (name, at) in drafters.trained() {
            self.trained.with_label_values(&[&*name]).set(i64::try_from(at).unwrap_or(i64::MAX));
        }
        let known = identities.all();
        for drafter in policies.policies().iter().flat_map(|policy| &policy.drafters) {
            let Drafter::Model { model, vocabulary: Vocabulary::Same, .. } = drafter else { continue };
            let differs = known
                .iter()
                .filter_map(|(_, identity)| identity.as_deref())
                .any(|identity| matches!(drafters.state(model, identity), ModelState::OtherVocabulary(_)));
            let gauge = self.mismatch.with_label_values(&[&**model]);
            gauge.set(gauge.get().max(differs.into()));
        }
    }
}
