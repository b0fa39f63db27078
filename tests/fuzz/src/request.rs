//! A client's body: its eligibility, its parsing and its forwarding.
//!
//! Input: route and dialect, one byte each; then the body. An eligible body must be read as by the
//! ordinary parser; the body sent to the server must be the client's except for the fields that
//! Foretell adds. The body is also a request of the Messages and the Responses API, and its lines
//! are the data of the chat's events that answer it.

use foretell_engines::{Dialect, Engine, PromptStep};
use foretell_proxy::gateway::route::model_of;
use foretell_wire::anthropic::{self, System};
use foretell_wire::openai::{Judgement, Request, Route, judge, parsed_bytes, understand};
use foretell_wire::responses;
use foretell_wire::translation::{Events, Stream, Thinking};
use serde_json::{Value, json};

use crate::bytes::Bytes;

/// Maximum size of an input, bytes.
const MAX_LEN: usize = 64 << 10;
/// Fields of a request that the first call sets.
const SET: [&str; 4] = ["stream", "stream_options", "prediction", "seed"];

/// Runs one input.
pub fn run(input: &[u8]) {
    if input.len() > MAX_LEN {
        return;
    }
    let mut input = Bytes(input);
    let route = input.one(&[Route::Completions, Route::Chat]);
    let dialect = input.one(&Dialect::ALL);
    let body = input.0;
    if understand(route, body).is_some_and(|(request, _)| request.body.iter().any(is_private)) {
        return;
    }
    let read: Option<Value> = serde_json::from_slice(body).ok();
    translated(read.as_ref().unwrap_or(&Value::Null), body);
    strictly(route, body, read.as_ref());
    match judge(route, body) {
        Judgement::Eligible(request) => eligible(&request, body, read.as_ref(), dialect),
        Judgement::Passthrough { .. } => {
            if let Some((_, findings)) = understand(route, body) {
                assert!(findings.iter().any(|finding| finding.refused.is_some()));
            }
        }
    }
}

/// A translated request is a chat, and a stream has one end, whatever the engine sends.
fn translated(request: &Value, body: &[u8]) {
    let text = String::from_utf8_lossy(body);
    if let Ok(chat) = anthropic::translate(request, System::Merged, Thinking::Effort) {
        assert!(chat["messages"].is_array());
    }
    let asked = responses::translate(request, Thinking::Template).map(|(chat, asked)| {
        assert!(chat["messages"].as_array().is_some_and(|messages| !messages.is_empty()));
        asked
    });
    let any = || responses::translate(&json!({"input": "x"}), Thinking::Effort).unwrap().1;
    let stream = responses::Events::stream(asked.unwrap_or_else(|_| any()), 1);
    ends_once(stream, &text, &["response.completed", "response.incomplete", "response.failed"]);
    ends_once(anthropic::Events::stream(1), &text, &["message_stop", "error"]);
}

fn ends_once(mut stream: Stream<impl Events>, text: &str, ends: &[&str]) {
    let mut out = Vec::new();
    text.lines().for_each(|data| stream.push(data, &mut out));
    stream.cut(&mut out);
    let out = String::from_utf8(out).unwrap();
    let names: Vec<&str> = out.lines().filter_map(|line| line.strip_prefix("event: ")).collect();
    let at: Vec<usize> = (0..names.len()).filter(|at| ends.contains(&names[*at])).collect();
    assert_eq!(at, [names.len() - 1], "{names:?}");
}

/// True if a name here or below is one that the ordinary parser reads as one of its private values,
/// and ours does not.
fn is_private((name, value): (&String, &Value)) -> bool {
    fn below(value: &Value) -> bool {
        match value {
            Value::Array(items) => items.iter().any(below),
            Value::Object(members) => members.iter().any(is_private),
            _ => false,
        }
    }
    name.starts_with("$serde_json::private::") || below(value)
}

/// A body that our parser accepts is read the same by the ordinary one, and is no larger than
/// estimated.
fn strictly(route: Route, body: &[u8], read: Option<&Value>) {
    let Some((request, _)) = understand(route, body) else { return };
    assert_eq!(Some(&request.body), read.and_then(Value::as_object));
    let held: usize = request.body.values().map(held).sum();
    assert!(held <= parsed_bytes(body), "{held} > {}", parsed_bytes(body));
}

/// Heap size of a value, bytes.
fn held(value: &Value) -> usize {
    match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
        Value::String(text) => text.len(),
        Value::Array(items) => items.capacity() * size_of::<Value>() + items.iter().map(held).sum::<usize>(),
        Value::Object(members) => {
            let entry = size_of::<usize>() + size_of::<String>() + size_of::<Value>();
            members.len() * entry
                + members.iter().map(|(name, value)| name.len() + held(value)).sum::<usize>()
        }
    }
}

fn eligible(request: &Request, body: &[u8], read: Option<&Value>, dialect: Dialect) {
    let members = read.and_then(Value::as_object).expect("what is eligible is an object");
    assert_eq!(&request.body, members);
    assert_eq!(members.get("model").and_then(Value::as_str), Some(request.model.as_str()));
    assert_eq!(model_of(body).as_deref(), Some(request.model.as_str()));
    assert_eq!(members.get("stream").and_then(Value::as_bool).unwrap_or(false), request.stream);
    let sampling = &request.sampling;
    let finite = [sampling.temperature, sampling.top_p, sampling.min_p, sampling.presence_penalty];
    assert!(finite.iter().all(|value| value.is_finite()) && sampling.temperature >= 0.0, "{sampling:?}");
    let engine = Engine { context: Some(2048), ..Engine::new(dialect, "m", "1.0") };
    let (sampling, settled) = engine.sampling(request);
    let _ = (engine.methods_for(request, &sampling, settled), engine.limit(request));
    sent(&engine, request);
}

/// The first call carries every client field that Foretell does not set.
fn sent(engine: &Engine, request: &Request) {
    let call = engine.first_request(request, 7);
    let sent: Value = serde_json::from_slice(&call.body).expect("a call is JSON");
    if call.path != request.route.path() {
        return;
    }
    for (name, value) in request.body.iter().filter(|(name, _)| !SET.contains(&name.as_str())) {
        assert_eq!(sent.get(name), Some(value), "{name}");
    }
    if let (Some(seed), Some(sent)) = (request.body.get("seed"), sent.get("seed")) {
        assert!(seed.is_null() || seed == sent, "the client's own seed");
    }
    if let Ok(PromptStep::Call(call)) = engine.prompt_step(request, None) {
        assert!(serde_json::from_slice::<Value>(&call.body).is_ok(), "a call is JSON");
    }
}
