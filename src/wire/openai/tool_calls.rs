//! The grammar of forced or strict tool calls, in the form of Hermes, which the model was trained
//! on and the output parser reads.

use std::fmt::Write;

use serde_json::{Value, json};

use super::grammar::{Grammar, Language};

/// The version of [`call_grammar`], equal in a server and the proxy in front of it.
pub const CALL_GRAMMAR_VERSION: u64 = 1;

/// The calls that a request forces (`tool_choice`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ForcedCalls {
    /// One or more, of any function that is offered (`required`).
    Any,
    Function(String),
}

impl ForcedCalls {
    /// Reads a `tool_choice` that forces a call; `None` if it does not.
    pub fn read(choice: &Value) -> Option<Self> {
        if choice == "required" {
            return Some(Self::Any);
        }
        let name = (choice.get("type")? == "function").then(|| choice.pointer("/function/name"))?;
        Some(Self::Function(name?.as_str()?.to_owned()))
    }
}

/// The grammar of a request's calls in the form of Hermes; `None` if no call is forced or strict,
/// or if no such function is offered.
///
/// Strict calls that are not forced may have text before, between and after them. `single`: there
/// is no second call.
pub fn call_grammar(tools: &[Value], forced: Option<&ForcedCalls>, single: bool) -> Option<Grammar> {
    if forced.is_none() && !tools.iter().any(is_strict) {
        return None;
    }
    let named = tools.iter().filter_map(|tool| Some((tool.pointer("/function/name")?.as_str()?, tool)));
    let offered = named.filter(|(name, _)| match forced {
        Some(ForcedCalls::Function(wanted)) => name == wanted,
        Some(ForcedCalls::Any) | None => true,
    });
    let schema = |tool| {
        let is_constrained = forced.is_some() || is_strict(tool);
        arguments(is_constrained.then(|| tool.pointer("/function/parameters")).flatten())
    };
    let calls: Vec<(&str, Value)> = offered.map(|(name, tool)| (name, schema(tool))).collect();
    if calls.is_empty() {
        return None;
    }
    let (parameter, start) = match forced {
        Some(ForcedCalls::Any) if !single => {
            ("tool_choice", r#"start: "<tool_call>" call ("\n<tool_call>" call)*"#)
        }
        Some(_) => ("tool_choice", r#"start: "<tool_call>" call"#),
        None => ("tools", if single { "start: (open call)? TEXT" } else { "start: (open call)* TEXT" }),
    };
    let any: Vec<String> = (0..calls.len()).map(|at| format!("call_{at}")).collect();
    let text = if forced.is_none() { TEXT } else { "" };
    let mut lark = format!("{start}\n{text}call: \"\\n\" ({}) \"}}\\n</tool_call>\"\n", any.join(" | "));
    for (at, (name, schema)) in calls.iter().enumerate() {
        // A separate schema, so that its references are those of the function.
        let begin = Value::from(format!("{{\"name\": {}, \"arguments\": ", Value::from(*name)));
        let _ = writeln!(lark, "call_{at}: {begin} arguments_{at}\narguments_{at}: %json {schema}");
    }
    Some(Grammar { parameter, language: Language::Lark(lark), any_whitespace: false })
}

/// Calls among text. The text before a call ends with the first marker; that after the last one has
/// none.
const TEXT: &str = r"open[lazy]: /(.|\n)*<tool_call>/
TEXT: /(.|\n)*/ & ~/(.|\n)*<tool_call>(.|\n)*/
";

/// True if the arguments of a tool's calls have to be of its schema.
pub fn is_strict(tool: &Value) -> bool {
    tool.pointer("/function/strict") == Some(&Value::Bool(true))
}

/// The schema of a function's arguments, with their layout; any object without a schema.
fn arguments(parameters: Option<&Value>) -> Value {
    let schema = parameters.filter(|schema| schema.is_object());
    let mut schema = schema.cloned().unwrap_or_else(|| json!({"type": "object"}));
    if let Some(members) = schema.as_object_mut() {
        // One space after a colon or a comma, as chat templates write calls.
        let layout = json!({"whitespace_flexible": false, "key_separator": ": ", "item_separator": ", ",
            "coerce_one_of": true});
        members.insert("x-guidance".to_owned(), layout);
    }
    schema
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
        assert_eq!(ForcedCalls::read(&json!("required")), Some(ForcedCalls::Any));
        let named = json!({"type": "function", "function": {"name": "f"}});
        assert_eq!(ForcedCalls::read(&named), Some(ForcedCalls::Function("f".to_owned())));
        for other in
            [json!("auto"), json!("none"), json!({"type": "function"}), json!({"type": "custom"}), json!(1)]
        {
            assert_eq!(ForcedCalls::read(&other), None, "{other}");
        }
    }

    fn lark(forced: &ForcedCalls) -> String {
        text(call_grammar(&tools(), Some(forced), false))
    }

    fn text(grammar: Option<Grammar>) -> String {
        match grammar.unwrap().language {
            Language::Lark(text) => text,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_named_function_is_called_once_and_any_of_them_one_or_more_times() {
        let named = lark(&ForcedCalls::Function("g".to_owned()));
        assert!(!named.contains('*') && named.contains(r#"\"name\": \"g\""#), "{named}");
        assert!(!named.contains(r#"\"f\""#), "{named}");
        let any = lark(&ForcedCalls::Any);
        assert!(any.contains("call)*") && any.contains("(call_0 | call_1)"), "{any}");
        let single = call_grammar(&tools(), Some(&ForcedCalls::Any), true);
        assert!(!text(single).contains("call)*"), "one call, of any of them");
    }

    /// A change needs another `CALL_GRAMMAR_VERSION`.
    #[test]
    fn the_form_of_calls_is_that_of_its_version() {
        assert_eq!(CALL_GRAMMAR_VERSION, 1);
        let layout = r#""x-guidance":{"whitespace_flexible":false,"key_separator":": ","item_separator":", ","coerce_one_of":true}"#;
        let rules = [
            r#"call: "\n" (call_0) "}\n</tool_call>""#,
            r#"call_0: "{\"name\": \"f\", \"arguments\": " arguments_0"#,
            &format!(r#"arguments_0: %json {{"type":"object",{layout}}}"#),
        ];
        let rules = rules.join("\n");
        let named = lark(&ForcedCalls::Function("f".to_owned()));
        assert_eq!(named, format!("start: \"<tool_call>\" call\n{rules}\n"));
    }

    #[test]
    fn what_is_not_offered_or_not_known_has_no_grammar() {
        let of = |tools: &[Value], forced: &ForcedCalls| call_grammar(tools, Some(forced), false);
        assert_eq!(of(&tools(), &ForcedCalls::Function("h".to_owned())), None);
        assert_eq!(of(&[], &ForcedCalls::Any), None);
        assert_eq!(call_grammar(&tools(), None, false), None, "nothing is forced or strict");
    }
}
