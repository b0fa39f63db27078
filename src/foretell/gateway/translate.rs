//! Requests of the Messages and the Responses API for a backend whose `routes` say `translate`, or
//! for `foretell target` itself: they go on as chats, with all that a chat gets here, and come back
//! as answers of their API.
//!
//! The translation is at the very edge: everything behind it sees a chat. Only the label `route` of
//! metrics and logs tells by which API the client asked. A request that a chat cannot ask for is
//! passed on as it is.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures_util::stream;
use http::header::{
    ACCEPT_ENCODING, AUTHORIZATION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, TRANSFER_ENCODING,
};
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, Uri, request};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use serde_json::Value;

use super::route::{self, Read};
use crate::fleet::Fleet;
use crate::http::answer::error_body;
use crate::http::body::{Body, BoxError, full};
use crate::http::gather;
use crate::http::headers;
use crate::http::memory::{Memory, Reservation};
use crate::http::request::RequestBody;
use crate::random;
use foretell_core::words::PassthroughReason;
use foretell_engines::anthropic::{self, System};
use foretell_engines::dialect::{Dialect, Quirks};
use foretell_engines::openai::sse::{Decoder, TooLong};
use foretell_engines::openai::{Api, Route, json, parsed_bytes};
use foretell_engines::responses::{self, Echo};
use foretell_engines::translation::{Events, Stream, Thinking, Untranslated};

/// Maximum size of an answer that is not streamed, bytes.
pub(super) const ANSWER_BYTES: usize = 64 << 20;
/// The path of a request as a whole.
const BODY: &str = "body";
/// Where clients of the Messages API put their key.
const API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// Extension of a chat request that is a translation: the API that the client asked by.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AskedBy(pub Api);

/// The answer that the client of a translated request is to get.
#[derive(Debug)]
pub(crate) enum Back {
    /// A message.
    Message,
    /// A response that repeats this, for which memory is kept.
    Response(Box<Echo>, Reservation),
}

/// The API that a request asks by, if it is one that may be translated.
pub(crate) fn asked(request: &Request<RequestBody>) -> Option<Api> {
    route::passthrough_api(request.method(), request.uri())
}

/// The backend of a request by another API.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backend {
    /// How it is told to reason.
    pub thinking: Thinking,
    /// It has that API itself: what cannot be translated is left to it.
    pub has_api: bool,
    /// It knows `stream_options.continuous_usage_stats`.
    pub continuous_usage: bool,
}

/// The request to serve, and the answer that is to be made of that to it. `told` tells by the body
/// what backend it is for; `None`: that gets requests of this API as they are. A request that is
/// not translated has [`Untranslated`] as an extension.
pub(crate) async fn enter(
    request: Request<RequestBody>,
    api: Api,
    told: impl FnOnce(&[u8]) -> Option<Backend>,
    limit: usize,
    memory: &Arc<Memory>,
) -> (Request<RequestBody>, Option<Back>) {
    if route::is_encoded(request.headers()) {
        return (request, None);
    }
    let (parts, body) = request.into_parts();
    let as_it_is = |parts, body: Body| (Request::from_parts(parts, RequestBody::resumed(body)), None);
    let bytes = match route::read(body, limit, memory).await {
        Read::Broken(error) => return as_it_is(parts, broken(error)),
        Read::Unread(body, _) => return as_it_is(parts, body),
        Read::Whole(bytes) => bytes,
    };
    let Some(backend) = told(&bytes) else { return as_it_is(parts, full(bytes)) };
    // What is read of the body, and the chat that is made of that.
    let Some(parsed) = memory.try_take(2 * parsed_bytes(&bytes) as u64) else {
        return as_it_is(parts, full(bytes));
    };
    let mut parts = parts;
    let (body, back) = match chat(api, &bytes, backend, parsed) {
        Ok((chat, back)) => (chat, Some(back)),
        Err(passed @ Untranslated::Passed { .. }) => {
            parts.extensions.insert(passed);
            return as_it_is(parts, full(bytes));
        }
        Err(Untranslated::Refused { path, .. }) if backend.has_api => {
            let reason = if path == BODY { PassthroughReason::Body } else { PassthroughReason::Parameter };
            parts.extensions.insert(Untranslated::Passed { reason, parameter: path });
            return as_it_is(parts, full(bytes));
        }
        Err(refused @ Untranslated::Refused { .. }) => {
            parts.extensions.insert(refused);
            // Errors of the Responses API are those of chats.
            (Bytes::new(), (api == Api::Messages).then_some(Back::Message))
        }
    };
    parts.extensions.insert(AskedBy(api));
    as_chat(&mut parts);
    (Request::from_parts(parts, RequestBody::resumed(full(body))), back)
}

/// The backend of a request by this API; `None` if it is sent such as they are.
pub(super) fn told(fleet: &Fleet, api: Api, body: &[u8]) -> Option<Backend> {
    let replica = fleet.would_pick(route::model_of(body).as_deref())?;
    let quirks = Dialect::named(&replica.engine()).map_or(&Quirks::COMMON, Dialect::quirks);
    let Quirks { thinking, has_other_apis: has_api, usage, .. } = *quirks;
    replica.translates(api).then_some(Backend { thinking, has_api, continuous_usage: usage.has_continuous })
}

/// The body of the chat request. `memory` covers what is read of the request.
fn chat(
    api: Api,
    body: &[u8],
    backend: Backend,
    mut memory: Reservation,
) -> Result<(Bytes, Back), Untranslated> {
    let Backend { thinking, continuous_usage, .. } = backend;
    let malformed = || Untranslated::Refused {
        path: BODY.to_owned(),
        words: "it is no JSON, or not every reader reads it alike".to_owned(),
    };
    let parsed = json::parse(body).ok_or_else(malformed)?;
    let (mut chat, back) = match api {
        Api::Responses => {
            let (chat, asked) = responses::translate(&parsed, thinking)?;
            let kept = memory.split(asked.bytes() as u64);
            (chat, Back::Response(Box::new(asked), kept))
        }
        Api::Messages | Api::Completion(_) => {
            (anthropic::translate(&parsed, System::Merged, thinking)?, Back::Message)
        }
    };
    if let Some(options) = chat.get_mut("stream_options").and_then(Value::as_object_mut)
        && !continuous_usage
    {
        options.shift_remove("continuous_usage_stats");
    }
    Ok((chat.to_string().into(), back))
}

fn as_chat(parts: &mut request::Parts) {
    let mut uri = std::mem::take(&mut parts.uri).into_parts();
    uri.path_and_query = Some(PathAndQuery::from_static(Route::Chat.path()));
    parts.uri = Uri::from_parts(uri).unwrap_or_else(|_| Uri::from_static(Route::Chat.path()));
    for name in [CONTENT_LENGTH, TRANSFER_ENCODING] {
        parts.headers.remove(name);
    }
    // The answer has to be read.
    parts.headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    sign(&mut parts.headers);
}

/// Chats take a key as a bearer token. The field stays: it may name the tenant.
fn sign(headers: &mut HeaderMap) {
    let Some(key) = headers.get(API_KEY) else { return };
    let bearer = [b"Bearer ", key.as_bytes()].concat();
    if let Ok(mut bearer) = HeaderValue::from_bytes(&bearer) {
        bearer.set_sensitive(true);
        headers.entry(AUTHORIZATION).or_insert(bearer);
    }
}

fn broken(error: BoxError) -> Body {
    StreamBody::new(stream::once(std::future::ready(Err::<Frame<Bytes>, _>(error)))).boxed_unsync()
}

/// The answer to a chat as the answer that the client is to get; without such, as it is.
pub(crate) async fn leave(
    response: Response<Body>,
    back: Option<Back>,
    memory: &Arc<Memory>,
) -> Response<Body> {
    let success = response.status().is_success();
    let back = match back {
        // Errors of the Responses API are those of chats.
        Some(Back::Response(..)) if !success => return response,
        None => return response,
        Some(back) => back,
    };
    let (mut parts, body) = response.into_parts();
    parts.headers.remove(CONTENT_LENGTH);
    let encoding = parts.headers.remove(CONTENT_ENCODING);
    let encoded = encoding.is_some_and(|encoding| encoding != "identity");
    let seed = random::fresh_seed();
    if success && !encoded && headers::is_event_stream(&parts.headers) {
        let body = match back {
            Back::Message => translating(body, anthropic::Events::stream(seed), None),
            Back::Response(asked, kept) => {
                translating(body, responses::Events::stream(*asked, seed), Some(kept))
            }
        };
        return Response::from_parts(parts, body);
    }
    let mut taken = memory.take(0);
    // It is there, and cannot be asked for again: memory for it is taken however much is in use.
    let read = gather::counted(body, ANSWER_BYTES, &mut taken).await.ok();
    let answer = match read.filter(|_| !encoded) {
        Some(bytes) => {
            taken.follow((bytes.len() + parsed_bytes(&bytes)) as u64);
            serde_json::from_slice::<Value>(&bytes).ok()
        }
        None => None,
    };
    let (status, text) = back.whole(answer.as_ref(), parts.status, seed);
    parts.status = status;
    parts.headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Response::from_parts(parts, full(text))
}

impl Back {
    /// Status and JSON for a chat's answer that is not streamed.
    fn whole(&self, answer: Option<&Value>, status: StatusCode, seed: u64) -> (StatusCode, String) {
        if !status.is_success() {
            return (status, anthropic::error(answer, "the backend refused the request").to_string());
        }
        let made = answer.and_then(|chat| match self {
            Self::Message => anthropic::message(chat, seed),
            Self::Response(asked, _) => responses::response(chat, asked, seed).map(|made| made.to_string()),
        });
        made.map_or_else(|| (StatusCode::BAD_GATEWAY, self.no_chat().to_string()), |made| (status, made))
    }

    /// The error for an answer of which nothing can be made.
    fn no_chat(&self) -> Value {
        let words = "the backend's answer is no chat, is compressed, or calls a tool with broken arguments";
        match self {
            Self::Message => anthropic::error(None, words),
            Self::Response(..) => error_body(StatusCode::BAD_GATEWAY, words, None, "backend_answer"),
        }
    }
}

/// A stream of a chat's events, read as those of another API.
struct Translating<E> {
    body: Body,
    decoder: Decoder,
    events: Stream<E>,
    /// The chat's stream has ended.
    ended: bool,
    /// The frame or error behind its events.
    last: Option<Result<Frame<Bytes>, BoxError>>,
    _kept: Option<Reservation>,
}

fn translating<E: Events + Send + Unpin + 'static>(
    body: Body,
    events: Stream<E>,
    kept: Option<Reservation>,
) -> Body {
    let decoder = Decoder::default();
    Translating { body, decoder, events, ended: false, last: None, _kept: kept }.boxed_unsync()
}

impl<E: Events> Translating<E> {
    /// The events for these bytes of the chat's.
    fn take(&mut self, data: &[u8]) -> Result<Vec<u8>, TooLong> {
        let mut out = Vec::new();
        for message in self.decoder.push(data)? {
            self.events.push(&message.data, &mut out);
        }
        Ok(out)
    }
}

impl<E: Events + Unpin> http_body::Body for Translating<E> {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = self.get_mut();
        loop {
            if this.ended {
                return Poll::Ready(this.last.take());
            }
            let made = match ready!(Pin::new(&mut this.body).poll_frame(cx)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => this.take(&data).map_err(|error| Some(Err(error.into()))),
                    Err(trailers) => Err(Some(Ok(trailers))),
                },
                end => Err(end),
            };
            let out = made.unwrap_or_else(|end| {
                let mut out = Vec::new();
                this.events.cut(&mut out);
                (this.ended, this.last) = (true, end);
                out
            });
            if !out.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(out.into()))));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_becomes_a_bearer_token_unless_there_is_one() {
        let signed = |lines: &[(&'static str, &str)]| {
            let mut headers = HeaderMap::new();
            for (name, value) in lines {
                headers.append(*name, value.parse().unwrap());
            }
            sign(&mut headers);
            headers.get(AUTHORIZATION).map(|value| value.to_str().unwrap().to_owned())
        };
        assert_eq!(signed(&[("x-api-key", "k")]).as_deref(), Some("Bearer k"));
        assert_eq!(signed(&[("x-api-key", "k"), ("authorization", "Bearer a")]).as_deref(), Some("Bearer a"));
        assert_eq!(signed(&[]), None);
    }

    #[test]
    fn only_path_and_framing_of_a_request_change() {
        let request = Request::post("http://h:1/v1/messages?beta=true").header(CONTENT_LENGTH, 9).body(());
        let mut parts = request.unwrap().into_parts().0;
        as_chat(&mut parts);
        assert_eq!(parts.uri, "http://h:1/v1/chat/completions");
        assert_eq!(parts.headers.len(), 1);
        assert_eq!(parts.headers[ACCEPT_ENCODING], "identity");
    }

    #[tokio::test]
    async fn an_answer_is_translated_however_full_the_memory_is_unless_it_is_compressed() {
        let memory = Memory::new(0);
        let chat =
            r#"{"id":"c","model":"m","choices":[{"message":{"content":"Hi"},"finish_reason":"stop"}]}"#;
        for (encoding, status) in [("identity", 200), ("gzip", 502)] {
            let answer = Response::builder().header(CONTENT_ENCODING, encoding).body(full(chat)).unwrap();
            let answer = leave(answer, Some(Back::Message), &memory).await;
            assert_eq!(answer.status(), status, "{encoding}");
            assert!(!answer.headers().contains_key(CONTENT_ENCODING));
        }
    }

    #[tokio::test]
    async fn what_cannot_be_translated_is_left_to_a_server_that_has_the_api() {
        for body in [r#"{"model":"m","mcp_servers":[]}"#, r#"{"model":"m","k":18446744073709551616}"#] {
            for has_api in [true, false] {
                let backend = Backend { thinking: Thinking::Effort, has_api, continuous_usage: true };
                let request = Request::post("/v1/messages").body(RequestBody::resumed(full(body))).unwrap();
                let memory = Memory::new(1 << 20);
                let (request, back) =
                    enter(request, Api::Messages, |_| Some(backend), 1 << 16, &memory).await;
                assert_eq!((request.uri().path() == "/v1/messages", back.is_none()), (has_api, has_api));
                let reason = request.extensions().get::<Untranslated>();
                assert_eq!(matches!(reason, Some(Untranslated::Passed { .. })), has_api, "{reason:?}");
            }
        }
    }
}
