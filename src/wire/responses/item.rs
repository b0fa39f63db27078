//! The parts of a chat's answer as items of a response.

use serde_json::{Map, Value, json};

use super::custom::Growing;
use super::echo::Echo;
use crate::translation::{AnswerPart, digits, set};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ItemKind {
    Reasoning,
    Message,
    Function,
    Custom,
}

impl ItemKind {
    pub fn of(part: &AnswerPart, echo: &Echo) -> Self {
        match part {
            AnswerPart::Reasoning => Self::Reasoning,
            AnswerPart::Text => Self::Message,
            AnswerPart::Call(call) if echo.is_custom(&call.name) => Self::Custom,
            AnswerPart::Call(_) => Self::Function,
        }
    }

    pub fn id(self, seed: u64, number: u64) -> String {
        let prefix = match self {
            Self::Reasoning => "rs",
            Self::Message => "msg",
            Self::Function => "fc",
            Self::Custom => "ctc",
        };
        format!("{prefix}_{}", digits(seed, number))
    }

    /// The part of content that a text is; calls have none.
    pub fn content(self, text: &str, logprobs: &[Value]) -> Option<Value> {
        let mut part = Map::new();
        match self {
            Self::Function | Self::Custom => return None,
            Self::Reasoning => {
                set(&mut part, "text", json!(text));
                set(&mut part, "type", json!("reasoning_text"));
            }
            Self::Message => {
                set(&mut part, "annotations", json!([]));
                set(&mut part, "text", json!(text));
                set(&mut part, "type", json!("output_text"));
                if !logprobs.is_empty() || text.is_empty() {
                    set(&mut part, "logprobs", json!(logprobs));
                }
            }
        }
        Some(Value::Object(part))
    }
}

/// An item; without a text, as it begins. `text` of a call is its arguments, or its input.
pub(super) fn item(
    part: &AnswerPart,
    kind: ItemKind,
    id: &str,
    text: &str,
    logprobs: &[Value],
    status: &str,
) -> Value {
    let content = if text.is_empty() { None } else { kind.content(text, logprobs) };
    let content = content.map(|content| json!([content]));
    let mut item = Map::new();
    let mut put = |name: &str, value: Value| set(&mut item, name, value);
    match part {
        AnswerPart::Reasoning => {
            put("id", json!(id));
            put("summary", json!([]));
            put("type", json!("reasoning"));
            if let Some(content) = content {
                put("content", content);
            }
            put("status", json!(status));
        }
        AnswerPart::Text => {
            put("id", json!(id));
            put("content", content.unwrap_or_else(|| json!([])));
            put("role", json!("assistant"));
            put("status", json!(status));
            put("type", json!("message"));
        }
        AnswerPart::Call(call) if kind == ItemKind::Custom => {
            put("call_id", json!(call.id));
            put("input", json!(text));
            put("name", json!(call.name));
            put("type", json!("custom_tool_call"));
            put("id", json!(id));
        }
        AnswerPart::Call(call) => {
            put("arguments", json!(text));
            put("call_id", json!(call.id));
            put("name", json!(call.name));
            put("type", json!("function_call"));
            put("id", json!(id));
            put("status", json!(status));
        }
    }
    Value::Object(item)
}

/// The text of an item: the arguments of a free-form tool's call hold its input.
pub(super) fn text_of(kind: ItemKind, text: String) -> String {
    if kind != ItemKind::Custom {
        return text;
    }
    // As the events of a stream have it, also where the text was cut.
    let mut input = Growing::default();
    input.push(&text);
    input.end(&text).0
}

/// Log-probabilities as a complete item has them.
pub(super) fn logprobs(chat: &[Value]) -> Vec<Value> {
    chat.iter().map(|row| row_of(row, &["token", "bytes", "logprob"])).collect()
}

/// Log-probabilities as an event has them.
pub(super) fn streamed_logprobs(chat: &[Value]) -> Vec<Value> {
    chat.iter().map(|row| row_of(row, &["token", "logprob"])).collect()
}

fn row_of(row: &Value, names: &[&str]) -> Value {
    let selected = |row: &Value| -> Map<String, Value> {
        names.iter().map(|name| ((*name).to_owned(), row.get(*name).cloned().unwrap_or_default())).collect()
    };
    let mut made = selected(row);
    let top = row.get("top_logprobs").and_then(Value::as_array).into_iter().flatten();
    set(&mut made, "top_logprobs", top.map(|row| Value::Object(selected(row))).collect());
    Value::Object(made)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[rstest::rstest]
    #[case::whole(r#"{"input": "ab"}"#, "ab")]
    #[case::cut(r#"{"input": "ab"#, "ab")]
    #[case::no_json("patch it", "patch it")]
    fn the_input_of_a_free_form_call_is_that_of_its_stream(#[case] arguments: &str, #[case] wanted: &str) {
        assert_eq!(text_of(ItemKind::Custom, arguments.to_owned()), wanted);
        assert_eq!(text_of(ItemKind::Function, arguments.to_owned()), arguments);
    }
}
