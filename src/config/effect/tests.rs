use std::collections::BTreeSet;
use std::path::Path;

use super::*;
use crate::config::read::asked;
use crate::config::{policy, process};

/// Process files that together have every map a process file may have.
const PROCESSES: [&str; 1] = ["version: 1
listen: [{ address: '127.0.0.1:1', tls: { cert: c, key: k } }]
backends:
- { name: a, replicas: { dns: 'a:1' }, models: [{ id: m }] }
- { name: b, replicas: { model: x } }
drafters: { x: { path: p } }
"];
/// Policy files that together have every map a policy file may have.
const POLICIES: [&str; 3] = [
    "version: 1
name: a
drafters:
- { kind: prompt_lookup }
- { kind: suffix }
- { kind: recycling }
- { kind: phrasebook, phrases: [{ trigger: a, continuation: b }] }
- { kind: model, model: x }
",
    "version: 1\nname: a\naccept: { rule: ears_gated }\n",
    "version: 1\nname: a\naccept: { rule: typical }\n",
];

/// Every setting that parsing these documents looks up, without the lists and maps that hold
/// others.
fn settings(documents: &[&str], parse: impl Fn(&str)) -> BTreeSet<String> {
    asked::take();
    for document in documents {
        parse(document);
    }
    let asked: BTreeSet<String> = asked::take().iter().map(|path| without_numbers(path)).collect();
    let holds = |path: &str| {
        asked.iter().any(|other| other.strip_prefix(path).is_some_and(|rest| rest.starts_with(['.', '['])))
    };
    asked.iter().filter(|path| !holds(path)).cloned().collect()
}

fn without_numbers(path: &str) -> String {
    path.chars().filter(|letter| !letter.is_ascii_digit()).collect()
}

#[test]
fn every_setting_without_effect_is_one_that_a_file_may_have() {
    let process = settings(&PROCESSES, |text| drop(process::parse("f", text).unwrap()));
    let policy = settings(&POLICIES, |text| drop(policy::parse("f", text).unwrap()));
    for (listed, known) in [(PROCESS, process), (POLICY, policy)] {
        for Remark { path, .. } in listed {
            assert!(known.contains(*path), "{path}: {known:?}");
        }
    }
}

/// Every value's path in a schema, as [`settings`] writes them.
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
fn the_policy_schema_has_exactly_the_keys_that_the_reader_looks_up() {
    let settings = settings(&POLICIES, |text| drop(policy::parse("f", text).unwrap()));
    let mut found = BTreeSet::new();
    paths(&policy::schema::schema(), "", &mut found);
    found.retain(|path| path != "drafters[].kind");
    let settings: BTreeSet<String> = settings.into_iter().filter(|path| path != "drafters[].kind").collect();
    assert_eq!(found, settings);
}

#[test]
fn the_process_schema_has_exactly_the_keys_that_the_reader_looks_up() {
    let settings = settings(&PROCESSES, |text| drop(process::parse("f", text).unwrap()));
    let mut found = BTreeSet::new();
    paths(&process::schema::schema(), "", &mut found);
    assert_eq!(found, settings);
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
    files.retain(|(file, _)| !file.contains("/src/config/"));
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
