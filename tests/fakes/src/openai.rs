//! Common parts of engines with the OpenAI interface.

use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Value, json};

use super::hermes;
use super::house::{Hermes, Setup};

/// A fresh id with a prefix.
pub fn id(prefix: &str) -> String {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    format!("{prefix}-{:032x}", NEXT.fetch_add(1, Ordering::SeqCst))
}

/// Seconds since 1970.
pub fn created() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// Markers by which an engine's parsers split an output; without them all of it is content.
#[derive(Clone, Debug, Default)]
pub struct Parsers {
    reasoning_end: Option<String>,
    tool_call: Option<(String, String)>,
    hermes: Option<Hermes>,
}

/// Parsed output, or a piece of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Parsed {
    pub thought: String,
    pub said: String,
    /// The arguments of a call.
    pub call: Option<String>,
    /// Calls of the parser `hermes`; in a piece, what is new of each.
    pub calls: Vec<hermes::Call>,
    /// The call begins with this piece.
    pub begins: bool,
    /// The thought is over.
    pub answers: bool,
}

impl Parsed {
    pub fn is_nothing(&self) -> bool {
        self.thought.is_empty() && self.said.is_empty() && self.call.is_none() && self.calls.is_empty()
    }
}

impl Parsers {
    /// Parsers of a request with or without tools.
    pub fn of(setup: &Setup, tools: bool) -> Self {
        let tool_call = setup.tool_call.clone().filter(|_| tools);
        let hermes = setup.hermes.filter(|_| tools);
        Self { reasoning_end: setup.reasoning_end.clone(), tool_call, hermes }
    }

    pub fn reasons(&self) -> bool {
        self.reasoning_end.is_some()
    }

    pub fn any(&self) -> bool {
        self.reasons() || self.tool_call.is_some() || self.hermes.is_some()
    }

    pub fn whole(&self, text: &str) -> Parsed {
        let mut parsed = self.part(text, false);
        if let Some(works) = self.hermes {
            let rest = match &self.reasoning_end {
                Some(marker) => text.split_once(marker.as_str()).map_or("", |(_, rest)| rest),
                None => text,
            };
            let (said, calls) = hermes::whole(rest, works);
            (parsed.said, parsed.calls) = (said.unwrap_or_default(), calls);
        }
        parsed
    }

    /// While an output is open, a possible beginning of a marker is withheld.
    fn part(&self, text: &str, open: bool) -> Parsed {
        let mut parsed = Parsed { answers: true, ..Parsed::default() };
        let mut rest = text;
        if let Some(marker) = &self.reasoning_end {
            let parted = rest.split_once(marker.as_str());
            let thought = parted.map_or_else(|| released(rest, marker, open), |(thought, _)| thought);
            thought.clone_into(&mut parsed.thought);
            parsed.answers = parted.is_some();
            let Some((_, said)) = parted else { return parsed };
            rest = said;
        }
        if let Some((begin, end)) = &self.tool_call {
            match rest.split_once(begin.as_str()) {
                Some((said, call)) => {
                    rest = said;
                    let ended = call.split_once(end.as_str()).map(|(call, _)| call);
                    parsed.call = Some(ended.unwrap_or_else(|| released(call, end, open)).to_owned());
                }
                None => rest = released(rest, begin, open),
            }
        }
        if let Some(works) = self.hermes {
            (parsed.said, parsed.calls) = hermes::parse(rest, works, open);
            return parsed;
        }
        rest.clone_into(&mut parsed.said);
        parsed
    }
}

fn released<'a>(text: &'a str, marker: &str, open: bool) -> &'a str {
    let begins = |at: &usize| text.is_char_boundary(*at) && marker.starts_with(&text[*at..]);
    let held = if open { (0..text.len()).find(begins) } else { None };
    &text[..held.unwrap_or(text.len())]
}

/// Splits a streamed text into the content of its deltas.
pub struct Parting {
    parsers: Parsers,
    seen: String,
    told: Parsed,
    /// Tokens of the thought.
    pub thoughts: usize,
}

impl Parting {
    pub fn new(parsers: Parsers) -> Self {
        Self { parsers, seen: String::new(), told: Parsed::default(), thoughts: 0 }
    }

    /// A call has begun.
    pub fn called(&self) -> bool {
        self.told.call.is_some() || !self.told.calls.is_empty()
    }

    pub fn push(&mut self, text: &str, last: bool) -> Parsed {
        self.seen.push_str(text);
        // At the end of a stream `hermes` does not release what it holds back.
        let all = self.parsers.part(&self.seen, !last || self.parsers.hermes.is_some());
        let rest = |all: &str, told: &str| all.get(told.len()..).unwrap_or_default().to_owned();
        let begins = all.call.is_some() && self.told.call.is_none();
        let call = all.call.as_deref().map(|call| rest(call, self.told.call.as_deref().unwrap_or_default()));
        let piece = Parsed {
            thought: rest(&all.thought, &self.told.thought),
            said: rest(&all.said, &self.told.said),
            call: call.filter(|call| begins || !call.is_empty()),
            calls: new_calls(&all.calls, &self.told.calls, last),
            begins,
            answers: all.answers,
        };
        self.thoughts += usize::from(!piece.thought.is_empty());
        self.told = all;
        if begins && !last {
            // The name is sent first, and arguments from the next piece on.
            self.told.call = Some(String::new());
            return Parsed { call: Some(String::new()), ..piece };
        }
        piece
    }
}

/// Counters and gauges in the text format.
#[derive(Default)]
pub struct Exposition(pub String);

impl Exposition {
    pub fn add(&mut self, kind: &str, name: &str, labels: &str, value: impl std::fmt::Display) {
        let line =
            if labels.is_empty() { format!("{name} {value}") } else { format!("{name}{{{labels}}} {value}") };
        let family = name.strip_suffix("_total").unwrap_or(name);
        let family = if kind == "counter" { family } else { name };
        self.0.extend(["# HELP ", family, " ", family, "\n# TYPE ", family, " ", kind, "\n", &line, "\n"]);
    }

    pub fn gauge(&mut self, name: &str, labels: &str, value: impl std::fmt::Display) {
        self.add("gauge", name, labels, value);
    }

    pub fn counter(&mut self, name: &str, labels: &str, value: impl std::fmt::Display) {
        self.add("counter", name, labels, value);
    }
}

/// The list of one model.
pub fn models(id: &str, owner: &str, max_len: usize) -> Value {
    json!({"object": "list", "data": [{"id": id, "object": "model", "created": created(), "owned_by": owner,
        "root": id, "parent": null, "max_model_len": max_len}]})
}

/// New parts of each call: its name and arguments without what was sent before. A call of which
/// nothing is new is empty.
fn new_calls(all: &[hermes::Call], told: &[hermes::Call], last: bool) -> Vec<hermes::Call> {
    let none = hermes::Call::default();
    let new = all.iter().enumerate().map(|(at, call)| {
        let told = told.get(at).unwrap_or(&none);
        let name = if told.name.is_empty() { call.name.clone() } else { String::new() };
        let arguments = call.arguments.get(told.arguments.len()..).unwrap_or_default().to_owned();
        hermes::Call { name, arguments }
    });
    let mut new: Vec<hermes::Call> = new.collect();
    if new.iter().all(|call| *call == none) {
        return Vec::new();
    }
    // 0.32, `abstract_tool_parser.py`, `get_remaining_unstreamed_args`: arguments that never began.
    if let (true, Some(call), Some(all)) = (last, new.last_mut(), all.last())
        && all.arguments.is_empty()
    {
        call.arguments.push_str("{}");
    }
    new
}
