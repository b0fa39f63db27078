//! vLLM's tool parser `hermes`, after its source (0.32, `tool_parsers/hermes_tool_parser.py`): at
//! every step the whole text is parsed again, and what is new is sent.

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
/// held back.
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
        let complete = after.is_some() || serde_json::from_str::<serde_json::Value>(json).is_ok();
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
