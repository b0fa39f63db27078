//! The first call to vLLM is aborted by its id, so that vLLM reports its usage.

use std::net::SocketAddr;

use foretell::app::local;
use serde_json::{Value, json};

use crate::client::{FORCED, send};
use crate::fakes::http::Request;
use crate::fakes::vllm::{Options, Vllm};
use crate::fakes::{Fake, toy};
use crate::wire::Message;

const ABORT: &str = "/inference/v1/abort_requests";
const CHAT: &str = "/v1/chat/completions";

/// With every option that is needed for counts of cached tokens.
fn told() -> Options {
    Options { prompt_tokens_details: true, scale_out: true, ..Options::of("0.33.0") }
}

async fn server(options: Options) -> Fake<Vllm> {
    let server = Fake::start(Vllm::new(options)).await;
    server.house.keep_requests();
    server
}

async fn before(address: SocketAddr) -> foretell::app::Running {
    let tokenizer = toy::folder().join("tokenizer.json").display().to_string();
    let process = format!(
        "version: 1\ntimeouts: {{ verify: 10s }}\nbackends:\n  - name: toy\n    replicas: [\"http://{address}\"]\n    \
         models: [{{ id: \"*\", tokenizer: {tokenizer} }}]\n    probe: {{ when: never }}\n"
    );
    local::proxy(&process, &[&format!("{FORCED}holdback: {{ start: 0, floor: 0 }}\n")]).await.unwrap()
}

async fn ask(address: SocketAddr, fields: &str) -> Message {
    let body = json!({"model": "toy", "temperature": 0, "max_tokens": 40, "presence_penalty": 0, "frequency_penalty": 0,
        "messages": [{"role": "user", "content": "one two three one two three one two"}]});
    let answer = send(address, CHAT, fields, &body).await;
    assert_eq!(answer.json()["usage"]["foretell"]["path"], "speculated", "{}", answer.text());
    answer
}

fn of<'a>(requests: &'a [Request], path: &str) -> Vec<&'a Request> {
    requests.iter().filter(|request| request.path == path).collect()
}

/// Clients may use one id twice, and the engine aborts all that have it.
#[tokio::test]
async fn the_aborted_id_is_unique() {
    let server = server(told()).await;
    let proxy = before(server.address).await;
    let answer = ask(proxy.gateway.addresses[0], "x-request-id: mine\r\n").await;
    assert_eq!(answer.head.get("x-request-id"), Some("mine"));
    assert_eq!(answer.json()["id"], "chatcmpl-mine");
    assert!(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"].is_u64(), "{}", answer.text());
    let requests = server.house.take_requests();
    let [first] = of(&requests, CHAT)[..] else { panic!("one first call") };
    let id = first.get("x-request-id").unwrap();
    assert!(id.starts_with("mine-") && id.len() == "mine-".len() + 16, "{id}");
    let [abort] = of(&requests, ABORT)[..] else { panic!("one abort") };
    assert_eq!(abort.json().unwrap(), json!({"request_ids": [format!("chatcmpl-{id}")]}));
}

#[tokio::test]
async fn without_cached_token_counts_only_the_first_request_is_aborted() {
    let server = server(Options { prompt_tokens_details: false, ..told() }).await;
    let proxy = before(server.address).await;
    for _ in 0..3 {
        let answer = ask(proxy.gateway.addresses[0], "x-request-id: mine\r\n").await;
        assert_eq!(answer.json()["usage"]["prompt_tokens_details"], Value::Null);
    }
    let requests = server.house.take_requests();
    assert_eq!(of(&requests, ABORT).len(), 1);
    let last = of(&requests, CHAT).last().unwrap().get("x-request-id");
    assert_eq!(last, Some("mine"));
}

#[tokio::test]
async fn a_server_without_the_call_is_not_asked_for_it() {
    let server = server(Options { scale_out: false, ..told() }).await;
    let proxy = before(server.address).await;
    let answer = ask(proxy.gateway.addresses[0], "x-request-id: mine\r\n").await;
    assert_eq!(answer.json()["usage"]["prompt_tokens_details"], Value::Null);
    assert!(of(&server.house.take_requests(), ABORT).is_empty());
}

/// A gateway in between that sets request ids may give one id to several: then none is aborted by
/// id.
#[tokio::test]
async fn an_answer_with_another_id_is_not_aborted_by_id() {
    let server = server(Options { renamed: true, ..told() }).await;
    let proxy = before(server.address).await;
    ask(proxy.gateway.addresses[0], "x-request-id: mine\r\n").await;
    assert!(of(&server.house.take_requests(), ABORT).is_empty());
}
