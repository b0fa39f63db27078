//! Incremental detokenizer: never emits half a character, and in total exactly the text of all
//! tokens.
//!
//! In byte-level tokenizers (most current ones) every token has its bytes, so the text is their
//! concatenation and one token costs O(1). Others decode a token differently depending on its
//! neighbours; for those a short window is decoded with and without the new token, and the
//! difference is the new text.

use std::sync::Arc;

use super::tokenizer::Tokenizer;
use foretell_core::session::Decode;
use foretell_core::units::TokenId;

/// Maximum tokens that the window may hold back; after these a broken character is final.
const WINDOW: usize = 16;

/// Tokens of the context that a window begins with.
const CONTEXT: usize = 4;

/// The bytes of every token of a byte-level vocabulary.
pub(crate) struct ByteTable {
    /// The bytes of token `id` are `bytes[ends[id - 1]..ends[id]]`.
    bytes: Vec<u8>,
    ends: Vec<u32>,
    special: Vec<bool>,
}

impl ByteTable {
    pub(crate) fn new(tokenizer: &tokenizers::Tokenizer, size: usize) -> Self {
        let mut table = Self { bytes: Vec::new(), ends: Vec::with_capacity(size), special: Vec::new() };
        let alphabet = alphabet();
        let added = tokenizer.get_added_vocabulary();
        for id in 0..size {
            let token = tokenizer.id_to_token(id as TokenId).unwrap_or_default();
            let byte = |character| alphabet.get(character as usize).copied().flatten();
            match token.chars().map(byte).collect::<Option<Vec<u8>>>() {
                Some(bytes) => table.bytes.extend_from_slice(&bytes),
                // Not all in the byte alphabet: an added token, whose name is its text.
                None => table.bytes.extend_from_slice(token.as_bytes()),
            }
            table.ends.push(table.bytes.len() as u32);
            table.special.push(added.is_special_token(&token));
        }
        table
    }

    /// The bytes of a token; empty if there is no such token.
    pub(crate) fn bytes(&self, id: TokenId) -> &[u8] {
        let id = id as usize;
        let start = id.checked_sub(1).map_or(Some(&0), |before| self.ends.get(before));
        let range = start.zip(self.ends.get(id)).map(|(&start, &end)| start as usize..end as usize);
        range.and_then(|range| self.bytes.get(range)).unwrap_or_default()
    }

    /// True if a token is left out of the text.
    pub(crate) fn is_special(&self, id: TokenId) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }
}

/// The byte of each character in byte-level vocabularies: printable Latin-1 characters are their
/// own bytes, the characters from U+0100 on are the other bytes in order.
fn alphabet() -> Vec<Option<u8>> {
    let mut alphabet = vec![None; 512];
    let mut next = 256;
    for byte in 0..=255_u8 {
        let printable = matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
        let at = if printable { usize::from(byte) } else { next };
        next += usize::from(!printable);
        if let Some(slot) = alphabet.get_mut(at) {
            *slot = Some(byte);
        }
    }
    alphabet
}

/// An incremental detokenizer of one output.
#[derive(Clone)]
pub struct Detokenizer(Kind);

#[derive(Clone)]
enum Kind {
    Bytes { table: Arc<ByteTable>, held: Vec<u8>, skip_special: bool },
    Window { tokenizer: Arc<Tokenizer>, window: Vec<TokenId>, said: usize, skip_special: bool },
}

impl Detokenizer {
    pub(crate) fn bytes(table: Arc<ByteTable>, skip_special: bool) -> Self {
        Self(Kind::Bytes { table, held: Vec::new(), skip_special })
    }

    pub(crate) fn window(tokenizer: Arc<Tokenizer>, context: &[TokenId], skip_special: bool) -> Self {
        let recent = context.get(context.len().saturating_sub(CONTEXT)..).unwrap_or_default();
        Self(Kind::Window { tokenizer, window: recent.to_vec(), said: recent.len(), skip_special })
    }
}

impl Detokenizer {
    /// True if it holds back the beginning of a character.
    pub fn holds(&self) -> bool {
        match &self.0 {
            Kind::Bytes { held, .. } => !held.is_empty(),
            Kind::Window { window, said, .. } => window.len() > *said,
        }
    }
}

impl Decode for Detokenizer {
    fn push(&mut self, token: TokenId) -> String {
        match &mut self.0 {
            Kind::Bytes { table, skip_special, .. } if *skip_special && table.is_special(token) => {
                String::new()
            }
            Kind::Bytes { table, held, .. } => {
                held.extend_from_slice(table.bytes(token));
                certain(held)
            }
            // It adds no text, so nothing would take it out of the window again.
            Kind::Window { tokenizer, skip_special, .. } if *skip_special && tokenizer.is_special(token) => {
                String::new()
            }
            Kind::Window { tokenizer, window, said, skip_special } => {
                window.push(token);
                difference(tokenizer, window, said, *skip_special, false)
            }
        }
    }

    fn flush(&mut self) -> String {
        match &mut self.0 {
            Kind::Bytes { held, .. } => String::from_utf8_lossy(&std::mem::take(held)).into_owned(),
            Kind::Window { tokenizer, window, said, skip_special } => {
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
    held: String,
    step: Step,
}

/// The text that is held until a character is whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The character alone (vLLM's parser of gpt-oss, which reads tokens).
    Character,
    /// All of a token's text (streams of llama.cpp).
    Token,
    /// All of a token's text, also where its last character can never become whole (vLLM 0.32,
    /// `v1/engine/detokenizer.py`: `DecodeStream` of the library `tokenizers`).
    Broken,
}

impl Stepwise {
    /// The same by such steps.
    pub fn new(decoder: Detokenizer, step: Step) -> Self {
        Self { decoder, held: String::new(), step }
    }
}

impl Decode for Stepwise {
    fn push(&mut self, token: TokenId) -> String {
        let text = self.decoder.push(token);
        self.held.push_str(&text);
        let holds = match self.step {
            Step::Character => false,
            Step::Token => self.decoder.holds(),
            Step::Broken => self.decoder.holds() || self.held.ends_with(char::REPLACEMENT_CHARACTER),
        };
        if holds { String::new() } else { std::mem::take(&mut self.held) }
    }

    fn flush(&mut self) -> String {
        self.decoder.flush();
        self.held.clear();
        String::new()
    }

    fn fork(&self) -> Box<dyn Decode> {
        Box::new(self.clone())
    }
}

/// Takes from `held` the text that is final: characters, and U+FFFD for bytes that can never become
/// one. The beginning of a character stays, at most three bytes.
fn certain(held: &mut Vec<u8>) -> String {
    let mut text = String::new();
    let mut taken = 0;
    while let Some(rest) = held.get(taken..).filter(|rest| !rest.is_empty()) {
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
    held.drain(..taken);
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
        assert_eq!(steps(Step::Broken, &emoji), ["a", "", "", "", "😀", ""]);
        assert_eq!(steps(Step::Broken, &emoji[..4]), ["a", "", "", "", ""]);
        let stray = [byte(b'a'), byte(0x80), byte(b'b'), byte(0x80)];
        assert_eq!(sent(detokenizer(), &stray), ["a", "\u{FFFD}", "b", "\u{FFFD}", ""]);
        assert_eq!(steps(Step::Broken, &stray), ["a", "", "\u{FFFD}b", "", ""]);
        assert_eq!(steps(Step::Token, &stray), ["a", "\u{FFFD}", "b", "\u{FFFD}", ""]);
        // The first byte of a character and a space in one token.
        let both = (0..tokenizer.end()).find(|&id| {
            let spelled = tokenizer.spelling(id).unwrap_or_default();
            spelled.len() > 1 && spelled[0] == b' ' && std::str::from_utf8(&spelled).is_err()
        });
        if let Some(both) = both {
            assert_eq!(steps(Step::Broken, &[both]), ["", ""]);
            assert_eq!(steps(Step::Character, &[both]), [" ", ""]);
        }
    }

    #[test]
    fn the_alphabet_names_every_byte_once() {
        let mut bytes: Vec<u8> = alphabet().into_iter().flatten().collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
    }

    #[test]
    fn final_text_is_a_prefix_of_the_lossy_text() {
        let bytes = b"a\xC3\xA9\xF0\x9F\x92\xA9\xFF\xF0\x9Fz\xE2\x82";
        for cut in 0..=bytes.len() {
            let mut held = bytes[..cut].to_vec();
            let said = certain(&mut held);
            assert!(held.len() < 4);
            assert_eq!(said + &String::from_utf8_lossy(&held), String::from_utf8_lossy(&bytes[..cut]));
        }
    }
}
