//! Parses a policy file.

use std::fmt::Display;
use std::sync::{Arc, LazyLock};

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::Value as Json;

use crate::at::At;
use crate::forms::PolicyName;
use crate::problem::{Problem, Refusal};
use crate::problems::Problems;
use crate::{check, schema, yaml};
use foretell_core::draft::{LookupSpec, Ngram, Phrases};
use foretell_policy::form::As;
use foretell_policy::{
    Accept, Bounds, Corpus, Drafter, Gamma, Gates, Holdback, Match, Policy, PolicyMode, Revision, Rule,
    Scope, Tolerance, Vocabulary,
};

/// A policy with the lines needed to report conflicts with other files.
#[derive(Clone, Debug)]
pub struct ParsedPolicy {
    /// The policy.
    pub policy: Policy,
    /// The line of its name.
    pub name_line: u64,
    /// The line of each drafter.
    pub drafter_lines: Vec<u64>,
    /// Settings that have no effect or are not meant for production.
    pub warnings: Vec<String>,
}

/// Reads a policy file.
///
/// # Errors
/// Every problem in the file, in the order of its lines.
pub fn parse(file: &str, source: &str) -> Result<ParsedPolicy, Vec<Problem>> {
    let mut root = yaml::parse(file, source)?;
    let problems = Problems::new(file);
    let settings: PolicyFile = check::read(settings(), &mut root, &problems);
    let at = At::root(&root, &problems);
    let policy = settings.settle(&at, Revision::of(source.as_bytes()));
    let drafter_lines = at.key("drafters").items().iter().map(At::line).collect();
    let (name_line, warnings) = (at.line_of("name"), problems.warnings());
    let problems = problems.into_vec();
    if problems.is_empty() {
        Ok(ParsedPolicy { policy, name_line, drafter_lines, warnings })
    } else {
        Err(problems)
    }
}

/// The JSON Schema of policy files, draft 2020-12, which editors use for completion and checks.
///
/// Conditions that a schema cannot express (bounds in the wrong order, names shared by two files,
/// drafters that the config file does not declare) are left to `foretell check`.
pub fn schema() -> Json {
    schema::published(settings().clone(), false)
}

/// The schema by which the file is read.
pub(crate) fn settings() -> &'static Json {
    static SETTINGS: LazyLock<Json> = LazyLock::new(|| {
        let says = "The requests that it applies to, drafters and limits. The first file, by name, that \
                    matches a request applies.";
        schema::of::<PolicyFile>("Foretell policy", says)
    });
    &SETTINGS
}

/// The settings of a policy file.
#[derive(Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["name"]))]
struct PolicyFile {
    /// Unique; answers, metrics and logs call the policy NAME@REVISION.
    #[serde(with = "As::<PolicyName>")]
    name: String,
    /// off: pass requests through. shadow: decode plainly, and score drafts without sending them.
    /// plain: no drafting. auto: speculate where it pays.
    #[schemars(extend("hints" = { "observe": "shadow (observe is a mode of the config file)" }))]
    mode: PolicyMode,
    /// Conditions; every field must match, and of a list one entry.
    #[serde(rename = "match")]
    matcher: Match,
    /// Drafters, in order of preference. Default: prompt_lookup, suffix, phrasebook and head.
    drafters: Vec<DrafterKind>,
    /// Draft lengths (gamma is `num_speculative_tokens` in vLLM), and the predicted gain that
    /// speculation requires.
    gamma: Gamma,
    /// The rule by which draft tokens are accepted.
    accept: AcceptRule,
    /// Limits beyond which requests are decoded plainly for a while.
    gates: Gates,
    /// The control group: a share of the requests is always decoded plainly, for comparison.
    holdback: Holdback,
    /// Uses of its texts.
    corpus: Corpus,
}

impl Default for PolicyFile {
    fn default() -> Self {
        Self {
            name: String::new(),
            mode: PolicyMode::default(),
            matcher: Match::default(),
            drafters: vec![
                DrafterKind::PromptLookup { ngram: Ngram::default() },
                DrafterKind::Suffix { scope: Scope::Request, i_accept_sharing: false },
                DrafterKind::Phrasebook { schemas: true, phrases: None },
                DrafterKind::Head,
            ],
            gamma: Gamma::default(),
            accept: AcceptRule::Exact,
            gates: Gates::default(),
            holdback: Holdback::default(),
            corpus: Corpus::default(),
        }
    }
}

/// A drafter, as a file names it.
#[derive(Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum DrafterKind {
    /// Copies the tokens that followed the longest match of the last tokens in the request's own
    /// text.
    PromptLookup {
        /// Lengths of the match, tokens.
        #[serde(default)]
        ngram: Ngram,
    },
    /// Drafts the most frequent continuation of the current context, in this request and, by scope,
    /// in earlier ones.
    Suffix {
        /// The requests whose outputs it learns from.
        #[serde(default)]
        scope: Scope,
        /// Required for scope: global, which shares text between tenants.
        #[serde(default)]
        i_accept_sharing: bool,
    },
    /// Operator phrases (trigger, continuation), and JSON skeletons by schemas of the prompt or the
    /// request; at least one.
    Phrasebook {
        /// Draft keys, punctuation and only choices of objects whose schema, tool or example is in
        /// the prompt, or whose schema binds the output.
        #[serde(default = "yes")]
        schemas: bool,
        /// Triggers, each with the continuation that is drafted after it.
        #[serde(default)]
        phrases: Option<Vec<Phrase>>,
    },
    /// Drafts of a head on the target's hidden state, made by `foretell target` for a model that
    /// has one.
    Head,
    /// The client's own prediction; drafting resumes after an edit.
    Prediction,
    /// A language model in this process.
    Model {
        /// Its name under drafters of the config file.
        #[schemars(extend("allowed" = "a name under drafters of the config file"))]
        model: String,
        /// Relation of its vocabulary to the target's: same (a model with another vocabulary does
        /// not draft), slem (drafts are translated as text), auto (same if it is; else slem).
        #[serde(default)]
        vocabulary: Vocabulary,
        /// Required for a model that was trained on recorded texts of other tenants than the
        /// policy's one.
        #[serde(default)]
        i_accept_sharing: bool,
    },
}

const fn yes() -> bool {
    true
}

#[derive(Deserialize, JsonSchema)]
struct Phrase {
    /// Text after which it is drafted.
    trigger: String,
    /// Text that is drafted.
    continuation: String,
}

/// The accept rule, as a file names it; without a rule it is exact.
#[derive(Deserialize, JsonSchema)]
#[serde(tag = "rule", rename_all = "snake_case")]
#[schemars(extend("otherwise" = "exact"))]
enum AcceptRule {
    /// Only tokens that the target itself would have generated.
    Exact,
    /// A lossy rule: outputs may drift from the model's own, and each answer reports its drift.
    Ears {
        /// Minimum probability of the draft token ÷ that of the likeliest; 0 is as published.
        #[serde(default)]
        #[schemars(range(min = 0, max = 1))]
        kappa: f64,
        #[serde(flatten)]
        drift: Lossy,
    },
    /// A lossy rule: outputs may drift from the model's own, and each answer reports its drift.
    Typical {
        /// Threshold on the token's probability.
        #[serde(default = "epsilon")]
        #[schemars(range(min = 0, max = 1))]
        epsilon: f64,
        /// Factor of the threshold that depends on the entropy.
        #[serde(default = "delta")]
        #[schemars(range(min = 0, max = 1))]
        delta: f64,
        #[serde(flatten)]
        drift: Lossy,
    },
}

const fn epsilon() -> f64 {
    0.09
}

const fn delta() -> f64 {
    0.3
}

/// The limits of a lossy rule.
#[derive(Deserialize, JsonSchema)]
#[serde(default)]
struct Lossy {
    /// How far the rule is relaxed: the product of two curves, capped.
    tolerance: Tolerance,
    /// Drift (total variation) that is allowed per 100 output tokens, on average so far. It is
    /// spent where it saves most time.
    #[schemars(range(min = 0, max = 100))]
    drift_per_100_tokens: f64,
    /// Maximum drift of an output, spread over its expected length; null: only the limit above.
    #[schemars(range(min = 0, max = 1))]
    max_drift: Option<f64>,
}

impl Default for Lossy {
    fn default() -> Self {
        let Accept { tolerance, max_drift, drift_per_100_tokens, .. } = Accept::default();
        Self { tolerance, drift_per_100_tokens, max_drift }
    }
}

impl PolicyFile {
    /// The policy; what breaks a rule between settings is reported.
    fn settle(self, at: &At<'_>, revision: Revision) -> Policy {
        let Self { name, mode, mut matcher, drafters, gamma, accept, gates, mut holdback, corpus } = self;
        let matches = at.key("match");
        ordered(matcher.temperature, 2.0, &matches.key("temperature"));
        ordered(matcher.prompt_tokens, 1e9, &matches.key("prompt_tokens"));
        let headers = matcher.headers.into_iter();
        matcher.headers = headers.map(|(name, values)| (name.to_lowercase(), values)).collect();
        let items = at.key("drafters").items();
        let positions = items.iter().map(Some).chain(std::iter::repeat(None));
        let drafters = drafters.into_iter().zip(positions);
        let drafters = drafters.filter_map(|(drafter, item)| drafter.settle(item)).collect();
        if gamma.fixed.is_some() {
            at.key("gamma").warn("fixed", "speculates at any cost: it is for tests and sweeps");
        }
        let shares = at.key("holdback");
        if !shares.has("floor") {
            holdback.floor = holdback.floor.min(holdback.start);
        }
        if holdback.floor > holdback.start {
            let refusal = Refusal::new("above start", format!("0 to {}", holdback.start));
            shares.refuse("floor", refusal, holdback.floor.to_string());
        }
        let accept = accept.settle(&at.key("accept"));
        Policy { name, revision, mode, matcher, drafters, gamma, accept, gates, holdback, corpus }
    }
}

fn below_min(min: &dyn Display, max: &dyn Display) -> Refusal {
    Refusal::new("below min", format!("{min} to {max}"))
}

fn ordered(bounds: Bounds, most: f64, at: &At<'_>) {
    if let (Some(min), Some(max)) = (bounds.min, bounds.max)
        && min > max
    {
        at.refuse("max", below_min(&min, &most), max.to_string());
    }
}

impl DrafterKind {
    /// The drafter at `at`; `None` if it is refused. The default drafters have no position.
    fn settle(self, at: Option<&At<'_>>) -> Option<Drafter> {
        Some(Drafter::Lookup(match self {
            Self::PromptLookup { ngram } => LookupSpec::PromptLookup(settled(ngram, at)),
            Self::Suffix { scope, i_accept_sharing } => {
                if scope == Scope::Global && !i_accept_sharing {
                    let allowed = "request|tenant, or global with i_accept_sharing: true";
                    at?.refuse("scope", Refusal::new("shares text between tenants", allowed), "\"global\"");
                }
                LookupSpec::Suffix(scope)
            }
            Self::Phrasebook { schemas, phrases } => phrasebook(schemas, phrases, at)?,
            Self::Head => LookupSpec::Head,
            Self::Prediction => LookupSpec::Prediction,
            Self::Model { model, vocabulary, i_accept_sharing: shares } => {
                return Some(Drafter::Model { model, vocabulary, shares });
            }
        }))
    }
}

fn settled(mut ngram: Ngram, at: Option<&At<'_>>) -> Ngram {
    let Some(at) = at.map(|at| at.key("ngram")) else { return ngram };
    if !at.has("max") {
        ngram.max = ngram.max.max(ngram.min);
    }
    if ngram.min > ngram.max {
        at.refuse("max", below_min(&ngram.min, &64), ngram.max.to_string());
    }
    ngram
}

/// Phrases are optional only if the prompt's `schemas` are used.
fn phrasebook(schemas: bool, phrases: Option<Vec<Phrase>>, at: Option<&At<'_>>) -> Option<LookupSpec> {
    if phrases.is_none() && !schemas && at?.lacks("phrases") {
        let allowed = "a list of { trigger, continuation }, or schemas: true";
        at?.refuse("phrases", Refusal::new("missing", allowed), "nothing");
    }
    let texts = phrases.unwrap_or_default().into_iter().map(|phrase| (phrase.trigger, phrase.continuation));
    match Phrases::new(texts.collect()) {
        Ok(phrases) => Some(LookupSpec::Phrasebook { phrases: Arc::new(phrases), schemas }),
        Err(why) => {
            at?.refuse("phrases", Refusal::new("too large", "fewer or shorter triggers"), why);
            None
        }
    }
}

/// Warning of a lossy rule.
const LOSSY: &str = "is lossy: texts may drift from the model's own, within drift_per_100_tokens and \
                     max_drift, and each answer reports its drift";

impl AcceptRule {
    fn settle(self, at: &At<'_>) -> Accept {
        let (rule, drift) = match self {
            Self::Exact => return Accept::default(),
            Self::Ears { kappa, drift } => (Rule::Ears { kappa }, drift),
            Self::Typical { epsilon, delta, drift } => (Rule::Typical { epsilon, delta }, drift),
        };
        let Lossy { tolerance, max_drift, drift_per_100_tokens } = drift;
        let relaxed = at.key("tolerance");
        rising(&tolerance.temperature, 2, "temperature", &relaxed);
        rising(&tolerance.load, 1, "load", &relaxed);
        at.warn("rule", LOSSY);
        Accept { rule, tolerance, max_drift, drift_per_100_tokens }
    }
}

fn rising(curve: &[(f64, f64)], most: u32, key: &str, at: &At<'_>) {
    if !curve.windows(2).all(|pair| matches!(pair, [(a, _), (b, _)] if a < b)) {
        let allowed = format!("[[x, y], ...] with x rising from 0 to {most}, and y from 0 to 1");
        at.refuse(key, Refusal::new("not a curve", allowed), "a list");
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use foretell_core::draft::Source;

    #[test]
    fn every_drafter_can_be_configured_by_its_name() {
        let kinds = schema::of_value::<DrafterKind>();
        let named: BTreeSet<String> = schema::shapes(&kinds)
            .iter()
            .filter_map(schema::tag)
            .map(|(_, name)| schema::plain(name))
            .collect();
        assert_eq!(named, Source::ALL.iter().map(|source| source.name().to_owned()).collect());
    }
}
