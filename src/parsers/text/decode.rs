//! Incremental detokenizer: never emits half a character, and in total exactly the text of all
//! tokens.
//!
//! In byte-level tokenizers (most current ones) every token has its bytes, so the text is their
//! concatenation and one token costs O(1). Others decode a token differently depending on its
//! neighbours; for those a short window is decoded with and without the new token, and the
//! difference is the new text.

use std::sync::Arc;

use super::byte_table::ByteTable;
use super::tokenizer::Tokenizer;
use foretell_core::session::Decode;
use foretell_core::units::TokenId;

/// Maximum tokens that the window may withhold; after these a broken character is final.
const WINDOW: usize = 16;

/// Tokens of the context that a window begins with.
const CONTEXT: usize = 4;

/// An incremental detokenizer of one output.
#[derive(Clone)]
pub struct Detokenizer(Method);

#[derive(Clone)]
enum Method {
    Bytes { table: Arc<ByteTable>, pending: Vec<u8>, skip_special: bool },
    Window { tokenizer: Arc<Tokenizer>, window: Vec<TokenId>, said: usize, skip_special: bool },
}

impl Tokenizer {
    /// An incremental detokenizer; `skip_special` leaves special tokens out. `context` is the
    /// tokens before the output: some tokenizers write the first token of a text differently
    /// (byte-level ones do not, and ignore it).
    pub fn detokenizer(self: &Arc<Self>, context: &[TokenId], skip_special: bool) -> Detokenizer {
        if let Some(table) = self.byte_table() {
            let table = Arc::clone(table);
            return Detokenizer(Method::Bytes { table, pending: Vec::new(), skip_special });
        }
        let window = context.get(context.len().saturating_sub(CONTEXT)..).unwrap_or_default().to_vec();
        let (tokenizer, said) = (Arc::clone(self), window.len());
        Detokenizer(Method::Window { tokenizer, window, said, skip_special })
    }
}

impl Detokenizer {
    /// True if it withholds the beginning of a character.
    pub fn is_inside_character(&self) -> bool {
        match &self.0 {
            Method::Bytes { pending, .. } => !pending.is_empty(),
            Method::Window { window, said, .. } => window.len() > *said,
        }
    }
}

impl Decode for Detokenizer {
    fn push(&mut self, token: TokenId) -> String {
        match &mut self.0 {
            Method::Bytes { table, skip_special, .. } if *skip_special && table.is_special(token) => {
                String::new()
            }
            Method::Bytes { table, pending, .. } => {
                pending.extend_from_slice(table.bytes(token));
                certain(pending)
            }
            // It adds no text, so nothing would remove it from the window.
            Method::Window { tokenizer, skip_special, .. }
                if *skip_special && tokenizer.is_special(token) =>
            {
                String::new()
            }
            Method::Window { tokenizer, window, said, skip_special } => {
                window.push(token);
                difference(tokenizer, window, said, *skip_special, false)
            }
        }
    }

    fn flush(&mut self) -> String {
        match &mut self.0 {
            Method::Bytes { pending, .. } => String::from_utf8_lossy(&std::mem::take(pending)).into_owned(),
            Method::Window { tokenizer, window, said, skip_special } => {
                difference(tokenizer, window, said, *skip_special, true)
            }
        }
    }

    fn fork(&self) -> Box<dyn Decode> {
        Box::new(self.clone())
    }
}

/// A detokenizer that leaves out the character that is cut at the end of the output, as engines do
/// that decode by steps.
#[derive(Clone)]
pub struct Stepwise {
    decoder: Detokenizer,
    pending: String,
    step: DecodeStep,
}

/// The text that is withheld until a character is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecodeStep {
    /// The character alone (vLLM's parser of gpt-oss, which reads tokens).
    Character,
    /// All of a token's text (streams of llama.cpp).
    Token,
    /// All of a token's text, also where its last character can never be completed (vLLM 0.32,
    /// `v1/engine/detokenizer.py`: `DecodeStream` of the library `tokenizers`).
    Broken,
}

impl Stepwise {
    pub fn new(decoder: Detokenizer, step: DecodeStep) -> Self {
        Self { decoder, pending: String::new(), step }
    }
}

impl Decode for Stepwise {
    fn push(&mut self, token: TokenId) -> String {
        let text = self.decoder.push(token);
        self.pending.push_str(&text);
        let is_incomplete = match self.step {
            DecodeStep::Character => false,
            DecodeStep::Token => self.decoder.is_inside_character(),
            DecodeStep::Broken => {
                self.decoder.is_inside_character() || self.pending.ends_with(char::REPLACEMENT_CHARACTER)
            }
        };
        if is_incomplete { String::new() } else { std::mem::take(&mut self.pending) }
    }

    fn flush(&mut self) -> String {
        self.decoder.flush();
        self.pending.clear();
        String::new()
    }

    fn fork(&self) -> Box<dyn Decode> {
        Box::new(self.clone())
    }
}

/// Takes from `pending` the text that is final: characters, and U+FFFD for bytes that can never
/// become one. The beginning of a character stays, at most three bytes.
fn certain(pending: &mut Vec<u8>) -> String {
    let mut text = String::new();
    let mut taken = 0;
    while let Some(rest) = pending.get(taken..).filter(|rest| !rest.is_empty()) {
        let (valid, broken) = match std::str::from_utf8(rest) {
            Ok(_) => (rest.len(), Some(0)),
            Err(error) => (error.valid_up_to(), error.error_len()),
        };
        text.push_str(&String::from_utf8_lossy(rest.get(..valid).unwrap_or_default()));
        taken += valid;
        match broken {
            Some(0) => {}
            Some(len) => {
                text.push('\u{FFFD}');
                taken += len;
            }
            None => break,
        }
    }
    pending.drain(..taken);
    text
}

/// The text that the tokens after the first `said` of the window add; empty while it may still
/// change.
fn difference(
    tokenizer: &Tokenizer,
    window: &mut Vec<TokenId>,
    said: &mut usize,
    skip_special: bool,
    last: bool,
) -> String {
    let text = |ids: &[TokenId]| tokenizer.decode(ids, skip_special).unwrap_or_default();
    let before = text(window.get(..*said).unwrap_or_default());
    let after = text(window);
    let unsure = after.ends_with('\u{FFFD}') && window.len() - *said < WINDOW;
    if unsure && !last {
        return String::new();
    }
    let new = after.get(before.len()..).unwrap_or_default().to_owned();
    // The text returned now is the context of the next text.
    if !new.is_empty() {
        window.drain(..*said);
        *said = window.len();
    }
    new
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The text that a decoder sends for each of these tokens, and at the end.
    fn sent(mut decoder: impl Decode, tokens: &[TokenId]) -> Vec<String> {
        let mut sent: Vec<String> = tokens.iter().map(|&token| decoder.push(token)).collect();
        sent.push(decoder.flush());
        sent
    }

    #[test]
    fn by_steps_a_token_waits_for_all_of_its_characters() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../onnx/models/target/tokenizer.json");
        let tokenizer = Arc::new(Tokenizer::from_file(std::path::Path::new(path)).unwrap());
        let byte =
            |byte: u8| (0..tokenizer.end()).find(|&id| *tokenizer.spelling(id).unwrap() == [byte]).unwrap();
        let detokenizer = || tokenizer.detokenizer(&[], true);
        let emoji: Vec<TokenId> = "a😀".bytes().map(byte).collect();
        let steps = |step, tokens: &[TokenId]| sent(Stepwise::new(detokenizer(), step), tokens);
        assert_eq!(steps(DecodeStep::Broken, &emoji), ["a", "", "", "", "😀", ""]);
        assert_eq!(steps(DecodeStep::Broken, &emoji[..4]), ["a", "", "", "", ""]);
        let stray = [byte(b'a'), byte(0x80), byte(b'b'), byte(0x80)];
        assert_eq!(sent(detokenizer(), &stray), ["a", "\u{FFFD}", "b", "\u{FFFD}", ""]);
        assert_eq!(steps(DecodeStep::Broken, &stray), ["a", "", "\u{FFFD}b", "", ""]);
        assert_eq!(steps(DecodeStep::Token, &stray), ["a", "\u{FFFD}", "b", "\u{FFFD}", ""]);
        // The first byte of a character and a space in one token.
        let both = (0..tokenizer.end()).find(|&id| {
            let spelled = tokenizer.spelling(id).unwrap_or_default();
            spelled.len() > 1 && spelled[0] == b' ' && std::str::from_utf8(&spelled).is_err()
        });
        if let Some(both) = both {
            assert_eq!(steps(DecodeStep::Broken, &[both]), ["", ""]);
            assert_eq!(steps(DecodeStep::Character, &[both]), [" ", ""]);
        }
    }

    #[test]
    fn final_text_is_a_prefix_of_the_lossy_text() {
        let bytes = b"a\xC3\xA9\xF0\x9F\x92\xA9\xFF\xF0\x9Fz\xE2\x82";
        for cut in 0..=bytes.len() {
            let mut pending = bytes[..cut].to_vec();
            let said = certain(&mut pending);
            assert!(pending.len() < 4);
            assert_eq!(said + &String::from_utf8_lossy(&pending), String::from_utf8_lossy(&bytes[..cut]));
        }
    }
}
