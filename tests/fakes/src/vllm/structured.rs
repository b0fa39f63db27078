//! Structured output from 0.32 on, after its source (`v1/structured_output`, `sampling_params.py`,
//! `entrypoints/generate/base/protocol.py`): a grammar binds the output of a request from its first
//! token on, whatever the prompt is.

use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::{Value, json};

use super::super::fields::Fields;
use super::super::guidance::Guidance;
use super::super::hermes::python;
use super::super::mask::{Compiler, Layout, Mask, Spec, Xgrammar};
use super::{Refusal, Vllm};
use crate::TokenId;

/// The library that makes the grammars of a server (`--structured-outputs-config`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Library {
    /// The default: xgrammar, unless the first grammar of the process is one that it does not take;
    /// then guidance, for all that follow.
    Auto,
    /// llguidance.
    Guidance,
    /// One that no page names: free whitespace, and special tokens are no text.
    Unknown,
    /// xgrammar with `disable_any_whitespace`.
    FixedWhitespace,
    /// llguidance with it.
    FixedGuidance,
    /// An xgrammar that no version is: objects may have members that their schema does not name.
    MoreMembers,
    /// An xgrammar that no version is: objects have only those members that they need.
    FewerMembers,
}

/// The compiler of the process.
#[derive(Default)]
pub(super) struct Grammars(Mutex<Option<Arc<Compiler>>>);

impl Grammars {
    /// Begins a new process.
    pub fn renew(&self) {
        *self.0.lock() = None;
    }
}

/// The language that a request asks for.
enum Asked {
    Json(Value),
    Other(Spec),
}

impl Vllm {
    /// The grammar of an output with these stop tokens of its own; `None` if it has none, or if
    /// this version has none here.
    pub(super) fn mask(&self, fields: &Fields, stop_ids: &[TokenId]) -> Result<Option<Mask>, Refusal> {
        if self.minor() < 32 {
            return Ok(None);
        }
        let asked = match self.made_of_tools(fields)? {
            Some((_, Value::String(tag))) => Some(Asked::Other(Spec::Tag(tag))),
            Some((_, schema)) => Some(Asked::Json(schema)),
            None => asked(fields)?,
        };
        let Some(asked) = asked else { return Ok(None) };
        let library = self.options.library;
        let compiler = {
            let mut known = self.grammars.0.lock();
            let guidance = matches!(library, Library::Guidance | Library::FixedGuidance)
                || (library == Library::Auto && asked.is_foreign());
            let layout = Layout {
                any_whitespace: !matches!(library, Library::FixedWhitespace | Library::FixedGuidance),
                strict: library != Library::MoreMembers,
            };
            let toy = &self.house.toy;
            let new = || {
                if guidance {
                    Compiler::Guidance(Guidance::new(toy, layout.any_whitespace))
                } else {
                    Compiler::Xgrammar(Xgrammar::new(toy, library != Library::Unknown, layout))
                }
            };
            Arc::clone(known.get_or_insert_with(|| Arc::new(new())))
        };
        let spec = match asked {
            Asked::Json(mut schema) => {
                if library == Library::FewerMembers {
                    leave_out(&mut schema);
                }
                Spec::Json(python(&schema))
            }
            Asked::Other(spec) => spec,
        };
        let stops = [&[self.house.toy.eos()], stop_ids, &self.options.other_ends].concat();
        let mask = compiler.mask(&spec, &stops);
        mask.map(Some).map_err(|error| Refusal::bad(format!("Failed to transform into a grammar: {error}")))
    }
}

impl Asked {
    /// True if xgrammar does not take it.
    fn is_foreign(&self) -> bool {
        matches!(self, Self::Json(schema) if has_foreign(schema))
    }
}

/// True if a schema has a member that vLLM knows xgrammar to ignore.
fn has_foreign(schema: &Value) -> bool {
    match schema {
        Value::Object(members) => {
            let is = |of: &str| schema["type"] == of;
            let number = (is("integer") || is("number")) && members.contains_key("multipleOf");
            let array = is("array") && members.contains_key("uniqueItems");
            number || array || members.values().any(has_foreign)
        }
        Value::Array(items) => items.iter().any(has_foreign),
        _ => false,
    }
}

/// Leaves out the properties that an object does not need.
fn leave_out(schema: &mut Value) {
    match schema {
        Value::Object(members) => {
            let required = members.get("required").and_then(Value::as_array).cloned().unwrap_or_default();
            if let Some(properties) = members.get_mut("properties").and_then(Value::as_object_mut) {
                properties.retain(|name, _| required.contains(&json!(name)));
            }
            members.values_mut().for_each(leave_out);
        }
        Value::Array(items) => items.iter_mut().for_each(leave_out),
        _ => {}
    }
}

fn asked(fields: &Fields) -> Result<Option<Asked>, Refusal> {
    let mut members = fields.object("structured_outputs")?;
    let given = fields.get("structured_outputs").is_some();
    let format = fields.object("response_format")?;
    let bad = |message: &str| Refusal::about(message, "response_format");
    match format.text("type")?.as_deref() {
        None if fields.get("response_format").is_some() => return Err(bad("type: Field required")),
        None | Some("text") if !given => return Ok(None),
        None | Some("text") => {}
        Some("json_object") => drop(members.0.insert("json_object".to_owned(), json!(true))),
        Some("json_schema") => {
            let schema = format.object("json_schema")?.get("schema").cloned();
            let schema = schema.ok_or_else(|| bad("the 'json_schema' field must be provided."))?;
            members.0.insert("json".to_owned(), schema);
        }
        Some(other) => {
            let message = format!("this fake has no response_format of type {other}");
            return Err(Refusal(501, "NotImplementedError", message, None));
        }
    }
    constraint(&members).map(Some)
}

/// The one constraint of `structured_outputs`.
fn constraint(members: &Fields) -> Result<Asked, Refusal> {
    let names = ["json", "regex", "choice", "grammar", "json_object", "structural_tag"];
    let about = |message: String| Refusal::about(message, "structured_outputs");
    if let Some(unknown) =
        members.unknown(&[&names[..], &["disable_any_whitespace", "whitespace_pattern"]].concat())
    {
        return Err(about(format!("Unexpected keyword argument: {unknown}")));
    }
    let given: Vec<&str> = names.into_iter().filter(|name| members.get(name).is_some()).collect();
    let [name] = given[..] else {
        return Err(about(format!("one kind of structured outputs constraint is needed, got {given:?}")));
    };
    let text = |name| Ok::<_, Refusal>(members.text(name)?.unwrap_or_default());
    Ok(match name {
        "json" => match members.get(name) {
            Some(Value::String(schema)) => Asked::Json(
                serde_json::from_str(schema)
                    .map_err(|_| about("Invalid JSON grammar specification.".to_owned()))?,
            ),
            schema => Asked::Json(schema.cloned().unwrap_or_default()),
        },
        "json_object" if members.flag(name)? => Asked::Json(json!({"type": "object"})),
        "json_object" => return Err(about("json_object must be True if set".to_owned())),
        "regex" => Asked::Other(Spec::Regex(text(name)?)),
        "choice" => match members.texts(name)? {
            texts if texts.is_empty() => return Err(about("Choice '[]' cannot be an empty list".to_owned())),
            texts => Asked::Other(Spec::Choice(texts)),
        },
        "grammar" => match text(name)? {
            rules if rules.contains("::=") => Asked::Other(Spec::Rules(rules)),
            lark => Asked::Other(Spec::Lark(lark)),
        },
        other => {
            let message = format!("this fake has no {other}");
            return Err(Refusal(501, "NotImplementedError", message, None));
        }
    })
}
