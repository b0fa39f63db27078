//! Tokenizers of both families, trained here on a few words.

use foretell_parsers::text::Tokenizer;
use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::sequence::Sequence;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::models::{ModelWrapper, TrainerWrapper};
use tokenizers::normalizers::Replace;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::metaspace::{Metaspace, PrependScheme};
use tokenizers::{AddedToken, DecoderWrapper};

pub const TEXT: &str = "The quick brown fox jumps over the lazy dog. Der schnelle braune Fuchs springt über den \
    faulen Hund, naïve façade — “quoted” … 東京は夜の七時。 Привет, мир! 👩‍👩‍👧 and 💩.\n\tdef f(x):\n        return x + 1\n";

fn special(text: &str) -> AddedToken {
    AddedToken::from(text, true)
}

/// Like GPT-2's: every token is bytes. `size` tokens.
pub fn byte_level(size: usize) -> Tokenizer {
    let mut tokenizer = tokenizers::Tokenizer::new(BPE::default());
    tokenizer.with_pre_tokenizer(Some(ByteLevel::new(false, true, true)));
    tokenizer.with_decoder(Some(ByteLevel::new(false, true, true)));
    let trainer = BpeTrainer::builder()
        .vocab_size(size)
        .show_progress(false)
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .special_tokens(vec![special("<s>"), special("</s>"), special("<|ü ü|>")])
        .build();
    let mut trainer = TrainerWrapper::BpeTrainer(trainer);
    tokenizer.train(&mut trainer, std::iter::repeat_n(TEXT.to_owned(), 3)).unwrap();
    tokenizer.add_tokens([AddedToken::from("plain added ö", false)]).unwrap();
    Tokenizer::new(tokenizer).unwrap()
}

/// Like Llama's first tokenizers: a sign for spaces, byte fallback for characters outside of the
/// vocabulary.
pub fn sentence_pieces(size: usize) -> Tokenizer {
    let mut tokenizer = tokenizers::Tokenizer::new(BPE::builder().byte_fallback(true).build().unwrap());
    tokenizer.with_pre_tokenizer(Some(Metaspace::new('▁', PrependScheme::First, false)));
    tokenizer.with_decoder(Some(Sequence::new(vec![
        DecoderWrapper::Replace(Replace::new("▁", " ").unwrap()),
        DecoderWrapper::ByteFallback(ByteFallback::new()),
        DecoderWrapper::Fuse(tokenizers::decoders::fuse::Fuse::new()),
        DecoderWrapper::Strip(tokenizers::decoders::strip::Strip::new(' ', 1, 0)),
    ])));
    let bytes = (0..=255_u8).map(|byte| AddedToken::from(format!("<0x{byte:02X}>"), false));
    let ascii: String = TEXT.chars().filter(char::is_ascii).collect();
    let trainer = BpeTrainer::builder()
        .vocab_size(size)
        .show_progress(false)
        .special_tokens([special("<s>"), special("</s>")].into_iter().chain(bytes).collect())
        .build();
    let mut trainer = TrainerWrapper::BpeTrainer(trainer);
    tokenizer.train(&mut trainer, std::iter::repeat_n(ascii, 3)).unwrap();
    assert!(matches!(tokenizer.get_model(), ModelWrapper::BPE(_)));
    Tokenizer::new(tokenizer).unwrap()
}
