//! Removes members from the bytes of an event, so that everything else stays as the server wrote
//! it: order, spacing, nulls, and unknown members.

use std::ops::Range;

use super::event::{Event, Member, Object};

/// The change to a member of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Edit {
    Retain,
    /// It is removed, with its comma.
    Drop,
    /// Its value becomes null.
    Null,
}

/// Byte ranges and their replacements, in ascending order of their starts.
type Edits = Vec<(Range<usize>, &'static str)>;

/// The JSON text of an event with `top` applied to the names of its members and `choice` to those
/// of each of its choices.
pub fn edited(event: &Event, top: impl Fn(&str) -> Edit, choice: impl Fn(&str) -> Edit) -> String {
    let mut edits = Edits::new();
    edit(event.top(), top, &mut edits);
    event.choices().for_each(|object| edit(object, &choice, &mut edits));
    edits.sort_by_key(|(position, _)| position.start);
    let json = event.json();
    let (mut out, mut at) = (String::with_capacity(json.len()), 0);
    for (position, instead) in edits {
        out.push_str(json.get(at..position.start.max(at)).unwrap_or_default());
        out.push_str(instead);
        at = at.max(position.end);
    }
    out.push_str(json.get(at..).unwrap_or_default());
    out
}

/// `json`, an object, with one more member at its end; `None` if it does not end like an object.
pub fn appended(json: &str, name: &str, value: &serde_json::Value) -> Option<String> {
    let end = json.trim_end();
    let (body, comma) = match end.strip_suffix('}')? {
        body if body.trim_end().ends_with('{') => (body, ""),
        body => (body, ","),
    };
    Some(format!("{body}{comma}{}:{value}}}{}", serde_json::Value::from(name), json.get(end.len()..)?))
}

fn edit(object: Object<'_>, treat: impl Fn(&str) -> Edit, edits: &mut Edits) {
    // There is no comma after the last member that stays.
    let mut remaining_end: Option<usize> = None;
    let key = |member: &Member| member.name.start.saturating_sub(1);
    for (position, (member, (name, _))) in object.ranges.iter().zip(object.members()).enumerate() {
        match (treat(name), object.ranges.get(position + 1)) {
            (Edit::Retain, _) => {}
            (Edit::Null, _) => edits.push((member.value.clone(), "null")),
            (Edit::Drop, Some(next)) => {
                edits.push((key(member)..key(next), ""));
                continue;
            }
            (Edit::Drop, None) => {
                edits.push((remaining_end.unwrap_or(key(member))..member.value.end, ""));
                continue;
            }
        }
        remaining_end = Some(member.value.end);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn without(json: &str, gone: &[&str]) -> String {
        let drop = |name: &str| if gone.contains(&name) { Edit::Drop } else { Edit::Retain };
        edited(&Event::of(json.to_owned()).unwrap(), drop, drop)
    }

    #[test]
    fn a_member_goes_with_its_comma_and_all_else_stays() {
        let event =
            r#"{"id": "a",  "choices":[{"index":0,"token_ids":[1, 2],"x":null,"y":"}\""}], "usage":{"a":1}}"#;
        assert_eq!(
            without(event, &["usage", "token_ids"]),
            r#"{"id": "a",  "choices":[{"index":0,"x":null,"y":"}\""}]}"#
        );
        assert_eq!(without(event, &["id"]), event.replace(r#""id": "a",  "#, ""));
        assert_eq!(without(r#"{"a":1,"b":2,"c":3}"#, &["b", "c"]), r#"{"a":1}"#);
        assert_eq!(without(r#"{"a":1,"b":2}"#, &["a", "b"]), "{}");
        assert_eq!(without("{ }", &["a"]), "{ }");
    }

    #[test]
    fn a_value_can_become_null() {
        let null = |name: &str| if name == "usage" { Edit::Null } else { Edit::Retain };
        let event = r#"{"usage":{"a":[1]},"b":2}"#;
        let event = Event::of(event.to_owned()).unwrap();
        assert_eq!(edited(&event, null, |_| Edit::Retain), r#"{"usage":null,"b":2}"#);
    }

    #[test]
    fn a_member_is_put_at_the_end() {
        assert_eq!(appended(r#"{"a":1}"#, "b", &json!("c")).unwrap(), r#"{"a":1,"b":"c"}"#);
        assert_eq!(appended("{}", "b", &json!(1)).unwrap(), r#"{"b":1}"#);
    }

    #[test]
    fn text_that_is_not_an_object_is_no_event() {
        for text in ["", "[1]", "{", "{\"a\"", "{\"a\":", "{\"a\":1", "{\"a\":1,", "\"\\"] {
            assert_eq!(Event::of(text.to_owned()), None, "{text}");
        }
    }

    fn values() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            "[a-c\\\\\"{}\\[\\],: é]{0,6}".prop_map(Value::from),
        ];
        leaf.prop_recursive(3, 24, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::vec(("[a-c]|choices", inner), 0..4)
                    .prop_map(|members| Value::Object(members.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn editing_equals_parsing_removing_and_writing(value in values(), pretty: bool) {
            prop_assume!(value.is_object());
            let text = if pretty { serde_json::to_string_pretty(&value).unwrap() } else { value.to_string() };
            let cut: Value = serde_json::from_str(&without(&text, &["a"])).unwrap();
            let mut wanted = value;
            wanted.as_object_mut().unwrap().shift_remove("a");
            for choice in wanted.get_mut("choices").and_then(Value::as_array_mut).into_iter().flatten() {
                if let Some(members) = choice.as_object_mut() {
                    members.shift_remove("a");
                }
            }
            prop_assert_eq!(cut, wanted);
        }

        #[test]
        fn any_text_is_taken(text in "[{}\\[\\]\",:\\\\a1 ]{0,40}") {
            let _ = Event::of(text).map(|event| edited(&event, |_| Edit::Drop, |_| Edit::Drop));
        }
    }
}
