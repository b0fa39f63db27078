//! A request of the Responses API as a chat request.

use foretell_core::words::PassthroughReason;
use serde_json::{Map, Value, json};

use super::custom;
use super::echo::{Echo, LOGPROBS};
use super::input::messages;
use crate::translation::{Thinking, Untranslated, passed, refused, set, stream};

/// Members that a chat has under the same name: OpenAI's, then those that vLLM adds to both.
const SAME: [&str; 26] = [
    "model",
    "temperature",
    "top_p",
    "parallel_tool_calls",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "stop",
    "top_k",
    "min_p",
    "repetition_penalty",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "include_reasoning",
    "structured_outputs",
    "chat_template_kwargs",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "cache_salt",
    "priority",
    "session_id",
    "watermarking",
    "vllm_xargs",
];
/// Members that do not change the answer of a self-hosted engine.
const IGNORED: [&str; 10] = [
    "client_metadata",
    "max_tool_calls",
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "stream_options",
    "user",
    // Read with `include`.
    "top_logprobs",
];
/// Members by which a server is echo for what only a server does: it keeps an answer, or works
/// without a client. `false` asks for nothing.
const SERVED: [&str; 10] = [
    "background",
    "context_management",
    "conversation",
    "ec_transfer_params",
    "enable_response_messages",
    "kv_transfer_params",
    "previous_input_messages",
    "previous_response_id",
    "prompt",
    "store",
];
/// The chat request for the body of a request of the Responses API, and what its answer repeats of
/// that.
///
/// # Errors
/// A member that is malformed, or that no chat request can ask for.
pub fn translate(body: &Value, thinking: Thinking) -> Result<(Value, Echo), Untranslated> {
    let Some(members) = body.as_object() else { return refused("body", "an object is needed") };
    let given = |name: &str| members.get(name).filter(|value| !value.is_null());
    let mut chat = Map::new();
    for (name, value) in members.iter().filter(|(_, value)| !value.is_null()) {
        match name.as_str() {
            same if SAME.contains(&same) => set(&mut chat, same, value.clone()),
            ignored if IGNORED.contains(&ignored) => {}
            served if SERVED.contains(&served) => {
                if *value != json!(false) {
                    return passed(PassthroughReason::Parameter, served);
                }
            }
            "max_output_tokens" => set(&mut chat, "max_tokens", value.clone()),
            // The first two become messages, the third may change a member of the same name.
            "input" | "instructions" | "reasoning" => {}
            "stream" => {
                if stream(value)? {
                    set(&mut chat, "stream", json!(true));
                    set(&mut chat, "stream_options", json!({ "include_usage": true }));
                }
            }
            "tools" => tools(value, &mut chat)?,
            "tool_choice" => tool_choice(value, &mut chat)?,
            "text" => text(value, &mut chat)?,
            "include" => include(value, given("top_logprobs"), &mut chat)?,
            "truncation" => truncation(value, &mut chat)?,
            _ => return passed(PassthroughReason::UnknownParameter, name),
        }
    }
    if let Some(value) = given("reasoning") {
        reasoning(value, thinking, &mut chat);
    }
    let Some(input) = given("input") else { return refused("input", "it is missing") };
    let messages = messages(input, given("instructions"), thinking)?;
    if messages.continues {
        set(&mut chat, "add_generation_prompt", json!(false));
        set(&mut chat, "continue_final_message", json!(true));
    }
    set(&mut chat, "messages", Value::Array(messages.chat));
    choice_of_tools(&mut chat)?;
    Ok((Value::Object(chat), Echo::of(members)))
}

/// The tools of the chat, if there are any. The server runs those that are neither functions nor
/// free-form, and holds to their grammars.
fn tools(value: &Value, chat: &mut Map<String, Value>) -> Result<(), Untranslated> {
    let Some(given) = value.as_array() else { return refused("tools", "a list") };
    let tool = |(number, tool): (usize, &Value)| {
        let path = format!("tools[{number}]");
        let text = |name: &str| tool.get(name).and_then(Value::as_str);
        let function = match text("type") {
            Some("function") => {
                let members = tool.as_object().into_iter().flatten();
                let members_of_function = members.filter(|(name, value)| *name != "type" && !value.is_null());
                members_of_function.map(|(name, value)| (name.clone(), value.clone())).collect()
            }
            Some("custom") if custom::is_free(tool) => custom::function(tool),
            Some("custom") => return passed(PassthroughReason::Tools, format!("{path}.format")),
            Some(_) => return passed(PassthroughReason::Tools, format!("{path}.type")),
            None => return refused(&format!("{path}.type"), "it is missing"),
        };
        if text("name").is_none() {
            return refused(&format!("{path}.name"), "it is missing");
        }
        Ok(json!({ "type": "function", "function": Value::Object(function) }))
    };
    let tools: Vec<Value> = given.iter().enumerate().map(tool).collect::<Result<_, _>>()?;
    if !tools.is_empty() {
        set(chat, "tools", Value::Array(tools));
    }
    Ok(())
}

fn tool_choice(value: &Value, chat: &mut Map<String, Value>) -> Result<(), Untranslated> {
    let choice = match (value.as_str(), value.get("type").and_then(Value::as_str)) {
        (Some("auto" | "none" | "required"), _) => value.clone(),
        (None, Some("function" | "custom")) => {
            let Some(name) = value.get("name").and_then(Value::as_str) else {
                return refused("tool_choice.name", "it is missing");
            };
            json!({ "type": "function", "function": { "name": name } })
        }
        (None, Some(_)) => return passed(PassthroughReason::Tools, "tool_choice"),
        _ => return refused("tool_choice", "auto, none, required, or a tool"),
    };
    set(chat, "tool_choice", choice);
    Ok(())
}

/// With tools the choice is `auto` unless another is made; without, there is nothing to choose.
fn choice_of_tools(chat: &mut Map<String, Value>) -> Result<(), Untranslated> {
    if chat.contains_key("tools") {
        chat.entry("tool_choice").or_insert_with(|| json!("auto"));
        return Ok(());
    }
    match chat.remove("tool_choice") {
        Some(choice) if choice != "auto" && choice != "none" => refused("tool_choice", "there are no tools"),
        _ => Ok(()),
    }
}

/// `text.format`; self-hosted engines do not know `text.verbosity`.
fn text(value: &Value, chat: &mut Map<String, Value>) -> Result<(), Untranslated> {
    let Some(format) = value.get("format").filter(|format| !format.is_null()) else { return Ok(()) };
    let response_format = match format.get("type").and_then(Value::as_str) {
        Some("text") => return Ok(()),
        Some("json_object") => json!({ "type": "json_object" }),
        Some("json_schema") => {
            let mut schema = format.as_object().cloned().unwrap_or_default();
            schema.shift_remove("type");
            json!({ "type": "json_schema", "json_schema": schema })
        }
        _ => return refused("text.format.type", "text, json_object or json_schema"),
    };
    set(chat, "response_format", response_format);
    Ok(())
}

/// `reasoning.effort`; the request's variables of the template win.
fn reasoning(value: &Value, thinking: Thinking, chat: &mut Map<String, Value>) {
    let Some(effort) = value.get("effort").filter(|effort| !effort.is_null()) else { return };
    set(chat, "reasoning_effort", effort.clone());
    if thinking != Thinking::Effort {
        let variables = chat.entry("chat_template_kwargs").or_insert_with(|| json!({}));
        if let Some(variables) = variables.as_object_mut() {
            variables.entry("enable_thinking").or_insert_with(|| json!(effort != "none"));
        }
    }
}

fn include(value: &Value, top: Option<&Value>, chat: &mut Map<String, Value>) -> Result<(), Untranslated> {
    let Some(names) = value.as_array() else { return refused("include", "a list") };
    if names.iter().any(|name| name == LOGPROBS) {
        set(chat, "logprobs", json!(true));
        set(chat, "top_logprobs", top.cloned().unwrap_or_else(|| json!(0)));
    }
    Ok(())
}

fn truncation(value: &Value, chat: &mut Map<String, Value>) -> Result<(), Untranslated> {
    match value.as_str() {
        Some("disabled") => {}
        Some("auto") => set(chat, "truncate_prompt_tokens", json!(-1)),
        _ => return refused("truncation", "auto or disabled"),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn translated(mut body: Value, thinking: Thinking) -> Result<Value, Untranslated> {
        let members = body.as_object_mut().unwrap();
        members.entry("input").or_insert_with(|| json!("hi"));
        translate(&body, thinking).map(|(chat, _)| chat)
    }

    #[test]
    fn an_engine_other_than_vllm_is_told_to_reason_by_its_template_and_of_no_developer() {
        let body = json!({
            "reasoning": { "effort": "none" },
            "chat_template_kwargs": { "a": 1 },
            "input": [{ "role": "developer", "content": "hi" }],
        });
        let chat = translated(body.clone(), Thinking::Template).unwrap();
        assert_eq!(chat["chat_template_kwargs"], json!({ "enable_thinking": false, "a": 1 }));
        assert_eq!(
            (&chat["reasoning_effort"], &chat["messages"][0]["role"]),
            (&json!("none"), &json!("system"))
        );
        let chat = translated(body, Thinking::Effort).unwrap();
        assert_eq!(chat["chat_template_kwargs"], json!({ "a": 1 }));
        assert_eq!(chat["messages"][0]["role"], "developer");
    }

    #[rstest::rstest]
    #[case(json!({ "previous_response_id": "resp_1" }), PassthroughReason::Parameter, "previous_response_id")]
    #[case(json!({ "background": true }), PassthroughReason::Parameter, "background")]
    #[case(json!({ "store": true }), PassthroughReason::Parameter, "store")]
    #[case(json!({ "conversation": "c" }), PassthroughReason::Parameter, "conversation")]
    #[case(json!({ "prompt": { "id": "p" } }), PassthroughReason::Parameter, "prompt")]
    #[case(json!({ "tools": [{ "type": "web_search" }] }), PassthroughReason::Tools, "tools[0].type")]
    #[case(json!({ "tools": [{ "type": "custom", "name": "p", "format": { "type": "grammar" } }] }), PassthroughReason::Tools, "tools[0].format")]
    #[case(json!({ "tool_choice": { "type": "allowed_tools" } }), PassthroughReason::Tools, "tool_choice")]
    #[case(json!({ "input": [{ "type": "computer_call" }] }), PassthroughReason::Parameter, "input[0].type")]
    #[case(json!({ "input": [{ "type": "reasoning", "encrypted_content": "x" }] }), PassthroughReason::Parameter, "input[0].encrypted_content")]
    #[case(json!({ "input": [{ "role": "user", "content": [{ "type": "input_file" }] }] }), PassthroughReason::Multimodal, "input[0].content[0].type")]
    #[case(json!({ "input": [{ "role": "user", "content": [{ "type": "input_image", "file_id": "f" }] }] }), PassthroughReason::Multimodal, "input[0].content[0].file_id")]
    #[case(json!({ "messages": [] }), PassthroughReason::UnknownParameter, "messages")]
    fn what_only_a_server_does_is_passed_on_for_a_reason(
        #[case] body: Value,
        #[case] reason: PassthroughReason,
        #[case] parameter: &str,
    ) {
        let wanted = Untranslated::Passed { reason, parameter: parameter.to_owned() };
        assert_eq!(translated(body, Thinking::Effort), Err(wanted));
    }

    #[test]
    fn what_asks_for_nothing_is_no_reason() {
        let body =
            json!({ "store": false, "background": false, "previous_response_id": null, "tools": null });
        assert!(translated(body, Thinking::Effort).is_ok());
    }

    #[rstest::rstest]
    #[case(json!([]), "body: an object is needed")]
    #[case(json!({}), "input: it is missing")]
    #[case(json!({ "input": 7 }), "input: a text or a list")]
    #[case(json!({ "input": [] }), "input: a text or a list")]
    #[case(json!({ "input": [7] }), "input[0]: an object")]
    #[case(json!({ "input": [{ "type": "item_reference", "id": "i" }] }), "input[0]: nothing is stored")]
    #[case(json!({ "input": [{ "content": "x" }] }), "input[0].role: user")]
    #[case(json!({ "input": [{ "role": "tool", "content": "x" }] }), "input[0].role: user")]
    #[case(json!({ "input": [{ "role": "user" }] }), "input[0].content: a text")]
    #[case(json!({ "input": [{ "role": "user", "content": [{}] }] }), "input[0].content[0].type: it is missing")]
    #[case(json!({ "input": [{ "role": "user", "content": [{ "type": "input_text" }] }] }), "input[0].content[0].text: a text")]
    #[case(json!({ "input": [{ "type": "function_call", "call_id": "c" }] }), "input[0].name: a text")]
    #[case(json!({ "input": [{ "type": "function_call_output", "output": "x" }] }), "input[0].call_id: a text")]
    #[case(json!({ "input": "x", "instructions": ["x"] }), "instructions: a text")]
    #[case(json!({ "input": "x", "stream": 1 }), "stream: a boolean")]
    #[case(json!({ "input": "x", "tools": [{ "type": "function" }] }), "tools[0].name: it is missing")]
    #[case(json!({ "input": "x", "tools": [{}] }), "tools[0].type: it is missing")]
    #[case(json!({ "input": "x", "tool_choice": "required" }), "tool_choice: there are no tools")]
    #[case(json!({ "input": "x", "tool_choice": 1 }), "tool_choice: auto")]
    #[case(json!({ "input": "x", "text": { "format": { "type": "xml" } } }), "text.format.type: text")]
    #[case(json!({ "input": "x", "include": "all" }), "include: a list")]
    #[case(json!({ "input": "x", "truncation": 1 }), "truncation: auto")]
    fn what_is_malformed_is_refused_by_its_path(#[case] body: Value, #[case] wanted: &str) {
        let error = translate(&body, Thinking::Effort).unwrap_err();
        assert!(matches!(error, Untranslated::Refused { .. }), "{error:?}");
        assert!(error.to_string().starts_with(wanted), "{error}");
        assert_eq!(wanted.split_once(':').map(|(path, _)| path), Some(error.path()));
    }
}
