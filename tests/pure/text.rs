//! Tokens to text, on tokenizers trained here: the concatenated incremental text is the text of all
//! tokens.

use std::sync::{Arc, LazyLock};

use foretell_core::session::Decode;
use foretell_parsers::text::Tokenizer;
use proptest::prelude::*;

use crate::trained_tokenizers::{TEXT, byte_level, sentence_pieces};

static BYTES: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| Arc::new(byte_level(400)));
static PIECES: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| Arc::new(sentence_pieces(500)));

/// The pieces of the incremental detokenizer; as `String`s they hold whole characters.
fn pieces(tokenizer: &Arc<Tokenizer>, ids: &[u32], skip_special: bool) -> Vec<String> {
    let mut detokenizer = tokenizer.detokenizer(&[], skip_special);
    let mut pieces: Vec<String> = ids.iter().map(|&id| detokenizer.push(id)).collect();
    pieces.push(detokenizer.flush());
    pieces
}

#[test]
fn real_text_is_complete_and_without_replacement_characters() {
    for tokenizer in [&*BYTES, &*PIECES] {
        let ids = tokenizer.encode(TEXT, false).unwrap();
        let pieces = pieces(tokenizer, &ids, true);
        assert!(pieces.iter().all(|piece| !piece.contains('\u{FFFD}')), "{pieces:?}");
        assert_eq!(pieces.concat(), tokenizer.decode(&ids, true).unwrap());
        assert_eq!(pieces.concat().trim_start(), TEXT);
    }
}

#[test]
fn a_character_in_several_tokens_comes_with_its_last_one() {
    let ids = BYTES.encode("🦀", false).unwrap();
    assert!(ids.len() > 1, "the test needs a character that is not one token");
    let pieces = pieces(&BYTES, &ids, true);
    assert_eq!(pieces[ids.len() - 1], "🦀");
    assert_eq!(pieces.concat(), "🦀");
}

#[test]
fn a_character_that_never_ends_becomes_one_replacement_character_at_the_end() {
    let mut ids = BYTES.encode("a🦀", false).unwrap();
    ids.pop();
    let pieces = pieces(&BYTES, &ids, true);
    assert_eq!(pieces.concat(), "a\u{FFFD}");
    assert_eq!(pieces.last().unwrap(), "\u{FFFD}");
}

#[test]
fn special_tokens_are_left_out_only_on_request() {
    let end = BYTES.id("</s>").unwrap();
    let odd = BYTES.id("<|ü ü|>").unwrap();
    let ids = [BYTES.encode("a", false).unwrap(), vec![end, odd]].concat();
    assert_eq!(pieces(&BYTES, &ids, true).concat(), "a");
    assert_eq!(pieces(&BYTES, &ids, false).concat(), "a</s><|ü ü|>");
    assert!(BYTES.is_special(end) && !BYTES.is_special(BYTES.id("plain added ö").unwrap()));
}

/// `</s>` is special, `plain added ö` is not.
#[test]
fn a_text_touches_special_tokens_within_around_and_across_them() {
    for text in ["</s>", "/s", "a</s>b", "end</", "s> and", "|>\n"] {
        assert!(BYTES.touches_special(text), "{text:?}");
    }
    for text in ["plain added ö", "\n\n", "END", "}"] {
        assert!(!BYTES.touches_special(text), "{text:?}");
    }
}

#[test]
fn the_output_of_a_sentence_piece_model_keeps_its_leading_space_after_a_prompt() {
    let prompt = PIECES.encode("The quick", false).unwrap();
    let all = PIECES.encode("The quick brown", false).unwrap();
    let mut detokenizer = PIECES.detokenizer(&prompt, true);
    let output: String = all[prompt.len()..].iter().map(|&id| detokenizer.push(id)).collect();
    assert_eq!(output + &detokenizer.flush(), " brown");
}

/// Where it stayed, each further one would be decoded with all before it.
#[test]
fn a_special_token_does_not_stay_in_the_window() {
    let end = PIECES.id("</s>").unwrap();
    let ids = PIECES.encode("The quick brown", false).unwrap();
    let mut detokenizer = PIECES.detokenizer(&[], true);
    let mut text = detokenizer.push(ids[0]);
    for _ in 0..100 {
        text += &detokenizer.push(end);
        assert!(!detokenizer.is_inside_character());
    }
    text.extend(ids[1..].iter().map(|&id| detokenizer.push(id)));
    assert_eq!(text, PIECES.decode(&ids, true).unwrap());
}

#[test]
fn ids_beyond_the_vocabulary_are_left_out() {
    assert_eq!(pieces(&BYTES, &[1_000_000, u32::MAX], true).concat(), "");
}

#[test]
fn equal_vocabularies_have_equal_fingerprints_and_others_do_not() {
    assert_eq!(BYTES.fingerprint(), byte_level(400).fingerprint());
    assert_ne!(BYTES.fingerprint(), PIECES.fingerprint());
}

proptest! {
    #[test]
    fn random_ids_of_a_byte_level_vocabulary_in_sum_are_the_text_of_all(
        ids in prop::collection::vec(0u32..420, 0..60), skip in any::<bool>(),
    ) {
        prop_assert_eq!(pieces(&BYTES, &ids, skip).concat(), BYTES.decode(&ids, skip).unwrap());
    }

    #[test]
    fn any_text_in_sum_is_the_text_of_all(text in "\\PC{0,40}") {
        for tokenizer in [&*BYTES, &*PIECES] {
            let ids = tokenizer.encode(&text, false).unwrap();
            prop_assert_eq!(pieces(tokenizer, &ids, true).concat(), tokenizer.decode(&ids, true).unwrap());
        }
    }
}
