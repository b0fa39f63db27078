//! Operation: wrong secrets and configuration are refused, an outage is visible, servers that need
//! a key get one, signals end nothing by accident, and every change is logged.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::kit::{
    Answer, Backend, PATIENCE, Proxy, Start, Wire, ask, eventually, get, post, respond, wait_for,
};
use crate::ops_kit::{
    Papers, Spot, Target, bearer, completion, foretell, json_answer, lines, log, models, request_line,
    streamed, write,
};

/// A backend that is never called.
const BACKENDS: &str = "backends: [{ name: b, replicas: [\"http://127.0.0.1:1\"] }]\n";

fn first_replica(proxy: &Proxy) -> Value {
    proxy.admin_get("/api/replicas").json()["replicas"][0].clone()
}

/// Runs `check` and `serve` on a config file, from the folder that it is in.
fn refused(files: &[(&str, &str)], wanted: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), files);
    for command in ["check", "serve"] {
        let told = foretell(folder.path(), &[command, "--config", "foretell.yaml"]);
        assert_eq!(told.code, Some(64), "{command} of {files:?}: {told:?}");
        for wanted in wanted {
            assert!(told.all().contains(wanted), "{command} says nothing of {wanted}: {told:?}");
        }
    }
}

// ----------------------------------------------------------------------- Secrets

#[test]
fn a_secret_file_without_a_secret_is_refused_with_its_line() {
    for empty in ["", "\n", " \t\r\n\n", "\u{feff}", "\u{feff}\n", "\u{200b}"] {
        let admin = format!("version: 1\n{BACKENDS}admin:\n  address: \"0.0.0.0:0\"\n  token_file: token\n");
        refused(&[("foretell.yaml", &admin), ("token", empty)], &["foretell.yaml:5: admin.token_file: "]);
        for field in ["token_file", "own_token_file"] {
            let backend = format!(
                "version: 1\nbackends:\n  - name: b\n    replicas: [\"http://127.0.0.1:1\"]\n    connect:\n      auth:\n        \
                 {field}: token\n"
            );
            let position = format!("foretell.yaml:7: backends[0].connect.auth.{field}: ");
            refused(&[("foretell.yaml", &backend), ("token", empty)], &[&position]);
        }
    }
}

#[test]
fn an_api_key_file_without_a_key_is_refused_before_any_request() {
    let server = Spot::new(|_| models());
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &[("key", " \n"), ("w.jsonl", PROMPT)]);
    let url = format!("http://{}", server.address);
    let bench =
        ["bench", "--direct", &url, "--through", &url, "--workload", "w.jsonl", "--api-key-file", "key"];
    for args in [&["probe", &url, "--api-key-file", "key"][..], &bench] {
        let told = foretell(folder.path(), args);
        assert_eq!(told.code, Some(64), "{told:?}");
        assert!(told.err.contains("key: ") && told.err.contains("empty"), "{told:?}");
    }
    assert_eq!(server.all().len(), 0);
}

/// A proxy whose admin listener wants a token.
fn guarded() -> (Proxy, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &[("token", "s3cret\n")]);
    let admin = format!(
        "{BACKENDS}admin: {{ address: \"127.0.0.2:0\", token_file: {} }}\n",
        folder.path().join("token").display()
    );
    (Start::with(&admin).start(), folder)
}

fn admin(proxy: &Proxy, method: &str, path: &str, host: &str, fields: &str) -> u16 {
    let body = r#"{"mode":"off"}"#;
    let (length, body) = if method == "POST" {
        (format!("content-length: {}\r\n", body.len()), body)
    } else {
        (String::new(), "")
    };
    let request = format!(
        "{method} {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n{length}{fields}\r\n{body}"
    );
    ask(proxy.admin, request).status()
}

#[test]
fn with_a_token_strange_hosts_and_pages_are_refused_too() {
    let (proxy, _folder) = guarded();
    let right = "authorization: Bearer s3cret\r\n";
    let own = [proxy.admin.to_string(), "localhost".to_owned(), "[::1]:9464".to_owned()];
    for host in &own {
        assert_eq!(admin(&proxy, "GET", "/api/replicas", host, right), 200, "{host}");
    }
    for path in ["/healthz", "/readyz"] {
        assert_eq!(admin(&proxy, "GET", path, &own[0], ""), 200, "{path} is for anybody");
    }
    for wrong in
        ["", "authorization: Bearer \r\n", "authorization: Bearer\r\n", "authorization: Bearer s3cre\r\n"]
    {
        for (method, path) in
            [("GET", "/api/replicas"), ("GET", "/metrics"), ("POST", "/api/mode"), ("POST", "/api/drain")]
        {
            assert_eq!(admin(&proxy, method, path, &own[0], wrong), 401, "{method} {path} {wrong}");
        }
    }
    for host in ["evil.example", "evil.example:9464", "localhost.evil.example", "127.0.0.1.evil.example"] {
        for (method, path) in [("GET", "/api/replicas"), ("GET", "/"), ("POST", "/api/mode")] {
            let status = admin(&proxy, method, path, host, right);
            assert!(matches!(status, 401 | 403 | 421), "{method} {path} for {host}: {status}");
        }
    }
    let page = format!("{right}origin: http://evil.example\r\n");
    for (method, path) in [("GET", "/api/replicas"), ("POST", "/api/mode")] {
        assert_eq!(admin(&proxy, method, path, &own[0], &page), 403, "{method} {path}");
    }
    for site in ["cross-site", "same-site", "same-origin\r\nsec-fetch-site: cross-site"] {
        let page = format!("{right}sec-fetch-site: {site}\r\n");
        assert_eq!(admin(&proxy, "POST", "/api/mode", &own[0], &page), 403, "{site}");
        assert_eq!(admin(&proxy, "GET", "/api/replicas", &own[0], &page), 200, "{site}");
    }
    let of = |fields: &str| {
        let host = proxy.admin;
        let request =
            format!("GET /api/status HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n{fields}\r\n");
        ask(proxy.admin, request)
    };
    assert_eq!(of(right).json()["mode"]["process"]["mode"], "auto", "nothing was switched");
}

#[test]
fn the_status_page_comes_without_a_token_has_nothing_in_it_and_may_ask_with_one() {
    let (proxy, _folder) = guarded();
    let own = proxy.admin.to_string();
    for path in ["/", "/page.js", "/style.css", "/sessions.js"] {
        assert_eq!(admin(&proxy, "GET", path, &own, ""), 200, "{path}");
        assert!(matches!(admin(&proxy, "GET", path, "evil.example", ""), 401 | 403 | 421), "{path}");
        assert_eq!(admin(&proxy, "POST", path, &own, ""), 405, "{path}");
    }
    let page = ask(proxy.admin, format!("GET / HTTP/1.1\r\nhost: {own}\r\nconnection: close\r\n\r\n")).text();
    assert!(!page.contains("127.0.0.1:1"), "the address of a backend is no part of it");
    for path in
        ["/api/status", "/api/sessions", "/api/sessions/1", "/api/coverage", "/api/replicas", "/metrics"]
    {
        assert_eq!(admin(&proxy, "GET", path, &own, ""), 401, "{path}");
    }
    let same = format!("origin: http://{own}\r\n");
    let right = format!("authorization: Bearer s3cret\r\n{same}");
    assert_eq!(admin(&proxy, "POST", "/api/mode", &own, &same), 401);
    for (site, status) in
        [("", 200), ("same-origin", 200), ("same-site", 403), ("cross-site", 403), ("none", 403)]
    {
        let site = if site.is_empty() { String::new() } else { format!("sec-fetch-site: {site}\r\n") };
        assert_eq!(admin(&proxy, "POST", "/api/mode", &own, &format!("{right}{site}")), status, "{site}");
    }
    let port = proxy.admin.port();
    for other in ["http://localhost".to_owned(), format!("http://localhost:{port}"), "null".to_owned()] {
        let fields = format!("authorization: Bearer s3cret\r\norigin: {other}\r\n");
        assert_eq!(admin(&proxy, "POST", "/api/mode", &own, &fields), 403, "{other}");
    }
}

#[test]
fn the_operators_own_names_for_the_admin_listener_are_taken() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &[("token", "s3cret\n")]);
    let token = folder.path().join("token").display().to_string();
    let process = format!(
        "{BACKENDS}admin: {{ address: \"127.0.0.2:0\", token_file: {token}, hosts: [foretell.example] }}\n"
    );
    let proxy = Start::with(&process).start();
    let right = "authorization: Bearer s3cret\r\n";
    assert_eq!(admin(&proxy, "GET", "/api/replicas", "Foretell.Example:9464", right), 200);
    assert_eq!(admin(&proxy, "GET", "/api/replicas", "foretell.example", ""), 401);
    assert_eq!(admin(&proxy, "GET", "/api/replicas", "other.example", right), 403);
}

// ----------------------------------------------------------------- Configuration

#[test]
fn the_folder_of_the_policies_is_found_from_the_config_file() {
    let folder = tempfile::tempdir().unwrap();
    let quiet = "version: 1\nname: quiet\nmode: off\n";
    for (file, policies) in [
        ("named.yaml", "policies: { dir: rules }\n"),
        ("below/named.yaml", "policies: { dir: ../rules }\n"),
        ("unnamed/x.yaml", ""),
    ] {
        let text = format!("version: 1\n{BACKENDS}{policies}");
        write(folder.path(), &[(file, &text), ("rules/a.yaml", quiet), ("unnamed/policies/a.yaml", quiet)]);
        let file = folder.path().join(file).display().to_string();
        let told = foretell(std::path::Path::new("/"), &["check", "--config", &file]);
        assert_eq!(told.code, Some(0), "{told:?}");
        assert!(told.out.contains("policies: quiet@"), "{told:?}");
    }
    // Paths on the command line are relative to the working directory.
    let told = foretell(folder.path(), &["check", "--config", "unnamed/x.yaml", "--policies", "rules"]);
    assert!(told.out.contains("rules/a.yaml: ok") && told.out.contains("policies: quiet@"), "{told:?}");
}

#[test]
fn a_policy_folder_that_is_named_and_missing_is_an_error() {
    let process = format!("version: 1\n{BACKENDS}policies:\n  dir: nope\n");
    refused(&[("foretell.yaml", &process)], &["foretell.yaml:4: policies.dir: ", "nope"]);
    let folder = tempfile::tempdir().unwrap();
    for command in ["check", "serve"] {
        let backend = "http://127.0.0.1:1";
        let told = foretell(folder.path(), &[command, "--backend", backend, "--policies", "/nope"]);
        assert_eq!(told.code, Some(64), "{command}: {told:?}");
        assert!(told.all().contains("--policies: ") && told.all().contains("/nope"), "{told:?}");
    }
}

#[test]
fn policies_that_vanish_are_not_replaced_by_the_built_in_one() {
    let quiet = "version: 1\nname: quiet\nmode: off\n".to_owned();
    let mut start = Start::with(BACKENDS);
    start.policies = vec![("a.yaml", quiet)];
    let proxy = start.start();
    std::fs::remove_dir_all(proxy.folder.path().join("policies")).unwrap();
    let answer = proxy.admin_post("/api/reload", "");
    assert_eq!(answer.status(), 422, "{}", answer.text());
    let policies = proxy.admin_get("/api/policies").json();
    assert_eq!(
        (&policies["policies"][0]["name"], &policies["policies"][0]["synchronized"]),
        (&json!("quiet"), &json!(false))
    );
}

#[test]
fn every_named_file_is_opened_and_all_errors_are_reported_at_once() {
    let process = "version: 1
listen:
  - address: \"127.0.0.1:0\"
    tls: { cert: no.pem, key: text.txt, client_ca: text.txt }
admin: { address: \"127.0.0.1:0\", token_file: no-token }
backends:
  - name: b
    replicas: [\"https://127.0.0.1:1\"]
    models: [{ id: m, tokenizer: text.txt }]
    connect:
      tls: { ca: text.txt }
      auth: { token_file: no-key }
drafters:
  one: { path: no-drafter }
  two: { path: ., tokenizer: text.txt }
policies: { dir: rules }
limts: {}
";
    let policy = "version: 1\nname: x\ngamma: { max: 99 }\n";
    refused(
        &[("foretell.yaml", process), ("text.txt", "no certificate"), ("rules/a.yaml", policy)],
        &[
            "foretell.yaml:4: listen[0].tls.cert: ",
            "foretell.yaml:4: listen[0].tls.key: ",
            "foretell.yaml:4: listen[0].tls.client_ca: ",
            "foretell.yaml:5: admin.token_file: ",
            "foretell.yaml:9: backends[0].models[0].tokenizer: ",
            "foretell.yaml:11: backends[0].connect.tls.ca: ",
            "foretell.yaml:12: backends[0].connect.auth.token_file: ",
            "foretell.yaml:14: drafters.one.path: ",
            "foretell.yaml:15: drafters.two.path: ",
            "foretell.yaml:15: drafters.two.tokenizer: ",
            "foretell.yaml:17: limts: ",
            "a.yaml:3: gamma.max: ",
        ],
    );
}

#[test]
fn a_certificate_and_a_key_of_another_are_refused() {
    let papers = Papers::new();
    let process = format!(
        "version: 1\n{BACKENDS}listen:\n  - address: \"127.0.0.1:0\"\n    tls: {{ cert: {}, key: {} }}\n",
        papers.path("own.pem"),
        papers.path("signed.key")
    );
    refused(&[("foretell.yaml", &process)], &["foretell.yaml:5: listen[0].tls."]);
}

#[test]
fn without_configuration_check_and_serve_agree() {
    let folder = tempfile::tempdir().unwrap();
    for files in [
        vec![],
        vec![("foretell.yaml", "version: 1\n")],
        vec![("foretell.yaml", "version: 1\nbackends: []\n")],
    ] {
        write(folder.path(), &files);
        let [check, serve] = ["check", "serve"].map(|command| foretell(folder.path(), &[command]));
        assert_eq!((check.code, serve.code), (Some(64), Some(64)), "{check:?} {serve:?}");
        for told in [check, serve] {
            assert!(told.all().contains("backends") && told.all().contains("--backend"), "{told:?}");
        }
    }
}

// ------------------------------------------------------------------------ Outage

#[test]
fn a_dead_backend_shows_everywhere_and_its_return_too() {
    let address = Spot::new(|_| models()).leave();
    let proxy = Start::before(address).start();
    let down = eventually("a warning that it is down", || lines(&proxy, "WARN", "b/0").into_iter().next());
    assert!(down.contains("refused"), "{down}");
    let shown = eventually("the last error", || {
        Some(first_replica(&proxy)).filter(|shown| !shown["last_error"].is_null())
    });
    assert_eq!(shown["up"], false);
    assert!(shown["last_error"].to_string().contains("refused"), "{shown}");
    let answer = ask(proxy.address, completion("dead", "", &json!({"model": "m", "prompt": "a"})));
    assert_eq!(answer.status(), 502);
    eventually("it is among the failed", || {
        let sums = proxy.admin_get("/api/status").json()["since_start"].clone();
        (sums["failed"] == 1 && sums["reasons"][0]["reason"] == "unreachable").then_some(())
    });
    assert_eq!(
        (answer.field("x-foretell-path"), answer.field("x-foretell-reason")),
        (Some("passthrough"), Some("unreachable"))
    );
    let line = request_line(&proxy, "dead");
    assert_eq!(line["reason"], "unreachable");
    assert!(line["error"].as_str().is_some_and(|error| error.contains("refused")), "{line}");
    let session = proxy.admin_get("/api/sessions").json()["sessions"][0].clone();
    assert!(session["error"].as_str().is_some_and(|error| error.contains("refused")), "{session}");
    assert!(proxy.metric("foretell_requests_total{path=\"passthrough\",reason=\"unreachable\"}") >= 1.0);
    assert_eq!(lines(&proxy, "WARN", "b/0").len(), 1, "one line for one transition");
    let _back = Spot::at(address, |_| models());
    eventually("a line that it is up again", || {
        lines(&proxy, "INFO", "b/0").into_iter().find(|line| line.contains(" up"))
    });
    eventually("it is shown as up", || (first_replica(&proxy)["up"] == true).then_some(()));
}

#[test]
fn an_open_breaker_is_logged_once_with_its_cause() {
    let backend = Spot::new(|request| match request.method() {
        "POST" => respond("500 Internal Server Error", "", "the engine is dead"),
        _ => models(),
    });
    let proxy = Start::before(backend.address).start();
    for n in 0..20 {
        ask(proxy.address, completion(&n.to_string(), "", &json!({"model": "m", "prompt": "a"})));
    }
    let warned =
        eventually("a warning of the breaker", || lines(&proxy, "WARN", "breaker").into_iter().next());
    assert!(warned.contains("b/0") && warned.contains("500"), "{warned}");
    assert_eq!(lines(&proxy, "WARN", "breaker").len(), 1);
    assert!(first_replica(&proxy)["last_error"].to_string().contains("500"));
}

#[test]
fn a_refused_tls_handshake_is_logged_and_counted_once() {
    let connections = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&connections);
    // Answers in plain text, without TLS.
    let plain = Backend::start(move |mut wire, _| {
        counted.fetch_add(1, Ordering::Relaxed);
        wire.more();
        wire.try_send("HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n");
    });
    let process = format!("backends: [{{ name: b, replicas: [\"https://{}\"] }}]\n", plain.address);
    let proxy = Start::with(&process).start();
    let down = eventually("a warning that it is down", || lines(&proxy, "WARN", "b/0").into_iter().next());
    assert!(down.contains("TLS refused"), "{down}");
    let answer = ask(proxy.address, completion("tls", "", &json!({"model": "m", "prompt": "a"})));
    assert_eq!((answer.status(), answer.field("x-foretell-reason")), (502, Some("unreachable")));
    assert!(first_replica(&proxy)["last_error"].to_string().contains("TLS"));
    assert!(request_line(&proxy, "tls")["error"].to_string().contains("TLS"));
    // Health checks continue and are not counted as failures.
    let before = connections.load(Ordering::Relaxed);
    eventually("it is tried again", || (connections.load(Ordering::Relaxed) > before + 3).then_some(()));
    assert_eq!(lines(&proxy, "WARN", "b/0").len(), 1);
    let counted = proxy.metric("foretell_replica_errors_total{kind=\"backend_unreachable\"");
    assert!(counted <= 3.0, "one request failed, {counted} failures are counted");
}

#[test]
fn a_backend_that_never_answers_is_logged() {
    // Accepts and never answers.
    let backend = Backend::start(|mut wire, _| {
        wire.stream.set_read_timeout(None).unwrap();
        while wire.more() {}
    });
    let start = Start::before(backend.address).and("timeouts: { first_byte: 300ms }\n");
    let proxy = start.start();
    let warned = eventually("a warning", || lines(&proxy, "WARN", "b/0").into_iter().next());
    assert!(warned.contains("no answer"), "{warned}");
    let answer = ask(proxy.address, completion("late", "", &json!({"model": "m", "prompt": "a"})));
    assert_eq!((answer.status(), answer.field("x-foretell-reason")), (504, Some("unreachable")));
    assert!(request_line(&proxy, "late")["error"].to_string().contains("300ms"));
    assert!(first_replica(&proxy)["last_error"].to_string().contains("no answer"));
}

#[test]
fn readiness_waits_for_a_backend_where_the_operator_wants_it() {
    let address = Spot::new(|_| models()).leave();
    let there = Spot::new(|_| models());
    let process = |ready: &str| {
        format!(
            "backends:\n  - {{ name: a, replicas: [\"http://{}\"] }}\n  - {{ name: b, default: true, replicas: [\"http://{address}\"] }}\n{ready}",
            there.address
        )
    };
    let other = Start::with(&process("ready: { require_backend: false }\n")).start();
    other.ready();
    let proxy = Start::with(&process("ready: { require_backend: true }\n")).start();
    eventually("it has been asked", || lines(&proxy, "WARN", "b/0").into_iter().next());
    let waiting = proxy.admin_get("/readyz");
    assert_eq!(waiting.status(), 503);
    assert!(waiting.text().contains('b'), "{}", waiting.text());
    assert_eq!(proxy.admin_get("/healthz").status(), 200);
    let back = Spot::at(address, |_| models());
    proxy.ready();
    back.leave();
    ask(proxy.address, completion("gone", "", &json!({"model": "m", "prompt": "a"})));
    eventually("not ready any more", || (proxy.admin_get("/readyz").status() == 503).then_some(()));
    assert_eq!(other.admin_get("/readyz").status(), 200);
}

// -------------------------------------------------------------------------- Keys

const PROMPT: &str =
    "{\"route\":\"completions\",\"body\":{\"model\":\"other\",\"prompt\":\"a\",\"max_tokens\":2}}\n";

/// A server that answers 401 without this key.
fn locked(key: &'static str) -> Spot {
    Spot::new(move |request| {
        if bearer(request) != Some(key) {
            return json_answer("401 Unauthorized", &json!({"error": {"message": "no key"}}));
        }
        match request.method() {
            "GET" => models(),
            _ => streamed(),
        }
    })
}

#[test]
fn probe_reports_a_missing_key_and_takes_one() {
    let server = locked("Bearer right");
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &[("key", "right\n"), ("wrong", "wrong\n")]);
    let url = format!("http://{}", server.address);
    for more in [&[][..], &["--json"], &["--api-key-file", "wrong"], &["--billed"]] {
        let told = foretell(folder.path(), &[&["probe", &url], more].concat());
        assert_eq!(told.code, Some(1), "{more:?}: {told:?}");
        assert!(told.all().contains("401") && told.all().contains("--api-key-file"), "{told:?}");
    }
    let before = server.all().len();
    for more in [
        &["--api-key-file", "key"][..],
        &["--header", "Authorization: Bearer right", "--header", "x-team: ops"],
    ] {
        let told = foretell(folder.path(), &[&["probe", &url], more].concat());
        assert_eq!(told.code, Some(2), "it answers, and nothing can be verified there: {told:?}");
    }
    let all = server.all();
    assert!(all[before..].iter().all(|(_, request)| bearer(request) == Some("Bearer right")));
    assert_eq!(all.last().unwrap().1.field("x-team"), Some("ops"));
    for bad in [&["--header", "no colon"][..], &["--header", "bad name: x"], &["--api-key-file", "missing"]] {
        let told = foretell(folder.path(), &[&["probe", &url], bad].concat());
        assert_eq!(told.code, Some(64), "{told:?}");
    }
}

#[test]
fn explain_takes_a_key_for_its_own_requests() {
    let server = locked("Bearer right");
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &[("key", "right\n"), ("empty", "\n"), ("r.json", r#"{"model":"m","prompt":"a"}"#)]);
    let url = format!("http://{}", server.address);
    let explain = ["explain", "--backend", &url, "--request", "r.json"];
    let told = foretell(folder.path(), &explain);
    assert!(told.all().contains("401"), "{told:?}");
    let told = foretell(folder.path(), &[&explain[..], &["--api-key-file", "key"]].concat());
    assert!(!told.all().contains("401"), "{told:?}");
    assert!(server.all().iter().any(|(_, request)| bearer(request) == Some("Bearer right")));
    let told = foretell(folder.path(), &[&explain[..], &["--api-key-file", "empty"]].concat());
    assert_eq!(told.code, Some(64), "{told:?}");
}

#[test]
fn bench_takes_a_key_headers_and_a_model() {
    let server = locked("Bearer right");
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &[("key", "right\n"), ("w.jsonl", PROMPT)]);
    let url = format!("http://{}", server.address);
    let bench =
        ["bench", "--direct", &url, "--through", &url, "--workload", "w.jsonl", "--alternations", "3"];
    let told = foretell(folder.path(), &bench);
    assert_eq!(told.code, Some(1), "{told:?}");
    assert!(told.err.contains("401"), "{told:?}");
    let before = server.all().len();
    let more = ["--api-key-file", "key", "--header", "x-team: ops", "--model", "mine", "--json", "out.json"];
    let told = foretell(folder.path(), &[&bench[..], &more].concat());
    assert_eq!(told.code, Some(0), "{told:?}");
    let all = server.all();
    let asked: Vec<&Answer> = all[before..].iter().map(|(_, request)| request).collect();
    assert!(
        asked
            .iter()
            .all(|request| bearer(request) == Some("Bearer right") && request.field("x-team") == Some("ops"))
    );
    let completions: Vec<_> = asked.iter().filter(|request| request.target() == "/v1/completions").collect();
    assert!(!completions.is_empty() && completions.iter().all(|request| request.json()["model"] == "mine"));
    let report: Value =
        serde_json::from_str(&std::fs::read_to_string(folder.path().join("out.json")).unwrap()).unwrap();
    assert_eq!(report["runs"][0]["ratio"]["n"], 3);
}

#[test]
fn foretells_own_key_is_on_its_own_calls_and_never_on_a_clients() {
    let server = locked("Bearer own");
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &[("own", "own\n")]);
    let process = format!(
        "backends:\n  - name: b\n    replicas: [\"http://{}\"]\n    connect: {{ auth: {{ own_token_file: {} }} }}\n",
        server.address,
        folder.path().join("own").display()
    );
    let proxy = Start::with(&process).start();
    eventually("it asks with its own key", || (server.count("/v1/models") > 0).then_some(()));
    assert!(server.all().iter().all(|(_, request)| bearer(request) == Some("Bearer own")));
    for (fields, sent) in [("", None), ("authorization: Bearer client\r\n", Some("Bearer client"))] {
        for path in ["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/client"] {
            let answer = ask(proxy.address, post(path, fields, r#"{"model":"m","prompt":"a"}"#));
            assert_eq!(answer.status(), 401, "{path} {fields}");
            let seen = server.all().into_iter().rfind(|(_, request)| request.method() == "POST").unwrap().1;
            assert_eq!((seen.target(), bearer(&seen)), (path, sent));
        }
        assert_eq!(ask(proxy.address, get("/v1/models", fields)).status(), 401);
    }
    let clients = ask(
        proxy.address,
        completion("own", "authorization: Bearer own\r\n", &json!({"model": "m", "prompt": "a"})),
    );
    assert_eq!(clients.status(), 200, "a client that has the key may use it");
    assert!(!proxy.stderr().contains("Bearer own"));
}

#[test]
fn a_session_carries_the_clients_key_while_its_load_is_read_with_foretells_own() {
    let target = Target::start();
    // In front of a real engine, a server that accepts two keys and records the key of every
    // request.
    let engine = target.address;
    let wall = Spot::new(move |request| match bearer(request) {
        Some("Bearer own" | "Bearer client") => pass_on(engine, request),
        _ => json_answer("401 Unauthorized", &json!({"error": {"message": "no key"}})),
    });
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &[("own", "own\n")]);
    let process = format!(
        "backends:\n  - name: b\n    replicas: [\"http://{}\"]\n    probe: {{ when: never }}\n    \
         connect: {{ auth: {{ own_token_file: {} }} }}\n",
        wall.address,
        folder.path().join("own").display()
    );
    let mut start = Start::with(&process);
    let policy =
        "version: 1\nname: p\ndrafters: [{ kind: prompt_lookup, ngram: { min: 1 } }]\ngamma: { fixed: 3 }\n";
    start.policies = vec![("a.yaml", policy.to_owned())];
    let proxy = start.start();
    proxy.knows("onnx");
    let body = json!({"model": Target::model(), "prompt": "one two three one two three one two", "max_tokens": 24,
        "temperature": 0});
    let answer = ask(proxy.address, completion("keyed", "authorization: Bearer client\r\n", &body));
    assert_eq!(
        (answer.status(), answer.field("x-foretell-path")),
        (200, Some("speculated")),
        "{}",
        answer.text()
    );
    let all = wall.all();
    let of = |key: &'static str| {
        all.iter().filter(move |(_, request)| bearer(request) == Some(key)).map(|(_, request)| request)
    };
    assert!(of("Bearer client").all(|request| request.method() == "POST"));
    assert!(of("Bearer client").count() >= 2, "the first call and its rounds");
    assert!(
        of("Bearer own").all(|request| request.json()["prompt"] != body["prompt"]),
        "no round with Foretell's key"
    );
    eventually("the load is read", || (wall.count("/metrics") > 0).then_some(()));
    let answer = ask(proxy.address, completion("keyless", "", &body));
    assert_eq!(answer.status(), 401, "without a key no answer");
}

/// Forwards a request unchanged and returns the bytes of the answer.
fn pass_on(to: std::net::SocketAddr, request: &Answer) -> Vec<u8> {
    let mut bytes = format!("{}\r\nconnection: close\r\n", request.line);
    for (name, value) in &request.fields {
        if !["connection", "transfer-encoding", "content-length"].contains(&name.as_str()) {
            bytes.extend([name.as_str(), ": ", value.as_str(), "\r\n"]);
        }
    }
    let mut bytes = format!("{bytes}content-length: {}\r\n\r\n", request.body.len()).into_bytes();
    bytes.extend_from_slice(&request.body);
    let answer = ask(to, bytes);
    let mut fields = String::new();
    for (name, value) in &answer.fields {
        if !["connection", "transfer-encoding", "content-length"].contains(&name.as_str()) {
            fields.extend([name.as_str(), ": ", value.as_str(), "\r\n"]);
        }
    }
    respond(answer.line.strip_prefix("HTTP/1.1 ").unwrap_or("502 Bad Gateway"), &fields, &answer.body)
}

#[test]
fn a_running_proxy_reports_a_missing_key() {
    let server = locked("Bearer right");
    let proxy = Start::before(server.address).start();
    let warned = eventually("a warning", || lines(&proxy, "WARN", "401").into_iter().next());
    assert!(warned.contains("b/0") && warned.contains("own_token_file"), "{warned}");
    let shown = eventually("it is shown", || {
        Some(first_replica(&proxy)).filter(|shown| shown["probe"]["conclusion"].to_string().contains("401"))
    });
    assert!(shown["probe"]["conclusion"].to_string().contains("own_token_file"), "{shown}");
    assert_eq!(lines(&proxy, "WARN", "401").len(), 1);
}

#[test]
fn a_passthrough_server_needs_no_key_of_foretells_own() {
    let server = locked("Bearer right");
    for (named, reason) in [("billed: true", "billed"), ("engine: openai", "no_verify_method")] {
        let process =
            format!("backends: [{{ name: b, {named}, replicas: [\"http://{}\"] }}]\n", server.address);
        let proxy = Start::with(&process).start();
        eventually("it has been asked", || {
            (first_replica(&proxy)["probe"]["conclusion"].to_string().contains("401")).then_some(())
        });
        let body = json!({"model": "m", "prompt": "a", "max_tokens": 2});
        let answer = ask(proxy.address, completion("passthrough", "authorization: Bearer right\r\n", &body));
        assert_eq!((answer.status(), answer.field("x-foretell-reason")), (200, Some(reason)), "{named}");
        assert_eq!(lines(&proxy, "WARN", "b/0"), Vec::<String>::new(), "{named}");
    }
}

#[test]
fn a_certificate_that_is_its_own_authority_is_explained() {
    let papers = Papers::new();
    let served = |name: &str| {
        let plain = Backend::plain();
        let process = format!(
            "backends: [{{ name: inner, replicas: [\"http://{}\"] }}]\nlisten: [{{ address: \"127.0.0.1:0\", tls: {{ cert: {}, key: {} }} }}]\n",
            plain.address,
            papers.path(&format!("{name}.pem")),
            papers.path(&format!("{name}.key"))
        );
        (Start::with(&process).start(), plain)
    };
    let (own, _behind) = served("own");
    let url = format!("https://localhost:{}", own.address.port());
    let told = foretell(papers.folder.path(), &["probe", &url, "--ca", "own.pem"]);
    assert_eq!(told.code, Some(1), "{told:?}");
    assert!(told.err.contains("CA:FALSE") && !told.err.contains("CaUsedAsEndEntity"), "{told:?}");
    let process = format!(
        "backends: [{{ name: b, replicas: [\"{url}\"], connect: {{ tls: {{ ca: {} }} }} }}]\n",
        papers.path("own.pem")
    );
    let proxy = Start::with(&process).start();
    let warned = eventually("a warning", || lines(&proxy, "WARN", "b/0").into_iter().next());
    assert!(warned.contains("CA:FALSE"), "{warned}");
    // A certificate signed by the given authority is accepted, by probe and by bench.
    let (signed, _behind) = served("signed");
    let url = format!("https://localhost:{}", signed.address.port());
    let told = foretell(papers.folder.path(), &["probe", &url, "--ca", "ca.pem"]);
    assert_eq!(told.code, Some(2), "a Foretell answers, which verifies nothing: {told:?}");
    let told = foretell(papers.folder.path(), &["probe", &url]);
    assert_eq!(told.code, Some(1), "{told:?}");
    assert!(told.err.contains("--ca"), "{told:?}");
}

#[test]
fn bench_speaks_tls() {
    let papers = Papers::new();
    let behind = Spot::new(|request| if request.method() == "GET" { models() } else { streamed() });
    let process = format!(
        "backends: [{{ name: inner, replicas: [\"http://{}\"] }}]\nlisten: [{{ address: \"127.0.0.1:0\", tls: {{ cert: {}, key: {} }} }}]\n",
        behind.address,
        papers.path("signed.pem"),
        papers.path("signed.key")
    );
    let proxy = Start::with(&process).start();
    write(papers.folder.path(), &[("w.jsonl", PROMPT)]);
    let (direct, through) =
        (format!("http://{}", behind.address), format!("https://localhost:{}", proxy.address.port()));
    let bench =
        ["bench", "--direct", &direct, "--through", &through, "--workload", "w.jsonl", "--alternations", "1"];
    let told = foretell(papers.folder.path(), &[&bench[..], &["--ca", "ca.pem"]].concat());
    assert_eq!(told.code, Some(0), "{told:?}");
    let told = foretell(papers.folder.path(), &bench);
    assert_eq!(told.code, Some(1), "{told:?}");
}

// ---------------------------------------------------------------------- Back-off

#[test]
fn an_unknown_server_is_queried_with_back_off_and_recognised_at_once_when_it_is_another() {
    let target = Target::start();
    let engine = target.address;
    let unknown = Spot::new(|_| respond("404 Not Found", "", ""));
    let proxy = Start::before(unknown.address).start();
    wait_for(Duration::from_mins(1), "it has been asked thrice", || {
        (unknown.count("/version") >= 3).then_some(())
    });
    // Each pause begins after the previous answer, so a busy machine can only lengthen it.
    let came = unknown.all().into_iter().filter(|(_, request)| request.target() == "/version");
    let came: Vec<Instant> = came.map(|(at, _)| at).collect();
    assert!(came[1] - came[0] > Duration::from_secs(4) && came[2] - came[1] > Duration::from_secs(9));
    assert_eq!(first_replica(&proxy)["engine"], "unknown");
    let address = unknown.leave();
    eventually("it is seen to be away", || {
        ask(proxy.address, completion("away", "", &json!({"model": "m", "prompt": "a"})));
        (first_replica(&proxy)["up"] == false).then_some(())
    });
    let _engine = Spot::at(address, move |request| pass_on(engine, request));
    proxy.knows("onnx");
}

#[test]
fn a_python_server_is_unknown_unless_it_is_mlx() {
    let python = "server: BaseHTTP/0.6 Python/3.12.3\r\n";
    let list = json!({"object": "list", "data": [{"id": "m", "object": "model"}]}).to_string();
    let server = Spot::new(move |request| match request.target() {
        "/v1/models" => respond("200 OK", python, &list),
        _ => respond("404 File not found", python, "<!DOCTYPE HTML><h1>Error response</h1>"),
    });
    let told =
        foretell(std::path::Path::new("/"), &["probe", &format!("http://{}", server.address), "--json"]);
    assert!(!told.out.contains("mlx"), "{told:?}");
    let proxy = Start::before(server.address).start();
    let shown = eventually("it has been asked", || {
        Some(first_replica(&proxy)).filter(|shown| shown["engine"] != "auto")
    });
    assert_eq!(shown["engine"], "unknown");
    assert!(!shown.to_string().contains("mlx"), "{shown}");
}

// ------------------------------------------------------------------ Reasons

#[test]
fn an_unreadable_control_header_is_named_in_the_reason() {
    let server = Spot::new(|_| models());
    let proxy = Start::before(server.address).start();
    for (n, wish) in ["gama=3", "gamma=0", "on"].into_iter().enumerate() {
        let id = format!("wish-{n}");
        let fields = format!("x-foretell: {wish}\r\n");
        let answer = ask(proxy.address, completion(&id, &fields, &json!({"model": "m", "prompt": "a"})));
        assert_eq!((answer.status(), answer.field("x-foretell-reason")), (200, Some("client")));
        assert_eq!(answer.field("x-foretell-parameter"), Some("x-foretell"), "{wish}");
        let line = request_line(&proxy, &id);
        assert_eq!((&line["reason"], &line["parameter"]), (&json!("client"), &json!("x-foretell")));
    }
    let answer =
        ask(proxy.address, completion("off", "x-foretell: off\r\n", &json!({"model": "m", "prompt": "a"})));
    assert_eq!(
        (answer.field("x-foretell-reason"), answer.field("x-foretell-parameter")),
        (Some("client"), None)
    );
}

#[test]
fn refusals_of_a_real_engine_and_a_disabled_replica_have_reasons() {
    let target = Target::start();
    let mut start = Start::before(target.address);
    let policy =
        "version: 1\nname: p\ndrafters: [{ kind: prompt_lookup, ngram: { min: 1 } }]\ngamma: { fixed: 3 }\n";
    start.policies = vec![("a.yaml", policy.to_owned())];
    let proxy = start.start();
    proxy.knows("onnx");
    let body = |model: &str| json!({"model": model, "prompt": "one two one two one two", "max_tokens": 16, "temperature": 0});
    let answer = ask(proxy.address, completion("404", "", &body("nobody")));
    assert_eq!((answer.status(), answer.field("x-foretell-path")), (404, Some("plain")));
    let reason = answer.field("x-foretell-reason").expect("a reason").to_owned();
    let line = request_line(&proxy, "404");
    assert_eq!((line["status"].as_u64(), line["reason"].as_str()), (Some(404), Some(reason.as_str())));
    let answer = ask(proxy.address, completion("speculated", "", &body(Target::model())));
    assert_eq!(answer.field("x-foretell-path"), Some("speculated"));
    let disabled = proxy.admin_post("/api/replicas/0/disable", "");
    assert_eq!(disabled.status(), 200);
    let answer = ask(proxy.address, completion("disabled", "", &body(Target::model())));
    assert_eq!((answer.status(), answer.field("x-foretell-path")), (200, Some("plain")));
    assert_eq!(answer.field("x-foretell-reason"), Some("gate_health"));
    assert!(
        lines(&proxy, "WARN", "b/0").iter().any(|line| line.contains("only")),
        "the last one goes on serving"
    );
}

// ----------------------------------------------------------------------- Signals

#[test]
fn signals_that_mean_nothing_yet_are_logged_and_end_nothing() {
    let server = Spot::new(|_| models());
    let mut proxy = Start::before(server.address).start();
    proxy.ready();
    for name in ["HUP", "USR1", "USR2"] {
        for _ in 0..2 {
            proxy.signal(name);
        }
        eventually("the signal is logged", || {
            assert!(proxy.exited().is_none(), "SIG{name} has ended it");
            log(&proxy).iter().any(|line| line.to_string().contains(&format!("SIG{name}"))).then_some(())
        });
    }
    assert_eq!(
        ask(proxy.address, completion("alive", "", &json!({"model": "m", "prompt": "a"}))).status(),
        200
    );
}

/// Makes a named pipe.
fn pipe(path: &Path) {
    assert!(std::process::Command::new("mkfifo").arg(path).status().unwrap().success());
}

/// Opens a pipe for writing, which blocks until `proxy` reads it.
fn opened(path: PathBuf, proxy: &mut Proxy) -> std::fs::File {
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || tell.send(std::fs::OpenOptions::new().write(true).open(path)));
    eventually("the file is being read", || {
        assert!(proxy.exited().is_none(), "{}", proxy.stderr());
        told.try_recv().ok()
    })
    .unwrap()
}

#[test]
fn a_signal_ends_a_process_that_is_still_loading_a_model() {
    let bundled = Path::new(env!("CARGO_MANIFEST_DIR")).join("onnx/models/draft-same");
    for name in ["TERM", "INT"] {
        let folder = tempfile::tempdir().unwrap();
        let [vocabulary, endless] = ["tokenizer.json", "endless"].map(|name| folder.path().join(name));
        for file in ["model.onnx", "config.json"] {
            std::os::unix::fs::symlink(bundled.join(file), folder.path().join(file)).unwrap();
        }
        pipe(&vocabulary);
        pipe(&endless);
        let model = format!("drafters: {{ slow: {{ path: {} }} }}\n", folder.path().display());
        let mut start = Start::with(BACKENDS).and(&model);
        start.policies =
            vec![("a.yaml", "version: 1\nname: a\ndrafters: [{ kind: model, model: slow }]\n".to_owned())];
        start.listeners = Vec::new();
        let mut proxy = start.start();
        // The configuration is checked with the real file, and then the model is loaded from a pipe
        // that never ends.
        let mut checked = opened(vocabulary.clone(), &mut proxy);
        std::fs::rename(endless, &vocabulary).unwrap();
        checked.write_all(&std::fs::read(bundled.join("tokenizer.json")).unwrap()).unwrap();
        drop(checked);
        let _never_written = opened(vocabulary, &mut proxy);
        proxy.signal(name);
        assert_eq!(proxy.wait().code(), Some(0), "SIG{name}: {}", proxy.stderr());
        assert!(proxy.stderr().contains("before it had started"), "{}", proxy.stderr());
    }
}

/// A backend that answers a POST on a signal from the test.
fn held() -> (Backend, std::sync::mpsc::Sender<()>) {
    let (tell, told) = std::sync::mpsc::channel();
    let told = std::sync::Mutex::new(told);
    let backend = Backend::answering(move |request| {
        if request.method() == "POST" {
            let _ = told.lock().unwrap().recv_timeout(PATIENCE);
            return respond("200 OK", "", "done");
        }
        respond("404 Not Found", "", "")
    });
    (backend, tell)
}

#[test]
fn two_simultaneous_signals_count_as_one() {
    for pair in [["TERM", "TERM"], ["INT", "INT"], ["INT", "TERM"]] {
        let (backend, tell) = held();
        let mut proxy = Start::before(backend.address).start();
        proxy.ready();
        let mut client = Wire::connect(proxy.address);
        client.send(completion("held", "", &json!({"model": "m", "prompt": "a"})));
        eventually("it is at the backend", || {
            (proxy.metric("foretell_replica_requests_in_flight") > 0.0).then_some(())
        });
        // As GNU timeout does: one to the process and one to its group.
        proxy.signals(&pair);
        eventually("it drains", || (proxy.admin_get("/readyz").status() == 503).then_some(()));
        std::thread::sleep(Duration::from_millis(300));
        assert!(proxy.exited().is_none(), "{pair:?} have ended it at once");
        tell.send(()).unwrap();
        let answer = client.answer();
        assert_eq!((answer.status(), answer.text().as_str(), answer.whole), (200, "done", true), "{pair:?}");
        assert_eq!(proxy.wait().code(), Some(0));
    }
}

#[test]
fn an_idle_process_ends_at_the_first_signal() {
    for name in ["TERM", "INT"] {
        // The delay of 5 s is skipped; one success is proof, on a machine that may be busy.
        let took = || {
            let server = Spot::new(|_| models());
            let mut proxy = Start::before(server.address).start();
            proxy.ready();
            assert_eq!(ask(proxy.address, get("/v1/models", "connection: close\r\n")).status(), 200);
            proxy.signal(name);
            let begun = Instant::now();
            assert_eq!(proxy.wait().code(), Some(0));
            begun.elapsed()
        };
        let quick = (0..5).any(|_| took() < Duration::from_secs(4));
        assert!(quick, "SIG{name}: the delay was waited for");
    }
}

#[test]
fn a_configured_delay_is_waited_for_without_health_checks() {
    let server = Spot::new(|_| respond("404 Not Found", "", ""));
    let mut proxy = Start::before(server.address).and("drain: { delay: 12s }\n").start();
    eventually("it has been asked", || (server.count("/v1/models") > 0).then_some(()));
    proxy.ready();
    proxy.signal("TERM");
    eventually("it drains", || (proxy.admin_get("/readyz").status() == 503).then_some(()));
    let draining = Instant::now();
    assert_eq!(ask(proxy.address, post("/v1/completions", "connection: close\r\n", "{}")).status(), 404);
    assert_eq!(proxy.wait().code(), Some(0));
    assert!(
        draining.elapsed() > Duration::from_secs(9),
        "the listener was to stay open: {:?}",
        draining.elapsed()
    );
    let late: Vec<String> = server
        .all()
        .into_iter()
        .filter(|(at, request)| request.method() == "GET" && *at > draining)
        .map(|(_, request)| request.line)
        .collect();
    assert!(late.is_empty(), "asked while draining: {late:?}");
}

#[test]
fn learnt_state_is_saved_and_restored_and_a_damaged_file_is_ignored() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("learnt.json");
    let backend = Backend::plain();
    let lines = format!("corpus: {{ snapshot: {} }}\n", file.display());
    let run = |says: &str| {
        let mut proxy = Start::before(backend.address).and(&lines).start();
        proxy.ready();
        eventually(says, || proxy.stderr().contains(says).then_some(()));
        proxy.signal("TERM");
        assert!(proxy.wait().success());
    };
    for _ in 0..2 {
        run("costs and acceptance");
        let written: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        assert_eq!(written["version"], 3);
    }
    for spoilt in [
        "",
        "{",
        "{\"version\": 9, \"saved\": 0, \"engine_starts\": []}",
        "{\"version\": 1, \"saved\": 0, \"engine_starts\": []}",
    ] {
        std::fs::write(&file, spoilt).unwrap();
        run("costs and acceptance cannot be restored");
    }
}

/// A FIFO, a folder, a device or a file of another user is not waited for, not read and not
/// replaced.
#[test]
fn a_snapshot_that_is_not_a_file_of_this_user_is_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    pipe(&at("fifo"));
    std::fs::create_dir(at("folder")).unwrap();
    std::os::unix::fs::symlink("/dev/zero", at("device")).unwrap();
    let mut named = vec!["fifo", "folder", "device"];
    std::fs::write(at("foreign"), r#"{"version":3,"saved":0,"engine_starts":[]}"#).unwrap();
    // Only root can change the owner of a file; the case is left out for other users.
    if std::os::unix::fs::chown(at("foreign"), Some(65534), None).is_ok() {
        named.push("foreign");
    }
    let backend = Backend::plain();
    for name in named {
        let kind = |path: &Path| std::fs::symlink_metadata(path).unwrap().file_type();
        let before = kind(&at(name));
        let lines = format!("corpus: {{ snapshot: {} }}\n", at(name).display());
        let mut proxy = Start::before(backend.address).and(&lines).start();
        proxy.ready();
        eventually("the start says so", || {
            proxy.stderr().contains("costs and acceptance cannot be restored").then_some(())
        });
        proxy.signal("TERM");
        assert!(proxy.wait().success());
        assert_eq!(kind(&at(name)), before, "{name}");
    }
}
