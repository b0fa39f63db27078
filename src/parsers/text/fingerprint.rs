//! The identity of a vocabulary: two tokenizers with equal fingerprints give every id the same
//! token.

use std::fmt;

use sha2::{Digest, Sha256};

use foretell_core::units::TokenId;

/// SHA-256 over every id and its token, in order of the ids.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint([u8; 32]);

impl Fingerprint {
    /// The fingerprint of a vocabulary in any order. Lengths are hashed too, so that entries cannot
    /// run together.
    pub fn of<'a>(vocabulary: impl IntoIterator<Item = (TokenId, &'a str)>) -> Self {
        let mut entries: Vec<_> = vocabulary.into_iter().collect();
        entries.sort_unstable();
        let mut hash = Sha256::new();
        for (id, token) in entries {
            hash.update(id.to_le_bytes());
            hash.update((token.len() as u64).to_le_bytes());
            hash.update(token.as_bytes());
        }
        Self(hash.finalize().into())
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(formatter, "{byte:02x}"))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{self}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_does_not_matter_and_everything_else_does() {
        let vocabulary = [(0, "a"), (1, "b")];
        let same = Fingerprint::of(vocabulary);
        assert_eq!(same, Fingerprint::of([(1, "b"), (0, "a")]));
        for other in [[(0, "b"), (1, "a")], [(0, "a"), (2, "b")], [(0, "ab"), (1, "")]] {
            assert_ne!(same, Fingerprint::of(other));
        }
        assert_eq!(same.to_string().len(), 64);
    }
}
