//! DeepSeek V3 and V3.1: calls between marker tokens, in a section of them.
//!
//! The server looks at token ids for where it is and at text for what is there, one line at a time:
//! a newline in the arguments ends them for a stream, and hides the call in a whole answer.

use super::{Call, Vocabulary, python};

use foretell_core::session::parse::{CallDelta, Parsed};
use foretell_core::units::TokenId;

const SECTION: &str = "<｜tool▁calls▁begin｜>";
const SECTION_END: &str = "<｜tool▁calls▁end｜>";
const START: &str = "<｜tool▁call▁begin｜>";
const END: &str = "<｜tool▁call▁end｜>";
const BETWEEN: &str = "<｜tool▁sep｜>";
const FENCE: &str = "\n```json\n";

/// Where name and arguments stand in a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layout {
    /// `TYPE sep NAME`, then the arguments in a fence of Markdown.
    V3,
    /// `NAME sep ARGUMENTS`.
    V31,
}

/// The text up to the end of its line.
fn line(text: &str) -> &str {
    text.split('\n').next().unwrap_or("")
}

impl Layout {
    /// Name and arguments of a call that may go on.
    fn read(self, text: &str) -> Option<(&str, &str)> {
        let (_, after) = line(text).rsplit_once(BETWEEN)?;
        let after = text.get(line(text).len() - after.len()..)?;
        if self == Self::V31 {
            let (name, _) = line(text).rsplit_once(BETWEEN)?;
            return Some((name, line(after)));
        }
        let name = line(after);
        let rest = after.get(name.len()..).filter(|rest| !rest.is_empty())?;
        let arguments = rest.strip_prefix(FENCE).map_or("", line);
        Some((name, arguments.trim_end_matches('`')))
    }
}

/// Parser of a stream.
#[derive(Clone, Debug)]
pub(super) struct Deepseek {
    layout: Layout,
    section: TokenId,
    start: Option<TokenId>,
    end: Option<TokenId>,
    in_section: bool,
    /// Markers of calls so far.
    starts: u32,
    ends: u32,
    /// Text since the last start marker.
    portion: String,
    is_named: bool,
    /// Arguments of each call, as the server remembers them: a call without any is not counted.
    known: Vec<String>,
    is_sure: bool,
}

impl Deepseek {
    /// `None` if the server would not start with such a vocabulary.
    pub fn new(layout: Layout, vocabulary: &Vocabulary<'_>) -> Option<Self> {
        (vocabulary.id)(SECTION_END)?;
        Some(Self {
            layout,
            section: (vocabulary.id)(SECTION)?,
            start: (vocabulary.id)(START),
            end: (vocabulary.id)(END),
            in_section: false,
            starts: 0,
            ends: 0,
            portion: String::new(),
            is_named: false,
            known: Vec::new(),
            is_sure: true,
        })
    }

    pub const fn layout(&self) -> Layout {
        self.layout
    }

    /// False once markers of calls came out of order, or as text that is no marker.
    pub const fn is_sure(&self) -> bool {
        self.is_sure
    }

    pub const fn is_outside_calls(&self) -> bool {
        self.starts <= self.ends
    }

    pub fn push(&mut self, token: Option<TokenId>, text: &str) -> Parsed {
        self.in_section |= token == Some(self.section);
        if !self.in_section {
            let is_marker = token.is_some() && (token == self.start || token == self.end);
            self.is_sure &= !is_marker;
            return Parsed::content(text.to_owned());
        }
        let content = text.replace(SECTION, "").replace(SECTION_END, "");
        let is_start = token.is_some() && token == self.start;
        let is_end = token.is_some() && token == self.end;
        let in_order = if is_start { self.starts == self.ends } else { !is_end || self.starts > self.ends };
        self.is_sure &= in_order;
        self.starts += u32::from(is_start);
        self.ends += u32::from(is_end);
        match self.starts.cmp(&self.ends) {
            std::cmp::Ordering::Less => Parsed::content(content.replace(START, "").replace(END, "")),
            std::cmp::Ordering::Equal if is_end => self.close(),
            std::cmp::Ordering::Equal => Parsed::content(content),
            std::cmp::Ordering::Greater if is_start => {
                self.portion.clear();
                self.is_named = false;
                Parsed::default()
            }
            std::cmp::Ordering::Greater => {
                self.portion.push_str(text);
                let is_marked =
                    [START, END, SECTION, SECTION_END].iter().any(|mark| self.portion.contains(mark));
                self.is_sure &= !is_marked;
                self.update()
            }
        }
    }

    /// The end of a call: only one without arguments so far is looked at again.
    fn close(&mut self) -> Parsed {
        let known = self.known.get(self.index()).is_some_and(String::is_empty);
        self.portion.truncate(python::strip_end(&self.portion).len());
        if known { self.update() } else { Parsed::default() }
    }

    fn index(&self) -> usize {
        self.starts.saturating_sub(1) as usize
    }

    fn update(&mut self) -> Parsed {
        let index = self.index();
        let Some((name, arguments)) = self.layout.read(&self.portion) else { return Parsed::default() };
        let mut delta = CallDelta { index: index as u32, ..CallDelta::default() };
        if self.is_named {
            let arguments = arguments.to_owned();
            if self.known.len() <= index {
                self.known.push(String::new());
            }
            // Calls without arguments before this one: the server is confused for some tokens.
            let Some(known) = self.known.get_mut(index) else { return Parsed::default() };
            if let Some(piece) = arguments.strip_prefix(known.as_str()) {
                piece.clone_into(&mut delta.arguments);
            }
            *known = arguments;
        } else if !name.is_empty() {
            delta.name = Some(name.to_owned());
            self.is_named = true;
        }
        let is_empty = delta.name.is_none() && delta.arguments.is_empty();
        Parsed { calls: if is_empty { Vec::new() } else { vec![delta] }, ..Parsed::default() }
    }
}

/// Content and calls of a whole output; `None` if it has no section.
pub(super) fn whole(layout: Layout, output: &str) -> Option<(Option<String>, Vec<Call>)> {
    let (content, _) = output.split_once(SECTION)?;
    let mut calls = Vec::new();
    let mut rest = output;
    while let Some(at) = rest.find(START) {
        rest = rest.get(at + START.len()..)?;
        let found = match layout {
            Layout::V31 => plain(rest),
            Layout::V3 => fenced(rest),
        };
        let Some((kind, call, length)) = found else { continue };
        if kind != "function" {
            // The server refuses the type, and with it all calls.
            return Some((Some(output.to_owned()), Vec::new()));
        }
        calls.push(call);
        rest = rest.get(length..)?;
    }
    Some((Some(content).filter(|text| !python::strip(text).is_empty()).map(str::to_owned), calls))
}

fn call(name: &str, arguments: &str) -> Call {
    Call { id: None, name: name.to_owned(), arguments: arguments.to_owned() }
}

/// A call of V3.1 at the start of `text`: its type, itself, its length.
fn plain(text: &str) -> Option<(&str, Call, usize)> {
    let (name, rest) = line(text).split_once(BETWEEN)?;
    let (arguments, rest) = rest.split_once(END)?;
    Some(("function", call(name, arguments), line(text).len() - rest.len()))
}

/// A call of V3 at the start of `text`, with its end marker on the line after its arguments.
fn fenced(text: &str) -> Option<(&str, Call, usize)> {
    let (kind, name) = line(text).rsplit_once(BETWEEN)?;
    let body = text.get(line(text).len()..)?.strip_prefix(FENCE)?;
    let arguments = line(body);
    let rest = body.get(arguments.len()..)?.strip_prefix("\n```")?.strip_prefix(END)?;
    Some((kind, call(name, arguments), text.len() - rest.len()))
}
