//! JSON as it was meant: an object that names a key twice is refused.
//!
//! Parsers disagree which of two equal keys wins. If Foretell read one and the backend the other, the two
//! would be answering different requests; so such a body is left to the backend alone.

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

struct Strict(Value);

/// Parses one JSON value; `None` if it is malformed, too deep, followed by more, or names a key twice.
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
        Number::from_f64(value).map(Value::Number).ok_or_else(|| E::custom("number out of range"))
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

    #[test]
    fn a_key_named_twice_is_refused_at_any_depth() {
        assert!(parse(br#"{"a":1,"a":1}"#).is_none());
        assert!(parse(br#"{"a":[{"b":{"c":1,"c":2}}]}"#).is_none());
        assert!(parse(br#"{"a":{"x":1},"b":{"x":1}}"#).is_some());
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
