//! One event of a stream, or one unstreamed answer, in the one way in which everything here reads
//! it: its text is split into members once, and a member is read where something depends on it.
//!
//! Gateways between a client and an engine rewrite streams: they add events, and write placeholders
//! where the engine has null. Such a placeholder is no value.

use std::ops::Range;

use serde::Deserialize;
use serde::de::{DeserializeOwned, Deserializer, MapAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;

/// Texts that gateways write for "no reason yet", in lower case: the zero value of a string in Go,
/// and null written as text.
const NO_REASON: [&str; 4] = ["", "null", "none", "undefined"];

/// A member of an object: the ranges of its name, without quotes, and of its value in a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Member {
    pub name: Range<usize>,
    pub value: Range<usize>,
}

/// The members of one object of an event.
#[derive(Clone, Copy, Debug)]
pub struct Object<'a> {
    json: &'a str,
    pub(super) ranges: &'a [Member],
}

impl<'a> Object<'a> {
    /// The names and the JSON texts of its members.
    pub fn members(self) -> impl Iterator<Item = (&'a str, &'a str)> {
        let text = |range: &Range<usize>| self.json.get(range.clone()).unwrap_or_default();
        self.ranges.iter().map(move |member| (text(&member.name), text(&member.value)))
    }

    /// The JSON text of a member; of several with that name, the last one.
    fn text(self, name: &str) -> Option<&'a str> {
        self.members().filter(|(other, _)| *other == name).last().map(|(_, text)| text)
    }

    /// The JSON text of a member; `None` if there is none, or it is null.
    pub fn member(self, name: &str) -> Option<&'a str> {
        self.text(name).filter(|text| *text != "null")
    }

    /// True if there is such a member, even null.
    pub fn has(self, name: &str) -> bool {
        self.text(name).is_some()
    }

    /// A member as a value of this type; `None` if it is absent, null, or something else.
    pub fn read<T: DeserializeOwned>(self, name: &str) -> Option<T> {
        serde_json::from_str(self.member(name)?).ok()
    }
}

/// One event of an answer, split into its members.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    json: String,
    members: Vec<Member>,
    /// Its choices that are objects.
    choices: Vec<Vec<Member>>,
    /// It has choices that are something else than a list of objects.
    is_malformed: bool,
    /// The delta of the first choice, or its message in an unstreamed answer, if it has one.
    delta: Option<Vec<Member>>,
}

impl Event {
    /// Splits a JSON text; `None` if it is no object.
    pub fn of(json: String) -> Option<Self> {
        let members = split(&json, 0..json.len())?;
        let member = |ranges: &[Member], name: &str| {
            Object { json: &json, ranges }.member(name).map(|text| range_of(text, &json))
        };
        let listed = member(&members, "choices").map_or(Some(Vec::new()), |range| items(&json, range));
        let count = listed.as_ref().map(Vec::len);
        let choices: Vec<_> = listed.into_iter().flatten().filter_map(|range| split(&json, range)).collect();
        let first = choices.first();
        let delta = first.and_then(|ranges| member(ranges, "delta").or_else(|| member(ranges, "message")));
        let delta = delta.and_then(|range| split(&json, range));
        Some(Self { is_malformed: count != Some(choices.len()), members, choices, delta, json })
    }

    /// Its JSON text.
    pub fn json(&self) -> &str {
        &self.json
    }

    /// Its JSON value, null if that is nested too deeply: for the few events of an answer that are
    /// a model of others.
    pub fn value(&self) -> Value {
        serde_json::from_str(&self.json).unwrap_or_default()
    }

    /// Its members.
    pub fn top(&self) -> Object<'_> {
        Object { json: &self.json, ranges: &self.members }
    }

    /// True if it has choices that are something else than a list of objects.
    pub fn is_malformed(&self) -> bool {
        self.is_malformed
    }

    /// Its choices.
    pub fn choices(&self) -> impl ExactSizeIterator<Item = Object<'_>> {
        self.choices.iter().map(|ranges| Object { json: &self.json, ranges })
    }

    /// Its first choice.
    pub fn choice(&self) -> Option<Object<'_>> {
        self.choices().next()
    }

    /// The delta of its first choice, or its message in an unstreamed answer.
    pub fn delta(&self) -> Option<Object<'_>> {
        self.delta.as_ref().map(|ranges| Object { json: &self.json, ranges })
    }

    /// The text of its first choice: the content, or the text of a completion; empty if there is
    /// none.
    pub fn text(&self) -> String {
        let text = match self.delta() {
            Some(delta) => delta.read("content"),
            None => self.choice().and_then(|choice| choice.read("text")),
        };
        text.unwrap_or_default()
    }

    /// The members of that delta or message other than role and content, with their JSON texts.
    pub fn others(&self) -> impl Iterator<Item = (&str, &str)> {
        let members = self.delta().into_iter().flat_map(Object::members);
        members.filter(|(name, text)| !matches!(*name, "role" | "content") && *text != "null")
    }

    /// The reason for which a choice has ended; `None` while it goes on.
    pub fn finish(&self) -> Option<String> {
        self.choices().find_map(finish)
    }

    /// The error that it reports, or is (`"object": "error"`, as engines wrote it once); `None` if
    /// it has no such member, or a placeholder.
    pub fn error(&self) -> Option<Value> {
        let (top, is_one) = (self.top(), self.top().member("object") == Some("\"error\""));
        if is_one || top.member("error").is_some() { error(&self.value()).cloned() } else { None }
    }

    /// The JSON text of its usage; `None` if it has no such object.
    pub fn usage(&self) -> Option<&str> {
        self.top().member("usage").filter(|usage| usage.starts_with('{'))
    }

    /// True if it holds usage and no choice.
    pub fn is_usage(&self) -> bool {
        self.choice().is_none() && self.usage().is_some()
    }

    /// True if it is part of no answer: it holds neither choices, nor usage, nor an error. Metadata
    /// and keep-alives of gateways are written so.
    fn is_foreign(&self) -> bool {
        let is_empty = self.choices.is_empty() && !self.is_malformed;
        is_empty && self.usage().is_none() && self.error().is_none()
    }
}

/// The reason for which a choice has ended; `None` while it goes on.
pub fn finish(choice: Object<'_>) -> Option<String> {
    choice.read::<String>("finish_reason").filter(|text| reason(text).is_some())
}

/// The range of `part` in the text that it is a part of.
fn range_of(part: &str, text: &str) -> Range<usize> {
    let start = (part.as_ptr() as usize).saturating_sub(text.as_ptr() as usize);
    start..start + part.len()
}

/// The items of the list at a range of a text; `None` if there is none.
fn items(json: &str, range: Range<usize>) -> Option<Vec<Range<usize>>> {
    let items: Vec<&RawValue> = serde_json::from_str(json.get(range)?).ok()?;
    Some(items.into_iter().map(|item| range_of(item.get(), json)).collect())
}

/// The members of the object at a range of a text; `None` if there is none.
fn split(json: &str, range: Range<usize>) -> Option<Vec<Member>> {
    let Pairs(pairs) = serde_json::from_str(json.get(range)?).ok()?;
    let member = |(name, value): (&RawValue, &RawValue)| {
        let name = range_of(name.get(), json);
        Member { name: name.start + 1..name.end.saturating_sub(1), value: range_of(value.get(), json) }
    };
    Some(pairs.into_iter().map(member).collect())
}

/// Names and values of an object, as texts.
struct Pairs<'a>(Vec<(&'a RawValue, &'a RawValue)>);

impl<'de: 'a, 'a> Deserialize<'de> for Pairs<'a> {
    fn deserialize<D: Deserializer<'de>>(reader: D) -> Result<Self, D::Error> {
        reader.deserialize_map(PairsVisitor)
    }
}

struct PairsVisitor;

impl<'de> Visitor<'de> for PairsVisitor {
    type Value = Pairs<'de>;

    fn expecting(&self, text: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        text.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Pairs<'de>, A::Error> {
        let mut pairs = Vec::new();
        while let Some(pair) = map.next_entry()? {
            pairs.push(pair);
        }
        Ok(Pairs(pairs))
    }
}

/// The data of one event of a stream, read.
#[derive(Clone, Debug, PartialEq)]
pub enum Data {
    /// Part of an answer: choices, usage or an error.
    Answer(Event),
    /// Part of no answer: an event that a gateway has added; `None` if it is no JSON object.
    Foreign(Option<Event>),
    /// An object that is damaged: part of an answer may be lost with it.
    Damaged,
}

impl Data {
    /// Reads the data of an event other than `[DONE]`.
    pub fn of(data: String) -> Self {
        if !data.trim_start().starts_with('{') {
            return Self::Foreign(None);
        }
        match Event::of(data) {
            Some(event) if event.is_foreign() => Self::Foreign(Some(event)),
            Some(event) => Self::Answer(event),
            None => Self::Damaged,
        }
    }
}

/// The reason for which a choice has ended; `None` while it goes on.
pub fn finish_reason(choice: &Value) -> Option<&str> {
    choice.get("finish_reason").and_then(Value::as_str).and_then(reason)
}

/// A finish reason, unless the text is a placeholder for none.
pub fn reason(text: &str) -> Option<&str> {
    let placeholder = NO_REASON.iter().any(|none| text.trim().eq_ignore_ascii_case(none));
    (!placeholder).then_some(text)
}

/// The error of a JSON value; see [`Event::error`].
pub fn error(event: &Value) -> Option<&Value> {
    if event.get("object").is_some_and(|object| object == "error") {
        return Some(event);
    }
    event.get("error").filter(|error| match error {
        Value::Null | Value::Bool(false) => false,
        Value::String(text) => reason(text).is_some(),
        Value::Object(members) => !members.is_empty(),
        Value::Array(items) => !items.is_empty(),
        Value::Bool(true) | Value::Number(_) => true,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_placeholder_is_no_finish_reason() {
        for none in [json!(""), json!("null"), json!("None"), json!(null), json!(false), json!({}), json!(0)]
        {
            assert_eq!(finish_reason(&json!({ "finish_reason": none })), None, "{none}");
        }
        assert_eq!(finish_reason(&json!({})), None);
        for ends in ["stop", "length", "tool_calls", "abort"] {
            assert_eq!(finish_reason(&json!({ "finish_reason": ends })), Some(ends));
        }
    }

    #[test]
    fn a_placeholder_is_no_error() {
        for none in [json!(null), json!(""), json!({}), json!([]), json!(false), json!("null")] {
            assert_eq!(error(&json!({ "error": none })), None, "{none}");
        }
        for some in [json!("out of memory"), json!({"code": 500}), json!(true), json!(7)] {
            assert_eq!(error(&json!({ "error": some })), Some(&some));
        }
        let whole = json!({"object": "error", "message": "no"});
        assert_eq!(error(&whole), Some(&whole));
    }

    #[test]
    fn only_choices_usage_and_errors_belong_to_an_answer() {
        let foreign = [
            json!({}),
            json!(null),
            json!(3),
            json!("ping"),
            json!([]),
            json!({"type": "ping"}),
            json!({"choices": []}),
            json!({"choices": null}),
            json!({"choices": [], "usage": null}),
            json!({"error": {}}),
        ];
        let is_foreign = |event: &Value| matches!(Data::of(event.to_string()), Data::Foreign(_));
        assert!(foreign.iter().all(is_foreign));
        let own = [
            json!({"choices": [{}]}),
            json!({"choices": [], "usage": {"prompt_tokens": 1}}),
            json!({"usage": {"prompt_tokens": 1}}),
            json!({"error": "no"}),
            json!({"choices": "no list"}),
        ];
        assert!(!own.iter().any(is_foreign));
    }

    #[test]
    fn only_a_damaged_object_is_damage() {
        for foreign in ["", "null", "7", "ping", "\"[DONE]\"", "[]", "<html>"] {
            assert_eq!(Data::of(foreign.to_owned()), Data::Foreign(None), "{foreign}");
        }
        let of = |data: &str| Data::of(data.to_owned());
        assert!(matches!(of(r#"{"type":"ping"}"#), Data::Foreign(Some(_))));
        assert_eq!(of(r#"{"choices":[{"tex"#), Data::Damaged);
        assert!(matches!(of(r#"{"choices":[{"text":"a"}]}"#), Data::Answer(_)));
    }

    #[test]
    fn members_are_read_where_they_are() {
        let json =
            r#"{"a": 1, "choices": [{"text":"x\"}", "token_ids": [1, 2], "delta": {"b": null}}], "a": 2}"#;
        let event = Event::of(json.to_owned()).unwrap();
        assert_eq!(event.top().read::<u32>("a"), Some(2), "the last of several");
        let choice = event.choice().unwrap();
        assert_eq!(
            (choice.read("text"), choice.read("token_ids")),
            (Some("x\"}".to_owned()), Some(vec![1, 2]))
        );
        let delta = event.delta().unwrap();
        assert_eq!((delta.has("b"), delta.member("b"), delta.has("c")), (true, None, false));
        assert_eq!(choice.read::<u32>("text"), None, "of another type");
        assert!(Event::of(r#"{"choices": [[1]]}"#.to_owned()).unwrap().is_malformed());
    }
}
