//! The forms of texts that files may hold, each with its name in schemas. How durations and sizes
//! are written is in [`foretell_policy::form`].

use std::borrow::Cow;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use foretell_policy::form::{Delay, Form, Period, Size};
use http::Uri;

use super::problem::Refusal;
use super::store_url::StoreUrl;
use super::values::{Network, Render, TokenizerSource};
use foretell_net::http::is_callable;

/// Checks a text; the message of an error is that of [`Form::parse`].
pub type Check = fn(&str) -> Result<(), Cow<'static, str>>;

fn check<F: Form>(text: &str) -> Result<(), Cow<'static, str>> {
    F::parse(text).map(drop)
}

/// Parses a text that does not come from a file.
///
/// # Errors
/// It has another form.
pub fn parse<F: Form>(text: &str) -> Result<F::Value, Refusal> {
    F::parse(text).map_err(|message| Refusal::of(message, F::ALLOWED))
}

/// Declares forms: type of the values, name, pattern, message for other texts, what to write
/// instead, and the functions that parse and show a value.
macro_rules! forms {
    ($(
        $(#[$doc:meta])*
        $name:ident($value:ty) $format:literal, $pattern:literal, $wrong:literal, $allowed:literal,
        $parse:expr, $show:expr;
    )*) => {
        $(
            $(#[$doc])*
            #[derive(Debug)]
            pub struct $name;

            impl Form for $name {
                type Value = $value;
                const FORMAT: &'static str = $format;
                const PATTERN: &'static str = $pattern;
                const ALLOWED: &'static str = $allowed;

                fn parse(text: &str) -> Result<$value, Cow<'static, str>> {
                    let parse: fn(&str) -> Option<$value> = $parse;
                    parse(text).ok_or(Cow::Borrowed($wrong))
                }

                fn show(value: &$value) -> Option<String> {
                    let show: fn(&$value) -> Option<String> = $show;
                    show(value)
                }
            }
        )*

        /// The form with this name.
        pub fn named(format: &str) -> Option<Check> {
            match format {
                Delay::FORMAT => Some(check::<Delay>),
                Period::FORMAT => Some(check::<Period>),
                Size::<u64>::FORMAT => Some(check::<Size<u64>>),
                $($format => Some(check::<$name>),)*
                _ => None,
            }
        }
    };
}

forms! {
    /// A file or folder.
    FilePath(PathBuf) "path", ".", "not a path", "a path",
        |text| (!text.is_empty()).then(|| text.into()), |_| None;
    /// A text that is required, so that it has no default to show.
    Text(String) "text", ".", "not a text", "a text",
        |text| (!text.is_empty()).then(|| text.to_owned()), |_| None;
    /// The name of a policy. It is used in headers and metrics, so few characters are allowed.
    PolicyName(String) "name", "^[A-Za-z0-9._-]{1,64}$", "not a name", "1 to 64 of A-Z a-z 0-9 . _ -",
        |text| is_of(text, 64, b"._-").then(|| text.to_owned()), |_| None;
    /// A prefix of keys in a store.
    KeyPrefix(String) "key", "^[A-Za-z0-9._-]{1,64}$", "not a name for keys",
        "up to 64 letters, digits, `-`, `.` and `_`",
        |text| is_of(text, 64, b"._-").then(|| text.to_owned()), |key| Some(key.clone());
    /// An address to listen on: `IP:PORT`, `localhost:PORT` (127.0.0.1), or `:PORT` (0.0.0.0, every
    /// IPv4 address of the machine).
    Address(SocketAddr) "address", r"^.*:\d+$", "not an address", "IP:PORT, localhost:PORT or :PORT",
        address, |address| Some(address.to_string());
    /// A host name without a port.
    HostName(String) "host", "^[A-Za-z0-9._-]+$", "not a host name", "a name without a port",
        |text| is_of(text, usize::MAX, b"-._").then(|| text.to_owned()), |_| None;
    /// A host name with a port.
    HostPort(String) "host and port", r"^[^/]+:\d*[1-9]\d*$", "not a host with a port", "HOST:PORT",
        |text| has_port(text).then(|| text.to_owned()), |_| None;
    /// A header name, in lower case.
    HeaderName(String) "header", "^[!#$%&'*+.^_`|~0-9A-Za-z-]+$", "not a header name", "a header name",
        |text| Some(http::HeaderName::from_bytes(text.as_bytes()).ok()?.to_string()), |_| None;
    /// One address or a network.
    Peers(Network) "network", r"^[0-9A-Fa-f:.]*[0-9A-Fa-f:](/\d+)?$", "not a network", "IP or IP/BITS",
        |text| text.parse().ok(), |_| None;
    /// A URL without path, query or user.
    Origin(Uri) "origin", "^https?://", "not a URL", "http(s)://HOST[:PORT]",
        origin, |_| None;
    /// The address of a server; its path is put before every request's path. A schema cannot tell
    /// where a variable's value ends.
    Base(Uri) "base", r"^(https?://[^?#@]+|.*\$\{.*)$", "not a URL", "http(s)://HOST[:PORT][/BASE]",
        callable, |_| None;
    /// A page of a server.
    PagePath(String) "page", "^/", "not a path of the backend", "/PATH",
        |text| is_page(text).then(|| text.to_owned()), |page| Some(page.clone());
    /// The renderer of a backend's chats.
    Renderer(Render) "renderer", "^(backend$|https?://)", "not a URL", "backend|http(s)://HOST[:PORT]",
        |text| if text == "backend" { Some(Render::Backend) } else { origin(text).map(Render::By) },
        |_| Some("backend".to_owned());
    /// Where a tokenizer comes from.
    Tokenizer(TokenizerSource) "tokenizer", ".", "not a path", "backend|PATH",
        tokenizer,
        |_| Some("backend".to_owned());
    /// A Unix socket. A TCP port of loopback is shared by all containers of a pod.
    UnixSocket(PathBuf) "socket", "^unix:/", "not a Unix socket", "unix:/PATH",
        |text| text.strip_prefix("unix:").filter(|path| path.starts_with('/')).map(Into::into), |_| None;
    /// The permissions of a file.
    FileMode(u32) "mode", "^0?[0-7]{3}$", "not permissions", "three octal digits, as \"0660\"",
        |text| u32::from_str_radix(text, 8).ok().filter(|mode| *mode <= 0o777 && text.len() >= 3),
        |mode| Some(format!("0{mode:o}"));
    /// Address and login of a store.
    Store(StoreUrl) "store", "^rediss?://", "not the URL of a store",
        "redis(s)://[[USER]:PASSWORD@]HOST[:PORT][/DATABASE]",
        StoreUrl::parse, |_| None;
}

/// True if the text has up to `max` letters, digits and characters of `more`, and at least one.
fn is_of(text: &str, max: usize, more: &[u8]) -> bool {
    let good = |byte: u8| byte.is_ascii_alphanumeric() || more.contains(&byte);
    (1..=max).contains(&text.len()) && text.bytes().all(good)
}

fn address(text: &str) -> Option<SocketAddr> {
    let port = |ip, port: &str| port.parse().ok().map(|port| SocketAddr::new(IpAddr::V4(ip), port));
    match text.rsplit_once(':') {
        Some(("", number)) => port(Ipv4Addr::UNSPECIFIED, number),
        Some(("localhost", number)) => port(Ipv4Addr::LOCALHOST, number),
        _ => text.parse().ok(),
    }
}

fn has_port(text: &str) -> bool {
    text.rsplit_once(':').is_some_and(|(host, port)| {
        !host.is_empty() && !host.contains('/') && port.parse::<u16>().is_ok_and(|port| port > 0)
    })
}

fn is_page(text: &str) -> bool {
    text.starts_with('/') && text.parse::<http::uri::PathAndQuery>().is_ok()
}

fn origin(text: &str) -> Option<Uri> {
    callable(text).filter(|uri| matches!(uri.path(), "" | "/"))
}

fn tokenizer(text: &str) -> Option<TokenizerSource> {
    match text {
        "" => None,
        "backend" => Some(TokenizerSource::Backend),
        path => Some(TokenizerSource::File(path.into())),
    }
}

/// Parses an `http` or `https` URL with a host, without query or user; trailing slashes are cut.
fn callable(text: &str) -> Option<Uri> {
    let uri: Uri = text.trim_end_matches('/').parse().ok()?;
    let good = matches!(uri.scheme_str(), Some("http" | "https"))
        && uri
            .authority()
            .is_some_and(|authority| is_callable(authority) && !authority.as_str().contains('@'))
        && uri.host().is_some_and(|host| !host.is_empty())
        && uri.query().is_none();
    good.then_some(uri)
}

#[cfg(test)]
mod tests {
    use super::super::{policy, process};
    use super::*;

    #[test]
    fn every_form_that_a_setting_names_is_checked() {
        for schema in [policy::settings(), process::file::settings()] {
            let text = schema.to_string();
            let formats: Vec<&str> =
                text.split("\"format\":\"").skip(1).filter_map(|rest| rest.split('"').next()).collect();
            assert!(!formats.is_empty());
            for format in formats {
                assert!(named(format).is_some(), "{format}");
            }
        }
    }
}
