//! DeepSeek V3 and V3.1: calls between marker tokens, in a section of them.
//!
//! The server looks at token ids for where it is and at text for what is there, one line at a time:
//! a newline in the arguments ends them for a stream, and hides the call in an unstreamed answer.

use super::growing::Places;
use super::{ToolCall, Vocabulary, python, steps};

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

/// The text of a call that may go on: what is read of it, and where its parts stand.
#[derive(Clone, Debug, Default)]
struct Portion {
    text: String,
    read: usize,
    /// End of the first line.
    line: Option<usize>,
    /// End of the last separator in the first line.
    separator: Option<usize>,
    /// End of the line of arguments behind a fence, and of it without backticks at its end.
    fenced: Option<usize>,
    solid: usize,
    /// A marker stands in it as text.
    is_marked: bool,
}

impl Portion {
    fn push(&mut self, layout: Layout, text: &str) {
        self.text.push_str(text);
        steps::read(text.len());
        self.is_marked |=
            [START, END, SECTION, SECTION_END].iter().any(|mark| self.unread(mark.len()).contains(mark));
        if self.line.is_none() {
            self.line = self.text.get(self.read..).and_then(|new| new.find('\n')).map(|at| self.read + at);
            let end = self.line.unwrap_or(self.text.len());
            let from = self.unread_from(BETWEEN.len());
            let last = self.text.get(from..end).and_then(|new| new.rfind(BETWEEN));
            self.separator = last.map(|at| from + at + BETWEEN.len()).or(self.separator);
        }
        if layout == Layout::V3
            && let Some(start) = self.fence_end()
        {
            self.read_fenced(start);
        }
        self.read = self.text.len();
    }

    /// Where a marker of this length may begin that is not all in what was read before.
    fn unread_from(&self, length: usize) -> usize {
        self.text.floor_char_boundary((self.read + 1).saturating_sub(length))
    }

    fn unread(&self, length: usize) -> &str {
        self.text.get(self.unread_from(length)..).unwrap_or("")
    }

    /// End of the fence behind the first line.
    fn fence_end(&self) -> Option<usize> {
        let line = self.line?;
        self.text.get(line..)?.starts_with(FENCE).then_some(line + FENCE.len())
    }

    fn read_fenced(&mut self, start: usize) {
        let from = self.read.max(start);
        self.solid = self.solid.max(start);
        if self.fenced.is_some() {
            return;
        }
        let new = self.text.get(from..).unwrap_or("");
        self.fenced = new.find('\n').map(|at| from + at);
        let new = self.text.get(from..self.fenced.unwrap_or(self.text.len())).unwrap_or("");
        let solid = new.trim_end_matches('`').len();
        if solid > 0 {
            self.solid = from + solid;
        }
    }

    /// The name, and where the arguments begin and end.
    fn parts(&self, layout: Layout) -> Option<(&str, usize, usize)> {
        let separator = self.separator?;
        if layout == Layout::V31 {
            let name = self.text.get(..separator - BETWEEN.len())?;
            return Some((name, separator, self.line.unwrap_or(self.text.len())));
        }
        let line = self.line?;
        let name = self.text.get(separator..line)?;
        Some(self.fence_end().map_or((name, line, line), |start| (name, start, self.solid)))
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
    portion: Portion,
    is_named: bool,
    /// Arguments of each call, as the server remembers them: a call without any is not counted.
    known: Vec<String>,
    /// Position in the portion that the arguments last remembered begin at.
    known_from: Option<usize>,
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
            portion: Portion::default(),
            is_named: false,
            known: Vec::new(),
            known_from: None,
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
                self.portion = Portion::default();
                self.is_named = false;
                self.known_from = None;
                Parsed::default()
            }
            std::cmp::Ordering::Greater => {
                self.portion.push(self.layout, text);
                self.is_sure &= !self.portion.is_marked;
                self.update()
            }
        }
    }

    /// The end of a call: only one without arguments so far is read a second time.
    fn close(&mut self) -> Parsed {
        let known = self.known.get(self.index()).is_some_and(String::is_empty);
        let text = std::mem::take(&mut self.portion).text;
        self.portion.push(self.layout, python::strip_end(&text));
        self.known_from = None;
        if known { self.update() } else { Parsed::default() }
    }

    fn index(&self) -> usize {
        self.starts.saturating_sub(1) as usize
    }

    fn update(&mut self) -> Parsed {
        let index = self.index();
        let Some((name, start, end)) = self.portion.parts(self.layout) else { return Parsed::default() };
        let mut delta = CallDelta { index: index as u32, ..CallDelta::default() };
        if self.is_named {
            if self.known.len() <= index {
                self.known.push(String::new());
            }
            // Calls without arguments before this one: the server is confused for some tokens.
            let Some(known) = self.known.get_mut(index) else { return Parsed::default() };
            let text = |from| self.portion.text.get(from..end).unwrap_or("");
            if self.known_from == Some(start) {
                text(start + known.len()).clone_into(&mut delta.arguments);
                known.push_str(&delta.arguments);
            } else {
                let arguments = text(start);
                steps::read(arguments.len());
                arguments.strip_prefix(known.as_str()).unwrap_or("").clone_into(&mut delta.arguments);
                arguments.clone_into(known);
                self.known_from = Some(start);
            }
        } else if !name.is_empty() {
            delta.name = Some(name.to_owned());
            self.is_named = true;
        }
        let is_empty = delta.name.is_none() && delta.arguments.is_empty();
        Parsed { calls: if is_empty { Vec::new() } else { vec![delta] }, ..Parsed::default() }
    }
}

/// Content and calls of a complete output; `None` if it has no section.
pub(super) fn unstreamed(layout: Layout, output: &str) -> Option<(Option<String>, Vec<ToolCall>)> {
    let (content, _) = output.split_once(SECTION)?;
    let mut calls = Vec::new();
    let mut found = Found::new(output);
    let mut at = 0;
    while let Some(start) = found.starts.from(at) {
        at = start + START.len();
        let call = match layout {
            Layout::V31 => found.plain(at),
            Layout::V3 => found.fenced(at),
        };
        let Some((kind, call, end)) = call else { continue };
        if kind != "function" {
            // The server refuses the type, and with it all calls.
            return Some((Some(output.to_owned()), Vec::new()));
        }
        calls.push(call);
        at = end;
    }
    Some((Some(content).filter(|text| !python::strip(text).is_empty()).map(str::to_owned), calls))
}

fn call(name: &str, arguments: &str) -> ToolCall {
    ToolCall { id: None, name: name.to_owned(), arguments: arguments.to_owned() }
}

/// The positions of all that calls are made of in a complete output. They are looked for once for
/// all calls that lack them.
struct Found<'a> {
    output: &'a str,
    starts: Places<'a>,
    ends: Places<'a>,
    separators: Places<'a>,
    lines: Places<'a>,
    arguments: Places<'a>,
}

impl<'a> Found<'a> {
    const fn new(output: &'a str) -> Self {
        Self {
            output,
            starts: Places::new(output, START),
            ends: Places::new(output, END),
            separators: Places::new(output, BETWEEN),
            lines: Places::new(output, "\n"),
            arguments: Places::new(output, "\n"),
        }
    }

    /// The line that begins at the byte `at`, if it has a separator: its end, and the separator's
    /// start.
    fn line(&mut self, at: usize) -> Option<(usize, usize)> {
        let end = self.lines.from(at).unwrap_or(self.output.len());
        let separator = self.separators.from(at).filter(|separator| separator + BETWEEN.len() <= end)?;
        Some((end, separator))
    }

    /// A call of V3.1 from the byte `at` on: its type, itself, its end.
    fn plain(&mut self, at: usize) -> Option<(&'a str, ToolCall, usize)> {
        let (line, separator) = self.line(at)?;
        let start = separator + BETWEEN.len();
        let end = self.ends.from(start).filter(|end| end + END.len() <= line)?;
        let call = call(self.output.get(at..separator)?, self.output.get(start..end)?);
        Some(("function", call, end + END.len()))
    }

    /// A call of V3, with its end marker on the line after its arguments.
    fn fenced(&mut self, at: usize) -> Option<(&'a str, ToolCall, usize)> {
        let (line, _) = self.line(at)?;
        let start = line + FENCE.len();
        self.output.get(line..)?.starts_with(FENCE).then_some(())?;
        let end = self.arguments.from(start)?;
        let rest = self.output.get(end..)?.strip_prefix("\n```")?.strip_prefix(END)?;
        let (kind, name) = self.output.get(at..line)?.rsplit_once(BETWEEN)?;
        Some((kind, call(name, self.output.get(start..end)?), self.output.len() - rest.len()))
    }
}
