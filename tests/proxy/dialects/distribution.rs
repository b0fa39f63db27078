//! Unseeded sampling: tokens that come through the proxy have the engine's own distribution.
//!
//! The model of the fakes is a known function, so the distribution of a short text is a sum over
//! its branches, and counts of many texts are tested against it (Pearson's chi-square). A proxy
//! that accepts every draft fails the same test.

use std::collections::{BTreeMap, BTreeSet};

use foretell_core::units::TokenId;
use foretell_wire::openai::Route;
use futures_util::stream::{self, StreamExt};
use serde_json::{Value, json};

use super::house::{House, setup};
use super::table::TABLE;
use crate::client::Ask;
use crate::fakes::sample::{Noise, Pipeline, Sampling};
use crate::fakes::toy::{Context, Toy};

const DRAWS: usize = 800;
/// Minimum number of accepted draft tokens in `DRAWS` texts: with fewer, the test would measure
/// plain tokens only.
const MANY: u64 = DRAWS as u64 / 20;
/// Texts drawn for each parameter.
const FEW: usize = 300;
const TEMPERATURE: f64 = 0.8;
/// Branches that are followed at every position; all others together are one class.
const WIDE: usize = 5;
/// Tokens of a round, after the plain tokens.
const ROUND: usize = 2;
/// Tokens of a text: a plain one, and those of a round.
const LONG: usize = 1 + ROUND;

/// Sampling of `long` tokens with a temperature and no other parameter.
fn plain(pipeline: Pipeline, long: usize) -> Sampling {
    Sampling { temperature: TEMPERATURE, ..Sampling::new(pipeline, Noise::fresh(), long) }
}

/// The most likely next tokens after a context whose first `prompt` tokens are the prompt, with
/// their probabilities.
fn branches(toy: &Toy, sampling: &Sampling, context: &Context, prompt: usize) -> Vec<(TokenId, f64)> {
    let mut all = sampling.distribution(&toy.row(context, context.len()), context, prompt, toy.eos());
    all.sort_by(|a, b| b.1.total_cmp(&a.1));
    all.truncate(WIDE);
    all
}

/// The probability of every likely text.
fn distribution(toy: &Toy, sampling: &Sampling, prompt: &[TokenId], long: usize) -> BTreeMap<String, f64> {
    let mut open = vec![(Vec::new(), 1.0)];
    for _ in 0..long {
        let grow = |(path, share): (Vec<TokenId>, f64)| {
            let context = Context::new(&[prompt, &path].concat());
            let grown = |(token, p)| ([path.clone(), vec![token]].concat(), share * p);
            branches(toy, sampling, &context, prompt.len()).into_iter().map(grown).collect::<Vec<_>>()
        };
        open = open.into_iter().flat_map(grow).collect();
    }
    let mut distribution = BTreeMap::new();
    for (path, share) in open {
        *distribution.entry(toy.decode(&path, true)).or_default() += share;
    }
    distribution
}

/// A prompt in which every likely first token occurs, followed by its most likely next one, so that
/// there is a draft after each of them.
fn prompt(toy: &Toy) -> Vec<TokenId> {
    let whole = |token: TokenId| {
        let text = toy.name(token);
        text.is_ascii() && !text.is_empty() && token != toy.eos()
    };
    let free = plain(Pipeline::VLLM, LONG);
    let likely = |last: TokenId| branches(toy, &free, &Context::new(&[last]), 1).into_iter().take(4);
    let fits = |&last: &TokenId| {
        likely(last).all(|(token, _)| whole(token) && likely(token).all(|(next, _)| whole(next)))
    };
    let pair = |(token, _)| [token].into_iter().chain(likely(token).next().map(|(next, _)| next));
    let prompt = |last: TokenId| likely(last).flat_map(pair).chain([last]).collect::<Vec<_>>();
    (200..4000).find(fits).map(prompt).expect("a token whose branches are all plain text")
}

/// Chi-square over classes with an expected count of at least five; returns the probability of a
/// value as large.
fn p_value(distribution: &BTreeMap<String, f64>, counts: &BTreeMap<String, usize>) -> f64 {
    let draws: usize = counts.values().sum();
    let (mut chi, mut classes, mut seen, mut sure) = (0.0, 0, 0, 0.0);
    for (text, share) in distribution {
        let expected = share * draws as f64;
        if expected >= 5.0 {
            let count = counts.get(text).copied().unwrap_or(0);
            chi += (count as f64 - expected).powi(2) / expected;
            (classes, seen, sure) = (classes + 1, seen + count, sure + share);
        }
    }
    let rest = ((1.0 - sure) * draws as f64).max(1e-9);
    chi += ((draws - seen) as f64 - rest).powi(2) / rest;
    upper_tail(chi, f64::from(classes))
}

/// Wilson and Hilferty: the cube root of a chi-square over its degrees of freedom is nearly normal.
fn upper_tail(chi: f64, freedom: f64) -> f64 {
    let spread = 2.0 / (9.0 * freedom);
    let z = ((chi / freedom).cbrt() - (1.0 - spread)) / spread.sqrt();
    0.5 * libm::erfc(z / std::f64::consts::SQRT_2)
}

/// Counts of `draws` texts through the proxy, and the number of accepted draft tokens; `None` if
/// such a request is passed through, so that its text is the engine's own.
async fn drawn(
    house: &House,
    prompt: &[TokenId],
    more: &Value,
    draws: usize,
) -> Option<(BTreeMap<String, usize>, u64)> {
    let mut fields = json!({"prompt": prompt, "max_tokens": LONG, "temperature": TEMPERATURE, "top_p": 1,
        "top_k": -1, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0});
    fields.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let ask = Ask::new(Route::Completions, false, fields);
    let first = house.through(&ask).await.message;
    if first.head.get("x-foretell-path") == Some("passthrough") {
        let parameter = first.head.get("x-foretell-parameter");
        assert!(parameter.is_some(), "{}: {:?}", house.row.name, first.head.get("x-foretell-reason"));
        return None;
    }
    let answers: Vec<_> =
        stream::iter(0..draws).map(|_| house.through(&ask)).buffer_unordered(8).collect().await;
    let mut counts = BTreeMap::new();
    let mut accepted = 0;
    for answer in answers {
        accepted += answer.foretell()["accepted"].as_u64().unwrap_or(0);
        *counts.entry(answer.plain.text).or_default() += 1;
    }
    Some((counts, accepted))
}

/// Tests texts against the distribution. Returns the number of draft tokens that were accepted in
/// them, `None` if they are passed through.
async fn follows(
    house: &House,
    prompt: &[TokenId],
    more: &Value,
    sampling: &Sampling,
    draws: usize,
) -> Option<u64> {
    let (mut counts, accepted) = drawn(house, prompt, more, draws).await?;
    let name = house.row.name;
    let distribution = distribution(&house.engine.house().toy, sampling, prompt, LONG);
    let mut p = p_value(&distribution, &counts);
    if p <= 0.001 {
        // One correct run in a thousand comes here; a fault fails the second test too.
        counts = drawn(house, prompt, more, draws).await.unwrap().0;
        p = p_value(&distribution, &counts);
    }
    assert!(p > 0.001, "{name} {more}: p = {p:.2e}\n{counts:?}\n{distribution:?}");
    Some(accepted)
}

/// Each parameter set alone: where the engines' seeds do not decide the text, the distribution must
/// be the engine's.
fn singly(plain: &Sampling, biased: TokenId) -> Vec<(Value, Sampling)> {
    let plain = || plain.clone();
    vec![
        (json!({"temperature": 1.2}), Sampling { temperature: 1.2, ..plain() }),
        (json!({"top_p": 0.9}), Sampling { top_p: 0.9, ..plain() }),
        (json!({"min_p": 0.1}), Sampling { min_p: 0.1, ..plain() }),
        (json!({"presence_penalty": 0.6}), Sampling { presence: 0.6, ..plain() }),
        (json!({"frequency_penalty": 0.4}), Sampling { frequency: 0.4, ..plain() }),
        (json!({"repetition_penalty": 1.1}), Sampling { repetition: 1.1, ..plain() }),
        (
            json!({"logit_bias": {biased.to_string(): -1.5}}),
            Sampling { bias: vec![(biased, -1.5)], ..plain() },
        ),
        (json!({"seed": 7}), plain()),
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unseeded_texts_follow_the_engines_own_distribution() {
    for row in TABLE.iter().filter(|row| !row.name.ends_with("deterministic")) {
        let house = House::build(row, setup(None)).await;
        let prompt = prompt(&house.engine.house().toy);
        let free = plain(row.pipeline, LONG);
        let narrow = Sampling { top_k: 4, ..free.clone() };
        for (more, sampling) in [(json!({}), free), (json!({"top_k": 4}), narrow)] {
            // A plain request has to last longer than the concurrent calls that must be answered
            // before the first round.
            let mut accepted = None;
            for slower in [1, 2, 2, 2, 2, 2, 2] {
                house.slow_down(slower);
                accepted = follows(&house, &prompt, &more, &sampling, DRAWS).await;
                if accepted > Some(MANY) {
                    break;
                }
            }
            assert!(accepted > Some(MANY), "{} {more}: {accepted:?} accepted", row.name);
        }
        house.leave().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unseeded_texts_follow_the_distribution_of_each_parameter_by_itself() {
    let (mut asked, mut speculated) = (BTreeSet::new(), BTreeSet::new());
    for row in TABLE.iter().filter(|row| !row.name.ends_with("deterministic")) {
        let house = House::build(row, setup(None)).await;
        let toy = &house.engine.house().toy;
        let (prompt, free) = (prompt(toy), plain(row.pipeline, LONG));
        let biased = branches(toy, &free, &Context::new(&prompt), prompt.len())[0].0;
        for (more, sampling) in singly(&free, biased) {
            let name = more.as_object().unwrap().keys().next().unwrap().clone();
            asked.insert(name.clone());
            // The prompt may have a draft for none of the tokens that a parameter leaves.
            if follows(&house, &prompt, &more, &sampling, FEW).await > Some(0) {
                speculated.insert(name);
            }
        }
        house.leave().await;
    }
    assert_eq!(speculated, asked, "each of them is speculated on before some engine");
}

#[test]
fn the_test_detects_a_proxy_that_accepts_every_draft() {
    let toy = Toy::new(setup(None).temper);
    let prompt = prompt(&toy);
    let long = LONG;
    let free = plain(Pipeline::VLLM, long);
    let wide = Sampling { top_k: WIDE, ..free.clone() };
    let distribution = distribution(&toy, &free, &prompt, long);
    let uniform = |draw: usize, position: usize| foretell_core::units::SplitMix64::at(draw as u64, position);
    let mut counts = [BTreeMap::new(), BTreeMap::new()];
    for draw in 0..DRAWS {
        for (accepts_all, counts) in [false, true].into_iter().zip(&mut counts) {
            let mut path = Vec::new();
            for position in 0..long {
                let context = Context::new(&[prompt.as_slice(), &path].concat());
                let mut left = uniform(draw, position);
                let all = branches(&toy, &wide, &context, prompt.len());
                let drafted = position == 1 && accepts_all;
                let taken = all.iter().find(|(_, p)| {
                    left -= p;
                    drafted || left <= 0.0
                });
                path.push(taken.unwrap_or(&all[0]).0);
            }
            *counts.entry(toy.decode(&path, true)).or_default() += 1;
        }
    }
    let exact = super::distribution::distribution(&toy, &wide, &prompt, long);
    assert!(p_value(&exact, &counts[0]) > 0.001, "a correct sampler passes");
    assert!(p_value(&distribution, &counts[1]) < 1e-6, "p = {}", p_value(&distribution, &counts[1]));
}
