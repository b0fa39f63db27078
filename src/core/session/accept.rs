//! The acceptance rule: the tokens of a draft that join the context.
//!
//! Exact is sample and match. The backend sampled a token after every prefix of the draft, or
//! reported the complete distribution there, from which one is drawn here. Walk down: emit the
//! sample, go on while it is a child of the position at which it was drawn. Every emitted token is
//! a sample of the backend's distribution at that prefix, so the distribution of the text is the
//! backend's whatever was drafted, for one-hot drafts and any tree of them, and for targets whose
//! noise depends on the position alone.
//!
//! A lossy [`Rule`] may emit the first child of a position although the target chose another token.
//! If it may is settled, and its price charged to the [`Ledger`], by the facts known before the
//! position is decided: the distribution there, the tolerance when the request was sent, the output
//! so far. So the sum of the charges limits the total variation of the complete output, by the
//! chain rule, on every path.
//!
//! Where the drafter shares the target's noise, the draft x and the sample y are not independent:
//! Gumbel noise makes both increasing in the noise of their token and decreasing in that of all
//! others, so by the inequality of Fortuin, Kasteleyn and Ginibre P(y = x | x) ≥ p(x): x replaces y
//! no more often than is charged, and the limit applies. It does not apply to a token that another
//! drafter proposed and that was chosen by the first one's draw, nor to the positions behind it:
//! there ([`Judged::coupled`]) the complete probability of replacing y by x is charged, as if y
//! were never x.

mod rule;

pub use rule::{Known, Rule};

use crate::control::Tolerance;
use crate::draft::Tree;
use crate::units::{SplitMix64, TokenId};
use crate::words::{Dist, DriftLimits, Ledger, Row, VerifyResult};

/// The result of a round.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Accepted {
    /// The tokens that join the context: the accepted run and one more, unless that is undecided.
    pub tokens: Vec<TokenId>,
    /// Indices of the draft nodes that were accepted, from the top down.
    pub nodes: Vec<usize>,
    /// True if the backend reported that the last of the tokens ends the text.
    pub ends: bool,
}

impl Accepted {
    /// True if all its tokens are below `vocabulary`. The result outside the accepted path is not
    /// checked: rejecting it for a sample that is not used would change the frequency of those that
    /// are.
    pub fn is_within(&self, vocabulary: TokenId) -> bool {
        self.tokens.iter().all(|&token| token < vocabulary)
    }
}

/// The acceptance rule, its tolerance, and the limits of its drift.
#[derive(Clone, Debug, PartialEq)]
pub struct Accept {
    pub rule: Rule,
    /// Tolerance of a lossy rule, by temperature and load.
    pub tolerance: Tolerance,
    /// Maximum total variation charged to a complete output, spread over its expected length;
    /// `None`: any amount. It limits the total-variation distance of the distribution of outputs.
    pub max_drift: Option<f64>,
    /// Maximum total variation charged per 100 output tokens, on average so far.
    pub drift_per_100_tokens: f64,
}

impl Default for Accept {
    fn default() -> Self {
        Self {
            rule: Rule::Exact,
            tolerance: Tolerance::default(),
            max_drift: None,
            drift_per_100_tokens: 2.0,
        }
    }
}

impl Accept {
    /// True if it may ever accept a token that the target did not choose.
    pub fn is_lossy(&self) -> bool {
        self.rule != Rule::Exact && self.tolerance.max > 0.0
    }

    /// The limits of an output of which `expected` tokens are expected.
    fn limits(&self, expected: f64) -> DriftLimits {
        DriftLimits { total: self.max_drift, rate: self.allowed(expected) }
    }

    /// Total variation that each of the `expected` tokens of an output allows.
    pub fn allowed(&self, expected: f64) -> f64 {
        let rate = self.drift_per_100_tokens / 100.0;
        self.max_drift.map_or(rate, |total| rate.min(total / expected.max(1.0)))
    }
}

/// A round to be judged.
pub struct Judged<'a> {
    pub draft: &'a Tree,
    /// The backend's verification result for it.
    pub result: &'a VerifyResult,
    /// Tokens of prompt and output before the first row.
    pub context: usize,
    /// Tokens of output before it.
    pub output: usize,
    /// Tolerance of a lossy rule, 0 to 1, fixed when the verify request was sent; zero is exact.
    pub tolerance: f64,
    /// The choice of the first draft token, or the number of tokens behind it, may depend on the
    /// target's noise in more ways than through the draw of the token itself.
    pub coupled: bool,
    /// Tokens expected of the complete output.
    pub expected: f64,
    /// Tokens that a unit of drift has to bring.
    pub price: f64,
    /// Tokens that are expected to follow if a node is accepted, by node; those beyond the end
    /// bring one.
    pub worth: &'a [f64],
    /// True if the output, with these accepted tokens, is free text, in which a rule may be
    /// relaxed.
    pub free: &'a dyn Fn(&[TokenId]) -> bool,
}

/// Random numbers drawn here, each uniform in (0, 1) and tied to the position `depth` tokens behind
/// the context.
pub trait Draws {
    /// Number that selects a token of a distribution.
    fn token(&mut self, depth: usize) -> f64;

    /// True with this probability (0 to 1). The draw belongs to the position: a second call returns
    /// the same.
    fn chance(&mut self, depth: usize, probability: f64) -> bool;
}

/// Walks the draft by the samples, up to the first undecided position; no tokens if that is the
/// first. `None` if the result has more rows than the draft has positions.
pub fn walk(
    round: &Judged<'_>,
    accept: &Accept,
    ledger: &mut Ledger,
    draws: &mut impl Draws,
) -> Option<Accepted> {
    let Judged { draft, result, .. } = *round;
    if result.rows.len() > draft.len() + 1 {
        return None;
    }
    let mut accepted = Accepted::default();
    let mut position = None;
    while let Some(row) = result.rows.get(position.map_or(0, |node| node + 1)) {
        let depth = accepted.tokens.len();
        let relaxed = relaxed(round, position, row, accept, &accepted.tokens, ledger);
        let substitute = relaxed.filter(|relaxed| draws.chance(depth, relaxed.probability));
        let token = match (target_token(row, || draws.token(depth)), substitute) {
            (token, Some(Substitution { token: child, .. })) if token != Some(child) => {
                ledger.substitutions += 1;
                Some(child)
            }
            (token, _) => token,
        };
        let Some(token) = token else { break };
        accepted.tokens.push(token);
        accepted.ends = row.ends && row.sample == Some(token);
        let next = if accepted.ends { None } else { draft.child(position, token) };
        let Some(node) = next else { break };
        accepted.nodes.push(node);
        position = Some(node);
    }
    Some(accepted)
}

/// A draft token that may replace the target's choice, with this probability.
#[derive(Clone, Copy, Debug)]
struct Substitution {
    token: TokenId,
    probability: f64,
}

/// The relaxation of the rule at a position, charged to the ledger. Reads the distribution there,
/// and no sample of this round that is not accepted yet.
fn relaxed(
    round: &Judged<'_>,
    position: Option<usize>,
    row: &Row,
    accept: &Accept,
    before: &[TokenId],
    ledger: &mut Ledger,
) -> Option<Substitution> {
    let Judged { draft, result, tolerance, output, .. } = *round;
    if tolerance <= 0.0 || accept.rule == Rule::Exact {
        return None;
    }
    // Of several children the first: chosen before anything is drawn.
    let node = draft.children(position).next()?;
    if !(round.free)(before) {
        return None;
    }
    let token = draft.nodes().get(node)?.token;
    let known = known(row, token, result, node);
    let charge = known.and_then(|known| {
        let replaced = accept.rule.replacement_probability(&known, tolerance)?;
        let gain = replaced * (1.0 - known.low);
        Some((replaced, if round.coupled { replaced } else { gain }, gain))
    });
    let Some((probability, charge, gain)) = charge else {
        ledger.unknown += 1;
        return None;
    };
    let brings = gain * round.worth.get(node).copied().unwrap_or(1.0);
    if charge <= 0.0 || brings < round.price * charge {
        return None;
    }
    let within = ledger.charge(charge, output + before.len(), accept.limits(round.expected));
    within.then_some(Substitution { token, probability })
}

/// Known figures at the position of a row for its child `node`.
fn known(row: &Row, token: TokenId, result: &VerifyResult, node: usize) -> Option<Known> {
    let reported = result.rows.get(node + 1).and_then(|row| row.draft_p);
    Known::of(row.dist.as_ref()?, row.entropy, token, reported)
}

/// The token that the target takes at a position: its sample, or one drawn here from its complete
/// distribution.
fn target_token(row: &Row, noise: impl FnOnce() -> f64) -> Option<TokenId> {
    row.sample
        .or_else(|| row.dist.as_ref().filter(|dist| dist.complete).and_then(|dist| drawn(dist, noise())))
}

/// The token at the quantile `noise`, uniform in (0, 1).
fn drawn(dist: &Dist, noise: f64) -> Option<TokenId> {
    let total: f64 = dist.top.iter().map(|entry| entry.1).sum();
    let mut remaining = noise * total;
    let fallen = dist.top.iter().find(|&&(_, p)| {
        remaining -= p;
        remaining <= 0.0
    });
    fallen.or(dist.top.last()).map(|entry| entry.0)
}

/// Judges the rounds of a session. [`Judge`] is used in production; a test can replace it by one
/// with a planted bug, with all the code around it as shipped.
pub trait Walk {
    /// The result of a round; `None` if the verification result does not fit the draft.
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
    /// A judge whose random numbers are those of the seed `noise`.
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

/// Random numbers by seed and position: two streams, one for tokens and one for chances.
struct Seeded {
    seed: u64,
    context: usize,
}

impl Draws for Seeded {
    fn token(&mut self, depth: usize) -> f64 {
        SplitMix64::at(self.seed, self.context + depth)
    }

    fn chance(&mut self, depth: usize, probability: f64) -> bool {
        SplitMix64::at(SplitMix64::mix(self.seed ^ CHANCE), self.context + depth) < probability
    }
}

/// Separates the stream of chances from that of tokens.
const CHANCE: u64 = 0x6368_616e_6365;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draft::{Features, Node, Source, Vote};
    use crate::words::Row;

    /// Random numbers in the order of the positions.
    struct Listed<'a>(&'a [f64]);

    impl Draws for Listed<'_> {
        fn token(&mut self, depth: usize) -> f64 {
            self.0[depth]
        }

        fn chance(&mut self, _: usize, _: f64) -> bool {
            unreachable!("exact leaves nothing to chance")
        }
    }

    /// Exact, with these random numbers; the ledger stays empty.
    fn walked(draft: &Tree, result: &VerifyResult, noise: &[f64]) -> Option<Accepted> {
        let mut ledger = Ledger::default();
        let round = Judged {
            draft,
            result,
            context: 0,
            output: 0,
            tolerance: 1.0,
            coupled: false,
            expected: 100.0,
            price: 1.0,
            worth: &[],
            free: &|_| true,
        };
        let accepted = walk(&round, &Accept::default(), &mut ledger, &mut Listed(noise));
        assert_eq!(ledger, Ledger::default());
        accepted
    }

    fn walk_samples(draft: &Tree, result: &VerifyResult) -> Option<Accepted> {
        walked(draft, result, &[0.5; 8])
    }

    fn rows(samples: &[TokenId]) -> VerifyResult {
        let rows = samples.iter().copied().map(Row::of).collect();
        VerifyResult { rows, ..VerifyResult::default() }
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
    fn the_walk_stops_before_the_first_undecided_position() {
        let draft = Tree::chain(&[1, 2, 3], Source::Model, Features::default());
        let run = walk_samples(&draft, &rows(&[1, 2])).expect("fits");
        assert_eq!((run.tokens, run.nodes), (vec![1, 2], vec![0, 1]));
        assert_eq!(walk_samples(&draft, &rows(&[])).expect("fits"), Accepted::default());
    }

    #[test]
    fn where_the_backend_reports_a_distribution_the_token_is_drawn_from_it() {
        let draft = Tree::chain(&[1, 2], Source::Model, Features::default());
        let dist = || Row::undrawn(vec![(1, 0.5), (7, 0.3), (2, 0.2)]);
        let result = VerifyResult { rows: vec![dist(), dist(), Row::of(4)], ..VerifyResult::default() };
        let tokens = |noise: &[f64]| walked(&draft, &result, noise).expect("fits").tokens;
        assert_eq!(tokens(&[0.49, 0.81, 0.5]), [1, 2, 4]);
        assert_eq!(tokens(&[0.49, 0.79, 0.5]), [1, 7]);
        assert_eq!(tokens(&[0.51, 0.99, 0.5]), [7]);
    }

    #[test]
    fn a_partial_distribution_decides_nothing() {
        let draft = Tree::chain(&[1], Source::Model, Features::default());
        let part =
            Row { dist: Some(Dist { top: vec![(1, 0.9)], complete: false, slack: 0.0 }), ..Row::default() };
        let result = |first: Row| VerifyResult { rows: vec![first, Row::of(4)], ..VerifyResult::default() };
        assert_eq!(walk_samples(&draft, &result(part.clone())).expect("fits"), Accepted::default());
        let sampled = Row { sample: Some(1), ..part };
        assert_eq!(walk_samples(&draft, &result(sampled)).expect("fits").tokens, [1, 4]);
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
        let mut result = rows(&[1, 2, 3]);
        result.rows[0].ends = true;
        let run = walk_samples(&draft, &result).expect("fits");
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

    /// Every chance is taken.
    struct Always;

    impl Draws for Always {
        fn token(&mut self, _: usize) -> f64 {
            0.5
        }

        fn chance(&mut self, _: usize, probability: f64) -> bool {
            probability > 0.0
        }
    }

    #[test]
    fn a_position_is_relaxed_only_if_the_tokens_that_follow_are_worth_its_charge() {
        let draft = Tree::chain(&[1, 2], Source::Model, Features::default());
        let dist = Dist { top: vec![(7, 0.5), (1, 0.3), (2, 0.2)], complete: true, slack: 0.0 };
        let first = Row { dist: Some(dist), ..Row::of(7) };
        let result = VerifyResult { rows: vec![first, Row::of(2), Row::of(4)], ..VerifyResult::default() };
        let rule = Rule::Ears { kappa: 0.0 };
        let accept = Accept { rule, drift_per_100_tokens: 100.0, ..Accept::default() };
        let relaxed = |price, coupled| {
            let mut ledger = Ledger::default();
            let round = Judged {
                draft: &draft,
                result: &result,
                context: 0,
                output: 9,
                tolerance: 0.5,
                coupled,
                expected: 100.0,
                price,
                worth: &[3.0, 1.0],
                free: &|_| true,
            };
            let run = walk(&round, &accept, &mut ledger, &mut Always).expect("fits");
            (run.tokens.first() == Some(&1), ledger.charged > 0.0)
        };
        assert_eq!(relaxed(2.9, false), (true, true));
        assert_eq!(relaxed(3.1, false), (false, false), "three tokens follow");
        assert_eq!(relaxed(2.9, true), (false, false), "a coupled draft is charged in full");
        assert_eq!(relaxed(2.0, true), (true, true));
    }
}
