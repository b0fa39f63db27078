//! One mapping of causes to the errors that clients see, in the shape of the OpenAI API.

use std::convert::Infallible;
use std::panic::AssertUnwindSafe;

use futures_util::FutureExt;
use http::header::RETRY_AFTER;
use http::{HeaderValue, Response, StatusCode};

use foretell_net::fleet::{REQUEST_TIMEOUT, SendError, SendErrorKind};
use foretell_net::http::answer::{error_body, json_response};
use foretell_net::http::body::Body;
use foretell_net::http::request::Silent;
use foretell_observe::Record;
use foretell_wire::translation::Untranslated;

/// `Retry-After` of a request refused for lack of memory, seconds.
const RETRY_AFTER_MEMORY: HeaderValue = HeaderValue::from_static("1");

/// Cause of an error answer by Foretell itself. A backend's answers are never changed.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The backend gave no answer.
    #[error(transparent)]
    Send(#[from] SendError),
    /// There is no replica to send the request to.
    #[error("no backend is configured, or no address of it is known")]
    NoBackend,
    /// A `CONNECT` request: Foretell is no forward proxy.
    #[error("CONNECT is not served here")]
    Connect,
    /// More than one tenant is named.
    #[error("the request names more than one tenant")]
    TenantTwice,
    /// A trusted peer names a tenant by other bytes than UTF-8.
    #[error("the tenant's name is not UTF-8")]
    TenantNotUtf8,
    /// A request of another API that no chat request can express.
    #[error(transparent)]
    Untranslated(Untranslated),
    /// The body is larger than `limits.passthrough_body`.
    #[error("the request body has more than {limit} bytes")]
    BodyTooLarge { limit: u64 },
    /// The client's body ended early.
    #[error("the request body ended early")]
    BodyBroken,
    /// The client's body stalled.
    #[error(transparent)]
    BodySilent(Silent),
    /// Twice `limits.memory` is in use, or the limit is and the request cannot be passed on unread.
    #[error("memory is short; retry later")]
    Memory,
    /// The backend switched protocols without an `Upgrade` request.
    #[error("backend `{backend}` switched protocols unasked")]
    UnaskedUpgrade { backend: String },
    /// The backend's stream broke off, and nothing could go on from there.
    #[error("the backend broke off")]
    BrokeOff,
    /// Another process, or another model, answers at the backend's address than the one that began
    /// this answer.
    #[error("another engine answers at the backend's address than the one that began this answer")]
    Changed,
    /// Nothing came from the backend in the middle of its answer, and nothing could go on from
    /// there.
    #[error("the backend went silent")]
    WentSilent,
    /// The session runner failed before anything was sent.
    #[error("the request could not be answered")]
    Internal,
}

impl Failure {
    /// Records it as the cause of the request's end.
    pub fn record_in(&self, record: &mut Record) {
        if self.is_unreachable() {
            record.unreachable(self.to_string());
        } else {
            record.failed(self.to_string());
        }
    }

    /// True if no replica has answered.
    fn is_unreachable(&self) -> bool {
        match self {
            Self::Send(error) => error.kind() != SendErrorKind::Request,
            Self::NoBackend => true,
            Self::Connect
            | Self::TenantTwice
            | Self::TenantNotUtf8
            | Self::Untranslated(_)
            | Self::BodyTooLarge { .. }
            | Self::BodyBroken
            | Self::BodySilent(_)
            | Self::Memory
            | Self::UnaskedUpgrade { .. }
            | Self::BrokeOff
            | Self::Changed
            | Self::WentSilent
            | Self::Internal => false,
        }
    }

    pub fn status(&self) -> StatusCode {
        match self {
            Self::Send(error) => error.status(),
            Self::NoBackend | Self::BrokeOff | Self::Changed | Self::UnaskedUpgrade { .. } => {
                StatusCode::BAD_GATEWAY
            }
            Self::WentSilent => StatusCode::GATEWAY_TIMEOUT,
            Self::Connect => StatusCode::METHOD_NOT_ALLOWED,
            Self::BodyTooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            Self::BodyBroken | Self::TenantTwice | Self::TenantNotUtf8 | Self::Untranslated(_) => {
                StatusCode::BAD_REQUEST
            }
            Self::BodySilent(_) => StatusCode::REQUEST_TIMEOUT,
            Self::Memory => StatusCode::SERVICE_UNAVAILABLE,
            Self::Internal => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// The `code` of the error body.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Send(error) => error.code(),
            Self::NoBackend => "no_backend",
            Self::Connect => "method_not_allowed",
            Self::TenantTwice => "tenant_twice",
            Self::TenantNotUtf8 => "tenant_not_utf8",
            Self::Untranslated(_) => "not_translated",
            Self::BodyTooLarge { .. } => "body_too_large",
            Self::BodyBroken => "bad_request_body",
            Self::BodySilent(_) => REQUEST_TIMEOUT,
            Self::Memory => "memory",
            Self::UnaskedUpgrade { .. } => "backend_protocol",
            Self::BrokeOff => "backend_broke_off",
            Self::Changed => SendErrorKind::Changed.code(),
            Self::WentSilent => SendErrorKind::Timeout.code(),
            Self::Internal => "internal_error",
        }
    }

    /// The failure for an error of reading the client's body: [`Self::BodySilent`] or
    /// [`Self::BodyBroken`].
    pub fn of_body(error: &(dyn std::error::Error + 'static)) -> Self {
        error.downcast_ref().copied().map_or(Self::BodyBroken, Self::BodySilent)
    }

    /// The HTTP answer: status, error body, and `Retry-After` for [`Self::Memory`].
    pub fn response(&self) -> Response<Body> {
        let mut response = json_response(self.status(), &self.body());
        if matches!(self, Self::Memory) {
            response.headers_mut().insert(RETRY_AFTER, RETRY_AFTER_MEMORY);
        }
        response
    }

    /// The error body, in the shape of the OpenAI API.
    pub fn body(&self) -> serde_json::Value {
        let member = match self {
            Self::Untranslated(untranslated) => Some(untranslated.path()),
            _ => None,
        };
        error_body(self.status(), &self.to_string(), member, self.code())
    }
}

/// Layer (for `map_future`) behind which a panic costs its request alone, and not the connection
/// with all that is on it.
pub async fn shielded(
    answer: impl Future<Output = Result<Response<Body>, Infallible>>,
) -> Result<Response<Body>, Infallible> {
    AssertUnwindSafe(answer).catch_unwind().await.unwrap_or_else(|_| {
        tracing::error!("a request panicked");
        Ok(Failure::Internal.response())
    })
}
