//! Checks a sampled token against its text: engines send both, and one of them may be wrong.
//!
//! A sample must never be refused for its value, which would change its distribution. So a text is
//! judged only where the bytes that a correct engine writes are known, whatever it has sampled;
//! elsewhere every text is accepted.

use std::sync::Arc;

use super::tokenizer::Tokenizer;
use foretell_core::session::Decode;
use foretell_core::units::TokenId;

/// Tokens of the context that are decoded: a character has at most four bytes, a token at least
/// one.
const CONTEXT: usize = 8;
/// Replacement for bytes that are no character.
const BROKEN: char = char::REPLACEMENT_CHARACTER;

/// True if `text` may be the engine's text of `token` after `before`. `tidies`: the engine removes
/// spaces before punctuation, as Hugging Face's code does where the model's configuration does not
/// forbid that.
pub fn may_spell(
    tokenizer: &Arc<Tokenizer>,
    before: impl DoubleEndedIterator<Item = TokenId>,
    token: TokenId,
    text: &str,
    tidies: bool,
) -> bool {
    // Only byte-level tokens that are not added ones have the same text in every engine. Some
    // engines show the marks of chats and the end of the text.
    if !tokenizer.is_byte_level() || tokenizer.added().binary_search(&token).is_ok() {
        return true;
    }
    let mut recent: Vec<TokenId> = before.rev().take(CONTEXT).collect();
    recent.reverse();
    let mut decoder = tokenizer.detokenizer(&[], true);
    let said: String = recent.into_iter().map(|token| decoder.push(token)).collect();
    if decoder.is_inside_character() || said.ends_with(BROKEN) {
        return true;
    }
    let spelt = decoder.push(token);
    if spelt.contains(BROKEN) || (tidies && !is_plain(&said, &spelt)) {
        return true;
    }
    match text.strip_prefix(spelt.as_str()) {
        Some("") => true,
        // The beginning of a character is withheld with the text before it, or written as U+FFFD.
        Some(rest) => decoder.is_inside_character() && rest.chars().all(|c| c == BROKEN),
        None => decoder.is_inside_character() && text.is_empty(),
    }
}

/// True if nothing here could be tidied: a word after a word.
fn is_plain(said: &str, spelt: &str) -> bool {
    let word = spelt.strip_prefix(' ').unwrap_or(spelt);
    let behind_word = said.chars().next_back().is_some_and(char::is_alphanumeric);
    behind_word && !word.is_empty() && word.chars().all(char::is_alphanumeric)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenizers::models::bpe::BPE;
    use tokenizers::pre_tokenizers::byte_level::ByteLevel;

    /// Tokens: " a", "b", " .", the three bytes of "€", and a mark.
    const A: TokenId = 0;
    const B: TokenId = 1;
    const DOT: TokenId = 2;
    const EURO: [TokenId; 3] = [3, 4, 5];
    const MARK: TokenId = 6;

    fn words() -> Arc<Tokenizer> {
        let spelt = ["\u{120}a", "b", "\u{120}.", "\u{e2}", "\u{124}", "\u{ac}"];
        let vocab = spelt.iter().zip(0..).map(|(token, id)| ((*token).to_owned(), id)).collect();
        let mut words = tokenizers::Tokenizer::new(BPE::new(vocab, Vec::new()));
        words.with_pre_tokenizer(Some(ByteLevel::new(false, true, true)));
        words.with_decoder(Some(ByteLevel::new(false, true, true)));
        words.add_special_tokens([tokenizers::AddedToken::from("<|end|>", true)]).unwrap();
        let words = Tokenizer::new(words).unwrap();
        assert!(words.is_byte_level() && words.id("<|end|>") == Some(MARK));
        Arc::new(words)
    }

    fn may(before: &[TokenId], token: TokenId, text: &str) -> bool {
        may_spell(&words(), before.iter().copied(), token, text, false)
    }

    #[test]
    fn a_word_is_written_by_its_bytes_and_by_nothing_else() {
        assert!(may(&[], A, " a") && may(&[B], A, " a") && may(&[A], DOT, " ."));
        for wrong in ["a", "", "b", " ab", " a\u{fffd}", " "] {
            assert!(!may(&[B], A, wrong), "{wrong:?}");
        }
        assert!(may(&[A], MARK, "") && may(&[A], MARK, "<|end|>"), "some engines show marks");
    }

    #[test]
    fn half_a_character_is_withheld_or_broken_and_its_other_half_is_not_judged() {
        for (before, token) in [(&[A][..], EURO[0]), (&[MARK][..], EURO[0])] {
            assert!(may(before, token, "") && may(before, token, "\u{fffd}"));
            assert!(!may(before, token, "b") && !may(before, token, "\u{fffd}b"));
        }
        for (before, token) in
            [(&EURO[..1], EURO[1]), (&EURO[..2], EURO[2]), (&EURO[..1], B), (&EURO[1..2], B)]
        {
            assert!(may(before, token, "") && may(before, token, "anything"), "{before:?}");
        }
        assert!(!may(&EURO, B, "anything"), "the text before ends with a whole character");
    }

    #[test]
    fn where_texts_are_tidied_only_words_after_words_are_judged() {
        let may =
            |before: &[TokenId], token, text| may_spell(&words(), before.iter().copied(), token, text, true);
        assert!(may(&[B], A, " a") && !may(&[B], A, " b"));
        assert!(may(&[B], DOT, ".") && may(&[B], DOT, ""));
        assert!(may(&[DOT], A, "a"));
    }
}
