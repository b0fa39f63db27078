//! Shared by the translations of other APIs into chats: the reasons for which a request is not
//! translated, and a chat's answer as parts. PURE.

mod parts;

pub use parts::{AnswerPart, Call, End, Events, Stream};
pub use parts::{broken_off, logprobs, of_message, stop, write};

use foretell_core::words::PassthroughReason;
use serde_json::{Map, Value};

/// How reasoning is switched on or off at the engine, and which roles its templates know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Thinking {
    /// By `reasoning_effort` and `thinking_token_budget`; every role is passed on (vLLM).
    Effort,
    /// By `chat_template_kwargs.enable_thinking`; a developer's messages are those of the system.
    Template,
    /// As [`Self::Template`], and `thinking_budget_tokens` limits it (llama.cpp).
    TemplateAndBudget,
}

/// Reason for which a request is not translated, in words for the client: they begin with the path
/// of the member.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Untranslated {
    /// It is malformed, or asks what no engine can do.
    #[error("{path}: {words}")]
    Refused { path: String, words: String },
    /// A server with that API may do it, but a chat cannot ask for it.
    #[error("{parameter}: a chat cannot ask for it")]
    Passed { reason: PassthroughReason, parameter: String },
}

impl Untranslated {
    pub fn path(&self) -> &str {
        match self {
            Self::Refused { path, .. } => path,
            Self::Passed { parameter, .. } => parameter,
        }
    }
}

pub fn refused<T>(path: &str, words: &str) -> Result<T, Untranslated> {
    Err(Untranslated::Refused { path: path.to_owned(), words: words.to_owned() })
}

pub fn passed<T>(reason: PassthroughReason, parameter: impl Into<String>) -> Result<T, Untranslated> {
    Err(Untranslated::Passed { reason, parameter: parameter.into() })
}

pub fn set(members: &mut Map<String, Value>, name: &str, value: Value) {
    members.insert(name.to_owned(), value);
}

/// The boolean `stream` of a request.
pub fn stream(value: &Value) -> Result<bool, Untranslated> {
    value.as_bool().map_or_else(|| refused("stream", "a boolean"), Ok)
}

/// 32 hexadecimal digits, others for every seed and number.
pub fn digits(seed: u64, number: u64) -> String {
    let mix = foretell_core::units::SplitMix64::mix;
    let first = mix(seed ^ mix(number));
    format!("{first:016x}{:016x}", mix(first))
}

/// The records of a file in `tests/goldens` that have this member.
#[cfg(test)]
pub fn goldens(file: &str, member: &str) -> Vec<Value> {
    let path = format!("{}/../../tests/goldens/{file}", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(path).unwrap();
    let records = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let found: Vec<Value> = records.filter(|record| record.get(member).is_some()).collect();
    assert!(found.len() > 5, "{member}: {}", found.len());
    found
}
