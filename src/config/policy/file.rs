//! Parses a policy file.

use std::sync::Arc;

use serde_json::{Value as Json, json};

use crate::declared::Slot;
use crate::kind::{
    Kind, between, boolean, duration, form, number, period, ratio, text, whole, word, word_or_hint,
};
use crate::problem::{Problem, Problems, Refusal};
use crate::process::file::{HEADER_NAME, described, version};
use crate::read::{Item, Section};
use crate::yaml::{self, Node, Value};
use foretell_core::draft::{LookupSpec, Ngram, Phrases, Source};
use foretell_policy::{
    Accept, Bounds, Corpus, Drafter, Gamma, Gates, Glob, Holdback, Match, Policy, PolicyMode, Revision, Rule,
    Scope, Tolerance, Vocabulary,
};
use foretell_wire::openai::control_header::GAMMA_MAX;
use foretell_wire::openai::{Api, Route};

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
    let root = yaml::parse(file, source)?;
    let problems = Problems::new(file);
    let placed = read(&Item::root(&root, &problems), Revision::of(source.as_bytes()));
    let warnings = problems.warnings();
    match (problems.into_vec(), placed) {
        (none, Some(placed)) if none.is_empty() => Ok(ParsedPolicy { warnings, ..placed }),
        (some, _) => Err(some),
    }
}

/// The JSON Schema of policy files, draft 2020-12, which editors use for completion and checks.
///
/// Conditions that a schema cannot express (bounds in the wrong order, names shared by two files,
/// drafters that the config file does not declare) are left to `foretell check`.
pub fn schema() -> Json {
    let (empty, problems, slot) = (yaml::EMPTY, Problems::new("schema"), Slot::default());
    read(&Item::declaring(&empty, &problems, &slot), Revision::default());
    let says = "The requests that it applies to, drafters and limits. The first file, by name, that matches a request applies.";
    described(slot.schema(), "Foretell policy", says)
}

/// Modes of the config file, and their names in policies.
const MODE_HINTS: &[(&str, &str)] = &[("observe", "shadow (observe is a mode of the config file)")];

fn read(root: &Item<'_>, revision: Revision) -> Option<ParsedPolicy> {
    let mut top = root.section();
    version(&mut top);
    let name = "Unique; answers, metrics and logs call the policy NAME@REVISION.";
    let name = top.must("name", name, "a text", &self::name());
    let name_line = top.line("name");
    let mode = "off: pass requests through. shadow: decode plainly, and score drafts without sending them. plain: no drafting. auto: speculate where it pays.";
    let mode = top.or("mode", mode, PolicyMode::default(), &word_or_hint(PolicyMode::NAMES, MODE_HINTS));
    let matcher =
        matcher(top.section("match", "Conditions; every field must match, and of a list one entry."));
    let items = top
        .item(
            "drafters",
            "Drafters, in order of preference. Default: prompt_lookup, suffix, phrasebook and head.",
        )
        .map(|item| item.items());
    let lines = |items: &Vec<Item<'_>>| items.iter().map(|item| item.node.line).collect();
    let drafter_lines = items.as_ref().map_or_else(Vec::new, lines);
    let drafters = items.map_or_else(default_drafters, |items| items.iter().filter_map(drafter).collect());
    let gamma = gamma(top.section(
        "gamma",
        "Draft lengths (gamma is `num_speculative_tokens` in vLLM), and the predicted gain that speculation requires.",
    ));
    let accept = top
        .item("accept", "The rule by which draft tokens are accepted.")
        .map_or_else(Accept::default, |item| accept(&item));
    let gates = gates(top.section("gates", "Limits beyond which requests are decoded plainly for a while."));
    let holdback = holdback(top.section(
        "holdback",
        "The control group: a share of the requests is always decoded plainly, for comparison.",
    ));
    let corpus = corpus(top.section("corpus", "What becomes of its texts."));
    top.close();
    let name = name?;
    let policy = Policy { name, revision, mode, matcher, drafters, gamma, accept, gates, holdback, corpus };
    Some(ParsedPolicy { policy, name_line, drafter_lines, warnings: Vec::new() })
}

fn corpus(mut section: Section<'_>) -> Corpus {
    let record = "Record the tokens of eligible requests, for `foretell train`; needs `corpus.record` of the config file.";
    let corpus = Corpus { record: section.or("record", record, false, &boolean()) };
    section.close();
    corpus
}

/// A policy name. It is used in headers and metrics, so few characters are allowed.
fn name() -> Kind<String> {
    let good = |name: &str| {
        name.len() <= 64 && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
    };
    let refusal = || Refusal::new("not a name", "1 to 64 of A-Z a-z 0-9 . _ -");
    form("^[A-Za-z0-9._-]{1,64}$", refusal, move |name| good(name).then(|| name.to_owned()))
}

/// Values of `match.routes`.
const ROUTES: &[(&str, Api)] = &[
    ("completions", Api::Completion(Route::Completions)),
    ("chat", Api::Completion(Route::Chat)),
    ("messages", Api::Messages),
    ("responses", Api::Responses),
];

fn matcher(mut section: Section<'_>) -> Match {
    let glob = || {
        let read = |node: &Node| text().read(node).map(|pattern| Glob::new(&pattern));
        Kind::new(json!({ "type": "string", "minLength": 1 }), read)
    };
    let models = "Model ids as clients send them, with * and ? for any characters.";
    let prompt_tokens = "Length of the prompt, tokens; for a text prompt, a quarter of its bytes.";
    let matcher = Match {
        models: section.item("models", models).map(|item| item.list(&glob())),
        backends: section.item("backends", "Names of backends, with * and ?.").map(|item| item.list(&glob())),
        tenants: section
            .item("tenants", "Tenants, as determined by `tenant` of the config file.")
            .map(|item| item.list(&text())),
        routes: section.item("routes", "APIs that clients ask by.").map(|item| item.list(&word(ROUTES))),
        headers: section
            .item("headers", "Header names, each with its allowed values.")
            .map_or_else(Vec::new, |item| headers(&item)),
        temperature: bounds(
            section.section("temperature", "The effective temperature, the server's default included."),
            2.0,
        ),
        prompt_tokens: bounds(section.section("prompt_tokens", prompt_tokens), 1e9),
    };
    section.close();
    matcher
}

fn headers(item: &Item<'_>) -> Vec<(String, Vec<String>)> {
    if let Some(slot) = item.slot() {
        slot.with("propertyNames", json!({ "pattern": HEADER_NAME }));
    }
    let members = item.members().into_iter();
    members
        .filter_map(|(name, item)| {
            let parsed = http::HeaderName::from_bytes(name.as_bytes()).ok();
            if parsed.is_none() {
                let refusal = Refusal::new("not a header name", "a header name");
                item.refuse_as(refusal, format!("{name:?}"));
            }
            let values = item.list(&text());
            Some((parsed?.to_string(), values))
        })
        .collect()
}

fn bounds(mut section: Section<'_>, most: f64) -> Bounds {
    let bounds = Bounds {
        min: section.maybe("min", "Minimum, inclusive.", None, &number(0.0..=most)),
        max: section.maybe("max", "Maximum, inclusive.", None, &number(0.0..=most)),
    };
    if let (Some(min), Some(max)) = (bounds.min, bounds.max)
        && min > max
    {
        section.refuse("max", Refusal::new("below min", between(min, most)), &max.to_string());
    }
    section.close();
    bounds
}

/// Every kind of drafter, by its name in files.
const KINDS: &[(&str, Source)] = &[
    named(Source::PromptLookup),
    named(Source::Suffix),
    named(Source::Phrasebook),
    named(Source::Head),
    named(Source::Prediction),
    named(Source::Model),
];
const _: () = assert!(KINDS.len() == Source::ALL.len(), "every drafter can be configured");

const fn named(source: Source) -> (&'static str, Source) {
    (source.name(), source)
}

/// The meaning of a kind of drafter.
const fn says(kind: Source) -> &'static str {
    match kind {
        Source::PromptLookup => {
            "Copies the tokens that followed the longest match of the last tokens in the request's own text."
        }
        Source::Suffix => {
            "Drafts the most frequent continuation of the current context, in this request and, by scope, in earlier ones."
        }
        Source::Phrasebook => {
            "Operator phrases (trigger, continuation), and JSON skeletons by schemas of the prompt or the request; at least one."
        }
        Source::Head => {
            "Drafts of a head on the target's hidden state, made by `foretell target` for a model that has one."
        }
        Source::Prediction => "The client's own prediction; drafting resumes after an edit.",
        Source::Model => "A language model in this process.",
    }
}

fn drafter(item: &Item<'_>) -> Option<Drafter> {
    item.variants("kind", KINDS, says, |kind, section| {
        let lookup = match kind {
            Source::PromptLookup => {
                LookupSpec::PromptLookup(ngram(section.section("ngram", "Lengths of the match, tokens.")))
            }
            Source::Suffix => LookupSpec::Suffix(scope(section)),
            Source::Phrasebook => phrasebook(section)?,
            Source::Head => LookupSpec::Head,
            Source::Prediction => LookupSpec::Prediction,
            Source::Model => return model(section),
        };
        Some(Drafter::Lookup(lookup))
    })
}

/// The drafters of a policy that names none.
fn default_drafters() -> Vec<Drafter> {
    let lookups = [
        LookupSpec::PromptLookup(Ngram { min: 2, max: 8 }),
        LookupSpec::Suffix(Scope::Request),
        LookupSpec::Phrasebook { phrases: Arc::default(), schemas: true },
        LookupSpec::Head,
    ];
    lookups.map(Drafter::Lookup).into()
}

fn ngram(mut section: Section<'_>) -> Ngram {
    let min = section.or("min", "Shortest match.", 2, &whole(1..=64));
    let max = section.or("max", "Longest match.", 8_u32.max(min), &whole(1..=64));
    if min > max {
        section.refuse("max", Refusal::new("below min", between(min, 64)), &max.to_string());
    }
    section.close();
    Ngram { min, max }
}

/// Reads `scope`. Sharing text between tenants (`global`) needs an explicit `i_accept_sharing:
/// true`.
fn scope(section: &mut Section<'_>) -> Scope {
    let words = &[("request", Scope::Request), ("tenant", Scope::Tenant), ("global", Scope::Global)];
    let scope =
        section.or("scope", "The requests whose outputs it learns from.", Scope::default(), &word(words));
    let sharing = "Required for scope: global, which shares text between tenants.";
    let accepted = section.or("i_accept_sharing", sharing, false, &boolean());
    if scope == Scope::Global && !accepted {
        let allowed = "request|tenant, or global with i_accept_sharing: true";
        section.refuse("scope", Refusal::new("shares text between tenants", allowed), "\"global\"");
    }
    scope
}

fn phrasebook(section: &mut Section<'_>) -> Option<LookupSpec> {
    let says = "Draft keys, punctuation and only choices of objects whose schema, tool or example is in the prompt, or whose schema binds the output.";
    let schemas = section.or("schemas", says, true, &boolean());
    let phrases = phrases(section, schemas)?;
    Some(LookupSpec::Phrasebook { schemas, phrases })
}

/// Reads `phrases`, which is optional only if the prompt's `schemas` are used.
fn phrases(section: &mut Section<'_>, schemas: bool) -> Option<Arc<Phrases>> {
    let says = "Triggers, each with the continuation that is drafted after it.";
    let Some(item) = section.item("phrases", says) else {
        if !schemas {
            let allowed = "a list of { trigger, continuation }, or schemas: true";
            section.refuse("phrases", Refusal::new("missing", allowed), "nothing");
        }
        return schemas.then(Arc::default);
    };
    let phrase = |item: &Item<'_>| {
        let mut section = item.section();
        section.with(None, "type", json!("object"));
        let trigger = section.must("trigger", "Text after which it is drafted.", "a text", &text());
        let continuation = section.must("continuation", "Text that is drafted.", "a text", &text());
        section.close();
        Some((trigger?, continuation?))
    };
    let phrases = Phrases::new(item.items().iter().filter_map(phrase).collect());
    if let Err(why) = &phrases {
        section.refuse("phrases", Refusal::new("too large", "fewer or shorter triggers"), why);
    }
    phrases.map(Arc::new).ok()
}

fn model(section: &mut Section<'_>) -> Option<Drafter> {
    let words = &[("auto", Vocabulary::Auto), ("same", Vocabulary::Same), ("slem", Vocabulary::Slem)];
    let model = section.must(
        "model",
        "Its name under drafters of the config file.",
        "a name under drafters of the config file",
        &text(),
    );
    let says = "Relation of its vocabulary to the target's: same (a model with another vocabulary does not draft), slem (drafts are translated as text), auto (same if it is; else slem).";
    let vocabulary = section.or("vocabulary", says, Vocabulary::default(), &word(words));
    let sharing =
        "Required for a model that was trained on recorded texts of other tenants than the policy's one.";
    let shares = section.or("i_accept_sharing", sharing, false, &boolean());
    Some(Drafter::Model { model: model?, vocabulary, shares })
}

fn gamma(mut section: Section<'_>) -> Gamma {
    let default = Gamma::default();
    let lengths = || whole(1..=i64::from(GAMMA_MAX));
    let gamma = Gamma {
        max: section.or("max", "Maximum draft tokens of a round.", default.max, &lengths()),
        fixed: section.maybe(
            "fixed",
            "Speculate at every token with at most this many draft tokens, at any cost: for tests and sweeps.",
            default.fixed,
            &lengths(),
        ),
        margin: section.or(
            "margin",
            "Predicted gain over plain decoding that is required to start speculating; 0.10 is 10 %.",
            default.margin,
            &ratio(),
        ),
        stay: section.or(
            "stay",
            "Predicted gain over plain decoding that is required to continue.",
            default.stay,
            &ratio(),
        ),
    };
    if gamma.fixed.is_some() {
        section.warn("fixed", "speculates at any cost: it is for tests and sweeps");
    }
    section.close();
    gamma
}

/// Every accept rule, by its name in files, with the default settings.
const RULES: &[(&str, Rule)] = &[
    ("exact", Rule::Exact),
    ("ears", Rule::Ears { kappa: 0.0 }),
    ("typical", Rule::Typical { epsilon: 0.09, delta: 0.3 }),
];

/// The meaning of a rule, for the schema.
const fn meaning(rule: Rule) -> &'static str {
    match rule {
        Rule::Exact => "Only tokens that the target itself would have generated.",
        _ => "A lossy rule: outputs may drift from the model's own, and each answer reports its drift.",
    }
}

fn accept(item: &Item<'_>) -> Accept {
    // Without a rule it is exact; `null` is an empty map.
    if item.slot().is_none() && !item.has("rule") {
        return exact(item.section());
    }
    let read = |rule, section: &mut Section<'_>| {
        let rule = match rule {
            Rule::Exact => {
                section.with(None, "type", json!(["object", "null"]));
                section.optional("rule");
                forbid(section);
                return Some(Accept::default());
            }
            Rule::Ears { kappa } => {
                let says =
                    "Minimum probability of the draft token ÷ that of the likeliest; 0 is as published.";
                Rule::Ears { kappa: section.or("kappa", says, kappa, &ratio()) }
            }
            Rule::Typical { epsilon, delta } => {
                let factor = "Factor of the threshold that depends on the entropy.";
                Rule::Typical {
                    epsilon: section.or(
                        "epsilon",
                        "Threshold on the token's probability.",
                        epsilon,
                        &ratio(),
                    ),
                    delta: section.or("delta", factor, delta, &ratio()),
                }
            }
        };
        Some(lossy(rule, section))
    };
    item.variants("rule", RULES, meaning, read).unwrap_or_default()
}

fn exact(mut section: Section<'_>) -> Accept {
    section.known("rule");
    forbid(&mut section);
    section.close();
    Accept::default()
}

/// These settings bound the error of lossy rules; the exact rule has none, so they are refused.
fn forbid(section: &mut Section<'_>) {
    for key in ["kappa", "epsilon", "delta", "tolerance", "max_drift", "max_drift_rate"] {
        section.forbid(key, "only with a lossy rule");
    }
}

/// Warning of a lossy rule.
const LOSSY: &str = "is lossy: texts may drift from the model's own, within max_drift and max_drift_rate, and each answer reports its drift";

/// Warning of a lossy rule without `max_drift`.
const UNBOUNDED: &str =
    "leaves the drift of a whole output without limit: max_drift_rate allows more with every token";

fn lossy(rule: Rule, section: &mut Section<'_>) -> Accept {
    let default = Accept::default();
    let relaxed = "How far the rule is relaxed: the product of two curves, capped.";
    let drift = "Maximum drift (total variation) of a whole output; null: no limit, so that the drift of long outputs is unbounded.";
    section.warn("rule", LOSSY);
    let tolerance = tolerance(section.section("tolerance", relaxed));
    let max_drift = section.maybe("max_drift", drift, default.max_drift, &ratio());
    if max_drift.is_none() {
        section.warn("max_drift", UNBOUNDED);
    }
    Accept {
        rule,
        tolerance,
        max_drift,
        max_drift_rate: section.or(
            "max_drift_rate",
            "Maximum drift per output token, on average so far.",
            default.max_drift_rate,
            &ratio(),
        ),
    }
}

fn tolerance(mut section: Section<'_>) -> Tolerance {
    let tolerance = Tolerance {
        temperature: section.or(
            "temperature",
            "Points [temperature, tolerance], temperature rising. Without it 1 everywhere; always 0 at temperature 0.",
            Vec::new(),
            &curve(2.0),
        ),
        load: section.or(
            "load",
            "Points [load, factor], load from 0 (idle) to 1 (full or waiting) rising. Without it 1 everywhere.",
            Vec::new(),
            &curve(1.0),
        ),
        max: section.or(
            "max",
            "Maximum of the product; 0 relaxes nothing. typical is as published at 1.",
            0.0,
            &ratio(),
        ),
    };
    section.close();
    tolerance
}

/// A curve, `[[x, y], …]`, with rising x up to `most`.
fn curve(most: f64) -> Kind<Vec<(f64, f64)>> {
    let point = json!({
        "type": "array",
        "prefixItems": [{ "type": "number", "minimum": 0, "maximum": most }, { "type": "number", "minimum": 0, "maximum": 1 }],
        "items": false,
        "minItems": 2,
    });
    let read = move |node: &Node| {
        let refusal = || {
            Refusal::new(
                "not a curve",
                format!("[[x, y], ...] with x rising from 0 to {most}, and y from 0 to 1"),
            )
        };
        let Value::List(points) = &node.value else { return Err(refusal()) };
        let point = |point: &Node| match &point.value {
            Value::List(pair) => match pair.as_slice() {
                [x, y] => Some((number(0.0..=most).read(x).ok()?, ratio().read(y).ok()?)),
                _ => None,
            },
            _ => None,
        };
        let points: Vec<(f64, f64)> = points.iter().map(point).collect::<Option<_>>().ok_or_else(refusal)?;
        let rising = points.windows(2).all(|pair| matches!(pair, [(a, _), (b, _)] if a < b));
        if rising && !points.is_empty() { Ok(points) } else { Err(refusal()) }
    };
    Kind::new(json!({ "type": "array", "items": point, "minItems": 1 }), read)
}

fn gates(mut section: Section<'_>) -> Gates {
    let default = Gates::default();
    let waiting = "Maximum requests waiting in the engine, not counting ours.";
    let acceptance = "Minimum accepted ÷ drafted of the first tokens of drafts, where no gain is predicted.";
    let control = "Time per token of speculated requests ÷ that of the control group: closes when it is certainly above.";
    let first_token = "Time to first tokens with drafts in flight ÷ without: where more, by over 20 ms, fewer draft tokens are sent.";
    let reprobe = "Time that the `control` gate stays closed when it closes for the first time.";
    let gates = Gates {
        waiting: section.or("waiting", waiting, default.waiting, &whole(0..=1_000_000)),
        kv: section.or("kv", "Maximum share of the engine's KV cache in use.", default.kv, &ratio()),
        stale: section.or("stale", "Maximum age of the engine's last load report.", default.stale, &period()),
        acceptance: section.or("acceptance", acceptance, default.acceptance, &ratio()),
        control: section.or("control", control, default.control, &number(1.0..=10.0)),
        max_gap: section.or(
            "max_gap",
            "Longest pause in a stream that a round may cause.",
            default.max_gap,
            &period(),
        ),
        first_token: section.or("first_token", first_token, default.first_token, &number(1.0..=10.0)),
        reprobe: section.or("reprobe", reprobe, default.reprobe, &duration()),
    };
    section.close();
    gates
}

fn holdback(mut section: Section<'_>) -> Holdback {
    let default = Holdback::default();
    let start = "Share at the start; it falls as the comparison becomes certain.";
    let start = section.or("start", start, default.start, &ratio());
    let floor = section.or("floor", "Minimum share.", default.floor.min(start), &ratio());
    if floor > start {
        section.refuse("floor", Refusal::new("above start", between(0, start)), &floor.to_string());
    }
    section.close();
    Holdback { start, floor }
}
