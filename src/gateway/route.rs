//! Which requests could be speculated, and why the others are relayed.
//!
//! A candidate's body is read as long as it stays small and plain. Whatever was read is forwarded first, so a
//! request that turns out to be no candidate is relayed as if nobody had looked.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use http::header::CONTENT_ENCODING;
use http::{HeaderMap, Method, Uri};
use http_body::{Body as _, Frame, SizeHint};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde::Deserialize;

use crate::http::body::{Body, BoxError};
use crate::openai::Route;

/// The completion route that a request asks for.
pub fn candidate(method: &Method, uri: &Uri) -> Option<Route> {
    if *method != Method::POST {
        return None;
    }
    [Route::Completions, Route::Chat].into_iter().find(|route| route.path() == uri.path())
}

/// Whether answering a request twice is the same as once, but for the work: what only reads, and what only
/// computes an answer from the request.
pub fn is_repeatable(method: &Method, uri: &Uri) -> bool {
    const COMPUTED: [&str; 5] =
        ["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/detokenize"];
    method.is_safe() || *method == Method::POST && COMPUTED.contains(&uri.path())
}

/// Whether the body is compressed.
pub fn is_encoded(headers: &HeaderMap) -> bool {
    let encodings = headers.get_all(CONTENT_ENCODING).into_iter();
    encodings.map(http::HeaderValue::as_bytes).any(|coding| !coding.eq_ignore_ascii_case(b"identity"))
}

/// The model that a body names, if it is JSON that names one.
pub fn model_of(body: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct Named {
        model: String,
    }
    serde_json::from_slice::<Named>(body).ok().map(|named| named.model)
}

/// A request's body, after an attempt to read it.
pub enum Read {
    /// All of it.
    Whole(Bytes),
    /// Too large, or with trailers: what was read, and what is still to come.
    Replay(Replay),
    /// The client broke off.
    Broken,
}

/// Reads `body` up to `limit` bytes.
pub async fn read(mut body: Incoming, limit: usize) -> Read {
    if body.size_hint().lower() > limit as u64 {
        return Read::Replay(Replay { read: VecDeque::new(), rest: body });
    }
    let mut read: VecDeque<Frame<Bytes>> = VecDeque::new();
    let mut size = 0;
    while let Some(frame) = body.frame().await {
        let Ok(frame) = frame else { return Read::Broken };
        size += frame.data_ref().map_or(0, Bytes::len);
        let plain = frame.is_data();
        read.push_back(frame);
        if size > limit || !plain {
            return Read::Replay(Replay { read, rest: body });
        }
    }
    Read::Whole(joined(read))
}

fn joined(frames: VecDeque<Frame<Bytes>>) -> Bytes {
    let mut pieces = frames.into_iter().filter_map(|frame| frame.into_data().ok());
    let Some(first) = pieces.next() else { return Bytes::new() };
    let Some(second) = pieces.next() else { return first };
    let mut all = BytesMut::from(&first[..]);
    all.extend_from_slice(&second);
    for piece in pieces {
        all.extend_from_slice(&piece);
    }
    all.freeze()
}

/// A body of which a part has been read already: gives that part again, then the rest.
pub struct Replay {
    read: VecDeque<Frame<Bytes>>,
    rest: Incoming,
}

impl Replay {
    /// As a body to send.
    pub fn into_body(self) -> Body {
        self.boxed_unsync()
    }
}

impl http_body::Body for Replay {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match self.read.pop_front() {
            Some(frame) => Poll::Ready(Some(Ok(frame))),
            None => Pin::new(&mut self.rest).poll_frame(cx).map_err(Into::into),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.read.is_empty() && self.rest.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let read: usize = self.read.iter().filter_map(|frame| frame.data_ref().map(Bytes::len)).sum();
        let rest = self.rest.size_hint();
        let mut hint = SizeHint::new();
        hint.set_lower(rest.lower() + read as u64);
        if let Some(upper) = rest.upper() {
            hint.set_upper(upper + read as u64);
        }
        hint
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[rstest::rstest]
    #[case("POST", "/v1/completions", Some(Route::Completions))]
    #[case("POST", "/v1/chat/completions?x=1", Some(Route::Chat))]
    #[case("GET", "/v1/completions", None)]
    #[case("POST", "/v1/completions/", None)]
    #[case("POST", "/v1/embeddings", None)]
    fn only_the_two_routes_are_candidates(
        #[case] method: &str,
        #[case] uri: &str,
        #[case] wanted: Option<Route>,
    ) {
        assert_eq!(candidate(&method.parse().unwrap(), &uri.parse().unwrap()), wanted);
    }

    #[rstest::rstest]
    #[case("GET", "/v1/models", true)]
    #[case("POST", "/v1/chat/completions", true)]
    #[case("POST", "/v1/embeddings?x", true)]
    #[case("POST", "/v1/files", false)]
    #[case("POST", "/v1/load_lora_adapter", false)]
    #[case("DELETE", "/v1/files/7", false)]
    fn only_what_changes_nothing_may_be_done_twice(
        #[case] method: &str,
        #[case] uri: &str,
        #[case] wanted: bool,
    ) {
        assert_eq!(is_repeatable(&method.parse().unwrap(), &uri.parse().unwrap()), wanted);
    }

    #[test]
    fn the_model_is_found_wherever_it_stands_and_only_as_text() {
        assert_eq!(model_of(br#"{"prompt":"x","model":"m\u0031"}"#).as_deref(), Some("m1"));
        assert_eq!(model_of(br#"{"model":3}"#), None);
        assert_eq!(model_of(b"not json"), None);
    }
}
