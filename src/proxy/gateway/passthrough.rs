//! Passthrough: forwards requests that are not speculated on, and their answers, unchanged and
//! piece by piece.
//!
//! Nothing is buffered and nothing times out unless the operator has configured it. When a client
//! leaves, its answer is dropped, which closes the connection to the backend at once.

use std::sync::Arc;

use bytes::Bytes;
use http::header::{ACCEPT_ENCODING, CONNECTION, UPGRADE};
use http::{HeaderValue, Request, Response, StatusCode, request};
use http_body::Body as _;
use http_body_util::BodyExt;
use hyper::upgrade::OnUpgrade;
use serde::de::IgnoredAny;

use super::route;
use super::tunnel::Tunnels;
use crate::serving::failure::Failure;
use crate::serving::tap::{Ending, Listener, Tap, Tapped};
use foretell_net::clock::Clock;
use foretell_net::fleet::{self, Fleet, Replica};
use foretell_net::http::body::{Body, SLICE, Sliced};
use foretell_net::http::gather;
use foretell_net::http::headers;
use foretell_net::http::replay::Replay;
use foretell_net::http::service::Peer;
use foretell_observe::{Record, Recorded};
use foretell_wire::openai::OutputTokens;

/// Maximum size of an answer that is read to its end before its head is sent, bytes.
const RESEND_BYTES: usize = 64 << 20;

/// Records the answer, and adds `x-foretell-*` fields to it.
fn answered(record: &mut Record, response: &mut Response<impl Sized>) {
    record.answered(response.status(), response.headers());
    let so_far = record.so_far();
    let fields = response.headers_mut();
    fields.insert(headers::PATH, HeaderValue::from_static(so_far.path.name()));
    if let Some(reason) = so_far.reason {
        fields.insert(headers::REASON, HeaderValue::from_static(reason.name()));
    }
    if let Some(policy) = so_far.policy.as_deref().and_then(|policy| HeaderValue::from_str(policy).ok()) {
        fields.insert(headers::POLICY, policy);
    }
    if let Some(parameter) = so_far.parameter.as_deref().and_then(headers::parameter) {
        fields.insert(headers::PARAMETER, parameter);
    }
}

/// Answers with an error of Foretell.
pub(super) fn fail(mut record: Record, failure: &Failure) -> Response<Body> {
    let mut response = failure.response();
    failure.record_in(&mut record);
    answered(&mut record, &mut response);
    record.end(false);
    response
}

/// One request on its way to a backend.
pub struct Passthrough {
    pub record: Record,
    /// The replica that it goes to.
    pub replica: Arc<Replica>,
    /// The fleet, for another replica if that one gives no answer.
    pub fleet: Arc<Fleet>,
    /// `limits.passthrough_body`, bytes; `None` is unlimited.
    pub limit: Option<u64>,
    /// Replays the body, if the request may be sent twice; else `None`.
    pub repeatable: Option<Replay>,
}

impl Passthrough {
    /// Forwards a client's request, and its answer back. `parts` are as received.
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
            Some(client) => Box::pin(self.switch(parts, body, client, tunnels)).await,
        }
    }

    /// As [`Self::send`] for a head that is fit for the backend already.
    pub async fn send_prepared(mut self, parts: request::Parts, body: Body) -> Response<Body> {
        match self.exchange(parts, body).await {
            Err(failure) => fail(self.record, &failure),
            Ok(response) if response.status() == StatusCode::SWITCHING_PROTOCOLS => {
                let backend = self.replica.backend().to_owned();
                fail(self.record, &Failure::UnaskedUpgrade { backend })
            }
            Ok(response) => self.pass_back(response),
        }
    }

    /// As [`Self::send_prepared`] for a request that has been answered in part before: a JSON
    /// answer is read to its end before its head is sent, so that one that breaks off too is an
    /// error and not half an answer.
    pub async fn resend(mut self, mut parts: request::Parts, body: Body) -> Response<Body> {
        parts.headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        let response = match self.exchange(parts, body).await {
            Err(failure) => return fail(self.record, &failure),
            Ok(response) => response,
        };
        if !headers::is_json(response.headers()) || route::is_encoded(response.headers()) {
            return self.pass_back(response);
        }
        let (mut parts, body) = response.into_parts();
        let json = gather::read_all(body, RESEND_BYTES).await.ok();
        let Some(json) = json.filter(|json| serde_json::from_slice::<IgnoredAny>(json).is_ok()) else {
            return fail(self.record, &Failure::BrokeOff);
        };
        headers::from_backend(&mut parts.headers);
        parts.extensions.clear();
        let read = self.has_output(parts.status).then(|| {
            let mut tokens = OutputTokens::default();
            tokens.read(&json);
            tokens
        });
        let mut response = Response::from_parts(parts, foretell_net::http::body::full(json));
        answered(&mut self.record, &mut response);
        if let Some(tokens) = read {
            self.record.counted(&tokens);
        }
        self.record.emitted();
        self.record.end(false);
        response
    }

    /// Sends a request to switch protocols; if the backend agrees, the two connections
    /// are joined.
    async fn switch(
        mut self,
        parts: request::Parts,
        body: Body,
        client: OnUpgrade,
        tunnels: &Tunnels,
    ) -> Response<Body> {
        let mut response = match self.exchange(parts, body).await {
            Err(failure) => return fail(self.record, &failure),
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
        let mut response = Response::from_parts(parts, foretell_net::http::body::full(Bytes::new()));
        answered(&mut self.record, &mut response);
        tunnels.join(client, backend, self.record);
        response
    }

    async fn exchange(
        &mut self,
        mut parts: request::Parts,
        body: Body,
    ) -> Result<Response<fleet::Answer>, Failure> {
        headers::frame(&mut parts, &body);
        self.record.to(&self.replica);
        let body = match self.limit {
            None => body,
            Some(limit) if body.size_hint().lower() > limit => return Err(Failure::BodyTooLarge { limit }),
            Some(limit) => {
                let limit = usize::try_from(limit).unwrap_or(usize::MAX);
                http_body_util::Limited::new(body, limit).boxed_unsync()
            }
        };
        let small = body.size_hint().upper().is_some_and(|size| size <= SLICE as u64);
        let body = if small { body } else { Sliced::new(body).boxed_unsync() };
        let request = Request::from_parts(parts, body);
        let first = Arc::clone(&self.replica);
        let sent = self.fleet.send(&mut self.replica, request, self.repeatable.take()).await;
        if !Arc::ptr_eq(&first, &self.replica) {
            self.record.moved();
        }
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
        answered(&mut self.record, &mut response);
        let body = if self.has_output(response.status()) {
            let tap = Tap::new(response.headers(), Clock::start());
            Tapped::new(body, tap, Counting(self.record), None).map_err(Into::into).boxed_unsync()
        } else {
            Recorded::new(body, self.record).map_err(Into::into).boxed_unsync()
        };
        response.map(|()| body)
    }

    /// True if the answer with this status is generated text.
    fn has_output(&self, status: StatusCode) -> bool {
        status.is_success() && self.record.so_far().route.is_some()
    }
}

/// Counts the output tokens of an answer that is passed through, and ends its record.
struct Counting(Record);

impl Listener for Counting {
    type Content = OutputTokens;

    fn begun(&mut self) {
        self.0.emitted();
    }

    fn memory_used(&mut self, bytes: u64) {
        self.0.set_session_bytes(bytes);
    }

    fn over(mut self, tokens: OutputTokens, end: Ending) {
        self.0.counted(&tokens);
        match end {
            Ending::Complete => self.0.end(false),
            Ending::Broken(cause) => {
                self.0.failed(cause);
                self.0.end(false);
            }
            // The record notes the disconnect when it is dropped.
            Ending::Gone => {}
        }
    }
}
