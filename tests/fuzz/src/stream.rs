//! An event stream of a backend, through the whole proxy, to the bytes that the client gets.
//!
//! Input: kind of the request, cut of the stream, and if it breaks off; then the stream. A
//! passthrough stream arrives as it was sent; one written by a session is the same for any cut of
//! the backend's bytes.

use foretell_core::units::SplitMix64;

use crate::bytes::Bytes;
use crate::origin::{Answer, Turn, world};

/// Maximum size of an input, bytes.
const MAX_LEN: usize = 16 << 10;

/// Runs one input.
pub fn run(input: &[u8]) {
    if input.len() > MAX_LEN {
        return;
    }
    let mut input = Bytes(input);
    let chat = input.one(&[false, true]);
    let whole = input.one(&[true, true, true, false]);
    let streams = input.one(&[true, true, false]);
    let seed = input.byte();
    let sent = input.0;
    let mut turn = world("").turn();
    let mut ask =
        |control: &str, pieces: Vec<Vec<u8>>| asked(&mut turn, chat, streams, control, pieces, !whole);
    let passthrough = ask("off", vec![sent.to_vec()]);
    if whole {
        assert!(
            passthrough.whole && passthrough.body == sent,
            "passed through as {:?}",
            String::from_utf8_lossy(&passthrough.body)
        );
    }
    let at_once = ask("plain", vec![sent.to_vec()]);
    let cut = ask("plain", cut(sent, seed));
    let heads = || [&at_once, &cut].map(|answer| String::from_utf8_lossy(&answer.head).into_owned());
    assert_eq!(shown(&at_once), shown(&cut), "cut otherwise, it reads otherwise: {:#?}", heads());
}

fn shown(answer: &Answer) -> (bool, String) {
    (answer.whole, String::from_utf8_lossy(&answer.body).into_owned())
}

fn cut(mut rest: &[u8], seed: u8) -> Vec<Vec<u8>> {
    let mut rng = SplitMix64::new(u64::from(seed));
    let mut pieces = Vec::new();
    while !rest.is_empty() {
        let (piece, later) = rest.split_at(rest.len().min(1 + rng.below(1 + u64::from(seed)) as usize));
        pieces.push(piece.to_vec());
        rest = later;
    }
    pieces
}

fn asked(
    turn: &mut Turn<'_>,
    chat: bool,
    streams: bool,
    control: &str,
    pieces: Vec<Vec<u8>>,
    broken: bool,
) -> Answer {
    turn.answers(pieces, broken);
    let (path, subject) = if chat {
        ("/v1/chat/completions", r#""messages":[{"role":"user","content":"x"}]"#)
    } else {
        ("/v1/completions", r#""prompt":"x""#)
    };
    let body = format!(
        r#"{{"model":"foretell-target",{subject},"temperature":0,"presence_penalty":0,"frequency_penalty":0,"max_tokens":64,"stream":{streams}}}"#
    );
    turn.post(path, &format!("x-foretell: {control}\r\n"), body.as_bytes())
}
