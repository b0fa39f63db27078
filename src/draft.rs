//! Proposing tokens: the draft itself and the drafters that need no model.
//!
//! PURE. A drafter sees the past through [`Feedback`], and answers a [`Budget`] with a [`Tree`].

pub mod automaton;
pub mod merge;
pub mod prompt_lookup;
pub mod tree;

pub use merge::Merged;
pub use prompt_lookup::{Ngram, PromptLookup};
pub use tree::{Features, Node, Source, Tree};

use crate::units::TokenId;

/// How much a drafter may propose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Most nodes in all.
    pub nodes: usize,
    /// Most nodes on one path.
    pub depth: usize,
}

/// What has become the past since the drafter was last told.
#[derive(Clone, Copy, Debug)]
pub struct Feedback<'a> {
    /// The new tokens, in order: first the prompt's, then every emitted one.
    pub tokens: &'a [TokenId],
}

/// A drafter that lives in the proxy and needs no model.
pub trait Lookup: Send {
    /// Learns the tokens that have become the past.
    fn observe(&mut self, seen: &Feedback<'_>);
    /// Proposes what may follow everything observed so far; an empty tree means "no idea".
    fn draft(&self, budget: Budget) -> Tree;
}

/// A lookup drafter as a policy names it. Adding one is one file and one variant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LookupSpec {
    /// The longest recent match in the request's own context.
    PromptLookup(Ngram),
}

impl LookupSpec {
    /// A fresh drafter that has seen nothing.
    pub fn build(self) -> Box<dyn Lookup> {
        match self {
            Self::PromptLookup(ngram) => Box::new(PromptLookup::new(ngram)),
        }
    }
}
