//! What an operator reads when something is wrong: in the log, in headers, metrics and the API.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::house::{PLAIN_REQUESTS, VERIFIES, ask, before, engine, forced, policy};
use crate::client::Ask;
use crate::fakes::vllm::{Options, Vllm};
use crate::fakes::{Fake, Fault, Pace, When};
use crate::reasons::proxy::Proxy;
use crate::wire::PATIENCE;

/// The lines of the log with this text, as JSON.
fn lines(proxy: &Proxy, text: &str) -> Vec<Value> {
    let log = proxy.log();
    log.lines().filter(|line| line.contains(text)).map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Waits for a line with this text.
async fn line(proxy: &Proxy, text: &str) -> Value {
    let begun = Instant::now();
    loop {
        if let Some(line) = lines(proxy, text).pop() {
            return line;
        }
        assert!(begun.elapsed() < PATIENCE, "no {text:?}:\n{}", proxy.log());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_policy_switched_off_names_it_everywhere() {
    let engine = engine(Pace::default()).await;
    let proxy = before(&engine, "", "", &policy("quiet", "mode: off")).await;
    let answer = ask(1).send(proxy.front, "").await;
    let head = &answer.message.head;
    let told = [head.get("x-foretell-path"), head.get("x-foretell-reason")];
    assert_eq!(told, [Some("passthrough"), Some("policy")]);
    let named = head.get("x-foretell-policy").unwrap();
    assert!(named.starts_with("quiet@"), "{named}");
    assert_eq!(line(&proxy, "\"request\"").await["policy"], named);
    let metrics = proxy.get("/metrics").await.text();
    let counted = |line: &str| line.contains("reason=\"policy\"") && line.contains("policy=\"quiet\"");
    assert!(metrics.lines().any(|line| line.starts_with("foretell_requests_total") && counted(line)));
    let session = &proxy.get("/api/sessions").await.json()["sessions"][0];
    assert_eq!(session["policy"], named);
    let coverage = proxy.get("/api/coverage").await.json();
    let rest = &coverage["rest"][0];
    assert_eq!((&rest["reason"], &rest["policy"]), (&json!("policy"), &json!("quiet")));
    assert!(coverage["sentence"].as_str().unwrap().ends_with("the largest rest: policy quiet, 100 %"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_that_breaks_off_is_a_warning_with_its_cause_replica_model_and_policy() {
    let engine = engine(Pace::default()).await;
    for mode in ["auto", "off"] {
        let proxy = before(&engine, &format!("mode: {mode}\n"), "", &forced("own")).await;
        engine.house.faults.clear();
        engine.house.faults.at(When::path(PLAIN_REQUESTS), 0, Fault::CutAfter(3));
        engine.house.faults.always(When::path(PLAIN_REQUESTS), Fault::CutAfter(0));
        engine.house.faults.always(When::path(VERIFIES), Fault::Status(500));
        let asked = Ask { stream: true, ..ask(1) };
        let front = proxy.front;
        // A passthrough answer ends with its connection, which the client here takes for a fault.
        let _ = tokio::spawn(async move { asked.send(front, "").await }).await;
        let line = line(&proxy, "\"level\":\"WARN\",\"id\"").await;
        assert_eq!((&line["level"], &line["status"]), (&json!("WARN"), &json!(200)), "{mode} {line}");
        assert_eq!(line["replica"], "toy/0", "{mode} {line}");
        assert!(line["error"].as_str().is_some_and(|error| !error.is_empty()), "{mode} {line}");
        let session = proxy.get("/api/sessions").await.json()["sessions"][0].clone();
        assert_eq!(session["error"], line["error"], "{mode} {session}");
        if mode == "auto" {
            assert_eq!(line["model"], "toy", "{line}");
            assert!(line["policy"].as_str().unwrap().starts_with("own@"), "{line}");
        }
        engine.house.faults.clear();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_model_at_a_known_address_is_a_warning_and_shown() {
    let first = engine(Pace::default()).await;
    let address = first.address;
    let proxy = before(&first, "", "", &forced("own")).await;
    let url = format!("http://{address}/");
    assert!(proxy.get("/api/replicas").await.json()["replicas"][0]["model_changed"].is_null());
    drop(first);
    let mut options = Options { scale_out: true, ..Options::of("0.33.0") };
    options.setup.model = "other".to_owned();
    let _second = Fake::start_at(Vllm::new(options), address).await;
    let line = line(&proxy, "the model at this address changed").await;
    assert_eq!((&line["from"], &line["to"]), (&json!("toy"), &json!("other")), "{line}");
    assert_eq!((&line["level"], &line["url"]), (&json!("WARN"), &json!(url)), "{line}");
    let changed = &proxy.get("/api/replicas").await.json()["replicas"][0]["model_changed"];
    assert_eq!((&changed["from"], &changed["to"]), (&json!("toy"), &json!("other")));
    assert_eq!(lines(&proxy, "the model at this address changed").len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reload_names_the_policies_that_are_gone_and_repeats_no_warning() {
    let engine = engine(Pace::default()).await;
    let proxy =
        before(&engine, "", "", &policy("own", "accept: { rule: ears, tolerance: { max: 0 } }")).await;
    let warned = || lines(&proxy, "relaxes nothing").len();
    assert_eq!(warned(), 1, "at the start");
    let file = proxy.folder().join("policies/aside.yaml");
    std::fs::write(&file, policy("aside", "match: { models: [none] }")).unwrap();
    assert_eq!(proxy.post("/api/reload").await.head.status(), 200);
    assert!(line(&proxy, "\"reloaded\"").await["removed"].is_null());
    std::fs::remove_file(&file).unwrap();
    assert_eq!(proxy.post("/api/reload").await.head.status(), 200);
    assert_eq!(line(&proxy, "\"removed\"").await["removed"], "aside");
    assert_eq!(warned(), 1, "{}", proxy.log());
}
