//! What is wrong with a setting: where it stands, what is allowed, what was found.

use std::cell::RefCell;
use std::fmt;

use serde_json::{Value, json};

use super::named::Named;

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The file, or the flag or variable that said it.
    pub file: String,
    /// Its line, counted from 1; flags and variables have none.
    pub line: Option<u64>,
    /// Where in the document, such as `backends[0].replicas`.
    pub path: String,
    /// What is wrong.
    pub message: String,
    /// What may stand there.
    pub allowed: String,
    /// What stands there.
    pub got: String,
    /// What was probably meant.
    pub suggestion: Option<String>,
}

impl fmt::Display for Problem {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}", self.file)?;
        if let Some(line) = self.line {
            write!(formatter, ":{line}")?;
        }
        write!(formatter, ": {}: {}", self.path, self.explanation())
    }
}

impl Problem {
    /// Message, what is allowed and what was found, in one line.
    pub fn explanation(&self) -> String {
        let Self { message, allowed, got, .. } = self;
        match &self.suggestion {
            Some(meant) => format!("{message}, allowed {allowed}, got {got}; did you mean {meant}?"),
            None => format!("{message}, allowed {allowed}, got {got}"),
        }
    }

    /// As the admin interface writes it.
    pub fn to_value(&self) -> Value {
        json!({ "file": self.file, "line": self.line, "path": self.path, "message": self.explanation() })
    }
}

/// Collects the problems of one file, and the files that it names.
#[derive(Debug)]
pub struct Problems {
    file: String,
    found: RefCell<Vec<Problem>>,
    named: RefCell<Vec<Named>>,
}

impl Problems {
    /// None so far.
    pub fn new(file: &str) -> Self {
        Self { file: file.to_owned(), found: RefCell::default(), named: RefCell::default() }
    }

    /// The file that is looked at.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// Adds one.
    pub fn add(&self, line: u64, path: &str, refusal: Refusal, got: String) {
        self.found.borrow_mut().push(Problem {
            file: self.file.clone(),
            line: Some(line),
            path: path.to_owned(),
            message: refusal.message,
            allowed: refusal.allowed,
            got,
            suggestion: refusal.suggestion,
        });
    }

    /// Notes a file that this one names.
    pub fn name(&self, named: Named) {
        self.named.borrow_mut().push(named);
    }

    /// The files that this one names, in the order in which they were read.
    pub fn named(&self) -> Vec<Named> {
        self.named.borrow().clone()
    }

    /// All, in the order of the lines.
    pub fn into_vec(self) -> Vec<Problem> {
        let mut found = self.found.into_inner();
        found.sort_by_key(|problem| problem.line);
        found
    }
}

/// Why a value is not taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// What is wrong.
    pub message: String,
    /// What may stand there.
    pub allowed: String,
    /// What was probably meant.
    pub suggestion: Option<String>,
}

impl Refusal {
    /// A refusal without a suggestion.
    pub fn new(message: &str, allowed: impl Into<String>) -> Self {
        Self { message: message.to_owned(), allowed: allowed.into(), suggestion: None }
    }

    /// Names the allowed word that is nearest to `got`, if one is near.
    #[must_use]
    pub fn near(mut self, got: &str, words: &[&str]) -> Self {
        self.suggestion = nearest(got, words).map(str::to_owned);
        self
    }
}

/// The word that differs least from `got`: in at most a third of its letters, and at most three.
pub fn nearest<'a>(got: &str, words: &[&'a str]) -> Option<&'a str> {
    let near = |word: &&str| distance(got, word);
    let best = words.iter().copied().min_by_key(near)?;
    (distance(got, best) <= (best.chars().count().max(3) / 3).min(3)).then_some(best)
}

/// Letters to insert, delete, replace or swap with their neighbour (optimal string alignment).
fn distance(left: &str, right: &str) -> usize {
    let right: Vec<char> = right.chars().collect();
    let mut before: Vec<usize> = Vec::new();
    let mut above: Vec<usize> = (0..=right.len()).collect();
    let mut previous = None;
    for (row, letter) in left.chars().enumerate() {
        let mut line = vec![row + 1];
        for (column, &other) in right.iter().enumerate() {
            let at = |cells: &[usize], index: usize| cells.get(index).copied().unwrap_or(usize::MAX - 1);
            let replaced = at(&above, column) + usize::from(letter != other);
            let mut cost = replaced.min(at(&above, column + 1) + 1).min(at(&line, column) + 1);
            let swapped = previous == Some(other) && column > 0 && right.get(column - 1) == Some(&letter);
            if swapped {
                cost = cost.min(at(&before, column - 1) + 1);
            }
            line.push(cost);
        }
        before = std::mem::replace(&mut above, line);
        previous = Some(letter);
    }
    above.last().copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_are_the_known_ones() {
        for (left, right, expected) in
            [("", "", 0), ("", "ab", 2), ("kitten", "sitting", 3), ("gamam", "gamma", 1), ("abc", "abc", 0)]
        {
            assert_eq!(distance(left, right), expected, "{left} {right}");
            assert_eq!(distance(right, left), expected, "{right} {left}");
        }
    }

    #[test]
    fn only_a_near_word_is_suggested() {
        let words = ["limits", "listen", "timeouts"];
        assert_eq!(nearest("limts", &words), Some("limits"));
        assert_eq!(nearest("listne", &words), Some("listen"));
        assert_eq!(nearest("replicas", &words), None);
        assert_eq!(nearest("x", &["kv"]), None);
    }
}
