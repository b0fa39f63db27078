//! Hermes and Qwen 2.5: `<tool_call>{"name": …, "arguments": …}</tool_call>`.
//!
//! Streamed, the arguments are the model's text, cut out of the object: the server looks for
//! `"name"` and `"arguments"` wherever they stand first, so a call with its name last gets more
//! text than its arguments. In a complete answer, the object is parsed and serialised. Both are
//! followed here.

use super::growing::{EndSearch, NameSearch, ValueSearch};
use super::python::{self, Unread, Value};
use super::{ToolCall, Unsure, steps};

use foretell_core::session::parse::{CallDelta, Parsed};

const START: &str = "<tool_call>";
const END: &str = "</tool_call>";

/// Length of the longest proper prefix of `marker` that ends `text`.
pub(super) fn overlap(text: &str, marker: &str) -> usize {
    let most = text.len().min(marker.len() - 1);
    (1..=most).rev().find(|&n| marker.get(..n).is_some_and(|head| text.ends_with(head))).unwrap_or(0)
}

/// A call whose end has not been seen.
#[derive(Clone, Debug)]
struct Region {
    /// Text after the start marker.
    raw: String,
    /// Bytes of `raw` that cannot belong to an end marker, and those without the spaces at the end.
    read: usize,
    solid: usize,
    names: NameSearch,
    has_name: bool,
    values: ValueSearch,
    /// Position of the arguments in `raw`, once known.
    arguments: Option<usize>,
    end: EndSearch,
    /// Value of `solid` when arguments were looked for last.
    seen: usize,
    /// Bytes of the arguments that were sent.
    sent: usize,
}

impl Region {
    fn new() -> Self {
        Self {
            raw: String::new(),
            read: 0,
            solid: 0,
            names: NameSearch::default(),
            has_name: false,
            values: ValueSearch::new("\"arguments\""),
            arguments: None,
            end: EndSearch::default(),
            seen: 0,
            sent: 0,
        }
    }

    /// Reads the first `cut` bytes.
    fn read_to(&mut self, cut: usize) {
        let new = self.raw.get(self.read..cut).unwrap_or("");
        steps::read(new.len());
        let solid = python::strip_end(new).len();
        if solid > 0 {
            self.solid = self.read + solid;
        }
        self.read = cut;
    }

    /// The text without spaces at its end.
    fn stripped(&self) -> &str {
        self.raw.get(..self.solid).unwrap_or("")
    }

    /// The name of the call, when it becomes known.
    fn new_name(&mut self) -> Option<String> {
        let name = self.names.find(self.raw.get(..self.read)?, false)?.to_owned();
        self.has_name = true;
        Some(name)
    }

    fn arguments(&mut self) -> Option<usize> {
        if self.arguments.is_none() {
            self.arguments = self.values.next(self.raw.get(..self.solid)?);
        }
        self.arguments
    }
}

/// Parser of a stream.
#[derive(Clone, Debug, Default)]
pub(super) struct Hermes {
    /// Text that may become a marker: before the first call, or between two.
    withheld: String,
    region: Option<Region>,
    calls: u32,
    /// A closed call without a name: the server never gets past it.
    is_stuck: bool,
    /// The call of the last piece that the last push gave, and if the newest call has arguments.
    last: Option<u32>,
    has_arguments: bool,
    is_sure: bool,
}

impl Hermes {
    pub fn new() -> Self {
        Self { is_sure: true, ..Self::default() }
    }

    pub fn is_sure(&self) -> bool {
        self.is_sure
    }

    pub fn is_outside_calls(&self) -> bool {
        self.region.is_none() && self.withheld.is_empty()
    }

    pub fn push(&mut self, text: &str) -> Parsed {
        let mut parsed = Parsed::default();
        self.last = None;
        let mut text = text.to_owned();
        loop {
            let rest = match self.region.take() {
                Some(region) => self.inside(region, &text, &mut parsed),
                None => self.outside(&text, &mut parsed),
            };
            match rest {
                Some(rest) => text = rest,
                None => return parsed,
            }
        }
    }

    /// The server adds `{}` if its last delta has a piece of a call and the newest call has no
    /// arguments yet; a marker that it withheld is lost.
    pub fn finish(&mut self) -> Parsed {
        let mut parsed = Parsed::default();
        if let Some(index) = self.last.take()
            && !self.has_arguments
        {
            parsed.calls.push(CallDelta { index, arguments: "{}".to_owned(), ..CallDelta::default() });
        }
        parsed
    }

    /// Text outside calls. Returns the text after a start marker.
    fn outside(&mut self, text: &str, parsed: &mut Parsed) -> Option<String> {
        self.withheld.push_str(text);
        let start = self.withheld.find(START);
        let end = start.unwrap_or_else(|| self.withheld.len() - overlap(&self.withheld, START));
        let content: String = self.withheld.drain(..end).collect();
        if self.calls == 0 {
            parsed.text.push_str(&content);
        }
        start?;
        let rest = self.withheld.split_off(START.len());
        self.withheld.clear();
        self.region = Some(Region::new());
        self.calls += 1;
        self.has_arguments = false;
        Some(rest)
    }

    /// Text of a call. Returns the text after its end marker.
    fn inside(&mut self, mut region: Region, text: &str, parsed: &mut Parsed) -> Option<String> {
        let from = region.raw.len().saturating_sub(END.len());
        let from = (0..=from).rev().find(|&at| region.raw.is_char_boundary(at)).unwrap_or(0);
        region.raw.push_str(text);
        let end = region.raw.get(from..).and_then(|tail| tail.find(END)).map(|at| from + at);
        let rest = end.map(|end| region.raw.split_off(end));
        let cut = region.raw.len() - if end.is_none() { overlap(&region.raw, END) } else { 0 };
        if !self.is_stuck {
            self.advance(&mut region, cut, end.is_some(), parsed);
            self.is_stuck = end.is_some() && !region.has_name;
        }
        if rest.is_none() {
            self.region = Some(region);
        }
        rest?.get(END.len()..).map(str::to_owned)
    }

    /// Pieces that became known with the first `cut` bytes of the region.
    fn advance(&mut self, region: &mut Region, cut: usize, is_closed: bool, parsed: &mut Parsed) {
        let index = self.calls - 1;
        region.read_to(cut);
        if !region.has_name {
            let Some(name) = region.new_name() else { return };
            self.piece(parsed, CallDelta { index, name: Some(name), ..CallDelta::default() });
        }
        if region.solid == region.seen && !is_closed {
            return;
        }
        region.seen = region.solid;
        let Some(start) = region.arguments() else { return };
        let is_complete = is_closed || self.is_complete(region);
        let mut arguments = region.stripped().get(start..).unwrap_or("");
        if is_complete && let Some(inner) = arguments.strip_suffix('}') {
            arguments = python::strip_end(inner);
        }
        if arguments.len() > region.sent {
            let piece = arguments.get(region.sent..).unwrap_or("").to_owned();
            region.sent = arguments.len();
            self.has_arguments = true;
            self.piece(parsed, CallDelta { index, arguments: piece, ..CallDelta::default() });
        }
    }

    /// True if the region's text is a complete object of JSON.
    fn is_complete(&mut self, region: &mut Region) -> bool {
        let text = region.raw.get(..region.solid).unwrap_or("");
        let end = region.end.find(text);
        if !text.ends_with('}') {
            return false;
        }
        match end {
            Some(end) if end == text.len() => {}
            Some(_) => return false,
            None => {
                self.is_sure &= !region.end.is_beyond();
                return false;
            }
        }
        match python::load(python::strip(text)) {
            Ok(_) | Err(Unread::Unwritable) => true,
            Err(Unread::Invalid) => false,
            Err(Unread::Unsure) => {
                self.is_sure = false;
                false
            }
        }
    }

    fn piece(&mut self, parsed: &mut Parsed, piece: CallDelta) {
        self.last = Some(piece.index);
        parsed.append(Parsed { calls: vec![piece], ..Parsed::default() });
    }
}

/// Content and calls of a complete output, as [`super::unstreamed`] wants them.
pub(super) fn unstreamed(output: &str) -> Result<(Option<String>, Vec<ToolCall>), Unsure> {
    let Some(start) = output.find(START) else { return Ok((Some(output.to_owned()), Vec::new())) };
    let mut calls = Vec::new();
    let mut rest = output;
    while let Some((_, after)) = rest.split_once(START) {
        let (body, next) = after.split_once(END).unwrap_or((after, ""));
        match call(body)? {
            Some(call) => calls.push(call),
            None => return Ok((Some(output.to_owned()), Vec::new())),
        }
        rest = next;
    }
    let content = output.get(..start).filter(|text| !python::strip(text).is_empty());
    Ok((content.map(str::to_owned), calls))
}

/// One call; `None` if the server gives up all calls because of it.
fn call(body: &str) -> Result<Option<ToolCall>, Unsure> {
    let value = match python::load(body) {
        Ok(value) => value,
        Err(Unread::Invalid) => return Ok(None),
        Err(Unread::Unwritable | Unread::Unsure) => return Err(Unsure),
    };
    let Value::Object(fields) = value else { return Ok(None) };
    let field = |key| fields.iter().find(|(name, _)| name == key).map(|(_, value)| value);
    let (Some(Value::Text(name)), Some(arguments)) = (field("name"), field("arguments")) else {
        return Ok(None);
    };
    Ok(Some(ToolCall { id: None, name: name.clone(), arguments: python::dump(arguments) }))
}
