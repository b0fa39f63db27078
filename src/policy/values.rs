//! Values that policies are made of: name patterns and file revisions.

use std::fmt;

use sha2::{Digest, Sha256};

/// A pattern in which `*` stands for any text and `?` for any character.
#[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize, schemars::JsonSchema)]
pub struct Glob(String);

impl Glob {
    pub fn new(pattern: &str) -> Self {
        Self(pattern.to_owned())
    }

    /// The text of the pattern.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// True if it has no wildcard and so matches one text only.
    pub fn is_exact(&self) -> bool {
        !self.0.contains(['*', '?'])
    }

    /// True if all of `text` matches. Backtracking returns to the last `*` only, so the time is at
    /// most the product of both lengths.
    pub fn matches(&self, text: &str) -> bool {
        let pattern: Vec<char> = self.0.chars().collect();
        let text: Vec<char> = text.chars().collect();
        let (mut at, mut seen) = (0, 0);
        let mut star: Option<(usize, usize)> = None;
        while let Some(letter) = text.get(seen) {
            match pattern.get(at) {
                Some('*') => {
                    star = Some((at + 1, seen));
                    at += 1;
                }
                Some(wanted) if *wanted == '?' || wanted == letter => {
                    at += 1;
                    seen += 1;
                }
                _ => {
                    let Some((after, from)) = star else { return false };
                    star = Some((after, from + 1));
                    (at, seen) = (after, from + 1);
                }
            }
        }
        pattern.get(at..).is_none_or(|rest| rest.iter().all(|letter| *letter == '*'))
    }
}

/// The first 8 hex digits of the SHA-256 of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Revision([u8; 4]);

impl Revision {
    /// The revision of a file with these bytes.
    pub fn of(bytes: &[u8]) -> Self {
        let hash = Sha256::digest(bytes);
        let mut first = [0; 4];
        first.iter_mut().zip(hash.iter()).for_each(|(first, byte)| *first = *byte);
        Self(first)
    }
}

impl fmt::Display for Revision {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(formatter, "{byte:02x}"))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn globs_match_as_in_a_shell() {
        for (pattern, text, expected) in [
            ("*", "", true),
            ("*coder*", "qwen-coder-7b", true),
            ("*coder*", "qwen", false),
            ("lora-?", "lora-1", true),
            ("lora-?", "lora-12", false),
            ("a*b*c", "aXbYbZc", true),
            ("a*b*c", "aXbYbZ", false),
            ("", "", true),
            ("", "x", false),
            ("[a]", "[a]", true),
        ] {
            assert_eq!(Glob::new(pattern).matches(text), expected, "{pattern} {text}");
        }
        let slow = Glob::new(&"*a".repeat(200));
        assert!(!slow.matches(&"a".repeat(5_000).replace('a', "b")));
    }

    proptest! {
        #[test]
        fn a_glob_agrees_with_its_definition(pattern in "[ab*?]{0,8}", text in "[ab]{0,8}") {
            fn defined(pattern: &[u8], text: &[u8]) -> bool {
                match (pattern.split_first(), text.split_first()) {
                    (None, _) => text.is_empty(),
                    (Some((b'*', rest)), _) => (0..=text.len()).any(|skip| defined(rest, &text[skip..])),
                    (Some((wanted, rest)), Some((letter, later))) => {
                        (*wanted == b'?' || wanted == letter) && defined(rest, later)
                    }
                    (Some(_), None) => false,
                }
            }
            prop_assert_eq!(Glob::new(&pattern).matches(&text), defined(pattern.as_bytes(), text.as_bytes()));
        }
    }

    #[test]
    fn a_revision_is_the_beginning_of_the_hash() {
        // SHA-256 of the empty text begins e3b0c442.
        assert_eq!(Revision::of(b"").to_string(), "e3b0c442");
    }
}
