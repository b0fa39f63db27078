//! A client with one call at a time.

use std::net::SocketAddr;

use serde_json::Value;

use crate::wire::{Message, PATIENCE, Wire, post};

pub async fn call(address: SocketAddr, path: &str, body: &Value) -> Message {
    Wire::connect(address).await.ask(post(path, "", body.to_string().as_bytes())).await
}

/// The JSON of an answer that must be good.
pub async fn ask(address: SocketAddr, path: &str, body: Value) -> Value {
    let answer = call(address, path, &body).await;
    assert_eq!(answer.head.status(), 200, "{path} {body}: {}", answer.text());
    answer.json()
}

/// Status and message of a refusal.
pub async fn refusal(address: SocketAddr, path: &str, body: Value) -> (u16, String) {
    let answer = call(address, path, &body).await;
    (answer.head.status(), answer.text())
}

pub async fn get(address: SocketAddr, path: &str) -> Message {
    Wire::connect(address).await.ask(format!("GET {path} HTTP/1.1\r\nhost: api\r\n\r\n")).await
}

/// The payloads of all events.
pub async fn events(address: SocketAddr, path: &str, body: Value) -> Vec<String> {
    let answer = call(address, path, &body).await;
    assert_eq!(answer.head.status(), 200, "{}", answer.text());
    let text = answer.text();
    text.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).map(str::to_owned).collect()
}

/// The events that are JSON.
pub fn parsed(events: &[String]) -> Vec<Value> {
    events.iter().filter_map(|event| serde_json::from_str(event).ok()).collect()
}

pub fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap_or(&Vec::new()).iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// Waits for a condition that other tasks fulfil.
pub async fn until(comes: impl Fn() -> bool) {
    let wait = async {
        while !comes() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, wait).await.expect("it came in time");
}

/// The value in the first line that begins with `name`.
pub fn gauge<'a>(text: &'a str, name: &str) -> &'a str {
    let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("no {name}"));
    line.rsplit(' ').next().unwrap()
}
