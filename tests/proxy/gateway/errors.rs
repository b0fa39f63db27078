//! Every failure has a status and an error in the shape of the OpenAI API.

use std::time::Duration;

use foretell_proxy::gateway::Settings;

use super::house;
use crate::wire::{Message, Server, Wire, ok, post};

fn is_openai_error(answer: &Message, status: u16, code: &str) {
    assert_eq!(answer.head.status(), status, "{}", answer.text());
    let body = answer.json();
    let error = body["error"].as_object().expect("an error object");
    assert_eq!(error["code"], code);
    assert!(error["message"].as_str().is_some_and(|message| !message.is_empty()));
    assert!(error.contains_key("type") && error.contains_key("param"));
    assert_eq!(answer.head.get("content-type"), Some("application/json"));
}

async fn through(server: &Server, change: impl FnOnce(&mut Settings), request: impl AsRef<[u8]>) -> Message {
    let mut settings = house::settings(server.address);
    change(&mut settings);
    let gateway = house::start(settings).await;
    Wire::connect(gateway.addresses[0]).await.ask(request).await
}

async fn echo() -> Server {
    Server::answering(|request| ok("", &request.body)).await
}

#[tokio::test]
async fn a_backend_that_is_not_there_is_a_502() {
    let gone = echo().await.address;
    let (gateway, address) = house::before(gone).await;
    let answer = Wire::connect(address).await.ask(post("/v1/completions", "", b"{}")).await;
    is_openai_error(&answer, 502, "backend_unreachable");
    assert!(answer.text().contains(&format!("http://{gone}")), "{}", answer.text());
    assert_eq!(answer.head.get("x-foretell-path"), Some("passthrough"));
    let metrics = gateway.shared.observer.metrics().text();
    assert!(
        metrics.contains("foretell_replica_errors_total{kind=\"backend_unreachable\",replica=\"b/0\"} 1")
    );
    assert!(!gateway.shared.fleet.replicas()[0].is_up());
}

#[tokio::test]
async fn a_backend_that_hangs_up_without_an_answer_is_a_502() {
    let server = Server::start(|mut wire| async move {
        wire.message().await;
    })
    .await;
    let answer = through(&server, |_| {}, post("/v1/models", "", b"")).await;
    is_openai_error(&answer, 502, "backend_closed");
}

#[rstest::rstest]
#[case::no_http("220 mail.example ESMTP\r\n\r\n")]
#[case::switched_unasked("HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n")]
#[tokio::test]
async fn a_backend_of_another_protocol_is_a_502(#[case] says: &'static str) {
    let server = Server::answering(|_| says.as_bytes().to_vec()).await;
    let answer = through(&server, |_| {}, post("/v1/models", "", b"")).await;
    is_openai_error(&answer, 502, "backend_protocol");
}

#[tokio::test]
async fn no_first_byte_within_the_configured_time_is_a_504() {
    let server = Server::start(|mut wire| async move { wire.closed().await }).await;
    let quick = |settings: &mut Settings| settings.backends[0].first_byte = Some(Duration::from_millis(50));
    let answer = through(&server, quick, post("/v1/models", "", b"")).await;
    is_openai_error(&answer, 504, "backend_timeout");
}

#[tokio::test]
async fn a_body_above_the_passthrough_limit_is_a_413_with_and_without_a_declared_length() {
    let server = echo().await;
    let small = |settings: &mut Settings| settings.limits.passthrough_body = Some(10);
    let answer = through(&server, small, post("/v1/embeddings", "", b"12345678901")).await;
    is_openai_error(&answer, 413, "body_too_large");
    let chunked =
        "POST /v1/x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nb\r\n12345678901\r\n0\r\n\r\n";
    let answer = through(&server, small, chunked).await;
    is_openai_error(&answer, 413, "body_too_large");
    let answer = through(&server, small, post("/v1/embeddings", "", b"1234567890")).await;
    assert_eq!(answer.text(), "1234567890");
}

#[tokio::test]
async fn a_target_that_is_too_long_is_a_414() {
    let server = echo().await;
    let answer = through(&server, |_| {}, post(&format!("/{}", "a".repeat(8 << 10)), "", b"")).await;
    is_openai_error(&answer, 414, "uri_too_long");
    let answer = through(&server, |_| {}, post(&format!("/{}", "a".repeat((8 << 10) - 1)), "", b"")).await;
    assert_eq!(answer.head.status(), 200);
}

#[tokio::test]
async fn connect_is_a_405() {
    let server = echo().await;
    let answer = through(&server, |_| {}, "CONNECT example:443 HTTP/1.1\r\nhost: example:443\r\n\r\n").await;
    is_openai_error(&answer, 405, "method_not_allowed");
}

#[tokio::test]
async fn no_backend_at_all_is_a_502() {
    let server = echo().await;
    let answer =
        through(&server, |settings| settings.backends.clear(), post("/v1/completions", "", b"{}")).await;
    is_openai_error(&answer, 502, "no_backend");
}

#[tokio::test]
async fn a_chunk_size_that_is_no_number_breaks_the_request_off() {
    let server = echo().await;
    let broken = "POST /v1/x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\nab\r\n0\r\n\r\n";
    let answer = through(&server, |_| {}, broken).await;
    is_openai_error(&answer, 400, "bad_request_body");
}

#[tokio::test]
async fn an_answer_that_breaks_off_is_seen_to_break_off() {
    let server =
        Server::answering(|_| b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nonly this".to_vec()).await;
    let server = {
        let inner = server.address;
        // Closes as soon as its answer is sent.
        Server::start(move |mut wire| async move {
            let request = wire.message().await.unwrap();
            let mut asked = Wire::connect(inner).await;
            asked.send(post(request.head.target().1, "", b"")).await;
            let part = asked.exactly(46 + 2).await;
            wire.send(part).await;
        })
        .await
    };
    let (_gateway, address) = house::before(server.address).await;
    let mut client = Wire::connect(address).await;
    client.send(post("/v1/models", "", b"")).await;
    assert!(client.message().await.is_none(), "a cut answer looked whole");
}
