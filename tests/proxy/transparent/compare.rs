//! Differences between two answers, and between two requests.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use crate::fakes::http::Request;
use crate::wire::Message;

/// An answer, and its path.
pub struct Said {
    message: Message,
    stream: bool,
    pub speculated: bool,
}

/// Header fields that end at the next hop.
const HOP_BY_HOP: [&str; 8] = [
    "connection",
    "keep-alive",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "proxy-authorization",
    "proxy-connection",
];
/// Header fields of a request that a proxy sets itself.
const PROXYS: [&str; 8] = [
    "host",
    "x-request-id",
    "forwarded",
    "x-forwarded-for",
    "x-forwarded-host",
    "x-forwarded-proto",
    "traceparent",
    "via",
];
/// Members whose values differ from run to run.
const OWN: [&str; 9] = [
    "id",
    "created",
    // Drawn for a request without a seed.
    "seed",
    "prompt_ms",
    "prompt_per_token_ms",
    "prompt_per_second",
    "predicted_ms",
    "predicted_per_token_ms",
    "predicted_per_second",
];
/// Members whose values are pieces of a text.
const JOINED: [&str; 5] = ["text", "content", "reasoning", "reasoning_content", "arguments"];

impl Said {
    /// The reason why it was not speculated on.
    pub fn reason(&self) -> String {
        self.message.head.get("x-foretell-reason").unwrap_or_default().to_owned()
    }
}

pub fn said(message: Message, stream: bool) -> Said {
    let stream = stream && message.head.status() == 200;
    let trailer = message.trailers.iter().find_map(|line| line.strip_prefix("x-foretell-path: "));
    let path = trailer.or(message.head.get("x-foretell-path"));
    let trailer = message.trailers.iter().find_map(|line| line.strip_prefix("x-foretell-reason: "));
    // Drafts that decided nothing: the answer is not the first call's own either.
    let undecided = trailer.or(message.head.get("x-foretell-reason")) == Some("undecided");
    let speculated = path == Some("speculated") || undecided;
    Said { message, stream, speculated }
}

pub fn request_difference(direct: &[Request], through: &[Request]) -> Option<String> {
    let (Some(want), [got]) = (direct.last(), through) else {
        return Some(format!("{} requests instead of one", through.len()));
    };
    let fields = |request: &Request| -> BTreeSet<String> {
        let names = request.fields.iter().filter(|(name, _)| {
            !HOP_BY_HOP.contains(&name.as_str())
                && !PROXYS.contains(&name.as_str())
                && !name.starts_with("x-foretell")
        });
        names.map(|(name, value)| format!("{name}: {value}")).collect()
    };
    unequal("request header", &fields(want), &fields(got))
        .or_else(|| bytes("request body", &want.body, &got.body))
        .or_else(|| (want.query != got.query).then(|| "request query".to_owned()))
}

/// A speculated answer has the same values; any other has the same bytes.
pub fn first_difference(direct: &Said, through: &Said) -> Option<String> {
    let (want, got) = (&direct.message, &through.message);
    if want.head.status() != got.head.status() {
        return Some(format!("status {} for {}: {}", got.head.status(), want.head.status(), got.text()));
    }
    let fields = |message: &Message| -> BTreeSet<String> {
        let fields = message.head.fields.iter().map(|(name, value)| (name.to_ascii_lowercase(), value));
        // A proxy adds a date to an answer without one.
        let names = ["x-request-id", "content-length", "date"];
        let ours = |name: &str| name.starts_with("x-foretell") || names.contains(&name);
        let fields = fields.filter(|(name, _)| !HOP_BY_HOP.contains(&name.as_str()) && !ours(name));
        fields.map(|(name, value)| format!("{name}: {value}")).collect()
    };
    let body = if !through.speculated {
        bytes("body", &masked(&want.body), &masked(&got.body))
    } else if direct.stream {
        streams(&events(want), &events(got))
    } else {
        values(&own_cut(want.json()), &own_cut(got.json()), "speculated: ")
    };
    both(unequal("header", &fields(want), &fields(got)), body)
}

/// Both differences, if there are two.
pub fn both(one: Option<String>, other: Option<String>) -> Option<String> {
    one.into_iter().chain(other).reduce(|one, other| format!("{one}; {other}"))
}

fn unequal(what: &str, want: &BTreeSet<String>, got: &BTreeSet<String>) -> Option<String> {
    let list =
        |a: &BTreeSet<String>, b: &BTreeSet<String>| a.difference(b).cloned().collect::<Vec<_>>().join(", ");
    (want != got).then(|| format!("{what}: lacks [{}], has [{}]", list(want, got), list(got, want)))
}

fn bytes(what: &str, want: &[u8], got: &[u8]) -> Option<String> {
    let at = want.iter().zip(got).position(|(a, b)| a != b);
    let at = at.or((want.len() != got.len()).then_some(want.len().min(got.len())))?;
    let part = |bytes: &[u8]| {
        let part = &bytes[at.saturating_sub(60)..bytes.len().min(at + 140)];
        String::from_utf8_lossy(part).replace('\n', "\\n")
    };
    Some(format!("{what} at byte {at}\n    want …{}\n    got  …{}", part(want), part(got)))
}

/// The bytes with the values that differ from run to run masked.
fn masked(bytes: &[u8]) -> Vec<u8> {
    let mut text = String::from_utf8_lossy(bytes).into_owned();
    for name in OWN {
        let key = format!("\"{name}\":");
        let mut parts = text.split(key.as_str());
        let mut masked = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            masked.push_str(&key);
            masked.push_str(&part[part.find([',', '}']).unwrap_or(0)..]);
        }
        text = masked;
    }
    text.into_bytes()
}

/// A value without ids, times and Foretell's own fields.
fn own_cut(mut value: Value) -> Value {
    match &mut value {
        Value::Object(members) => {
            let kept = std::mem::take(members)
                .into_iter()
                .filter(|(name, _)| !OWN.contains(&name.as_str()) && name != "foretell" && name != "timings");
            *members = kept.map(|(name, value)| (name, own_cut(value))).collect();
        }
        Value::Array(list) => list.iter_mut().for_each(|entry| *entry = own_cut(entry.take())),
        _ => {}
    }
    value
}

/// The first difference of two values, with its path.
fn values(want: &Value, got: &Value, at: &str) -> Option<String> {
    match (want, got) {
        (Value::Object(a), Value::Object(b)) => {
            let names = |of: &Map<String, Value>| of.keys().cloned().collect::<BTreeSet<String>>();
            let inside =
                || a.iter().find_map(|(name, value)| values(value, &b[name], &format!("{at}.{name}")));
            unequal(&format!("members of {at}"), &names(a), &names(b)).or_else(inside)
        }
        (Value::Array(a), Value::Array(b)) if a.len() == b.len() => {
            let mut pairs = a.iter().zip(b).enumerate();
            pairs.find_map(|(index, (a, b))| values(a, b, &format!("{at}[{index}]")))
        }
        _ => (want != got).then(|| format!("{at}: want {want}, got {got}")),
    }
}

fn events(message: &Message) -> Vec<Value> {
    let text = message.text();
    let parts = text.split("\n\n").filter(|event| !event.is_empty());
    // Anything that is not JSON (a comment, the end) is kept as it is.
    parts
        .map(|event| {
            let data = event.strip_prefix("data:").map(str::trim);
            data.and_then(|data| serde_json::from_str(data).ok()).map_or_else(|| Value::from(event), own_cut)
        })
        .collect()
}

/// Differences in the sum of a stream, and in the kinds and order of its events.
fn streams(want: &[Value], got: &[Value]) -> Option<String> {
    let kinds = |events: &[Value]| -> Vec<String> {
        let mut kinds: Vec<String> = events.iter().map(kind).collect();
        kinds.dedup();
        kinds
    };
    let (wanted, shown) = (kinds(want), kinds(got));
    if wanted != shown {
        return Some(format!("speculated: kinds of events\n    want {wanted:?}\n    got  {shown:?}"));
    }
    let shapes =
        |events: &[Value]| events.iter().map(|event| format!("{} {}", kind(event), shape(event))).collect();
    unequal("speculated: shapes of events", &shapes(want), &shapes(got)).or_else(|| {
        let idle = |events: &[Value]| events.iter().filter(|event| is_idle(event)).count();
        let more = idle(want) == 0 && idle(got) > 0;
        let idle = more.then(|| format!("speculated: {} empty events", idle(got)));
        idle.or_else(|| values(&sum(want), &sum(got), "speculated: "))
    })
}

/// An event that has a choice with neither text nor an end.
fn is_idle(event: &Value) -> bool {
    kind(event) == "content"
        && [&event["choices"][0]["text"], &event["choices"][0]["delta"]["content"]]
            .iter()
            .all(|text| text.as_str().is_none_or(str::is_empty))
}

fn kind(event: &Value) -> String {
    let choice = &event["choices"][0];
    let delta = &choice["delta"];
    let kind = match () {
        () if event.is_string() => event.as_str().unwrap_or_default(),
        () if event["error"].is_object() => "error",
        () if choice.is_null() => "usage",
        () if !choice["finish_reason"].is_null() => "finish",
        () if delta["tool_calls"].is_array() => "tool call",
        () if delta["reasoning"].is_string() || delta["reasoning_content"].is_string() => "reasoning",
        () if delta["role"].is_string() => "role",
        () => "content",
    };
    kind.to_owned()
}

/// Members and the types of their values.
fn shape(value: &Value) -> String {
    match value {
        // Log-probabilities of a completion, by tokens.
        Value::Object(members) if !members.is_empty() && members.values().all(Value::is_f64) => {
            "numbers".to_owned()
        }
        Value::Object(members) => {
            let mut all: Vec<String> =
                members.iter().map(|(name, value)| format!("{name}:{}", shape(value))).collect();
            all.sort();
            format!("{{{}}}", all.join(","))
        }
        Value::Array(list) => format!("[{}]", list.first().map(shape).unwrap_or_default()),
        Value::String(_) => "text".to_owned(),
        Value::Number(_) => "number".to_owned(),
        Value::Bool(_) => "flag".to_owned(),
        Value::Null => "null".to_owned(),
    }
}

/// Joins texts, chains lists (of ids), and takes the last value that is not null of everything
/// else.
fn sum(events: &[Value]) -> Value {
    let mut sum = Value::Null;
    events.iter().filter(|event| event.is_object()).for_each(|event| add(&mut sum, event, ""));
    sum
}

fn add(sum: &mut Value, value: &Value, name: &str) {
    match (&mut *sum, value) {
        (_, Value::Null) => {}
        (Value::Object(members), Value::Object(more)) => {
            more.iter().for_each(|(name, value)| {
                add(members.entry(name.clone()).or_insert(Value::Null), value, name);
            });
        }
        (Value::Null, Value::Object(more)) => {
            let mut members = Value::Object(Map::new());
            more.iter().for_each(|(name, value)| add(&mut members[name.as_str()], value, name));
            *sum = members;
        }
        (Value::Array(list), Value::Array(more)) if name == "choices" => {
            match (list.first_mut(), more.first()) {
                (Some(one), Some(other)) => add(one, other, ""),
                _ => list.extend(more.iter().cloned()),
            }
        }
        (Value::Array(list), Value::Array(more)) => list.extend(more.iter().cloned()),
        (Value::String(text), Value::String(more)) if JOINED.contains(&name) => text.push_str(more),
        (_, value) => *sum = value.clone(),
    }
}
