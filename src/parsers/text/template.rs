//! Chat templates: messages to the text of a prompt, by the model's Jinja template.
//!
//! Configured as in the Python library: blocks are trimmed, `tojson` leaves text as it is, Python's
//! string and dictionary methods work, and a template may refuse messages by `raise_exception`.

use std::borrow::Cow;
use std::path::Path;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde};
use minijinja::{Environment, Error, ErrorKind, Value as Jinja, context};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};
use serde_json::{Map, Value};

use super::prepare::{COPIED, copied, prepare};
use super::{TextError, read};

const NAME: &str = "chat";
/// Maximum steps of rendering: a template of 100 lines takes about ten per message.
const STEPS: u64 = 1_000_000;
/// Maximum depth of recursion, where a macro counts for four.
const RECURSION: usize = 250;
/// Stack of rendering, bytes; its pages take memory when they are used. Values are written and
/// dropped by calls as deep as they are: up to 40,000, by 1,000 brackets in each of 40 calls of a
/// macro.
const STACK: usize = 256 << 20;
/// Maximum spaces by which JSON is indented.
const INDENT: usize = 16;

#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos: String,
    eos: String,
}

impl ChatTemplate {
    /// From a model's folder: `chat_template.jinja`, or the one in `tokenizer_config.json`, which
    /// also names the special tokens.
    ///
    /// # Errors
    /// A file cannot be read, there is no template, or as for [`Self::new`].
    pub fn from_folder(folder: &Path) -> Result<Self, TextError> {
        let config_path = folder.join("tokenizer_config.json");
        let config: Value = serde_json::from_slice(&read(&config_path)?)
            .map_err(|error| TextError::Template(format!("{}: {error}", config_path.display())))?;
        let separate_file = folder.join("chat_template.jinja");
        let source = if separate_file.exists() {
            String::from_utf8_lossy(&read(&separate_file)?).into_owned()
        } else {
            in_config(&config)
                .ok_or_else(|| TextError::Template(format!("none in {}", folder.display())))?
                .to_owned()
        };
        let special = |name| config.get(name).and_then(token_text).unwrap_or_default().to_owned();
        Self::new(&source, special("bos_token"), special("eos_token"))
    }

    /// From the text of a Jinja template and the texts of its BOS and EOS tokens, empty if it has
    /// none.
    ///
    /// # Errors
    /// The template is not valid, is too long, or assigns to an attribute in a way that is not
    /// understood.
    pub fn new(source: &str, bos: String, eos: String) -> Result<Self, TextError> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(wrong)?;
        let source = prepare(source, &syntax).map_err(wrong)?;
        environment.set_syntax(syntax);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_fuel(Some(STEPS));
        environment.set_recursion_limit(RECURSION);
        environment.add_function("raise_exception", refuse);
        environment.add_function(COPIED, copied);
        environment.add_filter("tojson", to_json);
        environment.add_template_owned(NAME, source).map_err(wrong)?;
        Ok(Self { environment, bos, eos })
    }

    /// The text of a prompt. `add_generation_prompt`: the text ends with the beginning of the
    /// assistant's answer.
    /// `variables`: further ones of the template, such as `tools`.
    ///
    /// # Errors
    /// The template refuses these messages, fails, or takes more than a million steps.
    pub fn render(
        &self,
        messages: &Value,
        add_generation_prompt: bool,
        variables: &Map<String, Value>,
    ) -> Result<String, TextError> {
        let template = self.environment.get_template(NAME).map_err(wrong)?;
        let mut variables = Cow::Borrowed(variables);
        if variables.contains_key(COPIED) {
            variables.to_mut().shift_remove(COPIED);
        }
        // An error holds values, so that it, too, is dropped here.
        stacker::grow(STACK, || {
            let rendered = template.render(context! {
                messages => Jinja::from(Serde(messages)),
                add_generation_prompt,
                bos_token => self.bos.as_str(),
                eos_token => self.eos.as_str(),
                ..Jinja::from(Serde(&*variables))
            });
            rendered.map_err(wrong)
        })
    }
}

#[allow(clippy::needless_pass_by_value)] // handed to `map_err`
fn wrong(error: Error) -> TextError {
    TextError::Template(error.to_string())
}

/// One template, or a list of named ones of which `default` is for plain chats.
fn in_config(config: &Value) -> Option<&str> {
    match config.get("chat_template")? {
        Value::String(source) => Some(source),
        Value::Array(named) => named
            .iter()
            .find(|entry| entry.get("name").and_then(Value::as_str) == Some("default"))?
            .get("template")?
            .as_str(),
        _ => None,
    }
}

/// A special token is a text, or an object with its `content`.
fn token_text(token: &Value) -> Option<&str> {
    token.as_str().or_else(|| token.get("content")?.as_str())
}

#[allow(clippy::needless_pass_by_value)] // the signature of a template function
fn refuse(message: String) -> Result<String, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

/// Writes a value as Python's `json.dumps(…, ensure_ascii=False)` does: a space after commas and
/// colons, only the necessary escapes; with `indent` on several lines.
#[allow(clippy::needless_pass_by_value)] // the signature of a template filter
fn to_json(value: Jinja, kwargs: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = kwargs.get("indent")?;
    // Few templates use sorting, escaping and separators; they are an error, because ignoring them
    // would be silent.
    kwargs.assert_all_used()?;
    if indent.is_some_and(|indent| indent > INDENT) {
        return Err(Error::new(ErrorKind::InvalidOperation, format!("indent is at most {INDENT}")));
    }
    let mut out = Vec::new();
    let written = match indent {
        Some(indent) => {
            let spaces = " ".repeat(indent);
            let formatter = PrettyFormatter::with_indent(spaces.as_bytes());
            value.serialize(&mut Serializer::with_formatter(&mut out, formatter))
        }
        None => value.serialize(&mut Serializer::with_formatter(&mut out, Spaced)),
    };
    written.map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))?;
    Ok(String::from_utf8_lossy(&out).into_owned())
}

struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + std::io::Write>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, out: &mut W) -> std::io::Result<()> {
        out.write_all(b": ")
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn render(source: &str, messages: &Value) -> Result<String, String> {
        ChatTemplate::new(source, "<s>".to_owned(), "</s>".to_owned())
            .and_then(|template| template.render(messages, true, &Map::new()))
            .map_err(|error| error.to_string())
    }

    #[test]
    fn blocks_leave_no_lines_behind() {
        let source = "{{ bos_token }}{% for m in messages %}\n  {% if true %}\n<|{{ m.role }}|>{{ m['content'].strip() }}{{ eos_token }}\n  {% endif %}\n{% endfor %}\n{% if add_generation_prompt %}\n<|assistant|>\n{%- endif %}\n";
        let messages = json!([{"role": "user", "content": " hi "}, {"role": "assistant", "content": "<b>"}]);
        assert_eq!(
            render(source, &messages).unwrap(),
            "<s><|user|>hi</s>\n<|assistant|><b></s>\n<|assistant|>"
        );
    }

    #[test]
    fn a_template_has_further_variables() {
        let source =
            "{{ tools[0].name }} {{ enable_thinking }} {{ messages|length }} {{ nothing is defined }}";
        let template = ChatTemplate::new(source, String::new(), String::new()).unwrap();
        let variables = json!({"tools": [{"name": "f"}], "enable_thinking": false, "messages": "mine"});
        let text = template.render(&json!([{}, {}]), true, variables.as_object().unwrap()).unwrap();
        assert_eq!(text, "f False 2 False", "the messages stay those of the request");
    }

    #[test]
    fn a_template_may_refuse() {
        let error = render("{{ raise_exception('roles must alternate') }}", &json!([])).unwrap_err();
        assert!(error.contains("roles must alternate"), "{error}");
    }

    #[test]
    fn a_template_that_does_not_end_is_ended() {
        let source = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}";
        let error = render(source, &json!([])).unwrap_err();
        assert!(error.contains("fuel"), "{error}");
    }

    #[test]
    fn a_namespace_does_not_contain_itself() {
        for (source, said) in [
            ("{% set a = namespace(y=1) %}{% set a.x = a %}{{ a }}", Ok("{'x': {'y': 1}, 'y': 1}")),
            ("{% set a = namespace() %}{% set b = [a] %}{% set a.x = b %}{{ a.x | tojson }}", Ok("[{}]")),
            (
                "{% set a = namespace(x=3) %}{% set b = dict(a) %}{% set a.x = b %}{{ a.x | tojson }}",
                Ok(r#"{"x": 3}"#),
            ),
            ("{% set a = namespace() %}{% set a.x = {a: a} %}{{ a.x }}", Ok("{{}: {}}")),
            ("{% set a = namespace() %}{% set (a.x, b) = a, 1 %}{{ a.x }}", Ok("{}")),
            ("{% set a = namespace(), 1 %}{% set b = a.0 %}{% set b.x = b, %}{{ b.x | tojson }}", Ok("[{}]")),
            ("{% macro f(a=namespace()) %}{% set a.x = a %}{{ a.x }}{% endmacro %}{{ f() }}", Ok("{}")),
            (
                "{% set a = namespace() %}{% for i in range(999) %}{% set a.x = a %}{% endfor %}",
                Err("200 levels"),
            ),
            (
                "{% set a = namespace() %}{% set a.x | default(a, true) %}{% endset %}{{ a.x }}",
                Err("filtered"),
            ),
            (
                "{% set a = namespace(x='x') %}{% for i in range(99) %}{% set a.x = a.x ~ a.x %}{% endfor %}",
                Err("megabyte"),
            ),
            (
                "{% set a = namespace(x=[1]) %}{% for i in range(99) %}{% set a.x = a.x + a.x %}{% endfor %}",
                Err("megabyte"),
            ),
        ] {
            match (render(source, &json!([])), said) {
                (Ok(text), Ok(said)) => assert_eq!(text, said, "{source}"),
                (Err(text), Err(said)) => assert!(text.contains(said), "{source}: {text}"),
                (got, _) => panic!("{source}: {got:?}"),
            }
        }
    }

    #[test]
    fn a_namespace_carries_values_out_of_loops() {
        let source = "{% macro count(state) %}{% set state.n = state.n + 1 -%} {% endmacro %}{% set ns = namespace(n=1, last='') %}{% for m in messages %}{{ count(ns) }}{% set ns.last = m.text ~ ns['last'] if true else '' %}{% endfor %}{{ ns.n }} {{ ns.last }}";
        assert_eq!(render(source, &json!([{"text": "a"}, {"text": "b"}])).unwrap(), "3 ba");
        let list = "{% set ns = namespace(a=[]) %}{% for i in range(3000) %}{% set ns.a = ns.a + [i] %}{% endfor %}{{ ns.a[2999] }}";
        assert_eq!(render(list, &json!([])).unwrap(), "2999");
    }

    #[test]
    fn a_deep_value_is_written_and_dropped() {
        let nest = format!("{{% set x = {}x{} %}}", "[".repeat(60), "]".repeat(60)).repeat(16);
        for end in ["{{ x }}", "{{ x | tojson }}", "{{ x == [x] }}", "{% if x %}{{ x | list }}{% endif %}"] {
            let deep = format!(
                "{{% macro f(x, n) %}}{nest}{{% if n %}}{{{{ f(x, n - 1) }}}}{{% else %}}{end}{{% endif %}}{{% endmacro %}}{{{{ f(0, 35) }}}}"
            );
            assert!(render(&deep, &json!([])).is_ok(), "{end}");
            let deeper = deep.replace("f(0, 35)", "f(0, 90)");
            assert!(render(&deeper, &json!([])).unwrap_err().contains("recursion"), "{end}");
            assert!(render(&format!("{nest}{nest}"), &json!([])).unwrap_err().contains("1,000 brackets"));
        }
        assert!(render(&"x".repeat(300_000), &json!([])).unwrap_err().contains("256 KiB"));
    }

    #[test]
    fn a_template_cannot_get_around_the_copies() {
        for source in [
            "{% set a = namespace() %}{% set a.x = 1)), ((a %}{{ a }}",
            "{% set a = namespace() %}{% set a.x = ((a %}{{ a }}",
            "{% set foretell_copied = namespace %}{% set a = namespace() %}{% set a.x = {'y': a} %}{{ a }}",
        ] {
            assert!(render(source, &json!([])).unwrap_err().contains("not supported"), "{source}");
        }
        let source = "{% set a = namespace(y=1) %}{% set a.x = a %}{{ a.x }}";
        let template = ChatTemplate::new(source, String::new(), String::new()).unwrap();
        let variables = json!({"foretell_copied": 1});
        assert_eq!(template.render(&json!([]), true, variables.as_object().unwrap()).unwrap(), "{'y': 1}");
    }

    #[test]
    fn blocks_for_training_have_no_effect() {
        let source =
            "{% for m in messages %}\n{%- generation -%}\n {{ m.text }} {% endgeneration %}\n{% endfor %}";
        assert_eq!(render(source, &json!([{"text": "a"}, {"text": "b"}])).unwrap(), "a b ");
    }

    #[test]
    fn json_is_written_as_python_writes_it() {
        let messages = json!([{"role": "user", "content": "<a & 'b'>", "z": [1, {"a": null}]}]);
        assert_eq!(
            render("{{ messages | tojson }}", &messages).unwrap(),
            r#"[{"role": "user", "content": "<a & 'b'>", "z": [1, {"a": null}]}]"#
        );
        assert_eq!(render("{{ [1] | tojson(indent=2) }}", &messages).unwrap(), "[\n  1\n]");
        assert!(render("{{ [1] | tojson(sort_keys=true) }}", &messages).is_err());
        assert!(render("{{ [1] | tojson(indent=99999999999999) }}", &messages).is_err());
    }

    #[test]
    fn python_methods_work() {
        let messages = json!([{"role": "user", "content": "a\nb"}]);
        let source =
            "{{ messages[0].get('content').split('\\n')[1] }}{{ messages[0].content.startswith('a') }}";
        assert_eq!(render(source, &messages).unwrap().to_lowercase(), "btrue");
    }

    #[test]
    fn a_folder_gives_template_and_special_tokens() {
        let folder = tempfile::tempdir().unwrap();
        let config = json!({"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": [
            {"name": "tool_use", "template": "no"},
            {"name": "default", "template": "{{ bos_token }}x{{ eos_token }}"}]});
        std::fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
        let text = |folder: &Path| {
            ChatTemplate::from_folder(folder).unwrap().render(&json!([]), true, &Map::new()).unwrap()
        };
        assert_eq!(text(folder.path()), "<s>x</s>");
        std::fs::write(folder.path().join("chat_template.jinja"), "own file").unwrap();
        assert_eq!(text(folder.path()), "own file");
    }
}
