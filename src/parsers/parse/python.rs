//! JSON as Python's `json` reads and writes it.
//!
//! A server in Python re-serialises arguments that it has parsed, so the very text matters: the
//! separators `", "` and `": "`, the shortest float with Python's exponents, integers of any size,
//! the last of two equal keys at the position of the first. What Python rejects, or answers with an
//! error that cannot be foreseen from the text, is an [`Unread`].

use std::collections::HashMap;
use std::fmt::Write;

use super::steps;

/// Values deeper than this are not read: Python's limit depends on its stack.
pub(super) const MAX_DEPTH: usize = 200;
/// More digits than this are an error of another kind in Python (`int` from a string).
pub(super) const MAX_DIGITS: usize = 4_300;

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    Null,
    Bool(bool),
    /// Canonical digits, with a sign if negative.
    Int(String),
    Float(f64),
    Text(String),
    List(Vec<Value>),
    Object(Vec<(String, Value)>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unread {
    /// Python says `JSONDecodeError`.
    Invalid,
    /// Python reads it, and cannot write it as UTF-8: half of a surrogate pair is in it.
    Unwritable,
    /// Python's answer depends on more than the text: nested too deep, too many digits.
    Unsure,
}

/// True for what `str.isspace` and `\s` call a space.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

pub(super) fn strip(text: &str) -> &str {
    let stripped = text.trim_matches(is_space);
    steps::read(text.len() - stripped.len());
    stripped
}

pub(super) fn strip_end(text: &str) -> &str {
    let stripped = text.trim_end_matches(is_space);
    steps::read(text.len() - stripped.len());
    stripped
}

/// The first value of a text.
#[derive(Debug)]
pub(super) struct First<'a> {
    pub value: Value,
    pub rest: &'a str,
    /// Each number is written as Python writes it, and no key comes twice.
    pub is_plain: bool,
}

/// `JSONDecoder().raw_decode`.
pub(super) fn load_first(text: &str) -> Result<First<'_>, Unread> {
    let mut reader = Reader::new(text);
    let value = reader.value(0);
    steps::read(text.len() - reader.rest.len());
    let value = value?;
    if reader.has_half {
        return Err(Unread::Unwritable);
    }
    Ok(First { value, rest: reader.rest, is_plain: reader.is_plain })
}

pub(super) fn load(text: &str) -> Result<Value, Unread> {
    let mut reader = Reader::new(text);
    reader.skip();
    let value = reader.value(0);
    steps::read(text.len() - reader.rest.len());
    let value = value?;
    reader.skip();
    match (reader.rest.is_empty(), reader.has_half) {
        (true, false) => Ok(value),
        (true, true) => Err(Unread::Unwritable),
        (false, _) => Err(Unread::Invalid),
    }
}

/// `json.dumps(value, ensure_ascii=False)`.
pub(super) fn dump(value: &Value) -> String {
    let mut out = String::new();
    write_value(&mut out, value);
    steps::read(out.len());
    out
}

/// `json.dumps(value)`: the same in ASCII.
pub(super) fn dump_ascii(value: &Value) -> String {
    let mut out = String::new();
    for c in dump(value).chars() {
        if c <= '~' {
            out.push(c);
            continue;
        }
        for unit in c.encode_utf16(&mut [0; 2]) {
            let _ = write!(out, "\\u{unit:04x}");
        }
    }
    out
}

fn write_value(out: &mut String, value: &Value) {
    match value {
        Value::Null => out.push_str("null"),
        Value::Bool(true) => out.push_str("true"),
        Value::Bool(false) => out.push_str("false"),
        Value::Int(digits) => out.push_str(digits),
        Value::Float(number) => write_float(out, *number),
        Value::Text(text) => write_text(out, text),
        Value::List(items) => {
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                if i > 0 {
                    out.push_str(", ");
                }
                write_value(out, item);
            }
            out.push(']');
        }
        Value::Object(fields) => {
            out.push('{');
            for (i, (name, item)) in fields.iter().enumerate() {
                if i > 0 {
                    out.push_str(", ");
                }
                write_text(out, name);
                out.push_str(": ");
                write_value(out, item);
            }
            out.push('}');
        }
    }
}

fn write_text(out: &mut String, text: &str) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if c < ' ' => {
                let _ = write!(out, "\\u{:04x}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

/// `float.__repr__`, with the names that `json` gives to what is no number.
fn write_float(out: &mut String, number: f64) {
    if number.is_nan() {
        return out.push_str("NaN");
    }
    if number.is_infinite() {
        return out.push_str(if number > 0.0 { "Infinity" } else { "-Infinity" });
    }
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = format!("{number}");
        out.push_str(&plain);
        if !plain.contains('.') {
            out.push_str(".0");
        }
        return;
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    let _ = write!(out, "{digits}e{sign}{:02}", exponent.abs());
}

struct Reader<'a> {
    rest: &'a str,
    /// Half of a surrogate pair was read.
    has_half: bool,
    is_plain: bool,
}

impl<'a> Reader<'a> {
    const fn new(text: &'a str) -> Self {
        Self { rest: text, has_half: false, is_plain: true }
    }

    fn skip(&mut self) {
        self.rest = self.rest.trim_start_matches([' ', '\t', '\n', '\r']);
    }

    fn take(&mut self, literal: &str) -> bool {
        match self.rest.strip_prefix(literal) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    fn value(&mut self, depth: usize) -> Result<Value, Unread> {
        if depth > MAX_DEPTH {
            return Err(Unread::Unsure);
        }
        match self.rest.chars().next() {
            Some('"') => self.text().map(Value::Text),
            Some('{') => self.object(depth),
            Some('[') => self.list(depth),
            Some('-' | '0'..='9') => self.number(),
            _ => self.word(),
        }
    }

    fn word(&mut self) -> Result<Value, Unread> {
        let words = [
            ("null", Value::Null),
            ("true", Value::Bool(true)),
            ("false", Value::Bool(false)),
            ("NaN", Value::Float(f64::NAN)),
            ("Infinity", Value::Float(f64::INFINITY)),
        ];
        for (word, value) in words {
            if self.take(word) {
                self.is_plain &= !matches!(value, Value::Float(_));
                return Ok(value);
            }
        }
        Err(Unread::Invalid)
    }

    fn digits(&mut self) -> usize {
        let length = self.rest.bytes().take_while(u8::is_ascii_digit).count();
        self.rest = self.rest.get(length..).unwrap_or("");
        length
    }

    fn number(&mut self) -> Result<Value, Unread> {
        let start = self.rest;
        let value = self.any_number()?;
        let length = start.len() - self.rest.len();
        self.is_plain &= start.get(..length) == Some(dump(&value).as_str());
        Ok(value)
    }

    fn any_number(&mut self) -> Result<Value, Unread> {
        let start = self.rest;
        let is_negative = self.take("-");
        if is_negative && self.take("Infinity") {
            return Ok(Value::Float(f64::NEG_INFINITY));
        }
        if !self.take("0") && self.digits() == 0 {
            return Err(Unread::Invalid);
        }
        let integer_length = start.len() - self.rest.len();
        self.fraction();
        self.exponent();
        let length = start.len() - self.rest.len();
        let text = start.get(..length).unwrap_or("");
        if length > integer_length {
            return text.parse().map(Value::Float).map_err(|_| Unread::Unsure);
        }
        integer(text).ok_or(Unread::Unsure)
    }

    fn fraction(&mut self) {
        let before = self.rest;
        if self.take(".") && self.digits() == 0 {
            self.rest = before;
        }
    }

    fn exponent(&mut self) {
        let before = self.rest;
        if self.take("e") || self.take("E") {
            let _ = self.take("+") || self.take("-");
            if self.digits() == 0 {
                self.rest = before;
            }
        }
    }

    fn list(&mut self, depth: usize) -> Result<Value, Unread> {
        self.take("[");
        let mut items = Vec::new();
        self.skip();
        if self.take("]") {
            return Ok(Value::List(items));
        }
        loop {
            self.skip();
            items.push(self.value(depth + 1)?);
            self.skip();
            if self.take("]") {
                return Ok(Value::List(items));
            }
            if !self.take(",") {
                return Err(Unread::Invalid);
            }
        }
    }

    fn object(&mut self, depth: usize) -> Result<Value, Unread> {
        self.take("{");
        let mut fields = Fields::default();
        self.skip();
        if self.take("}") {
            return Ok(fields.into());
        }
        loop {
            self.skip();
            let name = self.text()?;
            self.skip();
            if !self.take(":") {
                return Err(Unread::Invalid);
            }
            self.skip();
            let value = self.value(depth + 1)?;
            self.is_plain &= fields.set(name, value);
            self.skip();
            if self.take("}") {
                return Ok(fields.into());
            }
            if !self.take(",") {
                return Err(Unread::Invalid);
            }
        }
    }

    fn text(&mut self) -> Result<String, Unread> {
        if !self.take("\"") {
            return Err(Unread::Invalid);
        }
        let mut out = String::new();
        loop {
            let plain = self.rest.find(|c| c == '"' || c == '\\' || c < ' ').ok_or(Unread::Invalid)?;
            let (text, rest) = self.rest.split_at(plain);
            out.push_str(text);
            self.rest = rest;
            if self.take("\"") {
                return Ok(out);
            }
            if !self.take("\\") {
                return Err(Unread::Invalid);
            }
            match self.escape()? {
                Some(c) => out.push(c),
                None => self.has_half = true,
            }
        }
    }

    /// The character after a backslash; `None` for half of a surrogate pair.
    fn escape(&mut self) -> Result<Option<char>, Unread> {
        let c = self.rest.chars().next().ok_or(Unread::Invalid)?;
        self.rest = self.rest.get(c.len_utf8()..).unwrap_or("");
        Ok(Some(match c {
            '"' | '\\' | '/' => c,
            'b' => '\u{8}',
            'f' => '\u{c}',
            'n' => '\n',
            'r' => '\r',
            't' => '\t',
            'u' => return self.unicode(),
            _ => return Err(Unread::Invalid),
        }))
    }

    fn unicode(&mut self) -> Result<Option<char>, Unread> {
        let first = self.hex().ok_or(Unread::Invalid)?;
        if !(0xd800..0xdc00).contains(&first) {
            return Ok(char::from_u32(first));
        }
        let before = self.rest;
        if self.take("\\u") {
            let second = self.hex().ok_or(Unread::Invalid)?;
            if (0xdc00..0xe000).contains(&second) {
                return Ok(char::from_u32(0x10000 + ((first - 0xd800) << 10) + (second - 0xdc00)));
            }
        }
        self.rest = before;
        Ok(None)
    }

    fn hex(&mut self) -> Option<u32> {
        let (digits, rest) = self.rest.split_at_checked(4)?;
        if !digits.bytes().all(|b| b.is_ascii_hexdigit()) {
            return None;
        }
        self.rest = rest;
        u32::from_str_radix(digits, 16).ok()
    }
}

/// Fields of an object, in the order in which their names came first.
#[derive(Debug, Default)]
pub(super) struct Fields {
    list: Vec<(String, Value)>,
    /// The places of the names, once there are more than [`FEW_FIELDS`].
    positions: HashMap<String, usize>,
}

/// So many names are looked through one by one.
const FEW_FIELDS: usize = 16;

impl Fields {
    /// Assigns a field: at its old position if it is there. True if it is new.
    pub fn set(&mut self, name: String, value: Value) -> bool {
        let known = self.position(&name).and_then(|position| self.list.get_mut(position));
        let is_new = known.is_none();
        match known {
            Some((_, known)) => *known = value,
            None => self.push(name, value),
        }
        is_new
    }

    fn position(&self, name: &str) -> Option<usize> {
        if self.list.len() > FEW_FIELDS {
            steps::read(name.len());
            return self.positions.get(name).copied();
        }
        steps::read(self.list.len());
        self.list.iter().position(|(known, _)| known == name)
    }

    fn push(&mut self, name: String, value: Value) {
        let position = self.list.len();
        if position == FEW_FIELDS {
            self.positions = self.list.iter().map(|(name, _)| name.clone()).zip(0..).collect();
        }
        if position >= FEW_FIELDS {
            self.positions.insert(name.clone(), position);
        }
        self.list.push((name, value));
    }

    pub fn last(&self) -> Option<&(String, Value)> {
        self.list.last()
    }
}

impl From<Fields> for Value {
    fn from(fields: Fields) -> Self {
        Self::Object(fields.list)
    }
}

/// An integer from `[-+]digits`; `None` if Python refuses so many.
fn integer(text: &str) -> Option<Value> {
    let digits = text.trim_start_matches(['-', '+']);
    if digits.len() > MAX_DIGITS {
        return None;
    }
    let digits = digits.trim_start_matches('0');
    let sign = if text.starts_with('-') && !digits.is_empty() { "-" } else { "" };
    Some(Value::Int(if digits.is_empty() { "0".to_owned() } else { format!("{sign}{digits}") }))
}

/// `int(text)`: `Err(Invalid)` for a `ValueError`.
pub(super) fn int(text: &str) -> Result<Value, Unread> {
    let number = numeral(text)?;
    let digits = number.strip_prefix(['-', '+']).unwrap_or(&number);
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err(Unread::Invalid);
    }
    integer(&number).ok_or(Unread::Invalid)
}

/// `float(text)`: `Err(Invalid)` for a `ValueError`.
pub(super) fn float(text: &str) -> Result<f64, Unread> {
    let number = numeral(text)?;
    let body = number.strip_prefix(['-', '+']).unwrap_or(&number);
    if !body.starts_with(|c: char| c.is_ascii_digit() || c == '.') {
        // Names of infinity and of no number are refused by the caller as well.
        return Err(Unread::Invalid);
    }
    number.parse().map_err(|_| Unread::Invalid)
}

/// A number's text without spaces around it and without `_` between two digits.
fn numeral(text: &str) -> Result<String, Unread> {
    let text = strip(text);
    if text.chars().any(|c| !c.is_ascii() && c.is_numeric()) {
        return Err(Unread::Unsure);
    }
    let bytes = text.as_bytes();
    let is_digit = |at: Option<usize>| at.and_then(|at| bytes.get(at)).is_some_and(u8::is_ascii_digit);
    let mut out = String::new();
    for (at, c) in text.char_indices() {
        if c != '_' {
            out.push(c);
        } else if !is_digit(at.checked_sub(1)) || !is_digit(Some(at + 1)) {
            return Err(Unread::Invalid);
        }
    }
    Ok(out)
}

/// True if `json.dumps(value, allow_nan=False)` succeeds.
pub(super) fn is_finite(value: &Value) -> bool {
    match value {
        Value::Float(number) => number.is_finite(),
        Value::List(items) => items.iter().all(is_finite),
        Value::Object(fields) => fields.iter().all(|(_, value)| is_finite(value)),
        _ => true,
    }
}
