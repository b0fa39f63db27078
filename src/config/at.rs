//! A position in a document, for rules between settings.

use std::path::Path;

use super::check::member;
use super::named::{FileKind, Named};
use super::problem::Refusal;
use super::problems::Problems;
use super::yaml::{EMPTY, Key, Node, Value};

/// A value of a document that has been checked, or its absence.
#[derive(Clone, Debug)]
pub struct At<'n> {
    node: &'n Node,
    /// Its line; that of the map around it if it is missing.
    line: u64,
    path: String,
    problems: &'n Problems,
}

impl<'n> At<'n> {
    /// The root of a document.
    pub fn root(node: &'n Node, problems: &'n Problems) -> Self {
        Self { node, line: node.line, path: String::new(), problems }
    }

    fn entry(&self, key: &str) -> Option<(&'n Key, &'n Node)> {
        let Value::Map(entries) = &self.node.value else { return None };
        entries.iter().find(|(found, _)| found.name == key).map(|(key, node)| (key, node))
    }

    /// The value under `key`.
    #[must_use]
    pub fn key(&self, key: &str) -> Self {
        let (node, line) = self.entry(key).map_or((&EMPTY, self.line), |(_, node)| (node, node.line));
        Self { node, line, path: member(&self.path, key), problems: self.problems }
    }

    /// The elements of a list that were not refused: those that were read.
    pub fn items(&self) -> Vec<Self> {
        let Value::List(items) = &self.node.value else { return Vec::new() };
        let item = |(index, node): (usize, &'n Node)| {
            let path = format!("{}[{index}]", self.path);
            (node.value != Value::Refused).then_some(Self { node, line: node.line, path, ..self.clone() })
        };
        items.iter().enumerate().filter_map(item).collect()
    }

    /// True if the map has a value under `key` that was not refused.
    pub fn has(&self, key: &str) -> bool {
        self.entry(key).is_some_and(|(_, node)| node.value != Value::Refused)
    }

    /// True if the map does not have `key`.
    pub fn lacks(&self, key: &str) -> bool {
        self.entry(key).is_none()
    }

    pub fn line(&self) -> u64 {
        self.line
    }

    /// Line of `key`; that of the map if it does not have it.
    pub fn line_of(&self, key: &str) -> u64 {
        self.entry(key).map_or(self.line, |(key, _)| key.line)
    }

    /// Reports this value.
    pub fn refuse_this(&self, refusal: Refusal) {
        self.problems.add(self.line, &self.path, refusal, self.node.got());
    }

    /// Reports a problem with the value under `key`, which is shown as `got`.
    pub fn refuse(&self, key: &str, refusal: Refusal, got: impl Into<String>) {
        self.problems.add(self.line_of(key), &member(&self.path, key), refusal, got.into());
    }

    /// Warns of the value of `key`, if the map has it: a setting without effect, or one that is not
    /// meant for production.
    pub fn warn(&self, key: &str, says: &str) {
        let Some((key, node)) = self.entry(key) else { return };
        let warning = format!("{} {says}", node.shown().trim_matches('"'));
        self.problems.warn(key.line, &member(&self.path, &key.name), &warning);
    }

    /// Records the file that `key` names, so that it is opened later.
    pub fn names(&self, key: &str, kind: FileKind, path: Option<&Path>) {
        let Some(path) = path else { return };
        self.problems.name(Named {
            path: path.to_owned(),
            kind,
            file: self.problems.file().to_owned(),
            line: Some(self.line_of(key)),
            setting: member(&self.path, key),
        });
    }
}
