//! Reasons that a backend was not recognised.

use hyper::StatusCode;

use foretell_core::words::PassthroughReason;
use foretell_engines::Dialect;

/// Reason that a backend was not recognised.
#[derive(Debug, thiserror::Error)]
pub enum Unknown {
    /// It cannot be reached.
    #[error("not reachable: {0}")]
    Unreachable(String),
    /// It does not answer in time. A known engine is still the same: it is busy, or hangs, which
    /// the fleet notices by itself.
    #[error("not reachable: {0}")]
    Late(String),
    /// It could not be checked that a single engine answers.
    #[error("{0}")]
    Unchecked(String),
    /// It requires an API key, or another one than was sent; with the status of its answer.
    #[error("{0}: an API key is required")]
    Locked(StatusCode),
    /// It answers, but as none of the engines that Foretell recognises.
    #[error("{0}")]
    Stranger(String),
    /// An engine that is known and has no verification method, and the page on which it reports its
    /// load.
    #[error("requests to {} are only passed through here", .0.name())]
    PassedThrough(Dialect, Option<&'static str>),
    /// It answers, but not as an engine that supports a verification method.
    #[error("not an engine that can verify: {1}")]
    Foreign(PassthroughReason, String),
}

impl Unknown {
    pub(super) fn foreign(why: impl Into<String>) -> Self {
        Self::Foreign(PassthroughReason::NoVerifyMethod, why.into())
    }

    pub(super) fn tokenizer(why: impl Into<String>) -> Self {
        Self::Foreign(PassthroughReason::Tokenizer, why.into())
    }
}
