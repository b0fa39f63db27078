//! The output of a request as text, for `/api/sessions` and the status page: kept only if the
//! operator has allowed it (`observe.text`) and the client has asked for it
//! (`x-foretell-text: on`). It is in no log line, span or metric.

use std::collections::VecDeque;

use serde_json::{Value, json};

/// Maximum bytes kept from the beginning of an output.
const MAX: usize = 16 << 10;

/// An output, in parts by the round that brought them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Text {
    pieces: Vec<Piece>,
    bytes: usize,
    /// Something is left out, at the end.
    cut: bool,
    /// Rounds whose text has not been written yet.
    rounds: VecDeque<usize>,
}

/// A part of an output.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Piece {
    /// The round that brought it, from 0; `None`: plain decoding.
    round: Option<usize>,
    text: String,
}

impl Text {
    /// A round has ended: what is written next is its text.
    pub fn round(&mut self, number: usize) {
        self.rounds.push_back(number);
    }

    /// Notes text that is sent to the client.
    pub fn write(&mut self, text: &str) {
        let round = self.rounds.pop_front();
        let left = MAX - self.bytes;
        let kept = text.get(..text.floor_char_boundary(left)).unwrap_or_default();
        self.cut |= kept.len() < text.len();
        self.bytes += kept.len();
        match self.pieces.last_mut() {
            Some(last) if last.round == round => last.text.push_str(kept),
            _ if kept.is_empty() => {}
            _ => self.pieces.push(Piece { round, text: kept.to_owned() }),
        }
    }

    /// The parts in order with the number of their round, from 1, or `null`; and whether the rest
    /// of the output is left out.
    pub(super) fn to_json(&self) -> Value {
        let piece = |Piece { round, text }: &Piece| json!({ "round": round.map(|at| at + 1), "text": text });
        json!({ "pieces": self.pieces.iter().map(piece).collect::<Vec<_>>(), "cut": self.cut })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_part_has_the_round_that_brought_it() {
        let mut text = Text::default();
        text.write("a");
        text.write("b");
        text.round(0);
        text.round(1);
        text.write("cd");
        text.write("e");
        text.write("f");
        let piece = |round: Option<u32>, text: &str| json!({ "round": round, "text": text });
        let pieces = [piece(None, "ab"), piece(Some(1), "cd"), piece(Some(2), "e"), piece(None, "f")];
        assert_eq!(text.to_json(), json!({ "pieces": pieces, "cut": false }));
    }

    #[test]
    fn a_long_output_is_cut_between_two_characters() {
        let mut text = Text::default();
        text.write(&"x".repeat(MAX - 1));
        text.write("ü!");
        let told = text.to_json();
        assert_eq!((told["cut"].as_bool(), text.bytes), (Some(true), MAX - 1));
    }
}
