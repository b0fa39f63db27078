//! Requests that reach the session runner, and their exchange.

use std::sync::Arc;

use foretell::app::Gateway;
use foretell_core::words::{Mode, PassthroughReason};
use foretell_net::fleet::{ModelName, ReplicaSettings};
use foretell_net::http::body::{Body, full};
use foretell_proxy::gateway::Settings;
use foretell_proxy::serving::exchange::{Client, Exchange, Serve};
use foretell_wire::openai::Control;
use futures_util::future::BoxFuture;
use http::Response;
use tokio::sync::mpsc;

use super::house;
use crate::wire::{Message, Server, Wire, ok, post};

const BODY: &[u8] = br#"{"model":"m","prompt":"p"}"#;
const SPACED: &[u8] = br#"{ "model" : "m" ,"prompt":"p"}"#;

/// Notes each exchange and answers by itself, or gives it back.
struct Noting(mpsc::UnboundedSender<Exchange>, bool);

impl Serve for Noting {
    fn serve(&self, exchange: Exchange) -> BoxFuture<'static, Response<Body>> {
        if self.1 {
            return Box::pin(exchange.decline(PassthroughReason::Fault));
        }
        self.0.send(exchange).unwrap();
        Box::pin(async { Response::new(full("driven")) })
    }
}

async fn gateway(
    server: &Server,
    give_back: bool,
    change: impl FnOnce(&mut Settings),
) -> (Gateway, mpsc::UnboundedReceiver<Exchange>) {
    let mut settings = house::settings(server.address);
    settings.backends[0].speculates = true;
    change(&mut settings);
    let (tell, seen) = mpsc::unbounded_channel();
    let serving: Option<Arc<dyn Serve>> = Some(Arc::new(Noting(tell, give_back)));
    (Gateway::start(settings, serving, None).await.unwrap(), seen)
}

async fn plain() -> Server {
    Server::answering(|request| ok("", &request.body)).await
}

async fn ask(gateway: &Gateway, fields: &str, body: &[u8]) -> Message {
    Wire::connect(gateway.addresses[0]).await.ask(post("/v1/completions", fields, body)).await
}

#[tokio::test]
async fn an_eligible_request_is_handed_over_with_all_that_belongs_to_it() {
    let server = plain().await;
    let (gateway, mut seen) = gateway(&server, false, |_| {}).await;
    let fields = "x-foretell: gamma=3\r\nx-request-id: r7\r\nte: trailers\r\nconnection: x-gone\r\nx-gone: 1\r\nx-kept: 1\r\n";
    let body = br#"{"model": "m",  "prompt": "p"}"#;
    assert_eq!(ask(&gateway, fields, body).await.text(), "driven");
    let exchange = seen.recv().await.unwrap();
    assert_eq!(&exchange.body[..], body);
    assert_eq!(
        exchange.client,
        Client {
            api: foretell_wire::openai::Route::Completions.into(),
            control: Some(Control::Gamma(3)),
            mode: Mode::Auto,
            tenant: None,
            trailers: true,
            may_use_corpus: true
        }
    );
    assert_eq!((exchange.request.model.as_str(), exchange.replica.backend()), ("m", "b"));
    assert_eq!(exchange.slot.record.so_far().id, "r7");
    let headers = &exchange.head.headers;
    assert_eq!(headers["x-request-id"], "r7");
    assert!(headers.contains_key("x-kept") && headers.contains_key("x-forwarded-for"));
    for gone in ["x-gone", "x-foretell", "connection"] {
        assert!(!headers.contains_key(gone), "{gone}");
    }
    let in_flight = || gateway.shared.observer.metrics().text().contains("foretell_requests_in_flight 1");
    assert!(in_flight());
    drop(exchange);
    assert!(!in_flight());
}

#[rstest::rstest]
#[case::not_json("", "{", "body")]
#[case::large_number("", r#"{"model":"m","k":18446744073709551616}"#, "body")]
#[case::encoded("content-encoding: gzip\r\n", r#"{"model":"m"}"#, "encoded")]
#[case::body("", r#"{"model":"m","prompt":"0123456789012345678901234567890123456789"}"#, "body")]
#[tokio::test]
async fn a_request_that_is_not_eligible_is_passed_through_with_its_reason(
    #[case] fields: &str,
    #[case] body: &str,
    #[case] reason: &str,
) {
    let server = plain().await;
    let (gateway, mut seen) = gateway(&server, false, |settings| settings.limits.speculate_body = 50).await;
    let answer = ask(&gateway, fields, body.as_bytes()).await;
    assert_eq!(answer.text(), body);
    assert_eq!(answer.head.get("x-foretell-path"), Some("passthrough"));
    assert_eq!(answer.head.get("x-foretell-reason"), Some(reason));
    assert!(seen.try_recv().is_err());
    let counted = format!("path=\"passthrough\",policy=\"\",reason=\"{reason}\",");
    assert!(gateway.shared.observer.metrics().text().contains(&counted));
}

#[tokio::test]
async fn beyond_the_limit_of_sessions_requests_are_passed_through_until_a_session_ends() {
    let server = plain().await;
    let (gateway, mut seen) = gateway(&server, false, |settings| settings.limits.sessions = 1).await;
    assert_eq!(ask(&gateway, "", BODY).await.text(), "driven");
    let first = seen.recv().await.unwrap();
    let second = ask(&gateway, "", BODY).await;
    assert_eq!(second.head.get("x-foretell-reason"), Some("sessions"));
    drop(first);
    assert_eq!(ask(&gateway, "", BODY).await.text(), "driven");
}

#[tokio::test]
async fn a_request_that_the_session_runner_gives_back_is_passed_through_unchanged() {
    let server = plain().await;
    let (gateway, _seen) = gateway(&server, true, |_| {}).await;
    let answer = ask(&gateway, "", SPACED).await;
    assert_eq!(answer.text(), std::str::from_utf8(SPACED).unwrap());
    assert_eq!(answer.head.get("x-foretell-reason"), Some("fault"));
    assert_eq!(answer.head.get("x-foretell-path"), Some("passthrough"));
}

struct Broken;

impl Serve for Broken {
    fn serve(&self, _exchange: Exchange) -> BoxFuture<'static, Response<Body>> {
        Box::pin(async { panic!("a planted fault") })
    }
}

#[tokio::test]
async fn a_session_runner_that_panics_costs_one_answer_and_nothing_else() {
    let server = plain().await;
    let mut settings = house::settings(server.address);
    settings.backends[0].speculates = true;
    let serving: Option<Arc<dyn Serve>> = Some(Arc::new(Broken));
    let gateway = Gateway::start(settings, serving, None).await.unwrap();
    let mut client = Wire::connect(gateway.addresses[0]).await;
    let answer = client.ask(post("/v1/completions", "", BODY)).await;
    assert_eq!(
        (answer.head.status(), &answer.json()["error"]["code"]),
        (500, &serde_json::json!("internal_error"))
    );
    assert_eq!(client.ask(post("/v1/embeddings", "", BODY)).await.head.status(), 200);
    assert!(gateway.shared.observer.metrics().text().contains("foretell_requests_in_flight 0"));
}

#[tokio::test]
async fn requests_go_to_the_backend_of_their_model_handed_over_or_passed_through() {
    let here = Server::answering(|_| ok("", b"here")).await;
    let there = Server::answering(|_| ok("", b"there")).await;
    let named = |name: &str, server: &Server, model: &str| ReplicaSettings {
        models: vec![ModelName { id: model.to_owned(), ..ModelName::default() }],
        ..ReplicaSettings::new(name, format!("http://{}", server.address))
    };
    let settings = Settings {
        backends: vec![named("one", &here, "m"), named("two", &there, "lora-*")],
        ..house::settings(here.address)
    };
    let gateway = house::start(settings).await;
    for (model, wanted) in [("m", "here"), ("lora-7", "there"), ("other", "here")] {
        let body = format!("{{\"model\":\"{model}\"}}");
        assert_eq!(ask(&gateway, "", body.as_bytes()).await.text(), wanted);
        let mut client = Wire::connect(gateway.addresses[0]).await;
        assert_eq!(client.ask(post("/v1/embeddings", "", body.as_bytes())).await.text(), wanted);
        // Clients write the model behind the messages, however long these are.
        let long = format!("{{\"prompt\":\"{}\",\"model\":\"{model}\"}}", "x".repeat(9 << 20));
        let fields = "content-type: application/json\r\n";
        assert_eq!(ask(&gateway, fields, long.as_bytes()).await.text(), wanted);
        assert_eq!(client.ask(post("/v1/embeddings", fields, long.as_bytes())).await.text(), wanted);
    }
}
