//! The command line for people and scripts: help, version, pages, and the `drain` command.

use crate::kit::{Start, eventually};
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
fn drain_waits_until_the_proxy_is_empty_and_finds_it_by_the_process_file() {
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
    assert!(proxy.wait().success());
    let told =
        foretell(folder.path(), &["drain", "--admin", &admin, "--token-file", &token.display().to_string()]);
    assert_eq!(told.code, Some(1));
    assert!(told.err.contains("nobody listens there"), "{}", told.err);
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
