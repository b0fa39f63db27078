//! The one reason that a request's record carries.

use super::{PassthroughReason, PlainReason};

/// Reason for which a request was not speculated on, or not to the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// A session decoded plainly.
    Plain(PlainReason),
    /// The request was passed through.
    Passthrough(PassthroughReason),
}

impl Reason {
    /// `plain` or `passthrough`: the kind of request that it is a reason for.
    pub const fn kind(self) -> &'static str {
        match self {
            Self::Plain(_) => "plain",
            Self::Passthrough(_) => "passthrough",
        }
    }

    /// The name in headers, metrics and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plain(reason) => reason.name(),
            Self::Passthrough(reason) => reason.name(),
        }
    }

    /// The reason in plain words.
    pub const fn words(self) -> &'static str {
        match self {
            Self::Plain(reason) => reason.words(),
            Self::Passthrough(reason) => reason.words(),
        }
    }
}

impl From<PlainReason> for Reason {
    fn from(reason: PlainReason) -> Self {
        Self::Plain(reason)
    }
}

impl From<PassthroughReason> for Reason {
    fn from(reason: PassthroughReason) -> Self {
        Self::Passthrough(reason)
    }
}
