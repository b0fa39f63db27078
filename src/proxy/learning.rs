//! Measurements and texts that outlive a session: costs and acceptance of each engine with their
//! snapshot, the traits of its answers, the comparison of control groups, the corpus of earlier
//! texts, the part of it that sidecars share, and recordings of requests.

pub mod answer_traits;
pub mod cipher;
pub mod comparison;
pub mod corpus;
pub mod grammars;
pub mod recording;
pub mod shared;
pub mod snapshot;

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use lru::LruCache;
use parking_lot::Mutex;

use crate::learning::answer_traits::AnswerTraits;
use crate::learning::shared::Statistics;
use foretell_core::control::Control;
use foretell_core::session::Permission;
use foretell_net::clock::Clock;
use foretell_net::fleet::Replica;
use foretell_net::fleet::identity::{EngineStart, Identities, Identity, ServerKnowledge};
use foretell_net::random;

/// Maximum number of engine starts with costs and acceptance; the least recently used one is
/// evicted.
const ENGINE_STARTS: NonZeroUsize = NonZeroUsize::new(512).unwrap();
/// Other sidecars forget what one has shared if it does not share for this long.
pub const ENGINE_START_TTL: Duration = Duration::from_hours(24);

type ByEngineStart<T> = Mutex<LruCache<EngineStart, Arc<T>>>;

/// Costs, acceptance and answer traits of each engine, shared by its sessions.
pub struct Learnt {
    /// Share of the free sequences that verify requests by fan-out may take, by backend.
    slots: HashMap<String, f64>,
    clock: Clock,
    /// Costs and acceptance.
    controls: ByEngineStart<Control>,
    /// The same for answers passed on unchanged, whose ids were tokenized from their text: used for
    /// projections only.
    observed: ByEngineStart<Control>,
    traits: ByEngineStart<AnswerTraits>,
    /// Measurements of other sidecars; `None` without a store.
    others: Mutex<Option<Arc<Statistics>>>,
    /// Random name of these measurements in a store.
    name: String,
    /// The name under which the measurements of the snapshot are in the store.
    former: Mutex<Option<String>>,
}

impl Learnt {
    /// Nothing is learnt yet. `slots`: share of the free sequences that verify requests by fan-out
    /// may take, by backend.
    pub fn new(slots: HashMap<String, f64>) -> Self {
        let map = || Mutex::new(LruCache::new(ENGINE_STARTS));
        let traits = Mutex::new(LruCache::new(ENGINE_STARTS));
        let (controls, observed) = (map(), map());
        Self {
            slots,
            clock: Clock::start(),
            controls,
            observed,
            traits,
            others: Mutex::default(),
            name: format!("{:014x}", random::fresh_seed()),
            former: Mutex::default(),
        }
    }

    /// The clock of the measurements.
    pub fn clock(&self) -> Clock {
        self.clock
    }

    /// Control state of an engine, with the operator's limits and the probe's costs applied.
    pub fn control(&self, identity: &Identity, backend: &str) -> Arc<Control> {
        self.prepared(self.control_of(&identity.engine_start), identity, backend)
    }

    /// The measurements of an engine. A new one begins with those that other sidecars have shared.
    fn control_of(&self, engine_start: &EngineStart) -> Arc<Control> {
        let (control, new) = {
            let mut controls = self.controls.lock();
            let new = !controls.contains(engine_start);
            (Arc::clone(controls.get_or_insert_ref(engine_start, Arc::default)), new)
        };
        if new {
            self.lend_to(engine_start, &control);
        }
        control
    }

    /// Every engine with its measurements.
    fn controls(&self) -> Vec<(EngineStart, Arc<Control>)> {
        let controls = self.controls.lock();
        controls.iter().map(|(engine_start, control)| (engine_start.clone(), Arc::clone(control))).collect()
    }

    /// Control state that a request with this permission reads and updates: that of the engine, or
    /// one for projections only if it is never speculated on.
    pub fn for_permission(&self, permission: Permission, identity: &Identity, backend: &str) -> Arc<Control> {
        let control = self.control(identity, backend);
        if permission.never().is_none() {
            return control;
        }
        let observed =
            Arc::clone(self.observed.lock().get_or_insert_ref(&identity.engine_start, Arc::default));
        let observed = self.prepared(observed, identity, backend);
        // The measured costs of calls are valid for both.
        let costs = control.with(|learnt| learnt.costs.clone());
        observed.with(|learnt| {
            if costs.plain_token().is_some() || learnt.costs.plain_token().is_none() {
                *learnt.costs = costs;
            }
        });
        observed
    }

    /// Control state of the engine at a replica's address; `None` before its first request, or if
    /// its engine is not known.
    pub fn at(&self, identities: &Identities, replica: &Arc<Replica>) -> Option<Arc<Control>> {
        let knowledge = identities.knowledge(replica)?;
        let ServerKnowledge::Known(identity) = &*knowledge else { return None };
        self.controls.lock().peek(&identity.engine_start).map(Arc::clone)
    }

    /// Traits observed so far in an engine's answers.
    pub fn answer_traits(&self, identity: &Identity) -> Arc<AnswerTraits> {
        Arc::clone(self.traits.lock().get_or_insert_ref(&identity.engine_start, Arc::default))
    }

    fn prepared(&self, control: Arc<Control>, identity: &Identity, backend: &str) -> Arc<Control> {
        control.with(|learnt| {
            if let Some(share) = self.slots.get(backend) {
                learnt.allow_slots(*share);
            }
            if let Some(probe) = &identity.probe {
                learnt.costs.take_prior(&probe.prior);
            }
        });
        control
    }
}
