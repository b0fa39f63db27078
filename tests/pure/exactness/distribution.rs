//! Full enumeration: the exact distribution of the client's output, against that of plain decoding.
//!
//! Every random choice of the world is enumerated with its exact weight, over small vocabularies,
//! short drafts, all verification methods, the fallbacks from one method to the next, the ways in
//! which a backend reports the end of a text, and all patterns of switches.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::backend::{Ask, Manner, plain};
use super::bugs::Bug;
use super::toy::{Chance, Distribution, ScoringToy, Target, Toy, distance, distribution};
use super::world::{Case, Hooks, Outcome, play_judged};
use foretell_core::control::{self, Control, TemperatureBucket};
use foretell_core::draft::suffix::Segment;
use foretell_core::draft::{
    Agreement, Budget, Context, DrafterId, Features, LookupSpec, Ngram, Node, Origin, Phrases, Scope, Shared,
    Source, Spelling, Tree, Vote,
};
use foretell_core::session::accept::{self, Accept, Accepted, Draws, Judged, Walk};
use foretell_core::session::{Ending, Resources, Rules};
use foretell_core::units::TokenId;
use foretell_core::words::{Ledger, VerifyMethod};
use rstest::rstest;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Drafter {
    /// The lookup drafter in the session itself.
    Lookup,
    /// A chain of the target's favourites, sometimes with a wrong one.
    Chain,
    /// A bush: two children at every node.
    Bush,
    /// Proposals of the target's head, which come with its answers.
    Head,
    /// Every lookup drafter, with earlier texts, a prediction and phrases.
    Lookups,
    /// All of them, and the bush: one merged tree.
    Merged,
}

impl Drafter {
    fn asks_a_model(self) -> bool {
        matches!(self, Self::Chain | Self::Bush | Self::Merged)
    }
}

/// Token texts for the drafters that read text: parts of JSON, followed by letters.
#[derive(Debug)]
struct Parts;

impl Parts {
    const TEXTS: [&str; 12] = ["{\"b", "\":1}", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"];

    fn text(token: TokenId) -> &'static str {
        Self::TEXTS.get(token as usize).copied().unwrap_or("_")
    }

    fn of(tokens: &[TokenId]) -> String {
        tokens.iter().map(|&token| Self::text(token)).collect()
    }
}

impl Spelling for Parts {
    fn bytes(&self, token: TokenId) -> Vec<u8> {
        Self::text(token).as_bytes().to_vec()
    }

    /// The beginning of a token at the end of a text is that token: a draft may be wrong.
    fn tokens(&self, text: &str) -> Vec<(TokenId, usize)> {
        let mut at = 0;
        let mut tokens = Vec::new();
        while let Some(rest) = text.get(at..).filter(|rest| !rest.is_empty()) {
            let meets = |part: &&str| rest.starts_with(*part) || part.starts_with(rest);
            let token = Self::TEXTS.iter().position(meets).unwrap_or_default() as TokenId;
            at += Self::text(token).len().min(rest.len());
            tokens.push((token, at));
        }
        tokens
    }
}

#[test]
fn a_schema_in_the_prompt_affects_these_worlds() {
    let spec = LookupSpec::Phrasebook { phrases: Arc::default(), schemas: true };
    let mut drafter = spec.build(spec.source().into(), &shared()).unwrap();
    let mut context = Context::new([&spec], &shared());
    context.read(&[0, 1, 0, 1, 2], Origin::Prompt, |seen| drafter.observe(seen));
    context.read(&[2, 0], Origin::Output, |seen| drafter.observe(seen));
    let draft = drafter.draft(context.text(), Budget { nodes: 3, depth: 3 });
    assert_eq!((draft.len(), draft.path(0)), (1, vec![1]));
}

/// Every lookup drafter.
pub fn lookups() -> Vec<LookupSpec> {
    let phrase =
        |trigger: &[TokenId], continuation: &[TokenId]| (Parts::of(trigger), Parts::of(continuation));
    let phrases = Phrases::new(vec![phrase(&[2], &[0, 1]), phrase(&[1, 0], &[1, 1])]).unwrap();
    vec![
        LookupSpec::PromptLookup(Ngram { min: 1, max: 4 }),
        LookupSpec::Suffix(Scope::Tenant),
        LookupSpec::Prediction,
        LookupSpec::Phrasebook { phrases: Arc::new(phrases), schemas: true },
        LookupSpec::Head,
    ]
}

/// Shared state that they use in addition to the request.
pub fn shared() -> Shared {
    let earlier = Segment::build(&[(1, &[0, 1, 2, 1, 0, 0, 1, 2, 0, 1]), (2, &[1, 2, 0, 2, 1])]);
    Shared {
        of_tenant: Arc::new([Arc::new(earlier)]),
        prediction: Arc::new([0, 1, 1, 2]),
        spelling: Some(Arc::new(Parts)),
        proposes: true,
        ..Shared::default()
    }
}

pub fn node(token: TokenId, parent: Option<usize>) -> Node {
    Node::new(token, parent, Vote::new(Source::Model, Features::default()))
}

fn bush(target: impl Target, context: &[TokenId], gamma: usize, siblings: usize) -> Tree {
    let mut tree = Tree::default();
    let mut positions: Vec<Option<usize>> = vec![None];
    while let Some(position) = positions.first().copied() {
        positions.remove(0);
        let path = position.map(|node| tree.path(node)).unwrap_or_default();
        let full: Vec<TokenId> = context.iter().chain(&path).copied().collect();
        for rank in 0..siblings {
            if tree.len() == gamma {
                return tree;
            }
            positions.push(Some(tree.push(node(target.favourite(&full, rank), position))));
        }
    }
    tree
}

pub fn case(vocabulary: usize, drafter: Drafter, gamma: usize, methods: &[VerifyMethod]) -> Case {
    let letters = (0..vocabulary).map(|token| vec![b'a' + token as u8]).collect();
    let lookups = match drafter {
        Drafter::Lookup => vec![LookupSpec::PromptLookup(Ngram { min: 1, max: 4 })],
        Drafter::Head => vec![LookupSpec::Head],
        Drafter::Lookups | Drafter::Merged => lookups(),
        Drafter::Chain | Drafter::Bush => Vec::new(),
    };
    let rules = Rules { methods: methods.to_vec(), gamma_fixed: Some(gamma), lookups, ..Rules::default() };
    let resources = Resources {
        shared: shared(),
        // Any number is valid: the distribution is the same for each of several models.
        model: drafter.asks_a_model().then_some(2),
        ..Resources::default()
    };
    Case {
        prompt: vec![0, 1, 0, 1, 2],
        vocabulary: Arc::new(letters),
        ending: Ending { eos: vec![vocabulary as TokenId - 1], ..Ending::default() },
        max: 4,
        rules,
        resources,
        manner: Manner::default(),
        temperature: 0.0,
    }
}

pub fn draft(drafter: Drafter, target: impl Target, context: &[TokenId], gamma: usize) -> Tree {
    match drafter {
        Drafter::Lookup | Drafter::Head | Drafter::Lookups => Tree::default(),
        Drafter::Chain => bush(target, context, gamma, 1),
        Drafter::Bush | Drafter::Merged => bush(target, context, gamma, 2),
    }
}

pub fn key(text: &str, tokens: &[TokenId], finish: &str) -> String {
    format!("{text}|{tokens:?}|{finish}")
}

pub fn plain_distribution(target: impl Target, case: &Case) -> Distribution {
    distribution(|chance| {
        let mut sample = |ask: &Ask<'_>| chance.token(&target.weights(ask.context));
        let (text, tokens, finish) = plain(case, &mut sample);
        key(&text, &tokens, finish.name())
    })
}

/// Walks as shipped, with enumerated draws: one for each output position, shared by all requests
/// for it; unless a bug is planted.
struct Court<'a, 'o> {
    chance: &'a Chance<'o>,
    drawn: BTreeMap<usize, f64>,
    bug: Bug,
}

impl Walk for Court<'_, '_> {
    fn walk(&mut self, round: &Judged<'_>) -> Option<Accepted> {
        let result = self.bug.result(round.draft, round.result.clone());
        let mut ledger = Ledger::default();
        let asked = Judged { result: &result, ..*round };
        let mut draws = Keyed { court: self, context: round.context };
        let accepted = accept::walk(&asked, &Accept::default(), &mut ledger, &mut draws)?;
        assert_eq!(ledger, Ledger::default(), "exact costs nothing");
        Some(self.bug.accepted(round.draft, &result, accepted))
    }

    fn ledger(&self) -> Ledger {
        Ledger::default()
    }
}

/// The draws of a round that begins after `context` tokens.
struct Keyed<'c, 'a, 'o> {
    court: &'c mut Court<'a, 'o>,
    context: usize,
}

impl Draws for Keyed<'_, '_, '_> {
    fn token(&mut self, depth: usize) -> f64 {
        let Court { chance, drawn, bug } = &mut *self.court;
        let position = if *bug == Bug::DrawnPerCall { depth } else { self.context + depth };
        let third = 1.0 / 3.0;
        *drawn.entry(position).or_insert_with(|| ScoringToy::DRAWS[chance.pick(&[third, third, third])])
    }

    fn chance(&mut self, _: usize, _: f64) -> bool {
        unreachable!("exact leaves nothing to chance")
    }
}

/// One way to play a case.
#[derive(Clone, Copy, Debug)]
pub struct Way {
    pub drafter: Drafter,
    /// Bit n < 3: speculation is allowed at the n-th token event; bit 3: a plain request returns
    /// two tokens at once.
    pub switches: u32,
    pub bug: Bug,
}

fn outcome(target: impl Target, case: &Case, control: Control, way: Way, chance: &Chance<'_>) -> Outcome {
    let Way { drafter, switches, bug } = way;
    let court = Court { chance, drawn: BTreeMap::new(), bug };
    let unread = bug == Bug::SwitchOnUnread;
    let mut hooks = Hooks {
        sample: &mut |ask| chance.token(&target.weights(ask.context)),
        told: &mut |context| target.row(context),
        distribution: &mut |_| None,
        draft: &mut |context, gamma| draft(drafter, target, context, gamma),
        allow: &mut |event, ahead| if unread { ahead != Some(0) } else { switches >> event.min(2) & 1 == 1 },
        chunk: &mut || 1 + (switches as usize >> 3 & 1),
        chaos: &mut || None,
        wrong: bug.wrong(),
    };
    play_judged(case, control, court, &mut hooks)
}

/// Distribution of the client's output through the session.
pub fn session_distribution(target: impl Target, case: &Case, way: Way) -> Distribution {
    distribution(|chance| {
        let outcome = outcome(target, case, Control::new(), way, chance);
        let finish = outcome.summary.finish.expect("ended");
        let lost = way.bug == Bug::BonusLost;
        assert!(lost || outcome.summary.output_tokens as usize == outcome.tokens.len());
        key(&outcome.text, &outcome.tokens, finish.name())
    })
}

fn keeps_the_distribution(target: impl Target, case: &Case, drafter: Drafter) {
    let plain = plain_distribution(target, case);
    for switches in 0..16 {
        let distribution = session_distribution(target, case, Way { drafter, switches, bug: Bug::None });
        let tv = distance(&plain, &distribution);
        assert!(tv < 1e-12, "switches {switches:b}: {tv} in {case:?}");
    }
}

use Drafter::{Bush, Chain, Head, Lookup, Lookups, Merged};

#[rstest]
fn one_hot_drafts_keep_the_distribution(
    #[values(Lookup, Chain, Bush, Head, Lookups, Merged)] drafter: Drafter,
    #[values(VerifyMethod::FanOut, VerifyMethod::Tree)] method: VerifyMethod,
    #[values(3, 4)] vocabulary: usize,
    #[values(11, 42)] salt: u64,
) {
    for gamma in 1..=3 {
        let toy = Toy { vocabulary, salt: salt + gamma as u64 };
        let max = if vocabulary == 3 { 4 } else { 3 };
        keeps_the_distribution(toy, &Case { max, ..case(vocabulary, drafter, gamma, &[method]) }, drafter);
    }
}

/// The client's own request brings the first token, and the rest is asked for by ids.
#[rstest]
fn a_first_token_alone_keeps_the_distribution(
    #[values(Drafter::Lookup, Drafter::Chain, Drafter::Merged)] drafter: Drafter,
    #[values(&[VerifyMethod::FanOut], &[VerifyMethod::Score, VerifyMethod::FanOut])]
    methods: &[VerifyMethod],
    #[values(1, 2, 4)] max: usize,
) {
    let toy = Toy { vocabulary: 3, salt: 7 };
    let manner = Manner { first_token_alone: true, ..Manner::default() };
    keeps_the_distribution(toy, &Case { max, manner, ..case(3, drafter, 2, methods) }, drafter);
}

/// Sessions with a backend that returns distributions, takes chains only, leaves positions open,
/// has fewer lanes than the draft has nodes, or alone knows which tokens end a text.
#[rstest]
#[case::score(&[VerifyMethod::Score])]
#[case::score_then_fan_out(&[VerifyMethod::Score, VerifyMethod::FanOut])]
#[case::score_then_tree(&[VerifyMethod::Score, VerifyMethod::Tree])]
#[case::fan_out(&[VerifyMethod::FanOut])]
fn every_method_and_every_fallback_keeps_the_distribution(
    #[case] methods: &[VerifyMethod],
    #[values(Lookup, Chain, Bush, Head, Lookups, Merged)] drafter: Drafter,
    #[values(false, true)] special: bool,
    #[values(false, true)] ends: bool,
) {
    for gamma in 1..=3 {
        let target = ScoringToy { salt: 23 + gamma as u64, special };
        let mut case = case(4, drafter, gamma, methods);
        case.max = 5 - gamma;
        // A backend that alone knows the ends leaves positions open where one may be.
        case.manner = Manner { ends: ends && special, tails: special || ends, lanes: 2, ..Manner::default() };
        keeps_the_distribution(target, &case, drafter);
    }
}

/// Learnt state with so much acceptance and such inexpensive verify requests that the controller
/// decides to speculate.
fn confident(methods: &[VerifyMethod]) -> Control {
    let control = Control::new();
    control.with(|learnt| {
        (0..20).for_each(|_| learnt.costs.note_plain(0.010, 1, 1, control::Disturbance::default()));
        for &method in methods {
            for nodes in 0..4 {
                learnt.costs.verified(control::Way::by(method, 0), nodes, control::Shared::default(), 0.004);
            }
        }
        let resumed = control::Disturbance { resumed: true, ..control::Disturbance::default() };
        learnt.costs.note_plain(0.010, 1, 1, resumed);
        let lookup = Vote::new(Source::PromptLookup, Features::matched(2));
        for vote in [lookup, Vote::new(DrafterId::model(2), Features::default())] {
            (0..20).for_each(|_| {
                learnt.survival.observe(TemperatureBucket::Greedy, vote, Agreement::Alone, 0, true);
            });
        }
        learnt.costs.drafted(2, 4, 0.001);
    });
    control
}

#[rstest]
#[case::fan_out(&[VerifyMethod::FanOut])]
#[case::tree(&[VerifyMethod::Tree])]
#[case::score(&[VerifyMethod::Score, VerifyMethod::FanOut])]
fn the_controller_s_decisions_keep_the_distribution(
    #[case] methods: &[VerifyMethod],
    #[values(Drafter::Lookup, Drafter::Chain, Drafter::Bush, Drafter::Lookups)] drafter: Drafter,
) {
    let target = ScoringToy { salt: 17, special: false };
    let mut case = Case { max: 6, ..case(4, drafter, 2, methods) };
    case.rules.gamma_fixed = None;
    case.rules.gamma_max = 2;
    if !drafter.asks_a_model() {
        // Not every text has a match of two tokens.
        case.rules.lookups = vec![LookupSpec::PromptLookup(Ngram { min: 2, max: 4 })];
    }
    let (mut speculations, mut plain_count) = (0, 0);
    let distribution = distribution(|chance| {
        let way = Way { drafter, switches: 7, bug: Bug::None };
        let outcome = outcome(target, &case, confident(methods), way, chance);
        speculations += u32::from(outcome.summary.speculated);
        plain_count += u32::from(!outcome.summary.speculated);
        key(&outcome.text, &outcome.tokens, outcome.summary.finish.expect("ended").name())
    });
    let tv = distance(&plain_distribution(target, &case), &distribution);
    assert!(tv < 1e-12, "{tv}");
    assert!(speculations > 50 && plain_count > 0, "too tame: {speculations} speculated, {plain_count} plain");
}

#[test]
fn the_enumeration_itself_is_complete() {
    let toy = Toy { vocabulary: 4, salt: 3 };
    let distribution = plain_distribution(toy, &case(4, Drafter::Chain, 1, &[VerifyMethod::Tree]));
    assert!((distribution.values().sum::<f64>() - 1.0).abs() < 1e-12);
    assert_eq!(distribution.len(), 3_usize.pow(4) + (0..4).map(|n| 3_usize.pow(n)).sum::<usize>());
}

#[test]
fn a_scored_prompt_has_the_sampled_distribution_and_open_positions() {
    let (mut open, mut told) = (0, 0);
    for token in 0..4 {
        for len in 0..20 {
            let context = [vec![1; len], vec![token]].concat();
            let target = ScoringToy { salt: 5, special: true };
            match target.row(&context) {
                None => open += 1,
                Some(row) => {
                    told += 1;
                    let dist = row.dist.expect("nothing is sampled");
                    let weights = target.weights(&context);
                    assert!(dist.top.iter().all(|&(token, p)| (weights[token as usize] - p).abs() < 1e-12));
                    assert!(dist.complete && dist.top.iter().all(|entry| entry.0 != ScoringToy::END));
                }
            }
        }
    }
    assert!(open > 10 && told > 10, "{open} open, {told} told");
}
