//! The small values that settings are made of: durations, sizes, globs, networks, revisions.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;
use std::time::Duration;

use sha2::{Digest, Sha256};

/// `\d+(ms|s|m|h)`.
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

/// `\d+(B|KiB|MiB|GiB)`, in bytes.
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

/// A pattern in which `*` stands for any text and `?` for any character.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Glob(String);

impl Glob {
    /// From its text.
    pub fn new(pattern: &str) -> Self {
        Self(pattern.to_owned())
    }

    /// The pattern.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether it stands for one text only.
    pub fn is_exact(&self) -> bool {
        !self.0.contains(['*', '?'])
    }

    /// Whether `text` is of this pattern. Only the last `*` is ever tried again, so the time is at most the
    /// product of both lengths.
    pub fn matches(&self, text: &str) -> bool {
        let pattern: Vec<char> = self.0.chars().collect();
        let text: Vec<char> = text.chars().collect();
        let (mut at, mut seen) = (0, 0);
        let mut star: Option<(usize, usize)> = None;
        while let Some(letter) = text.get(seen) {
            match pattern.get(at) {
                Some('*') => {
                    star = Some((at + 1, seen));
                    at += 1;
                }
                Some(wanted) if *wanted == '?' || wanted == letter => {
                    at += 1;
                    seen += 1;
                }
                _ => {
                    let Some((after, from)) = star else { return false };
                    star = Some((after, from + 1));
                    (at, seen) = (after, from + 1);
                }
            }
        }
        pattern.get(at..).is_none_or(|rest| rest.iter().all(|letter| *letter == '*'))
    }
}

/// An address, or all addresses that begin with the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    address: IpAddr,
    bits: u8,
}

impl Network {
    /// Whether `address` is in it.
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

/// The first 8 hex digits of the SHA-256 of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Revision([u8; 4]);

impl Revision {
    /// Of these bytes.
    pub fn of(bytes: &[u8]) -> Self {
        let hash = Sha256::digest(bytes);
        let mut first = [0; 4];
        first.iter_mut().zip(hash.iter()).for_each(|(first, byte)| *first = *byte);
        Self(first)
    }
}

impl fmt::Display for Revision {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(formatter, "{byte:02x}"))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

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
    fn globs_match_as_in_a_shell() {
        for (pattern, text, expected) in [
            ("*", "", true),
            ("*coder*", "qwen-coder-7b", true),
            ("*coder*", "qwen", false),
            ("lora-?", "lora-1", true),
            ("lora-?", "lora-12", false),
            ("a*b*c", "aXbYbZc", true),
            ("a*b*c", "aXbYbZ", false),
            ("", "", true),
            ("", "x", false),
            ("[a]", "[a]", true),
        ] {
            assert_eq!(Glob::new(pattern).matches(text), expected, "{pattern} {text}");
        }
        let slow = Glob::new(&"*a".repeat(200));
        assert!(!slow.matches(&"a".repeat(5_000).replace('a', "b")));
    }

    proptest! {
        #[test]
        fn a_glob_agrees_with_its_definition(pattern in "[ab*?]{0,8}", text in "[ab]{0,8}") {
            fn defined(pattern: &[u8], text: &[u8]) -> bool {
                match (pattern.split_first(), text.split_first()) {
                    (None, _) => text.is_empty(),
                    (Some((b'*', rest)), _) => (0..=text.len()).any(|skip| defined(rest, &text[skip..])),
                    (Some((wanted, rest)), Some((letter, later))) => {
                        (*wanted == b'?' || wanted == letter) && defined(rest, later)
                    }
                    (Some(_), None) => false,
                }
            }
            prop_assert_eq!(Glob::new(&pattern).matches(&text), defined(pattern.as_bytes(), text.as_bytes()));
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

    #[test]
    fn a_revision_is_the_beginning_of_the_hash() {
        // SHA-256 of the empty text begins e3b0c442.
        assert_eq!(Revision::of(b"").to_string(), "e3b0c442");
    }
}
