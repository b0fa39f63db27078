//! The reference pages of policy files and of the config file, from the schemas of their settings.

use std::fmt::Write;

use serde_json::Value;

use super::schema::{allowed, members, nullable, plain, shapes, tag, words};
use super::{policy, process};

/// The page of policy files, as Markdown.
pub fn policy() -> String {
    page(POLICY, policy::settings())
}

/// The page of the config file, as Markdown.
pub fn process() -> String {
    page(PROCESS, process::file::settings())
}

fn page(head: &str, schema: &Value) -> String {
    let mut text = format!("{head}{TABLE}");
    for (name, value) in members(schema).filter(|(_, value)| is_leaf(value)) {
        row(&mut text, name, value);
    }
    for (name, value) in members(schema).filter(|(_, value)| !is_leaf(value)) {
        let _ = write!(text, "\n## `{name}`\n\n{}\n", says(value));
        let kinds = kinds(value);
        if kinds.iter().any(|kind| tag(kind).is_some()) {
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

/// The shapes of a setting with several, or of the elements of a list.
fn kinds(schema: &Value) -> &[Value] {
    shapes(schema.get("items").unwrap_or(schema))
}

fn is_leaf(schema: &Value) -> bool {
    let schema = nullable(schema).unwrap_or(schema);
    members(schema).next().is_none() && kinds(schema).is_empty() && element(schema).is_none()
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

/// One shape of a setting, under the constant that identifies it.
fn section(text: &mut String, path: &str, kind: &Value) {
    let Some((name, word)) = tag(kind) else { return };
    let _ = write!(text, "\n### `{name}: {}`\n\n{}\n", plain(word), says(kind));
    if members(kind).count() > 1 {
        text.push_str(TABLE);
        for (member, value) in members(kind).filter(|(member, _)| *member != name) {
            entry(text, &format!("{path}.{member}"), value);
        }
    }
}

/// The row of a setting, or the rows of its members.
fn entry(text: &mut String, path: &str, outer: &Value) {
    let schema = nullable(outer).unwrap_or(outer);
    if let Some((index, inner)) = element(schema) {
        return entry(text, &format!("{path}{index}"), inner);
    }
    if members(schema).next().is_none() {
        row(text, path, outer);
    }
    for holder in [schema].into_iter().chain(kinds(schema)) {
        for (name, value) in members(holder) {
            entry(text, &format!("{path}.{name}"), value);
        }
    }
}

fn row(text: &mut String, path: &str, schema: &Value) {
    let default = schema.get("default").map_or_else(String::new, |value| format!("`{}`", plain(value)));
    let values = values(nullable(schema).unwrap_or(schema));
    let _ = writeln!(text, "| `{path}` | {values} | {default} | {} |", escaped(says(schema)));
}

/// A text in a cell of a table.
fn escaped(text: &str) -> String {
    text.replace('|', "\\|")
}

fn values(schema: &Value) -> String {
    if let Some(words) = words(schema) {
        return words.iter().map(|word| format!("`{word}`")).collect::<Vec<_>>().join(", ");
    }
    match (schema.get("type").and_then(Value::as_str), schema.get("items")) {
        (Some("boolean"), _) => "`true`, `false`".to_owned(),
        (Some("array"), Some(items)) if items.get("prefixItems").is_some() => {
            "a list of points `[x, y]`".to_owned()
        }
        (Some("array"), Some(items)) => match values(items).as_str() {
            "a text" => "a list of texts".to_owned(),
            one => format!("a list of {one}"),
        },
        (None, _) if schema.get("allowed").is_none() => match shapes(schema) {
            [first, ..] => format!("{}, or the shape below", values(first)),
            [] => allowed(schema),
        },
        _ => escaped(&allowed(schema)),
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
        for (page, schema) in [(policy(), policy::settings()), (process(), process::file::settings())] {
            let mut all = Vec::new();
            keys(schema, &mut all);
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
