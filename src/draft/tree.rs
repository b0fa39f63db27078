//! A draft: a tree of proposed tokens. A chain is a tree.
//!
//! Nodes are kept parents-first, so every prefix of the node list is itself a tree: cutting a draft to a
//! budget is a truncation.

use crate::units::TokenId;

/// Which drafter proposed a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Source {
    /// The longest recent match in the request's own context.
    PromptLookup,
    /// A local language model.
    Model,
}

impl Source {
    /// Every source.
    pub const ALL: [Self; 2] = [Self::PromptLookup, Self::Model];

    /// Its place in [`Source::ALL`].
    pub const fn index(self) -> usize {
        match self {
            Self::PromptLookup => 0,
            Self::Model => 1,
        }
    }

    /// The name in policies, metrics and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::PromptLookup => "prompt_lookup",
            Self::Model => "model",
        }
    }
}

/// What a drafter knows about a node before it is verified; all of it computed from the past and from q.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Features {
    /// Length of the matched context, in tokens (lookup drafters).
    pub match_len: u32,
    /// Top-1 less top-2 score of the drafter (model drafters).
    pub margin: f32,
}

/// One proposed token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Node {
    /// The proposed token.
    pub token: TokenId,
    /// Index of the parent node; `None` follows the context.
    pub parent: Option<usize>,
    /// Who proposed it.
    pub source: Source,
    /// Why.
    pub features: Features,
}

/// A draft. Invariant: a parent stands before its children, and siblings carry different tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tree {
    nodes: Vec<Node>,
}

impl Tree {
    /// A chain of tokens from one source.
    pub fn chain(tokens: &[TokenId], source: Source, features: Features) -> Self {
        let nodes = tokens
            .iter()
            .enumerate()
            .map(|(index, &token)| Node { token, parent: index.checked_sub(1), source, features })
            .collect();
        Self { nodes }
    }

    /// Appends a node and returns its index. A sibling with the same token is not doubled: its index comes
    /// back. A parent that does not exist makes the node follow the context.
    pub fn push(&mut self, node: Node) -> usize {
        let parent = node.parent.filter(|&parent| parent < self.nodes.len());
        if let Some(twin) = self.child(parent, node.token) {
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

    /// Whether nothing is proposed.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// Keeps the first `len` nodes.
    pub fn truncate(&mut self, len: usize) {
        self.nodes.truncate(len);
    }

    /// The child of `parent` that carries `token`.
    pub fn child(&self, parent: Option<usize>, token: TokenId) -> Option<usize> {
        self.nodes.iter().position(|node| node.parent == parent && node.token == token)
    }

    /// The tokens from the context down to and including `node`.
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

    /// How many nodes from the first on are a chain.
    pub fn stem(&self) -> usize {
        let follows = |(index, node): &(usize, &Node)| node.parent == index.checked_sub(1);
        self.nodes.iter().enumerate().take_while(follows).count()
    }

    /// Whether every node is the only child of its parent.
    pub fn is_chain(&self) -> bool {
        self.nodes.iter().enumerate().all(|(index, node)| node.parent == index.checked_sub(1))
    }
}
