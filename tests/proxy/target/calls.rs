//! Chats whose tool calls the server parses.

use std::sync::Arc;

use foretell_onnx::target::hugging::FolderWords;
use foretell_onnx::target::metrics::Metrics;
use foretell_onnx::target::scheduler::Engine;
use foretell_onnx::target::server::App;
use foretell_parsers::parse::{Parsers, ToolFormat};
use serde_json::json;

use super::client::{Server, choices, serve_app};
use super::fake::Watch;
use crate::end_to_end::model::{self, Babble};

const CALL: &str = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Bern\"}}\n</tool_call>";

/// A server whose model writes the call, and the last token of it that is not there before.
async fn calling() -> (Server, u32) {
    let folder = tempfile::tempdir().unwrap();
    let tokenizer = model::words(folder.path());
    let script = tokenizer.encode(CALL, false).unwrap();
    let (_, &last) = script.iter().enumerate().rfind(|&(at, token)| !script[..at].contains(token)).unwrap();
    let after = tokenizer.id("<|assistant|>").unwrap();
    let babble = Babble::new(&tokenizer, 4096, 2).with_script(after, script);
    let metrics = Arc::new(Metrics::new().unwrap());
    let engine = Engine::start(Box::new(babble), Arc::clone(&metrics)).unwrap();
    let words = Arc::new(FolderWords::read(folder.path()).unwrap());
    let parsers = Parsers { tools: Some(ToolFormat::Hermes), reasoning: None };
    let app = App::new("toy".into(), engine, words, metrics).with_parsers(parsers).unwrap();
    (serve_app(app, Watch::default()).await, last)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_output_that_stops_with_a_call_ends_by_it_whatever_stopped_it() {
    let (server, last) = calling().await;
    let tool = json!({"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}});
    for (more, finish) in [
        (json!({}), "tool_calls"),
        (json!({"stop": "</tool_call>"}), "tool_calls"),
        (json!({"stop_token_ids": [last]}), "tool_calls"),
        (json!({"max_tokens": 60}), "length"),
    ] {
        let mut body = json!({"messages": [{"role": "user", "content": "Go on."}], "temperature": 0,
            "max_tokens": 400, "stream": true, "tools": [tool]});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let events = server.stream("/v1/chat/completions", &body).await;
        assert_eq!(choices(&events, 0).last().unwrap()["finish_reason"], finish, "{more}");
        assert!(choices(&events, 0).any(|choice| choice["delta"]["tool_calls"].is_array()), "{more}");
        // A call whose arguments are cut is one in a stream alone, as with vLLM.
        if more.get("stop_token_ids").is_none() && finish == "tool_calls" {
            body["stream"] = json!(false);
            let whole = server.ask("/v1/chat/completions", &body).await;
            assert_eq!(whole["choices"][0]["finish_reason"], finish, "{more}");
        }
    }
}
