//! Translations against those of vLLM: `tests/goldens/messages.jsonl`, recorded by
//! `tests/engines/messages.py`.

use serde_json::{Map, Value};

use crate::anthropic::{Events, System, message, translate};
use crate::translation::{Thinking, goldens};

fn with(member: &str) -> Vec<Value> {
    goldens("messages.jsonl", member)
}

/// A text with each signature written as vLLM's are in the file.
fn unsigned(text: &str) -> String {
    let mut parts = text.split("\"signature\":\"");
    let mut masked = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (digits, rest) = part.split_at(32);
        assert!(digits.bytes().all(|digit| digit.is_ascii_hexdigit()), "{part}");
        masked.push_str("\"signature\":\"SIGNATURE");
        masked.push_str(rest);
    }
    masked
}

/// A chat request with the arguments of calls as values: both sides write them as JSON, with other
/// spaces. Members that are null or false by default are ignored.
fn comparable(chat: &Value) -> Value {
    fn read(value: &Value) -> Value {
        match value {
            Value::Object(members) => {
                let kept = members.iter().filter(|(_, value)| !value.is_null());
                let mut kept: Map<String, Value> =
                    kept.map(|(name, value)| (name.clone(), read(value))).collect();
                if let Some(arguments) = kept.get("arguments").and_then(Value::as_str) {
                    let parsed = serde_json::from_str(arguments).unwrap();
                    kept.insert("arguments".to_owned(), parsed);
                }
                Value::Object(kept)
            }
            Value::Array(items) => items.iter().map(read).collect(),
            other => other.clone(),
        }
    }
    let mut chat = read(chat);
    let members = chat.as_object_mut().unwrap();
    for (name, default) in [("stream", false), ("parallel_tool_calls", true)] {
        if members.get(name) == Some(&Value::Bool(default)) {
            members.remove(name);
        }
    }
    // Without tools it asks for nothing.
    if !members.contains_key("tools") {
        members.remove("tool_choice");
    }
    chat
}

#[test]
fn requests_become_the_chats_that_vllm_makes_of_them() {
    for record in with("request") {
        let system = if record["merged"] == true { System::Merged } else { System::Separate };
        let made = translate(&record["request"], system, Thinking::Effort).unwrap();
        assert_eq!(comparable(&made), comparable(&record["chat"]), "{}", record["request"]);
    }
}

#[test]
fn streams_become_the_events_that_vllm_makes_of_them_to_the_byte() {
    for record in with("stream") {
        let (mut events, mut out) = (Events::stream(1), Vec::new());
        for chunk in record["stream"].as_array().unwrap() {
            events.push(chunk.as_str().unwrap(), &mut out);
        }
        let expected: String =
            record["events"].as_array().unwrap().iter().map(|event| event.as_str().unwrap()).collect();
        assert_eq!(unsigned(&String::from_utf8(out).unwrap()), expected);
    }
}

#[test]
fn whole_answers_become_the_messages_that_vllm_makes_of_them() {
    for record in with("whole") {
        let made = message(&record["whole"], 1).unwrap();
        let made: Value = serde_json::from_str(&unsigned(&made)).unwrap();
        assert_eq!(made, record["message"]);
    }
}
