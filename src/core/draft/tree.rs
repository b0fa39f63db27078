//! A draft: a tree of proposed tokens. A chain is a tree.
//!
//! Nodes are stored parents-first, so every prefix of the node list is itself a tree: cutting a
//! draft to a budget is a truncation.

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use super::Source;
use crate::units::TokenId;

/// Features of a node known before it is verified, all computed from the context and from q; 0
/// where a drafter does not have one.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Features {
    /// Length of the matched context, in tokens (lookup drafters).
    pub match_len: u32,
    /// Logit of the token minus the highest of the others, by the drafter (model drafters).
    pub margin: f32,
    /// Share of the earlier occurrences that continued with this token, 0 to 1 (drafters that
    /// count), or its probability (the head).
    pub share: f32,
}

impl Features {
    /// Those of a token after a match of `match_len` tokens.
    pub fn matched(match_len: u32) -> Self {
        Self { match_len, ..Self::default() }
    }
}

/// The other drafters' proposals at the position of a proposed token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Agreement {
    /// They propose no token at its position.
    #[default]
    Alone,
    /// At least one of another kind proposes the same.
    Seconded,
    /// Those of another kind propose only other tokens there.
    Contested,
}

impl Agreement {
    /// Number of variants.
    pub const COUNT: usize = 3;

    /// Its index among the variants.
    pub const fn index(self) -> usize {
        self as usize
    }
}

/// A drafter of a session: its kind, and which one of that kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct DrafterId {
    /// Its kind.
    pub source: Source,
    /// Its index among those of its kind: of lookups in the policy's order, of models in the list
    /// of the models that have drafted for the engine start ([`crate::control::Control::model`]).
    pub number: u8,
}

impl DrafterId {
    pub const fn model(number: u8) -> Self {
        Self { source: Source::Model, number }
    }

    /// Id under which acceptance is learnt: lookups of one kind share one, each model has a
    /// separate one.
    #[must_use]
    pub const fn learnt_as(self) -> Self {
        let number = if matches!(self.source, Source::Model) { self.number } else { 0 };
        Self { source: self.source, number }
    }

    /// Row of its learnt acceptance in tables. Models come last, so that tables may grow with their
    /// number.
    pub const fn row(self) -> usize {
        self.source.index() + self.learnt_as().number as usize
    }
}

impl From<Source> for DrafterId {
    fn from(source: Source) -> Self {
        Self { source, number: 0 }
    }
}

/// A drafter that proposed a node, and its evidence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Vote {
    /// The drafter that proposed the node.
    pub drafter: DrafterId,
    /// The evidence that the survival probability is estimated from.
    pub features: Features,
}

impl Vote {
    pub fn new(drafter: impl Into<DrafterId>, features: Features) -> Self {
        Self { drafter: drafter.into(), features }
    }
}

/// The drafters that proposed a node: at least one, each of them once. Up to three need no heap
/// allocation.
#[derive(Clone, Debug, PartialEq)]
pub struct Votes {
    first: Vote,
    others: SmallVec<[Vote; 2]>,
}

impl Votes {
    /// The vote of the first drafter that proposed it.
    pub fn first(&self) -> Vote {
        self.first
    }

    /// All votes, the first one first.
    pub fn iter(&self) -> impl Iterator<Item = Vote> {
        std::iter::once(self.first).chain(self.others.iter().copied())
    }

    /// The first vote of each source: a node counts once for a source.
    pub fn by_source(&self) -> impl Iterator<Item = Vote> {
        let first = |at: usize, vote: &Vote| {
            self.iter().take(at).all(|before| before.drafter.source != vote.drafter.source)
        };
        self.iter().enumerate().filter(move |(at, vote)| first(*at, vote)).map(|(_, vote)| vote)
    }

    /// Adds the votes of drafters that have not voted yet.
    fn join(&mut self, more: &Self) {
        for vote in more.iter() {
            if self.iter().all(|known| known.drafter != vote.drafter) {
                self.others.push(vote);
            }
        }
    }
}

impl From<Vote> for Votes {
    fn from(first: Vote) -> Self {
        Self { first, others: SmallVec::new() }
    }
}

/// One proposed token.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// The proposed token.
    pub token: TokenId,
    /// Index of the parent node; `None` follows the context.
    pub parent: Option<usize>,
    /// The drafters that proposed it, for their acceptance statistics.
    pub votes: Votes,
    /// The other drafters' proposals at its position, even if their tokens were not sent.
    pub company: Agreement,
}

impl Node {
    /// A token that one drafter proposes.
    pub fn new(token: TokenId, parent: Option<usize>, vote: Vote) -> Self {
        Self { token, parent, votes: vote.into(), company: Agreement::Alone }
    }
}

/// A draft. Invariant: a parent comes before its children, and siblings carry different tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tree {
    nodes: Vec<Node>,
}

impl Tree {
    /// A chain of tokens from one drafter, all with the same features.
    pub fn chain(tokens: &[TokenId], drafter: impl Into<DrafterId>, features: Features) -> Self {
        let vote = Vote::new(drafter, features);
        let node = |(index, &token): (usize, &TokenId)| Node::new(token, index.checked_sub(1), vote);
        Self { nodes: tokens.iter().enumerate().map(node).collect() }
    }

    pub(super) fn with_capacity(nodes: usize) -> Self {
        Self { nodes: Vec::with_capacity(nodes) }
    }

    /// The tree of these nodes in this order. A parent has to be picked before its children: a node
    /// without its parent follows the context.
    pub(super) fn picked(self, order: impl ExactSizeIterator<Item = usize>) -> Self {
        let mut moved: Vec<Option<usize>> = vec![None; self.nodes.len()];
        let mut nodes: Vec<Option<Node>> = self.nodes.into_iter().map(Some).collect();
        let mut picked = Self::with_capacity(order.len());
        for index in order {
            let Some(node) = nodes.get_mut(index).and_then(Option::take) else { continue };
            let parent = node.parent.and_then(|parent| moved.get(parent).copied().flatten());
            if let Some(position) = moved.get_mut(index) {
                *position = Some(picked.nodes.len());
            }
            picked.nodes.push(Node { parent, ..node });
        }
        picked
    }

    /// Appends a node and returns its index. A sibling with the same token is not doubled: it gets
    /// the votes, and its index comes back. A parent that does not exist makes the node follow the
    /// context.
    pub fn push(&mut self, node: Node) -> usize {
        let parent = node.parent.filter(|&parent| parent < self.nodes.len());
        if let Some(twin) = self.child(parent, node.token) {
            if let Some(known) = self.nodes.get_mut(twin) {
                known.votes.join(&node.votes);
            }
            return twin;
        }
        self.nodes.push(Node { parent, ..node });
        self.nodes.len() - 1
    }

    /// The nodes, parents first.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Number of nodes.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// True if nothing is proposed.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// The same tree, proposed by `drafter`.
    #[must_use]
    pub fn by(mut self, drafter: DrafterId) -> Self {
        for node in &mut self.nodes {
            node.votes = Vote { drafter, ..node.votes.first() }.into();
        }
        self
    }

    /// The tree without the nodes whose tokens are not below `end`, and without those behind them:
    /// an engine may refuse a request with one, or die of it.
    #[must_use]
    pub fn within(self, end: TokenId) -> Self {
        if self.nodes.iter().all(|node| node.token < end) {
            return self;
        }
        let mut retained: Vec<bool> = Vec::with_capacity(self.nodes.len());
        for node in &self.nodes {
            let follows = node.parent.is_none_or(|parent| retained.get(parent) == Some(&true));
            retained.push(follows && node.token < end);
        }
        let order: Vec<usize> =
            (0..retained.len()).filter(|&index| retained.get(index) == Some(&true)).collect();
        self.picked(order.into_iter())
    }

    /// Truncates the draft to its first `len` nodes.
    pub fn truncate(&mut self, len: usize) {
        self.nodes.truncate(len);
    }

    /// Index of the child of `parent` (`None`: of the context) that carries `token`; `None` if
    /// there is none.
    pub fn child(&self, parent: Option<usize>, token: TokenId) -> Option<usize> {
        let from = after(parent);
        let later = self.nodes.get(from..).unwrap_or_default();
        later.iter().position(|node| node.parent == parent && node.token == token).map(|at| from + at)
    }

    /// Length of the longest branch, nodes.
    pub fn depth(&self) -> usize {
        let mut depths: Vec<usize> = Vec::with_capacity(self.len());
        for node in self.nodes() {
            depths.push(node.parent.and_then(|parent| depths.get(parent)).map_or(1, |depth| depth + 1));
        }
        depths.into_iter().max().unwrap_or(0)
    }

    /// Indices of the children of `parent` (`None`: of the context) in the order in which they were
    /// added.
    pub fn children(&self, parent: Option<usize>) -> impl Iterator<Item = usize> {
        let later = self.nodes.iter().enumerate().skip(after(parent));
        later.filter(move |(_, node)| node.parent == parent).map(|(index, _)| index)
    }

    /// Sets [`Node::company`] of every node.
    pub fn note_agreement(&mut self) {
        let companies: Vec<Agreement> = (0..self.len()).map(|at| self.company(at)).collect();
        for (node, company) in self.nodes.iter_mut().zip(companies) {
            node.company = company;
        }
    }

    fn company(&self, node: usize) -> Agreement {
        let Some(this) = self.nodes.get(node) else { return Agreement::Alone };
        let source = this.votes.first().drafter.source;
        let other = |votes: &Votes| votes.iter().any(|vote| vote.drafter.source != source);
        if other(&this.votes) {
            return Agreement::Seconded;
        }
        let mut twins = self.children(this.parent).filter_map(|twin| self.nodes.get(twin));
        if twins.any(|twin| other(&twin.votes)) { Agreement::Contested } else { Agreement::Alone }
    }

    /// The tokens from the context down to and including `node`; empty if there is no such node.
    pub fn path(&self, node: usize) -> Vec<TokenId> {
        let mut path = Vec::new();
        let mut at = Some(node);
        while let Some(node) = at.and_then(|index| self.nodes.get(index)) {
            path.push(node.token);
            at = node.parent;
        }
        path.reverse();
        path
    }

    /// Number of nodes, from the first on, that form a chain.
    pub fn stem(&self) -> usize {
        let follows = |(index, node): &(usize, &Node)| node.parent == index.checked_sub(1);
        self.nodes.iter().enumerate().take_while(follows).count()
    }
}

/// First index that a child of `parent` may have.
fn after(parent: Option<usize>) -> usize {
    parent.map_or(0, |parent| parent + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_twin_is_not_added_again_and_every_drafter_votes_once() {
        let vote = |source, match_len| Vote::new(source, Features::matched(match_len));
        let mut tree = Tree::chain(&[1, 2], Source::Model, Features::default());
        assert_eq!(tree.push(Node::new(1, None, vote(Source::PromptLookup, 7))), 0);
        assert_eq!(tree.push(Node::new(1, None, vote(Source::PromptLookup, 9))), 0);
        assert_eq!(tree.push(Node::new(3, Some(0), vote(Source::PromptLookup, 7))), 2);
        let voters = |node: usize| {
            tree.nodes()[node]
                .votes
                .iter()
                .map(|vote| (vote.drafter.source, vote.features.match_len))
                .collect()
        };
        let (both, one): (Vec<_>, Vec<_>) = (voters(0), voters(1));
        assert_eq!(both, [(Source::Model, 0), (Source::PromptLookup, 7)], "the first vote counts");
        assert_eq!((one, tree.len()), (vec![(Source::Model, 0)], 3));
    }

    #[test]
    fn what_is_behind_an_id_outside_the_vocabulary_goes_with_it() {
        let node = |token, parent| Node::new(token, parent, Vote::new(Source::Model, Features::default()));
        let mut tree = Tree::default();
        for (token, parent) in [(9, None), (1, None), (2, Some(0)), (3, Some(1)), (9, Some(3)), (4, Some(3))]
        {
            tree.push(node(token, parent));
        }
        assert_eq!(tree.clone().within(10), tree);
        let retained: Vec<_> = tree.within(9).nodes().iter().map(|node| (node.token, node.parent)).collect();
        assert_eq!(retained, [(1, None), (3, Some(0)), (4, Some(1))]);
    }
}
