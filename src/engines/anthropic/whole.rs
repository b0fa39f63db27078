//! A whole answer of a chat as a message.

use serde_json::{Map, Value, json};

use super::{Called, signature, stopped, usage};
use crate::translation::{Part, of_message, set};

/// The message for the JSON answer of a chat; `seed` makes its signatures. `None` if that is no
/// answer of a chat, or a call's arguments are no JSON object.
pub fn message(chat: &Value, seed: u64) -> Option<Value> {
    let choice = chat.get("choices")?.get(0)?;
    let parts = of_message(choice.get("message")?, seed)?;
    let called = parts.iter().any(|(part, _)| matches!(part, Part::Call(_)));
    let blocks = parts.iter().map(|(part, text)| block(part, text, seed));
    let mut content: Vec<Value> = blocks.collect::<Option<_>>()?;
    // Clients expect a first block.
    if content.is_empty() {
        content.push(json!({ "type": "text", "text": "" }));
    }
    let finish = choice.get("finish_reason").and_then(Value::as_str);
    let called = if called { Called::Complete } else { Called::No };
    let (reason, sequence) = stopped(finish, choice.get("stop_reason"), called);
    let mut message = Map::new();
    set(&mut message, "id", chat.get("id").cloned().unwrap_or_default());
    set(&mut message, "type", json!("message"));
    set(&mut message, "role", json!("assistant"));
    set(&mut message, "content", Value::Array(content));
    set(&mut message, "model", chat.get("model").cloned().unwrap_or_default());
    for (name, value) in [("stop_reason", reason), ("stop_sequence", sequence)] {
        if !value.is_null() {
            set(&mut message, name, value);
        }
    }
    set(&mut message, "usage", usage(chat.get("usage").filter(|usage| !usage.is_null())));
    Some(Value::Object(message))
}

fn block(part: &Part, text: &str, seed: u64) -> Option<Value> {
    Some(match part {
        Part::Reasoning => {
            json!({ "type": "thinking", "thinking": text, "signature": signature(seed, 0) })
        }
        Part::Text => json!({ "type": "text", "text": text }),
        Part::Call(call) => {
            let arguments = if text.is_empty() { "{}" } else { text };
            let input: Map<String, Value> = serde_json::from_str(arguments).ok()?;
            json!({ "type": "tool_use", "id": call.id, "name": call.name, "input": input })
        }
    })
}

/// The error of the Messages API for an error answer of a chat, with `words` where it has none.
pub fn error(chat: Option<&Value>, words: &str) -> Value {
    let inner = chat.and_then(|chat| chat.get("error")).filter(|error| error.is_object()).or(chat);
    let text = |name: &str| inner?.get(name)?.as_str();
    let kind = text("type").filter(|kind| *kind != "error").unwrap_or("api_error");
    json!({ "type": "error", "error": { "type": kind, "message": text("message").unwrap_or(words) } })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(message: &Value, finish: &str) -> Value {
        json!({
            "id": "chatcmpl-1", "object": "chat.completion", "model": "m",
            "choices": [{ "index": 0, "message": message, "finish_reason": finish, "stop_reason": null }],
            "usage": { "prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7 },
        })
    }

    #[test]
    fn text_reasoning_and_calls_are_blocks_in_that_order() {
        let call =
            json!({ "id": "c1", "type": "function", "function": { "name": "f", "arguments": "{\"a\": 1}" } });
        let chat = answer(&json!({ "content": "Hi", "reasoning": "Hm", "tool_calls": [call] }), "tool_calls");
        let message = message(&chat, 7).unwrap();
        let expected = json!({
            "id": "chatcmpl-1", "type": "message", "role": "assistant",
            "content": [
                { "type": "thinking", "thinking": "Hm", "signature": signature(7, 0) },
                { "type": "text", "text": "Hi" },
                { "type": "tool_use", "id": "c1", "name": "f", "input": { "a": 1 } },
            ],
            "model": "m", "stop_reason": "tool_use", "usage": { "input_tokens": 5, "output_tokens": 2 },
        });
        assert_eq!(message, expected);
    }

    #[test]
    fn an_empty_answer_has_one_empty_block_and_a_broken_call_is_no_message() {
        let empty = message(&answer(&json!({ "content": null }), "stop"), 1).unwrap();
        assert_eq!(empty["content"], json!([{ "type": "text", "text": "" }]));
        assert_eq!(empty["stop_reason"], "end_turn");
        let call = json!({ "id": "c1", "function": { "name": "f", "arguments": "{\"a" } });
        assert_eq!(message(&answer(&json!({ "tool_calls": [call] }), "length"), 1), None);
        assert_eq!(message(&json!({ "object": "list" }), 1), None);
    }

    #[rstest::rstest]
    #[case(json!({ "error": { "message": "no", "type": "NotFoundError", "code": 404 } }), "NotFoundError", "no")]
    #[case(json!({ "object": "error", "message": "no", "type": "BadRequestError" }), "BadRequestError", "no")]
    #[case(json!({ "error": "no" }), "api_error", "words")]
    #[case(json!(7), "api_error", "words")]
    fn errors_keep_their_type_and_words(#[case] chat: Value, #[case] kind: &str, #[case] words: &str) {
        let expected = json!({ "type": "error", "error": { "type": kind, "message": words } });
        assert_eq!(error(Some(&chat), "words"), expected);
    }
}
