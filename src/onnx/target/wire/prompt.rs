//! Reads the fields of the prompt.

use serde_json::value::RawValue;
use serde_json::{Map, Value};

use crate::target::errors::Refusal;
use crate::target::fields::{Fields, invalid};
use crate::target::parts::ParseOptions;
use crate::target::wire::{Prompt, Served};
use foretell_core::units::TokenId;
use foretell_parsers::parse::Parsers;
use foretell_wire::openai::ForcedCalls;

/// Maximum number of prompts in one request, as in vLLM.
pub(super) const PROMPTS_MAX: usize = 1024;

/// Reads `prompt`: a string, a list of token ids, or a list of either.
pub(super) fn prompts(fields: &mut Fields<'_>, served: Served<'_>) -> Result<Vec<Prompt>, Refusal> {
    let raw: Box<RawValue> = fields.take("prompt")?.ok_or(Refusal::Missing("prompt"))?;
    let read = |error: serde_json::Error| invalid("prompt", error.to_string());
    let inner = raw.get().strip_prefix('[').map(str::trim_start);
    let prompts = match inner.and_then(|inner| inner.chars().next()) {
        None => vec![Prompt::Text(serde_json::from_str(raw.get()).map_err(read)?)],
        Some('"') => {
            let texts: Vec<String> = serde_json::from_str(raw.get()).map_err(read)?;
            texts.into_iter().map(Prompt::Text).collect()
        }
        Some('[') => {
            let lists: Vec<Vec<TokenId>> = serde_json::from_str(raw.get()).map_err(read)?;
            lists.into_iter().map(Prompt::Ids).collect()
        }
        Some(_) => vec![Prompt::Ids(serde_json::from_str(raw.get()).map_err(read)?)],
    };
    for prompt in &prompts {
        match prompt {
            Prompt::Ids(ids) if ids.is_empty() => return Err(invalid("prompt", "must not be empty")),
            Prompt::Ids(ids) => served.check_ids("prompt", ids)?,
            Prompt::Text(_) | Prompt::Messages(_) => {}
        }
    }
    if prompts.len() > PROMPTS_MAX {
        return Err(invalid("prompt", format!("at most {PROMPTS_MAX} prompts, got {}", prompts.len())));
    }
    Ok(prompts)
}

/// Reads `generated`: one number for all prompts, or a list with one for each.
pub(super) fn generated(fields: &mut Fields<'_>, prompts: &[Prompt]) -> Result<Vec<usize>, Refusal> {
    let Some(raw) = fields.take::<Box<RawValue>>("generated")? else { return Ok(vec![0; prompts.len()]) };
    let read = |error: serde_json::Error| invalid("generated", error.to_string());
    let counts: Vec<usize> = if raw.get().starts_with('[') {
        serde_json::from_str(raw.get()).map_err(read)?
    } else {
        vec![serde_json::from_str(raw.get()).map_err(read)?; prompts.len()]
    };
    if counts.len() != prompts.len() {
        return Err(invalid("generated", format!("{} numbers for {} prompts", counts.len(), prompts.len())));
    }
    for (prompt, &count) in prompts.iter().zip(&counts) {
        match prompt {
            Prompt::Ids(ids) if count > ids.len() => {
                return Err(invalid(
                    "generated",
                    format!("{count} is more than the {} tokens of the prompt", ids.len()),
                ));
            }
            Prompt::Text(_) if count > 0 => return Err(invalid("generated", "needs prompts of token ids")),
            _ => {}
        }
    }
    Ok(counts)
}

/// Checks a chat message and joins its content into one string, as text templates expect.
pub(super) fn message(mut message: Map<String, Value>) -> Result<Value, Refusal> {
    if !message.get("role").is_some_and(Value::is_string) {
        return Err(invalid("messages", "every message needs a role"));
    }
    parse_arguments(&mut message);
    // An answer of calls or reasoning alone has no content, and comes back as it was sent.
    let is_answer = message.get("role").is_some_and(|role| role == "assistant");
    if is_answer {
        spell_reasoning(&mut message);
    }
    let content = match message.get("content") {
        None | Some(Value::Null) if is_answer => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => {
            let texts = parts.iter().map(text_part).collect::<Result<Vec<_>, _>>()?;
            texts.join("\n")
        }
        _ => return Err(invalid("messages", "content must be a string or a list of text parts")),
    };
    message.insert("content".to_owned(), Value::String(content));
    Ok(Value::Object(message))
}

/// Gives the reasoning of an answer both of its names: servers send the first one, templates read
/// the second. As in vLLM.
fn spell_reasoning(message: &mut Map<String, Value>) {
    let given = |name: &str| message.get(name).filter(|reasoning| !reasoning.is_null()).cloned();
    if let Some(reasoning) = given("reasoning").or_else(|| given("reasoning_content")) {
        for name in ["reasoning", "reasoning_content"] {
            message.insert(name.to_owned(), reasoning.clone());
        }
    }
}

/// Parses the arguments of a message's calls, which templates expect as an object.
fn parse_arguments(message: &mut Map<String, Value>) {
    let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
    for call in calls.into_iter().flatten() {
        let Some(arguments) = call.pointer_mut("/function/arguments") else { continue };
        if let Some(Ok(parsed)) = arguments.as_str().map(serde_json::from_str) {
            *arguments = parsed;
        }
    }
}

fn text_part(part: &Value) -> Result<String, Refusal> {
    let text = (part.get("type").and_then(Value::as_str) == Some("text")).then(|| part.get("text")).flatten();
    text.and_then(Value::as_str)
        .map(str::to_owned)
        .ok_or(Refusal::Unsupported { param: "messages".to_owned(), message: "only text parts" })
}

/// Reads the fields about the chat template; returns `add_generation_prompt`.
pub(super) fn opening(fields: &mut Fields<'_>) -> Result<bool, Refusal> {
    fields.only("continue_final_message", &["false"], "only false")?;
    fields.only("chat_template", &[], "only the model's template")?;
    fields.flag("add_generation_prompt", true)
}

/// Reads tools and the variables of the chat template. An effort of reasoning is one of them, and
/// switches it on or off where the client does not, as in vLLM.
pub(super) fn parse_options(fields: &mut Fields<'_>, parsers: Parsers) -> Result<ParseOptions, Refusal> {
    if parsers.tools.is_none() {
        fields.only("tools", &["[]"], "start this server with --tool-parser")?;
    }
    let tools: Vec<Value> = fields.take("tools")?.unwrap_or_default();
    let choice = fields.take::<Value>("tool_choice")?;
    let forced = choice.as_ref().and_then(ForcedCalls::read);
    let may_call = match &choice {
        None => !tools.is_empty(),
        Some(choice) if choice == "none" => false,
        Some(choice) if (choice == "auto" || forced.is_some()) && !tools.is_empty() => true,
        Some(_) => {
            let message = "only none, and with tools auto, required or a function";
            return Err(Refusal::Unsupported { param: "tool_choice".to_owned(), message });
        }
    };
    let single_call = !fields.flag("parallel_tool_calls", true)?;
    let mut template: Option<Map<String, Value>> = fields.take("chat_template_kwargs")?;
    if let Some(effort) = fields.take::<String>("reasoning_effort")? {
        let variables = template.get_or_insert_default();
        variables.entry("enable_thinking").or_insert(Value::Bool(effort != "none"));
        variables.insert("reasoning_effort".to_owned(), Value::String(effort));
    }
    Ok(ParseOptions { tools, may_call, single_call, forced, template })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(given: Value) -> Result<Value, Refusal> {
        let Value::Object(given) = given else { unreachable!() };
        message(given)
    }

    #[test]
    fn an_answer_without_content_is_taken_back() {
        for content in [json!({}), json!({"content": null})] {
            let mut given = json!({"role": "assistant", "reasoning": "Hm"});
            given.as_object_mut().unwrap().extend(content.as_object().unwrap().clone());
            let want =
                json!({"role": "assistant", "reasoning": "Hm", "reasoning_content": "Hm", "content": ""});
            assert_eq!(read(given), Ok(want));
        }
        for role in ["user", "system", "tool"] {
            let refused = read(json!({"role": role, "content": null}));
            assert!(matches!(refused, Err(Refusal::Invalid { .. })), "{refused:?}");
        }
    }

    #[test]
    fn reasoning_has_the_name_that_templates_read() {
        for given in [
            json!({"reasoning": "Hm"}),
            json!({"reasoning_content": "Hm"}),
            json!({"reasoning": null, "reasoning_content": "Hm"}),
        ] {
            let mut answer = json!({"role": "assistant", "content": "a"});
            answer.as_object_mut().unwrap().extend(given.as_object().unwrap().clone());
            let read = read(answer).unwrap();
            assert_eq!((&read["reasoning"], &read["reasoning_content"]), (&json!("Hm"), &json!("Hm")));
        }
        let none = json!({"role": "assistant", "content": "a"});
        assert_eq!(read(none.clone()), Ok(none));
    }
}
