//! An unstreamed answer of a chat as a message.

use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::{Called, signature, stopped, usage};
use crate::openai::event::finish_reason;
use crate::translation::{AnswerPart, of_message, stop};

/// Members that engines add to their answers for other parts of a deployment.
const ADDED: [&str; 2] = ["kv_transfer_params", "ec_transfer_params"];

/// The message, as JSON text, for the JSON answer of a chat; `seed` makes its signatures. Arguments
/// of calls stand in it as they came: their numbers may be longer than 64 bits. `None` if that is
/// no answer of a chat or one that the engine broke off, or a call's arguments are no JSON object.
pub fn message(chat: &Value, seed: u64) -> Option<String> {
    let choice = chat.get("choices")?.get(0)?;
    let parts = of_message(choice.get("message")?, seed)?;
    let called = parts.iter().any(|(part, _)| matches!(part, AnswerPart::Call(_)));
    let blocks = parts.iter().map(|(part, text)| block(part, text, seed));
    let mut content: Vec<String> = blocks.collect::<Option<_>>()?;
    // Clients expect a first block.
    if content.is_empty() {
        content.push(json!({ "type": "text", "text": "" }).to_string());
    }
    let finish = finish_reason(choice)?;
    let called = if called { Called::Complete } else { Called::No };
    let (reason, sequence) = stopped(finish, stop(choice), called)?;
    let of_chat = |name: &str| chat.get(name).cloned().unwrap_or_default();
    let mut members = vec![
        ("id", of_chat("id").to_string()),
        ("type", json!("message").to_string()),
        ("role", json!("assistant").to_string()),
        ("content", format!("[{}]", content.join(","))),
        ("model", of_chat("model").to_string()),
    ];
    let added = ADDED.map(|name| (name, of_chat(name)));
    let some = [("stop_reason", reason), ("stop_sequence", sequence)].into_iter().chain(added);
    members.extend(some.filter(|(_, value)| !value.is_null()).map(|(name, value)| (name, value.to_string())));
    members.push(("usage", usage(chat.get("usage").filter(|usage| !usage.is_null())).to_string()));
    Some(object(&members))
}

fn block(part: &AnswerPart, text: &str, seed: u64) -> Option<String> {
    Some(match part {
        AnswerPart::Reasoning => {
            json!({ "type": "thinking", "thinking": text, "signature": signature(seed, 0) }).to_string()
        }
        AnswerPart::Text => json!({ "type": "text", "text": text }).to_string(),
        AnswerPart::Call(call) => {
            let arguments = if text.is_empty() { "{}" } else { text };
            let input: &RawValue = serde_json::from_str(arguments).ok()?;
            let input = Some(input.get()).filter(|input| input.starts_with('{'))?;
            let (id, name) = (json!(call.id).to_string(), json!(call.name).to_string());
            let kind = json!("tool_use").to_string();
            object(&[("type", kind), ("id", id), ("name", name), ("input", input.to_owned())])
        }
    })
}

/// The JSON text of an object with these members, of which the values are JSON text.
fn object(members: &[(&str, String)]) -> String {
    let members: Vec<String> = members.iter().map(|(name, value)| format!("\"{name}\":{value}")).collect();
    format!("{{{}}}", members.join(","))
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
        let message: Value = serde_json::from_str(&message(&chat, 7).unwrap()).unwrap();
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

    #[rstest::rstest]
    #[case::vllm("stop_reason")]
    #[case::sglang("matched_stop")]
    fn a_stop_text_is_read_under_either_name(#[case] name: &str) {
        let mut chat = answer(&json!({ "content": "Hi" }), "stop");
        let choice = chat["choices"][0].as_object_mut().unwrap();
        choice.shift_remove("stop_reason");
        choice.insert(name.to_owned(), json!("END"));
        let message: Value = serde_json::from_str(&message(&chat, 1).unwrap()).unwrap();
        assert_eq!(
            (&message["stop_reason"], &message["stop_sequence"]),
            (&json!("stop_sequence"), &json!("END"))
        );
    }

    #[test]
    fn an_empty_answer_has_one_empty_block_and_a_broken_call_is_no_message() {
        let empty = message(&answer(&json!({ "content": null }), "stop"), 1).unwrap();
        let empty: Value = serde_json::from_str(&empty).unwrap();
        assert_eq!(empty["content"], json!([{ "type": "text", "text": "" }]));
        assert_eq!(empty["stop_reason"], "end_turn");
        let call = json!({ "id": "c1", "function": { "name": "f", "arguments": "{\"a" } });
        assert_eq!(message(&answer(&json!({ "tool_calls": [call] }), "length"), 1), None);
        assert_eq!(message(&json!({ "object": "list" }), 1), None);
        assert_eq!(message(&answer(&json!({ "content": "Hi" }), "abort"), 1), None);
    }

    #[test]
    fn arguments_stand_as_they_came_and_added_members_are_kept() {
        let nested = format!("{}1{}", "[".repeat(200), "]".repeat(200));
        let arguments = format!("{{\"id\": 12345678901234567890123, \"b\": -0, \"c\": {nested}}}");
        let call = json!({ "id": "c1", "function": { "name": "f", "arguments": arguments } });
        let mut chat = answer(&json!({ "tool_calls": [call] }), "tool_calls");
        chat["kv_transfer_params"] = json!({ "a": 1 });
        let message = message(&chat, 1).unwrap();
        assert!(message.contains(&format!("\"input\":{arguments}}}")), "{message}");
        assert!(message.contains("\"kv_transfer_params\":{\"a\":1}"), "{message}");
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
