//! Free-form tools as functions with one text, `input`, as vLLM shows them to a model
//! (`vllm/tool_parsers/utils.py`, 0.32).

use serde_json::{Map, Value, json};

/// Beginning of the arguments before the text.
const BEFORE: [&str; 4] = ["{", "\"input\"", ":", "\""];

/// True if the input of such a tool has no grammar.
pub(super) fn is_free(tool: &Value) -> bool {
    let format = tool.get("format").filter(|format| !format.is_null());
    format.is_none_or(|format| format.get("type").is_some_and(|kind| kind == "text"))
}

pub(super) fn function(tool: &Value) -> Map<String, Value> {
    let input = json!({ "type": "string", "description": "The freeform text payload for this tool." });
    let parameters = json!({
        "type": "object",
        "properties": { "input": input },
        "required": ["input"],
        "additionalProperties": false,
    });
    let given = ["name", "description"].map(|name| (name, tool.get(name).cloned().unwrap_or_default()));
    let members = given.into_iter().chain([("parameters", parameters)]);
    members.filter(|(_, value)| !value.is_null()).map(|(name, value)| (name.to_owned(), value)).collect()
}

/// The arguments of a call with this input, written as vLLM writes them.
pub(super) fn arguments(input: &str) -> String {
    format!("{{\"input\": {}}}", json!(input))
}

/// The input of a call with these arguments; what is no such object is the input itself.
fn input(arguments: &str) -> String {
    let parsed = serde_json::from_str::<Value>(arguments).ok();
    let text = parsed.as_ref().and_then(|parsed| parsed.get("input")?.as_str());
    text.unwrap_or(arguments).to_owned()
}

/// Reads the input of a call from its arguments while they grow.
#[derive(Debug, Default)]
pub(super) struct Growing {
    /// Bytes of the arguments that have been read.
    read: usize,
    /// The input so far.
    text: String,
    /// Nothing more can be read: the text has ended, or the arguments have another form.
    over: bool,
}

impl Growing {
    /// The part of the input that `arguments`, all so far, add.
    pub fn push(&mut self, arguments: &str) -> String {
        if self.over {
            return String::new();
        }
        if self.read == 0 {
            match begin(arguments) {
                Ok(Some(at)) => self.read = at,
                Ok(None) => return String::new(),
                Err(Other) => {
                    self.over = true;
                    return String::new();
                }
            }
        }
        let rest = arguments.get(self.read..).unwrap_or_default();
        let (end, closed) = readable(rest);
        let escaped = rest.get(..end).unwrap_or_default();
        let Ok(piece) = serde_json::from_str::<String>(&format!("\"{escaped}\"")) else {
            self.over = true;
            return String::new();
        };
        self.over = closed;
        self.read += end;
        self.text.push_str(&piece);
        piece
    }

    /// The complete input at the end, and what is missing of it. A text that was cut short ends
    /// where it was cut.
    pub fn end(&mut self, arguments: &str) -> (String, String) {
        let complete = input(arguments);
        match complete.strip_prefix(self.text.as_str()) {
            Some(missing) => (complete.clone(), missing.to_owned()),
            None => (std::mem::take(&mut self.text), String::new()),
        }
    }
}

/// The arguments are no object that begins with `input`.
struct Other;

/// Where the text begins; `None`: not yet known.
fn begin(arguments: &str) -> Result<Option<usize>, Other> {
    let mut rest = arguments;
    for token in BEFORE {
        rest = rest.trim_ascii_start();
        match rest.strip_prefix(token) {
            Some(after) => rest = after,
            None if token.starts_with(rest) => return Ok(None),
            None => return Err(Other),
        }
    }
    Ok(Some(arguments.len() - rest.len()))
}

/// Length of the part of a JSON text that ends with no half of an escape, and true if its quote
/// follows.
fn readable(text: &str) -> (usize, bool) {
    let bytes = text.as_bytes();
    let mut at = 0;
    loop {
        let length = match bytes.get(at) {
            None => return (at, false),
            Some(b'"') => return (at, true),
            Some(b'\\') => escape(text, at),
            Some(_) => 1,
        };
        if at + length > bytes.len() {
            return (at, false);
        }
        at += length;
    }
}

/// Length of the escape at `at`; the first half of a surrogate pair has the length of both.
fn escape(text: &str, at: usize) -> usize {
    let Some(b'u') = text.as_bytes().get(at + 1) else { return 2 };
    let unit = text.get(at + 2..at + 6).and_then(|digits| u32::from_str_radix(digits, 16).ok());
    if unit.is_some_and(|unit| (0xD800..0xDC00).contains(&unit)) { 12 } else { 6 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The pieces, and the whole, of arguments that come character by character.
    fn grown(arguments: &str) -> (Vec<String>, String) {
        let (mut growing, mut pieces) = (Growing::default(), Vec::new());
        let ends = arguments.char_indices().map(|(at, c)| at + c.len_utf8());
        pieces.extend(ends.map(|end| growing.push(&arguments[..end])));
        let (complete, missing) = growing.end(arguments);
        pieces.push(missing);
        (pieces.into_iter().filter(|piece| !piece.is_empty()).collect(), complete)
    }

    #[rstest::rstest]
    #[case::spaces("{ \"input\" :\n\"ab\" }", "ab", 2)]
    #[case::escapes(r#"{"input": "a\n\"ü\u00e9\uD83D\uDE00\\"}"#, "a\n\"üé😀\\", 7)]
    #[case::no_json("patch it", "patch it", 1)]
    #[case::another_member(r#"{"a": 1, "input": "b"}"#, "b", 1)]
    #[case::no_text(r#"{"input": 1}"#, r#"{"input": 1}"#, 1)]
    #[case::a_prefix("{\"in", "{\"in", 1)]
    #[case::cut(r#"{"input": "ab\u00"#, "ab", 2)]
    #[case::line_break("{\"input\": \"a\nb\"}", "a", 1)]
    fn pieces_are_a_beginning_of_the_whole(
        #[case] arguments: &str,
        #[case] wanted: &str,
        #[case] count: usize,
    ) {
        let (pieces, complete) = grown(arguments);
        assert_eq!((pieces.concat().as_str(), complete.as_str(), pieces.len()), (wanted, wanted, count));
    }

    #[test]
    fn an_input_comes_back_as_it_was() {
        let text = "a\n\"ü\"\u{1}\\";
        assert_eq!(arguments("ü\n"), "{\"input\": \"ü\\n\"}");
        assert_eq!(input(&arguments(text)), text);
    }
}
