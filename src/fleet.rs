//! The servers behind Foretell: how to reach them, which one answers for a model, how calls to them fail.

pub mod backend;
pub mod error;
pub mod link;
pub mod models;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

pub use backend::{Backend, BackendSettings, InvalidUrl};
pub use error::{SendError, SendErrorKind};
pub use link::Answer;
pub use models::ModelName;

/// All backends, in the order of the configuration. Entries with the same name are replicas of one backend.
#[derive(Debug)]
pub struct Fleet {
    backends: Vec<Arc<Backend>>,
    turn: AtomicUsize,
}

impl Fleet {
    /// A fleet of these backends.
    #[must_use]
    pub fn new(backends: Vec<Arc<Backend>>) -> Self {
        Self { backends, turn: AtomicUsize::new(0) }
    }

    /// Every backend, in the order of the configuration.
    pub fn backends(&self) -> &[Arc<Backend>] {
        &self.backends
    }

    /// Whether the model named in a body can change where the request goes.
    pub fn needs_model(&self) -> bool {
        let first = self.backends.first().map(|backend| backend.name());
        self.backends.iter().any(|backend| Some(backend.name()) != first)
    }

    /// Who answers for `model`: exact id, alias, glob; else the only backend; else the one marked default;
    /// else the first, whose own 404 the client gets. `None` only for an empty fleet.
    pub fn pick(&self, model: Option<&str>) -> Option<Arc<Backend>> {
        let chosen = model
            .and_then(|model| {
                let best = self.backends.iter().filter_map(|b| b.answers_for(model).map(|rank| (rank, b)));
                best.min_by_key(|(rank, _)| *rank).map(|(_, backend)| backend)
            })
            .or_else(|| self.backends.iter().find(|backend| backend.is_default()))
            .or_else(|| self.backends.first())?;
        Some(self.replica_of(chosen))
    }

    /// Takes turns among the replicas of `chosen` that were reachable last time.
    fn replica_of(&self, chosen: &Arc<Backend>) -> Arc<Backend> {
        let same = || self.backends.iter().filter(|backend| backend.name() == chosen.name());
        if same().nth(1).is_none() {
            return Arc::clone(chosen);
        }
        let up = same().filter(|backend| backend.is_up()).count();
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let picked = match up {
            0 => same().nth(turn % same().count().max(1)),
            _ => same().filter(|backend| backend.is_up()).nth(turn % up),
        };
        Arc::clone(picked.unwrap_or(chosen))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn backend(name: &str, url: &str, models: &[&str], default: bool) -> Arc<Backend> {
        let models =
            models.iter().map(|id| ModelName { id: (*id).to_owned(), aliases: Vec::new() }).collect();
        let settings = BackendSettings { models, default, ..BackendSettings::new(name, url) };
        Arc::new(Backend::new(settings).unwrap())
    }

    fn chosen(fleet: &Fleet, model: Option<&str>) -> String {
        fleet.pick(model).unwrap().name().to_owned()
    }

    #[test]
    fn an_exact_id_wins_over_a_glob_that_stands_before_it() {
        let fleet = Fleet::new(vec![
            backend("loras", "http://a", &["lora-*"], false),
            backend("one", "http://b", &["lora-one"], false),
        ]);
        assert_eq!(chosen(&fleet, Some("lora-one")), "one");
        assert_eq!(chosen(&fleet, Some("lora-two")), "loras");
    }

    #[test]
    fn an_unknown_model_goes_to_the_default_and_else_to_the_first() {
        let a = || backend("a", "http://a", &["m"], false);
        let fleet = Fleet::new(vec![a(), backend("b", "http://b", &[], true)]);
        assert_eq!(chosen(&fleet, Some("who")), "b");
        assert_eq!(chosen(&fleet, None), "b");
        let fleet = Fleet::new(vec![a(), backend("b", "http://b", &[], false)]);
        assert_eq!(chosen(&fleet, Some("who")), "a");
        assert!(Fleet::new(Vec::new()).pick(None).is_none());
    }

    #[test]
    fn replicas_take_turns_and_one_that_is_down_is_passed_over() {
        let fleet = Fleet::new(vec![
            backend("a", "http://one", &[], false),
            backend("a", "http://two", &[], false),
            backend("a", "http://three", &[], false),
        ]);
        let urls = |n: usize| -> Vec<String> {
            (0..n).map(|_| fleet.pick(None).unwrap().url().to_owned()).collect()
        };
        assert_eq!(urls(3), ["http://one", "http://two", "http://three"]);
        fleet.backends()[1].mark(false);
        assert!(urls(8).iter().all(|url| url != "http://two"));
    }
}
