//! Driving eligible requests: from the judged request to the running session.
//!
//! The order is the order of the promises: whatever is missing (an unknown backend, no policy, a drafter that
//! did not load) leads to a plain relay with a reason, and nothing here can fail a request that the backend
//! would answer.

mod again;
mod busy;
mod calls;
pub mod comparison;
pub mod drafters;
mod drafting;
pub mod exchange;
pub mod failure;
pub mod gates;
mod head;
pub mod live;
pub mod memory;
pub mod mode;
mod pump;
mod recovery;
mod ride;
pub mod ruling;
mod run;
mod sink;
pub mod snapshot;

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::FutureExt;
use parking_lot::Mutex;

use crate::clock::Clock;
use crate::control::{Class, Control, Forecast, Heat, Imposed, Prospective, Shelf, Way, forecast};
use crate::draft::memory::Key;
use crate::draft::{self, LookupSpec, Spelling};
use crate::drive::calls::CallLimits;
use crate::drive::drafters::Drafters;
use crate::drive::drafting::Drafting;
use crate::drive::exchange::{BoxFuture, Drive, Driven, Exchange};
use crate::drive::memory::{Memories, Remembering};
use crate::drive::ruling::{Passed, Rulebook};
use crate::drive::run::Run;
use crate::fleet::Replica;
use crate::fleet::identity::{Epoch, Identities, Identity, Standing};
use crate::observe::Observer;
use crate::observe::metrics::Stage;
use crate::openai::Sampling;
use crate::policy::Ruling;
use crate::session::{Permission, Rules};
use crate::words::{BypassReason, Plan};

/// Most epochs whose costs and acceptance are kept; the longest unused one makes room for a new one.
const EPOCHS: usize = 1_024;
/// An epoch without a request for this long may be dropped.
const EPOCH_KEPT: Duration = Duration::from_hours(24);

/// What a [`Driver`] is built from.
pub struct DriverSetup {
    /// Which engine and model answer at each replica's address.
    pub identities: Arc<Identities>,
    /// The policies and the operator's terms per backend.
    pub rulebook: Rulebook,
    /// The loaded model drafters, by name.
    pub drafters: Arc<Drafters>,
    /// Timeout of a verify round.
    pub verify_timeout: Duration,
    /// Timeout of a model draft (`timeouts.draft`); `None` if the operator has not set one.
    pub draft_timeout: Option<Duration>,
    /// What leaping may cost the other requests, by backend.
    pub costs: HashMap<String, Imposed>,
    /// What drafters remember of earlier requests.
    pub memories: Memories,
}

/// Runs the sessions of eligible requests.
pub struct Driver {
    inner: Arc<Inner>,
}

struct Inner {
    setup: DriverSetup,
    clock: Clock,
    /// What was learnt about each epoch, shared by its sessions.
    controls: Mutex<Shelf<Epoch, Arc<Control>>>,
}

impl Driver {
    /// A driver that has learnt nothing yet.
    pub fn new(setup: DriverSetup) -> Self {
        let controls = Mutex::new(Shelf::new(EPOCHS, EPOCH_KEPT));
        Self { inner: Arc::new(Inner { setup, clock: Clock::start(), controls }) }
    }
}

impl Driver {
    /// What is expected of a request with this ruling, temperature and prompt length (tokens) on a replica now; `None` if its
    /// engine is not known.
    pub fn forecast(
        &self,
        replica: &Arc<Replica>,
        ruling: &Ruling,
        temperature: f64,
        prompt: usize,
    ) -> Option<Forecast> {
        let standing = self.inner.setup.identities.standing(replica)?;
        let Standing::Known(identity) = &*standing else { return None };
        let control = self.inner.control(identity, replica.name());
        let rules = &ruling.rules;
        let heat = Heat::of(temperature);
        let heat = if rules.accept.is_lossy() { heat.relaxed() } else { heat };
        let classes: Vec<Class> =
            ruling::sources(ruling).map(|source| Class { source, heat, kind: rules.kind }).collect();
        let (plan, fallback) = (*rules.plans.first()?, rules.plans.get(1).copied());
        let asked = Prospective {
            classes: &classes,
            way: Way { plan, fallback, context: prompt },
            margin: rules.margin,
            gap_most: rules.gap_most.map_or(f64::MAX, |most| most.as_secs_f64()),
            acceptance_least: rules.acceptance_least,
            forced: rules.gamma_fixed.is_some(),
        };
        let signal = replica.load().map(|load| load.signal());
        control.with(|learnt| {
            if let Some(signal) = &signal {
                learnt.crowd_changes(|crowd| crowd.hear(signal));
            }
            Some(forecast(learnt, &asked, self.inner.clock.now()))
        })
    }
}

impl Drive for Driver {
    fn drive(&self, exchange: Exchange) -> BoxFuture<Driven> {
        let inner = Arc::clone(&self.inner);
        async move {
            match inner.prepare(&exchange) {
                Ok(run) => Box::pin(run.begin(exchange)).await,
                Err(reason) => Err(exchange.decline(reason)),
            }
        }
        .boxed()
    }
}

impl Inner {
    /// What is known of an engine, with what the operator and the probe have said of it.
    fn control(&self, identity: &Identity, backend: &str) -> Arc<Control> {
        let control = Arc::clone(self.controls.lock().get(&identity.epoch, self.clock.now()));
        control.with(|learnt| {
            if let Some(imposed) = self.setup.costs.get(backend) {
                learnt.impose(*imposed);
            }
            if let Some(probe) = &identity.probe {
                learnt.costs.take_prior(&probe.prior);
            }
        });
        control
    }

    /// Everything that is decided before the first call; the error is why the request is relayed instead.
    fn prepare(&self, exchange: &Exchange) -> Result<Run, BypassReason> {
        let request = &exchange.request;
        let standing = self.setup.identities.standing(&exchange.replica);
        let backend = exchange.replica.name();
        let passed = Passed {
            request,
            headers: &exchange.head.headers,
            tenant: exchange.client.tenant.as_deref(),
            control: exchange.client.control,
            backend,
            mode: exchange.shared.modes.of(backend),
        };
        let begun = Instant::now();
        let ruled = self.setup.rulebook.rule(&passed, standing.as_deref(), &self.setup.drafters);
        exchange.shared.observer.metrics().overhead(Stage::Decide, begun.elapsed());
        let (mut ruling, drawn) = ruled?;
        let Some(Standing::Known(identity)) = standing.as_deref() else { return Err(BypassReason::NoPlan) };
        let identity = Arc::clone(identity);
        let seed = request.sampling.seed.unwrap_or_else(fresh_seed);
        let sampling = if identity.engine.shares_noise() {
            Sampling { seed: Some(seed), ..ruling.sampling.clone() }
        } else {
            ruling.sampling.clone()
        };
        let mut drafting = self.drafting(&ruling, &identity, &sampling, &exchange.shared.observer);
        ruling.rules.model = drafting.is_there();
        ruling.rules.drafts_ahead = drafting.goes_back();
        ruling.rules.shares_noise = drafting.shares_noise() && identity.engine.shares_noise();
        ruling.rules.samples = ruling.rules.shares_noise && self.samples(&ruling, exchange);
        if ruling.rules.samples {
            drafting.sample(fresh_seed());
        }
        ruling.rules.vocabulary = identity.tokenizer.end();
        ruling.rules.verify_timeout = self.setup.verify_timeout;
        ruling.rules.draft_timeout = self.setup.draft_timeout;
        let remembering = self.remembering(&ruling, &identity, exchange);
        let spelling: Arc<dyn Spelling> = Arc::clone(&identity.tokenizer) as _;
        ruling.rules.shared = draft::Shared { spelling: Some(spelling), ..remembering.shared() };
        let control = self.control(&identity, backend);
        let limits = CallLimits { bytes_max: ruling.bytes_max, question: self.setup.verify_timeout };
        Ok(Run {
            identity,
            ruling,
            drawn,
            sampling,
            control,
            drafting,
            remembering,
            limits,
            clock: self.clock,
            seed,
        })
    }
}

impl Inner {
    /// Whether drafts are sampled rather than drawn with the target's own noise, where they could be. The target has to be in
    /// this process, so that its laws are at hand; a client's seed, which makes the text a function of the target's noise,
    /// rules it out; and so do lossy rules, lookups, whose drafts are merged with the model's, and a time limit, which might
    /// be kept or not for what is drawn.
    fn samples(&self, ruling: &Ruling, exchange: &Exchange) -> bool {
        let asked = &exchange.request.sampling;
        let Rules { plans, accept, lookups, .. } = &ruling.rules;
        let free = asked.seed.is_none() && ruling.sampling.temperature > 0.0 && !accept.is_lossy();
        let alone = lookups.is_empty() && self.setup.draft_timeout.is_none();
        free && alone && exchange.replica.is_here() && plans.first() == Some(&Plan::Tree)
    }

    /// What of the memory this request reads, and where it is learnt: by the drafters of its policy, if it has any that may
    /// draft.
    fn remembering(&self, ruling: &Ruling, identity: &Identity, exchange: &Exchange) -> Remembering {
        let drafts = !matches!(ruling.rules.permission, Permission::Ride(_)) && exchange.client.memory;
        let lookups = || ruling.rules.lookups.iter().filter(|_| drafts);
        let scopes = lookups().filter_map(|spec| match spec {
            LookupSpec::Suffix(scope) => Some(*scope),
            LookupSpec::PromptLookup(_)
            | LookupSpec::Prediction
            | LookupSpec::Phrasebook { .. }
            | LookupSpec::Recycling => None,
        });
        let model = format!("{}/{}", exchange.replica.name(), identity.epoch.model);
        let key = Key { model, vocabulary: identity.epoch.vocabulary.clone(), tenant: None };
        let tenant = exchange.client.tenant.as_deref();
        let remembering = Remembering::new(&self.setup.memories, &key, tenant, scopes);
        if !lookups().any(|spec| *spec == LookupSpec::Recycling) {
            return remembering;
        }
        // Replicas that were started together share what they say.
        remembering.recycling(&key, &format!("{}@{}", identity.epoch.version, identity.epoch.started))
    }

    #[cfg(feature = "onnx")]
    fn drafting(
        &self,
        ruling: &Ruling,
        identity: &Identity,
        sampling: &Sampling,
        observer: &Arc<Observer>,
    ) -> Drafting {
        let named = ruling.model.as_ref();
        let drafter = named.and_then(|(name, speech)| self.setup.drafters.get(name, *speech, identity));
        // Where the target's noise cannot be reproduced, its most probable token is the best guess: draft greedily.
        let temperature = if identity.engine.shares_noise() { sampling.temperature } else { 0.0 };
        let sampling = Sampling { temperature, ..sampling.clone() };
        Drafting::new(drafter, sampling, self.setup.draft_timeout.is_some(), Arc::clone(observer))
    }

    #[cfg(not(feature = "onnx"))]
    #[expect(clippy::unused_self, reason = "the shape that the drafting with a runtime has")]
    fn drafting(&self, _: &Ruling, _: &Identity, _: &Sampling, _: &Arc<Observer>) -> Drafting {
        Drafting::none()
    }
}

/// A random seed of 53 bits: JSON readers that parse numbers as doubles keep it exactly.
pub fn fresh_seed() -> u64 {
    RandomState::new().hash_one(0_u8) >> 11
}
