//! The fields of a request body, each read as the type that it must have.

use crate::TokenId;
use serde_json::{Map, Value};

use super::http::Request;
use super::toy::Toy;

/// A field of the wrong type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wrong {
    pub field: String,
    pub want: &'static str,
    pub got: String,
}

impl std::fmt::Display for Wrong {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "{}: input should be {}, got {}", self.field, self.want, self.got)
    }
}

fn wrong(field: &str, want: &'static str, got: &Value) -> Wrong {
    let mut got = got.to_string();
    got.truncate(got.char_indices().nth(80).map_or(got.len(), |(at, _)| at));
    Wrong { field: field.to_owned(), want, got }
}

/// A JSON object. Null members count as missing.
#[derive(Clone, Debug, Default)]
pub struct Fields(pub Map<String, Value>);

impl Fields {
    pub fn of(request: &Request) -> Result<Self, Wrong> {
        let body: Value = serde_json::from_slice(&request.body).map_err(|error| Wrong {
            field: "body".into(),
            want: "valid JSON",
            got: error.to_string(),
        })?;
        Self::from(&body, "body")
    }

    pub fn from(value: &Value, name: &str) -> Result<Self, Wrong> {
        value.as_object().cloned().map(Self).ok_or_else(|| wrong(name, "a valid dictionary", value))
    }

    pub fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    fn read<T>(
        &self,
        name: &str,
        want: &'static str,
        as_type: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>, Wrong> {
        let Some(value) = self.get(name) else { return Ok(None) };
        as_type(value).map(Some).ok_or_else(|| wrong(name, want, value))
    }

    pub fn float(&self, name: &str) -> Result<Option<f64>, Wrong> {
        self.read(name, "a valid number", Value::as_f64)
    }

    pub fn int(&self, name: &str) -> Result<Option<i64>, Wrong> {
        self.read(name, "a valid integer", Value::as_i64)
    }

    pub fn uint(&self, name: &str) -> Result<Option<u64>, Wrong> {
        self.read(name, "a valid non-negative integer", Value::as_u64)
    }

    pub fn flag(&self, name: &str) -> Result<bool, Wrong> {
        Ok(self.read(name, "a valid boolean", Value::as_bool)?.unwrap_or(false))
    }

    pub fn text(&self, name: &str) -> Result<Option<String>, Wrong> {
        self.read(name, "a valid string", |value| value.as_str().map(str::to_owned))
    }

    /// A text, or a list of them.
    pub fn texts(&self, name: &str) -> Result<Vec<String>, Wrong> {
        let read = |value: &Value| match value {
            Value::String(text) => Some(vec![text.clone()]),
            Value::Array(texts) => texts.iter().map(|text| text.as_str().map(str::to_owned)).collect(),
            _ => None,
        };
        Ok(self.read(name, "a valid string or list of strings", read)?.unwrap_or_default())
    }

    pub fn ids(&self, name: &str) -> Result<Option<Vec<TokenId>>, Wrong> {
        self.read(name, "a valid list of integers", ids)
    }

    /// An object from ids (as text) to numbers.
    pub fn bias(&self, name: &str) -> Result<Vec<(TokenId, f32)>, Wrong> {
        let read = |value: &Value| {
            let pair = |(id, bias): (&String, &Value)| Some((id.parse().ok()?, bias.as_f64()? as f32));
            value.as_object()?.iter().map(pair).collect()
        };
        Ok(self.read(name, "a valid dictionary of numbers", read)?.unwrap_or_default())
    }

    /// The only text that a grammar allows: the fakes have one fixed object for all but regular
    /// expressions, which they support only where these match a single text.
    pub fn grammar(&self, toy: &Toy) -> Result<Vec<TokenId>, Wrong> {
        let format = self.object("response_format")?;
        if let Some(regex) = self.object("structured_outputs")?.text("regex")? {
            return Ok(toy.encode(&literal(&regex)));
        }
        let outputs = self.get("structured_outputs").is_some_and(|outputs| !outputs.is_null());
        let free = !outputs && format.get("type").is_none_or(|of| of == "text");
        Ok(if free { Vec::new() } else { toy.encode("{\"answer\": true}") })
    }

    /// Tools that the model may call.
    pub fn tools(&self) -> bool {
        let any = self.get("tools").and_then(Value::as_array).is_some_and(|tools| !tools.is_empty());
        any && self.get("tool_choice").is_none_or(|choice| choice != "none")
    }

    /// All calls but the first are left out.
    pub fn single_call(&self) -> bool {
        self.get("parallel_tool_calls") == Some(&Value::Bool(false))
    }

    pub fn object(&self, name: &str) -> Result<Self, Wrong> {
        self.get(name).map_or_else(|| Ok(Self::default()), |value| Self::from(value, name))
    }

    /// The first field whose name is not among these.
    pub fn unknown(&self, known: &[&str]) -> Option<&str> {
        self.0.keys().map(String::as_str).find(|name| !known.contains(name))
    }

    /// The first requested of these parameters, which the real engine has and the fake lacks. They
    /// must never be ignored.
    pub fn beyond(&self, names: &[&str]) -> Option<String> {
        let idle = |value: &Value| {
            matches!(value, Value::Bool(false))
                || *value == Value::from(Vec::<Value>::new())
                || value["type"] == "text"
        };
        let asked = |name: &&&str| self.get(name).is_some_and(|value| !idle(value));
        names.iter().find(asked).map(|name| format!("this fake has no {name}"))
    }

    /// `prompt` as the OpenAI interface has it: a text, texts, ids, or lists of ids.
    pub fn prompts(&self, toy: &Toy) -> Result<Vec<Vec<TokenId>>, Wrong> {
        let want = "a valid string, list of strings, list of integers or list of lists of integers";
        let read = |value: &Value| match value {
            Value::String(text) => Some(vec![toy.encode(text)]),
            Value::Array(parts) if parts.first().is_some_and(Value::is_number) => Some(vec![ids(value)?]),
            Value::Array(parts) if parts.first().is_some_and(Value::is_string) => {
                parts.iter().map(|part| Some(toy.encode(part.as_str()?))).collect()
            }
            Value::Array(parts) => parts.iter().map(ids).collect(),
            _ => None,
        };
        self.read("prompt", want, read)?.ok_or(Wrong { field: "prompt".into(), want, got: "nothing".into() })
    }
}

/// The one text that a regular expression of escaped characters allows.
fn literal(regex: &str) -> String {
    let (mut text, mut rest) =
        (String::new(), regex.replace("[.]", ".").replace("\\n", "\n").into_bytes().into_iter());
    while let Some(byte) = rest.next() {
        let byte = if byte == b'\\' { rest.next().unwrap_or(byte) } else { byte };
        text.push(char::from(byte));
    }
    text
}

pub fn ids(value: &Value) -> Option<Vec<TokenId>> {
    value.as_array()?.iter().map(|id| TokenId::try_from(id.as_u64()?).ok()).collect()
}

/// A token that is not in the vocabulary.
pub fn outside(prompts: &[Vec<TokenId>], toy: &Toy) -> Option<TokenId> {
    prompts.iter().flatten().copied().find(|&token| token as usize >= toy.vocabulary())
}
