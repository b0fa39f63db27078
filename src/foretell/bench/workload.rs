//! Workload files: one `{"route", "body"}` per line.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use foretell_wire::openai::Route;

/// Name of the built-in workload.
pub const BUILTIN: &str = "builtin";
/// Tasks in plain English that any instruct model can do: rewriting, editing and extracting. Their
/// answers repeat much of the prompt, which favours speculation, so the figures stand for this kind
/// of work and not for others.
const BUILTIN_LINES: &str = include_str!("workload/builtin.jsonl");

/// The prompts of a workload file.
#[derive(Clone, Debug)]
pub struct Workload {
    /// Name of the file without its extension.
    pub name: String,
    /// The prompts, in file order; at least one.
    pub prompts: Vec<Prompt>,
}

/// One line of a workload: a route and a request body.
#[derive(Clone, Debug)]
pub struct Prompt {
    /// API route to send it to.
    pub route: Route,
    /// Description for a reader; `None` if the line has none.
    pub says: Option<String>,
    /// Request body as in the file.
    pub body: Map<String, Value>,
}

/// Changes made to every request body of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings<'a> {
    pub temperature: f64,
    /// Output limit, tokens; `None`: that of the file.
    pub max_tokens: Option<u32>,
    /// Model id; `None`: that of the file.
    pub model: Option<&'a str>,
    /// Adds a seed per prompt, the same for both sides and in every alternation.
    pub seeded: bool,
}

/// Error in a workload file.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be read.
    #[error("{path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error(
        "{file}:{line}: {reason}; expected {{\"route\": \"completions\" or \"chat\", \"body\": {{the request}}}} on each line"
    )]
    Line {
        file: String,
        /// Line number, counted from 1.
        line: usize,
        reason: String,
    },
    #[error("{file}: no prompts")]
    Empty {
        /// Path of the file or the folder.
        file: String,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    route: String,
    #[serde(default)]
    says: Option<String>,
    body: Map<String, Value>,
}

impl Workload {
    /// Reads a workload file; blank lines are skipped. [`BUILTIN`] is the built-in one.
    pub fn read(path: &Path) -> Result<Self, Error> {
        if path.as_os_str() == BUILTIN {
            return Self::parse(BUILTIN.to_owned(), BUILTIN, BUILTIN_LINES);
        }
        let text =
            std::fs::read_to_string(path).map_err(|source| Error::Read { path: path.to_owned(), source })?;
        let name = path.file_stem().map_or_else(String::new, |stem| stem.to_string_lossy().into_owned());
        Self::parse(name, &path.display().to_string(), &text)
    }

    /// Parses the text of a workload file; errors name `file`.
    ///
    /// # Errors
    /// The first line that is not a valid prompt, or that there is no prompt.
    pub fn parse(name: String, file: &str, text: &str) -> Result<Self, Error> {
        let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
        let prompts = lines
            .map(|(at, line)| {
                parse_line(line).map_err(|reason| Error::Line { file: file.to_owned(), line: at + 1, reason })
            })
            .collect::<Result<Vec<_>, _>>()?;
        if prompts.is_empty() {
            return Err(Error::Empty { file: file.to_owned() });
        }
        Ok(Self { name, prompts })
    }

    /// Every `*.jsonl` of a folder, sorted by path.
    pub fn read_folder(folder: &Path) -> Result<Vec<Self>, Error> {
        let read = |source| Error::Read { path: folder.to_owned(), source };
        let mut found = BTreeMap::new();
        for entry in std::fs::read_dir(folder).map_err(read)? {
            let path = entry.map_err(read)?.path();
            if path.extension().is_some_and(|ending| ending == "jsonl") {
                found.insert(path.clone(), Self::read(&path)?);
            }
        }
        if found.is_empty() {
            return Err(Error::Empty { file: folder.display().to_string() });
        }
        Ok(found.into_values().collect())
    }
}

fn parse_line(line: &str) -> Result<Prompt, String> {
    let line: Line = serde_json::from_str(line).map_err(|error| {
        // The column in the line, without the line number of the parser.
        let text = error.to_string();
        let what = text.split(" at line ").next().unwrap_or(&text);
        format!("column {}: {what}", error.column())
    })?;
    let route = [Route::Completions, Route::Chat]
        .into_iter()
        .find(|route| route.name() == line.route)
        .ok_or_else(|| format!("route: allowed completions|chat, got {:?}", line.route))?;
    Ok(Prompt { route, says: line.says, body: line.body })
}

impl Prompt {
    /// The body to send: streamed, with usage, changed as `settings` say. `index` selects the
    /// prompt's seed.
    pub fn request(&self, settings: &Settings<'_>, index: usize) -> Bytes {
        let mut body = self.body.clone();
        body.insert("stream".into(), true.into());
        let options = body.entry("stream_options").or_insert_with(|| json!({}));
        if let Some(options) = options.as_object_mut() {
            options.insert("include_usage".into(), true.into());
        }
        body.insert("temperature".into(), settings.temperature.into());
        if let Some(limit) = settings.max_tokens {
            body.shift_remove("max_completion_tokens");
            body.insert("max_tokens".into(), limit.into());
        }
        if let Some(model) = settings.model {
            body.insert("model".into(), model.into());
        }
        if settings.seeded {
            body.insert("seed".into(), (1_000 + index).into());
        }
        Bytes::from(Value::Object(body).to_string())
    }

    /// The model id in the body; empty if there is none.
    pub fn model(&self) -> &str {
        self.body.get("model").and_then(Value::as_str).unwrap_or_default()
    }

    /// All text of the prompt, used to distinguish copies from loops.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for key in ["prompt", "messages"] {
            gather(self.body.get(key), &mut text);
        }
        text
    }
}

/// Appends every string of a prompt: the text itself, its parts, or the `content` and `text` of its
/// messages.
fn gather(value: Option<&Value>, text: &mut String) {
    match value {
        Some(Value::String(found)) => {
            text.push_str(found);
            text.push('\n');
        }
        Some(Value::Array(parts)) => parts.iter().for_each(|part| gather(Some(part), text)),
        Some(Value::Object(part)) => {
            for key in ["content", "text"] {
                gather(part.get(key), text);
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINES: &str = r#"
{"route":"completions","body":{"model":"m","prompt":"def f(","max_tokens":9,"temperature":0}}

{"route":"chat","body":{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"Hi"}]}]}}
"#;

    fn workload() -> Workload {
        Workload::parse("code".into(), "some/code.jsonl", LINES).unwrap()
    }

    #[test]
    fn lines_become_prompts() {
        let found = workload();
        assert_eq!(
            found.prompts.iter().map(|prompt| prompt.route).collect::<Vec<_>>(),
            [Route::Completions, Route::Chat]
        );
        assert_eq!(found.prompts[0].text(), "def f(\n");
        assert_eq!(found.prompts[1].text(), "Hi\n");
    }

    #[test]
    fn a_request_is_streamed_with_usage_and_settings() {
        let settings =
            Settings { temperature: 0.7, max_tokens: Some(32), model: Some("other"), seeded: true };
        let sent: Value = serde_json::from_slice(&workload().prompts[0].request(&settings, 4)).unwrap();
        assert_eq!(
            sent,
            json!({"model": "other", "prompt": "def f(", "max_tokens": 32, "temperature": 0.7, "stream": true,
                   "stream_options": {"include_usage": true}, "seed": 1004})
        );
    }

    #[test]
    fn the_built_in_workload_is_for_any_model() {
        let found = Workload::read(Path::new(BUILTIN)).unwrap();
        assert_eq!((found.name.as_str(), found.prompts.len()), ("builtin", 20));
        for prompt in &found.prompts {
            assert!(prompt.route == Route::Chat && prompt.model().is_empty() && !prompt.text().is_empty());
            assert!(prompt.body.get("max_tokens").and_then(Value::as_u64).is_some());
        }
    }

    #[test]
    fn a_wrong_line_is_named() {
        let wrong = |text: &str| Workload::parse("w".into(), "some/w.jsonl", text).unwrap_err().to_string();
        assert_eq!(wrong(""), "some/w.jsonl: no prompts");
        assert_eq!(
            wrong("\n{\"route\":\"embeddings\",\"body\":{}}"),
            "some/w.jsonl:2: route: allowed completions|chat, got \"embeddings\"; expected {\"route\": \"completions\" or \
             \"chat\", \"body\": {the request}} on each line"
        );
        assert_eq!(
            wrong("{\"route\":\"chat\"}"),
            "some/w.jsonl:1: column 16: missing field `body`; expected {\"route\": \"completions\" or \"chat\", \
             \"body\": {the request}} on each line"
        );
        assert!(wrong("\n\nhello").starts_with("some/w.jsonl:3: column 1: expected value; expected {"));
    }
}
