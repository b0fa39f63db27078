//! A request of the Messages API as a chat request.

use serde_json::{Map, Value, json};

use crate::translation::{Thinking, Untranslated, refused, set, stream};

/// Placement of system messages within the conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum System {
    Separate,
    /// Merged into the one at the beginning: many chat templates refuse any other.
    Merged,
}

/// Members that a chat has under the same name.
const SAME: [&str; 5] = ["model", "max_tokens", "temperature", "top_p", "top_k"];
/// Members that do not change the answer of a self-hosted engine, and members of a chat that the
/// API does not have: engines leave them out.
const IGNORED: [&str; 12] = [
    "metadata",
    "context_management",
    "service_tier",
    "betas",
    "n",
    "stop",
    "stream_options",
    "logprobs",
    "top_logprobs",
    "echo",
    "max_completion_tokens",
    "best_of",
];
/// Beginning of a system text with which a client names itself and a hash of the request: with it
/// no two prompts would have the same beginning.
const BILLING: &str = "x-anthropic-billing-header";

/// The chat request for the body of a request of the Messages API.
///
/// # Errors
/// A member that is malformed, or that no chat request can ask for.
pub fn translate(body: &Value, system: System, thinking: Thinking) -> Result<Value, Untranslated> {
    let Some(members) = body.as_object() else { return refused("body", "an object is needed") };
    let mut chat = Map::new();
    let mut streamed = false;
    // `system` becomes a message. `thinking` has precedence over all else that concerns it.
    let later = ["system", "output_config", "thinking"];
    let given = members.iter().filter(|(name, value)| !value.is_null() && !later.contains(&name.as_str()));
    for (name, value) in given {
        match name.as_str() {
            same if SAME.contains(&same) => set(&mut chat, same, value.clone()),
            ignored if IGNORED.contains(&ignored) => {}
            "messages" => set(
                &mut chat,
                "messages",
                messages(value, members.get("system").filter(|text| !text.is_null()), system)?,
            ),
            "stop_sequences" => set(&mut chat, "stop", value.clone()),
            "stream" => streamed = stream(value)?,
            // Chats refuse an empty list.
            "tools" if value.as_array().is_some_and(Vec::is_empty) => {}
            "tools" => set(&mut chat, "tools", tools(value)?),
            "tool_choice" => tool_choice(value, &mut chat)?,
            "mcp_servers" | "container" => return refused(name, "an engine has none"),
            _ => set(&mut chat, name, value.clone()),
        }
    }
    let member = |name| members.get(name).filter(|value: &&Value| !value.is_null());
    member("output_config").map_or(Ok(()), |value| output_config(value, &mut chat))?;
    member("thinking").map_or(Ok(()), |value| think(value, thinking, &mut chat))?;
    for needed in ["model", "max_tokens", "messages"] {
        if !chat.contains_key(needed) {
            return refused(needed, "it is missing");
        }
    }
    if chat.get("max_tokens").and_then(Value::as_u64).is_none_or(|tokens| tokens == 0) {
        return refused("max_tokens", "an integer above 0");
    }
    match chat.get("tools") {
        Some(_) if !chat.contains_key("tool_choice") => set(&mut chat, "tool_choice", json!("auto")),
        Some(offered) if !is_offered(&chat, offered) => return refused("tool_choice.name", "no such tool"),
        Some(_) => {}
        // Chats refuse a choice without tools.
        None => drop(chat.shift_remove("tool_choice")),
    }
    if streamed {
        set(&mut chat, "stream", json!(true));
        set(&mut chat, "stream_options", json!({ "include_usage": true, "continuous_usage_stats": true }));
    }
    Ok(Value::Object(chat))
}

/// True unless the chat forces a tool that is not among these.
fn is_offered(chat: &Map<String, Value>, tools: &Value) -> bool {
    const NAME: &str = "/function/name";
    let forced = chat.get("tool_choice").and_then(|choice| choice.pointer(NAME));
    let mut tools = tools.as_array().into_iter().flatten();
    forced.is_none_or(|forced| tools.any(|tool| tool.pointer(NAME) == Some(forced)))
}

/// The messages of the chat, that of the system first.
fn messages(value: &Value, top: Option<&Value>, system: System) -> Result<Value, Untranslated> {
    let Some(given) = value.as_array().filter(|given| !given.is_empty()) else {
        return refused("messages", "a list with a message is needed");
    };
    // Clients that bill send a list.
    let mut first = match top {
        Some(Value::String(text)) => vec![text.clone()],
        Some(top) => system_texts(top, "system")?,
        None => Vec::new(),
    };
    let mut chat = Vec::new();
    for (number, message) in given.iter().enumerate() {
        let path = format!("messages[{number}]");
        let content = message.get("content").filter(|content| !content.is_null());
        let Some(content) = content else { return refused(&path, "content is missing") };
        match (message.get("role").and_then(Value::as_str), system) {
            (Some("system"), System::Merged) => first.extend(system_texts(content, &path)?),
            (Some("system"), System::Separate) => {
                let text = system_texts(content, &path)?.concat();
                if !text.is_empty() {
                    chat.push(json!({ "role": "system", "content": text }));
                }
            }
            (Some(role @ ("user" | "assistant")), _) => turn(role, content, &path, &mut chat)?,
            _ => return refused(&path, "role: user, assistant or system"),
        }
    }
    first.retain(|text| !text.is_empty());
    if !first.is_empty() {
        chat.insert(0, json!({ "role": "system", "content": first.concat() }));
    }
    Ok(Value::Array(chat))
}

/// The texts of a system message, without that of a client's billing.
fn system_texts(content: &Value, path: &str) -> Result<Vec<String>, Untranslated> {
    let texts: Vec<&str> = match content {
        Value::String(text) => vec![text],
        Value::Array(blocks) => {
            let text = |block: &Value| block.get("type").is_some_and(|kind| kind == "text");
            if !blocks.iter().all(text) {
                return refused(path, "a system message has blocks of text only");
            }
            blocks.iter().filter_map(|block| block.get("text").and_then(Value::as_str)).collect()
        }
        _ => return refused(path, "a text or a list of blocks"),
    };
    let is_prompt = |text: &&str| !text.is_empty() && !text.starts_with(BILLING);
    Ok(texts.into_iter().filter(is_prompt).map(ToOwned::to_owned).collect())
}

/// Parts of a message, gathered from its blocks.
#[derive(Default)]
struct Turn {
    parts: Vec<Value>,
    calls: Vec<Value>,
    reasoning: String,
    has_reasoning: bool,
}

/// Adds the messages for one of a user or an assistant. Results of tools are separate messages,
/// before the user's words.
fn turn(role: &str, content: &Value, path: &str, chat: &mut Vec<Value>) -> Result<(), Untranslated> {
    let blocks = match content {
        Value::String(text) => {
            chat.push(json!({ "role": role, "content": text }));
            return Ok(());
        }
        Value::Array(blocks) => blocks,
        _ => return refused(path, "content: a text or a list of blocks"),
    };
    let mut turn = Turn::default();
    for (number, block) in blocks.iter().enumerate() {
        turn.take(role, block, &format!("{path}.content[{number}]"), chat)?;
    }
    let mut message = Map::new();
    set(&mut message, "role", json!(role));
    if turn.has_reasoning {
        set(&mut message, "reasoning", json!(turn.reasoning));
    }
    if !turn.calls.is_empty() {
        set(&mut message, "tool_calls", Value::Array(turn.calls));
    }
    let text = match turn.parts.as_slice() {
        [only] => only.get("text").cloned(),
        _ => None,
    };
    if !turn.parts.is_empty() {
        set(&mut message, "content", text.unwrap_or(Value::Array(turn.parts)));
    }
    if role == "assistant" || message.contains_key("content") {
        chat.push(Value::Object(message));
    }
    Ok(())
}

impl Turn {
    fn take(
        &mut self,
        role: &str,
        block: &Value,
        path: &str,
        chat: &mut Vec<Value>,
    ) -> Result<(), Untranslated> {
        let text = |name: &str| block.get(name).and_then(Value::as_str);
        match text("type") {
            Some("text") => {
                if let Some(text) = text("text").filter(|text| !text.is_empty()) {
                    self.parts.push(json!({ "type": "text", "text": text }));
                }
            }
            Some("image") => self.parts.push(image(block, path)?),
            Some("thinking") => {
                self.has_reasoning = true;
                self.reasoning.push_str(text("thinking").unwrap_or_default());
            }
            // Opaque to everyone but its author.
            Some("redacted_thinking") => {}
            Some("tool_use") => {
                let (Some(id), Some(name)) = (text("id"), text("name")) else {
                    return refused(path, "id and name are needed");
                };
                let input = block.get("input").cloned().unwrap_or_else(|| json!({}));
                let function = json!({ "name": name, "arguments": input.to_string() });
                self.calls.push(json!({ "id": id, "type": "function", "function": function }));
            }
            Some("tool_result") if role == "user" => result(block, path, chat)?,
            _ => return refused(path, "type: text, image, thinking, tool_use, or tool_result of a user"),
        }
        Ok(())
    }
}

/// The message of a tool's result, and one of the user for its images.
fn result(block: &Value, path: &str, chat: &mut Vec<Value>) -> Result<(), Untranslated> {
    let Some(id) = block.get("tool_use_id").and_then(Value::as_str) else {
        return refused(path, "tool_use_id is needed");
    };
    let (mut texts, mut images) = (Vec::new(), Vec::new());
    match block.get("content") {
        None | Some(Value::Null) => {}
        Some(Value::String(text)) => texts.push(text.as_str()),
        Some(Value::Array(items)) => {
            for item in items {
                match item.get("type").and_then(Value::as_str) {
                    Some("text") => texts.extend(item.get("text").and_then(Value::as_str)),
                    Some("image") => images.push(image(item, path)?),
                    _ => return refused(path, "content of a result: text or image"),
                }
            }
        }
        Some(_) => return refused(path, "content of a result: a text or a list of blocks"),
    }
    chat.push(json!({ "role": "tool", "tool_call_id": id, "content": texts.join("\n") }));
    if !images.is_empty() {
        chat.push(json!({ "role": "user", "content": images }));
    }
    Ok(())
}

fn image(block: &Value, path: &str) -> Result<Value, Untranslated> {
    let source = block.get("source");
    let text = |name: &str| source?.get(name)?.as_str();
    let url = match text("type") {
        Some("url") => text("url").unwrap_or_default().to_owned(),
        Some("base64") => {
            let kind = text("media_type").unwrap_or("image/jpeg");
            format!("data:{kind};base64,{}", text("data").unwrap_or_default())
        }
        _ => return refused(path, "source.type: url or base64"),
    };
    Ok(json!({ "type": "image_url", "image_url": { "url": url } }))
}

/// The tools of the chat. Those that a provider runs itself have no schema.
fn tools(value: &Value) -> Result<Value, Untranslated> {
    let Some(given) = value.as_array() else { return refused("tools", "a list") };
    let tool = |(number, tool): (usize, &Value)| {
        let Some(schema) = tool.get("input_schema").and_then(Value::as_object) else {
            return refused(&format!("tools[{number}]"), "only tools with an input_schema can be translated");
        };
        let mut function = Map::new();
        set(&mut function, "name", tool.get("name").cloned().unwrap_or_default());
        for name in ["description", "strict", "defer_loading"] {
            if let Some(value) = tool.get(name).filter(|value| !value.is_null()) {
                set(&mut function, name, value.clone());
            }
        }
        let mut schema = schema.clone();
        schema.entry("type").or_insert_with(|| json!("object"));
        set(&mut function, "parameters", Value::Object(schema));
        Ok(json!({ "type": "function", "function": function }))
    };
    given.iter().enumerate().map(tool).collect()
}

fn tool_choice(value: &Value, chat: &mut Map<String, Value>) -> Result<(), Untranslated> {
    let choice = match value.get("type").and_then(Value::as_str) {
        Some(same @ ("auto" | "none")) => json!(same),
        Some("any") => json!("required"),
        Some("tool") => {
            let Some(name) = value.get("name").and_then(Value::as_str) else {
                return refused("tool_choice.name", "it is missing");
            };
            json!({ "type": "function", "function": { "name": name } })
        }
        _ => return refused("tool_choice.type", "auto, any, tool or none"),
    };
    set(chat, "tool_choice", choice);
    if value.get("disable_parallel_tool_use").and_then(Value::as_bool) == Some(true) {
        set(chat, "parallel_tool_calls", json!(false));
    }
    Ok(())
}

fn think(value: &Value, thinking: Thinking, chat: &mut Map<String, Value>) -> Result<(), Untranslated> {
    let kind = value.get("type").and_then(Value::as_str);
    match (kind, thinking) {
        (Some("enabled"), Thinking::Effort) => {
            let budget = value.get("budget_tokens").cloned().unwrap_or_default();
            set(chat, "thinking_token_budget", budget);
        }
        (Some("disabled"), Thinking::Effort) => set(chat, "reasoning_effort", json!("none")),
        (Some(kind @ ("enabled" | "disabled")), Thinking::Template | Thinking::TemplateAndBudget) => {
            if let (Thinking::TemplateAndBudget, Some(budget)) = (thinking, value.get("budget_tokens")) {
                set(chat, "thinking_budget_tokens", budget.clone());
            }
            let known = chat.entry("chat_template_kwargs").or_insert_with(|| json!({}));
            if let Some(known) = known.as_object_mut() {
                set(known, "enable_thinking", json!(kind == "enabled"));
            }
        }
        (Some("adaptive"), _) => {}
        _ => return refused("thinking.type", "enabled, disabled or adaptive"),
    }
    Ok(())
}

fn output_config(value: &Value, chat: &mut Map<String, Value>) -> Result<(), Untranslated> {
    let format = value.get("format").filter(|format| !format.is_null());
    if let Some(format) = format {
        let is_schema = format.get("type") == Some(&json!("json_schema"));
        let (Some(schema), true) = (format.get("schema"), is_schema) else {
            return refused("output_config.format", "a json_schema with its schema");
        };
        let named = json!({ "name": "json_schema", "schema": schema });
        set(chat, "response_format", json!({ "type": "json_schema", "json_schema": named }));
    }
    if let Some(effort) = value.get("effort").filter(|effort| !effort.is_null()) {
        set(chat, "reasoning_effort", effort.clone());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chat(mut body: Value) -> Value {
        let members = body.as_object_mut().unwrap();
        for (name, value) in [("model", json!("m")), ("max_tokens", json!(9))] {
            members.entry(name).or_insert(value);
        }
        members.entry("messages").or_insert_with(|| json!([{ "role": "user", "content": "hi" }]));
        translate(&body, System::Merged, Thinking::Effort).unwrap()
    }

    #[test]
    fn what_a_chat_refuses_though_the_api_has_it_is_left_out() {
        let plain = chat(json!({}));
        assert_eq!(chat(json!({ "tools": [] })), plain);
        assert_eq!(chat(json!({ "tools": [], "tool_choice": { "type": "any" } })), plain);
        assert_eq!(chat(json!({ "n": 2, "stop": "x", "logprobs": true, "echo": true })), plain);
        let unknown = json!({
            "model": "m", "max_tokens": 9, "messages": [{ "role": "user", "content": "hi" }],
            "tools": [{ "name": "f", "input_schema": {} }],
            "tool_choice": { "type": "tool", "name": "g" },
        });
        let refused = translate(&unknown, System::Merged, Thinking::Effort).unwrap_err();
        assert_eq!(refused.path(), "tool_choice.name");
    }

    #[test]
    fn what_is_said_of_thinking_holds_wherever_it_stands() {
        let [disabled, effort] = [json!({ "type": "disabled" }), json!({ "effort": "high" })];
        for body in [
            json!({ "thinking": disabled, "output_config": effort }),
            json!({ "output_config": effort, "thinking": disabled }),
        ] {
            assert_eq!(chat(body)["reasoning_effort"], "none");
        }
        let body = json!({
            "model": "m", "max_tokens": 9, "messages": [{ "role": "user", "content": "hi" }],
            "thinking": disabled, "chat_template_kwargs": { "a": 1 },
        });
        let thinking = translate(&body, System::Merged, Thinking::Template).unwrap();
        assert_eq!(thinking["chat_template_kwargs"], json!({ "a": 1, "enable_thinking": false }));
    }

    #[test]
    fn a_header_of_billing_is_left_out_of_lists_only() {
        let text = "x-anthropic-billing-header: 1; You are X.";
        let first = |system: Value| chat(json!({ "system": system }))["messages"][0].clone();
        assert_eq!(first(json!(text)), json!({ "role": "system", "content": text }));
        assert_eq!(first(json!([{ "type": "text", "text": text }]))["role"], "user");
    }

    fn messages_of(messages: &Value) -> Value {
        chat(json!({ "messages": messages }))["messages"].clone()
    }

    #[test]
    fn sampling_and_limits_keep_their_meaning() {
        let translated = chat(json!({
            "temperature": 0.5, "top_p": 0.9, "top_k": 4, "stop_sequences": ["END"], "stream": true,
            "metadata": { "user_id": "u" }, "chat_template_kwargs": { "a": 1 }, "system": null,
        }));
        let expected = json!({
            "model": "m", "max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "stop": ["END"],
            "chat_template_kwargs": { "a": 1 }, "messages": [{ "role": "user", "content": "hi" }],
            "stream": true, "stream_options": { "include_usage": true, "continuous_usage_stats": true },
        });
        assert_eq!(translated, expected);
    }

    #[test]
    fn system_messages_are_merged_or_stay_without_the_text_of_billing() {
        let body = json!({
            "model": "m", "max_tokens": 1,
            "system": [
                { "type": "text", "text": "x-anthropic-billing-header: cch=1" },
                { "type": "text", "text": "One.", "cache_control": { "type": "ephemeral" } },
            ],
            "messages": [
                { "role": "user", "content": "a" },
                { "role": "system", "content": "Two." },
                { "role": "user", "content": "b" },
            ],
        });
        let roles = |system| {
            let translated = translate(&body, system, Thinking::Effort).unwrap();
            let said = |message: &Value| {
                format!("{} {}", message["role"].as_str().unwrap(), message["content"].as_str().unwrap())
            };
            translated["messages"].as_array().unwrap().iter().map(said).collect::<Vec<_>>()
        };
        assert_eq!(roles(System::Merged), ["system One.Two.", "user a", "user b"]);
        assert_eq!(roles(System::Separate), ["system One.", "user a", "system Two.", "user b"]);
    }

    #[test]
    fn calls_results_and_reasoning_become_messages_of_a_chat() {
        let translated = messages_of(&json!([
            { "role": "assistant", "content": [
                { "type": "thinking", "thinking": "Hm.", "signature": "s" },
                { "type": "redacted_thinking", "data": "zz" },
                { "type": "text", "text": "Look:" },
                { "type": "tool_use", "id": "t1", "name": "find", "input": { "q": "ä" } },
            ] },
            { "role": "user", "content": [
                { "type": "tool_result", "tool_use_id": "t1", "content": [
                    { "type": "text", "text": "one" }, { "type": "text", "text": "two" },
                ] },
                { "type": "text", "text": "And?" },
            ] },
            { "role": "user", "content": [{ "type": "tool_result", "tool_use_id": "t2" }] },
        ]));
        let call = json!({ "name": "find", "arguments": "{\"q\":\"ä\"}" });
        let expected = json!([
            { "role": "assistant", "reasoning": "Hm.",
              "tool_calls": [{ "id": "t1", "type": "function", "function": call }], "content": "Look:" },
            { "role": "tool", "tool_call_id": "t1", "content": "one\ntwo" },
            { "role": "user", "content": "And?" },
            { "role": "tool", "tool_call_id": "t2", "content": "" },
        ]);
        assert_eq!(translated, expected);
    }

    #[test]
    fn images_become_urls() {
        let translated = messages_of(&json!([{ "role": "user", "content": [
            { "type": "image", "source": { "type": "base64", "media_type": "image/png", "data": "QQ==" } },
            { "type": "text", "text": "What?" },
        ] }]));
        assert_eq!(translated[0]["content"][0]["image_url"]["url"], "data:image/png;base64,QQ==");
        assert_eq!(translated[0]["content"][1]["text"], "What?");
    }

    #[rstest::rstest]
    #[case(json!({ "type": "auto" }), json!("auto"))]
    #[case(json!({ "type": "any" }), json!("required"))]
    #[case(json!({ "type": "none" }), json!("none"))]
    #[case(json!({ "type": "tool", "name": "f" }), json!({ "type": "function", "function": { "name": "f" } }))]
    fn the_choice_of_tools_is_translated(#[case] given: Value, #[case] wanted: Value) {
        let tools = json!([{ "name": "f", "input_schema": { "properties": {} } }]);
        let translated = chat(json!({ "tools": tools, "tool_choice": given }));
        assert_eq!(translated["tool_choice"], wanted);
        let function = json!({ "name": "f", "parameters": { "properties": {}, "type": "object" } });
        assert_eq!(translated["tools"], json!([{ "type": "function", "function": function }]));
        assert_eq!(chat(json!({ "tools": tools }))["tool_choice"], "auto");
    }

    #[test]
    fn reasoning_is_told_to_the_engine_in_its_own_way() {
        let with = |given: Value, thinking| {
            let messages = json!([{ "role": "user", "content": "hi" }]);
            let body = json!({ "model": "m", "max_tokens": 9, "messages": messages, "thinking": given });
            translate(&body, System::Merged, thinking).unwrap()
        };
        let enabled = json!({ "type": "enabled", "budget_tokens": 1024 });
        assert_eq!(with(enabled.clone(), Thinking::Effort)["thinking_token_budget"], 1024);
        assert_eq!(with(json!({ "type": "disabled" }), Thinking::Effort)["reasoning_effort"], "none");
        assert_eq!(with(enabled.clone(), Thinking::TemplateAndBudget)["thinking_budget_tokens"], 1024);
        let thinking = with(enabled, Thinking::Template);
        assert_eq!(thinking["chat_template_kwargs"], json!({ "enable_thinking": true }));
        assert!(with(json!({ "type": "adaptive" }), Thinking::Effort).get("reasoning_effort").is_none());
        let effort = chat(json!({ "output_config": { "effort": "high" } }));
        assert_eq!(effort["reasoning_effort"], "high");
    }

    #[rstest::rstest]
    #[case(json!([]), "body: an object is needed")]
    #[case(json!({ "model": "m", "messages": [] , "max_tokens": 1 }), "messages: a list with a message")]
    #[case(json!({ "model": "m", "messages": [{ "role": "user", "content": "a" }] }), "max_tokens: it is missing")]
    #[case(json!({ "model": "m", "max_tokens": 0, "messages": [{ "role": "user", "content": "a" }] }), "max_tokens: an")]
    #[case(json!({ "max_tokens": 1, "messages": [{ "role": "tool", "content": "a" }] }), "messages[0]: role")]
    #[case(json!({ "messages": [{ "role": "user", "content": [{ "type": "document" }] }] }), "messages[0].content[0]: type")]
    #[case(json!({ "tools": [{ "type": "web_search_20250305", "name": "w" }] }), "tools[0]: only tools")]
    #[case(json!({ "mcp_servers": [{}] }), "mcp_servers: an engine has none")]
    fn what_cannot_be_asked_is_refused_by_its_path(#[case] body: Value, #[case] wanted: &str) {
        let error = translate(&body, System::Merged, Thinking::Effort).unwrap_err().to_string();
        assert!(error.starts_with(wanted), "{error}");
    }
}
