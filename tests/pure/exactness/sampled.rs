//! Sampled drafts by full enumeration: a text produced by rounds of sampled chains, rounds of
//! one-hot drafts and plain tokens has the target's own distribution. Planted bugs must be caught.
//!
//! The chain, the coins and the tokens after a run are enumerated with their exact weights. A bug
//! is in the input of the shipped verification, in its coins, or in the use of its result.

use std::collections::BTreeMap;

use super::distribution::{Drafter, case, key, plain_distribution};
use super::toy::{Chance, Distribution as Texts, Target, Toy, distance, distribution};
use super::world::{Case, Hooks, Wrong, play_judged};
use foretell_core::control::Control;
use foretell_core::draft::{Draft, Features, Sampled, Stop, chance_by_entropy};
use foretell_core::session::accept::sampled::{Kept, verify};
use foretell_core::session::accept::{Accept, Judge};
use foretell_core::units::TokenId;
use foretell_core::words::{Distribution, Row, VerifyMethod};
use rstest::rstest;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Bug {
    None,
    /// A refused token is replaced by one of p.
    NoResidual,
    /// A token of the residual is drawn as if its weights summed to 1; the missing mass goes to the
    /// last token.
    Unnormalised,
    /// The last token is cut off if it is unlikely.
    TrimmedByValue,
    /// Drafting stops after a token that is drawn and left out, because it is unlikely.
    StoppedByValue,
    /// A token that a one-hot draft proposes too is verified as one-hot.
    Deduplicated,
    /// The chain is drawn from what is left of q after top-k, and verified by q before that.
    RawDrafter,
    /// The target's distributions are taken before top-k.
    RawTarget,
    /// The coin of a run is tossed with the weight of the run that is one shorter.
    CoinOffByOne,
    /// The residual after a run has the weight of the run that is one shorter.
    ResidualOffByOne,
    /// The drafter's probabilities of the common tokens are not renormalised.
    NotRenormalised,
    /// The coins of a block are keyed by text position: those after a run are used again.
    CoinsByPosition,
    /// The token after a run is the target's own sample, drawn again while it equals the refused
    /// token.
    Resampled,
}

/// Transformation of the model's distributions into the drafter's.
#[derive(Clone, Copy, Debug, PartialEq)]
enum OutputVocabulary {
    /// The model's own.
    Own,
    /// Its two likeliest tokens.
    TopK,
    /// Only the tokens that the target has too.
    Common,
}

#[derive(Clone, Copy, Debug)]
struct Way {
    gamma: usize,
    output_vocabulary: OutputVocabulary,
    /// Drafting stops where the drafter is uncertain.
    stops: bool,
    /// At some positions the target's distribution is unknown.
    holes: bool,
    /// Kind of the round by the number of tokens before it: base 3, 0 sampled, 1 one-hot, 2 a plain
    /// token.
    rounds: usize,
    bug: Bug,
}

impl Way {
    const fn new(gamma: usize) -> Self {
        Self {
            gamma,
            output_vocabulary: OutputVocabulary::Own,
            stops: false,
            holes: false,
            rounds: 0,
            bug: Bug::None,
        }
    }
}

struct World<'a, 'o> {
    target: Toy,
    max: usize,
    way: Way,
    chance: &'a Chance<'o>,
    /// Known bounds of the coin of a position, if coins are keyed by position.
    coins: BTreeMap<usize, (f64, f64)>,
}

fn of(weights: &[f64]) -> Distribution {
    Distribution::new((0..).zip(weights.iter().copied()).collect()).expect("a distribution")
}

/// The `most` likeliest tokens, renormalised.
fn top(distribution: &Distribution, most: usize) -> Distribution {
    let mut entries = distribution.entries().to_vec();
    entries.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    entries.truncate(most);
    Distribution::new(entries).expect("a distribution")
}

impl World<'_, '_> {
    /// The target's distribution, with top-k of all but one token.
    fn p(&self, context: &[TokenId]) -> Distribution {
        top(&self.raw_p(context), self.target.vocabulary - 1)
    }

    fn raw_p(&self, context: &[TokenId]) -> Distribution {
        of(&self.target.weights(context))
    }

    /// The distribution of the drafter's model before any transformation. It has one token that the
    /// target does not have.
    fn raw_q(&self, context: &[TokenId]) -> Distribution {
        let own = Toy { vocabulary: self.target.vocabulary + 1, salt: self.target.salt + 1000 };
        of(&own.weights(context))
    }

    /// The distribution that the drafter samples from.
    fn q(&self, context: &[TokenId]) -> Distribution {
        let known = |distribution: &Distribution| {
            let mut entries = distribution.entries().to_vec();
            entries.retain(|entry| (entry.0 as usize) < self.target.vocabulary);
            Distribution::new(entries).expect("a distribution")
        };
        let raw = self.raw_q(context);
        match self.way.output_vocabulary {
            OutputVocabulary::Own => {
                of(&Toy { salt: self.target.salt + 1000, ..self.target }.weights(context))
            }
            OutputVocabulary::TopK => top(&known(&raw), 2),
            OutputVocabulary::Common => known(&raw),
        }
    }

    /// The drafter distribution of a token as passed to the verification.
    fn told_q(&self, context: &[TokenId], token: TokenId) -> Distribution {
        match self.way.bug {
            Bug::Deduplicated if token == self.target.favourite(context, 0) => {
                Distribution::new(vec![(token, 1.0)]).expect("a distribution")
            }
            Bug::RawDrafter | Bug::NotRenormalised => self.raw_q(context),
            _ => self.q(context),
        }
    }

    /// Where the drafter stops.
    fn stop(&self) -> Option<Stop> {
        let min_survival = if self.way.output_vocabulary == OutputVocabulary::TopK { 0.56 } else { 0.49 };
        self.way.stops.then(|| Stop::new(min_survival))
    }

    fn drawn(&self, distribution: &Distribution) -> TokenId {
        let weights: Vec<f64> = distribution.entries().iter().map(|entry| entry.1).collect();
        distribution.entries()[self.chance.pick(&weights)].0
    }

    /// A chain of at most `most` tokens.
    fn drafted(&self, context: &[TokenId], most: usize) -> Sampled {
        let (mut chain, mut q) = (Vec::new(), Vec::new());
        let (mut text, mut stop) = (context.to_vec(), self.stop());
        while chain.len() < most {
            let distribution = self.q(&text);
            if stop.as_mut().is_some_and(|stop| !stop.goes_on(chance_by_entropy(distribution.entropy()))) {
                break;
            }
            let token = self.drawn(&distribution);
            if self.way.bug == Bug::StoppedByValue && distribution.of(token) < 0.3 {
                break;
            }
            q.push(self.told_q(&text, token));
            chain.push(token);
            text.push(token);
        }
        if self.way.bug == Bug::TrimmedByValue
            && q.last().is_some_and(|distribution| distribution.of(chain[chain.len() - 1]) < 0.3)
        {
            chain.pop();
            q.pop();
        }
        Sampled::drawn(chain, q).expect("drawn from its distributions")
    }

    /// The target's distributions along a chain, up to the first unknown one.
    fn distributions(&self, context: &[TokenId], chain: &[TokenId]) -> Vec<Distribution> {
        let mut distributions = Vec::new();
        for len in 0..=chain.len() {
            let text = [context, &chain[..len]].concat();
            let sum: usize = text.iter().map(|&token| token as usize + 1).sum();
            if self.way.holes && sum.is_multiple_of(3) {
                break;
            }
            distributions.push(if self.way.bug == Bug::RawTarget {
                self.raw_p(&text)
            } else {
                self.p(&text)
            });
        }
        distributions
    }

    /// A round of a sampled chain; returns its tokens.
    fn sampled(&mut self, context: &[TokenId], most: usize) -> Vec<TokenId> {
        let draft = self.drafted(context, most);
        let p = self.distributions(context, draft.chain());
        let bug = self.way.bug;
        let weights = weights(&draft, &p);
        let chance = self.chance;
        let coins = &mut self.coins;
        let kept = verify(&draft, &p, |at, probability| match bug {
            Bug::CoinOffByOne => {
                let keep = off_by_one(&draft, &p, &weights, at).unwrap_or(probability);
                chance.pick(&[keep, 1.0 - keep]) == 0
            }
            Bug::CoinsByPosition => keyed(coins, context.len() + at, probability, chance),
            _ => chance.pick(&[probability, 1.0 - probability]) == 0,
        });
        let mut tokens = draft.chain()[..kept.run].to_vec();
        tokens.extend(self.next(&draft, &p, &weights, &kept));
        tokens
    }

    /// The token after the run.
    fn next(&self, draft: &Sampled, p: &[Distribution], weights: &[f64], kept: &Kept) -> Option<TokenId> {
        let Kept { run, next } = kept;
        let refused = draft.chain().get(*run).copied().filter(|_| *run < p.len());
        let distribution = next.as_ref()?;
        let Some(refused) = refused else { return Some(self.drawn(distribution)) };
        Some(match self.way.bug {
            Bug::NoResidual => self.drawn(&p[*run]),
            Bug::Resampled => {
                let others = p[*run].entries().iter().copied().filter(|entry| entry.0 != refused).collect();
                self.drawn(&Distribution::new(others).unwrap_or_else(|| p[*run].clone()))
            }
            Bug::Unnormalised => {
                let mut left = p[*run].excess(weights[*run], &draft.q()[*run]);
                let missing = 1.0 - left.iter().map(|entry| entry.1).sum::<f64>();
                left.last_mut().expect("refused").1 += missing;
                self.drawn(&Distribution::new(left).expect("a distribution"))
            }
            Bug::ResidualOffByOne => {
                let weight = weights[run.saturating_sub(1)];
                self.drawn(
                    &Distribution::new(p[*run].excess(weight, &draft.q()[*run]))
                        .unwrap_or_else(|| distribution.clone()),
                )
            }
            _ => self.drawn(distribution),
        })
    }

    /// A round of a one-hot chain: the target's favourites, by sample and match.
    fn one_hot(&self, context: &[TokenId], most: usize) -> Vec<TokenId> {
        let mut text = context.to_vec();
        loop {
            let (draft, token) = (self.target.favourite(&text, 0), self.drawn(&self.p(&text)));
            text.push(token);
            if token != draft || text.len() > context.len() + most {
                return text.split_off(context.len());
            }
        }
    }

    fn play(&mut self) -> String {
        let prompt = [0, 1];
        let mut text = prompt.to_vec();
        while text.len() < prompt.len() + self.max {
            let done = text.len() - prompt.len();
            let most = self.way.gamma.min(self.max - done - 1);
            let tokens = match self.way.rounds / 3_usize.pow(done as u32) % 3 {
                0 => self.sampled(&text, most),
                1 => self.one_hot(&text, most),
                _ => Vec::new(),
            };
            // An undecided token is decoded plainly.
            if tokens.is_empty() {
                text.push(self.drawn(&self.p(&text)));
            }
            text.extend(tokens);
        }
        format!("{text:?}")
    }
}

/// P_0, P_1, … of block verification.
fn weights(draft: &Sampled, p: &[Distribution]) -> Vec<f64> {
    let mut weights = vec![1.0_f64];
    for ((&token, q), p) in draft.chain().iter().zip(draft.q()).zip(p) {
        let last = weights[weights.len() - 1];
        weights.push((last * p.of(token) / q.of(token)).min(1.0));
    }
    weights
}

/// The coin of the run that ends at position `at`, by the weight of the run before; `None` for the
/// whole chain.
fn off_by_one(draft: &Sampled, p: &[Distribution], weights: &[f64], at: usize) -> Option<f64> {
    let (p, q) = (p.get(at + 1)?, draft.q().get(at + 1)?);
    let beyond: f64 = p.excess(weights[at], q).iter().map(|entry| entry.1).sum();
    Some(if beyond + 1.0 - weights[at] > 0.0 { beyond / (beyond + 1.0 - weights[at]) } else { 1.0 })
}

/// A coin that keeps its value for repeated requests.
fn keyed(
    coins: &mut BTreeMap<usize, (f64, f64)>,
    position: usize,
    probability: f64,
    chance: &Chance<'_>,
) -> bool {
    let (low, high) = *coins.entry(position).or_insert((0.0, 1.0));
    let edge = probability.clamp(low, high);
    let below = chance.pick(&[edge - low, high - edge]) == 0;
    coins.insert(position, if below { (low, edge) } else { (edge, high) });
    below
}

fn texts(target: Toy, max: usize, way: Way) -> Texts {
    distribution(|chance| World { target, max, way, chance, coins: BTreeMap::new() }.play())
}

/// Distance of the distribution of the texts from that of plain decoding.
fn error(target: Toy, max: usize, way: Way) -> f64 {
    let plain_count = Way { rounds: 3_usize.pow(max as u32) - 1, bug: Bug::None, ..way };
    distance(&texts(target, max, plain_count), &texts(target, max, way))
}

fn keeps_the_distribution(target: Toy, max: usize, way: Way) {
    let tv = error(target, max, way);
    assert!(tv < 1e-12, "{way:?}: {tv}");
}

/// Every pattern of sampled rounds, one-hot rounds and plain tokens.
fn patterns(max: usize) -> impl Iterator<Item = usize> {
    0..3_usize.pow(max as u32 - 1)
}

#[rstest]
fn sampled_drafts_keep_the_distribution(
    #[values(OutputVocabulary::Own, OutputVocabulary::TopK, OutputVocabulary::Common)]
    output_vocabulary: OutputVocabulary,
    #[values(false, true)] stops: bool,
    #[values(false, true)] holes: bool,
) {
    for gamma in 1..=3 {
        for rounds in patterns(3) {
            let way = Way { output_vocabulary, stops, holes, rounds, ..Way::new(gamma) };
            keeps_the_distribution(Toy { vocabulary: 3, salt: 7 + gamma as u64 }, 3, way);
        }
        let way = Way { output_vocabulary, stops, holes, ..Way::new(gamma) };
        keeps_the_distribution(Toy { vocabulary: 3, salt: 50 + gamma as u64 }, 4, way);
        keeps_the_distribution(Toy { vocabulary: 4, salt: 90 + gamma as u64 }, 3, way);
    }
}

#[rstest]
#[case::missing_residual(Bug::NoResidual, OutputVocabulary::Own)]
#[case::residual_unnormalised(Bug::Unnormalised, OutputVocabulary::Own)]
#[case::trimming_by_value(Bug::TrimmedByValue, OutputVocabulary::Own)]
#[case::stopping_by_value(Bug::StoppedByValue, OutputVocabulary::Own)]
#[case::sampled_node_merged_with_a_one_hot_one(Bug::Deduplicated, OutputVocabulary::Own)]
#[case::q_before_processing(Bug::RawDrafter, OutputVocabulary::TopK)]
#[case::p_before_processing(Bug::RawTarget, OutputVocabulary::Own)]
#[case::tli_without_renormalising(Bug::NotRenormalised, OutputVocabulary::Common)]
#[case::sampled_anew(Bug::Resampled, OutputVocabulary::Own)]
fn a_bug_is_caught(
    #[case] bug: Bug,
    #[case] output_vocabulary: OutputVocabulary,
    #[values(3, 4)] vocabulary: usize,
) {
    is_caught(Toy { vocabulary, salt: 21 }, 3, Way { output_vocabulary, bug, ..Way::new(2) });
}

#[rstest]
#[case::weight_of_the_coin_off_by_one(Bug::CoinOffByOne)]
#[case::weight_of_the_residual_off_by_one(Bug::ResidualOffByOne)]
#[case::coins_used_again(Bug::CoinsByPosition)]
fn a_bug_of_blocks_is_caught(#[case] bug: Bug) {
    is_caught(Toy { vocabulary: 3, salt: 10 }, 4, Way { bug, ..Way::new(3) });
}

fn is_caught(target: Toy, max: usize, way: Way) {
    keeps_the_distribution(target, max, Way { bug: Bug::None, ..way });
    let tv = error(target, max, way);
    assert!(tv > 1e-3, "{way:?} is not caught: {tv}");
}

#[test]
fn the_end_of_drafting_depends_on_the_position() {
    for output_vocabulary in [OutputVocabulary::Own, OutputVocabulary::TopK, OutputVocabulary::Common] {
        let way = Way { output_vocabulary, stops: true, ..Way::new(1) };
        let lengths = |salt| {
            distribution(|chance| {
                let target = Toy { vocabulary: 3, salt };
                let world = World { target, max: 2, way, chance, coins: BTreeMap::new() };
                world.drafted(&[0, 1], 3).chain().len().to_string()
            })
        };
        let all: Texts = (0..10).flat_map(lengths).collect();
        assert!(all.contains_key("1") && all.contains_key("2"), "{output_vocabulary:?}: {all:?}");
    }
}

/// Mean number of tokens kept of a chain of `gamma`.
fn kept(target: Toy, gamma: usize) -> f64 {
    mean_run(target, gamma, |world| world.sampled(&[0, 1], gamma).len() - 1)
}

/// The same by the test that decides token by token (Leviathan et al., arXiv 2211.17192).
fn kept_by_ratio(target: Toy, gamma: usize) -> f64 {
    mean_run(target, gamma, |world| {
        let draft = world.drafted(&[0, 1], gamma);
        let p = world.distributions(&[0, 1], draft.chain());
        let ratios =
            draft.chain().iter().zip(draft.q()).zip(&p).map(|((&token, q), p)| p.of(token) / q.of(token));
        let kept = ratios
            .map(|ratio| ratio.min(1.0))
            .take_while(|&keep| world.chance.pick(&[keep, 1.0 - keep]) == 0);
        kept.count()
    })
}

fn mean_run(target: Toy, gamma: usize, run: impl Fn(&mut World<'_, '_>) -> usize) -> f64 {
    let way = Way::new(gamma);
    let runs = distribution(|chance| {
        let mut world = World { target, max: gamma + 1, way, chance, coins: BTreeMap::new() };
        run(&mut world).to_string()
    });
    runs.iter().map(|(run, p)| run.parse::<f64>().expect("a number") * p).sum()
}

#[test]
fn a_block_keeps_more_than_the_ratio_test_and_never_less() {
    let mut gains = 0;
    for salt in 0..40 {
        let target = Toy { vocabulary: 3, salt };
        assert!((kept_by_ratio(target, 1) - kept(target, 1)).abs() < 1e-12);
        for gamma in 2..=3 {
            let (ratio, block) = (kept_by_ratio(target, gamma), kept(target, gamma));
            assert!(block > ratio - 1e-12, "{salt} {gamma}: {block} < {ratio}");
            gains += usize::from(block > ratio + 1e-3);
        }
    }
    assert!(gains > 20, "{gains} of 80");
}

/// The acceptance probability of a single token is the overlap of p and q.
#[test]
fn a_chain_of_one_token_is_kept_with_the_overlap_of_the_distributions() {
    for salt in 0..20 {
        let target = Toy { vocabulary: 4, salt };
        let way = Way::new(1);
        let common = distribution(|chance| {
            let world = World { target, max: 2, way, chance, coins: BTreeMap::new() };
            let (p, q) = (world.p(&[0, 1]), world.q(&[0, 1]));
            let common: f64 = p.entries().iter().map(|&(token, p)| p.min(q.of(token))).sum();
            common.to_string()
        });
        let common: f64 = common.keys().next().expect("one").parse().expect("a number");
        assert!((kept(target, 1) - common).abs() < 1e-12);
    }
}

/// The target as the session's world has it: after its sampling parameters.
#[derive(Clone, Copy)]
struct Processed(Toy);

impl Target for Processed {
    fn weights(self, context: &[TokenId]) -> Vec<f64> {
        let left = top(&of(&self.0.weights(context)), self.0.vocabulary - 1);
        (0..self.0.vocabulary).map(|token| left.of(token as TokenId)).collect()
    }
}

/// Distribution of the client's output through the shipped session with a sampling model drafter.
fn session_distribution(target: Toy, case: &Case, way: Way, switches: u32) -> Texts {
    distribution(|chance| {
        let world = || World { target, max: case.max, way, chance, coins: BTreeMap::new() };
        let mut hooks = Hooks {
            sample: &mut |ask| world().drawn(&world().p(ask.context)),
            told: &mut |_| None,
            distribution: &mut |_| None,
            draft: &mut |context, gamma| {
                let drawn = world().drafted(context, gamma);
                let features = vec![Features::default(); drawn.chain().len()];
                Draft::drawn(drawn, features)
            },
            kept: &mut |context, drawn| {
                let p = world().distributions(context, drawn.chain());
                let toss = |_, probability| chance.pick(&[probability, 1.0 - probability]) == 0;
                let kept = verify(drawn, &p, toss);
                let next = kept.next.map(|distribution| world().drawn(&distribution));
                let run = drawn.chain()[..kept.run].iter().copied().chain(next).map(Some);
                let rows = run.chain(std::iter::repeat(None)).take(drawn.chain().len() + 1);
                rows.map(|sample| Row { sample, ..Row::default() }).collect()
            },
            allow: &mut |event, _| switches >> event.min(2) & 1 == 1,
            chunk: &mut || 1 + (switches as usize >> 3),
            chaos: &mut || None,
            wrong: Wrong::default(),
        };
        let outcome = play_judged(case, Control::new(), Judge::new(Accept::default(), 0), &mut hooks);
        key(&outcome.text, &outcome.tokens, outcome.summary.finish.expect("ended").name())
    })
}

/// Also with lookup drafters: their drafts are not merged with a sampled one.
#[rstest]
fn a_session_with_sampled_drafts_keeps_the_distribution(
    #[values(Drafter::Chain, Drafter::Merged)] drafter: Drafter,
    #[values((false, false), (true, false), (false, true))] (stops, holes): (bool, bool),
) {
    for gamma in 1..=2 {
        let target = Toy { vocabulary: 3, salt: 60 + gamma as u64 };
        let case = Case { max: 4, ..case(3, drafter, gamma, &[VerifyMethod::Tree, VerifyMethod::FanOut]) };
        let plain = plain_distribution(Processed(target), &case);
        for switches in 0..16 {
            let way = Way { stops, holes, ..Way::new(gamma) };
            let tv = distance(&plain, &session_distribution(target, &case, way, switches));
            assert!(tv < 1e-12, "switches {switches:b}: {tv} in {way:?}");
        }
    }
}
