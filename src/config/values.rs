//! Parsers for durations, sizes, percent-encoded text and networks. Patterns and revisions are
//! re-exported from [`foretell_policy`].

use std::net::IpAddr;
use std::str::FromStr;
use std::time::Duration;

pub use foretell_policy::{Glob, Revision};

/// The longest duration that a setting may have: ten years. A longer one is a mistake, and clocks
/// cannot count to it.
const LONGEST: Duration = Duration::from_hours(87_600);
/// The largest size that a setting may have, bytes: 1,024 TiB.
const LARGEST: u64 = 1 << 50;

/// Why a text is no duration, or no size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unmeasured {
    /// It is no number with a unit of time.
    #[error("not a duration: write a whole number and ms, s, m or h, such as 200ms or 30s")]
    NoDuration,
    #[error("longer than 87600h, ten years: write a shorter duration")]
    TooLong,
    /// It is no number with a unit of size.
    #[error("not a size: write a whole number and B, KiB, MiB or GiB, such as 512MiB")]
    NoSize,
    #[error("larger than 1048576GiB: write a smaller size")]
    TooLarge,
}

/// Durations, as examples for messages.
pub const DURATIONS: &str = "200ms, 30s, 5m or 1h";
/// Sizes, as examples for messages.
pub const SIZES: &str = "512KiB, 64MiB or 2GiB";

impl Unmeasured {
    /// The sentence about the value `got`; `bare`: it is a number whose unit is missing.
    pub fn about(self, got: &str, bare: bool) -> String {
        let (wanted, examples) = match self {
            Self::NoDuration => ("a duration", DURATIONS),
            Self::NoSize => ("a size", SIZES),
            Self::TooLong => return format!("{got} is longer than ten years; write at most 87600h"),
            Self::TooLarge => return format!("{got} is too large; write at most 1048576GiB"),
        };
        let wrong = if bare { "has no unit".to_owned() } else { format!("is not {wanted}") };
        format!("{got} {wrong}; write for example {examples}")
    }
}

/// Parses a duration of the command line as [`duration`] does.
///
/// # Errors
/// The sentence says what is wrong with it, and how a duration is written.
pub fn duration_or_why(text: &str) -> Result<Duration, String> {
    duration(text).map_err(|wrong| wrong.about(text, is_bare(text)))
}

/// True if the text is a number without a unit.
pub fn is_bare(text: &str) -> bool {
    text.parse::<u64>().is_ok()
}

/// Parses a duration: a whole number and `ms`, `s`, `m` or `h`.
///
/// # Errors
/// It is malformed, or longer than ten years.
pub fn duration(text: &str) -> Result<Duration, Unmeasured> {
    let (digits, unit) = digits_and_unit(text).ok_or(Unmeasured::NoDuration)?;
    let millis = match unit {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => return Err(Unmeasured::NoDuration),
    };
    let duration = digits.parse().ok().and_then(|count: u64| count.checked_mul(millis));
    let duration = duration.map(Duration::from_millis).filter(|duration| *duration <= LONGEST);
    duration.ok_or(Unmeasured::TooLong)
}

/// Parses a size, a whole number and `B`, `KiB`, `MiB` or `GiB`, into bytes.
///
/// # Errors
/// It is malformed, or larger than 1,024 TiB.
pub fn size(text: &str) -> Result<u64, Unmeasured> {
    let (digits, unit) = digits_and_unit(text).ok_or(Unmeasured::NoSize)?;
    let bytes = match unit {
        "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        _ => return Err(Unmeasured::NoSize),
    };
    let size = digits.parse().ok().and_then(|count: u64| count.checked_mul(bytes));
    size.filter(|size| *size <= LARGEST).ok_or(Unmeasured::TooLarge)
}

fn digits_and_unit(text: &str) -> Option<(&str, &str)> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    (digits > 0).then(|| text.split_at(digits))
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
        assert_eq!(duration("250ms"), Ok(Duration::from_millis(250)));
        assert_eq!(duration("2h"), Ok(Duration::from_hours(2)));
        assert_eq!(duration("87600h"), Ok(LONGEST));
        assert_eq!(size("32KiB"), Ok(32 << 10));
        assert_eq!(size("3GiB"), Ok(3 << 30));
        assert_eq!(size("1048576GiB"), Ok(LARGEST));
        for wrong in ["", "5", "s", "-5s", "1.5s", "5 s", "5S"] {
            assert_eq!(duration(wrong), Err(Unmeasured::NoDuration), "{wrong}");
        }
        for long in ["18446744073709551615ms", "99999999999999999999s", "9999999999999999999h", "87601h"] {
            assert_eq!(duration(long), Err(Unmeasured::TooLong), "{long}");
        }
        for wrong in ["", "5", "5KB", "5kib", "+5B"] {
            assert_eq!(size(wrong), Err(Unmeasured::NoSize), "{wrong}");
        }
        for large in ["18446744073709551615B", "99999999999999GiB", "1125899906842625B"] {
            assert_eq!(size(large), Err(Unmeasured::TooLarge), "{large}");
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
