//! A gateway in front of an engine that bends every answer in one form.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value, json};

use super::forms::{Bend, Event, gzip};
use crate::wire::{Head, Message, Server, Wire, chunk};

/// The gateway, and the generations that clients' own prompts have cost behind it.
pub struct Gateway {
    pub address: SocketAddr,
    generations: Arc<AtomicUsize>,
    _server: Server,
}

impl Gateway {
    pub async fn before(engine: SocketAddr, bend: Bend) -> Self {
        let generations = Arc::new(AtomicUsize::new(0));
        let shared = Arc::clone(&generations);
        let server = Server::start(move |wire| serve(wire, engine, bend, Arc::clone(&shared))).await;
        Self { address: server.address, generations, _server: server }
    }

    /// First calls and resends so far: calls that carry a prompt as its client wrote it.
    pub fn generations(&self) -> usize {
        self.generations.load(Ordering::Relaxed)
    }
}

async fn serve(mut client: Wire, engine: SocketAddr, bend: Bend, generations: Arc<AtomicUsize>) {
    let Some(mut request) = client.message().await else { return };
    let is_completion = request.head.target().1.ends_with("/completions");
    let mut body: Value = serde_json::from_slice(&request.body).unwrap_or_default();
    if is_completion && (body["prompt"].is_string() || body["messages"].is_array()) {
        generations.fetch_add(1, Ordering::Relaxed);
    }
    let unknown = |known: &[&str]| -> Vec<String> {
        let names = body.as_object().into_iter().flatten().map(|(name, _)| name.clone());
        names.filter(|name| !known.contains(&name.as_str())).collect()
    };
    let mut gathered = false;
    match bend {
        Bend::Strict(status, known) if is_completion && !unknown(known).is_empty() => {
            let error = json!({"error": {"message": "unknown member", "code": status}}).to_string();
            let head = format!(
                "HTTP/1.1 {status} No\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{error}",
                error.len()
            );
            client.try_send(head).await;
            return;
        }
        Bend::Removes(known) if is_completion => {
            for name in unknown(known) {
                body.as_object_mut().unwrap().shift_remove(&name);
            }
            request.body = body.to_string().into_bytes();
        }
        Bend::NoStreams if is_completion && body["stream"] == true => {
            body["stream"] = false.into();
            body.as_object_mut().unwrap().shift_remove("stream_options");
            request.body = body.to_string().into_bytes();
            gathered = true;
        }
        _ => {}
    }
    let mut upstream = Wire::connect(engine).await;
    upstream.send(forwarded(&request)).await;
    let head = tokio::select! {
        head = upstream.head() => head,
        () = client.closed() => return,
    };
    let Some(head) = head else { return };
    let streams = head.get("content-type").is_some_and(|kind| kind.starts_with("text/event-stream"));
    if streams && is_completion && !gathered {
        return stream(&mut client, &mut upstream, head, bend).await;
    }
    let Some(Message { head, body, .. }) = upstream.body(head).await else { return };
    let (body, coding) = match bend {
        Bend::Compressed { json: true } if is_completion => (gzip(&body), "content-encoding: gzip\r\n"),
        _ => (body, ""),
    };
    let lines = lines(&head, &["content-length", "transfer-encoding", "connection"]);
    let head = format!(
        "{}\r\n{lines}{coding}content-length: {}\r\nconnection: close\r\n\r\n",
        head.line,
        body.len()
    );
    client.try_send([head.as_bytes(), &body].concat()).await;
}

fn forwarded(request: &Message) -> Vec<u8> {
    let lines = lines(&request.head, &["connection", "transfer-encoding", "content-length"]);
    let length = request.body.len();
    let head =
        format!("{}\r\n{lines}content-length: {length}\r\nconnection: close\r\n\r\n", request.head.line);
    [head.as_bytes(), &request.body].concat()
}

fn lines(head: &Head, without: &[&str]) -> String {
    let kept = head.fields.iter().filter(|(name, _)| !without.contains(&name.to_ascii_lowercase().as_str()));
    kept.fold(String::new(), |all, (name, value)| all + name + ": " + value + "\r\n")
}

/// Bends a stream. The engines of these tests send each event in a chunk of its own.
async fn stream(client: &mut Wire, upstream: &mut Wire, head: Head, bend: Bend) {
    let label = match bend {
        Bend::Label("") => String::new(),
        Bend::Label(kind) => format!("content-type: {kind}\r\n"),
        _ => "content-type: text/event-stream\r\n".to_owned(),
    };
    let coding = if matches!(bend, Bend::Compressed { .. }) { "content-encoding: gzip\r\n" } else { "" };
    let lines = lines(&head, &["content-type", "content-length", "transfer-encoding", "connection"]);
    let head = format!(
        "{}\r\n{lines}{label}{coding}transfer-encoding: chunked\r\nconnection: close\r\n\r\n",
        head.line
    );
    if !client.try_send(head).await {
        return;
    }
    let (mut at, mut all) = (0, Vec::new());
    loop {
        let bytes = tokio::select! {
            bytes = upstream.chunk() => bytes,
            () = client.closed() => return,
        };
        let Some(bytes) = bytes else { return };
        if bytes.is_empty() {
            break;
        }
        let bent = bent(bend, &mut at, &bytes);
        if matches!(bend, Bend::Compressed { .. }) {
            all.extend(bent);
        } else if !bent.is_empty() && !client.try_send(chunk(&bent)).await {
            return;
        }
    }
    if !all.is_empty() {
        client.try_send(chunk(&gzip(&all))).await;
    }
    client.try_send("0\r\n\r\n").await;
}

fn bent(bend: Bend, at: &mut usize, bytes: &[u8]) -> Vec<u8> {
    let text = String::from_utf8_lossy(bytes);
    let data = text.trim_end().strip_prefix("data:").map(str::trim_start);
    match (bend, data) {
        (Bend::NoDone, Some("[DONE]")) => Vec::new(),
        (Bend::Done(end), Some("[DONE]")) => end.as_bytes().to_vec(),
        (Bend::Bytes(change), _) => change(bytes),
        (Bend::Events(change), Some(data)) => {
            let Ok(event) = serde_json::from_str::<Value>(data) else { return bytes.to_vec() };
            let events = change(*at, &event);
            *at += 1;
            let written = events.into_iter().map(|event| match event {
                Event::Json(event) => format!("data: {event}\n\n"),
                Event::Raw(raw) => raw,
            });
            written.collect::<String>().into_bytes()
        }
        _ => bytes.to_vec(),
    }
}
