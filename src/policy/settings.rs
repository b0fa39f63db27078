//! What a policy file says: who drafts, how far, by which rule, and when not. Defaults are those of the documentation.

use std::time::Duration;

/// A drafter of a policy.
#[derive(Clone, Debug, PartialEq)]
pub enum Drafter {
    /// The longest recent match in the request's own context.
    PromptLookup {
        /// Shortest match, tokens.
        ngram_min: u32,
        /// Longest match, tokens.
        ngram_max: u32,
    },
    /// Frequencies of earlier outputs.
    Suffix {
        /// Whose outputs.
        scope: Scope,
    },
    /// The operator's phrases.
    Phrasebook {
        /// After the trigger comes the continuation.
        phrases: Vec<(String, String)>,
    },
    /// Successors that verdicts have shown.
    Recycling,
    /// The client's own prediction.
    Prediction,
    /// A local model.
    Model {
        /// Its name in the process file.
        model: String,
        /// How its vocabulary relates to the target's.
        vocabulary: Vocabulary,
    },
}

impl Drafter {
    /// The name of its kind.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::PromptLookup { .. } => "prompt_lookup",
            Self::Suffix { .. } => "suffix",
            Self::Phrasebook { .. } => "phrasebook",
            Self::Recycling => "recycling",
            Self::Prediction => "prediction",
            Self::Model { .. } => "model",
        }
    }
}

/// Whose outputs a suffix drafter learns from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scope {
    /// The request's own.
    #[default]
    Request,
    /// The tenant's.
    Tenant,
    /// Everybody's.
    Global,
}

/// How the vocabulary of a drafter model relates to the target's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Vocabulary {
    /// Found out by the fingerprints.
    #[default]
    Auto,
    /// The same.
    Same,
    /// Translated by text.
    Slem,
    /// Translated by common tokens.
    Tli,
}

/// How far to leap.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gamma {
    /// Most draft tokens in one round.
    pub max: u32,
    /// Leap at every token event with at most this many, whatever is predicted.
    pub fixed: Option<u32>,
    /// Gain that must be expected to begin.
    pub margin: f64,
    /// Gain that must be expected to go on.
    pub stay: f64,
}

/// When a draft token is accepted.
#[derive(Clone, Debug, PartialEq)]
pub struct Accept {
    /// The rule.
    pub rule: Rule,
    /// How much a lossy rule may relax.
    pub tolerance: Tolerance,
    /// Bound on the total variation of a whole output.
    pub max_drift: Option<f64>,
    /// Working limit on the mean per token.
    pub max_drift_rate: f64,
}

/// An accept rule.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    /// Nothing but what the target would have said.
    Exact,
    /// Relaxed, as published.
    Ears,
    /// Relaxed where the draft token is likely enough.
    EarsGated {
        /// Least share of the most likely token's probability.
        kappa: f64,
    },
    /// Relaxed by a factor.
    EarsScaled,
    /// Typical acceptance.
    Typical {
        /// Threshold on the probability.
        epsilon: f64,
        /// Threshold on the entropy.
        delta: f64,
    },
    /// Deferred acceptance.
    Fly,
}

impl Rule {
    /// The name in files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Ears => "ears",
            Self::EarsGated { .. } => "ears_gated",
            Self::EarsScaled => "ears_scaled",
            Self::Typical { .. } => "typical",
            Self::Fly => "fly",
        }
    }
}

/// How much a lossy rule may relax: the product of two curves, and a bound.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tolerance {
    /// Points (temperature, tolerance), rising.
    pub temperature: Vec<(f64, f64)>,
    /// Points (load, factor), rising.
    pub load: Vec<(f64, f64)>,
    /// The most.
    pub max: f64,
}

/// Live reasons not to leap.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gates {
    /// Most waiting requests of the engine.
    pub waiting: u32,
    /// Highest use of its KV cache.
    pub kv: f64,
    /// Oldest load signal.
    pub stale: Duration,
    /// Least accepted ÷ drafted.
    pub acceptance: f64,
    /// Highest time per token ÷ that of the control group.
    pub latency: f64,
    /// Longest silence that a leap may cause.
    pub max_gap: Duration,
    /// First retry after a gate has closed.
    pub reprobe: Duration,
}

/// The control group: a share of the requests rides.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Holdback {
    /// At first.
    pub start: f64,
    /// In the end.
    pub floor: f64,
}

impl Default for Gamma {
    fn default() -> Self {
        Self { max: 8, fixed: None, margin: 0.10, stay: 0.05 }
    }
}

impl Default for Accept {
    fn default() -> Self {
        Self { rule: Rule::Exact, tolerance: Tolerance::default(), max_drift: None, max_drift_rate: 0.02 }
    }
}

impl Default for Gates {
    fn default() -> Self {
        Self {
            waiting: 0,
            kv: 0.9,
            stale: Duration::from_secs(2),
            acceptance: 0.2,
            latency: 1.02,
            max_gap: Duration::from_millis(500),
            reprobe: Duration::from_secs(30),
        }
    }
}

impl Default for Holdback {
    fn default() -> Self {
        Self { start: 0.2, floor: 0.01 }
    }
}
