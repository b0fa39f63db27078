//! A Hugging Face tokenizer, with additional functions that Foretell needs.

use std::path::Path;
use std::sync::Arc;

use tokenizers::DecoderWrapper;

use super::byte_table::ByteTable;
use super::fingerprint::Fingerprint;
use super::{TextError, read};
use foretell_core::draft::Spelling;
use foretell_core::units::TokenId;

/// Limit of the ids of a vocabulary; the largest current ones reach an eighth of it. Tables are
/// indexed by id, so a single id of four billion would need a table of that size.
const IDS: usize = 1 << 22;

/// A token of an encoded text, and its end in the text, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    pub token: TokenId,
    /// One past its last byte. Tokens that share a character between them all end with it.
    pub end: usize,
}

/// A tokenizer. Shared as an `Arc`.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    bytes: Option<Arc<ByteTable>>,
    fingerprint: Fingerprint,
    end: TokenId,
    longest: usize,
    added: Arc<[TokenId]>,
}

impl Tokenizer {
    /// Loads a `tokenizer.json`, or that of a folder.
    ///
    /// # Errors
    /// The file cannot be read, or as for [`Self::from_bytes`].
    pub fn from_file(path: &Path) -> Result<Self, TextError> {
        let inside = path.join("tokenizer.json");
        Self::from_bytes(&read(if path.is_dir() { &inside } else { path })?)
    }

    /// From the text of a `tokenizer.json`. The library panics at some invalid files, which is
    /// caught and returned as an error: the file may come from any backend.
    ///
    /// # Errors
    /// The library cannot read it, or as for [`Self::new`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, TextError> {
        let read = std::panic::catch_unwind(|| tokenizers::Tokenizer::from_bytes(bytes));
        read.map_err(|_| TextError::Tokenizer("the library cannot read it".to_owned()))?
            .map_err(wrong)
            .and_then(Self::new)
    }

    /// From a tokenizer that was built in memory. Truncation and padding are switched off: a
    /// silently truncated prompt would be another prompt.
    ///
    /// # Errors
    /// A token has an id of 2²² or more.
    pub fn new(mut inner: tokenizers::Tokenizer) -> Result<Self, TextError> {
        inner.with_truncation(None).map_err(wrong)?;
        inner.with_padding(None);
        let vocabulary = inner.get_vocab(true);
        let fingerprint = Fingerprint::of(vocabulary.iter().map(|(token, &id)| (id, token.as_str())));
        let longest = vocabulary.keys().map(String::len).max().unwrap_or(0);
        let size = vocabulary.values().max().map_or(0, |&id| id as usize + 1);
        if size > IDS {
            return Err(TextError::Tokenizer(format!("a token has the id {}, more than {IDS}", size - 1)));
        }
        let bytes = is_byte_level(inner.get_decoder()).then(|| Arc::new(ByteTable::new(&inner, size)));
        let mut added: Vec<TokenId> = inner.get_added_tokens_decoder().into_keys().collect();
        added.sort_unstable();
        Ok(Self { inner, bytes, fingerprint, end: size as TokenId, longest, added: added.into() })
    }

    /// The ids of a text; `special` adds the tokens that the tokenizer puts around every prompt
    /// (such as a BOS token).
    ///
    /// # Errors
    /// The tokenizer cannot encode this text.
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<TokenId>, TextError> {
        self.inner.encode_fast(text, special).map(|encoding| encoding.get_ids().to_vec()).map_err(wrong)
    }

    /// The tokens of a text, each with its end; nothing is put around the text.
    ///
    /// # Errors
    /// The tokenizer cannot encode this text.
    pub fn pieces(&self, text: &str) -> Result<Vec<Piece>, TextError> {
        if let Some(pieces) = self.bytes.as_ref().and_then(|table| self.laid_out(table, text)) {
            return Ok(pieces);
        }
        let encoding = self.inner.encode(text, false).map_err(wrong)?;
        let mut end = 0;
        let pieces = encoding.get_ids().iter().zip(encoding.get_offsets());
        Ok(pieces
            .map(|(&token, &(_, until))| {
                end = end.max(until);
                Piece { token, end }
            })
            .collect())
    }

    /// The tokens of a text, with their ends by the bytes of each; `None` if these are not the
    /// bytes of the text (it was normalised).
    fn laid_out(&self, table: &ByteTable, text: &str) -> Option<Vec<Piece>> {
        let mut end = 0;
        let pieces = self.encode(text, false).ok()?.into_iter().map(|token| {
            end += table.bytes(token).len();
            Piece { token, end }
        });
        let pieces: Vec<Piece> = pieces.collect();
        (end == text.len()).then_some(pieces)
    }

    /// The bytes of a token within a text; `None` if there is no such token.
    pub fn spelling(&self, id: TokenId) -> Option<Vec<u8>> {
        if let Some(table) = self.bytes.as_ref()
            && id < self.end
        {
            return Some(table.bytes(id).to_vec());
        }
        let token = self.token(id)?;
        let byte = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
        if let Some(byte) = byte.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            return Some(vec![byte]);
        }
        Some(token.replace('\u{2581}', " ").into_bytes())
    }

    /// The text of ids, with U+FFFD for bytes that are not valid UTF-8. Ids without a token are
    /// skipped, and special tokens if `skip_special`.
    ///
    /// # Errors
    /// The tokenizer cannot decode these ids.
    pub fn decode(&self, ids: &[TokenId], skip_special: bool) -> Result<String, TextError> {
        self.inner.decode(ids, skip_special).map_err(wrong)
    }

    /// The bytes of its tokens; `None` if it is not byte-level.
    pub(super) fn byte_table(&self) -> Option<&Arc<ByteTable>> {
        self.bytes.as_ref()
    }

    /// The token of an id, as the vocabulary spells it; `None` if no token has this id.
    pub fn token(&self, id: TokenId) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The id of a token, as the vocabulary spells it; `None` if there is no such token.
    pub fn id(&self, token: &str) -> Option<TokenId> {
        self.inner.token_to_id(token)
    }

    /// True if a token is special: it is not part of the text.
    pub fn is_special(&self, id: TokenId) -> bool {
        self.token(id).is_some_and(|token| self.inner.get_added_vocabulary().is_special_token(&token))
    }

    /// The special tokens, in rising order.
    pub fn special(&self) -> Vec<TokenId> {
        (0..self.end()).filter(|&id| self.is_special(id)).collect()
    }

    /// True if this text may occur in one with special tokens, and not in the same text without
    /// them.
    pub fn touches_special(&self, text: &str) -> bool {
        let touches = |special: &str| {
            let meets =
                |a: &str, b: &str| (1..a.len()).any(|at| a.get(at..).is_some_and(|end| b.starts_with(end)));
            special.contains(text) || text.contains(special) || meets(special, text) || meets(text, special)
        };
        let special = self.added.iter().filter(|&&id| self.is_special(id));
        special.filter_map(|&id| self.token(id)).any(|special| touches(&special))
    }

    /// The tokens that may end an output, in rising order: engines go by ids, and not every
    /// tokenizer flags each of them as special.
    pub fn may_end(&self) -> Vec<TokenId> {
        let is_added = |id: TokenId| self.added.binary_search(&id).is_ok();
        (0..self.end()).filter(|&id| self.is_special(id) || is_added(id)).collect()
    }

    /// The tokens that were added to the model's vocabulary (marks of a chat, of tools, of
    /// reasoning), in rising order.
    pub fn added(&self) -> &Arc<[TokenId]> {
        &self.added
    }

    /// True if the text of tokens is the concatenation of their bytes.
    pub fn is_byte_level(&self) -> bool {
        self.bytes.is_some()
    }

    /// Number of tokens, added ones included.
    pub fn size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// One more than the largest id.
    pub fn end(&self) -> TokenId {
        self.end
    }

    /// Length of the longest token as the vocabulary spells it, bytes; the text of a token is no
    /// longer.
    pub fn longest(&self) -> usize {
        self.longest
    }

    /// The identity of the vocabulary.
    pub fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }
}

impl Spelling for Tokenizer {
    fn bytes(&self, token: TokenId) -> Vec<u8> {
        let special = match &self.bytes {
            Some(table) => table.is_special(token),
            None => self.is_special(token),
        };
        if special { Vec::new() } else { self.spelling(token).unwrap_or_default() }
    }

    fn tokens(&self, text: &str) -> Vec<(TokenId, usize)> {
        let pieces = self.pieces(text).unwrap_or_default();
        pieces.into_iter().map(|piece| (piece.token, piece.end)).collect()
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Tokenizer({} tokens, {})", self.size(), self.fingerprint)
    }
}

#[allow(clippy::needless_pass_by_value)] // handed to `map_err`
fn wrong(error: tokenizers::Error) -> TextError {
    TextError::Tokenizer(error.to_string())
}

/// True if the text of tokens is the concatenation of their bytes.
fn is_byte_level(decoder: Option<&DecoderWrapper>) -> bool {
    match decoder {
        Some(DecoderWrapper::ByteLevel(_)) => true,
        Some(DecoderWrapper::Sequence(sequence)) => {
            matches!(sequence.get_decoders(), [only] if is_byte_level(Some(only)))
        }
        _ => false,
    }
}
