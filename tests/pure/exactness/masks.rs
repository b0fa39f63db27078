//! Output under a grammar that the backend applies to the client's own request alone: the client
//! gets what that request alone would have brought, text and distribution.
//!
//! At temperature 0 by identity of texts, on a target whose likeliest token is often barred. Above
//! it by full enumeration: a barred sample leaves its position undecided, whatever was drafted, so
//! it is one draw of a rejection sampling, and the next one is drawn anew.

use std::sync::LazyLock;

use super::backend::{Ask, Manner, plain};
use super::distribution::{self, Drafter, key};
use super::grammar::{Automaton, Bound, Slip};
use super::greedy::{cases, some_chaos};
use super::toy::{Chance, Distribution, Target, Toy, distance};
use super::world::{Case, Chaos, Hooks, Outcome, Wrong, play};
use foretell_core::draft::{LookupSpec, Ngram, Tree};
use foretell_core::session::{Ending, Fault, Finish, Hold, Rules};
use foretell_core::units::{SplitMix64, TokenId};
use foretell_core::words::VerifyMethod;
use foretell_engines::masks::Allows;
use proptest::prelude::*;
use rstest::rstest;

/// Ends in some states, and one token alone in another.
static PAIRS: Automaton =
    Automaton { regex: "(ab|c)*", edges: &[(0, b'a', 1), (1, b'b', 0), (0, b'c', 0)], accepts: &[0] };
/// Half of a character ends no text.
static CHARACTERS: Automaton = Automaton {
    regex: "(ab|c|é)*",
    edges: &[(0, b'a', 1), (1, b'b', 0), (0, b'c', 0), (0, 0xC3, 2), (2, 0xA9, 0)],
    accepts: &[0],
};
/// A long beginning without an end.
static PARTS: Automaton = Automaton {
    regex: "(a|b)*c(ab)*",
    edges: &[(0, b'a', 0), (0, b'b', 0), (0, b'c', 1), (1, b'a', 2), (2, b'b', 1)],
    accepts: &[1],
};
/// An end everywhere.
static ANYWHERE: Automaton =
    Automaton { regex: "(ab|c)*a?", edges: &[(0, b'a', 1), (0, b'c', 0), (1, b'b', 0)], accepts: &[0, 1] };
/// A place where nothing but the end is allowed.
static SHORT: Automaton = Automaton {
    regex: "c?(ab){1,2}",
    edges: &[(0, b'c', 1), (0, b'a', 2), (1, b'a', 2), (2, b'b', 3), (3, b'a', 4), (4, b'b', 5)],
    accepts: &[3, 5],
};
/// The end alone is barred, behind every other token.
static LAST: Automaton = Automaton {
    regex: "(a|b)*b",
    edges: &[(0, b'a', 0), (0, b'b', 1), (1, b'a', 0), (1, b'b', 1)],
    accepts: &[1],
};

/// Letters, several of them in a token, a character in whole and in halves, a mark that ends
/// nothing, and the end.
const WORDS: [&str; 12] =
    ["a", "b", "c", "ab", "ca", "bc", "abc", "<0xC3>", "<0xA9>", "é", "<|mark|>", "</s>"];

/// The grammars of the texts at temperature 0, each with lists of allowed tokens, and with bans.
static GRAMMARS: LazyLock<Vec<Bound>> = LazyLock::new(|| {
    let automata = [&PAIRS, &CHARACTERS, &PARTS, &ANYWHERE, &SHORT];
    let both = |automaton| [1024, 2].map(|listed| Bound::new(automaton, &WORDS, listed));
    automata.into_iter().flat_map(both).collect()
});

/// The same, and some behind reasoning: that ends with a marker, at the beginning of the output, or
/// with either.
static ALL: LazyLock<Vec<Bound>> = LazyLock::new(|| {
    let behind = |bound: &Bound| {
        [(4, vec![]), (9, vec![0, 3]), (10, vec![2])]
            .map(|(marker, first)| bound.clone().behind_reasoning(marker, &first))
    };
    GRAMMARS.iter().cloned().chain(GRAMMARS.iter().step_by(3).flat_map(behind)).collect()
});

/// The mask is the grammar of the backend: behind every output of up to five tokens.
#[test]
fn the_mask_allows_what_the_backend_allows() {
    for bound in GRAMMARS.iter().step_by(2) {
        let (mask, ends) = (bound.mask(), bound.ends());
        assert_eq!(ends, [10, 11]);
        let mut outputs = vec![Vec::new()];
        let mut next = 0;
        while let Some(output) = outputs.get(next).cloned() {
            next += 1;
            let allowed = bound.allowed(&output);
            let text: Vec<TokenId> = allowed.iter().copied().filter(|token| !ends.contains(token)).collect();
            let may_end = allowed.len() > text.len();
            let all = if may_end { [text.as_slice(), &ends].concat() } else { text.clone() };
            assert_eq!(mask.allowed(&[], &output, WORDS.len()), Some(all), "{bound:?} {output:?}");
            assert_eq!(mask.may_end(&[], &output), may_end, "{bound:?} {output:?}");
            for token in 0..WORDS.len() as TokenId {
                let says = if ends.contains(&token) {
                    Allows::Unknown
                } else if text.contains(&token) {
                    Allows::Yes
                } else {
                    Allows::No
                };
                assert_eq!(mask.says(&[], &output, &[], token), says, "{bound:?} {output:?} {token}");
                let ended = token == bound.end();
                let followed = mask.follow(&[], &output, &[token], ended) == 1;
                assert_eq!(followed, allowed.contains(&token), "{bound:?} {output:?} {token}");
            }
            if output.len() < 5 {
                outputs.extend(text.into_iter().map(|token| [output.as_slice(), &[token]].concat()));
            }
        }
        assert!(next > 10, "{bound:?}: {next} outputs");
    }
}

// ------------------------------------------------------------------ Temperature 0

/// A pure function of the context that mostly repeats the earlier successor of its last two tokens,
/// whatever a grammar says; at some positions two tokens are the likeliest.
fn probabilities(context: &[TokenId]) -> Vec<f64> {
    let seed = context
        .iter()
        .rev()
        .take(4)
        .fold(context.len() as u64 / 7, |seed, &token| SplitMix64::mix(seed ^ u64::from(token)));
    let tail = &context[context.len().saturating_sub(2)..];
    let earlier = (tail.len()..context.len()).rev().find(|&end| &context[end - tail.len()..end] == tail);
    let score = |token: usize| {
        let repeats = earlier.is_some_and(|end| context[end] as usize == token && seed % 5 != 0);
        // The end comes late, and often where it is barred.
        let ends = match (token + 1 == WORDS.len(), seed % 8) {
            (false, _) => 0,
            (true, 0) => 24,
            (true, _) => -8,
        };
        (SplitMix64::mix(seed + 77 * token as u64) % 16) as i32 + if repeats { 12 } else { 0 } + ends
    };
    let weights: Vec<f64> = (0..WORDS.len()).map(|token| 2_f64.powi(score(token))).collect();
    let sum: f64 = weights.iter().sum();
    weights.into_iter().map(|weight| weight / sum).collect()
}

/// The likeliest of these tokens, the first of several.
fn likeliest(context: &[TokenId], among: Option<&[TokenId]>) -> TokenId {
    let probabilities = probabilities(context);
    let all: Vec<TokenId> = (0..WORDS.len() as TokenId).collect();
    let of = |token: TokenId| probabilities[token as usize];
    let among = among.unwrap_or(&all).iter().copied();
    among.reduce(|best, token| if of(token) > of(best) { token } else { best }).expect("a token")
}

/// A drafter that mostly agrees with the target under its grammar, and at times with the target
/// alone; wide drafts also carry a sibling.
fn scripted(bound: &Bound, prompt: usize, context: &[TokenId], gamma: usize, wide: bool) -> Tree {
    let mut tree = Tree::default();
    let mut full = context.to_vec();
    let mut parent = None;
    while tree.len() < gamma {
        let hash = SplitMix64::mix(full.len() as u64 * 31 + u64::from(full[full.len() - 1]));
        let allowed = bound.allowed(&full[prompt..]);
        let among = Some(allowed.as_slice()).filter(|allowed| !allowed.is_empty() && !hash.is_multiple_of(5));
        let right = likeliest(&full, among);
        let wrong = (hash % WORDS.len() as u64) as TokenId;
        if wide && tree.len() + 1 < gamma {
            tree.push(distribution::node(allowed.first().copied().unwrap_or(wrong), parent));
        }
        let token = if hash.is_multiple_of(7) { wrong } else { right };
        parent = Some(tree.push(distribution::node(token, parent)));
        full.push(token);
    }
    tree.truncate(gamma);
    tree
}

fn case(prompt: u64, methods: &[VerifyMethod], gamma: Option<usize>) -> Case {
    let mut random = SplitMix64::new(prompt);
    let bound = &ALL[random.below(ALL.len() as u64) as usize];
    let stops = ["cab", "é", "abab", "cc", "bc"];
    let stop = (0..random.below(2)).map(|_| stops[random.below(5) as usize].to_owned()).collect();
    let lookups = if random.chance(2) {
        vec![LookupSpec::PromptLookup(Ngram { min: 1, max: 6 })]
    } else {
        distribution::lookups()
    };
    let rules = Rules {
        methods: methods.to_vec(),
        gamma_fixed: gamma,
        lookups,
        shared: distribution::shared(),
        model: random.chance(2).then_some(2),
        segment: random.chance(3).then(|| 1 + random.below(4) as u32),
        ahead: Some(random.below(3) as usize),
        ..Rules::default()
    };
    let len = 4 + random.below(20);
    Case {
        prompt: (0..len).map(|_| random.below(7) as TokenId).collect(),
        ending: Ending {
            stop,
            eos: vec![bound.end()],
            hold: if random.chance(2) { Hold::Longest } else { Hold::Beginning },
            ..Ending::default()
        },
        max: 1 + random.below(40) as usize,
        vocabulary: bound.vocabulary().clone(),
        rules,
        manner: Manner { ends: true, lanes: 1 + random.below(8) as usize, ..Manner::default() },
        temperature: 0.0,
        grammar: Some(bound.clone()),
    }
}

/// Plays a case with random cuts and switches.
fn speculated(case: &Case, seed: u64, slip: Slip, chaos: &mut dyn FnMut() -> Option<Chaos>) -> Outcome {
    let bound = case.grammar.as_ref().expect("a grammar");
    let mut cuts = SplitMix64::new(seed ^ 1);
    let mut switches = SplitMix64::new(seed ^ 2);
    let mostly = switches.below(4);
    let wide = seed.is_multiple_of(2) && case.rules.methods == [VerifyMethod::FanOut];
    play(
        case,
        &mut Hooks {
            sample: &mut |ask| likeliest(ask.context, ask.among.as_deref()),
            told: &mut |_| unreachable!("its likeliest tokens are told"),
            distribution: &mut |context| Some(probabilities(context)),
            draft: &mut |context, gamma| scripted(bound, case.prompt.len(), context, gamma, wide).into(),
            kept: &mut |_, _| unreachable!("no draft is sampled"),
            allow: &mut |_, _| switches.below(4) >= mostly,
            overtakes: seed.is_multiple_of(3),
            chunk: &mut || 1 + cuts.below(4) as usize,
            chaos,
            wrong: Wrong { slip, ..Wrong::default() },
        },
    )
}

/// The client's own request alone.
fn reference(case: &Case) -> (String, Vec<TokenId>, &'static str) {
    let mut sample = |ask: &Ask<'_>| likeliest(ask.context, ask.among.as_deref());
    let (text, tokens, finish) = plain(case, &mut sample);
    (text, tokens, finish.name())
}

const METHODS: [&[VerifyMethod]; 2] = [&[VerifyMethod::FanOut], &[VerifyMethod::Score, VerifyMethod::FanOut]];

#[rstest]
#[case::fan_out(METHODS[0])]
#[case::score_then_fan_out(METHODS[1])]
fn under_a_grammar_the_text_is_the_plain_text(
    #[case] methods: &[VerifyMethod],
    #[values(1, 2, 3, 4, 5, 6)] gamma: usize,
) {
    let (mut speculations, mut accepted, mut barred, mut allowed, mut used) = (0, 0, 0, 0, 0);
    for prompt in 0..1_000 {
        let case = case(prompt, methods, Some(gamma));
        let (text, tokens, finish) = reference(&case);
        let outcome = speculated(&case, prompt ^ gamma as u64, Slip::None, &mut || None);
        let summary = &outcome.summary;
        assert_eq!((&outcome.text, &outcome.tokens), (&text, &tokens), "prompt {prompt}: {case:?}");
        assert_eq!(summary.finish.map(Finish::name), Some(finish), "prompt {prompt}");
        assert_eq!(summary.output_tokens as usize, tokens.len(), "prompt {prompt}");
        speculations += u32::from(summary.speculated);
        (accepted, used) = (accepted + summary.accepted, used + summary.ahead.used);
        (barred, allowed) = (barred + outcome.barred, allowed + outcome.allowed);
    }
    let counts = format!(
        "{speculations} speculated, {accepted} accepted, {barred} barred, {allowed} allowed, {used} ahead"
    );
    assert!(speculations > 200 && accepted > 200 && barred > 200 && allowed > 200, "too tame: {counts}");
}

/// Faults of every request, those for a token among the allowed ones included.
#[test]
fn a_fault_under_a_grammar_changes_no_text() {
    let (mut faulted, mut ended) = (0, 0);
    for prompt in 0..1_000 {
        let case = case(prompt, METHODS[prompt as usize % 2], Some(1 + prompt as usize % 5));
        let (text, tokens, finish) = reference(&case);
        let mut random = SplitMix64::new(prompt ^ 3);
        let faults = [Fault::Plain, Fault::Verify, Fault::RetryAfter(std::time::Duration::from_secs(1))];
        let mut chaos = || random.chance(6).then(|| Chaos::Fault(faults[random.below(3) as usize]));
        let outcome = speculated(&case, prompt, Slip::None, &mut chaos);
        assert!(tokens.starts_with(&outcome.tokens), "prompt {prompt}");
        if let Some(end) = outcome.summary.finish {
            assert_eq!((&outcome.text, &outcome.tokens), (&text, &tokens), "prompt {prompt}");
            assert_eq!(end.name(), finish, "prompt {prompt}");
            ended += 1;
        }
        faulted += outcome.faulted;
    }
    assert!(faulted > 100 && ended > 300, "{faulted} requests failed, {ended} answers ended");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn whatever_happens_under_a_grammar_no_token_is_lost_or_doubled(
        prompt in 0u64..10_000,
        seed in any::<u64>(),
        gamma in prop_oneof![Just(None), (1usize..6).prop_map(Some)],
        scored in any::<bool>(),
        script in proptest::collection::vec(some_chaos(), 0..120),
    ) {
        let case = case(prompt, METHODS[usize::from(scored)], gamma);
        let (text, tokens, finish) = reference(&case);
        let mut script = script.into_iter();
        let outcome = speculated(&case, seed, Slip::None, &mut || script.next().flatten());
        prop_assert!(tokens.starts_with(&outcome.tokens), "{:?} is no beginning of {:?}", outcome.tokens, tokens);
        match outcome.summary.finish {
            Some(end) => {
                prop_assert_eq!((&outcome.text, &outcome.tokens), (&text, &tokens));
                prop_assert_eq!(end.name(), finish);
            }
            None => prop_assert!(text.starts_with(&outcome.text)),
        }
    }
}

#[rstest]
#[case::barred_sample_accepted(Slip::BarredAccepted, 0)]
#[case::mask_one_token_behind(Slip::MaskLags, 0)]
#[case::mask_one_token_behind_scored(Slip::MaskLags, 1)]
#[case::token_sampled_among_all(Slip::AllowedRaw, 0)]
#[case::end_accepted_anywhere(Slip::EndUnchecked, 0)]
#[case::end_accepted_anywhere_scored(Slip::EndUnchecked, 1)]
#[case::second_allowed_token_of_a_row(Slip::SecondAllowed, 1)]
#[case::allowed_token_banned(Slip::OneBannedTooMany, 0)]
#[case::reasoning_bound(Slip::ReasoningBound, 0)]
#[case::reasoning_bound_scored(Slip::ReasoningBound, 1)]
#[case::first_token_behind_reasoning_unbound(Slip::FirstUnbound, 0)]
#[case::first_token_behind_reasoning_unbound_scored(Slip::FirstUnbound, 1)]
fn a_misused_mask_is_caught_by_the_text(#[case] slip: Slip, #[case] methods: usize) {
    let differs = |prompt: &u64| {
        let case = case(*prompt, METHODS[methods], Some(3));
        let (text, tokens, finish) = reference(&case);
        let outcome = speculated(&case, *prompt, slip, &mut || None);
        (&outcome.text, &outcome.tokens) != (&text, &tokens)
            || outcome.summary.finish.map(Finish::name) != Some(finish)
    };
    let caught = (0..300).filter(differs).count();
    assert!(caught > 5, "{caught} of 300");
}

// --------------------------------------------------------------- All distributions

/// Of a target's probabilities those of these tokens, as a sampler renormalises them.
fn among(mut weights: Vec<f64>, among: Option<&[TokenId]>) -> Vec<f64> {
    let Some(among) = among else { return weights };
    for (token, weight) in (0..).zip(&mut weights) {
        if !among.contains(&token) {
            *weight = 0.0;
        }
    }
    let sum: f64 = weights.iter().sum();
    weights.into_iter().map(|weight| weight / sum).collect()
}

/// The target as a drafter knows it: at two of three positions under the grammar.
#[derive(Clone, Copy)]
struct Known<'a> {
    toy: Toy,
    case: &'a Case,
}

impl Target for Known<'_> {
    fn weights(self, context: &[TokenId]) -> Vec<f64> {
        let bound = self.case.grammar.as_ref().filter(|_| !context.len().is_multiple_of(3));
        let allowed = bound.map(|bound| bound.allowed(&context[self.case.prompt.len()..]));
        among(self.toy.weights(context), allowed.as_deref().filter(|allowed| !allowed.is_empty()))
    }
}

fn enumerated(bound: Bound, drafter: Drafter, gamma: usize, max: usize) -> Case {
    let case = distribution::case(bound.vocabulary().len(), drafter, gamma, &[VerifyMethod::FanOut]);
    let manner = Manner { ends: true, ..Manner::default() };
    Case { max, manner, vocabulary: bound.vocabulary().clone(), grammar: Some(bound), ..case }
}

fn plain_distribution(toy: Toy, case: &Case) -> Distribution {
    super::toy::distribution(|chance| {
        let mut sample = |ask: &Ask<'_>| chance.token(&among(toy.weights(ask.context), ask.among.as_deref()));
        let (text, tokens, finish) = plain(case, &mut sample);
        key(&text, &tokens, finish.name())
    })
}

/// One way to play a case; see [`distribution::Way`].
#[derive(Clone, Copy)]
struct Way {
    drafter: Drafter,
    switches: u32,
    slip: Slip,
}

fn outcome(toy: Toy, case: &Case, way: Way, chance: &Chance<'_>) -> Outcome {
    let Way { drafter, switches, slip } = way;
    let gamma = case.rules.gamma_fixed.unwrap_or_default();
    let mut hooks = Hooks {
        sample: &mut |ask| chance.token(&among(toy.weights(ask.context), ask.among.as_deref())),
        told: &mut |_| unreachable!("no prompt is scored"),
        distribution: &mut |_| None,
        draft: &mut |context, most| {
            distribution::draft(drafter, Known { toy, case }, context, most.min(gamma)).into()
        },
        kept: &mut |_, _| unreachable!("no draft is sampled"),
        allow: &mut |event, _| switches >> event.min(2) & 1 == 1,
        overtakes: switches >> 4 & 1 == 1,
        chunk: &mut || 1 + (switches as usize >> 3 & 1),
        chaos: &mut || None,
        wrong: Wrong { slip, ..Wrong::default() },
    };
    play(case, &mut hooks)
}

/// Counts over all outcomes.
#[derive(Clone, Copy, Debug, Default)]
struct Count {
    outcomes: u32,
    accepted: u32,
    barred: u32,
    allowed: u32,
    ahead: u32,
}

fn session_distribution(toy: Toy, case: &Case, way: Way, count: &mut Count) -> Distribution {
    super::toy::distribution(|chance| {
        let outcome = outcome(toy, case, way, chance);
        count.outcomes += 1;
        count.accepted += outcome.summary.accepted;
        count.barred += outcome.barred;
        count.allowed += outcome.allowed;
        count.ahead += outcome.summary.ahead.sent;
        let finish = outcome.summary.finish;
        assert!(finish.is_some() || way.slip != Slip::None, "ended");
        key(&outcome.text, &outcome.tokens, finish.map_or("none", Finish::name))
    })
}

const LETTERS: [&str; 4] = ["a", "b", "c", "</s>"];
const TWO: [&str; 3] = ["a", "b", "</s>"];
const MARKED: [&str; 4] = ["a", "b", "<|mark|>", "</s>"];

#[rstest]
#[case::last(&LAST, &TWO, 1024, 4)]
#[case::with_a_mark(&LAST, &MARKED, 1024, 3)]
#[case::with_a_mark_by_bans(&LAST, &MARKED, 0, 3)]
#[case::pairs(&PAIRS, &LETTERS, 1024, 3)]
#[case::ends_anywhere(&ANYWHERE, &LETTERS, 1024, 3)]
fn under_a_grammar_the_distribution_is_the_plain_one(
    #[case] automaton: &'static Automaton,
    #[case] words: &[&str],
    #[case] listed: usize,
    #[case] max: usize,
    #[values(Drafter::Chain, Drafter::Bush, Drafter::Lookups)] drafter: Drafter,
) {
    let count = has_the_plain_distribution(&Bound::new(automaton, words, listed), drafter, max);
    assert!(count.barred > 100 && count.allowed > 100 && count.accepted > 50, "too tame: {count:?}");
}

/// Token 2 ends the reasoning, or one of `first` as the first of the output.
#[rstest]
#[case::ended_by_a_marker(&[])]
#[case::or_by_what_the_grammar_begins_with(&[1])]
fn behind_reasoning_the_distribution_is_the_plain_one(
    #[case] first: &[TokenId],
    #[values(Drafter::Chain, Drafter::Bush, Drafter::Lookups)] drafter: Drafter,
) {
    let bound = Bound::new(&LAST, &LETTERS, 1024).behind_reasoning(2, first);
    let count = has_the_plain_distribution(&bound, drafter, 3);
    assert!(count.barred > 20 && count.allowed > 20 && count.accepted > 50, "too tame: {count:?}");
}

fn has_the_plain_distribution(bound: &Bound, drafter: Drafter, max: usize) -> Count {
    let mut count = Count::default();
    let all: Vec<u32> = (0..16).collect();
    let patterns = if drafter == Drafter::Chain { all.as_slice() } else { &[3, 6, 7, 8 + 1, 8 + 5, 8 + 7] };
    // There are as many outcomes by lookups within one token less.
    let max = if drafter == Drafter::Lookups { max.min(3) } else { max };
    for gamma in 1..=2 {
        let toy = Toy { vocabulary: bound.vocabulary().len(), salt: 11 + gamma as u64 };
        let case = enumerated(bound.clone(), drafter, gamma, max);
        let plain = plain_distribution(toy, &case);
        for &switches in patterns {
            let way = Way { drafter, switches, slip: Slip::None };
            let tv = distance(&plain, &session_distribution(toy, &case, way, &mut count));
            assert!(tv < 1e-12, "switches {switches:b}: {tv} in {case:?}");
        }
    }
    count
}

/// Verify requests that are sent before it is known if a sample of the one before them is barred.
#[test]
fn under_a_grammar_requests_ahead_keep_the_distribution() {
    let (drafter, toy) = (Drafter::Lookup, Toy { vocabulary: 3, salt: 11 });
    let mut case = enumerated(Bound::new(&LAST, &TWO, 1024), drafter, 1, 5);
    case.rules.ahead = Some(1);
    // Without the end, so that assumptions continue.
    case.prompt = vec![0, 1, 0, 1, 0];
    let plain = plain_distribution(toy, &case);
    let mut count = Count::default();
    for switches in [3, 16 + 3] {
        let way = Way { drafter, switches, slip: Slip::None };
        let tv = distance(&plain, &session_distribution(toy, &case, way, &mut count));
        assert!(tv < 1e-12, "switches {switches:b}: {tv}");
    }
    assert!(count.ahead > 100 && count.barred > 100, "too tame: {count:?}");
}

/// To refuse a round for a barred sample anywhere in it, on the accepted run or not, is no bug: its
/// rows are drawn independently, so that is one more rejection.
#[rstest]
#[case::barred_sample_accepted(Slip::BarredAccepted, 7, Bound::new(&LAST, &MARKED, 1024), 15)]
#[case::mask_one_token_behind(Slip::MaskLags, 7, Bound::new(&PAIRS, &LETTERS, 1024), 10)]
#[case::token_sampled_among_all(Slip::AllowedRaw, 1, Bound::new(&PAIRS, &LETTERS, 1024), 21)]
#[case::end_accepted_anywhere(Slip::EndUnchecked, 7, Bound::new(&LAST, &TWO, 1024), 15)]
#[case::event_dropped_for_its_last_token(Slip::EventDropped, 8 + 1, Bound::new(&LAST, &TWO, 1024), 9)]
#[case::round_refused_for_its_last_token(Slip::RoundRefused, 7, Bound::new(&PAIRS, &LETTERS, 1024), 20)]
#[case::allowed_token_banned(Slip::OneBannedTooMany, 1, Bound::new(&LAST, &MARKED, 0), 15)]
fn a_misused_mask_is_caught_by_the_distribution(
    #[case] slip: Slip,
    #[case] switches: u32,
    #[case] bound: Bound,
    #[case] salt: u64,
) {
    let vocabulary = bound.vocabulary().len();
    let (drafter, toy) = (Drafter::Chain, Toy { vocabulary, salt });
    let case = enumerated(bound, drafter, 2, if vocabulary == 3 { 4 } else { 3 });
    let plain = plain_distribution(toy, &case);
    let tv = |slip| {
        let way = Way { drafter, switches, slip };
        distance(&plain, &session_distribution(toy, &case, way, &mut Count::default()))
    };
    let (sound, wrong) = (tv(Slip::None), tv(slip));
    assert!(sound < 1e-12, "without the slip: {sound}");
    assert!(wrong > 0.01, "not caught: {wrong}");
}
