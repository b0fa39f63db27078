//! The state of every gate, for operators: which ones let requests leap on which replica now, and how often they changed.
//!
//! Sessions ask for themselves, at every event; this only watches, once a second and at every scrape.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use super::Driver;
use super::comparison::Comparisons;
use super::exchange::Shared;
use super::ruling;
use crate::config::store::PolicyStore;
use crate::draft::{DrafterId, LookupSpec, Source};
use crate::fleet::Replica;
use crate::fleet::identity::Standing;
use crate::http::memory::Level;
use crate::policy::part::{ModelState, Part};
use crate::policy::{LiveGates, Policy, PolicyMode};
use crate::words::Gate;

/// How often the gates are looked at.
const EVERY: Duration = Duration::from_secs(1);

/// Whether each gate is open, by place in [`Gate::ALL`].
pub type Open = [bool; Gate::ALL.len()];

/// The gates of a policy at a replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatesAt {
    /// The name of the policy.
    pub policy: String,
    /// The name of the backend.
    pub backend: String,
    /// The label of the replica.
    pub replica: String,
    /// Which are open.
    pub open: Open,
}

/// Changes of each gate since the start: to open, and to closed.
pub type Changes = [[u64; 2]; Gate::ALL.len()];

/// Watches the gates of all policies at all replicas.
pub struct GateWatch {
    driver: Arc<Driver>,
    policies: Arc<PolicyStore>,
    comparisons: Arc<Comparisons>,
    shared: Shared,
    seen: Mutex<Seen>,
}

/// What the last look has shown, by policy and replica, and the changes so far.
#[derive(Default)]
struct Seen {
    last: HashMap<(String, String), Open>,
    changes: Changes,
}

impl Seen {
    /// Takes a look down. What is new was open before; what is gone is forgotten.
    fn take(&mut self, now: &[GatesAt]) {
        let mut last = HashMap::with_capacity(now.len());
        for at in now {
            let key = (at.policy.clone(), at.replica.clone());
            let before = self.last.remove(&key).unwrap_or([true; Gate::ALL.len()]);
            for (changes, (before, open)) in self.changes.iter_mut().zip(before.iter().zip(&at.open)) {
                let [opened, closed] = changes;
                if before != open {
                    *(if *open { opened } else { closed }) += 1;
                }
            }
            last.insert(key, at.open);
        }
        self.last = last;
    }
}

impl GateWatch {
    /// Of these parts of a running proxy.
    pub fn new(
        driver: Arc<Driver>,
        policies: Arc<PolicyStore>,
        comparisons: Arc<Comparisons>,
        shared: Shared,
    ) -> Self {
        Self { driver, policies, comparisons, shared, seen: Mutex::default() }
    }

    /// Looks again and again, until `stop`.
    pub async fn keep_looking(self: Arc<Self>, stop: CancellationToken) {
        let mut ticks = tokio::time::interval(EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                _ = ticks.tick() => drop(self.look()),
            }
        }
    }

    /// The gates of all policies that draft, at the replicas that they apply to, as they are now.
    pub fn look(&self) -> Vec<GatesAt> {
        let policies = self.policies.current();
        let drafts = |policy: &&Arc<Policy>| matches!(policy.mode, PolicyMode::Shadow | PolicyMode::Auto);
        let slower: Vec<(String, String)> = self
            .comparisons
            .all()
            .into_iter()
            .filter(|compared| compared.closed)
            .map(|compared| (compared.policy, compared.backend))
            .collect();
        let replicas = self.shared.fleet.replicas();
        let mut all = Vec::new();
        for policy in policies.policies().iter().filter(drafts) {
            let gates = LiveGates::of(policy);
            let drafters = drafters(policy);
            for replica in replicas.iter().filter(|replica| policy.matcher.has_backend(replica.name())) {
                let mut open = [true; Gate::ALL.len()];
                let signal = replica.load().map(|load| load.signal());
                let mut close = |gate: Gate| {
                    if let Some(open) = open.get_mut(gate.place()) {
                        *open = false;
                    }
                };
                gates.all_closed(ruling::is_healthy(replica), signal.as_ref()).for_each(&mut close);
                let is_slower = slower.iter().any(|(name, at)| *name == policy.name && at == replica.name());
                if is_slower || self.driver.has_lost(replica) {
                    close(Gate::Latency);
                }
                if self.shared.memory.level() != Level::Enough {
                    close(Gate::Memory);
                }
                if self.driver.refuses(replica, &drafters, policy.gates.acceptance) {
                    close(Gate::Acceptance);
                }
                all.push(GatesAt {
                    policy: policy.name.clone(),
                    backend: replica.name().to_owned(),
                    replica: replica.label().to_owned(),
                    open,
                });
            }
        }
        self.seen.lock().take(&all);
        all
    }

    /// Changes so far.
    pub fn changes(&self) -> Changes {
        self.seen.lock().changes
    }

    /// The parts that all requests share.
    pub fn shared(&self) -> &Shared {
        &self.shared
    }

    /// The policies in force.
    pub fn policies(&self) -> &PolicyStore {
        &self.policies
    }
}

/// A drafter of a policy.
enum Drafts<'a> {
    Lookup(Source),
    Model(&'a str),
}

/// The drafters of a policy.
fn drafters(policy: &Policy) -> Vec<Drafts<'_>> {
    let of = |part| match part {
        Part::Inline(spec) => Some(Drafts::Lookup(LookupSpec::source(&spec))),
        Part::Asked(name, _) => Some(Drafts::Model(name)),
        Part::Unknown(_) | Part::Absent(_) => None,
    };
    policy.drafters.iter().filter_map(|drafter| of(drafter.part(|_| ModelState::Ready))).collect()
}

impl Driver {
    /// Whether hardly any first token from these drafters is accepted on a replica.
    fn refuses(&self, replica: &Arc<Replica>, drafters: &[Drafts<'_>], least: f64) -> bool {
        let Some(standing) = self.inner.setup.identities.standing(replica) else { return false };
        let Standing::Known(identity) = &*standing else { return false };
        let Some(control) = self.inner.controls.lock().look(&identity.epoch).map(Arc::clone) else {
            return false;
        };
        let id = |drafter: &Drafts<'_>| match drafter {
            Drafts::Lookup(source) => DrafterId::from(*source),
            Drafts::Model(name) => DrafterId::model(control.model(name)),
        };
        let drafters: Vec<DrafterId> = drafters.iter().map(id).collect();
        control.with(|learnt| learnt.survival.are_refused(&drafters, least))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(replica: &str, closed: &[Gate]) -> GatesAt {
        let open = Gate::ALL.map(|gate| !closed.contains(&gate));
        GatesAt { policy: "p".to_owned(), backend: "b".to_owned(), replica: replica.to_owned(), open }
    }

    #[test]
    fn each_change_of_each_gate_is_counted_once_and_what_is_new_was_open() {
        let mut seen = Seen::default();
        seen.take(&[at("a", &[Gate::Load]), at("b", &[])]);
        seen.take(&[at("a", &[Gate::Load]), at("b", &[Gate::Health, Gate::Load])]);
        seen.take(&[at("a", &[]), at("b", &[Gate::Health])]);
        assert_eq!(seen.changes[Gate::Load.place()], [2, 2]);
        assert_eq!(seen.changes[Gate::Health.place()], [0, 1]);
        seen.take(&[at("a", &[])]);
        seen.take(&[at("a", &[]), at("b", &[Gate::Health])]);
        assert_eq!(seen.changes[Gate::Health.place()], [0, 2], "a replica that comes back is new");
    }
}
