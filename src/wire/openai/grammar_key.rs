//! Identifies the requests whose output a server binds by the same grammar, or by none.

use sha2::{Digest, Sha256};

use super::parameters::{self, Treatment};
use super::request::Request;

/// SHA-256 over the members of a request that its grammar may depend on: all but the messages and
/// those that never change an output. vLLM makes the grammar of tools, tool choice, formats,
/// switches and template variables, and reads no message for it (0.32,
/// `renderers/online_renderer.py`, and `adjust_request` of every parser).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GrammarKey([u8; 32]);

impl GrammarKey {
    /// The key of a request. Members in another order make another key.
    pub fn of(request: &Request) -> Self {
        let mut hash = Sha256::new();
        for (name, value) in request.body.iter().filter(|(name, _)| matters(request, name)) {
            // Lengths are hashed too, so that members cannot run together.
            for text in [name, &value.to_string()] {
                hash.update((text.len() as u64).to_le_bytes());
                hash.update(text.as_bytes());
            }
        }
        Self(hash.finalize().into())
    }
}

fn matters(request: &Request, name: &str) -> bool {
    let row = parameters::find(request.route, name);
    name != "messages" && row.is_none_or(|row| row.treatment != Treatment::Inert)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::openai::{Route, understand};

    fn key(more: &Value) -> GrammarKey {
        let tool = json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}});
        let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "a"}], "tools": [tool], "stream": true});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        GrammarKey::of(&understand(Route::Chat, body.to_string().as_bytes()).unwrap().0)
    }

    #[test]
    fn messages_and_names_for_the_log_make_no_difference() {
        for same in [
            json!({"messages": [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]}),
            json!({"user": "u"}),
            json!({"metadata": {"turn": 2}}),
            json!({"prompt_cache_key": "k"}),
        ] {
            assert_eq!(key(&same), key(&json!({})), "{same}");
        }
    }

    #[test]
    fn every_other_member_makes_another_key() {
        let tool = |name: &str, more: &Value| {
            let mut function = json!({"name": name, "parameters": {"type": "object"}});
            function.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            json!({"tools": [{"type": "function", "function": function}]})
        };
        let others = [
            tool("g", &json!({})),
            tool("f", &json!({"strict": true})),
            tool("f", &json!({"parameters": {"type": "object", "required": ["a"]}})),
            json!({"tools": []}),
            json!({"tool_choice": "none"}),
            json!({"tool_choice": "auto"}),
            json!({"tool_choice": null}),
            json!({"parallel_tool_calls": false}),
            json!({"response_format": {"type": "json_object"}}),
            json!({"structured_outputs": {"json": {}}}),
            json!({"reasoning_effort": "low"}),
            json!({"chat_template_kwargs": {"enable_thinking": false}}),
            json!({"model": "n"}),
            json!({"temperature": 0}),
            json!({"never_heard_of": 1}),
        ];
        let keys: std::collections::HashSet<GrammarKey> = others.iter().map(key).collect();
        assert_eq!(keys.len(), others.len());
        assert!(!keys.contains(&key(&json!({}))));
    }
}
