//! How a draft is verified, and what the backend said.

use crate::units::TokenId;

/// How a draft is put to the backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Plan {
    /// One prompt per node in one call, one sampled token each.
    FanOut,
    /// The tree itself, to a target that knows trees (`POST /v1/verify`).
    Tree,
}

impl Plan {
    /// Every plan.
    pub const ALL: [Self; 2] = [Self::FanOut, Self::Tree];

    /// Its place in [`Plan::ALL`].
    pub const fn index(self) -> usize {
        match self {
            Self::FanOut => 0,
            Self::Tree => 1,
        }
    }

    /// The name in files, metrics and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::FanOut => "fan_out",
            Self::Tree => "tree",
        }
    }
}

/// What the target says at one place: row 0 follows the context, row `i + 1` follows node `i`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Row {
    /// The token that the target sampled there, with the request's own sampling.
    pub sample: TokenId,
    /// Its processed log-probability, where the backend tells it.
    pub logprob: Option<f32>,
}

/// The backend's answer to one verify call: one row more than the draft has nodes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Verdict {
    /// Row 0 follows the context, row `i + 1` follows node `i`.
    pub rows: Vec<Row>,
    /// Tokens that the backend really computed, where it tells; otherwise unknown.
    pub computed: Option<u32>,
}
