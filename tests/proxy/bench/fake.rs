//! A deterministic OpenAI server that streams, alone or with the reports of a Foretell in front.
//!
//! The "model" writes numbered words, so every output is known; `Behaviour` sets the faults.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use foretell::bench::client::Url;
use foretell_net::http::body::Body;
use foretell_net::http::connections::Connections;
use foretell_net::http::listen::{Bounds, Listening, Stop, serve};
use foretell_net::http::request::RequestBody;
use futures_util::{FutureExt, StreamExt};
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::Frame;
use hyper::{Request, Response};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tower::service_fn;

/// The only model that the fake lists.
pub const MODEL: &str = "fake-model";

/// Behaviour of a server.
#[derive(Clone, Debug, Default)]
pub struct Behaviour {
    /// Reports `usage.foretell` and streams two tokens per event, as a round does.
    pub speculates: bool,
    /// Writes other words than the other servers.
    pub lies: bool,
    /// Repeats the same words.
    pub loops: bool,
    /// Every request whose number is divisible by this fails.
    pub fails_every: Option<(usize, Fault)>,
    /// Has no `/tokenize` and no `/metrics`.
    pub bare: bool,
}

/// Ways in which a request fails.
#[derive(Clone, Copy, Debug)]
pub enum Fault {
    /// Status 500 with an OpenAI error.
    Status,
    /// The connection is closed in the middle of the stream.
    Cut,
    /// The stream ends cleanly before the answer is complete.
    Short,
}

/// A running server.
#[derive(Debug)]
pub struct Fake {
    pub url: Url,
    /// Bodies of all completion requests, in order.
    pub seen: Arc<Mutex<Vec<Value>>>,
    stop: Stop,
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.stop.accept.cancel();
        self.stop.cut.cancel();
    }
}

impl Fake {
    pub async fn start(behaviour: Behaviour) -> Self {
        let listener = TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0))).await.unwrap();
        let url = Url::from(listener.local_addr().unwrap());
        let (seen, stop) = (Arc::new(Mutex::new(Vec::new())), Stop::default());
        let (requests, pages) = (Arc::clone(&seen), Arc::new(AtomicUsize::new(0)));
        let app = service_fn(move |request| {
            answer(request, behaviour.clone(), Arc::clone(&requests), Arc::clone(&pages)).map(Ok)
        });
        let listening = Listening::new(Bounds::default(), Connections::new(1 << 10), stop.clone());
        tokio::spawn(serve(listener, app, listening));
        Self { url, seen, stop }
    }

    /// An address without a server.
    pub fn nobody(address: SocketAddr) -> Self {
        Self { url: address.into(), seen: Arc::default(), stop: Stop::default() }
    }
}

async fn answer(
    request: Request<RequestBody>,
    behaviour: Behaviour,
    seen: Arc<Mutex<Vec<Value>>>,
    pages: Arc<AtomicUsize>,
) -> Response<Body> {
    let path = request.uri().path().to_owned();
    let bytes = request.into_body().collect().await.unwrap().to_bytes();
    match path.as_str() {
        "/metrics" if !behaviour.bare => {
            whole(200, &metrics(pages.fetch_add(1, Ordering::Relaxed), &behaviour))
        }
        "/tokenize" if !behaviour.bare => {
            let body: Value = serde_json::from_slice(&bytes).unwrap();
            let words = body["prompt"].as_str().unwrap().split_whitespace();
            let ids: Vec<u32> =
                words.map(|word| word.bytes().fold(7, |h, b| h * 31 % 9973 + u32::from(b))).collect();
            whole(200, &json!({"count": ids.len(), "tokens": ids}).to_string())
        }
        "/v1/completions" | "/v1/chat/completions" => {
            let body: Value = serde_json::from_slice(&bytes).unwrap();
            let number = {
                let mut seen = seen.lock().unwrap();
                seen.push(body.clone());
                seen.len()
            };
            complete(&body, path.contains("chat"), number, &behaviour)
        }
        "/v1/models" => whole(200, &json!({"object": "list", "data": [{"id": MODEL}]}).to_string()),
        _ => whole(404, r#"{"error":{"message":"no such page"}}"#),
    }
}

fn complete(body: &Value, chat: bool, number: usize, behaviour: &Behaviour) -> Response<Body> {
    let fault =
        behaviour.fails_every.filter(|(every, _)| number.is_multiple_of(*every)).map(|(_, fault)| fault);
    if matches!(fault, Some(Fault::Status)) {
        return whole(500, r#"{"error":{"message":"out of slots","type":"server_error"}}"#);
    }
    let mut frames: Vec<Result<Frame<Bytes>, _>> =
        events(body, chat, behaviour).into_iter().map(|event| Ok(Frame::data(Bytes::from(event)))).collect();
    if fault.is_some() {
        frames.truncate(3);
    }
    // A pause before the cut, so that the bytes before it have been sent.
    let cut = async {
        tokio::task::yield_now().await;
        Err("cut".into())
    };
    let cut = futures_util::stream::iter(matches!(fault, Some(Fault::Cut)).then_some(cut)).then(|cut| cut);
    let body = StreamBody::new(futures_util::stream::iter(frames).chain(cut));
    Response::builder().header("content-type", "text/event-stream").body(Body::new(body)).unwrap()
}

/// The words of an answer: `max_tokens` of them, numbered from the prompt's length plus the seed.
pub fn words(body: &Value, behaviour: &Behaviour) -> Vec<String> {
    let prompt = body.get("prompt").or_else(|| body.get("messages")).unwrap().to_string();
    let start = prompt.len() as u64 * 100 + body["seed"].as_u64().unwrap_or(0) + u64::from(behaviour.lies);
    let every = if behaviour.loops { 4 } else { 1_000_000 };
    (0..body["max_tokens"].as_u64().unwrap_or(16)).map(|i| format!("w{} ", start + i % every)).collect()
}

fn events(body: &Value, chat: bool, behaviour: &Behaviour) -> Vec<String> {
    let words = words(body, behaviour);
    let ids = |run: &[String]| (0..run.len()).collect::<Vec<_>>();
    let wants_ids = body["return_token_ids"] == true;
    let mut events = Vec::new();
    let mut send = |value: Value| events.push(format!("data: {value}\n\n"));
    if chat {
        send(json!({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}));
    }
    let run = if behaviour.speculates { 2 } else { 1 };
    for run in words.chunks(run) {
        let text = run.concat();
        let mut choice = if chat {
            json!({"index": 0, "delta": {"content": text}, "finish_reason": null})
        } else {
            json!({"index": 0, "text": text, "finish_reason": null})
        };
        if wants_ids {
            choice["token_ids"] = json!(ids(run));
        }
        send(json!({"choices": [choice]}));
    }
    let end = if chat { json!({"delta": {}}) } else { json!({"text": ""}) };
    let mut choice = end;
    choice["finish_reason"] = "length".into();
    send(json!({"choices": [choice]}));
    if body["stream_options"]["include_usage"] == true {
        let mut usage = json!({"prompt_tokens": 5, "completion_tokens": words.len()});
        if behaviour.speculates {
            let rounds = words.len() / 2;
            usage["foretell"] = json!({"path": "speculated", "reason": null, "policy": "default@00000000",
                "rounds": rounds, "drafted": 3 * rounds, "accepted": rounds,
                "drift": {"charged": 0.0, "rate": 0.0, "substitutions": 0}});
        }
        send(json!({"choices": [], "usage": usage}));
    }
    events.push("data: [DONE]\n\n".into());
    events
}

/// Counters that grow with every scrape: a plain step is 10 ms, a verify run 12 ms, a draft 1 ms.
fn metrics(looks: usize, behaviour: &Behaviour) -> String {
    let times = looks as f64 + 1.0;
    let lines: &[(&str, f64)] = if behaviour.speculates {
        &[("foretell_draft_seconds%{drafter=\"model\"}", 0.001)]
    } else {
        &[
            ("foretell_target_step_seconds%{kind=\"decode\"}", 0.010),
            ("foretell_target_step_seconds%{kind=\"verify\"}", 0.012),
            ("foretell_target_step_seconds%{kind=\"prefill\"}", 0.030),
        ]
    };
    let mut page = String::new();
    for (name, seconds) in lines {
        for (part, value) in [("_sum", seconds * times), ("_count", times)] {
            page.push_str(&[name.replace('%', part), value.to_string()].join(" "));
            page.push('\n');
        }
    }
    page
}

fn whole(status: u16, text: &str) -> Response<Body> {
    let body = Full::new(Bytes::from(text.to_owned())).map_err(|never| match never {}).boxed_unsync();
    Response::builder().status(status).body(body).unwrap()
}
