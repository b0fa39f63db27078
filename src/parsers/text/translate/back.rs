//! A draft of a drafter in the tokens of the target.

use std::sync::Arc;

use super::Pair;
use crate::text::tokenizer::Piece;
use foretell_core::session::Decode;
use foretell_core::units::TokenId;

/// Tokens of the drafter before its draft that its detokenizer reads.
const CONTEXT: usize = 4;

/// The end of a text, after which drafts are translated.
#[derive(Debug)]
pub struct Anchor {
    pair: Arc<Pair>,
    /// The last words of the text.
    behind: String,
    /// Tokens of the target after them, whose character is not complete yet.
    open: Vec<TokenId>,
    /// The drafter's last tokens.
    context: Vec<TokenId>,
}

/// A token of the target in a translated draft.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Translated {
    pub token: TokenId,
    /// The first of the drafter's tokens that its text comes from, by its index in the draft.
    pub first: usize,
    pub last: usize,
}

/// End of the text of a draft.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// It may continue.
    Open,
    Mark(TokenId),
    /// A mark that the target does not have.
    Unknown,
}

impl Anchor {
    pub(super) fn new(pair: Arc<Pair>, behind: &str, open: &[TokenId], ids: &[TokenId]) -> Self {
        let context = ids.get(ids.len().saturating_sub(CONTEXT)..).unwrap_or_default().to_vec();
        Self { pair, behind: behind.to_owned(), open: open.to_vec(), context }
    }

    /// The draft in the target's tokens: those of its text, and a mark at its end if the target has
    /// one for the drafter's. Empty where the two vocabularies do not meet at the end of the text.
    pub fn translate(&self, drafted: &[TokenId]) -> Vec<Translated> {
        let (text, ends, mark) = self.text(drafted);
        let mut translated = self.tokens(&text, &ends, mark != End::Open);
        // A mark after text that could not be translated would be at another position.
        if let End::Mark(token) = mark
            && (text.is_empty() || !translated.is_empty())
        {
            let at = ends.len();
            translated.push(Translated { token, first: at, last: at });
        }
        translated
    }

    /// The text of the draft up to its first mark, the end of each of its tokens in it, and that
    /// mark in the target's vocabulary. Bytes that are no characters end it.
    fn text(&self, drafted: &[TokenId]) -> (String, Vec<usize>, End) {
        let mut decode = self.pair.drafter.detokenizer(&self.context, false);
        let (mut text, mut ends) = (String::new(), Vec::new());
        for token in drafted {
            if let Some(mark) = self.pair.marks_back.get(token) {
                return (text, ends, mark.map_or(End::Unknown, End::Mark));
            }
            let new = decode.push(*token);
            if new.contains('\u{FFFD}') {
                break;
            }
            text.push_str(&new);
            ends.push(text.len());
        }
        (text, ends, End::Open)
    }

    fn tokens(&self, text: &str, ends: &[usize], closed: bool) -> Vec<Translated> {
        let Some((pieces, at)) = self.pieces(text) else { return Vec::new() };
        let mut translated: Vec<Translated> = Vec::new();
        let mut begin = 0;
        for piece in &pieces {
            let end = piece.end - at;
            let first = ends.partition_point(|&token_end| token_end <= begin);
            let last = ends.partition_point(|&token_end| token_end < end.max(begin + 1));
            let most = ends.len().saturating_sub(1);
            translated.push(Translated { token: piece.token, first: first.min(most), last: last.min(most) });
            begin = end;
        }
        if !closed && translated.len() > 1 && may_grow(text, begin) {
            translated.pop();
        }
        translated
    }

    /// The target's tokens after the end of the text, and the number of bytes before them that
    /// their ends include.
    fn pieces(&self, text: &str) -> Option<(Vec<Piece>, usize)> {
        if text.is_empty() {
            return None;
        }
        let at = self.behind.len();
        let mut pieces = self.pair.target.pieces(&[self.behind.as_str(), text].concat()).ok()?;
        let met = pieces.iter().rposition(|piece| piece.end == at).map(|last| last + 1);
        let met = if at == 0 { Some(met.unwrap_or(0)) } else { met };
        match met {
            Some(met) => {
                let rest = pieces.split_off(met);
                let begun = rest.iter().zip(&self.open).all(|(piece, &open)| piece.token == open);
                (begun && rest.len() > self.open.len())
                    .then(|| (rest.into_iter().skip(self.open.len()).collect(), at))
            }
            // The target has split its text differently than its tokenizer would: the draft is
            // encoded alone.
            None if self.open.is_empty() && self.pair.target.is_byte_level() => {
                self.pair.target.pieces(text).ok().map(|pieces| (pieces, 0))
            }
            None => None,
        }
    }
}

/// True if the last piece of a text may become a longer one when the text continues: it ends within
/// a word.
fn may_grow(text: &str, end: usize) -> bool {
    text.get(..end).and_then(|text| text.chars().last()).is_some_and(char::is_alphanumeric)
}
