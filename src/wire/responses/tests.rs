//! Translations against those of vLLM: `tests/goldens/responses.jsonl`, recorded by
//! `tests/engines/responses.py`.

use serde_json::{Map, Value, json};

use super::{Echo, Events, response, translate};
use crate::translation::{Thinking, goldens};

fn echo(record: &Value) -> Echo {
    translate(&record["asked"], Thinking::Effort).unwrap().1
}

/// Without members that are null or that vLLM alone has, with ids as in the file.
fn comparable(value: &Value) -> Value {
    /// Counts of rounds with tools of the server, of which there is one.
    const ROUNDS: [&str; 5] = [
        "input_tokens_per_turn",
        "cached_tokens_per_turn",
        "output_tokens_per_turn",
        "tool_output_tokens_per_turn",
        "tool_output_tokens",
    ];
    match value {
        Value::Object(members) => {
            let present =
                members.iter().filter(|(name, value)| !value.is_null() && !ROUNDS.contains(&name.as_str()));
            Value::Object(
                present.map(|(name, value)| (name.clone(), comparable(value))).collect::<Map<_, _>>(),
            )
        }
        Value::Array(items) => items.iter().map(comparable).collect(),
        Value::String(text) => match text.split_once('_') {
            Some((kind @ ("resp" | "msg" | "rs" | "fc" | "ctc"), _)) => json!(format!("{kind}_ID")),
            _ => value.clone(),
        },
        other => other.clone(),
    }
}

/// A response of vLLM's where it differs by intent: what a limit cut says so in its last item too.
fn limited(response: &mut Value) {
    let cut = response["status"] == "incomplete";
    let last = response["output"].as_array_mut().and_then(|output| output.last_mut());
    if let Some(last) = last
        && cut
    {
        last["status"] = json!("incomplete");
    }
}

/// The same for the events: those of the end, and of the last item.
fn limited_events(events: &mut [Value]) {
    let last = events.iter().rposition(|event| event["item"].is_object());
    let Some(end) = events.last_mut().filter(|end| end["response"]["status"] == "incomplete") else { return };
    end["type"] = json!("response.incomplete");
    limited(&mut end["response"]);
    if let Some(last) = last {
        events[last]["item"]["status"] = json!("incomplete");
    }
}

#[test]
fn requests_become_chats_that_ask_vllm_for_the_same() {
    for record in goldens("responses.jsonl", "request") {
        let (mut chat, _) = translate(&record["request"], Thinking::Effort).unwrap();
        let messages = chat["messages"].as_array_mut().unwrap();
        for part in messages.iter_mut().filter_map(|message| message["content"].as_array_mut()).flatten() {
            // vLLM's chat takes no note of it.
            part["image_url"].as_object_mut().map(|image| image.remove("detail"));
        }
        assert_eq!(comparable(&chat), comparable(&record["chat"]), "{}", record["request"]);
    }
}

#[test]
fn streams_become_the_events_that_vllm_makes_of_them_to_the_byte() {
    for record in goldens("responses.jsonl", "stream") {
        let (mut events, mut out) = (Events::stream(echo(&record), 1), Vec::new());
        for chunk in record["stream"].as_array().unwrap() {
            events.push(chunk.as_str().unwrap(), &mut out);
        }
        let made = read(&String::from_utf8(out).unwrap());
        let recorded = record["events"].as_array().unwrap().iter();
        let mut wanted: Vec<Value> = recorded.flat_map(|event| read(event.as_str().unwrap())).collect();
        limited_events(&mut wanted);
        for (made, wanted) in made.iter().zip(&wanted) {
            // What is repeated of the request has the client's order of members.
            if made["response"].is_object() {
                assert_eq!(made, wanted);
            } else {
                assert_eq!(made.to_string(), wanted.to_string());
            }
        }
        assert_eq!(made.len(), wanted.len());
    }
}

/// The events of a stream, comparable.
fn read(text: &str) -> Vec<Value> {
    let events = text.split("\n\n").filter(|event| !event.is_empty());
    let data = |event: &str| {
        let (name, data) = event.split_once('\n').unwrap();
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(name.strip_prefix("event: "), data["type"].as_str());
        comparable(&data)
    };
    events.map(data).collect()
}

#[test]
fn whole_answers_become_the_responses_that_vllm_makes_of_them() {
    for record in goldens("responses.jsonl", "whole") {
        let made = comparable(&response(&record["whole"], &echo(&record), 1).unwrap());
        let mut wanted = comparable(&serde_json::from_str(record["response"].as_str().unwrap()).unwrap());
        limited(&mut wanted);
        // vLLM gives reasoning a status in streams only.
        let reasoning = |item: &&mut Value| item["type"] == "reasoning";
        for item in wanted["output"].as_array_mut().unwrap().iter_mut().filter(reasoning) {
            item["status"] = json!("completed");
        }
        assert_eq!(made, wanted, "{}", record["whole"]);
    }
}
