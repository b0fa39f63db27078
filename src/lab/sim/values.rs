//! Values of a table: durations, numbers in a range, and a word or a map.

use std::fmt;
use std::marker::PhantomData;
use std::num::NonZeroUsize;

use serde::de::value::{MapAccessDeserializer, StrDeserializer};
use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};

/// Maximum simulated time, seconds.
pub const DAY: u64 = 86_400;

pub fn number<'de, D: Deserializer<'de>, const MIN: u32, const MAX: u32>(source: D) -> Result<f64, D::Error> {
    let value = f64::deserialize(source)?;
    let good = (f64::from(MIN)..=f64::from(MAX)).contains(&value);
    if good { Ok(value) } else { Err(D::Error::custom(format!("allowed {MIN}..={MAX}, got {value}"))) }
}

/// An integer of at least 1.
pub fn count<'de, D: Deserializer<'de>>(source: D) -> Result<usize, D::Error> {
    NonZeroUsize::deserialize(source).map(NonZeroUsize::get)
}

/// The seconds of a duration of at least `MIN` microseconds and at most `MAX` seconds.
pub fn seconds<'de, D: Deserializer<'de>, const MIN: u64, const MAX: u64>(
    source: D,
) -> Result<f64, D::Error> {
    let text = String::deserialize(source)?;
    let seconds = parse_seconds(&text).map_err(D::Error::custom)?;
    let good = (MIN as f64 / 1e6..=MAX as f64).contains(&seconds);
    if good { Ok(seconds) } else { Err(D::Error::custom(format!("allowed {MIN}us..={MAX}s, got {text}"))) }
}

/// The seconds of a duration; fractions are allowed.
pub fn parse_seconds(text: &str) -> Result<f64, String> {
    let unit = text.find(|letter: char| !(letter.is_ascii_digit() || letter == '.'));
    let (count, unit) = text.split_at(unit.unwrap_or(text.len()));
    let factor = match unit {
        "us" => Some(1e-6),
        "ms" => Some(1e-3),
        "s" => Some(1.0),
        "m" => Some(60.0),
        "h" => Some(3600.0),
        _ => None,
    };
    let seconds = factor.and_then(|factor| Some(count.parse::<f64>().ok()? * factor));
    seconds.ok_or_else(|| format!(r"allowed a duration, \d+(.\d+)?(us|ms|s|m|h), got {text}"))
}

/// A word, or a map. Unlike those of an untagged enum, errors name the key in the map.
pub enum WordOr<W, T> {
    Word(W),
    Map(T),
}

impl<'de, W: Deserialize<'de>, T: Deserialize<'de>> Deserialize<'de> for WordOr<W, T> {
    fn deserialize<D: Deserializer<'de>>(source: D) -> Result<Self, D::Error> {
        source.deserialize_any(WordOrVisitor(PhantomData))
    }
}

struct WordOrVisitor<W, T>(PhantomData<(W, T)>);

impl<'de, W: Deserialize<'de>, T: Deserialize<'de>> Visitor<'de> for WordOrVisitor<W, T> {
    type Value = WordOr<W, T>;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("a word or a map")
    }

    fn visit_str<E: Error>(self, word: &str) -> Result<Self::Value, E> {
        W::deserialize(StrDeserializer::new(word)).map(WordOr::Word)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
        T::deserialize(MapAccessDeserializer::new(map)).map(WordOr::Map)
    }
}
