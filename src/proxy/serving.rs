//! Serving of eligible requests: from the policy's ruling to the running session.
//!
//! Anything missing leads to passthrough with a reason (an unknown backend, no policy) or to plain
//! decoding (no drafter); nothing here can fail a request that the backend would answer.

mod busy;
mod calls;
pub mod drafters;
mod drafting;
pub mod exchange;
pub mod failure;
mod first_token;
pub mod gates;
mod grammar;
mod head;
mod inject;
pub mod live;
pub mod mode;
mod observed;
mod parsing;
pub mod passthrough;
mod plain;
pub mod plan;
mod resend;
pub mod ruling;
mod run;
mod session_loop;
mod sink;
pub mod tap;

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::{BoxFuture, FutureExt};
use http::Response;
use tokio::sync::Semaphore;

use crate::learning::Learnt;
use crate::learning::answer_traits::AnswerTraits;
use crate::learning::comparison::Drawn;
use crate::learning::corpus::{CorpusAccess, CorpusHandle};
use crate::learning::recording::{Record, Recorder};
use crate::serving::drafters::Drafters;
use crate::serving::drafters::SessionModel;
use crate::serving::drafting::Drafting;
use crate::serving::exchange::{Exchange, Joining, Serve};
use crate::serving::grammar::Grammar;
use crate::serving::plan::{CallLimits, SessionPlan};
use crate::serving::ruling::Rulebook;
use crate::serving::run::Run;
use foretell_core::control::{Class, Forecast, Presence, Prospective, Way, forecast};
use foretell_core::draft::corpus::Key;
use foretell_core::draft::{self, LookupSpec, Spelling};
use foretell_core::session::{Permission, Resources, Timeouts};
use foretell_core::words::{PassthroughReason, PlainReason};
use foretell_drafts::joins::Terms;
use foretell_net::clock::Clock;
use foretell_net::fleet::Replica;
use foretell_net::fleet::identity::{Identities, Identity, ServerKnowledge};
use foretell_net::http::body::Body;
use foretell_net::random::fresh_seed;
use foretell_observe::Observer;
use foretell_observe::metrics::Stage;
use foretell_policy::{Admitted, Passthrough, Ruling, Subjects};
use foretell_wire::openai::{Request, Route, Sampling};

/// Maximum number of answers on which drafters are scored concurrently.
const SCORING: usize = 4;

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
    /// Costs, acceptance and traits of each engine.
    pub learnt: Arc<Learnt>,
    /// Texts of earlier requests that drafters read.
    pub corpus: CorpusHandle,
    /// `None` without `corpus.record` of the config file.
    pub recorder: Option<Recorder>,
}

/// The format of a server's answers to one request.
pub struct AnswerFormat {
    /// Traits observed in the server's answers.
    traits: Arc<AnswerTraits>,
    /// Knowledge about a grammar that may constrain the output.
    grammar: Grammar,
    /// The permission to which it narrows that of every policy; `None` if it does not.
    pub permission: Option<Permission>,
}

fn format_permission(
    identity: &Identity,
    request: &Request,
    traits: &AnswerTraits,
    grammar: &Grammar,
) -> Option<Permission> {
    let engine = &identity.engine;
    let has_ids = engine.reports_ids(request);
    let lost = |stop: &String| identity.tokenizer.touches_special(stop);
    let stops = engine.quirks().stops.in_special && request.stop.iter().any(lost);
    if !has_ids || stops {
        return Some(Permission::Plain(PlainReason::UntrustedIds));
    }
    if *grammar == Grammar::Known(true) {
        return Some(Permission::Plain(PlainReason::Grammar));
    }
    match request.route {
        Route::Chat => parsing::permission(identity, request, traits),
        Route::Completions => None,
    }
}

/// Runs the sessions of eligible requests.
pub struct SessionRunner {
    setup: SessionRunnerSetup,
    clock: Clock,
    /// Permits for scoring drafters on an answer; answers without a permit are only counted.
    scoring: Arc<Semaphore>,
}

impl SessionRunner {
    /// A session runner that has learnt nothing yet.
    pub fn new(setup: SessionRunnerSetup) -> Self {
        Self { clock: setup.learnt.clock(), setup, scoring: Arc::new(Semaphore::new(SCORING)) }
    }

    /// Forecast for a request with this ruling, temperature and prompt length (tokens) on a replica
    /// now; `None` if its engine is not known.
    pub fn forecast(
        &self,
        replica: &Arc<Replica>,
        ruling: &Ruling,
        temperature: f64,
        prompt: usize,
    ) -> Option<Forecast> {
        let knowledge = self.setup.identities.knowledge(replica)?;
        let ServerKnowledge::Known(identity) = &*knowledge else { return None };
        let control = self.setup.learnt.for_permission(ruling.rules.permission, identity, replica.backend());
        let rules = &ruling.rules;
        let bucket = rules.bucket(temperature);
        let drafters = ruling::drafters(ruling, &control);
        let classes: Vec<Class> =
            drafters.into_iter().map(|drafter| Class::new(drafter, bucket, rules.kind)).collect();
        let (method, fallback) = (*rules.methods.first()?, rules.methods.get(1).copied());
        let prospective = Prospective {
            classes: &classes,
            way: Way { method, fallback, context: prompt },
            margin: rules.margin,
            max_gap: rules.max_gap.map_or(f64::MAX, |gap| gap.as_secs_f64()),
            first_token: rules.first_token,
            min_acceptance: rules.min_acceptance,
            gamma_max: rules.gamma_max,
            forced: rules.gamma_fixed.is_some(),
        };
        let signal = replica.load().map(|load| load.signal());
        control.with(|learnt| {
            if let Some(signal) = &signal {
                learnt.set_signal(signal);
            }
            Some(forecast(learnt, &prospective))
        })
    }

    /// The format of a server's answers to a request, as it is known now.
    pub fn answer_format(&self, identity: &Identity, request: &Request) -> AnswerFormat {
        let traits = self.setup.learnt.answer_traits(identity);
        let grammar = Grammar::of(identity, request, &traits);
        let permission = format_permission(identity, request, &traits, &grammar);
        AnswerFormat { traits, grammar, permission }
    }

    /// The state of the output parsers for this request, in words for the operator; `None` if they
    /// do not matter, or have proved themselves.
    pub fn proof_note(&self, identity: &Identity, request: &Request) -> Option<String> {
        parsing::note(identity, request, &self.setup.learnt.answer_traits(identity))
    }

    /// The policy's ruling, and the draw of its control group; the error is the passthrough reason.
    fn rule(
        &self,
        exchange: &Exchange,
        knowledge: Option<&ServerKnowledge>,
        by_format: Option<Permission>,
    ) -> Result<(Ruling, Drawn), Passthrough> {
        let client = &exchange.client;
        let tenant = client.tenant.as_deref();
        let admitted = Admitted {
            head: Subjects { api: client.api, headers: &exchange.sent, tenant },
            request: &exchange.request,
            control: client.control,
            backend: exchange.replica.backend(),
            mode: client.mode,
        };
        let begun = Instant::now();
        let ruled = self.setup.rulebook.rule(&admitted, knowledge, by_format, &self.setup.drafters);
        exchange.shared.observer.metrics().overhead(Stage::Decide, begun.elapsed());
        ruled
    }

    /// Makes every decision that precedes the first call; the error is the passthrough reason.
    fn prepare(&self, exchange: &Exchange) -> Result<Run, Passthrough> {
        let (request, backend) = (&exchange.request, exchange.replica.backend());
        let knowledge = self.setup.identities.knowledge(&exchange.replica);
        let format = match knowledge.as_deref() {
            Some(ServerKnowledge::Known(identity)) => Some(self.answer_format(identity, request)),
            _ => None,
        };
        let by_format = format.as_ref().and_then(|format| format.permission);
        let (ruling, drawn) = self.rule(exchange, knowledge.as_deref(), by_format)?;
        let (Some(ServerKnowledge::Known(identity)), Some(format)) = (knowledge.as_deref(), format) else {
            return Err(PassthroughReason::NoVerifyMethod.into());
        };
        let permission = ruling.rules.permission;
        let control = self.setup.learnt.for_permission(permission, identity, backend);
        let seed = request.sampling.seed.unwrap_or_else(fresh_seed);
        let noise_is_known = identity.engine.quirks().shares_noise;
        let mut sampling = ruling.sampling.clone();
        if noise_is_known {
            sampling.seed = Some(seed);
        }
        let drafter = self.drafter(&ruling, identity);
        let model = drafter.as_ref().map(|drafter| control.model(&drafter.name));
        let drafting = self.drafting(drafter, identity, &sampling, &exchange.shared.observer);
        let corpus = self.corpus_access(permission, &ruling, identity, exchange);
        let spelling: Arc<dyn Spelling> = Arc::clone(&identity.tokenizer) as _;
        let schema = if ruling.rules.lookups.iter().any(LookupSpec::reads_schema) {
            ruling.sampling.grammar.as_ref().and_then(|grammar| grammar.schema().cloned()).map(Arc::new)
        } else {
            None
        };
        // A head runs in the target, so it samples with the target's noise.
        let head = identity.engine.proposes > 0 && ruling.rules.lookups.contains(&LookupSpec::Head);
        let shares_noise = noise_is_known && (drafting.shares_noise() || head);
        let resources = Resources {
            model,
            shares_noise,
            vocabulary: identity.tokenizer.end(),
            timeouts: Timeouts { verify: self.setup.verify_timeout, draft: self.setup.draft_timeout },
            shared: draft::Shared { spelling: Some(spelling), schema, ..corpus.shared() },
        };
        // A request that is passed on unchanged counts towards the concurrency of those that are
        // speculated on.
        let present = permission.never().map(|_| Presence::new(self.setup.learnt.control(identity, backend)));
        let limits = CallLimits { bytes_max: ruling.bytes_max, question: self.setup.verify_timeout };
        let parses = parsing::applies(identity, request);
        let first_call = match permission.never() {
            Some(_) => None,
            None => Some(
                exchange
                    .replica
                    .first_calls()
                    .begin(request.route)
                    .ok_or(PassthroughReason::UnreadableAnswers)?,
            ),
        };
        let identity = Arc::clone(identity);
        Ok(Run {
            plan: Arc::new(SessionPlan {
                identity,
                ruling,
                resources,
                sampling,
                seed,
                limits,
                parses,
                grammar: format.grammar,
            }),
            drawn,
            control,
            drafting,
            corpus,
            clock: self.clock,
            present,
            scoring: Arc::clone(&self.scoring),
            answer_traits: format.traits,
            first_call,
        })
    }

    /// The part of the corpus that this request reads and is added to, by those drafters of its
    /// policy that may draft.
    fn corpus_access(
        &self,
        permission: Permission,
        ruling: &Ruling,
        identity: &Identity,
        exchange: &Exchange,
    ) -> CorpusAccess {
        let drafts = !matches!(permission, Permission::Plain(_)) && exchange.client.may_use_corpus;
        let lookups: &[LookupSpec] = if drafts { &ruling.rules.lookups } else { &[] };
        let scopes = lookups.iter().filter_map(LookupSpec::corpus_scope);
        let model = format!("{}/{}", exchange.replica.backend(), identity.engine_start.model);
        let key = Key { model, vocabulary: identity.engine_start.vocabulary.clone(), tenant: None };
        let tenant = exchange.client.tenant.as_deref();
        let mut access = CorpusAccess::new(&self.setup.corpus, &key, tenant, scopes);
        if let Some(recorder) = self.recorder(permission, ruling, exchange) {
            let tenant = tenant.map(ToOwned::to_owned);
            let (model, vocabulary) = (key.model.clone(), key.vocabulary.clone());
            let policy = ruling.policy.name.clone();
            let (prompt, output) = (Vec::new(), Vec::new());
            let record = Record { at: 0, model, vocabulary, tenant, policy, prompt, output };
            access = access.recording(recorder, record);
        }
        access
    }

    /// The recorder, if process, policy and client let this request be recorded and it is one of
    /// the recorded share. Only requests of sessions are recorded, since their token ids are
    /// certain.
    fn recorder(&self, permission: Permission, ruling: &Ruling, exchange: &Exchange) -> Option<&Recorder> {
        let is_session = permission.never().is_none();
        let allowed = ruling.policy.corpus.record && exchange.client.may_use_corpus && is_session;
        let recorder = self.setup.recorder.as_ref()?;
        (allowed && recorder.draws()).then_some(recorder)
    }

    fn drafter(&self, ruling: &Ruling, identity: &Identity) -> Option<SessionModel> {
        let (name, mode) = ruling.model.as_ref()?;
        self.setup.drafters.get(name, *mode, identity)
    }

    /// The requests to the model drafter of a request, if it has one.
    fn drafting(
        &self,
        drafter: Option<SessionModel>,
        identity: &Identity,
        sampling: &Sampling,
        observer: &Arc<Observer>,
    ) -> Drafting {
        // Where the target's noise cannot be reproduced, its most probable token is the best guess:
        // draft greedily.
        let temperature = if identity.engine.quirks().shares_noise { sampling.temperature } else { 0.0 };
        let sampling = Sampling { temperature, ..sampling.clone() };
        let bounded = self.setup.draft_timeout.is_some();
        Drafting::new(drafter, sampling, bounded, Arc::clone(observer))
    }
}

impl Serve for SessionRunner {
    fn serve(&self, exchange: Exchange) -> BoxFuture<'static, Response<Body>> {
        let prepared = self.prepare(&exchange);
        async move {
            match prepared {
                Ok(run) => Box::pin(run.begin(exchange)).await,
                Err(why) => exchange.decline(why).await,
            }
        }
        .boxed()
    }

    fn terms(&self, joining: &Joining<'_>) -> (Terms, Option<String>) {
        self.terms_of(joining)
    }
}
