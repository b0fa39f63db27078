//! Header fields of the answer to a served request: the backend's, and Foretell's path, policy and
//! reason.

use http::Response;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};

use super::sink::TRAILERS;
use foretell_net::http::headers;

/// Stops a reverse proxy in front from buffering a stream.
const ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");
/// Value of `x-foretell-path` in the head of a stream, which is sent before it is known whether the
/// request is speculated on.
pub const ELIGIBLE: &str = "eligible";

/// True if a backend's answer is a successful event stream.
pub fn is_stream<B>(response: &Response<B>) -> bool {
    response.status().is_success() && headers::is_event_stream(response.headers())
}

/// Adds `x-foretell-path`, `x-foretell-policy` and, if given, `x-foretell-reason`.
pub fn with<B>(
    mut response: Response<B>,
    policy: &str,
    path: &'static str,
    reason: Option<&'static str>,
) -> Response<B> {
    let fields = response.headers_mut();
    fields.insert(headers::PATH, HeaderValue::from_static(path));
    if let Ok(policy) = HeaderValue::from_str(policy) {
        fields.insert(headers::POLICY, policy);
    }
    if let Some(reason) = reason {
        fields.insert(headers::REASON, HeaderValue::from_static(reason));
    }
    response
}

/// The header fields of an answer that is passed on unchanged.
pub fn passed_on(mut fields: HeaderMap) -> HeaderMap {
    headers::from_backend(&mut fields);
    fields
}

/// The backend's header fields, without those that describe its body.
fn without_body(fields: HeaderMap) -> HeaderMap {
    let mut fields = passed_on(fields);
    fields.remove(header::CONTENT_LENGTH);
    fields.remove(header::TRAILER);
    fields
}

/// The header fields of a JSON answer that is assembled here, of this `content-type`.
pub fn of_json(fields: HeaderMap, json_type: &'static str) -> HeaderMap {
    let mut fields = without_body(fields);
    fields.insert(header::CONTENT_TYPE, HeaderValue::from_static(json_type));
    // Servers send these with streams only.
    for name in [header::CACHE_CONTROL, ACCEL_BUFFERING] {
        fields.remove(name);
    }
    fields
}

/// The header fields of a stream that is written here.
pub fn of_stream(fields: HeaderMap, trailers: bool) -> HeaderMap {
    let mut fields = without_body(fields);
    if trailers {
        fields.insert(header::TRAILER, HeaderValue::from_static(TRAILERS));
    }
    fields
}
