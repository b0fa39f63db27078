//! The forms in which gateways and engines bend the answers to every request, each after a public
//! report, or of the kind of one.

use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};

/// A form.
#[derive(Clone, Copy)]
pub struct Form {
    pub name: &'static str,
    pub bend: Bend,
    /// Reports of it, or of its kind.
    pub from: &'static str,
}

/// The effect of a form.
#[derive(Clone, Copy)]
pub enum Bend {
    /// To the event of this number from 0: the events to send in its place.
    Events(fn(usize, &Value) -> Vec<Event>),
    /// To the bytes of a stream's event.
    Bytes(fn(&[u8]) -> Vec<u8>),
    /// The `content-type` of streams; none if empty.
    Label(&'static str),
    /// Answers are compressed, JSON too or not.
    Compressed { json: bool },
    /// A stream is answered by one JSON document.
    NoStreams,
    /// Requests with members that are not in this list are refused with this status.
    Strict(u16, &'static [&'static str]),
    /// Members of requests that are not in this list are removed.
    Removes(&'static [&'static str]),
    /// The end of streams has no `[DONE]`.
    NoDone,
    /// The end of streams, in place of `[DONE]`.
    Done(&'static str),
}

/// An event of a bent stream.
pub enum Event {
    Json(Value),
    /// Bytes of an event, with its blank line.
    Raw(String),
}

/// The members that the clients of these tests send.
const CLIENTS: &[&str] = &[
    "model",
    "prompt",
    "messages",
    "max_tokens",
    "temperature",
    "stream",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "stream_options",
];

fn raw(text: &str) -> Event {
    Event::Raw(format!("{text}\n\n"))
}

fn same(event: &Value) -> Event {
    Event::Json(event.clone())
}

/// These events in front of the first one.
fn opened(at: usize, event: &Value, first: Vec<Event>) -> Vec<Event> {
    let mut all = if at == 0 { first } else { Vec::new() };
    all.push(same(event));
    all
}

/// These events in front of the third one.
fn amid(at: usize, event: &Value, these: Vec<Event>) -> Vec<Event> {
    let mut all = if at == 2 { these } else { Vec::new() };
    all.push(same(event));
    all
}

fn with(event: &Value, name: &str, value: Value) -> Value {
    let mut event = event.clone();
    event[name] = value;
    event
}

/// The event with its choices changed.
fn chosen(event: &Value, change: impl Fn(&mut Value)) -> Vec<Event> {
    let mut event = event.clone();
    event["choices"].as_array_mut().into_iter().flatten().for_each(change);
    vec![Event::Json(event)]
}

/// The finish reason of events that have none.
fn unfinished(event: &Value, reason: &Value) -> Vec<Event> {
    chosen(event, |choice| {
        if choice["finish_reason"].is_null() {
            choice["finish_reason"] = reason.clone();
        }
    })
}

fn is_usage(event: &Value) -> bool {
    event["choices"].as_array().is_some_and(Vec::is_empty) && event["usage"].is_object()
}

const fn form(name: &'static str, from: &'static str, bend: Bend) -> Form {
    Form { name, bend, from }
}

pub const FORMS: &[Form] = &[
    form(
        "empty choices first",
        "meilisearch#6477, llmeter#34",
        Bend::Events(|at, event| opened(at, event, vec![Event::Json(with(event, "choices", json!([])))])),
    ),
    form(
        "a first event as of Azure",
        "mentat#429, litellm#27971",
        Bend::Events(|at, event| {
            let azure = json!({"choices": [], "created": 0, "id": "", "model": "", "object": "",
            "prompt_filter_results": [{"prompt_index": 0, "content_filter_results": {}}]});
            opened(at, event, vec![Event::Json(azure)])
        }),
    ),
    form(
        "a ping first",
        "litellm#27971",
        Bend::Events(|at, event| opened(at, event, vec![raw(r#"data: {"type":"ping"}"#)])),
    ),
    form(
        "a ping at every event",
        "fleet heartbeats",
        Bend::Events(|_, event| vec![raw(r#"data: {"type":"ping"}"#), same(event)]),
    ),
    form(
        "a named ping amid",
        "anthropic style",
        Bend::Events(|at, event| amid(at, event, vec![raw("event: ping\ndata: {\"type\": \"ping\"}")])),
    ),
    form("empty data first", "Portkey#1629", Bend::Events(|at, event| opened(at, event, vec![raw("data:")]))),
    form("empty data amid", "Portkey#1629", Bend::Events(|at, event| amid(at, event, vec![raw("data: ")]))),
    form(
        "an empty object first",
        "Portkey#1629",
        Bend::Events(|at, event| opened(at, event, vec![raw("data: {}")])),
    ),
    form("null first", "Portkey#1629", Bend::Events(|at, event| opened(at, event, vec![raw("data: null")]))),
    form("null amid", "Portkey#1629", Bend::Events(|at, event| amid(at, event, vec![raw("data: null")]))),
    form(
        "a number and a list first",
        "of this kind",
        Bend::Events(|at, event| {
            opened(at, event, vec![raw("data: 7"), raw("data: []"), raw("data: \"[DONE]\"")])
        }),
    ),
    form(
        "a word first",
        "heartbeats as data",
        Bend::Events(|at, event| opened(at, event, vec![raw("data: heartbeat")])),
    ),
    form(
        "null choices first",
        "of this kind",
        Bend::Events(|at, event| opened(at, event, vec![Event::Json(with(event, "choices", Value::Null))])),
    ),
    form(
        "no choices amid",
        "of this kind",
        Bend::Events(|at, event| {
            amid(at, event, vec![raw(r#"data: {"object":"guardrails","hook_results":[{"ok":true}]}"#)])
        }),
    ),
    form(
        "empty choices amid",
        "azure asynchronous filters",
        Bend::Events(|at, event| amid(at, event, vec![Event::Json(with(event, "choices", json!([])))])),
    ),
    form(
        "a foreign event name",
        "Portkey hooks",
        Bend::Events(|at, event| {
            opened(at, event, vec![raw("event: hook_results\ndata: {\"before\":[{\"passed\":true}]}")])
        }),
    ),
    form(
        "foreign events after the end",
        "of this kind",
        Bend::Events(|_, event| {
            let ends = event["choices"][0]["finish_reason"].is_string();
            let mut all = vec![same(event)];
            if ends {
                all.push(raw(r#"data: {"type":"summary","latency_ms":12}"#));
            }
            all
        }),
    ),
    form(
        "an empty error at every event",
        "of this kind",
        Bend::Events(|_, event| vec![Event::Json(with(event, "error", json!({})))]),
    ),
    form(
        "an error text without content",
        "of this kind",
        Bend::Events(|_, event| vec![Event::Json(with(event, "error", json!("")))]),
    ),
    form(
        "an empty finish reason",
        "sglang#3912, ollama#4357",
        Bend::Events(|_, event| unfinished(event, &json!(""))),
    ),
    form(
        "the finish reason null as text",
        "AIShell#350",
        Bend::Events(|_, event| unfinished(event, &json!("null"))),
    ),
    form(
        "the finish reason None",
        "of this kind",
        Bend::Events(|_, event| unfinished(event, &json!("None"))),
    ),
    form(
        "the finish reason false",
        "of this kind",
        Bend::Events(|_, event| unfinished(event, &json!(false))),
    ),
    form(
        "zero values of Go",
        "qualcomm/GenieX#1243",
        Bend::Events(|_, event| {
            let mut all = unfinished(event, &json!(""));
            if let Some(Event::Json(event)) = all.first_mut() {
                event.as_object_mut().unwrap().shift_remove("usage");
                for choice in event["choices"].as_array_mut().into_iter().flatten() {
                    let choice = choice.as_object_mut().unwrap();
                    for name in ["token_ids", "prompt_token_ids"] {
                        choice.shift_remove(name);
                    }
                }
            }
            all
        }),
    ),
    form(
        "no finish reason",
        "bifrost#7397, vllm#19650",
        Bend::Events(|_, event| {
            chosen(event, |choice| drop(choice.as_object_mut().unwrap().shift_remove("finish_reason")))
        }),
    ),
    form("every event stops", "of this kind", Bend::Events(|_, event| unfinished(event, &json!("stop")))),
    form(
        "no finish reason, and no end",
        "of this kind",
        Bend::Events(|_, event| if is_usage(event) { vec![] } else { unfinished(event, &json!("")) }),
    ),
    form(
        "no usage",
        "openrouter",
        Bend::Events(|_, event| {
            if is_usage(event) {
                return vec![];
            }
            let mut event = event.clone();
            event.as_object_mut().unwrap().shift_remove("usage");
            vec![Event::Json(event)]
        }),
    ),
    form(
        "usage beside null choices",
        "of this kind",
        Bend::Events(|_, event| {
            vec![if is_usage(event) { Event::Json(with(event, "choices", Value::Null)) } else { same(event) }]
        }),
    ),
    form(
        "a damaged event amid",
        "vllm#27336",
        Bend::Events(|at, event| amid(at, event, vec![raw(r#"data: {"id":"x","choices":[{"index":0,"te"#)])),
    ),
    form(
        "a damaged event first",
        "of this kind",
        Bend::Events(|at, event| {
            opened(at, event, vec![raw(r#"data: {"id":"x","choices":[{"index":0,"te"#)])
        }),
    ),
    form(
        "a huge event first",
        "vllm#27336, term-llm#298",
        Bend::Events(|at, event| {
            vec![if at == 0 {
                Event::Json(with(event, "pad", "x".repeat(3 << 20).into()))
            } else {
                same(event)
            }]
        }),
    ),
    form(
        "a huge event amid",
        "open-webui#24928",
        Bend::Events(|at, event| {
            vec![if at == 2 {
                Event::Json(with(event, "pad", "x".repeat(3 << 20).into()))
            } else {
                same(event)
            }]
        }),
    ),
    form(
        "an enormous event first",
        "of this kind",
        Bend::Events(|at, event| {
            opened(at, event, vec![raw(&format!("data: {{\"pad\":\"{}\"}}", "x".repeat(12 << 20)))])
        }),
    ),
    form(
        "an enormous event amid",
        "of this kind",
        Bend::Events(|at, event| {
            amid(at, event, vec![raw(&format!("data: {{\"pad\":\"{}\"}}", "x".repeat(12 << 20)))])
        }),
    ),
    form(
        "choices that are no list",
        "of this kind",
        Bend::Events(|at, event| amid(at, event, vec![Event::Json(json!({"choices": {"0": {"text": ""}}}))])),
    ),
    form(
        "renamed from event to event",
        "mentat#429",
        Bend::Events(|at, event| {
            vec![Event::Json(with(event, "model", if at == 0 { json!("") } else { json!("gateway/m") }))]
        }),
    ),
    form(
        "another model at every event",
        "of this kind",
        Bend::Events(|at, event| vec![Event::Json(with(event, "model", format!("m-{at}").into()))]),
    ),
    form(
        "another fingerprint at every event",
        "of this kind",
        Bend::Events(|at, event| {
            vec![Event::Json(with(event, "system_fingerprint", format!("fp_{at}").into()))]
        }),
    ),
    form(
        "another fingerprint first",
        "of this kind",
        Bend::Events(|at, event| {
            vec![if at == 0 {
                Event::Json(with(event, "system_fingerprint", "fp_x".into()))
            } else {
                same(event)
            }]
        }),
    ),
    form(
        "no fingerprint first",
        "of this kind",
        Bend::Events(|at, event| {
            let mut event = event.clone();
            if at == 0 {
                event.as_object_mut().unwrap().shift_remove("system_fingerprint");
            }
            vec![Event::Json(event)]
        }),
    ),
    form(
        "another id at every event",
        "of this kind",
        Bend::Events(|at, event| vec![Event::Json(with(event, "id", format!("chatcmpl-{at}").into()))]),
    ),
    form(
        "comments at every event",
        "openrouter",
        Bend::Events(|_, event| vec![raw(": PROCESSING"), same(event)]),
    ),
    form(
        "text without its ids",
        "gateways that rebuild events",
        Bend::Events(|_, event| {
            chosen(event, |choice| {
                let choice = choice.as_object_mut().unwrap();
                choice.shift_remove("token_ids");
                choice.shift_remove("prompt_token_ids");
            })
        }),
    ),
    form(
        "the end of a line is CRLF",
        "apisix",
        Bend::Bytes(|bytes| String::from_utf8_lossy(bytes).replace('\n', "\r\n").into_bytes()),
    ),
    form(
        "no space behind data",
        "TGI",
        Bend::Bytes(|bytes| String::from_utf8_lossy(bytes).replace("data: ", "data:").into_bytes()),
    ),
    form("ids and retries", "of this kind", Bend::Bytes(|bytes| [b"id: 7\nretry: 3000\n", bytes].concat())),
    form("no content type", "private-ml-sdk#20", Bend::Label("")),
    form("plain text", "ramalama#2837", Bend::Label("text/plain; charset=utf-8")),
    form("bytes", "9router#3492", Bend::Label("application/octet-stream")),
    form("labelled as JSON", "foundry-dev-tools#195", Bend::Label("application/json")),
    form("labelled as lines of JSON", "of this kind", Bend::Label("application/x-ndjson")),
    form("compressed streams", "slicc#3037, raptor#547", Bend::Compressed { json: false }),
    form("compressed answers", "apisix#13544, backend.ai#5771", Bend::Compressed { json: true }),
    form("JSON for a stream", "gateways that gather", Bend::NoStreams),
    form("unknown members are a 400", "strict gateways", Bend::Strict(400, CLIENTS)),
    form("unknown members are a 422", "pydantic, extra=forbid", Bend::Strict(422, CLIENTS)),
    form("unknown members are a 500", "of this kind", Bend::Strict(500, CLIENTS)),
    form("unknown members are removed", "litellm drop_params", Bend::Removes(CLIENTS)),
    form("no [DONE]", "TGI, of this kind", Bend::NoDone),
    form("[DONE] without a space", "of this kind", Bend::Done("data:[DONE]\n\n")),
    form("[DONE] twice", "of this kind", Bend::Done("data: [DONE]\n\ndata: [DONE]\n\n")),
    form("events behind [DONE]", "of this kind", Bend::Done("data: [DONE]\n\ndata: {\"type\":\"bye\"}\n\n")),
];

/// The bytes, compressed.
pub fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}
