//! A problem with a setting: its position, the allowed values, and the value found.

use std::borrow::Cow;
use std::fmt::{self, Write};

use foretell_policy::form::GOT;
use strsim::osa_distance;

/// The path of a whole document.
pub const DOCUMENT: &str = "(document)";

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The file, or the flag or environment variable, that has the setting.
    pub file: String,
    /// Line in the file, counted from 1; `None` for flags and variables.
    pub line: Option<u64>,
    /// Path in the document, such as `backends[0].replicas`; [`DOCUMENT`] is the whole document.
    pub path: String,
    pub message: String,
    /// The values that are allowed; empty if the message is the whole sentence.
    pub allowed: String,
    /// The value that was found, as shown to the user.
    pub got: String,
    /// The allowed word that was probably meant.
    pub suggestion: Option<String>,
}

impl fmt::Display for Problem {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}", OneLine(&self.file))?;
        if let Some(line) = self.line {
            write!(formatter, ":{line}")?;
        }
        if self.path != DOCUMENT {
            write!(formatter, ": {}", OneLine(&self.path))?;
        }
        write!(formatter, ": {}", OneLine(&self.explanation()))
    }
}

/// A text in one line: control characters, which a key of a file may hold, are escaped.
struct OneLine<'a>(&'a str);

impl fmt::Display for OneLine<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for character in self.0.chars() {
            if character.is_control() {
                write!(formatter, "{}", character.escape_default())?;
            } else {
                formatter.write_char(character)?;
            }
        }
        Ok(())
    }
}

impl Problem {
    /// A refusal at a position of a file, with the value that was found.
    pub fn new(
        file: impl Into<String>,
        line: Option<u64>,
        path: impl Into<String>,
        refusal: Refusal,
        got: impl Into<String>,
    ) -> Self {
        let Refusal { message, allowed, suggestion } = refusal;
        Self { file: file.into(), line, path: path.into(), message, allowed, got: got.into(), suggestion }
    }

    /// Message, allowed values and value found, in one line.
    pub fn explanation(&self) -> String {
        let Self { message, allowed, got, .. } = self;
        let sentence = match allowed.as_str() {
            "" => message.replace(GOT, got),
            _ => format!("{message}, allowed {allowed}, got {got}"),
        };
        match &self.suggestion {
            Some(meant) => format!("{sentence}; did you mean {meant}?"),
            None => sentence,
        }
    }
}

/// Reason that a value is refused, without its position.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Description of the problem.
    pub message: String,
    /// The values that are allowed; empty if the message is the whole sentence.
    pub allowed: String,
    /// The allowed word that was probably meant.
    pub suggestion: Option<String>,
}

impl Refusal {
    /// A refusal whose sentence says all: the value, as [`GOT`], and what to write instead.
    pub fn sentence(sentence: impl Into<String>) -> Self {
        Self { message: sentence.into(), allowed: String::new(), suggestion: None }
    }

    /// A refusal with this message, which may be a sentence about [`GOT`].
    pub fn of(message: Cow<'_, str>, allowed: &str) -> Self {
        if message.contains(GOT) { Self::sentence(message) } else { Self::new(&message, allowed) }
    }

    /// True if the message says all.
    pub fn is_sentence(&self) -> bool {
        self.allowed.is_empty()
    }

    /// A refusal without a suggestion.
    pub fn new(message: &str, allowed: impl Into<String>) -> Self {
        Self { message: message.to_owned(), allowed: allowed.into(), suggestion: None }
    }

    /// Suggests the word of `words` that is most similar to `got`, if one is similar enough.
    #[must_use]
    pub fn near(mut self, got: &str, words: &[&str]) -> Self {
        self.suggestion = nearest(got, words).map(str::to_owned);
        self
    }
}

/// The word with the smallest edit distance to `got`, at most a third of the word's letters and at
/// most 3; else the only one that begins like `got`.
pub fn nearest<'a>(got: &str, words: &[&'a str]) -> Option<&'a str> {
    let best = words.iter().copied().min_by_key(|word| osa_distance(got, word))?;
    if osa_distance(got, best) <= (best.chars().count().max(3) / 3).min(3) {
        return Some(best);
    }
    begun(got, words)
}

/// The only word that begins like `got` without its last letter, which may be the ending of another
/// form of the word.
fn begun<'a>(got: &str, words: &[&'a str]) -> Option<&'a str> {
    let (last, _) = got.char_indices().last().filter(|(last, _)| *last >= 4)?;
    let mut found =
        words.iter().copied().filter(|word| got.get(..last).is_some_and(|stem| word.starts_with(stem)));
    match (found.next(), found.next()) {
        (Some(only), None) => Some(only),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_near_word_is_suggested() {
        let words = ["limits", "listen", "timeouts"];
        assert_eq!(nearest("limts", &words), Some("limits"));
        assert_eq!(nearest("listne", &words), Some("listen"));
        assert_eq!(nearest("replicas", &words), None);
        let routes = ["completions", "chat"];
        assert_eq!(nearest("complete", &routes), Some("completions"));
        assert_eq!(nearest("completion", &routes), Some("completions"));
        assert_eq!(nearest("complete", &["completions", "completes-not"]), None, "two begin so");
        assert_eq!(nearest("comb", &routes), None);
        assert_eq!(nearest("x", &["kv"]), None);
    }
}
