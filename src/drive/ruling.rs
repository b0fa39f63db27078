//! What the policies say about one request.
//!
//! The strictest of process mode, policy mode and client's wish wins. A drafter or rule that a policy names
//! and this build does not have is left out: leaving out a drafter is slower, never wrong, and every rule
//! falls back to the exact one.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use crate::clock::Clock;
use crate::config::policy::{Drafter, Facts, Gates, Holdback, Policy, PolicyMode, Vocabulary};
use crate::config::process::Plans;
use crate::config::store::PolicyStore;
use crate::control::gates::LoadGates;
use crate::control::{PolicyState, Shelf};
use crate::dialect::Engine;
use crate::draft::LookupSpec;
use crate::draft::prompt_lookup::Ngram;
use crate::fleet::identity::Identity;
use crate::fleet::scrape::Pulse;
use crate::fleet::{Replica, Standing};
use crate::gateway::handover::Exchange;
use crate::openai::{Control, Request, Sampling};
use crate::session::{Permission, Rules};
use crate::units::Dice;
use crate::words::BypassReason;
use crate::words::Mode;
use crate::words::{Plan, RideReason};

/// Policies whose control groups are remembered, and for how long after their last request.
const POLICIES: usize = 1_024;
const POLICY_KEPT: Duration = Duration::from_hours(24);

/// What one request may do.
pub struct Ruling {
    /// `name@revision` of the policy that matched.
    pub name: String,
    /// What the session may do.
    pub rules: Rules,
    /// The model drafter that the policy names, if any.
    pub model: Option<String>,
    /// Most bytes of a round's request, and of its answer.
    pub bytes_max: usize,
    /// The gates that a replica may close while the request runs.
    pub gates: ReplicaGates,
}

/// The gates that a replica may close while a request runs.
#[derive(Clone, Copy, Debug)]
pub struct ReplicaGates {
    load: LoadGates,
    /// `gamma.fixed` heeds only health.
    forced: bool,
}

impl ReplicaGates {
    /// The gate that is closed now.
    pub fn closed(&self, backend: &Replica, pulse: &Pulse) -> Option<RideReason> {
        match backend.standing() {
            Standing::Down | Standing::Broken => return Some(RideReason::GateHealth),
            Standing::Ready | Standing::Disabled => {}
        }
        let signal = (!self.forced).then(|| pulse.signal()).flatten();
        self.load.closed(signal.as_ref())
    }
}

/// How the target samples for one request, and how its drafts can be verified exactly.
pub struct Effective {
    /// The client's fields and the server's.
    pub sampling: Sampling,
    /// Best first.
    pub plans: Vec<Plan>,
}

impl Effective {
    /// What this engine makes of a request.
    ///
    /// # Errors
    /// Why it cannot leap here.
    pub fn of(engine: &Engine, request: &Request) -> Result<Self, BypassReason> {
        let (sampling, settled) = engine.sampling(request);
        if let Some(reason) = engine.refuses(request, &sampling) {
            return Err(reason);
        }
        let plans = engine.plans(request, &sampling, settled);
        match (plans.is_empty(), settled) {
            (false, _) => Ok(Self { sampling, plans }),
            (true, true) => Err(BypassReason::NoPlan),
            (true, false) => Err(BypassReason::DefaultsUnknown),
        }
    }
}

/// The policies that hold now, and the bounds of the backends.
pub struct Rulebook {
    policies: Arc<PolicyStore>,
    plans: HashMap<String, Plans>,
    draws: Mutex<Draws>,
    clock: Clock,
}

/// What control groups are drawn with: the states of the policies by their names, so that an edited policy goes on
/// where it was.
struct Draws {
    states: Shelf<String, PolicyState>,
    dice: Dice,
}

impl Rulebook {
    /// `plans` by the name of the backend; `dice` draw who is held back.
    pub fn new(policies: Arc<PolicyStore>, plans: HashMap<String, Plans>, dice: Dice) -> Self {
        let draws = Mutex::new(Draws { states: Shelf::new(POLICIES, POLICY_KEPT), dice });
        Self { policies, plans, draws, clock: Clock::start() }
    }

    /// What the first matching policy, the process and the client allow this request.
    pub fn rule(
        &self,
        exchange: &Exchange,
        identity: &Identity,
        effective: &Effective,
        mode: Mode,
    ) -> Result<Ruling, BypassReason> {
        let request = &exchange.request;
        let facts = Facts {
            model: &request.model,
            backend: exchange.backend.name(),
            tenant: None,
            route: request.route,
            headers: &exchange.parts.headers,
            temperature: effective.sampling.temperature,
            prompt_tokens: request.prompt_size().tokens,
        };
        let policies = self.policies.current();
        let policy = policies.first_match(&facts).ok_or(BypassReason::NoPolicy)?;
        let engine = &identity.engine;
        let hopeless = identity.probe.as_ref().is_some_and(|probe| probe.nothing_pays());
        let permission = match permission(mode, policy.mode, exchange.control)? {
            Permission::Leap if engine.speculates => Permission::Ride(RideReason::BackendSpeculates),
            Permission::Leap if hopeless && policy.gamma.fixed.is_none() => {
                Permission::Ride(RideReason::NoGain)
            }
            permission => permission,
        };
        let bounds = self.plans.get(exchange.backend.name()).ok_or(BypassReason::NoPlan)?;
        let allowed: Vec<Plan> = bounds.allow.iter().filter_map(|name| name.plan()).collect();
        let plans = effective.plans.iter().copied().filter(|plan| allowed.contains(plan)).collect();
        let gamma = |gamma: u32| match exchange.control {
            Some(Control::Gamma(most)) => gamma.min(u32::from(most)) as usize,
            _ => gamma as usize,
        };
        let rules = Rules {
            permission,
            plans,
            gamma_max: gamma(policy.gamma.max),
            gamma_fixed: policy.gamma.fixed.map(gamma),
            margin: policy.gamma.margin,
            stay: policy.gamma.stay,
            lookups: policy.drafters.iter().filter_map(lookup).collect(),
            context_max: engine.context.unwrap_or(usize::MAX).min(bounds.context_max as usize),
            holdback: self.held_back(policy),
            segment: engine.segment,
            ..Rules::default()
        };
        let model = policy.drafters.iter().find_map(model).map(ToOwned::to_owned);
        let bytes_max = usize::try_from(bounds.bytes_max).unwrap_or(usize::MAX);
        let Gates { waiting, kv, stale, .. } = policy.gates;
        let load = LoadGates { waiting, kv, stale };
        let gates = ReplicaGates { load, forced: policy.gamma.fixed.is_some() };
        Ok(Ruling { name: policy.label(), rules, model, bytes_max, gates })
    }

    /// Whether this request is in the control group of its policy.
    fn held_back(&self, policy: &Policy) -> bool {
        let Holdback { start, floor } = policy.holdback;
        let Draws { states, dice } = &mut *self.draws.lock();
        states.get(&policy.name, self.clock.now()).holds_back(start, floor, dice)
    }
}

fn permission(mode: Mode, policy: PolicyMode, control: Option<Control>) -> Result<Permission, BypassReason> {
    match (mode, policy, control) {
        (Mode::Off, _, _) => Err(BypassReason::Off),
        (_, _, Some(Control::Off)) => Err(BypassReason::Client),
        (_, PolicyMode::Off, _) => Err(BypassReason::Policy),
        (_, PolicyMode::Ride, _) => Ok(Permission::Ride(RideReason::Policy)),
        (_, _, Some(Control::Ride)) => Ok(Permission::Ride(RideReason::Client)),
        (Mode::Observe, _, _) => Ok(Permission::Shadow(RideReason::Observe)),
        (Mode::Auto, PolicyMode::Shadow, _) => Ok(Permission::Shadow(RideReason::Shadow)),
        (Mode::Auto, PolicyMode::Auto, _) => Ok(Permission::Leap),
    }
}

/// The lookup drafter that a policy asks for, if it is built.
fn lookup(drafter: &Drafter) -> Option<LookupSpec> {
    match drafter {
        Drafter::PromptLookup { ngram_min, ngram_max } => {
            Some(LookupSpec::PromptLookup(Ngram { min: *ngram_min, max: *ngram_max }))
        }
        Drafter::Suffix { .. }
        | Drafter::Phrasebook { .. }
        | Drafter::Recycling
        | Drafter::Prediction
        | Drafter::Model { .. } => None,
    }
}

/// The model that a policy asks for, if its vocabulary can be used.
fn model(drafter: &Drafter) -> Option<&str> {
    match drafter {
        Drafter::Model { model, vocabulary: Vocabulary::Auto | Vocabulary::Same } => Some(model),
        _ => None,
    }
}
