//! Removes the client's own `prediction` from a body, for a server that would refuse the whole
//! request for it.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde::ser::{Serialize, Serializer};
use serde_json::value::RawValue;

/// `body` without its `prediction`, every other member as it was written; `None` if it has none, or
/// is not an object.
pub fn without_prediction(body: &[u8]) -> Option<Vec<u8>> {
    let Members(mut members) = serde_json::from_slice(body).ok()?;
    let all = members.len();
    members.retain(|(name, _)| name != "prediction");
    (members.len() < all).then(|| serde_json::to_vec(&Members(members)).ok()).flatten()
}

/// The members of an object in their order, their values untouched.
struct Members<'a>(Vec<(String, &'a RawValue)>);

impl<'de: 'a, 'a> Deserialize<'de> for Members<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(MembersVisitor).map(Members)
    }
}

impl Serialize for Members<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, value)| (name, value)))
    }
}

struct MembersVisitor;

impl<'de> Visitor<'de> for MembersVisitor {
    type Value = Vec<(String, &'de RawValue)>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut members = Vec::new();
        while let Some(member) = map.next_entry()? {
            members.push(member);
        }
        Ok(members)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn without(body: &str) -> Option<String> {
        without_prediction(body.as_bytes()).map(|body| String::from_utf8(body).unwrap())
    }

    #[test]
    fn every_other_member_stays_as_it_was_written() {
        let body = r#"{ "model":"m\u0031", "top_p" : 1.0,"prediction": {"type":"content","content":"b"},
            "n":2, "x": [ 1e2 , 18446744073709551616 ] }"#;
        let wanted = r#"{"model":"m\u0031","top_p":1.0,"n":2,"x":[ 1e2 , 18446744073709551616 ]}"#;
        assert_eq!(without(body).as_deref(), Some(wanted));
    }

    #[test]
    fn a_prediction_of_any_type_is_removed_even_if_repeated() {
        assert_eq!(without(r#"{"prediction":null}"#).as_deref(), Some("{}"));
        assert_eq!(without(r#"{"prediction":1,"a":1,"pre\u0064iction":[]}"#).as_deref(), Some(r#"{"a":1}"#));
    }

    #[test]
    fn a_body_without_a_prediction_is_not_changed() {
        for body in [r#"{"a":{"prediction":1}}"#, r#"["prediction"]"#, r#"{"prediction":"#, "", "{} {}"] {
            assert_eq!(without(body), None, "{body}");
        }
    }
}
