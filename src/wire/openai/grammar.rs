//! Grammars that constrain an output: `response_format` of OpenAI, `structured_outputs` of vLLM.

use serde_json::{Map, Value, json};

/// The texts that an output may be.
#[derive(Clone, Debug, PartialEq)]
pub enum Language {
    JsonObject,
    Json(Value),
    /// The texts that this regular expression matches completely.
    Regex(String),
    Choice(Vec<String>),
    /// A grammar in Lark's notation.
    Lark(String),
}

/// The grammar that a request asks for.
#[derive(Clone, Debug, PartialEq)]
pub struct Grammar {
    pub parameter: &'static str,
    /// Texts that an output may be.
    pub language: Language,
    /// False if JSON has a fixed layout, without spaces of the model's choice.
    pub any_whitespace: bool,
}

/// The name of the field that re-sends a grammar.
pub const STRUCTURED_OUTPUTS: &str = "structured_outputs";
/// The name of OpenAI's field.
pub const RESPONSE_FORMAT: &str = "response_format";

impl Grammar {
    /// The grammar of a `response_format`; `None` for plain text.
    ///
    /// # Errors
    /// The reason in words.
    pub fn of_response_format(value: &Value) -> Result<Option<Self>, &'static str> {
        let language = match value.get("type").and_then(Value::as_str) {
            Some("text") => return Ok(None),
            Some("json_object") => Language::JsonObject,
            Some("json_schema") => {
                let schema = value.pointer("/json_schema/schema").filter(|schema| schema.is_object());
                Language::Json(schema.ok_or("json_schema.schema must be an object")?.clone())
            }
            _ => return Err("type must be text, json_object or json_schema"),
        };
        Ok(Some(Self { parameter: RESPONSE_FORMAT, language, any_whitespace: true }))
    }

    /// The JSON schema of the output; `None` if it has another form.
    pub fn schema(&self) -> Option<&Value> {
        match &self.language {
            Language::Json(schema) => Some(schema),
            Language::JsonObject | Language::Regex(_) | Language::Choice(_) | Language::Lark(_) => None,
        }
    }

    /// The grammar of `structured_outputs`.
    ///
    /// # Errors
    /// The reason in words.
    pub fn of_structured_outputs(value: &Value) -> Result<Self, &'static str> {
        let members = value.as_object().ok_or("must be an object")?;
        let (mut language, mut any_whitespace) = (None, true);
        for (name, value) in members.iter().filter(|(_, value)| !value.is_null()) {
            if name == "disable_any_whitespace" {
                any_whitespace = !value.as_bool().ok_or("disable_any_whitespace must be a boolean")?;
                continue;
            }
            let found = language_of(name, value)?;
            if found.is_some() && language.is_some() {
                return Err("one of json, json_object, regex, choice and grammar is allowed");
            }
            language = found.or(language);
        }
        let language = language.ok_or("one of json, json_object, regex, choice and grammar is needed")?;
        Ok(Self { parameter: STRUCTURED_OUTPUTS, language, any_whitespace })
    }

    /// The value of `structured_outputs` that asks for this grammar.
    pub fn to_json(&self) -> Value {
        let (name, value) = match &self.language {
            Language::JsonObject => ("json_object", json!(true)),
            Language::Json(schema) => ("json", schema.clone()),
            Language::Regex(regex) => ("regex", json!(regex)),
            Language::Choice(texts) => ("choice", json!(texts)),
            Language::Lark(grammar) => ("grammar", json!(grammar)),
        };
        let mut members = Map::from_iter([(name.to_owned(), value)]);
        if !self.any_whitespace {
            members.insert("disable_any_whitespace".to_owned(), json!(true));
        }
        Value::Object(members)
    }
}

fn language_of(name: &str, value: &Value) -> Result<Option<Language>, &'static str> {
    let text = |why| value.as_str().map(str::to_owned).ok_or(why);
    Ok(Some(match name {
        "json_object" => {
            let is_enabled = value.as_bool().ok_or("json_object must be a boolean")?;
            return Ok(is_enabled.then_some(Language::JsonObject));
        }
        // A schema may come as a text.
        "json" => match value {
            Value::Object(_) => Language::Json(value.clone()),
            Value::String(text) => Language::Json(
                super::json::parse(text.as_bytes())
                    .filter(Value::is_object)
                    .ok_or("json is not a JSON object")?,
            ),
            _ => return Err("json must be an object or a text"),
        },
        "regex" => Language::Regex(text("regex must be a text")?),
        "grammar" => Language::Lark(text("grammar must be a text")?),
        "choice" => {
            let texts = value.as_array().filter(|texts| !texts.is_empty());
            let texts =
                texts.and_then(|texts| texts.iter().map(|text| text.as_str().map(str::to_owned)).collect());
            Language::Choice(texts.ok_or("choice must be a list of texts")?)
        }
        _ => return Err("known are json, json_object, regex, choice, grammar and disable_any_whitespace"),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_language_is_read_from_what_it_is_sent_as() {
        let schema = json!({"type": "object", "properties": {"b": {}, "a": {}}});
        for value in [
            json!({"json": schema}),
            json!({"json_object": true}),
            json!({"regex": "a+"}),
            json!({"choice": ["a", "b"]}),
            json!({"grammar": "start: \"a\""}),
            json!({"json": schema, "disable_any_whitespace": true}),
        ] {
            let grammar = Grammar::of_structured_outputs(&value).unwrap();
            assert_eq!(grammar.to_json().to_string(), value.to_string());
        }
        let text =
            Grammar::of_structured_outputs(&json!({"json": schema.to_string(), "regex": null})).unwrap();
        assert_eq!(text.language, Language::Json(schema.clone()));
        let format =
            json!({"type": "json_schema", "json_schema": {"name": "n", "strict": true, "schema": schema}});
        assert_eq!(Grammar::of_response_format(&format).unwrap().unwrap().language, Language::Json(schema));
        assert_eq!(Grammar::of_response_format(&json!({"type": "text"})), Ok(None));
        assert_eq!(
            Grammar::of_response_format(&json!({"type": "json_object"})).unwrap().unwrap().language,
            Language::JsonObject
        );
    }

    #[test]
    fn what_is_not_known_is_an_error() {
        for value in [
            json!("x"),
            json!({}),
            json!({"json_object": false}),
            json!({"json": 1}),
            json!({"json": "{"}),
            json!({"choice": []}),
            json!({"choice": [1]}),
            json!({"regex": "a", "choice": ["a"]}),
            json!({"structural_tag": "x"}),
            json!({"regex": "a", "whitespace_pattern": " "}),
        ] {
            assert!(Grammar::of_structured_outputs(&value).is_err(), "{value}");
        }
        for value in
            [json!({}), json!({"type": "json_schema"}), json!({"type": "structural_tag"}), json!("text")]
        {
            assert!(Grammar::of_response_format(&value).is_err(), "{value}");
        }
    }
}
