//! Reading settings out of a document: every error is noted with its place, and reading goes on.

use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::named::{FileKind, Named};
use super::problem::{Problems, Refusal};
use super::values;
use super::yaml::{Key, Node, Value};

/// One map of the document. Keys that nobody asked for are unknown, which is noted when it is dropped by
/// [`Section::close`].
pub struct Section<'n> {
    entries: &'n [(Key, Node)],
    path: String,
    line: u64,
    known: Vec<&'static str>,
    /// It is no map at all, so it makes no sense to miss things in it.
    broken: bool,
    problems: &'n Problems,
}

/// One value of the document with its place.
#[derive(Clone)]
pub struct Item<'n> {
    /// The value.
    pub node: &'n Node,
    /// Its place.
    pub path: String,
    problems: &'n Problems,
}

impl<'n> Item<'n> {
    /// The root of a document.
    pub fn root(node: &'n Node, problems: &'n Problems) -> Self {
        Self { node, path: String::new(), problems }
    }

    /// Notes that this value is not taken.
    pub fn refuse(&self, refusal: Refusal) {
        self.refuse_as(refusal, self.node.got());
    }

    /// Notes a problem here, with what was found instead of the value itself.
    pub fn refuse_as(&self, refusal: Refusal, got: String) {
        let path = if self.path.is_empty() { "(document)" } else { &self.path };
        self.problems.add(self.node.line, path, refusal, got);
    }

    /// The value as `parse` reads it; `None`, and a problem noted, if it cannot.
    pub fn read<T>(&self, parse: impl FnOnce(&Node) -> Result<T, Refusal>) -> Option<T> {
        parse(self.node).map_err(|refusal| self.refuse(refusal)).ok()
    }

    /// The value as a map; an empty one, and a problem noted, if it is none. Nothing is an empty map.
    pub fn section(&self) -> Section<'n> {
        let (entries, broken): (&[(Key, Node)], bool) = match &self.node.value {
            Value::Map(entries) => (entries, false),
            Value::Null => (&[], false),
            _ => {
                self.refuse(Refusal::new("wrong type", "a map"));
                (&[], true)
            }
        };
        let section = Section {
            entries,
            path: self.path.clone(),
            line: self.node.line,
            known: Vec::new(),
            broken,
            problems: self.problems,
        };
        section.note_doubles();
        section
    }

    /// The elements of a list; none, and a problem noted, if it is no list.
    pub fn items(&self) -> Vec<Item<'n>> {
        let Value::List(nodes) = &self.node.value else {
            self.refuse(Refusal::new("wrong type", "a list"));
            return Vec::new();
        };
        let item = |(index, node)| {
            let path = format!("{}[{index}]", self.path);
            Item { node, path, problems: self.problems }
        };
        nodes.iter().enumerate().map(item).collect()
    }

    /// The members of a map whose keys are names that the file chooses.
    pub fn members(&self) -> Vec<(&'n str, Item<'n>)> {
        let section = self.section();
        let item = |(key, node): &'n (Key, Node)| {
            let path = section.place(&key.name);
            (key.name.as_str(), Item { node, path, problems: self.problems })
        };
        section.entries.iter().map(item).collect()
    }

    /// The elements of a list as `parse` reads them.
    pub fn list<T>(&self, parse: impl Fn(&Node) -> Result<T, Refusal>) -> Vec<T> {
        self.items().iter().filter_map(|item| item.read(&parse)).collect()
    }
}

impl<'n> Section<'n> {
    /// The value of `key`, if the file has it.
    pub fn item(&mut self, key: &'static str) -> Option<Item<'n>> {
        self.known.push(key);
        #[cfg(test)]
        asked::note(self.place(key));
        let (_, node) = self.entries.iter().find(|(name, _)| name.name == key)?;
        Some(Item { node, path: self.place(key), problems: self.problems })
    }

    /// The line of `key`, or of the map if it has none.
    pub fn line(&self, key: &str) -> u64 {
        self.entries.iter().find(|(name, _)| name.name == key).map_or(self.line, |(name, _)| name.line)
    }

    /// The value of `key`, or `default` if the file has none.
    pub fn or<T>(
        &mut self,
        key: &'static str,
        default: T,
        parse: impl FnOnce(&Node) -> Result<T, Refusal>,
    ) -> T {
        self.item(key).and_then(|item| item.read(parse)).unwrap_or(default)
    }

    /// The value of `key`, where `null` stands for none; `default` if the file does not say.
    pub fn maybe<T>(
        &mut self,
        key: &'static str,
        default: Option<T>,
        parse: impl FnOnce(&Node) -> Result<T, Refusal>,
    ) -> Option<T> {
        match self.item(key) {
            None => default,
            Some(item) if item.node.is_null() => None,
            Some(item) => item.read(parse),
        }
    }

    /// The value of `key`, which must be there.
    pub fn must<T>(
        &mut self,
        key: &'static str,
        allowed: &str,
        parse: impl FnOnce(&Node) -> Result<T, Refusal>,
    ) -> Option<T> {
        let item = self.item(key);
        if item.is_none() {
            self.refuse(key, Refusal::new("missing", allowed), "nothing");
        }
        item.and_then(|item| item.read(parse))
    }

    /// The map under `key`; an empty one if the file has none.
    #[must_use]
    pub fn section(&mut self, key: &'static str) -> Section<'n> {
        match self.item(key) {
            Some(item) => item.section(),
            None => Section {
                entries: &[],
                path: self.place(key),
                line: self.line,
                known: Vec::new(),
                broken: false,
                problems: self.problems,
            },
        }
    }

    /// The list under `key` as `parse` reads its elements; `default` if the file has none.
    pub fn list<T>(
        &mut self,
        key: &'static str,
        default: Vec<T>,
        parse: impl Fn(&Node) -> Result<T, Refusal>,
    ) -> Vec<T> {
        self.item(key).map_or(default, |item| item.list(parse))
    }

    /// Notes a problem with `key`, at its line if the file has it.
    pub fn refuse(&self, key: &str, refusal: Refusal, got: &str) {
        if self.broken {
            return;
        }
        self.problems.add(self.line(key), &self.place(key), refusal, got.to_owned());
    }

    /// The file that `key` names, where `null` stands for none. It is noted as one to be opened.
    pub fn file(&mut self, key: &'static str, kind: FileKind) -> Option<PathBuf> {
        let named = self.maybe(key, None, path)?;
        self.names(key, kind, &named);
        Some(named)
    }

    /// The file that `key` must name. It is noted as one to be opened.
    pub fn must_file(&mut self, key: &'static str, kind: FileKind) -> Option<PathBuf> {
        let named = self.must(key, "a path", path)?;
        self.names(key, kind, &named);
        Some(named)
    }

    /// Notes that `key` names a file.
    pub fn names(&self, key: &str, kind: FileKind, named: &Path) {
        self.problems.name(Named {
            path: named.to_owned(),
            kind,
            file: self.problems.file().to_owned(),
            line: Some(self.line(key)),
            place: self.place(key),
        });
    }

    /// Refuses `key`, which has no meaning here.
    pub fn forbid(&mut self, key: &'static str, allowed: &str) {
        if let Some(item) = self.item(key) {
            item.refuse(Refusal::new("has no meaning here", allowed));
        }
    }

    /// Notes every key that nobody asked for.
    pub fn close(self) {
        for (key, _) in self.entries.iter().filter(|(key, _)| !self.known.contains(&key.name.as_str())) {
            let refusal = Refusal::new("unknown key", self.known.join("|")).near(&key.name, &self.known);
            self.problems.add(key.line, &self.place(&key.name), refusal, key.name.clone());
        }
    }

    fn place(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    fn note_doubles(&self) {
        for (index, (key, _)) in self.entries.iter().enumerate() {
            let first = self.entries.iter().take(index).find(|(other, _)| other.name == key.name);
            if let Some((first, _)) = first {
                let refusal = Refusal::new("key is there twice", format!("once, as on line {}", first.line));
                self.problems.add(key.line, &self.place(&key.name), refusal, key.name.clone());
            }
        }
    }
}

/// `true` or `false`.
pub fn boolean(node: &Node) -> Result<bool, Refusal> {
    match node.value {
        Value::Bool(value) => Ok(value),
        _ => Err(Refusal::new("wrong type", "true|false")),
    }
}

/// A text that is not empty.
pub fn text(node: &Node) -> Result<String, Refusal> {
    match &node.value {
        Value::Text(text) if !text.is_empty() => Ok(text.clone()),
        _ => Err(Refusal::new("wrong type", "a text")),
    }
}

/// A path.
pub fn path(node: &Node) -> Result<PathBuf, Refusal> {
    text(node).map(PathBuf::from).map_err(|_| Refusal::new("wrong type", "a path"))
}

/// One of these words.
pub fn word<T: Copy>(words: &'static [(&'static str, T)]) -> impl Fn(&Node) -> Result<T, Refusal> {
    move |node| {
        let names: Vec<&str> = words.iter().map(|(name, _)| *name).collect();
        let refusal = Refusal::new("unknown value", names.join("|"));
        let Value::Text(text) = &node.value else { return Err(refusal) };
        let found = words.iter().find(|(name, _)| name == text);
        found.map(|(_, value)| *value).ok_or_else(|| refusal.near(text, &names))
    }
}

/// A whole number in a range.
pub fn whole<T: TryFrom<i64>>(range: RangeInclusive<i64>) -> impl Fn(&Node) -> Result<T, Refusal> {
    move |node| {
        let allowed = format!("{}..={}", range.start(), range.end());
        let Value::Whole(value) = node.value else { return Err(Refusal::new("wrong type", allowed)) };
        let value =
            Some(value).filter(|value| range.contains(value)).and_then(|value| T::try_from(value).ok());
        value.ok_or_else(|| Refusal::new("out of range", allowed))
    }
}

/// A number in a range.
pub fn number(range: RangeInclusive<f64>) -> impl Fn(&Node) -> Result<f64, Refusal> {
    move |node| {
        let allowed = format!("{}..={}", range.start(), range.end());
        let value = match node.value {
            Value::Whole(value) => value as f64,
            Value::Number(value) => value,
            _ => return Err(Refusal::new("wrong type", allowed)),
        };
        if range.contains(&value) { Ok(value) } else { Err(Refusal::new("out of range", allowed)) }
    }
}

/// A share from nothing to all.
pub fn ratio(node: &Node) -> Result<f64, Refusal> {
    number(0.0..=1.0)(node)
}

/// `\d+(ms|s|m|h)`.
pub fn duration(node: &Node) -> Result<Duration, Refusal> {
    match &node.value {
        Value::Text(text) => values::duration(text),
        _ => None,
    }
    .ok_or_else(|| Refusal::new("not a duration", r"\d+(ms|s|m|h)"))
}

/// A duration that is not zero: how often something is done, or how long it may take.
pub fn period(node: &Node) -> Result<Duration, Refusal> {
    let duration = duration(node)?;
    if duration.is_zero() { Err(Refusal::new("out of range", "at least 1ms")) } else { Ok(duration) }
}

/// `\d+(B|KiB|MiB|GiB)`, in bytes, not zero.
pub fn size(node: &Node) -> Result<u64, Refusal> {
    let size = match &node.value {
        Value::Text(text) => values::size(text),
        _ => None,
    };
    match size {
        None => Err(Refusal::new("not a size", r"\d+(B|KiB|MiB|GiB)")),
        Some(0) => Err(Refusal::new("out of range", "at least 1B")),
        Some(size) => Ok(size),
    }
}

/// `IP:PORT`.
pub fn address(node: &Node) -> Result<SocketAddr, Refusal> {
    let Value::Text(text) = &node.value else { return Err(Refusal::new("wrong type", "IP:PORT")) };
    parse_address(text)
}

/// `IP:PORT`.
pub fn parse_address(text: &str) -> Result<SocketAddr, Refusal> {
    text.parse().map_err(|_| Refusal::new("not an address", "IP:PORT"))
}

/// `http://HOST[:PORT]` or `https://…`, without path, query or user.
pub fn url(node: &Node) -> Result<http::Uri, Refusal> {
    let Value::Text(text) = &node.value else {
        return Err(Refusal::new("wrong type", "http(s)://HOST[:PORT]"));
    };
    parse_url(text)
}

/// `http://HOST[:PORT]` or `https://…`, without path, query or user.
fn parse_url(text: &str) -> Result<http::Uri, Refusal> {
    let refusal = || Refusal::new("not a URL", "http(s)://HOST[:PORT]");
    let uri = callable(text).ok_or_else(refusal)?;
    if matches!(uri.path(), "" | "/") { Ok(uri) } else { Err(refusal()) }
}

/// As `parse_url`, but with a path that every request goes below.
pub fn parse_base(text: &str) -> Result<http::Uri, Refusal> {
    callable(text).ok_or_else(|| Refusal::new("not a URL", "http(s)://HOST[:PORT][/BASE]"))
}

/// An address with a scheme and a host, without query or user.
fn callable(text: &str) -> Option<http::Uri> {
    let uri: http::Uri = text.trim_end_matches('/').parse().ok()?;
    let good = matches!(uri.scheme_str(), Some("http" | "https"))
        && uri.authority().is_some_and(|authority| !authority.as_str().contains('@'))
        && uri.host().is_some_and(|host| !host.is_empty())
        && uri.query().is_none();
    good.then_some(uri)
}

/// Which keys the reading of files has asked for, so that a test can walk the settings.
#[cfg(test)]
pub(super) mod asked {
    use std::cell::RefCell;
    use std::collections::BTreeSet;

    thread_local! {
        static ASKED: RefCell<BTreeSet<String>> = RefCell::default();
    }

    pub(super) fn note(path: String) {
        ASKED.with_borrow_mut(|asked| asked.insert(path));
    }

    /// All since the last time.
    pub(crate) fn take() -> BTreeSet<String> {
        ASKED.take()
    }
}
