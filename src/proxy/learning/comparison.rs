//! The control groups of the policies: draws the group in them, and compares the groups.

pub mod shown;

use std::num::NonZeroUsize;
use std::sync::Arc;

use lru::LruCache;
use parking_lot::Mutex;

use foretell_core::control::costs::Basis;
use foretell_core::control::groups::{ControlGate, Groups};
use foretell_core::units::SplitMix64;
use foretell_net::clock::Clock;
use foretell_policy::{Group, Holdback, Policy};

/// Maximum number of pairs of policy and backend with groups; the least recently used one is
/// evicted.
const GROUPS: NonZeroUsize = NonZeroUsize::new(1_024).unwrap();

/// The groups of each policy at each backend, by name: they survive an edit of the policy.
pub struct Comparisons {
    groups: Mutex<AllGroups>,
    clock: Clock,
}

/// The groups by names of policy and backend, and the random numbers that draw them.
type AllGroups = (LruCache<(String, String), Groups>, SplitMix64);

/// The groups of a policy at a backend.
pub struct Compared {
    pub policy: String,
    pub backend: String,
    pub groups: Groups,
    /// Speculation was measured slower than plain decoding, and is closed for a while.
    pub closed: bool,
}

/// The group that a request was drawn into.
pub struct Drawn {
    all: Arc<Comparisons>,
    policy: Arc<Policy>,
    backend: String,
    group: Group,
}

impl Comparisons {
    /// No groups yet; `rng` draws them.
    pub fn new(rng: SplitMix64) -> Self {
        Self { groups: Mutex::new((LruCache::new(GROUPS), rng)), clock: Clock::start() }
    }

    /// Draws the group of a request. `timed`: the tokens of a plain call are known when they
    /// arrive. Otherwise the groups cannot be compared, and the control group is only the share
    /// `floor`.
    pub fn draw(self: &Arc<Self>, policy: &Arc<Policy>, backend: &str, timed: bool) -> Drawn {
        let Holdback { start, floor } = policy.holdback;
        let start = if timed { start } else { floor };
        let now = self.clock.now();
        let group = {
            let (all, rng) = &mut *self.groups.lock();
            let groups = all.get_or_insert_mut((policy.name.clone(), backend.to_owned()), Groups::default);
            let in_control = groups.draws_control_group(start, floor, rng);
            Group { in_control, is_slower: groups.is_closed(now) }
        };
        let (all, policy, backend) = (Arc::clone(self), Arc::clone(policy), backend.to_owned());
        Drawn { all, policy, backend, group }
    }

    /// True if speculation of this policy is closed at this backend now, as [`Self::draw`] would
    /// find it, without a change of state.
    pub fn is_closed(&self, policy: &str, backend: &str) -> bool {
        let now = self.clock.now();
        let key = (policy.to_owned(), backend.to_owned());
        self.groups.lock().0.peek(&key).is_some_and(|groups| groups.looks_closed(now))
    }

    /// The groups of every policy and backend, in no order.
    pub fn all(&self) -> Vec<Compared> {
        let now = self.clock.now();
        let compared = |((policy, backend), groups): (&(String, String), &Groups)| Compared {
            policy: policy.clone(),
            backend: backend.clone(),
            groups: *groups,
            closed: groups.looks_closed(now),
        };
        self.groups.lock().0.iter().map(compared).collect()
    }
}

impl Drawn {
    /// The group.
    pub fn group(&self) -> Group {
        self.group
    }

    /// Notes the projected speedup of the request, and its basis.
    pub fn note_projected(&self, gain: f64, basis: Basis) {
        let key = (self.policy.name.clone(), self.backend.clone());
        self.all.groups.lock().0.get_or_insert_mut(key, Groups::default).note_projected(gain, basis);
    }

    /// Notes the request's `seconds` per token after the first. A request under a closed gate is in
    /// neither group.
    pub fn ended(&self, seconds: f64) {
        if self.group.is_slower {
            return;
        }
        let gate = ControlGate { limit: self.policy.gates.control, reprobe: self.policy.gates.reprobe };
        let now = self.all.clock.now();
        let key = (self.policy.name.clone(), self.backend.clone());
        self.all.groups.lock().0.get_or_insert_mut(key, Groups::default).note(
            self.group.in_control,
            seconds,
            gate,
            now,
        );
    }
}
