//! `foretell explain`, `POST /api/explain` and `check` agree with what the proxy does.

use std::net::{SocketAddr, TcpListener};
use std::path::Path;

use serde_json::Value;
use tempfile::TempDir;

use crate::kit::{Answer, Backend, Proxy, Start, ask, eventually, post};
use crate::ops_kit::{self, Target};

const BODY: &str = r#"{"model":"m","prompt":"a b c","max_tokens":4,"temperature":0}"#;

/// Exit code, standard output and standard error of a command that runs to its end in `folder`.
fn foretell(folder: &Path, args: &[&str]) -> (i32, String, String) {
    let told = ops_kit::foretell(folder, args);
    (told.code.unwrap_or(-1), told.out, told.err)
}

/// An address of this machine without a listener.
fn nobody() -> SocketAddr {
    nobody_at("127.0.0.1:0")
}

fn nobody_at(address: &str) -> SocketAddr {
    TcpListener::bind(address).unwrap().local_addr().unwrap()
}

/// A folder with a request and a config file whose admin port has no listener.
fn folder(process: &str, policy: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    write("foretell.yaml", &format!("version: 1\nadmin: {{ address: \"{}\" }}\n{process}\n", nobody()));
    write("request.json", BODY);
    std::fs::create_dir(folder.path().join("policies")).unwrap();
    write("policies/a.yaml", &format!("version: 1\nname: a\n{policy}\n"));
    folder
}

/// The command's output for the request in `folder`, as JSON and as text.
fn explained(folder: &Path, args: &[&str]) -> (Value, String) {
    let command = [&["explain", "--request", "request.json"], args].concat();
    let (code, words, err) = foretell(folder, &command);
    assert_eq!(code, 0, "{words}{err}");
    let (_, json, _) = foretell(folder, &[&command[..], &["--json"]].concat());
    (serde_json::from_str(&json).unwrap(), words)
}

fn result(told: &Value) -> (&str, &str) {
    (told["path"].as_str().unwrap_or_default(), told["reason"].as_str().unwrap_or_default())
}

#[test]
fn a_body_that_cannot_be_read_is_told_with_the_place() {
    let dead = folder(&format!("backends: [{{ name: b, replicas: [\"http://{}\"] }}]", nobody()), "");
    let deep = "[".repeat(200_000);
    for (body, note) in [
        (
            r#"{"model":"m","prompt":"secret"; }"#,
            "The body is not JSON: expected `,` or `}` at line 1 column 31.",
        ),
        ("[1]", "The body is JSON, but no object with the fields of a request."),
        (deep.as_str(), "The body is not JSON: EOF while parsing a list at line 1 column 200000."),
    ] {
        std::fs::write(dead.path().join("request.json"), body).unwrap();
        let (told, words) = explained(dead.path(), &["--offline"]);
        assert!(told["notes"].as_array().unwrap().contains(&note.into()), "{words}");
        assert!(!words.contains("secret"), "{words}");
    }
}

#[test]
fn a_missing_server_is_never_explained_as_eligible() {
    let dead = folder(&format!("backends: [{{ name: b, replicas: [\"http://{}\"] }}]", nobody()), "");
    let (told, words) = explained(dead.path(), &[]);
    assert_eq!(
        (result(&told), &told["facts_from"]),
        (("passthrough", "unreachable"), &"server".into()),
        "{words}"
    );
    assert!(!words.contains("eligible") && words.contains("Foretell would answer with an error"), "{words}");
    let steps = told["steps"].as_array().unwrap();
    let decides = steps.iter().find(|step| step["result"] != "passed").unwrap();
    assert_eq!((&decides["step"], &decides["result"]), (&"server".into(), &"failed".into()), "{words}");
}

#[test]
fn a_passthrough_server_is_never_explained_as_eligible() {
    let plain = Backend::plain();
    let passthrough =
        folder(&format!("backends: [{{ name: b, replicas: [\"http://{}\"] }}]", plain.address), "");
    let (told, words) = explained(passthrough.path(), &[]);
    assert_eq!(
        (result(&told), &told["facts_from"]),
        (("passthrough", "no_verify_method"), &"server".into()),
        "{words}"
    );
    assert!(!words.contains("eligible"), "{words}");
}

#[test]
fn without_a_backend_nothing_is_eligible() {
    let none = folder("backends: []", "");
    let (told, words) = explained(none.path(), &[]);
    assert_eq!((result(&told), &told["facts_from"]), (("failed", "no_backend"), &"nobody".into()), "{words}");
    assert!(!words.contains("eligible"), "{words}");
    let notes = told["notes"].as_array().unwrap();
    let says = |what: &str| notes.iter().any(|note| note.as_str().unwrap().contains(what));
    assert!(says("no proxy answers at ") && says("(--config) or --backend names a server"), "{words}");
}

#[test]
fn unqueried_steps_are_undecided() {
    let address = nobody();
    let open = folder(&format!("backends: [{{ name: b, replicas: [\"http://{address}\"] }}]"), "");
    let (told, words) = explained(open.path(), &["--offline"]);
    assert_eq!((result(&told), &told["facts_from"]), (("undecided", ""), &"nobody".into()), "{words}");
    assert!(words.contains("step server: the server was not queried"), "{words}");
    // Steps that do not depend on the server are decided.
    let (told, _) = explained(open.path(), &["--offline", "--header", "x-foretell: gama=3"]);
    assert_eq!(result(&told), ("passthrough", "client"));
    let (code, _, err) =
        foretell(open.path(), &["explain", "--request", "request.json", "--admin", &nobody().to_string()]);
    assert_eq!(code, 1);
    assert!(err.contains("no proxy answers"), "{err}");
}

fn before(target: &Target) -> String {
    format!(
        "backends: [{{ name: b, replicas: [\"http://{}\"], probe: {{ when: never }} }}]\n",
        target.address
    )
}

/// `POST /api/explain` for a request with these fields and this body.
fn asked(proxy: &Proxy, fields: &str, body: &str) -> Value {
    let call = format!(
        "POST /api/explain HTTP/1.1\r\nhost: localhost\r\n{fields}content-length: {}\r\n\r\n{body}",
        body.len()
    );
    let answer = ask(proxy.admin, call);
    assert_eq!(answer.status(), 200, "{}", answer.text());
    answer.json()
}

fn sent(proxy: &Proxy, fields: &str, body: &str) -> Answer {
    ask(proxy.address, post("/v1/completions", fields, body))
}

/// Every case is explained and then sent: the answer's headers must agree.
#[test]
#[cfg_attr(not(feature = "onnx"), ignore = "needs a model to serve")]
fn explanations_agree_with_the_answers() {
    let target = Target::start();
    let model = r#""model":"target","max_tokens":4"#;
    let body = |more: &str| format!("{{{model},\"prompt\":\"the same, the same, the\"{more}}}");
    let mut start = Start::with(&before(&target))
        .and("tenant: { header: x-tenant, trusted_peers: [127.0.0.1], fallback: authorization_hash }");
    start.policies = vec![
        (
            "10.yaml",
            "version: 1\nname: hot\nmatch: { temperature: { min: 0.5 } }\nmode: \"off\"\n".to_owned(),
        ),
        ("20.yaml", "version: 1\nname: plain\nmatch: { tenants: [ide] }\nmode: plain\n".to_owned()),
        (
            "25.yaml",
            "version: 1\nname: hashed\nmatch: { tenants: [c3e9a1c985d603e4] }\nmode: plain\n".to_owned(),
        ),
        (
            "30.yaml",
            "version: 1\nname: shadows\nmatch: { headers: { x-team: [web] } }\nmode: shadow\n".to_owned(),
        ),
        (
            "40.yaml",
            "version: 1\nname: forced\nmatch: { headers: { x-team: [ide] } }\ngamma: { fixed: 2 }\n"
                .to_owned(),
        ),
    ];
    let proxy = start.start();
    proxy.knows("onnx");
    let greedy = body(",\"temperature\":0");
    let cases = [
        ("", body(""), "policy"),
        ("", greedy.clone(), "no_policy"),
        ("x-foretell: off\r\n", greedy.clone(), "client"),
        ("x-foretell: gama=3\r\n", greedy.clone(), "client"),
        ("content-encoding: gzip\r\n", greedy.clone(), "encoded"),
        ("", body(",\"n\":2"), "choices"),
        ("", body(",\"bogus\":2"), "unknown_parameter"),
        ("", "[1]".to_owned(), "body"),
        ("x-tenant: ide\r\n", greedy.clone(), "policy"),
        ("x-team: web\r\n", greedy.clone(), "shadow"),
        ("x-team: ide\r\nx-foretell: plain\r\n", greedy.clone(), "client"),
        ("x-team: ide\r\n", greedy.clone(), ""),
    ];
    for (fields, body, wanted) in &cases {
        let told = asked(&proxy, &format!("{fields}x-explain-x-none: 1\r\n"), body);
        let answer = sent(&proxy, fields, body);
        let reason = answer.field("x-foretell-reason").unwrap_or_default();
        let path = answer.field("x-foretell-path").unwrap_or_default();
        let policy = answer.field("x-foretell-policy").unwrap_or_default();
        assert_eq!(result(&told).1, *wanted, "{fields} {body}: {told}");
        assert_eq!(told["path"] == "passthrough", path == "passthrough", "{fields} {body}: {told}");
        if wanted.is_empty() {
            assert_eq!((path, &told["verify"][0]), ("speculated", &"tree".into()), "{told}");
            assert_eq!(told["gamma_max"], 2);
        } else {
            assert_eq!(reason, *wanted, "{fields} {body}");
        }
        // The answer to a passthrough request names no policy.
        if path != "passthrough" {
            assert_eq!(told["policy"], policy, "{fields} {body}");
        }
    }
    let two = "x-tenant: ide\r\nx-tenant: web\r\n";
    let told = asked(&proxy, two, &greedy);
    assert!(told["notes"].to_string().contains("more than one tenant"), "{told}");
    assert_eq!((&told["tenant"], sent(&proxy, two, &greedy).status()), (&Value::Null, 400));
    // Header fields of the call itself are given for the explained request with a prefix.
    let key = "authorization: Bearer sk-1\r\n";
    let told = asked(&proxy, &format!("x-explain-{key}"), &greedy);
    assert_eq!((result(&told), &told["tenant"]), (("eligible", "policy"), &"c3e9a1c985d603e4".into()));
    assert_eq!(sent(&proxy, key, &greedy).field("x-foretell-reason"), Some("policy"));
}

#[test]
#[cfg_attr(not(feature = "onnx"), ignore = "needs a model to serve")]
fn the_running_proxy_explains_and_reports_a_missing_server() {
    let mut target = Target::start();
    let admin = nobody_at("127.0.0.2:0");
    let secret = tempfile::tempdir().unwrap();
    std::fs::write(secret.path().join("token"), "s3cret").unwrap();
    let token = secret.path().join("token");
    let settings = format!("admin: {{ address: \"{admin}\", token_file: \"{}\" }}", token.display());
    let mut start = Start::with(&before(&target)).and(&settings);
    start.policies = vec![("a.yaml", "version: 1\nname: a\n".to_owned())];
    start.listeners = vec![[127, 0, 0, 1].into()];
    let proxy = start.start();
    let home = proxy.folder.path();
    std::fs::write(home.join("request.json"), BODY.replace("\"m\"", "\"target\"")).unwrap();
    let told = || explained(home, &["--config", "foretell.yaml"]);
    let (first, words) = eventually("the server is known", || {
        let (told, words) = told();
        (told["verify"][0] == "tree").then_some((told, words))
    });
    assert_eq!((result(&first), &first["facts_from"]), (("eligible", ""), &"proxy".into()), "{words}");
    assert!(words.contains("facts from   the running proxy"), "{words}");
    assert_eq!(first["replica"], format!("b/0 at http://{}/", target.address));

    // Changed policies are not part of the answer until they are loaded, and a note says so.
    std::fs::write(home.join("policies/a.yaml"), "version: 1\nname: b\nmode: \"off\"\n").unwrap();
    eventually("they are taken up", || {
        let request = ["explain", "--request", "request.json", "--config", "foretell.yaml"];
        let (_, words, _) = foretell(home, &request);
        let stale = words.starts_with("eligible");
        assert!(!stale || words.contains("the files have b@"), "{words}");
        (!stale && words.contains("reason       policy")).then_some(())
    });
    std::fs::write(home.join("policies/a.yaml"), "version: 1\nname: a\n").unwrap();
    // By now a probe may have found that speculation does not pay here.
    eventually("and the old ones again", || (result(&told().0).0 == "eligible").then_some(()));
    // With other settings, those are explained instead of the running proxy.
    std::fs::create_dir(home.join("others")).unwrap();
    std::fs::write(home.join("others/a.yaml"), "version: 1\nname: b\nmode: \"off\"\n").unwrap();
    let (other, _) = explained(home, &["--config", "foretell.yaml", "--policies", "others"]);
    assert_eq!((result(&other), &other["facts_from"]), (("passthrough", "policy"), &"server".into()));

    target.kill();
    let body = BODY.replace("\"m\"", "\"target\"");
    eventually("the proxy has noticed", || {
        // Until then, a request is still sent to the server.
        assert_eq!(sent(&proxy, "", &body).status(), 502);
        (result(&told().0) == ("passthrough", "unreachable")).then_some(())
    });
    let (_, words) = told();
    assert!(!words.contains("eligible") && words.contains("Foretell would answer with an error"), "{words}");
}

#[test]
fn every_setting_without_effect_is_warned_of_by_check_and_serve() {
    let backends = |address: &str| format!("backends:\n  - name: b\n    replicas: [\"http://{address}\"]\n");
    let policy = "accept:\n  rule: ears\n  tolerance: { max: 0 }\n";
    let folder = folder(&backends("127.0.0.1:9"), policy);
    let (code, out, err) = foretell(folder.path(), &["check"]);
    assert_eq!(code, 0, "{out}{err}");
    let warning = "policy a: accept.rule: ears relaxes nothing";
    assert!(out.contains(&format!("{warning}: tolerance.max is 0")), "{out}");
    let backend = Backend::plain();
    let mut start = Start::with(&backends(&backend.address.to_string()));
    start.policies = vec![("a.yaml", format!("version: 1\nname: a\n{policy}"))];
    let proxy = start.start();
    proxy.ready();
    eventually(warning, || proxy.stderr().contains(warning).then_some(()));
}
