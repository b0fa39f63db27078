//! Reads settings from a parsed document. An error is recorded with its line and path, and reading
//! continues.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::named::{FileKind, Named};
use super::problem::{Problems, Refusal};
use super::values;
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
}

/// A value of the document and its path.
#[derive(Clone)]
pub struct Item<'n> {
    /// The value.
    pub node: &'n Node,
    /// Path of the value, such as `backends[0].name`; empty for the root.
    pub path: String,
    problems: &'n Problems,
}

impl<'n> Item<'n> {
    /// The root of a document; problems go to `problems`.
    pub fn root(node: &'n Node, problems: &'n Problems) -> Self {
        Self { node, path: String::new(), problems }
    }

    /// Reports that this value is refused.
    pub fn refuse(&self, refusal: Refusal) {
        self.refuse_as(refusal, self.node.got());
    }

    /// As [`Self::refuse`], but shows `got` instead of the value itself.
    pub fn refuse_as(&self, refusal: Refusal, got: String) {
        self.problems.add(self.node.line, &self.path, refusal, got);
    }

    /// The value converted by `parse`; if that fails, the problem is reported and `None` returned.
    pub fn read<T>(&self, parse: impl FnOnce(&Node) -> Result<T, Refusal>) -> Option<T> {
        parse(self.node).map_err(|refusal| self.refuse(refusal)).ok()
    }

    /// The value as a map. `null` reads as an empty map; any other type is reported and also reads
    /// as empty.
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

    /// The elements of a list; any other type is reported and reads as an empty list.
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

    /// The entries of a map whose keys the user chooses, such as names.
    pub fn members(&self) -> Vec<(&'n str, Item<'n>)> {
        let section = self.section();
        let item = |(key, node): &'n (Key, Node)| {
            let path = section.position(&key.name);
            (key.name.as_str(), Item { node, path, problems: self.problems })
        };
        section.entries.iter().map(item).collect()
    }

    /// The elements of a list converted by `parse`; those that fail are reported and left out.
    pub fn list<T>(&self, parse: impl Fn(&Node) -> Result<T, Refusal>) -> Vec<T> {
        self.items().iter().filter_map(|item| item.read(&parse)).collect()
    }
}

impl<'n> Section<'n> {
    /// The value of `key`; `None` if the map does not have it.
    pub fn item(&mut self, key: &'static str) -> Option<Item<'n>> {
        self.known.push(key);
        #[cfg(test)]
        asked::note(self.position(key));
        let (_, node) = self.entries.iter().find(|(name, _)| name.name == key)?;
        Some(Item { node, path: self.position(key), problems: self.problems })
    }

    /// Line of `key`; that of the map if it does not have it.
    pub fn line(&self, key: &str) -> u64 {
        self.entries.iter().find(|(name, _)| name.name == key).map_or(self.line, |(name, _)| name.line)
    }

    /// The value of `key`; `default` if the key is missing or its value is refused.
    pub fn or<T>(
        &mut self,
        key: &'static str,
        default: T,
        parse: impl FnOnce(&Node) -> Result<T, Refusal>,
    ) -> T {
        self.item(key).and_then(|item| item.read(parse)).unwrap_or(default)
    }

    /// The value of `key`. `null` and a refused value give `None`, a missing key gives `default`.
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

    /// The value of a required `key`; a missing key is reported and gives `None`.
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

    /// The map under `key`; an empty map if the key is missing.
    #[must_use]
    pub fn section(&mut self, key: &'static str) -> Section<'n> {
        match self.item(key) {
            Some(item) => item.section(),
            None => Section {
                entries: &[],
                path: self.position(key),
                line: self.line,
                known: Vec::new(),
                broken: false,
                problems: self.problems,
            },
        }
    }

    /// The list under `key`, its elements converted by `parse`; `default` if the key is missing.
    pub fn list<T>(
        &mut self,
        key: &'static str,
        default: Vec<T>,
        parse: impl Fn(&Node) -> Result<T, Refusal>,
    ) -> Vec<T> {
        self.item(key).map_or(default, |item| item.list(parse))
    }

    /// Reports a problem with `key`, on the key's line or, if it is missing, on the map's.
    pub fn refuse(&self, key: &str, refusal: Refusal, got: &str) {
        if self.broken {
            return;
        }
        self.problems.add(self.line(key), &self.position(key), refusal, got.to_owned());
    }

    /// The file path under `key`, recorded so that the file is checked later; a missing key and
    /// `null` give `None`.
    pub fn file(&mut self, key: &'static str, kind: FileKind) -> Option<PathBuf> {
        let named = self.maybe(key, None, path)?;
        self.names(key, kind, &named);
        Some(named)
    }

    /// The required file path under `key`, recorded so that the file is checked later.
    pub fn must_file(&mut self, key: &'static str, kind: FileKind) -> Option<PathBuf> {
        let named = self.must(key, "a path", path)?;
        self.names(key, kind, &named);
        Some(named)
    }

    /// Records that `key` names the file `named`.
    pub fn names(&self, key: &str, kind: FileKind, named: &Path) {
        self.problems.name(Named {
            path: named.to_owned(),
            kind,
            file: self.problems.file().to_owned(),
            line: Some(self.line(key)),
            position: self.position(key),
        });
    }

    /// Reports `key`, if it is present, as one that may not be set here.
    pub fn forbid(&mut self, key: &'static str, allowed: &str) {
        if let Some(item) = self.item(key) {
            item.refuse(Refusal::new("has no meaning here", allowed));
        }
    }

    /// Reports every key that was not looked up as unknown. At the top of a file, `x-` keys are
    /// reserved for its author, as holders of anchors.
    pub fn close(self) {
        let own = |key: &Key| self.path.is_empty() && is_own(&key.name);
        let known = |key: &Key| self.known.contains(&key.name.as_str()) || own(key);
        for (key, _) in self.entries.iter().filter(|(key, _)| !known(key)).take(UNKNOWN) {
            let refusal = Refusal::new("unknown key", self.known.join("|")).near(&key.name, &self.known);
            self.problems.add(key.line, &self.position(&key.name), refusal, key.name.clone());
        }
    }

    fn position(&self, key: &str) -> String {
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
                    self.problems.add(key.line, &self.position(&key.name), refusal, key.name.clone());
                }
            }
        }
    }
}

/// True if a key at the top of a file is reserved for its author.
pub fn is_own(key: &str) -> bool {
    key.starts_with("x-")
}

/// Reads `true` or `false`.
pub fn boolean(node: &Node) -> Result<bool, Refusal> {
    match node.value {
        Value::Bool(value) => Ok(value),
        _ => Err(Refusal::new("wrong type", "true|false")),
    }
}

/// Reads a text; an empty one is refused.
pub fn text(node: &Node) -> Result<String, Refusal> {
    let text = node.text().filter(|text| !text.is_empty());
    text.map(str::to_owned).ok_or_else(|| Refusal::new("wrong type", "a text"))
}

/// Reads a path.
pub fn path(node: &Node) -> Result<PathBuf, Refusal> {
    text(node).map(PathBuf::from).map_err(|_| Refusal::new("wrong type", "a path"))
}

/// Reads one of these words and gives its value.
pub fn word<T: Copy>(words: &'static [(&'static str, T)]) -> impl Fn(&Node) -> Result<T, Refusal> {
    move |node| {
        let names: Vec<&str> = words.iter().map(|(name, _)| *name).collect();
        let refusal = Refusal::new("unknown value", names.join("|"));
        // YAML 1.1 reads an unquoted `off` as false, and templates still do.
        let meant = |word: &str| names.contains(&word).then(|| word.to_owned());
        let text = match &node.value {
            Value::Text(text) => text,
            Value::Bool(false) => return Err(Refusal { suggestion: meant("off"), ..refusal }),
            Value::Bool(true) => return Err(Refusal { suggestion: meant("on"), ..refusal }),
            _ => return Err(refusal),
        };
        let found = words.iter().find(|(name, _)| name == text);
        found.map(|(_, value)| *value).ok_or_else(|| refusal.near(text, &names))
    }
}

/// Reads a whole number in an inclusive range.
pub fn whole<T: TryFrom<i64>>(range: RangeInclusive<i64>) -> impl Fn(&Node) -> Result<T, Refusal> {
    move |node| {
        let allowed = format!("{}..={}", range.start(), range.end());
        let Value::Whole(value) = node.value else { return Err(Refusal::new("wrong type", allowed)) };
        let value =
            Some(value).filter(|value| range.contains(value)).and_then(|value| T::try_from(value).ok());
        value.ok_or_else(|| Refusal::new("out of range", allowed))
    }
}

/// Reads a number in an inclusive range.
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

/// Reads a number from 0 to 1.
pub fn ratio(node: &Node) -> Result<f64, Refusal> {
    number(0.0..=1.0)(node)
}

/// Reads a duration, `\d+(ms|s|m|h)`; zero is allowed.
pub fn duration(node: &Node) -> Result<Duration, Refusal> {
    match &node.value {
        Value::Text(text) => values::duration(text),
        _ => None,
    }
    .ok_or_else(|| Refusal::new("not a duration", r"\d+(ms|s|m|h)"))
}

/// Reads a duration of at least 1 ms.
pub fn period(node: &Node) -> Result<Duration, Refusal> {
    let duration = duration(node)?;
    if duration.is_zero() { Err(Refusal::new("out of range", "at least 1ms")) } else { Ok(duration) }
}

/// Reads a size, `\d+(B|KiB|MiB|GiB)`, of at least one byte; the result is in bytes.
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

/// Allowed forms of an address to listen on.
pub const ADDRESS: &str = "IP:PORT, localhost:PORT or :PORT";

/// Reads an address to listen on, see [`parse_address`].
pub fn address(node: &Node) -> Result<SocketAddr, Refusal> {
    let Value::Text(text) = &node.value else { return Err(Refusal::new("wrong type", ADDRESS)) };
    parse_address(text)
}

/// Parses an address to listen on: `IP:PORT`, `localhost:PORT` (127.0.0.1), or `:PORT` (0.0.0.0,
/// every IPv4 address of the machine).
pub fn parse_address(text: &str) -> Result<SocketAddr, Refusal> {
    let port = |ip, port: &str| port.parse().ok().map(|port| SocketAddr::new(IpAddr::V4(ip), port));
    let named = match text.rsplit_once(':') {
        Some(("", all)) => port(Ipv4Addr::UNSPECIFIED, all),
        Some(("localhost", own)) => port(Ipv4Addr::LOCALHOST, own),
        _ => text.parse().ok(),
    };
    named.ok_or_else(|| Refusal::new("not an address", ADDRESS))
}

/// Reads `http://HOST[:PORT]` or `https://…`, without path, query or user.
pub fn url(node: &Node) -> Result<http::Uri, Refusal> {
    let Value::Text(text) = &node.value else {
        return Err(Refusal::new("wrong type", "http(s)://HOST[:PORT]"));
    };
    parse_url(text)
}

/// Parses `http://HOST[:PORT]` or `https://…`, without path, query or user.
fn parse_url(text: &str) -> Result<http::Uri, Refusal> {
    let refusal = || Refusal::new("not a URL", "http(s)://HOST[:PORT]");
    let uri = callable(text).ok_or_else(refusal)?;
    if matches!(uri.path(), "" | "/") { Ok(uri) } else { Err(refusal()) }
}

/// As `parse_url`, but a path is allowed: it is put before every request's path.
pub fn parse_base(text: &str) -> Result<http::Uri, Refusal> {
    callable(text).ok_or_else(|| Refusal::new("not a URL", "http(s)://HOST[:PORT][/BASE]"))
}

/// Parses an `http` or `https` URL with a host, without query or user; trailing slashes are cut.
fn callable(text: &str) -> Option<http::Uri> {
    let uri: http::Uri = text.trim_end_matches('/').parse().ok()?;
    let good = matches!(uri.scheme_str(), Some("http" | "https"))
        && uri.authority().is_some_and(|authority| !authority.as_str().contains('@'))
        && uri.host().is_some_and(|host| !host.is_empty())
        && uri.query().is_none();
    good.then_some(uri)
}

/// Records the keys that were looked up, so that a test can list every setting.
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

    /// The paths recorded since the last call.
    pub(crate) fn take() -> BTreeSet<String> {
        ASKED.take()
    }
}
