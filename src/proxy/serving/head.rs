//! Header fields of the answer to a served request: the backend's, and Foretell's path, policy and
//! reason.

use http::Response;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};

use super::sink::TRAILERS;
use foretell_net::http::headers;
use foretell_observe::Finished;

/// Stops a reverse proxy in front from buffering a stream.
const ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");
/// Value of `x-foretell-path` in the head of a stream, which is sent before it is known whether the
/// request is speculated on.
const ELIGIBLE: &str = "eligible";

/// True if a backend's answer is a successful event stream.
pub fn is_stream<B>(response: &Response<B>) -> bool {
    response.status().is_success() && headers::is_event_stream(response.headers())
}

/// Adds path, reason, policy and parameter of the request as it was served so far.
pub fn name(fields: &mut HeaderMap, served: &Finished) {
    fields.insert(headers::PATH, HeaderValue::from_static(served.path.name()));
    if let Some(reason) = served.reason {
        fields.insert(headers::REASON, HeaderValue::from_static(reason.name()));
    }
    name_policy(fields, served.policy.as_deref());
    if let Some(parameter) = served.parameter.as_deref().and_then(headers::parameter) {
        fields.insert(headers::PARAMETER, parameter);
    }
}

/// Adds the policy, if one has decided about the request.
pub fn name_policy(fields: &mut HeaderMap, policy: Option<&str>) {
    if let Some(policy) = policy.and_then(|policy| HeaderValue::from_str(policy).ok()) {
        fields.insert(headers::POLICY, policy);
    }
}

/// As [`name`] for a stream: its path and reason are in its trailers.
pub fn name_eligible(fields: &mut HeaderMap) {
    fields.insert(headers::PATH, HeaderValue::from_static(ELIGIBLE));
    fields.remove(headers::REASON);
}

/// Declares the trailers of a stream, if it gets any.
pub fn declare_trailers(fields: &mut HeaderMap, trailers: bool) {
    if trailers {
        fields.insert(header::TRAILER, HeaderValue::from_static(TRAILERS));
    }
}

/// The backend's header fields, without those that describe its body.
fn without_body(mut fields: HeaderMap) -> HeaderMap {
    headers::from_backend(&mut fields);
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
    declare_trailers(&mut fields, trailers);
    fields
}
