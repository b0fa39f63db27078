//! Settings of a policy: drafters, draft lengths, acceptance rule and limits. The defaults here are
//! the documented ones.

use std::time::Duration;

use foretell_core::control::{MARGIN, STAY};
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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
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
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gamma {
    /// Maximum draft tokens of a round.
    pub max: u32,
    /// Speculate at every token with at most this many draft tokens, whatever gain is predicted
    /// (for tests); `None`: the controller chooses.
    pub fixed: Option<u32>,
    /// Predicted gain over plain decoding required to start speculating, as a share (0.10 = 10 %).
    pub margin: f64,
    /// Predicted gain over plain decoding required to continue speculating, as a share.
    pub stay: f64,
}

/// Limits beyond which sessions decode plainly for a while.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gates {
    /// Maximum requests waiting in the engine, without Foretell's.
    pub waiting: u32,
    /// Maximum share of the engine's KV cache in use, 0 to 1.
    pub kv: f64,
    /// Maximum age of the engine's last load report.
    pub stale: Duration,
    /// Minimum accepted ÷ drafted of the first tokens of drafts, 0 to 1, where no gain is
    /// predicted.
    pub acceptance: f64,
    /// Maximum of time per token with speculation ÷ that of the control group: the gate closes when
    /// the ratio is certainly above it.
    pub control: f64,
    /// Longest pause in the client's stream that a round may cause, or two plain tokens' time if
    /// that is longer.
    pub max_gap: Duration,
    /// Maximum ratio of the times to first tokens with drafts in flight and without; 20 ms more are
    /// always allowed.
    pub first_token: f64,
    /// Time that the `control` gate stays closed when it closes for the first time.
    pub reprobe: Duration,
}

/// The control group: a share of the requests is only decoded plainly, for comparison.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Holdback {
    /// Share of requests at the start, 0 to 1; it falls as the comparison becomes certain.
    pub start: f64,
    /// Minimum share of requests, 0 to 1.
    pub floor: f64,
}

impl Default for Gamma {
    fn default() -> Self {
        Self { max: GAMMA_MAX as u32, fixed: None, margin: MARGIN, stay: STAY }
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
        Self { start: 0.2, floor: 0.01 }
    }
}
