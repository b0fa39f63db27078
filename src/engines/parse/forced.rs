//! The grammar of calls that a request forces, in the form in which the model makes calls by itself:
//! so the output parser needs no other way, and what a model was trained on stays likely.

use std::fmt::Write;

use serde_json::{Value, json};

use super::ToolFormat;
use crate::openai::{Grammar, Language};

/// The version of the grammar of forced calls, which a server and the proxy before it have to share.
pub const FORCED_FORM: u64 = 1;

/// The calls that a request forces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Forced {
    /// One or more, of any function that is offered (`required`).
    Any,
    /// One of this function.
    Function(String),
}

impl Forced {
    /// Reads a `tool_choice` that forces a call; `None` if it does not.
    pub fn read(choice: &Value) -> Option<Self> {
        if choice == "required" {
            return Some(Self::Any);
        }
        let name = (choice.get("type")? == "function").then(|| choice.pointer("/function/name"))?;
        Some(Self::Function(name?.as_str()?.to_owned()))
    }

    /// The grammar that forces calls of these tools; `None` if no such function is offered, or the
    /// format has no grammar here.
    pub fn grammar(&self, format: Option<ToolFormat>, tools: &[Value]) -> Option<Grammar> {
        // Others write arguments in a form of their own.
        if format != Some(ToolFormat::Hermes) {
            return None;
        }
        let functions = tools.iter().filter_map(|tool| tool.get("function"));
        let named = functions.filter_map(|function| Some((function.get("name")?.as_str()?, function)));
        let offered = named.filter(|(name, _)| match self {
            Self::Any => true,
            Self::Function(wanted) => name == wanted,
        });
        let calls: Vec<String> = offered.map(|(name, function)| call(name, function)).collect();
        if calls.is_empty() {
            return None;
        }
        let start = match self {
            Self::Any => r#"call ("\n" call)*"#,
            Self::Function(_) => "call",
        };
        let mut lark = format!("start: {start}\n");
        for (at, schema) in calls.iter().enumerate() {
            let _ = writeln!(lark, "json_{at}: %json {schema}");
        }
        let any: Vec<String> = (0..calls.len()).map(|at| format!("json_{at}")).collect();
        let _ = writeln!(lark, r#"call: "<tool_call>\n" ({}) "\n</tool_call>""#, any.join(" | "));
        Some(Grammar { parameter: "tool_choice", language: Language::Lark(lark), any_whitespace: false })
    }
}

/// The schema of a call of one function.
fn call(name: &str, function: &Value) -> String {
    let arguments = function.get("parameters").filter(|schema| schema.is_object());
    let arguments = arguments.cloned().unwrap_or_else(|| json!({"type": "object"}));
    json!({
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": false,
        // One space after a colon or a comma, as chat templates write calls.
        "x-guidance": {"whitespace_flexible": false, "key_separator": ": ", "item_separator": ", "},
    })
    .to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tools() -> Vec<Value> {
        let tool = |name: &str| json!({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}});
        vec![tool("f"), tool("g")]
    }

    #[test]
    fn a_choice_that_forces_is_read() {
        assert_eq!(Forced::read(&json!("required")), Some(Forced::Any));
        let named = json!({"type": "function", "function": {"name": "f"}});
        assert_eq!(Forced::read(&named), Some(Forced::Function("f".to_owned())));
        for other in
            [json!("auto"), json!("none"), json!({"type": "function"}), json!({"type": "custom"}), json!(1)]
        {
            assert_eq!(Forced::read(&other), None, "{other}");
        }
    }

    #[test]
    fn a_named_function_is_called_once_and_any_of_them_one_or_more_times() {
        let text =
            |forced: &Forced| match forced.grammar(Some(ToolFormat::Hermes), &tools()).unwrap().language {
                Language::Lark(text) => text,
                other => panic!("{other:?}"),
            };
        let named = text(&Forced::Function("g".to_owned()));
        assert!(named.starts_with("start: call\n") && named.contains(r#"{"const":"g"}"#), "{named}");
        assert!(!named.contains(r#"{"const":"f"}"#), "{named}");
        let any = text(&Forced::Any);
        assert!(any.starts_with("start: call (") && any.contains("(json_0 | json_1)"), "{any}");
    }

    #[test]
    fn what_is_not_offered_or_not_known_has_no_grammar() {
        let unknown = Forced::Function("h".to_owned());
        assert_eq!(unknown.grammar(Some(ToolFormat::Hermes), &tools()), None);
        assert_eq!(Forced::Any.grammar(Some(ToolFormat::Hermes), &[]), None);
        assert_eq!(Forced::Any.grammar(Some(ToolFormat::Mistral), &tools()), None);
        assert_eq!(Forced::Any.grammar(None, &tools()), None);
    }
}
