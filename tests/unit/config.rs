//! Settings: valid files are parsed, and all errors of a file are reported at once, with their
//! lines.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use foretell_config::load::parse_policies;
use foretell_config::policy;
use foretell_config::process::{self, Dialect, Process, Render, Replicas, Scheme, Timeouts, TokenizerSource};
use foretell_config::{Flags, Loaded, PolicyStore, Problem, load, load_policies};
use foretell_config::{reference, schema as published};
use foretell_core::draft::{LookupSpec, Ngram};
use foretell_core::words::{Mode, VerifyMethod};
use foretell_engines::Dialect as Spoken;
use foretell_engines::probe::prospect;
use foretell_policy::{Bounds, Drafter, Fact, Match, Policy, PolicyMode, Rule, Scope, Subject};
use foretell_wire::openai::Route;
use http::HeaderMap;
use proptest::prelude::*;

const BAD_CONFIG: &str = include_str!("config/bad-config.txt");
const BAD_POLICY: &str = include_str!("config/bad-policy.txt");

fn lines(problems: &[Problem]) -> String {
    problems.iter().flat_map(|problem| [problem.to_string(), "\n".to_owned()]).collect()
}

/// The cases of a table: name, file, exact errors.
fn cases(table: &str) -> Vec<(&str, String, String)> {
    let case = |text| {
        let (name, rest): (&str, &str) = str::split_once(text, '\n').unwrap();
        let (source, errors) = rest.split_once("--- errors\n").unwrap();
        (name, source.to_owned(), format!("{}\n", errors.trim_end()))
    };
    table.trim_start_matches("=== ").split("\n=== ").map(case).collect()
}

fn check_table(table: &str, parse: impl Fn(&str) -> Result<(), Vec<Problem>>) -> usize {
    let cases = cases(table);
    for (name, source, expected) in &cases {
        let got = parse(source).map_err(|problems| lines(&problems));
        assert_eq!(got, Err(expected.clone()), "{name}");
    }
    cases.len()
}

#[test]
fn the_policy_that_a_probe_proposes_is_valid() {
    for text in [prospect::policy(Some(5), false), prospect::policy(None, true)] {
        let process = process::parse("process", "version: 1\n").unwrap();
        let sources = [("probed.yaml".to_owned(), text.clone())];
        assert!(parse_policies(&sources, &process).is_ok(), "{text}");
    }
}

#[test]
fn every_bad_file_has_exact_errors() {
    let processes = check_table(BAD_CONFIG, |source| process::parse("f", source).map(|_| ()));
    let policies = check_table(BAD_POLICY, |source| policy::parse("f", source).map(|_| ()));
    assert!(processes + policies >= 60, "{processes} + {policies}");
}

fn policy(source: &str) -> Policy {
    let source = format!("version: 1\nname: a\n{source}");
    policy::parse("a.yaml", &source).map_err(|problems| lines(&problems)).unwrap().policy
}

fn process_of(source: &str) -> Process {
    let source = format!("version: 1\n{source}");
    process::parse("f", &source).map_err(|problems| lines(&problems)).unwrap()
}

#[test]
fn an_almost_empty_config_file_is_the_documented_one() {
    let empty = process_of("");
    assert_eq!(empty, Process::default());
    let mut full = process::parse("f", include_str!("../../deploy/foretell.yaml")).unwrap();
    let mut backend = full.backends.pop().unwrap();
    // Explicit verification methods are marked as such, even if they are the defaults.
    assert!(std::mem::replace(&mut backend.methods.explicit, false));
    full.drafters.clear();
    full.listen = empty.listen.clone();
    // This file has no policies next to it, and an explicit drain delay is waited for.
    assert!(full.policies == Path::new("../policies") && !full.drain.early && empty.drain.early);
    (full.policies, full.drain.early) = (empty.policies.clone(), true);
    full.policy_files.dir = None;
    assert_eq!(full, empty);
    let bare = process_of("backends: [{ name: llama70, replicas: [\"http://10.0.0.7:8000\"] }]")
        .backends
        .pop()
        .unwrap();
    assert_eq!(process::Backend { models: Vec::new(), ..backend }, bare);
}

#[test]
fn a_config_file_is_understood() {
    let process = process_of(
        r#"
mode: observe
listen: [{ address: "[::1]:80", tls: { cert: c, key: k, client_ca: a } }, { address: "127.0.0.1:0" }]
admin: { address: "0.0.0.0:1", token_file: t }
limits: { passthrough_body: 1GiB }
timeouts: { idle: 2m, draft: 40ms }
tenant: { header: X-Tenant, trusted_peers: [10.0.0.0/8] }
fleet: { store: "rediss://me:pass@store:7000/3", key: west, sync: 2s, ca: c }
backends:
  - name: a
    engine: sglang
    replicas: { dns: "a:1" }
    models: [{ id: m, tokenizer: some/file.json }]
    verify: { allow: [tree] }
    budget: { slots: 0 }
    billed: true
  - name: b
    replicas: ["https://a/base/", "http://b:1"]
    ranks: 4
    render: "http://10.0.0.9:8001"
    connect: { tls: { ca: ca, cert: c, key: k }, auth: { pass: false } }
  - name: d
    replicas: ["http://d:1"]
    models: [{ id: m2 }, { id: "lora-*", base: m2 }]
    render: null
    connect: { http: http1 }
    budget: { slots: 0.5 }
"#,
    );
    assert_eq!(process.mode, Mode::Observe);
    assert_eq!(process.listen[0].tls.as_ref().unwrap().client_ca.as_deref(), Some(Path::new("a")));
    assert_eq!(process.limits.passthrough_body, Some(1 << 30));
    assert_eq!(process.timeouts.idle, Some(Duration::from_mins(2)));
    assert_eq!(process.timeouts.draft, Some(Duration::from_millis(40)));
    assert_eq!(Timeouts::default().draft, None, "a draft's deadline is the session's own");
    assert_eq!(process.tenant.header.as_deref(), Some("x-tenant"));
    let store = process.fleet.store.as_ref().unwrap();
    assert_eq!((store.to_string().as_str(), store.tls), ("rediss://store:7000/3", true));
    assert_eq!((process.fleet.key.as_str(), process.fleet.sync), ("west", Duration::from_secs(2)));
    let backend = &process.backends[0];
    assert_eq!(backend.dialect, Dialect::Of(Spoken::Sglang));
    assert_eq!(
        backend.replicas,
        Replicas::Dns { name: "a:1".to_owned(), every: Duration::from_secs(5), scheme: Scheme::Http }
    );
    assert_eq!(backend.models[0].tokenizer, TokenizerSource::File("some/file.json".into()));
    assert_eq!(backend.methods.allow, [VerifyMethod::Tree]);
    let other = &process.backends[1];
    let Replicas::Urls(urls) = &other.replicas else { panic!("addresses, not a name") };
    let Render::By(renderer) = &other.render else { panic!("another server") };
    assert_eq!(renderer.port_u16(), Some(8001));
    assert_eq!((urls[0].path(), other.ranks, other.connect.auth.pass), ("/base", 4, false));
    let tls = &other.connect.tls;
    assert_eq!((tls.cert.as_deref(), tls.key.as_deref()), (Some(Path::new("c")), Some(Path::new("k"))));
    let last = &process.backends[2];
    assert_eq!((&last.render, &backend.render), (&Render::Never, &Render::Backend));
    assert_eq!(
        (backend.budget.slots.to_string().as_str(), last.budget.slots.to_string().as_str()),
        ("0", "0.5")
    );
    assert!(backend.billed && backend.connect.auth.pass);
}

#[test]
fn a_policy_file_is_understood() {
    let text = include_str!("../../policies/examples/ide-code.yaml");
    let ide = policy::parse("ide-code.yaml", text).unwrap().policy;
    assert_eq!((ide.name.as_str(), ide.mode), ("ide-code", PolicyMode::Auto));
    assert_eq!(ide.drafters[0], Drafter::Lookup(LookupSpec::PromptLookup(Ngram { min: 2, max: 8 })));
    assert_eq!(ide.drafters[1], Drafter::Lookup(LookupSpec::Suffix(Scope::Tenant)));
    assert_eq!(ide.drafters.len(), 2, "the model waits for the config file");
    assert_eq!((ide.gamma.max, ide.gamma.fixed, ide.accept.rule), (32, None, Rule::Exact));
    assert_eq!(ide.gates.max_gap, Duration::from_millis(500));
    assert_eq!(ide.label(), format!("ide-code@{}", ide.revision));
    let lossy = policy(
        "accept: { rule: ears, kappa: 0.3, tolerance: { temperature: [[0, 0], [1.0, 0.3]], max: 0.3 } }",
    );
    assert_eq!(lossy.accept.rule, Rule::Ears { kappa: 0.3 });
    assert_eq!(lossy.accept.tolerance.temperature, [(0.0, 0.0), (1.0, 0.3)]);
    assert_eq!((lossy.accept.max_drift, lossy.accept.drift_per_100_tokens), (None, 2.0));
    let usual = policy("accept: { rule: ears, max_drift: 0.5 }").accept;
    assert_eq!((usual.max_drift, usual.tolerance.at(1.0, 0.0)), (Some(0.5), 1.0));
}

#[test]
fn an_empty_policy_is_the_built_in_one() {
    let built_in = policy::built_in().unwrap();
    let built_in = built_in.policies()[0].as_ref();
    assert_eq!(built_in.name, "default");
    let bare = policy("");
    let same = Policy { name: "default".to_owned(), revision: built_in.revision, ..bare };
    assert_eq!(*built_in, same);
}

fn subject(headers: &HeaderMap) -> Subject<'_> {
    Subject {
        model: "qwen-coder",
        backend: "a",
        tenant: Some("ide"),
        api: Route::Chat.into(),
        headers,
        temperature: Fact::Known(0.7),
        prompt_tokens: 100,
    }
}

#[rstest::rstest]
#[case("{}", "")]
#[case("{ models: [llama, '*coder'] }", "")]
#[case("{ models: [llama, 'x*'] }", "model to llama or x* qwen-coder")]
#[case("{ models: [] }", "model to none qwen-coder")]
#[case("{ backends: ['b'] }", "backend to b a")]
#[case("{ tenants: [web, ide] }", "")]
#[case("{ tenants: [web] }", "tenant to web ide")]
#[case("{ routes: [completions] }", "route to completions chat")]
#[case("{ routes: [chat, completions] }", "")]
#[case("{ temperature: { min: 0.7, max: 0.7 } }", "")]
#[case("{ temperature: { max: 0.6 } }", "temperature up to 0.6 0.7")]
#[case("{ prompt_tokens: { min: 101 } }", "prompt_tokens from 101 100")]
#[case("{ headers: { X-Team: [a, b] } }", "")]
#[case("{ headers: { x-team: [a], x-other: [q] } }", "header x-team to a b,header x-other to q none")]
fn a_match_ands_its_fields_and_ors_its_lists(#[case] source: &str, #[case] expected: &str) {
    let policy = policy(&format!("match: {source}"));
    let mut headers = HeaderMap::new();
    headers.insert("x-team", "b".parse().unwrap());
    let subject = subject(&headers);
    let mismatches = policy.matcher.mismatches(&subject);
    let got = |got: &Result<String, &str>| got.clone().unwrap();
    let told: Vec<_> =
        mismatches.iter().map(|m| format!("{} {} {}", m.field, m.wanted, got(&m.got))).collect();
    assert_eq!(told.join(","), expected);
    assert_eq!(policy.matches(&subject), Fact::Known(expected.is_empty()));
}

#[test]
fn without_a_tenant_no_list_of_tenants_matches() {
    let headers = HeaderMap::new();
    let subject = Subject { tenant: None, ..subject(&headers) };
    assert_eq!(policy("match: { tenants: [ide, none] }").matches(&subject), Fact::Known(false));
    assert!(Match { temperature: Bounds::default(), ..Match::default() }.mismatches(&subject).is_empty());
}

#[test]
fn a_temperature_that_is_not_known_matters_only_where_it_is_bounded() {
    let headers = HeaderMap::new();
    let subject = Subject { temperature: Fact::Unknown("nobody said"), ..subject(&headers) };
    let of = |source: &str| policy(&format!("match: {source}"));
    assert_eq!(of("{}").matches(&subject), Fact::Known(true));
    assert_eq!(of("{ models: [x] }").matches(&subject), Fact::Known(false), "for any temperature");
    let bounded = of("{ temperature: { max: 0.6 } }");
    assert_eq!(bounded.matches(&subject), Fact::Unknown("nobody said"));
    assert_eq!(
        bounded.matcher.mismatches(&subject)[0].to_string(),
        "temperature is not known (nobody said); this policy applies only up to 0.6"
    );
}

// Files, flags and environment.

fn write(folder: &Path, name: &str, text: &str) -> String {
    let path = folder.join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, text).unwrap();
    path.display().to_string()
}

fn flags_for(folder: &Path, process: &str) -> Flags {
    let policies = Some(folder.join("policies")).filter(|policies| policies.exists());
    let policies = policies.map(|policies| policies.display().to_string());
    Flags { config: Some(write(folder, "foretell.yaml", process)), policies, ..Flags::default() }
}

fn load_from(folder: &Path, process: &str) -> Result<Loaded, String> {
    load(&flags_for(folder, process), &BTreeMap::new())
        .map_err(|problems| lines(&problems).replace(&folder.display().to_string(), ""))
}

#[test]
fn a_flag_wins_over_the_environment_and_that_over_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let source = "version: 1\nlisten: [{ address: \"127.0.0.1:1\" }]\nadmin: { address: \"127.0.0.1:2\" }\n\
        backends: [{ name: a, replicas: [\"http://a:1\"] }, { name: b, replicas: [\"http://b:1\"] }]\n";
    let mut environment = BTreeMap::new();
    let mut flags = flags_for(folder.path(), source);
    let listen = |flags: &Flags, environment: &BTreeMap<String, String>| {
        load(flags, environment).unwrap().process.listen[0].address.port()
    };
    assert_eq!(listen(&flags, &environment), 1);
    environment.insert("FORETELL_LISTEN".to_owned(), "127.0.0.1:3".to_owned());
    environment.insert("FORETELL_ADMIN".to_owned(), String::new());
    assert_eq!(listen(&flags, &environment), 3);
    flags.listen = Some("127.0.0.1:4".to_owned());
    flags.backend = Some("http://c:1".to_owned());
    flags.engine = Some("onnx".to_owned());
    let process = load(&flags, &environment).unwrap().process;
    assert_eq!((process.listen[0].address.port(), process.admin.address.port()), (4, 2));
    assert_eq!(process.backends.len(), 1);
    assert_eq!(process.backends[0].dialect, Dialect::Of(Spoken::Onnx));
    assert_eq!(process.backends[0].replicas, Replicas::Urls(vec!["http://c:1".parse().unwrap()]));
    let path = environment.insert("FORETELL_CONFIG".to_owned(), flags.config.take().unwrap());
    assert_eq!(path, None);
    flags.backend = None;
    assert_eq!(load(&flags, &environment).unwrap().process.backends.len(), 2);
}

#[test]
fn variables_of_the_environment_stand_for_values_of_the_config_file_and_of_no_policy() {
    let folder = tempfile::tempdir().unwrap();
    let source = "version: 1\nmode: ${MODE:-observe}\nlimits: { sessions: \"${SESSIONS}\" }\nready: { require_backend: \"${READY:-false}\" }\n\
        backends: [{ name: \"${NAME}\", replicas: [\"http://${HOST}:8000\"] }]\n";
    let mut environment: BTreeMap<String, String> = [("SESSIONS", "7"), ("NAME", "70"), ("HOST", "engine")]
        .map(|(name, text)| (name.into(), text.into()))
        .into();
    write(folder.path(), "policies/a.yaml", "version: 1\nname: a\nmatch: { models: [\"${HOST}\"] }\n");
    let flags = flags_for(folder.path(), source);
    let loaded = load(&flags, &environment).map_err(|problems| lines(&problems)).unwrap();
    assert_eq!((loaded.process.mode, loaded.process.limits.sessions), (Mode::Observe, 7));
    assert_eq!(loaded.process.backends[0].name, "70");
    assert_eq!(
        loaded.process.backends[0].replicas,
        Replicas::Urls(vec!["http://engine:8000".parse().unwrap()])
    );
    assert_eq!(loaded.warnings, Vec::<String>::new(), "the value of the variable counts");
    let models = loaded.policies.policies()[0].matcher.models.clone().unwrap();
    assert_eq!(models[0].as_str(), "${HOST}");

    environment.remove("HOST");
    environment.insert("MODE".to_owned(), "s3cret".to_owned());
    environment.insert("SESSIONS".to_owned(), "many".to_owned());
    let told = lines(&load(&flags, &environment).unwrap_err());
    let told = told.replace(&folder.path().display().to_string(), "");
    assert_eq!(
        told,
        "/foretell.yaml:2: mode: unknown value, allowed off|observe|auto, got \"${MODE:-observe}\"\n\
         /foretell.yaml:3: limits.sessions: wrong type, allowed 0 to 1000000, got \"${SESSIONS}\"\n\
         /foretell.yaml:5: backends[0].replicas[0]: the variable HOST is not set, allowed ${NAME} of a variable that is set, \
         ${NAME:-DEFAULT}, or $${ for ${ itself, got \"http://${HOST}:8000\"\n\
         /foretell.yaml:5: backends[0].replicas[0]: not a URL, allowed http(s)://HOST[:PORT][/BASE], got \"http://${HOST}:8000\"\n",
    );
}

#[test]
fn keys_of_the_author_s_own_at_the_top_hold_anchors() {
    let process = process_of(
        "x-tls: &tls { tls: { ca: ca.pem } }\nx-note: anything\n\
         backends: [{ name: a, replicas: [\"http://a:1\"], connect: *tls }, { name: b, replicas: [\"http://b:1\"], connect: *tls }]\n",
    );
    let ca = |at: usize| process.backends[at].connect.tls.ca.clone();
    assert_eq!((ca(0), ca(1)), (Some("ca.pem".into()), Some("ca.pem".into())));
    let policy = policy("x-hours: &gamma { max: 4 }\ngamma: *gamma\n");
    assert_eq!(policy.gamma.max, 4);
    let inner = process::parse("f", "version: 1\nlimits: { x-a: 1 }\n").unwrap_err();
    assert!(lines(&inner).starts_with("f:2: limits.x-a: unknown key"), "{}", lines(&inner));
}

#[test]
fn addresses_may_leave_the_ip_out() {
    let process = process_of("listen: [{ address: \":8081\" }, { address: \"localhost:8082\" }]\n");
    let addresses: Vec<String> = process.listen.iter().map(|listen| listen.address.to_string()).collect();
    assert_eq!(addresses, ["0.0.0.0:8081", "127.0.0.1:8082"]);
    for wrong in ["localhost", "host:80", ":", ":99999", "localhost:http"] {
        let source = format!("version: 1\nlisten: [{{ address: \"{wrong}\" }}]\n");
        assert!(process::parse("f", &source).is_err(), "{wrong}");
    }
    // A non-loopback admin address needs a token, also if it is set by a flag.
    let flags = Flags { admin: Some(":9464".to_owned()), ..Flags::default() };
    let told = lines(&load(&flags, &BTreeMap::new()).unwrap_err());
    assert!(told.starts_with("--admin: admin.address: open to others without a token"), "{told}");
}

#[test]
fn a_server_without_a_tokenizer_of_its_own_is_given_one_by_a_flag() {
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path(), "m/tokenizer.json", "{}");
    let flags = |backend: Option<&str>, tokenizer: &str| Flags {
        backend: backend.map(str::to_owned),
        tokenizer: Some(tokenizer.to_owned()),
        ..Flags::default()
    };
    let loaded = load(&flags(Some("http://h:1"), &path), &BTreeMap::new()).unwrap();
    let [model] = &loaded.process.backends[0].models[..] else { panic!("one model") };
    assert!(
        model.id.matches("whatever/it-is") && model.tokenizer == TokenizerSource::File(path.clone().into())
    );
    let told = lines(&load(&flags(None, &path), &BTreeMap::new()).unwrap_err());
    let says =
        "--tokenizer: backends[0].models[0].tokenizer: no server for it, allowed together with --backend URL";
    assert!(told.starts_with(says), "{told}");
}

#[test]
fn a_bad_flag_is_named() {
    let flags = Flags {
        listen: Some("here".to_owned()),
        engine: Some("onyx".to_owned()),
        backend: Some("http://me:secret@host".to_owned()),
        policies: Some("no such folder".to_owned()),
        ..Flags::default()
    };
    let environment = BTreeMap::from([("FORETELL_ADMIN".to_owned(), "0.0.0.0:1".to_owned())]);
    let problems = load(&flags, &environment).unwrap_err();
    assert_eq!(
        lines(&problems),
        "--listen: listen: not an address, allowed IP:PORT, localhost:PORT or :PORT, got \"here\"\n\
         FORETELL_ADMIN: admin.address: open to others without a token, allowed a loopback address, or any with admin.token_file, got \"0.0.0.0:1\"\n\
         --backend: backends: not a URL, allowed http(s)://HOST[:PORT][/BASE], got \"http://***@host\"\n\
         --engine: backends[0].engine: unknown value, allowed auto|onnx|vllm|sglang|llamacpp|tgi|trtllm|triton|lmdeploy|openai|ollama|mlx, got \"onyx\"; did you mean onnx?\n\
         --policies: policies.dir: no such folder, allowed a folder with policy files, got \"no such folder\"\n"
    );
}

#[test]
fn the_mode_is_that_of_the_flag_then_of_the_variable_then_of_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = flags_for(folder.path(), "version: 1\nmode: off\n");
    let mode = |flag: Option<&str>, variable: &str| {
        let flags = Flags { mode: flag.map(str::to_owned), ..file.clone() };
        let environment = BTreeMap::from([("FORETELL_MODE".to_owned(), variable.to_owned())]);
        load(&flags, &environment).map(|loaded| (loaded.process.mode, loaded.process.mode_source))
    };
    assert_eq!(mode(None, "").unwrap(), (Mode::Off, None));
    assert_eq!(mode(None, "observe").unwrap(), (Mode::Observe, Some("FORETELL_MODE".to_owned())));
    assert_eq!(mode(Some("auto"), "observe").unwrap(), (Mode::Auto, Some("--mode".to_owned())));
    assert_eq!(
        lines(&mode(Some("shadow"), "").unwrap_err()),
        "--mode: mode: unknown value, allowed off|observe|auto, got \"shadow\"; did you mean observe (shadow is a mode of policies)?\n"
    );
}

#[test]
fn policies_are_read_in_the_order_of_their_file_names() {
    let folder = tempfile::tempdir().unwrap();
    for (file, name) in [
        ("20.yaml", "late"),
        ("10-b.yml", "early"),
        (".9.yaml", "no"),
        ("notes.txt", "no"),
        ("sub/5.yaml", "no"),
    ] {
        write(folder.path(), &format!("policies/{file}"), &format!("version: 1\nname: {name}\n"));
    }
    let loaded = load_from(folder.path(), "version: 1").unwrap();
    let names: Vec<_> = loaded.policies.policies().iter().map(|policy| policy.name.as_str()).collect();
    assert_eq!(names, ["early", "late"]);
    let headers = HeaderMap::new();
    let first = loaded.policies.first_match(&subject(&headers)).known().flatten();
    assert_eq!(first.unwrap().name, "early");
}

#[test]
fn errors_of_several_files_are_reported_at_once() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "policies/a.yaml", "version: 1\nname: x\n");
    write(folder.path(), "policies/b.yaml", "version: 1\nmode: auto\nname: x\n");
    let model =
        "version: 1\nname: y\ndrafters:\n  - kind: prompt_lookup\n  - { kind: model, model: draft-sane }\n";
    write(folder.path(), "policies/c.yaml", model);
    write(folder.path(), "policies/d.yaml", "version: 1\nname: z\nmode: on\n");
    let process = "version: 1\ndrafters: { draft-same: { path: p }, draft-other: { path: p } }\n";
    assert_eq!(
        load_from(folder.path(), process).unwrap_err(),
        "/policies/b.yaml:3: name: not unique, allowed a name that no other policy has, got \"x\"\n\
         /policies/c.yaml:5: drafters[1].model: not declared under drafters of the config file, allowed draft-same|draft-other, got \"draft-sane\"; did you mean draft-same?\n\
         /policies/d.yaml:3: mode: unknown value, allowed off|shadow|plain|auto, got \"on\"\n"
    );
    // A config file that cannot be read declares nothing, which is not reported as an error of the
    // policies.
    let told = load_from(folder.path(), "version: 1\nmode: x\ndrafters: {}\n").unwrap_err();
    assert!(told.starts_with("/foretell.yaml:2: mode:") && !told.contains("declared"), "{told}");
}

#[test]
fn a_named_file_that_is_not_there_is_an_error() {
    let flags = Flags { config: Some("no/such/file.yaml".to_owned()), ..Flags::default() };
    let problems = load(&flags, &BTreeMap::new()).unwrap_err();
    assert_eq!(
        lines(&problems),
        "no/such/file.yaml: cannot open file: No such file or directory (os error 2)\n"
    );
}

#[test]
fn every_setting_without_effect_that_a_file_sets_is_warned_of_at_its_line() {
    let folder = tempfile::tempdir().unwrap();
    let policy = "version: 1\nname: x\ndrafters:\n- { kind: prompt_lookup }\n- { kind: suffix }\n\
                  - kind: model\n  model: m\n  vocabulary: slem\naccept: { rule: typical, tolerance: { max: 0 } }\n\
                  gates:\n  waiting: 3\n  max_gap: 1s\ngamma: { fixed: 4 }\n";
    write(folder.path(), "policies/a.yaml", policy);
    write(
        folder.path(),
        "policies/b.yaml",
        "version: 1\nname: y\naccept: { rule: exact }\ngamma: { fixed: null }\n",
    );
    let process = "version: 1\ndrafters: { m: { path: x } }\nobserve: { otlp: null, share: 1.0 }\ntenant: { header: x-t }\n\
                   limits: { sessions: 3 }\ncorpus:\n  bytes: 1MiB\n\
                   backends:\n- name: a\n  replicas: [\"http://a\"]\n  budget:\n    slots: 0.2\n- { name: b, replicas: [\"http://b\"] }\n";
    let loaded = load_from(folder.path(), process).unwrap();
    let named = folder.path().display().to_string();
    let told: Vec<String> = loaded.warnings.iter().map(|line| line.replace(&named, "")).collect();
    assert_eq!(
        told,
        [
            "/policies/a.yaml:9: accept.rule: typical is lossy: texts may drift from the model's own, within \
             drift_per_100_tokens and max_drift, and each answer reports its drift",
            "/policies/a.yaml:13: gamma.fixed: 4 speculates at any cost: it is for tests and sweeps",
            "tenant.header: x-t is never trusted: tenant.trusted_peers is empty",
            "policy x: accept.rule: typical relaxes nothing: tolerance.max is 0",
            "policy y: it never applies: policy x before it has no match",
        ]
    );
}

#[rstest::rstest]
#[case("match: { backends: [lama*, b] }", "match.backends: no backend is named lama*")]
#[case(
    "match: { tenants: [a] }",
    "match.tenants never applies without tenant.header or tenant.fallback of the config file"
)]
#[case(
    "drafters: [{ kind: suffix, scope: tenant }]",
    "scope: tenant drafts from the request's own text alone without tenant.header or tenant.fallback of the config file"
)]
#[case("mode: shadow\ncorpus: { record: true }", "corpus.record has no effect with mode: shadow")]
#[case("corpus: { record: true }", "")]
#[case("match: { backends: [b] }", "")]
#[case("match: { models: [] }", "it never applies: match.models is empty")]
#[case(
    "match: { routes: [chat, messages, responses] }",
    "match.routes: messages and responses never apply, as no backend has routes: { ...: translate }"
)]
fn a_setting_of_a_policy_that_the_config_file_leaves_without_effect_is_warned_of(
    #[case] policy: &str,
    #[case] wanted: &str,
) {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "policies/a.yaml", &format!("version: 1\nname: p\n{policy}\n"));
    let process =
        "version: 1\nbackends: [{ name: b, replicas: [\"http://b:1\"] }]\ncorpus: { record: { dir: r } }\n";
    let wanted: Vec<String> = Some(wanted)
        .filter(|wanted| !wanted.is_empty())
        .into_iter()
        .map(|it| format!("policy p: {it}"))
        .collect();
    assert_eq!(load_from(folder.path(), process).unwrap().warnings, wanted);
    let observing = load_from(folder.path(), &format!("{process}mode: observe\n")).unwrap().warnings;
    let unrecorded = observing.contains(&"policy p: corpus.record has no effect in mode observe".to_owned());
    assert_eq!(unrecorded, policy == "corpus: { record: true }");
}

#[test]
fn listeners_that_cannot_be_bound_beside_another_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    for good in [
        "metrics: { address: \"127.0.0.1:9465\" }",
        "listen: [{ address: \":0\" }, { address: \":0\" }]\nadmin: { address: \"127.0.0.1:0\" }",
        "listen: [{ address: \"127.0.0.1:1\" }, { address: \"[::1]:1\" }]\nmetrics: { address: \"127.0.0.2:1\" }",
        // Sockets of IPv4 alone do not take the port of IPv6.
        "listen: [{ address: \":1\" }, { address: \"[::1]:1\" }]",
    ] {
        let loaded = load_from(folder.path(), &format!("version: 1\n{good}\n"));
        assert!(loaded.is_ok(), "{good}: {loaded:?}");
    }
    for (bad, told) in [
        (
            "metrics: { address: \":9464\" }",
            "metrics.address: admin.address (127.0.0.1:9464) takes it, allowed an address of its own, got \"0.0.0.0:9464\"",
        ),
        (
            "listen: [{ address: \"127.0.0.1:9464\" }]",
            "admin.address: listen[0].address (127.0.0.1:9464) takes it, allowed an address of its own, got \"127.0.0.1:9464\"",
        ),
        (
            "listen: [{ address: \"127.0.0.1:1\" }, { address: \"[::]:1\" }]",
            "listen[1].address: listen[0].address (127.0.0.1:1) takes it, allowed an address of its own, got \"[::]:1\"",
        ),
    ] {
        let got = load_from(folder.path(), &format!("version: 1\n{bad}\n")).unwrap_err();
        assert_eq!(got, format!("/foretell.yaml: {told}\n"));
    }
    let process = "version: 1\nlisten: [{ address: \"127.0.0.1:9464\" }]\n";
    let flags = Flags { admin: Some("127.0.0.1:1".to_owned()), ..flags_for(folder.path(), process) };
    assert!(load(&flags, &BTreeMap::new()).is_ok(), "flags count");
}

#[test]
fn a_backend_without_a_method_of_verification_is_warned_of() {
    let folder = tempfile::tempdir().unwrap();
    let warnings = |allow: &str| {
        let file = format!(
            "version: 1\nbackends: [{{ name: b, replicas: [\"http://b:1\"], verify: {{ allow: {allow} }} }}]\n"
        );
        load_from(folder.path(), &file).unwrap().warnings
    };
    assert_eq!(
        warnings("[]"),
        ["backend b: verify.allow: [] leaves no method: its requests are passed through"]
    );
    assert_eq!(warnings("[score]"), Vec::<String>::new());
}

#[test]
fn a_replica_that_is_the_process_itself_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let loaded = |listen: &str, replica: &str| {
        let file = format!(
            "version: 1\nlisten: [{{ address: {listen:?} }}]\nbackends: [{{ name: b, replicas: [{replica:?}] }}]\n"
        );
        load_from(folder.path(), &file).map(|_| ())
    };
    for (listen, replica) in [
        ("127.0.0.1:8080", "http://10.0.0.1:8080"),
        ("127.0.0.1:8080", "http://127.0.0.1:8081"),
        ("127.0.0.2:8080", "http://127.0.0.1:8080"),
        (":8080", "http://10.0.0.1:8080"),
        (":8080", "http://engine:8080"),
    ] {
        assert_eq!(loaded(listen, replica), Ok(()), "{listen} {replica}");
    }
    for (listen, replica) in [
        ("127.0.0.1:8080", "http://127.0.0.1:8080"),
        ("127.0.0.1:8080", "http://localhost:8080/v1"),
        (":80", "http://127.0.0.1"),
        ("[::]:8080", "http://[::1]:8080"),
    ] {
        let told = loaded(listen, replica).unwrap_err();
        let wanted = "backends[0].replicas[0]: listen[0].address is there, allowed the address of a server";
        assert!(told.contains(wanted), "{listen} {replica}: {told}");
    }
    let told = loaded("127.0.0.1:1", "http://127.0.0.1:9464").unwrap_err();
    assert!(told.contains("admin.address is there"), "{told}");
}

#[test]
fn a_config_file_that_is_a_pipe_is_refused_and_not_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("foretell.yaml");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let flags = Flags { config: Some(pipe.display().to_string()), ..Flags::default() };
    let told = lines(&load(&flags, &BTreeMap::new()).unwrap_err());
    assert!(told.contains("it is a FIFO, not a regular file"), "{told}");
}

#[test]
fn a_reload_is_taken_whole_or_not_at_all() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "policies/a.yaml", "version: 1\nname: x\n");
    let loaded = load_from(folder.path(), "version: 1").unwrap();
    let process = loaded.process.clone();
    let store = PolicyStore::new(loaded.policies);
    let held = store.current();
    let first = held.policies()[0].revision;

    write(folder.path(), "policies/a.yaml", "version: 1\nname: x\ngamma: { max: 99 }\n");
    let problems = store.reload(|| load_policies(&process), |_| Ok(())).unwrap_err();
    assert_eq!((problems.len(), problems[0].line), (1, Some(3)));
    assert!(!store.synchronized());
    assert_eq!(store.current().policies()[0].revision, first);

    write(folder.path(), "policies/a.yaml", "version: 1\nname: x\ngamma: { max: 9 }\n");
    let failed = store.reload(|| load_policies(&process), |_| Err(problems));
    assert!(failed.is_err() && store.current().policies()[0].gamma.max == 32);

    let taken = store.reload(|| load_policies(&process), |_| Ok(())).unwrap();
    assert!(store.synchronized());
    assert_eq!((taken.policies()[0].gamma.max, store.current().policies()[0].gamma.max), (9, 9));
    assert_ne!(taken.policies()[0].revision, first);
    assert_eq!(held.policies()[0].gamma.max, 32);
}

#[test]
fn every_file_that_is_shipped_is_good() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let yaml_in = |folder: &str| {
        let mut files: Vec<_> = fs::read_dir(root.join(folder))
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.extension().is_some_and(|extension| extension == "yaml"))
            .map(|path| (path.display().to_string(), fs::read_to_string(&path).unwrap()))
            .collect();
        files.sort();
        assert!(!files.is_empty(), "{folder}");
        files
    };
    // The other files of that folder belong to other programs; tests/deploy reads those.
    for (file, text) in yaml_in("deploy").into_iter().filter(|(file, _)| file.ends_with("/foretell.yaml")) {
        let process = process::parse(&file, &text).map_err(|problems| lines(&problems)).unwrap();
        let built_in = policy::parse("default.yaml", policy::DEFAULT).unwrap();
        assert_eq!(built_in.warnings, Vec::<String>::new());
        for folder in ["policies", "policies/examples"] {
            parse_policies(&yaml_in(folder), &process).map_err(|problems| lines(&problems)).unwrap();
        }
    }
}

fn as_json(text: &str) -> Option<serde_json::Value> {
    serde_saphyr::from_str(text).ok()
}

/// Errors that a schema cannot express and `check` reports.
const BEYOND_A_SCHEMA: [&str; 8] = [
    "bounds the wrong way round",
    "n-grams the wrong way round",
    "sharing without saying so",
    "a curve that falls back",
    "a curve that goes back",
    "a floor above the start",
    "a holdback that grows",
    "a key twice",
];

#[test]
fn the_references_that_are_shipped_are_the_program_s() {
    for (page, told, command) in [
        ("metrics", foretell_metrics::reference(), "metrics"),
        ("guarantees", foretell_engines::guarantees::reference(), "guarantees"),
        ("policy-reference", reference::policy(), "policy-reference"),
        ("config-reference", reference::process(), "config-reference"),
    ] {
        let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("docs/{page}.md"));
        let shipped = fs::read_to_string(shipped).unwrap();
        assert_eq!(shipped, told, "foretell check --{command} > docs/{page}.md");
    }
}

#[test]
fn the_schema_that_is_shipped_is_the_reader_s_and_takes_what_it_takes() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let shipped = fs::read_to_string(root.join("policies/schema.json")).unwrap();
    assert_eq!(shipped, published::text(&policy::schema()), "foretell check --schema > policies/schema.json");
    let schema = jsonschema::validator_for(&policy::schema()).unwrap();
    let mut good = vec![root.join("policies/default.yaml")];
    good.extend(fs::read_dir(root.join("policies/examples")).unwrap().map(|entry| entry.unwrap().path()));
    for file in good {
        let text = fs::read_to_string(&file).unwrap();
        let errors: Vec<String> =
            schema.iter_errors(&as_json(&text).unwrap()).map(|error| error.to_string()).collect();
        assert!(errors.is_empty(), "{}: {errors:?}", file.display());
    }
    for (name, source, _) in
        cases(BAD_POLICY).into_iter().filter(|(name, ..)| !BEYOND_A_SCHEMA.contains(name))
    {
        // Text that is not YAML is outside the scope of a schema.
        assert!(as_json(&source).is_none_or(|value| !schema.is_valid(&value)), "{name} passes");
    }
}

/// The same for the config file.
const BEYOND_THE_CONFIG_SCHEMA: [&str; 16] = [
    "a key twice",
    // The YAML reader of this test reads YAML 1.1's `yes` as `true`.
    "truth values as words",
    "a network that is none",
    "a replica twice",
    "two listeners on one address",
    "an open admin interface",
    "more memory for drafters than half of all",
    "two backends of one name",
    "two default backends",
    "another server that renders, for an engine that has none",
    "a model here that cannot be run so",
    "a model here with what only a server has",
    "a model twice",
    "models of one backend with different tokenizers and parsers",
    "a credential as tenant",
    "a store with two passwords, and authorities without TLS",
];

#[test]
fn the_schema_of_the_config_file_is_the_reader_s_and_takes_what_it_takes() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let shipped = fs::read_to_string(root.join("deploy/schema.json")).unwrap();
    assert_eq!(
        shipped,
        published::text(&process::schema()),
        "foretell check --schema=config > deploy/schema.json"
    );
    let schema = jsonschema::validator_for(&process::schema()).unwrap();
    let whole = fs::read_to_string(root.join("deploy/foretell.yaml")).unwrap();
    let least = "version: 1\nbackends: [{ name: a, replicas: ['${URL}'], ranks: '${RANKS:-0}' }]\n";
    for text in [whole.as_str(), least, "version: 1\nx-own: [1]\ndrain:\n"] {
        let errors: Vec<String> =
            schema.iter_errors(&as_json(text).unwrap()).map(|error| error.to_string()).collect();
        assert!(errors.is_empty(), "{errors:?}");
    }
    for (name, source, _) in
        cases(BAD_CONFIG).into_iter().filter(|(name, ..)| !BEYOND_THE_CONFIG_SCHEMA.contains(name))
    {
        assert!(as_json(&source).is_none_or(|value| !schema.is_valid(&value)), "{name} passes");
    }
}

/// Each policy alone, with a config file that has only a backend; and it refers to no file next to
/// it.
#[test]
fn the_examples_pass_wherever_they_are_copied_to() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for example in fs::read_dir(root.join("policies/examples")).unwrap().map(|entry| entry.unwrap().path()) {
        let text = fs::read_to_string(&example).unwrap();
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), "policies/a.yaml", &text);
        let loaded =
            load_from(folder.path(), "version: 1\nbackends: [{ name: a, replicas: ['http://a:1'] }]\n");
        assert!(loaded.is_ok(), "{}: {:?}", example.display(), loaded.err());
        assert!(!text.contains("$schema"), "{}: a reference that breaks elsewhere", example.display());
    }
}

proptest! {
    #[test]
    fn no_text_is_too_strange(text in "(?s).{0,200}") {
        let _ = process::parse("f", &text);
        let _ = policy::parse("f", &text);
    }

    #[test]
    fn no_damage_to_a_good_file_is_too_strange(at in 0usize..2000, with in "[\\PC\n]{0,3}") {
        for good in [include_str!("../../deploy/foretell.yaml"), include_str!("../../policies/examples/ide-code.yaml")] {
            let mut text: Vec<char> = good.chars().collect();
            let at = at % text.len();
            text.splice(at..=at, with.chars());
            let text: String = text.into_iter().collect();
            for problem in process::parse("f", &text).err().into_iter().flatten() {
                prop_assert!(problem.line.is_some_and(|line| line >= 1 && line <= text.lines().count() as u64 + 1));
            }
            let _ = policy::parse("f", &text);
        }
    }
}
