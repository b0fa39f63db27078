//! The `usage` object of an answer, and what Foretell adds to it.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use foretell_core::words::Ledger;

/// How a request was served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Path {
    /// It was speculated on at least once.
    Speculated,
    /// It was eligible, but decoded plainly to the end.
    Plain,
    /// Passed on unchanged; completions and other requests.
    Passthrough,
}

impl Path {
    /// The name in headers, metrics and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Speculated => "speculated",
            Self::Plain => "plain",
            Self::Passthrough => "passthrough",
        }
    }
}

/// `usage.foretell`: how the request was served.
#[derive(Clone, Debug, PartialEq)]
pub struct SpeculatedUsage<'a> {
    pub path: Path,
    /// Reason why it was not speculated on, or not to the end; `None` if it was.
    pub reason: Option<&'a str>,
    /// `name@revision` of its policy; `None` without one.
    pub policy: Option<&'a str>,
    /// Counts of its rounds; `None` where they depend on texts of other clients and would reveal
    /// them.
    pub counts: Option<Counts>,
}

/// The rounds of one request.
#[derive(Clone, Debug, PartialEq)]
pub struct Counts {
    /// Rounds whose verification result decided at least one token.
    pub rounds: u32,
    /// Draft tokens sent in them.
    pub drafted: u32,
    /// Draft tokens accepted in them.
    pub accepted: u32,
    /// Drift from the target's distribution charged for them, in total variation.
    pub drift: Ledger,
    pub output_tokens: u32,
}

impl SpeculatedUsage<'_> {
    /// The JSON object.
    pub fn to_value(&self) -> Value {
        let mut object = json!({ "path": self.path.name(), "reason": self.reason, "policy": self.policy });
        if let (Some(counts), Some(object)) = (&self.counts, object.as_object_mut()) {
            counts.add_to(object);
        }
        object
    }
}

impl Counts {
    fn add_to(&self, object: &mut Map<String, Value>) {
        for (name, count) in [("rounds", self.rounds), ("drafted", self.drafted), ("accepted", self.accepted)]
        {
            object.insert(name.to_owned(), count.into());
        }
        let drift = json!({
            "charged": self.drift.charged,
            "rate": self.drift.rate(self.output_tokens),
            "substitutions": self.drift.substitutions,
        });
        object.insert("drift".to_owned(), drift);
    }
}

/// A `usage` object of a backend, of which only the counts are read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UsageText {
    json: String,
    counts: TokenCounts,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
struct TokenCounts {
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
}

impl UsageText {
    /// From the JSON text of an object.
    pub fn of(json: impl Into<String>) -> Self {
        let json = json.into();
        Self { counts: serde_json::from_str(&json).unwrap_or_default(), json }
    }

    pub fn prompt_tokens(&self) -> Option<u64> {
        self.counts.prompt_tokens
    }

    pub fn completion_tokens(&self) -> Option<u64> {
        self.counts.completion_tokens
    }

    /// All of it.
    pub fn usage(&self) -> Option<Usage> {
        Usage::from_backend(&serde_json::from_str(&self.json).ok()?)
    }
}

/// The usage of one request, in the shape in which its backend reports it.
#[derive(Clone, Debug, PartialEq)]
pub struct Usage {
    base: Map<String, Value>,
    prompt_tokens: u64,
    prediction: Option<(u32, u32)>,
}

impl Usage {
    /// From the number of prompt tokens only, where the backend's stream was aborted before it
    /// reported usage.
    pub fn new(prompt_tokens: u64) -> Self {
        Self { base: Map::new(), prompt_tokens, prediction: None }
    }

    /// From a `usage` object of the backend; with all that it reports about the prompt. `None` if
    /// it does not report the number of prompt tokens.
    pub fn from_backend(usage: &Value) -> Option<Self> {
        let base = usage.as_object()?.clone();
        let prompt_tokens = base.get("prompt_tokens")?.as_u64()?;
        Some(Self { base, prompt_tokens, prediction: None })
    }

    pub fn prompt_tokens(&self) -> u64 {
        self.prompt_tokens
    }

    /// Without the members that are null: those of running usage, which the end of a stream lacks.
    #[must_use]
    pub fn without_nulls(mut self) -> Self {
        self.base.retain(|_, value| !value.is_null());
        self
    }

    /// With the backend's details of the prompt (`prompt_tokens_details`).
    #[must_use]
    pub fn with_prompt_details(mut self, details: Value) -> Self {
        self.base.insert("prompt_tokens_details".to_owned(), details);
        self
    }

    /// With this number of output tokens that are reasoning, where the backend reports one.
    #[must_use]
    pub fn with_reasoning_tokens(mut self, tokens: u64) -> Self {
        let details = self.base.get_mut("completion_tokens_details").and_then(Value::as_object_mut);
        if let Some(count) = details.and_then(|details| details.get_mut("reasoning_tokens")) {
            *count = tokens.into();
        }
        self
    }

    /// Adds the numbers of accepted and rejected tokens of the client's `prediction`.
    #[must_use]
    pub fn with_prediction(mut self, accepted: u32, rejected: u32) -> Self {
        self.prediction = Some((accepted, rejected));
        self
    }

    /// The object for the client: prompt as the backend reported it, output as the client received
    /// it, and `foretell` as a member of that name if it is given.
    pub fn to_value(&self, completion_tokens: u64, foretell: Option<&SpeculatedUsage<'_>>) -> Value {
        let mut usage = self.base.clone();
        usage.insert("prompt_tokens".to_owned(), self.prompt_tokens.into());
        usage.insert("completion_tokens".to_owned(), completion_tokens.into());
        usage.insert("total_tokens".to_owned(), self.prompt_tokens.saturating_add(completion_tokens).into());
        if let Some((accepted, rejected)) = self.prediction {
            let details = usage.entry("completion_tokens_details").or_insert_with(|| json!({}));
            if !details.is_object() {
                *details = json!({});
            }
            if let Some(details) = details.as_object_mut() {
                details.insert("accepted_prediction_tokens".to_owned(), accepted.into());
                details.insert("rejected_prediction_tokens".to_owned(), rejected.into());
            }
        }
        if let Some(foretell) = foretell {
            usage.insert("foretell".to_owned(), foretell.to_value());
        }
        Value::Object(usage)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_prompt_is_the_backends_and_the_output_is_the_clients() {
        let backend = json!({"prompt_tokens": 12, "total_tokens": 13, "completion_tokens": 1,
            "prompt_tokens_details": {"cached_tokens": 11}});
        let usage = Usage::from_backend(&backend).unwrap();
        assert_eq!(
            usage.to_value(30, None),
            json!({"prompt_tokens": 12, "total_tokens": 42, "completion_tokens": 30,
                "prompt_tokens_details": {"cached_tokens": 11}})
        );
    }

    #[test]
    fn prediction_tokens_are_there_only_when_set() {
        let usage = Usage::new(5);
        assert!(usage.to_value(1, None).get("completion_tokens_details").is_none());
        let value = usage.with_prediction(7, 2).to_value(1, None);
        assert_eq!(
            value["completion_tokens_details"],
            json!({"accepted_prediction_tokens": 7, "rejected_prediction_tokens": 2})
        );
    }

    #[test]
    fn the_rounds_are_reported_in_one_object() {
        let counts = Counts {
            rounds: 3,
            drafted: 12,
            accepted: 9,
            drift: Ledger { charged: 0.5, substitutions: 2, ..Ledger::default() },
            output_tokens: 10,
        };
        let speculated_usage = SpeculatedUsage {
            path: Path::Speculated,
            reason: None,
            policy: Some("default@0123abcd"),
            counts: Some(counts),
        };
        assert_eq!(
            Usage::new(5).to_value(1, Some(&speculated_usage))["foretell"],
            json!({"path": "speculated", "reason": null, "policy": "default@0123abcd", "rounds": 3,
                "drafted": 12, "accepted": 9, "drift": {"charged": 0.5, "rate": 0.05, "substitutions": 2}})
        );
        let discreet = SpeculatedUsage { counts: None, ..speculated_usage };
        assert_eq!(
            discreet.to_value(),
            json!({"path": "speculated", "reason": null, "policy": "default@0123abcd"})
        );
    }
}
