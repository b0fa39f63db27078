//! Reads settings from a parsed document. An error is recorded with its line and path, and reading
//! continues.
//!
//! Every look-up names the setting's meaning, kind and default, which are its declaration: an empty
//! document that is read with [`Slot`]s gives the schema of the file ([`super::declared`]).

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::path::{Path, PathBuf};

use serde_json::json;

use super::declared::Slot;
use super::kind::{Kind, path};
use super::named::{FileKind, Named};
use super::problem::{Problems, Refusal};
use super::yaml::{Key, Node, Value};

/// Maximum number of unknown keys of a map that are reported. A file with more is of another kind.
const UNKNOWN: usize = 100;

/// A map of the document. Call [`Section::close`] after the last key: it reports every key that was
/// not looked up as unknown.
pub struct Section<'n> {
    entries: &'n [(Key, Node)],
    path: String,
    line: u64,
    known: Vec<&'static str>,
    /// True if the value is not a map, which is reported already: missing keys are not reported as
    /// well.
    broken: bool,
    problems: &'n Problems,
    declared: Option<Declared<'n>>,
}

/// A value of the document and its path.
#[derive(Clone)]
pub struct Item<'n> {
    pub node: &'n Node,
    /// Path of the value, such as `backends[0].name`; empty for the root.
    pub path: String,
    problems: &'n Problems,
    declared: Option<Declared<'n>>,
}

/// The place of a value in the schema that is made, and the empty document that is read for it.
#[derive(Clone)]
struct Declared<'n> {
    slot: Slot,
    empty: &'n Node,
}

impl Declared<'_> {
    fn at(&self, slot: Slot) -> Self {
        Self { slot, empty: self.empty }
    }
}

impl<'n> Item<'n> {
    /// The root of a document; problems go to `problems`.
    pub fn root(node: &'n Node, problems: &'n Problems) -> Self {
        Self { node, path: String::new(), problems, declared: None }
    }

    /// The root of an empty document that is read for its schema.
    pub fn declaring(empty: &'n Node, problems: &'n Problems, slot: &Slot) -> Self {
        let declared = Some(Declared { slot: slot.clone(), empty });
        Self { node: empty, path: String::new(), problems, declared }
    }

    /// The place in the schema, if one is made.
    pub fn slot(&self) -> Option<&Slot> {
        self.declared.as_ref().map(|declared| &declared.slot)
    }

    /// Reports that this value is refused.
    pub fn refuse(&self, refusal: Refusal) {
        self.refuse_as(refusal, self.node.got());
    }

    /// As [`Self::refuse`], but shows `got` instead of the value itself.
    pub fn refuse_as(&self, refusal: Refusal, got: String) {
        self.problems.add(self.node.line, &self.path, refusal, got);
    }

    /// The value; if it is not of this kind, that is reported and `None` returned.
    pub fn read<T>(&self, kind: &Kind<T>) -> Option<T> {
        if let Some(slot) = self.slot() {
            let (schema, default) = kind.declared(None);
            slot.leaf(schema, default);
        }
        kind.read(self.node).map_err(|refusal| self.refuse(refusal)).ok()
    }

    /// True if the value is a map with `key`.
    pub fn has(&self, key: &str) -> bool {
        matches!(&self.node.value, Value::Map(entries) if entries.iter().any(|(name, _)| name.name == key))
    }

    /// The value as a map. `null` reads as an empty map; any other type is reported and also reads
    /// as empty.
    pub fn section(&self) -> Section<'n> {
        let (entries, broken): (&[(Key, Node)], bool) = match &self.node.value {
            Value::Map(entries) => (entries, false),
            Value::Null => (&[], self.declared.is_some()),
            _ => {
                self.refuse(Refusal::new("wrong type", "a map"));
                (&[], true)
            }
        };
        if let Some(slot) = self.slot() {
            slot.object();
        }
        let section = Section {
            entries,
            path: self.path.clone(),
            line: self.node.line,
            known: Vec::new(),
            broken,
            problems: self.problems,
            declared: self.declared.clone(),
        };
        section.note_doubles();
        section
    }

    /// The elements of a list; any other type is reported and reads as an empty list.
    pub fn items(&self) -> Vec<Item<'n>> {
        if let Some(declared) = &self.declared {
            return vec![self.prototype(declared.slot.element())];
        }
        let Value::List(nodes) = &self.node.value else {
            self.refuse(Refusal::new("wrong type", "a list"));
            return Vec::new();
        };
        let item = |(index, node)| {
            let path = format!("{}[{index}]", self.path);
            Item { node, path, problems: self.problems, declared: None }
        };
        nodes.iter().enumerate().map(item).collect()
    }

    /// The entries of a map whose keys the user chooses, such as names.
    pub fn members(&self) -> Vec<(&'n str, Item<'n>)> {
        if let Some(declared) = &self.declared {
            return vec![("", self.prototype(declared.slot.values()))];
        }
        let section = self.section();
        let item = |(key, node): &'n (Key, Node)| {
            let path = section.path_of(&key.name);
            (key.name.as_str(), Item { node, path, problems: self.problems, declared: None })
        };
        section.entries.iter().map(item).collect()
    }

    /// The elements of a list; those that are not of this kind are reported and left out.
    pub fn list<T>(&self, kind: &Kind<T>) -> Vec<T> {
        self.items().iter().filter_map(|item| item.read(kind)).collect()
    }

    /// A map whose other keys depend on the word under `key`: `read` gets the word's value and the
    /// map. Each word has a sentence of its own.
    pub fn variants<K: Copy + PartialEq, T>(
        &self,
        key: &'static str,
        words: &'static [(&'static str, K)],
        says: impl Fn(K) -> &'static str,
        read: impl Fn(K, &mut Section<'n>) -> Option<T>,
    ) -> Option<T> {
        if let Some(declared) = &self.declared {
            for (word, value) in words {
                let slot = declared.slot.alternative();
                slot.says(says(*value));
                slot.require(key);
                slot.member(key).leaf(json!({ "const": word }), serde_json::Value::Null);
                read(*value, &mut self.prototype(slot).section());
            }
            return None;
        }
        let mut section = self.section();
        let names = words.iter().map(|(name, _)| *name).collect::<Vec<_>>().join("|");
        let value = section.must(key, "", &names, &super::kind::word(words))?;
        let found = read(value, &mut section);
        section.close();
        found
    }

    /// An element that stands for all of them in a schema.
    fn prototype(&self, slot: Slot) -> Item<'n> {
        let declared = self.declared.as_ref().map(|declared| declared.at(slot));
        let node = self.declared.as_ref().map_or(self.node, |declared| declared.empty);
        Item { node, path: String::new(), problems: self.problems, declared }
    }

    /// As one of several shapes of the value; only for a schema.
    pub fn alternative(&self, says: &str) -> Option<Item<'n>> {
        let slot = self.slot()?.alternative();
        slot.says(says);
        Some(self.prototype(slot))
    }
}

impl<'n> Section<'n> {
    /// The value of `key`, which means `says`; `None` if the map does not have it.
    pub fn item(&mut self, key: &'static str, says: &str) -> Option<Item<'n>> {
        self.known.push(key);
        if let Some(declared) = &self.declared {
            let slot = declared.slot.member(key);
            slot.says(says);
            let declared = Some(declared.at(slot));
            let (node, problems) = (declared.as_ref()?.empty, self.problems);
            return Some(Item { node, path: self.path_of(key), problems, declared });
        }
        let (_, node) = self.entries.iter().find(|(name, _)| name.name == key)?;
        Some(Item { node, path: self.path_of(key), problems: self.problems, declared: None })
    }

    /// The map must have `key`; for its schema alone.
    pub fn require(&self, key: &'static str) {
        if let Some(declared) = &self.declared {
            declared.slot.require(key);
        }
    }

    /// The map need not have `key` after all; for its schema alone.
    pub fn optional(&self, key: &str) {
        if let Some(declared) = &self.declared {
            declared.slot.optional(key);
        }
    }

    /// The map may have `key`, which is read elsewhere.
    pub fn known(&mut self, key: &'static str) {
        self.known.push(key);
    }

    /// True if the map has `key`.
    pub fn has(&self, key: &str) -> bool {
        self.entries.iter().any(|(name, _)| name.name == key)
    }

    /// Line of `key`; that of the map if it does not have it.
    pub fn line(&self, key: &str) -> u64 {
        self.entries.iter().find(|(name, _)| name.name == key).map_or(self.line, |(name, _)| name.line)
    }

    /// Notes kind and default of `key` in the schema, if one is made.
    fn declare<T>(&self, key: &'static str, kind: &Kind<T>, default: Option<&T>) -> Option<Slot> {
        let slot = self.declared.as_ref()?.slot.member(key);
        let (schema, default) = kind.declared(default);
        slot.leaf(schema, default);
        Some(slot)
    }

    /// The value of `key`; `default` if the key is missing or its value is refused.
    pub fn or<T>(&mut self, key: &'static str, says: &str, default: T, kind: &Kind<T>) -> T {
        let item = self.item(key, says);
        if self.declare(key, kind, Some(&default)).is_some() {
            return default;
        }
        item.and_then(|item| item.read(kind)).unwrap_or(default)
    }

    /// The value of `key`. `null` and a refused value give `None`, a missing key gives `default`.
    pub fn maybe<T>(
        &mut self,
        key: &'static str,
        says: &str,
        default: Option<T>,
        kind: &Kind<T>,
    ) -> Option<T> {
        let item = self.item(key, says);
        if let Some(slot) = self.declare(key, kind, default.as_ref()) {
            slot.or_null();
            return default;
        }
        match item {
            None => default,
            Some(item) if item.node.is_null() => None,
            Some(item) => item.read(kind),
        }
    }

    /// The value of a required `key`; a missing key is reported and gives `None`.
    pub fn must<T>(&mut self, key: &'static str, says: &str, allowed: &str, kind: &Kind<T>) -> Option<T> {
        let item = self.item(key, says);
        self.require(key);
        if item.is_none() {
            self.refuse(key, Refusal::new("missing", allowed), "nothing");
        }
        item.and_then(|item| item.read(kind))
    }

    /// The map under `key`; an empty map if the key is missing.
    #[must_use]
    pub fn section(&mut self, key: &'static str, says: &str) -> Section<'n> {
        match self.item(key, says) {
            Some(item) => item.section(),
            None => Section {
                entries: &[],
                path: self.path_of(key),
                line: self.line,
                known: Vec::new(),
                broken: false,
                problems: self.problems,
                declared: None,
            },
        }
    }

    /// The list under `key`; `default` if the key is missing.
    pub fn list<T>(&mut self, key: &'static str, says: &str, default: Vec<T>, kind: &Kind<T>) -> Vec<T> {
        self.item(key, says).map_or(default, |item| item.list(kind))
    }

    /// Adds a keyword to the schema of `key`; of the map itself without a key.
    pub fn with(&self, key: Option<&str>, keyword: &str, value: serde_json::Value) {
        let Some(declared) = &self.declared else { return };
        let slot = key.map_or_else(|| declared.slot.clone(), |key| declared.slot.member(key));
        slot.with(keyword, value);
    }

    /// Reports a problem with `key`, on the key's line or, if it is missing, on the map's.
    pub fn refuse(&self, key: &str, refusal: Refusal, got: &str) {
        if self.broken {
            return;
        }
        self.problems.add(self.line(key), &self.path_of(key), refusal, got.to_owned());
    }

    /// Warns of the value of `key`, if the map has it: a setting without effect, or one that is not
    /// meant for production.
    pub fn warn(&self, key: &str, says: &str) {
        let Some((key, node)) = self.entries.iter().find(|(name, _)| name.name == key) else { return };
        let shown = node.shown();
        let warning = format!("{} {says}", shown.trim_matches('"'));
        self.problems.warn(key.line, &self.path_of(&key.name), &warning);
    }

    /// The file path under `key`, recorded so that the file is checked later; a missing key and
    /// `null` give `None`.
    pub fn file(&mut self, key: &'static str, says: &str, kind: FileKind) -> Option<PathBuf> {
        let named = self.maybe(key, says, None, &path())?;
        self.names(key, kind, &named);
        Some(named)
    }

    /// The required file path under `key`, recorded so that the file is checked later.
    pub fn must_file(&mut self, key: &'static str, says: &str, kind: FileKind) -> Option<PathBuf> {
        let named = self.must(key, says, "a path", &path())?;
        self.names(key, kind, &named);
        Some(named)
    }

    pub fn names(&self, key: &str, kind: FileKind, named: &Path) {
        self.problems.name(Named {
            path: named.to_owned(),
            kind,
            file: self.problems.file().to_owned(),
            line: Some(self.line(key)),
            setting: self.path_of(key),
        });
    }

    /// Reports `key`, if it is present, as one that may not be set here.
    pub fn forbid(&mut self, key: &'static str, allowed: &str) {
        self.known.push(key);
        if let Some((_, node)) = self.entries.iter().find(|(name, _)| name.name == key) {
            let path = self.path_of(key);
            Item { node, path, problems: self.problems, declared: None }
                .refuse(Refusal::new("has no meaning here", allowed));
        }
    }

    /// Reports every key that was not looked up as unknown. At the top of a file, `x-` keys are
    /// reserved for its author, as holders of anchors.
    pub fn close(&self) {
        let own = |key: &Key| self.path.is_empty() && is_own(&key.name);
        let known = |key: &Key| self.known.contains(&key.name.as_str()) || own(key);
        for (key, _) in self.entries.iter().filter(|(key, _)| !known(key)).take(UNKNOWN) {
            let refusal = Refusal::new("unknown key", self.known.join("|")).near(&key.name, &self.known);
            self.problems.add(key.line, &self.path_of(&key.name), refusal, key.name.clone());
        }
    }

    fn path_of(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    fn note_doubles(&self) {
        let mut lines = HashMap::with_capacity(self.entries.len());
        for (key, _) in self.entries {
            match lines.entry(key.name.as_str()) {
                Entry::Vacant(first) => drop(first.insert(key.line)),
                Entry::Occupied(first) => {
                    let refusal =
                        Refusal::new("key is there twice", format!("once, as on line {}", first.get()));
                    self.problems.add(key.line, &self.path_of(&key.name), refusal, key.name.clone());
                }
            }
        }
    }
}

/// True if a key at the top of a file is reserved for its author.
pub fn is_own(key: &str) -> bool {
    key.starts_with("x-")
}
