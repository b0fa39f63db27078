//! Effect on the proxy of a probe, and of the load of its replicas.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;

use super::house::{EXPENSIVE, INEXPENSIVE, complete, proxy, reason, replica, until, vllm};
use crate::client::{FORCED, get, send};
use crate::fakes::{Front, Load, Pace};
use crate::reasons::scene::PLAIN;
use crate::wire::{Wire, post};

const NEVER: &str = "    probe: { when: never }\n";
const LONG: Duration = Duration::from_mins(1);

#[tokio::test]
async fn two_engines_behind_one_address_are_never_speculated_with() {
    let (one, two) = (vllm("0.33.0", |_| {}).await, vllm("0.33.0", |_| {}).await);
    two.restart();
    let front = Front::before(vec![one.address, two.address]).await;
    let proxy = proxy(front.address, FORCED, NEVER).await;
    until(LONG, || async {
        replica(&proxy).await["probe"]["conclusion"].to_string().contains("several_engines")
    })
    .await;
    let before = one.house.tally().sequences + two.house.tally().sequences;
    for _ in 0..8 {
        assert_eq!(reason(&proxy).await, "several_engines");
    }
    assert_eq!(one.house.tally().sequences + two.house.tally().sequences - before, 8);
    let metrics = get(proxy.gateway.admin.unwrap(), "/metrics").await.text();
    let rounds: f64 = metrics
        .lines()
        .filter(|line| line.starts_with("foretell_spec_decode_num_drafts_total"))
        .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
        .sum();
    assert!(rounds.abs() < 0.5, "{rounds}");
}

#[tokio::test]
async fn one_engine_behind_a_front_is_speculated_with() {
    let one = vllm("0.33.0", |_| {}).await;
    let front = Front::before(vec![one.address]).await;
    let proxy = proxy(front.address, FORCED, NEVER).await;
    until(LONG, || async { replica(&proxy).await["engine_start"].is_string() }).await;
    let answer = complete(&proxy, 40).await;
    assert_eq!(answer.head.get("x-foretell-path"), Some("speculated"), "{}", answer.text());
}

#[tokio::test]
async fn a_server_on_which_no_method_pays_stays_plain_with_its_reason() {
    let fake = vllm("0.33.0", |options| {
        options.setup.pace = EXPENSIVE;
        options.setup.max_len = 250;
    })
    .await;
    let proxy = proxy(fake.address, PLAIN, "").await;
    until(LONG, || async {
        let pays = replica(&proxy).await["probe"]["pays"].as_bool();
        // The noise of a busy machine may look like a gain.
        if pays == Some(true) {
            send(proxy.gateway.admin.unwrap(), "/api/replicas/0/reprobe", "", &json!({})).await;
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        pays == Some(false)
    })
    .await;
    assert_eq!(reason(&proxy).await, "no_gain");
    let shown = replica(&proxy).await;
    assert!(
        shown["probe"]["conclusion"]
            .as_str()
            .unwrap()
            .starts_with("Speculation will probably not pay here: "),
        "{shown:#}"
    );
    assert_eq!(fake.house.fatal(), Vec::<String>::new());
}

#[tokio::test]
async fn a_probe_teaches_the_engine_and_can_be_asked_for_again() {
    let fake = vllm("0.33.0", |options| options.setup.pace = INEXPENSIVE).await;
    let proxy = proxy(fake.address, PLAIN, NEVER).await;
    until(LONG, || async { replica(&proxy).await["engine_start"].is_string() }).await;
    assert_eq!(replica(&proxy).await["probe"], json!(null));
    for _ in 0..2 {
        let before = fake.house.tally().sequences;
        let request = post("/api/replicas/0/reprobe", "", b"");
        let mut wire = Wire::connect(proxy.gateway.admin.unwrap()).await;
        let request = String::from_utf8(request).unwrap().replace("host: api", "host: localhost");
        assert!(wire.ask(request).await.head.status() < 300);
        until(LONG, || async {
            let done = fake.house.tally().sequences > before + 10;
            done && replica(&proxy).await["probe"]["pays"] == json!(true)
        })
        .await;
    }
    let shown = replica(&proxy).await;
    assert_eq!(shown["probe"]["cache"]["rows"], json!("tail"), "{shown:#}");
}

#[tokio::test]
async fn a_foretell_is_no_engine_to_speculate_with() {
    let fake = vllm("0.33.0", |_| {}).await;
    let inner = proxy(fake.address, PLAIN, NEVER).await;
    let outer = proxy(inner.gateway.addresses[0], FORCED, NEVER).await;
    until(LONG, || async {
        replica(&outer).await["probe"]["conclusion"].to_string().contains("it is a Foretell")
    })
    .await;
    assert_eq!(reason(&outer).await, "no_verify_method");
}

#[tokio::test]
async fn a_probe_gives_way_to_clients() {
    let slow = Pace { step: Duration::from_millis(10), ..INEXPENSIVE };
    let fake = vllm("0.33.0", |options| options.setup.pace = slow).await;
    let proxy = Arc::new(proxy(fake.address, PLAIN, NEVER).await);
    until(LONG, || async { replica(&proxy).await["engine_start"].is_string() }).await;
    let before = fake.house.tally();
    let client = tokio::spawn({
        let proxy = Arc::clone(&proxy);
        async move { complete(&proxy, 400).await }
    });
    until(LONG, || async { fake.house.tally().sequences > before.sequences }).await;
    send(proxy.gateway.admin.unwrap(), "/api/replicas/0/reprobe", "", &json!({})).await;
    for _ in 0..25 {
        let now = fake.house.tally();
        if now.finished > before.finished {
            break;
        }
        assert_eq!(now.sequences - before.sequences, 1, "the client's alone");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(client.await.unwrap().head.status(), 200);
    until(LONG, || async { replica(&proxy).await["probe"]["pays"].is_boolean() }).await;
}

#[tokio::test]
async fn a_gate_closes_when_requests_wait_and_opens_when_they_do_not() {
    let fake = vllm("0.33.0", |_| {}).await;
    let proxy = proxy(fake.address, PLAIN, NEVER).await;
    until(LONG, || async { replica(&proxy).await["load"]["running"].is_number() }).await;
    assert_ne!(reason(&proxy).await, "gate_load");
    *fake.house.pretend.lock() = Load { running: 4, waiting: 2, kv: 0.3 };
    until(LONG, || async { replica(&proxy).await["load"]["waiting"] == json!(2) }).await;
    assert_eq!(reason(&proxy).await, "gate_load");
    *fake.house.pretend.lock() = Load { running: 4, waiting: 0, kv: 0.95 };
    until(LONG, || async { replica(&proxy).await["load"]["waiting"] == json!(0) }).await;
    assert_eq!(reason(&proxy).await, "gate_load");
    *fake.house.pretend.lock() = Load::default();
    until(LONG, || async { reason(&proxy).await != "gate_load" }).await;
}

#[tokio::test]
async fn forced_requests_ignore_the_load() {
    let fake = vllm("0.33.0", |_| {}).await;
    *fake.house.pretend.lock() = Load { running: 9, waiting: 9, kv: 0.99 };
    let proxy = proxy(fake.address, FORCED, NEVER).await;
    until(LONG, || async { replica(&proxy).await["load"]["waiting"] == json!(9) }).await;
    let answer = complete(&proxy, 40).await;
    assert_eq!(answer.head.get("x-foretell-path"), Some("speculated"), "{}", answer.text());
}

#[tokio::test]
async fn a_page_that_falls_silent_makes_the_signal_stale() {
    use crate::fakes::{Fault, When};
    let fake = vllm("0.33.0", |_| {}).await;
    let policy = format!("{PLAIN}gates: {{ stale: 500ms }}\n");
    let proxy = proxy(fake.address, &policy, NEVER).await;
    until(LONG, || async { replica(&proxy).await["load"]["running"].is_number() }).await;
    fake.house.faults.always(When::path("/metrics"), Fault::Hang);
    let is_stale = || async {
        let metrics = get(proxy.gateway.admin.unwrap(), "/metrics").await.text();
        let closed = |line: &str| line.contains("gate=\"stale\"") && line.ends_with(" 0");
        metrics.lines().any(|line| line.starts_with("foretell_gate_open{") && closed(line))
    };
    // Pages are read one after the other: once one hangs, no new figures arrive.
    until(LONG, || async { fake.house.faults.struck() > 0 && is_stale().await }).await;
    // The page also shows the start time, so the process behind a new connection is unknown; but
    // the gate was closed before.
    for _ in 0..3 {
        assert_eq!(reason(&proxy).await, "gate_stale");
    }
    fake.house.faults.clear();
    until(LONG, || async { reason(&proxy).await != "gate_stale" }).await;
}

#[tokio::test]
async fn a_billed_backend_is_asked_for_its_models_alone() {
    let fake = vllm("0.33.0", |_| {}).await;
    let proxy = proxy(fake.address, PLAIN, "    billed: true\n").await;
    until(LONG, || async {
        replica(&proxy).await["probe"]["conclusion"].to_string().contains("bills per token")
    })
    .await;
    assert_eq!(reason(&proxy).await, "billed");
    let calls = fake.house.tally().calls;
    let paths: Vec<_> = calls.keys().map(String::as_str).collect();
    assert_eq!(paths, ["/v1/completions", "/v1/models"]);
}
