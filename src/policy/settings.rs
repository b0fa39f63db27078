//! Settings of a policy: drafters, draft lengths, acceptance rule and limits. The defaults here are
//! the documented ones.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::form::{As, Delay, Period};
use foretell_core::control::MARGIN;
pub use foretell_core::draft::Scope;
use foretell_core::draft::{LookupSpec, Source};
use foretell_core::session::GAMMA_MAX;

/// A drafter of a policy.
#[derive(Clone, Debug, PartialEq)]
pub enum Drafter {
    /// A lookup drafter, which needs no model.
    Lookup(LookupSpec),
    /// A drafter model in this process.
    Model {
        /// Its name under `drafters` of the config file.
        model: String,
        /// Relation of its vocabulary to the target's.
        vocabulary: Vocabulary,
        /// True if its drafts may repeat texts of other tenants that it was trained on.
        shares: bool,
    },
}

impl Drafter {
    /// Name of the kind in files.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Lookup(spec) => spec.source().name(),
            Self::Model { .. } => Source::Model.name(),
        }
    }
}

/// Relation of a drafter model's vocabulary to the target's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Vocabulary {
    /// Decided by comparing the fingerprints of both; if they differ, `slem`.
    #[default]
    Auto,
    /// The same; a model whose fingerprint differs does not draft.
    Same,
    /// Drafts are translated as text (string-level exact match, Universal Assisted Generation).
    Slem,
}

/// Draft lengths and the gain required for speculation.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Gamma {
    /// Maximum draft tokens of a round.
    #[schemars(range(min = 1, max = GAMMA_MAX))]
    pub max: u32,
    /// Speculate at every token with at most this many draft tokens, at any cost: for tests and
    /// sweeps.
    #[schemars(range(min = 1, max = GAMMA_MAX))]
    pub fixed: Option<u32>,
    /// Predicted gain over plain decoding that is required to start speculating (0.10 is 10 %),
    /// and half of it to go on.
    #[schemars(range(min = 0, max = 1))]
    pub margin: f64,
}

/// Limits beyond which sessions decode plainly for a while.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Gates {
    /// Maximum requests waiting in the engine, without Foretell's.
    #[schemars(range(min = 0, max = 1_000_000))]
    pub waiting: u32,
    /// Maximum share of the engine's KV cache in use.
    #[schemars(range(min = 0, max = 1))]
    pub kv: f64,
    /// Maximum age of the engine's last load report.
    #[serde(with = "As::<Period>")]
    pub stale: Duration,
    /// Minimum accepted ÷ drafted of the first tokens of drafts, where no gain is predicted.
    #[schemars(range(min = 0, max = 1))]
    pub acceptance: f64,
    /// Time per token of speculated requests ÷ that of the control group: closes when it is
    /// certainly above.
    #[schemars(range(min = 1, max = 10))]
    pub control: f64,
    /// Longest pause in a stream that a round may cause, or two plain tokens' time if that is
    /// longer.
    #[serde(with = "As::<Period>")]
    pub max_gap: Duration,
    /// Time to first tokens with drafts in flight ÷ without: where more, by over 20 ms, fewer draft
    /// tokens are sent.
    #[schemars(range(min = 1, max = 10))]
    pub first_token: f64,
    /// Time that the `control` gate stays closed when it closes for the first time.
    #[serde(with = "As::<Delay>")]
    pub reprobe: Duration,
}

/// The control group: a share of the requests is only decoded plainly, for comparison.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Holdback {
    /// Greatest share. It is smaller where speculation is fast, so that the group costs 2.4 % of
    /// the speed, and falls as the comparison becomes certain.
    #[schemars(range(min = 0, max = 1))]
    pub start: f64,
    /// Minimum share.
    #[schemars(range(min = 0, max = 1))]
    pub floor: f64,
}

impl Default for Gamma {
    fn default() -> Self {
        Self { max: GAMMA_MAX as u32, fixed: None, margin: MARGIN }
    }
}

impl Default for Gates {
    fn default() -> Self {
        Self {
            waiting: 0,
            kv: 0.9,
            stale: Duration::from_secs(2),
            acceptance: 0.2,
            control: 1.02,
            max_gap: Duration::from_millis(500),
            first_token: 1.10,
            reprobe: Duration::from_secs(30),
        }
    }
}

impl Default for Holdback {
    fn default() -> Self {
        Self { start: 0.2, floor: 0.002 }
    }
}
