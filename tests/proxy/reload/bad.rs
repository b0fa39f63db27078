//! Errors are reported exactly, and change nothing.

use serde_json::{Value, json};

use super::{comes, is_named, write};
use crate::client::metric;
use crate::fakes::Pace;
use crate::groups::house::{before, engine, policy, send};

const BAD_POLICY: &str = include_str!("../../unit/config/bad-policy.txt");

/// File and exact errors of each case of the table.
fn cases() -> impl Iterator<Item = (&'static str, Vec<&'static str>)> {
    BAD_POLICY.trim_start_matches("=== ").split("\n=== ").map(|case| {
        let (_, rest) = case.split_once('\n').unwrap();
        let (source, errors) = rest.split_once("--- errors\n").unwrap();
        (source, errors.trim_end().lines().collect())
    })
}

#[tokio::test]
async fn each_of_sixty_bad_files_is_reported_exactly_and_none_changes_anything() {
    let engine = engine(Pace::default()).await;
    let good = policy("good", "");
    let proxy = before(&engine, "", "", &good).await;
    let dir = proxy.folder().join("policies");
    let before = proxy.get("/api/policies").await.json()["policies"][0]["revision"].clone();
    let file = dir.join("bad.yaml").display().to_string();
    let mut reported = 0;
    for (source, errors) in cases() {
        write(&dir, "bad.yaml", source);
        let refused = proxy.post("/api/reload").await;
        assert_eq!(refused.head.status(), 422, "{source}");
        let shown = |error: &Value| {
            let line = error["line"].as_u64().filter(|&line| line > 0);
            let line = line.map_or(String::new(), |line| format!(":{line}"));
            let message = error["message"].as_str().unwrap();
            match error["path"].as_str().unwrap() {
                "(document)" => format!("f{line}: {message}"),
                path => format!("f{line}: {path}: {message}"),
            }
        };
        let found = refused.json()["errors"].as_array().unwrap().clone();
        assert!(found.iter().all(|error| error["file"] == json!(file)), "{found:?}");
        assert_eq!(found.iter().map(shown).collect::<Vec<_>>(), errors, "{source}");
        let policies = proxy.get("/api/policies").await.json();
        assert_eq!(
            (policies["policies"].as_array().unwrap().len(), &policies["policies"][0]["revision"]),
            (1, &before)
        );
        assert_eq!(policies["refused"], Value::Array(found));
        reported += 1;
    }
    assert!(reported >= 60, "{reported}");
    assert!(metric(proxy.admin, "foretell_config_synchronized ").await < 0.5);
    for answer in send(&engine, &proxy, 0..2).await {
        assert!(answer.message.head.get("x-foretell-policy").unwrap().starts_with("good@"));
    }
    std::fs::remove_file(dir.join("bad.yaml")).unwrap();
    assert_eq!(proxy.post("/api/reload").await.head.status(), 200);
    assert!(metric(proxy.admin, "foretell_config_synchronized ").await > 0.5);
    assert_eq!(proxy.get("/api/policies").await.json()["refused"], json!([]));
}

#[tokio::test]
async fn settings_that_need_a_restart_are_named_and_the_policies_are_still_taken() {
    let engine = engine(Pace::default()).await;
    let proxy = before(&engine, "", "", &policy("first", "")).await;
    let file = proxy.folder().join("foretell.yaml");
    let process = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, format!("{process}limits: {{ sessions: 7 }}\n")).unwrap();
    write(&proxy.folder().join("policies"), "policy.yaml", &policy("second", ""));
    let done = proxy.post("/api/reload").await;
    assert_eq!((done.head.status(), &done.json()["policies"][0]["name"]), (200, &json!("second")));
    let line = format!("{process}x").lines().count();
    let message = "cannot change while the process runs, allowed the default until a restart, got 7";
    let error = json!({ "file": file.display().to_string(), "line": line, "path": "limits.sessions", "message": message });
    assert_eq!(done.json()["refused"], json!([error]));
    assert!(metric(proxy.admin, "foretell_config_synchronized ").await < 0.5);
    // An unreadable config file: everything stays as it is.
    std::fs::write(&file, "version: 1\nlimits: {\n").unwrap();
    write(&proxy.folder().join("policies"), "policy.yaml", &policy("third", ""));
    assert_eq!(proxy.post("/api/reload").await.head.status(), 422);
    std::fs::write(&file, &process).unwrap();
    comes(&proxy, |policies| is_named(policies, "third") && policies["refused"] == json!([])).await;
    assert!(metric(proxy.admin, "foretell_config_synchronized ").await > 0.5);
}

/// Learnt state of the replica and of the kind of request outlives its policy: nothing is measured
/// anew.
#[tokio::test]
async fn learnt_state_survives() {
    let engine = engine(Pace::default()).await;
    let proxy = before(&engine, "", "", &policy("same", "gamma: { max: 8, fixed: 4 }")).await;
    send(&engine, &proxy, 0..4).await;
    let known = |replica: &Value| replica["engine_start"].clone();
    let before = known(&proxy.replica().await);
    proxy.adopt(&policy("same", "gamma: { max: 7, fixed: 3 }")).await;
    assert_eq!(known(&proxy.replica().await), before);
    for answer in send(&engine, &proxy, 4..6).await {
        assert_eq!(answer.foretell()["path"], "speculated", "{}", answer.foretell());
    }
}
