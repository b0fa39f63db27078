//! The bytes of the tokens of a byte-level vocabulary.

use foretell_core::units::TokenId;

/// The bytes of every token of a byte-level vocabulary.
pub(super) struct ByteTable {
    /// The bytes of token `id` are `bytes[ends[id - 1]..ends[id]]`.
    bytes: Vec<u8>,
    ends: Vec<u32>,
    special: Vec<bool>,
}

impl ByteTable {
    pub(super) fn new(tokenizer: &tokenizers::Tokenizer, size: usize) -> Self {
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
    pub(super) fn bytes(&self, id: TokenId) -> &[u8] {
        let id = id as usize;
        let start = id.checked_sub(1).map_or(Some(&0), |before| self.ends.get(before));
        let range = start.zip(self.ends.get(id)).map(|(&start, &end)| start as usize..end as usize);
        range.and_then(|range| self.bytes.get(range)).unwrap_or_default()
    }

    /// True if a token is not part of the text.
    pub(super) fn is_special(&self, id: TokenId) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }
}

/// The byte of each character in byte-level vocabularies: printable Latin-1 characters stand for
/// themselves, the characters from U+0100 on are the other bytes in order.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_alphabet_names_every_byte_once() {
        let mut bytes: Vec<u8> = alphabet().into_iter().flatten().collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
    }
}
