//! The items of a request as the messages of a chat.
//!
//! Reasoning, text and calls of one turn are items here, and one message of the assistant there.

use foretell_core::words::PassthroughReason;
use serde_json::{Map, Value, json};

use super::custom;
use crate::translation::{Thinking, Untranslated, passed, refused, set};

pub(super) struct Messages {
    pub chat: Vec<Value>,
    pub continues: bool,
}

/// The messages for `input`, with `instructions` before them.
pub(super) fn messages(
    input: &Value,
    instructions: Option<&Value>,
    thinking: Thinking,
) -> Result<Messages, Untranslated> {
    let mut turns = Turns { messages: Vec::new(), thinking };
    match instructions {
        None => {}
        Some(Value::String(text)) if text.is_empty() => {}
        Some(Value::String(text)) => turns.add("system", json!(text)),
        Some(_) => return refused("instructions", "a text"),
    }
    let items = match input {
        Value::String(text) => {
            turns.add("user", json!(text));
            &[]
        }
        Value::Array(items) if !items.is_empty() => items.as_slice(),
        _ => return refused("input", "a text or a list of items is needed"),
    };
    for (number, item) in items.iter().enumerate() {
        turns.take(item, &format!("input[{number}]"))?;
    }
    let chat = turns.messages.into_iter().map(Value::Object).collect();
    Ok(Messages { chat, continues: items.last().is_some_and(is_partial) })
}

/// True for an incomplete item of the assistant.
fn is_partial(item: &Value) -> bool {
    let text = |name: &str| item.get(name).and_then(Value::as_str);
    let is_assistant = match text("type") {
        None | Some("message") => text("role") == Some("assistant"),
        kind => kind == Some("reasoning"),
    };
    is_assistant && matches!(text("status"), Some("in_progress" | "incomplete"))
}

struct Turns {
    messages: Vec<Map<String, Value>>,
    thinking: Thinking,
}

impl Turns {
    fn take(&mut self, item: &Value, path: &str) -> Result<(), Untranslated> {
        if !item.is_object() {
            return refused(path, "an object");
        }
        match item.get("type").and_then(Value::as_str) {
            None | Some("message") => self.message(item, path)?,
            Some("reasoning") => self.reasoning(item, path)?,
            Some("function_call") => {
                let name = needed(item, "name", path)?;
                let space = item.get("namespace").and_then(Value::as_str);
                let name = space.map_or_else(|| name.to_owned(), |space| format!("{space}__{name}"));
                self.call(item, &name, needed(item, "arguments", path)?, path)?;
            }
            Some("custom_tool_call") => {
                let arguments = custom::arguments(needed(item, "input", path)?);
                self.call(item, needed(item, "name", path)?, &arguments, path)?;
            }
            Some("function_call_output" | "custom_tool_call_output") => {
                let id = needed(item, "call_id", path)?;
                let output = content(item, "output", path)?;
                self.add("tool", output);
                self.put("tool_call_id", json!(id));
            }
            Some("item_reference") => return refused(path, "nothing is stored here"),
            Some(_) => return passed(PassthroughReason::Parameter, format!("{path}.type")),
        }
        Ok(())
    }

    fn message(&mut self, item: &Value, path: &str) -> Result<(), Untranslated> {
        match item.get("role").and_then(Value::as_str) {
            Some("assistant") => {
                let text = texts(item.get("content"), &format!("{path}.content"))?;
                self.of_assistant("content", json!(text));
            }
            Some("developer") if self.thinking != Thinking::Effort => {
                self.add("system", content(item, "content", path)?);
            }
            Some(role @ ("user" | "system" | "developer")) => self.add(role, content(item, "content", path)?),
            _ => return refused(&format!("{path}.role"), "user, assistant, system or developer"),
        }
        Ok(())
    }

    fn reasoning(&mut self, item: &Value, path: &str) -> Result<(), Untranslated> {
        let given = |name: &str| item.get(name).filter(|value| !value.is_null());
        // Only its author can read it.
        if given("encrypted_content").is_some() {
            return passed(PassthroughReason::Parameter, format!("{path}.encrypted_content"));
        }
        let filled = |name: &str| given(name).filter(|value| *value != &json!([]));
        let name = if filled("content").is_some() { "content" } else { "summary" };
        let text =
            given(name).map_or(Ok(String::new()), |value| texts(Some(value), &format!("{path}.{name}")))?;
        self.of_assistant("reasoning", json!(text));
        Ok(())
    }

    fn call(&mut self, item: &Value, name: &str, arguments: &str, path: &str) -> Result<(), Untranslated> {
        let id = needed(item, "call_id", path)?;
        let function = json!({ "name": name, "arguments": arguments });
        let call = json!({ "id": id, "type": "function", "function": function });
        let calls = self.assistant().and_then(|last| last.get_mut("tool_calls")?.as_array_mut());
        match calls {
            Some(calls) => calls.push(call),
            None => self.of_assistant("tool_calls", json!([call])),
        }
        Ok(())
    }

    /// The last message, if it is the assistant's.
    fn assistant(&mut self) -> Option<&mut Map<String, Value>> {
        self.messages.last_mut().filter(|last| last.get("role").is_some_and(|role| role == "assistant"))
    }

    /// Adds a member to the assistant's last message, or begins one where it has that already.
    fn of_assistant(&mut self, name: &str, value: Value) {
        if let Some(last) = self.assistant().filter(|last| !last.contains_key(name)) {
            return set(last, name, value);
        }
        self.messages.push(Map::from_iter([("role".to_owned(), json!("assistant"))]));
        self.put(name, value);
    }

    fn add(&mut self, role: &str, content: Value) {
        self.messages.push(Map::from_iter([("role".to_owned(), json!(role))]));
        self.put("content", content);
    }

    /// Sets a member of the last message.
    fn put(&mut self, name: &str, value: Value) {
        if let Some(last) = self.messages.last_mut() {
            set(last, name, value);
        }
    }
}

fn needed<'a>(of: &'a Value, name: &str, path: &str) -> Result<&'a str, Untranslated> {
    let text = of.get(name).and_then(Value::as_str);
    text.map_or_else(|| refused(&format!("{path}.{name}"), "a text is needed"), Ok)
}

/// The texts of an assistant's parts, joined.
fn texts(value: Option<&Value>, path: &str) -> Result<String, Untranslated> {
    match value {
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(parts)) => parts
            .iter()
            .enumerate()
            .map(|(number, part)| {
                let refusal = part.get("type").is_some_and(|kind| kind == "refusal");
                needed(part, if refusal { "refusal" } else { "text" }, &format!("{path}[{number}]"))
            })
            .collect(),
        _ => refused(path, "a text or a list of parts is needed"),
    }
}

/// A member that is a text, or a list of parts; one part of text is that text.
fn content(item: &Value, name: &str, path: &str) -> Result<Value, Untranslated> {
    let path = format!("{path}.{name}");
    let parts = match item.get(name) {
        Some(text @ Value::String(_)) => return Ok(text.clone()),
        Some(Value::Array(parts)) => parts,
        _ => return refused(&path, "a text or a list of parts is needed"),
    };
    let made = parts.iter().enumerate().map(|(number, given)| part(given, &format!("{path}[{number}]")));
    let made: Vec<Value> = made.collect::<Result<_, _>>()?;
    Ok(match made.as_slice() {
        [only] if only.get("text").is_some() => only.get("text").cloned().unwrap_or_default(),
        _ => Value::Array(made),
    })
}

fn part(given: &Value, path: &str) -> Result<Value, Untranslated> {
    match given.get("type").and_then(Value::as_str) {
        Some("input_text" | "output_text" | "text") => {
            Ok(json!({ "type": "text", "text": needed(given, "text", path)? }))
        }
        Some("input_image") if given.get("file_id").is_some_and(|id| !id.is_null()) => {
            passed(PassthroughReason::Multimodal, format!("{path}.file_id"))
        }
        Some("input_image") => {
            let mut image = Map::new();
            set(&mut image, "url", json!(needed(given, "image_url", path)?));
            if let Some(detail) = given.get("detail").filter(|detail| !detail.is_null()) {
                set(&mut image, "detail", detail.clone());
            }
            Ok(json!({ "type": "image_url", "image_url": image }))
        }
        Some(_) => passed(PassthroughReason::Multimodal, format!("{path}.type")),
        None => refused(&format!("{path}.type"), "it is missing"),
    }
}
