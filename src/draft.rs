//! Proposing tokens: the draft itself and the drafters that need no model.
//!
//! PURE. A drafter sees the past through [`Feedback`], and answers a [`Budget`] with a [`Tree`].

pub mod automaton;
pub mod merge;
pub mod prompt_lookup;
pub mod tree;

pub use merge::Merged;
pub use prompt_lookup::{Ngram, PromptLookup};
pub use tree::{DrafterId, Features, Node, Source, Tree, Vote, Votes};

use crate::units::TokenId;

/// How much a drafter may propose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Most nodes in all.
    pub nodes: usize,
    /// Most nodes on one path.
    pub depth: usize,
}

/// Tokens that have become the past since the last feedback.
#[derive(Clone, Copy, Debug)]
pub struct Feedback<'a> {
    /// The new tokens, in order: first the prompt's, then every emitted one.
    pub tokens: &'a [TokenId],
}

/// A drafter that lives in the proxy and needs no model.
pub trait Lookup: Send {
    /// Learns the tokens that have become the past.
    fn observe(&mut self, seen: &Feedback<'_>);
    /// Forgets every token behind the first `len`, as if it had not been observed.
    fn rewind(&mut self, len: usize);
    /// Proposes what may follow everything observed so far; an empty tree if it has no proposal.
    fn draft(&self, budget: Budget) -> Tree;
}

/// A lookup drafter as a policy names it. Adding one is one file and one variant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LookupSpec {
    /// The longest recent match in the request's own context.
    PromptLookup(Ngram),
}

impl LookupSpec {
    /// What kind of drafter it is.
    pub const fn source(self) -> Source {
        match self {
            Self::PromptLookup(_) => Source::PromptLookup,
        }
    }

    /// A fresh drafter that has seen nothing and votes as `id`.
    pub fn build(self, id: DrafterId) -> Box<dyn Lookup> {
        match self {
            Self::PromptLookup(ngram) => Box::new(PromptLookup::new(ngram, id)),
        }
    }
}

#[cfg(test)]
mod tests {
    //! The contract that every lookup drafter keeps.

    use super::*;
    use proptest::prelude::*;

    const SPECS: [LookupSpec; 2] = [
        LookupSpec::PromptLookup(Ngram { min: 1, max: 3 }),
        LookupSpec::PromptLookup(Ngram { min: 2, max: 8 }),
    ];

    #[test]
    fn a_drafter_that_has_seen_nothing_says_nothing() {
        for spec in SPECS {
            assert!(spec.build(spec.source().into()).draft(Budget { nodes: 8, depth: 8 }).is_empty());
        }
    }

    proptest! {
        #[test]
        fn a_draft_keeps_its_budget_and_depends_on_the_past_alone(
            text in proptest::collection::vec(0u32..5, 0..60),
            cut in 0usize..60,
            nodes in 0usize..10,
            depth in 0usize..10,
        ) {
            for spec in SPECS {
                let (mut whole, mut pieces) = (spec.build(spec.source().into()), spec.build(spec.source().into()));
                whole.observe(&Feedback { tokens: &text });
                let cut = cut.min(text.len());
                pieces.observe(&Feedback { tokens: &text[..cut] });
                let _ = pieces.draft(Budget { nodes, depth });
                pieces.observe(&Feedback { tokens: &text[cut..] });
                let draft = whole.draft(Budget { nodes, depth });
                prop_assert_eq!(&draft, &pieces.draft(Budget { nodes, depth }));
                prop_assert!(draft.len() <= nodes);
                for node in 0..draft.len() {
                    prop_assert!(draft.path(node).len() <= depth);
                    prop_assert!(text.contains(&draft.nodes()[node].token));
                }
                pieces.observe(&Feedback { tokens: &text[..cut] });
                pieces.rewind(text.len());
                prop_assert_eq!(&draft, &pieces.draft(Budget { nodes, depth }), "what is taken back was never there");
                let mut shorter = whole.draft(Budget { nodes: nodes + 1, depth });
                shorter.truncate(nodes);
                prop_assert_eq!(draft, shorter, "a smaller budget is a truncation");
            }
        }
    }
}
