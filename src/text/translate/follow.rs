//! The past of a request in the tokens of a drafter.

use std::sync::Arc;

use super::back::Anchor;
use super::{LOOK_BEHIND, Pair};
use crate::session::Decode;
use crate::text::Detokenizer;
use crate::text::tokenizer::Piece;
use crate::units::TokenId;
use crate::words::Past;

/// Text that is kept for the windows, bytes: more than any window needs, but for texts of very long tokens.
const KEPT: usize = 2048;
/// Most tokens of the drafter's that one of the target's is taken for.
const RATIO_MOST: f64 = 4.0;
/// It is cut back to [`KEPT`] when it has grown to this size, bytes.
const GROWN: usize = 8192;

/// Follows one request. A position counts the bytes of the text so far; a mark takes one position of its own.
pub struct Translator {
    pair: Arc<Pair>,
    decode: Detokenizer,
    /// Where the text of each token of the target ends. A token that completes no character ends where it begins.
    heard: Vec<u32>,
    /// Tokens of the target at the end whose text is not complete yet.
    open: Vec<TokenId>,
    ids: Vec<TokenId>,
    /// Where each of `ids` ends.
    ends: Vec<u32>,
    /// The first of `ids` behind the last mark.
    run: usize,
    /// The position behind the last mark.
    run_at: u32,
    /// The end of the text behind the last mark.
    tail: String,
    /// The position where `tail` begins.
    tail_at: u32,
}

impl Translator {
    /// A translator of a request of which nothing is known yet.
    pub fn new(pair: Arc<Pair>) -> Self {
        let decode = pair.target.detokenizer(&[], false);
        let ids = pair.begin.drafter.clone();
        let ends = vec![0; ids.len()];
        let run = ids.len();
        let (heard, open, tail) = (Vec::new(), Vec::new(), String::new());
        Self { pair, decode, heard, open, ids, ends, run, run_at: 0, tail, tail_at: 0 }
    }

    /// The pair that it translates between.
    pub fn pair(&self) -> &Arc<Pair> {
        &self.pair
    }

    /// Takes what the past has grown by. Prompt and output only grow; a past that is shorter than what was followed already
    /// is another one, and is read anew.
    pub fn follow(&mut self, past: &Past) {
        if past.len() < self.heard.len() {
            *self = Self::new(Arc::clone(&self.pair));
        }
        let (known, before) = (self.heard.len(), self.ids.len());
        let mut text = String::new();
        for token in past.tokens().skip(known) {
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
            if new.is_empty() || self.decode.holds() {
                self.open.push(token);
            }
            text.push_str(&new);
            self.heard.push(self.end() + text.len() as u32);
        }
        self.add(&text);
        self.pair.count(self.ids.get(before..).unwrap_or_default());
        self.forget();
    }

    /// The past in the drafter's tokens.
    pub fn ids(&self) -> &[TokenId] {
        &self.ids
    }

    /// How many of the drafter's tokens stand for one of the target's, as far as it is known.
    pub fn ratio(&self) -> f64 {
        match self.heard.len() {
            0..16 => 1.25,
            heard => (self.ids.len() as f64 / heard as f64).clamp(0.25, RATIO_MOST),
        }
    }

    /// What a draft behind the end of the text is translated by.
    pub fn anchor(&self) -> Anchor {
        let closed = self.heard.len() - self.open.len();
        let from = closed.checked_sub(LOOK_BEHIND + 1).and_then(|at| self.heard.get(at)).copied();
        let from = from.unwrap_or(0).max(self.tail_at);
        let behind = self.tail.get((from - self.tail_at) as usize..).unwrap_or_default();
        Anchor::new(Arc::clone(&self.pair), behind, &self.open, &self.ids)
    }

    /// The first of the drafter's places that tells of the target's token `place` (both counted from the first token of
    /// all; there is a token before it), and for each from there on how many of the target's tokens stand before it.
    pub fn places(&self, place: usize) -> (usize, Vec<usize>) {
        let begin = self.begin(place);
        let first = self.ends.partition_point(|&end| end <= begin).max(1);
        let before = |at: usize| self.heard.partition_point(|&end| end <= self.start(at));
        (first, (first..=self.ids.len()).map(before).collect())
    }

    /// Which of the target's tokens from `place` on the drafter would have written: those of whose text every token of the
    /// drafter's is the one that it chose. `chosen[i]` is its choice in its place `first + i`.
    pub fn agreed(&self, place: usize, first: usize, chosen: &[TokenId]) -> Vec<bool> {
        let agrees = |at: usize| at < first || chosen.get(at - first) == self.ids.get(at);
        let mut begin = self.begin(place);
        let heard = self.heard.get(place..).unwrap_or_default().iter();
        heard
            .map(|&end| {
                let from = self.ends.partition_point(|&own| own <= begin);
                let until = self.ends.partition_point(|&own| own < end) + 1;
                let touched = from..until.min(self.ids.len());
                // What no token of the drafter's tells of, the bytes of half a character or a mark that it does not have, it has
                // not written.
                let told = end > begin && !touched.is_empty();
                begin = end;
                told && touched.into_iter().all(agrees)
            })
            .collect()
    }

    /// As [`Self::agreed`] for a drafter that answers in the target's tokens: `right` are the tokens of the target that it
    /// chose where they stand. Where its own tokens do not meet the target's it has not been asked.
    pub fn agreed_at(&self, place: usize, right: &[usize]) -> Vec<bool> {
        let meets = |at: usize| {
            let begin = self.begin(at);
            begin == 0 || self.ends.binary_search(&begin).is_ok()
        };
        (place..self.heard.len()).map(|at| right.contains(&at) && meets(at)).collect()
    }

    /// Where the text of the target's token `at` begins.
    fn begin(&self, at: usize) -> u32 {
        at.checked_sub(1).and_then(|before| self.heard.get(before)).copied().unwrap_or(0)
    }

    /// Where the text ends.
    fn end(&self) -> u32 {
        self.tail_at + self.tail.len() as u32
    }

    fn mark(&mut self, token: TokenId, twin: Option<TokenId>) {
        let first = self.heard.is_empty();
        let at = self.end() + 1;
        self.heard.push(at);
        self.open.clear();
        let doubles = first && self.pair.begin.target.first() == Some(&token) && !self.ids.is_empty();
        if let Some(twin) = twin.filter(|_| !doubles) {
            self.ids.push(twin);
            self.ends.push(at);
        }
        self.run = self.ids.len();
        self.tail.clear();
        (self.run_at, self.tail_at) = (at, at);
    }

    /// Adds text: encodes a window of the end anew, and replaces what is no longer so.
    fn add(&mut self, new: &str) {
        if new.is_empty() {
            return;
        }
        self.tail.push_str(new);
        let from = self.window();
        let start = self.start(from);
        let pieces = self.pieces(self.text_from(from).unwrap_or(new), start);
        let (kept, taken) = self.agree(from, start, &pieces).unwrap_or((from, 0));
        self.replace(kept, pieces.into_iter().skip(taken).collect());
    }

    /// The drafter's tokens of a text that begins at a position.
    fn pieces(&self, text: &str, at: u32) -> Vec<Piece> {
        // A tokenizer that refuses a text leaves a gap in what the drafter sees, which costs acceptance and nothing else.
        let mut pieces = self.pair.drafter.pieces(text).unwrap_or_default();
        for piece in &mut pieces {
            piece.end += at as usize;
        }
        pieces
    }

    /// The token that a window begins with: one that begins a word, for there every tokenizer splits, else any.
    fn window(&self) -> usize {
        let latest = self.ids.len().saturating_sub(LOOK_BEHIND).max(self.run);
        let near = latest.saturating_sub(LOOK_BEHIND).max(self.run)..=latest;
        let sound = |at: &usize| self.text_from(*at).is_some();
        let word = |at: &usize| self.text_from(*at).is_some_and(|text| *at == self.run || begins_word(text));
        let back = near.clone().rev().find(word).or_else(|| near.rev().find(sound));
        back.or_else(|| (latest..self.ids.len()).find(sound)).unwrap_or(self.ids.len())
    }

    /// The text from a token on, as far as it is kept; `None` within a character, of which tokens may all end at one place.
    fn text_from(&self, at: usize) -> Option<&str> {
        let before = at.checked_sub(1).filter(|_| at > self.run).and_then(|before| self.ends.get(before));
        if before.is_some() && before == self.ends.get(at) {
            return None;
        }
        self.tail.get(self.start(at).checked_sub(self.tail_at)? as usize..)
    }

    /// The position where a token begins.
    fn start(&self, at: usize) -> u32 {
        if at == self.run {
            return self.run_at;
        }
        at.checked_sub(1).and_then(|before| self.ends.get(before)).copied().unwrap_or(0)
    }

    /// The longest run of tokens that the old ones from `from` on and a window from position `start` have in common, each
    /// in its place: how many of the old ones end with it, and how many pieces of the window. The later one of two.
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
        best.map(|(_, place)| place)
    }

    fn replace(&mut self, from: usize, pieces: Vec<Piece>) {
        self.ids.truncate(from);
        self.ends.truncate(from);
        for piece in pieces {
            self.ids.push(piece.token);
            self.ends.push(piece.end as u32);
        }
    }

    /// Lets go of text that no window will need.
    fn forget(&mut self) {
        if self.tail.len() < GROWN {
            return;
        }
        let mut cut = self.tail.len() - KEPT;
        while !self.tail.is_char_boundary(cut) {
            cut += 1;
        }
        self.tail.drain(..cut);
        self.tail_at += cut as u32;
    }
}

/// Whether a text begins with the space before a word.
fn begins_word(text: &str) -> bool {
    let mut characters = text.chars();
    characters.next() == Some(' ') && characters.next().is_some_and(char::is_alphanumeric)
}
