//! Parsers for percent-encoded text and networks. Patterns and revisions are re-exported from
//! [`foretell_policy`].

use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use foretell_policy::form;
pub use foretell_policy::{Glob, Revision};
use http::Uri;
use ipnet::{AddrParseError, IpNet};

/// The server that renders a backend's chat requests and parses outputs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Render {
    /// The backend itself, if it can.
    #[default]
    Backend,
    /// None: what has to be rendered is passed through.
    Never,
    /// The one at this URL.
    By(Uri),
}

/// Source of a model's tokenizer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum TokenizerSource {
    /// The backend's own, fetched from its `/tokenizer.json`.
    #[default]
    Backend,
    /// A `tokenizer.json` file, or a folder that has one.
    File(PathBuf),
}

/// Parses a duration of the command line as [`form::duration`] does.
///
/// # Errors
/// The sentence says what is wrong with it, and how a duration is written.
pub fn duration_or_why(text: &str) -> Result<Duration, String> {
    form::duration(text).map_err(|why| why.replace(form::GOT, text))
}

/// Text with its `%XX` decoded; `None` if an escape is malformed or the bytes are no text.
pub fn percent_decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let mut digit = || char::from(rest.next()?).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
        bytes.push(digit()? * 16 + digit()?);
    }
    String::from_utf8(bytes).ok()
}

/// An IP network: one address, or all addresses with the same first bits (`ADDRESS/BITS`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network(IpNet);

impl Network {
    /// True if `address` is in the network. An IPv4-mapped IPv6 address counts as IPv4.
    pub fn contains(&self, address: IpAddr) -> bool {
        self.0.contains(&address.to_canonical())
    }
}

impl FromStr for Network {
    type Err = AddrParseError;

    fn from_str(text: &str) -> Result<Self, AddrParseError> {
        let network =
            text.parse().or_else(|error| text.parse().map(|one: IpAddr| one.into()).map_err(|_| error));
        network.map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_escape_is_two_hexadecimal_digits() {
        assert_eq!(percent_decoded("a%2Fb%c3%A9").as_deref(), Some("a/bé"));
        for wrong in ["%", "%2", "%+f", "% f", "%-1", "%gg", "%ff", "%é1"] {
            assert_eq!(percent_decoded(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn networks_hold_their_addresses() {
        let inside = |network: &str, address: &str| {
            network.parse::<Network>().unwrap().contains(address.parse().unwrap())
        };
        assert!(inside("10.0.0.0/8", "10.255.1.2"));
        assert!(!inside("10.0.0.0/8", "11.0.0.1"));
        assert!(inside("10.0.0.0/8", "::ffff:10.0.0.1"));
        assert!(inside("192.168.1.7", "192.168.1.7"));
        assert!(!inside("192.168.1.7", "192.168.1.8"));
        assert!(inside("0.0.0.0/0", "1.2.3.4"));
        assert!(inside("::/0", "2001:db8::1"));
        assert!(inside("2001:db8::/32", "2001:db8:1::"));
        assert!("10.0.0.0/33".parse::<Network>().is_err());
        assert!("10.0.0".parse::<Network>().is_err());
    }
}
