//! Selection of the eligible requests; the others are passed through.
//!
//! A candidate's body is read while it stays within the limits of size and memory. The part that
//! was read is forwarded first, so a request that turns out not to be a candidate is passed through
//! unchanged.

use std::sync::Arc;

use bytes::Bytes;
use http::{Method, Uri};
use http_body_util::BodyExt;
use serde::Deserialize;

use foretell_net::http::body::{Body, BoxError};
use foretell_net::http::gather::{Gathered, Stopped, gather};
use foretell_net::http::memory::Memory;
use foretell_net::http::request::RequestBody;
use foretell_wire::openai::{Api, Route};

/// The completion route of a request.
pub fn candidate(method: &Method, uri: &Uri) -> Option<Route> {
    if *method != Method::POST {
        return None;
    }
    [Route::Completions, Route::Chat].into_iter().find(|route| route.path() == uri.path())
}

/// The API of a request for text, if that API is only passed through.
pub fn passthrough_api(method: &Method, uri: &Uri) -> Option<Api> {
    Api::PASSTHROUGH.into_iter().find(|api| *method == Method::POST && api.path() == uri.path())
}

/// True if sending a request twice has no effect but the work: reads, and completions.
pub fn is_repeatable(method: &Method, uri: &Uri) -> bool {
    method.is_safe() || candidate(method, uri).is_some()
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
    Complete(Bytes),
    /// The part that was read, and the rest.
    Unread(Body, Stopped),
    /// The client's body broke off, or stalled.
    Broken(BoxError),
}

/// Reads `body` up to `limit` bytes, if there is memory for it.
pub async fn read(body: RequestBody, limit: usize, memory: &Arc<Memory>) -> Read {
    match gather(body, limit, memory).await {
        Ok(Gathered::Complete(bytes)) => Read::Complete(bytes),
        Ok(Gathered::Partial(body, stopped)) => Read::Unread(body.boxed_unsync(), stopped),
        Err(error) => Read::Broken(error),
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
    #[case("POST", "/v1/completions?x", true)]
    #[case("POST", "/v1/embeddings", false)]
    #[case("POST", "/v1/files", false)]
    #[case("POST", "/v1/load_lora_adapter", false)]
    #[case("DELETE", "/v1/files/7", false)]
    fn only_requests_without_effects_are_repeatable(
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
