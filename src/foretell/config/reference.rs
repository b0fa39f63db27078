//! The reference pages of policy files and of the process file, made from their JSON Schemas, which
//! the readers make.

use std::fmt::Write;

use serde_json::Value;

use super::{policy, process};

/// The page of policy files, as Markdown.
pub fn policy() -> String {
    page(POLICY, &policy::schema())
}

/// The page of the process file, as Markdown.
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
        match kinds(value) {
            kinds if kinds.is_empty() => {
                text.push_str(TABLE);
                rows(&mut text, name, value);
            }
            kinds => kinds.iter().for_each(|kind| section(&mut text, name, kind)),
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
# Reference of the process file

Written by `foretell check --process-reference` from the schema of the process file
([deploy/schema.json](../deploy/schema.json)); a test compares this page with the program. A file with every setting:
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
    members(schema).is_empty() && kinds(schema).is_empty()
}

fn says(schema: &Value) -> &str {
    schema.get("description").and_then(Value::as_str).unwrap_or("")
}

/// One shape of a setting, under the constant that identifies it.
fn section(text: &mut String, path: &str, kind: &Value) {
    let word =
        members(kind).into_iter().find_map(|(name, value)| Some((name, value.get("const")?.as_str()?)));
    let Some((name, word)) = word else { return };
    let _ = write!(text, "\n### `{name}: {word}`\n\n{}\n", says(kind));
    if members(kind).len() > 1 {
        text.push_str(TABLE);
        rows(text, path, kind);
    }
}

/// A row for each member, including nested ones.
fn rows(text: &mut String, path: &str, schema: &Value) {
    for (name, value) in members(schema).into_iter().filter(|(_, value)| value.get("const").is_none()) {
        let path = format!("{path}.{name}");
        if is_leaf(value) {
            row(text, &path, value);
        } else {
            rows(text, &path, value);
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
        Some("string")
            if schema.get("pattern").is_some_and(|pattern| plain(pattern).contains("ms|s|m|h")) =>
        {
            "a duration: `250ms`, `30s`, `5m`, `1h`".to_owned()
        }
        Some("string") => "a text".to_owned(),
        _ => "an object".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_of_the_schema_is_on_the_page_with_its_meaning() {
        fn all(path: &str, schema: &Value, paths: &mut Vec<String>) {
            for (name, value) in members(schema).into_iter().filter(|(_, value)| value.get("const").is_none())
            {
                let path = if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") };
                if is_leaf(value) { paths.push(path) } else { all(&path, value, paths) }
            }
            for kind in kinds(schema) {
                all(path, kind, paths);
            }
        }
        for (page, schema) in [(policy(), policy::schema()), (process(), process::file::settings())] {
            let mut paths = Vec::new();
            all("", &schema, &mut paths);
            assert!(paths.len() > 30, "{paths:?}");
            for path in paths {
                let row = page.lines().find(|line| line.starts_with(&format!("| `{path}` |")));
                assert!(row.is_some_and(|row| !row.contains("|  |  |")), "{path}: {row:?}");
            }
        }
    }
}
