//! JSON bodies that carry the tokens of a request.
//!
//! Most bytes of a round are the context, and a fan-out sends it once for every node. Its ids are
//! written as JSON once ([`foretell_core::words::TokenContext`]) and copied wherever they are
//! needed; the other members are written in the order of the calls to [`Body::put`], so that the
//! bytes are those that serde writes for the same object.

use std::borrow::Cow;
use std::fmt::Write;

use serde::Serialize;
use serde_json::{Map, Value};

use foretell_core::units::TokenId;
use foretell_core::words::context::write_ids;

/// The context of a round as JSON text: ids separated by commas, without brackets.
pub struct Ids<'a>(Cow<'a, str>);

impl<'a> Ids<'a> {
    /// Takes `text` (the ids of `prompt` and `output`), or writes it if it is `None`.
    pub fn new(text: Option<&'a str>, prompt: &[TokenId], output: &[TokenId]) -> Self {
        Self(text.map_or_else(
            || {
                let mut text = String::new();
                for ids in [prompt, output] {
                    write_ids(&mut text, ids);
                }
                Cow::Owned(text)
            },
            Cow::Borrowed,
        ))
    }

    /// Writes a list of the context and the ids after it.
    fn write(&self, path: &[TokenId], body: &mut String) {
        body.push('[');
        body.push_str(&self.0);
        for (index, id) in path.iter().enumerate() {
            let comma = if index == 0 && self.0.is_empty() { "" } else { "," };
            // Writing to a string cannot fail.
            let _ = write!(body, "{comma}{id}");
        }
        body.push(']');
    }
}

/// A JSON object, written member by member.
pub struct Body(String);

impl Body {
    /// An object without members, with capacity for `bytes` bytes.
    pub fn with_room(bytes: usize) -> Self {
        let mut text = String::with_capacity(bytes);
        text.push('{');
        Self(text)
    }

    /// An empty object with capacity for `times` copies of the context of a round, and little else.
    pub fn around(ids: &Ids<'_>, times: usize) -> Self {
        Self::with_room(512 + times * (ids.0.len() + 64))
    }

    /// Adds a member.
    #[must_use]
    pub fn put(mut self, name: &str, value: impl Serialize) -> Self {
        self.name(name);
        // Values are strings, numbers and maps, which can always be written; an incomplete object
        // would be refused by the backend, and the request would go on plainly.
        self.0.push_str(&serde_json::to_string(&value).unwrap_or_default());
        self
    }

    /// Adds members.
    #[must_use]
    pub fn all(self, members: &Map<String, Value>) -> Self {
        members.iter().fold(self, |body, (name, value)| body.put(name, value))
    }

    /// Adds a list of ids: the context and the ids after it.
    #[must_use]
    pub fn ids(mut self, name: &str, ids: &Ids<'_>, path: &[TokenId]) -> Self {
        self.name(name);
        ids.write(path, &mut self.0);
        self
    }

    /// Adds a list of such lists, one for each path.
    #[must_use]
    pub fn lists(mut self, name: &str, ids: &Ids<'_>, paths: &[Vec<TokenId>]) -> Self {
        self.name(name);
        self.0.push('[');
        for (index, path) in paths.iter().enumerate() {
            if index > 0 {
                self.0.push(',');
            }
            ids.write(path, &mut self.0);
        }
        self.0.push(']');
        self
    }

    /// The bytes of the complete object.
    pub fn end(mut self) -> Vec<u8> {
        self.0.push('}');
        self.0.into_bytes()
    }

    fn name(&mut self, name: &str) {
        if self.0.len() > 1 {
            self.0.push(',');
        }
        self.0.push_str(&serde_json::to_string(name).unwrap_or_default());
        self.0.push(':');
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    #[test]
    fn members_stand_in_the_order_in_which_they_are_put() {
        let ids = Ids::new(None, &[1], &[2]);
        let more = json!({"temperature": 0.5, "logit_bias": {"5": -1.0}});
        let Value::Object(more) = more else { panic!("an object") };
        let body =
            Body::around(&ids, 1).put("model", "a \"model\"\n").ids("prompt", &ids, &[]).all(&more).end();
        let expected =
            r#"{"model":"a \"model\"\n","prompt":[1,2],"temperature":0.5,"logit_bias":{"5":-1.0}}"#;
        assert_eq!(String::from_utf8(body).unwrap(), expected);
        assert_eq!(Body::with_room(0).end(), b"{}");
    }

    proptest! {
        #[test]
        fn lists_of_ids_are_what_serde_writes(
            prompt in proptest::collection::vec(any::<TokenId>(), 0..4),
            output in proptest::collection::vec(any::<TokenId>(), 0..3),
            paths in proptest::collection::vec(proptest::collection::vec(any::<TokenId>(), 0..3), 0..4),
        ) {
            let whole: Vec<Vec<TokenId>> =
                paths.iter().map(|path| [&prompt[..], &output, path].concat()).collect();
            let body = Body::with_room(0).lists("a", &Ids::new(None, &prompt, &output), &paths).end();
            prop_assert_eq!(String::from_utf8(body).unwrap(), json!({ "a": whole }).to_string());
        }
    }
}
