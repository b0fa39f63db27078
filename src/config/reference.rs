//! The reference pages of policy files and of the config file, made from their JSON Schemas, which
//! the readers make.

use std::fmt::Write;

use serde_json::Value;

use super::{policy, process};

/// The page of policy files, as Markdown.
pub fn policy() -> String {
    page(POLICY, &policy::schema())
}

/// The page of the config file, as Markdown.
pub fn process() -> String {
    page(PROCESS, &process::file::settings())
}

fn page(head: &str, schema: &Value) -> String {
    let mut text = format!("{head}{TABLE}");
    let all = members(schema);
    for (name, value) in all.iter().filter(|(_, value)| is_leaf(value)) {
        row(&mut text, name, value);
    }
    for (name, value) in all.iter().filter(|(_, value)| !is_leaf(value)) {
        let _ = write!(text, "\n## `{name}`\n\n{}\n", says(value));
        let kinds = kinds(value);
        if kinds.iter().any(|kind| constant(kind).is_some()) {
            for kind in kinds {
                section(&mut text, name, kind);
            }
        } else {
            text.push_str(TABLE);
            entry(&mut text, name, value);
        }
    }
    text
}

const POLICY: &str = "\
# Reference of policy files

Written by `foretell check --policy-reference` from the schema of policy files
([policies/schema.json](../policies/schema.json)); a test compares this page with the program. What the settings mean
together, with examples: [policies.md](policies.md).
";

const PROCESS: &str = "\
# Reference of the config file

Written by `foretell check --config-reference` from the schema of the config file
([deploy/schema.json](../deploy/schema.json)); a test compares this page with the program. A file with most of them:
[deploy/foretell.yaml](../deploy/foretell.yaml). Any value may be an environment variable, `${NAME}`.
";

const TABLE: &str = "\n| setting | values | default | meaning |\n|---|---|---|---|\n";

/// The members of an object, by name.
fn members(schema: &Value) -> Vec<(&str, &Value)> {
    let members = schema.get("properties").and_then(Value::as_object);
    members.into_iter().flatten().map(|(name, value)| (name.as_str(), value)).collect()
}

/// The alternatives of a setting with several shapes, each identified by a constant.
fn kinds(schema: &Value) -> Vec<&Value> {
    let shapes = schema.get("oneOf").or_else(|| schema.pointer("/items/oneOf"));
    shapes.and_then(Value::as_array).into_iter().flatten().collect()
}

fn is_leaf(schema: &Value) -> bool {
    let inner = element(schema).is_none();
    members(schema).is_empty() && kinds(schema).is_empty() && inner
}

/// Contents of a list or of a map with free keys, and how their path is written.
fn element(schema: &Value) -> Option<(&'static str, &Value)> {
    let list = schema.get("items").filter(|items| items.is_object()).map(|items| ("[]", items));
    let map = || schema.get("additionalProperties").filter(|any| any.is_object()).map(|any| (".NAME", any));
    list.or_else(map).filter(|(_, inner)| !is_leaf(inner))
}

fn says(schema: &Value) -> &str {
    schema.get("description").and_then(Value::as_str).unwrap_or("")
}

/// The member that identifies one of several shapes, and its value.
fn constant(kind: &Value) -> Option<(&str, &str)> {
    members(kind).into_iter().find_map(|(name, value)| Some((name, value.get("const")?.as_str()?)))
}

/// One shape of a setting, under the constant that identifies it.
fn section(text: &mut String, path: &str, kind: &Value) {
    let Some((name, word)) = constant(kind) else { return };
    let _ = write!(text, "\n### `{name}: {word}`\n\n{}\n", says(kind));
    if members(kind).len() > 1 {
        text.push_str(TABLE);
        rows(text, path, kind);
    }
}

/// A row for each member, including nested ones.
fn rows(text: &mut String, path: &str, schema: &Value) {
    for (name, value) in members(schema).into_iter().filter(|(_, value)| value.get("const").is_none()) {
        entry(text, &format!("{path}.{name}"), value);
    }
}

/// The rows of one setting: its own, or those of what it holds.
fn entry(text: &mut String, path: &str, schema: &Value) {
    let schema = optional(schema);
    if is_leaf(schema) {
        row(text, path, schema);
    } else if let Some((index, inner)) = element(schema) {
        entry(text, &format!("{path}{index}"), inner);
    } else if kinds(schema).is_empty() {
        rows(text, path, schema);
    } else {
        row(text, path, schema);
        for kind in kinds(schema) {
            rows(text, path, kind);
        }
    }
}

fn row(text: &mut String, path: &str, schema: &Value) {
    let schema = optional(schema);
    let default = schema.get("default").map_or_else(String::new, |value| format!("`{}`", plain(value)));
    let _ = writeln!(
        text,
        "| `{path}` | {} | {default} | {} |",
        values(schema),
        says(schema).replace('|', "\\|")
    );
}

/// The schema of a setting that may also be null.
fn optional(schema: &Value) -> &Value {
    schema.pointer("/anyOf/0").unwrap_or(schema)
}

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

fn values(schema: &Value) -> String {
    let list = |values: &Value| -> String {
        let values: Vec<String> =
            values.as_array().into_iter().flatten().map(|value| format!("`{}`", plain(value))).collect();
        values.join(", ")
    };
    if let Some(value) = schema.get("const") {
        return format!("`{}`", plain(value));
    }
    if let Some(words) = schema.get("enum") {
        return list(words);
    }
    match schema.get("type").and_then(Value::as_str) {
        Some("integer" | "number") => match (schema.get("minimum"), schema.get("maximum")) {
            (Some(least), Some(most)) => format!("{least} to {most}"),
            _ => "a number".to_owned(),
        },
        Some("boolean") => "`true`, `false`".to_owned(),
        Some("array") => match schema.pointer("/items/enum") {
            Some(words) => format!("a list of {}", list(words)),
            None if schema.pointer("/items/prefixItems").is_some() => "a list of points `[x, y]`".to_owned(),
            None if schema.pointer("/items/type").and_then(Value::as_str) == Some("object") => {
                "a list of objects".to_owned()
            }
            None => "a list of texts".to_owned(),
        },
        Some("string") => text(schema.get("pattern").map(plain).as_deref().unwrap_or_default()).to_owned(),
        _ => match schema.pointer("/oneOf/0") {
            Some(first) if first.get("type").is_some() => {
                "a list of URLs, or one of the shapes below".to_owned()
            }
            Some(first) => {
                format!("{}, or the shape below", values(first.pointer("/anyOf/0").unwrap_or(first)))
            }
            None => "an object".to_owned(),
        },
    }
}

/// The values of a text with this pattern, in words.
fn text(pattern: &str) -> &'static str {
    match pattern.matches("ms|s|m|h").count() {
        0 => "a text",
        _ if pattern.contains("auto|off") => "`auto`, `off`, or two durations: `20s/30m`",
        1 => "a duration: `250ms`, `30s`, `5m`, `1h`",
        _ => "two durations: `20s/30m`",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every key of a schema, wherever it is.
    fn keys<'a>(schema: &'a Value, found: &mut Vec<&'a str>) {
        if let Some(properties) = schema.get("properties").and_then(Value::as_object) {
            found.extend(properties.keys().map(String::as_str));
        }
        match schema {
            Value::Object(members) => members.values().for_each(|value| keys(value, found)),
            Value::Array(values) => values.iter().for_each(|value| keys(value, found)),
            _ => {}
        }
    }

    #[test]
    fn every_setting_of_the_schema_is_on_the_page_with_its_meaning() {
        for (page, schema) in [(policy(), policy::schema()), (process(), process::file::settings())] {
            let mut all = Vec::new();
            keys(&schema, &mut all);
            assert!(all.len() > 40, "{all:?}");
            for key in all {
                let named = |line: &str| {
                    let path = line.split('`').nth(1).unwrap_or_default();
                    path.split(['.', '[', ']', ':']).any(|part| part == key)
                };
                assert!(page.lines().any(named), "{key} is missing");
            }
            assert!(!page.contains("|  |  |\n"), "a row without a meaning");
        }
    }
}
