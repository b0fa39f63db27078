//! The command line for people and scripts: help, version, pages, and the `drain` command.

use crate::kit::{Backend, Start, eventually, respond};
use crate::ops_kit::{foretell, write};

/// An address without a listener; none is needed.
const BACKENDS: &str = "backends: [{ name: b, replicas: [\"http://127.0.0.1:9\"] }]\n";

#[test]
fn without_arguments_there_is_help_and_a_wrong_command_gets_a_hint() {
    let folder = tempfile::tempdir().unwrap();
    let told = foretell(folder.path(), &[]);
    assert_eq!((told.code, told.out.as_str()), (Some(64), ""));
    assert!(told.err.contains("Usage: foretell") && told.err.contains("Exit codes"), "{}", told.err);
    assert!(!told.err.contains('\u{1b}'), "colours in a pipe");
    let told = foretell(folder.path(), &["complete"]);
    assert_eq!(told.code, Some(64));
    assert!(told.err.contains("'completions'"), "{}", told.err);
}

#[test]
fn version_help_and_pages_go_to_standard_output() {
    let folder = tempfile::tempdir().unwrap();
    let asked: [(&[&str], &str); 5] = [
        (&["--version"], concat!("foretell ", env!("CARGO_PKG_VERSION"))),
        (&["--help"], "Environment:"),
        (&["serve", "-h"], "[env: FORETELL_LISTEN] [default: 127.0.0.1:8080]"),
        (&["completions", "bash"], "complete -F"),
        (&["man"], ".TH foretell 1"),
    ];
    for (args, wanted) in asked {
        let told = foretell(folder.path(), args);
        assert_eq!((told.code, told.err.as_str()), (Some(0), ""), "{args:?}");
        let words = told.out.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words.contains(wanted), "{args:?}: {}", told.out);
        assert!(!told.out.contains('\u{1b}'), "{args:?}: colours in a pipe");
    }
}

#[test]
fn serve_prints_the_stanza_that_a_policy_of_a_model_drafter_needs() {
    let folder = tempfile::tempdir().unwrap();
    let policy = "version: 1\nname: a\ndrafters: [{ kind: model, model: draft-same, vocabulary: same }]\n";
    write(
        folder.path(),
        &[("foretell.yaml", &format!("version: 1\n{BACKENDS}")), ("policies/a.yaml", policy)],
    );
    let told = foretell(folder.path(), &["serve", "-c", "foretell.yaml"]);
    assert_eq!(told.code, Some(64));
    assert!(told.err.contains("drafters:\n  draft-same: { path: onnx/models/draft-same }\n"), "{}", told.err);
}

#[test]
fn drain_waits_until_the_proxy_is_empty_and_finds_it_by_the_config_file() {
    let mut start = Start::with(BACKENDS).and("admin: { address: \"127.0.0.2:0\", token_file: token }\n");
    start.process.push_str("drain: { delay: 0s, grace: 1m }\n");
    let folder = tempfile::tempdir().unwrap();
    let token = folder.path().join("token");
    std::fs::write(&token, "open\n").unwrap();
    start.process = start.process.replace("token_file: token", &format!("token_file: {}", token.display()));
    let mut proxy = start.start();
    let admin = proxy.admin.to_string();
    let told = foretell(folder.path(), &["drain", "--admin", &admin]);
    assert_eq!(told.code, Some(1));
    assert!(told.err.contains("--token-file"), "{}", told.err);
    let told = foretell(proxy.folder.path(), &["drain", "--admin", &admin]);
    assert_eq!((told.code, told.out.as_str()), (Some(0), "drained\n"), "{}", told.err);
    assert!(told.err.contains("waiting for 0 open requests to end"), "{}", told.err);
    assert!(proxy.wait().success());
    let told =
        foretell(folder.path(), &["drain", "--admin", &admin, "--token-file", &token.display().to_string()]);
    assert_eq!(told.code, Some(1));
    assert!(told.err.contains("nobody listens there"), "{}", told.err);
}

#[test]
fn drain_believes_no_server_but_a_proxy_and_names_a_token_that_is_none() {
    let folder = tempfile::tempdir().unwrap();
    let other =
        Backend::answering(|_| respond("200 OK", "content-type: text/html\r\n", "<html>welcome</html>"));
    let told = foretell(folder.path(), &["drain", "--admin", &other.address.to_string()]);
    assert_eq!((told.code, told.out.as_str()), (Some(1), ""));
    assert!(told.err.contains("does not support draining (200 OK)"), "{}", told.err);
    let told =
        foretell(folder.path(), &["drain", "--admin", &other.address.to_string(), "--token-file", "none"]);
    assert_eq!(
        (told.code, told.err.contains("--token-file none: No such file")),
        (Some(64), true),
        "{}",
        told.err
    );
    let locked = Backend::answering(|_| respond("401 Unauthorized", "", ""));
    write(folder.path(), &[("token", "wrong")]);
    let told =
        foretell(folder.path(), &["drain", "--admin", &locked.address.to_string(), "--token-file", "token"]);
    assert!(told.err.contains("the admin token is wrong"), "{}", told.err);
}

#[test]
fn a_bench_that_cannot_run_leaves_its_reports_and_a_wrong_name_is_told_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let workload = r#"{"route":"completions","body":{"prompt":"a"}}"#;
    write(folder.path(), &[("w.jsonl", workload), ("r.json", "earlier"), ("r.html", "earlier")]);
    let (nobody, files) = ("http://127.0.0.1:9", ["--json", "r.json", "--html", "r.html"]);
    let known = ["bench", "--direct", nobody, "--through", nobody, "--workload", "w.jsonl"];
    let told = foretell(folder.path(), &[&known[..], &files[..]].concat());
    assert_eq!(told.code, Some(1), "{}", told.err);
    for file in ["r.json", "r.html"] {
        assert_eq!(std::fs::read_to_string(folder.path().join(file)).unwrap(), "earlier");
    }
    let told = foretell(folder.path(), &[&known[..], &["--require", "other>=1"]].concat());
    assert_eq!(told.code, Some(64), "{}", told.err);
    assert!(
        told.err.contains("--require: allowed the name of a measured workload, got other"),
        "{}",
        told.err
    );
}

#[test]
fn a_port_that_does_not_exist_is_refused_wherever_a_server_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let replicas = "version: 1\nbackends: [{ name: b, replicas: [\"http://127.0.0.1:80800\"] }]\n";
    let (wrong, fine) = ("http://127.0.0.1:80800", "http://127.0.0.1:9");
    write(folder.path(), &[("foretell.yaml", replicas), ("w.jsonl", "")]);
    for args in [
        &["check"][..],
        &["serve", "--backend", wrong],
        &["probe", wrong],
        &["bench", "--direct", wrong, "--through", fine, "--workload", "w.jsonl"],
    ] {
        let told = foretell(folder.path(), args);
        assert_eq!(told.code, Some(64), "{args:?}: {}", told.all());
        assert!(told.all().contains("80800"), "{args:?}: {}", told.all());
    }
}

#[test]
fn drain_can_leave_at_once() {
    let mut proxy = Start::with(BACKENDS).and("drain: { delay: 10m }\n").start();
    let admin = proxy.admin.to_string();
    let folder = tempfile::tempdir().unwrap();
    let told = foretell(folder.path(), &["drain", "--no-wait", "--admin", &admin]);
    assert_eq!((told.code, told.out.as_str()), (Some(0), "draining\n"), "{}", told.err);
    eventually("it drains", || (proxy.admin_get("/readyz").status() == 503).then_some(()));
    proxy.signals(&["INT"]);
    assert!(proxy.wait().success());
}
