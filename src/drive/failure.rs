//! One mapping of causes to the errors that clients see, in the shape of the OpenAI API.

use http::{Response, StatusCode};

use crate::fleet::{SendError, SendErrorKind};
use crate::http::answer::{error_body, json_response};
use crate::http::body::Body;

/// Why Foretell itself answers a request with an error. What a backend answers is never changed.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The backend gave no answer.
    #[error(transparent)]
    Send(#[from] SendError),
    /// There is no replica that could be asked.
    #[error("no backend is configured, or no address of it is known")]
    NoBackend,
    /// The method is for forward proxies.
    #[error("CONNECT is not served here")]
    Connect,
    /// `limits.relay_body` is passed.
    #[error("the request body has more than {limit} bytes")]
    BodyTooLarge {
        /// The configured limit.
        limit: u64,
    },
    /// The client's body ended early.
    #[error("the request body ended early")]
    BodyBroken,
    /// The backend changed protocols without having been asked to.
    #[error("backend `{backend}` switched protocols unasked")]
    UnaskedUpgrade {
        /// The backend's name.
        backend: String,
    },
    /// The backend's stream broke off, and nothing could go on from there.
    #[error("the backend broke off")]
    BrokeOff,
    /// Nothing came from the backend in the middle of its answer, and nothing could go on from there.
    #[error("the backend went silent")]
    WentSilent,
    /// The backend sent several choices where one was asked for, too late to pass them on.
    #[error("the backend sent several choices where one was asked for")]
    ManyChoices,
    /// The driver of a session broke down before anything was sent.
    #[error("the request could not be answered")]
    Internal,
}

impl Failure {
    /// Whether no replica has answered.
    pub fn is_unreachable(&self) -> bool {
        match self {
            Self::Send(error) => error.kind() != SendErrorKind::Request,
            Self::NoBackend => true,
            Self::Connect
            | Self::BodyTooLarge { .. }
            | Self::BodyBroken
            | Self::UnaskedUpgrade { .. }
            | Self::BrokeOff
            | Self::WentSilent
            | Self::Internal => false,
        }
    }

    /// The HTTP status.
    pub fn status(&self) -> StatusCode {
        match self {
            Self::Send(error) => error.status(),
            Self::NoBackend | Self::BrokeOff | Self::ManyChoices | Self::UnaskedUpgrade { .. } => {
                StatusCode::BAD_GATEWAY
            }
            Self::WentSilent => StatusCode::GATEWAY_TIMEOUT,
            Self::Connect => StatusCode::METHOD_NOT_ALLOWED,
            Self::BodyTooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            Self::BodyBroken => StatusCode::BAD_REQUEST,
            Self::Internal => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// The `code` of the error body: one word per cause.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Send(error) => error.kind().code(),
            Self::NoBackend => "no_backend",
            Self::Connect => "method_not_allowed",
            Self::BodyTooLarge { .. } => "body_too_large",
            Self::BodyBroken => "bad_request_body",
            Self::UnaskedUpgrade { .. } => "backend_protocol",
            Self::BrokeOff => "backend_broke_off",
            Self::ManyChoices => "backend_choices",
            Self::WentSilent => SendErrorKind::Timeout.code(),
            Self::Internal => "internal_error",
        }
    }

    /// The whole answer.
    pub fn response(&self) -> Response<Body> {
        json_response(self.status(), &self.body())
    }

    /// What the answer says.
    pub fn body(&self) -> serde_json::Value {
        error_body(self.status(), &self.to_string(), None, self.code())
    }
}
