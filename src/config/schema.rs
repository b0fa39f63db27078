//! The JSON Schema of a file, from the structs that declare its settings.
//!
//! [`of`] makes the schema by which [`super::check`] reads a file and [`super::reference`] writes
//! its page. It has some keywords that [`published`] removes: `allowed` (what to write, for
//! messages), `hints` (words of the other file, and what they are called here) and `otherwise` (the
//! shape of a map that names none).

use std::mem;

use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde_json::{Map, Value, json};

/// The schema of a file with the settings `T`.
pub fn of<T: JsonSchema>(title: &str, says: &str) -> Value {
    let mut schema = json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema", "title": title, "description": says,
        "patternProperties": { "^x-": { "description": "For your own use, such as YAML anchors." } },
    });
    let mut settings = of_value::<T>();
    let mut members = Map::new();
    members.insert("version".to_owned(), json!({ "const": 1, "description": "Version of the file format." }));
    members.extend(taken(&mut settings, "properties"));
    let mut required = vec![json!("version")];
    required.extend(settings.get("required").and_then(Value::as_array).into_iter().flatten().cloned());
    set(&mut settings, "properties", members.into());
    set(&mut settings, "required", required.into());
    if let (Value::Object(schema), Value::Object(mut settings)) = (&mut schema, settings) {
        for word in ["$schema", "title", "description"] {
            settings.shift_remove(word);
        }
        schema.extend(settings);
    }
    schema
}

/// The schema of one value.
pub fn of_value<T: JsonSchema>() -> Value {
    let settings = SchemaSettings::draft2020_12().with(|settings| settings.inline_subschemas = true);
    let mut schema = settings.into_generator().into_root_schema_for::<T>().to_value();
    tidy(&mut schema);
    schema
}

fn set(schema: &mut Value, word: &str, value: Value) {
    if let Value::Object(words) = schema {
        words.insert(word.to_owned(), value);
    }
}

fn taken(schema: &mut Value, word: &str) -> Map<String, Value> {
    match schema.get_mut(word).map(Value::take) {
        Some(Value::Object(members)) => members,
        _ => Map::new(),
    }
}

/// The schemas directly inside a schema.
fn inner(schema: &mut Value) -> Vec<&mut Value> {
    let mut found = Vec::new();
    for (word, value) in schema.as_object_mut().into_iter().flatten() {
        match (word.as_str(), value) {
            ("properties", Value::Object(members)) => found.extend(members.values_mut()),
            ("items" | "additionalProperties", value @ Value::Object(_)) => found.push(value),
            ("oneOf" | "anyOf" | "prefixItems", Value::Array(all)) => found.extend(all),
            _ => {}
        }
    }
    found
}

/// Brings what schemars writes into the few forms that this folder reads.
fn tidy(schema: &mut Value) {
    inner(schema).into_iter().for_each(tidy);
    let Value::Object(words) = schema else { return };
    if let Some(Value::String(says)) = words.get_mut("description") {
        *says = says.replace('\n', " ");
    }
    let is_empty = |value: &Value| {
        let is_list = value.as_array().is_some_and(Vec::is_empty);
        value.is_null() || is_list || value.as_object().is_some_and(Map::is_empty)
    };
    words.retain(|word, value| word != "default" || !is_empty(value));
    // The variants of an enum, of which those with a comment are constants.
    let all = words.get("oneOf").and_then(Value::as_array);
    let names: Option<Vec<Vec<String>>> = all.and_then(|all| all.iter().map(self::words).collect());
    if let Some(names) = names {
        words.shift_remove("oneOf");
        words.insert("enum".to_owned(), names.concat().into());
    }
    if words.contains_key("enum") || words.contains_key("const") {
        words.shift_remove("type");
    }
    if words.contains_key("properties") {
        words.insert("additionalProperties".to_owned(), false.into());
    }
    match words.get("type").cloned() {
        Some(Value::Array(kinds)) => or_null(words, kinds),
        Some(Value::String(kind)) if kind == "string" && !words.contains_key("format") => {
            words.insert("minLength".to_owned(), 1.into());
        }
        Some(Value::String(kind)) if kind == "integer" || kind == "number" => {
            words.shift_remove("format");
        }
        _ => {}
    }
}

/// `type: [X, null]` as `anyOf` with `null`, as other values that may be `null` are described.
fn or_null(words: &mut Map<String, Value>, kinds: Vec<Value>) {
    let outside = ["description", "default"];
    let mut value: Map<String, Value> = mem::take(words);
    for word in outside {
        words.extend(value.shift_remove(word).map(|found| (word.to_owned(), found)));
    }
    value.insert("type".to_owned(), kinds.into_iter().find(|kind| kind != "null").unwrap_or_default());
    let mut value = Value::Object(value);
    tidy(&mut value);
    words.insert("anyOf".to_owned(), json!([value, { "type": "null" }]));
}

/// The schema as editors read it. With `variables`, any value may be an environment variable.
pub fn published(mut schema: Value, variables: bool) -> Value {
    publish(&mut schema, variables);
    set(&mut schema, "type", "object".into());
    schema
}

fn publish(schema: &mut Value, variables: bool) {
    for inner in inner(schema) {
        publish(inner, variables);
    }
    let otherwise = schema.get("otherwise").cloned();
    let branches = schema.get_mut("oneOf").and_then(Value::as_array_mut);
    for branch in branches.into_iter().flatten() {
        set(branch, "type", "object".into());
        let is_otherwise = tag(branch).is_some_and(|(_, word)| Some(word) == otherwise.as_ref());
        if is_otherwise && let Value::Object(words) = branch {
            words.shift_remove("required");
            words.insert("type".to_owned(), json!(["object", "null"]));
        }
    }
    let Value::Object(words) = schema else { return };
    for word in ["allowed", "hints", "otherwise"] {
        words.shift_remove(word);
    }
    // A section without a value is empty.
    if words.get("type").is_some_and(|kind| kind == "object") && !words.contains_key("required") {
        words.insert("type".to_owned(), json!(["object", "null"]));
    }
    let structure = ["properties", "items", "additionalProperties", "oneOf", "anyOf", "const"];
    let is_null = words.get("type").is_some_and(|kind| kind == "null");
    if variables && !is_null && structure.iter().all(|word| !words.contains_key(*word)) {
        let described = words.shift_remove("description");
        *schema = json!({ "anyOf": [schema, { "type": "string", "pattern": r"\$\{" }] });
        if let Some(described) = described {
            set(schema, "description", described);
        }
    }
}

/// A schema as a file.
pub fn text(schema: &Value) -> String {
    format!("{schema:#}\n")
}

/// The members of a map with known keys.
pub fn members(schema: &Value) -> impl Iterator<Item = (&String, &Value)> {
    schema.get("properties").and_then(Value::as_object).into_iter().flatten()
}

/// The member whose constant tells one of several shapes from the others, and the constant.
pub fn tag(schema: &Value) -> Option<(&String, &Value)> {
    members(schema).find_map(|(name, member)| Some((name, member.get("const")?)))
}

/// The schema of a value that may be `null`, without that.
pub fn nullable(schema: &Value) -> Option<&Value> {
    match schema.get("anyOf")?.as_array()?.as_slice() {
        [value, null] if null.get("type").is_some_and(|kind| kind == "null") => Some(value),
        _ => None,
    }
}

/// The shapes that a value may have.
pub fn shapes(schema: &Value) -> &[Value] {
    let shapes = schema.get("oneOf").or_else(|| schema.get("anyOf")).and_then(Value::as_array);
    shapes.map_or(&[], Vec::as_slice)
}

/// The words or constants that a value may be, as they are written.
pub fn words(schema: &Value) -> Option<Vec<String>> {
    let all = match (schema.get("enum"), schema.get("const")) {
        (Some(Value::Array(all)), _) => all.clone(),
        (_, Some(one)) => vec![one.clone()],
        _ => return None,
    };
    Some(all.iter().map(plain).collect())
}

/// A value as a file has it.
pub fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// The values that are allowed, in a few words.
pub fn allowed(schema: &Value) -> String {
    let schema = nullable(schema).unwrap_or(schema);
    if let Some(allowed) = schema.get("allowed") {
        return plain(allowed);
    }
    if let Some(words) = words(schema) {
        return words.join("|");
    }
    match schema.get("type").and_then(Value::as_str) {
        Some("integer" | "number") => match (schema.get("minimum"), schema.get("maximum")) {
            (Some(min), Some(max)) => format!("{min} to {max}"),
            _ => "a number".to_owned(),
        },
        Some("boolean") => "true|false".to_owned(),
        Some("array") if schema.get("prefixItems").is_some() => "[x, y]".to_owned(),
        Some("array") => "a list".to_owned(),
        Some("string") => "a text".to_owned(),
        _ => "a map".to_owned(),
    }
}
