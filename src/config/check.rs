//! Checks a document against the schema of its settings, and reports every error with its line.
//!
//! What is refused is reported and marked, so that reading goes on: the settings that remain are
//! good for serde. Rules between settings are for [`super::at`].

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use serde::de::DeserializeOwned;
use serde_json::Value as Json;

use super::forms;
use super::problem::Refusal;
use super::problems::Problems;
use super::schema::{allowed, members, nullable, plain, shapes, tag, words};
use super::yaml::{Key, Node, Value};

/// Maximum number of unknown keys of a map that are reported. A file with more is of another kind.
const UNKNOWN: usize = 100;

/// The settings of a document that are good; the others have their defaults. What is refused is
/// reported and marked in `root`.
pub fn read<T: DeserializeOwned + Default>(schema: &Json, root: &mut Node, problems: &Problems) -> T {
    let checker = Checker { problems };
    if !checker.value(schema, root, "") {
        return T::default();
    }
    serde_json::from_value(root.json()).unwrap_or_else(|error| {
        // A value that the schema takes and the type does not: the declaration of the setting is at
        // fault, and the file must not be taken.
        checker.refuse(root, "", Refusal::new(&error.to_string(), "what the type of the setting takes"));
        T::default()
    })
}

/// Checks the text of a flag or variable.
///
/// # Errors
/// It is refused.
pub fn word<T: DeserializeOwned>(schema: &Json, text: &str) -> Result<T, Refusal> {
    let mut node = Node::new(0, Value::Text(text.to_owned()));
    leaf(schema, &mut node)?;
    serde_json::from_value(node.json()).map_err(|error| Refusal::new(&error.to_string(), allowed(schema)))
}

/// True if a key at the top of a file is reserved for its author, as a holder of anchors.
pub fn is_reserved(key: &str) -> bool {
    key.starts_with("x-")
}

/// The path of a member.
pub fn member(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}

struct Checker<'p> {
    problems: &'p Problems,
}

impl Checker<'_> {
    fn refuse(&self, node: &Node, path: &str, refusal: Refusal) {
        self.problems.add(node.line, path, refusal, node.got());
    }

    /// True if the value is good; otherwise that is reported.
    fn value(&self, schema: &Json, node: &mut Node, path: &str) -> bool {
        if let Some(schema) = nullable(schema) {
            return node.is_null() || self.value(schema, node, path);
        }
        if !shapes(schema).is_empty() {
            return self.shape(schema, node, path);
        }
        let found = match schema.get("type").and_then(Json::as_str) {
            Some("object") => return self.map(schema, &[], node, path),
            Some("array") => return self.list(schema, node, path),
            _ => leaf(schema, node),
        };
        found.map_err(|refusal| self.refuse(node, path, refusal)).is_ok()
    }

    /// A value of several shapes, which its kind or the word under a key tells apart.
    fn shape(&self, schema: &Json, node: &mut Node, path: &str) -> bool {
        let shapes = shapes(schema);
        if let Some((key, _)) = shapes.first().and_then(tag) {
            return self.tagged(schema, key, node, path);
        }
        let kind = match node.value {
            Value::List(_) => "array",
            Value::Map(_) => "object",
            _ => "",
        };
        let is_kind = |kind: &str, shape: &&Json| shape.get("type").is_some_and(|name| name == kind);
        let is_leaf = |shape: &&Json| !is_kind("array", shape) && !is_kind("object", shape);
        let found = shapes.iter().find(|shape| is_kind(kind, shape)).or_else(|| shapes.iter().find(is_leaf));
        if let Some(shape) = found {
            return self.value(shape, node, path);
        }
        self.refuse(node, path, Refusal::new("wrong type", allowed(schema)));
        false
    }

    /// A map whose other keys depend on the word under `key`.
    fn tagged(&self, schema: &Json, key: &str, node: &mut Node, path: &str) -> bool {
        let Some(line) = self.open(node, path) else { return false };
        let shapes = shapes(schema);
        let names: Vec<String> = shapes.iter().filter_map(tag).map(|(_, name)| plain(name)).collect();
        let Value::Map(entries) = &mut node.value else { return false };
        if !entries.iter().any(|(found, _)| found.name == key) {
            let Some(otherwise) = schema.get("otherwise") else {
                let refusal = Refusal::new("missing", names.join("|"));
                self.problems.add(line, &member(path, key), refusal, "nothing".to_owned());
                return false;
            };
            let key = Key { name: key.to_owned(), line };
            entries.push((key, Node::new(line, Value::Text(plain(otherwise)))));
        }
        let Some((_, word)) = entries.iter_mut().find(|(found, _)| found.name == key) else { return false };
        if let Err(refusal) = one_of(&Json::Null, &names, word) {
            self.refuse(word, &member(path, key), refusal);
            return false;
        }
        let named = |shape: &&Json| tag(shape).is_some_and(|(_, name)| word.text() == name.as_str());
        let Some(shape) = shapes.iter().find(named) else { return false };
        self.map(shape, shapes, node, path)
    }

    /// The line of a map; a section without a value is an empty one. Keys that are there twice are
    /// reported.
    fn open(&self, node: &mut Node, path: &str) -> Option<u64> {
        if node.is_null() {
            node.value = Value::Map(Vec::new());
        }
        let Value::Map(entries) = &node.value else {
            self.refuse(node, path, Refusal::new("wrong type", "a map"));
            return None;
        };
        let mut lines = HashMap::with_capacity(entries.len());
        for (key, _) in entries {
            match lines.entry(key.name.as_str()) {
                Entry::Vacant(first) => drop(first.insert(key.line)),
                Entry::Occupied(first) => {
                    let refusal =
                        Refusal::new("key is there twice", format!("once, as on line {}", first.get()));
                    self.problems.add(key.line, &member(path, &key.name), refusal, key.name.clone());
                }
            }
        }
        Some(node.line)
    }

    /// A map with known keys, or with free ones of one kind. `siblings`: the other shapes that it
    /// may have.
    fn map(&self, schema: &Json, siblings: &[Json], node: &mut Node, path: &str) -> bool {
        let Some(line) = self.open(node, path) else { return false };
        let Value::Map(entries) = &mut node.value else { return false };
        if let Some(values) = schema.get("additionalProperties").filter(|values| values.is_object()) {
            self.free(schema, values, entries, path);
            return true;
        }
        let required = schema.get("required").and_then(Json::as_array).map_or(&[][..], Vec::as_slice);
        let mut is_complete = true;
        for (name, schema) in members(schema) {
            let path = member(path, name);
            match entries.iter_mut().find(|(key, _)| key.name == *name) {
                Some((_, node)) => {
                    let good = self.value(schema, node, &path);
                    if !good {
                        node.value = Value::Refused;
                        is_complete &= !required.iter().any(|required| required == name);
                    }
                }
                None if required.iter().any(|required| required == name) => {
                    let refusal = Refusal::new("missing", allowed(schema));
                    self.problems.add(line, &path, refusal, "nothing".to_owned());
                    is_complete = false;
                }
                None => {}
            }
        }
        self.unknown(schema, siblings, entries, path);
        is_complete || path.is_empty()
    }

    /// A map whose keys the operator chooses.
    fn free(&self, schema: &Json, values: &Json, entries: &mut [(Key, Node)], path: &str) {
        let is_header = schema.get("propertyNames").is_some();
        for (key, node) in entries {
            let path = member(path, &key.name);
            if is_header && let Err(refusal) = forms::parse::<forms::HeaderName>(&key.name) {
                self.problems.add(key.line, &path, refusal, format!("{:?}", key.name));
                node.value = Value::Refused;
            } else if !self.value(values, node, &path) {
                node.value = Value::Refused;
            }
        }
    }

    /// Reports the keys that a map may not have.
    fn unknown(&self, schema: &Json, siblings: &[Json], entries: &[(Key, Node)], path: &str) {
        let known: Vec<&str> = members(schema).map(|(name, _)| name.as_str()).collect();
        let is_known = |key: &Key| known.contains(&key.name.as_str());
        let reserved = |key: &Key| path.is_empty() && is_reserved(&key.name);
        let unknown = entries.iter().filter(|(key, _)| !is_known(key) && !reserved(key));
        for (key, node) in unknown.take(UNKNOWN) {
            let path = member(path, &key.name);
            let has = |shape: &&Json| members(shape).any(|(name, _)| *name == key.name);
            let others: Vec<String> =
                siblings.iter().filter(has).filter_map(tag).map(|(_, word)| plain(word)).collect();
            match shapes_key(siblings) {
                Some(tag) if !others.is_empty() => {
                    let allowed = format!("only with {tag}: {}", others.join("|"));
                    self.refuse(node, &path, Refusal::new("has no meaning here", allowed));
                }
                _ => {
                    let refusal = Refusal::new("unknown key", known.join("|")).near(&key.name, &known);
                    self.problems.add(key.line, &path, refusal, key.name.clone());
                }
            }
        }
    }

    /// A list of values of one kind, or of as many as the schema has.
    fn list(&self, schema: &Json, node: &mut Node, path: &str) -> bool {
        let tuple = schema.get("prefixItems").and_then(Json::as_array);
        let refusal = match &node.value {
            Value::List(items) => match tuple {
                Some(tuple) if tuple.len() != items.len() => {
                    Some(Refusal::new("wrong type", allowed(schema)))
                }
                None if items.is_empty() && schema.get("minItems").is_some() => {
                    Some(Refusal::new("empty", "at least one entry"))
                }
                _ => None,
            },
            _ => Some(Refusal::new("wrong type", allowed(schema))),
        };
        if let Some(refusal) = refusal {
            self.refuse(node, path, refusal);
            return false;
        }
        let Value::List(items) = &mut node.value else { return false };
        let mut all = true;
        for (index, item) in items.iter_mut().enumerate() {
            let schema = tuple.and_then(|tuple| tuple.get(index)).or_else(|| schema.get("items"));
            let good = schema.is_none_or(|schema| self.value(schema, item, &format!("{path}[{index}]")));
            if !good {
                item.value = Value::Refused;
                all = false;
            }
        }
        all || tuple.is_none()
    }
}

/// The key whose word tells several shapes apart.
fn shapes_key(shapes: &[Json]) -> Option<&String> {
    shapes.first().and_then(tag).map(|(key, _)| key)
}

/// Checks a value that is no list or map. A variable's text becomes the value where a text is
/// wanted.
fn leaf(schema: &Json, node: &mut Node) -> Result<(), Refusal> {
    if let Some(words) = words(schema) {
        return one_of(schema, &words, node);
    }
    match schema.get("type").and_then(Json::as_str) {
        Some("boolean") if matches!(node.value, Value::Bool(_)) => Ok(()),
        Some("boolean") => Err(Refusal::new("wrong type", allowed(schema))),
        Some(kind @ ("integer" | "number")) => number(schema, kind == "integer", node),
        _ => text(schema, node),
    }
}

/// Checks a word or constant.
fn one_of(schema: &Json, words: &[String], node: &Node) -> Result<(), Refusal> {
    let names: Vec<&str> = words.iter().map(String::as_str).collect();
    let constant = schema.get("const");
    // The only number that is a constant is the version.
    let message = if constant.is_some_and(Json::is_number) { "unknown version" } else { "unknown value" };
    let refusal = Refusal::new(message, names.join("|"));
    // YAML 1.1 reads an unquoted `off` as false, and templates still do.
    let meant = |word: &str| names.contains(&word).then(|| word.to_owned());
    match &node.value {
        Value::Text(text) if constant.is_none_or(Json::is_string) => {
            if names.contains(&text.as_str()) {
                return Ok(());
            }
            let hint = schema.get("hints").and_then(|hints| hints.get(text)).map(plain);
            let near = refusal.near(text, &names);
            Err(Refusal { suggestion: hint.or_else(|| near.suggestion.clone()), ..near })
        }
        Value::Whole(value) if constant.and_then(Json::as_i64) == Some(*value) => Ok(()),
        Value::Bool(false) => Err(Refusal { suggestion: meant("off"), ..refusal }),
        Value::Bool(true) => Err(Refusal { suggestion: meant("on"), ..refusal }),
        _ => Err(refusal),
    }
}

fn number(schema: &Json, is_whole: bool, node: &Node) -> Result<(), Refusal> {
    let value = match node.value {
        Value::Whole(value) => value as f64,
        Value::Number(value) if !is_whole => value,
        _ => return Err(Refusal::new("wrong type", allowed(schema))),
    };
    let limit = |word: &str| schema.get(word).and_then(Json::as_f64);
    let above = limit("minimum").is_none_or(|min| value >= min);
    let below = limit("maximum").is_none_or(|max| value <= max);
    if above && below { Ok(()) } else { Err(Refusal::new("out of range", allowed(schema))) }
}

fn text(schema: &Json, node: &mut Node) -> Result<(), Refusal> {
    let form = schema.get("format").and_then(Json::as_str).and_then(forms::named);
    let wrong = || Refusal::new("wrong type", allowed(schema));
    let refusal = |message| Refusal::of(message, &allowed(schema));
    let text = match (node.text(), &node.value) {
        (Some(text), _) => text.to_owned(),
        // A number may lack its unit alone.
        (None, Value::Whole(number)) => {
            let unmeasured = form.and_then(|form| form(&number.to_string()).err()).map(refusal);
            return Err(unmeasured.filter(Refusal::is_sentence).unwrap_or_else(wrong));
        }
        _ => return Err(wrong()),
    };
    match form {
        Some(form) => form(&text).map_err(refusal)?,
        None if text.is_empty() => return Err(wrong()),
        None => {}
    }
    node.value = Value::Text(text);
    Ok(())
}
