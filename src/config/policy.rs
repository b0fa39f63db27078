//! A policy: which requests, which drafters, which bounds.

mod file;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use http::HeaderMap;

use super::problem::Problem;
use super::values::{Glob, Revision};
use crate::openai::Route;

pub use file::{Placed, parse};

/// The policy that is there when no file is.
pub const DEFAULT: &str = include_str!("../../policies/default.yaml");

/// What a policy lets its requests do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PolicyMode {
    /// Bypass.
    Off,
    /// Ride, and draft in the shadow.
    Shadow,
    /// Ride, and draft nothing.
    Ride,
    /// Leap where it pays.
    #[default]
    Auto,
}

impl PolicyMode {
    /// All, with their names in files.
    pub const NAMES: &'static [(&'static str, Self)] =
        &[("off", Self::Off), ("shadow", Self::Shadow), ("ride", Self::Ride), ("auto", Self::Auto)];

    /// The name in files and in the admin interface.
    pub fn name(self) -> &'static str {
        super::process::name_of(Self::NAMES, self)
    }
}

/// A validated policy.
#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    /// Its name.
    pub name: String,
    /// The identity of the file it came from.
    pub revision: Revision,
    /// What its requests may do.
    pub mode: PolicyMode,
    /// Which requests are its own.
    pub matcher: Match,
    /// Who proposes, in the order of the file.
    pub drafters: Vec<Drafter>,
    /// How far to leap.
    pub gamma: Gamma,
    /// When a draft token is accepted.
    pub accept: Accept,
    /// Live reasons not to leap.
    pub gates: Gates,
    /// The control group.
    pub holdback: Holdback,
}

/// Which requests are a policy's own: every field must hold, and within a field one entry is enough; `None`
/// holds for all.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Match {
    /// Patterns of model ids.
    pub models: Option<Vec<Glob>>,
    /// Patterns of backend names.
    pub backends: Option<Vec<Glob>>,
    /// Tenants.
    pub tenants: Option<Vec<String>>,
    /// Routes.
    pub routes: Option<Vec<Route>>,
    /// Headers, each with the values of which it must have one.
    pub headers: Vec<(String, Vec<String>)>,
    /// Effective temperature, inclusive.
    pub temperature: Bounds,
    /// Tokens of the prompt, inclusive.
    pub prompt_tokens: Bounds,
}

/// An interval with both ends in it; `None` is open.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Bounds {
    /// The least value.
    pub min: Option<f64>,
    /// The greatest value.
    pub max: Option<f64>,
}

impl Bounds {
    /// Whether `value` is in it.
    pub fn contains(&self, value: f64) -> bool {
        self.min.is_none_or(|min| value >= min) && self.max.is_none_or(|max| value <= max)
    }
}

/// What a policy looks at.
#[derive(Clone, Copy, Debug)]
pub struct Facts<'a> {
    /// The model id as sent.
    pub model: &'a str,
    /// The name of the backend.
    pub backend: &'a str,
    /// The tenant, if there is one.
    pub tenant: Option<&'a str>,
    /// The route.
    pub route: Route,
    /// The client's headers.
    pub headers: &'a HeaderMap,
    /// Effective temperature.
    pub temperature: f64,
    /// Tokens of the prompt, perhaps estimated.
    pub prompt_tokens: usize,
}

/// A field of `match` that does not hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// The field.
    pub field: &'static str,
    /// What the policy wants.
    pub wanted: String,
    /// What the request has.
    pub got: String,
}

impl Match {
    /// Every field that does not hold for this request.
    pub fn mismatches(&self, facts: &Facts<'_>) -> Vec<Mismatch> {
        let globs = |field, wanted: &Option<Vec<Glob>>, got: &str| {
            let wanted = wanted.as_ref().filter(|globs| !globs.iter().any(|glob| glob.matches(got)))?;
            let wanted = wanted.iter().map(Glob::as_str).collect::<Vec<_>>().join("|");
            Some(Mismatch { field, wanted, got: got.to_owned() })
        };
        let bounds = |field, wanted: Bounds, got: f64| {
            let end = |end: Option<f64>| end.map_or(String::new(), |end| end.to_string());
            let wanted_text = || format!("{}..={}", end(wanted.min), end(wanted.max));
            (!wanted.contains(got)).then(|| Mismatch { field, wanted: wanted_text(), got: got.to_string() })
        };
        let fields = [
            globs("models", &self.models, facts.model),
            globs("backends", &self.backends, facts.backend),
            self.tenant_mismatch(facts.tenant),
            self.route_mismatch(facts.route),
            bounds("temperature", self.temperature, facts.temperature),
            bounds("prompt_tokens", self.prompt_tokens, facts.prompt_tokens as f64),
        ];
        fields.into_iter().flatten().chain(self.header_mismatches(facts.headers)).collect()
    }

    fn tenant_mismatch(&self, tenant: Option<&str>) -> Option<Mismatch> {
        let wanted = self.tenants.as_ref()?;
        let own = tenant.is_some_and(|tenant| wanted.iter().any(|wanted| wanted == tenant));
        let got = tenant.unwrap_or("none").to_owned();
        (!own).then(|| Mismatch { field: "tenants", wanted: wanted.join("|"), got })
    }

    fn route_mismatch(&self, route: Route) -> Option<Mismatch> {
        let wanted = self.routes.as_ref().filter(|routes| !routes.contains(&route))?;
        let wanted = wanted.iter().map(|route| route.name()).collect::<Vec<_>>().join("|");
        Some(Mismatch { field: "routes", wanted, got: route.name().to_owned() })
    }

    fn header_mismatches(&self, headers: &HeaderMap) -> Vec<Mismatch> {
        let mismatch = |(name, wanted): &(String, Vec<String>)| {
            let got: Vec<_> = headers.get_all(name).iter().filter_map(|value| value.to_str().ok()).collect();
            let own = got.iter().any(|value| wanted.iter().any(|wanted| wanted == value));
            let told = if got.is_empty() { "none".to_owned() } else { got.join(", ") };
            let wanted = format!("{name}: {}", wanted.join("|"));
            (!own).then_some(Mismatch { field: "headers", wanted, got: told })
        };
        self.headers.iter().filter_map(mismatch).collect()
    }
}

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
    /// Whether this version has it; one that it has not drafts nothing, and `check` says so.
    pub const fn is_built(&self) -> bool {
        match self {
            Self::PromptLookup { .. }
            | Self::Model { vocabulary: Vocabulary::Auto | Vocabulary::Same, .. } => true,
            Self::Suffix { .. }
            | Self::Phrasebook { .. }
            | Self::Recycling
            | Self::Prediction
            | Self::Model { .. } => false,
        }
    }

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

impl Policy {
    /// `name@revision`.
    pub fn label(&self) -> String {
        format!("{}@{}", self.name, self.revision)
    }

    /// Whether this request is the policy's own.
    pub fn matches(&self, facts: &Facts<'_>) -> bool {
        self.matcher.mismatches(facts).is_empty()
    }
}

/// All policies, in the order of their file names.
#[derive(Clone, Debug, Default)]
pub struct PolicySet {
    policies: Vec<Arc<Policy>>,
}

impl PolicySet {
    /// In this order.
    pub fn new(policies: Vec<Policy>) -> Self {
        Self { policies: policies.into_iter().map(Arc::new).collect() }
    }

    /// The one policy that is there when no file is.
    ///
    /// # Errors
    /// Never, as a test shows; the type is that of every other policy file.
    pub fn built_in() -> Result<Self, Vec<Problem>> {
        parse("default.yaml", DEFAULT).map(|placed| Self::new(vec![placed.policy]))
    }

    /// The first policy whose own this request is.
    pub fn first_match(&self, facts: &Facts<'_>) -> Option<&Arc<Policy>> {
        self.policies.iter().find(|policy| policy.matches(facts))
    }

    /// All of them.
    pub fn policies(&self) -> &[Arc<Policy>] {
        &self.policies
    }

    /// The drafter models that some policy names.
    pub fn models(&self) -> impl Iterator<Item = &str> {
        self.policies.iter().flat_map(|policy| &policy.drafters).filter_map(|drafter| match drafter {
            Drafter::Model { model, .. } => Some(model.as_str()),
            _ => None,
        })
    }
}

/// Whether a folder entry is a policy file.
pub fn is_policy_file(path: &Path) -> bool {
    path.is_file() && path.extension().is_some_and(|extension| extension == "yaml" || extension == "yml")
}
