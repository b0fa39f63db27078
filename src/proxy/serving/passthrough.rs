//! The one way of a request that goes to the backend as the client sent it, and of an answer that
//! goes to the client as the backend sent it, piece by piece.
//!
//! Nothing is buffered and nothing times out unless the operator has configured it. When a client
//! leaves, its answer is dropped, which closes the connection to the backend at once.

use std::sync::Arc;

use http::header::ACCEPT_ENCODING;
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, request};
use http_body::Body as _;
use http_body_util::BodyExt;
use serde::de::IgnoredAny;

use super::exchange::{Exchange, Slot, Unsent};
use super::failure::Failure;
use super::head;
use super::sink::trailer_fields;
use super::tap::{Ending, Listener, Tap, Tapped};
use foretell_core::words::PassthroughReason;
use foretell_net::clock::Clock;
use foretell_net::fleet::{Answer, Fleet, Replica};
use foretell_net::http::body::{Body, SLICE, Sliced, full};
use foretell_net::http::gather;
use foretell_net::http::headers;
use foretell_net::http::replay::Replay;
use foretell_observe::{Record, Recorded};
use foretell_policy as policy;
use foretell_wire::openai::OutputTokens;

/// Maximum size of an answer that is read to its end before its head is sent, bytes.
const RESEND_BYTES: usize = 64 << 20;

/// The way of one request to a backend.
pub struct Passthrough {
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
    /// Sends the request.
    pub async fn exchange(
        &mut self,
        record: &mut Record,
        mut parts: request::Parts,
        body: Body,
    ) -> Result<Response<Answer>, Failure> {
        headers::frame(&mut parts, &body);
        record.to(&self.replica);
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
            record.moved();
        }
        sent.map_err(|error| match self.limit {
            Some(limit) if error.is_limit() => Failure::BodyTooLarge { limit },
            _ => Failure::Send(error),
        })
    }

    /// As [`Self::exchange`] for a request that does not ask for another protocol.
    pub async fn send(
        &mut self,
        record: &mut Record,
        parts: request::Parts,
        body: Body,
    ) -> Result<Response<Answer>, Failure> {
        let response = self.exchange(record, parts, body).await?;
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            return Err(Failure::UnaskedUpgrade { backend: self.replica.backend().to_owned() });
        }
        Ok(response)
    }

    /// Sends the request, and passes its answer back.
    pub async fn answer(mut self, mut record: Record, parts: request::Parts, body: Body) -> Response<Body> {
        match self.send(&mut record, parts, body).await {
            Err(failure) => fail(record, &failure),
            Ok(response) => pass_back(record, response),
        }
    }
}

/// Answers with an error of Foretell.
pub fn fail(mut record: Record, failure: &Failure) -> Response<Body> {
    let policy = record.so_far().policy.clone();
    let mut response = failure.response();
    failure.record_in(&mut record);
    answered(&mut record, &mut response);
    head::name_policy(response.headers_mut(), policy.as_deref());
    record.end(false);
    response
}

/// Records the answer, and adds `x-foretell-*` fields to it.
pub fn answered(record: &mut Record, response: &mut Response<impl Sized>) {
    record.answered(response.status(), response.headers());
    head::name(response.headers_mut(), record.so_far());
}

/// The head of a backend's answer, fit for the client, and its body.
fn parted(response: Response<Answer>) -> (Response<()>, Answer) {
    let (mut parts, body) = response.into_parts();
    headers::from_backend(&mut parts.headers);
    // Extensions of the backend's connection mean nothing on the client's.
    parts.extensions.clear();
    (Response::from_parts(parts, ()), body)
}

/// Passes an answer on; its output tokens are counted.
pub fn pass_back(mut record: Record, response: Response<Answer>) -> Response<Body> {
    if !has_output(&record, response.status()) {
        return pass_unread(record, response);
    }
    let (mut response, body) = parted(response);
    answered(&mut record, &mut response);
    let tap = Tap::new(response.headers(), Clock::start());
    response.map(|()| tapped(body, tap, Counting(record), None))
}

/// Passes an answer on that has no output.
pub(super) fn pass_unread(mut record: Record, response: Response<Answer>) -> Response<Body> {
    let (mut response, body) = parted(response);
    answered(&mut record, &mut response);
    response.map(|()| Recorded::new(body, record).map_err(Into::into).boxed_unsync())
}

/// Passes on the answer to an eligible request. `listener` reads the output. The trailers of a
/// stream are sent if the client takes them.
pub(super) fn pass_observed<L: Listener>(
    mut slot: Slot,
    response: Response<Answer>,
    (clock, trailers): (Clock, bool),
    listener: impl FnOnce(Slot) -> L,
) -> Response<Body> {
    if !response.status().is_success() {
        return pass_unread(slot.into_record(), response);
    }
    let (mut response, body) = parted(response);
    answered(&mut slot.record, &mut response);
    let mut trailers = trailers.then(|| trailer_fields(slot.record.so_far()));
    if headers::is_event_stream(response.headers()) {
        head::name_eligible(response.headers_mut());
        head::declare_trailers(response.headers_mut(), trailers.is_some());
    } else {
        trailers = None;
    }
    let tap = Tap::new(response.headers(), clock);
    response.map(|()| tapped(body, tap, listener(slot), trailers))
}

fn tapped<L: Listener>(body: Answer, tap: Tap<L::Content>, listener: L, trailers: Option<HeaderMap>) -> Body {
    Tapped::new(body, tap, listener, trailers).map_err(Into::into).boxed_unsync()
}

/// True if an answer with this status is generated text.
fn has_output(record: &Record, status: StatusCode) -> bool {
    status.is_success() && record.so_far().route.is_some()
}

impl Exchange {
    /// Passes the request through instead of serving it.
    pub async fn decline(self, why: impl Into<policy::Passthrough>) -> Response<Body> {
        let Self { head, body, replica, shared, slot, .. } = self;
        decline(Unsent { head, body, replica }, slot, &shared.fleet, why.into()).await
    }
}

/// Sends a request that was to be served by a session, of which no part of an answer has been sent
/// to the client.
pub(super) async fn decline(
    Unsent { head, body, replica }: Unsent,
    slot: Slot,
    fleet: &Arc<Fleet>,
    why: policy::Passthrough,
) -> Response<Body> {
    let (mut record, reason) = (slot.into_record(), why.reason);
    record.declined(reason, why.parameter);
    record.decided_by(why.policy);
    let repeatable = Some(Replay::of(body.clone()));
    let passthrough = Passthrough { replica, fleet: Arc::clone(fleet), limit: None, repeatable };
    match reason {
        PassthroughReason::Fault => resend(passthrough, record, head, full(body)).await,
        _ => passthrough.answer(record, head, full(body)).await,
    }
}

/// Sends a request that may have been answered in part before: a JSON answer is read to its end
/// before its head is sent, so that one that breaks off too is an error and not half an answer.
async fn resend(
    mut passthrough: Passthrough,
    mut record: Record,
    mut parts: request::Parts,
    body: Body,
) -> Response<Body> {
    parts.headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    let response = match passthrough.send(&mut record, parts, body).await {
        Err(failure) => return fail(record, &failure),
        Ok(response) => response,
    };
    if !headers::is_json(response.headers()) || headers::is_encoded(response.headers()) {
        return pass_back(record, response);
    }
    let (response, body) = parted(response);
    let json = gather::read_all(body, RESEND_BYTES).await.ok();
    let Some(json) = json.filter(|json| serde_json::from_slice::<IgnoredAny>(json).is_ok()) else {
        return fail(record, &Failure::BrokeOff);
    };
    let read = has_output(&record, response.status()).then(|| {
        let mut tokens = OutputTokens::default();
        tokens.read(&json);
        tokens
    });
    let mut response = response.map(|()| full(json));
    answered(&mut record, &mut response);
    if let Some(tokens) = read {
        record.counted(&tokens);
    }
    record.emitted();
    record.end(false);
    response
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
