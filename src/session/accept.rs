//! The accept rule: what of a draft becomes the past.
//!
//! Exact is sample and match. The backend sampled a token after every prefix of the draft, or told the whole
//! distribution there, from which one is drawn here. Walk down: emit the sample, go on while it is a child of
//! the place it was drawn at. Every emitted token is a sample of the backend's own law at its own prefix, so the
//! law of the text is the backend's whatever was drafted, for one-hot drafts and any tree of them, and for targets
//! whose noise depends on the place alone.

use crate::draft::Tree;
use crate::units::{Dice, TokenId};
use crate::words::{Dist, Ledger, Row, Verdict};

/// What a round brought.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Accepted {
    /// The tokens that become the past: the accepted run and one more.
    pub tokens: Vec<TokenId>,
    /// The draft nodes that were accepted, from the top down.
    pub nodes: Vec<usize>,
    /// The backend reported that the last of the tokens ends the text.
    pub ends: bool,
}

impl Accepted {
    /// Whether all its tokens are below `vocabulary`. What the answer holds beside the accepted path is not asked:
    /// a refusal for a sample that is not used would change how often those come that are.
    pub fn is_within(&self, vocabulary: TokenId) -> bool {
        self.tokens.iter().all(|&token| token < vocabulary)
    }
}

/// By which rule draft tokens are judged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rule {
    /// Sample and match: the text has the target's own law.
    #[default]
    Exact,
}

/// Walks the draft by the samples, up to the first place that is not decided; no tokens if that is the
/// first. `noise(depth)` is uniform in (0, 1) and belongs to the place `depth` tokens behind the context.
/// `None` if the verdict has more rows than the draft has places.
pub fn walk(
    draft: &Tree,
    verdict: &Verdict,
    rule: Rule,
    _ledger: &mut Ledger,
    mut noise: impl FnMut(usize) -> f64,
) -> Option<Accepted> {
    if verdict.rows.len() > draft.len() + 1 {
        return None;
    }
    let mut accepted = Accepted::default();
    let mut place = None;
    while let Some(row) = verdict.rows.get(place.map_or(0, |node| node + 1)) {
        let token = match rule {
            Rule::Exact => sampled(row, || noise(accepted.tokens.len())),
        };
        let Some(token) = token else { break };
        accepted.tokens.push(token);
        accepted.ends = row.ends;
        let next = if row.ends { None } else { draft.child(place, token) };
        let Some(node) = next else { break };
        accepted.nodes.push(node);
        place = Some(node);
    }
    Some(accepted)
}

/// The token that the target takes at a place: its own sample, or one drawn here from its whole distribution.
fn sampled(row: &Row, noise: impl FnOnce() -> f64) -> Option<TokenId> {
    row.sample
        .or_else(|| row.dist.as_ref().filter(|dist| dist.complete).and_then(|dist| drawn(dist, noise())))
}

/// The token on which `noise`, uniform in (0, 1), falls.
fn drawn(dist: &Dist, noise: f64) -> Option<TokenId> {
    let total: f64 = dist.top.iter().map(|entry| entry.1).sum();
    let mut left = noise * total;
    let fallen = dist.top.iter().find(|&&(_, p)| {
        left -= p;
        left <= 0.0
    });
    fallen.or(dist.top.last()).map(|entry| entry.0)
}

/// Judges the rounds of a session. [`Judge`] does in production; a test can put one with a planted bug in its
/// place, and everything around it is as shipped.
pub trait Walk {
    /// What a round brought whose first row follows `context` tokens of prompt and output; `None` if the verdict
    /// does not fit the draft.
    fn walk(&mut self, draft: &Tree, verdict: &Verdict, context: usize) -> Option<Accepted>;

    /// The drift of the output so far.
    fn ledger(&self) -> Ledger;
}

/// The judge of one session.
#[derive(Clone, Debug)]
pub struct Judge {
    rule: Rule,
    ledger: Ledger,
    noise: u64,
}

impl Judge {
    /// A judge whose draws, where the backend sends distributions and no samples, are those of the seed `noise`.
    pub fn new(rule: Rule, noise: u64) -> Self {
        Self { rule, ledger: Ledger::default(), noise }
    }
}

impl Walk for Judge {
    fn walk(&mut self, draft: &Tree, verdict: &Verdict, context: usize) -> Option<Accepted> {
        let seed = self.noise;
        walk(draft, verdict, self.rule, &mut self.ledger, |depth| Dice::at(seed, context + depth))
    }

    fn ledger(&self) -> Ledger {
        self.ledger
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draft::{Features, Node, Source, Vote};
    use crate::words::Row;

    /// Exact, with these draws; the ledger stays empty.
    fn walked(draft: &Tree, verdict: &Verdict, noise: &[f64]) -> Option<Accepted> {
        let mut ledger = Ledger::default();
        let accepted = walk(draft, verdict, Rule::Exact, &mut ledger, |depth| noise[depth]);
        assert_eq!(ledger, Ledger::default());
        accepted
    }

    fn walk_samples(draft: &Tree, verdict: &Verdict) -> Option<Accepted> {
        walked(draft, verdict, &[0.5; 8])
    }

    fn rows(samples: &[TokenId]) -> Verdict {
        let rows = samples.iter().copied().map(Row::of).collect();
        Verdict { rows, ..Verdict::default() }
    }

    #[test]
    fn a_chain_is_followed_to_the_first_mismatch_and_one_token_more_is_emitted() {
        let draft = Tree::chain(&[1, 2, 3], Source::Model, Features::default());
        let run = walk_samples(&draft, &rows(&[1, 2, 9, 4])).expect("fits");
        assert_eq!((run.tokens, run.nodes), (vec![1, 2, 9], vec![0, 1]));
        assert_eq!(walk_samples(&draft, &rows(&[1, 2, 3, 4])).expect("fits").tokens, [1, 2, 3, 4]);
        assert_eq!(walk_samples(&draft, &rows(&[1, 2, 3, 4, 5])), None);
    }

    #[test]
    fn the_walk_stops_before_the_first_place_that_is_not_decided() {
        let draft = Tree::chain(&[1, 2, 3], Source::Model, Features::default());
        let run = walk_samples(&draft, &rows(&[1, 2])).expect("fits");
        assert_eq!((run.tokens, run.nodes), (vec![1, 2], vec![0, 1]));
        assert_eq!(walk_samples(&draft, &rows(&[])).expect("fits"), Accepted::default());
    }

    #[test]
    fn where_the_backend_tells_a_distribution_the_token_is_drawn_from_it() {
        let draft = Tree::chain(&[1, 2], Source::Model, Features::default());
        let dist = || Row::undrawn(vec![(1, 0.5), (7, 0.3), (2, 0.2)]);
        let verdict = Verdict { rows: vec![dist(), dist(), Row::of(4)], ..Verdict::default() };
        let tokens = |noise: &[f64]| walked(&draft, &verdict, noise).expect("fits").tokens;
        assert_eq!(tokens(&[0.49, 0.81, 0.5]), [1, 2, 4]);
        assert_eq!(tokens(&[0.49, 0.79, 0.5]), [1, 7]);
        assert_eq!(tokens(&[0.51, 0.99, 0.5]), [7]);
    }

    #[test]
    fn what_is_known_in_part_decides_nothing() {
        let draft = Tree::chain(&[1], Source::Model, Features::default());
        let part = Row { dist: Some(Dist { top: vec![(1, 0.9)], complete: false }), ..Row::default() };
        let verdict = |first: Row| Verdict { rows: vec![first, Row::of(4)], ..Verdict::default() };
        assert_eq!(walk_samples(&draft, &verdict(part.clone())).expect("fits"), Accepted::default());
        let sampled = Row { sample: Some(1), ..part };
        assert_eq!(walk_samples(&draft, &verdict(sampled)).expect("fits").tokens, [1, 4]);
    }

    #[test]
    fn ids_are_judged_on_the_path_alone() {
        let mut draft = Tree::chain(&[1], Source::Model, Features::default());
        draft.push(Node::new(2, None, Vote::new(Source::Model, Features::default())));
        let within = |samples: &[TokenId]| walk_samples(&draft, &rows(samples)).expect("fits").is_within(10);
        assert!(within(&[1, 3, 10]), "the row of the sibling that was not sampled");
        assert!(!within(&[1, 10, 3]));
    }

    #[test]
    fn nothing_follows_a_token_that_ends_the_text() {
        let draft = Tree::chain(&[1, 2], Source::Model, Features::default());
        let mut verdict = rows(&[1, 2, 3]);
        verdict.rows[0].ends = true;
        let run = walk_samples(&draft, &verdict).expect("fits");
        assert_eq!((run.tokens, run.nodes, run.ends), (vec![1], vec![], true));
    }

    #[test]
    fn in_a_tree_the_row_of_the_child_that_was_sampled_counts() {
        let mut draft = Tree::default();
        for (token, parent) in [(1, None), (2, None), (5, Some(0)), (6, Some(1))] {
            draft.push(Node::new(token, parent, Vote::new(Source::Model, Features::default())));
        }
        let run = walk_samples(&draft, &rows(&[2, 5, 6, 7, 8])).expect("fits");
        assert_eq!((run.tokens, run.nodes), (vec![2, 6, 8], vec![1, 3]));
    }
}
