//! An output that a model wrote, through every pair of output parsers, streamed and whole.
//!
//! Input: the formats, which of the request's switches are on, where the parser is copied; then the
//! output. It is cut into tokens: a marker is one, other text is cut after each space.

use foretell_core::session::{Parse, Parsed};
use foretell_core::units::TokenId;
use foretell_parsers::parse::{Parsers, ReasoningFormat, Request, ToolFormat, Vocabulary};
use serde_json::{Value, json};

use crate::bytes::Bytes;

/// Maximum size of an input, bytes.
const MAX_LEN: usize = 16 << 10;
/// Markers of all families.
const MARKERS: [&str; 31] = [
    "</minimax:tool_call>",
    "</think>",
    "</tool_call>",
    "<minimax:tool_call>",
    "<think>",
    "<tool_call>",
    "<|im_end|>",
    "<|im_start|>",
    "<|python_tag|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "｜DSML｜",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[THINK]",
    "[/THINK]",
    "<|return|>",
    "<|constrain|>",
    "<|channel|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|call|>",
];
/// The ids of the last ones, gpt-oss's; the others are tokens by their place.
const HARMONY: [TokenId; 7] = [200_002, 200_003, 200_005, 200_006, 200_007, 200_008, 200_012];

/// The id of the marker at this place.
fn id_at(at: usize) -> TokenId {
    let harmony = at.checked_sub(MARKERS.len() - HARMONY.len());
    harmony.and_then(|at| HARMONY.get(at).copied()).unwrap_or(at as TokenId)
}

/// Runs one input.
pub fn run(input: &[u8]) {
    if input.len() > MAX_LEN {
        return;
    }
    let mut bytes = Bytes(input);
    let tools = ToolFormat::ALL.get(bytes.below(ToolFormat::ALL.len() + 1)).copied();
    let reasoning = ReasoningFormat::ALL.get(bytes.below(ReasoningFormat::ALL.len() + 1)).copied();
    let (switches, copied) = (bytes.byte(), bytes.below(256));
    let offered = offered();
    let template = json!({"enable_thinking": switches & 1 > 0});
    let id = |text: &str| MARKERS.iter().position(|&marker| marker == text).map(id_at);
    let prompt = id("</think>").unwrap();
    let request = Request {
        tools: if switches & 2 > 0 { &offered } else { &[] },
        may_call: switches & 4 > 0,
        single_call: switches & 32 > 0,
        template: template.as_object().filter(|_| switches & 8 > 0),
        prompt: if switches & 16 > 0 { &[prompt] } else { &[] },
    };
    let text = String::from_utf8_lossy(bytes.0);
    let tokens = cut(&text);
    let special: Vec<(TokenId, &str)> = (0..).map(id_at).zip(MARKERS).collect();
    let vocabulary = Vocabulary { id: &id, special: &special };
    let parsers = Parsers { tools, reasoning };
    // gpt-oss goes with no other family.
    let Ok(parser) = parsers.stream(&request, &vocabulary) else { return };
    let (straight, sure) = stream(parser, &tokens, None);
    let parser = parsers.stream(&request, &vocabulary).unwrap();
    assert_eq!(stream(parser, &tokens, Some(copied)).0, straight, "a copy of the parser goes on otherwise");
    if sure {
        assert_within(&straight.reasoning, &text);
        assert_within(&straight.text, &text);
    }
    if let Ok(whole) = parsers.unstreamed(&request, &vocabulary, &tokens) {
        assert_within(whole.reasoning.as_deref().unwrap_or(""), &text);
        assert_within(whole.content.as_deref().unwrap_or(""), &text);
        assert!(request.may_call || whole.calls.is_empty(), "a call where none may be");
    }
}

fn offered() -> Vec<Value> {
    let kinds = ["string", "integer", "number", "boolean", "object", "array"];
    let properties = kinds.map(|kind| (kind.to_owned(), json!({"type": kind})));
    let properties = Value::Object(properties.into_iter().collect());
    let parameters = json!({"type": "object", "properties": properties});
    vec![json!({"type": "function", "function": {"name": "f", "parameters": parameters}})]
}

/// The tokens of a text, each with its part of it.
fn cut(text: &str) -> Vec<(TokenId, &str)> {
    let mut tokens = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let marker = MARKERS.iter().position(|marker| rest.starts_with(marker));
        let plain = || {
            let space = rest.find(' ').map_or(rest.len(), |at| at + 1);
            let next = MARKERS.iter().filter_map(|marker| rest.find(marker)).min();
            next.map_or(space, |next| next.min(space))
        };
        let (id, len) = match marker {
            Some(at) => (id_at(at), MARKERS[at].len()),
            None => (1000, plain()),
        };
        let (piece, after) = rest.split_at(len);
        tokens.push((id, piece));
        rest = after;
    }
    tokens
}

/// The parts of a stream, and true if they are sure. At token `copied` the parser's copy goes on.
fn stream(mut parser: Box<dyn Parse>, tokens: &[(TokenId, &str)], copied: Option<usize>) -> (Parsed, bool) {
    let mut parsed = Parsed::default();
    for (at, (token, text)) in tokens.iter().enumerate() {
        if copied == Some(at) {
            parser = parser.fork();
        }
        parsed.append(parser.push(*token, text));
        let _ = parser.is_outside_calls();
        assert!(parser.reasoning_tokens() <= at as u64 + 1, "more tokens of reasoning than there are");
    }
    parsed.append(parser.finish());
    (parsed, parser.is_sure())
}

/// Nothing is invented: a part is what is left of the text where something is taken out.
fn assert_within(part: &str, text: &str) {
    let mut rest = text.chars();
    for wanted in part.chars() {
        assert!(rest.any(|c| c == wanted), "{part:?} is not within {text:?}");
    }
}
