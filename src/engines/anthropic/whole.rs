//! A whole answer of a chat as a message.

use serde_json::{Map, Value, json};

use super::{Called, signature, stopped, usage};

/// The message for the JSON answer of a chat; `seed` makes its signatures. `None` if that is no
/// answer of a chat, or a call's arguments are no JSON object.
pub fn message(chat: &Value, seed: u64) -> Option<Value> {
    let choice = chat.get("choices")?.get(0)?;
    let said = choice.get("message")?;
    let text = |name: &str| said.get(name).and_then(Value::as_str).filter(|text| !text.is_empty());
    let mut content = Vec::new();
    if let Some(reasoning) = text("reasoning").or_else(|| text("reasoning_content")) {
        let signature = signature(seed, 0);
        content.push(json!({ "type": "thinking", "thinking": reasoning, "signature": signature }));
    }
    content.extend(text("content").map(|text| json!({ "type": "text", "text": text })));
    let calls = said.get("tool_calls").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    for call in calls {
        content.push(tool_use(call)?);
    }
    // Clients expect a first block.
    if content.is_empty() {
        content.push(json!({ "type": "text", "text": "" }));
    }
    let finish = choice.get("finish_reason").and_then(Value::as_str);
    let called = if calls.is_empty() { Called::No } else { Called::Complete };
    let (reason, sequence) = stopped(finish, choice.get("stop_reason"), called);
    let mut message = Map::new();
    let mut set = |name: &str, value: Value| message.insert(name.to_owned(), value);
    set("id", chat.get("id").cloned().unwrap_or_default());
    set("type", json!("message"));
    set("role", json!("assistant"));
    set("content", Value::Array(content));
    set("model", chat.get("model").cloned().unwrap_or_default());
    for (name, value) in [("stop_reason", reason), ("stop_sequence", sequence)] {
        if !value.is_null() {
            set(name, value);
        }
    }
    set("usage", usage(chat.get("usage").filter(|usage| !usage.is_null())));
    Some(Value::Object(message))
}

fn tool_use(call: &Value) -> Option<Value> {
    let function = call.get("function")?;
    let arguments = function.get("arguments").and_then(Value::as_str).unwrap_or("{}");
    let input: Map<String, Value> = serde_json::from_str(arguments).ok()?;
    Some(json!({ "type": "tool_use", "id": call.get("id")?, "name": function.get("name")?, "input": input }))
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
