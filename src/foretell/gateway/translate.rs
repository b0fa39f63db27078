//! Requests of the Messages API for a backend with `routes: { messages: translate }`, or for a
//! model in this process: they go on as chats, with all that a chat gets here, and come back as
//! messages.
//!
//! The translation is at the very edge: everything behind it sees a chat. Only the label `route` of
//! metrics and logs tells that the client asked for a message.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_util::stream;
use http::header::{AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, TRANSFER_ENCODING};
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, Uri, request};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use serde_json::Value;

use super::route::{self, Read};
use crate::fleet::Fleet;
use crate::http::answer::json_response;
use crate::http::body::{Body, BoxError, full};
use crate::http::gather::{Gathered, gather};
use crate::http::headers;
use crate::http::memory::Memory;
use crate::http::request::RequestBody;
use crate::random;
use foretell_engines::anthropic::{self, Events, System, Thinking};
use foretell_engines::dialect::Dialect;
use foretell_engines::openai::sse::Decoder;
use foretell_engines::openai::{Api, Route, json, parsed_bytes};

/// Maximum size of an answer that is not streamed, bytes.
const ANSWER_BYTES: usize = 64 << 20;
/// Where clients of the Messages API put their key.
const API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// Extension of a chat request that is a translation: the API that the client asked by.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AskedBy(pub Api);

/// Extension of a request that cannot be translated: the words for the client.
#[derive(Clone, Debug)]
pub(crate) struct Untranslated(pub String);

/// True if the request asks for a message.
pub(crate) fn asks(request: &Request<RequestBody>) -> bool {
    route::relayed_api(request.method(), request.uri()) == Some(Api::Messages)
}

/// The request to serve, and true if the answer must be translated back. `told` tells by the body
/// how the engine is told to reason; `None`: it gets messages as they are.
pub(crate) async fn enter(
    request: Request<RequestBody>,
    told: impl FnOnce(&[u8]) -> Option<Thinking>,
    limit: usize,
    memory: &Arc<Memory>,
) -> (Request<RequestBody>, bool) {
    if !asks(&request) || route::is_encoded(request.headers()) {
        return (request, false);
    }
    let (parts, body) = request.into_parts();
    let as_it_is = |parts, body: Body| (Request::from_parts(parts, RequestBody::resumed(body)), false);
    let bytes = match route::read(body, limit, memory).await {
        Read::Broken(error) => return as_it_is(parts, broken(error)),
        Read::Unread(body, _) => return as_it_is(parts, body),
        Read::Whole(bytes) => bytes,
    };
    let Some(thinking) = told(&bytes) else { return as_it_is(parts, full(bytes)) };
    // What is read of the body, and the chat that is made of that.
    let Some(_parsed) = memory.try_take(2 * parsed_bytes(&bytes) as u64) else {
        return as_it_is(parts, full(bytes));
    };
    let mut request = Request::from_parts(parts, ());
    let body = match chat(&bytes, thinking) {
        Ok(body) => body,
        Err(words) => {
            request.extensions_mut().insert(Untranslated(words));
            Bytes::new()
        }
    };
    request.extensions_mut().insert(AskedBy(Api::Messages));
    let (mut parts, ()) = request.into_parts();
    as_chat(&mut parts);
    (Request::from_parts(parts, RequestBody::resumed(full(body))), true)
}

/// How the backend of a request is told to reason; `None` if it is sent messages as they are.
pub(super) fn told(fleet: &Fleet, body: &[u8]) -> Option<Thinking> {
    let replica = fleet.would_pick(route::model_of(body).as_deref())?;
    let effort = replica.dialect().as_str() == Dialect::Vllm.name();
    replica.translates().then_some(if effort { Thinking::Effort } else { Thinking::Template })
}

/// The body of the chat request, or the reason that there is none, for the client.
fn chat(body: &[u8], thinking: Thinking) -> Result<Bytes, String> {
    let parsed = json::parse(body).ok_or("the body is no JSON, or names a key twice")?;
    let translated = anthropic::translate(&parsed, System::Merged, thinking);
    translated.map(|translated| translated.body.to_string().into()).map_err(|error| error.to_string())
}

fn as_chat(parts: &mut request::Parts) {
    let mut uri = std::mem::take(&mut parts.uri).into_parts();
    uri.path_and_query = Some(PathAndQuery::from_static(Route::Chat.path()));
    parts.uri = Uri::from_parts(uri).unwrap_or_else(|_| Uri::from_static(Route::Chat.path()));
    for name in [CONTENT_LENGTH, TRANSFER_ENCODING] {
        parts.headers.remove(name);
    }
    sign(&mut parts.headers);
}

/// Chats take a key as a bearer token.
fn sign(headers: &mut HeaderMap) {
    let Some(key) = headers.remove(API_KEY) else { return };
    let bearer = [b"Bearer ", key.as_bytes()].concat();
    if let Ok(mut bearer) = HeaderValue::from_bytes(&bearer) {
        bearer.set_sensitive(true);
        headers.entry(AUTHORIZATION).or_insert(bearer);
    }
}

fn broken(error: BoxError) -> Body {
    StreamBody::new(stream::once(std::future::ready(Err::<Frame<Bytes>, _>(error)))).boxed_unsync()
}

/// The answer to a chat as an answer of the Messages API.
pub(crate) async fn leave(response: Response<Body>, memory: &Arc<Memory>) -> Response<Body> {
    let (mut parts, body) = response.into_parts();
    parts.headers.remove(CONTENT_LENGTH);
    let seed = random::fresh_seed();
    if parts.status.is_success() && headers::is_event_stream(&parts.headers) {
        let (decoder, events) = (Decoder::default(), Events::new(seed));
        return Response::from_parts(parts, Translating { body, decoder, events }.boxed_unsync());
    }
    let answer = match gather(body, ANSWER_BYTES, memory).await {
        Ok(Gathered::Whole(bytes)) => serde_json::from_slice::<Value>(&bytes).ok(),
        Ok(Gathered::Part(..)) | Err(_) => None,
    };
    let whole = answer.as_ref().filter(|_| parts.status.is_success());
    let (status, value) = match (whole.and_then(|chat| anthropic::message(chat, seed)), parts.status) {
        (Some(message), status) => (status, message),
        (None, status) if status.is_success() => {
            let words = "the backend's answer is no chat, or calls a tool with broken arguments";
            (StatusCode::BAD_GATEWAY, anthropic::error(None, words))
        }
        (None, status) => (status, anthropic::error(answer.as_ref(), "the backend refused the request")),
    };
    let written = json_response(status, &value);
    parts.status = status;
    parts.headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Response::from_parts(parts, written.into_body())
}

/// A stream of a chat's events, read as those of a message.
struct Translating {
    body: Body,
    decoder: Decoder,
    events: Events,
}

impl http_body::Body for Translating {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = self.get_mut();
        loop {
            let frame = match std::task::ready!(Pin::new(&mut this.body).poll_frame(cx)) {
                Some(Ok(frame)) => frame,
                end => return Poll::Ready(end),
            };
            let data = match frame.into_data() {
                Ok(data) => data,
                Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
            };
            let mut out = Vec::new();
            for message in this.decoder.push(&data)? {
                this.events.push(&message.data, &mut out);
            }
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
            assert!(!headers.contains_key(API_KEY));
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
        assert!(parts.headers.is_empty());
    }
}
