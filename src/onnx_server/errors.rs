//! Refusals in the shape that OpenAI's clients know.

use http::StatusCode;
use serde_json::json;

/// A request that is not answered as it was meant.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Refusal {
    /// The body is not a JSON object.
    #[error("The request body is not a valid JSON object: {0}")]
    NotJson(String),
    /// A field has a value that it cannot have.
    #[error("Invalid value for '{param}': {message}")]
    Invalid {
        /// Name of the request field.
        param: String,
        /// What was expected, and what came.
        message: String,
    },
    /// A field is missing.
    #[error("Missing required parameter: '{0}'")]
    Missing(&'static str),
    /// A field that this server does not know.
    #[error("Unknown parameter: '{0}'")]
    Unknown(String),
    /// A field that this server knows and does not do.
    #[error("Parameter '{param}' is not supported by this server: {message}")]
    Unsupported {
        /// Name of the request field.
        param: String,
        /// What would be accepted.
        message: &'static str,
    },
    /// Prompt and output together are longer than the model's context.
    #[error(
        "This model's maximum context length is {context} tokens. However, you requested {requested} tokens \
         ({prompt} in the prompt, {output} for the output). Please reduce the length of the prompt or of the output."
    )]
    TooLong {
        /// Most tokens of prompt and output.
        context: usize,
        /// Tokens asked for in all.
        requested: usize,
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens of output asked for.
        output: usize,
        /// The field to blame.
        param: &'static str,
    },
    /// No such model here.
    #[error("The model `{0}` does not exist.")]
    NoModel(String),
    /// The path has no handler.
    #[error("Not found: {0}")]
    NoRoute(String),
    /// The route exists, this method does not.
    #[error("Method not allowed: {0}")]
    Method(String),
    /// The body is longer than this server reads.
    #[error("The request body is longer than {0} bytes")]
    BodyTooLong(usize),
    /// The body broke off.
    #[error("The request body could not be read: {0}")]
    Unreadable(String),
    /// A run of the model failed.
    #[error("{0}")]
    Fault(String),
}

impl Refusal {
    /// The HTTP status.
    pub fn status(&self) -> StatusCode {
        match self {
            Self::NotJson(_)
            | Self::Invalid { .. }
            | Self::Missing(_)
            | Self::Unknown(_)
            | Self::Unsupported { .. }
            | Self::TooLong { .. }
            | Self::Unreadable(_) => StatusCode::BAD_REQUEST,
            Self::NoModel(_) | Self::NoRoute(_) => StatusCode::NOT_FOUND,
            Self::Method(_) => StatusCode::METHOD_NOT_ALLOWED,
            Self::BodyTooLong(_) => StatusCode::PAYLOAD_TOO_LARGE,
            Self::Fault(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// The value of `error.type`.
    fn kind(&self) -> &'static str {
        match self {
            Self::NoModel(_) | Self::NoRoute(_) => "NotFoundError",
            Self::Fault(_) => "InternalServerError",
            _ => "BadRequestError",
        }
    }

    fn param(&self) -> Option<&str> {
        match self {
            Self::Invalid { param, .. } | Self::Unknown(param) | Self::Unsupported { param, .. } => {
                Some(param)
            }
            Self::Missing(param) | Self::TooLong { param, .. } => Some(param),
            Self::NoModel(_) => Some("model"),
            _ => None,
        }
    }

    /// The body: `{"error":{"message","type","param","code"}}`, code being the status.
    pub fn body(&self) -> Vec<u8> {
        let error = json!({"error": {
            "message": self.to_string(), "type": self.kind(), "param": self.param(), "code": self.status().as_u16(),
        }});
        error.to_string().into_bytes()
    }
}
