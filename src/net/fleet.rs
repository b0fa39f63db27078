//! The servers behind Foretell: selects the backend and replica for a model, and classifies failed
//! calls.
//!
//! A backend is a service of a model; each of its replicas has one KV cache and is addressed by
//! itself, since a session that moved would have to recompute its context. A request picks a
//! replica once, and its later calls go there too.

mod backend;
pub mod breaker;
pub mod discover;
pub mod error;
pub mod first_calls;
mod health;
pub mod identity;
pub mod key;
pub mod link;
mod liveness;
pub mod load;
pub mod models;
pub mod probe;
pub mod replica;
mod reread;
mod retry;
pub mod rounds_seen;
mod silence;
pub mod tie;
pub mod tls;
mod watch;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use prometheus::HistogramVec;
use tokio::sync::watch as channel;

use crate::random::SharedSplitMix64;
use foretell_metrics::{Metric, REPLICA_CONNECT};
use foretell_wire::openai::Api;

pub use breaker::BreakerState;
pub use discover::{Resolve, SystemResolver};
pub use error::{REQUEST_TIMEOUT, SendError, SendErrorKind};
pub use first_calls::FirstCall;
pub use health::{HealthState, LastError};
pub use key::KeyFile;
pub use link::{Answer, BrokenOff};
pub use load::Load;
pub use models::ModelName;
pub use replica::{Auth, Counters, Fresh, InvalidUrl, Probed, Repeatable, Replica, ReplicaSettings};

use backend::Backend;
use retry::RetryBudget;

/// All backends, in the order of the configuration, and their current replicas.
#[derive(Debug)]
pub struct Fleet {
    backends: Vec<Backend>,
    changed: channel::Sender<u64>,
    rng: SharedSplitMix64,
    budget: RetryBudget,
    connects: HistogramVec,
    /// Host names whose last lookup failed.
    unresolved: Mutex<BTreeSet<String>>,
}

impl Fleet {
    /// A fleet at these addresses; those of one name are replicas of one backend. Opens no
    /// connection and resolves no name.
    ///
    /// # Errors
    /// An address is no http or https URL, or its TLS settings cannot be used.
    pub fn new(settings: impl IntoIterator<Item = ReplicaSettings>) -> Result<Self, InvalidUrl> {
        let Metric { name, labels, help } = REPLICA_CONNECT.metric;
        let connects = prometheus::HistogramOpts::new(name, help).buckets(REPLICA_CONNECT.buckets.to_vec());
        let connects = HistogramVec::new(connects, labels)
            .map_err(|error| InvalidUrl { url: String::new(), detail: error.to_string() })?;
        let mut backends: Vec<Backend> = Vec::new();
        for settings in settings {
            match backends.iter_mut().find(|backend| backend.name() == settings.name) {
                Some(backend) => backend.add(settings),
                None => backends.push(Backend::new(settings)),
            }
        }
        backends.iter().try_for_each(|backend| backend.open(&connects))?;
        Ok(Self {
            backends,
            changed: channel::Sender::new(0),
            rng: SharedSplitMix64::default(),
            budget: RetryBudget::default(),
            connects,
            unresolved: Mutex::default(),
        })
    }

    /// The names of the backends, in the order of the configuration.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.backends.iter().map(Backend::name)
    }

    /// All current replicas, backend by backend.
    pub fn replicas(&self) -> Vec<Arc<Replica>> {
        let mut all = Vec::new();
        self.each(|replica| all.push(Arc::clone(replica)));
        all
    }

    /// Calls `show` with every current replica.
    pub fn each(&self, mut show: impl FnMut(&Arc<Replica>)) {
        self.backends.iter().for_each(|backend| backend.replicas().iter().for_each(&mut show));
    }

    /// A counter that increases whenever a replica is added or removed.
    pub fn changes(&self) -> channel::Receiver<u64> {
        self.changed.subscribe()
    }

    /// True if the model named in a body can change the request's destination.
    pub fn needs_model(&self) -> bool {
        self.backends.len() > 1
    }

    /// True if some replica's dialect can verify drafts.
    pub fn speculates(&self) -> bool {
        self.backends.iter().any(|backend| backend.replicas().iter().any(|replica| replica.speculates()))
    }

    /// True if requests of this API are translated for some replica.
    pub fn translates(&self, api: Api) -> bool {
        self.backends.iter().any(|backend| backend.replicas().iter().any(|replica| replica.translates(api)))
    }

    /// The replica for a new request for `model`. The backend: exact id, alias, glob; else the only
    /// one; else the one marked default; else the first, whose 404 the client gets. Of its
    /// replicas: the less busy of two chosen at random. `None` only if there is no backend, or none
    /// of its addresses is known.
    pub fn pick(&self, model: Option<&str>) -> Option<Arc<Replica>> {
        self.budget.request();
        let chosen = self.backend(model)?.pick(&self.rng, None)?;
        chosen.chosen();
        Some(chosen)
    }

    /// The replica that a request for `model` would be sent to now, without sending one.
    pub fn would_pick(&self, model: Option<&str>) -> Option<Arc<Replica>> {
        self.backend(model)?.pick(&self.rng, None)
    }

    fn backend(&self, model: Option<&str>) -> Option<&Backend> {
        if let [only] = self.backends.as_slice() {
            return Some(only);
        }
        let named = model.and_then(|model| {
            let fits =
                self.backends.iter().filter_map(|backend| Some((backend.answers_for(model)?, backend)));
            fits.min_by_key(|(fit, _)| *fit).map(|(_, backend)| backend)
        });
        named
            .or_else(|| self.backends.iter().find(|backend| backend.is_default()))
            .or_else(|| self.backends.first())
    }

    /// Another replica of the same backend that is [`HealthState::Ready`]; `None` if there is none.
    pub fn other(&self, than: &Arc<Replica>) -> Option<Arc<Replica>> {
        let backend = self.backends.iter().find(|backend| backend.name() == than.backend())?;
        backend.pick(&self.rng, Some(than)).filter(|other| other.health_state() == HealthState::Ready)
    }

    /// The first backend without a reachable replica; `None` if all have one.
    pub fn unreachable(&self) -> Option<&str> {
        // A disabled replica still serves if there is no other.
        let reachable = |backend: &Backend| {
            let replicas = backend.replicas();
            let is_out = |replica: &Arc<Replica>| replica.health_state() == HealthState::Disabled;
            let all_out = replicas.iter().all(is_out);
            replicas.iter().any(|replica| replica.is_reachable() && (all_out || !is_out(replica)))
        };
        self.backends.iter().find(|backend| !reachable(backend)).map(Backend::name)
    }

    /// The backends without an answering replica, except those that the operator disabled: requests
    /// to them fail or wait.
    pub fn out(&self) -> Vec<&str> {
        let out = |health_state: &HealthState| {
            matches!(health_state, HealthState::Silent | HealthState::Down | HealthState::Broken)
        };
        let all_out = |backend: &&Backend| {
            let states: Vec<HealthState> =
                backend.replicas().iter().map(|replica| replica.health_state()).collect();
            states.iter().any(out) && !states.contains(&HealthState::Ready)
        };
        self.backends.iter().filter(all_out).map(Backend::name).collect()
    }

    /// True if its backend has no other replica.
    pub fn is_sole(&self, replica: &Arc<Replica>) -> bool {
        let backend = self.backends.iter().find(|backend| backend.name() == replica.backend());
        backend.is_none_or(|backend| backend.replicas().iter().all(|other| Arc::ptr_eq(other, replica)))
    }

    /// Histogram of the time to connect, seconds, by replica.
    pub fn connects(&self) -> &HistogramVec {
        &self.connects
    }

    /// The names to resolve (`HOST:PORT`), and the interval of each.
    fn discoveries(&self) -> Vec<(String, Duration)> {
        self.backends.iter().flat_map(Backend::discoveries).collect()
    }

    fn names_to_resolve(&self) -> BTreeSet<String> {
        self.discoveries().into_iter().map(|(name, _)| name).collect()
    }

    fn is_unresolved(&self, name: &str) -> bool {
        self.unresolved.lock().contains(name)
    }

    fn set_unresolved(&self, name: &str, unresolved: bool) {
        let mut names = self.unresolved.lock();
        if unresolved {
            names.insert(name.to_owned());
        } else {
            names.remove(name);
        }
    }

    /// Updates the replicas to the addresses that a name has now.
    fn found(&self, name: &str, addresses: &BTreeSet<SocketAddr>) {
        for backend in &self.backends {
            if backend.found(name, addresses, &self.connects) {
                self.changed.send_modify(|changes| *changes += 1);
            }
        }
    }
}
