use std::collections::BTreeSet;
use std::path::Path;

use super::*;
use crate::config::{policy, process};

/// Every value's path in a schema.
fn paths(schema: &serde_json::Value, path: &str, found: &mut BTreeSet<String>) {
    let join = |name: &str| if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") };
    let branches = ["oneOf", "anyOf"].iter().filter_map(|word| schema.get(word)?.as_array()).flatten();
    branches.for_each(|branch| paths(branch, path, found));
    if let Some(items) =
        schema.get("items").filter(|items| items.get("properties").or(items.get("oneOf")).is_some())
    {
        paths(items, &format!("{path}[]"), found);
    }
    // Members whose names are free: the documents use `x`.
    if let Some(any) = schema.get("additionalProperties").filter(|any| any.get("properties").is_some()) {
        paths(any, &join("x"), found);
    }
    let Some(properties) = schema.get("properties").and_then(serde_json::Value::as_object) else { return };
    for (name, inner) in properties {
        let free = |value: &serde_json::Value| value.pointer("/additionalProperties/properties").is_some();
        let holds = |value: &serde_json::Value| {
            ["properties", "oneOf"].iter().any(|word| value.get(word).is_some()) || free(value)
        };
        let listed = inner.get("items").is_some_and(holds);
        if !holds(inner) && !listed {
            found.insert(join(name));
        }
        paths(inner, &join(name), found);
    }
}

#[test]
fn every_setting_without_effect_is_one_that_a_file_may_have() {
    for (listed, schema) in [(PROCESS, process::schema()), (POLICY, policy::schema())] {
        let mut known = BTreeSet::new();
        paths(&schema, "", &mut known);
        for Remark { path, .. } in listed {
            assert!(known.contains(*path), "{path}: {known:?}");
        }
    }
}

/// Name under which code would use the setting: its last two path segments.
fn tail(path: &str) -> String {
    let names: Vec<&str> = path.trim_end_matches("[]").rsplitn(3, '.').take(2).collect();
    names.iter().rev().map(|name| name.trim_end_matches("[]")).collect::<Vec<_>>().join(".")
}

fn sources(folder: &Path, found: &mut Vec<(String, String)>) {
    for entry in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        if entry.is_dir() {
            sources(&entry, found);
        } else if let Ok(text) = std::fs::read_to_string(&entry) {
            found.push((entry.display().to_string(), text));
        }
    }
}

#[test]
fn settings_without_effect_are_used_nowhere() {
    let mut files = Vec::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut files);
    files.retain(|(file, _)| !file.contains("/src/foretell/config/"));
    for Remark { path, .. } in PROCESS.iter().chain(POLICY) {
        let name = tail(path);
        let used = files.iter().find(|(_, text)| text.contains(&name));
        assert!(used.is_none(), "{path} is used in {}: remove it from the table", used.unwrap().0);
    }
    assert_eq!(
        (tail("backends[].budget.slots"), tail("corpus.ttl")),
        ("budget.slots".into(), "corpus.ttl".into())
    );
}

#[test]
fn values_without_a_request_cause_no_warning() {
    let told = |kind, text: &str| remarks(kind, "f", &yaml::parse("f", text).unwrap());
    let process = "observe: { otlp: null, text: false }\ncorpus: { snapshot: null }\n";
    assert_eq!(told(Kind::Process, process), Vec::<String>::new());
    assert_eq!(told(Kind::Policy, "accept: { rule: exact }\ngamma: { fixed: null }\n"), Vec::<String>::new());
    let process =
        "backends:\n- name: a\n  budget:\n    slots: 0.2\n- name: b\n  models: [{ id: x, base: y }]\n";
    assert_eq!(
        told(Kind::Process, process),
        [
            "f:4: backends[0].budget.slots: 0.2 has no effect yet: the engine's free slots are not counted",
            "f:6: backends[1].models[0].base: y has no effect: an adapter is routed and verified like every other model",
        ]
    );
}
