//! Searches in a text that only grows: each byte of it is read about once, however often it is
//! looked for what the text does not have yet.

use super::python::{MAX_DEPTH, MAX_DIGITS, is_space};
use super::steps;

fn behind(text: &str, at: usize) -> &str {
    text.get(at..).unwrap_or("")
}

/// A search for the value after `"KEY"\s*:\s*`.
#[derive(Clone, Debug)]
pub(super) struct ValueSearch {
    key: &'static str,
    /// The text is read up to this byte.
    read: usize,
    expects: Expects,
}

#[derive(Clone, Copy, Debug)]
enum Expects {
    Key,
    /// The key ends at this byte.
    Colon(usize),
    Value,
}

impl ValueSearch {
    pub const fn new(key: &'static str) -> Self {
        Self { key, read: 0, expects: Expects::Key }
    }

    /// The position of the next value, as soon as its first character is there.
    pub fn next(&mut self, text: &str) -> Option<usize> {
        loop {
            let rest = behind(text, self.read);
            match self.expects {
                Expects::Key => {
                    let Some(found) = rest.find(self.key) else {
                        steps::read(rest.len());
                        // The end of the text may be the beginning of the key.
                        let end = (text.len() + 1).saturating_sub(self.key.len());
                        self.read = self.read.max(text.floor_char_boundary(end));
                        return None;
                    };
                    steps::read(found);
                    self.read += found + self.key.len();
                    self.expects = Expects::Colon(self.read);
                }
                Expects::Colon(end) => {
                    if self.skip(rest)? == ':' {
                        self.read += 1;
                        self.expects = Expects::Value;
                    } else {
                        // The quote may begin another key.
                        self.read = end - 1;
                        self.expects = Expects::Key;
                    }
                }
                Expects::Value => {
                    self.skip(rest)?;
                    self.expects = Expects::Key;
                    return Some(self.read);
                }
            }
        }
    }

    /// Skips spaces; returns the character behind them.
    fn skip(&mut self, rest: &str) -> Option<char> {
        let solid = rest.trim_start_matches(is_space);
        steps::read(rest.len() - solid.len());
        self.read += rest.len() - solid.len();
        solid.chars().next()
    }
}

#[derive(Clone, Debug)]
pub(super) struct NameSearch {
    values: ValueSearch,
    /// A value, and the byte up to which its end was looked for.
    value: Option<(usize, usize)>,
}

impl Default for NameSearch {
    fn default() -> Self {
        Self { values: ValueSearch::new("\"name\""), value: None }
    }
}

impl NameSearch {
    /// The name; one without characters only counts if `may_be_empty`.
    pub fn find<'a>(&mut self, text: &'a str, may_be_empty: bool) -> Option<&'a str> {
        loop {
            let (at, read) = match self.value {
                Some(value) => value,
                None => self.values.next(text).map(|at| (at, at + 1))?,
            };
            if behind(text, at).starts_with('"') {
                let rest = behind(text, read);
                let Some(length) = rest.find('"') else {
                    steps::read(rest.len());
                    self.value = Some((at, text.len()));
                    return None;
                };
                steps::read(length);
                self.value = Some((at, read));
                let name = text.get(at + 1..read + length).unwrap_or("");
                if may_be_empty || !name.is_empty() {
                    return Some(name);
                }
            }
            self.value = None;
        }
    }
}

/// A search for the end of the list or object of JSON that a text begins with.
#[derive(Clone, Debug, Default)]
pub(super) struct EndSearch {
    read: usize,
    depth: usize,
    digits: usize,
    is_text: bool,
    is_escaped: bool,
    is_beyond: bool,
    end: Option<usize>,
}

impl EndSearch {
    /// Reads what is new in the text. Returns the end, once it is there; the JSON is not checked.
    pub fn find(&mut self, text: &str) -> Option<usize> {
        let from = self.read;
        for (at, byte) in behind(text, from).bytes().enumerate() {
            if self.end.is_some() {
                break;
            }
            self.read = from + at + 1;
            self.take(byte);
        }
        steps::read(self.read - from);
        self.end
    }

    fn take(&mut self, byte: u8) {
        self.digits = if byte.is_ascii_digit() && !self.is_text { self.digits + 1 } else { 0 };
        match byte {
            _ if self.is_escaped => self.is_escaped = false,
            b'\\' if self.is_text => self.is_escaped = true,
            b'"' => self.is_text = !self.is_text,
            _ if self.is_text => {}
            b'{' | b'[' => self.depth += 1,
            b'}' | b']' => {
                self.depth = self.depth.saturating_sub(1);
                self.end = (self.depth == 0).then_some(self.read);
            }
            _ => {}
        }
        self.is_beyond |= self.depth > MAX_DEPTH || self.digits > MAX_DIGITS;
    }

    /// True if the text has what Python's answer depends on more than the text for
    /// ([`super::python::Unread::Unsure`]).
    pub const fn is_beyond(&self) -> bool {
        self.is_beyond
    }
}

/// The positions of a text in another one, searched from ever later positions on.
pub(super) struct Places<'a> {
    text: &'a str,
    searched: &'static str,
    /// Where the last search began, and what it found.
    last: Option<(usize, Option<usize>)>,
}

impl<'a> Places<'a> {
    pub const fn new(text: &'a str, searched: &'static str) -> Self {
        Self { text, searched, last: None }
    }

    /// The first position from the byte `at` on.
    pub fn from(&mut self, at: usize) -> Option<usize> {
        if let Some((from, found)) = self.last
            && from <= at
            && found.is_none_or(|found| at <= found)
        {
            return found;
        }
        let rest = behind(self.text, at);
        let found = rest.find(self.searched);
        steps::read(found.unwrap_or(rest.len()));
        let found = found.map(|found| at + found);
        self.last = Some((at, found));
        found
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// `"key"\s*:\s*` by rereading all of the text, as the server does.
    fn value(text: &str, key: &str) -> Option<usize> {
        let mut from = 0;
        while let Some(found) = text.get(from..)?.find(key) {
            let after = from + found + key.len();
            let rest = text.get(after..)?.trim_start_matches(is_space);
            if let Some(value) = rest.strip_prefix(':') {
                return Some(text.len() - value.trim_start_matches(is_space).len());
            }
            from = after - 1;
        }
        None
    }

    fn name(text: &str, may_be_empty: bool) -> Option<&str> {
        let mut from = 0;
        loop {
            let at = from + value(text.get(from..)?, "\"name\"")?;
            let rest = text.get(at..)?;
            match rest.strip_prefix('"').and_then(|rest| rest.split_once('"')) {
                Some((name, _)) if may_be_empty || !name.is_empty() => return Some(name),
                _ => from = at,
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 4_000, ..ProptestConfig::default() })]

        #[test]
        fn a_search_in_pieces_finds_what_reading_all_again_finds(
            pieces in prop::collection::vec(r#""|"na|me"|"name"|name|:| |é|x|\{|\}"#, 0..24),
            may_be_empty: bool,
        ) {
            let (mut text, mut names, mut values) = (String::new(), NameSearch::default(), ValueSearch::new("\"name\""));
            let (mut first_name, mut first_value) = (None, None);
            for piece in pieces {
                text.push_str(&piece);
                first_name = first_name.or_else(|| names.find(&text, may_be_empty).map(str::to_owned));
                first_value = first_value.or_else(|| values.next(&text));
                let found = name(&text, may_be_empty);
                prop_assert_eq!(first_name.as_deref(), found, "{}", &text);
                let found = value(&text, "\"name\"").filter(|at| *at < text.len());
                prop_assert_eq!(first_value, found, "{}", &text);
            }
        }
    }

    #[test]
    fn the_end_of_an_object_is_found_in_pieces() {
        let mut search = EndSearch::default();
        let text = r#"{"a\"}": [1, {"b": "]"}], "é": {}} {"#;
        let whole = EndSearch::default().find(text);
        assert_eq!(whole, Some(text.len() - 2));
        let ends: Vec<usize> = text.char_indices().map(|(at, _)| at).skip(1).collect();
        let found: Vec<_> = ends.iter().filter_map(|&end| search.find(&text[..end])).collect();
        assert_eq!((found.len(), found.first()), (2, whole.as_ref()));
        let deep = "[".repeat(MAX_DEPTH + 1);
        let mut search = EndSearch::default();
        assert!(search.find(&deep).is_none() && search.is_beyond());
    }
}
