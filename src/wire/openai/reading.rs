//! Text and token counts of an answer, or of one event of a stream, read without changing it.

use serde_json::Value;

use super::event::finish_reason;
use super::parts::REASONING;

/// The content of an answer or an event.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reading<'a> {
    /// Text of its choice: the content, or the text of a completion; empty if there is none.
    pub text: &'a str,
    /// Reasoning that the server's parser has taken out of the text; empty if there is none.
    pub reasoning: &'a str,
    /// The choice holds something other than text, such as tool calls or log-probabilities.
    pub other: bool,
    /// Finish reason; `None` while the output continues.
    pub finish: Option<&'a str>,
    /// Tokens of the prompt and tokens of the output, as the server counts them; `None` if it does
    /// not report both here.
    pub usage: Option<(u64, u64)>,
}

impl<'a> Reading<'a> {
    /// Reads an unstreamed answer, or the data of one event.
    pub fn of(answer: &'a Value) -> Self {
        let usage = answer.get("usage").and_then(|usage| {
            Some((usage.get("prompt_tokens")?.as_u64()?, usage.get("completion_tokens")?.as_u64()?))
        });
        let Some(choice) = answer.pointer("/choices/0") else { return Self { usage, ..Self::default() } };
        let message = choice.get("delta").or_else(|| choice.get("message"));
        let text = message.map_or_else(|| choice.get("text"), |message| message.get("content"));
        let member = |name: &str| message.and_then(|message| message.get(name)).and_then(Value::as_str);
        let members = message.and_then(Value::as_object).into_iter().flatten();
        let mut foreign = members.filter(|(name, _)| !matches!(name.as_str(), "role" | "content"));
        Self {
            text: text.and_then(Value::as_str).unwrap_or_default(),
            reasoning: REASONING.into_iter().find_map(member).unwrap_or_default(),
            other: foreign.any(|(_, value)| !is_nothing(value)),
            finish: finish_reason(choice),
            usage,
        }
    }
}

/// True if a member is empty: null, or an empty list or text.
fn is_nothing(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(items) => items.is_empty(),
        Value::String(text) => text.is_empty(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn events_and_answers_of_both_routes_read_alike() {
        let chunk = json!({"choices": [{"delta": {"role": "assistant", "content": "a"}}]});
        let whole = json!({"choices": [{"message": {"role": "assistant", "content": "a", "tool_calls": [],
            "reasoning": null}}]});
        let completion = json!({"choices": [{"text": "a"}]});
        for answer in [chunk, whole, completion] {
            assert_eq!(Reading::of(&answer), Reading { text: "a", ..Reading::default() });
        }
    }

    #[test]
    fn content_other_than_text_is_recognised() {
        let thinks = json!({"choices": [{"delta": {"reasoning": "hm", "content": null}}]});
        assert_eq!(Reading::of(&thinks), Reading { reasoning: "hm", other: true, ..Reading::default() });
        let last = json!({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}});
        assert_eq!(Reading::of(&last), Reading { usage: Some((3, 5)), ..Reading::default() });
        let ends = json!({"choices": [{"text": "", "finish_reason": "stop"}]});
        assert_eq!(Reading::of(&ends), Reading { finish: Some("stop"), ..Reading::default() });
    }
}
