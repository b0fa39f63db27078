//! The operator's API.

use std::sync::Arc;

use foretell::admin::{FileError, Hooks};
use foretell::app::Gateway;
use foretell::gateway::StartError;
use foretell::gateway::{Brains, Settings};
use serde_json::{Value, json};

use super::house;
use crate::wire::{Message, Server, Wire, ok, post};

async fn backend() -> Server {
    Server::answering(|_| ok("", b"{}")).await
}

async fn get(gateway: &Gateway, path: &str) -> Message {
    let request = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n");
    Wire::connect(gateway.admin.unwrap()).await.ask(request).await
}

async fn tell(gateway: &Gateway, path: &str, body: &str) -> Message {
    let mut wire = Wire::connect(gateway.admin.unwrap()).await;
    wire.ask(post(path, "", body.as_bytes()).replace_host()).await
}

trait ReplaceHost {
    fn replace_host(self) -> Vec<u8>;
}

impl ReplaceHost for Vec<u8> {
    /// The admin listener answers to this machine's own names only.
    fn replace_host(self) -> Vec<u8> {
        String::from_utf8(self).unwrap().replacen("host: api", "host: localhost", 1).into_bytes()
    }
}

#[tokio::test]
async fn a_relayed_completion_shows_in_metrics_sessions_and_page_without_its_text() {
    let server = backend().await;
    let (gateway, address) = house::before(server.address).await;
    let mut client = Wire::connect(address).await;
    let body = br#"{"model":"m","prompt":"a very secret prompt"}"#;
    let answer = client.ask(post("/v1/completions", "x-request-id: r1\r\n", body)).await;
    assert_eq!(answer.head.get("x-foretell-reason"), Some("no_plan"));
    let metrics = get(&gateway, "/metrics").await.text();
    for line in [
        "foretell_requests_total{code_class=\"2xx\",model=\"\",path=\"bypassed\",policy=\"\",route=\"completions\"} 1",
        "foretell_bypass_total{reason=\"no_plan\"} 1",
        "gen_ai_server_request_duration_seconds_count{path=\"bypassed\"} 1",
        "foretell_config_synchronized 1",
    ] {
        assert!(metrics.contains(line), "{line} is missing in\n{metrics}");
    }
    assert!(metrics.contains("foretell_replica_up{replica=\"b/0\"} 1"));
    let sessions = get(&gateway, "/api/sessions").await;
    let session = &sessions.json()["sessions"][0];
    assert_eq!(
        (&session["id"], &session["path"], &session["reason"]),
        (&json!("r1"), &json!("bypassed"), &json!("no_plan"))
    );
    assert_eq!(session["rounds"], json!([]));
    let page = get(&gateway, "/").await.text();
    assert!(page.contains("r1"));
    for shown in [metrics, sessions.text(), page] {
        assert!(!shown.contains("secret"));
    }
    let replicas = get(&gateway, "/api/replicas").await.json();
    let replica = &replicas["replicas"][0];
    assert_eq!(
        (&replica["name"], &replica["up"], &replica["dialect"]),
        (&json!("b/0"), &json!(true), &json!("auto"))
    );
}

#[tokio::test]
async fn the_mode_is_switched_at_run_time_and_nonsense_is_refused() {
    let server = backend().await;
    let (gateway, address) = house::before(server.address).await;
    let done = tell(&gateway, "/api/mode", r#"{"mode":"off"}"#).await;
    assert_eq!((done.head.status(), &done.json()["mode"]), (200, &json!("off")));
    let answer = Wire::connect(address).await.ask(post("/v1/completions", "", b"{}")).await;
    assert_eq!(answer.head.get("x-foretell-reason"), Some("off"));
    let done = tell(&gateway, "/api/mode", r#"{"mode":"observe","backend":"b","ttl":"5m"}"#).await;
    assert_eq!(done.json()["mode"], "off", "the stricter mode wins");
    for nonsense in [
        r#"{"mode":"on"}"#,
        r#"{"mode":"off","backend":"who"}"#,
        r#"{"mode":"off","ttl":"5"}"#,
        "",
        r#"{"mode":"off","x":1}"#,
    ] {
        assert_eq!(tell(&gateway, "/api/mode", nonsense).await.head.status(), 400, "{nonsense}");
    }
}

struct Files;

impl Hooks for Files {
    fn policies(&self) -> Option<Value> {
        Some(json!([{ "name": "default", "revision": "12345678", "mode": "auto", "synchronized": true }]))
    }

    fn reload(&self) -> Option<Result<Value, Vec<FileError>>> {
        let error = FileError {
            file: "policies/a.yaml".to_owned(),
            line: 3,
            path: "gamma.max".to_owned(),
            message: "allowed 1..=32, got 99".to_owned(),
        };
        Some(Err(vec![error]))
    }

    fn replica(&self, _: &std::sync::Arc<foretell::fleet::Replica>) -> Option<Value> {
        Some(json!({ "epoch": "e1", "plans": ["tree"] }))
    }
}

#[tokio::test]
async fn what_the_configuration_can_answer_is_answered_and_the_rest_is_404() {
    let server = backend().await;
    let gateway = Gateway::start(house::settings(server.address), Brains::default(), Some(Arc::new(Files)))
        .await
        .unwrap();
    assert_eq!(get(&gateway, "/api/policies").await.json()["policies"][0]["revision"], "12345678");
    let refused = tell(&gateway, "/api/reload", "").await;
    assert_eq!(refused.head.status(), 422);
    let error = json!({ "file": "policies/a.yaml", "line": 3, "path": "gamma.max", "message": "allowed 1..=32, got 99" });
    assert_eq!(refused.json(), json!({ "errors": [error] }));
    assert_eq!(get(&gateway, "/api/replicas").await.json()["replicas"][0]["plans"], json!(["tree"]));
    assert_eq!(tell(&gateway, "/api/explain", "{}").await.head.status(), 404);
    assert_eq!(get(&gateway, "/api/mode").await.head.status(), 405);
    let bare = house::start(house::settings(server.address)).await;
    assert_eq!(get(&bare, "/api/policies").await.head.status(), 404);
}

#[tokio::test]
async fn with_a_token_everything_but_health_wants_it() {
    let server = backend().await;
    let settings = Settings {
        admin_token: Some("t0ken".to_owned()),
        admin_hosts: vec!["foretell.example".to_owned()],
        ..house::settings(server.address)
    };
    let gateway = house::start(settings).await;
    let ask = |fields: &'static str| {
        let admin = gateway.admin.unwrap();
        async move {
            let request = format!("GET /metrics HTTP/1.1\r\nhost: foretell.example\r\n{fields}\r\n");
            Wire::connect(admin).await.ask(request).await.head.status()
        }
    };
    assert_eq!(ask("").await, 401);
    assert_eq!(ask("authorization: Bearer wrong\r\n").await, 401);
    assert_eq!(ask("authorization: Bearer t0ken\r\n").await, 200);
    assert_eq!(get(&gateway, "/healthz").await.text(), "ok");
    assert_eq!(get(&gateway, "/readyz").await.text(), "ready");
}

#[tokio::test]
async fn an_open_admin_address_without_token_does_not_start() {
    let server = backend().await;
    let settings = Settings { admin: Some(([0, 0, 0, 0], 0).into()), ..house::settings(server.address) };
    let refused = Gateway::start(settings, Brains::default(), None).await;
    assert!(matches!(refused, Err(StartError::AdminOpen(_))));
}

#[tokio::test]
async fn pages_of_other_sites_cannot_reach_it() {
    let server = backend().await;
    let (gateway, _) = house::before(server.address).await;
    let admin = gateway.admin.unwrap();
    let rebound = Wire::connect(admin).await.ask("GET /metrics HTTP/1.1\r\nhost: evil.example\r\n\r\n").await;
    assert_eq!(rebound.head.status(), 401);
    let forged = post("/api/mode", "origin: http://evil.example\r\n", br#"{"mode":"off"}"#).replace_host();
    assert_eq!(Wire::connect(admin).await.ask(forged).await.head.status(), 403);
}

#[tokio::test]
async fn a_metrics_listener_shows_metrics_and_nothing_else() {
    let server = backend().await;
    let settings = Settings { metrics: Some(([127, 0, 0, 1], 0).into()), ..house::settings(server.address) };
    let gateway = house::start(settings).await;
    let ask = |path: &'static str| {
        let address = gateway.metrics.unwrap();
        async move { Wire::connect(address).await.ask(format!("GET {path} HTTP/1.1\r\nhost: m\r\n\r\n")).await }
    };
    assert!(ask("/metrics").await.text().contains("foretell_build_info"));
    assert_eq!(ask("/api/sessions").await.head.status(), 404);
}
