//! A client that compares: one request sent in four ways, and the parts of the answers that must
//! be equal.

use std::net::SocketAddr;

use foretell_wire::openai::Route;
use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::wire::{Message, Wire, post};

/// Speculates at every token, with drafts from the request's own text.
pub const FORCED: &str = "version: 1\nname: forced\ndrafters: [{ kind: prompt_lookup, ngram: { min: 1, max: 8 } }]\n\
    gamma: { max: 8, fixed: 4 }\n";

/// A policy whose requests are all plain, as the control group of one that speculates: the proxy
/// sends its own calls, and it continues an answer whose first call breaks off.
pub const CONTROL_GROUP: &str = "version: 1\nname: held\ndrafters: [{ kind: prompt_lookup, ngram: { min: 1, max: 8 } }]\n\
    gamma: { max: 8 }\nholdback: { start: 1, floor: 1 }\n";

/// The value of a series, or the sum of all series if the metric is named without labels.
pub async fn metric(address: SocketAddr, name: &str) -> f64 {
    let page = get(address, "/metrics").await.text();
    let (name, labels) = name.trim_end().split_once('{').unwrap_or((name.trim_end(), ""));
    let labels: Vec<&str> =
        labels.trim_end_matches('}').split(',').filter(|label| !label.is_empty()).collect();
    let of = |line: &str| {
        let (series, value) = line.rsplit_once(' ')?;
        let (found, has) = series.split_once('{').unwrap_or((series, ""));
        let has: Vec<&str> = has.trim_end_matches('}').split(',').collect();
        (found == name && labels.iter().all(|label| has.contains(label)))
            .then(|| value.parse::<f64>().ok())?
    };
    page.lines().filter_map(of).sum()
}

pub async fn get(address: SocketAddr, path: &str) -> Message {
    Wire::connect(address).await.ask(format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n")).await
}

pub async fn send(address: SocketAddr, path: &str, fields: &str, body: &Value) -> Message {
    let body = body.to_string();
    let fields = format!("{fields}content-length: {}", body.len());
    let request = format!("POST {path} HTTP/1.1\r\nhost: localhost\r\n{fields}\r\n\r\n{body}");
    Wire::connect(address).await.ask(request).await
}

/// A request of a client, independent of route and streaming.
#[derive(Clone, Debug)]
pub struct Ask {
    pub route: Route,
    pub stream: bool,
    pub fields: Value,
}

impl Ask {
    pub fn new(route: Route, stream: bool, fields: Value) -> Self {
        Self { route, stream, fields }
    }

    /// The same request, sent in all four ways.
    pub fn all(fields: &Value) -> Vec<Self> {
        let ways = [
            (Route::Completions, false),
            (Route::Completions, true),
            (Route::Chat, false),
            (Route::Chat, true),
        ];
        ways.into_iter().map(|(route, stream)| Self::new(route, stream, fields.clone())).collect()
    }

    pub fn body(&self) -> Value {
        let mut body = json!({"model": "toy", "stream": self.stream});
        let fields = body.as_object_mut().unwrap();
        if self.stream {
            fields.insert("stream_options".into(), json!({"include_usage": true}));
        }
        fields.extend(self.fields.as_object().unwrap().clone());
        let prompt = fields.shift_remove("prompt").unwrap();
        match self.route {
            Route::Completions => fields.insert("prompt".into(), prompt),
            Route::Chat => fields.insert("messages".into(), json!([{"role": "user", "content": prompt}])),
        };
        body
    }

    pub fn bytes(&self, fields: &str) -> Vec<u8> {
        post(self.route.path(), fields, self.body().to_string().as_bytes())
    }

    pub async fn send(&self, to: SocketAddr, fields: &str) -> Answer {
        Answer::read(self, Wire::connect(to).await.ask(self.bytes(fields)).await)
    }
}

/// The parts of an answer that a client can compare.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plain {
    pub status: u16,
    pub text: String,
    /// Text that a reasoning parser took out.
    pub thought: String,
    pub finish: String,
    /// `stop_reason` or `matched_stop` of the last choice that has one.
    pub stop: String,
    pub completion_tokens: u64,
    pub prompt_tokens: u64,
}

#[derive(Clone, Debug)]
pub struct Answer {
    pub plain: Plain,
    pub usage: Value,
    pub ids: Vec<u32>,
    pub prompt_ids: Vec<u32>,
    /// `logprobs` of all choices, their lists joined; null if there are none.
    pub logprobs: Value,
    told: Value,
    pub message: Message,
}

impl Answer {
    pub fn read(ask: &Ask, message: Message) -> Self {
        let values =
            if ask.stream && message.head.status() == 200 { events(&message) } else { vec![message.json()] };
        let mut plain = Plain { status: message.head.status(), ..Plain::default() };
        let (mut usage, mut ids, mut prompt_ids) = (Value::Null, Vec::new(), Vec::new());
        let mut logprobs = Value::Null;
        for value in &values {
            for choice in value["choices"].as_array().into_iter().flatten() {
                let texts = [&choice["text"], &choice["delta"]["content"], &choice["message"]["content"]];
                let said = if choice["delta"].is_object() { &choice["delta"] } else { &choice["message"] };
                let thoughts = [&said["reasoning"], &said["reasoning_content"]];
                plain.thought.extend(thoughts.iter().find_map(|thought| thought.as_str()));
                plain.text.extend(texts.iter().filter_map(|text| text.as_str()));
                if let Some(finish) = choice["finish_reason"].as_str() {
                    plain.finish.push_str(finish);
                }
                for name in ["stop_reason", "matched_stop"] {
                    plain.stop.push_str(&choice[name].to_string().replace("null", ""));
                }
                ids.extend(numbers(&choice["token_ids"]));
                join(&mut logprobs, &choice["logprobs"]);
                prompt_ids.extend(numbers(&choice["prompt_token_ids"]));
            }
            prompt_ids.extend(numbers(&value["prompt_token_ids"]));
            if value["usage"].is_object() {
                usage = value["usage"].clone();
            }
        }
        plain.completion_tokens = usage["completion_tokens"].as_u64().unwrap_or(u64::MAX);
        plain.prompt_tokens = usage["prompt_tokens"].as_u64().unwrap_or(u64::MAX);
        let told = told(&usage, &message);
        Self { plain, usage, ids, prompt_ids, logprobs, told, message }
    }

    /// Path and reason: from usage if the request was speculated on, else from header fields or
    /// trailers.
    pub fn foretell(&self) -> &Value {
        &self.told
    }
}

fn told(usage: &Value, message: &Message) -> Value {
    if usage["foretell"].is_object() {
        return usage["foretell"].clone();
    }
    let trailer = |name: &str| {
        let mut lines = message.trailers.iter().filter_map(|line| line.split_once(": "));
        lines.find_map(|(found, value)| (found == name).then_some(value))
    };
    let field = |name: &str| trailer(name).or(message.head.get(name));
    let path = match field("x-foretell-path") {
        Some("eligible" | "plain") => "plain",
        _ => return Value::Null,
    };
    json!({"path": path, "reason": field("x-foretell-reason"), "policy": field("x-foretell-policy"), "rounds": 0,
        "drafted": 0, "accepted": 0, "drift": {"charged": 0.0, "rate": 0.0, "substitutions": 0}})
}

/// Joins the lists of log-probabilities.
fn join(all: &mut Value, more: &Value) {
    for (name, list) in more.as_object().into_iter().flatten() {
        match all.get_mut(name).and_then(Value::as_array_mut) {
            Some(known) => known.extend(list.as_array().unwrap().iter().cloned()),
            None => all[name] = list.clone(),
        }
    }
}

fn numbers(value: &Value) -> Vec<u32> {
    value.as_array().into_iter().flatten().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// The events of a stream, which must end with `[DONE]`, or with an error and no `[DONE]`.
pub fn events(message: &Message) -> Vec<Value> {
    let text = message.text();
    let data = text.split("\n\n").filter(|event| !event.is_empty() && !event.starts_with(": "));
    let mut events: Vec<&str> =
        data.map(|event| event.strip_prefix("data:").expect("data").trim_start()).collect();
    let fails = events.last().is_some_and(|event| event.starts_with("{\"error\":"));
    assert!(fails || events.pop() == Some("[DONE]"), "{text}");
    events.iter().map(|event| serde_json::from_str(event).unwrap()).collect()
}

static PANICS: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Panics so far, in any thread.
pub fn panics() -> Vec<String> {
    PANICS.lock().clone()
}

/// A panic in any thread is a fault, whatever the client received, unless the test planted it.
pub fn watch_panics() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            let text = panic.to_string();
            if !text.contains("planted crash") {
                PANICS.lock().push(text);
                usual(panic);
            }
        }));
    });
}
