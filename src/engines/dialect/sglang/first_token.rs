//! The first token of a chat as an answer of its own: the streams of SGLang's chats tell no ids,
//! its whole answers do (0.5.23, `serving_chat.py`).

use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::dialect::shared::bytes;
use crate::dialect::{Call, FirstToken};
use crate::openai::Request;
use foretell_core::units::TokenId;

/// The client's own request, for one token and its ids.
pub fn request(request: &Request) -> Call {
    let mut body = request.body.clone();
    for name in ["prediction", "stream_options", "max_completion_tokens"] {
        body.shift_remove(name);
    }
    let one = [("stream", json!(false)), ("max_tokens", json!(1))];
    let ids = ["return_token_ids", "return_prompt_token_ids"].map(|name| (name, json!(true)));
    body.extend(one.into_iter().chain(ids).map(|(name, value)| (name.to_owned(), value)));
    Call { path: request.route.path(), body: bytes(&body) }
}

#[derive(Deserialize)]
struct Answer {
    id: Value,
    created: Value,
    model: Value,
    choices: [Choice; 1],
    usage: Value,
}

#[derive(Deserialize)]
struct Choice {
    message: Map<String, Value>,
    finish_reason: String,
    #[serde(default)]
    matched_stop: Value,
    prompt_token_ids: Vec<TokenId>,
    response_token_ids: [TokenId; 1],
}

/// Reads the answer; `None` if it has anything but a text, or not exactly one token.
pub fn read(answer: &Value) -> Option<FirstToken> {
    let Answer { id, created, model, choices: [choice], usage } = Answer::deserialize(answer).ok()?;
    let is_text =
        |(name, value): (&String, &Value)| matches!(name.as_str(), "role" | "content") || value.is_null();
    if !choice.message.iter().all(is_text) {
        return None;
    }
    let text = choice.message.get("content")?.as_str()?.to_owned();
    let finish = match choice.finish_reason.as_str() {
        "length" => Value::Null,
        // At a stop text the last token has lost its text.
        "stop" if choice.matched_stop.is_number() => json!("stop"),
        _ => return None,
    };
    let event = |choices: Value, usage: Option<Value>| {
        let mut event = json!({"id": id, "object": "chat.completion.chunk", "created": created, "model": model,
            "choices": choices});
        if let (Some(members), Some(usage)) = (event.as_object_mut(), usage) {
            members.insert("usage".to_owned(), usage);
        }
        event
    };
    // In the order of its own events (`sse_utils.py`).
    let role = json!([{"index": 0, "delta": {"reasoning_content": null, "role": "assistant", "content": ""},
        "logprobs": null, "finish_reason": null, "matched_stop": null}]);
    let [token] = choice.response_token_ids;
    let first = json!([{"index": 0, "delta": {"reasoning_content": null, "content": text}, "logprobs": null,
        "finish_reason": finish, "matched_stop": choice.matched_stop, "token_ids": [token],
        "prompt_token_ids": choice.prompt_token_ids}]);
    Some(FirstToken {
        role: event(role, None),
        usage: event(json!([]), Some(usage)),
        first: event(first, None),
        token,
        text,
    })
}
