//! Parsers for durations, sizes, percent-encoded text and networks. Patterns and revisions are
//! re-exported from [`foretell_engines::policy`].

use std::net::IpAddr;
use std::str::FromStr;
use std::time::Duration;

pub use foretell_engines::policy::{Glob, Revision};

/// Durations, as examples for messages.
pub const DURATIONS: &str = "200ms, 30s, 5m or 1h";
/// Sizes, as examples for messages.
pub const SIZES: &str = "512KiB, 64MiB or 2GiB";

/// Parses a duration: a whole number and `ms`, `s`, `m` or `h`; `None` if it is malformed or too
/// large.
pub fn duration(text: &str) -> Option<Duration> {
    let (count, unit) = number_and_unit(text)?;
    let millis = match unit {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => return None,
    };
    count.checked_mul(millis).map(Duration::from_millis)
}

/// Parses a duration of the command line as [`duration`] does.
///
/// # Errors
/// The sentence says what is wrong with it, and how a duration is written.
pub fn duration_or_why(text: &str) -> Result<Duration, String> {
    duration(text).ok_or_else(|| no_quantity(text, is_bare(text), "a duration", DURATIONS))
}

/// True if the text is a number without a unit.
pub fn is_bare(text: &str) -> bool {
    text.parse::<u64>().is_ok()
}

/// The sentence about a value that is not a number with a unit; `bare`: only its unit is missing.
pub fn no_quantity(got: &str, bare: bool, wanted: &str, examples: &str) -> String {
    let wrong = if bare { "has no unit".to_owned() } else { format!("is not {wanted}") };
    format!("{got} {wrong}; write for example {examples}")
}

/// Parses a size, a whole number and `B`, `KiB`, `MiB` or `GiB`, into bytes; `None` if it is
/// malformed or too large.
pub fn size(text: &str) -> Option<u64> {
    let (count, unit) = number_and_unit(text)?;
    let bytes = match unit {
        "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        _ => return None,
    };
    count.checked_mul(bytes)
}

fn number_and_unit(text: &str) -> Option<(u64, &str)> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (count, unit) = text.split_at(digits);
    Some((count.parse().ok()?, unit))
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
pub struct Network {
    address: IpAddr,
    bits: u8,
}

impl Network {
    /// True if `address` is in the network. An IPv4-mapped IPv6 address counts as IPv4.
    pub fn contains(&self, address: IpAddr) -> bool {
        let same = |own: u128, other: u128, width: u32| {
            let shift = width - u32::from(self.bits);
            own.checked_shr(shift).unwrap_or(0) == other.checked_shr(shift).unwrap_or(0)
        };
        match (self.address, address.to_canonical()) {
            (IpAddr::V4(own), IpAddr::V4(other)) => {
                same(u128::from(own.to_bits()), u128::from(other.to_bits()), 32)
            }
            (IpAddr::V6(own), IpAddr::V6(other)) => same(own.to_bits(), other.to_bits(), 128),
            _ => false,
        }
    }
}

impl FromStr for Network {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (address, bits) =
            text.split_once('/').map_or((text, None), |(address, bits)| (address, Some(bits)));
        let address: IpAddr = address.parse().map_err(|_| ())?;
        let width = if address.is_ipv4() { 32 } else { 128 };
        let bits = bits.map_or(Ok(width), |bits| bits.parse().map_err(|_| ()))?;
        if bits <= width { Ok(Self { address, bits }) } else { Err(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_and_sizes_have_their_units_and_nothing_else() {
        assert_eq!(duration("250ms"), Some(Duration::from_millis(250)));
        assert_eq!(duration("2h"), Some(Duration::from_hours(2)));
        assert_eq!(size("32KiB"), Some(32 << 10));
        assert_eq!(size("3GiB"), Some(3 << 30));
        for wrong in
            ["", "5", "s", "-5s", "1.5s", "5 s", "5S", "99999999999999999999s", "9999999999999999999h"]
        {
            assert_eq!(duration(wrong), None, "{wrong}");
        }
        for wrong in ["", "5", "5KB", "5kib", "+5B", "99999999999999GiB"] {
            assert_eq!(size(wrong), None, "{wrong}");
        }
    }

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
