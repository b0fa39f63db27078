//! The parts of a chat's delta, or of a complete message: reasoning, content and tool calls, read
//! and written.

use serde_json::{Map, Value, json};

use foretell_core::session::parse::{CallDelta, Parsed, ParsedMessage, ToolCall};

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

/// Writes parts as a delta, without those that are empty. `reasoning` is the name of the member for
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

/// The calls of a complete message whose pieces these are, in the order of a stream. `None` if one
/// of them has another form, or no id or name.
pub fn joined_calls(pieces: &Value) -> Option<Value> {
    let mut joined = Parsed::default();
    for piece in pieces.as_array()? {
        joined.append(Parsed { calls: vec![read_call(piece)?], ..Parsed::default() });
    }
    let complete = |CallDelta { id, name, arguments, .. }| Some(complete_call(&id?, &name?, &arguments));
    joined.calls.into_iter().map(complete).collect()
}

fn complete_call(id: &str, name: &str, arguments: &str) -> Value {
    json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
}

/// Reads the message of an unstreamed chat answer. `None` if it has another form.
pub fn read_message(body: &[u8]) -> Option<ParsedMessage> {
    let answer: Value = serde_json::from_slice(body).ok()?;
    let message = answer.pointer("/choices/0/message")?.as_object()?;
    let text = |name: &str| message.get(name).and_then(Value::as_str).map(str::to_owned);
    let calls = message.get("tool_calls").and_then(Value::as_array).into_iter().flatten();
    Some(ParsedMessage {
        reasoning: REASONING.into_iter().find_map(text),
        content: text("content"),
        calls: calls.map(read_complete_call).collect::<Option<_>>()?,
        reasoning_tokens: 0,
    })
}

/// Ids are omitted: the engine makes new ones on this page.
fn read_complete_call(call: &Value) -> Option<ToolCall> {
    let member = |name: &str| call.get("function")?.get(name)?.as_str().map(str::to_owned);
    Some(ToolCall { id: None, name: member("name")?, arguments: member("arguments")? })
}

/// Writes the parts of an unstreamed answer into its message; null for those that it has not, no
/// member for no calls. `reasoning` and `id` as for [`write()`].
pub fn write_message(
    message: &mut Map<String, Value>,
    parts: &ParsedMessage,
    reasoning: &str,
    mut id: impl FnMut() -> String,
) {
    message.insert("content".to_owned(), json!(parts.content));
    if parts.reasoning.is_some() {
        message.insert(reasoning.to_owned(), json!(parts.reasoning));
    }
    if parts.calls.is_empty() {
        return;
    }
    let calls = parts
        .calls
        .iter()
        .map(|call| complete_call(&call.id.clone().unwrap_or_else(&mut id), &call.name, &call.arguments));
    message.insert("tool_calls".to_owned(), calls.collect());
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
    fn a_whole_message_that_is_written_is_read_again() {
        let call = |name: &str| ToolCall { id: None, name: name.to_owned(), arguments: "{}".to_owned() };
        for (reasoning, content, calls) in [
            (Some("hm"), None, vec![call("f"), call("g")]),
            (None, Some("so"), Vec::new()),
            (None, None, Vec::new()),
        ] {
            let parts = ParsedMessage {
                reasoning: reasoning.map(str::to_owned),
                content: content.map(str::to_owned),
                calls,
                reasoning_tokens: 0,
            };
            let mut message = Map::new();
            write_message(&mut message, &parts, REASONING[0], || "id".to_owned());
            assert_eq!(message.contains_key("tool_calls"), !parts.calls.is_empty());
            let answer = json!({"choices": [{"message": message}]});
            assert_eq!(read_message(answer.to_string().as_bytes()), Some(parts));
        }
        assert_eq!(read_message(b"{\"choices\": []}"), None);
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
    fn pieces_of_calls_are_joined_to_whole_ones() {
        let begins = |index: u64| {
            json!({"id": format!("id-{index}"), "type": "function", "index": index,
            "function": {"name": "f"}})
        };
        let on = |index: u64, piece: &str| json!({"index": index, "function": {"arguments": piece}});
        let pieces = json!([begins(0), on(0, "{\"a\""), on(0, ":1}"), begins(1), on(1, "{}")]);
        let wanted = json!([
            {"id": "id-0", "type": "function", "function": {"name": "f", "arguments": "{\"a\":1}"}},
            {"id": "id-1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
        ]);
        assert_eq!(joined_calls(&pieces), Some(wanted));
        assert_eq!(joined_calls(&json!([on(0, "{}")])), None, "a call without its beginning");
        assert_eq!(joined_calls(&json!([{"index": 0, "type": "custom", "custom": {}}])), None);
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
