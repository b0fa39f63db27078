//! The grammar of calls that a request forces or wants strict, in the form in which the model makes
//! calls by itself: so the output parser needs no other way, and what a model was trained on stays
//! likely.

use std::fmt::Write;

use serde_json::{Value, json};

use super::ToolFormat;
use crate::openai::{Grammar, Language};

/// The version of the grammar of calls, which a server and the proxy in front of it have to share.
pub const CALL_GRAMMAR: u64 = 1;

/// The calls that a request forces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Forced {
    /// One or more, of any function that is offered (`required`).
    Any,
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
}

/// The grammar of the calls of a request; `None` if nothing binds them, if no such function is
/// offered, or if the format has no grammar here.
///
/// Calls that are not forced are bound where a function is strict: text may be written before,
/// between and after them. `single`: there is no second call.
pub fn call_grammar(
    format: Option<ToolFormat>,
    tools: &[Value],
    forced: Option<&Forced>,
    single: bool,
) -> Option<Grammar> {
    // Others write arguments in a form of their own.
    if format != Some(ToolFormat::Hermes) || (forced.is_none() && !tools.iter().any(is_strict)) {
        return None;
    }
    let named = tools.iter().filter_map(|tool| Some((tool.pointer("/function/name")?.as_str()?, tool)));
    let offered = named.filter(|(name, _)| match forced {
        Some(Forced::Function(wanted)) => name == wanted,
        Some(Forced::Any) | None => true,
    });
    let bound = |tool| forced.is_some() || is_strict(tool);
    let calls: Vec<(&str, Value)> =
        offered.map(|(name, tool)| (name, arguments(tool, bound(tool)))).collect();
    if calls.is_empty() {
        return None;
    }
    let (parameter, start) = match forced {
        Some(Forced::Any) if !single => {
            ("tool_choice", r#"start: "<tool_call>" call ("\n<tool_call>" call)*"#)
        }
        Some(_) => ("tool_choice", r#"start: "<tool_call>" call"#),
        None => ("tools", if single { "start: (open call)? TEXT" } else { "start: (open call)* TEXT" }),
    };
    let any: Vec<String> = (0..calls.len()).map(|at| format!("call_{at}")).collect();
    let text = if forced.is_none() { TEXT } else { "" };
    let mut lark = format!("{start}\n{text}call: \"\\n\" ({}) \"}}\\n</tool_call>\"\n", any.join(" | "));
    for (at, (name, schema)) in calls.iter().enumerate() {
        // A schema of its own, so that its references are those of the function.
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

/// The schema of a function's arguments; any object unless `bound`.
fn arguments(tool: &Value, bound: bool) -> Value {
    let schema = tool.pointer("/function/parameters").filter(|_| bound).cloned();
    let mut schema = schema.filter(Value::is_object).unwrap_or_else(|| json!({"type": "object"}));
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
        assert_eq!(Forced::read(&json!("required")), Some(Forced::Any));
        let named = json!({"type": "function", "function": {"name": "f"}});
        assert_eq!(Forced::read(&named), Some(Forced::Function("f".to_owned())));
        for other in
            [json!("auto"), json!("none"), json!({"type": "function"}), json!({"type": "custom"}), json!(1)]
        {
            assert_eq!(Forced::read(&other), None, "{other}");
        }
    }

    fn lark(forced: &Forced) -> String {
        text(call_grammar(Some(ToolFormat::Hermes), &tools(), Some(forced), false))
    }

    fn text(grammar: Option<Grammar>) -> String {
        match grammar.unwrap().language {
            Language::Lark(text) => text,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_named_function_is_called_once_and_any_of_them_one_or_more_times() {
        let named = lark(&Forced::Function("g".to_owned()));
        assert!(!named.contains('*') && named.contains(r#"\"name\": \"g\""#), "{named}");
        assert!(!named.contains(r#"\"f\""#), "{named}");
        let any = lark(&Forced::Any);
        assert!(any.contains("call)*") && any.contains("(call_0 | call_1)"), "{any}");
        let single = call_grammar(Some(ToolFormat::Hermes), &tools(), Some(&Forced::Any), true);
        assert!(!text(single).contains("call)*"), "one call, of any of them");
    }

    /// A change needs another `CALL_GRAMMAR`.
    #[test]
    fn the_form_of_calls_is_that_of_its_version() {
        assert_eq!(CALL_GRAMMAR, 1);
        let layout = r#""x-guidance":{"whitespace_flexible":false,"key_separator":": ","item_separator":", ","coerce_one_of":true}"#;
        let rules = [
            r#"call: "\n" (call_0) "}\n</tool_call>""#,
            r#"call_0: "{\"name\": \"f\", \"arguments\": " arguments_0"#,
            &format!(r#"arguments_0: %json {{"type":"object",{layout}}}"#),
        ];
        let rules = rules.join("\n");
        let named = lark(&Forced::Function("f".to_owned()));
        assert_eq!(named, format!("start: \"<tool_call>\" call\n{rules}\n"));
    }

    #[test]
    fn what_is_not_offered_or_not_known_has_no_grammar() {
        let of = |format, tools: &[Value], forced: &Forced| call_grammar(format, tools, Some(forced), false);
        let hermes = Some(ToolFormat::Hermes);
        assert_eq!(of(hermes, &tools(), &Forced::Function("h".to_owned())), None);
        assert_eq!(of(hermes, &[], &Forced::Any), None);
        assert_eq!(of(Some(ToolFormat::Mistral), &tools(), &Forced::Any), None);
        assert_eq!(of(None, &tools(), &Forced::Any), None);
        assert_eq!(call_grammar(hermes, &tools(), None, false), None, "nothing is forced or strict");
    }
}
