//! Hosted services that bill per token: no verify requests are sent to them, they are only relayed.
//! Their requests may be given a guess of the answer as OpenAI's `prediction`, which the provider
//! verifies by its own rule; rejected tokens are billed, so this is done only where the operator
//! allows it (`verify.allow: [prediction]`).
//!
//! The only kind of request that contains most of its answer asks for small changes of a given
//! text: the prediction is that text. The body stays byte for byte what the client sent, except for
//! one member that is put in front.

use serde_json::{Value, json};

use crate::openai::messages::plain_text;
use crate::openai::{Prompt, Request, Route};

/// Minimum length of a predicted text, bytes: shorter ones are generated faster than they are
/// predicted.
const MIN: usize = 64;
/// Words by which a message asks for a text to be changed.
const CHANGES: [&str; 26] = [
    "add",
    "adapt",
    "change",
    "clean",
    "convert",
    "correct",
    "delete",
    "edit",
    "extend",
    "fix",
    "format",
    "improve",
    "insert",
    "migrate",
    "modify",
    "move",
    "optimize",
    "port",
    "refactor",
    "remove",
    "rename",
    "replace",
    "revise",
    "rewrite",
    "translate",
    "update",
];

/// The client's body with a prediction of the answer; `None` if the request shows no likely answer,
/// the client has sent its own, or the provider takes none with such a request.
pub fn predicted(request: &Request, body: &[u8]) -> Option<Vec<u8>> {
    let content = likely(request)?;
    let prediction = json!({ "type": "content", "content": content });
    let begin = body.iter().position(|&byte| byte == b'{')? + 1;
    let (head, rest) = body.split_at_checked(begin)?;
    let mut altered = Vec::with_capacity(body.len() + content.len() + 64);
    altered.extend_from_slice(head);
    altered.extend_from_slice(format!("\"prediction\":{prediction},").as_bytes());
    altered.extend_from_slice(rest);
    Some(altered)
}

/// The text that the answer is likely to repeat: the longest fenced block of the last message, of
/// equally long ones the last.
fn likely(request: &Request) -> Option<String> {
    let (Route::Chat, Prompt::Messages(messages)) = (request.route, &request.prompt) else { return None };
    // Providers refuse predicted outputs with these; audio and several choices have made the
    // request ineligible before.
    let penalized = request.sampling.presence_penalty > 0.0 || request.sampling.frequency_penalty > 0.0;
    let named = ["prediction", "max_completion_tokens"].iter().any(|name| request.body.contains_key(*name));
    let refused = named;
    if penalized || refused || !request.rendered.is_empty() {
        return None;
    }
    let last = messages.as_array()?.last()?;
    if last.get("role").and_then(Value::as_str) != Some("user") {
        return None;
    }
    let text = plain_text(last.get("content")?)?;
    let (around, blocks) = fenced(&text);
    let asks = around.split(|c: char| !c.is_alphanumeric()).map(str::to_lowercase);
    let asks = asks.into_iter().any(|word| CHANGES.contains(&word.as_str()));
    let longest = blocks.into_iter().max_by_key(String::len)?;
    (asks && longest.len() >= MIN).then_some(longest)
}

/// The text outside of fenced blocks, and the blocks. A fence that is never closed is ignored.
fn fenced(text: &str) -> (String, Vec<String>) {
    let (mut around, mut blocks) = (String::new(), Vec::new());
    let mut open: Option<(&str, String)> = None;
    for line in text.split_inclusive('\n') {
        let mark = fence(line);
        open = match (open, mark) {
            (None, Some(mark)) => Some((mark, String::new())),
            (None, None) => {
                around.push_str(line);
                None
            }
            (Some((begun, block)), Some(mark))
                if mark.starts_with(begun) && line.trim().len() == mark.len() =>
            {
                blocks.push(block);
                None
            }
            (Some((begun, mut block)), _) => {
                block.push_str(line);
                Some((begun, block))
            }
        };
    }
    if let Some((_, rest)) = open {
        around.push_str(&rest);
    }
    (around, blocks)
}

/// The fence that a line begins with: three or more backticks or tildes.
fn fence(line: &str) -> Option<&str> {
    let line = line.trim_start();
    let of = |mark: char| line.len() - line.trim_start_matches(mark).len();
    let length = of('`').max(of('~'));
    (length >= 3).then(|| line.get(..length)).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openai::{Judgement, judge};

    const CODE: &str =
        "fn main() {\n    let greeting = \"hello\";\n    println!(\"{greeting}, world\");\n}\n";

    fn body(content: &str, more: &Value) -> String {
        let mut body = json!({"model": "gpt-4.1", "messages": [
            {"role": "system", "content": "Fix what you are given.\n```\nnot this\n```"},
            {"role": "user", "content": content}], "temperature": 1e-7});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body.to_string()
    }

    fn sent(body: &str) -> Option<String> {
        match judge(Route::Chat, body.as_bytes()) {
            Judgement::Eligible(request) => {
                predicted(&request, body.as_bytes()).map(|bytes| String::from_utf8(bytes).unwrap())
            }
            Judgement::Relay { .. } => None,
        }
    }

    fn rename() -> String {
        format!("Rename the variable.\n```rust\n{CODE}```\nThanks.")
    }

    #[test]
    fn the_text_that_is_to_be_changed_is_the_prediction_and_nothing_else_of_the_body_moves() {
        let body = body(&rename(), &json!({"logit_bias": {"5": 1.50}}));
        let altered = sent(&body).unwrap();
        let prediction = json!({"type": "content", "content": CODE});
        assert_eq!(altered, format!("{{\"prediction\":{prediction},{}", body.strip_prefix('{').unwrap()));
        let read: Value = serde_json::from_str(&altered).unwrap();
        assert_eq!(read["prediction"], prediction);
    }

    #[test]
    fn of_several_blocks_the_longest_counts() {
        let longer = format!("{CODE}// and more\n");
        let asked = format!("Fix the first:\n~~~\n{longer}~~~\nlike this\n````\n```\n{CODE}````\n");
        let altered: Value = serde_json::from_str(&sent(&body(&asked, &json!({}))).unwrap()).unwrap();
        assert_eq!(altered["prediction"]["content"], longer);
    }

    #[test]
    fn requests_that_the_provider_refuses_with_a_prediction_get_none() {
        for more in [
            json!({"prediction": {"type": "content", "content": "mine"}}),
            json!({"prediction": null}),
            json!({"n": 2}),
            json!({"logprobs": true}),
            json!({"presence_penalty": 0.1}),
            json!({"frequency_penalty": 0.1}),
            json!({"max_completion_tokens": 9}),
            json!({"tools": [{"type": "function", "function": {"name": "f"}}]}),
            json!({"modalities": ["text", "audio"]}),
            json!({"audio": {"voice": "a", "format": "wav"}}),
            json!({"who_knows": 1}),
        ] {
            assert_eq!(sent(&body(&rename(), &more)), None, "{more}");
        }
        assert!(sent(&body(&rename(), &json!({"presence_penalty": 0, "logprobs": false}))).is_some());
    }

    #[test]
    fn a_question_about_a_text_is_not_answered_by_the_text() {
        let asks = |content: &str| sent(&body(content, &json!({}))).is_some();
        assert!(!asks(&format!("What does this do?\n```\n{CODE}```")), "no change is asked for");
        assert!(!asks("Rename it.\n```\nlet x = 1;\n```"), "too short");
        assert!(!asks(&format!("Rename it.\n```\n{CODE}")), "the fence is never closed");
        assert!(!asks(&format!("```\n// rename\n{CODE}```")), "the word is in the text itself");
        assert!(asks(&format!("please REFACTOR:\n\n```\n{CODE}\n```")));
    }
}
