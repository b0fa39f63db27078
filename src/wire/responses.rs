//! The Responses API of OpenAI as a translation of chats: a request as the chat request that asks
//! the same, the answer to that as a response.
//!
//! As with [`crate::anthropic`], the chat behind it is eligible. Where engines differ, it
//! does as vLLM does (`vllm/entrypoints/openai/responses`, 0.32, without Harmony), but for what
//! that leaves out of the API: an answer that a limit cut ends with `response.incomplete`, and so
//! does its last item; one that broke off ends with `response.failed`; an assistant's message of
//! several parts is sent completely. PURE.

mod custom;
mod echo;
mod events;
mod input;
mod item;
mod request;

pub use echo::Echo;
pub use events::Events;
pub use request::translate;

use serde_json::{Map, Value, json};

use crate::openai::event::finish_reason;
use crate::translation::{logprobs, of_message, set};
use echo::ResponseStatus;
use item::ItemKind;

/// The response for the JSON answer of a chat; its ids are made from `seed`. `None` if that is no
/// answer of a chat.
pub fn response(chat: &Value, echo: &Echo, seed: u64) -> Option<Value> {
    let choice = chat.get("choices")?.get(0)?;
    let state = ResponseStatus::of(finish_reason(choice)?);
    let parts = of_message(choice.get("message")?, seed)?;
    let (rows, last) = (item::logprobs(logprobs(choice)), parts.len().saturating_sub(1));
    let items = parts.into_iter().enumerate().map(|(at, (part, text))| {
        let kind = ItemKind::of(&part, echo);
        let id = kind.id(seed, at as u64);
        let status = if at == last { state.of_item() } else { ResponseStatus::Completed.name() };
        item::item(&part, kind, &id, &item::text_of(kind, text), &rows, status)
    });
    let mut echo = echo.clone();
    echo.begin(chat);
    Some(echo.response(&state, items.collect(), chat.get("usage")))
}

/// Usage of a chat as that of a response. Missing counts are 0: clients need a number.
fn usage(chat: &Value) -> Value {
    let count = |name: &str| chat.get(name).and_then(Value::as_u64).unwrap_or(0);
    let detail = |of: &str, name: &str| chat.get(of).and_then(|of| of.get(name)?.as_u64()).unwrap_or(0);
    let mut usage = Map::new();
    set(&mut usage, "input_tokens", json!(count("prompt_tokens")));
    let cached = detail("prompt_tokens_details", "cached_tokens");
    let written = detail("prompt_tokens_details", "created_cache_tokens");
    set(
        &mut usage,
        "input_tokens_details",
        json!({ "cached_tokens": cached, "cache_write_tokens": written }),
    );
    set(&mut usage, "output_tokens", json!(count("completion_tokens")));
    let reasoning = detail("completion_tokens_details", "reasoning_tokens");
    set(&mut usage, "output_tokens_details", json!({ "reasoning_tokens": reasoning }));
    let total = count("prompt_tokens").saturating_add(count("completion_tokens"));
    set(&mut usage, "total_tokens", json!(total));
    if let Some(foretell) = chat.get("foretell") {
        set(&mut usage, "foretell", foretell.clone());
    }
    Value::Object(usage)
}

fn error_words(chat: Option<&Value>) -> Option<&str> {
    let error = chat?.get("error")?;
    error.get("message").and_then(Value::as_str).or(error.as_str())
}

#[cfg(test)]
mod tests;
