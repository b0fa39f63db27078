//! Answers that Foretell itself writes: JSON, and errors in the format of the OpenAI API.

use http::header::CONTENT_TYPE;
use http::{HeaderValue, Response, StatusCode};
use serde_json::json;

use super::body::{Body, full};

/// The JSON `{"error":{"message","type","param","code"}}`; `type` follows from `status`.
pub fn error_body(status: StatusCode, message: &str, param: Option<&str>, code: &str) -> serde_json::Value {
    let kind = match status.as_u16() {
        401 => "authentication_error",
        404 => "not_found_error",
        429 => "rate_limit_error",
        400..=499 => "invalid_request_error",
        _ => "server_error",
    };
    json!({ "error": { "message": message, "type": kind, "param": param, "code": code } })
}

/// An error answer of Foretell itself.
pub fn error_response(status: StatusCode, message: &str, param: Option<&str>, code: &str) -> Response<Body> {
    json_response(status, &error_body(status, message, param, code))
}

/// A JSON answer of Foretell itself.
pub fn json_response(status: StatusCode, value: &serde_json::Value) -> Response<Body> {
    let mut response = Response::new(full(value.to_string()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
