//! One request from its head to the hand-over: to the relay or to the driver.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use futures_util::FutureExt;
use http::header::CONNECTION;
use http::{HeaderMap, HeaderValue, Method, Request, Response, Version, request};
use http_body::Body as _;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tracing::Instrument;

use super::relay::{Relay, fail};
use super::route::{self, Read};
use super::tunnel::Tunnels;
use crate::dialect;
use crate::drive::exchange::{Client, Declined, Drive, Exchange, Slot, Unsent, fit};
use crate::drive::failure::Failure;
use crate::fleet::Replica;
use crate::gateway::{Brains, Limits, Settings, Shared};
use crate::http::body::Body;
use crate::http::body::full;
use crate::http::headers;
use crate::http::listen::Peer;
use crate::observe::Record;
use crate::observe::metrics::Stage;
use crate::openai::{self, Control, Judgement, Route};
use crate::words::BypassReason;
use crate::words::Mode;

/// Longest `x-request-id` of a client that is taken over, bytes.
const LONGEST_ID: usize = 128;

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
    record: Record,
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
}

/// A body on its way to a backend.
enum Payload {
    /// It has been read.
    Whole(Bytes),
    /// It passes as it comes.
    Stream(Body),
}

impl Payload {
    fn streamed(body: Incoming) -> Self {
        if body.is_end_stream() {
            return Self::Whole(Bytes::new());
        }
        Self::Stream(body.map_err(Into::into).boxed_unsync())
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

    /// Answers one request. Its id goes with it to the backend, and back to the client; an answer with an id of the
    /// backend's own keeps that.
    pub(crate) async fn answer(self: Arc<Self>, request: Request<Incoming>) -> Response<Body> {
        let (mut parts, body) = request.into_parts();
        let (id, field) = self.id(&parts.headers);
        parts.headers.insert(headers::REQUEST_ID, field.clone());
        let record = Record::begin(&self.shared.observer, id);
        let span = record.span().clone();
        let mut response =
            self.answer_recorded(Request::from_parts(parts, body), record).instrument(span).await;
        response.headers_mut().entry(headers::REQUEST_ID).or_insert(field);
        response
    }

    async fn answer_recorded(&self, request: Request<Incoming>, record: Record) -> Response<Body> {
        let (mut parts, body) = request.into_parts();
        let peer = parts.extensions.remove::<Peer>();
        let keeps_alive = parts.version <= Version::HTTP_11;
        let inbound = Inbound { parts, peer, record };
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
    async fn other(&self, mut inbound: Inbound, body: Incoming) -> Response<Body> {
        if inbound.parts.method == Method::CONNECT {
            return fail(inbound.record, &Failure::Connect);
        }
        let mut model = None;
        // Only where several backends answer is it worth looking for the model.
        let body = if self.shared.fleet.needs_model() && inbound.parts.method == Method::POST {
            match route::read(body, self.limits.speculate_body).await {
                Read::Broken => return fail(inbound.record, &Failure::BodyBroken),
                Read::Replay(replay) => Payload::Stream(replay.into_body()),
                Read::Whole(bytes) => {
                    model = route::model_of(&bytes);
                    Payload::Whole(bytes)
                }
            }
        } else {
            Payload::streamed(body)
        };
        let Some(backend) = self.shared.fleet.pick(model.as_deref()) else {
            return fail(inbound.record, &Failure::NoBackend);
        };
        if let Some(model) = model {
            inbound.record.model(model);
        }
        self.relay(inbound, body, backend).await
    }

    async fn relay(&self, inbound: Inbound, body: Payload, backend: Arc<Replica>) -> Response<Body> {
        let twice = route::is_repeatable(&inbound.parts.method, &inbound.parts.uri);
        let (body, repeatable) = match body {
            Payload::Whole(bytes) => (full(bytes.clone()), Some(bytes).filter(|_| twice)),
            Payload::Stream(body) => (body, None),
        };
        let fleet = Arc::clone(&self.shared.fleet);
        let Inbound { parts, peer, record } = inbound;
        let relay = Relay { record, backend, fleet, limit: self.limits.relay_body, repeatable };
        relay.send(parts, body, peer, &self.tunnels).await
    }

    /// Relays a completion with a prediction.
    async fn predict(
        &self,
        inbound: Inbound,
        model: String,
        altered: Bytes,
        own: Bytes,
        to: Option<Arc<Replica>>,
    ) -> Response<Body> {
        let Inbound { parts, peer, mut record } = inbound;
        let Some(backend) = to.or_else(|| self.shared.fleet.pick(Some(&model))) else {
            return fail(record, &Failure::NoBackend);
        };
        record.model(model.clone());
        let (fleet, limit) = (Arc::clone(&self.shared.fleet), self.limits.relay_body);
        let relay = Relay { record, backend, fleet, limit, repeatable: None };
        relay.send_predicted(parts, altered, own, &model, peer).await
    }

    /// A completion: drive it, or relay it with a reason.
    async fn completion(&self, mut inbound: Inbound, body: Incoming, route: Route) -> Response<Body> {
        let control = self.control(&inbound.parts);
        inbound.record.bypassed(route, BypassReason::Fault, None);
        let (why, model, to, body) = match self.decide(&inbound.parts, body, route, control.clone()).await {
            Verdict::Drive { eligible, body } => {
                return self.hand_over(inbound, eligible, body, control.ok().flatten()).await;
            }
            Verdict::Fail(failure) => return fail(inbound.record, &failure),
            Verdict::Predict { why, model, altered, own, to } => {
                inbound.record.bypassed(route, why.reason, None);
                return self.predict(inbound, model, altered, own, to).await;
            }
            Verdict::Relay { why, model, to, body } => (why, model, to, body),
        };
        inbound.record.bypassed(route, why.reason, why.parameter);
        let Some(backend) = to.or_else(|| self.shared.fleet.pick(model.as_deref())) else {
            return fail(inbound.record, &Failure::NoBackend);
        };
        if let Some(model) = model {
            inbound.record.model(model);
        }
        let body = match body {
            Payload::Whole(bytes) => Payload::Whole(fit(&backend, &mut inbound.parts, bytes)),
            unread @ Payload::Stream(_) => unread,
        };
        self.relay(inbound, body, backend).await
    }

    async fn decide(
        &self,
        parts: &request::Parts,
        body: Incoming,
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
        let bytes = match route::read(body, self.limits.speculate_body).await {
            Read::Broken => return Verdict::Fail(Failure::BodyBroken),
            Read::Replay(replay) => {
                let why = early.unwrap_or(BypassReason::Body.into());
                let body = Payload::Stream(replay.into_body());
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
            let predicted = dialect::openai::predicted(&request, body).map(Bytes::from);
            return Err((Why { reason, parameter: None, predicted }, Some(backend)));
        }
        if !backend.speculates() {
            return Err((BypassReason::NoPlan.into(), Some(backend)));
        }
        match Arc::clone(&self.sessions).try_acquire_owned() {
            Ok(permit) => Ok(Eligible { request, to: backend, permit }),
            Err(_) => Err((BypassReason::Sessions.into(), Some(backend))),
        }
    }

    async fn hand_over(
        &self,
        inbound: Inbound,
        eligible: Eligible,
        body: Bytes,
        control: Option<Control>,
    ) -> Response<Body> {
        let Eligible { request, to: replica, permit } = eligible;
        let Inbound { parts: mut head, peer, mut record } = inbound;
        let Some(drive) = &self.drive else { return fail(record, &Failure::Internal) };
        let client = Client { control, trailers: headers::takes_trailers(&head.headers) };
        let host = head.uri.host().map(ToOwned::to_owned);
        headers::for_backend(&mut head.headers, head.version, host.as_deref(), peer);
        head.headers.remove(CONNECTION);
        head.headers.remove(http::header::UPGRADE);
        record.model(request.model.clone());
        let slot = Slot::new(record, permit);
        let answer =
            drive.drive(Exchange { head, body, request, replica, shared: self.shared.clone(), client, slot });
        // A broken driver may cost this answer, never the client's connection.
        match AssertUnwindSafe(answer).catch_unwind().await {
            Ok(Ok(response)) => response,
            Ok(Err(declined)) => self.relay_declined(*declined).await,
            Err(_) => {
                tracing::error!("the driver of a session panicked");
                Failure::Internal.response()
            }
        }
    }

    /// Relays what the driver gives back.
    async fn relay_declined(&self, declined: Declined) -> Response<Body> {
        let Declined { unsent, slot, reason } = declined;
        let Unsent { mut head, body, replica: backend } = unsent;
        let mut record = slot.into_record();
        record.declined(reason);
        let body = fit(&backend, &mut head, body);
        let repeatable = Some(body.clone());
        let fleet = Arc::clone(&self.shared.fleet);
        let relay = Relay { record, backend, fleet, limit: None, repeatable };
        relay.send_prepared(head, full(body)).await
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
    fn id(&self, headers: &HeaderMap) -> (String, HeaderValue) {
        let given = headers.get(headers::REQUEST_ID).filter(|id| (1..=LONGEST_ID).contains(&id.len()));
        if let Some((field, id)) = given.and_then(|field| Some((field, field.to_str().ok()?))) {
            return (id.to_owned(), field.clone());
        }
        let id = format!("ft-{:x}", self.ids.fetch_add(1, Ordering::Relaxed));
        // Only letters, digits and a dash.
        let field = HeaderValue::try_from(&id).unwrap_or(HeaderValue::from_static("ft"));
        (id, field)
    }
}
