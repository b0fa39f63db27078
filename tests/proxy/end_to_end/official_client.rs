//! The official `openai` client for Python, direct and through the proxy: the same results.

use std::path::Path;
use std::process::Command;

use foretell::app::local;
use foretell_proxy::serving::drafters::Drafters;

use super::house::{FORCED, House, Setup};
use crate::wire::{EVENTS, Message, Server, chunk, ok};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// A server that answers every chat with a call of a tool.
fn tool_call(request: &Message) -> Vec<u8> {
    if request.head.target().0 == "GET" {
        return ok(
            "content-type: application/json\r\n",
            br#"{"object":"list","data":[{"id":"tools","object":"model"}]}"#,
        );
    }
    if request.json()["stream"] != true {
        let call = r#"{"id":"c","object":"chat.completion","created":1,"model":"tools","choices":[{"index":0,"finish_reason":"tool_calls","message":{"role":"assistant","content":null,"tool_calls":[{"id":"call_1","type":"function","function":{"name":"weather","arguments":"{\"city\": \"Bern\"}"}}]}}],"usage":{"prompt_tokens":9,"completion_tokens":7,"total_tokens":16}}"#;
        return ok("content-type: application/json\r\n", call.as_bytes());
    }
    let events = [
        r#"{"role":"assistant","content":null,"tool_calls":[{"index":0,"id":"call_1","type":"function","function":{"name":"weather","arguments":""}}]},"finish_reason":null"#,
        r#"{"tool_calls":[{"index":0,"function":{"arguments":"{\"city\""}}]},"finish_reason":null"#,
        r#"{"tool_calls":[{"index":0,"function":{"arguments":": \"Bern\"}"}}]},"finish_reason":null"#,
        r#"{},"finish_reason":"tool_calls""#,
    ];
    let mut answer = EVENTS.as_bytes().to_vec();
    for delta in events {
        let event = format!(
            "data: {{\"id\":\"c\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"tools\",\"choices\":[{{\"index\":0,\"delta\":{delta}}}]}}\n\n"
        );
        answer.extend(chunk(event.as_bytes()));
    }
    answer.extend(chunk(b"data: [DONE]\n\n"));
    answer.extend_from_slice(b"0\r\n\r\n");
    answer
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_official_python_client_sees_what_it_sees_without_a_proxy() {
    let packages = Path::new(ROOT).join(".cache/python");
    assert!(packages.join("openai").is_dir(), "the client is not there: `make test` fetches it");
    let house =
        House::build(Setup { methods: "[tree, fan_out]", policies: &[FORCED], ..Setup::default() }).await;
    let tools = Server::answering(|request| tool_call(&request)).await;
    let process =
        format!("version: 1\nbackends: [{{ name: tools, replicas: [\"http://{}\"] }}]\n", tools.address);
    let proxy = local::proxy_with(&process, &[FORCED], Drafters::default()).await.unwrap();
    let addresses = [house.target.address, house.front(), tools.address, proxy.gateway.addresses[0]];
    let mut command = Command::new(std::env::var("PYTHON").unwrap_or_else(|_| "python3".to_owned()));
    command.arg("tests/python/openai_client.py").current_dir(ROOT).env("PYTHONPATH", packages);
    command.args(addresses.map(|address| format!("http://{address}")));
    let out = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    let (said, wrong) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success(), "{said}\n{wrong}");
    House::assert_calm();
}
