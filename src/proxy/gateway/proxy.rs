//! One request from its head to the hand-over to the passthrough or the session runner.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use futures_util::FutureExt;
use http::header::CONNECTION;
use http::{HeaderMap, HeaderValue, Method, Request, Response, Version, request};
use http_body::Body as _;
use http_body_util::BodyExt;
use hyper::upgrade::OnUpgrade;
use tokio::sync::OwnedSemaphorePermit;
use tower::ServiceBuilder;
use tower_http::request_id::{MakeRequestId, PropagateRequestIdLayer, RequestId, SetRequestIdLayer};
use tracing::Instrument;

use super::facts;
use super::route::{self, Read};
use super::tenant::{self, Doubt};
use super::translate::{self, ClientApi};
use super::tunnel::Tunnels;
use crate::gateway::{Settings, Shared};
use crate::serving::exchange::{Client, Exchange, Joining, Serve, Slot};
use crate::serving::failure::{Failure, shielded};
use crate::serving::passthrough::{Passthrough, fail};
use foretell_config::process::Limits;
use foretell_config::process::Tenant;
use foretell_core::words::{Mode, PassthroughReason};
use foretell_drafts::joins::Terms;
use foretell_net::fleet::Replica;
use foretell_net::http::body::Body;
use foretell_net::http::body::full;
use foretell_net::http::gather::Stopped;
use foretell_net::http::headers;
use foretell_net::http::memory::{Level, Reservation};
use foretell_net::http::replay::Replay;
use foretell_net::http::request::RequestBody;
use foretell_net::http::service::{App, Peer};
use foretell_observe::Record;
use foretell_observe::metrics::Stage;
use foretell_policy::{self as policy, Admission, Admitted, Fact, Head, Outcome, Subjects, Wish};
use foretell_wire::openai::{self, Control, Route};
use foretell_wire::translation::Untranslated;

/// Maximum length of a client's `x-request-id` that is adopted, bytes.
const LONGEST_ID: usize = 128;

/// Memory for the buffers of a request whose body is passed through unread, bytes.
const UNREAD: u64 = 128 << 10;

/// Maximum bytes of a streamed body that are stored to resend it.
const REPLAYED: usize = 256 << 10;

/// Serves requests; one for all connections.
pub struct Proxy {
    shared: Shared,
    limits: Limits,
    client_control: bool,
    serving: Option<Arc<dyn Serve>>,
    tenants: Tenant,
    tunnels: Tunnels,
    ids: Ids,
}

/// Ids of requests that bring none; one count for all listeners.
#[derive(Clone)]
struct Ids(Arc<AtomicU64>);

impl Default for Ids {
    fn default() -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self(Arc::new(AtomicU64::new((now.as_micros() as u64) << 20)))
    }
}

impl MakeRequestId for Ids {
    fn make_request_id<B>(&mut self, _: &Request<B>) -> Option<RequestId> {
        let id = format!("ft-{:x}", self.0.fetch_add(1, Ordering::Relaxed));
        Some(RequestId::new(HeaderValue::try_from(id).ok()?))
    }
}

/// The request with one `x-request-id` of the client, or none if that is no text or too long.
fn with_usable_id(mut request: Request<RequestBody>) -> Request<RequestBody> {
    let usable = |id: &HeaderValue| (1..=LONGEST_ID).contains(&id.len()) && id.to_str().is_ok();
    if let Some(id) = request.headers_mut().remove(headers::REQUEST_ID).filter(usable) {
        request.headers_mut().insert(headers::REQUEST_ID, id);
    }
    request
}

/// A request that is being answered.
struct Inbound {
    parts: request::Parts,
    peer: Option<Peer>,
    record: Record,
}

/// The failure of a request whose tenant is doubtful.
fn tenant_failure(doubt: Doubt) -> Failure {
    match doubt {
        Doubt::Twice => Failure::TenantTwice,
        Doubt::NotUtf8 => Failure::TenantNotUtf8,
    }
}

/// The decision about a completion.
enum Received {
    Serve { eligible: Eligible, body: Bytes },
    Passthrough { why: policy::Passthrough, known: Known, body: Payload },
    Fail(Failure),
}

/// Facts about a request that is passed through.
#[derive(Default)]
struct Known {
    model: Option<String>,
    /// The replica that was picked for it.
    to: Option<Arc<Replica>>,
    /// `None` if its body was not read, or is no request.
    request: Option<Box<openai::Request>>,
}

/// A request that may be served by a session, with its replica and its session permit.
struct Eligible {
    request: Box<openai::Request>,
    to: Arc<Replica>,
    /// The stricter of the process's mode and the backend's.
    mode: Mode,
    permit: OwnedSemaphorePermit,
    /// Covers the parsed body and all memory of the session.
    memory: Reservation,
    /// Time at which the complete body had been received.
    received: Instant,
}

/// A body on its way to a backend.
enum Payload {
    /// It has been read.
    Buffered(Bytes),
    /// It is streamed.
    Stream(Body),
}

impl Payload {
    fn streamed(body: RequestBody) -> Self {
        if body.is_end_stream() {
            return Self::Buffered(Bytes::new());
        }
        Self::Stream(body.boxed_unsync())
    }
}

/// True unless the request is excluded from the corpus: by any value of `x-foretell-corpus` but
/// `on`.
fn may_use_corpus(headers: &HeaderMap) -> bool {
    let is_on = |value: &HeaderValue| value.as_bytes().trim_ascii().eq_ignore_ascii_case(b"on");
    headers.get_all(headers::CORPUS).iter().all(is_on)
}

/// Reason for which a request is passed through, if that is decided.
fn passthrough(ended: Option<Outcome>) -> Option<policy::Passthrough> {
    match ended? {
        Outcome::Passthrough(passthrough) => Some(passthrough),
        // The passthrough finds no replica, and answers with that error.
        Outcome::Nobody => Some(PassthroughReason::NoVerifyMethod.into()),
        Outcome::Serve(_) | Outcome::Undecided(..) => None,
    }
}

impl Proxy {
    pub fn new(
        settings: &Settings,
        serving: Option<Arc<dyn Serve>>,
        shared: Shared,
        tunnels: Tunnels,
    ) -> Self {
        Self {
            shared,
            limits: settings.limits,
            client_control: settings.client_control,
            serving,
            tenants: settings.tenant.clone(),
            tunnels,
            ids: Ids::default(),
        }
    }

    /// The clients' service. A request's id is sent to the backend, and back to the client; an
    /// answer with an id of the backend passes unchanged. A panic fails one request.
    pub fn layered(self: Arc<Self>) -> impl App {
        ServiceBuilder::new()
            .map_request(with_usable_id)
            .layer(SetRequestIdLayer::new(headers::REQUEST_ID, self.ids.clone()))
            .layer(PropagateRequestIdLayer::new(headers::REQUEST_ID))
            .map_future(shielded)
            .service_fn(move |request| Arc::clone(&self).answer(request).map(Ok))
    }

    async fn answer(self: Arc<Self>, request: Request<RequestBody>) -> Response<Body> {
        let Shared { fleet, memory, .. } = &self.shared;
        let Some(api) = translate::api_of(&request).filter(|api| fleet.translates(*api)) else {
            return self.begin(request).await;
        };
        let backend = |body: &[u8]| translate::backend_of(fleet, api, body);
        let (request, back) =
            translate::translate_request(request, api, backend, self.limits.speculate_body, memory).await;
        let response = self.begin(request).await;
        translate::translate_answer(response, back, memory).await
    }

    async fn begin(&self, request: Request<RequestBody>) -> Response<Body> {
        let (mut parts, body) = request.into_parts();
        let id = parts.headers.get(headers::REQUEST_ID).and_then(|id| id.to_str().ok()).unwrap_or_default();
        let mut record = Record::begin(&self.shared.observer, id.to_owned(), &parts.headers);
        if let Some(ClientApi(api)) = parts.extensions.remove() {
            record.translates(api);
        }
        if let Some(trace) = &record.so_far().trace {
            trace.inject(None, &mut parts.headers);
        }
        let span = record.span().clone();
        self.answer_recorded(Request::from_parts(parts, body), record).instrument(span).await
    }

    async fn answer_recorded(&self, request: Request<RequestBody>, record: Record) -> Response<Body> {
        let (mut parts, body) = request.into_parts();
        let peer = parts.extensions.remove::<Peer>();
        let is_http1 = parts.version <= Version::HTTP_11;
        let mut inbound = Inbound { parts, peer, record };
        let untranslated = inbound.parts.extensions.remove::<Untranslated>();
        if let Some(refused @ Untranslated::Refused { .. }) = untranslated {
            return fail(inbound.record, &Failure::Untranslated(refused));
        }
        let address = inbound.peer.map(|peer| peer.address.ip());
        if let Some(doubt) = tenant::doubt(&self.tenants, address, &inbound.parts.headers) {
            return fail(inbound.record, &tenant_failure(doubt));
        }
        let mut response = match route::candidate(&inbound.parts.method, &inbound.parts.uri) {
            Some(route) => self.completion(inbound, body, route).await,
            None => self.other(inbound, body, untranslated).await,
        };
        if is_http1 && self.shared.life.is_draining() && !response.headers().contains_key(CONNECTION) {
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }

    /// Passes through a request that is no completion, perhaps for the reason that it is not
    /// translated.
    async fn other(
        &self,
        mut inbound: Inbound,
        body: RequestBody,
        untranslated: Option<Untranslated>,
    ) -> Response<Body> {
        if inbound.parts.method == Method::CONNECT {
            return fail(inbound.record, &Failure::Connect);
        }
        let api = route::passthrough_api(&inbound.parts.method, &inbound.parts.uri);
        match (api, untranslated) {
            (Some(api), Some(Untranslated::Passed { reason, parameter })) => {
                inbound.record.passthrough(api, reason, Some(parameter));
            }
            (Some(api), _) => inbound.record.set_api(api),
            (None, _) => {}
        }
        let mut model = None;
        // With several backends the model selects one; it is also recorded for requests for text.
        let decides = self.shared.fleet.needs_model() && inbound.parts.method == Method::POST;
        let recorded = api.is_some() && facts::laxest(&self.shared.fleet, &self.shared.modes) != Mode::Off;
        let body = if decides || recorded {
            let selects = decides && headers::is_json(&inbound.parts.headers);
            match route::read(body, self.readable(&inbound.parts.headers, selects), &self.shared.memory).await
            {
                Read::Broken(error) => return fail(inbound.record, &Failure::of_body(&*error)),
                Read::Unread(_, Stopped::Memory) if decides => return fail(inbound.record, &Failure::Memory),
                Read::Unread(body, _) => Payload::Stream(body),
                Read::Complete(bytes) => {
                    model = route::model_of(&bytes);
                    Payload::Buffered(bytes)
                }
            }
        } else {
            Payload::streamed(body)
        };
        let Some(replica) = self.shared.fleet.pick(model.as_deref()) else {
            return fail(inbound.record, &Failure::NoBackend);
        };
        if let Some(model) = model {
            inbound.record.model(model);
        }
        self.join_plain(&mut inbound, &replica, PassthroughReason::Route);
        self.passthrough(inbound, body, replica).await
    }

    async fn passthrough(
        &self,
        mut inbound: Inbound,
        body: Payload,
        replica: Arc<Replica>,
    ) -> Response<Body> {
        let twice = route::is_repeatable(&inbound.parts.method, &inbound.parts.uri);
        let buffers = if matches!(body, Payload::Stream(_)) { UNREAD } else { 0 };
        inbound.record.reserve(self.shared.memory.take(buffers));
        let Inbound { mut parts, peer, record } = inbound;
        let (fleet, limit) = (Arc::clone(&self.shared.fleet), self.limits.passthrough_body);
        let (body, repeatable) = match body {
            Payload::Buffered(bytes) => (full(bytes.clone()), twice.then(|| Replay::of(bytes))),
            Payload::Stream(body) => self.repeatable(body, twice),
        };
        let passthrough = Passthrough { replica, fleet, limit, repeatable };
        let host = parts.uri.host().map(ToOwned::to_owned);
        let offered = headers::for_backend(&mut parts.headers, parts.version, host.as_deref(), peer);
        let client = offered.and_then(|_| parts.extensions.remove::<OnUpgrade>());
        match client {
            None => passthrough.answer(record, parts, body).await,
            Some(client) => Box::pin(self.tunnels.switch(passthrough, record, (parts, body), client)).await,
        }
    }

    /// A streamed body, and the means to resend it.
    fn repeatable(&self, body: Body, twice: bool) -> (Body, Option<Replay>) {
        if !twice {
            return (body, None);
        }
        Replay::passing(body, REPLAYED, &self.shared.memory)
    }

    /// Serves a completion by a session, or passes it through with a reason.
    async fn completion(&self, mut inbound: Inbound, body: RequestBody, route: Route) -> Response<Body> {
        if self.shared.memory.level() == Level::Exhausted {
            inbound.record.passthrough(route, PassthroughReason::Memory, None);
            return fail(inbound.record, &Failure::Memory);
        }
        let wish = self.wish(&inbound.parts);
        let peer = inbound.peer.map(|peer| peer.address.ip());
        let tenant = tenant::of(&self.tenants, peer, &inbound.parts.headers);
        inbound.record.passthrough(route, PassthroughReason::Fault, None);
        let headers = &inbound.parts.headers;
        let api = inbound.record.api(route);
        let mut head = facts::of_head((route, api, headers), tenant.as_deref(), wish, &self.shared);
        head.speculates_anywhere &= self.serving.is_some();
        let (why, known, body) = match self.admit(head, body).await {
            Received::Serve { mut eligible, body } => {
                // Of a chat's events only the prompt's tokens are read by a translation.
                eligible.request.reads_reasoning_usage = !inbound.record.is_translation();
                let trailers = headers::takes_trailers(&inbound.parts.headers);
                let may_use_corpus = may_use_corpus(&inbound.parts.headers);
                self.join(&mut inbound, &eligible.request, &eligible.to, tenant.as_deref(), wish);
                let (control, mode) = (wish.control(), eligible.mode);
                let client = Client { api, control, mode, tenant, trailers, may_use_corpus };
                return Box::pin(self.hand_over(inbound, eligible, body, client)).await;
            }
            Received::Fail(failure) => {
                let reason = match failure {
                    Failure::Memory => PassthroughReason::Memory,
                    Failure::BodyBroken | Failure::BodySilent(_) | Failure::BodyTooLarge { .. } => {
                        PassthroughReason::Body
                    }
                    _ => PassthroughReason::Fault,
                };
                inbound.record.passthrough(route, reason, None);
                return fail(inbound.record, &failure);
            }
            Received::Passthrough { why, known, body } => (why, known, body),
        };
        inbound.record.passthrough(route, why.reason, why.parameter);
        let Known { model, to, request } = known;
        let Some(replica) = to.or_else(|| self.shared.fleet.pick(model.as_deref())) else {
            return fail(inbound.record, &Failure::NoBackend);
        };
        if let Some(model) = model {
            inbound.record.model(model);
        }
        match request {
            Some(request) => self.join(&mut inbound, &request, &replica, tenant.as_deref(), wish),
            None => self.join_plain(&mut inbound, &replica, why.reason),
        }
        self.passthrough(inbound, body, replica).await
    }

    /// Takes the steps of an [`Admission`]: those of the head, and those of the body once it is
    /// read.
    async fn admit(&self, head: Head<'_>, body: RequestBody) -> Received {
        let (route, headers) = (head.route, head.headers);
        let mut admission = Admission::begin(head);
        let early = passthrough(admission.ended());
        let fleet = &self.shared.fleet;
        if let (Some(why), false) = (&early, fleet.needs_model()) {
            let (why, body) = (why.clone(), Payload::streamed(body));
            return Received::Passthrough { why, known: Known::default(), body };
        }
        let readable = self.readable(headers, fleet.needs_model());
        let bytes = match route::read(body, readable, &self.shared.memory).await {
            Read::Broken(error) => return Received::Fail(Failure::of_body(&*error)),
            // The model, which decides the backend, is in the part that was not read.
            Read::Unread(_, Stopped::Memory) if fleet.needs_model() => {
                return Received::Fail(Failure::Memory);
            }
            Read::Unread(body, stopped) => {
                let why = match stopped {
                    Stopped::Limit => {
                        admission.locate(Fact::Known(policy::Body::TooLarge), Fact::Known(None));
                        passthrough(admission.ended()).unwrap_or(PassthroughReason::Body.into())
                    }
                    Stopped::Memory => early.unwrap_or(PassthroughReason::Memory.into()),
                };
                return Received::Passthrough { why, known: Known::default(), body: Payload::Stream(body) };
            }
            Read::Complete(bytes) => bytes,
        };
        if let Some(limit) = self.limits.passthrough_body.filter(|limit| bytes.len() as u64 > *limit) {
            return Received::Fail(Failure::BodyTooLarge { limit });
        }
        let (why, known) = match early {
            Some(why) => (why, Known::default()),
            None if bytes.len() > self.limits.speculate_body => {
                admission.locate(Fact::Known(policy::Body::TooLarge), Fact::Known(None));
                (passthrough(admission.ended()).unwrap_or(PassthroughReason::Body.into()), Known::default())
            }
            None => match self.judged(admission, route, &bytes) {
                Ok(eligible) => return Received::Serve { eligible, body: bytes },
                Err(passthrough) => passthrough,
            },
        };
        let named = known.request.as_ref().map(|request| request.model.clone());
        let model = named.filter(|model| !model.is_empty()).or_else(|| route::model_of(&bytes));
        let known = Known { model, ..known };
        Received::Passthrough { why, known, body: Payload::Buffered(bytes) }
    }

    /// Bytes of a body that are read before it is passed on. Where the model `selects` the backend,
    /// that is the complete body: clients write the model behind the messages.
    fn readable(&self, headers: &HeaderMap, selects: bool) -> usize {
        if !selects || headers::is_encoded(headers) {
            return self.limits.speculate_body;
        }
        let limit = self
            .limits
            .passthrough_body
            .map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX));
        limit.max(self.limits.speculate_body)
    }

    /// Judges the body, and takes a session permit if a session may serve it. The replica that was
    /// picked for it also serves it if it is passed through.
    fn judged(
        &self,
        admission: Admission<'_>,
        route: Route,
        body: &Bytes,
    ) -> Result<Eligible, (policy::Passthrough, Known)> {
        let Some(memory) = self.shared.memory.try_take(openai::parsed_bytes(body) as u64) else {
            return Err((PassthroughReason::Memory.into(), Known::default()));
        };
        let begun = Instant::now();
        let understood = openai::understand(route, body);
        self.shared.observer.metrics().overhead(Stage::Parse, begun.elapsed());
        let judged = policy::Body::from(&understood);
        let to = match judged {
            policy::Body::Eligible(request) => self.shared.fleet.pick(Some(&request.model)),
            policy::Body::Refused { .. } | policy::Body::TooLarge => None,
        };
        let reserved = self.reserved(admission, judged, to.as_deref());
        match (reserved, understood.map(|(request, _)| Box::new(request)), to) {
            (Ok((mode, permit)), Some(request), Some(to)) => {
                Ok(Eligible { request, to, mode, permit, memory, received: begun })
            }
            (ended, request, to) => {
                let why = passthrough(ended.err().flatten()).unwrap_or(PassthroughReason::Fault.into());
                Err((why, Known { model: None, to, request }))
            }
        }
    }

    /// Takes the steps of a body that was judged and of the replica that was picked for it, and a
    /// session permit if nothing else rules out a session.
    fn reserved<'a>(
        &self,
        mut admission: Admission<'a>,
        body: policy::Body<'a>,
        to: Option<&'a Replica>,
    ) -> Result<(Mode, OwnedSemaphorePermit), Option<Outcome>> {
        let backend = to.map(|replica| facts::backend(replica, &self.shared));
        admission.locate(Fact::Known(body), Fact::Known(backend));
        if !admission.is_open() {
            return Err(admission.ended());
        }
        let permit = Arc::clone(&self.shared.sessions).try_acquire_owned().ok();
        admission.session(Fact::Known(permit.is_some()));
        match (admission.mode(), permit) {
            (Some(mode), Some(permit)) => Ok((mode, permit)),
            _ => Err(admission.ended()),
        }
    }

    async fn hand_over(
        &self,
        inbound: Inbound,
        eligible: Eligible,
        body: Bytes,
        client: Client,
    ) -> Response<Body> {
        let Eligible { request, to: replica, mode: _, permit, memory, received } = eligible;
        let Inbound { parts: mut head, peer, mut record } = inbound;
        let Some(serving) = &self.serving else { return fail(record, &Failure::Internal) };
        let host = head.uri.host().map(ToOwned::to_owned);
        let sent = head.headers.clone();
        headers::for_backend(&mut head.headers, head.version, host.as_deref(), peer);
        head.headers.remove(CONNECTION);
        head.headers.remove(http::header::UPGRADE);
        record.model(request.model.clone());
        record.request_read(received);
        record.reserve(memory);
        let slot = Slot::new(record, permit);
        let answer = serving.serve(Exchange {
            head,
            sent,
            body,
            request,
            replica,
            shared: self.shared.clone(),
            client,
            slot,
        });
        answer.await
    }

    /// Ties a request to the rows of its engine, if that may ask for drafts.
    fn join(
        &self,
        inbound: &mut Inbound,
        request: &openai::Request,
        replica: &Arc<Replica>,
        tenant: Option<&str>,
        wish: Wish,
    ) {
        let (joins, headers) = (&self.shared.joins, &inbound.parts.headers);
        let id = headers.get(headers::REQUEST_ID).and_then(|id| id.to_str().ok());
        let (true, Some(serving), Some(id)) = (joins.are_expected(), &self.serving, id) else { return };
        // A header that cannot be read counts as `off`, as everywhere.
        let control = if wish == Wish::Unreadable { Some(Control::Off) } else { wish.control() };
        let admitted = Admitted {
            head: Subjects { api: inbound.record.api(request.route), headers, tenant },
            request,
            control,
            backend: replica.backend(),
            mode: self.shared.modes.of(replica.backend()),
        };
        let joining = Joining { admitted, replica, may_use_corpus: may_use_corpus(headers) };
        let (terms, policy) = serving.terms(&joining);
        let plain = terms.plain;
        inbound.record.joins(joins.register(id, terms));
        if joins.is_injected(replica.label()) {
            inbound.record.decided_by(policy);
            inbound.record.injected(plain);
        }
    }

    /// Ties a request that has no policy to the rows of its engine, which get no drafts.
    fn join_plain(&self, inbound: &mut Inbound, replica: &Replica, why: PassthroughReason) {
        let joins = &self.shared.joins;
        if joins.are_expected() {
            let terms = Terms::plain(replica.label(), why);
            inbound.record.joins(joins.register(&inbound.record.so_far().id, terms));
        }
    }

    /// The client's `x-foretell`, if the operator allows it.
    fn wish(&self, parts: &request::Parts) -> Wish {
        if !self.client_control {
            return Wish::read(std::iter::empty());
        }
        Wish::read(parts.headers.get_all(headers::CONTROL))
    }
}
