//! The part of the admin API that needs the configuration: policies, drafters, and what is known about the servers.

use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::{Value, json};

use super::explain::{self, Question, ServerFacts};
use crate::config::load::{load_policies, policy_warnings};
use crate::config::problem::Problem;
use crate::config::process::Process;
use crate::config::store::PolicyStore;
use crate::config::values::Revision;
use crate::drive::Driver;
use crate::drive::comparison::Comparisons;
use crate::drive::drafters::Drafters;
use crate::drive::ruling;
use crate::fleet::Replica;
use crate::fleet::identity::{Identities, Standing};
use crate::gateway::Shared;
use crate::observe::Observer;
use crate::policy::part::ModelState;
use crate::policy::{self, Explanation, Fact, PolicySet, Ruling};
use crate::words::RideReason;

/// What a running proxy knows, shared with those who learn it.
pub struct Known {
    /// The policies in force.
    pub policies: Arc<PolicyStore>,
    /// The loaded drafters.
    pub drafters: Arc<Drafters>,
    /// Who answers at the replicas' addresses.
    pub identities: Arc<Identities>,
    /// The control groups of the policies.
    pub comparisons: Arc<Comparisons>,
    /// What is learnt of the replicas.
    pub driver: Arc<Driver>,
}

/// The configuration of a running proxy and the state that depends on it.
pub struct Configured {
    process: Process,
    known: Known,
    /// Held while the policies are read again: one at a time.
    reloading: Mutex<()>,
}

impl Configured {
    /// Also sets the metrics about the policies in force.
    pub fn new(process: Process, known: Known, observer: &Observer) -> Self {
        let configured = Self { process, known, reloading: Mutex::default() };
        configured.show(observer, true);
        configured
    }

    /// Sets the metrics about the policies in force; `synchronized`: they are those of the files.
    fn show(&self, observer: &Observer, synchronized: bool) {
        let policies = self.known.policies.current();
        let labels: Vec<String> = policies.policies().iter().map(|policy| policy.label()).collect();
        let version = Revision::of(labels.join(",").as_bytes()).to_string();
        observer.metrics().configured(&version, synchronized);
    }

    /// The list in `/api/policies`, in match order.
    pub fn policies(&self) -> Value {
        let synchronized = self.known.policies.synchronized();
        let policies = self.known.policies.current();
        let entries = policies.policies().iter().map(|policy| {
            json!({
                "name": policy.name,
                "revision": policy.revision.to_string(),
                "mode": policy.mode.name(),
                "synchronized": synchronized,
                "compared": self.known.comparisons.shown(&policy.name),
            })
        });
        entries.collect()
    }

    /// Reads the policies again and loads the drafters they name; replaces all policies or none.
    ///
    /// # Errors
    /// Every problem found; then the old policies stay in force.
    pub fn reload(&self, observer: &Observer) -> Result<Value, Vec<Problem>> {
        let _one_at_a_time = self.reloading.lock();
        let outcome =
            self.known.policies.reload(|| load_policies(&self.process), |policies| self.build(policies));
        self.show(observer, outcome.is_ok());
        outcome?;
        for warning in policy_warnings(&self.process) {
            tracing::warn!("{warning}");
        }
        Ok(json!({ "policies": self.policies() }))
    }

    fn build(&self, policies: &PolicySet) -> Result<(), Vec<Problem>> {
        self.known.drafters.extend(&self.process, policies).map_err(|error| {
            vec![Problem {
                file: self.process.policies.display().to_string(),
                line: None,
                path: format!("drafters.{}", error.name),
                message: "cannot be loaded".to_owned(),
                allowed: "a drafter that loads".to_owned(),
                got: error.detail,
                suggestion: None,
            }]
        })
    }

    /// Largest body that is read for speculation, bytes.
    pub fn speculate_body(&self) -> usize {
        usize::try_from(self.process.limits.speculate_body).unwrap_or(usize::MAX)
    }

    /// Explains what would happen to a request now.
    pub fn explain(&self, question: &Question, shared: &Shared) -> Explanation {
        let replica = shared.fleet.would_pick(question.model());
        let standing = replica.as_ref().and_then(|replica| self.known.identities.standing(replica));
        let backend = replica
            .as_ref()
            .and_then(|replica| self.process.backends.iter().find(|backend| backend.name == replica.name()));
        let terms = backend.map(|backend| ruling::terms(&backend.plans)).unwrap_or_default();
        let identity = match standing.as_deref() {
            Some(Standing::Known(identity)) => Some(identity),
            Some(Standing::Relayed(..)) | None => None,
        };
        let server = match (replica.as_deref().and_then(explain::down), standing.as_deref()) {
            (Some(why), _) => Fact::Known(policy::ServerState::Down(why)),
            (None, Some(standing)) => Fact::Known(ruling::standing(standing, &terms)),
            (None, None) => Fact::Unknown("no replica is known"),
        };
        let models = |name: &str| {
            let unknown = ModelState::Unknown("the server's vocabulary is not known");
            identity.map_or(unknown, |identity| self.known.drafters.state(name, &identity.epoch.vocabulary))
        };
        let closed = |ruling: &Ruling| {
            let gate = || {
                let replica = replica.as_deref()?;
                let signal = replica.load().map(|load| load.signal());
                ruling::closed(&ruling.gates, replica, signal.as_ref())
            };
            if shared.life.is_draining() { Some(RideReason::Draining) } else { gate() }
        };
        let known = ServerFacts {
            asked: "proxy",
            replica: replica.as_ref(),
            server,
            models: &models,
            closed: &closed,
            notes: Vec::new(),
        };
        explain::explain(question, &self.process, &self.known.policies.current(), shared, known)
    }

    /// What is known about a replica: epoch, plans, probe and ride-only windows; `None` if it is not one of the identified
    /// backends.
    pub fn replica(&self, replica: &Arc<Replica>) -> Option<Value> {
        let mut shown = self.known.identities.shown(replica)?;
        if let Some(shown) = shown.as_object_mut() {
            shown.insert("switchback".to_owned(), self.known.driver.windows(replica));
        }
        Some(shown)
    }

    /// Starts a new probe of a replica; returns once it has started, without waiting for its end.
    ///
    /// # Errors
    /// Why no probe was started.
    pub fn reprobe(&self, replica: &Arc<Replica>) -> Result<Value, String> {
        self.known
            .identities
            .reprobe(replica)
            .map(|()| json!({ "replica": replica.label(), "reprobe": true }))
    }
}
