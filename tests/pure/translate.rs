//! Translation between two vocabularies: for any text, both sides have the same text, and a draft
//! is translated without a byte lost or added.

use std::path::Path;
use std::sync::{Arc, LazyLock};

use foretell_core::session::Decode;
use foretell_core::units::SplitMix64;
use foretell_core::words::TokenContext;
use foretell_parsers::text::Tokenizer;
use foretell_parsers::text::translate::{Ends, Pair, Translator};
use rstest::rstest;

use crate::trained_tokenizers::{byte_level, sentence_pieces};

fn bundled(model: &str) -> Arc<Tokenizer> {
    let file =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../onnx/models").join(model).join("tokenizer.json");
    Arc::new(Tokenizer::from_file(&file).unwrap())
}

fn pair(target: &Arc<Tokenizer>, drafter: &Arc<Tokenizer>) -> Arc<Pair> {
    let ends = Ends { target: &[0], drafter: &[0] };
    Arc::new(Pair::new(Arc::clone(target), Arc::clone(drafter), ends).unwrap())
}

static TARGET: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| bundled("target"));
static OTHER: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| bundled("draft-other"));
static BYTES: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| Arc::new(byte_level(320)));
static PIECES: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| Arc::new(sentence_pieces(500)));

fn below(rng: &mut SplitMix64, bound: usize) -> usize {
    rng.below(bound as u64) as usize
}

/// The text of tokens without marks, with U+FFFD for broken characters and nothing for one that may
/// still be completed.
fn text(tokenizer: &Arc<Tokenizer>, ids: &[u32]) -> String {
    let mut decode = tokenizer.detokenizer(&[], false);
    let piece = |&id: &u32| if tokenizer.is_special(id) { decode.flush() } else { decode.push(id) };
    ids.iter().map(piece).collect()
}

/// A random text of difficult parts.
fn trouble(rng: &mut SplitMix64) -> String {
    const BITS: [&str; 24] = [
        "the ",
        "return x + 1\n",
        "naïve ",
        "e\u{301}",
        "o\u{308}\u{323}",
        "🦀",
        "👩\u{200d}👩\u{200d}👧",
        "🇩🇪",
        "東京",
        "は夜の",
        "\t",
        "\r\n",
        "\n\n",
        "    ",
        " ",
        "\u{a0}",
        "\u{200b}",
        "Привет",
        "مرحبا",
        "\u{feff}",
        "ﬁ",
        "self.",
        "0123456789",
        "—…",
    ];
    let count = 1 + below(rng, 12);
    (0..count).map(|_| BITS[below(rng, BITS.len())]).collect()
}

/// Tokens as a model writes them: mostly those of a text, sometimes an arbitrary token, so that
/// bytes may be broken.
fn tokens(tokenizer: &Tokenizer, rng: &mut SplitMix64) -> Vec<u32> {
    let mut tokens = tokenizer.encode(&trouble(rng), false).unwrap();
    if below(rng, 3) == 0 {
        let at = below(rng, tokens.len() + 1);
        let strange: Vec<u32> =
            (0..=below(rng, 3)).map(|_| below(rng, tokenizer.end() as usize) as u32).collect();
        tokens.splice(at..at, strange);
    }
    tokens
}

/// Both sides of a translator must have the same text. Byte-level drafters keep every byte; others
/// every word.
fn in_step(translator: &Translator, target: &Arc<Tokenizer>, drafter: &Arc<Tokenizer>, heard: &[u32]) {
    let said = text(target, heard);
    // Incomplete characters are withheld, so this is the whole text.
    let words: Vec<u32> = translator.ids().iter().copied().filter(|&id| !drafter.is_special(id)).collect();
    let told = drafter.decode(&words, false).unwrap();
    if drafter.is_byte_level() {
        assert_eq!(told, said);
    } else {
        let words = |text: &str| text.replace(' ', "");
        assert_eq!(words(&told), words(&said));
    }
}

fn fuzz(target: &Arc<Tokenizer>, drafter: &Arc<Tokenizer>, strings: u64) {
    let pair = pair(target, drafter);
    for string in 0..strings {
        let mut rng = SplitMix64::new(string);
        let all: Vec<u32> = (0..4).flat_map(|_| tokens(target, &mut rng)).collect();
        let mut translator = Translator::new(Arc::clone(&pair));
        let (mut context, mut at) = (TokenContext::new(&all[..1.min(all.len())], &[]), 1);
        while at < all.len() {
            let more = (1 + below(&mut rng, 20)).min(all.len() - at);
            context.push(&all[at..at + more]);
            at += more;
            translator.follow(&context);
            in_step(&translator, target, drafter, &all[..at]);
        }
    }
}

#[rstest]
#[case::bundled(&TARGET, &OTHER, 4_000)]
#[case::the_other_way(&OTHER, &TARGET, 2_000)]
#[case::few_tokens(&TARGET, &BYTES, 2_000)]
#[case::to_sentence_pieces(&TARGET, &PIECES, 1_000)]
#[case::from_sentence_pieces(&PIECES, &OTHER, 1_000)]
fn the_two_streams_of_ten_thousand_strings_stay_in_step(
    #[case] target: &Arc<Tokenizer>,
    #[case] drafter: &Arc<Tokenizer>,
    #[case] strings: u64,
) {
    fuzz(target, drafter, strings);
}

/// Cuts texts at random positions, lets the drafter continue them, and counts the translations that
/// are not empty.
fn told(target: &Arc<Tokenizer>, drafter: &Arc<Tokenizer>, strings: u64) -> (usize, usize) {
    let pair = pair(target, drafter);
    let (mut spoken, mut asked) = (0, 0);
    for string in 0..strings {
        let mut rng = SplitMix64::new(string);
        let whole: String = (0..3).map(|_| trouble(&mut rng)).collect();
        let ids = target.encode(&whole, false).unwrap();
        let cut = 1 + below(&mut rng, ids.len());
        let known = text(target, &ids[..cut]);
        let rest = &whole[known.len()..];
        let mut translator = Translator::new(Arc::clone(&pair));
        translator.follow(&TokenContext::new(&ids[..cut], &[]));
        let mut drafted = drafter.encode(rest, false).unwrap();
        drafted.truncate(12);
        let translated = translator.anchor().translate(&drafted);
        let bytes =
            |ids: &[u32]| -> Vec<u8> { ids.iter().flat_map(|&id| target.spelling(id).unwrap()).collect() };
        let tokens: Vec<u32> = translated.iter().map(|token| token.token).collect();
        let said = [bytes(&ids[..cut]), bytes(&tokens)].concat();
        assert!(whole.as_bytes().starts_with(&said), "{whole:?} cut at {cut}: {tokens:?}");
        for token in &translated {
            assert!(token.first <= token.last && token.last < drafted.len());
        }
        asked += usize::from(!text(drafter, &drafted).is_empty());
        spoken += usize::from(!translated.is_empty());
    }
    (spoken, asked)
}

#[test]
fn a_translated_draft_goes_on_where_the_target_is_and_loses_no_byte() {
    for (target, drafter) in [(&*TARGET, &*OTHER), (&*OTHER, &*TARGET), (&*TARGET, &*BYTES)] {
        let (spoken, asked) = told(target, drafter, 1_000);
        assert!(spoken * 10 >= asked * 9, "{spoken} of {asked}");
    }
}
