//! Lossy rules by full enumeration: each rule's distribution is that of its formula, and the drift
//! ledger bounds the distance of the whole output's distribution from the target's. Planted bugs
//! must be caught.

use std::cell::RefCell;
use std::collections::BTreeMap;

use super::backend::{Ask, ranked};
use super::distribution::{Drafter, case, key, node, plain_distribution};
use super::toy::{Chance, Distribution, ScoringToy, Target, Toy, distance, distribution};
use super::world::{Case, Hooks, Outcome, play_judged};
use foretell_core::control::{Control, Tolerance};
use foretell_core::draft::Tree;
use foretell_core::session::accept::{self, Accept, Accepted, Draws, Judged, Rule, Walk};
use foretell_core::units::TokenId;
use foretell_core::words::{Dist, Ledger, Row, VerifyMethod, VerifyResult};
use rstest::rstest;

/// A bug in the implementation of a lossy rule.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Bug {
    None,
    /// As published, EARS never accepts a token with a probability below 0.01, even if the target
    /// itself samples it.
    ClampBelowP,
    /// Only a substitution that happened is charged.
    ChargedAfter,
    /// The rule reads the distribution before top-k.
    RawDistribution,
    /// A second child is relaxed after the first was not kept.
    TwoChildren,
    /// JSON is treated as free text.
    InsideJson,
    /// Of a probability between bounds, the upper bound is used.
    AcceptingBound,
    /// The load is read after the sample, and is higher if the token is refused.
    LoadAfterSample,
}

/// Walks as shipped, with enumerated random choices; unless a bug is planted.
struct Court<'a, 'o> {
    chance: &'a Chance<'o>,
    accept: Accept,
    ledger: Ledger,
    /// Known bounds of the draw of a position.
    drawn: BTreeMap<usize, (f64, f64)>,
    bug: Bug,
}

impl<'a, 'o> Court<'a, 'o> {
    fn new(chance: &'a Chance<'o>, accept: Accept, bug: Bug) -> Self {
        Self { chance, accept, ledger: Ledger::default(), drawn: BTreeMap::new(), bug }
    }
}

struct Keyed<'c, 'a, 'o> {
    court: &'c mut Court<'a, 'o>,
    context: usize,
}

impl Draws for Keyed<'_, '_, '_> {
    fn token(&mut self, _: usize) -> f64 {
        let third = 1.0 / 3.0;
        ScoringToy::DRAWS[self.court.chance.pick(&[third, third, third])]
    }

    fn chance(&mut self, depth: usize, probability: f64) -> bool {
        let (low, high) = self.court.drawn.entry(self.context + depth).or_insert((0.0, 1.0));
        if probability >= *high {
            return true;
        }
        if probability <= *low {
            return false;
        }
        let share = (probability - *low) / (*high - *low);
        let hit = self.court.chance.pick(&[share, 1.0 - share]) == 0;
        *(if hit { high } else { low }) = probability;
        hit
    }
}

impl Walk for Court<'_, '_> {
    fn walk(&mut self, round: &Judged<'_>) -> Option<Accepted> {
        let (bug, before, context) = (self.bug, self.ledger, round.context);
        let mut result = round.result.clone();
        let first = round.draft.nodes().first().map(|node| node.token);
        let refused = result.rows.first().is_some_and(|row| row.sample.is_some() && row.sample != first);
        let mut tolerance = round.tolerance;
        let always = |_: &[TokenId]| true;
        let free: &dyn Fn(&[TokenId]) -> bool = if bug == Bug::InsideJson { &always } else { round.free };
        match bug {
            Bug::AcceptingBound => {
                result.rows.iter_mut().filter_map(|row| row.dist.as_mut()).for_each(|dist| {
                    dist.top.iter_mut().for_each(|entry| entry.1 *= 1.0 + dist.slack);
                    dist.slack = 0.0;
                });
            }
            Bug::LoadAfterSample if !refused => tolerance = 0.0,
            Bug::RawDistribution => {
                let raw =
                    Dist { top: (0..3).map(|token| (token, 0.25)).collect(), complete: false, slack: 0.0 };
                result
                    .rows
                    .iter_mut()
                    .for_each(|row| (row.dist, row.draft_p) = (Some(raw.clone()), Some(0.25)));
            }
            _ => {}
        }
        let judged = Judged { result: &result, tolerance, free, ..*round };
        let (accept, mut ledger) = (self.accept.clone(), self.ledger);
        let mut draws = Keyed { court: self, context };
        let mut accepted = accept::walk(&judged, &accept, &mut ledger, &mut draws)?;
        match bug {
            Bug::ChargedAfter if ledger.substitutions == before.substitutions => {
                ledger.charged = before.charged;
            }
            Bug::ClampBelowP => {
                // A token that was accepted with a probability below 0.01 is refused and drawn
                // again.
                let unlikely = |node: &usize| result.rows[node + 1].draft_p.is_some_and(|p| p < 0.01);
                if let Some(at) = accepted.nodes.iter().position(unlikely) {
                    accepted.tokens.truncate(at);
                    accepted.nodes.truncate(at);
                    accepted.tokens.push(0);
                }
            }
            Bug::TwoChildren => {
                let position = accepted.nodes.last().copied();
                let second = round.draft.children(position).nth(1);
                let last = accepted.tokens.len() - 1;
                let hit = second.is_some() && self.chance.pick(&[0.2, 0.8]) == 0;
                if let Some(second) = second.filter(|_| hit) {
                    accepted.tokens[last] = round.draft.nodes()[second].token;
                }
            }
            _ => {}
        }
        self.ledger = ledger;
        Some(accepted)
    }

    fn ledger(&self) -> Ledger {
        self.ledger
    }
}

// ------------------------------------------------- One round against the formula

/// R(x) by the published formulas, implemented a second time.
fn published(rule: Rule, distribution: &[f64], x: usize, tau: f64) -> f64 {
    let (p, peak) = (distribution[x], distribution.iter().copied().fold(0.0, f64::max));
    if p == 0.0 {
        return 0.0;
    }
    let entropy: f64 = -distribution.iter().filter(|p| **p > 0.0).map(|p| p * p.ln()).sum::<f64>();
    let r = match rule {
        Rule::Ears { kappa } => {
            if p < 0.01 || p / peak < kappa {
                p
            } else {
                p + tau * (1.0 - peak)
            }
        }
        Rule::Typical { epsilon, delta } => {
            if p > f64::min(epsilon, delta * f64::exp(-entropy)) {
                p + tau * (1.0 - p)
            } else {
                p
            }
        }
        Rule::Exact => p,
    };
    f64::min(r, 1.0)
}

/// Distribution of a round's tokens by the formula: at each position the first child is emitted
/// with probability R(x).
fn analytic(
    target: impl Target,
    rule: Rule,
    tau: f64,
    context: &[TokenId],
    draft: &Tree,
    at: Option<usize>,
) -> Distribution {
    let distribution = target.weights(context);
    let first = draft.children(at).next().map(|node| draft.nodes()[node].token as usize);
    let mut out = Distribution::new();
    for (token, &p) in distribution.iter().enumerate() {
        let weight = match first {
            Some(x) if x == token => published(rule, &distribution, x, tau),
            Some(x) => p * (1.0 - published(rule, &distribution, x, tau)) / (1.0 - distribution[x]),
            None => p,
        };
        let token = token as TokenId;
        let next = draft.child(at, token);
        let rest = match next {
            Some(node) => analytic(target, rule, tau, &[context, &[token]].concat(), draft, Some(node)),
            None => Distribution::from([(String::new(), 1.0)]),
        };
        for (tail, share) in rest {
            *out.entry(format!("{token}.{tail}")).or_default() += weight * share;
        }
    }
    out
}

/// The verification result of a target that returns its distribution with every sample.
fn result(target: impl Target, chance: &Chance<'_>, context: &[TokenId], draft: &Tree) -> VerifyResult {
    let full = |position: Option<usize>| {
        [context, &position.map(|node| draft.path(node)).unwrap_or_default()].concat()
    };
    let rows = std::iter::once(None).chain((0..draft.len()).map(Some)).map(|position| {
        let distribution = target.weights(&full(position));
        let told = position.map(|node| {
            let drafted = &draft.nodes()[node];
            target.weights(&full(drafted.parent))[drafted.token as usize]
        });
        let entropy = -distribution.iter().filter(|p| **p > 0.0).map(|p| p * p.ln()).sum::<f64>();
        Row {
            dist: Some(ranked(&distribution, 3)),
            draft_p: told,
            entropy: Some(entropy),
            ..Row::of(chance.token(&distribution))
        }
    });
    VerifyResult { rows: rows.collect(), ..VerifyResult::default() }
}

/// Tokens in the format of the keys of a round's distribution.
fn written(tokens: &[TokenId]) -> String {
    tokens.iter().fold(String::new(), |text, token| text + &format!("{token}."))
}

fn accept_by(rule: Rule) -> Accept {
    let tolerance = Tolerance { temperature: Vec::new(), load: Vec::new(), max: 1.0 };
    Accept { rule, tolerance, max_drift: None, drift_per_100_tokens: 10_000.0 }
}

fn round_distribution(
    target: impl Target,
    rule: Rule,
    tau: f64,
    context: &[TokenId],
    draft: &Tree,
    bug: Bug,
) -> (Distribution, f64) {
    let charged = RefCell::new(0.0_f64);
    let found = distribution(|chance| {
        let result = result(target, chance, context, draft);
        let mut court = Court::new(chance, accept_by(rule), bug);
        let round = Judged {
            draft,
            result: &result,
            context: context.len(),
            output: 0,
            tolerance: tau,
            coupled: false,
            expected: 1.0,
            price: 0.0,
            worth: &[],
            free: &|_| true,
        };
        let accepted = court.walk(&round).expect("fits");
        let mut most = charged.borrow_mut();
        *most = most.max(court.ledger.charged);
        written(&accepted.tokens)
    });
    (found, charged.into_inner())
}

fn drafts(target: impl Target, context: &[TokenId]) -> Vec<Tree> {
    let favourite = |context: &[TokenId], rank| target.favourite(context, rank);
    let mut chains = Vec::new();
    for ranks in [[0, 0, 0], [1, 0, 1], [2, 1, 0], [1, 2, 2]] {
        let mut tree = Tree::default();
        let mut full = context.to_vec();
        for (depth, rank) in ranks.into_iter().enumerate() {
            let token = favourite(&full, rank);
            tree.push(node(token, depth.checked_sub(1)));
            full.push(token);
        }
        chains.push(tree);
    }
    let mut bush = Tree::default();
    bush.push(node(favourite(context, 1), None));
    bush.push(node(favourite(context, 0), None));
    let below = [context, &[favourite(context, 0)]].concat();
    bush.push(node(favourite(&below, 2), Some(1)));
    chains.push(bush);
    chains
}

/// A distribution with an unlikely token, to test the rules for those.
#[derive(Clone, Copy)]
struct Skewed(u64);

impl Target for Skewed {
    fn weights(self, context: &[TokenId]) -> Vec<f64> {
        let mut distribution = vec![0.6, 0.3, 0.095, 0.005];
        let turn = (context.len() + self.0 as usize + context.last().map_or(0, |&token| token as usize)) % 4;
        distribution.rotate_right(turn);
        distribution
    }
}

const EARS: Rule = Rule::Ears { kappa: 0.0 };
const RULES: [Rule; 3] = [EARS, Rule::Ears { kappa: 0.3 }, Rule::Typical { epsilon: 0.09, delta: 0.3 }];

fn has_its_distribution(target: impl Target, context: &[TokenId]) {
    for draft in drafts(target, context) {
        for rule in RULES {
            for tau in [0.0, 0.2, 0.7, 1.0] {
                let (found, charged) = round_distribution(target, rule, tau, context, &draft, Bug::None);
                let wanted = analytic(target, rule, tau, context, &draft, None);
                let off = distance(&found, &wanted);
                assert!(off < 1e-12, "{rule:?} {tau} {draft:?}: {off}");
                let tv = distance(&found, &analytic(target, Rule::Exact, 0.0, context, &draft, None));
                assert!(tv <= charged + 1e-12, "{rule:?} {tau}: {tv} of {charged}");
            }
        }
    }
}

#[rstest]
fn each_rule_has_the_distribution_of_its_formula(#[values(3, 8)] salt: u64) {
    has_its_distribution(Toy { vocabulary: 4, salt }, &[0, 1, 2]);
    has_its_distribution(Skewed(salt), &[0, 1, 2]);
}

#[test]
fn truncated_tokens_are_never_kept() {
    has_its_distribution(ScoringToy { salt: 7, special: false }, &[0, 1]);
}

// ---------------------------------------------- Whole outputs against the ledger

/// A target that returns bounds instead of probabilities at every third context.
#[derive(Clone, Copy)]
struct Between(ScoringToy);

impl Between {
    const SLACK: f64 = 0.25;
}

impl Target for Between {
    fn weights(self, context: &[TokenId]) -> Vec<f64> {
        self.0.weights(context)
    }

    fn row(self, context: &[TokenId]) -> Option<Row> {
        if !context.len().is_multiple_of(3) {
            return self.0.row(context);
        }
        let Dist { top, .. } = ranked(&self.0.weights(context), 3);
        let top = top.into_iter().map(|(token, p)| (token, p / (1.0 + Self::SLACK))).collect();
        Some(Row { dist: Some(Dist { top, complete: false, slack: Self::SLACK }), ..Row::default() })
    }
}

/// Result of enumerating a case.
struct Found {
    distribution: Distribution,
    /// Mean and maximum of the charges of the ledgers.
    mean: f64,
    most: f64,
    substitutions: f64,
    unknown: u32,
}

fn session_distribution(target: impl Target, case: &Case, drafter: Drafter, bug: Bug) -> Found {
    let sums = RefCell::new((0.0_f64, 0.0_f64, 0.0_f64, 0_u32));
    let drifts = distribution(|chance| {
        let outcome = outcome(target, case, drafter, bug, chance);
        let drift = outcome.summary.drift;
        let mut sums = sums.borrow_mut();
        sums.1 = sums.1.max(drift.charged);
        sums.3 = sums.3.max(drift.unknown);
        format!("{}|{}", drift.charged, drift.substitutions)
    });
    let mean_of = |position: usize| -> f64 {
        let value = |key: &str| {
            key.split('|').nth(position).and_then(|text| text.parse::<f64>().ok()).expect("a number")
        };
        drifts.iter().map(|(key, weight)| value(key) * weight).sum()
    };
    let found = distribution(|chance| {
        let outcome = outcome(target, case, drafter, bug, chance);
        key(&outcome.text, &outcome.tokens, outcome.summary.finish.expect("ended").name())
    });
    let (_, most, _, unknown) = sums.into_inner();
    Found { distribution: found, mean: mean_of(0), most, substitutions: mean_of(1), unknown }
}

fn outcome(target: impl Target, case: &Case, drafter: Drafter, bug: Bug, chance: &Chance<'_>) -> Outcome {
    let court = Court::new(chance, case.rules.accept.clone(), bug);
    let weights = |context: &[TokenId]| target.weights(context);
    let mut hooks = Hooks {
        sample: &mut |ask: &Ask<'_>| chance.token(&weights(ask.context)),
        told: &mut |context| target.row(context),
        distribution: &mut |context| Some(weights(context)),
        draft: &mut |context, gamma| drafted(target, drafter, context, gamma),
        allow: &mut |_, _| true,
        chunk: &mut || 1,
        chaos: &mut || None,
        wrong: super::world::Wrong::default(),
    };
    play_judged(case, Control::new(), court, &mut hooks)
}

/// The second choice first, so that a rule has something to relax.
fn drafted(target: impl Target, drafter: Drafter, context: &[TokenId], gamma: usize) -> Tree {
    let mut tree = Tree::default();
    let mut full = context.to_vec();
    let mut at = None;
    while tree.len() < gamma {
        let token = target.favourite(&full, 1);
        let parent = at;
        at = Some(tree.push(node(token, parent)));
        if drafter == Drafter::Bush && tree.len() < gamma {
            tree.push(node(target.favourite(&full, 0), parent));
        }
        full.push(token);
    }
    tree
}

fn lossy_case(rule: Rule, methods: &[VerifyMethod], drafter: Drafter, gamma: usize) -> Case {
    let mut case = case(4, Drafter::Chain, gamma, methods);
    case.max = 4;
    case.temperature = 0.8;
    case.rules.accept = accept_by(rule);
    case.rules.accept.tolerance.max = 0.6;
    debug_assert!(drafter != Drafter::Lookup);
    case
}

fn is_bounded(target: impl Target, case: &Case, drafter: Drafter) -> Found {
    let found = session_distribution(target, case, drafter, Bug::None);
    let tv = distance(&plain_distribution(target, case), &found.distribution);
    assert!(tv <= found.mean + 1e-12, "{tv} of {} in {case:?}", found.mean);
    found
}

#[rstest]
fn the_ledger_bounds_the_total_variation_of_whole_outputs(
    #[values(0, 1, 2)] rule: usize,
    #[values(Drafter::Chain, Drafter::Bush)] drafter: Drafter,
) {
    for gamma in 1..=3 {
        let case = lossy_case(RULES[rule], &[VerifyMethod::Tree], drafter, gamma);
        let found = is_bounded(
            Toy { vocabulary: 4, salt: 30 + gamma as u64 },
            &Case { max: 3, ..case.clone() },
            drafter,
        );
        assert!(found.mean > 0.01 && found.substitutions > 0.0, "too tame: {}", found.mean);
        let found = is_bounded(ScoringToy { salt: 11, special: false }, &case, drafter);
        assert!(found.mean > 0.01, "too tame: {}", found.mean);
    }
}

#[rstest]
fn between_bounds_the_ledger_bounds_it_as_well(#[values(0, 1)] rule: usize) {
    for gamma in 1..=3 {
        for special in [false, true] {
            let target = Between(ScoringToy { salt: 40, special });
            let methods = [VerifyMethod::Score, VerifyMethod::FanOut];
            let case = lossy_case(RULES[rule], &methods, Drafter::Chain, gamma);
            let found = is_bounded(target, &case, Drafter::Chain);
            assert!(found.mean > 0.01 && found.substitutions > 0.0, "too tame: {}", found.mean);
        }
    }
}

#[test]
fn without_probabilities_the_rule_is_exact() {
    let toy = Toy { vocabulary: 4, salt: 9 };
    let case = lossy_case(EARS, &[VerifyMethod::FanOut], Drafter::Chain, 2);
    let found = session_distribution(toy, &Case { max: 3, ..case.clone() }, Drafter::Chain, Bug::None);
    assert!(distance(&plain_distribution(toy, &Case { max: 3, ..case }), &found.distribution) < 1e-12);
    assert!(found.unknown > 0 && found.most == 0.0);
}

#[rstest]
#[case::of_the_whole_output(Some(0.15), 100.0)]
#[case::per_token(None, 0.05)]
fn no_output_drifts_beyond_its_limits(#[case] whole: Option<f64>, #[case] rate: f64) {
    let toy = Toy { vocabulary: 4, salt: 31 };
    let mut case = lossy_case(EARS, &[VerifyMethod::Tree], Drafter::Chain, 2);
    case.max = 3;
    case.rules.accept.tolerance.max = 0.1;
    (case.rules.accept.max_drift, case.rules.accept.drift_per_100_tokens) = (whole, 100.0 * rate);
    let found = is_bounded(toy, &case, Drafter::Chain);
    assert!(found.most <= whole.unwrap_or(rate * case.max as f64) + 1e-12, "{}", found.most);
    assert!(found.most > 0.0, "too tame");
}

#[rstest]
#[case::at_temperature_zero(|case: &mut Case| case.temperature = 0.0)]
#[case::without_tolerance(|case: &mut Case| case.rules.accept.tolerance.max = 0.0)]
fn nothing_is_relaxed(#[case] change: fn(&mut Case)) {
    let toy = Toy { vocabulary: 4, salt: 31 };
    let mut case = lossy_case(EARS, &[VerifyMethod::Tree], Drafter::Chain, 2);
    case.max = 3;
    change(&mut case);
    let found = session_distribution(toy, &case, Drafter::Chain, Bug::None);
    assert!(distance(&plain_distribution(toy, &case), &found.distribution) < 1e-12 && found.most == 0.0);
}

/// Token 0 opens an object: outputs that begin with it keep the target's own distribution.
fn json_case() -> Case {
    let mut case = lossy_case(EARS, &[VerifyMethod::Tree], Drafter::Chain, 3);
    case.max = 3;
    case.vocabulary = std::sync::Arc::new(vec![b"{".to_vec(), b"b".to_vec(), b"c".to_vec(), b"d".to_vec()]);
    case
}

/// Distance of the distribution of outputs that begin with `{` from the target's, conditioned on
/// that beginning.
fn inside_json(bug: Bug) -> f64 {
    let (toy, case) = (Toy { vocabulary: 4, salt: 31 }, json_case());
    let of = |distribution: &Distribution| -> Distribution {
        let json: Distribution = distribution
            .iter()
            .filter(|(text, _)| text.starts_with('{'))
            .map(|(k, w)| (k.clone(), *w))
            .collect();
        let all: f64 = json.values().sum();
        json.into_iter().map(|(text, weight)| (text, weight / all)).collect()
    };
    let found = session_distribution(toy, &case, Drafter::Chain, bug);
    distance(&of(&plain_distribution(toy, &case)), &of(&found.distribution))
}

#[test]
fn json_is_never_relaxed() {
    assert!(inside_json(Bug::None) < 1e-12);
    assert!(inside_json(Bug::InsideJson) > 1e-3, "not caught");
}

#[test]
fn a_clamp_below_p_is_caught() {
    let (target, context) = (Skewed(3), [0, 1, 2]);
    let mut draft = Tree::default();
    draft.push(node(target.favourite(&context, 3), None));
    let wanted = analytic(target, EARS, 0.5, &context, &draft, None);
    let off = |bug| distance(&round_distribution(target, EARS, 0.5, &context, &draft, bug).0, &wanted);
    assert!(off(Bug::None) < 1e-12);
    assert!(off(Bug::ClampBelowP) > 1e-3, "not caught");
}

/// One draft token at one position: the distance of the output distribution from the target's, and
/// the mean charge.
fn at_one_place(target: impl Target, rank: usize, between: bool, bug: Bug) -> (f64, f64) {
    let context = [0, 1, 2];
    let mut draft = Tree::default();
    draft.push(node(target.favourite(&context, rank), None));
    let found = distribution(|chance| {
        let mut result = result(target, chance, &context, &draft);
        if between {
            // Bounds and no sample: an open position is sampled afterwards.
            let mut dist = ranked(&target.weights(&context), 3);
            (dist.slack, dist.complete) = (Between::SLACK, false);
            result.rows = vec![Row { dist: Some(dist), ..Row::default() }];
        }
        let mut court = Court::new(chance, accept_by(EARS), bug);
        let round = Judged {
            draft: &draft,
            result: &result,
            context: 3,
            output: 0,
            tolerance: 0.6,
            coupled: false,
            expected: 1.0,
            price: 0.0,
            worth: &[],
            free: &|_| true,
        };
        let accepted = court.walk(&round).expect("fits").tokens;
        let token = accepted.first().copied().unwrap_or_else(|| chance.token(&target.weights(&context)));
        format!("{token}|{}", court.ledger.charged)
    });
    let mut tokens = Distribution::new();
    let mut mean = 0.0;
    for (key, weight) in &found {
        let (token, tv) = key.split_once('|').expect("two parts");
        *tokens.entry(token.to_owned()).or_default() += weight;
        mean += weight * tv.parse::<f64>().expect("a number");
    }
    let plain =
        (0..).zip(target.weights(&context)).map(|(token, p): (u32, f64)| (token.to_string(), p)).collect();
    (distance(&tokens, &plain), mean)
}

#[rstest]
#[case::charged_after_the_outcome(Bug::ChargedAfter, 1)]
#[case::load_read_after_the_sample(Bug::LoadAfterSample, 1)]
#[case::raw_for_processed(Bug::RawDistribution, 2)]
#[case::the_accepting_bound(Bug::AcceptingBound, 1)]
fn a_bug_of_the_ledger_is_caught(#[case] bug: Bug, #[case] rank: usize) {
    let target = ScoringToy { salt: 11, special: false };
    let between = bug == Bug::AcceptingBound;
    let (tv, mean) = at_one_place(target, rank, between, Bug::None);
    assert!(tv <= mean + 1e-12, "without the bug: {tv} of {mean}");
    let (tv, mean) = at_one_place(target, rank, between, bug);
    assert!(tv > mean + 1e-3, "not caught: {tv} of {mean}");
}

#[test]
fn a_second_relaxed_child_is_caught() {
    let (toy, context) = (Toy { vocabulary: 4, salt: 8 }, [0, 1, 2]);
    let bush = drafts(toy, &context).pop().expect("the bush");
    let wanted = analytic(toy, EARS, 0.5, &context, &bush, None);
    let off = |bug| distance(&round_distribution(toy, EARS, 0.5, &context, &bush, bug).0, &wanted);
    assert!(off(Bug::None) < 1e-12);
    assert!(off(Bug::TwoChildren) > 1e-3, "not caught");
}

/// A drafter that shares the target's noise together with one that does not: the token drafted
/// first depends on the former's draw, and so on the target's draw. Treated as independent, too
/// little would be charged.
#[test]
fn drafts_that_depend_on_the_target_s_noise_are_charged_in_full() {
    const P: [f64; 4] = [0.3, 0.05, 0.65, 0.0];
    // The model draws token 1 or 2, and for each the target has another distribution; their mixture
    // is P.
    const DRAWN: [f64; 2] = [0.6, 0.4];
    let given = [[0.396, 0.05 / 0.6, 1.0 - 0.396 - 0.05 / 0.6, 0.0], [0.156, 0.0, 0.844, 0.0]];
    let run = |coupled: bool| {
        let mean = RefCell::new(0.0);
        let found = distribution(|chance| {
            let model = chance.pick(&DRAWN);
            let sample = chance.token(&given[model]);
            // The other drafter proposes token 0, which comes before token 2 and after token 1.
            let first = u32::from(model == 0);
            let mut draft = Tree::default();
            draft.push(node(first, None));
            let row = Row { dist: Some(ranked(&P, 3)), ..Row::of(sample) };
            let result = VerifyResult { rows: vec![row], ..VerifyResult::default() };
            let mut court = Court::new(chance, accept_by(Rule::Ears { kappa: 0.3 }), Bug::None);
            let round = Judged {
                draft: &draft,
                result: &result,
                context: 3,
                output: 0,
                tolerance: 0.3,
                coupled,
                expected: 1.0,
                price: 0.0,
                worth: &[],
                free: &|_| true,
            };
            let token = court.walk(&round).expect("fits").tokens[0];
            // The charge depends on the model's draw alone.
            if model == 1 {
                *mean.borrow_mut() = DRAWN[1] * court.ledger.charged;
            }
            token.to_string()
        });
        let plain = (0..).zip(P).map(|(token, p): (u32, f64)| (token.to_string(), p)).collect();
        (distance(&found, &plain), mean.into_inner())
    };
    let (tv, charged) = run(true);
    assert!(tv > 0.05 && tv <= charged + 1e-12, "{tv} of {charged}");
    let (tv, charged) = run(false);
    assert!(tv > charged + 1e-3, "not caught: {tv} of {charged}");
}
