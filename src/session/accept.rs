//! The exact accept rule: sample and match.
//!
//! The backend sampled a token after every prefix of the draft. Walk down: emit the sample, go on while it is
//! a child of the place it was drawn at. Every emitted token is the backend's own sample at its own prefix,
//! so the law of the text is the backend's whatever was drafted, for one-hot drafts and any tree of them,
//! and for targets whose noise depends on the place alone.

use crate::draft::Tree;
use crate::units::TokenId;
use crate::words::Verdict;

/// What a round brought.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Accepted {
    /// The tokens that become the past: the accepted run and one more.
    pub tokens: Vec<TokenId>,
    /// The draft nodes that were accepted, from the top down.
    pub nodes: Vec<usize>,
    /// The backend said that the last of the tokens ends the text.
    pub ends: bool,
}

/// Walks the draft by the samples, up to the first place that is not decided; no tokens if that is the
/// first. `None` if the verdict has more rows than the draft has places.
pub fn walk(draft: &Tree, verdict: &Verdict) -> Option<Accepted> {
    if verdict.rows.len() > draft.len() + 1 {
        return None;
    }
    let mut accepted = Accepted::default();
    let mut place = None;
    loop {
        let Some(row) = verdict.rows.get(place.map_or(0, |node| node + 1)) else { return Some(accepted) };
        accepted.tokens.push(row.sample);
        if row.ends {
            accepted.ends = true;
            return Some(accepted);
        }
        let Some(node) = draft.child(place, row.sample) else { return Some(accepted) };
        accepted.nodes.push(node);
        place = Some(node);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draft::{Features, Node, Source};
    use crate::words::Row;

    fn rows(samples: &[TokenId]) -> Verdict {
        let rows = samples.iter().copied().map(Row::of).collect();
        Verdict { rows, computed: None }
    }

    #[test]
    fn a_chain_is_followed_to_the_first_mismatch_and_one_token_more_is_emitted() {
        let draft = Tree::chain(&[1, 2, 3], Source::Model, Features::default());
        let run = walk(&draft, &rows(&[1, 2, 9, 4])).expect("fits");
        assert_eq!((run.tokens, run.nodes), (vec![1, 2, 9], vec![0, 1]));
        assert_eq!(walk(&draft, &rows(&[1, 2, 3, 4])).expect("fits").tokens, [1, 2, 3, 4]);
        assert_eq!(walk(&draft, &rows(&[1, 2, 3, 4, 5])), None);
    }

    #[test]
    fn the_walk_stops_before_the_first_place_that_is_not_decided() {
        let draft = Tree::chain(&[1, 2, 3], Source::Model, Features::default());
        let run = walk(&draft, &rows(&[1, 2])).expect("fits");
        assert_eq!((run.tokens, run.nodes), (vec![1, 2], vec![0, 1]));
        assert_eq!(walk(&draft, &rows(&[])).expect("fits"), Accepted::default());
    }

    #[test]
    fn nothing_follows_a_token_that_ends_the_text() {
        let draft = Tree::chain(&[1, 2], Source::Model, Features::default());
        let mut verdict = rows(&[1, 2, 3]);
        verdict.rows[0].ends = true;
        let run = walk(&draft, &verdict).expect("fits");
        assert_eq!((run.tokens, run.nodes, run.ends), (vec![1], vec![], true));
    }

    #[test]
    fn in_a_tree_the_row_of_the_child_that_was_sampled_counts() {
        let mut draft = Tree::default();
        for (token, parent) in [(1, None), (2, None), (5, Some(0)), (6, Some(1))] {
            draft.push(Node { token, parent, source: Source::Model, features: Features::default() });
        }
        let run = walk(&draft, &rows(&[2, 5, 6, 7, 8])).expect("fits");
        assert_eq!((run.tokens, run.nodes), (vec![2, 6, 8], vec![1, 3]));
    }
}
