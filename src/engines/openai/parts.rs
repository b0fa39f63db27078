//! The parts of a chat's delta: reasoning, content and tool calls, read and written.

use serde_json::{Map, Value, json};

use foretell_core::session::{CallDelta, Parsed};

/// Names of the reasoning in a delta: vLLM's, and that of older versions and other servers.
pub const REASONING: [&str; 2] = ["reasoning", "reasoning_content"];

/// Reads a delta: its content, and its other members by name. `None` if one of them is neither
/// reasoning nor a piece of a function call, or has another form.
pub fn read(text: &str, more: &Map<String, Value>) -> Option<Parsed> {
    let mut parsed = Parsed::content(text.to_owned());
    for (name, value) in more {
        match (name.as_str(), value) {
            // Some versions send both names with the same text.
            (name, Value::String(reasoning)) if REASONING.contains(&name) => {
                parsed.reasoning.clone_from(reasoning);
            }
            ("tool_calls", Value::Array(calls)) => {
                for call in calls {
                    parsed.append(Parsed { calls: vec![read_call(call)?], ..Parsed::default() });
                }
            }
            _ => return None,
        }
    }
    Some(parsed)
}

fn read_call(call: &Value) -> Option<CallDelta> {
    let function = call.get("function");
    let member = |name: &str| function.and_then(|function| function.get(name)).and_then(Value::as_str);
    let is_function = call.get("type").is_none_or(|kind| kind.is_null() || kind == "function");
    is_function.then_some(())?;
    Some(CallDelta {
        index: u32::try_from(call.get("index")?.as_u64()?).ok()?,
        id: call.get("id").and_then(Value::as_str).map(str::to_owned),
        name: member("name").map(str::to_owned),
        arguments: member("arguments").unwrap_or_default().to_owned(),
    })
}

/// Writes parts as a delta, those that are empty left out. `reasoning` is the member that holds
/// reasoning, `id` makes the id of a call that begins without one.
pub fn write(
    parsed: &Parsed,
    reasoning: &str,
    mut id: impl FnMut(&CallDelta) -> String,
) -> Map<String, Value> {
    let mut delta = Map::new();
    if !parsed.reasoning.is_empty() {
        delta.insert(reasoning.to_owned(), json!(parsed.reasoning));
    }
    if !parsed.text.is_empty() {
        delta.insert("content".to_owned(), json!(parsed.text));
    }
    if !parsed.calls.is_empty() {
        let calls = parsed.calls.iter().map(|call| write_call(call, &mut id));
        delta.insert("tool_calls".to_owned(), calls.collect());
    }
    delta
}

fn write_call(call: &CallDelta, id: &mut impl FnMut(&CallDelta) -> String) -> Value {
    let mut function = Map::new();
    let begins = call.name.as_ref();
    if let Some(name) = begins {
        function.insert("name".to_owned(), json!(name));
    }
    if !call.arguments.is_empty() {
        function.insert("arguments".to_owned(), json!(call.arguments));
    }
    match begins {
        Some(_) => {
            json!({"id": call.id.clone().unwrap_or_else(|| id(call)), "type": "function", "index": call.index, "function": function})
        }
        None => json!({"index": call.index, "function": function}),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delta(value: &Value) -> Option<Parsed> {
        let mut members = value.as_object().unwrap().clone();
        let text = members.shift_remove("content");
        read(text.as_ref().and_then(Value::as_str).unwrap_or_default(), &members)
    }

    #[test]
    fn what_is_written_is_read_again() {
        let call = |index, name: Option<&str>, arguments: &str| CallDelta {
            index,
            id: name.map(|_| format!("id-{index}")),
            name: name.map(str::to_owned),
            arguments: arguments.to_owned(),
        };
        let parsed = Parsed {
            reasoning: "hm".to_owned(),
            text: "so".to_owned(),
            calls: vec![call(0, None, "1}"), call(1, Some("f"), "{")],
        };
        for reasoning in REASONING {
            let written = write(&parsed, reasoning, |_| String::new());
            assert_eq!(written[reasoning], "hm");
            assert_eq!(written["tool_calls"][1]["id"], "id-1");
            assert!(written["tool_calls"][0].get("id").is_none());
            assert_eq!(delta(&Value::Object(written)), Some(parsed.clone()));
        }
        assert!(write(&Parsed::default(), REASONING[0], |_| String::new()).is_empty());
    }

    #[test]
    fn pieces_of_one_call_in_one_event_become_one() {
        let both = json!({"content": null, "tool_calls": [
            {"id": "x", "type": "function", "index": 0, "function": {"name": "f"}},
            {"index": 0, "function": {"arguments": "{\"a\":"}},
        ]});
        let call = CallDelta {
            index: 0,
            id: Some("x".to_owned()),
            name: Some("f".to_owned()),
            arguments: "{\"a\":".to_owned(),
        };
        assert_eq!(delta(&both).map(|parsed| parsed.calls), Some(vec![call]));
    }

    #[test]
    fn an_unknown_member_is_not_understood() {
        for other in [
            json!({"refusal": "no"}),
            json!({"reasoning": {"text": "x"}}),
            json!({"tool_calls": [{"index": 0, "type": "custom", "custom": {}}]}),
            json!({"tool_calls": [{"function": {"name": "f"}}]}),
        ] {
            assert_eq!(delta(&other), None, "{other}");
        }
    }
}
