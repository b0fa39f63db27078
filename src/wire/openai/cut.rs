//! Removes members from the bytes of an event, so that everything else stays as the server wrote
//! it: order, spacing, nulls, and unknown members.

use std::ops::Range;

/// A member of a JSON object: the byte ranges of its key and its value.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Member {
    key: Range<usize>,
    value: Range<usize>,
}

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

/// `json` with `top` applied to the names of its members and `choice` to those of each of its
/// choices. `None` if it is not an object.
pub fn edited(json: &str, top: impl Fn(&str) -> Edit, choice: impl Fn(&str) -> Edit) -> Option<String> {
    let bytes = json.as_bytes();
    let members = members(bytes, skip_space(bytes, 0))?;
    let mut edits = Edits::new();
    edit(json, &members, top, &mut edits);
    for choices in members.iter().filter(|member| name(json, member) == "choices") {
        for item in items(bytes, choices.value.start).unwrap_or_default() {
            if let Some(members) = self::members(bytes, item.start) {
                edit(json, &members, &choice, &mut edits);
            }
        }
    }
    edits.sort_by_key(|(position, _)| position.start);
    let (mut out, mut at) = (String::with_capacity(json.len()), 0);
    for (position, instead) in edits {
        out.push_str(json.get(at..position.start.max(at)).unwrap_or_default());
        out.push_str(instead);
        at = at.max(position.end);
    }
    out.push_str(json.get(at..).unwrap_or_default());
    Some(out)
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

fn name<'a>(json: &'a str, member: &Member) -> &'a str {
    json.get(member.key.start + 1..member.key.end.saturating_sub(1)).unwrap_or_default()
}

fn edit(json: &str, members: &[Member], treat: impl Fn(&str) -> Edit, edits: &mut Edits) {
    let treated: Vec<Edit> = members.iter().map(|member| treat(name(json, member))).collect();
    // There is no comma after the last member that stays.
    let mut remaining_end: Option<usize> = None;
    for (position, (member, edit)) in members.iter().zip(&treated).enumerate() {
        match (edit, members.get(position + 1)) {
            (Edit::Retain, _) => {}
            (Edit::Null, _) => edits.push((member.value.clone(), "null")),
            (Edit::Drop, Some(next)) => edits.push((member.key.start..next.key.start, "")),
            (Edit::Drop, None) => {
                let from = remaining_end.map_or(member.key.start, |end| end);
                edits.push((from..member.value.end, ""));
            }
        }
        if *edit != Edit::Drop {
            remaining_end = Some(member.value.end);
        }
    }
}

/// The members of the object that begins at `at`.
fn members(bytes: &[u8], at: usize) -> Option<Vec<Member>> {
    let mut at = skip_space(bytes, expect(bytes, at, b'{')?);
    let mut members = Vec::new();
    if bytes.get(at) == Some(&b'}') {
        return Some(members);
    }
    loop {
        let key = at..skip_string(bytes, at)?;
        let start = skip_space(bytes, expect(bytes, skip_space(bytes, key.end), b':')?);
        let value = start..skip_value(bytes, start)?;
        at = skip_space(bytes, value.end);
        members.push(Member { key, value });
        match bytes.get(at)? {
            b',' => at = skip_space(bytes, at + 1),
            b'}' => return Some(members),
            _ => return None,
        }
    }
}

/// The items of the list that begins at `at`.
fn items(bytes: &[u8], at: usize) -> Option<Vec<Range<usize>>> {
    let mut at = skip_space(bytes, expect(bytes, at, b'[')?);
    let mut items = Vec::new();
    if bytes.get(at) == Some(&b']') {
        return Some(items);
    }
    loop {
        let item = at..skip_value(bytes, at)?;
        at = skip_space(bytes, item.end);
        items.push(item);
        match bytes.get(at)? {
            b',' => at = skip_space(bytes, at + 1),
            b']' => return Some(items),
            _ => return None,
        }
    }
}

fn expect(bytes: &[u8], at: usize, wanted: u8) -> Option<usize> {
    (*bytes.get(at)? == wanted).then_some(at + 1)
}

fn skip_space(bytes: &[u8], mut at: usize) -> usize {
    while bytes.get(at).is_some_and(u8::is_ascii_whitespace) {
        at += 1;
    }
    at
}

/// One past the string that begins at `at`.
fn skip_string(bytes: &[u8], at: usize) -> Option<usize> {
    let mut at = expect(bytes, at, b'"')?;
    loop {
        match bytes.get(at)? {
            b'"' => return Some(at + 1),
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
}

/// One past the value that begins at `at`.
fn skip_value(bytes: &[u8], at: usize) -> Option<usize> {
    let mut at = at;
    let mut depth = 0_usize;
    loop {
        match bytes.get(at)? {
            b'"' => at = skip_string(bytes, at)?,
            b'{' | b'[' => {
                depth += 1;
                at += 1;
                continue;
            }
            b'}' | b']' => {
                depth = depth.checked_sub(1)?;
                at += 1;
            }
            b',' | b':' if depth > 0 => {
                at += 1;
                continue;
            }
            byte if byte.is_ascii_whitespace() => {
                at += 1;
                continue;
            }
            _ => {
                while bytes.get(at).is_some_and(|byte| {
                    !byte.is_ascii_whitespace() && !matches!(byte, b',' | b'}' | b']' | b':')
                }) {
                    at += 1;
                }
            }
        }
        if depth == 0 {
            return Some(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn without(json: &str, gone: &[&str]) -> String {
        let drop = |name: &str| if gone.contains(&name) { Edit::Drop } else { Edit::Retain };
        edited(json, drop, drop).unwrap()
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
        assert_eq!(edited(event, null, |_| Edit::Retain).unwrap(), r#"{"usage":null,"b":2}"#);
    }

    #[test]
    fn a_member_is_put_at_the_end() {
        assert_eq!(appended(r#"{"a":1}"#, "b", &json!("c")).unwrap(), r#"{"a":1,"b":"c"}"#);
        assert_eq!(appended("{}", "b", &json!(1)).unwrap(), r#"{"b":1}"#);
    }

    #[test]
    fn text_that_is_not_an_object_is_refused() {
        for text in ["", "[1]", "{", "{\"a\"", "{\"a\":", "{\"a\":1", "{\"a\":1,", "\"\\"] {
            assert_eq!(edited(text, |_| Edit::Drop, |_| Edit::Drop), None, "{text}");
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
            let _ = edited(&text, |_| Edit::Drop, |_| Edit::Drop);
        }
    }
}
