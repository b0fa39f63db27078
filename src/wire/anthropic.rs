//! The Messages API of Anthropic as a translation of chats: a request as the chat request that asks
//! the same, the answer to that as an answer of the Messages API.
//!
//! vLLM, SGLang and llama.cpp serve the Messages API by such a translation themselves; here it
//! stands in front of the chat, so that the chat is eligible, and in front of engines that
//! have no Messages API. Where engines differ, it does as vLLM does
//! (`vllm/entrypoints/anthropic/serving.py`, 0.32). PURE.

mod events;
mod request;
mod unstreamed;

pub use events::Events;
pub use request::{System, translate};
pub use unstreamed::{error, message};

use serde_json::{Map, Value, json};

use crate::translation::digits;

/// Usage of a chat as that of a message: cached prompt tokens are counted apart.
fn usage(chat: Option<&Value>) -> Value {
    let count = |value: Option<&Value>, key: &str| value?.get(key)?.as_u64();
    let details = chat.and_then(|usage| usage.get("prompt_tokens_details"));
    let (cached, created) = (count(details, "cached_tokens"), count(details, "created_cache_tokens"));
    let input = count(chat, "prompt_tokens").unwrap_or(0);
    let fresh = input.saturating_sub(cached.unwrap_or(0)).saturating_sub(created.unwrap_or(0));
    let mut usage = Map::new();
    usage.insert("input_tokens".to_owned(), fresh.into());
    usage.insert("output_tokens".to_owned(), count(chat, "completion_tokens").unwrap_or(0).into());
    for (name, tokens) in [("cache_creation_input_tokens", created), ("cache_read_input_tokens", cached)] {
        if let Some(tokens) = tokens {
            usage.insert(name.to_owned(), tokens.into());
        }
    }
    if let Some(foretell) = chat.and_then(|usage| usage.get("foretell")) {
        usage.insert("foretell".to_owned(), foretell.clone());
    }
    Value::Object(usage)
}

/// Tools that an answer calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Called {
    No,
    /// Some, the last of which may be cut short.
    Yes,
    /// Some, each with its complete arguments.
    Complete,
}

/// `stop_reason` and `stop_sequence` of a message for the finish of a chat; `None` for an answer
/// that the engine broke off. A stop text that cut a call short wins over the call, which must not
/// run. For other reasons (`repetition`) both are null, as vLLM has them.
fn stopped(finish: &str, stop: Option<&Value>, called: Called) -> Option<(Value, Value)> {
    let sequence = stop.filter(|stop| stop.is_string() && called != Called::Complete);
    let reason = match (finish, called, sequence) {
        ("length", ..) => "max_tokens",
        ("content_filter", ..) => "refusal",
        ("stop" | "tool_calls", _, Some(sequence)) => {
            return Some((json!("stop_sequence"), sequence.clone()));
        }
        ("stop", Called::No, None) => "end_turn",
        ("stop" | "tool_calls", _, None) => "tool_use",
        ("abort" | "error", ..) => return None,
        _ => return Some((Value::Null, Value::Null)),
    };
    Some((json!(reason), Value::Null))
}

/// Signature of a block of reasoning, as long as vLLM's are. Nothing is signed by it; clients send
/// it back unread.
fn signature(seed: u64, block: u64) -> String {
    digits(seed, block)
}

#[cfg(test)]
mod tests {
    mod goldens;

    use super::*;

    #[test]
    fn cached_tokens_are_counted_apart() {
        let chat = json!({
            "prompt_tokens": 10,
            "completion_tokens": 3,
            "prompt_tokens_details": { "cached_tokens": 8 },
        });
        let expected = json!({ "input_tokens": 2, "output_tokens": 3, "cache_read_input_tokens": 8 });
        assert_eq!(usage(Some(&chat)), expected);
        assert_eq!(usage(None), json!({ "input_tokens": 0, "output_tokens": 0 }));
    }

    #[test]
    fn a_stop_text_wins_over_a_call_that_it_cut_short_and_a_limit_over_all() {
        let (stop, token) = (json!("END"), json!(7));
        let reason = |finish, stop, called| stopped(finish, stop, called).unwrap().0;
        assert_eq!(reason("length", Some(&stop), Called::Complete), "max_tokens");
        assert_eq!(reason("stop", Some(&stop), Called::Complete), "tool_use");
        let cut = stopped("stop", Some(&stop), Called::Yes);
        assert_eq!(cut, Some((json!("stop_sequence"), json!("END"))));
        assert_eq!(reason("stop", Some(&token), Called::Yes), "tool_use");
        assert_eq!(reason("stop", None, Called::No), "end_turn");
        assert_eq!(reason("content_filter", None, Called::Yes), "refusal");
        assert_eq!(reason("repetition", None, Called::No), Value::Null);
        assert_eq!(stopped("abort", None, Called::No), None);
    }
}
