//! The one reason that a request's record carries.

use super::{PlainReason, RelayReason};

/// Reason for which a request was not speculated on, or not to the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// A session decoded plainly.
    Plain(PlainReason),
    /// The request was relayed.
    Relay(RelayReason),
}

impl Reason {
    /// `plain` or `relayed`: the kind of request that it is a reason for.
    pub const fn kind(self) -> &'static str {
        match self {
            Self::Plain(_) => "plain",
            Self::Relay(_) => "relayed",
        }
    }

    /// The name in headers, metrics and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plain(reason) => reason.name(),
            Self::Relay(reason) => reason.name(),
        }
    }

    /// The reason in plain words.
    pub const fn words(self) -> &'static str {
        match self {
            Self::Plain(reason) => reason.words(),
            Self::Relay(reason) => reason.words(),
        }
    }
}

impl From<PlainReason> for Reason {
    fn from(reason: PlainReason) -> Self {
        Self::Plain(reason)
    }
}

impl From<RelayReason> for Reason {
    fn from(reason: RelayReason) -> Self {
        Self::Relay(reason)
    }
}
