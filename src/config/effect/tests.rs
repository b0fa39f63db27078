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

/// Settings of the process file that have an effect: path, file and the text in that file that uses it.
const PROCESS_ACTS: &[(&str, &str, &str)] = &[
    ("version", "config/process/file.rs", "fn version"),
    ("mode", "app.rs", "process.mode"),
    ("listen[].address", "app.rs", "listen.address"),
    ("listen[].tls.cert", "app.rs", "&tls.cert"),
    ("listen[].tls.key", "app.rs", "&tls.key"),
    ("listen[].tls.client_ca", "app.rs", "tls.client_ca"),
    ("admin.address", "app.rs", "process.admin.address"),
    ("admin.token_file", "app.rs", "process.admin.token_file"),
    ("metrics.address", "app.rs", "process.metrics"),
    ("limits.headers", "app.rs", "limits.headers"),
    ("limits.header_bytes", "app.rs", "limits.header_bytes"),
    ("limits.speculate_body", "app.rs", "limits.speculate_body"),
    ("limits.relay_body", "app.rs", "limits.relay_body"),
    ("limits.sessions", "app.rs", "limits.sessions"),
    ("timeouts.header", "app.rs", "process.timeouts.header"),
    ("timeouts.connect", "app.rs", "process.timeouts.connect"),
    ("timeouts.first_byte", "app.rs", "process.timeouts.first_byte"),
    ("timeouts.idle", "app.rs", "process.timeouts.idle"),
    ("timeouts.verify", "app.rs", "timeouts.verify"),
    ("timeouts.draft", "app.rs", "timeouts.draft"),
    ("timeouts.pool_idle", "app.rs", "process.timeouts.pool_idle"),
    ("drain.delay", "app.rs", "process.drain.delay"),
    ("drain.grace", "app.rs", "process.drain.grace"),
    ("tenant.header", "gateway/tenant.rs", "configured.header"),
    ("tenant.trusted_peers", "gateway/tenant.rs", "configured.trusted_peers"),
    ("tenant.fallback", "gateway/tenant.rs", "configured.fallback"),
    ("client.control", "app.rs", "process.client"),
    ("backends[].name", "app.rs", "backend.name"),
    ("admin.hosts", "app.rs", "admin.hosts"),
    ("limits.connections", "app.rs", "limits.connections"),
    ("limits.memory", "app.rs", "limits.memory"),
    ("limits.uri", "app.rs", "limits.uri"),
    ("ready.require_backend", "app.rs", "require_backend"),
    ("timeouts.body", "app.rs", "timeouts.body"),
    ("timeouts.keep_alive", "app.rs", "timeouts.keep_alive"),
    ("backends[].connect.auth.own_token_file", "app.rs", "own_token_file"),
    ("backends[].default", "app.rs", "backend.default"),
    ("backends[].dialect", "app.rs", "backend.dialect"),
    ("backends[].ranks", "app.rs", "backend.ranks"),
    ("backends[].billed", "app.rs", "backend.billed"),
    ("backends[].replicas.dns", "app.rs", "Replicas::Dns"),
    ("backends[].replicas.every", "app.rs", "discover: Some(*every)"),
    ("backends[].replicas.scheme", "app.rs", "*https"),
    ("backends[].replicas.model", "onnx_server/open.rs", "&model.path"),
    ("backends[].replicas.name", "onnx_server/open.rs", "model.name"),
    ("backends[].replicas.device", "onnx_server/open.rs", "model.device"),
    ("backends[].replicas.lanes", "onnx_server/open.rs", "model.lanes"),
    ("backends[].replicas.context", "onnx_server/open.rs", "model.context"),
    ("backends[].replicas.threads", "onnx_server/open.rs", "model.threads"),
    ("backends[].models[].id", "app.rs", "model.id"),
    ("backends[].models[].aliases", "app.rs", "model.aliases"),
    ("backends[].models[].tokenizer", "app.rs", "model.tokenizer"),
    ("backends[].connect.http", "app.rs", "connect.http"),
    ("backends[].connect.host", "app.rs", "connect.host"),
    ("backends[].connect.tls.ca", "app.rs", "connect.ca"),
    ("backends[].connect.tls.cert", "app.rs", "connect.identity"),
    ("backends[].connect.tls.key", "app.rs", "connect.identity"),
    ("backends[].connect.auth.pass", "app.rs", "connect.pass_auth"),
    ("backends[].connect.auth.token_file", "app.rs", "connect.token_file"),
    ("backends[].load.url", "app.rs", "backend.load.url"),
    ("backends[].load.every", "app.rs", "backend.load.every"),
    ("backends[].plans.allow", "drive/ruling.rs", "plans.allow"),
    ("backends[].plans.context_max", "drive/ruling.rs", "plans.context_max"),
    ("backends[].plans.bytes_max", "drive/ruling.rs", "plans.bytes_max"),
    ("memory.bytes", "app.rs", "memory.bytes"),
    ("memory.ttl", "app.rs", "memory.ttl"),
    ("memory.snapshot", "app.rs", "memory.snapshot"),
    ("backends[].budget.extra_tokens", "app.rs", "budget.extra_tokens"),
    ("backends[].budget.switchback", "app.rs", "budget.switchback"),
    ("backends[].probe.when", "app.rs", "backend.probe.when"),
    ("backends[].probe.calls", "app.rs", "backend.probe.calls"),
    ("backends[].probe.within", "app.rs", "backend.probe.within"),
    ("drafters.x.path", "drive/drafters.rs", "model.path"),
    ("drafters.x.tokenizer", "drive/drafters.rs", "model.tokenizer"),
    ("drafters.x.device", "drive/drafters.rs", "model.device"),
    ("drafters.x.slots", "drive/drafters.rs", "model.slots"),
    ("drafters.x.context", "drive/drafters.rs", "model.context"),
    ("policies.dir", "config/load.rs", "process.policies"),
    ("observe.log", "cli/serve.rs", "observe.log"),
    ("observe.level", "cli/serve.rs", "observe.level"),
    ("observe.otlp", "app.rs", "observe.otlp"),
    ("observe.share", "app.rs", "observe.share"),
    ("observe.text", "app.rs", "observe.text"),
];

/// The same for policy files.
const POLICY_ACTS: &[(&str, &str, &str)] = &[
    ("version", "config/process/file.rs", "fn version"),
    ("name", "policy.rs", "self.name"),
    ("mode", "policy/steps.rs", "policy.mode"),
    ("match.models", "policy/matching.rs", "self.models"),
    ("match.backends", "policy/matching.rs", "self.backends"),
    ("match.tenants", "policy/matching.rs", "self.tenants"),
    ("match.routes", "policy/matching.rs", "self.routes"),
    ("match.headers", "policy/matching.rs", "self.headers"),
    ("match.temperature.min", "policy/matching.rs", "self.temperature"),
    ("match.temperature.max", "policy/matching.rs", "self.temperature"),
    ("match.prompt_tokens.min", "policy/matching.rs", "self.prompt_tokens"),
    ("match.prompt_tokens.max", "policy/matching.rs", "self.prompt_tokens"),
    ("drafters[].kind", "policy/part.rs", "Part::Inline(LookupSpec::Recycling)"),
    ("drafters[].ngram.min", "policy/part.rs", "ngram_min"),
    ("drafters[].ngram.max", "policy/part.rs", "ngram_max"),
    ("drafters[].model", "policy/part.rs", "model(name)"),
    ("drafters[].vocabulary", "policy/part.rs", "speech(*vocabulary"),
    ("drafters[].phrases[].trigger", "draft/phrasebook.rs", "(trigger, _)"),
    ("drafters[].phrases[].continuation", "draft/phrasebook.rs", "(trigger, continuation)"),
    ("drafters[].schemas", "draft/phrasebook.rs", "schemas.then("),
    ("drafters[].scope", "policy/part.rs", "LookupSpec::Suffix(*scope)"),
    ("drafters[].i_accept_sharing", "config/policy/file.rs", "!accepted"),
    ("gamma.max", "policy/ruling.rs", "policy.gamma.max"),
    ("gamma.fixed", "policy/ruling.rs", "policy.gamma.fixed"),
    ("gamma.ahead", "policy/ruling.rs", "policy.gamma.ahead"),
    ("gamma.margin", "policy/ruling.rs", "policy.gamma.margin"),
    ("gamma.stay", "policy/ruling.rs", "policy.gamma.stay"),
    ("accept.rule", "session/accept.rs", "accept.rule"),
    ("accept.kappa", "session/accept/rule.rs", "kappa * peak"),
    ("accept.epsilon", "session/accept/rule.rs", "epsilon.min"),
    ("accept.delta", "session/accept/rule.rs", "delta * "),
    ("accept.tolerance.temperature", "control/tolerance.rs", "self.temperature"),
    ("accept.tolerance.load", "control/tolerance.rs", "self.load"),
    ("accept.tolerance.max", "control/tolerance.rs", "self.max"),
    ("accept.max_drift", "session/accept.rs", "self.max_drift"),
    ("accept.max_drift_rate", "session/accept.rs", "self.max_drift_rate"),
    ("gates.waiting", "policy/ruling.rs", "LoadGates { waiting"),
    ("gates.kv", "policy/ruling.rs", "kv, stale }"),
    ("gates.stale", "policy/ruling.rs", "kv, stale }"),
    ("gates.acceptance", "policy/ruling.rs", "policy.gates.acceptance"),
    ("gates.latency", "drive/comparison.rs", "gates.latency"),
    ("gates.max_gap", "policy/ruling.rs", "policy.gates.max_gap"),
    ("gates.reprobe", "drive/comparison.rs", "gates.reprobe"),
    ("holdback.start", "drive/comparison.rs", "Holdback { start, floor }"),
    ("holdback.floor", "drive/comparison.rs", "Holdback { start, floor }"),
];

/// Settings that are only allowed beside another one that has no effect (path, other path).
const POLICY_BESIDE: &[(&str, &str)] = &[];

/// Every setting that parsing these documents asks for, without the lists and maps that hold others.
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

fn source(file: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src").join(file);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Asserts that every setting is in exactly one of the three lists.
fn sorted_out(
    settings: &BTreeSet<String>,
    acts: &[(&str, &str, &str)],
    ignored: &[Remark],
    beside: &[(&str, &str)],
) {
    let listed = acts.iter().map(|(path, ..)| *path);
    let listed =
        listed.chain(ignored.iter().map(|remark| remark.path)).chain(beside.iter().map(|(path, _)| *path));
    let listed: Vec<String> = listed.map(ToOwned::to_owned).collect();
    let once: BTreeSet<String> = listed.iter().cloned().collect();
    assert_eq!(listed.len(), once.len(), "a setting stands in two lists");
    let missing: Vec<_> = settings.difference(&once).collect();
    let gone: Vec<_> = once.difference(settings).collect();
    assert!(missing.is_empty(), "say what acts on them, or that nothing does: {missing:?}");
    assert!(gone.is_empty(), "no file can have them: {gone:?}");
    for (path, file, text) in acts {
        assert!(source(file).contains(text), "{path}: {file} has no {text:?} any more");
    }
    for (path, with) in beside {
        assert!(ignored.iter().any(|remark| remark.path == *with), "{path} goes with {with}");
    }
}

#[test]
fn every_setting_of_the_process_file_acts_or_is_known_not_to() {
    let settings = settings(&PROCESSES, |text| drop(process::parse("f", text).unwrap()));
    assert!(settings.len() > 70, "{settings:?}");
    sorted_out(&settings, PROCESS_ACTS, PROCESS, &[]);
}

#[test]
fn every_setting_of_a_policy_file_acts_or_is_known_not_to() {
    let settings = settings(&POLICIES, |text| drop(policy::parse("f", text).unwrap()));
    assert!(settings.len() > 40, "{settings:?}");
    sorted_out(&settings, POLICY_ACTS, POLICY, POLICY_BESIDE);
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
    // Members whose names are free: that of the documents is `x`.
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
fn the_schema_has_every_key_that_the_reader_asks_for_and_no_other() {
    let settings = settings(&POLICIES, |text| drop(policy::parse("f", text).unwrap()));
    let mut found = BTreeSet::new();
    paths(&policy::schema::schema(), "", &mut found);
    found.retain(|path| path != "drafters[].kind");
    let settings: BTreeSet<String> = settings.into_iter().filter(|path| path != "drafters[].kind").collect();
    assert_eq!(found, settings);
}

#[test]
fn the_schema_of_the_process_file_has_every_key_that_the_reader_asks_for_and_no_other() {
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
fn what_is_said_to_have_no_effect_is_used_nowhere() {
    let mut files = Vec::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut files);
    files.retain(|(file, _)| !file.contains("/src/config/"));
    for Remark { path, .. } in PROCESS.iter().chain(POLICY) {
        let name = tail(path);
        let used = files.iter().find(|(_, text)| text.contains(&name));
        assert!(used.is_none(), "{path} is used in {}: take it out of the table", used.unwrap().0);
    }
    assert_eq!(
        (tail("backends[].budget.slots"), tail("memory.ttl")),
        ("budget.slots".into(), "memory.ttl".into())
    );
}

#[test]
fn what_asks_for_nothing_is_not_warned_of() {
    let told = |kind, text: &str| remarks(kind, "f", &yaml::parse("f", text).unwrap());
    let process = "observe: { otlp: null, text: false }\nmemory: { snapshot: null }\n";
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
