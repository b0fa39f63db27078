//! Measurements as sidecars of one fleet share them: sums and their weights, without the state of
//! any one process, so that those of many are added up in any order.
//!
//! A sidecar stores local measurements apart from those of others, and shares local ones only: none
//! is counted twice. Those of others are *lent*: they fill the memory that local ones leave free,
//! so a new sidecar begins with what the others know, and one with enough local measurements
//! decides as if it were alone.

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Serialize, Serializer};

use super::costs::SharedCosts;
use super::state::{Class, EngineStartState};
use super::survival::TemperatureBucket;
use super::{Control, MAX_MODELS, Sums, Survival};
use crate::draft::{DrafterId, Source};

/// Limit of every mean and every weight (seconds, tokens, observations): far above any real one.
/// Calculations with figures below it stay below those that a snapshot refuses.
pub(super) const MAX: f64 = 1e12;

/// A sum of a quantity over measurements, and their number or weight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
pub struct Sum(pub f64, pub f64);

/// With five significant digits, which is more than any of these figures is worth.
impl Serialize for Sum {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        (rounded(self.0), rounded(self.1)).serialize(serializer)
    }
}

fn rounded(figure: f64) -> f64 {
    format!("{figure:.4e}").parse().unwrap_or(0.0)
}

impl Sum {
    /// Adds the measurements of another sum. An invalid one is ignored: it may come from outside.
    pub fn add(&mut self, other: Self) {
        if other.is_valid() {
            *self = Self(self.0 + other.0, self.1 + other.1);
        }
    }

    /// Mean of the quantity; `None` without measurements.
    pub fn mean(self) -> Option<f64> {
        (self.1 > 0.0).then(|| self.0 / self.1)
    }

    /// The same mean with a weight of at most `room`.
    #[must_use]
    pub fn within(self, room: f64) -> Self {
        let share = (room.max(0.0) / self.1.max(f64::MIN_POSITIVE)).min(1.0);
        Self(self.0 * share, self.1 * share)
    }

    fn is_valid(self) -> bool {
        (1.0 / MAX..MAX).contains(&self.1) && (0.0..MAX * self.1).contains(&self.0)
    }
}

/// Adds every sum of `other` to the one in `sums` with the same key.
pub(super) fn add_all<K: Ord + Clone>(sums: &mut BTreeMap<K, Sum>, other: &BTreeMap<K, Sum>) {
    for (key, sum) in other {
        sums.entry(key.clone()).or_default().add(*sum);
    }
}

/// A class as it is shared: the drafter's name, the index of the temperature bucket, the kind of
/// request.
type SharedClass = (String, usize, u64);

/// Measurements that depend on the model alone, as they are shared.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SharedModel {
    /// Accepted and tried draft tokens: by drafter's name, and index in its row of cells.
    acceptance: BTreeMap<String, BTreeMap<usize, Sum>>,
    #[serde(with = "super::pairs")]
    classes: BTreeMap<SharedClass, Sums>,
    /// Tokens of outputs, and outputs.
    length: Sum,
}

impl SharedModel {
    /// Maximum number of classes in a sum: those of others come from outside.
    const CLASSES: usize = 4_096;

    /// Adds the measurements of another sidecar, or of another replica.
    pub fn add(&mut self, other: &Self) {
        for (drafter, cells) in &other.acceptance {
            if self.acceptance.len() < MAX_MODELS + Source::ALL.len() || self.acceptance.contains_key(drafter)
            {
                add_all(self.acceptance.entry(drafter.clone()).or_default(), cells);
            }
        }
        for (class, rounds) in &other.classes {
            if self.classes.len() < Self::CLASSES || self.classes.contains_key(class) {
                self.classes.entry(class.clone()).or_default().add(*rounds);
            }
        }
        self.length.add(other.length);
    }

    /// True if nothing was measured.
    pub fn is_empty(&self) -> bool {
        self.acceptance.is_empty() && self.classes.is_empty() && self.length == Sum::default()
    }

    fn of(engine_start: &EngineStartState) -> Self {
        let mut shared = Self { length: engine_start.length.shared(), ..Self::default() };
        for drafter in drafters(&engine_start.models) {
            let cells = engine_start.survival.shared(drafter);
            if let Some(name) = name_of(drafter, &engine_start.models)
                && !cells.is_empty()
            {
                shared.acceptance.insert(name, cells);
            }
        }
        for (class, rounds) in engine_start.classes.iter() {
            if let Some(name) = name_of(class.drafter(), &engine_start.models) {
                let class = (name, class.bucket().index(), class.kind());
                shared.classes.insert(class, rounds.shared());
            }
        }
        shared
    }

    /// The drafters that are known here by these names, or get a number.
    fn numbered(&self, models: &mut Vec<String>) -> HashMap<&str, DrafterId> {
        let names = self.acceptance.keys().chain(self.classes.keys().map(|(name, ..)| name));
        let numbered = names.filter_map(|name| Some((name.as_str(), drafter_of(name, models)?)));
        numbered.collect()
    }

    /// Counts of acceptance, by drafter.
    fn rows<'a>(&'a self, numbers: &HashMap<&str, DrafterId>) -> Vec<(DrafterId, &'a BTreeMap<usize, Sum>)> {
        let rows = self.acceptance.iter();
        rows.filter_map(|(name, cells)| Some((*numbers.get(name.as_str())?, cells))).collect()
    }

    fn rounds(&self, numbers: &HashMap<&str, DrafterId>) -> HashMap<Class, Sums> {
        let class = |(name, bucket, kind): &SharedClass| {
            let (drafter, bucket) = (numbers.get(name.as_str())?, TemperatureBucket::ALL.get(*bucket)?);
            Some(Class::new(*drafter, *bucket, *kind))
        };
        let classes = self.classes.iter();
        classes.filter_map(|(key, rounds)| Some((class(key)?, *rounds))).collect()
    }
}

/// Every drafter of an engine start whose model drafters have these names.
fn drafters(models: &[String]) -> impl Iterator<Item = DrafterId> {
    let lookups = Source::ALL.into_iter().filter(|source| *source != Source::Model);
    let models = (0..=u8::MAX).zip(models).map(|(number, _)| DrafterId::model(number));
    lookups.map(DrafterId::from).chain(models)
}

/// Prefix of a model drafter's shared name.
const MODEL: &str = "model:";

/// The name under which a drafter's measurements are shared. Each process numbers its models in
/// another order.
fn name_of(drafter: DrafterId, models: &[String]) -> Option<String> {
    match drafter.source {
        Source::Model => models.get(usize::from(drafter.number)).map(|name| format!("{MODEL}{name}")),
        source => Some(source.name().to_owned()),
    }
}

/// The drafter of a shared name. A model that is not known here yet gets a number, as long as there
/// is a free one.
fn drafter_of(name: &str, models: &mut Vec<String>) -> Option<DrafterId> {
    let Some(model) = name.strip_prefix(MODEL) else {
        let source = Source::ALL.into_iter().find(|source| source.name() == name);
        return source.filter(|source| *source != Source::Model).map(DrafterId::from);
    };
    let known = models.iter().position(|known| known == model);
    let position = known.or_else(|| {
        let has_room = models.len() + 1 < MAX_MODELS;
        has_room.then(|| {
            models.push(model.to_owned());
            models.len() - 1
        })
    });
    position.and_then(|position| u8::try_from(position).ok()).map(DrafterId::model)
}

impl Control {
    /// The local measurements as they are shared: those of the model, and those of the engine's
    /// process.
    pub fn shared(&self) -> (SharedModel, SharedCosts) {
        let (replica, engine_start) = &*self.states.lock();
        (SharedModel::of(engine_start), replica.costs.local())
    }

    /// Replaces the measurements that others lent.
    pub fn lend(&self, model: &SharedModel, costs: &SharedCosts) {
        let numbers = model.numbered(&mut self.states.lock().1.models);
        // Sessions wait for the lock: the tables are made outside of it.
        let (cells, rounds) = (Survival::table(&model.rows(&numbers)), model.rounds(&numbers));
        let (replica, engine_start) = &mut *self.states.lock();
        engine_start.survival.lend(cells);
        engine_start.classes.lend(rounds);
        engine_start.length.lend(model.length);
        replica.costs.lend(costs);
    }
}

#[cfg(test)]
mod tests;
