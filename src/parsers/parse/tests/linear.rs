//! The work of every parser grows with the output: bytes that are read are counted, not time.

use super::*;

/// Tokens that are repeated, in the shorter of two outputs.
const MANY: usize = 1_000;
/// Times as many bytes that an output of twice the length may cost. Work that grows with the square
/// costs four times as many.
const MOST: u64 = 3;

/// Pieces that a family may hold back, or look for in what it holds back.
const PIECES: [&str; 19] = [
    " ",
    "\n",
    "a",
    "7",
    "\"",
    "\\",
    "{",
    "}",
    "[",
    "}}",
    "`",
    "<",
    "< p",
    ">",
    "<parameter=",
    "<parameter=a>1</parameter>",
    "<arg_key>a</arg_key><arg_value>1</arg_value>",
    "\"name\": ",
    ", \"k\": {}",
];

type Tokens = Vec<(TokenId, String)>;

fn families() -> Vec<&'static Golden> {
    let (mut tools, mut reasoning) = (Vec::new(), Vec::new());
    let new = |golden: &&Golden| {
        let Parsers { tools: tool, reasoning: thought } = golden.parsers;
        let is_new = tool.is_some_and(|tool| !tools.contains(&tool))
            || thought.is_some_and(|thought| !reasoning.contains(&thought));
        tools.extend(tool);
        reasoning.extend(thought);
        is_new
    };
    let found: Vec<_> = goldens().iter().filter(new).collect();
    assert!(ToolFormat::ALL.iter().all(|format| tools.contains(format)));
    assert!(ReasoningFormat::ALL.iter().all(|format| reasoning.contains(format)));
    found
}

/// The case with the longest output that may call.
fn longest(golden: &Golden) -> Case {
    let cases = golden.cases.iter().map(|json| case(golden, json));
    cases.max_by_key(|case| (case.may_call, case.tokens.len())).unwrap()
}

/// Bytes that are read of the case's output with a piece in it so many times.
fn work(golden: &Golden, case: &Case, cut: usize, piece: (TokenId, &str), times: usize) -> [u64; 2] {
    let repeated = std::iter::repeat_n((piece.0, piece.1.to_owned()), times);
    let (before, after) = case.tokens.split_at(cut);
    let tokens: Tokens = before.iter().cloned().chain(repeated).chain(after.iter().cloned()).collect();
    let streamed = steps::of(|| {
        let mut parser = case.stream(golden);
        for (token, text) in &tokens {
            parser.push(*token, text);
        }
        parser.finish();
    });
    let case = Case {
        tokens,
        tools: case.tools.clone(),
        template: None,
        prompt: case.prompt.clone(),
        name: String::new(),
        ..*case
    };
    [streamed, steps::of(|| drop(case.unstreamed(golden)))]
}

fn check(golden: &Golden, case: &Case, cut: usize, piece: (TokenId, &str)) -> Option<String> {
    let once = work(golden, case, cut, piece, MANY);
    let twice = work(golden, case, cut, piece, 2 * MANY);
    let is_linear = once.iter().zip(&twice).all(|(once, twice)| *twice <= MOST * once.max(&100_000));
    (!is_linear).then(|| format!("{} at {cut} {piece:?}: {once:?} {twice:?}", case.name))
}

#[test]
fn twice_as_much_output_is_twice_as_much_work() {
    let mut found = Vec::new();
    for golden in families() {
        let case = longest(golden);
        let length = case.tokens.len();
        for cut in [0, length / 2, length * 3 / 4] {
            found.extend(PIECES.iter().filter_map(|piece| check(golden, &case, cut, (9_999, piece))));
        }
    }
    assert_none(&found);
}

#[test]
fn twice_as_many_markers_are_twice_as_much_work() {
    let mut found = Vec::new();
    for golden in families() {
        let case = longest(golden);
        for (text, token) in &golden.markers {
            // A marker may come before its text, or instead of it.
            for text in [text, ""] {
                let cuts = [0, case.tokens.len() / 2];
                found.extend(cuts.iter().filter_map(|&cut| check(golden, &case, cut, (*token, text))));
            }
        }
    }
    assert_none(&found);
}
