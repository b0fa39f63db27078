//! How a draft is verified, and what the backend answers.

use crate::units::TokenId;

/// Verification method: how a draft is sent to the backend.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    Hash,
    PartialOrd,
    Ord,
    serde::Serialize,
    serde::Deserialize,
    schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum VerifyMethod {
    /// One prompt per node, one sampled token each.
    FanOut,
    /// The tree itself, to a target that verifies trees (`POST /v1/verify`).
    Tree,
    /// One prompt with the draft at its end, and the log-probabilities of that tail.
    Score,
}

impl VerifyMethod {
    /// Every verification method.
    pub const ALL: [Self; 3] = [Self::FanOut, Self::Tree, Self::Score];

    /// Its index in [`VerifyMethod::ALL`].
    pub const fn index(self) -> usize {
        self as usize
    }

    /// The shape of the drafts that it verifies.
    pub const fn shape(self) -> Shape {
        match self {
            Self::FanOut | Self::Tree => Shape::Tree,
            Self::Score => Shape::Chain,
        }
    }

    /// Sequences that the engine computes for a round with `nodes` nodes.
    pub const fn sequences(self, nodes: usize) -> usize {
        match self {
            Self::FanOut => nodes + 1,
            Self::Tree | Self::Score => 1,
        }
    }

    /// Tokens of all prompts of a round whose draft is a chain of `nodes` nodes, behind `context`
    /// tokens of context.
    pub const fn prompt_tokens(self, context: usize, nodes: usize) -> usize {
        match self {
            Self::FanOut => (nodes + 1) * context + nodes * (nodes + 1) / 2,
            Self::Tree | Self::Score => context + nodes,
        }
    }

    /// The name in files, metrics and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::FanOut => "fan_out",
            Self::Tree => "tree",
            Self::Score => "score",
        }
    }
}

/// The shape of the drafts that a method verifies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    Tree,
    /// A chain: the likeliest path.
    Chain,
}

/// The distribution of the token at one position, processed by the request's sampling parameters
/// (temperature, penalties, truncation), in the part that the engine reports.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Dist {
    /// Tokens and their probabilities, most probable first; where `slack` is not zero, their
    /// minimum probabilities.
    pub top: Vec<(TokenId, f64)>,
    /// No other token has any probability, so that a token can be drawn from it.
    pub complete: bool,
    /// Relative uncertainty: a probability may be larger than listed by this share of itself. 0.1
    /// where only the share of the unlisted tokens is not known and may be a tenth; zero where the
    /// probabilities are known.
    pub slack: f64,
}

/// The target's result at one position: row 0 follows the context, row `i + 1` follows node `i`. A
/// row with neither a sample nor a complete distribution is undecided.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Row {
    /// The token that the target sampled at this position, with the request's sampling; `None` if
    /// it sampled none, or it is not known.
    pub sample: Option<TokenId>,
    /// The distribution that the sample was drawn from, or is to be drawn from; `None` if the
    /// engine does not report it.
    pub dist: Option<Dist>,
    /// The probability of the node that this row follows, under the row of its parent; `None` if
    /// not known.
    pub draft_p: Option<f64>,
    /// Entropy of the complete distribution, nats; `None` if not known.
    pub entropy: Option<f64>,
    /// The backend reports that the sample ends the text.
    pub ends: bool,
    /// The text that the backend sent for the sample; `None` if it sent none.
    pub text: Option<String>,
}

impl Row {
    /// A sample without any further information.
    pub fn of(sample: TokenId) -> Self {
        Self { sample: Some(sample), ..Self::default() }
    }

    /// A complete distribution from which nothing has been drawn yet.
    pub fn undrawn(top: Vec<(TokenId, f64)>) -> Self {
        Self { dist: Some(Dist { top, complete: true, slack: 0.0 }), ..Self::default() }
    }
}

/// The backend's result for one verify request: one row more than the draft has nodes, or fewer
/// where the last ones could not be decided. The choice of omitted or undecided rows may depend on
/// the context, the draft and distributions, never on a sample.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct VerifyResult {
    /// Row 0 follows the context, row `i + 1` follows node `i`.
    pub rows: Vec<Row>,
    /// Tokens that the backend computed for the request; `None` if it does not report that.
    pub computed: Option<u32>,
    /// How the draft was sent to the backend, the key under which its cost is noted; `None` where
    /// no request was made.
    pub put: Option<Put>,
    /// The backend's proposal for what follows; `None` if it made none.
    pub proposal: Option<Proposal>,
}

/// Tokens that the backend itself proposes: a head drafted them from the hidden state behind the
/// last token of a context.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Proposal {
    /// The last tokens of that context. Behind others it says nothing.
    pub behind: Vec<TokenId>,
    /// For each next position the likeliest tokens with their probabilities, best first. Each
    /// position follows the first token of the one before it.
    pub steps: Vec<Vec<(TokenId, f32)>>,
}

/// How a draft was sent to the backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Put {
    /// The verification method.
    pub method: VerifyMethod,
    /// Number of the draft's nodes that were sent, from the first on.
    pub nodes: usize,
}
