//! The context of a request in the tokens of a drafter.

use std::sync::Arc;

use super::back::Anchor;
use super::{LOOK_BEHIND, Pair};
use crate::text::Detokenizer;
use crate::text::tokenizer::Piece;
use foretell_core::session::Decode;
use foretell_core::units::TokenId;
use foretell_core::words::TokenContext;

/// Text that is stored for the windows, bytes: more than any window needs, except for texts of very
/// long tokens.
const RETAINED: usize = 2048;
/// Maximum drafter tokens per target token.
const MAX_RATIO: f64 = 4.0;
/// Size at which the text is cut back to [`RETAINED`], bytes.
const GROWN: usize = 8192;

/// Follows one request. A position counts the bytes of the text so far; a mark takes one position.
pub struct Translator {
    pair: Arc<Pair>,
    decode: Detokenizer,
    /// The end of each target token in the text. A token that completes no character ends where it
    /// begins.
    target_ends: Vec<u32>,
    /// The last tokens of the target, whose text is not complete yet.
    open: Vec<TokenId>,
    ids: Vec<TokenId>,
    /// The end of each of `ids` in the text.
    ends: Vec<u32>,
    /// Index of the first of `ids` after the last mark.
    run: usize,
    /// The position after the last mark.
    run_at: u32,
    /// The end of the text after the last mark.
    tail: String,
    /// The position where `tail` begins.
    tail_at: u32,
}

impl Translator {
    /// A translator of an empty context.
    pub fn new(pair: Arc<Pair>) -> Self {
        let decode = pair.target.detokenizer(&[], false);
        let ids = pair.begin.drafter.clone();
        let ends = vec![0; ids.len()];
        let run = ids.len();
        let (target_ends, open, tail) = (Vec::new(), Vec::new(), String::new());
        Self { pair, decode, target_ends, open, ids, ends, run, run_at: 0, tail, tail_at: 0 }
    }

    /// The pair that it translates between.
    pub fn pair(&self) -> &Arc<Pair> {
        &self.pair
    }

    /// Reads the new tokens of the context. Prompt and output only grow; a context that is shorter
    /// than the tokens already read is another one, and is read from the start.
    pub fn follow(&mut self, context: &TokenContext) {
        if context.len() < self.target_ends.len() {
            *self = Self::new(Arc::clone(&self.pair));
        }
        let known = self.target_ends.len();
        let mut text = String::new();
        for token in context.tokens().skip(known) {
            if let Some(twin) = self.pair.marks.get(&token).copied() {
                text.push_str(&self.decode.flush());
                self.add(&std::mem::take(&mut text));
                self.mark(token, twin);
                continue;
            }
            let new = self.decode.push(token);
            if !new.is_empty() {
                self.open.clear();
            }
            if new.is_empty() || self.decode.is_inside_character() {
                self.open.push(token);
            }
            text.push_str(&new);
            self.target_ends.push(self.end() + text.len() as u32);
        }
        self.add(&text);
        self.forget();
    }

    /// The context in the drafter's tokens.
    pub fn ids(&self) -> &[TokenId] {
        &self.ids
    }

    /// Drafter tokens per target token of the context, 0.25 to 4; 1.25 before 16 target tokens were
    /// read.
    pub fn ratio(&self) -> f64 {
        match self.target_ends.len() {
            0..16 => 1.25,
            target_ends => (self.ids.len() as f64 / target_ends as f64).clamp(0.25, MAX_RATIO),
        }
    }

    /// The end of the text, by which a draft after it is translated.
    pub fn anchor(&self) -> Anchor {
        let closed = self.target_ends.len() - self.open.len();
        let from = closed.checked_sub(LOOK_BEHIND + 1).and_then(|at| self.target_ends.get(at)).copied();
        let from = from.unwrap_or(0).max(self.tail_at);
        let behind = self.tail.get((from - self.tail_at) as usize..).unwrap_or_default();
        Anchor::new(Arc::clone(&self.pair), behind, &self.open, &self.ids)
    }

    /// The index in [`Self::ids`] (at least 1) of the first token that covers the text of the
    /// target's token `position`, an index into the context.
    pub fn first_position(&self, position: usize) -> usize {
        let begin = self.begin(position);
        self.ends.partition_point(|&end| end <= begin).max(1)
    }

    /// Entry `i` is true if the drafter would have generated the target's token `position + i`:
    /// every drafter token of its text is the one that the drafter chose. `chosen[i]` is its choice
    /// at its position `first + i`.
    pub fn agreed(&self, position: usize, first: usize, chosen: &[TokenId]) -> Vec<bool> {
        let agrees = |at: usize| at < first || chosen.get(at - first) == self.ids.get(at);
        let mut begin = self.begin(position);
        let target_ends = self.target_ends.get(position..).unwrap_or_default().iter();
        target_ends
            .map(|&end| {
                let from = self.ends.partition_point(|&token_end| token_end <= begin);
                let until = self.ends.partition_point(|&token_end| token_end < end) + 1;
                let touched = from..until.min(self.ids.len());
                // A target token without a drafter token (the bytes of half a character, or a mark
                // that the drafter does not have) was not generated by it.
                let has_text = end > begin && !touched.is_empty();
                begin = end;
                has_text && touched.into_iter().all(agrees)
            })
            .collect()
    }

    /// Start of the text of the target's token `at`.
    fn begin(&self, at: usize) -> u32 {
        at.checked_sub(1).and_then(|before| self.target_ends.get(before)).copied().unwrap_or(0)
    }

    /// End of the text.
    fn end(&self) -> u32 {
        self.tail_at + self.tail.len() as u32
    }

    fn mark(&mut self, token: TokenId, twin: Option<TokenId>) {
        let first = self.target_ends.is_empty();
        let at = self.end() + 1;
        self.target_ends.push(at);
        self.open.clear();
        let doubles = first && self.pair.begin.target.first() == Some(&token) && !self.ids.is_empty();
        if let Some(twin) = twin
            && !doubles
        {
            self.ids.push(twin);
            self.ends.push(at);
        }
        self.run = self.ids.len();
        self.tail.clear();
        self.run_at = at;
        self.tail_at = at;
    }

    /// Adds text: re-encodes a window of the end, and replaces the tokens that have changed.
    fn add(&mut self, new: &str) {
        if new.is_empty() {
            return;
        }
        self.tail.push_str(new);
        let from = self.window();
        let start = self.start(from);
        let pieces = self.pieces(self.text_from(from).unwrap_or(new), start);
        let (unchanged, taken) = self.agree(from, start, &pieces).unwrap_or((from, 0));
        self.replace(unchanged, pieces.into_iter().skip(taken).collect());
    }

    /// The drafter's tokens of a text that begins at the position `at`.
    fn pieces(&self, text: &str, at: u32) -> Vec<Piece> {
        // A tokenizer that refuses a text leaves a gap in the drafter's context, which only costs
        // acceptance.
        let mut pieces = self.pair.drafter.pieces(text).unwrap_or_default();
        for piece in &mut pieces {
            piece.end += at as usize;
        }
        pieces
    }

    /// The token that a window begins with: one that begins a word, because every tokenizer splits
    /// there, otherwise any.
    fn window(&self) -> usize {
        let latest = self.ids.len().saturating_sub(LOOK_BEHIND).max(self.run);
        let near = latest.saturating_sub(LOOK_BEHIND).max(self.run)..=latest;
        let sound = |at: &usize| self.text_from(*at).is_some();
        let word = |at: &usize| self.text_from(*at).is_some_and(|text| *at == self.run || begins_word(text));
        let back = near.clone().rev().find(word).or_else(|| near.rev().find(sound));
        back.or_else(|| (latest..self.ids.len()).find(sound)).unwrap_or(self.ids.len())
    }

    /// The text from a token on; `None` if it is no longer stored, or within a character, whose
    /// tokens may all end at one position.
    fn text_from(&self, at: usize) -> Option<&str> {
        let before = if at > self.run { self.ends.get(at - 1) } else { None };
        if before.is_some() && before == self.ends.get(at) {
            return None;
        }
        self.tail.get(self.start(at).checked_sub(self.tail_at)? as usize..)
    }

    /// The position at which a token begins.
    fn start(&self, at: usize) -> u32 {
        if at == self.run {
            return self.run_at;
        }
        at.checked_sub(1).and_then(|before| self.ends.get(before)).copied().unwrap_or(0)
    }

    /// The longest run of tokens at equal positions that the old ones from `from` on and a window
    /// from position `start` have in common: the number of old tokens up to its end, and the number
    /// of pieces of the window up to it. Of two equally long runs the later one.
    fn agree(&self, from: usize, start: u32, pieces: &[Piece]) -> Option<(usize, usize)> {
        let mut best: Option<(usize, (usize, usize))> = None;
        let (mut old, mut new, mut run) = (from, 0, 0);
        let mut begins = start as usize;
        while let (Some(piece), Some((&id, &end))) =
            (pieces.get(new), self.ids.get(old).zip(self.ends.get(old)))
        {
            let same = id == piece.token && end as usize == piece.end && self.start(old) as usize == begins;
            run = if same { run + 1 } else { 0 };
            if same && best.is_none_or(|(longest, _)| run >= longest) {
                best = Some((run, (old + 1, new + 1)));
            }
            let behind = piece.end;
            if end as usize <= behind {
                old += 1;
            }
            if behind <= end as usize {
                begins = behind;
                new += 1;
            }
        }
        best.map(|(_, position)| position)
    }

    fn replace(&mut self, from: usize, pieces: Vec<Piece>) {
        self.ids.truncate(from);
        self.ends.truncate(from);
        for piece in pieces {
            self.ids.push(piece.token);
            self.ends.push(piece.end as u32);
        }
    }

    /// Drops text that no window will need.
    fn forget(&mut self) {
        if self.tail.len() < GROWN {
            return;
        }
        let mut cut = self.tail.len() - RETAINED;
        while !self.tail.is_char_boundary(cut) {
            cut += 1;
        }
        self.tail.drain(..cut);
        self.tail_at += cut as u32;
    }
}

/// True if a text begins with the space before a word.
fn begins_word(text: &str) -> bool {
    let mut characters = text.chars();
    characters.next() == Some(' ') && characters.next().is_some_and(char::is_alphanumeric)
}
