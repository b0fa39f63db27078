//! Continuations at a few positions, their frequencies, and the drafts made of them.
//!
//! The counts form a trie of the continuations, which is never built: with at most 32 positions a
//! node is a set of positions in one machine word, and its children are that set split by the next
//! token.

use std::collections::BinaryHeap;

use super::TokenId;
use super::order::SEPARATOR;

/// Maximum positions that are read for one match length.
pub const MANY: usize = 16;
/// Tokens that are read after a position: the maximum depth of a draft.
pub const AHEAD: usize = 32;

/// A set of positions, one bit each; a higher bit is a more recent position.
type Group = u32;

/// The form of a draft.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// One token after another, each the most frequent one.
    Path,
    /// The most probable tokens of all branches.
    Tree,
}

/// A token of a draft.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Proposal {
    pub token: TokenId,
    /// Index of the parent, which comes before it; `None` follows the context.
    pub parent: Option<usize>,
    /// Product of the shares from the context down to it, 0 to 1.
    pub chance: f64,
    /// Share of the positions at the parent that continue with this token, 0 to 1.
    pub share: f64,
    /// Number of the positions read whose continuation begins with this path.
    pub count: u32,
}

/// The expected continuations of a context.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Draft {
    /// The tokens, parents first.
    pub nodes: Vec<Proposal>,
    /// Sum of the nodes' `chance`: the expected number of accepted tokens.
    pub score: f64,
    /// Tokens of context that agree.
    pub match_len: usize,
    /// Positions whose context agrees for `match_len` tokens.
    pub positions: usize,
    /// Number of them that were read.
    pub sampled: usize,
}

/// A proposal in the queue. The greatest comes first; no two have the same rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    /// The likelier first, then the nearer, then the more recent: `chance`, [`AHEAD`] minus the
    /// depth, group. Packed into one number, because these comparisons are much of the time of a
    /// draft. (A probability is not negative, so its bits sort as it does.)
    rank: u128,
    token: TokenId,
    parent: Option<u32>,
    /// Positions at the parent.
    above: u32,
}

impl Candidate {
    fn chance(self) -> f64 {
        f64::from_bits((self.rank >> 64) as u64)
    }

    fn depth(self) -> usize {
        AHEAD - (self.rank >> 32) as u32 as usize
    }

    fn group(self) -> Group {
        self.rank as Group
    }

    fn proposal(self) -> Proposal {
        let count = self.group().count_ones();
        let parent = self.parent.map(|parent| parent as usize);
        Proposal { token: self.token, parent, chance: self.chance(), share: share(count, self.above), count }
    }
}

/// The continuations at up to [`MANY`] positions.
#[derive(Debug)]
pub(super) struct Continuations {
    /// The texts from the positions on, the oldest first, padded with separators. Copied, so that
    /// the memory latency is paid once and not per token.
    following: [[TokenId; AHEAD]; MANY],
    len: usize,
}

impl Continuations {
    /// Takes the first [`MANY`] of the given texts, the oldest first.
    pub fn new<'a>(texts: impl Iterator<Item = &'a [TokenId]>) -> Self {
        let mut this = Self { following: [[SEPARATOR; AHEAD]; MANY], len: 0 };
        for (position, text) in this.following.iter_mut().zip(texts) {
            position.iter_mut().zip(text).for_each(|(position, &token)| *position = token);
            this.len += 1;
        }
        this
    }

    /// A draft of at most `budget` tokens, each with a `chance` of at least `least`.
    pub fn draft(&self, shape: Shape, budget: usize, least: f64) -> Draft {
        let nodes = match shape {
            Shape::Path => self.path(budget, least),
            Shape::Tree => self.tree(budget, least),
        };
        let score = nodes.iter().map(|node| node.chance).sum();
        Draft { nodes, score, sampled: self.len, ..Draft::default() }
    }

    fn path(&self, budget: usize, least: f64) -> Vec<Proposal> {
        let mut nodes = Vec::new();
        let (mut group, mut chance, mut parent) = (self.all(), 1.0, None);
        for depth in 0..budget.min(AHEAD) {
            // The most recent child comes first, and is chosen unless another is more frequent.
            let most = |best: Option<(TokenId, Group)>, child: (TokenId, Group)| {
                Some(best.filter(|best| best.1.count_ones() >= child.1.count_ones()).unwrap_or(child))
            };
            let Some((token, child)) = self.children(group, depth).fold(None, most) else { break };
            let node = proposal(token, parent, chance, (child, group));
            if node.chance < least {
                break;
            }
            (group, chance, parent) = (child, node.chance, Some(nodes.len()));
            nodes.push(node);
        }
        nodes
    }

    fn tree(&self, budget: usize, least: f64) -> Vec<Proposal> {
        let mut nodes: Vec<Proposal> = Vec::with_capacity(budget.min(AHEAD));
        let mut waiting = BinaryHeap::with_capacity(2 * AHEAD);
        waiting.extend(self.candidates((self.all(), 0), None, (1.0, least)));
        while nodes.len() < budget
            && let Some(next) = waiting.pop()
        {
            let position = Some(nodes.len() as u32);
            waiting.extend(self.candidates((next.group(), next.depth()), position, (next.chance(), least)));
            nodes.push(next.proposal());
        }
        nodes
    }

    /// The children of a node that are likely enough.
    fn candidates(
        &self,
        (group, depth): (Group, usize),
        parent: Option<u32>,
        (chance, least): (f64, f64),
    ) -> impl Iterator<Item = Candidate> {
        let above = group.count_ones();
        let candidate = move |(token, child): (TokenId, Group)| {
            let chance = chance * share(child.count_ones(), above);
            let rest = (AHEAD - depth - 1) as u128;
            let rank = u128::from(chance.to_bits()) << 64 | rest << 32 | u128::from(child);
            (chance >= least).then_some(Candidate { rank, token, parent, above })
        };
        self.children(group, depth).filter_map(candidate)
    }

    /// The tokens `depth` tokens after the positions of `group`, each with its positions: the one
    /// whose latest position is the most recent first. Positions whose text has ended are in no
    /// group.
    fn children(&self, group: Group, depth: usize) -> impl Iterator<Item = (TokenId, Group)> {
        let mut remaining = group;
        std::iter::from_fn(move || {
            while let Some(newest) = remaining.checked_ilog2() {
                let Some(token) = self.token(newest, depth) else {
                    remaining &= !(1 << newest);
                    continue;
                };
                let child = self.carrying(token, remaining, depth);
                remaining &= !child;
                return Some((token, child));
            }
            None
        })
    }

    /// The positions of `group` where `token` is the token `depth` tokens later.
    fn carrying(&self, token: TokenId, group: Group, depth: usize) -> Group {
        let (mut remaining, mut found) = (group, 0);
        while remaining != 0 {
            let index = remaining.trailing_zeros();
            remaining &= remaining - 1;
            found |= Group::from(self.token(index, depth) == Some(token)) << index;
        }
        found
    }

    fn token(&self, index: u32, depth: usize) -> Option<TokenId> {
        let text = self.following.get(index as usize)?;
        text.get(depth).copied().filter(|&token| token != SEPARATOR)
    }

    fn all(&self) -> Group {
        ((1_u64 << self.len) - 1) as Group
    }
}

/// A child (`groups.0`) of a node (`groups.1`) that is reached with `chance`.
fn proposal(token: TokenId, parent: Option<usize>, chance: f64, groups: (Group, Group)) -> Proposal {
    let count = groups.0.count_ones();
    let share = share(count, groups.1.count_ones());
    Proposal { token, parent, chance: chance * share, share, count }
}

fn share(count: u32, above: u32) -> f64 {
    f64::from(count) / f64::from(above)
}

#[cfg(test)]
mod tests {
    use super::super::brute;
    use super::*;
    use proptest::prelude::*;

    fn tokens(draft: &Draft) -> Vec<(TokenId, Option<usize>, u32)> {
        draft.nodes.iter().map(|node| (node.token, node.parent, node.count)).collect()
    }

    fn count(texts: &[&[TokenId]]) -> Continuations {
        Continuations::new(texts.iter().copied())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(150))]

        #[test]
        fn counts_like_a_trie(
            texts in prop::collection::vec(prop::collection::vec(0_u32..4, 0..AHEAD + 1), 0..MANY + 1),
            cut in 0_usize..AHEAD,
            budget in 0_usize..70,
            least in prop_oneof![Just(0.0), 0.0..0.6_f64],
        ) {
            // Long texts only agree if they start alike.
            let alike: Vec<Vec<TokenId>> = texts.iter().map(|text| {
                let start = texts[0].get(..cut).unwrap_or_default();
                [start, text].concat().into_iter().take(AHEAD).collect()
            }).collect();
            for texts in [texts, alike] {
                let texts: Vec<&[TokenId]> = texts.iter().map(Vec::as_slice).collect();
                for shape in [Shape::Path, Shape::Tree] {
                    let expected = brute::draft(&texts, shape, budget, least);
                    prop_assert_eq!(count(&texts).draft(shape, budget, least), expected);
                }
            }
        }
    }

    #[test]
    fn a_path_takes_the_most_frequent_and_of_equals_the_most_recent() {
        let draft = count(&[&[1, 5], &[2, 6], &[2, 7], &[3]]).draft(Shape::Path, 9, 0.1);
        assert_eq!(tokens(&draft), [(2, None, 2), (7, Some(0), 1)]);
        assert_eq!((draft.score.to_bits(), draft.sampled), (0.75_f64.to_bits(), 4));
    }

    #[test]
    fn a_tree_takes_the_likeliest_tokens() {
        let texts: [&[TokenId]; 4] = [&[1, 5, 8], &[1, 5, 9], &[2, 6], &[2, 6]];
        let draft = count(&texts).draft(Shape::Tree, 5, 0.1);
        let expected = [(2, None, 2), (1, None, 2), (6, Some(0), 2), (5, Some(1), 2), (9, Some(3), 1)];
        assert_eq!(tokens(&draft), expected);
        assert_eq!(
            tokens(&count(&texts).draft(Shape::Tree, 9, 0.3)),
            expected[..4],
            "8 and 9 are too unlikely"
        );
    }

    #[test]
    fn a_text_that_has_ended_counts_at_its_parent_only() {
        let draft = count(&[&[1, SEPARATOR, 7], &[1], &[1, 2]]).draft(Shape::Path, 9, 0.3);
        let shares: Vec<f64> = draft.nodes.iter().map(|node| node.share).collect();
        assert_eq!((tokens(&draft), shares), (vec![(1, None, 3), (2, Some(0), 1)], vec![1.0, 1.0 / 3.0]));
    }

    #[test]
    fn reads_at_most_many_texts_and_ahead_tokens() {
        let long = [3; AHEAD + 5];
        let draft = count(&[&long[..]; MANY + 1]).draft(Shape::Tree, 99, 0.1);
        assert_eq!((draft.nodes.len(), draft.sampled, draft.nodes[31].count), (AHEAD, MANY, MANY as u32));
        assert_eq!(count(&[&long]).draft(Shape::Path, 99, 0.1).nodes.len(), AHEAD);
    }
}
