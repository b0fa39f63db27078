//! Error answers in the format that OpenAI's clients expect.

use http::StatusCode;
use serde_json::json;

/// Error of a refused or failed request, as sent to the client.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Refusal {
    /// The body is not a JSON object.
    #[error("The request body is not a valid JSON object: {0}")]
    NotJson(String),
    /// A field has a value that is not allowed.
    #[error("Invalid value for '{param}': {message}")]
    Invalid {
        /// Name of the request field.
        param: String,
        /// The expected and the given value, in words.
        message: String,
    },
    /// A required field is missing.
    #[error("Missing required parameter: '{0}'")]
    Missing(&'static str),
    /// The field is not known to this server.
    #[error("Unknown parameter: '{0}'")]
    Unknown(String),
    /// The field is known, but this server does not support it.
    #[error("Parameter '{param}' is not supported by this server: {message}")]
    Unsupported {
        /// Name of the request field.
        param: String,
        /// The values that would be accepted, in words.
        message: &'static str,
    },
    /// Prompt and output together exceed the model's context.
    #[error(
        "This model's maximum context length is {context} tokens. However, you requested {requested} tokens \
         ({prompt} in the prompt, {output} for the output). Please reduce the length of the prompt or of the output."
    )]
    TooLong {
        /// Maximum number of tokens of prompt and output together.
        context: usize,
        /// Tokens requested in total.
        requested: usize,
        prompt: usize,
        /// Requested output tokens.
        output: usize,
        /// Name of the request field that the error names.
        param: &'static str,
    },
    /// The server does not serve this model.
    #[error("The model `{0}` does not exist.")]
    NoModel(String),
    /// The path is not known.
    #[error("Not found: {0}")]
    NoRoute(String),
    /// The path exists, but not with this method.
    #[error("Method not allowed: {0}")]
    Method(String),
    /// The body exceeds this limit, bytes.
    #[error("The request body is longer than {0} bytes")]
    BodyTooLong(usize),
    /// The body ended early.
    #[error("The request body could not be read: {0}")]
    Unreadable(String),
    /// A run of the model failed, or its thread has ended.
    #[error("{0}")]
    Fault(String),
}

impl Refusal {
    /// HTTP status of the answer.
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

    /// The JSON body `{"error":{"message","type","param","code"}}`; `code` is the HTTP status.
    pub fn body(&self) -> Vec<u8> {
        let error = json!({"error": {
            "message": self.to_string(), "type": self.kind(), "param": self.param(), "code": self.status().as_u16(),
        }});
        error.to_string().into_bytes()
    }
}
