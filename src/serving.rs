//! Serving of eligible requests: from the policy's ruling to the running session.
//!
//! Anything missing (an unknown backend, no policy, a drafter that did not load) leads to a relay
//! with a reason; nothing here can fail a request that the backend would answer.

mod again;
mod answer_traits;
mod busy;
mod calls;
pub mod comparison;
pub mod corpus;
pub mod drafters;
mod drafting;
#[cfg(feature = "onnx")]
mod evaluation;
pub mod exchange;
pub mod failure;
pub mod gates;
mod head;
pub mod live;
pub mod mode;
mod plain;
mod recovery;
pub mod ruling;
mod run;
mod session_loop;
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
use crate::control::EvaluatedText;
use crate::control::{Class, Control, ExpiringMap, Forecast, Imposed, Presence, Prospective, Way, forecast};
use crate::draft::corpus::Key;
use crate::draft::{self, LookupSpec, Spelling};
use crate::fleet::Replica;
use crate::fleet::identity::{Epoch, Identities, Identity, ServerKnowledge};
use crate::observe::Observer;
use crate::observe::metrics::Stage;
use crate::openai::{Route, Sampling};
#[cfg(feature = "onnx")]
use crate::policy::part::TranslationMode;
use crate::policy::{Relay, Ruling};
use crate::serving::answer_traits::AnswerTraits;
use crate::serving::calls::CallLimits;
use crate::serving::corpus::{CorpusAccess, CorpusHandle};
use crate::serving::drafters::Drafters;
#[cfg(feature = "onnx")]
use crate::serving::drafters::SessionModel;
use crate::serving::drafting::{DrafterEvaluation, Drafting};
use crate::serving::exchange::{BoxFuture, Exchange, Serve, Served};
use crate::serving::ruling::{Passed, Rulebook};
use crate::serving::run::Run;
use crate::session::{Permission, Rules};
#[cfg(feature = "onnx")]
use crate::units::SplitMix64;
use crate::words::{PlainReason, RelayReason, VerifyMethod};

/// Maximum number of epochs whose costs and acceptance are kept; the least recently used one is
/// evicted.
const EPOCHS: usize = 1_024;
/// An epoch without a request for this long may be dropped.
const EPOCH_KEPT: Duration = Duration::from_hours(24);

/// Maximum number of answers on which drafters are scored concurrently.
const SCORING: usize = 4;

/// Parts from which a [`SessionRunner`] is built.
pub struct SessionRunnerSetup {
    /// Engine and model at each replica's address.
    pub identities: Arc<Identities>,
    /// Policies, and the operator's verification limits by backend.
    pub rulebook: Rulebook,
    /// The loaded model drafters, by name.
    pub drafters: Arc<Drafters>,
    /// Timeout of a round's verify requests.
    pub verify_timeout: Duration,
    /// Timeout of a model draft (`timeouts.draft`); `None` if the operator has not set one.
    pub draft_timeout: Option<Duration>,
    /// Limits on what speculation may cost other requests, by backend.
    pub costs: HashMap<String, Imposed>,
    /// Texts of earlier requests that drafters read.
    pub corpus: CorpusHandle,
}

/// Runs the sessions of eligible requests.
pub struct SessionRunner {
    inner: Arc<Inner>,
}

struct Inner {
    setup: SessionRunnerSetup,
    clock: Clock,
    /// Costs and acceptance learnt for each epoch, shared by its sessions.
    controls: Mutex<ExpiringMap<Epoch, Arc<Control>>>,
    /// The same for answers passed on unchanged, whose ids were tokenized from their text: used for
    /// projections only.
    observed: Mutex<ExpiringMap<Epoch, Arc<Control>>>,
    /// Traits observed in the answers of each epoch's server.
    manners: Mutex<ExpiringMap<Epoch, Arc<AnswerTraits>>>,
    /// Permits for scoring drafters on an answer; answers without a permit are only counted.
    scoring: Arc<Semaphore>,
    /// Time budget for evaluating several model drafters on one text.
    #[cfg(feature = "onnx")]
    share: Arc<evaluation::Share>,
}

impl SessionRunner {
    /// A session runner that has learnt nothing yet.
    pub fn new(setup: SessionRunnerSetup) -> Self {
        let map = || Mutex::new(ExpiringMap::new(EPOCHS, EPOCH_KEPT));
        let inner = Inner {
            setup,
            clock: Clock::start(),
            controls: map(),
            observed: map(),
            manners: Mutex::new(ExpiringMap::new(EPOCHS, EPOCH_KEPT)),
            scoring: Arc::new(Semaphore::new(SCORING)),
            #[cfg(feature = "onnx")]
            share: Arc::default(),
        };
        Self { inner: Arc::new(inner) }
    }
}

impl SessionRunner {
    /// Forecast for a request with this ruling, temperature and prompt length (tokens) on a replica
    /// now; `None` if its engine is not known.
    pub fn forecast(
        &self,
        replica: &Arc<Replica>,
        ruling: &Ruling,
        temperature: f64,
        prompt: usize,
    ) -> Option<Forecast> {
        let knowledge = self.inner.setup.identities.knowledge(replica)?;
        let ServerKnowledge::Known(identity) = &*knowledge else { return None };
        let control = self.inner.learnt_for(ruling, identity, replica.name());
        let rules = &ruling.rules;
        let bucket = rules.bucket(temperature);
        let drafters = ruling::drafters(ruling, &control);
        let classes: Vec<Class> =
            drafters.into_iter().map(|drafter| Class::new(drafter, bucket, rules.kind)).collect();
        let (method, fallback) = (*rules.methods.first()?, rules.methods.get(1).copied());
        let asked = Prospective {
            classes: &classes,
            way: Way { method, fallback, context: prompt },
            margin: rules.margin,
            max_gap: rules.max_gap.map_or(f64::MAX, |most| most.as_secs_f64()),
            min_acceptance: rules.min_acceptance,
            forced: rules.gamma_fixed.is_some(),
        };
        let signal = replica.load().map(|load| load.signal());
        control.with(|learnt| {
            if let Some(signal) = &signal {
                learnt.concurrency_changes(|concurrency| concurrency.set_signal(signal));
            }
            Some(forecast(learnt, &asked, self.inner.clock.now()))
        })
    }
}

impl SessionRunner {
    /// Probability with which each model drafter of a ruling is drawn for a request of this
    /// temperature on a replica, by name; empty with fewer than two models, or if the engine is not
    /// known.
    pub fn chances(&self, replica: &Arc<Replica>, ruling: &Ruling, temperature: f64) -> Vec<(String, f64)> {
        let knowledge = self.inner.setup.identities.knowledge(replica);
        let Some(ServerKnowledge::Known(identity)) = knowledge.as_deref() else { return Vec::new() };
        if ruling.models.len() < 2 {
            return Vec::new();
        }
        let control = self.inner.learnt_for(ruling, identity, replica.name());
        let numbers: Vec<u8> = ruling.models.iter().map(|(name, _)| control.model(name)).collect();
        let hedge =
            control.with(|learnt| learnt.hedges.of(ruling.rules.bucket(temperature), ruling.rules.kind));
        let names = ruling.models.iter().map(|(name, _)| name.clone());
        names.zip(hedge.weights(&numbers)).collect()
    }
}

impl SessionRunner {
    /// Reason for which requests of this route stay plain on this engine under every policy,
    /// because of the format of its answers; `None` if there is none.
    pub fn plain_before(&self, identity: &Identity, route: Route) -> Option<PlainReason> {
        self.inner.plain_before(identity, route)
    }
}

impl Serve for SessionRunner {
    fn serve(&self, exchange: Exchange) -> BoxFuture<Served> {
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
    /// Control state that a request with this ruling reads and updates: `controls`, or `observed`
    /// if the ruling never allows speculation.
    fn learnt_for(&self, ruling: &Ruling, identity: &Identity, backend: &str) -> Arc<Control> {
        let control = self.control(&self.controls, identity, backend);
        if ruling.rules.permission.never().is_none() {
            return control;
        }
        let observed = self.control(&self.observed, identity, backend);
        // The measured costs of calls are valid for both.
        let costs = control.with(|learnt| learnt.costs.clone());
        observed.with(|learnt| {
            if costs.plain_token().is_some() || learnt.costs.plain_token().is_none() {
                *learnt.costs = costs;
            }
        });
        observed
    }

    /// Control state of an engine, with the operator's limits and the probe's costs applied.
    fn control(
        &self,
        map: &Mutex<ExpiringMap<Epoch, Arc<Control>>>,
        identity: &Identity,
        backend: &str,
    ) -> Arc<Control> {
        let control = Arc::clone(map.lock().get(&identity.epoch, self.clock.now()));
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

    /// Traits observed so far in this engine's answers.
    fn answer_traits(&self, identity: &Identity) -> Arc<AnswerTraits> {
        Arc::clone(self.manners.lock().get(&identity.epoch, self.clock.now()))
    }

    /// See [`SessionRunner::plain_before`].
    fn plain_before(&self, identity: &Identity, route: Route) -> Option<PlainReason> {
        if !identity.engine.dialect.codec().tells_ids(route) {
            return Some(PlainReason::UntrustedIds);
        }
        (route == Route::Chat && self.answer_traits(identity).parses()).then_some(PlainReason::Parser)
    }

    /// Makes every decision that precedes the first call; the error is the reason for a relay.
    fn prepare(&self, exchange: &Exchange) -> Result<Run, Relay> {
        let request = &exchange.request;
        let knowledge = self.setup.identities.knowledge(&exchange.replica);
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
        let ruled = self.setup.rulebook.rule(&passed, knowledge.as_deref(), &self.setup.drafters);
        exchange.shared.observer.metrics().overhead(Stage::Decide, begun.elapsed());
        let (mut ruling, drawn) = ruled?;
        let Some(ServerKnowledge::Known(identity)) = knowledge.as_deref() else {
            return Err(RelayReason::NoVerifyMethod.into());
        };
        let identity = Arc::clone(identity);
        let seed = request.sampling.seed.unwrap_or_else(fresh_seed);
        let sampling = if identity.engine.shares_noise() {
            Sampling { seed: Some(seed), ..ruling.sampling.clone() }
        } else {
            ruling.sampling.clone()
        };
        let answer_traits = self.answer_traits(&identity);
        if ruling.rules.permission == Permission::Speculate
            && let Some(reason) = self.plain_before(&identity, request.route)
        {
            ruling.rules.permission = Permission::Plain(reason);
        }
        let control = self.learnt_for(&ruling, &identity, backend);
        // A request that is passed on unchanged counts towards the concurrency of those that are
        // speculated on.
        let present = ruling
            .rules
            .permission
            .never()
            .map(|_| Presence::new(self.control(&self.controls, &identity, backend)));
        let observer = &exchange.shared.observer;
        let (mut drafting, evaluation) = self.drafting(&mut ruling, &identity, &sampling, &control, observer);
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
            evaluation,
            remembering,
            limits,
            clock: self.clock,
            seed,
            present,
            scoring: Arc::clone(&self.scoring),
            answer_traits,
        })
    }
}

impl Inner {
    /// True if drafts are sampled rather than drawn with the target's own noise. Requires a target
    /// in this process, whose distributions are available. Ruled out by a client's seed, which
    /// makes the text a function of the target's noise; by lossy rules; by lookups, whose drafts
    /// are merged with the model's; and by a draft timeout, which could be met or missed depending
    /// on the tokens drawn.
    fn samples(&self, ruling: &Ruling, exchange: &Exchange) -> bool {
        let asked = &exchange.request.sampling;
        let Rules { methods, accept, lookups, .. } = &ruling.rules;
        let free = asked.seed.is_none() && ruling.sampling.temperature > 0.0 && !accept.is_lossy();
        let alone = lookups.is_empty() && self.setup.draft_timeout.is_none();
        free && alone && exchange.replica.is_here() && methods.first() == Some(&VerifyMethod::Tree)
    }

    /// The part of the corpus that this request reads and is added to, by those drafters of its
    /// policy that may draft.
    fn remembering(&self, ruling: &Ruling, identity: &Identity, exchange: &Exchange) -> CorpusAccess {
        let drafts = !matches!(ruling.rules.permission, Permission::Plain(_)) && exchange.client.memory;
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
        let remembering = CorpusAccess::new(&self.setup.corpus, &key, tenant, scopes);
        if !lookups().any(|spec| *spec == LookupSpec::Recycling) {
            return remembering;
        }
        // Replicas that were started together share their successors.
        let started = identity.epoch.started / 1_000_000;
        remembering.recycling(&key, &format!("{}@{started}", identity.epoch.version))
    }

    /// The model drafter of a request, drawn from those of its policy, and the evaluation of all of
    /// them after it.
    #[cfg(feature = "onnx")]
    fn drafting(
        &self,
        ruling: &mut Ruling,
        identity: &Identity,
        sampling: &Sampling,
        control: &Arc<Control>,
        observer: &Arc<Observer>,
    ) -> (Drafting, Option<DrafterEvaluation>) {
        // Where the target's noise cannot be reproduced, its most probable token is the best guess:
        // draft greedily.
        let temperature = if identity.engine.shares_noise() { sampling.temperature } else { 0.0 };
        let (bucket, kind) = (ruling.rules.bucket(sampling.temperature), ruling.rules.kind);
        let sampling = Sampling { temperature, ..sampling.clone() };
        let models = self.models(ruling, identity, control);
        let numbers: Vec<u8> = models.iter().map(|(number, _)| *number).collect();
        let hedge = control.with(|learnt| learnt.hedges.of(bucket, kind));
        let drawn = hedge.draw(&numbers, &mut SplitMix64::new(fresh_seed()));
        ruling.rules.model = drawn;
        let drafter = models.iter().find(|(number, _)| Some(*number) == drawn);
        let evaluated = evaluated(ruling, bucket, drawn);
        if let Some((_, session_model)) = drafter.filter(|_| evaluated.is_some()) {
            observer.metrics().drawn(&ruling.policy.name, &session_model.name);
        }
        let bounded = self.setup.draft_timeout.is_some();
        let session_model = drafter.map(|(_, session_model)| session_model.clone());
        let drafting = Drafting::new(session_model, sampling.clone(), bounded, Arc::clone(observer));
        let evaluation = evaluated.filter(|_| models.len() > 1).map(|evaluated| DrafterEvaluation {
            evaluated,
            models,
            control: Arc::clone(control),
            sampling,
            observer: Arc::clone(observer),
            share: Arc::clone(&self.share),
            clock: self.clock,
            begun: Instant::now(),
        });
        (drafting, evaluation)
    }

    /// The loaded models of a ruling, by their numbers in the control state.
    #[cfg(feature = "onnx")]
    fn models(&self, ruling: &Ruling, identity: &Identity, control: &Control) -> Vec<(u8, SessionModel)> {
        let session_model = |(name, translation_mode): &(String, TranslationMode)| {
            Some((control.model(name), self.setup.drafters.get(name, *translation_mode, identity)?))
        };
        ruling.models.iter().filter_map(session_model).collect()
    }

    #[cfg(not(feature = "onnx"))]
    #[expect(clippy::unused_self, reason = "same signature as with a runtime")]
    fn drafting(
        &self,
        _: &mut Ruling,
        _: &Identity,
        _: &Sampling,
        _: &Arc<Control>,
        _: &Arc<Observer>,
    ) -> (Drafting, Option<DrafterEvaluation>) {
        (Drafting::none(), None)
    }
}

/// The evaluated text of a request, still without results; `None` if nothing would be drafted.
#[cfg(feature = "onnx")]
fn evaluated(
    ruling: &Ruling,
    bucket: crate::control::TemperatureBucket,
    drafted: Option<u8>,
) -> Option<EvaluatedText> {
    let rules = &ruling.rules;
    let drafts = !matches!(rules.permission, Permission::Plain(_));
    let (method, fallback) = (*rules.methods.first().filter(|_| drafts)?, rules.methods.get(1).copied());
    let way = Way { method, fallback, context: 0 };
    Some(EvaluatedText {
        bucket,
        kind: rules.kind,
        way,
        gamma_max: rules.gamma_max,
        hits: Vec::new(),
        drafted,
    })
}

/// A random seed of 53 bits: JSON readers that parse numbers as doubles keep it exactly.
pub fn fresh_seed() -> u64 {
    RandomState::new().hash_one(0_u8) >> 11
}
