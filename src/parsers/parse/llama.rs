//! Llama 3 and 4: an output that is JSON from its first character, `{"name": …, "parameters": …}`,
//! several with `; ` between them.
//!
//! The server parses the complete output with every token, completing it by guesses, and sends what
//! two guesses have in common. Joined, that is the arguments as Python writes them, as long as no
//! guess was wrong; where one could be, this parser is not sure. It gives the arguments at the end
//! of a call; the server, along the way.

use super::growing::EndSearch;
use super::python::{self, Unread, Value};
use super::{ToolCall, Unsure, steps};

use foretell_core::session::parse::{CallDelta, Parsed};

const TAG: &str = "<|python_tag|>";
const BETWEEN: &str = "; ";

/// Parser of a stream.
#[derive(Clone, Debug)]
pub(super) struct Llama {
    /// The output is calls; `None` before its first text.
    is_calls: Option<bool>,
    /// Text of the call that has not ended, and what stands before it.
    open: String,
    /// Where the call's object ends, behind what stands before it.
    end: EndSearch,
    /// The name is given, or does not stand first.
    is_named: bool,
    has_no_first_name: bool,
    /// Bytes of `open` that are spaces where a call should follow.
    blank: usize,
    calls: u32,
    is_sure: bool,
}

impl Llama {
    pub fn new() -> Self {
        Self {
            is_calls: None,
            open: String::new(),
            end: EndSearch::default(),
            is_named: false,
            has_no_first_name: false,
            blank: 0,
            calls: 0,
            is_sure: true,
        }
    }

    pub const fn is_sure(&self) -> bool {
        self.is_sure
    }

    pub fn is_outside_calls(&self) -> bool {
        self.is_calls != Some(true) || self.open.is_empty()
    }

    pub fn push(&mut self, text: &str) -> Parsed {
        if text.is_empty() {
            return Parsed::default();
        }
        let is_calls = self.is_calls.unwrap_or_else(|| self.begin(text));
        if !is_calls {
            return Parsed::content(text.to_owned());
        }
        self.open.push_str(text);
        let mut parsed = Parsed::default();
        // Only a quote can end a name.
        let mut may_name = text.contains('"');
        while self.advance(&mut parsed, may_name) {
            may_name = true;
        }
        parsed
    }

    /// Tells calls from content by the first text. A part of the tag, in plain tokens, is content
    /// until the rest of it has come.
    fn begin(&mut self, text: &str) -> bool {
        let all = std::mem::take(&mut self.open) + text;
        if TAG.starts_with(&all) && all != TAG {
            self.open = all;
            return false;
        }
        let is_calls = all.starts_with(TAG) || all.starts_with('{');
        self.is_calls = Some(is_calls);
        if is_calls && all.len() > text.len() {
            self.is_sure = false;
        }
        is_calls
    }

    /// A call that was not ended has pieces that only the server's guesses tell.
    pub fn finish(&mut self) -> Parsed {
        if self.is_calls == Some(true) && self.calls == 0 || self.open.contains('{') {
            self.is_sure = false;
        }
        Parsed::default()
    }

    /// Takes a call out of the text; false if none has ended. `may_name`: the text may have a name
    /// that it had not before.
    fn advance(&mut self, parsed: &mut Parsed, may_name: bool) -> bool {
        if self.calls == 0
            && let Some(rest) = self.open.strip_prefix(TAG)
        {
            self.open = rest.to_owned();
        }
        let gap = if self.calls > 0 { BETWEEN } else { "" };
        let Some(object) = self.open.strip_prefix(gap) else {
            let new = self.open.get(self.blank..).unwrap_or("");
            steps::read(new.len());
            self.is_sure &= gap.starts_with(self.open.as_str()) || new.chars().all(|c| " \t\r\n".contains(c));
            // Once it is no part of the gap it stays none.
            self.blank = if gap.starts_with(self.open.as_str()) { 0 } else { self.open.len() };
            return false;
        };
        if object.is_empty() {
            return false;
        }
        if !object.starts_with('{') {
            self.is_sure = false;
            return false;
        }
        if may_name && !self.is_named && !self.has_no_first_name {
            match first_name(object) {
                Ok(name) => {
                    let name = Some(name.to_owned());
                    self.is_named = true;
                    parsed.calls.push(CallDelta { index: self.calls, name, ..CallDelta::default() });
                }
                Err(NoName::Yet) => {}
                Err(NoName::Ever) => self.has_no_first_name = true,
            }
        }
        self.end_call(gap.len(), parsed)
    }

    /// Takes the call out of the text behind a gap, if its object ends there.
    fn end_call(&mut self, gap: usize, parsed: &mut Parsed) -> bool {
        let object = self.open.get(gap..).unwrap_or("");
        if self.end.find(object).is_none() {
            self.is_sure &= !self.end.is_beyond();
            return false;
        }
        let Ok(found) = python::load_first(object) else {
            // The text so far is no JSON, and no more text makes it some.
            self.is_sure = false;
            return false;
        };
        let rest = found.rest.to_owned();
        self.is_sure &= found.is_plain;
        self.call(found.value, parsed);
        self.open = rest;
        (self.end, self.has_no_first_name, self.blank) = (EndSearch::default(), false, 0);
        true
    }

    fn call(&mut self, value: Value, parsed: &mut Parsed) {
        let index = self.calls;
        self.calls += 1;
        let was_named = std::mem::take(&mut self.is_named);
        let Some((name, arguments, is_named_first)) = parts(value) else {
            self.is_sure = false;
            return;
        };
        let is_empty = matches!(&arguments, Value::Object(fields) if fields.is_empty());
        self.is_sure &= matches!(arguments, Value::Object(_)) && (is_named_first || !is_empty);
        // The server takes an empty object for no arguments yet.
        let arguments = if is_empty { String::new() } else { python::dump(&arguments) };
        let name = (!was_named).then_some(name);
        if name.is_some() || !arguments.is_empty() {
            parsed.append(Parsed {
                calls: vec![CallDelta { index, name, arguments, ..CallDelta::default() }],
                ..Parsed::default()
            });
        }
    }
}

/// Name and arguments of an object, and if the name stands first of the two.
fn parts(value: Value) -> Option<(String, Value, bool)> {
    let Value::Object(fields) = value else { return None };
    let position_of = |key: &str| fields.iter().position(|(known, _)| known == key);
    let name = position_of("name")?;
    if position_of("arguments").is_some() && position_of("parameters").is_some() {
        return None;
    }
    let arguments = position_of("arguments").or(position_of("parameters"))?;
    match (fields.get(name)?, fields.get(arguments)?) {
        ((_, Value::Text(text)), (_, value)) if !text.is_empty() => {
            Some((text.clone(), value.clone(), name < arguments))
        }
        _ => None,
    }
}

/// Why an object has no first name.
enum NoName {
    /// More text may give it one.
    Yet,
    Ever,
}

/// The name at the start of an object, if it is its first field and needs no unescaping.
fn first_name(object: &str) -> Result<&str, NoName> {
    let mut rest = object;
    for part in ["{", "\"name\"", ":", "\""] {
        rest = rest.trim_start();
        if rest.len() < part.len() && part.starts_with(rest) {
            return Err(NoName::Yet);
        }
        rest = rest.strip_prefix(part).ok_or(NoName::Ever)?;
    }
    steps::read(object.len());
    let (name, _) = rest.split_once('"').ok_or(NoName::Yet)?;
    if name.is_empty() || name.contains('\\') { Err(NoName::Ever) } else { Ok(name) }
}

pub(super) fn unstreamed(output: &str) -> Result<(Option<String>, Vec<ToolCall>), Unsure> {
    let content = || Ok((Some(output.to_owned()), Vec::new()));
    let mut calls = Vec::new();
    let mut at = 0;
    while let Some(start) = output.get(at..).and_then(|rest| rest.find('{')).map(|found| at + found) {
        let found = match python::load_first(output.get(start..).unwrap_or("")) {
            Ok(found) => found,
            Err(Unread::Invalid) => return content(),
            Err(_) => return Err(Unsure),
        };
        let Some(call) = call(&found.value) else { return content() };
        calls.push(call);
        // A brace right behind a call is taken for a part of it.
        let end = output.len() - found.rest.len();
        at = end + usize::from(found.rest.starts_with('{'));
    }
    if calls.is_empty() { content() } else { Ok((None, calls)) }
}

fn call(value: &Value) -> Option<ToolCall> {
    let Value::Object(fields) = value else { return None };
    let field = |key: &str| fields.iter().find(|(known, _)| known == key).map(|(_, value)| value);
    let Value::Text(name) = field("name")? else { return None };
    let arguments = field("arguments").or_else(|| field("parameters"))?;
    Some(ToolCall { id: None, name: name.clone(), arguments: python::dump(arguments) })
}
