//! The state of every gate, for operators: which gates are open on which replica now, and how often
//! they changed.
//!
//! Sessions check the gates themselves, at every event; this only reads them, once a second and at
//! every scrape.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use super::SessionRunner;
use super::exchange::Shared;
use super::ruling;
use crate::learning::comparison::Comparisons;
use foretell_config::store::PolicyStore;
use foretell_core::draft::{DrafterId, LookupSpec, Source};
use foretell_core::words::Gate;
use foretell_net::fleet::Replica;
use foretell_net::http::memory::Level;
use foretell_policy::part::{DrafterPart, ModelState};
use foretell_policy::{LiveGates, Policy, PolicyMode};

/// Interval between readings of the gates.
const EVERY: Duration = Duration::from_secs(1);

/// True for each open gate, by position in [`Gate::ALL`].
pub type Open = [bool; Gate::ALL.len()];

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatesAt {
    pub policy: String,
    pub backend: String,
    pub replica: String,
    pub open: Open,
}

/// Changes of each gate since the start: to open, and to closed.
pub type Changes = [[u64; 2]; Gate::ALL.len()];

/// Watches the gates of all policies at all replicas.
pub struct GateWatch {
    runner: Arc<SessionRunner>,
    policies: Arc<PolicyStore>,
    comparisons: Arc<Comparisons>,
    shared: Shared,
    seen: Mutex<Seen>,
}

/// The last reading, by policy and replica, and the changes so far.
#[derive(Default)]
struct Seen {
    last: HashMap<(String, String), Open>,
    changes: Changes,
}

impl Seen {
    /// Takes a reading. A gate without an earlier reading counts as open before; one that is gone
    /// is dropped.
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
    pub fn new(
        runner: Arc<SessionRunner>,
        policies: Arc<PolicyStore>,
        comparisons: Arc<Comparisons>,
        shared: Shared,
    ) -> Self {
        Self { runner, policies, comparisons, shared, seen: Mutex::default() }
    }

    /// Reads the gates once a second until `stop`.
    pub async fn run(self: Arc<Self>, stop: CancellationToken) {
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
            for replica in replicas.iter().filter(|replica| policy.matcher.has_backend(replica.backend())) {
                let mut open = [true; Gate::ALL.len()];
                let signal = replica.load().map(|load| load.signal());
                let mut close = |gate: Gate| {
                    if let Some(open) = open.get_mut(gate.position()) {
                        *open = false;
                    }
                };
                gates.all_closed(ruling::is_healthy(replica), signal.as_ref()).for_each(&mut close);
                let is_slower =
                    slower.iter().any(|(name, at)| *name == policy.name && at == replica.backend());
                self.runner.closed(replica, policy.gates.first_token).for_each(&mut close);
                if is_slower {
                    close(Gate::Control);
                }
                if self.shared.memory.level() != Level::Enough {
                    close(Gate::Memory);
                }
                if self.runner.refuses(replica, &drafters, policy.gates.acceptance) {
                    close(Gate::Acceptance);
                }
                all.push(GatesAt {
                    policy: policy.name.clone(),
                    backend: replica.backend().to_owned(),
                    replica: replica.label().to_owned(),
                    open,
                });
            }
        }
        self.seen.lock().take(&all);
        all
    }

    pub fn changes(&self) -> Changes {
        self.seen.lock().changes
    }

    pub fn shared(&self) -> &Shared {
        &self.shared
    }

    pub fn policies(&self) -> &PolicyStore {
        &self.policies
    }
}

enum Drafts<'a> {
    Lookup(Source),
    Model(&'a str),
}

fn drafters(policy: &Policy) -> Vec<Drafts<'_>> {
    let of = |part| match part {
        DrafterPart::Inline(spec) => Some(Drafts::Lookup(LookupSpec::source(&spec))),
        DrafterPart::ModelDrafter(name, _) => Some(Drafts::Model(name)),
        DrafterPart::Unknown(_) | DrafterPart::Absent(_) => None,
    };
    policy.drafters.iter().filter_map(|drafter| of(drafter.part(Some(true), |_| ModelState::Ready))).collect()
}

impl SessionRunner {
    /// True if the acceptance of first tokens of all these drafters on a replica is below
    /// `min_acceptance` at some temperature, and that of none is above it at any temperature.
    fn refuses(&self, replica: &Arc<Replica>, drafters: &[Drafts<'_>], min_acceptance: f64) -> bool {
        let Some(control) = self.learnt(replica) else { return false };
        let id = |drafter: &Drafts<'_>| match drafter {
            Drafts::Lookup(source) => DrafterId::from(*source),
            Drafts::Model(name) => DrafterId::model(control.model(name)),
        };
        let drafters: Vec<DrafterId> = drafters.iter().map(id).collect();
        control.with(|learnt| learnt.survival.are_refused(&drafters, min_acceptance))
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
    fn each_change_of_each_gate_is_counted_once() {
        let mut seen = Seen::default();
        seen.take(&[at("a", &[Gate::Load]), at("b", &[])]);
        seen.take(&[at("a", &[Gate::Load]), at("b", &[Gate::Health, Gate::Load])]);
        seen.take(&[at("a", &[]), at("b", &[Gate::Health])]);
        assert_eq!(seen.changes[Gate::Load.position()], [2, 2]);
        assert_eq!(seen.changes[Gate::Health.position()], [0, 1]);
        seen.take(&[at("a", &[])]);
        seen.take(&[at("a", &[]), at("b", &[Gate::Health])]);
        assert_eq!(seen.changes[Gate::Health.position()], [0, 2], "a replica that comes back is new");
    }
}
