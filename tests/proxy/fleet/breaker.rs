//! The circuit breaker of a replica: causes to open it, and ways to close it.

use std::sync::atomic::Ordering;

use foretell::app::Gateway;
use foretell_net::fleet::{BreakerState, HealthState, Load};

use serde_json::json;

use super::house::{self, Replica, Reply, answer, ask, metric};
use crate::client::get;
use crate::wire::{Message, Wire, post};

async fn tell(gateway: &Gateway, path: &str) -> Message {
    let request = format!("POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n");
    Wire::connect(gateway.admin.unwrap()).await.ask(request).await
}

async fn show(gateway: &Gateway, path: &str) -> Message {
    get(gateway.admin.unwrap(), path).await
}

#[tokio::test]
async fn server_errors_open_it_a_health_check_half_opens_it_and_work_closes_it() {
    let (mut replica, sick) = Replica::sick(500, "engine is dead").await;
    let other = Replica::saying("fine").await;
    let gateway = house::before(&[replica.address, other.address]).await;
    let broken = gateway.shared.fleet.replicas()[0].clone();
    while broken.breaker() == BreakerState::Closed {
        ask(&gateway, house::completion()).await;
    }
    let errors = metric(&gateway, "foretell_replica_errors_total{kind=\"server_error\",replica=\"b/0\"}");
    assert_eq!(errors, Some(5.0));
    assert_eq!(metric(&gateway, "foretell_replica_breaker_state{replica=\"b/0\"}"), Some(2.0));
    assert_eq!(broken.health_state(), HealthState::Broken);
    for _ in 0..30 {
        assert_eq!(ask(&gateway, house::completion()).await.text(), "fine");
    }
    // The health check is a call that costs the replica nothing.
    sick.store(false, Ordering::Relaxed);
    while replica.next().await.unwrap().head.target() != ("GET", "/health") {}
    while broken.breaker() == BreakerState::Open {
        tokio::task::yield_now().await;
    }
    while broken.breaker() != BreakerState::Closed {
        assert_eq!(ask(&gateway, house::completion()).await.head.status(), 200);
    }
    for state in ["open", "half_open", "closed"] {
        let line = format!("foretell_replica_breaker_transitions_total{{replica=\"b/0\",to=\"{state}\"}}");
        assert_eq!(metric(&gateway, &line), Some(1.0), "{state}");
    }
}

/// The metrics and the API agree on breaker state and reachability of the first replica.
async fn agrees(gateway: &Gateway) {
    let read = || {
        let state = metric(gateway, "foretell_replica_breaker_state{replica=\"b/0\"}").unwrap();
        (
            BreakerState::ALL[state as usize].name(),
            metric(gateway, "foretell_replica_up{replica=\"b/0\"}") == Some(1.0),
        )
    };
    loop {
        let before = read();
        let shown = show(gateway, "/api/replicas").await.json()["replicas"][0].clone();
        // A health check may run in between.
        if before == read() {
            assert_eq!((&shown["breaker"], &shown["up"]), (&json!(before.0), &json!(before.1)), "{shown}");
            return;
        }
    }
}

#[tokio::test]
async fn status_api_and_metrics_agree_on_an_outage() {
    let (replica, sick) = Replica::sick(500, "engine is dead").await;
    let gateway = house::before(&[replica.address]).await;
    let only = gateway.shared.fleet.replicas()[0].clone();
    let out = || async { show(&gateway, "/api/status").await.json()["out"].clone() };
    assert_eq!(out().await, json!([]));
    agrees(&gateway).await;
    while only.breaker() == BreakerState::Closed {
        ask(&gateway, house::completion()).await;
    }
    assert_eq!(out().await, json!(["b"]));
    agrees(&gateway).await;
    sick.store(false, Ordering::Relaxed);
    while only.breaker() != BreakerState::Closed {
        ask(&gateway, house::completion()).await;
        agrees(&gateway).await;
    }
    assert_eq!(out().await, json!([]));
    agrees(&gateway).await;
}

#[tokio::test]
async fn errors_of_the_client_never_open_it() {
    let refusals = [
        (400, "{}"),
        (404, "no such model"),
        (429, "later"),
        (500, "This model's maximum context length is 2048 tokens"),
        (500, "The decoder prompt (length 9000) is longer than the maximum model length"),
        (500, "exceeds max_model_len"),
        (501, "not here"),
    ];
    for (status, body) in refusals {
        let (replica, _) = Replica::sick(status, body).await;
        let gateway = house::before(&[replica.address]).await;
        let mut client = Wire::connect(gateway.addresses[0]).await;
        for _ in 0..200 {
            assert_eq!(client.ask(house::completion()).await.head.status(), status);
        }
        let replica = gateway.shared.fleet.replicas()[0].clone();
        assert_eq!(replica.health_state(), HealthState::Ready, "{status} {body}");
        assert!(replica.counters().errors.iter().all(|(_, count)| *count == 0), "{status} {body}");
    }
}

#[tokio::test]
async fn an_answer_that_breaks_off_counts_but_a_client_that_leaves_does_not() {
    let replica = Replica::start(|request| match request.head.target().1 {
        "/half" => Reply::Reset(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf".to_vec()),
        "/hold" => Reply::Hold,
        _ => Reply::Bytes(answer(200, "", "well")),
    })
    .await;
    let gateway = house::before(&[replica.address]).await;
    let only = gateway.shared.fleet.replicas()[0].clone();
    for _ in 0..20 {
        let mut client = Wire::connect(gateway.addresses[0]).await;
        client.send(post("/hold", "", b"{}")).await;
        while only.in_flight() == 0 {
            tokio::task::yield_now().await;
        }
        drop(client);
        while only.in_flight() > 0 {
            tokio::task::yield_now().await;
        }
    }
    assert_eq!(only.health_state(), HealthState::Ready);
    for _ in 0..5 {
        let mut client = Wire::connect(gateway.addresses[0]).await;
        client.send(post("/half", "", b"{}")).await;
        assert!(client.message().await.is_none());
    }
    assert_eq!(only.breaker(), BreakerState::Open);
    // The only replica is still tried.
    assert_eq!(ask(&gateway, house::completion()).await.text(), "well");
    assert_eq!(only.breaker(), BreakerState::Closed);
}

#[tokio::test]
async fn a_replica_that_recovers_is_found_without_a_request() {
    let mut replica = Replica::saying("first").await;
    let other = Replica::saying("other").await;
    let gateway = house::before(&[replica.address, other.address]).await;
    replica.kill().await;
    let first = gateway.shared.fleet.replicas()[0].clone();
    while first.is_up() {
        assert_eq!(ask(&gateway, house::completion()).await.head.status(), 200);
    }
    let mut again = Replica::at(replica.address, |_| Reply::Bytes(answer(404, "", "no such page"))).await;
    assert_eq!(again.next().await.unwrap().head.target(), ("GET", "/health"));
    assert_eq!(again.next().await.unwrap().head.target(), ("GET", "/v1/models"));
    while !first.is_up() {
        tokio::task::yield_now().await;
    }
    assert_eq!(first.health_state(), HealthState::Ready);
}

#[tokio::test]
async fn the_operator_takes_a_replica_out_and_in_again() {
    let (mut one, mut two) = (Replica::saying("one").await, Replica::saying("two").await);
    let gateway = house::before(&[one.address, two.address]).await;
    assert_eq!(tell(&gateway, "/api/replicas/0/disable").await.json()["state"], "disabled");
    for _ in 0..30 {
        assert_eq!(ask(&gateway, house::completion()).await.text(), "two");
    }
    let first = show(&gateway, "/api/replicas").await.json()["replicas"][0].clone();
    assert_eq!((first["name"].as_str(), first["state"].as_str()), (Some("b/0"), Some("disabled")));
    assert_eq!(tell(&gateway, "/api/replicas/0/enable").await.json()["state"], "ready");
    two.requests();
    while one.requests().is_empty() {
        ask(&gateway, house::completion()).await;
    }
    for (path, status) in [
        ("/api/replicas/b/0/disable", 200),
        ("/api/replicas/b/2/disable", 404),
        ("/api/replicas/2/disable", 404),
        ("/api/replicas/x/disable", 404),
        ("/api/replicas/0/eat", 404),
        ("/api/replicas/0/reprobe", 404),
    ] {
        assert_eq!(tell(&gateway, path).await.head.status(), status, "{path}");
    }
    assert_eq!(show(&gateway, "/api/replicas/0/disable").await.head.status(), 405);
}

#[tokio::test]
async fn the_load_that_an_engine_reports_is_shown() {
    let replica = Replica::saying("x").await;
    let gateway = house::before(&[replica.address]).await;
    let shown = show(&gateway, "/api/replicas").await.json()["replicas"][0].clone();
    assert_eq!(shown["load"], serde_json::Value::Null);
    let load = Load {
        running: 3,
        waiting: 2,
        limit: None,
        kv_usage: Some(0.25),
        verifying: 0,
        calls: 0,
        at: tokio::time::Instant::now(),
    };
    gateway.shared.fleet.replicas()[0].set_load(load);
    let shown = show(&gateway, "/api/replicas").await.json()["replicas"][0].clone();
    assert_eq!((&shown["name"], &shown["backend"]), (&"b/0".into(), &"b".into()));
    assert_eq!((&shown["breaker"], &shown["in_flight"]), (&"closed".into(), &0.into()));
    assert_eq!((&shown["load"]["running"], &shown["load"]["kv_usage"]), (&3.into(), &0.25.into()));
    assert_eq!(metric(&gateway, "foretell_replica_load{replica=\"b/0\",signal=\"waiting\"}"), Some(2.0));
    assert!(metric(&gateway, "foretell_replica_load_age_seconds{replica=\"b/0\"}").unwrap() >= 0.0);
    ask(&gateway, house::completion()).await;
    assert_eq!(metric(&gateway, "foretell_replica_connect_seconds_count{replica=\"b/0\"}"), Some(1.0));
}
