//! The forms of settings: how a value is written where its type alone does not say it.
//!
//! PURE. A setting is a field of a struct that derives `Deserialize` and `JsonSchema`: type,
//! default, limits and one sentence. A field whose text has a special form (`30s`, `64MiB`) names
//! it: `#[serde(with = "As::<Period>")]`. `foretell` checks files against the schemas that result,
//! reports every error with its line, and makes the published schemas and pages from them.

use std::borrow::Cow;
use std::marker::PhantomData;
use std::time::Duration;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Stands in a sentence for the value that was found, which may have to be hidden.
pub const GOT: &str = "{got}";

/// How values of one kind are written.
pub trait Form {
    type Value;
    /// Its name, the `format` of its schema.
    const FORMAT: &'static str;
    /// A regular expression that every such text matches, for editors.
    const PATTERN: &'static str;
    /// The texts that are allowed, for messages.
    const ALLOWED: &'static str;

    /// The value of a text.
    ///
    /// # Errors
    /// The text has another form. With [`GOT`] the message is a sentence that says what to write
    /// instead; otherwise [`Self::ALLOWED`] does.
    fn parse(text: &str) -> Result<Self::Value, Cow<'static, str>>;

    /// A value as a file would have it; `None` if it has no default to show.
    fn show(_: &Self::Value) -> Option<String> {
        None
    }
}

/// The schema of a form. `allowed` is for messages and pages, and is not published.
fn schema<F: Form>() -> Schema {
    json_schema!({ "type": "string", "format": F::FORMAT, "pattern": F::PATTERN, "allowed": F::ALLOWED })
}

fn parsed<F: Form, E: Error>(text: &str) -> Result<F::Value, E> {
    F::parse(text).map_err(E::custom)
}

/// A field of a form, for `#[serde(with = …)]`.
#[derive(Debug)]
pub struct As<F>(PhantomData<F>);

impl<F: Form> As<F> {
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<F::Value, D::Error> {
        parsed::<F, _>(&String::deserialize(from)?)
    }

    pub fn serialize<S: Serializer>(value: &F::Value, to: S) -> Result<S::Ok, S::Error> {
        F::show(value).serialize(to)
    }
}

/// A field of a form or `null`.
#[derive(Debug)]
pub struct Maybe<F>(PhantomData<F>);

impl<F: Form> Maybe<F> {
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<F::Value>, D::Error> {
        Option::<String>::deserialize(from)?.map(|text| parsed::<F, _>(&text)).transpose()
    }

    pub fn serialize<S: Serializer>(value: &Option<F::Value>, to: S) -> Result<S::Ok, S::Error> {
        value.as_ref().and_then(F::show).serialize(to)
    }
}

/// A list of values of a form.
#[derive(Debug)]
pub struct Each<F>(PhantomData<F>);

impl<F: Form> Each<F> {
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<F::Value>, D::Error> {
        Vec::<String>::deserialize(from)?.iter().map(|text| parsed::<F, _>(text)).collect()
    }

    /// A list has no default to show.
    pub fn serialize<S: Serializer>(_: &[F::Value], to: S) -> Result<S::Ok, S::Error> {
        to.serialize_unit()
    }
}

macro_rules! with_schema {
    ($($of:ident, $schema:expr);*) => {$(
        impl<F: Form> JsonSchema for $of<F> {
            fn inline_schema() -> bool {
                true
            }

            fn schema_name() -> Cow<'static, str> {
                Cow::Owned(format!("{} {}", stringify!($of), F::FORMAT))
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                let of: fn(Schema) -> Schema = $schema;
                of(schema::<F>())
            }
        }
    )*};
}

with_schema! {
    As, |form| form;
    Maybe, |form| json_schema!({ "anyOf": [form, { "type": "null" }] });
    Each, |form| json_schema!({ "type": "array", "items": form })
}

/// The longest duration that a setting may have: ten years. A longer one is a mistake, and clocks
/// cannot count to it.
pub const LONGEST: Duration = Duration::from_hours(87_600);
/// The largest size that a setting may have, bytes: 1,024 TiB.
pub const LARGEST: u64 = 1 << 50;

/// Durations, as examples for messages.
const DURATIONS: &str = "200ms, 30s, 5m or 1h";
/// Sizes, as examples for messages.
const SIZES: &str = "512KiB, 64MiB or 2GiB";

/// Parses a duration: a whole number and `ms`, `s`, `m` or `h`.
///
/// # Errors
/// It is malformed, or longer than ten years: a sentence about [`GOT`].
pub fn duration(text: &str) -> Result<Duration, String> {
    let units = [("ms", 1), ("s", 1_000), ("m", 60_000), ("h", 3_600_000)];
    let millis = measured(text, &units).ok_or_else(|| unmeasured(text, "a duration", DURATIONS))?;
    let duration = Duration::from_millis(millis);
    if duration <= LONGEST {
        Ok(duration)
    } else {
        Err(format!("{GOT} is longer than ten years; write at most 87600h"))
    }
}

/// Parses a size, a whole number and `B`, `KiB`, `MiB` or `GiB`, into bytes.
///
/// # Errors
/// It is malformed, or larger than 1,024 TiB: a sentence about [`GOT`].
pub fn size(text: &str) -> Result<u64, String> {
    let units = [("B", 1), ("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30)];
    let bytes = measured(text, &units).ok_or_else(|| unmeasured(text, "a size", SIZES))?;
    if bytes <= LARGEST { Ok(bytes) } else { Err(format!("{GOT} is too large; write at most 1048576GiB")) }
}

/// The number in the smallest unit, at most the largest `u64`; `None` for another form.
fn measured(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (digits, unit) = text.split_at(digits);
    let (_, factor) = units.iter().find(|(name, _)| *name == unit)?;
    let count = digits.parse().unwrap_or(u64::MAX);
    (!digits.is_empty()).then(|| count.saturating_mul(*factor))
}

fn unmeasured(text: &str, wanted: &str, examples: &str) -> String {
    match text.parse::<u64>() {
        Ok(_) => format!("{GOT} has no unit; write for example {examples}"),
        Err(_) => format!("{GOT} is not {wanted}; write for example {examples}"),
    }
}

/// A duration as files write it, such as `30s`.
pub fn shown(duration: Duration) -> String {
    let (millis, units) = (duration.as_millis(), [(3_600_000, "h"), (60_000, "m"), (1_000, "s")]);
    let found = units.into_iter().find(|(unit, _)| millis % unit == 0 && millis > 0);
    let (unit, name) = found.unwrap_or((1, "ms"));
    format!("{}{name}", millis / unit)
}

/// A duration, such as `30s`; zero is allowed.
#[derive(Debug)]
pub struct Delay;

impl Form for Delay {
    type Value = Duration;
    const FORMAT: &'static str = "delay";
    const PATTERN: &'static str = r"^\d+(ms|s|m|h)$";
    const ALLOWED: &'static str = "a duration such as 200ms, 30s, 5m or 1h";

    fn parse(text: &str) -> Result<Duration, Cow<'static, str>> {
        Ok(duration(text)?)
    }

    fn show(duration: &Duration) -> Option<String> {
        Some(shown(*duration))
    }
}

/// A duration of at least 1 ms.
#[derive(Debug)]
pub struct Period;

impl Form for Period {
    type Value = Duration;
    const FORMAT: &'static str = "period";
    const PATTERN: &'static str = r"^0*[1-9]\d*(ms|s|m|h)$";
    const ALLOWED: &'static str = Delay::ALLOWED;

    fn parse(text: &str) -> Result<Duration, Cow<'static, str>> {
        match duration(text)? {
            Duration::ZERO => Err(format!("out of range, allowed at least 1ms, got {GOT}").into()),
            duration => Ok(duration),
        }
    }

    fn show(duration: &Duration) -> Option<String> {
        Delay::show(duration)
    }
}

/// A size of at least one byte, such as `64MiB`; the value is in bytes.
#[derive(Debug)]
pub struct Size<T>(PhantomData<T>);

impl<T: Copy + TryFrom<u64> + TryInto<u64>> Form for Size<T> {
    type Value = T;
    const FORMAT: &'static str = "size";
    const PATTERN: &'static str = r"^0*[1-9]\d*(B|KiB|MiB|GiB)$";
    const ALLOWED: &'static str = "a size such as 512KiB, 64MiB or 2GiB";

    fn parse(text: &str) -> Result<T, Cow<'static, str>> {
        match size(text)? {
            0 => Err(format!("out of range, allowed at least 1B, got {GOT}").into()),
            size => T::try_from(size).map_err(|_| format!("{GOT} is more than memory can hold").into()),
        }
    }

    fn show(size: &T) -> Option<String> {
        let size = (*size).try_into().ok()?;
        let units = [(30, "GiB"), (20, "MiB"), (10, "KiB")];
        let (bits, name) =
            units.into_iter().find(|(bits, _)| size.trailing_zeros() >= *bits).unwrap_or((0, "B"));
        Some(format!("{}{name}", size >> bits))
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
        let fails = |found: Result<(), String>, why: &str| assert!(found.unwrap_err().contains(why), "{why}");
        for wrong in ["", "s", "-5s", "1.5s", "5 s", "5S"] {
            fails(duration(wrong).map(|_| ()), "is not a duration");
        }
        for long in ["18446744073709551615ms", "99999999999999999999s", "9999999999999999999h", "87601h"] {
            fails(duration(long).map(|_| ()), "ten years");
        }
        for wrong in ["", "5KB", "5kib", "+5B"] {
            fails(size(wrong).map(|_| ()), "is not a size");
        }
        for large in ["18446744073709551615B", "99999999999999GiB", "1125899906842625B"] {
            fails(size(large).map(|_| ()), "too large");
        }
        fails(duration("5").map(|_| ()), "has no unit");
        fails(size("5").map(|_| ()), "has no unit");
    }

    #[test]
    fn values_are_shown_as_they_are_written() {
        for text in ["0ms", "250ms", "30s", "2m", "1h"] {
            assert_eq!(shown(duration(text).unwrap()), text);
        }
        for text in ["1B", "8KiB", "512MiB", "2GiB"] {
            let size = Size::<u64>::parse(text).unwrap();
            assert_eq!(Size::<u64>::show(&size).as_deref(), Some(text));
        }
    }
}
