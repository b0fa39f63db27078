//! Measurements that the sidecars of a fleet share: acceptance, classes and lengths by model, costs
//! by the process of an engine.
//!
//! Nothing is keyed by the name of a replica, which differs between sidecars: a model is known by
//! its id, weights and vocabulary, a process also by its version and start time. Engines that
//! report no start time share only the measurements of the model.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::Learnt;
use foretell_core::control::{Control, SharedCosts, SharedModel, pairs};
use foretell_net::fleet::identity::EngineStart;

/// Minimum start time, microseconds since 1970 (the year 2005). A smaller one is a count of outages
/// ([`EngineStart::started`]): this many microseconds
/// after 1970 is the year 2005.
const FIRST_START: u64 = 1 << 50;

/// A model, independent of the engine that serves it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ModelKey {
    model: String,
    weights: Option<String>,
    vocabulary: String,
}

impl ModelKey {
    fn of(engine_start: &EngineStart) -> Self {
        let EngineStart { model, weights, vocabulary, .. } = engine_start.clone();
        Self { model, weights, vocabulary }
    }
}

/// A process of an engine.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ProcessKey {
    model: ModelKey,
    version: String,
    started: u64,
}

impl ProcessKey {
    /// That of an engine start; `None` if its engine reports no start time.
    fn of(engine_start: &EngineStart) -> Option<Self> {
        let EngineStart { version, started, .. } = engine_start.clone();
        let key = Self { model: ModelKey::of(engine_start), version, started };
        (started >= FIRST_START).then_some(key)
    }

    fn is_sibling(&self, engine_start: &EngineStart) -> bool {
        self.version == engine_start.version
            && self.model == ModelKey::of(engine_start)
            && ProcessKey::of(engine_start).as_ref() != Some(self)
    }
}

/// The measurements of one sidecar, or the sums of several.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Statistics {
    #[serde(with = "pairs")]
    models: BTreeMap<ModelKey, SharedModel>,
    #[serde(with = "pairs")]
    processes: BTreeMap<ProcessKey, SharedCosts>,
}

impl Statistics {
    /// Adds the measurements of another sidecar.
    pub fn add(&mut self, other: &Self) {
        for (key, model) in &other.models {
            self.models.entry(key.clone()).or_default().add(model);
        }
        for (key, costs) in &other.processes {
            self.processes.entry(key.clone()).or_default().add(costs);
        }
    }

    /// Reduces the weights of costs that are `idle` seconds old.
    pub fn age(&mut self, idle: f64) {
        self.processes.values_mut().for_each(|costs| costs.age(idle));
    }

    /// True if nothing was measured.
    pub fn is_empty(&self) -> bool {
        self.models.values().all(SharedModel::is_empty) && self.processes.values().all(SharedCosts::is_empty)
    }

    fn add_engine(&mut self, engine_start: &EngineStart, model: &SharedModel, costs: &SharedCosts) {
        self.models.entry(ModelKey::of(engine_start)).or_default().add(model);
        if let Some(process) = ProcessKey::of(engine_start) {
            self.processes.entry(process).or_default().add(costs);
        }
    }

    /// The measurements of one model.
    fn of_model(&self, model: &ModelKey) -> Self {
        let models = self.models.get_key_value(model).into_iter();
        let processes = self.processes.iter().filter(|(key, _)| key.model == *model);
        let copy = |(key, costs): (&ProcessKey, &SharedCosts)| (key.clone(), costs.clone());
        Self {
            models: models.map(|(key, model)| (key.clone(), model.clone())).collect(),
            processes: processes.map(copy).collect(),
        }
    }

    /// The measurements that apply to an engine start.
    fn of(&self, engine_start: &EngineStart) -> (SharedModel, SharedCosts) {
        let model = self.models.get(&ModelKey::of(engine_start)).cloned().unwrap_or_default();
        let process = ProcessKey::of(engine_start).and_then(|key| self.processes.get(&key)).cloned();
        let mut siblings = SharedCosts::default();
        for (_, costs) in self.processes.iter().filter(|(key, _)| key.is_sibling(engine_start)) {
            siblings.add(costs);
        }
        (model, process.unwrap_or_default().or_probed(&siblings))
    }
}

/// An engine with the measurements of this sidecar.
struct LocalEngine {
    engine_start: EngineStart,
    control: Arc<Control>,
    model: SharedModel,
    costs: SharedCosts,
}

impl Learnt {
    /// Name of the local measurements in a store.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Name under which another process has written the measurements that were read from a
    /// snapshot: they are local ones now. `None` once they are known to be written under
    /// [`Self::name`].
    pub fn former(&self) -> Option<String> {
        self.former.lock().clone()
    }

    /// Notes that the measurements of the snapshot are written under [`Self::name`].
    pub fn forget_former(&self) {
        *self.former.lock() = None;
    }

    /// The local measurements of all engines, with their weights now.
    pub fn local(&self) -> Statistics {
        let mut sum = Statistics::default();
        for LocalEngine { engine_start, model, costs, .. } in self.engines(|_| true) {
            sum.add_engine(&engine_start, &model, &costs);
        }
        sum
    }

    /// Lends measurements of other sidecars to every engine, instead of those that were lent
    /// before, together with those of this sidecar's other engines of the same model.
    pub fn lend(&self, others: Statistics) {
        let others = Arc::new(others);
        *self.others.lock() = Some(Arc::clone(&others));
        let engines = self.engines(|_| true);
        for LocalEngine { engine_start, control, .. } in &engines {
            lend(&others, &engines, engine_start, control);
        }
    }

    /// Lends to an engine that is new here. Without a store, nothing.
    pub(super) fn lend_to(&self, engine_start: &EngineStart, control: &Control) {
        let Some(others) = self.others.lock().clone() else { return };
        let model = ModelKey::of(engine_start);
        let engines = self.engines(|other| ModelKey::of(other) == model);
        lend(&others, &engines, engine_start, control);
    }

    fn engines(&self, which: impl Fn(&EngineStart) -> bool) -> Vec<LocalEngine> {
        let engine = |(engine_start, control): (EngineStart, Arc<Control>)| {
            let (model, costs) = control.shared();
            LocalEngine { engine_start, control, model, costs }
        };
        self.controls().into_iter().filter(|(engine_start, _)| which(engine_start)).map(engine).collect()
    }
}

fn lend(others: &Statistics, engines: &[LocalEngine], engine_start: &EngineStart, control: &Control) {
    let model = ModelKey::of(engine_start);
    let mut sum = others.of_model(&model);
    for other in engines
        .iter()
        .filter(|other| other.engine_start != *engine_start && ModelKey::of(&other.engine_start) == model)
    {
        sum.add_engine(&other.engine_start, &other.model, &other.costs);
    }
    let (model, costs) = sum.of(engine_start);
    control.lend(&model, &costs);
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use foretell_core::units::Tick;

    fn engine_start(replica: &str, started: u64) -> EngineStart {
        EngineStart {
            replica: replica.to_owned(),
            model: "m".to_owned(),
            version: "1".to_owned(),
            started: FIRST_START + started,
            weights: None,
            vocabulary: "v".to_owned(),
        }
    }

    fn measure(control: &Control, token: f64) {
        control.with(|learnt| {
            (0..50).for_each(|_| learnt.note_plain(token, 1, Tick(0)));
            (0..20).for_each(|_| learnt.output_ended(2_000));
        });
    }

    /// Seconds per plain token, and the expected length of an output.
    fn figures(control: &Control) -> (Option<f64>, f64) {
        control.with(|learnt| (learnt.costs.plain_token(), learnt.expected_remainder(0).round()))
    }

    fn sidecar() -> Learnt {
        Learnt::new(HashMap::new())
    }

    #[test]
    fn a_sidecar_under_other_names_knows_the_process_again_and_a_new_replica_the_model() {
        let (one, other) = (sidecar(), sidecar());
        measure(&one.control_of(&engine_start("a/0", 7)), 0.02);
        other.lend(one.local());
        let same = figures(&other.control_of(&engine_start("b/3", 7)));
        assert!(same.0.is_some_and(|token| (token - 0.02).abs() < 1e-6), "{same:?}");
        let sibling = figures(&other.control_of(&engine_start("b/4", 8)));
        assert_eq!((sibling.0, sibling.1), (None, same.1), "another machine may have another pace");
        let stranger = EngineStart { vocabulary: "w".to_owned(), ..engine_start("b/3", 7) };
        assert_eq!(figures(&other.control_of(&stranger)), (None, 256.0));
        assert_eq!(other.local(), other.local());
        assert!(other.local().is_empty(), "what was lent is not its own");
    }

    #[test]
    fn a_new_replica_of_the_same_sidecar_begins_with_the_figures_of_the_others() {
        let learnt = sidecar();
        measure(&learnt.control_of(&engine_start("a/0", 7)), 0.02);
        let (_, unshared) = figures(&learnt.control_of(&engine_start("a/1", 8)));
        assert!((unshared - 256.0).abs() < 1e-9, "without a store nothing is shared");
        learnt.lend(Statistics::default());
        assert!(figures(&learnt.control_of(&engine_start("a/1", 8))).1 > 1_500.0);
        assert!(figures(&learnt.control_of(&engine_start("a/2", 9))).1 > 1_500.0);
    }

    #[test]
    fn an_engine_without_a_start_time_shares_what_depends_on_the_model() {
        let (one, other) = (sidecar(), sidecar());
        let restarts = EngineStart { started: 3, ..engine_start("a/0", 0) };
        measure(&one.control_of(&restarts), 0.02);
        other.lend(one.local());
        let (token, length) = figures(&other.control_of(&restarts));
        assert!(token.is_none() && length > 1_500.0);
    }

    #[tokio::test(start_paused = true)]
    async fn two_sidecars_that_lend_to_each_other_do_not_amplify_each_other() {
        let (one, other) = (sidecar(), sidecar());
        measure(&one.control_of(&engine_start("a/0", 7)), 0.02);
        let first = one.local();
        for _ in 0..10 {
            other.lend(one.local());
            other.control_of(&engine_start("a/0", 7));
            one.lend(other.local());
        }
        assert_eq!(one.local(), first);
        assert!(other.local().is_empty());
    }
}
