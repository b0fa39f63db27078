//! Driving eligible requests: from the judged request to the running session.
//!
//! The order is the order of the promises: whatever is missing (an unknown backend, no policy, a drafter that
//! did not load) leads to a plain relay with a reason, and nothing here can fail a request that the backend
//! would answer.

mod calls;
pub mod drafters;
mod drafting;
pub mod failure;
pub mod mode;
mod naming;
mod pump;
mod report;
mod ride;
pub mod ruling;
mod sink;
mod watcher;

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::FutureExt;
use http_body_util::BodyExt;
use hyper::Response;

use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use parking_lot::Mutex;

use crate::clock::Clock;
use crate::control::{Control, Shelf};
use crate::dialect::MaxTokens;
use crate::drive::calls::{CallLimits, Calls, Common};
use crate::drive::drafters::Drafters;
use crate::drive::drafting::Drafting;
use crate::drive::failure::Failure;
use crate::drive::naming::Naming;
use crate::drive::pump::Pump;
use crate::drive::report::Report;
use crate::drive::ride::Ride;
use crate::drive::ruling::{Effective, Rulebook, Ruling};
use crate::drive::sink::{Outcome, Sink, TRAILERS};
use crate::drive::watcher::Watcher;
use crate::fleet::Answer;
use crate::fleet::identity::{Epoch, Identities, Identity};
use crate::gateway::handover::{BoxFuture, Drive, Exchange};
use crate::http::body::{Body, BoxError};
use crate::http::headers;
use crate::observe::{Finished, Observer};
use crate::openai::{Path, Prompt, Request, Route, Sampling};
use crate::session::{Action, ActionId, Decode, Ending, Limit, Permission, RidePlan, Session, Start};
use crate::units::TokenId;
use crate::words::BypassReason;
use crate::words::Mode;
use crate::words::RideReason;

/// Epochs of which something is remembered, and for how long after their last request.
const EPOCHS: usize = 1_024;
const EPOCH_KEPT: Duration = Duration::from_hours(24);

const POLICY: HeaderName = HeaderName::from_static("x-foretell-policy");
/// `eligible`: a stream may leap, or not; its end is not known when its head is sent.
const ELIGIBLE: HeaderValue = HeaderValue::from_static("eligible");

/// What the driver is made of.
pub struct Parts {
    /// Who is behind the backends' addresses.
    pub identities: Arc<Identities>,
    /// The policies, and what they say about a request.
    pub rulebook: Rulebook,
    /// The model drafters that are loaded.
    pub drafters: Arc<Drafters>,
    /// Longest time for a verify call.
    pub verify_timeout: Duration,
    /// Longest time for a draft, if the operator has set one.
    pub draft_timeout: Option<Duration>,
}

/// Drives eligible requests.
pub struct Driver {
    inner: Arc<Inner>,
}

struct Inner {
    parts: Parts,
    clock: Clock,
    controls: Mutex<Shelf<Epoch, Arc<Control>>>,
}

impl Driver {
    /// A driver that has learnt nothing yet.
    pub fn new(parts: Parts) -> Self {
        let controls = Mutex::new(Shelf::new(EPOCHS, EPOCH_KEPT));
        Self { inner: Arc::new(Inner { parts, clock: Clock::start(), controls }) }
    }
}

impl Drive for Driver {
    fn drive(&self, exchange: Exchange) -> BoxFuture<Response<Body>> {
        let inner = Arc::clone(&self.inner);
        async move {
            match inner.prepare(&exchange) {
                Ok(prepared) => Box::pin(prepared.begin(exchange)).await,
                Err(reason) => exchange.relay(reason).await,
            }
        }
        .boxed()
    }
}

/// Everything that is decided before the first call.
struct Prepared {
    identity: Arc<Identity>,
    ruling: Ruling,
    sampling: Sampling,
    control: Arc<Control>,
    drafting: Drafting,
    limits: CallLimits,
    clock: Clock,
    seed: u64,
}

impl Inner {
    fn prepare(&self, exchange: &Exchange) -> Result<Prepared, BypassReason> {
        let request = &exchange.request;
        let identity = self.parts.identities.of(&exchange.backend)?;
        let effective = Effective::of(&identity.engine, request)?;
        let mode = exchange.modes.of(exchange.backend.name());
        let mut ruling = self.parts.rulebook.rule(exchange, &identity, &effective, mode)?;
        let seed = request.sampling.seed.unwrap_or_else(fresh_seed);
        let sampling = if identity.engine.shares_noise() {
            Sampling { seed: Some(seed), ..effective.sampling }
        } else {
            effective.sampling
        };
        let drafting = self.drafting(&ruling, &identity, &sampling, &exchange.observer);
        ruling.rules.model = drafting.is_there();
        ruling.rules.vocabulary = identity.tokenizer.end();
        ruling.rules.verify_timeout = self.parts.verify_timeout;
        ruling.rules.draft_timeout = self.parts.draft_timeout;
        let control = Arc::clone(self.controls.lock().get(&identity.epoch, self.clock.now()));
        if let Some(probe) = &identity.probe {
            control.with(|learnt| learnt.costs.take_prior(&probe.prior));
        }
        let limits = CallLimits { bytes_max: ruling.bytes_max, verify: self.parts.verify_timeout };
        Ok(Prepared { identity, ruling, sampling, control, drafting, limits, clock: self.clock, seed })
    }
}

impl Inner {
    #[cfg(feature = "onnx")]
    fn drafting(
        &self,
        ruling: &Ruling,
        identity: &Identity,
        sampling: &Sampling,
        observer: &Arc<Observer>,
    ) -> Drafting {
        let drafter = ruling.model.as_deref().and_then(|name| self.parts.drafters.get(name, identity));
        // Without the target's own noise its likeliest sample is the likeliest token.
        let temperature = if identity.engine.shares_noise() { sampling.temperature } else { 0.0 };
        let sampling = Sampling { temperature, ..sampling.clone() };
        Drafting::new(drafter, sampling, self.parts.draft_timeout.is_some(), Arc::clone(observer))
    }

    #[cfg(not(feature = "onnx"))]
    #[expect(clippy::unused_self, reason = "the shape that the drafting with a runtime has")]
    fn drafting(&self, _: &Ruling, _: &Identity, _: &Sampling, _: &Arc<Observer>) -> Drafting {
        Drafting::none()
    }
}

/// 53 bits, so that the seed survives every JSON reader on the way.
pub fn fresh_seed() -> u64 {
    RandomState::new().hash_one(0_u8) >> 11
}

impl Prepared {
    /// Sends the first ride and answers with what comes back.
    async fn begin(self, exchange: Exchange) -> Response<Body> {
        let spare = exchange.spare();
        let Exchange {
            parts,
            request,
            backend,
            id,
            started,
            observer,
            slot,
            modes,
            life,
            wants_trailers,
            ..
        } = exchange;
        let accepted = self.clock.before(started.elapsed());
        let name = backend.name().to_owned();
        let finished = Finished {
            id: id.clone(),
            model: Some(request.model.clone()),
            route: Some(request.route),
            policy: Some(self.ruling.name.clone()),
            ..Finished::new(Path::Ridden, name.clone())
        };
        let mut report = Report::new(observer, started, finished, slot);
        let calls = Calls::new(Common {
            replica: Arc::clone(&backend),
            engine: Arc::clone(&self.identity.engine),
            pulse: Arc::clone(&self.identity.pulse),
            headers: parts.headers,
            request_id: id,
            model: request.model.clone(),
            sampling: self.sampling.clone(),
            limits: self.limits,
        });
        let call = self.identity.engine.first_ride(&request, self.seed);
        let response = match calls.first(call).await {
            Ok(response) => response,
            Err(error) => {
                // Nothing has been answered: another replica may, without a session.
                if let Some(other) = spare.elsewhere(&error) {
                    report.forget();
                    return spare.relay(other).await;
                }
                let failure = Failure::from(error);
                report.status(failure.status().as_u16());
                report.done();
                return self.head(failure.response(), Path::Ridden.name(), None);
            }
        };
        report.status(response.status().as_u16());
        if !is_stream(&response) {
            let response = pass_on(response, report);
            return self.head(response, Path::Ridden.name(), None);
        }
        let clock = self.clock;
        let mut session = Session::new(self.start(&request), Arc::clone(&self.control), clock.now());
        let Some((ride, Action::Ride(RidePlan::First))) = session.poll() else {
            return Failure::Internal.response();
        };
        let watcher = Watcher::new(accepted);
        let gates = self.ruling.gates;
        let (replica, pulse) = (Arc::clone(&backend), Arc::clone(&self.identity.pulse));
        let closed = move || match modes.of(&name) {
            // What is under way is to end by the simplest way there is.
            _ if life.is_draining() => Some(RideReason::Draining),
            Mode::Auto => gates.closed(&replica, &pulse),
            Mode::Off | Mode::Observe => Some(RideReason::Observe),
        };
        Box::pin(self.answer(
            session,
            ride,
            response,
            calls,
            &request,
            wants_trailers,
            watcher,
            closed,
            report,
        ))
        .await
    }

    /// How the ids of the first ride become known, where it does not tell them and the request may leave it.
    fn naming(&self) -> Option<Naming> {
        let rules = &self.ruling.rules;
        let leaps = rules.permission == Permission::Leap && (!rules.holdback || rules.gamma_fixed.is_some());
        let plan =
            rules.plans.first().filter(|_| leaps && !self.identity.engine.dialect.quirks().ride_ids)?;
        Some(Naming::new(Arc::clone(&self.identity.tokenizer), *plan))
    }

    fn start(&self, request: &Request) -> Start {
        let prompt: &[TokenId] = match &request.prompt {
            Prompt::Ids(ids) => ids,
            Prompt::Text(_) | Prompt::Messages(_) => &[],
        };
        let engine = &self.identity.engine;
        let max_tokens = match engine.limit(request) {
            MaxTokens::Tokens(tokens) => Some(tokens),
            MaxTokens::Context | MaxTokens::Unknown => None,
        };
        Start {
            prompt: (!prompt.is_empty()).then(|| prompt.to_vec()),
            limit: Limit { max_tokens, context: engine.context.and_then(|most| u32::try_from(most).ok()) },
            ending: Ending {
                stop: request.stop.clone(),
                stop_order: engine.dialect.quirks().stop_order,
                hold: engine.dialect.quirks().stop_hold,
                include_stop: request.include_stop,
                stop_token_ids: request.stop_token_ids.clone(),
                eos: engine.eos.clone(),
                ignore_eos: request.sampling.ignore_eos,
                min_tokens: request.sampling.min_tokens,
            },
            temperature: self.sampling.temperature,
            decode: self.decoder(prompt, request.stream),
            marks: match request.route {
                Route::Chat => Arc::clone(self.identity.tokenizer.added()),
                Route::Completions => Arc::default(),
            },
            rules: self.ruling.rules.clone(),
            seed: self.seed,
            noise: fresh_seed(),
        }
    }

    fn decoder(&self, prompt: &[TokenId], stream: bool) -> Box<dyn Decode> {
        let decoder = self.identity.tokenizer.detokenizer(prompt, true);
        if stream && self.identity.engine.drops_tail {
            Box::new(Tailless(decoder))
        } else {
            Box::new(decoder)
        }
    }

    #[expect(clippy::too_many_arguments, reason = "the one place where a session meets its world")]
    async fn answer(
        self,
        session: Session,
        ride: ActionId,
        response: Response<Answer>,
        calls: Calls,
        request: &Request,
        trailers: bool,
        watcher: Watcher,
        closed: impl Fn() -> Option<RideReason> + Send + Sync + 'static,
        mut report: Report,
    ) -> Response<Body> {
        let (head, body) = response.into_parts();
        let engine = &self.identity.engine;
        let (id, beside) = (ride, engine.beside(request));
        let ride = Ride::begun(ride, Arc::clone(engine), body, !request.stream);
        let policy = self.ruling.name.clone();
        let headers = head.headers;
        let (sink, stream) = if request.stream {
            Sink::stream(request, &self.identity.engine, trailers)
        } else {
            (Sink::whole(request, &self.identity.engine), crate::http::body::full(Vec::new()))
        };
        let naming = self.naming();
        let drafting = self.drafting;
        let asked = beside.map(|call| calls.clone().beside(Arc::new(request.clone()), call));
        let mut pump = Pump::new(session, ride, calls, drafting, watcher, self.clock, sink, Box::new(closed));
        if let Some(asked) = asked {
            pump.ask_beside(id, asked);
        }
        if let Some(naming) = naming {
            pump.name_by(naming);
        }
        if request.stream {
            report.streams();
            tokio::spawn(async move {
                let (outcome, watcher, answer) = pump.run(policy).await;
                report.account(&outcome, &watcher, answer.is_err());
                report.done();
            });
            let mut response = Response::new(stream);
            *response.headers_mut() = stream_fields(headers, trailers);
            return head_with(response, &self.ruling.name, ELIGIBLE, None);
        }
        let (outcome, watcher, answer) = pump.run(policy).await;
        report.account(&outcome, &watcher, answer.is_err());
        whole(&outcome, answer.ok().flatten(), headers, &self.ruling.name, report)
    }

    fn head(
        &self,
        response: Response<Body>,
        path: &'static str,
        reason: Option<&'static str>,
    ) -> Response<Body> {
        head_with(response, &self.ruling.name, HeaderValue::from_static(path), reason)
    }
}

/// A decoder that leaves out the half of a character that an output ends in, as its engine's streams do.
struct Tailless<D>(D);

impl<D: Decode> Decode for Tailless<D> {
    fn push(&mut self, token: TokenId) -> String {
        self.0.push(token)
    }

    fn flush(&mut self) -> String {
        self.0.flush();
        String::new()
    }
}

/// The answer to a client that does not stream.
fn whole(
    outcome: &Outcome,
    answer: Option<Vec<u8>>,
    headers: HeaderMap,
    policy: &str,
    mut report: Report,
) -> Response<Body> {
    let path = HeaderValue::from_static(outcome.path().name());
    let Some(answer) = answer.filter(|_| outcome.summary.finish.is_some()) else {
        let failure = &outcome.broken;
        report.status(failure.status().as_u16());
        report.done();
        return head_with(failure.response(), policy, path, outcome.reason());
    };
    let mut response = Response::new(crate::http::body::full(answer));
    *response.headers_mut() = plain_fields(headers);
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, json);
    report.done();
    head_with(response, policy, path, outcome.reason())
}

fn head_with(
    mut response: Response<Body>,
    policy: &str,
    path: HeaderValue,
    reason: Option<&'static str>,
) -> Response<Body> {
    let fields = response.headers_mut();
    fields.insert(headers::PATH, path);
    if let Ok(policy) = HeaderValue::from_str(policy) {
        fields.insert(POLICY, policy);
    }
    if let Some(reason) = reason {
        fields.insert(headers::REASON, HeaderValue::from_static(reason));
    }
    response
}

fn is_stream(response: &Response<Answer>) -> bool {
    let kind = response.headers().get(header::CONTENT_TYPE);
    response.status().is_success()
        && kind.is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"))
}

/// Whatever the backend said instead of streaming (an error, as a rule) is its own answer to the client.
fn pass_on(response: Response<Answer>, report: Report) -> Response<Body> {
    let (mut head, body) = response.into_parts();
    headers::strip_hop_by_hop(&mut head.headers);
    report.done();
    Response::from_parts(head, body.map_err(|error| -> BoxError { Box::new(error) }).boxed_unsync())
}

/// The backend's own fields, less what belonged to its body.
fn plain_fields(mut headers: HeaderMap) -> HeaderMap {
    headers::strip_hop_by_hop(&mut headers);
    headers.remove(header::CONTENT_LENGTH);
    headers.remove(header::TRAILER);
    headers
}

fn stream_fields(headers: HeaderMap, trailers: bool) -> HeaderMap {
    let mut headers = plain_fields(headers);
    // Proxies in front that buffer would undo what was gained.
    headers.entry("x-accel-buffering").or_insert(HeaderValue::from_static("no"));
    headers.entry(header::CACHE_CONTROL).or_insert(HeaderValue::from_static("no-cache"));
    if trailers {
        headers.insert(header::TRAILER, HeaderValue::from_static(TRAILERS));
    }
    headers
}
