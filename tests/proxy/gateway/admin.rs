//! The operator's API.

use std::path::Path as File;
use std::time::Duration;

use foretell::admin::status;
use foretell::app::{self, Gateway, Running};
use foretell_config::load_policies;
use foretell_config::process;
use foretell_net::http::listen::Endpoint;
use foretell_observe::Finished;
use foretell_policy::Revision;
use foretell_proxy::gateway::{Settings, Shared, StartError};
use foretell_wire::openai::{Path, Route};
use serde_json::json;
use tokio_util::sync::CancellationToken;

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

/// Requests to other text APIs are shown as passthrough completions are: with model and reason.
#[tokio::test]
async fn responses_and_messages_show_in_metrics_sessions_and_sums_with_their_model() {
    let server = backend().await;
    let (gateway, address) = house::before(server.address).await;
    let mut client = Wire::connect(address).await;
    for (path, route) in [("/v1/responses", "responses"), ("/v1/messages", "messages")] {
        let body = br#"{"model":"m","input":"a very secret prompt","stream":false}"#;
        assert_eq!(client.ask(post(path, "", body)).await.head.status(), 200);
        let line = format!(
            "foretell_requests_total{{code_class=\"2xx\",model=\"m\",path=\"passthrough\",policy=\"\",reason=\"route\",route=\"{route}\"}} 1"
        );
        let metrics = get(&gateway, "/metrics").await.text();
        assert!(metrics.contains(&line), "{line}\n{metrics}");
        let sessions = get(&gateway, "/api/sessions").await;
        assert!(!sessions.text().contains("secret"));
        let newest = &sessions.json()["sessions"][0];
        assert_eq!(
            (&newest["route"], &newest["path"], &newest["reason"], &newest["model"]),
            (&json!(route), &json!("passthrough"), &json!("route"), &json!("m"))
        );
    }
    client.ask(post("/v1/embeddings", "", br#"{"model":"m","input":"x"}"#)).await;
    let metrics = get(&gateway, "/metrics").await.text();
    assert!(
        metrics.contains("model=\"\",path=\"passthrough\",policy=\"\",reason=\"route\",route=\"other\"} 1"),
        "{metrics}"
    );
    let sums = get(&gateway, "/api/status").await.json()["since_start"].clone();
    assert_eq!((&sums["completions"], &sums["other_requests"]), (&json!(2), &json!(1)), "{sums}");
    assert_eq!(
        (&sums["reasons"][0]["reason"], &sums["reasons"][0]["requests"]),
        (&json!("route"), &json!(2))
    );
}

#[tokio::test]
async fn a_passthrough_completion_shows_in_metrics_sessions_and_page_without_its_text() {
    let server = backend().await;
    let (gateway, address) = house::before(server.address).await;
    let mut client = Wire::connect(address).await;
    let body = br#"{"model":"m","prompt":"a very secret prompt"}"#;
    let answer = client.ask(post("/v1/completions", "x-request-id: r1\r\n", body)).await;
    assert_eq!(answer.head.get("x-foretell-reason"), Some("no_verify_method"));
    let metrics = get(&gateway, "/metrics").await.text();
    for line in [
        "foretell_requests_total{code_class=\"2xx\",model=\"\",path=\"passthrough\",policy=\"\",reason=\"no_verify_method\",route=\"completions\"} 1",
        "gen_ai_server_request_duration_seconds_count{path=\"passthrough\"} 1",
        "foretell_config_synchronized 1",
    ] {
        assert!(metrics.contains(line), "{line} is missing in\n{metrics}");
    }
    assert!(metrics.contains("foretell_replica_up{replica=\"b/0\"} 1"));
    let sessions = get(&gateway, "/api/sessions").await;
    let session = &sessions.json()["sessions"][0];
    assert_eq!(
        (&session["id"], &session["path"], &session["reason"]),
        (&json!("r1"), &json!("passthrough"), &json!("no_verify_method"))
    );
    assert_eq!(session["rounds"], json!([]));
    let status = get(&gateway, "/api/status").await;
    let sums = &status.json()["since_start"];
    assert_eq!(
        sums["reasons"],
        json!([{ "kind": "passthrough", "reason": "no_verify_method", "words": "the backend cannot verify drafts", "requests": 1 }])
    );
    assert_eq!((&sums["completions"], &sums["paths"]["passthrough"]), (&json!(1), &json!(1)));
    let one = get(&gateway, &format!("/api/sessions/{}", session["number"])).await;
    assert_eq!(&one.json(), session);
    for shown in [metrics, sessions.text(), status.text(), one.text()] {
        assert!(!shown.contains("secret"));
    }
    let replicas = get(&gateway, "/api/replicas").await.json();
    let replica = &replicas["replicas"][0];
    assert_eq!(
        (&replica["name"], &replica["up"], &replica["engine"]),
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
        r#"{"mode":"off","ttl":"18446744073709551615ms"}"#,
        "",
        r#"{"mode":"off","x":1}"#,
    ] {
        assert_eq!(tell(&gateway, "/api/mode", nonsense).await.head.status(), 400, "{nonsense}");
    }
}

/// A whole proxy in front of `server`, with a folder of policies.
async fn configured(server: &Server, policies: &File) -> Running {
    let text = format!(
        "version: 1\nlisten: [{{ address: '127.0.0.1:0' }}]\nadmin: {{ address: '127.0.0.1:0' }}\n\
         backends: [{{ name: b, replicas: ['http://{}'] }}]\npolicies: {{ dir: {} }}\n",
        server.address,
        policies.display()
    );
    let process = process::parse("f", &text).unwrap();
    let policies = load_policies(&process).unwrap();
    app::start(process, policies).await.unwrap()
}

#[tokio::test]
async fn readyz_names_an_outage_in_the_words_of_the_page() {
    let server = backend().await;
    let (gateway, address) = house::before(server.address).await;
    assert_eq!(get(&gateway, "/readyz").await.text(), "ready");
    drop(server);
    Wire::connect(address).await.ask(post("/v1/completions", "", b"{}")).await;
    let answer = get(&gateway, "/readyz").await;
    assert_eq!((answer.head.status(), answer.text()), (200, "ready; outage: b".to_owned()));
    assert_eq!(get(&gateway, "/api/status").await.json()["out"], json!(["b"]));
}

#[tokio::test]
async fn refused_files_are_reported_by_readyz_and_status() {
    let server = backend().await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a.yaml");
    std::fs::write(&file, "version: 1\nname: a\n").unwrap();
    let running = configured(&server, folder.path()).await;
    let gateway = &running.gateway;
    let ready = || async {
        let answer = get(gateway, "/readyz").await;
        (answer.head.status(), answer.text())
    };
    assert_eq!(ready().await, (200, "ready".to_owned()));
    std::fs::write(&file, "version: 1\nname: a\ngamma: { max: 99 }\n").unwrap();
    assert_eq!(tell(gateway, "/api/reload", "").await.head.status(), 422);
    assert_eq!(ready().await, (200, "ready; the configuration's files are not in force".to_owned()));
    assert_eq!(get(gateway, "/api/status").await.json()["synchronized"], false);
    std::fs::write(&file, "version: 1\nname: a\n").unwrap();
    assert_eq!(tell(gateway, "/api/reload", "").await.head.status(), 200);
    assert_eq!(ready().await, (200, "ready".to_owned()));
}

#[tokio::test]
async fn routes_that_the_configuration_allows_are_answered_and_the_rest_is_404() {
    let server = backend().await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a.yaml");
    let first = "version: 1\nname: a\n";
    std::fs::write(&file, first).unwrap();
    let running = configured(&server, folder.path()).await;
    let gateway = &running.gateway;
    let policies = get(gateway, "/api/policies").await.json();
    let revision = Revision::of(first.as_bytes()).to_string();
    let wanted =
        json!([{ "name": "a", "revision": revision, "mode": "auto", "synchronized": true, "compared": [] }]);
    assert_eq!(policies["policies"], wanted);

    std::fs::write(&file, "version: 1\nname: a\ngamma: { max: 99 }\n").unwrap();
    let refused = tell(gateway, "/api/reload", "").await;
    assert_eq!(refused.head.status(), 422);
    let message = "out of range, allowed 1 to 32, got 99";
    let error =
        json!({ "file": file.display().to_string(), "line": 3, "path": "gamma.max", "message": message });
    assert_eq!(refused.json(), json!({ "errors": [error] }));
    assert_eq!(get(gateway, "/api/policies").await.json()["policies"][0]["synchronized"], false);

    std::fs::write(&file, "version: 1\nname: b\n").unwrap();
    assert_eq!(tell(gateway, "/api/reload", "").await.json()["policies"][0]["name"], "b");
    assert!(get(gateway, "/api/replicas").await.json()["replicas"][0]["probe"]["conclusion"].is_string());
    assert_eq!(get(gateway, "/api/explain").await.head.status(), 405);
    assert_eq!(get(gateway, "/api/mode").await.head.status(), 405);

    let bare = house::start(house::settings(server.address)).await;
    assert_eq!(get(&bare, "/api/policies").await.head.status(), 404);
    for path in ["/api/reload", "/api/explain", "/api/replicas/0/reprobe"] {
        assert_eq!(tell(&bare, path, "{}").await.head.status(), 404, "{path}");
    }
}

#[tokio::test]
async fn a_request_is_explained_as_it_would_be_decided_now() {
    let server = backend().await;
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(
        folder.path().join("a.yaml"),
        "version: 1\nname: a\nmatch: { headers: { x-team: [ide] } }\n",
    )
    .unwrap();
    let running = configured(&server, folder.path()).await;
    let (gateway, address) = (&running.gateway, running.gateway.addresses[0]);
    let body = r#"{"model":"m","prompt":"p"}"#;
    let explained = tell(gateway, "/api/explain", body).await;
    assert_eq!(explained.head.status(), 200);
    let explained = explained.json();
    assert_eq!(
        (&explained["path"], &explained["reason"]),
        (&json!("passthrough"), &json!("no_verify_method")),
        "{explained}"
    );
    assert_eq!((&explained["facts_from"], &explained["backend"]), (&json!("proxy"), &json!("b")));
    assert_eq!(
        explained["policies"][0]["mismatches"],
        json!(["header x-team is none; this policy applies only to ide"])
    );
    let answer = Wire::connect(address).await.ask(post("/v1/completions", "", body.as_bytes())).await;
    assert_eq!(answer.head.get("x-foretell-reason"), Some("no_verify_method"), "the same");

    let ask = |query: &'static str, fields: &'static str, body: &'static str| async move {
        let call = post(&format!("/api/explain{query}"), fields, body.as_bytes()).replace_host();
        Wire::connect(gateway.admin.unwrap()).await.ask(call).await
    };
    let ours = ask("?route=chat&tenant=t%20u", "x-explain-x-team: ide\r\n", body).await.json();
    assert_eq!((&ours["route"], &ours["tenant"]), (&json!("chat"), &json!("t u")));
    assert_eq!(ours["policies"][0]["matches"], true);
    let off = ask("", "x-foretell: off\r\n", body).await.json();
    assert_eq!((&off["path"], &off["reason"]), (&json!("passthrough"), &json!("client")));
    let nothing = ask("", "", "no json").await.json();
    assert_eq!(
        (&nothing["reason"], &nothing["model"]),
        (&json!("no_verify_method"), &json!(null)),
        "the first step counts"
    );
    assert_eq!(
        (&nothing["steps"][4]["step"], &nothing["steps"][4]["reason"]),
        (&json!("body"), &json!("body"))
    );
    assert_eq!(ask("?route=x", "", body).await.head.status(), 400);
    assert_eq!(ask("", "origin: http://x\r\n", body).await.head.status(), 403);
}

#[tokio::test]
async fn an_open_admin_address_without_token_does_not_start() {
    let server = backend().await;
    let settings = Settings { admin: Some(([0, 0, 0, 0], 0).into()), ..house::settings(server.address) };
    let refused = Gateway::start(settings, None, None).await;
    assert!(matches!(refused, Err(StartError::AdminOpen(_))));
}

#[tokio::test]
async fn an_address_in_use_is_reported_with_the_setting_to_change() {
    let server = backend().await;
    let refused = |settings| async { Gateway::start(settings, None, None).await.err().unwrap().to_string() };
    let had = || Endpoint { address: server.address, tls: None };
    let clients = refused(Settings { listen: vec![had()], ..house::settings(server.address) }).await;
    assert!(clients.starts_with(&format!("cannot listen on {}: ", server.address)), "{clients}");
    assert!(clients.contains("--listen"), "{clients}");
    let admin = refused(Settings { admin: Some(server.address), ..house::settings(server.address) }).await;
    assert!(admin.contains("--admin") && !admin.contains("--listen"), "{admin}");
}

#[tokio::test]
async fn the_status_page_may_do_nothing_but_ask_this_listener() {
    let server = backend().await;
    let (gateway, _) = house::before(server.address).await;
    for (path, kind) in [("/", "text/html"), ("/style.css", "text/css"), ("/page.js", "text/javascript")] {
        let file = get(&gateway, path).await;
        let field = |name: &str| file.head.get(name).unwrap_or_default().to_owned();
        assert_eq!(field("content-type"), format!("{kind}; charset=utf-8"));
        assert_eq!(
            field("content-security-policy"),
            "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; \
             base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        );
        assert_eq!((&*field("x-content-type-options"), &*field("cache-control")), ("nosniff", "no-store"));
        assert_eq!(field("referrer-policy"), "no-referrer");
    }
    let api = get(&gateway, "/api/replicas").await;
    assert_eq!(api.head.get("x-content-type-options"), Some("nosniff"));
    assert_eq!(api.head.get("cache-control"), Some("no-store"));
    assert_eq!(get(&gateway, "/none.js").await.head.status(), 404);
    let own = format!("origin: http://{}\r\n", gateway.admin.unwrap());
    let asked = post("/api/mode", &own, br#"{"mode":"off"}"#);
    let named = |host: &str| String::from_utf8(asked.clone()).unwrap().replacen("host: api", host, 1);
    let admin = gateway.admin.unwrap();
    let strange = Wire::connect(admin).await.ask(named("host: localhost")).await;
    assert_eq!(strange.head.status(), 403, "another name is another origin");
    let same = Wire::connect(admin).await.ask(named(&format!("host: {admin}"))).await;
    assert_eq!((same.head.status(), &same.json()["mode"]), (200, &json!("off")));
}

#[tokio::test]
async fn the_pages_requests_are_small_and_nonsense_is_refused() {
    let server = backend().await;
    let (gateway, address) = house::before(server.address).await;
    for _ in 0..3 {
        Wire::connect(address).await.ask(post("/v1/completions", "", br#"{"model":"m","prompt":"p"}"#)).await;
    }
    let status = get(&gateway, "/api/status?after=0").await.json();
    assert_eq!((&status["sessions"], &status["samples"]), (&json!(3), &json!([])));
    assert_eq!((&status["unready"], &status["draining"]), (&json!(null), &json!(false)));
    let brief = get(&gateway, "/api/sessions?rounds=no").await.json();
    assert_eq!((&brief["sessions"][0]["number"], &brief["sessions"][2]["number"]), (&json!(3), &json!(1)));
    assert!(brief["sessions"][0].get("rounds").is_none());
    for (path, code) in [
        ("/api/status?after=", 400),
        ("/api/status?after=-1", 400),
        ("/api/status?since=1", 400),
        ("/api/sessions?rounds=yes", 400),
        ("/api/sessions/4", 404),
        ("/api/sessions/x", 404),
        ("/api/sessions/", 404),
    ] {
        assert_eq!(get(&gateway, path).await.head.status(), code, "{path}");
    }
    assert_eq!(tell(&gateway, "/api/status", "").await.head.status(), 405);
    assert_eq!(tell(&gateway, "/api/sessions/1", "").await.head.status(), 405);
    tell(&gateway, "/api/mode", r#"{"mode":"observe","backend":"b","ttl":"1h"}"#).await;
    let mode = &get(&gateway, "/api/status").await.json()["mode"];
    let of_b = &mode["backends"][0];
    assert_eq!((&mode["process"]["mode"], &of_b["name"]), (&json!("auto"), &json!("b")));
    assert_eq!((&of_b["mode"], &of_b["override"]["base"]), (&json!("observe"), &json!("auto")));
    assert!(of_b["override"]["ends_in_seconds"].as_f64().unwrap() > 3_000.0);
}

#[tokio::test(start_paused = true)]
async fn a_sample_is_taken_every_five_seconds() {
    let shared = Shared::new(&house::settings(([127, 0, 0, 1], 1).into())).unwrap();
    let stop = CancellationToken::new();
    let sampling = tokio::spawn(status::sample_until_stopped(shared.clone(), None, stop.clone()));
    let history = shared.observer.history();
    for number in 1..=4_u64 {
        let mut finished = Finished { route: Some(Route::Chat.into()), ..Finished::new(Path::Plain, "b") };
        finished.usage.output_tokens = 7;
        shared.observer.finish(finished);
        while history.after(number - 1).is_empty() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let sample = history.after(number - 1)[0];
        assert_eq!((sample.number, sample.completions, sample.tokens), (number, 1, 7));
        assert!((sample.seconds - 5.0).abs() < 0.2, "{sample:?}");
    }
    stop.cancel();
    sampling.await.unwrap();
}

#[tokio::test]
async fn a_metrics_listener_is_for_scrapers_and_probes_and_nothing_else() {
    let server = backend().await;
    let settings = Settings { metrics: Some(([127, 0, 0, 1], 0).into()), ..house::settings(server.address) };
    let gateway = house::start(settings).await;
    let ask = |path: &'static str| {
        let address = gateway.metrics.unwrap();
        async move { Wire::connect(address).await.ask(format!("GET {path} HTTP/1.1\r\nhost: m\r\n\r\n")).await }
    };
    assert!(ask("/metrics").await.text().contains("foretell_build_info"));
    assert_eq!(ask("/healthz").await.text(), "ok");
    assert_eq!(ask("/readyz").await.text(), "ready");
    assert_eq!(ask("/").await.head.status(), 404);
    assert_eq!(ask("/api/sessions").await.head.status(), 404);
    gateway.shared.life.drain();
    assert_eq!(ask("/healthz").await.head.status(), 200);
    assert_eq!(ask("/readyz").await.head.status(), 503);
}
