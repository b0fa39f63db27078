//! One request from its head to the hand-over: to the relay or to the driver.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use futures_util::FutureExt;
use http::header::CONNECTION;
use http::{HeaderValue, Method, Request, Response, Version, request};
use http_body::Body as _;
use http_body_util::BodyExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::handover::{Drive, Exchange, Slot};
use super::relay::{self, Record, Relay};
use super::route::{self, Read};
use super::tunnel::Tunnels;
use crate::dialect;
use crate::drive::failure::Failure;
use crate::fleet::Replica;
use crate::gateway::{Brains, Limits, Settings, Shared};
use crate::http::body::Body;
use crate::http::body::full;
use crate::http::gather::Stopped;
use crate::http::headers;
use crate::http::listen::Peer;
use crate::http::memory::{Level, Reservation};
use crate::http::request::RequestBody;
use crate::observe::metrics::Stage;
use crate::openai::{self, Control, Judgement, Route};
use crate::words::BypassReason;
use crate::words::Mode;

/// What the buffers of a request take whose body is relayed unread, bytes.
const UNREAD: u64 = 128 << 10;

/// What every request needs.
pub struct Proxy {
    shared: Shared,
    limits: Limits,
    client_control: bool,
    drive: Option<Arc<dyn Drive>>,
    sessions: Arc<Semaphore>,
    tunnels: Tunnels,
    ids: AtomicU64,
}

/// A request under way.
struct Inbound {
    parts: request::Parts,
    peer: Option<Peer>,
    started: Instant,
}

/// What is left to do with a completion whose body has been read, or not.
enum Verdict {
    Drive {
        eligible: Eligible,
        body: Bytes,
    },
    Relay {
        why: Why,
        model: Option<String>,
        to: Option<Arc<Replica>>,
        body: Payload,
    },
    /// With a prediction; the client's own body is for a service that takes none.
    Predict {
        why: Why,
        model: String,
        altered: Bytes,
        own: Bytes,
        to: Option<Arc<Replica>>,
    },
    Fail(Failure),
}

/// A request that may be driven, with its replica and its place among the sessions.
struct Eligible {
    request: Box<openai::Request>,
    to: Arc<Replica>,
    permit: OwnedSemaphorePermit,
    /// For the body as it was understood, and for all that the session will hold.
    memory: Reservation,
}

/// A body on its way to a backend.
enum Payload {
    /// It has been read.
    Whole(Bytes),
    /// It passes as it comes.
    Stream(Body),
}

impl Payload {
    fn streamed(body: RequestBody) -> Self {
        if body.is_end_stream() {
            return Self::Whole(Bytes::new());
        }
        Self::Stream(body.boxed_unsync())
    }
}

/// Why a completion is relayed.
#[derive(Clone)]
struct Why {
    reason: BypassReason,
    parameter: Option<String>,
    /// The body to send in place of the client's: the same with a prediction.
    predicted: Option<Bytes>,
}

impl From<BypassReason> for Why {
    fn from(reason: BypassReason) -> Self {
        Self { reason, parameter: None, predicted: None }
    }
}

impl Proxy {
    pub(crate) fn new(settings: &Settings, brains: &Brains, shared: Shared, tunnels: Tunnels) -> Self {
        let epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            shared,
            limits: settings.limits,
            client_control: settings.client_control,
            drive: brains.drive.clone(),
            sessions: Arc::new(Semaphore::new(settings.limits.sessions.min(Semaphore::MAX_PERMITS))),
            tunnels,
            ids: AtomicU64::new((epoch.as_micros() as u64) << 20),
        }
    }

    /// Answers one request.
    pub(crate) async fn answer(self: Arc<Self>, request: Request<RequestBody>) -> Response<Body> {
        let started = Instant::now();
        let (mut parts, body) = request.into_parts();
        let peer = parts.extensions.remove::<Peer>();
        let keeps_alive = parts.version <= Version::HTTP_11;
        let inbound = Inbound { parts, peer, started };
        let mut response = match route::candidate(&inbound.parts.method, &inbound.parts.uri) {
            Some(route) => self.completion(inbound, body, route).await,
            None => self.other(inbound, body).await,
        };
        if keeps_alive && self.shared.life.is_draining() && !response.headers().contains_key(CONNECTION) {
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }

    /// Whatever is no completion.
    async fn other(&self, inbound: Inbound, body: RequestBody) -> Response<Body> {
        let mut record = Record::new(Arc::clone(&self.shared.observer), inbound.started);
        if inbound.parts.method == Method::CONNECT {
            return record.fail(&Failure::Connect);
        }
        let mut model = None;
        // Only where several backends answer is it worth looking for the model.
        let body = if self.shared.fleet.needs_model() && inbound.parts.method == Method::POST {
            match route::read(body, self.limits.speculate_body, &self.shared.memory).await {
                Read::Broken(error) => return record.fail(&Failure::of_body(&*error)),
                Read::Unread(_, Stopped::Memory) => return record.fail(&Failure::Memory),
                Read::Unread(body, Stopped::Limit) => Payload::Stream(body),
                Read::Whole(bytes) => {
                    model = route::model_of(&bytes);
                    Payload::Whole(bytes)
                }
            }
        } else {
            Payload::streamed(body)
        };
        let Some(backend) = self.shared.fleet.pick(model.as_deref()) else {
            return record.fail(&Failure::NoBackend);
        };
        if let Some(model) = model {
            record.model(model);
        }
        self.relay(inbound, body, record, backend).await
    }

    async fn relay(
        &self,
        inbound: Inbound,
        body: Payload,
        mut record: Record,
        backend: Arc<Replica>,
    ) -> Response<Body> {
        let twice = route::is_repeatable(&inbound.parts.method, &inbound.parts.uri);
        let (body, repeatable) = match body {
            Payload::Whole(bytes) => (full(bytes.clone()), Some(bytes).filter(|_| twice)),
            Payload::Stream(body) => {
                record.keep(self.shared.memory.take(UNREAD));
                (body, None)
            }
        };
        let fleet = Arc::clone(&self.shared.fleet);
        let relay = Relay { record, backend, fleet, limit: self.limits.relay_body, repeatable };
        relay.send(inbound.parts, body, inbound.peer, &self.tunnels).await
    }

    /// Relays a completion with a prediction.
    async fn predict(
        &self,
        inbound: Inbound,
        mut record: Record,
        model: String,
        altered: Bytes,
        own: Bytes,
        to: Option<Arc<Replica>>,
    ) -> Response<Body> {
        let Some(backend) = to.or_else(|| self.shared.fleet.pick(Some(&model))) else {
            return record.fail(&Failure::NoBackend);
        };
        record.model(model.clone());
        let (fleet, limit) = (Arc::clone(&self.shared.fleet), self.limits.relay_body);
        let relay = Relay { record, backend, fleet, limit, repeatable: None };
        relay.send_predicted(inbound.parts, altered, own, &model, inbound.peer).await
    }

    /// A completion: drive it, or relay it with a reason.
    async fn completion(&self, mut inbound: Inbound, body: RequestBody, route: Route) -> Response<Body> {
        let control = self.control(&inbound.parts);
        let id = self.id(&inbound.parts);
        let mut record = Record::new(Arc::clone(&self.shared.observer), inbound.started);
        if self.shared.memory.level() == Level::Exhausted {
            record.completion(route, id, BypassReason::Memory, None);
            return record.fail(&Failure::Memory);
        }
        record.completion(route, id.clone(), BypassReason::Fault, None);
        let (why, model, to, body) = match self.decide(&inbound.parts, body, route, control.clone()).await {
            Verdict::Drive { eligible, body } => {
                return self.hand_over(inbound, eligible, body, control.ok().flatten(), id, record).await;
            }
            Verdict::Fail(failure) => {
                if matches!(failure, Failure::Memory) {
                    record.completion(route, id, BypassReason::Memory, None);
                }
                return record.fail(&failure);
            }
            Verdict::Predict { why, model, altered, own, to } => {
                record.completion(route, id, why.reason, None);
                return self.predict(inbound, record, model, altered, own, to).await;
            }
            Verdict::Relay { why, model, to, body } => (why, model, to, body),
        };
        record.completion(route, id, why.reason, why.parameter);
        let Some(backend) = to.or_else(|| self.shared.fleet.pick(model.as_deref())) else {
            return record.fail(&Failure::NoBackend);
        };
        if let Some(model) = model {
            record.model(model);
        }
        let memory = &self.shared.memory;
        let body = match body {
            Payload::Whole(bytes) => Payload::Whole(relay::fit(&backend, &mut inbound.parts, bytes, memory)),
            unread @ Payload::Stream(_) => unread,
        };
        self.relay(inbound, body, record, backend).await
    }

    async fn decide(
        &self,
        parts: &request::Parts,
        body: RequestBody,
        route: Route,
        control: Result<Option<Control>, Why>,
    ) -> Verdict {
        let rides = control.as_ref().ok().map(|control| *control == Some(Control::Ride));
        let early = self.early(parts, control);
        let fleet = &self.shared.fleet;
        if let (Some(why), false) = (&early, fleet.needs_model() || fleet.refuses_prediction()) {
            let (why, body) = (why.clone(), Payload::streamed(body));
            return Verdict::Relay { why, model: None, to: None, body };
        }
        let bytes = match route::read(body, self.limits.speculate_body, &self.shared.memory).await {
            Read::Broken(error) => return Verdict::Fail(Failure::of_body(&*error)),
            // Whom it is for stands in what was not read.
            Read::Unread(_, Stopped::Memory) if fleet.needs_model() => return Verdict::Fail(Failure::Memory),
            Read::Unread(body, stopped) => {
                let unread = match stopped {
                    Stopped::Limit => BypassReason::Body,
                    Stopped::Memory => BypassReason::Memory,
                };
                let (why, body) = (early.unwrap_or(unread.into()), Payload::Stream(body));
                return Verdict::Relay { why, model: None, to: None, body };
            }
            Read::Whole(bytes) => bytes,
        };
        let (why, to) = match early {
            Some(why) => (why, None),
            None => match self.judged(route, &bytes) {
                Ok(eligible) => return Verdict::Drive { eligible, body: bytes },
                Err((mut why, to)) => match (why.predicted.take(), route::model_of(&bytes)) {
                    (Some(altered), Some(model)) if rides == Some(false) => {
                        return Verdict::Predict { why, model, altered, own: bytes, to };
                    }
                    _ => (why, to),
                },
            },
        };
        let model = route::model_of(&bytes);
        Verdict::Relay { why, model, to, body: Payload::Whole(bytes) }
    }

    /// Reasons that need no look into the body.
    fn early(&self, parts: &request::Parts, control: Result<Option<Control>, Why>) -> Option<Why> {
        let fleet = &self.shared.fleet;
        match control {
            Err(why) => return Some(why),
            Ok(Some(Control::Off)) => return Some(BypassReason::Client.into()),
            Ok(_) => {}
        }
        if fleet.names().all(|name| self.shared.modes.of(name) == Mode::Off) {
            return Some(BypassReason::Off.into());
        }
        if self.drive.is_none() || !(fleet.speculates() || fleet.predicts()) {
            return Some(BypassReason::NoPlan.into());
        }
        route::is_encoded(&parts.headers).then(|| BypassReason::Encoded.into())
    }

    /// Judges the body, and takes a place among the sessions if it may be driven. A replica that was picked
    /// for it serves it also if it is relayed.
    fn judged(&self, route: Route, body: &Bytes) -> Result<Eligible, (Why, Option<Arc<Replica>>)> {
        let begun = Instant::now();
        let Some(memory) = self.shared.memory.try_take(openai::parsed_bytes(body) as u64) else {
            return Err((BypassReason::Memory.into(), None));
        };
        let judged = openai::judge(route, body);
        self.shared.observer.metrics().overhead(Stage::Parse, begun.elapsed());
        let request = match judged {
            Judgement::Eligible(request) => request,
            Judgement::Bypass { reason, parameter } => {
                return Err((Why { reason, parameter, predicted: None }, None));
            }
        };
        let Some(backend) = self.shared.fleet.pick(Some(&request.model)) else {
            return Err((BypassReason::NoPlan.into(), None));
        };
        if self.shared.modes.of(backend.name()) == Mode::Off {
            return Err((BypassReason::Off.into(), Some(backend)));
        }
        if self.shared.modes.of(backend.name()) == Mode::Auto && backend.predicts_for(&request.model) {
            let reason = if backend.is_billed() { BypassReason::Billed } else { BypassReason::NoPlan };
            let predicted = dialect::openai::predicted(&request, body);
            let predicted = predicted.map(|body| self.shared.memory.take(body.len() as u64).over(body));
            return Err((Why { reason, parameter: None, predicted }, Some(backend)));
        }
        if !backend.speculates() {
            return Err((BypassReason::NoPlan.into(), Some(backend)));
        }
        match Arc::clone(&self.sessions).try_acquire_owned() {
            Ok(permit) => Ok(Eligible { request, to: backend, permit, memory }),
            Err(_) => Err((BypassReason::Sessions.into(), Some(backend))),
        }
    }

    async fn hand_over(
        &self,
        inbound: Inbound,
        eligible: Eligible,
        body: Bytes,
        control: Option<Control>,
        id: String,
        record: Record,
    ) -> Response<Body> {
        let Eligible { request, to: backend, permit, memory } = eligible;
        let Some(drive) = &self.drive else { return record.fail(&Failure::Internal) };
        let mut parts = inbound.parts;
        let text_allowed = parts.headers.get(headers::TEXT).is_some_and(|value| value == "on");
        let wants_trailers = headers::takes_trailers(&parts.headers);
        let host = parts.uri.host().map(ToOwned::to_owned);
        headers::for_backend(&mut parts.headers, parts.version, host.as_deref(), inbound.peer);
        parts.headers.remove(CONNECTION);
        parts.headers.remove(http::header::UPGRADE);
        let held = record.hand_over();
        let answer = drive.drive(Exchange {
            parts,
            body,
            request,
            backend,
            fleet: Arc::clone(&self.shared.fleet),
            control,
            text_allowed,
            wants_trailers,
            peer: inbound.peer.map(|peer| peer.address.ip()),
            id,
            started: inbound.started,
            modes: Arc::clone(&self.shared.modes),
            life: Arc::clone(&self.shared.life),
            observer: Arc::clone(&self.shared.observer),
            memory: Arc::clone(&self.shared.memory),
            slot: Slot { _held: held, _permit: permit, memory },
        });
        // A broken driver may cost this answer, never the client's connection.
        AssertUnwindSafe(answer).catch_unwind().await.unwrap_or_else(|_| {
            tracing::error!("the driver of a session panicked");
            Failure::Internal.response()
        })
    }

    /// The client's wish. One that cannot be read is taken for the strictest.
    fn control(&self, parts: &request::Parts) -> Result<Option<Control>, Why> {
        let Some(value) = parts.headers.get(headers::CONTROL).filter(|_| self.client_control) else {
            return Ok(None);
        };
        let unreadable =
            || Why { parameter: Some(headers::CONTROL.to_string()), ..BypassReason::Client.into() };
        let wish = value.to_str().map_err(|_| unreadable())?;
        Control::parse(wish).map(Some).map_err(|_| unreadable())
    }

    /// The client's `x-request-id`, or one of our own.
    fn id(&self, parts: &request::Parts) -> String {
        let given = parts.headers.get("x-request-id").and_then(|id| id.to_str().ok());
        match given.filter(|id| (1..=128).contains(&id.len())) {
            Some(id) => id.to_owned(),
            None => format!("ft-{:x}", self.ids.fetch_add(1, Ordering::Relaxed)),
        }
    }
}
