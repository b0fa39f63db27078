//! Merges several drafts into one tree, cut to a budget by survival probability.
//!
//! Only one-hot nodes may be merged into a tree: it is verified by "the sample is a child", which
//! is exact for any set of children that was fixed before the sample was drawn.

use super::{Agreement, Budget, Node, Tree, Vote};
use crate::words::Shape;

/// The merged draft, and the probability of each node that it and all its ancestors are accepted.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Merged {
    /// The nodes in order of survival probability; any prefix is a tree.
    pub tree: Tree,
    /// Survival probabilities, 0 to 1, indexed by node, never rising.
    pub survival: Vec<f64>,
}

/// Merges drafts, cut to `budget`, for [`Shape::Chain`] to the likeliest path. `accept(vote,
/// company, depth)` is the probability by that vote that a node is accepted given that its parent
/// is; depth counts from 0. A node proposed twice carries both votes and the higher probability.
pub fn merge(
    drafts: &[Tree],
    budget: Budget,
    shape: Shape,
    accept: impl Fn(Vote, Agreement, usize) -> f64,
) -> Merged {
    let all = union(drafts);
    let mut reached: Vec<Reached> = Vec::with_capacity(all.len());
    for node in all.nodes() {
        let above = node.parent.and_then(|parent| reached.get(parent)).copied();
        let depth = above.map_or(0, |above| above.depth + 1);
        let above = above.map_or(1.0, |above| above.survival);
        let chance = node.votes.iter().map(|vote| accept(vote, node.company, depth)).fold(0.0, f64::max);
        reached.push(Reached { survival: (above * chance).clamp(0.0, above), depth });
    }
    cut(all, &reached, budget, shape)
}

/// Survival probability and depth of a node of the union.
#[derive(Clone, Copy)]
struct Reached {
    survival: f64,
    /// Counted from 0.
    depth: usize,
}

/// All nodes of all drafts, each once, with the other drafters' votes on them.
fn union(drafts: &[Tree]) -> Tree {
    let mut all = Tree::with_capacity(drafts.iter().map(Tree::len).sum());
    let mut placed: Vec<usize> = Vec::with_capacity(drafts.iter().map(Tree::len).max().unwrap_or(0));
    for draft in drafts {
        placed.clear();
        for node in draft.nodes() {
            let parent = node.parent.and_then(|parent| placed.get(parent).copied());
            placed.push(all.push(Node { parent, ..node.clone() }));
        }
    }
    if drafts.iter().filter(|draft| !draft.is_empty()).count() > 1 {
        all.note_agreement();
    }
    all
}

/// The best nodes, parents before children: the survival probability never rises along a path; ties
/// go to the shallower node, and then to the first one.
fn cut(all: Tree, reached: &[Reached], budget: Budget, shape: Shape) -> Merged {
    let mut order: Vec<(usize, Reached)> = reached.iter().copied().enumerate().collect();
    order.retain(|(_, reached)| reached.depth < budget.depth);
    order.sort_unstable_by(|(a, one), (b, other)| {
        other.survival.total_cmp(&one.survival).then(one.depth.cmp(&other.depth)).then(a.cmp(b))
    });
    if shape == Shape::Chain {
        let mut last = None;
        order.retain(|&(index, _)| {
            let follows = all.nodes().get(index).is_some_and(|node| node.parent == last);
            last = if follows { Some(index) } else { last };
            follows
        });
    }
    order.truncate(budget.nodes);
    let survival = order.iter().map(|(_, reached)| reached.survival).collect();
    Merged { tree: all.picked(order.iter().map(|&(index, _)| index)), survival }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_tree_the_likeliest_path_is_a_chain() {
        let model = Tree::chain(&[1, 2, 3], Source::Model, Features::default());
        let lookup = Tree::chain(&[1, 5, 6], Source::PromptLookup, Features::default());
        let accept = |vote: Vote, _, _| if vote.drafter.source == Source::Model { 0.9 } else { 0.5 };
        let budget = Budget { nodes: 9, depth: 9 };
        let merged = merge(&[lookup, model], budget, Shape::Chain, accept);
        assert_eq!(merged.tree.stem(), merged.tree.len());
        assert_eq!(merged.tree.path(2), [1, 2, 3]);
    }
    use crate::draft::{Features, Source};
    use proptest::prelude::*;

    fn accept(vote: Vote, _: Agreement, _depth: usize) -> f64 {
        match vote.drafter.source {
            Source::PromptLookup => 0.9,
            _ => 0.5,
        }
    }

    #[test]
    fn a_common_prefix_is_one_path_and_the_cut_is_by_survival_probability() {
        let lookup = Tree::chain(&[1, 2, 3], Source::PromptLookup, Features::default());
        let model = Tree::chain(&[1, 4, 5], Source::Model, Features::default());
        let merged = merge(&[model, lookup], Budget { nodes: 4, depth: 8 }, Shape::Tree, accept);
        let tokens: Vec<u32> = merged.tree.nodes().iter().map(|node| node.token).collect();
        assert_eq!(tokens, [1, 2, 3, 4]);
        assert_eq!(merged.tree.path(3), [1, 4]);
        assert!((merged.survival[2] - 0.729).abs() < 1e-12, "{:?}", merged.survival);
        let voters = merged.tree.nodes().iter().map(|node| node.votes.iter().count());
        assert_eq!(voters.collect::<Vec<_>>(), [2, 1, 1, 1], "the common node has both votes");
    }

    proptest! {
        #[test]
        fn any_cut_is_a_tree_within_its_budget(
            chains in proptest::collection::vec(proptest::collection::vec(0u32..3, 0..6), 0..4),
            nodes in 0usize..8, depth in 0usize..5, p in 0.0f64..=1.0,
        ) {
            let drafts: Vec<Tree> = chains
                .iter()
                .map(|chain| Tree::chain(chain, Source::Model, Features::default()))
                .collect();
            let merged = merge(&drafts, Budget { nodes, depth }, Shape::Tree, |_, _, _| p);
            prop_assert!(merged.tree.len() <= nodes && merged.survival.len() == merged.tree.len());
            prop_assert!(merged.survival.windows(2).all(|pair| pair[0] >= pair[1]));
            for node in 0..merged.tree.len() {
                let path = merged.tree.path(node);
                prop_assert!(path.len() <= depth);
                prop_assert!(chains.iter().any(|chain| chain.starts_with(&path)));
                prop_assert!(merged.tree.nodes()[node].parent.is_none_or(|parent| parent < node));
            }
        }
    }
}
