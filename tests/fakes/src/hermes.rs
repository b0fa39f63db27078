//! vLLM's tool parser `hermes`, after its source (0.32, `tool_parsers/hermes_tool_parser.py`): for
//! a stream the whole text is parsed again at every step, and what is new is sent; an answer that
//! is not streamed is parsed by other code.

use serde_json::Value;

use crate::house::Hermes;

const BEGIN: &str = "<tool_call>";
const END: &str = "</tool_call>";

/// A call as far as it has come.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Call {
    /// Empty until it is complete.
    pub name: String,
    pub arguments: String,
}

/// The content of a text, and its calls. `open`: more may follow, so the beginning of a marker is
/// withheld.
pub fn parse(text: &str, works: Hermes, open: bool) -> (String, Vec<Call>) {
    let Some((content, mut rest)) = text.split_once(BEGIN) else {
        let held = if open { overlap(text, BEGIN) } else { 0 };
        return (text[..text.len() - held].to_owned(), Vec::new());
    };
    let mut calls = Vec::new();
    loop {
        let (json, after) = match rest.split_once(END) {
            Some((json, after)) => (json.trim(), Some(after)),
            None => (rest[..rest.len() - overlap(rest, END)].trim(), None),
        };
        let complete = after.is_some() || serde_json::from_str::<Value>(json).is_ok();
        let Some(name) = name(json) else { break };
        let complete = complete && works == Hermes::AsRead;
        calls.push(Call { name, arguments: arguments(json, complete).unwrap_or_default() });
        match after.and_then(|after| after.split_once(BEGIN)) {
            Some((_, next)) => rest = next,
            None => break,
        }
    }
    (content.to_owned(), calls)
}

/// The content of a complete text, and its calls, whose arguments are written again as Python does.
/// One call that is none makes all of it content.
pub fn whole(text: &str, works: Hermes) -> (Option<String>, Vec<Call>) {
    let mut calls = Vec::new();
    let mut rest = text;
    while let Some((_, after)) = rest.split_once(BEGIN) {
        let (json, next) = after.split_once(END).unwrap_or((after, ""));
        let Some(call) = call(json, works) else { return (Some(text.to_owned()), Vec::new()) };
        calls.push(call);
        rest = next;
    }
    let content = text.split_once(BEGIN).map_or(text, |(content, _)| content);
    (Some(content.to_owned()).filter(|text| calls.is_empty() || !text.trim().is_empty()), calls)
}

fn call(json: &str, works: Hermes) -> Option<Call> {
    let call: Value = serde_json::from_str(json).ok()?;
    let brace = if works == Hermes::AsRead { "" } else { "}" };
    let arguments = python(call.get("arguments")?) + brace;
    Some(Call { name: call.get("name")?.as_str()?.to_owned(), arguments })
}

/// JSON as Python's `json.dumps` writes it.
pub fn python(value: &Value) -> String {
    match value {
        Value::Array(items) => format!("[{}]", items.iter().map(python).collect::<Vec<_>>().join(", ")),
        Value::Object(members) => {
            let member = |(name, value): (&String, &Value)| {
                format!("{}: {}", Value::String(name.clone()), python(value))
            };
            format!("{{{}}}", members.iter().map(member).collect::<Vec<_>>().join(", "))
        }
        other => other.to_string(),
    }
}

/// Bytes at the end of the text that are the beginning of a marker.
fn overlap(text: &str, marker: &str) -> usize {
    (1..marker.len()).rev().find(|&len| text.ends_with(&marker[..len])).unwrap_or(0)
}

/// The text behind a key and its colon.
fn behind<'a>(json: &'a str, key: &str) -> Option<&'a str> {
    let mut rest = json;
    loop {
        rest = rest.split_once(key)?.1;
        if let Some(value) = rest.trim_start().strip_prefix(':') {
            return Some(value.trim_start());
        }
    }
}

fn name(json: &str) -> Option<String> {
    let (name, _) = behind(json, "\"name\"")?.strip_prefix('"')?.split_once('"')?;
    (!name.is_empty()).then(|| name.to_owned())
}

fn arguments(json: &str, complete: bool) -> Option<String> {
    let raw = behind(json, "\"arguments\"")?;
    if !complete {
        return Some(raw.to_owned());
    }
    let raw = raw.trim_end();
    Some(raw.strip_suffix('}').map_or(raw, str::trim_end).to_owned())
}
