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
#[cfg(feature = "onnx")]
mod hearing;
pub mod live;
mod manner;
pub mod memory;
pub mod mode;
mod pump;
mod recovery;
mod ride;
pub mod ruling;
mod run;
mod sink;
pub mod snapshot;
mod tap;
mod untouched;

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::FutureExt;
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use crate::clock::Clock;
#[cfg(feature = "onnx")]
use crate::control::Passage;
use crate::control::{Class, Control, Forecast, Imposed, Presence, Prospective, Shelf, Way, forecast};
use crate::draft::memory::Key;
use crate::draft::{self, LookupSpec, Spelling};
use crate::drive::calls::CallLimits;
use crate::drive::drafters::Drafters;
#[cfg(feature = "onnx")]
use crate::drive::drafters::Speaker;
use crate::drive::drafting::{Drafting, Hearing};
use crate::drive::exchange::{BoxFuture, Drive, Driven, Exchange};
use crate::drive::manner::Manner;
use crate::drive::memory::{Memories, Remembering};
use crate::drive::ruling::{Passed, Rulebook};
use crate::drive::run::Run;
use crate::fleet::Replica;
use crate::fleet::identity::{Epoch, Identities, Identity, Standing};
use crate::observe::Observer;
use crate::observe::metrics::Stage;
use crate::openai::{Route, Sampling};
#[cfg(feature = "onnx")]
use crate::policy::part::Speech;
use crate::policy::{Bypass, Ruling};
use crate::session::{Permission, Rules};
#[cfg(feature = "onnx")]
use crate::units::Dice;
use crate::words::{BypassReason, Plan, RideReason};

/// Most epochs whose costs and acceptance are kept; the longest unused one makes room for a new one.
const EPOCHS: usize = 1_024;
/// An epoch without a request for this long may be dropped.
const EPOCH_KEPT: Duration = Duration::from_hours(24);

/// Answers on which drafters are scored at the same time, at most.
const SCORING: usize = 4;

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
    /// The same of answers that passed unchanged, whose ids were made of their text: only projections rest on it.
    observed: Mutex<Shelf<Epoch, Arc<Control>>>,
    /// How the server of each epoch writes its answers.
    manners: Mutex<Shelf<Epoch, Arc<Manner>>>,
    /// Answers on which drafters are scored now; others are only counted meanwhile.
    scoring: Arc<Semaphore>,
    /// The time for hearing several models on one text.
    #[cfg(feature = "onnx")]
    share: Arc<hearing::Share>,
}

impl Driver {
    /// A driver that has learnt nothing yet.
    pub fn new(setup: DriverSetup) -> Self {
        let shelf = || Mutex::new(Shelf::new(EPOCHS, EPOCH_KEPT));
        let inner = Inner {
            setup,
            clock: Clock::start(),
            controls: shelf(),
            observed: shelf(),
            manners: Mutex::new(Shelf::new(EPOCHS, EPOCH_KEPT)),
            scoring: Arc::new(Semaphore::new(SCORING)),
            #[cfg(feature = "onnx")]
            share: Arc::default(),
        };
        Self { inner: Arc::new(inner) }
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
        let control = self.inner.learnt_for(ruling, identity, replica.name());
        let rules = &ruling.rules;
        let heat = rules.heat(temperature);
        let drafters = ruling::drafters(ruling, &control);
        let classes: Vec<Class> =
            drafters.into_iter().map(|drafter| Class::new(drafter, heat, rules.kind)).collect();
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

impl Driver {
    /// How likely each model of a ruling is drawn to draft for a request of this temperature on a replica, by name; empty if
    /// there is no choice, or the engine is not known.
    pub fn chances(&self, replica: &Arc<Replica>, ruling: &Ruling, temperature: f64) -> Vec<(String, f64)> {
        let standing = self.inner.setup.identities.standing(replica);
        let Some(Standing::Known(identity)) = standing.as_deref() else { return Vec::new() };
        if ruling.models.len() < 2 {
            return Vec::new();
        }
        let control = self.inner.learnt_for(ruling, identity, replica.name());
        let numbers: Vec<u8> = ruling.models.iter().map(|(name, _)| control.model(name)).collect();
        let hedge =
            control.with(|learnt| learnt.hedges.of(ruling.rules.heat(temperature), ruling.rules.kind));
        let names = ruling.models.iter().map(|(name, _)| name.clone());
        names.zip(hedge.weights(&numbers)).collect()
    }
}

impl Driver {
    /// Why requests of this route stay plain before this engine, whatever their policy, by how it writes its answers; `None`
    /// if they need not.
    pub fn plain_before(&self, identity: &Identity, route: Route) -> Option<RideReason> {
        self.inner.plain_before(identity, route)
    }
}

impl Drive for Driver {
    fn drive(&self, exchange: Exchange) -> BoxFuture<Driven> {
        let inner = Arc::clone(&self.inner);
        async move {
            match inner.prepare(&exchange) {
                Ok(run) => Box::pin(run.begin(exchange)).await,
                Err(why) => Err(exchange.decline(why)),
            }
        }
        .boxed()
    }
}

impl Inner {
    /// What a request with this ruling learns from, and what is known for it.
    fn learnt_for(&self, ruling: &Ruling, identity: &Identity, backend: &str) -> Arc<Control> {
        let control = self.control(&self.controls, identity, backend);
        if ruling.rules.permission.never().is_none() {
            return control;
        }
        let observed = self.control(&self.observed, identity, backend);
        // What calls cost is the same for both.
        let costs = control.with(|learnt| learnt.costs.clone());
        observed.with(|learnt| {
            if costs.ride_token().is_some() || learnt.costs.ride_token().is_none() {
                *learnt.costs = costs;
            }
        });
        observed
    }

    /// What is known of an engine, with what the operator and the probe have said of it.
    fn control(
        &self,
        shelf: &Mutex<Shelf<Epoch, Arc<Control>>>,
        identity: &Identity,
        backend: &str,
    ) -> Arc<Control> {
        let control = Arc::clone(shelf.lock().get(&identity.epoch, self.clock.now()));
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

    /// How this engine writes its answers, as far as they have shown.
    fn manner(&self, identity: &Identity) -> Arc<Manner> {
        Arc::clone(self.manners.lock().get(&identity.epoch, self.clock.now()))
    }

    /// See [`Driver::plain_before`].
    fn plain_before(&self, identity: &Identity, route: Route) -> Option<RideReason> {
        if !identity.engine.dialect.codec().tells_ids(route) {
            return Some(RideReason::NoDraft);
        }
        (route == Route::Chat && self.manner(identity).parses()).then_some(RideReason::Parser)
    }

    /// Everything that is decided before the first call; the error is why the request is relayed instead.
    fn prepare(&self, exchange: &Exchange) -> Result<Run, Bypass> {
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
        let Some(Standing::Known(identity)) = standing.as_deref() else {
            return Err(BypassReason::NoPlan.into());
        };
        let identity = Arc::clone(identity);
        let seed = request.sampling.seed.unwrap_or_else(fresh_seed);
        let sampling = if identity.engine.shares_noise() {
            Sampling { seed: Some(seed), ..ruling.sampling.clone() }
        } else {
            ruling.sampling.clone()
        };
        let manner = self.manner(&identity);
        if ruling.rules.permission == Permission::Leap
            && let Some(reason) = self.plain_before(&identity, request.route)
        {
            ruling.rules.permission = Permission::Ride(reason);
        }
        let control = self.learnt_for(&ruling, &identity, backend);
        // A request that passes unchanged is one of the crowd beside those that leap.
        let present = ruling
            .rules
            .permission
            .never()
            .map(|_| Presence::new(self.control(&self.controls, &identity, backend)));
        let observer = &exchange.shared.observer;
        let (mut drafting, hearing) = self.drafting(&mut ruling, &identity, &sampling, &control, observer);
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
        let limits = CallLimits { bytes_max: ruling.bytes_max, question: self.setup.verify_timeout };
        Ok(Run {
            identity,
            ruling,
            drawn,
            sampling,
            control,
            drafting,
            hearing,
            remembering,
            limits,
            clock: self.clock,
            seed,
            present,
            scoring: Arc::clone(&self.scoring),
            manner,
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
        let started = identity.epoch.started / 1_000_000;
        remembering.recycling(&key, &format!("{}@{started}", identity.epoch.version))
    }

    /// The model that drafts for a request, drawn from those of its policy, and how all of them are heard after it.
    #[cfg(feature = "onnx")]
    fn drafting(
        &self,
        ruling: &mut Ruling,
        identity: &Identity,
        sampling: &Sampling,
        control: &Arc<Control>,
        observer: &Arc<Observer>,
    ) -> (Drafting, Option<Hearing>) {
        // Where the target's noise cannot be reproduced, its most probable token is the best guess: draft greedily.
        let temperature = if identity.engine.shares_noise() { sampling.temperature } else { 0.0 };
        let (heat, kind) = (ruling.rules.heat(sampling.temperature), ruling.rules.kind);
        let sampling = Sampling { temperature, ..sampling.clone() };
        let models = self.models(ruling, identity, control);
        let numbers: Vec<u8> = models.iter().map(|(number, _)| *number).collect();
        let hedge = control.with(|learnt| learnt.hedges.of(heat, kind));
        let drawn = hedge.draw(&numbers, &mut Dice::new(fresh_seed()));
        ruling.rules.model = drawn;
        let drafter = models.iter().find(|(number, _)| Some(*number) == drawn);
        let passage = passage(ruling, heat, drawn);
        if let Some((_, speaker)) = drafter.filter(|_| passage.is_some()) {
            observer.metrics().drawn(&ruling.policy.name, &speaker.name);
        }
        let bounded = self.setup.draft_timeout.is_some();
        let speaker = drafter.map(|(_, speaker)| speaker.clone());
        let drafting = Drafting::new(speaker, sampling.clone(), bounded, Arc::clone(observer));
        let hearing = passage.filter(|_| models.len() > 1).map(|passage| Hearing {
            passage,
            models,
            control: Arc::clone(control),
            sampling,
            observer: Arc::clone(observer),
            share: Arc::clone(&self.share),
            clock: self.clock,
            begun: Instant::now(),
        });
        (drafting, hearing)
    }

    /// The models of a ruling that are loaded, by the numbers under which they are learnt of.
    #[cfg(feature = "onnx")]
    fn models(&self, ruling: &Ruling, identity: &Identity, control: &Control) -> Vec<(u8, Speaker)> {
        let speaker = |(name, speech): &(String, Speech)| {
            Some((control.model(name), self.setup.drafters.get(name, *speech, identity)?))
        };
        ruling.models.iter().filter_map(speaker).collect()
    }

    #[cfg(not(feature = "onnx"))]
    #[expect(clippy::unused_self, reason = "the shape that the drafting with a runtime has")]
    fn drafting(
        &self,
        _: &mut Ruling,
        _: &Identity,
        _: &Sampling,
        _: &Arc<Control>,
        _: &Arc<Observer>,
    ) -> (Drafting, Option<Hearing>) {
        (Drafting::none(), None)
    }
}

/// What is known of a passage of a request before its text is; `None` where nothing would be drafted.
#[cfg(feature = "onnx")]
fn passage(ruling: &Ruling, heat: crate::control::Heat, drafted: Option<u8>) -> Option<Passage> {
    let rules = &ruling.rules;
    let drafts = !matches!(rules.permission, Permission::Ride(_));
    let (plan, fallback) = (*rules.plans.first().filter(|_| drafts)?, rules.plans.get(1).copied());
    let way = Way { plan, fallback, context: 0 };
    Some(Passage { heat, kind: rules.kind, way, gamma_max: rules.gamma_max, heard: Vec::new(), drafted })
}

/// A random seed of 53 bits: JSON readers that parse numbers as doubles keep it exactly.
pub fn fresh_seed() -> u64 {
    RandomState::new().hash_one(0_u8) >> 11
}
