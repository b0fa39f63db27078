//! Writes the client's answer in the backend's format.
//!
//! The first chunk of the first call is the template: `id`, `created`, `model`, and all other
//! members of the backend's chunks are copied; only text, token ids, `finish_reason` and `usage`
//! are set. Fields that are there only because Foretell requested them are removed.

use serde_json::{Map, Value, json};

use super::request::{Request, Route};
use foretell_core::session::Finish;
use foretell_core::units::TokenId;

/// Fields that Foretell requested and the client did not, so that they must not reach the client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Additive {
    /// `stream_options.include_usage` was added.
    pub usage: bool,
    /// `return_token_ids` was added.
    pub token_ids: bool,
    /// Members of the answer that are there only because Foretell requested them.
    pub members: &'static [&'static str],
    /// Members of its choices that are there only because Foretell requested them.
    pub choice: &'static [&'static str],
    /// Where token ids were not requested, their members are there and null (vLLM).
    pub nulls: bool,
    /// Where usage was not requested, its member is there and null (SGLang).
    pub null_usage: bool,
}

impl Additive {
    /// The additions of a first call of `request` that asks for everything that Foretell needs.
    pub fn of(request: &Request) -> Self {
        Self { usage: !request.include_usage, token_ids: !request.return_token_ids, ..Self::default() }
    }
}

/// The members of a choice in which engines name the stop text or token.
pub const STOPS: [&str; 2] = ["stop_reason", "matched_stop"];
/// The names of token ids in a choice.
pub(super) const TOKEN_IDS: [&str; 2] = ["token_ids", "prompt_token_ids"];

/// Removes the additive fields from a chunk or an answer of the backend.
pub fn strip(answer: &mut Value, additive: Additive) {
    let Some(members) = answer.as_object_mut() else { return };
    match members.get_mut("usage") {
        Some(usage) if additive.usage && additive.null_usage => *usage = Value::Null,
        Some(_) if additive.usage => {
            members.shift_remove("usage");
        }
        _ => {}
    }
    if additive.token_ids {
        absent(members, "prompt_token_ids", additive);
    }
    for name in additive.members {
        members.shift_remove(*name);
    }
    for choice in members.get_mut("choices").and_then(Value::as_array_mut).into_iter().flatten() {
        let Some(choice) = choice.as_object_mut() else { continue };
        if additive.token_ids {
            for name in TOKEN_IDS {
                absent(choice, name, additive);
            }
        }
        for name in additive.choice {
            choice.shift_remove(*name);
        }
    }
}

/// Removes a member, or sets it to null, as in an answer for which it was not requested.
fn absent(members: &mut Map<String, Value>, name: &str, additive: Additive) {
    if !additive.nulls {
        members.shift_remove(name);
    } else if let Some(value) = members.get_mut(name) {
        *value = Value::Null;
    }
}

/// Adds the members of `missing` that `answer` lacks; existing ones stay. Lists are walked in
/// parallel.
pub fn fill(answer: &mut Value, missing: &Value) {
    match (answer, missing) {
        (Value::Object(members), Value::Object(missing)) => {
            for (name, value) in missing {
                match members.get_mut(name) {
                    Some(member) => fill(member, value),
                    None => {
                        members.insert(name.clone(), value.clone());
                    }
                }
            }
        }
        (Value::Array(items), Value::Array(missing)) => {
            items.iter_mut().zip(missing).for_each(|(item, missing)| fill(item, missing));
        }
        _ => {}
    }
}

/// Sorts the members of an object into the order of these names; others follow in their old order.
/// Without an object it does nothing.
pub fn order(object: Option<&mut Value>, names: &[&str]) {
    let Some(members) = object.and_then(Value::as_object_mut) else { return };
    let mut ordered = Map::with_capacity(members.len());
    for name in names {
        ordered.extend(members.shift_remove_entry(*name));
    }
    ordered.extend(std::mem::take(members));
    *members = ordered;
}

/// The shape of every later chunk, and of the unstreamed answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Template {
    route: Route,
    /// The chunk with a single choice, whose text, ids and finish reason are blank.
    chunk: Map<String, Value>,
    choice: Map<String, Value>,
    role: Value,
    /// The members of a chat's delta that are null.
    nulls: Map<String, Value>,
    prompt_token_ids: Option<Value>,
    shows_token_ids: bool,
}

impl Template {
    /// From the first chunk of the backend, with the additive fields. `None` if it is not a chunk
    /// with exactly one choice.
    pub fn from_first_chunk(chunk: &Value, route: Route, additive: Additive) -> Option<Self> {
        let shows_token_ids = !additive.token_ids;
        let prompt_token_ids = if shows_token_ids { prompt_token_ids(chunk).cloned() } else { None };
        let mut stripped = chunk.clone();
        strip(&mut stripped, Additive { token_ids: true, ..additive });
        let mut chunk = stripped.as_object_mut().map(std::mem::take)?;
        if let Some(usage) = chunk.get_mut("usage") {
            *usage = Value::Null;
        }
        let mut choices = match chunk.get_mut("choices")?.take() {
            Value::Array(choices) if choices.len() == 1 => choices,
            _ => return None,
        };
        let mut choice = choices.pop()?.as_object_mut().map(std::mem::take)?;
        choice.insert("finish_reason".to_owned(), Value::Null);
        if let Some(logprobs) = choice.get_mut("logprobs") {
            *logprobs = Value::Null;
        }
        let role = choice.get("delta").and_then(|delta| delta.get("role")).cloned();
        let delta = choice.get("delta").and_then(Value::as_object).into_iter().flatten();
        let nulls =
            delta.filter(|(name, value)| value.is_null() && !matches!(name.as_str(), "role" | "content"));
        let nulls = nulls.map(|(name, _)| (name.clone(), Value::Null)).collect();
        Some(Self {
            nulls,
            route,
            chunk,
            choice,
            role: role.unwrap_or_else(|| json!("assistant")),
            prompt_token_ids,
            shows_token_ids,
        })
    }

    /// A chunk of a stream with this text and its tokens; `finish` is `None` while the output
    /// continues.
    pub fn chunk(&self, text: &str, tokens: &[TokenId], finish: Option<Finish>) -> Value {
        match self.route {
            Route::Completions => {
                let mut choice = self.choice(tokens, finish);
                choice.insert("text".to_owned(), json!(text));
                self.around(vec![Value::Object(choice)])
            }
            Route::Chat => {
                let mut delta = self.nulls.clone();
                delta.insert("content".to_owned(), json!(text));
                self.delta(delta, tokens, finish)
            }
        }
    }

    /// A chunk of a chat's stream with this delta.
    pub fn delta(&self, delta: Map<String, Value>, tokens: &[TokenId], finish: Option<Finish>) -> Value {
        let mut choice = self.choice(tokens, finish);
        choice.insert("delta".to_owned(), Value::Object(delta));
        self.around(vec![Value::Object(choice)])
    }

    /// The delta of a chat's event without text.
    pub fn empty_delta(&self) -> Value {
        Value::Object(self.nulls.clone())
    }

    /// True if its chunks show the token ids.
    pub fn shows_token_ids(&self) -> bool {
        self.shows_token_ids
    }

    /// The chunk that ends a stream whose client requested usage.
    pub fn usage_chunk(&self, usage: Value) -> Value {
        let mut chunk = self.chunk.clone();
        chunk.insert("choices".to_owned(), json!([]));
        chunk.insert("usage".to_owned(), usage);
        Value::Object(chunk)
    }

    /// The answer to a request that does not stream.
    pub fn unstreamed(&self, text: &str, tokens: &[TokenId], finish: Option<Finish>, usage: Value) -> Value {
        let mut choice = self.choice(tokens, finish);
        choice.shift_remove("delta");
        match self.route {
            Route::Completions => choice.insert("text".to_owned(), json!(text)),
            Route::Chat => {
                let message = json!({ "role": self.role, "content": text });
                choice.shift_insert(1, "message".to_owned(), message)
            }
        };
        let ids = self.prompt_token_ids.clone();
        if let (Route::Completions, Some(ids)) = (self.route, ids.clone()) {
            choice.insert("prompt_token_ids".to_owned(), ids);
        }
        let mut answer = self.chunk.clone();
        if self.route == Route::Chat {
            answer.insert("object".to_owned(), json!("chat.completion"));
        }
        answer.insert("choices".to_owned(), json!([choice]));
        answer.insert("usage".to_owned(), usage);
        if let (Route::Chat, Some(ids)) = (self.route, ids) {
            answer.insert("prompt_token_ids".to_owned(), ids);
        }
        Value::Object(answer)
    }

    fn choice(&self, tokens: &[TokenId], finish: Option<Finish>) -> Map<String, Value> {
        let mut choice = self.choice.clone();
        choice.insert("finish_reason".to_owned(), json!(finish.map(Finish::name)));
        if self.shows_token_ids {
            choice.insert("token_ids".to_owned(), json!(tokens));
        }
        choice
    }

    fn around(&self, choices: Vec<Value>) -> Value {
        let mut chunk = self.chunk.clone();
        chunk.insert("choices".to_owned(), Value::Array(choices));
        Value::Object(chunk)
    }
}

/// The prompt's ids, a list, from the member in which the first chunk of either route has them;
/// `None` if it has none.
pub fn prompt_token_ids(chunk: &Value) -> Option<&Value> {
    let of_choice = || chunk.pointer("/choices/0/prompt_token_ids");
    chunk.get("prompt_token_ids").filter(|ids| ids.is_array()).or_else(of_choice).filter(|ids| ids.is_array())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn completion_chunk() -> Value {
        json!({"id": "cmpl-1", "object": "text_completion", "created": 7, "model": "m",
            "choices": [{"index": 0, "text": " is", "logprobs": null, "finish_reason": null,
                "token_ids": [318], "prompt_token_ids": [1, 2, 3]}], "usage": null})
    }

    fn chat_chunk() -> Value {
        json!({"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 7, "model": "m",
            "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": null,
                "finish_reason": null}], "prompt_token_ids": [1, 2]})
    }

    const ALL: Additive =
        Additive { usage: true, token_ids: true, members: &[], choice: &[], nulls: false, null_usage: false };

    #[test]
    fn a_chunk_differs_from_the_first_only_where_necessary() {
        let template = Template::from_first_chunk(&completion_chunk(), Route::Completions, ALL).unwrap();
        assert_eq!(
            template.chunk("x", &[9], Some(Finish::Stop)).to_string(),
            r#"{"id":"cmpl-1","object":"text_completion","created":7,"model":"m","choices":[{"index":0,"text":"x","logprobs":null,"finish_reason":"stop"}]}"#
        );
        let template = Template::from_first_chunk(&chat_chunk(), Route::Chat, ALL).unwrap();
        assert_eq!(
            template.chunk("x", &[9], None).to_string(),
            r#"{"id":"chatcmpl-1","object":"chat.completion.chunk","created":7,"model":"m","choices":[{"index":0,"delta":{"content":"x"},"logprobs":null,"finish_reason":null}]}"#
        );
    }

    #[test]
    fn the_whole_answer_has_the_shape_of_the_route() {
        let usage = json!({"prompt_tokens": 3});
        let template = Template::from_first_chunk(&completion_chunk(), Route::Completions, ALL).unwrap();
        assert_eq!(
            template.unstreamed("ab", &[9, 8], Some(Finish::Length), usage.clone()).to_string(),
            r#"{"id":"cmpl-1","object":"text_completion","created":7,"model":"m","choices":[{"index":0,"text":"ab","logprobs":null,"finish_reason":"length"}],"usage":{"prompt_tokens":3}}"#
        );
        let template = Template::from_first_chunk(&chat_chunk(), Route::Chat, ALL).unwrap();
        assert_eq!(
            template.unstreamed("ab", &[9, 8], Some(Finish::Stop), usage).to_string(),
            r#"{"id":"chatcmpl-1","object":"chat.completion","created":7,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"ab"},"logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens":3}}"#
        );
    }

    #[test]
    fn ids_that_the_client_asked_for_are_kept() {
        let additive = Additive { usage: true, ..Additive::default() };
        let template = Template::from_first_chunk(&completion_chunk(), Route::Completions, additive).unwrap();
        let chunk = template.chunk("x", &[9], None);
        assert_eq!(chunk["choices"][0]["token_ids"], json!([9]));
        assert!(chunk["choices"][0].get("prompt_token_ids").is_none());
        let whole = template.unstreamed("x", &[9], None, json!({}));
        assert_eq!(whole["choices"][0]["prompt_token_ids"], json!([1, 2, 3]));
        let template = Template::from_first_chunk(&chat_chunk(), Route::Chat, additive).unwrap();
        assert_eq!(template.unstreamed("x", &[9], None, json!({}))["prompt_token_ids"], json!([1, 2]));
    }

    #[test]
    fn a_client_that_asked_for_usage_sees_null_until_the_end() {
        let additive = Additive { token_ids: true, ..Additive::default() };
        let mut first = completion_chunk();
        first["usage"] = json!({"prompt_tokens": 3});
        let template = Template::from_first_chunk(&first, Route::Completions, additive).unwrap();
        assert_eq!(template.chunk("x", &[9], None)["usage"], Value::Null);
        let last = template.usage_chunk(json!({"prompt_tokens": 3}));
        assert_eq!((&last["choices"], &last["usage"]), (&json!([]), &json!({"prompt_tokens": 3})));
    }

    #[test]
    fn stripping_leaves_the_members_that_the_client_asked_for() {
        let mut chunk = completion_chunk();
        strip(&mut chunk, Additive::default());
        assert_eq!(chunk, completion_chunk());
        strip(&mut chunk, ALL);
        assert!(chunk.get("usage").is_none());
        assert!(chunk["choices"][0].get("token_ids").is_none());
        assert!(chunk["choices"][0].get("prompt_token_ids").is_none());
        assert_eq!(chunk["choices"][0]["text"], " is");
        let named = Additive { members: &["created"], choice: &["logprobs"], ..Additive::default() };
        strip(&mut chunk, named);
        assert!(chunk.get("created").is_none() && chunk["choices"][0].get("logprobs").is_none());
    }

    #[test]
    fn missing_members_are_filled_in() {
        let mut answer = json!({"choices": [{"message": {"content": "x"}, "stop_reason": "a"}]});
        fill(
            &mut answer,
            &json!({"choices": [{"message": {"refusal": null, "content": null}, "stop_reason": null}], "tier": null}),
        );
        let wanted = json!({"choices": [{"message": {"content": "x", "refusal": null}, "stop_reason": "a"}], "tier": null});
        assert_eq!(answer, wanted);
    }

    #[test]
    fn a_chunk_with_no_or_several_choices_is_no_template() {
        for choices in [json!([]), json!([{"index": 0}, {"index": 1}]), json!(null), json!([7])] {
            let chunk = json!({"id": "x", "choices": choices});
            assert!(Template::from_first_chunk(&chunk, Route::Completions, ALL).is_none());
        }
    }
}
