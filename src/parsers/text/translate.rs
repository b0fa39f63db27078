//! Translation between two vocabularies: the context of a request into a drafter's tokens, and
//! drafts into the target's.
//!
//! This is Universal Assisted Generation (SLEM, arXiv 2502.05202) made incremental: the two sides
//! share the text. The generated tokens are decoded once, and only a window of the text is encoded
//! a second time, because a tokenizer may split the end of a text differently once more text
//! follows. Old and new tokens of a window are compared by their positions in the text; the old
//! ones are replaced after the longest run that agrees.
//!
//! Nothing here affects the output: the target rejects a badly translated draft.
//!
//! * Marks (special tokens) are matched by name, ends of a text also by role, never by their text.
//! * A character of which the target has emitted only some bytes is not shown to the drafter; its
//!   draft begins with the complete character, and the bytes that are emitted already are removed
//!   from the translation.
//! * The last token of a translated draft is withheld if it might become a longer one once the
//!   drafter continues.

mod back;
mod follow;

pub use back::{Anchor, Translated};
pub use follow::Translator;

use std::collections::HashMap;
use std::sync::Arc;

use super::{TextError, Tokenizer};
use foretell_core::units::TokenId;

/// Tokens at the end of a text that are re-encoded when text is added to it.
const LOOK_BEHIND: usize = 10;

/// A target and a drafter with different vocabularies; shared by all sessions that translate
/// between them.
#[derive(Debug)]
pub struct Pair {
    target: Arc<Tokenizer>,
    drafter: Arc<Tokenizer>,
    /// The added tokens of the target that are no text, and the drafter's tokens of the same name
    /// or role.
    marks: HashMap<TokenId, Option<TokenId>>,
    /// The drafter's added tokens that are no text, and the target's.
    marks_back: HashMap<TokenId, Option<TokenId>>,
    /// The tokens that each side puts before a text.
    begin: Begin,
}

/// The tokens before every text (a BOS token, or none).
#[derive(Debug)]
struct Begin {
    target: Vec<TokenId>,
    drafter: Vec<TokenId>,
}

/// The tokens that end a text, which have the same role on both sides whatever their names.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ends<'a> {
    /// The end tokens of the target.
    pub target: &'a [TokenId],
    /// The end tokens of the drafter.
    pub drafter: &'a [TokenId],
}

impl Pair {
    /// Prepares the translation; takes time proportional to both vocabularies (tens of milliseconds
    /// for 150,000 tokens).
    ///
    /// # Errors
    /// One of the tokenizers cannot encode the empty text.
    pub fn new(target: Arc<Tokenizer>, drafter: Arc<Tokenizer>, ends: Ends<'_>) -> Result<Self, TextError> {
        let marks = marks(&target, &drafter, ends.target, ends.drafter);
        let marks_back = marks_back(&drafter, &target, ends.drafter, ends.target);
        let begin = Begin { target: target.encode("", true)?, drafter: drafter.encode("", true)? };
        Ok(Self { target, drafter, marks, marks_back, begin })
    }
}

/// The marks of `from`, each with the token of `to` that has its name, or otherwise, for an end of
/// the text, its role.
fn marks(
    from: &Tokenizer,
    to: &Tokenizer,
    ends: &[TokenId],
    ends_there: &[TokenId],
) -> HashMap<TokenId, Option<TokenId>> {
    let mut marks = HashMap::new();
    for &id in from.added().iter() {
        let Some(name) = from.token(id) else { continue };
        let named = to.id(&name).filter(|twin| to.added().binary_search(twin).is_ok());
        let role = || if ends.contains(&id) { ends_there.first().copied() } else { None };
        // An added token that is not special is text like any other.
        if from.is_special(id) {
            marks.insert(id, named.or_else(role));
        }
    }
    marks
}

/// As [`marks`], from drafter to target: an end of the drafter's text is one of the target's ends,
/// or the draft stops.
fn marks_back(
    drafter: &Tokenizer,
    target: &Tokenizer,
    ends: &[TokenId],
    ends_there: &[TokenId],
) -> HashMap<TokenId, Option<TokenId>> {
    let mut marks = marks(drafter, target, ends, ends_there);
    for &end in ends {
        let twin = marks.entry(end).or_default();
        let is_end = twin.is_some_and(|twin| ends_there.contains(&twin));
        if !is_end && !ends_there.is_empty() {
            *twin = ends_there.first().copied();
        }
    }
    marks
}
