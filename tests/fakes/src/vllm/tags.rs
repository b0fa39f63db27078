//! What vLLM makes of tools that have to be called, or called in a certain way, after its source
//! (0.32, `parser/abstract_parser.py`, `tool_parsers/structural_tag_registry.py`): a structural tag
//! for the tool parser `hermes`, or the schema of the arguments where it makes none.

use serde_json::{Value, json};

use super::super::fields::Fields;
use super::super::hermes::python;
use super::{Refusal, Vllm};
use crate::TokenId;

/// The calls that a request forces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Forced {
    /// `required`
    Any,
    Named(String),
}

impl Forced {
    pub fn of(fields: &Fields) -> Option<Self> {
        let choice = fields.get("tool_choice").filter(|_| fields.tools())?;
        if choice == "required" {
            return Some(Self::Any);
        }
        choice.pointer("/function/name").and_then(Value::as_str).map(|name| Self::Named(name.to_owned()))
    }
}

impl Vllm {
    /// The constraint that the tools of a request make, as a member of `structured_outputs`; `None`
    /// if they make none.
    pub(super) fn made_of_tools(&self, fields: &Fields) -> Result<Option<(&'static str, Value)>, Refusal> {
        if self.minor() < 32 || !fields.tools() {
            return Ok(None);
        }
        let forced = Forced::of(fields);
        let tools = fields.get("tools").and_then(Value::as_array).into_iter().flatten();
        let tools: Vec<&Value> = tools.collect();
        if self.house.setup.hermes.is_none() {
            return match forced {
                None => Ok(None),
                Some(Forced::Named(name)) => Ok(Some(("json", parameters(&tools, &name)))),
                Some(Forced::Any) => {
                    let message = "this fake has no list of required calls".to_owned();
                    Err(Refusal(501, "NotImplementedError", message, None))
                }
            };
        }
        let given = fields.get("structured_outputs").is_some() || fields.get("response_format").is_some();
        let single = fields.single_call() && !(forced.is_none() && given);
        let strict = |tool: &&&Value| tool["function"]["strict"] == true;
        if forced.is_none() && !single && !tools.iter().any(|tool| strict(&tool)) {
            return Ok(None);
        }
        let offered = tools.iter().filter(|tool| match &forced {
            Some(Forced::Named(name)) => tool["function"]["name"] == *name,
            Some(Forced::Any) | None => true,
        });
        let tags: Vec<Value> = offered
            .flat_map(|tool| {
                let name = tool["function"]["name"].as_str().unwrap_or_default();
                let free = json!(true);
                let schema = if strict(&tool) {
                    tool["function"].get("parameters").cloned().unwrap_or(free)
                } else {
                    free
                };
                [("\n", "\n"), ("", "")].map(|(before, behind)| {
                    json!({"type": "tag", "begin": format!("<tool_call>{before}{{\"name\": \"{name}\", \"arguments\": "),
                        "content": {"type": "json_schema", "json_schema": schema, "style": "json", "any_order": false,
                            "max_whitespace_cnt": null, "excludes": []},
                        "end": format!("}}{behind}</tool_call>")})
                })
            })
            .collect();
        let once = single || matches!(forced, Some(Forced::Named(_)));
        let format = match forced {
            None => {
                json!({"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": tags, "excludes": [],
                "at_least_one": false, "stop_after_first": once})
            }
            Some(_) => {
                json!({"type": "tags_with_separator", "tags": tags, "separator": "", "at_least_one": true,
                "stop_after_first": once})
            }
        };
        Ok(Some(("structural_tag", json!(python(&json!({"type": "structural_tag", "format": format}))))))
    }
}

impl Vllm {
    /// The only text of an output that a grammar binds from its first token on, as a stand-in for
    /// all that it allows; empty if none does.
    pub(super) fn bound(&self, fields: &Fields) -> Result<Vec<TokenId>, Refusal> {
        let forced = Forced::of(fields).filter(|_| self.minor() >= 32);
        let text = match (self.made_of_tools(fields)?, forced) {
            (Some(("structural_tag", _)), Some(Forced::Named(name))) => call(&name),
            (Some(("structural_tag", _)), Some(Forced::Any)) => {
                let name = fields.get("tools").and_then(|tools| tools.pointer("/0/function/name"));
                call(name.and_then(Value::as_str).unwrap_or_default())
            }
            (Some(("json", _)), _) => "{\"answer\": true}".to_owned(),
            _ => return Ok(fields.grammar(&self.house.toy)?),
        };
        Ok(self.house.toy.encode(&text))
    }
}

/// A call of this function.
fn call(name: &str) -> String {
    format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {{\"answer\": true}}}}\n</tool_call>")
}

/// The schema of a function's arguments.
fn parameters(tools: &[&Value], name: &str) -> Value {
    let tool = tools.iter().find(|tool| tool["function"]["name"] == *name);
    tool.and_then(|tool| tool["function"].get("parameters")).cloned().unwrap_or_else(|| json!({}))
}
