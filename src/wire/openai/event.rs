//! The members of one event of a stream, or of one unstreamed answer, in the one way in which
//! everything here reads them.
//!
//! Gateways between a client and an engine rewrite streams: they add events, and write placeholders
//! where the engine has null. Such a placeholder is no value.

use serde_json::Value;

/// Texts that gateways write for "no reason yet", in lower case: the zero value of a string in Go,
/// and null written as text.
const NO_REASON: [&str; 4] = ["", "null", "none", "undefined"];

/// The data of one event of a stream, read.
#[derive(Clone, Debug, PartialEq)]
pub enum Data {
    /// Part of an answer: choices, usage or an error.
    Answer(Value),
    /// Part of no answer: an event that a gateway has added; null if it is no JSON object.
    Foreign(Value),
    /// An object that is damaged: part of an answer may be lost with it.
    Damaged,
}

impl Data {
    /// Reads the data of an event other than `[DONE]`.
    pub fn of(data: &str) -> Self {
        match serde_json::from_str::<Value>(data) {
            Ok(event) if event.is_object() && !is_foreign(&event) => Self::Answer(event),
            Ok(event) if event.is_object() => Self::Foreign(event),
            Err(_) if data.trim_start().starts_with('{') => Self::Damaged,
            Ok(_) | Err(_) => Self::Foreign(Value::Null),
        }
    }
}

/// The choices; empty if there are none.
pub fn choices(event: &Value) -> &[Value] {
    event.get("choices").and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

/// The reason for which a choice has ended; `None` while it goes on.
pub fn finish_reason(choice: &Value) -> Option<&str> {
    choice.get("finish_reason").and_then(Value::as_str).and_then(reason)
}

/// A finish reason, unless the text is a placeholder for none.
pub fn reason(text: &str) -> Option<&str> {
    let placeholder = NO_REASON.iter().any(|none| text.trim().eq_ignore_ascii_case(none));
    (!placeholder).then_some(text)
}

/// True if a choice has ended.
pub fn finishes(event: &Value) -> bool {
    choices(event).iter().any(|choice| finish_reason(choice).is_some())
}

/// The error that an event reports, or is (`"object": "error"`, as engines wrote it once); `None`
/// if it has no such member, or a placeholder.
pub fn error(event: &Value) -> Option<&Value> {
    if event.get("object").is_some_and(|object| object == "error") {
        return Some(event);
    }
    event.get("error").filter(|error| match error {
        Value::Null | Value::Bool(false) => false,
        Value::String(text) => reason(text).is_some(),
        Value::Object(members) => !members.is_empty(),
        Value::Array(items) => !items.is_empty(),
        Value::Bool(true) | Value::Number(_) => true,
    })
}

/// True if an event holds usage and no choice.
pub fn is_usage(event: &Value) -> bool {
    choices(event).is_empty() && event.get("usage").is_some_and(Value::is_object)
}

/// True if an event is part of no answer: it holds neither choices, nor usage, nor an error.
/// Metadata and keep-alives of gateways are written so.
pub fn is_foreign(event: &Value) -> bool {
    let choices = event.get("choices").filter(|choices| !choices.is_null());
    let listed = choices.is_some_and(|choices| choices.as_array().is_none_or(|list| !list.is_empty()));
    !listed && error(event).is_none() && !is_usage(event)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_placeholder_is_no_finish_reason() {
        for none in [json!(""), json!("null"), json!("None"), json!(null), json!(false), json!({}), json!(0)]
        {
            assert_eq!(finish_reason(&json!({ "finish_reason": none })), None, "{none}");
        }
        assert_eq!(finish_reason(&json!({})), None);
        for ends in ["stop", "length", "tool_calls", "abort"] {
            assert_eq!(finish_reason(&json!({ "finish_reason": ends })), Some(ends));
        }
    }

    #[test]
    fn a_placeholder_is_no_error() {
        for none in [json!(null), json!(""), json!({}), json!([]), json!(false), json!("null")] {
            assert_eq!(error(&json!({ "error": none })), None, "{none}");
        }
        for some in [json!("out of memory"), json!({"code": 500}), json!(true), json!(7)] {
            assert_eq!(error(&json!({ "error": some })), Some(&some));
        }
        let whole = json!({"object": "error", "message": "no"});
        assert_eq!(error(&whole), Some(&whole));
    }

    #[test]
    fn only_choices_usage_and_errors_belong_to_an_answer() {
        let foreign = [
            json!({}),
            json!(null),
            json!(3),
            json!("ping"),
            json!([]),
            json!({"type": "ping"}),
            json!({"choices": []}),
            json!({"choices": null}),
            json!({"choices": [], "usage": null}),
            json!({"error": {}}),
        ];
        assert!(foreign.iter().all(is_foreign));
        let own = [
            json!({"choices": [{}]}),
            json!({"choices": [], "usage": {"prompt_tokens": 1}}),
            json!({"usage": {"prompt_tokens": 1}}),
            json!({"error": "no"}),
            json!({"choices": "no list"}),
        ];
        assert!(!own.iter().any(is_foreign));
    }

    #[test]
    fn only_a_damaged_object_is_damage() {
        for foreign in ["", "null", "7", "ping", "\"[DONE]\"", "[]", "<html>"] {
            assert_eq!(Data::of(foreign), Data::Foreign(Value::Null), "{foreign}");
        }
        assert_eq!(Data::of(r#"{"type":"ping"}"#), Data::Foreign(json!({"type": "ping"})));
        assert_eq!(Data::of(r#"{"choices":[{"tex"#), Data::Damaged);
        assert!(matches!(Data::of(r#"{"choices":[{"text":"a"}]}"#), Data::Answer(_)));
    }
}
