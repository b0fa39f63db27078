//! Faults of the store, by kind.

use std::io;
use std::time::Duration;

use redis::RedisError;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// No connection, or it broke.
    Connect,
    /// No answer in time.
    Timeout,
    /// The login was refused, or one is required.
    Password,
    /// It has no memory for a value.
    Full,
    /// It refused a command for another reason.
    Refused,
    /// Sidecars of another version use it.
    Version,
    /// An answer or an entry cannot be read.
    Answer,
}

impl FaultKind {
    pub const ALL: [Self; 7] = [
        Self::Connect,
        Self::Timeout,
        Self::Password,
        Self::Full,
        Self::Refused,
        Self::Version,
        Self::Answer,
    ];

    /// The name in metrics and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Connect => "connect",
            Self::Timeout => "timeout",
            Self::Password => "password",
            Self::Full => "full",
            Self::Refused => "refused",
            Self::Version => "version",
            Self::Answer => "answer",
        }
    }

    /// Its index in [`Self::ALL`].
    pub const fn index(self) -> usize {
        self as usize
    }

    /// The kind of a server's error reply, by its first word.
    fn of_reply(code: &str) -> Self {
        match code {
            "NOAUTH" | "WRONGPASS" | "NOPERM" => Self::Password,
            "OOM" | "MISCONF" => Self::Full,
            _ => Self::Refused,
        }
    }
}

/// A fault of the store.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{cause}")]
pub struct Fault {
    pub kind: FaultKind,
    /// The cause, for the operator; never a password.
    pub cause: String,
}

impl Fault {
    /// There was no answer within `limit`.
    pub fn timeout(limit: Duration) -> Self {
        Self { kind: FaultKind::Timeout, cause: format!("no answer within {} s", limit.as_secs()) }
    }

    /// An answer could not be read.
    pub fn answer(cause: impl Into<String>) -> Self {
        Self { kind: FaultKind::Answer, cause: cause.into() }
    }

    /// There is no connection.
    pub fn connect(cause: &dyn std::fmt::Display) -> Self {
        Self { kind: FaultKind::Connect, cause: cause.to_string() }
    }
}

impl From<RedisError> for Fault {
    fn from(error: RedisError) -> Self {
        // Of several commands sent together the first that was refused.
        let several = error.clone().into_server_errors();
        let first = several.as_ref().and_then(|errors| errors.first()).map(|(_, error)| error.code());
        let kind = match error.code().or(first) {
            Some(code) => FaultKind::of_reply(code),
            None if error.kind() == redis::ErrorKind::AuthenticationFailed => FaultKind::Password,
            None if error.is_timeout() => FaultKind::Timeout,
            None if error.is_io_error() => FaultKind::Connect,
            None => FaultKind::Answer,
        };
        Self { kind, cause: error.to_string() }
    }
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Self {
        Self::connect(&error)
    }
}
