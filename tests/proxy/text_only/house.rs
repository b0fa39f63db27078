//! A fake, the proxy in front of it, and a client that compares.

use std::net::SocketAddr;

use foretell::app::Running;
use foretell::app::local;
use serde_json::{Value, json};

use crate::fakes::toy;
use crate::wire::{Message, Wire, post};

/// Speculates at every token, with drafts from the request's own text.
const FORCED: &str = "version: 1\nname: forced\ndrafters: [{ kind: prompt_lookup, ngram: { min: 1, max: 8 } }]\n\
    gamma: { max: 8, fixed: 4 }\n";

/// A proxy that speculates wherever it may. `more` are lines of the backend.
pub async fn before(backend: SocketAddr, more: &str) -> Running {
    let tokenizer = toy::folder();
    before_with(backend, &tokenizer.display().to_string(), more).await
}

pub async fn before_with(backend: SocketAddr, tokenizer: &str, more: &str) -> Running {
    let process = format!(
        "version: 1\nbackends:\n  - name: toy\n    replicas: [\"http://{backend}\"]\n    \
         models: [{{ id: \"*\", tokenizer: \"{tokenizer}\" }}]\n    probe: {{ when: never }}\n{more}"
    );
    local::proxy(&process, &[FORCED]).await.unwrap()
}

/// The parts of an answer that a client can compare.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plain {
    pub status: u16,
    pub text: String,
    pub finish: String,
    pub usage: Option<(u64, u64)>,
}

#[derive(Clone, Debug)]
pub struct Answer {
    pub plain: Plain,
    pub usage: Value,
    pub message: Message,
}

impl Answer {
    pub fn field(&self, name: &str) -> &str {
        self.message.head.get(name).unwrap_or_default()
    }
}

pub async fn ask(to: SocketAddr, path: &str, fields: &str, body: &Value) -> Answer {
    let message = Wire::connect(to).await.ask(post(path, fields, body.to_string().as_bytes())).await;
    let text = message.text();
    let values: Vec<Value> = if text.starts_with("data: ") {
        let events = text.split("\n\n").filter_map(|event| event.strip_prefix("data: "));
        events.filter(|event| *event != "[DONE]").map(|event| serde_json::from_str(event).unwrap()).collect()
    } else {
        vec![message.json()]
    };
    let mut plain = Plain { status: message.head.status(), ..Plain::default() };
    let mut usage = Value::Null;
    for value in &values {
        for choice in value["choices"].as_array().into_iter().flatten() {
            let positions = [&choice["text"], &choice["delta"]["content"], &choice["message"]["content"]];
            plain.text.extend(positions.iter().filter_map(|position| position.as_str()));
            plain.finish.push_str(choice["finish_reason"].as_str().unwrap_or_default());
        }
        if value["usage"].is_object() {
            usage = value["usage"].clone();
        }
    }
    plain.usage = usage["prompt_tokens"].as_u64().zip(usage["completion_tokens"].as_u64());
    Answer { plain, usage, message }
}

/// A completion with more fields.
pub fn completion(more: &Value) -> Value {
    let mut body = json!({"model": "toy", "max_tokens": 60, "temperature": 0});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

pub fn front(proxy: &Running) -> SocketAddr {
    proxy.gateway.addresses[0]
}

pub async fn metric(proxy: &Running, line: &str) -> f64 {
    crate::client::metric(proxy.gateway.admin.unwrap(), line).await
}
