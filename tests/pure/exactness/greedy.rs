//! Byte-identity on a deterministic target: for any draft, any cut of the stream, any switch of the
//! session and any fault, the client gets the output of plain decoding: text, tokens, ending.

use std::sync::Arc;
use std::time::Duration;

use super::backend::{Ask, Manner, Vocabulary, plain};
use super::world::{Case, Chaos, Hooks, Outcome, Wrong, play};
use foretell_core::draft::{Features, LookupSpec, Ngram, Node, Source, Tree, Vote};
use foretell_core::session::{Ending, Fault, Resources, Rules, StopBuffer};
use foretell_core::units::{SplitMix64, TokenId};
use foretell_core::words::{Row, VerifyMethod};
use proptest::prelude::*;
use rstest::rstest;

/// Words, blanks, and characters whose bytes are spread over tokens.
fn vocabulary() -> Vocabulary {
    let words = [" the", " a", "ab", "b", "c", "bc", "\n", ".", " x", "é", "日本"];
    let mut tokens: Vec<Vec<u8>> = words.iter().map(|word| word.as_bytes().to_vec()).collect();
    tokens.extend("é".bytes().chain("日".bytes()).chain("💩".bytes()).map(|byte| vec![byte]));
    tokens.push(b"</s>".to_vec());
    Arc::new(tokens)
}

/// A pure function of the context: repeats the earlier successor of its last two tokens, with
/// exceptions.
fn target(context: &[TokenId], size: usize) -> TokenId {
    let seed = context
        .iter()
        .rev()
        .take(4)
        .fold(context.len() as u64 / 7, |seed, &token| SplitMix64::mix(seed ^ u64::from(token)));
    let tail = &context[context.len().saturating_sub(2)..];
    let earlier = (tail.len()..context.len()).rev().find(|&end| &context[end - tail.len()..end] == tail);
    match earlier {
        Some(end) if seed % 5 != 0 => context[end],
        _ => (SplitMix64::mix(seed + 1) % size as u64) as TokenId,
    }
}

/// Row of a position of a scored prompt; at some positions the two most likely tokens tie.
fn told(context: &[TokenId], size: usize) -> Option<Row> {
    let tie = SplitMix64::mix(context.len() as u64 ^ u64::from(context[0])).is_multiple_of(5);
    (!tie).then(|| Row::of(target(context, size)))
}

/// Distribution returned with a sample, at some positions: the token itself and two others.
fn sample_distribution(context: &[TokenId], size: usize) -> Option<Vec<f64>> {
    let mut distribution = vec![0.0; size];
    let token = target(context, size) as usize;
    for (at, p) in [(token + 2, 0.1), (token + 1, 0.2), (token, 0.7)] {
        distribution[at % size] = p;
    }
    (!context.len().is_multiple_of(3)).then_some(distribution)
}

/// A drafter that mostly agrees with the target; wide drafts also carry a sibling.
fn scripted(context: &[TokenId], gamma: usize, size: usize, wide: bool) -> Tree {
    let mut tree = Tree::default();
    let mut full = context.to_vec();
    let mut parent = None;
    while tree.len() < gamma {
        let right = target(&full, size);
        let hash = SplitMix64::mix(full.len() as u64 * 31 + u64::from(right));
        let wrong = (hash % size as u64) as TokenId;
        let node = |token| Node::new(token, parent, Vote::new(Source::Model, Features::default()));
        if wide && tree.len() + 1 < gamma {
            tree.push(node(wrong));
        }
        let token = if hash.is_multiple_of(6) { wrong } else { right };
        parent = Some(tree.push(node(token)));
        full.push(token);
    }
    tree.truncate(gamma);
    tree
}

fn case(prompt: u64, methods: &[VerifyMethod], gamma: Option<usize>, model: bool) -> Case {
    let vocabulary = vocabulary();
    let size = vocabulary.len() as u64;
    let mut random = SplitMix64::new(prompt);
    let stops = ["ab.", "é", "b a", "本日", "\n\n", "cc", " x\n", "x"];
    let stop = (0..random.below(3)).map(|_| stops[random.below(8) as usize].to_owned()).collect();
    let len = 4 + random.below(20);
    // Every other prompt with one lookup or a model alone, the others with every lookup as well.
    let lookups = match (prompt % 2 == 1, model) {
        (true, _) => super::distribution::lookups(),
        (false, true) => Vec::new(),
        (false, false) => vec![LookupSpec::PromptLookup(Ngram { min: 1, max: 6 })],
    };
    let rules = Rules { methods: methods.to_vec(), gamma_fixed: gamma, lookups, ..Rules::default() };
    let resources = Resources {
        shared: super::distribution::shared(),
        model: model.then_some((prompt % 3) as u8),
        ..Resources::default()
    };
    Case {
        prompt: (0..len).map(|_| random.below(size - 1) as TokenId).collect(),
        ending: Ending {
            stop,
            eos: vec![size as TokenId - 1],
            stop_buffer: if random.chance(2) { StopBuffer::Longest } else { StopBuffer::Beginning },
            ..Ending::default()
        },
        max: 1 + random.below(40) as usize,
        vocabulary,
        rules,
        resources,
        manner: Manner { lanes: 1 + random.below(8) as usize, ..Manner::default() },
        temperature: 0.0,
    }
}

/// Plays a case with random cuts and switches.
fn speculated(case: &Case, seed: u64, chaos: &mut dyn FnMut() -> Option<Chaos>) -> Outcome {
    let size = case.vocabulary.len();
    let mut cuts = SplitMix64::new(seed ^ 1);
    let mut switches = SplitMix64::new(seed ^ 2);
    let mostly = switches.below(4);
    let wide = seed.is_multiple_of(2) && case.rules.methods == [VerifyMethod::Tree];
    play(
        case,
        &mut Hooks {
            sample: &mut |ask| target(ask.context, size),
            told: &mut |context| told(context, size),
            distribution: &mut |context| sample_distribution(context, size),
            draft: &mut |context, gamma| scripted(context, gamma, size, wide),
            allow: &mut |_, _| switches.below(4) >= mostly,
            chunk: &mut || 1 + cuts.below(4) as usize,
            chaos,
            wrong: Wrong::default(),
        },
    )
}

fn reference(case: &Case) -> (String, Vec<TokenId>, &'static str) {
    let size = case.vocabulary.len();
    let (text, tokens, finish) = plain(case, &mut |ask: &Ask<'_>| target(ask.context, size));
    (text, tokens, finish.name())
}

#[rstest]
#[case::fan_out(&[VerifyMethod::FanOut])]
#[case::tree(&[VerifyMethod::Tree])]
#[case::score_then_fan_out(&[VerifyMethod::Score, VerifyMethod::FanOut])]
fn the_text_is_the_plain_text(
    #[case] methods: &[VerifyMethod],
    #[values(false, true)] model: bool,
    #[values(1, 2, 3, 4, 5, 6, 7, 8)] gamma: usize,
) {
    let (mut speculations, mut accepted) = (0, 0);
    for prompt in 0..1_000 {
        let case = case(prompt, methods, Some(gamma), model);
        let (text, tokens, finish) = reference(&case);
        let outcome = speculated(&case, prompt ^ gamma as u64, &mut || None);
        let summary = &outcome.summary;
        assert_eq!((&outcome.text, &outcome.tokens), (&text, &tokens), "prompt {prompt}: {case:?}");
        assert_eq!(summary.finish.map(foretell_core::session::Finish::name), Some(finish), "prompt {prompt}");
        assert_eq!(summary.output_tokens as usize, tokens.len(), "prompt {prompt}");
        speculations += u32::from(summary.speculated);
        accepted += summary.accepted;
    }
    assert!(speculations > 400 && accepted > 400, "too tame: {speculations} speculated, {accepted} accepted");
}

#[test]
fn with_the_controller_s_decisions_it_speculates_and_the_text_is_the_plain_text() {
    let mut speculations = 0;
    for prompt in 0..1_000 {
        for model in [false, true] {
            let mut case = case(prompt, &[VerifyMethod::Tree], None, model);
            case.max *= 8;
            let (text, tokens, finish) = reference(&case);
            let outcome = speculated(&case, prompt, &mut || None);
            assert_eq!((&outcome.text, &outcome.tokens), (&text, &tokens), "prompt {prompt}");
            assert_eq!(outcome.summary.finish.map(foretell_core::session::Finish::name), Some(finish));
            speculations += u32::from(outcome.summary.speculated);
        }
    }
    assert!(speculations > 50, "too tame: {speculations}");
}

pub fn some_chaos() -> impl Strategy<Value = Option<Chaos>> {
    prop_oneof![
        12 => Just(None),
        1 => Just(Some(Chaos::Fault(Fault::Draft))),
        1 => Just(Some(Chaos::Fault(Fault::Verify))),
        1 => Just(Some(Chaos::Fault(Fault::Plain))),
        1 => (0u64..12).prop_map(|s| Some(Chaos::Fault(Fault::RetryAfter(Duration::from_secs(s))))),
        1 => (1u64..9).prop_map(|age| Some(Chaos::Stale(age))),
        1 => Just(Some(Chaos::Misfit)),
        1 => Just(Some(Chaos::Torn)),
        1 => (0u64..6).prop_map(|s| Some(Chaos::Silence(s))),
        1 => prop_oneof![9 => Just(None), 1 => Just(Some(Chaos::Doubt)), 1 => Just(Some(Chaos::Gone))],
    ]
}

/// Number of cases of the property; FORETELL_CASES overrides it (`make reliability`).
pub fn cases() -> u32 {
    std::env::var("FORETELL_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(1_500)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn whatever_happens_no_token_is_lost_or_doubled(
        prompt in 0u64..10_000,
        seed in any::<u64>(),
        gamma in prop_oneof![Just(None), (1usize..6).prop_map(Some)],
        model in any::<bool>(),
        methods in proptest::sample::select(vec![vec![VerifyMethod::Tree], vec![VerifyMethod::Score, VerifyMethod::FanOut]]),
        script in proptest::collection::vec(some_chaos(), 0..120),
    ) {
        let case = case(prompt, &methods, gamma, model);
        let (text, tokens, finish) = reference(&case);
        let mut script = script.into_iter();
        let outcome = speculated(&case, seed, &mut || script.next().flatten());
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
