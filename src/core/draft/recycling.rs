//! `recycling`: the likely successors of the last token, by the target's last probabilities after
//! it (Token Recycling, arXiv 2408.08696).
//!
//! Verification results that were used have the probabilities of the likeliest tokens after every
//! node of their draft, the rejected ones too: they are functions of the context and of the draft.
//! They are kept per token, the latest first. A sample that did not become part of the context is
//! never read. Where a backend reports no probabilities, the tokens that followed a token in the
//! text are used instead, the latest first. From these rows a tree is grown, the likeliest node
//! first.
//!
//! A request has rows of its own, followed by those of earlier requests of its tenant.

mod successors;

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

pub use successors::{Row, Successors, WIDTH};

use super::{Budget, DrafterId, Features, Feedback, Lookup, Node, Tree, VerifyFeedback, Vote};
use crate::units::TokenId;

/// The drafter of one session. Memory: 32 bytes for every distinct token of its context or its
/// drafts, in pages of 8 tokens; the rows of earlier requests are shared.
#[derive(Debug)]
pub struct Recycling {
    id: DrafterId,
    own: Successors,
    earlier: Arc<Successors>,
    last: Option<TokenId>,
}

impl Recycling {
    /// A drafter that has seen nothing of its own request, with the rows of `earlier` ones, and
    /// votes as `id`.
    pub fn new(earlier: Arc<Successors>, id: DrafterId) -> Self {
        Self { id, own: Successors::default(), earlier, last: None }
    }

    /// The successors of a token: the request's own before those of earlier ones.
    fn row(&self, token: TokenId) -> Row {
        self.own.row(token).before(self.earlier.row(token))
    }
}

impl Lookup for Recycling {
    fn observe(&mut self, seen: &Feedback<'_>) {
        for &token in seen.tokens {
            if let Some(last) = self.last.replace(token) {
                self.own.follows(last, token);
            }
        }
    }

    fn observe_result(&mut self, told: &VerifyFeedback<'_>) {
        let nodes = told.draft.nodes().iter().map(|node| node.token);
        for (token, row) in std::iter::once(told.after).chain(nodes).zip(&told.result.rows) {
            if let Some(dist) = &row.dist {
                self.own.tell(token, &dist.top);
            }
        }
    }

    fn draft(&self, budget: Budget) -> Tree {
        let mut tree = Tree::default();
        let Some(last) = self.last.filter(|_| budget.depth > 0) else { return tree };
        let mut open = Frontier::default();
        open.offer(self.row(last), None, 1.0, 1);
        while tree.len() < budget.nodes
            && let Some(Open { survival, token, share, parent, depth, .. }) = open.candidates.pop()
        {
            let features = Features { share, ..Features::default() };
            let node = tree.push(Node::new(token, parent, Vote::new(self.id, features)));
            if depth < budget.depth {
                open.offer(self.row(token), Some(node), survival, depth + 1);
            }
        }
        tree
    }

    fn bytes(&self) -> usize {
        size_of::<Self>() + self.own.bytes()
    }

    fn successors(&self) -> Option<&Successors> {
        Some(&self.own)
    }
}

/// The tokens that may be taken next.
#[derive(Default)]
struct Frontier {
    candidates: BinaryHeap<Open>,
    offered: usize,
}

impl Frontier {
    /// Adds the successors in `row` of the node `parent`, whose survival probability is `above`.
    fn offer(&mut self, row: Row, parent: Option<usize>, above: f32, depth: usize) {
        for (token, share) in row.iter() {
            let order = Reverse(self.offered);
            self.offered += 1;
            self.candidates.push(Open { survival: above * share, order, token, share, parent, depth });
        }
    }
}

/// A token that may be the next node. The likeliest is the greatest; of equals the one that was
/// offered first.
#[derive(Debug)]
struct Open {
    survival: f32,
    order: Reverse<usize>,
    token: TokenId,
    share: f32,
    parent: Option<usize>,
    /// Nodes on its path, itself included.
    depth: usize,
}

impl Ord for Open {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.survival.total_cmp(&other.survival).then(self.order.cmp(&other.order))
    }
}

impl PartialOrd for Open {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Open {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Open {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draft::{Origin, Source};
    use crate::words::{Dist, Row as Answer, VerifyResult};

    fn drafter(earlier: Successors) -> Recycling {
        Recycling::new(Arc::new(earlier), Source::Recycling.into())
    }

    fn read(drafter: &mut Recycling, tokens: &[TokenId]) {
        drafter.observe(&Feedback { tokens, origin: Origin::Output });
    }

    fn paths(drafter: &Recycling, nodes: usize, depth: usize) -> Vec<Vec<TokenId>> {
        let tree = drafter.draft(Budget { nodes, depth });
        (0..tree.len()).map(|node| tree.path(node)).collect()
    }

    fn answer(top: &[(TokenId, f64)], sample: Option<TokenId>) -> Answer {
        let dist = Dist { top: top.to_vec(), complete: false, slack: 0.0 };
        Answer { sample, dist: (!top.is_empty()).then_some(dist), ..Answer::default() }
    }

    #[test]
    fn a_tree_grows_from_the_latest_successors() {
        let mut drafter = drafter(Successors::default());
        read(&mut drafter, &[1, 2, 3, 1, 4, 5, 1]);
        assert_eq!(paths(&drafter, 4, 4), [vec![4], vec![4, 5], vec![4, 5, 1], vec![2]]);
        assert_eq!(paths(&drafter, 3, 1), [[4], [2]]);
        assert!(paths(&drafter, 4, 0).is_empty());
    }

    #[test]
    fn every_row_of_a_result_is_read_and_no_sample_is() {
        let mut drafter = drafter(Successors::default());
        read(&mut drafter, &[1]);
        let draft = Tree::chain(&[2, 3], Source::Model, Features::default());
        let rows = vec![
            answer(&[(7, 0.9), (2, 0.05)], Some(7)),
            answer(&[(8, 0.6)], Some(4)),
            answer(&[], Some(99)),
        ];
        let result = VerifyResult { rows, ..VerifyResult::default() };
        drafter.observe_result(&VerifyFeedback { after: 1, draft: &draft, result: &result });
        assert_eq!(
            paths(&drafter, 9, 9),
            [vec![7], vec![2], vec![2, 8]],
            "2 was rejected, and 8 may follow it"
        );
        let share = |node: usize| {
            drafter.draft(Budget { nodes: 9, depth: 9 }).nodes()[node].votes.first().features.share
        };
        assert!((share(0) - 0.9).abs() < 0.003 && (share(2) - 0.6).abs() < 0.003);
        read(&mut drafter, &[3]);
        assert!(paths(&drafter, 9, 9).is_empty(), "its successors are not known");
    }

    #[test]
    fn rows_of_earlier_requests_follow_those_of_the_request() {
        let mut earlier = Successors::default();
        earlier.follows(1, 9);
        earlier.follows(1, 8);
        let mut drafter = drafter(earlier);
        read(&mut drafter, &[1, 9, 1]);
        assert_eq!(paths(&drafter, 3, 1), [[9], [8]]);
        assert_eq!(drafter.successors().map(Successors::tokens), Some(2), "its own only");
    }
}
