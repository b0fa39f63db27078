//! One request from its head to the hand-over: to the relay or to the driver.

use std::net::IpAddr;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use futures_util::FutureExt;
use http::header::CONNECTION;
use http::{HeaderValue, Method, Request, Response, Version, request};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::errors::{Failure, full};
use super::handover::{Drive, Exchange, Slot};
use super::headers;
use super::listen::{Body, Peer};
use super::mode::Mode;
use super::relay::{Record, Relay};
use super::route::{self, Read};
use super::tunnel::Tunnels;
use super::{Brains, Limits, Settings, Shared};
use crate::dialect;
use crate::fleet::Backend;
use crate::observe::metrics::Stage;
use crate::openai::{self, BypassReason, Control, Judgement, Route};

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
    peer: Option<IpAddr>,
    started: Instant,
}

/// What is left to do with a completion whose body has been read, or not.
enum Verdict {
    Drive {
        request: Box<openai::Request>,
        body: Bytes,
        permit: OwnedSemaphorePermit,
    },
    Relay {
        why: Why,
        model: Option<String>,
        body: Body,
    },
    /// With a prediction; the client's own body is for a service that takes none.
    Predict {
        why: Why,
        model: String,
        altered: Bytes,
        own: Bytes,
    },
    Fail(Failure),
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
    pub(super) fn new(settings: &Settings, brains: &Brains, shared: Shared, tunnels: Tunnels) -> Self {
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
    pub(super) async fn answer(self: Arc<Self>, request: Request<Incoming>) -> Response<Body> {
        let started = Instant::now();
        let (mut parts, body) = request.into_parts();
        let peer = parts.extensions.remove::<Peer>().map(|peer| peer.0.ip());
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
    async fn other(&self, inbound: Inbound, body: Incoming) -> Response<Body> {
        let mut record = Record::new(Arc::clone(&self.shared.observer), inbound.started);
        if inbound.parts.method == Method::CONNECT {
            return record.fail(&Failure::Connect);
        }
        let mut model = None;
        // Only where several backends answer is it worth looking for the model.
        let body = if self.shared.fleet.needs_model() && inbound.parts.method == Method::POST {
            match route::read(body, self.limits.speculate_body).await {
                Read::Broken => return record.fail(&Failure::BodyBroken),
                Read::Replay(replay) => replay.into_body(),
                Read::Whole(bytes) => {
                    model = route::model_of(&bytes);
                    full(bytes)
                }
            }
        } else {
            streamed(body)
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
        body: Body,
        record: Record,
        backend: Arc<Backend>,
    ) -> Response<Body> {
        let relay = Relay { record, backend, limit: self.limits.relay_body };
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
    ) -> Response<Body> {
        let Some(backend) = self.shared.fleet.pick(Some(&model)) else {
            return record.fail(&Failure::NoBackend);
        };
        record.model(model.clone());
        let relay = Relay { record, backend, limit: self.limits.relay_body };
        relay.send_predicted(inbound.parts, altered, own, &model, inbound.peer).await
    }

    /// A completion: drive it, or relay it with a reason.
    async fn completion(&self, inbound: Inbound, body: Incoming, route: Route) -> Response<Body> {
        let control = self.control(&inbound.parts);
        let id = self.id(&inbound.parts);
        let mut record = Record::new(Arc::clone(&self.shared.observer), inbound.started);
        record.completion(route, id.clone(), BypassReason::Fault, None);
        let (why, model, body) = match self.decide(&inbound.parts, body, route, control.clone()).await {
            Verdict::Drive { request, body, permit } => {
                return match self.shared.fleet.pick(Some(&request.model)) {
                    Some(backend) => {
                        self.hand_over(
                            inbound,
                            request,
                            body,
                            backend,
                            control.ok().flatten(),
                            id,
                            record,
                            permit,
                        )
                        .await
                    }
                    None => record.fail(&Failure::NoBackend),
                };
            }
            Verdict::Fail(failure) => return record.fail(&failure),
            Verdict::Predict { why, model, altered, own } => {
                record.completion(route, id, why.reason, None);
                return self.predict(inbound, record, model, altered, own).await;
            }
            Verdict::Relay { why, model, body } => (why, model, body),
        };
        record.completion(route, id, why.reason, why.parameter);
        let Some(backend) = self.shared.fleet.pick(model.as_deref()) else {
            return record.fail(&Failure::NoBackend);
        };
        if let Some(model) = model {
            record.model(model);
        }
        self.relay(inbound, body, record, backend).await
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
        if let (Some(why), false) = (&early, self.shared.fleet.needs_model()) {
            return Verdict::Relay { why: why.clone(), model: None, body: streamed(body) };
        }
        let bytes = match route::read(body, self.limits.speculate_body).await {
            Read::Broken => return Verdict::Fail(Failure::BodyBroken),
            Read::Replay(replay) => {
                let why = early.unwrap_or(BypassReason::Body.into());
                return Verdict::Relay { why, model: None, body: replay.into_body() };
            }
            Read::Whole(bytes) => bytes,
        };
        let (why, model) = match early {
            Some(why) => (why, route::model_of(&bytes)),
            None => match self.judged(route, &bytes) {
                Ok((request, permit)) => return Verdict::Drive { request, body: bytes, permit },
                Err(mut why) => match (why.predicted.take(), route::model_of(&bytes)) {
                    (Some(altered), Some(model)) if rides == Some(false) => {
                        return Verdict::Predict { why, model, altered, own: bytes };
                    }
                    (_, model) => (why, model),
                },
            },
        };
        Verdict::Relay { why, model, body: full(bytes) }
    }

    /// Reasons that need no look into the body.
    fn early(&self, parts: &request::Parts, control: Result<Option<Control>, Why>) -> Option<Why> {
        let fleet = &self.shared.fleet;
        match control {
            Err(why) => return Some(why),
            Ok(Some(Control::Off)) => return Some(BypassReason::Client.into()),
            Ok(_) => {}
        }
        if fleet.backends().iter().all(|backend| self.shared.modes.of(backend.name()) == Mode::Off) {
            return Some(BypassReason::Off.into());
        }
        if fleet.backends().iter().all(|backend| backend.is_billed() && !backend.predicts()) {
            return Some(BypassReason::Billed.into());
        }
        let serves = |backend: &Arc<Backend>| backend.speculates() || backend.predicts();
        if self.drive.is_none() || !fleet.backends().iter().any(serves) {
            return Some(BypassReason::NoPlan.into());
        }
        route::is_encoded(&parts.headers).then(|| BypassReason::Encoded.into())
    }

    /// Judges the body, and takes a place among the sessions if it may be driven.
    fn judged(
        &self,
        route: Route,
        body: &Bytes,
    ) -> Result<(Box<openai::Request>, OwnedSemaphorePermit), Why> {
        let begun = Instant::now();
        let judged = openai::judge(route, body);
        self.shared.observer.metrics().overhead(Stage::Parse, begun.elapsed());
        let request = match judged {
            Judgement::Eligible(request) => request,
            Judgement::Bypass { reason, parameter } => {
                return Err(Why { reason, parameter, predicted: None });
            }
        };
        let backend = self.shared.fleet.pick(Some(&request.model)).ok_or(BypassReason::NoPlan)?;
        let mode = self.shared.modes.of(backend.name());
        if mode == Mode::Off {
            return Err(BypassReason::Off.into());
        }
        if !backend.speculates() {
            let reason = if backend.is_billed() { BypassReason::Billed } else { BypassReason::NoPlan };
            let may = mode == Mode::Auto && backend.predicts_for(&request.model);
            let predicted = may.then(|| dialect::openai::predicted(&request, body)).flatten();
            return Err(Why { reason, parameter: None, predicted: predicted.map(Bytes::from) });
        }
        let permit = Arc::clone(&self.sessions).try_acquire_owned().map_err(|_| BypassReason::Sessions)?;
        Ok((request, permit))
    }

    #[expect(clippy::too_many_arguments, reason = "the one place where all that belongs to a session meets")]
    async fn hand_over(
        &self,
        inbound: Inbound,
        request: Box<openai::Request>,
        body: Bytes,
        backend: Arc<Backend>,
        control: Option<Control>,
        id: String,
        record: Record,
        permit: OwnedSemaphorePermit,
    ) -> Response<Body> {
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
            control,
            text_allowed,
            wants_trailers,
            peer: inbound.peer,
            id,
            started: inbound.started,
            modes: Arc::clone(&self.shared.modes),
            observer: Arc::clone(&self.shared.observer),
            slot: Slot { _held: held, _permit: permit },
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

fn streamed(body: Incoming) -> Body {
    body.map_err(Into::into).boxed_unsync()
}
