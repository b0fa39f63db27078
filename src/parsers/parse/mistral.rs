//! Mistral before its eleventh tokenizer: `[TOOL_CALLS]` and a list of objects, each with a name
//! and arguments.
//!
//! The server reads the list as it comes. What it sends of the arguments is the text of the pieces
//! that it cuts every token's text into, at the characters that can end what it waits for. It stops
//! for good at text that is no JSON; there, and at objects with anything else in them, this parser
//! is not sure.

use super::grammar::{Grammar, Names};
use super::pieces::{Event, Pieces};
use super::python::{self, Unread, Value};
use super::{ToolCall, Unsure, Vocabulary};

use foretell_core::session::parse::{CallDelta, Parsed};
use foretell_core::units::TokenId;

const MARKER: &str = "[TOOL_CALLS]";
/// The newer tokenizers have it.
const SEPARATOR: &str = "[ARGS]";

/// True if calls of the format come as this module has them.
pub(super) fn is_older(grammar: &Grammar, vocabulary: &Vocabulary<'_>) -> bool {
    grammar.names == Names::Mistral && (vocabulary.id)(SEPARATOR).is_none()
}

/// False if the server would not start with the vocabulary.
pub(super) fn starts(grammar: &Grammar, vocabulary: &Vocabulary<'_>) -> bool {
    grammar.names != Names::Mistral || (vocabulary.id)(MARKER).is_some()
}

/// Where in the list the output is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Position {
    /// Before the first object.
    List,
    /// Before a key, or the end of the object.
    Key,
    Name,
    BeforeArguments,
    Arguments,
    Between,
    Behind,
}

impl Position {
    /// The characters that end a piece.
    const fn ends(self) -> &'static [char] {
        match self {
            Self::List => &['{'],
            Self::Key => &[':', '{', '}'],
            Self::Name => &[',', ']', '}'],
            Self::BeforeArguments => &['{', '}'],
            Self::Arguments => &['}'],
            Self::Between => &['{', ']'],
            Self::Behind => &[],
        }
    }
}

/// A field of an object that stands for a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    Name,
    Arguments,
}

/// Parser of a stream.
#[derive(Clone, Debug)]
pub(super) struct Mistral {
    marker: TokenId,
    has_begun: bool,
    position: Position,
    pieces: Pieces,
    /// The one object stands without a list around it.
    is_bare: bool,
    field: Option<Field>,
    calls: u32,
    is_named: bool,
    is_sure: bool,
}

impl Mistral {
    /// `None` if the server would not start with such a vocabulary.
    pub fn new(vocabulary: &Vocabulary<'_>) -> Option<Self> {
        Some(Self {
            marker: (vocabulary.id)(MARKER)?,
            has_begun: false,
            position: Position::List,
            pieces: Pieces::new(),
            is_bare: false,
            field: None,
            calls: 0,
            is_named: false,
            is_sure: true,
        })
    }

    pub const fn is_sure(&self) -> bool {
        self.is_sure
    }

    pub fn is_outside_calls(&self) -> bool {
        !self.has_begun || self.position == Position::Behind
    }

    pub fn push(&mut self, token: Option<TokenId>, text: &str) -> Parsed {
        let is_marked = token == Some(self.marker) || text.contains(MARKER);
        self.has_begun |= is_marked;
        if !self.has_begun {
            return Parsed::content(text.to_owned());
        }
        let (mut content, mut rest) = ("", text.to_owned());
        if is_marked {
            let mut parts = text.split(MARKER);
            content = parts.next().unwrap_or("");
            rest = parts.collect();
        }
        let mut parsed = Parsed::content(content.to_owned());
        let mut rest = rest.as_str();
        while !rest.is_empty() && self.is_sure {
            if self.position == Position::Behind {
                rest.clone_into(&mut parsed.text);
                break;
            }
            let end = rest.find(self.position.ends()).map_or(rest.len(), |at| at + 1);
            let (piece, after) = rest.split_at(end);
            rest = after;
            self.take(piece, &mut parsed);
        }
        parsed
    }

    fn take(&mut self, piece: &str, parsed: &mut Parsed) {
        let was_in_arguments = self.position == Position::Arguments;
        let mut is_argument = was_in_arguments;
        for c in piece.chars() {
            let Ok(event) = self.pieces.push(c) else {
                self.is_sure = false;
                return;
            };
            if let Some(event) = event {
                self.apply(event, parsed);
                is_argument |= self.position == Position::Arguments;
            }
        }
        if is_argument {
            let text = if was_in_arguments { piece } else { piece.trim_start_matches(python::is_space) };
            self.emit(parsed, None, text);
        }
    }

    fn emit(&self, parsed: &mut Parsed, name: Option<String>, arguments: &str) {
        let index = self.calls.saturating_sub(1);
        let delta = CallDelta { index, name, arguments: arguments.to_owned(), ..CallDelta::default() };
        parsed.append(Parsed { calls: vec![delta], ..Parsed::default() });
    }

    fn apply(&mut self, event: Event, parsed: &mut Parsed) {
        // Containers around an object, and what is open behind the event.
        let around = usize::from(!self.is_bare);
        let depth = self.pieces.depth();
        match event {
            Event::Start { is_map: true } if depth == 1 => {
                self.is_bare = true;
                self.begin();
            }
            Event::Start { is_map: false } if depth == 1 => {}
            Event::Start { is_map: true } if depth == around + 1 => self.begin(),
            Event::Start { is_map: true } if depth == around + 2 => {
                self.is_sure &= self.is_named && self.field == Some(Field::Arguments);
                self.position = Position::Arguments;
            }
            Event::End { is_map: true } if depth == around + 1 => self.position = Position::Key,
            Event::End { is_map: true } if depth == around => {
                self.is_sure &= self.is_named;
                self.position = if self.is_bare { Position::Behind } else { Position::Between };
            }
            Event::End { is_map: false } if depth == 0 => self.position = Position::Behind,
            Event::Key(key) if depth == around + 1 => self.key(&key),
            Event::Text(text) if depth == around + 1 => self.text(text, parsed),
            _ => self.is_sure &= depth > around + 1 && self.position == Position::Arguments,
        }
    }

    fn begin(&mut self) {
        self.position = Position::Key;
        self.calls += 1;
        self.is_named = false;
        self.field = None;
    }

    fn key(&mut self, key: &str) {
        let (field, position) = match key {
            "name" => (Field::Name, Position::Name),
            "arguments" => (Field::Arguments, Position::BeforeArguments),
            _ => return self.is_sure = false,
        };
        // The name comes once and first.
        self.is_sure &= self.is_named == (field == Field::Arguments);
        self.is_sure &= self.field != Some(Field::Arguments);
        self.field = Some(field);
        self.position = position;
    }

    /// A text that is a field's value.
    fn text(&mut self, text: String, parsed: &mut Parsed) {
        match self.field {
            Some(Field::Name) => {
                self.is_named = true;
                self.position = Position::Key;
                self.emit(parsed, Some(text), "");
            }
            Some(Field::Arguments) => self.emit(parsed, None, &text),
            None => self.is_sure = false,
        }
    }
}

/// Content and calls of a complete output; without calls the content is the text behind the marker.
pub(super) fn unstreamed(output: &str) -> Result<(Option<String>, Vec<ToolCall>), Unsure> {
    let Some((content, behind)) = output.split_once(MARKER) else {
        return Ok((Some(output.to_owned()), Vec::new()));
    };
    let list = behind.split(MARKER).map(python::strip).find(|text| !text.is_empty()).unwrap_or("");
    let calls = match read(list)? {
        Some(Value::List(items)) => items.iter().filter_map(call).collect(),
        Some(value) => call(&value).into_iter().collect(),
        None => Vec::new(),
    };
    if calls.is_empty() {
        return Ok((Some(list.to_owned()), calls));
    }
    Ok((Some(content).filter(|text| !python::strip(text).is_empty()).map(str::to_owned), calls))
}

/// The first value of a text, or what stands between its first `[{` and its last `}]`.
fn read(text: &str) -> Result<Option<Value>, Unsure> {
    match python::load_first(text) {
        Ok(first) => return Ok(Some(first.value)),
        Err(Unread::Invalid) => {}
        Err(_) => return Err(Unsure),
    }
    let between = text.find("[{").and_then(|start| {
        let rest = text.get(start..)?;
        rest.get(..rest.rfind("}]")? + 2)
    });
    match between.filter(|text| text.len() > 3).map(python::load) {
        Some(Ok(value)) => Ok(Some(value)),
        Some(Err(Unread::Invalid)) | None => Ok(None),
        Some(Err(_)) => Err(Unsure),
    }
}

fn call(value: &Value) -> Option<ToolCall> {
    let Value::Object(fields) = value else { return None };
    let field = |key: &str| fields.iter().find(|(known, _)| known == key).map(|(_, value)| value);
    let (name, arguments) = (field("name"), field("arguments"));
    (name.is_some() || arguments.is_some()).then(|| ToolCall {
        id: None,
        name: if let Some(Value::Text(name)) = name { name.clone() } else { String::new() },
        arguments: match arguments {
            None | Some(Value::Null) => "{}".to_owned(),
            Some(Value::Text(text)) => text.clone(),
            Some(value) => python::dump(value),
        },
    })
}
