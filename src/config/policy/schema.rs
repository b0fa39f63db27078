//! The JSON Schema of policy files, which editors use for completion and checks.
//!
//! It is built from the same tables of words and ranges that the reader uses; a test compares it
//! with every key that the reader looks up. Conditions that a schema cannot express (bounds in the
//! wrong order, names shared by two files, drafters that the process file does not declare) are
//! left to `foretell check`.

use serde_json::{Map, Value, json};

use super::file::{KINDS, RULES};
use crate::openai::control_header::GAMMA_MAX;
use crate::policy::{AHEAD_MAX, Gamma, Gates, Holdback, PolicyMode};

/// The schema, draft 2020-12.
pub fn schema() -> Value {
    let (gamma, holdback) = (Gamma::default(), Holdback::default());
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Foretell policy",
        "description": "The requests that it applies to, drafters and limits. The first file, by name, that matches a request applies.",
        "type": "object",
        "required": ["version", "name"],
        "additionalProperties": false,
        "patternProperties": { "^x-": { "description": "For your own use, such as YAML anchors." } },
        "properties": {
            "version": { "const": 1, "description": "Version of the file format." },
            "name": {
                "type": "string",
                "pattern": "^[A-Za-z0-9._-]{1,64}$",
                "description": "Unique; answers, metrics and logs call the policy NAME@REVISION.",
            },
            "mode": words(&names(PolicyMode::NAMES), PolicyMode::default().name(),
                "off: relay. shadow: decode plainly, and score drafts without sending them. plain: no drafting. auto: speculate where it pays."),
            "match": matcher(),
            "drafters": {
                "type": "array",
                "items": { "oneOf": KINDS.iter().map(|(name, _)| drafter(name)).collect::<Vec<_>>() },
                "description": "Drafters, in order of preference. Default: prompt_lookup.",
            },
            "gamma": object("Draft lengths (gamma is `num_speculative_tokens` in vLLM), and the predicted gain that speculation requires.", &[
                ("max", whole(1, u32::from(GAMMA_MAX), Some(gamma.max), "Maximum draft tokens of a round.")),
                ("fixed", or_null(&whole(1, u32::from(GAMMA_MAX), None,
                    "Speculate at every token with at most this many draft tokens, at any cost: for tests and sweeps."))),
                ("ahead", or_null(&whole(0, AHEAD_MAX, None,
                    "Maximum verify requests sent before the result that they assume. Default: as many as pay, and none with `fixed`; with `fixed`, always this many."))),
                ("margin", share(Some(gamma.margin), "Predicted gain over plain decoding that is required to start speculating; 0.10 is 10 %.")),
                ("stay", share(Some(gamma.stay), "Predicted gain over plain decoding that is required to continue.")),
            ]),
            "accept": accept(),
            "gates": gates(),
            "holdback": object("The control group: a share of the requests is always decoded plainly, for comparison.", &[
                ("start", share(Some(holdback.start), "Share at the start; it falls as the comparison becomes certain.")),
                ("floor", share(Some(holdback.floor), "Minimum share.")),
            ]),
        },
    })
}

/// The schema as the text of `policies/schema.json`.
pub fn text() -> String {
    format!("{:#}\n", schema())
}

pub(in crate::config) fn names<T>(table: &[(&'static str, T)]) -> Vec<&'static str> {
    table.iter().map(|(name, _)| *name).collect()
}

pub(in crate::config) fn words(allowed: &[&str], default: &str, says: &str) -> Value {
    json!({ "enum": allowed, "default": default, "description": says })
}

pub(in crate::config) fn texts(says: &str) -> Value {
    json!({ "type": "array", "items": { "type": "string", "minLength": 1 }, "description": says })
}

fn number(least: f64, most: f64, default: Option<f64>, says: &str) -> Value {
    let mut schema = json!({ "type": "number", "minimum": least, "maximum": most, "description": says });
    if let (Some(default), Some(schema)) = (default, schema.as_object_mut()) {
        schema.insert("default".to_owned(), default.into());
    }
    schema
}

pub(in crate::config) fn share(default: Option<f64>, says: &str) -> Value {
    number(0.0, 1.0, default, says)
}

pub(in crate::config) fn whole(least: u32, most: u32, default: Option<u32>, says: &str) -> Value {
    let mut schema = json!({ "type": "integer", "minimum": least, "maximum": most, "description": says });
    if let (Some(default), Some(schema)) = (default, schema.as_object_mut()) {
        schema.insert("default".to_owned(), default.into());
    }
    schema
}

pub(in crate::config) fn duration(default: &str, says: &str) -> Value {
    json!({ "type": "string", "pattern": r"^\d+(ms|s|m|h)$", "default": default, "description": says })
}

/// A duration of at least 1 ms.
pub(in crate::config) fn period(default: &str, says: &str) -> Value {
    json!({ "type": "string", "pattern": r"^0*[1-9]\d*(ms|s|m|h)$", "default": default, "description": says })
}

pub(in crate::config) fn or_null(schema: &Value) -> Value {
    json!({ "anyOf": [schema, { "type": "null" }] })
}

/// A map with these keys and no others. `null` reads as an empty map.
pub(in crate::config) fn object(says: &str, properties: &[(&str, Value)]) -> Value {
    let properties: Map<String, Value> =
        properties.iter().map(|(name, schema)| ((*name).to_owned(), schema.clone())).collect();
    json!({ "type": ["object", "null"], "additionalProperties": false, "properties": properties, "description": says })
}

fn matcher() -> Value {
    let bounds = |most: f64, says: &str| {
        let side = |says: &str| or_null(&number(0.0, most, None, says));
        object(says, &[("min", side("Minimum, inclusive.")), ("max", side("Maximum, inclusive."))])
    };
    object(
        "Conditions; every field must match, and of a list one entry.",
        &[
            ("models", texts("Model ids as clients send them, with * and ? for any characters.")),
            ("backends", texts("Names of backends, with * and ?.")),
            ("tenants", texts("Tenants, as determined by `tenant` of the process file.")),
            (
                "routes",
                json!({ "type": "array", "items": { "enum": ["completions", "chat"] }, "description": "API routes." }),
            ),
            (
                "headers",
                json!({
                    "type": ["object", "null"],
                    "additionalProperties": { "type": "array", "items": { "type": "string", "minLength": 1 } },
                    "propertyNames": { "pattern": "^[!#$%&'*+.^_`|~0-9A-Za-z-]+$" },
                    "description": "Header names, each with its allowed values.",
                }),
            ),
            ("temperature", bounds(2.0, "The effective temperature, the server's default included.")),
            (
                "prompt_tokens",
                bounds(1e9, "Length of the prompt, tokens; for a text prompt, a quarter of its bytes."),
            ),
        ],
    )
}

fn drafter(kind: &str) -> Value {
    let (says, more, required): (&str, Vec<(&str, Value)>, Vec<&str>) = match kind {
        "prompt_lookup" => (
            "Copies the tokens that followed the longest match of the last tokens in the request's own text.",
            vec![(
                "ngram",
                object(
                    "Lengths of the match, tokens.",
                    &[
                        ("min", whole(1, 64, Some(2), "Shortest match.")),
                        ("max", whole(1, 64, Some(8), "Longest match.")),
                    ],
                ),
            )],
            vec![],
        ),
        "suffix" => (
            "Drafts the most frequent continuation of the current context, in this request and, by scope, in earlier ones.",
            vec![
                (
                    "scope",
                    words(
                        &["request", "tenant", "global"],
                        "request",
                        "The requests whose outputs it learns from.",
                    ),
                ),
                (
                    "i_accept_sharing",
                    json!({ "type": "boolean", "description": "Required for scope: global, which shares text between tenants." }),
                ),
            ],
            vec![],
        ),
        "phrasebook" => {
            let text = json!({ "type": "string", "minLength": 1 });
            let phrase = json!({
                "type": "object",
                "additionalProperties": false,
                "required": ["trigger", "continuation"],
                "properties": { "trigger": text.clone(), "continuation": text },
            });
            (
                "Operator phrases (trigger, continuation), and JSON skeletons from schemas and tools in the prompt; at least one.",
                vec![
                    (
                        "phrases",
                        json!({ "type": "array", "items": phrase, "description": "Triggers, each with the continuation that is drafted after it." }),
                    ),
                    (
                        "schemas",
                        json!({ "type": "boolean", "default": true, "description": "Draft keys, punctuation and only choices of objects whose schema, tool or example is in the prompt." }),
                    ),
                ],
                vec![],
            )
        }
        "model" => (
            "A language model in this process.",
            vec![
                (
                    "model",
                    json!({ "type": "string", "minLength": 1, "description": "Its name under drafters of the process file." }),
                ),
                (
                    "vocabulary",
                    words(
                        &["auto", "same", "slem", "tli"],
                        "auto",
                        "Relation of its vocabulary to the target's: same (a model with another vocabulary does not draft), slem (drafts are translated as text), tli (it chooses among the common tokens), auto (same if it is; else tli where the target's noise is shared and nine tenths of the text are common tokens; else slem).",
                    ),
                ),
            ],
            vec!["model"],
        ),
        "recycling" => (
            "Successors of the last token in verification results and in the text, of this and earlier requests of a tenant.",
            vec![],
            vec![],
        ),
        _ => ("The client's own prediction; drafting resumes after an edit.", vec![], vec![]),
    };
    let mut properties: Vec<(&str, Value)> = vec![("kind", json!({ "const": kind }))];
    properties.extend(more);
    let required: Vec<&str> = std::iter::once("kind").chain(required).collect();
    let mut schema = object(says, &properties);
    if let Some(schema) = schema.as_object_mut() {
        schema.insert("type".to_owned(), "object".into());
        schema.insert("required".to_owned(), required.into());
    }
    schema
}

fn curve(most: f64, says: &str) -> Value {
    let point = json!({
        "type": "array",
        "prefixItems": [{ "type": "number", "minimum": 0, "maximum": most }, { "type": "number", "minimum": 0, "maximum": 1 }],
        "items": false,
        "minItems": 2,
    });
    json!({ "type": "array", "items": point, "minItems": 1, "description": says })
}

/// The other keys of a rule depend on the rule.
fn accept() -> Value {
    let exact = object(
        "Only tokens that the target itself would have generated.",
        &[("rule", json!({ "const": "exact" }))],
    );
    let tolerance = object(
        "How far the rule is relaxed: the product of two curves, capped.",
        &[
            (
                "temperature",
                curve(
                    2.0,
                    "Points [temperature, tolerance], temperature rising. Without it 1 everywhere; always 0 at temperature 0.",
                ),
            ),
            (
                "load",
                curve(
                    1.0,
                    "Points [load, factor], load from 0 (idle) to 1 (full or waiting) rising. Without it 1 everywhere.",
                ),
            ),
            (
                "max",
                share(
                    Some(0.0),
                    "Maximum of the product; 0 relaxes nothing. typical and fly are as published at 1.",
                ),
            ),
        ],
    );
    let own = |rule: &str| match rule {
        "ears_gated" => {
            vec![(
                "kappa",
                share(Some(0.3), "Minimum probability of the draft token ÷ that of the likeliest."),
            )]
        }
        "typical" => vec![
            ("epsilon", share(Some(0.09), "Threshold on the token's probability.")),
            ("delta", share(Some(0.3), "Factor of the threshold that depends on the entropy.")),
        ],
        _ => Vec::new(),
    };
    let lossy = RULES.iter().map(|(name, _)| *name).filter(|name| *name != "exact").map(|name| {
        let mut properties = vec![
            ("rule", json!({ "const": name })),
            ("tolerance", tolerance.clone()),
            (
                "max_drift",
                or_null(&share(
                    Some(0.2),
                    "Maximum that may be charged to a whole output; null: no limit, so that the drift of long outputs is unbounded.",
                )),
            ),
            (
                "max_drift_rate",
                share(Some(0.02), "Maximum that may be charged per output token, on average so far."),
            ),
        ];
        properties.extend(own(name));
        let mut schema = object(
            "A lossy rule: outputs may drift from the model's own, and each answer reports the charge.",
            &properties,
        );
        if let Some(schema) = schema.as_object_mut() {
            schema.insert("type".to_owned(), "object".into());
            schema.insert("required".to_owned(), json!(["rule"]));
        }
        schema
    });
    json!({ "oneOf": std::iter::once(exact).chain(lossy).collect::<Vec<_>>(), "description": "The rule by which draft tokens are accepted." })
}

fn gates() -> Value {
    let gates = Gates::default();
    let seconds = |duration: std::time::Duration| format!("{}s", duration.as_secs());
    object(
        "Limits beyond which requests are decoded plainly for a while.",
        &[
            (
                "waiting",
                whole(
                    0,
                    1_000_000,
                    Some(gates.waiting),
                    "Maximum requests waiting in the engine, not counting ours.",
                ),
            ),
            ("kv", share(Some(gates.kv), "Maximum share of the engine's KV cache in use.")),
            ("stale", period(&seconds(gates.stale), "Maximum age of the engine's last load report.")),
            (
                "acceptance",
                share(
                    Some(gates.acceptance),
                    "Minimum accepted ÷ drafted of the first tokens of drafts, where no gain is predicted.",
                ),
            ),
            (
                "control",
                number(
                    1.0,
                    10.0,
                    Some(gates.control),
                    "Time per token of speculated requests ÷ that of the control group: closes when it is certainly above.",
                ),
            ),
            (
                "max_gap",
                period(
                    &format!("{}ms", gates.max_gap.as_millis()),
                    "Longest pause in a stream that a round may cause.",
                ),
            ),
            (
                "reprobe",
                duration(
                    &seconds(gates.reprobe),
                    "Time that the `control` gate stays closed when it closes for the first time.",
                ),
            ),
        ],
    )
}
