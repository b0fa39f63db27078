//! `suffix`: the most frequent continuation of the current context, in this request and in earlier
//! ones (SuffixDecoding, arXiv 2411.04975).
//!
//! The index is not a suffix tree, which costs hundreds of bytes per token, but an array of
//! positions sorted by the context *before* them, read backwards (a suffix array of the reversed
//! text, cut off at [`DEPTH`] tokens). All positions whose context agrees with the current one for
//! `m` tokens are one interval of that array, the intervals of growing `m` are nested, and one
//! search finds the innermost. Text and order take 8 bytes per token, an index of every
//! [`STRIDE`]th entry one more.
//!
//! [`Segment`] stores finished texts and never changes: new ones are built and small ones merged,
//! as in a log-structured merge tree. [`Growing`] stores one text that grows. A [`Finder`] queries
//! one or several of either.
//!
//! The token id [`SEPARATOR`] is never matched and never proposed: after it in a text a new context
//! begins, and of a queried context only the tokens after it count.

#[cfg(test)]
mod brute;
mod count;
mod find;
mod growing;
mod locate;
mod order;
mod search;
mod segment;

use std::sync::Arc;

pub use count::{AHEAD, Draft, MANY, Proposal, Shape};
pub use find::{Finder, Rules};
pub use growing::Growing;
pub use locate::{Located, Source};
pub use order::{DEPTH, SEPARATOR};
pub use search::STRIDE;
pub use segment::Segment;

use super::{Budget, DrafterId, Features, Feedback, Lookup, Node, Tree, Vote};
use crate::units::TokenId;

/// Earlier texts, the oldest first; shared by all sessions that may see them.
pub type View = Arc<[Arc<Segment>]>;

/// A draft may be long and unsure: the part of it that is sent is decided later, by the acceptance
/// rate of such tokens. (Over the recorded texts, the mean acceptance length at 8 nodes is 4.34
/// with these rules, and 3.88 with an offset of -4 and a minimum probability of 0.1.)
const RULES: Rules =
    Rules { max_nodes: AHEAD, max_spec_factor: 4.0, max_spec_offset: 4.0, min_token_prob: 0.02 };

/// The drafter of one session; the texts of earlier requests are shared.
#[derive(Debug)]
pub struct Suffix {
    id: DrafterId,
    earlier: View,
}

impl Suffix {
    /// A drafter that has seen nothing of its request, with the texts `earlier`, and votes as `id`.
    pub fn new(earlier: View, id: DrafterId) -> Self {
        Self { id, earlier }
    }

    fn node(&self, proposal: &Proposal, match_len: usize) -> Node {
        let share = proposal.share as f32;
        let features = Features { match_len: match_len as u32, share, ..Features::default() };
        Node::new(proposal.token, proposal.parent, Vote::new(self.id, features))
    }
}

impl Lookup for Suffix {
    /// Does nothing: the text itself is searched.
    fn observe(&mut self, _: &Feedback<'_>) {}

    /// The likeliest tokens first, so that a smaller budget is a shorter list.
    fn draft(&self, text: &Growing, budget: Budget) -> Tree {
        let earlier = self.earlier.iter().map(|segment| segment.source());
        let finder = Finder::new(earlier.chain(text.sources()), text.text());
        let Some(draft) = finder.draft(&RULES, Shape::Tree) else { return Tree::default() };
        let mut tree = Tree::default();
        let mut placed: Vec<Option<(usize, usize)>> = Vec::with_capacity(draft.nodes.len());
        for proposal in &draft.nodes {
            let parent = proposal.parent.map(|parent| placed.get(parent).copied().flatten());
            let position = match parent {
                None => Some((None, 0)),
                Some(above) => above.map(|(at, depth)| (Some(at), depth + 1)),
            };
            let fits = position.filter(|&(_, depth)| depth < budget.depth && tree.len() < budget.nodes);
            placed.push(fits.map(|(parent, depth)| {
                let node = self.node(proposal, draft.match_len);
                (tree.push(Node { parent, ..node }), depth)
            }));
        }
        tree
    }

    fn bytes(&self) -> usize {
        size_of::<Self>()
    }
}
