//! `head`: the tokens that the target's head proposes with each of its answers.
//!
//! A head is a small network on the target's hidden state (Medusa, arXiv 2401.10774; EAGLE, arXiv
//! 2401.15077). It runs where that state is, inside of the target, so its drafts come with a verify
//! result, and now and then with a plain token. They are a function of the context that they
//! follow.

use super::{Budget, DrafterId, Features, Feedback, Growing, Lookup, Node, Origin, Tree, Vote};
use crate::units::TokenId;
use crate::words::Proposal;

/// The drafter of one session.
#[derive(Debug)]
pub struct Head {
    id: DrafterId,
    /// Number of tokens of the context.
    seen: usize,
    /// The proposal and the number of tokens of the context that it follows.
    proposal: Option<(Proposal, usize)>,
    /// Tokens since the proposal came.
    since: Vec<TokenId>,
    /// Tokens of the output since the last proposal, or since its beginning.
    quiet: usize,
}

/// Output tokens without a proposal after which none is expected: a target that has a working head
/// sends one at least at every eighth.
const SILENT: usize = 16;

impl Head {
    /// A drafter without a proposal, which votes as `id`.
    pub const fn new(id: DrafterId) -> Self {
        Self { id, seen: 0, proposal: None, since: Vec::new(), quiet: 0 }
    }

    /// The proposal, if it follows the present context.
    fn fresh(&self) -> Option<&Proposal> {
        let (proposal, at) = self.proposal.as_ref()?;
        (self.seen == *at && self.since == proposal.behind).then_some(proposal)
    }
}

impl Lookup for Head {
    fn observe(&mut self, seen: &Feedback<'_>) {
        let before = self.seen;
        self.quiet += if seen.origin == Origin::Output { seen.tokens.len() } else { 0 };
        self.seen += seen.tokens.len();
        match &self.proposal {
            Some((proposal, at)) if self.seen <= *at => {
                // A prompt may be read after the first proposal came.
                let older = at.saturating_sub(proposal.behind.len()).saturating_sub(before);
                self.since.extend(seen.tokens.iter().skip(older));
            }
            _ => self.proposal = None,
        }
    }

    fn observe_proposal(&mut self, proposal: &Proposal, context: usize) {
        self.since.clear();
        self.quiet = 0;
        self.proposal = Some((proposal.clone(), context + proposal.behind.len()));
    }

    fn is_informed(&self) -> bool {
        self.fresh().is_some() || self.quiet > SILENT
    }

    fn draft(&self, _: &Growing, budget: Budget) -> Tree {
        let mut tree = Tree::default();
        let Some(proposal) = self.fresh() else { return tree };
        let mut open: Vec<Open> = Vec::new();
        let mut above = 1.0;
        for (depth, step) in proposal.steps.iter().take(budget.depth).enumerate() {
            let tokens = step.iter().enumerate();
            open.extend(tokens.map(|(rank, &(token, share))| {
                let share = probability(share);
                Open { survival: above * share, depth, rank, token, share }
            }));
            above *= step.first().map_or(0.0, |&(_, share)| probability(share));
        }
        open.sort_by(|a, b| b.survival.total_cmp(&a.survival).then(a.depth.cmp(&b.depth)));
        // The node of the first token of each position.
        let mut chain: Vec<usize> = Vec::new();
        for Open { depth, rank, token, share, .. } in open {
            if chain.len() < depth || tree.len() >= budget.nodes {
                break;
            }
            let parent = depth.checked_sub(1).and_then(|before| chain.get(before).copied());
            let features = Features { share, ..Features::default() };
            let node = tree.push(Node::new(token, parent, Vote::new(self.id, features)));
            if rank == 0 {
                chain.push(node);
            }
        }
        tree
    }

    fn bytes(&self) -> usize {
        let proposal = self.proposal.as_ref().map_or(0, |(proposal, _)| {
            let steps: usize = proposal.steps.iter().map(|step| size_of_val(step.as_slice())).sum();
            steps + size_of_val(proposal.behind.as_slice())
        });
        size_of::<Self>() + proposal + self.since.capacity() * size_of::<TokenId>()
    }
}

/// A number of the backend as a probability.
fn probability(share: f32) -> f32 {
    if share.is_nan() { 0.0 } else { share.clamp(0.0, 1.0) }
}

/// A proposed token.
struct Open {
    /// Probability that it is reached and accepted.
    survival: f32,
    /// Its position, and its index among the tokens of that position.
    depth: usize,
    rank: usize,
    token: TokenId,
    share: f32,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draft::Source;

    fn proposal(behind: &[TokenId]) -> Proposal {
        let steps = vec![vec![(5, 0.6), (6, 0.3)], vec![(7, 0.9), (8, 0.05)], vec![(9, 0.5), (1, 0.4)]];
        Proposal { behind: behind.to_vec(), steps }
    }

    fn read(head: &mut Head, tokens: &[TokenId]) {
        head.observe(&Feedback { tokens, origin: Origin::Output, text: &Growing::new() });
    }

    #[test]
    fn a_proposal_is_a_chain_with_alternatives_the_likeliest_first() {
        let mut head = Head::new(Source::Head.into());
        read(&mut head, &[1, 2, 3]);
        assert!(!head.is_informed());
        head.observe_proposal(&proposal(&[4]), 3);
        read(&mut head, &[4]);
        let nodes = |budget| {
            let tree = head.draft(&Growing::new(), budget);
            tree.nodes().iter().map(|node| (node.token, node.parent)).collect::<Vec<_>>()
        };
        let whole = [(5, None), (7, Some(0)), (6, None), (9, Some(1)), (1, Some(1)), (8, Some(0))];
        assert_eq!(nodes(Budget { nodes: 9, depth: 9 }), whole);
        assert_eq!(nodes(Budget { nodes: 1, depth: 9 }), [(5, None)]);
        assert_eq!(nodes(Budget { nodes: 9, depth: 1 }), [(5, None), (6, None)]);
    }

    #[test]
    fn a_proposal_may_come_before_the_prompt_is_read() {
        let mut head = Head::new(Source::Head.into());
        head.observe_proposal(&proposal(&[4]), 5);
        for piece in [&[1, 2, 3][..], &[9, 9, 4]] {
            assert!(!head.is_informed());
            read(&mut head, piece);
        }
        assert!(head.is_informed());
        assert!(head.bytes() < 512, "the prompt is not kept");
    }

    #[test]
    fn a_head_that_is_silent_has_nothing_to_say() {
        let mut head = Head::new(Source::Head.into());
        head.observe(&Feedback { tokens: &[1; 40], origin: Origin::Prompt, text: &Growing::new() });
        read(&mut head, &[1; SILENT]);
        assert!(!head.is_informed());
        read(&mut head, &[1]);
        assert!(head.is_informed() && head.draft(&Growing::new(), Budget { nodes: 9, depth: 9 }).is_empty());
        head.observe_proposal(&proposal(&[4]), 57);
        assert!(!head.is_informed(), "it drafts again");
    }

    #[test]
    fn a_proposal_behind_other_tokens_or_an_old_one_is_dropped() {
        let everything = Budget { nodes: 9, depth: 9 };
        for (after, speaks) in [(&[4, 2][..], true), (&[4, 3], false), (&[4], false), (&[4, 2, 1], false)] {
            let mut head = Head::new(Source::Head.into());
            read(&mut head, &[1]);
            head.observe_proposal(&proposal(&[4, 2]), 1);
            for &token in after {
                read(&mut head, &[token]);
            }
            assert_eq!(
                (head.is_informed(), !head.draft(&Growing::new(), everything).is_empty()),
                (speaks, speaks),
                "{after:?}"
            );
        }
    }
}
