//! JSON that comes in pieces: what each character opens, ends or completes, and if it is still
//! JSON.

use super::python::{self, Value};
use super::steps;

/// Numbers with more characters are not read: each character is checked with all before it.
const MAX_WORD: usize = 512;

/// The text is no JSON, or none that Python and other readers agree on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Broken;

/// A piece that a character made certain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Event {
    Start {
        is_map: bool,
    },
    End {
        is_map: bool,
    },
    Key(String),
    Text(String),
    /// A number or a word.
    Scalar,
}

/// The kinds of text that may come next, besides spaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    Value,
    /// A value, or the end of an empty list.
    FirstValue,
    Key,
    /// A key, or the end of an empty map.
    FirstKey,
    Colon,
    /// A comma, or the end of the container.
    Comma,
    Nothing,
}

/// The open part of a value without parts.
#[derive(Clone, Debug)]
enum Lexeme {
    None,
    /// Without its quotes; characters of an escape that are still to come.
    Text(String, u8),
    Word(String),
}

/// The state of a text.
#[derive(Clone, Debug)]
pub(super) struct Pieces {
    /// Open containers: true for a map.
    open: Vec<bool>,
    next: Next,
    lexeme: Lexeme,
}

impl Pieces {
    pub const fn new() -> Self {
        Self { open: Vec::new(), next: Next::Value, lexeme: Lexeme::None }
    }

    /// Open containers.
    pub const fn depth(&self) -> usize {
        self.open.len()
    }

    pub fn push(&mut self, c: char) -> Result<Option<Event>, Broken> {
        steps::read(c.len_utf8());
        match &mut self.lexeme {
            Lexeme::Text(text, escape) => {
                let is_end = c == '"' && *escape == 0;
                if !is_end {
                    *escape = after(*escape, c)?;
                    text.push(c);
                    return Ok(None);
                }
                let Ok(Value::Text(text)) = python::load(&format!("\"{text}\"")) else { return Err(Broken) };
                self.lexeme = Lexeme::None;
                if self.next == Next::Colon {
                    return Ok(Some(Event::Key(text)));
                }
                Ok(Some(Event::Text(text)))
            }
            Lexeme::Word(word) if c.is_ascii_alphanumeric() || "+-.".contains(c) => {
                word.push(c);
                if word.len() <= MAX_WORD && is_begun(word) { Ok(None) } else { Err(Broken) }
            }
            Lexeme::Word(word) => {
                if !is_word(word) {
                    return Err(Broken);
                }
                self.lexeme = Lexeme::None;
                // The end of a word tells nothing that the next event does not.
                self.structure(c)
            }
            Lexeme::None => self.structure(c),
        }
    }

    fn structure(&mut self, c: char) -> Result<Option<Event>, Broken> {
        let may_begin = matches!(self.next, Next::Value | Next::FirstValue);
        let may_be_key = matches!(self.next, Next::Key | Next::FirstKey);
        match c {
            ' ' | '\t' | '\r' | '\n' => Ok(None),
            '{' | '[' if may_begin => {
                let is_map = c == '{';
                self.open.push(is_map);
                self.next = if is_map { Next::FirstKey } else { Next::FirstValue };
                Ok(Some(Event::Start { is_map }))
            }
            '}' | ']' => self.end(c == '}'),
            '"' if may_be_key || may_begin => {
                self.next = if may_be_key { Next::Colon } else { self.behind() };
                self.lexeme = Lexeme::Text(String::new(), 0);
                Ok(None)
            }
            ':' if self.next == Next::Colon => {
                self.next = Next::Value;
                Ok(None)
            }
            ',' if self.next == Next::Comma => {
                self.next = if self.open.last() == Some(&true) { Next::Key } else { Next::Value };
                Ok(None)
            }
            _ if may_begin && is_begun(&c.to_string()) => {
                self.next = self.behind();
                self.lexeme = Lexeme::Word(c.to_string());
                Ok(Some(Event::Scalar))
            }
            _ => Err(Broken),
        }
    }

    fn end(&mut self, is_map: bool) -> Result<Option<Event>, Broken> {
        let is_empty = self.next == if is_map { Next::FirstKey } else { Next::FirstValue };
        let may_end = is_empty || self.next == Next::Comma;
        if !may_end || self.open.pop() != Some(is_map) {
            return Err(Broken);
        }
        self.next = self.behind();
        Ok(Some(Event::End { is_map }))
    }

    /// The kind of text that may come behind a value.
    const fn behind(&self) -> Next {
        if self.open.is_empty() { Next::Nothing } else { Next::Comma }
    }
}

/// The characters of an escape that are to come behind `c`, a character of a text.
fn after(escape: u8, c: char) -> Result<u8, Broken> {
    match (escape, c) {
        (0, '\\') => Ok(5),
        (0, c) if c >= ' ' => Ok(0),
        (5, 'u') => Ok(4),
        (5, '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't') => Ok(0),
        (1..=4, c) if c.is_ascii_hexdigit() => Ok(escape - 1),
        _ => Err(Broken),
    }
}

/// True for a word or a number.
fn is_word(word: &str) -> bool {
    word.chars().next().is_none_or(|c| !c.is_ascii_uppercase())
        && !word.contains("Inf")
        && python::load(word).is_ok()
}

/// True for what may become a word or a number.
fn is_begun(word: &str) -> bool {
    let is_literal = ["true", "false", "null"].iter().any(|literal| literal.starts_with(word));
    is_literal || is_word(word) || is_word(&format!("{word}0"))
}
