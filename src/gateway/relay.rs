//! The relay: what is not speculated passes as it is, piece by piece, in both directions.
//!
//! Nothing is collected and nothing is timed out unless the operator asked for it. Dropping the answer is
//! how a client's leaving reaches the backend: its connection is closed at once.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use bytes::Bytes;
use http::header::{CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, UPGRADE};
use http::{HeaderValue, Request, Response, StatusCode, request};
use http_body::{Body as _, Frame, SizeHint};
use http_body_util::BodyExt;
use hyper::upgrade::OnUpgrade;

use super::tunnel::Tunnels;
use crate::drive::failure::Failure;
use crate::fleet::{self, Fleet, Replica};
use crate::http::body::{Body, BoxError};
use crate::http::headers;
use crate::http::listen::Peer;
use crate::http::memory::{Memory, Reservation};
use crate::observe::metrics::Prediction;
use crate::observe::{Finished, Held, Observer};
use crate::openai::{self, Path, Route};
use crate::words::BypassReason;

/// Everything that is to be said about one request; says it exactly once, at the latest when dropped.
pub struct Record {
    observer: Arc<Observer>,
    started: Instant,
    finished: Option<Finished>,
    held: Option<Held>,
    stream: Option<Held>,
    memory: Option<Reservation>,
}

impl Record {
    /// A request that is no completion, until told otherwise.
    pub fn new(observer: Arc<Observer>, started: Instant) -> Self {
        let held = Some(observer.metrics().hold_request());
        let mut finished = Finished::new(Path::Relayed, "");
        finished.reason = Some(BypassReason::Route.name());
        Self { observer, started, finished: Some(finished), held, stream: None, memory: None }
    }

    /// It is a completion that is bypassed.
    pub fn completion(&mut self, route: Route, id: String, reason: BypassReason, parameter: Option<String>) {
        if let Some(finished) = &mut self.finished {
            finished.path = Path::Bypassed;
            finished.route = Some(route);
            finished.id = id;
            finished.reason = Some(reason.name());
            finished.parameter = parameter;
        }
    }

    /// Keeps memory reserved until the end of the answer.
    pub fn keep(&mut self, memory: Reservation) {
        self.memory = Some(memory);
    }

    /// The model that it names.
    pub fn model(&mut self, model: String) {
        if let Some(finished) = &mut self.finished {
            finished.model = Some(model);
        }
    }

    /// Someone else will say it; returns what counts the request as in flight.
    pub(super) fn hand_over(mut self) -> Held {
        self.finished = None;
        self.held.take().unwrap_or_else(|| self.observer.metrics().hold_request())
    }

    fn to(&mut self, backend: &str) {
        if let Some(finished) = &mut self.finished {
            backend.clone_into(&mut finished.backend);
        }
    }

    fn answered(&mut self, response: &mut Response<impl Sized>) {
        let Some(finished) = &mut self.finished else { return };
        finished.status = response.status().as_u16();
        let stream = response.headers().get(CONTENT_TYPE);
        if stream.is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream")) {
            self.stream = Some(self.observer.metrics().hold_stream());
        }
        let fields = response.headers_mut();
        fields.insert(headers::PATH, HeaderValue::from_static(finished.path.name()));
        if let Some(reason) = finished.reason {
            fields.insert(headers::REASON, HeaderValue::from_static(reason));
        }
    }

    fn first_byte(&mut self) {
        if let Some(finished) = &mut self.finished {
            finished.first_byte.get_or_insert_with(|| self.started.elapsed());
        }
    }

    /// Says it.
    fn end(&mut self, client_gone: bool) {
        if let Some(mut finished) = self.finished.take() {
            finished.duration = self.started.elapsed();
            finished.client_gone = client_gone;
            self.observer.finish(finished);
        }
        self.stream = None;
        self.held = None;
        self.memory = None;
    }

    /// Answers with an error of Foretell's own.
    pub fn fail(mut self, failure: &Failure) -> Response<Body> {
        let mut response = failure.response();
        self.answered(&mut response);
        self.end(false);
        response
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        self.end(true);
    }
}

/// A completion's body as `backend` takes it: without the client's own `prediction`, where its engine would refuse
/// the whole request for it.
pub(super) fn fit(backend: &Replica, parts: &mut request::Parts, body: Bytes, memory: &Arc<Memory>) -> Bytes {
    match backend.refuses_prediction().then(|| openai::without_prediction(&body)).flatten() {
        Some(without) => {
            parts.headers.remove(CONTENT_LENGTH);
            memory.take(without.len() as u64).over(without)
        }
        None => body,
    }
}

/// One request on its way to a backend.
pub struct Relay {
    /// What will be said about it.
    pub record: Record,
    /// Where it goes.
    pub backend: Arc<Replica>,
    /// Who can answer instead, if it gives no answer.
    pub fleet: Arc<Fleet>,
    /// `limits.relay_body`.
    pub limit: Option<u64>,
    /// The body, if the request may be sent twice.
    pub repeatable: Option<Bytes>,
}

impl Relay {
    /// Sends a client's request on, and its answer back. `parts` are as received.
    pub async fn send(
        self,
        mut parts: request::Parts,
        body: Body,
        peer: Option<Peer>,
        tunnels: &Tunnels,
    ) -> Response<Body> {
        let host = parts.uri.host().map(ToOwned::to_owned);
        let offered = headers::for_backend(&mut parts.headers, parts.version, host.as_deref(), peer);
        let client = match offered {
            Some(_) => parts.extensions.remove::<OnUpgrade>(),
            None => None,
        };
        match client {
            None => self.send_prepared(parts, body).await,
            Some(client) => self.switch(parts, body, client, tunnels).await,
        }
    }

    /// As [`Self::send`] for a head that is fit for the backend already.
    pub async fn send_prepared(mut self, parts: request::Parts, body: Body) -> Response<Body> {
        match self.exchange(parts, body).await {
            Err(failure) => self.record.fail(&failure),
            Ok(response) if response.status() == StatusCode::SWITCHING_PROTOCOLS => {
                let backend = self.backend.name().to_owned();
                self.record.fail(&Failure::UnaskedUpgrade { backend })
            }
            Ok(response) => self.pass_back(response),
        }
    }

    /// Sends a request that asks to switch protocols; if the backend agrees, the two connections are joined.
    async fn switch(
        mut self,
        parts: request::Parts,
        body: Body,
        client: OnUpgrade,
        tunnels: &Tunnels,
    ) -> Response<Body> {
        let mut response = match self.exchange(parts, body).await {
            Err(failure) => return self.record.fail(&failure),
            Ok(response) => response,
        };
        if response.status() != StatusCode::SWITCHING_PROTOCOLS {
            return self.pass_back(response);
        }
        let backend = hyper::upgrade::on(&mut response);
        let (mut parts, _) = response.into_parts();
        if let Some(protocol) = headers::from_backend(&mut parts.headers) {
            parts.headers.insert(UPGRADE, protocol);
        }
        parts.headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        let mut response = Response::from_parts(parts, crate::http::body::full(Bytes::new()));
        self.record.answered(&mut response);
        tunnels.join(client, backend, self.record);
        response
    }

    /// As [`Self::send`] with a body that Foretell has put a prediction into. A service that refuses it gets the
    /// client's own body: what it would have answered, it answers.
    pub async fn send_predicted(
        mut self,
        mut parts: request::Parts,
        altered: Bytes,
        own: Bytes,
        model: &str,
        peer: Option<Peer>,
    ) -> Response<Body> {
        let host = parts.uri.host().map(ToOwned::to_owned);
        headers::for_backend(&mut parts.headers, parts.version, host.as_deref(), peer);
        // The length is another one.
        for name in [CONTENT_LENGTH, CONNECTION, UPGRADE] {
            parts.headers.remove(name);
        }
        let first = self.exchange(parts.clone(), crate::http::body::full(altered)).await;
        let refused = match &first {
            // Neither costs anything; a pause that is asked for is another matter.
            Ok(response) => {
                matches!(response.status(), StatusCode::BAD_REQUEST | StatusCode::UNPROCESSABLE_ENTITY)
            }
            Err(_) => false,
        };
        let backend = Arc::clone(&self.backend);
        let metrics = |result| self.record.observer.metrics().prediction(result);
        if !refused {
            metrics(Prediction::Sent);
            return self.answer_with(first);
        }
        metrics(Prediction::Refused);
        let second = self.exchange(parts, crate::http::body::full(own)).await;
        if second.as_ref().is_ok_and(|response| response.status().is_success()) {
            backend.note_unpredicted(model);
        }
        self.answer_with(second)
    }

    fn answer_with(self, answer: Result<Response<fleet::Answer>, Failure>) -> Response<Body> {
        match answer {
            Err(failure) => self.record.fail(&failure),
            Ok(response) => self.pass_back(response),
        }
    }

    async fn exchange(
        &mut self,
        mut parts: request::Parts,
        body: Body,
    ) -> Result<Response<fleet::Answer>, Failure> {
        self.record.to(self.backend.name());
        headers::frame(&mut parts, &body);
        let body = match self.limit {
            None => body,
            Some(limit) if body.size_hint().lower() > limit => return Err(Failure::BodyTooLarge { limit }),
            Some(limit) => {
                let limit = usize::try_from(limit).unwrap_or(usize::MAX);
                http_body_util::Limited::new(body, limit).boxed_unsync()
            }
        };
        let request = Request::from_parts(parts, body);
        let sent = self.fleet.send(&mut self.backend, request, self.repeatable.as_ref()).await;
        sent.map_err(|error| match self.limit {
            Some(limit) if error.is_limit() => Failure::BodyTooLarge { limit },
            _ => Failure::Send(error),
        })
    }

    fn pass_back(mut self, response: Response<fleet::Answer>) -> Response<Body> {
        let (mut parts, body) = response.into_parts();
        headers::from_backend(&mut parts.headers);
        // Extensions of the backend's connection mean nothing on the client's.
        parts.extensions.clear();
        let mut response = Response::from_parts(parts, ());
        self.record.answered(&mut response);
        if body.is_end_stream() {
            self.record.end(false);
        }
        response.map(|()| Relayed { body, record: self.record }.boxed_unsync())
    }
}

/// The body of a backend's answer on its way to the client.
struct Relayed {
    body: fleet::Answer,
    record: Record,
}

impl http_body::Body for Relayed {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        Poll::Ready(match frame {
            Some(Ok(mut frame)) => {
                if let Some(trailers) = frame.trailers_mut() {
                    headers::strip_own(trailers);
                }
                self.record.first_byte();
                if self.body.is_end_stream() {
                    self.record.end(false);
                }
                Some(Ok(frame))
            }
            Some(Err(error)) => {
                self.record.end(false);
                Some(Err(error.into()))
            }
            None => {
                self.record.end(false);
                None
            }
        })
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
