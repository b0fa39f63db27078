//! Requests of the Messages and the Responses API for a backend whose `routes` say `translate`, or
//! for `foretell target` itself: they go on as chats, with all that a chat gets here, and come back
//! as answers of their API.
//!
//! The translation is at the very edge: everything behind it sees a chat. Only the label `route` of
//! metrics and logs shows the client's API. A request that a chat cannot express is passed on
//! unchanged.

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
use foretell_core::words::PassthroughReason;
use foretell_engines::{Dialect, Quirks};
use foretell_net::fleet::Fleet;
use foretell_net::http::answer::error_body;
use foretell_net::http::body::{Body, BoxError, full};
use foretell_net::http::gather;
use foretell_net::http::headers;
use foretell_net::http::memory::{Memory, Reservation};
use foretell_net::http::request::RequestBody;
use foretell_net::random;
use foretell_wire::anthropic::{self, System};
use foretell_wire::openai::sse::{Decoder, TooLong};
use foretell_wire::openai::{Api, Route, json, parsed_bytes};
use foretell_wire::responses::{self, Echo};
use foretell_wire::translation::{Events, Stream, Thinking, Untranslated};

/// Maximum size of an answer that is not streamed, bytes.
pub(super) const ANSWER_BYTES: usize = 64 << 20;
/// Path of the complete body in errors.
const BODY: &str = "body";
/// Header of the key in the Messages API.
const API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// Extension of a chat request that is a translation: the API that the client uses.
#[derive(Clone, Copy, Debug)]
pub struct ClientApi(pub Api);

/// The form of the answer to a translated request.
#[derive(Debug)]
pub enum AnswerForm {
    /// A message.
    Message,
    /// A response that repeats this, with the memory reserved for it.
    Response(Box<Echo>, Reservation),
}

/// The API of a request, if it is one that may be translated.
pub fn api_of(request: &Request<RequestBody>) -> Option<Api> {
    route::passthrough_api(request.method(), request.uri())
}

/// The backend of a request by another API.
#[derive(Clone, Copy, Debug)]
pub struct Backend {
    /// How a request switches its reasoning.
    pub thinking: Thinking,
    /// It has that API itself: requests that cannot be translated are passed on.
    pub has_api: bool,
    /// It knows `stream_options.continuous_usage_stats`.
    pub continuous_usage: bool,
}

/// The request to serve, and the form of the client's answer. `backend_of` finds the backend by the
/// body; `None`: requests of this API are passed on to it unchanged. A request that is not
/// translated has [`Untranslated`] as an extension.
pub async fn translate_request(
    request: Request<RequestBody>,
    api: Api,
    backend_of: impl FnOnce(&[u8]) -> Option<Backend>,
    limit: usize,
    memory: &Arc<Memory>,
) -> (Request<RequestBody>, Option<AnswerForm>) {
    if headers::is_encoded(request.headers()) {
        return (request, None);
    }
    let (parts, body) = request.into_parts();
    let unchanged = |parts, body: Body| (Request::from_parts(parts, RequestBody::resumed(body)), None);
    let bytes = match route::read(body, limit, memory).await {
        Read::Broken(error) => return unchanged(parts, broken(error)),
        Read::Unread(body, _) => return unchanged(parts, body),
        Read::Complete(bytes) => bytes,
    };
    let Some(backend) = backend_of(&bytes) else { return unchanged(parts, full(bytes)) };
    // The parsed body, and the chat that is made of it.
    let Some(parsed) = memory.try_take(2 * parsed_bytes(&bytes) as u64) else {
        return unchanged(parts, full(bytes));
    };
    let mut parts = parts;
    let (body, back) = match chat(api, &bytes, backend, parsed) {
        Ok((chat, back)) => (chat, Some(back)),
        Err(passed @ Untranslated::Passed { .. }) => {
            parts.extensions.insert(passed);
            return unchanged(parts, full(bytes));
        }
        Err(Untranslated::Refused { path, .. }) if backend.has_api => {
            let reason = if path == BODY { PassthroughReason::Body } else { PassthroughReason::Parameter };
            parts.extensions.insert(Untranslated::Passed { reason, parameter: path });
            return unchanged(parts, full(bytes));
        }
        Err(refused @ Untranslated::Refused { .. }) => {
            parts.extensions.insert(refused);
            // Errors of the Responses API are those of chats.
            (Bytes::new(), (api == Api::Messages).then_some(AnswerForm::Message))
        }
    };
    parts.extensions.insert(ClientApi(api));
    as_chat(&mut parts);
    (Request::from_parts(parts, RequestBody::resumed(full(body))), back)
}

/// The backend of a request by this API; `None` if it gets such requests unchanged.
pub(super) fn backend_of(fleet: &Fleet, api: Api, body: &[u8]) -> Option<Backend> {
    let replica = fleet.would_pick(route::model_of(body).as_deref())?;
    let quirks = Dialect::named(&replica.engine()).map_or(&Quirks::COMMON, Dialect::quirks);
    let Quirks { thinking, has_other_apis: has_api, usage, .. } = *quirks;
    replica.translates(api).then_some(Backend { thinking, has_api, continuous_usage: usage.has_continuous })
}

/// The body of the chat request. `memory` covers the parsed request.
fn chat(
    api: Api,
    body: &[u8],
    backend: Backend,
    mut memory: Reservation,
) -> Result<(Bytes, AnswerForm), Untranslated> {
    let Backend { thinking, continuous_usage, .. } = backend;
    let malformed = || Untranslated::Refused {
        path: BODY.to_owned(),
        words: "it is no JSON, or not every reader reads it alike".to_owned(),
    };
    let parsed = json::parse(body).ok_or_else(malformed)?;
    let (mut chat, back) = match api {
        Api::Responses => {
            let (chat, request) = responses::translate(&parsed, thinking)?;
            let reserved = memory.split(request.bytes() as u64);
            (chat, AnswerForm::Response(Box::new(request), reserved))
        }
        Api::Messages | Api::Completion(_) => {
            (anthropic::translate(&parsed, System::Merged, thinking)?, AnswerForm::Message)
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

/// Translates the answer to a chat to the client's API; unchanged if `back` is `None`.
pub async fn translate_answer(
    response: Response<Body>,
    back: Option<AnswerForm>,
    memory: &Arc<Memory>,
) -> Response<Body> {
    let success = response.status().is_success();
    let back = match back {
        // Errors of the Responses API are those of chats.
        Some(AnswerForm::Response(..)) if !success => return response,
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
            AnswerForm::Message => translating(body, anthropic::Events::stream(seed), None),
            AnswerForm::Response(request, reserved) => {
                translating(body, responses::Events::stream(*request, seed), Some(reserved))
            }
        };
        return Response::from_parts(parts, body);
    }
    let mut taken = memory.take(0);
    // The answer cannot be requested twice: memory for it is taken even above the limit.
    let answer = match gather::read_counted(body, ANSWER_BYTES, &mut taken).await {
        Ok(bytes) if !encoded => {
            taken.follow((bytes.len() + parsed_bytes(&bytes)) as u64);
            serde_json::from_slice::<Value>(&bytes).ok()
        }
        _ => None,
    };
    let (status, text) = back.translated(answer.as_ref(), parts.status, seed);
    parts.status = status;
    parts.headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Response::from_parts(parts, full(text))
}

impl AnswerForm {
    /// Status and JSON for a chat's answer that is not streamed.
    fn translated(&self, answer: Option<&Value>, status: StatusCode, seed: u64) -> (StatusCode, String) {
        if !status.is_success() {
            return (status, anthropic::error(answer, "the backend refused the request").to_string());
        }
        let made = answer.and_then(|chat| match self {
            Self::Message => anthropic::message(chat, seed),
            Self::Response(request, _) => {
                responses::response(chat, request, seed).map(|made| made.to_string())
            }
        });
        made.map_or_else(|| (StatusCode::BAD_GATEWAY, self.no_chat().to_string()), |made| (status, made))
    }

    /// The error for an answer that cannot be translated.
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
    _memory: Option<Reservation>,
}

fn translating<E: Events + Send + Unpin + 'static>(
    body: Body,
    events: Stream<E>,
    memory: Option<Reservation>,
) -> Body {
    let decoder = Decoder::default();
    Translating { body, decoder, events, ended: false, last: None, _memory: memory }.boxed_unsync()
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
                this.ended = true;
                this.last = end;
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
            let answer = translate_answer(answer, Some(AnswerForm::Message), &memory).await;
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
                    translate_request(request, Api::Messages, |_| Some(backend), 1 << 16, &memory).await;
                assert_eq!((request.uri().path() == "/v1/messages", back.is_none()), (has_api, has_api));
                let reason = request.extensions().get::<Untranslated>();
                assert_eq!(matches!(reason, Some(Untranslated::Passed { .. })), has_api, "{reason:?}");
            }
        }
    }
}
