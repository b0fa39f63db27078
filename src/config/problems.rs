//! What reading one file has found: problems, warnings, and the files that it names.

use std::cell::RefCell;

use super::named::Named;
use super::problem::{DOCUMENT, Problem, Refusal};

/// Collects the problems of one file, the warnings about its settings and the paths of other files
/// that it names.
#[derive(Debug)]
pub struct Problems {
    file: String,
    found: RefCell<Vec<Problem>>,
    warnings: RefCell<Vec<(u64, String)>>,
    named: RefCell<Vec<Named>>,
}

impl Problems {
    /// An empty collection for this file.
    pub fn new(file: &str) -> Self {
        Self {
            file: file.to_owned(),
            found: RefCell::default(),
            warnings: RefCell::default(),
            named: RefCell::default(),
        }
    }

    /// The file that is being read.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// Adds a problem on this line; an empty path means the document.
    pub fn add(&self, line: u64, path: &str, refusal: Refusal, got: String) {
        let path = if path.is_empty() { DOCUMENT } else { path };
        self.found.borrow_mut().push(Problem::new(&self.file, Some(line), path, refusal, got));
    }

    /// Adds a warning about a setting on this line.
    pub fn warn(&self, line: u64, path: &str, warning: &str) {
        let text = format!("{}:{line}: {path}: {warning}", self.file);
        self.warnings.borrow_mut().push((line, text));
    }

    /// The warnings, as `FILE:LINE: PATH: TEXT`, sorted by line.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = self.warnings.borrow().clone();
        warnings.sort_by_key(|(line, _)| *line);
        warnings.into_iter().map(|(_, text)| text).collect()
    }

    /// Adds a file that this one names.
    pub fn name(&self, named: Named) {
        self.named.borrow_mut().push(named);
    }

    /// The files that this one names, in reading order.
    pub fn named(&self) -> Vec<Named> {
        self.named.borrow().clone()
    }

    /// The problems, sorted by line.
    pub fn into_vec(self) -> Vec<Problem> {
        let mut found = self.found.into_inner();
        found.sort_by_key(|problem| problem.line);
        found
    }
}
