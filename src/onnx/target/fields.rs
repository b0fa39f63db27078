//! Reads a request body field by field. Each known field is taken by name and type; any other field
//! is refused by name, so a misspelt or unsupported parameter is always reported.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

use crate::target::errors::Refusal;

/// The fields that have not been taken yet. Values stay raw until their type is known, so that
/// thousands of token ids are parsed directly into numbers.
pub(super) struct Fields<'a> {
    rest: BTreeMap<String, &'a RawValue>,
}

impl<'a> Fields<'a> {
    /// Parses a JSON object.
    pub(super) fn read(body: &'a [u8]) -> Result<Self, Refusal> {
        let text = std::str::from_utf8(body).map_err(|error| Refusal::NotJson(error.to_string()))?;
        match serde_json::from_str::<BTreeMap<String, &'a RawValue>>(text) {
            Ok(rest) => Ok(Self { rest }),
            Err(error) => Err(Refusal::NotJson(error.to_string())),
        }
    }

    /// Takes a field of type `T`; `None` if it is missing or `null`, as with OpenAI and vLLM.
    pub(super) fn take<T: DeserializeOwned>(&mut self, name: &str) -> Result<Option<T>, Refusal> {
        let Some(raw) = self.rest.remove(name) else { return Ok(None) };
        serde_json::from_str::<Option<T>>(raw.get()).map_err(|error| invalid(name, reason(&error)))
    }

    /// Takes a boolean field.
    pub(super) fn flag(&mut self, name: &str, default: bool) -> Result<bool, Refusal> {
        Ok(self.take(name)?.unwrap_or(default))
    }

    pub(super) fn number(&mut self, name: &str, range: RangeInclusive<f64>) -> Result<Option<f64>, Refusal> {
        let value: Option<f64> = self.take(name)?;
        match value {
            Some(value) if !range.contains(&value) => {
                Err(invalid(name, format!("must be from {} to {}, got {value}", range.start(), range.end())))
            }
            value => Ok(value),
        }
    }

    pub(super) fn integer(&mut self, name: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, Refusal> {
        let value: Option<i64> = self.take(name)?;
        match value {
            Some(value) if !range.contains(&value) => {
                Err(invalid(name, format!("must be from {} to {}, got {value}", range.start(), range.end())))
            }
            value => Ok(value),
        }
    }

    /// Takes an integer from 0 to `most`.
    pub(super) fn size(&mut self, name: &str, most: usize) -> Result<Option<usize>, Refusal> {
        Ok(self.integer(name, 0..=most as i64)?.map(|value| value as usize))
    }

    /// Takes a string or a list of strings.
    pub(super) fn texts(&mut self, name: &str) -> Result<Option<Vec<String>>, Refusal> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "expected a string or a list of strings")]
        enum Texts {
            One(String),
            Many(Vec<String>),
        }
        Ok(self.take(name)?.map(|texts| match texts {
            Texts::One(text) => vec![text],
            Texts::Many(texts) => texts,
        }))
    }

    /// Takes fields that have no effect here, whatever their values.
    pub(super) fn ignore(&mut self, names: &[&str]) {
        for name in names {
            self.rest.remove(*name);
        }
    }

    /// Takes a field that may only be missing, `null`, or one of these JSON texts (compared without
    /// spaces).
    pub(super) fn only(
        &mut self,
        name: &str,
        allowed: &[&str],
        message: &'static str,
    ) -> Result<(), Refusal> {
        let Some(raw) = self.rest.remove(name) else { return Ok(()) };
        let compact: String = raw.get().split_ascii_whitespace().collect();
        if compact == "null" || allowed.contains(&compact.as_str()) {
            return Ok(());
        }
        Err(Refusal::Unsupported { param: name.to_owned(), message })
    }

    /// Refuses the request if any field has not been taken.
    pub(super) fn finish(self) -> Result<(), Refusal> {
        self.rest.into_keys().next().map_or(Ok(()), |name| Err(Refusal::Unknown(name)))
    }
}

/// The refusal of a field's value.
pub(super) fn invalid(param: &str, message: impl Into<String>) -> Refusal {
    Refusal::Invalid { param: param.to_owned(), message: message.into() }
}

/// The parser's message without its position, which counts from the start of the value and would
/// mislead.
fn reason(error: &serde_json::Error) -> String {
    let text = error.to_string();
    text.rsplit_once(" at line ").map_or(text.clone(), |(reason, _)| reason.to_owned())
}
