//! Parses a policy file.

use std::sync::Arc;

use crate::config::problem::{Problem, Problems, Refusal};
use crate::config::process::file::version;
use crate::config::read::{Item, Section, boolean, duration, number, period, ratio, text, whole, word};
use crate::config::yaml::{self, Node, Value};
use crate::draft::Phrases;
use crate::openai::Route;
use crate::openai::control_header::GAMMA_MAX;
use crate::policy::{
    AHEAD_MAX, Accept, Bounds, Drafter, Gamma, Gates, Glob, Holdback, Match, Policy, PolicyMode, Revision,
    Rule, Scope, Tolerance, Vocabulary,
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
}

/// Reads a policy file.
///
/// # Errors
/// Every problem in the file, in the order of its lines.
pub fn parse(file: &str, source: &str) -> Result<ParsedPolicy, Vec<Problem>> {
    let root = yaml::parse(file, source)?;
    let problems = Problems::new(file);
    let placed = read(&Item::root(&root, &problems), Revision::of(source.as_bytes()));
    match (problems.into_vec(), placed) {
        (none, Some(placed)) if none.is_empty() => Ok(placed),
        (some, _) => Err(some),
    }
}

fn read(root: &Item<'_>, revision: Revision) -> Option<ParsedPolicy> {
    let mut top = root.section();
    version(&mut top);
    let name = top.must("name", "a text", name);
    let name_line = top.line("name");
    let mode = top.or("mode", PolicyMode::default(), word(PolicyMode::NAMES));
    let matcher = matcher(top.section("match"));
    let items = top.item("drafters").map(|item| item.items());
    let lines = |items: &Vec<Item<'_>>| items.iter().map(|item| item.node.line).collect();
    let drafter_lines = items.as_ref().map_or_else(Vec::new, lines);
    let default = vec![Drafter::PromptLookup { ngram_min: 2, ngram_max: 8 }];
    let drafters = items.map_or(default, |items| items.iter().filter_map(drafter).collect());
    let gamma = gamma(top.section("gamma"));
    let accept = accept(top.section("accept"));
    let gates = gates(top.section("gates"));
    let holdback = holdback(top.section("holdback"));
    top.close();
    let policy = Policy { name: name?, revision, mode, matcher, drafters, gamma, accept, gates, holdback };
    Some(ParsedPolicy { policy, name_line, drafter_lines })
}

/// Reads a policy name. It is used in headers and metrics, so few characters are allowed.
fn name(node: &Node) -> Result<String, Refusal> {
    let refusal = || Refusal::new("not a name", "1 to 64 of A-Z a-z 0-9 . _ -");
    let name = text(node).map_err(|_| refusal())?;
    let good = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
    if good && name.len() <= 64 { Ok(name) } else { Err(refusal()) }
}

fn matcher(mut section: Section<'_>) -> Match {
    let routes = &[("completions", Route::Completions), ("chat", Route::Chat)];
    let glob = |node: &Node| text(node).map(|pattern| Glob::new(&pattern));
    let matcher = Match {
        models: section.item("models").map(|item| item.list(glob)),
        backends: section.item("backends").map(|item| item.list(glob)),
        tenants: section.item("tenants").map(|item| item.list(text)),
        routes: section.item("routes").map(|item| item.list(word(routes))),
        headers: section.item("headers").map_or_else(Vec::new, |item| headers(&item)),
        temperature: bounds(section.section("temperature"), 2.0),
        prompt_tokens: bounds(section.section("prompt_tokens"), 1e9),
    };
    section.close();
    matcher
}

fn headers(item: &Item<'_>) -> Vec<(String, Vec<String>)> {
    let members = item.members().into_iter();
    members
        .filter_map(|(name, item)| {
            let parsed = http::HeaderName::from_bytes(name.as_bytes()).ok();
            if parsed.is_none() {
                let refusal = Refusal::new("not a header name", "a header name");
                item.refuse_as(refusal, format!("{name:?}"));
            }
            let name = parsed?.to_string();
            Some((name, item.list(text)))
        })
        .collect()
}

fn bounds(mut section: Section<'_>, most: f64) -> Bounds {
    let bounds = Bounds {
        min: section.maybe("min", None, number(0.0..=most)),
        max: section.maybe("max", None, number(0.0..=most)),
    };
    if let (Some(min), Some(max)) = (bounds.min, bounds.max)
        && min > max
    {
        section.refuse("max", Refusal::new("below min", format!("{min}..={most}")), &max.to_string());
    }
    section.close();
    bounds
}

/// A kind of drafter.
#[derive(Clone, Copy)]
pub(super) enum Kind {
    PromptLookup,
    Suffix,
    Phrasebook,
    Recycling,
    Prediction,
    Model,
}

/// Every kind of drafter, by its name in files.
pub(super) const KINDS: &[(&str, Kind)] = &[
    ("prompt_lookup", Kind::PromptLookup),
    ("suffix", Kind::Suffix),
    ("phrasebook", Kind::Phrasebook),
    ("recycling", Kind::Recycling),
    ("prediction", Kind::Prediction),
    ("model", Kind::Model),
];

fn drafter(item: &Item<'_>) -> Option<Drafter> {
    let mut section = item.section();
    let names = KINDS.iter().map(|(name, _)| *name).collect::<Vec<_>>().join("|");
    // The other allowed keys depend on the kind.
    let drafter = match section.must("kind", &names, word(KINDS))? {
        Kind::PromptLookup => {
            let (ngram_min, ngram_max) = ngram(section.section("ngram"));
            Some(Drafter::PromptLookup { ngram_min, ngram_max })
        }
        Kind::Suffix => Some(Drafter::Suffix { scope: scope(&mut section) }),
        Kind::Phrasebook => phrasebook(&mut section),
        Kind::Recycling => Some(Drafter::Recycling),
        Kind::Prediction => Some(Drafter::Prediction),
        Kind::Model => model(&mut section),
    };
    section.close();
    drafter
}

fn ngram(mut section: Section<'_>) -> (u32, u32) {
    let min = section.or("min", 2, whole(1..=64));
    let max = section.or("max", 8_u32.max(min), whole(1..=64));
    if min > max {
        section.refuse("max", Refusal::new("below min", format!("{min}..=64")), &max.to_string());
    }
    section.close();
    (min, max)
}

/// Reads `scope`. Sharing text between tenants (`global`) needs an explicit `i_accept_sharing:
/// true`.
fn scope(section: &mut Section<'_>) -> Scope {
    let words = &[("request", Scope::Request), ("tenant", Scope::Tenant), ("global", Scope::Global)];
    let scope = section.or("scope", Scope::default(), word(words));
    let accepted = section.or("i_accept_sharing", false, boolean);
    if scope == Scope::Global && !accepted {
        let allowed = "request|tenant, or global with i_accept_sharing: true";
        section.refuse("scope", Refusal::new("shares text between tenants", allowed), "\"global\"");
    }
    scope
}

fn phrasebook(section: &mut Section<'_>) -> Option<Drafter> {
    let schemas = section.or("schemas", true, boolean);
    let phrases = phrases(section, schemas)?;
    Some(Drafter::Phrasebook { schemas, phrases })
}

/// Reads `phrases`, which is optional only if the prompt's `schemas` are used.
fn phrases(section: &mut Section<'_>, schemas: bool) -> Option<Arc<Phrases>> {
    let Some(item) = section.item("phrases") else {
        if !schemas {
            let allowed = "a list of { trigger, continuation }, or schemas: true";
            section.refuse("phrases", Refusal::new("missing", allowed), "nothing");
        }
        return schemas.then(Arc::default);
    };
    let phrase = |item: &Item<'_>| {
        let mut section = item.section();
        let trigger = section.must("trigger", "a text", text);
        let continuation = section.must("continuation", "a text", text);
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
    let words = &[
        ("auto", Vocabulary::Auto),
        ("same", Vocabulary::Same),
        ("slem", Vocabulary::Slem),
        ("tli", Vocabulary::Tli),
    ];
    let model = section.must("model", "a name under drafters of the process file", text);
    let vocabulary = section.or("vocabulary", Vocabulary::default(), word(words));
    Some(Drafter::Model { model: model?, vocabulary })
}

fn gamma(mut section: Section<'_>) -> Gamma {
    let default = Gamma::default();
    let gamma = Gamma {
        max: section.or("max", default.max, whole(1..=i64::from(GAMMA_MAX))),
        fixed: section.maybe("fixed", default.fixed, whole(1..=i64::from(GAMMA_MAX))),
        ahead: section.maybe("ahead", default.ahead, whole(0..=i64::from(AHEAD_MAX))),
        margin: section.or("margin", default.margin, ratio),
        stay: section.or("stay", default.stay, ratio),
    };
    section.close();
    gamma
}

/// An accept rule without its settings.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum RuleName {
    Exact,
    Ears,
    EarsGated,
    EarsScaled,
    Typical,
    Fly,
}

/// Every accept rule, by its name in files.
pub(super) const RULES: &[(&str, RuleName)] = &[
    ("exact", RuleName::Exact),
    ("ears", RuleName::Ears),
    ("ears_gated", RuleName::EarsGated),
    ("ears_scaled", RuleName::EarsScaled),
    ("typical", RuleName::Typical),
    ("fly", RuleName::Fly),
];

fn accept(mut section: Section<'_>) -> Accept {
    let default = Accept::default();
    let Some(name) = section.item("rule").map_or(Some(RuleName::Exact), |item| item.read(word(RULES))) else {
        // The other allowed keys depend on the rule.
        return default;
    };
    let rule = match name {
        // These settings bound the error of lossy rules; the exact rule has none, so they are
        // refused.
        RuleName::Exact => {
            for key in ["kappa", "epsilon", "delta", "tolerance", "max_drift", "max_drift_rate"] {
                section.forbid(key, "only with a lossy rule");
            }
            section.close();
            return default;
        }
        RuleName::Ears => Rule::Ears,
        RuleName::EarsScaled => Rule::EarsScaled,
        RuleName::Fly => Rule::Fly,
        RuleName::EarsGated => Rule::EarsGated { kappa: section.or("kappa", 0.3, ratio) },
        RuleName::Typical => Rule::Typical {
            epsilon: section.or("epsilon", 0.09, ratio),
            delta: section.or("delta", 0.3, ratio),
        },
    };
    let accept = Accept {
        rule,
        tolerance: tolerance(section.section("tolerance")),
        max_drift: section.maybe("max_drift", default.max_drift, ratio),
        max_drift_rate: section.or("max_drift_rate", default.max_drift_rate, ratio),
    };
    section.close();
    accept
}

fn tolerance(mut section: Section<'_>) -> Tolerance {
    let tolerance = Tolerance {
        temperature: section.or("temperature", Vec::new(), |node| curve(node, 2.0)),
        load: section.or("load", Vec::new(), |node| curve(node, 1.0)),
        max: section.or("max", 0.0, ratio),
    };
    section.close();
    tolerance
}

/// Reads a curve, `[[x, y], …]`, with rising x.
fn curve(node: &Node, most: f64) -> Result<Vec<(f64, f64)>, Refusal> {
    let refusal =
        || Refusal::new("not a curve", format!("[[x, y], ...] with x rising in 0..={most} and y in 0..=1"));
    let Value::List(points) = &node.value else { return Err(refusal()) };
    let point = |point: &Node| match &point.value {
        Value::List(pair) => match pair.as_slice() {
            [x, y] => Some((number(0.0..=most)(x).ok()?, ratio(y).ok()?)),
            _ => None,
        },
        _ => None,
    };
    let points: Vec<(f64, f64)> = points.iter().map(point).collect::<Option<_>>().ok_or_else(refusal)?;
    let rising = points.windows(2).all(|pair| matches!(pair, [(a, _), (b, _)] if a < b));
    if rising && !points.is_empty() { Ok(points) } else { Err(refusal()) }
}

fn gates(mut section: Section<'_>) -> Gates {
    let default = Gates::default();
    let gates = Gates {
        waiting: section.or("waiting", default.waiting, whole(0..=1_000_000)),
        kv: section.or("kv", default.kv, ratio),
        stale: section.or("stale", default.stale, period),
        acceptance: section.or("acceptance", default.acceptance, ratio),
        control: section.or("control", default.control, number(1.0..=10.0)),
        max_gap: section.or("max_gap", default.max_gap, period),
        reprobe: section.or("reprobe", default.reprobe, duration),
    };
    section.close();
    gates
}

fn holdback(mut section: Section<'_>) -> Holdback {
    let default = Holdback::default();
    let start = section.or("start", default.start, ratio);
    let floor = section.or("floor", default.floor.min(start), ratio);
    if floor > start {
        section.refuse("floor", Refusal::new("above start", format!("0..={start}")), &floor.to_string());
    }
    section.close();
    Holdback { start, floor }
}
