//! The URL of a store: address and login.

use std::fmt;

use super::values::percent_decoded;

/// Address and login of a store.
#[derive(Clone, PartialEq, Eq)]
pub struct StoreUrl {
    /// True for TLS.
    pub tls: bool,
    /// Host name or IP address.
    pub host: String,
    /// Port.
    pub port: u16,
    /// Number of the database.
    pub database: i64,
    /// User; `None` for the default one.
    pub user: Option<String>,
    /// Password, if it is in the URL.
    pub password: Option<String>,
}

/// As [`fmt::Display`]: without user and password.
impl fmt::Debug for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.tls { "rediss" } else { "redis" };
        let host = if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.clone() };
        write!(f, "{scheme}://{host}:{}/{}", self.port, self.database)
    }
}

impl StoreUrl {
    /// Parses the URL of a store; `None` if it is none. Reserved characters of user and password
    /// are percent-encoded.
    pub fn parse(text: &str) -> Option<Self> {
        let (scheme, rest) = text.split_once("://")?;
        let tls = match scheme {
            "redis" => false,
            "rediss" => true,
            _ => return None,
        };
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let database = if path.is_empty() { 0 } else { path.parse().ok().filter(|number| *number >= 0)? };
        let (login, address) =
            authority.rsplit_once('@').map_or((None, authority), |(login, address)| (Some(login), address));
        let (host, port) = host_and_port(address)?;
        let (user, password) = login.map_or(Some((None, None)), login_of)?;
        Some(Self { tls, host, port, database, user, password })
    }
}

/// Host, and port or the default one.
fn host_and_port(address: &str) -> Option<(String, u16)> {
    let (host, port) = match address.strip_prefix('[') {
        Some(ipv6) => ipv6.split_once(']').map(|(host, rest)| (host, rest.strip_prefix(':')))?,
        None => address.split_once(':').map_or((address, None), |(host, port)| (host, Some(port))),
    };
    let port = port.map_or(Some(6379), |port| port.parse().ok().filter(|port| *port > 0))?;
    let is_part = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b':');
    let named = !host.is_empty() && host.bytes().all(is_part);
    named.then(|| (host.to_owned(), port))
}

/// User and password of `[USER]:PASSWORD`, or of a user alone.
fn login_of(login: &str) -> Option<(Option<String>, Option<String>)> {
    let (user, password) = login.split_once(':').map_or((login, None), |(user, pass)| (user, Some(pass)));
    let user = Some(percent_decoded(user)?).filter(|user| !user.is_empty());
    match password {
        None => Some((user, None)),
        Some("") => None,
        Some(password) => Some((user, Some(percent_decoded(password)?))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_logins_are_read_and_never_shown() {
        let url = StoreUrl::parse("rediss://fore%3Atell:s%40cret@[::1]:7000/2").unwrap();
        assert_eq!((url.user.as_deref(), url.password.as_deref()), (Some("fore:tell"), Some("s@cret")));
        assert_eq!(format!("{url} {url:?}"), "rediss://[::1]:7000/2 rediss://[::1]:7000/2");
        let plain = StoreUrl::parse("redis://store").unwrap();
        assert_eq!((plain.tls, plain.host.as_str(), plain.port, plain.database), (false, "store", 6379, 0));
        let secret = StoreUrl::parse("redis://:pass@10.0.0.1/").unwrap();
        assert_eq!((secret.user, secret.password), (None, Some("pass".to_owned())));
        for wrong in [
            "http://store",
            "store:6379",
            "redis://",
            "redis://:6379",
            "redis://store:x",
            "redis://store:",
            "redis://store/x",
            "redis://store/-1",
            "redis://store/1/2",
            "redis://a:@store",
            "redis://a:%zz@store",
            "redis://store:70000",
        ] {
            assert!(StoreUrl::parse(wrong).is_none(), "{wrong}");
        }
    }
}
