//! The drafts service, which engines with Foretell's plug-in ask at every step.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::forms::{FileMode, UnixSocket};
use foretell_policy::form::{As, Maybe};

/// The drafts service for engines that run Foretell's plug-in (deploy/plugins).
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Drafts {
    /// Unix socket of the service; null: no service.
    #[serde(with = "Maybe::<UnixSocket>")]
    pub listen: Option<PathBuf>,
    /// Permissions of the socket, octal: who may write to it may ask for drafts.
    #[serde(with = "As::<FileMode>")]
    pub mode: u32,
    /// Drafts of requests that did not come through Foretell.
    pub unknown: UnknownRows,
}

impl Default for Drafts {
    fn default() -> Self {
        Self { listen: None, mode: 0o660, unknown: UnknownRows::default() }
    }
}

/// Drafts of requests that did not come through Foretell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum UnknownRows {
    /// From their text alone.
    #[default]
    Lookups,
    /// None.
    None,
}
