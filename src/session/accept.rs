//! The accept rule: what of a draft becomes the past.
//!
//! Exact is sample and match. The backend sampled a token after every prefix of the draft, or told the whole
//! distribution there, from which one is drawn here. Walk down: emit the sample, go on while it is a child of
//! the place it was drawn at. Every emitted token is a sample of the backend's own law at its own prefix, so the
//! law of the text is the backend's whatever was drafted, for one-hot drafts and any tree of them, and for targets
//! whose noise depends on the place alone.
//!
//! A lossy [`Rule`] may keep the first child of a place although the target chose another token. Whether it may is
//! settled, and its price charged to the [`Ledger`], by what was known before the place is decided: the law there, the
//! tolerance when the call was sent, the output so far. So the sum of the charges bounds the total variation of the
//! whole output, by the chain rule, on every path.
//!
//! Where the drafter shares the target's noise, the draft x and the sample y are not independent: Gumbel noise makes both
//! increasing in the noise of their own token and decreasing in that of all others, so by the inequality of Fortuin, Kasteleyn and
//! Ginibre P(y = x | x) ≥ p(x): x is put in y's place no more often than is charged, and the bound holds. It says nothing of a
//! token that another drafter proposed and that was chosen by what the first one drew, nor of the places behind it: there
//! ([`Judged::coupled`]) the whole chance of keeping x is charged, as if y were never x.

mod rule;
pub mod sampled;

pub use rule::{FLY_WINDOW, Known, Rule};

use crate::control::Tolerance;
use crate::draft::Tree;
use crate::units::{Dice, TokenId};
use crate::words::{Dist, DriftLimits, Ledger, Row, Verdict};

/// What a round brought.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Accepted {
    /// The tokens that become the past: the accepted run and one more, unless that was left open.
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

/// How draft tokens are judged: the rule, how far it may be relaxed, and what that may cost.
#[derive(Clone, Debug, PartialEq)]
pub struct Accept {
    /// The rule.
    pub rule: Rule,
    /// Tolerance of a lossy rule.
    pub tolerance: Tolerance,
    /// Most that may be charged to a whole output; `None`: any amount. It bounds the total-variation distance of the
    /// distribution of outputs.
    pub max_drift: Option<f64>,
    /// Most that may be charged per output token, on average so far.
    pub max_drift_rate: f64,
}

impl Default for Accept {
    fn default() -> Self {
        Self {
            rule: Rule::Exact,
            tolerance: Tolerance::default(),
            max_drift: Some(0.2),
            max_drift_rate: 0.02,
        }
    }
}

impl Accept {
    /// Whether it may ever accept what the target did not choose.
    pub fn is_lossy(&self) -> bool {
        self.rule != Rule::Exact && self.tolerance.max > 0.0
    }

    fn limits(&self) -> DriftLimits {
        DriftLimits { whole: self.max_drift, rate: self.max_drift_rate }
    }
}

/// A round to be judged.
pub struct Judged<'a> {
    /// What was drafted.
    pub draft: &'a Tree,
    /// What the backend says to it.
    pub verdict: &'a Verdict,
    /// Tokens of prompt and output before the first row.
    pub context: usize,
    /// Tokens of output before it.
    pub output: usize,
    /// Tolerance of a lossy rule, fixed when the call was sent; zero is exact.
    pub tolerance: f64,
    /// Which token is drafted first, or how many follow it, may depend on the target's noise in other ways than that a
    /// drafter drew the token itself with it.
    pub coupled: bool,
    /// Whether the output, with these accepted tokens, is free text, in which a rule may be relaxed.
    pub free: &'a dyn Fn(&[TokenId]) -> bool,
}

/// What is drawn here, each uniform in (0, 1) and tied to a place `depth` tokens behind the context.
pub trait Draws {
    /// Decides which token a distribution gives.
    fn token(&mut self, depth: usize) -> f64;

    /// Whether a chance of this probability comes true. The draw belongs to the place: asked twice, it is the same.
    fn chance(&mut self, depth: usize, probability: f64) -> bool;
}

/// Walks the draft by the samples, up to the first place that is not decided; no tokens if that is the first. `None` if
/// the verdict has more rows than the draft has places.
pub fn walk(
    round: &Judged<'_>,
    accept: &Accept,
    ledger: &mut Ledger,
    draws: &mut impl Draws,
) -> Option<Accepted> {
    let Judged { draft, verdict, .. } = *round;
    if verdict.rows.len() > draft.len() + 1 {
        return None;
    }
    let mut accepted = Accepted::default();
    let mut place = None;
    // Places behind a mismatch that passed: that the target chose the draft there has been looked at already.
    let mut seen = 0_usize;
    while let Some(row) = verdict.rows.get(place.map_or(0, |node| node + 1)) {
        let depth = accepted.tokens.len();
        let keep = match seen.checked_sub(1) {
            Some(left) => {
                seen = left;
                None
            }
            None => relaxed(round, place, row, accept, &accepted.tokens, ledger),
        };
        let kept = keep.filter(|keep| draws.chance(depth, keep.probability));
        let token = sampled(row, || draws.token(depth));
        let token = match kept {
            Some(Kept { token: child, window, .. }) if token != Some(child) => {
                if native(draft, verdict, place, child, window) {
                    seen = window;
                    ledger.substitutions += 1;
                    Some(child)
                } else {
                    token
                }
            }
            _ => token,
        };
        let Some(token) = token else { break };
        accepted.tokens.push(token);
        accepted.ends = row.ends && row.sample == Some(token);
        let next = if accepted.ends { None } else { draft.child(place, token) };
        let Some(node) = next else { break };
        accepted.nodes.push(node);
        place = Some(node);
    }
    Some(accepted)
}

/// A draft token that is kept although the target chose another one.
#[derive(Clone, Copy, Debug)]
struct Kept {
    token: TokenId,
    /// With this probability ...
    probability: f64,
    /// ... and only if the target itself chose so many draft tokens behind it.
    window: usize,
}

/// Whether and how the rule is relaxed at a place, charged to the ledger. Reads the law there, and no sample of this
/// round that is not accepted yet.
fn relaxed(
    round: &Judged<'_>,
    place: Option<usize>,
    row: &Row,
    accept: &Accept,
    before: &[TokenId],
    ledger: &mut Ledger,
) -> Option<Kept> {
    let Judged { draft, verdict, tolerance, output, .. } = *round;
    if tolerance <= 0.0 || accept.rule == Rule::Exact {
        return None;
    }
    // Of several children the first: chosen before anything is drawn.
    let node = draft.children(place).next()?;
    if !(round.free)(before) {
        return None;
    }
    let token = draft.nodes().get(node)?.token;
    let window = if accept.rule == Rule::Fly { FLY_WINDOW } else { 0 };
    let known = known(row, token, verdict, node);
    let charge = known.and_then(|known| {
        let keep = accept.rule.keeps(&known, tolerance)?;
        let native = follow(draft, node, window).map(|path| passes(draft, verdict, path));
        // A draft that ends within the window cannot pass.
        let native = native.unwrap_or(Some(0.0))?;
        let spent = if round.coupled && native > 0.0 { 1.0 } else { (1.0 - known.low) * native };
        Some((keep, keep * spent))
    });
    let Some((keep, charge)) = charge else {
        ledger.unknown += 1;
        return None;
    };
    let worth = charge > 0.0 && ledger.charge(charge, output + before.len(), accept.limits());
    worth.then_some(Kept { token, probability: keep, window })
}

/// The probability that the target itself chooses these nodes, one after the other; `None` where that is not known, or where
/// it will not be known whether it did.
fn passes(draft: &Tree, verdict: &Verdict, mut path: impl Iterator<Item = usize>) -> Option<f64> {
    path.try_fold(1.0, |p, node| {
        above(draft, verdict, node)?.sample?;
        Some(p * told(draft, verdict, node)?)
    })
}

/// The row at which a node was drafted.
fn above<'v>(draft: &Tree, verdict: &'v Verdict, node: usize) -> Option<&'v Row> {
    verdict.rows.get(draft.nodes().get(node)?.parent.map_or(0, |parent| parent + 1))
}

/// What is known at the place of a row about its child `node`.
fn known(row: &Row, token: TokenId, verdict: &Verdict, node: usize) -> Option<Known> {
    let told = verdict.rows.get(node + 1).and_then(|row| row.draft_p);
    Known::of(row.dist.as_ref()?, row.entropy, token, told)
}

/// The probability of a node under its parent's row, if that is known exactly.
fn told(draft: &Tree, verdict: &Verdict, node: usize) -> Option<f64> {
    if let Some(p) = verdict.rows.get(node + 1).and_then(|row| row.draft_p) {
        return Some(p);
    }
    let drafted = draft.nodes().get(node)?;
    let dist: &Dist = above(draft, verdict, node)?.dist.as_ref()?;
    let listed = dist.top.iter().find(|entry| entry.0 == drafted.token).map(|entry| entry.1);
    listed.or(dist.complete.then_some(0.0)).filter(|_| dist.slack <= 0.0)
}

/// The first so many nodes below `node`, always the first child; `None` if there are fewer.
fn follow(draft: &Tree, node: usize, nodes: usize) -> Option<impl Iterator<Item = usize>> {
    let mut path = Vec::with_capacity(nodes);
    let mut at = node;
    for _ in 0..nodes {
        at = draft.children(Some(at)).next()?;
        path.push(at);
    }
    Some(path.into_iter())
}

/// Whether the target itself chose the next `window` draft tokens behind `child`.
fn native(draft: &Tree, verdict: &Verdict, place: Option<usize>, child: TokenId, window: usize) -> bool {
    let path = draft.child(place, child).and_then(|node| follow(draft, node, window));
    let chose = |node: usize| {
        let drafted = draft.nodes().get(node)?;
        let row = above(draft, verdict, node)?;
        Some(row.sample == Some(drafted.token) && !row.ends)
    };
    path.is_some_and(|mut path| path.all(|node| chose(node) == Some(true)))
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
    /// What a round brought; `None` if the verdict does not fit the draft.
    fn walk(&mut self, round: &Judged<'_>) -> Option<Accepted>;

    /// The drift of the output so far.
    fn ledger(&self) -> Ledger;
}

/// The judge of one session.
#[derive(Clone, Debug)]
pub struct Judge {
    accept: Accept,
    ledger: Ledger,
    noise: u64,
}

impl Judge {
    /// A judge whose draws are those of the seed `noise`.
    pub fn new(accept: Accept, noise: u64) -> Self {
        Self { accept, ledger: Ledger::default(), noise }
    }
}

impl Walk for Judge {
    fn walk(&mut self, round: &Judged<'_>) -> Option<Accepted> {
        let mut draws = Seeded { seed: self.noise, context: round.context };
        walk(round, &self.accept, &mut self.ledger, &mut draws)
    }

    fn ledger(&self) -> Ledger {
        self.ledger
    }
}

/// Draws by seed and place: two streams, one for tokens and one for chances.
struct Seeded {
    seed: u64,
    context: usize,
}

impl Draws for Seeded {
    fn token(&mut self, depth: usize) -> f64 {
        Dice::at(self.seed, self.context + depth)
    }

    fn chance(&mut self, depth: usize, probability: f64) -> bool {
        Dice::at(Dice::mix(self.seed ^ CHANCE), self.context + depth) < probability
    }
}

/// Tells the stream of chances from that of tokens.
const CHANCE: u64 = 0x6368_616e_6365;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draft::{Features, Node, Source, Vote};
    use crate::words::Row;

    /// Draws in the order of the places.
    struct Listed<'a>(&'a [f64]);

    impl Draws for Listed<'_> {
        fn token(&mut self, depth: usize) -> f64 {
            self.0[depth]
        }

        fn chance(&mut self, _: usize, _: f64) -> bool {
            unreachable!("exact leaves nothing to chance")
        }
    }

    /// Exact, with these draws; the ledger stays empty.
    fn walked(draft: &Tree, verdict: &Verdict, noise: &[f64]) -> Option<Accepted> {
        let mut ledger = Ledger::default();
        let round =
            Judged { draft, verdict, context: 0, output: 0, tolerance: 1.0, coupled: false, free: &|_| true };
        let accepted = walk(&round, &Accept::default(), &mut ledger, &mut Listed(noise));
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
        let part =
            Row { dist: Some(Dist { top: vec![(1, 0.9)], complete: false, slack: 0.0 }), ..Row::default() };
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
