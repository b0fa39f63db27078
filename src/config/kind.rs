//! Kinds of values: how a value of a file is read, and how its schema describes it.

use std::fmt::Display;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Value as Json, json};

use super::problem::{GOT, Refusal};
use super::values::{self, Unmeasured};
use super::yaml::{Node, Value};
use foretell_net::http::is_callable;

type Read<T> = Box<dyn Fn(&Node) -> Result<T, Refusal>>;

pub struct Kind<T> {
    read: Read<T>,
    /// A value as a file would have it.
    show: Box<dyn Fn(&T) -> Json>,
    /// JSON Schema of a value, draft 2020-12.
    schema: Json,
}

impl<T> Kind<T> {
    /// A kind without a form in files, for values that have no default.
    pub fn new(schema: Json, read: impl Fn(&Node) -> Result<T, Refusal> + 'static) -> Self {
        Self { read: Box::new(read), show: Box::new(|_| Json::Null), schema }
    }

    /// With the form that a value has in files.
    #[must_use]
    pub fn shown(self, show: impl Fn(&T) -> Json + 'static) -> Self {
        Self { show: Box::new(show), ..self }
    }

    /// Reads a value.
    ///
    /// # Errors
    /// It is not of this kind.
    pub fn read(&self, node: &Node) -> Result<T, Refusal> {
        (self.read)(node)
    }

    /// The schema, and the default that a file would write; `Null` if it has no form.
    pub(super) fn declared(&self, default: Option<&T>) -> (Json, Json) {
        (self.schema.clone(), default.map_or(Json::Null, |default| (self.show)(default)))
    }
}

/// `true` or `false`.
pub fn boolean() -> Kind<bool> {
    let read = |node: &Node| match node.value {
        Value::Bool(value) => Ok(value),
        _ => Err(Refusal::new("wrong type", "true|false")),
    };
    Kind::new(json!({ "type": "boolean" }), read).shown(|value| json!(value))
}

/// A text; an empty one is refused.
pub fn text() -> Kind<String> {
    Kind::new(json!({ "type": "string", "minLength": 1 }), text_of).shown(|text| json!(text))
}

fn text_of(node: &Node) -> Result<String, Refusal> {
    let text = node.text().filter(|text| !text.is_empty());
    text.map(str::to_owned).ok_or_else(|| Refusal::new("wrong type", "a text"))
}

/// A text of a form: `pattern` is a regular expression for its schema, `parse` decides.
pub fn form<T: 'static>(
    pattern: &str,
    refusal: impl Fn() -> Refusal + 'static,
    parse: impl Fn(&str) -> Option<T> + 'static,
) -> Kind<T> {
    let read = move |node: &Node| text_of(node).ok().and_then(|text| parse(&text)).ok_or_else(&refusal);
    Kind::new(json!({ "type": "string", "pattern": pattern }), read)
}

pub fn path() -> Kind<PathBuf> {
    let read =
        |node: &Node| text_of(node).map(PathBuf::from).map_err(|_| Refusal::new("wrong type", "a path"));
    Kind::new(json!({ "type": "string", "minLength": 1 }), read)
}

pub fn word<T: Copy + PartialEq>(words: &'static [(&'static str, T)]) -> Kind<T> {
    word_or_hint(words, &[])
}

/// One of these words. `hints` has words that are used elsewhere, and what to write here instead.
pub fn word_or_hint<T: Copy + PartialEq>(
    words: &'static [(&'static str, T)],
    hints: &'static [(&'static str, &'static str)],
) -> Kind<T> {
    let names: Vec<&str> = words.iter().map(|(name, _)| *name).collect();
    let schema = json!({ "enum": names });
    let read = move |node: &Node| {
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
        found.map(|(_, value)| *value).ok_or_else(|| refusal.near(text, &names).hinted(text, hints))
    };
    let show = |value: &T| {
        words.iter().find(|(_, other)| other == value).map_or(Json::Null, |(name, _)| json!(name))
    };
    Kind::new(schema, read).shown(show)
}

/// An inclusive range in words.
pub fn between(least: impl Display, most: impl Display) -> String {
    format!("{least} to {most}")
}

pub fn whole<T: TryFrom<i64> + Display>(range: RangeInclusive<i64>) -> Kind<T> {
    let schema = json!({ "type": "integer", "minimum": range.start(), "maximum": range.end() });
    let read = move |node: &Node| {
        let allowed = between(range.start(), range.end());
        let Value::Whole(value) = node.value else { return Err(Refusal::new("wrong type", allowed)) };
        let value =
            Some(value).filter(|value| range.contains(value)).and_then(|value| T::try_from(value).ok());
        value.ok_or_else(|| Refusal::new("out of range", allowed))
    };
    Kind::new(schema, read).shown(|value: &T| json!(value.to_string().parse::<i64>().ok()))
}

pub fn number(range: RangeInclusive<f64>) -> Kind<f64> {
    let schema = json!({ "type": "number", "minimum": range.start(), "maximum": range.end() });
    let read = move |node: &Node| {
        let allowed = between(range.start(), range.end());
        let value = match node.value {
            Value::Whole(value) => value as f64,
            Value::Number(value) => value,
            _ => return Err(Refusal::new("wrong type", allowed)),
        };
        if range.contains(&value) { Ok(value) } else { Err(Refusal::new("out of range", allowed)) }
    };
    Kind::new(schema, read).shown(|value| json!(value))
}

/// A number from 0 to 1.
pub fn ratio() -> Kind<f64> {
    number(0.0..=1.0)
}

/// A duration, such as `30s`; zero is allowed.
pub fn duration() -> Kind<Duration> {
    Kind::new(json!({ "type": "string", "pattern": r"^\d+(ms|s|m|h)$" }), duration_of).shown(show_duration)
}

/// A duration of at least 1 ms.
pub fn period() -> Kind<Duration> {
    let read = |node: &Node| match duration_of(node)? {
        Duration::ZERO => Err(Refusal::new("out of range", "at least 1ms")),
        duration => Ok(duration),
    };
    Kind::new(json!({ "type": "string", "pattern": r"^0*[1-9]\d*(ms|s|m|h)$" }), read).shown(show_duration)
}

fn duration_of(node: &Node) -> Result<Duration, Refusal> {
    let read = match &node.value {
        Value::Text(text) => values::duration(text),
        Value::Whole(_) => Err(Unmeasured::NoDuration),
        _ => return Err(Refusal::new("wrong type", format!("a duration such as {}", values::DURATIONS))),
    };
    read.map_err(|wrong| Refusal::sentence(wrong.about(GOT, is_bare(node))))
}

/// True if the value is a number without a unit.
fn is_bare(node: &Node) -> bool {
    match &node.value {
        Value::Whole(_) => true,
        Value::Text(text) => values::is_bare(text),
        _ => false,
    }
}

fn show_duration(duration: &Duration) -> Json {
    json!(shown(*duration))
}

/// A duration as files write it, such as `30s`.
pub fn shown(duration: Duration) -> String {
    let (millis, units) = (duration.as_millis(), [(3_600_000, "h"), (60_000, "m"), (1_000, "s")]);
    let found = units.into_iter().find(|(unit, _)| millis % unit == 0 && millis > 0);
    let (unit, name) = found.unwrap_or((1, "ms"));
    format!("{}{name}", millis / unit)
}

/// A size, such as `64MiB`, of at least one byte; the result is in bytes.
pub fn size<T: Copy + TryFrom<u64> + TryInto<u64>>() -> Kind<T> {
    let read = |node: &Node| {
        let size = match &node.value {
            Value::Text(text) => values::size(text),
            Value::Whole(_) => Err(Unmeasured::NoSize),
            _ => return Err(Refusal::new("wrong type", format!("a size such as {}", values::SIZES))),
        };
        match size {
            Err(wrong) => Err(Refusal::sentence(wrong.about(GOT, is_bare(node)))),
            Ok(0) => Err(Refusal::new("out of range", "at least 1B")),
            Ok(size) => T::try_from(size).map_err(|_| Refusal::new("out of range", "what memory can hold")),
        }
    };
    let show = |size: &T| {
        let size = (*size).try_into().unwrap_or(u64::MAX);
        let found = [(30, "GiB"), (20, "MiB"), (10, "KiB")]
            .into_iter()
            .find(|(bits, _)| size.trailing_zeros() >= *bits);
        let (bits, name) = found.unwrap_or((0, "B"));
        json!(format!("{}{name}", size >> bits))
    };
    Kind::new(json!({ "type": "string", "pattern": r"^0*[1-9]\d*(B|KiB|MiB|GiB)$" }), read).shown(show)
}

/// Allowed forms of an address to listen on.
pub const ADDRESS: &str = "IP:PORT, localhost:PORT or :PORT";

/// An address to listen on, see [`parse_address`].
pub fn address() -> Kind<SocketAddr> {
    let read = |node: &Node| {
        let Value::Text(text) = &node.value else { return Err(Refusal::new("wrong type", ADDRESS)) };
        parse_address(text)
    };
    Kind::new(json!({ "type": "string", "pattern": r"^.*:\d+$" }), read)
        .shown(|address| json!(address.to_string()))
}

/// Parses an address to listen on: `IP:PORT`, `localhost:PORT` (127.0.0.1), or `:PORT` (0.0.0.0,
/// every IPv4 address of the machine).
///
/// # Errors
/// It is none of these.
pub fn parse_address(text: &str) -> Result<SocketAddr, Refusal> {
    let port = |ip, port: &str| port.parse().ok().map(|port| SocketAddr::new(IpAddr::V4(ip), port));
    let named = match text.rsplit_once(':') {
        Some(("", all)) => port(Ipv4Addr::UNSPECIFIED, all),
        Some(("localhost", own)) => port(Ipv4Addr::LOCALHOST, own),
        _ => text.parse().ok(),
    };
    named.ok_or_else(|| Refusal::new("not an address", ADDRESS))
}

/// `http://HOST[:PORT]` or `https://…`, without path, query or user.
pub fn url() -> Kind<http::Uri> {
    let allowed = "http(s)://HOST[:PORT]";
    let read = move |node: &Node| {
        let Value::Text(text) = &node.value else { return Err(Refusal::new("wrong type", allowed)) };
        let uri = callable(text).filter(|uri| matches!(uri.path(), "" | "/"));
        uri.ok_or_else(|| Refusal::new("not a URL", allowed))
    };
    Kind::new(json!({ "type": "string", "pattern": "^https?://" }), read)
}

/// As [`url`], but a path is allowed: it is put before every request's path.
pub fn base() -> Kind<http::Uri> {
    let read = |node: &Node| {
        let text = text_of(node).map_err(|_| Refusal::new("wrong type", BASE))?;
        parse_base(&text)
    };
    // A schema cannot tell where a variable's value ends.
    Kind::new(json!({ "type": "string", "pattern": r"^(https?://[^?#@]+|.*\$\{.*)$" }), read)
}

/// Allowed forms of the address of a server.
const BASE: &str = "http(s)://HOST[:PORT][/BASE]";

/// Parses the address of a server, see [`base`].
///
/// # Errors
/// It is no such URL.
pub fn parse_base(text: &str) -> Result<http::Uri, Refusal> {
    callable(text).ok_or_else(|| Refusal::new("not a URL", BASE))
}

/// Parses an `http` or `https` URL with a host, without query or user; trailing slashes are cut.
fn callable(text: &str) -> Option<http::Uri> {
    let uri: http::Uri = text.trim_end_matches('/').parse().ok()?;
    let good = matches!(uri.scheme_str(), Some("http" | "https"))
        && uri
            .authority()
            .is_some_and(|authority| is_callable(authority) && !authority.as_str().contains('@'))
        && uri.host().is_some_and(|host| !host.is_empty())
        && uri.query().is_none();
    good.then_some(uri)
}
