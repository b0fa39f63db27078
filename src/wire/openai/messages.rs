//! The messages of a chat: plain text is eligible; so are tool calls, their results and
//! reasoning of earlier turns, where the engine tells the prompt that its template makes of them.
//!
//! The messages themselves are never rewritten.

use serde_json::Value;

use foretell_core::words::PassthroughReason as R;

/// Checks the messages. Returns the passthrough reason where the engine does not report the prompt
/// that its template makes of them; `None` if they are only text.
///
/// # Errors
/// Reason why they are not eligible.
pub fn check(value: &Value) -> Result<Option<R>, R> {
    let messages = value.as_array().filter(|messages| !messages.is_empty()).ok_or(R::Body)?;
    let mut rendered = None;
    for message in messages {
        rendered = check_message(message)?.or(rendered);
    }
    Ok(rendered)
}

/// A text, or a list of text parts as one text; `None` if it is or has anything else.
pub fn plain_text(content: &Value) -> Option<String> {
    match content {
        Value::String(text) => Some(text.clone()),
        Value::Array(parts) => parts.iter().map(part_text).collect(),
        _ => None,
    }
}

/// Bytes of text in all messages, for estimating the length of the prompt; 0 for a message that has
/// more than text.
pub fn text_bytes(messages: &Value) -> usize {
    let contents = messages.as_array().into_iter().flatten().filter_map(|message| message.get("content"));
    contents.filter_map(plain_text).map(|text| text.len()).sum()
}

fn part_text(part: &Value) -> Option<&str> {
    if part.get("type")? == "text" { part.get("text")?.as_str() } else { None }
}

/// Checks one message; returns the reason to pass it through where the engine does not tell the
/// prompt.
fn check_message(message: &Value) -> Result<Option<R>, R> {
    let members = message.as_object().ok_or(R::Body)?;
    let mut rendered = None;
    for (key, value) in members.iter().filter(|(_, value)| !value.is_null()) {
        match key.as_str() {
            "role" => rendered = role(value)?.or(rendered),
            "content" => content(value)?,
            "name" => {
                value.as_str().ok_or(R::Body)?;
            }
            "tool_calls" | "tool_call_id" => rendered = Some(R::Tools),
            "function_call" | "tools" => return Err(R::Tools),
            "reasoning" | "reasoning_content" => rendered = rendered.or(Some(R::Reasoning)),
            "thinking" => return Err(R::Reasoning),
            "audio" => return Err(R::Multimodal),
            "refusal" | "annotations" | "prefix" => return Err(R::Parameter),
            _ => return Err(R::UnknownParameter),
        }
    }
    let said = |key| members.get(key).is_some_and(|value: &Value| !value.is_null());
    let says = said("content") || said("tool_calls");
    if said("role") && says { Ok(rendered) } else { Err(R::Body) }
}

fn role(value: &Value) -> Result<Option<R>, R> {
    match value.as_str().ok_or(R::Body)? {
        "system" | "developer" | "user" | "assistant" => Ok(None),
        "tool" => Ok(Some(R::Tools)),
        "function" => Err(R::Tools),
        _ => Err(R::Parameter),
    }
}

fn content(value: &Value) -> Result<(), R> {
    match value {
        Value::String(_) => Ok(()),
        Value::Array(parts) if !parts.is_empty() => parts.iter().try_for_each(part),
        _ => Err(R::Body),
    }
}

fn part(part: &Value) -> Result<(), R> {
    let members = part.as_object().ok_or(R::Body)?;
    match members.get("type").and_then(Value::as_str).ok_or(R::Body)? {
        "text" if members.keys().any(|key| key != "type" && key != "text") => Err(R::UnknownParameter),
        "text" => members.get("text").and_then(Value::as_str).map(|_| ()).ok_or(R::Body),
        "thinking" | "reasoning" => Err(R::Reasoning),
        "tool_reference" | "tool_use" | "tool_result" => Err(R::Tools),
        "refusal" => Err(R::Parameter),
        "image_url" | "image" | "input_image" | "image_pil" | "image_embeds" | "input_audio"
        | "audio_url" | "audio" | "audio_embeds" | "video_url" | "video" | "file" | "input_file" => {
            Err(R::Multimodal)
        }
        _ => Err(R::UnknownParameter),
    }
}
