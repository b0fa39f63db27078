//! Logging and tracing.

use http::Uri;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::forms::Origin;
use foretell_policy::form::Maybe;

/// Logging and tracing.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Observe {
    /// Format of the log; auto: text on a terminal, JSON elsewhere.
    pub log: LogFormat,
    /// Lowest level that is logged; libraries log at `info` at most.
    pub level: LogLevel,
    /// URL of a collector for traces by OTLP over HTTP.
    #[serde(with = "Maybe::<Origin>")]
    pub otlp: Option<Uri>,
    /// Share of the requests that have a line in the log and spans; failures always have a line.
    // Requests in a sampled trace of the client have both.
    #[schemars(range(min = 0, max = 1))]
    pub share: f64,
}

impl Default for Observe {
    fn default() -> Self {
        Self { log: LogFormat::default(), level: LogLevel::default(), otlp: None, share: 1.0 }
    }
}

/// Format of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LogFormat {
    /// Text on a terminal, JSON elsewhere.
    #[default]
    Auto,
    /// One JSON object per line.
    Json,
    /// Plain text for reading on a terminal.
    Text,
}

impl LogFormat {
    /// Every value with its name in files and flags.
    pub const NAMES: &'static [(&'static str, Self)] =
        &[("auto", Self::Auto), ("json", Self::Json), ("text", Self::Text)];
}

/// Lowest level that is logged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LogLevel {
    Error,
    Warn,
    #[default]
    Info,
    Debug,
    Trace,
}

impl LogLevel {
    /// Name in files and log filters.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warn => "warn",
            Self::Info => "info",
            Self::Debug => "debug",
            Self::Trace => "trace",
        }
    }
}
