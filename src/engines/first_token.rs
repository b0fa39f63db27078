//! The first token of a chat as a separate answer: streams of SGLang's chats report no ids,
//! unstreamed answers do (0.5.23, `serving_chat.py`).

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::shared::bytes;
use super::{Call, Unreadable};
use foretell_core::units::TokenId;
use foretell_wire::openai::Request;

/// The events with which the stream of a chat would have begun, made from an answer of one token
/// ([`read`]).
#[derive(Clone, Debug, PartialEq)]
pub struct FirstToken {
    /// The event with the role.
    pub role: Value,
    /// An event with the usage so far, which streams do not have.
    pub usage: Value,
    /// The event of the token, with its id, which streams do not have.
    pub event: Value,
    /// Ids of the prompt.
    pub prompt: Vec<TokenId>,
    /// The token.
    pub token: TokenId,
    /// The text that the server sent for it; `None` if a stop text has cut that.
    pub text: Option<String>,
}

/// The client's request, for one token and its ids.
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
    #[serde(default)]
    sglext: Value,
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

/// Reads the answer; `None` if the server broke it off.
///
/// # Errors
/// It has no ids, or anything but a text.
pub fn read(answer: &Value) -> Result<Option<FirstToken>, Unreadable> {
    let read = Answer::deserialize(answer).map_err(|_| Unreadable("no answer of one token with its ids"))?;
    let Answer { id, created, model, choices: [choice], usage, sglext } = read;
    let is_text =
        |(name, value): (&String, &Value)| matches!(name.as_str(), "role" | "content") || value.is_null();
    let content = choice.message.get("content").and_then(Value::as_str);
    let is_plain = choice.message.iter().all(is_text) && sglext.is_null();
    let content = if is_plain { content } else { None };
    let content = content.ok_or(Unreadable("something was made of the text"))?;
    if usage.get("prompt_tokens").and_then(Value::as_u64) != Some(choice.prompt_token_ids.len() as u64) {
        return Err(Unreadable("it counts another prompt"));
    }
    // Whoever continues finds the text that a stop text has cut.
    let cut = choice.matched_stop.is_string();
    let finish = match choice.finish_reason.as_str() {
        "length" => Value::Null,
        "stop" if cut => Value::Null,
        "stop" => json!("stop"),
        _ => return Ok(None),
    };
    let event = |choices: Value, usage: Option<Value>| {
        let mut event = json!({"id": id, "object": "chat.completion.chunk", "created": created, "model": model,
            "choices": choices});
        if let (Some(members), Some(usage)) = (event.as_object_mut(), usage) {
            members.insert("usage".to_owned(), usage);
        }
        event
    };
    // In the order of SGLang's events (`sse_utils.py`).
    let role = json!([{"index": 0, "delta": {"reasoning_content": null, "role": "assistant", "content": ""},
        "logprobs": null, "finish_reason": null, "matched_stop": null}]);
    let [token] = choice.response_token_ids;
    let matched = (!cut).then_some(choice.matched_stop);
    let first = json!([{"index": 0, "delta": {"reasoning_content": null, "content": content}, "logprobs": null,
        "finish_reason": finish, "matched_stop": matched, "token_ids": [token]}]);
    Ok(Some(FirstToken {
        role: event(role, None),
        usage: event(json!([]), Some(usage)),
        event: event(first, None),
        prompt: choice.prompt_token_ids,
        token,
        text: (!cut).then(|| content.to_owned()),
    }))
}
