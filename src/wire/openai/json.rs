//! Strict JSON: an object that names a key twice, and a number that would be written differently,
//! are refused.
//!
//! Parsers differ in which of two equal keys wins. If Foretell read one and the backend the other,
//! the two would answer different requests. And an integer of more than 64 bits, stored as a
//! double, would leave as another number: a chat template prints the schemas of tools, so the
//! prompt would be another. A request with such a body is passed through.

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

/// Maximum bytes that [`parse`] allocates for `body`: its texts, and a slot for every value, twice
/// because lists grow by doubling. Every value but the first comes after one of four characters.
pub fn parsed_bytes(body: &[u8]) -> usize {
    const VALUE: usize = 2 * size_of::<Value>();
    let values = body.iter().filter(|byte| matches!(byte, b',' | b':' | b'[' | b'{')).count() + 1;
    body.len().saturating_add(values.saturating_mul(VALUE))
}

struct Strict(Value);

/// Least magnitude from which a double without a fraction may have been an integer that it does not
/// represent: 2^53.
const INEXACT: f64 = 9_007_199_254_740_992.0;

/// Parses one JSON value; `None` if it is malformed, too deep, followed by more, names a key twice,
/// or has a number that might not be written as it was: an integer beyond 64 bits, `-0`.
pub fn parse(bytes: &[u8]) -> Option<Value> {
    serde_json::from_slice::<Strict>(bytes).ok().map(|strict| strict.0)
}

impl<'de> Deserialize<'de> for Strict {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(StrictVisitor).map(Strict)
    }
}

struct StrictVisitor;

impl<'de> Visitor<'de> for StrictVisitor {
    type Value = Value;

    fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        // Integers of up to 64 bits do not come here; what the number was written as is not known.
        let inexact = value.abs() >= INEXACT || (value == 0.0 && value.is_sign_negative());
        let number = if inexact { None } else { Number::from_f64(value) };
        number.map(Value::Number).ok_or_else(|| E::custom("a number is inexact"))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::String(value.to_owned()))
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(Value::String(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(Strict(item)) = seq.next_element()? {
            items.push(item);
        }
        Ok(Value::Array(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut object = Map::new();
        while let Some(key) = map.next_key::<String>()? {
            let Strict(value) = map.next_value()?;
            if object.insert(key, value).is_some() {
                return Err(A::Error::custom("a key is named twice"));
            }
        }
        Ok(Value::Object(object))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes of a value on the heap, by the capacity of lists and maps.
    fn held(value: &Value) -> usize {
        const ENTRY: usize = size_of::<usize>() + size_of::<String>() + size_of::<Value>();
        match value {
            Value::Null | Value::Bool(_) | Value::Number(_) => 0,
            Value::String(text) => text.len(),
            Value::Array(items) => {
                items.capacity() * size_of::<Value>() + items.iter().map(held).sum::<usize>()
            }
            Value::Object(members) => {
                let inner: usize = members.iter().map(|(name, value)| name.len() + held(value)).sum();
                2 * members.len() * ENTRY + inner
            }
        }
    }

    #[test]
    fn no_body_takes_more_than_parsed_bytes() {
        let bodies = [
            "1".to_owned(),
            format!("[{}]", vec!["1"; 5000].join(",")),
            format!("[{}]", vec!["{}"; 5000].join(",")),
            format!("[{}]", vec!["[]"; 5000].join(",")),
            format!("[{}]", vec!["{\"\":0}"; 5000].join(",")),
            format!("{{{}}}", (0..5000).map(|n| format!("\"{n}\":0")).collect::<Vec<_>>().join(",")),
            format!("{{\"prompt\":\"{}\"}}", "text, and more text: ".repeat(1000)),
        ];
        for body in bodies {
            let (said, held) = (parsed_bytes(body.as_bytes()), held(&parse(body.as_bytes()).unwrap()));
            assert!(held <= said, "{held} > {said} for {}", &body[..40.min(body.len())]);
        }
    }

    #[test]
    fn a_key_named_twice_is_refused_at_any_depth() {
        assert!(parse(br#"{"a":1,"a":1}"#).is_none());
        assert!(parse(br#"{"a":[{"b":{"c":1,"c":2}}]}"#).is_none());
        assert!(parse(br#"{"a":{"x":1},"b":{"x":1}}"#).is_some());
    }

    #[test]
    fn a_number_that_would_leave_as_another_is_refused() {
        for inexact in ["-0", "-0.0", "18446744073709551616", "-9223372036854775809", "1e400", "1e16"] {
            assert!(parse(format!(r#"{{"a":[{inexact}]}}"#).as_bytes()).is_none(), "{inexact}");
        }
        for kept in ["0", "18446744073709551615", "-9223372036854775808", "0.1", "1e15", "-2.5e-300"] {
            assert!(parse(format!(r#"{{"a":[{kept}]}}"#).as_bytes()).is_some(), "{kept}");
        }
    }

    #[test]
    fn a_value_reads_as_the_ordinary_parser_reads_it() {
        let text = br#"{"z":[1,-2,0.5,1e3,18446744073709551615,true,null,"\u00e9\n"],"a":{}}"#;
        let expected: Value = serde_json::from_slice(text).unwrap();
        assert_eq!(parse(text), Some(expected));
    }

    #[test]
    fn trailing_text_and_endless_depth_are_refused() {
        assert!(parse(b"{} x").is_none());
        assert!(parse("[".repeat(100_000).as_bytes()).is_none());
        assert!(parse(b"").is_none());
        assert!(parse(b"\xff").is_none());
    }
}
