//! A YAML document as a tree with the line of every value.
//!
//! Deserializing straight into types stops at the first error; users want all of them at once. So
//! the document becomes this tree first, which [`super::check`] compares with the schema. Anchors
//! and aliases are expanded by the parser, within its budget: an alias bomb is an error and does
//! not exhaust memory.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::Value as Json;
use serde_saphyr::Spanned;
use serde_saphyr::options::DuplicateKeyPolicy;

use super::problem::{DOCUMENT, Problem, Refusal};

/// Maximum size of a file that is read, bytes.
pub const FILE_BYTES: u64 = 10 << 20;
/// Maximum number of nodes that all aliases (`*a`) of a document expand to: nested ones would take
/// seconds otherwise.
const ALIASED: usize = 50_000;

/// A value and its line.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// Line, counted from 1; 0 if it is not known.
    pub line: u64,
    pub value: Value,
    /// The texts, if environment variables were substituted in the value.
    pub substituted: Option<Substituted>,
}

pub const EMPTY: Node = Node { line: 0, value: Value::Null, substituted: None };

/// A text in which environment variables were substituted.
#[derive(Clone, Debug, PartialEq)]
pub struct Substituted {
    /// The text in the file.
    pub written: String,
    /// The text with the variables' values.
    pub text: String,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// `null`, or no value.
    Null,
    /// `true` or `false`; no other word is read as one.
    Bool(bool),
    Whole(i64),
    Number(f64),
    Text(String),
    List(Vec<Node>),
    /// A map in the order of the file; a key may occur more than once, for the reader to report.
    Map(Vec<(Key, Node)>),
    /// A value that was reported, and is not read.
    Refused,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Key {
    pub name: String,
    /// Counted from 1.
    pub line: u64,
}

impl Node {
    pub const fn new(line: u64, value: Value) -> Self {
        Self { line, value, substituted: None }
    }

    /// The value as a text, if it is one. The value of a variable is a text, even if it also reads
    /// as another type.
    pub fn text(&self) -> Option<&str> {
        match (&self.value, &self.substituted) {
            (Value::Text(text), _) => Some(text),
            (Value::Bool(_) | Value::Whole(_) | Value::Number(_), Some(substituted)) => {
                Some(&substituted.text)
            }
            _ => None,
        }
    }

    /// The value as an error message shows it; with substituted variables, the text in the file.
    pub fn got(&self) -> String {
        match &self.substituted {
            Some(Substituted { written, .. }) => quote(written),
            None => self.shown(),
        }
    }

    /// The value, with variables substituted.
    pub fn shown(&self) -> String {
        match &self.value {
            Value::Null => "null".to_owned(),
            Value::Bool(value) => value.to_string(),
            Value::Whole(value) => value.to_string(),
            Value::Number(value) => value.to_string(),
            Value::Text(text) => quote(text),
            Value::List(_) => "a list".to_owned(),
            Value::Map(_) => "a map".to_owned(),
            Value::Refused => String::new(),
        }
    }

    /// The value without what was refused.
    pub fn json(&self) -> Json {
        match &self.value {
            Value::Null | Value::Refused => Json::Null,
            Value::Bool(value) => (*value).into(),
            Value::Whole(value) => (*value).into(),
            Value::Number(value) => (*value).into(),
            Value::Text(text) => text.as_str().into(),
            Value::List(items) => {
                items.iter().filter(|item| item.value != Value::Refused).map(Self::json).collect()
            }
            Value::Map(entries) => {
                let taken = entries.iter().filter(|(_, node)| node.value != Value::Refused);
                Json::Object(taken.map(|(key, node)| (key.name.clone(), node.json())).collect())
            }
        }
    }

    /// True if the value is `null` or missing.
    pub fn is_null(&self) -> bool {
        self.value == Value::Null
    }
}

/// A text as an error message shows it: quoted, at most 80 characters, with the password of a URL
/// masked.
pub fn quote(text: &str) -> String {
    let shown = match (text.find("://"), text.rfind('@')) {
        (Some(scheme), Some(at)) if scheme < at => {
            let (before, after) =
                (text.get(..scheme).unwrap_or_default(), text.get(at..).unwrap_or_default());
            format!("{before}://***{after}")
        }
        _ => text.to_owned(),
    };
    format!("{:?}", shown.chars().take(80).collect::<String>())
}

/// Parses a YAML document.
///
/// # Errors
/// A single problem if the text is not YAML or larger than [`FILE_BYTES`].
pub fn parse(file: &str, text: &str) -> Result<Node, Vec<Problem>> {
    if text.len() as u64 > FILE_BYTES {
        return Err(document(file, 1, "the file is too large", "at most 10MiB", &format!("{}B", text.len())));
    }
    let options = serde_saphyr::options! {
        duplicate_keys: DuplicateKeyPolicy::LastWins,
        strict_booleans: true,
        with_snippet: false,
        alias_limits: serde_saphyr::alias_limits! { max_total_replayed_events: ALIASED },
    };
    match serde_saphyr::from_str_with_options::<Spanned<Value>>(text, options) {
        Ok(root) if root.value == Value::Null => Ok(Node::new(1, Value::Null)),
        Ok(root) => Ok(node(root)),
        Err(error) => {
            let line = error.location().map_or(1, |location| location.line().max(1));
            let message = error.without_snippet().to_string();
            // The line is reported separately, and the parser's advice is about its own API.
            let message = message.lines().next().and_then(|line| line.split(" at line ").next());
            let message =
                message.and_then(|line| line.split(';').next()).unwrap_or("not readable").to_owned();
            let shown = text.lines().nth(line as usize - 1).unwrap_or_default().trim();
            Err(document(file, line, &message, "a YAML document", &quote(shown)))
        }
    }
}

fn document(file: &str, line: u64, message: &str, allowed: &str, got: &str) -> Vec<Problem> {
    vec![Problem::new(file, Some(line), DOCUMENT, Refusal::new(message, allowed), got)]
}

fn node(spanned: Spanned<Value>) -> Node {
    Node::new(spanned.referenced.line(), spanned.value)
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ValueVisitor)
    }
}

struct ValueVisitor;

impl<'de> Visitor<'de> for ValueVisitor {
    type Value = Value;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a YAML value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_none<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Whole(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(i64::try_from(value).map_or(Value::Number(value as f64), Value::Whole))
    }

    fn visit_i128<E>(self, value: i128) -> Result<Value, E> {
        Ok(i64::try_from(value).map_or(Value::Number(value as f64), Value::Whole))
    }

    fn visit_u128<E>(self, value: u128) -> Result<Value, E> {
        Ok(i64::try_from(value).map_or(Value::Number(value as f64), Value::Whole))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Value::Number(value))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::Text(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element::<Spanned<Value>>()? {
            items.push(node(item));
        }
        Ok(Value::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut entries = Vec::new();
        while let Some(key) = map.next_key::<Spanned<String>>()? {
            let key = Key { line: key.referenced.line(), name: key.value };
            entries.push((key, node(map.next_value::<Spanned<Value>>()?)));
        }
        Ok(Value::Map(entries))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries(node: &Node) -> &[(Key, Node)] {
        match &node.value {
            Value::Map(entries) => entries,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn every_value_has_its_line() {
        let root =
            parse("f", "# comment\na: 1\nb:\n  - x\n  - { c: 2.5,\n      d: off }\na: null\n").unwrap();
        let lines: Vec<_> =
            entries(&root).iter().map(|(key, node)| (key.name.as_str(), key.line, node.line)).collect();
        assert_eq!(lines, [("a", 2, 2), ("b", 3, 4), ("a", 7, 7)]);
        let Value::List(items) = &entries(&root)[1].1.value else { panic!() };
        assert_eq!((items[0].line, items[1].line), (4, 5));
        // `off` is a mode and not a truth value.
        assert_eq!(entries(&items[1])[1].1, Node::new(6, Value::Text("off".to_owned())));
    }

    #[test]
    fn an_alias_bomb_is_an_error() {
        let bomb = |levels: u32| {
            let mut bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n".to_owned();
            for level in 1..levels {
                let nine = vec![format!("*a{}", level - 1); 9].join(", ");
                bomb.extend([format!("a{level}: &a{level} [{nine}]\n")]);
            }
            bomb
        };
        // 9^3, 9^5 and 9^12 texts.
        assert!(parse("f", &bomb(3)).is_ok());
        assert!(parse("f", &bomb(5)).is_err());
        assert!(parse("f", &bomb(12)).is_err());
    }

    #[test]
    fn a_line_that_is_no_yaml_is_shown_without_its_password() {
        for line in [
            "fleet: { store: redis://:p]ss@valkey }",
            "fleet: { store: 'redis://:p]ss@valkey }",
            &format!("fleet: {{ store: redis://:p]ss{}@valkey }}", "]".repeat(90)),
        ] {
            let problem = parse("f", &format!("version: 1\n{line}\n")).unwrap_err().remove(0);
            assert!(problem.got.contains("redis://***@valkey"), "{problem}");
            assert!(!problem.to_string().contains("p]"), "{problem}");
        }
    }

    #[test]
    fn a_file_too_large_is_not_read() {
        let problem = parse("f", &"#".repeat((10 << 20) + 1)).unwrap_err().remove(0);
        assert_eq!(problem.to_string(), "f:1: the file is too large, allowed at most 10MiB, got 10485761B");
    }
}
