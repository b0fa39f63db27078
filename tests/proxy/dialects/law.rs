//! Unseeded sampling: the tokens that come through are distributed as the engine itself draws them.
//!
//! The fakes' model is a function that is known here, so the law of a short text is a sum over its branches,
//! and counts of many texts are put to it (Pearson's chi-square). A proxy that accepted whatever it drafted
//! fails the same test.

use std::collections::{BTreeMap, BTreeSet};

use foretell::openai::Route;
use foretell::units::TokenId;
use futures_util::stream::{self, StreamExt};
use serde_json::{Value, json};

use super::house::{House, setup};
use super::table::{Row, TABLE};
use crate::client::Ask;
use crate::fakes::sample::{Noise, Pipeline, Sampling};
use crate::fakes::toy::{Context, Toy};

const DRAWS: usize = 800;
/// Drafted tokens that are accepted in so many draws, at least: without them the law would be asked of rides alone.
const MANY: u64 = DRAWS as u64 / 20;
/// Draws for each of many parameters.
const FEW: usize = 300;
const TEMPERATURE: f64 = 0.8;
/// Branches that are followed at every place; all others are one class together.
const WIDE: usize = 5;
/// Tokens of a round, behind those that are ridden.
const ROUND: usize = 2;

/// Sampling of so many tokens with nothing but a temperature.
fn plain(pipeline: Pipeline, long: usize) -> Sampling {
    Sampling { temperature: TEMPERATURE, ..Sampling::new(pipeline, Noise::fresh(), long) }
}

/// The likeliest tokens behind a context whose first `prompt` tokens are no output, with their probabilities.
fn branches(toy: &Toy, sampling: &Sampling, context: &Context, prompt: usize) -> Vec<(TokenId, f64)> {
    let mut all = sampling.law(&toy.row(context, context.len()), context, prompt, toy.eos());
    all.sort_by(|a, b| b.1.total_cmp(&a.1));
    all.truncate(WIDE);
    all
}

/// The probability of every likely text.
fn law(toy: &Toy, sampling: &Sampling, prompt: &[TokenId], long: usize) -> BTreeMap<String, f64> {
    let mut open = vec![(Vec::new(), 1.0)];
    for _ in 0..long {
        let grow = |(path, share): (Vec<TokenId>, f64)| {
            let context = Context::new(&[prompt, &path].concat());
            let grown = |(token, p)| ([path.clone(), vec![token]].concat(), share * p);
            branches(toy, sampling, &context, prompt.len()).into_iter().map(grown).collect::<Vec<_>>()
        };
        open = open.into_iter().flat_map(grow).collect();
    }
    let mut law = BTreeMap::new();
    for (path, share) in open {
        *law.entry(toy.decode(&path, true)).or_default() += share;
    }
    law
}

/// A prompt in which every likely first token occurs with the likeliest ones behind it that are ridden and one
/// more, so that each of them is drafted from; as text, one that is cut into just these tokens again.
fn prompt(toy: &Toy, ridden: usize, as_text: bool) -> Vec<TokenId> {
    let whole = |token: TokenId| {
        let text = toy.name(token);
        text.is_ascii() && !text.is_empty() && token != toy.eos()
    };
    let free = plain(Pipeline::VLLM, ridden + ROUND);
    let likely = |last: TokenId| branches(toy, &free, &Context::new(&[last]), 1).into_iter().take(4);
    let fits = |&last: &TokenId| {
        likely(last).all(|(token, _)| whole(token) && likely(token).all(|(next, _)| whole(next)))
    };
    let between = if as_text { toy.encode("\n") } else { Vec::new() };
    let run = |(token, _)| {
        let next = |&token: &TokenId| likely(token).next().map(|(next, _)| next);
        let run = std::iter::successors(Some(token), next).take(ridden + 1);
        run.chain(between.iter().copied()).collect::<Vec<_>>()
    };
    let prompt = |last: TokenId| likely(last).flat_map(run).chain([last]).collect::<Vec<_>>();
    let same = |prompt: &Vec<TokenId>| !as_text || toy.encode(&toy.decode(prompt, true)) == *prompt;
    let mut prompts = (200..4000).filter(fits).map(prompt);
    prompts.find(same).expect("a place whose branches are all plain text")
}

/// Chi-square over classes of at least five expected, and the probability of one as large.
fn p_value(law: &BTreeMap<String, f64>, counts: &BTreeMap<String, usize>) -> f64 {
    let draws: usize = counts.values().sum();
    let (mut chi, mut classes, mut seen, mut sure) = (0.0, 0, 0, 0.0);
    for (text, share) in law {
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

/// Tokens of a text before this engine.
fn long(row: &Row) -> usize {
    row.ridden + ROUND
}

/// Counts of so many texts through the proxy, and the drafted tokens that were accepted; `None` if such a request
/// is relayed, and so the engine's own.
async fn drawn(
    house: &House,
    prompt: &[TokenId],
    more: &Value,
    draws: usize,
) -> Option<(BTreeMap<String, usize>, u64)> {
    let text = || json!(house.engine.house().toy.decode(prompt, true));
    let prompt = if house.row.takes_ids { json!(prompt) } else { text() };
    let mut fields = json!({"prompt": prompt, "max_tokens": long(house.row), "temperature": TEMPERATURE, "top_p": 1,
        "top_k": -1, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0});
    fields.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let ask = Ask::new(Route::Completions, false, fields);
    let first = house.through(&ask).await.message;
    if first.head.get("x-foretell-path") == Some("bypassed") {
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

/// Puts texts to the law; tells how many drafted tokens were accepted in them, `None` if they are relayed.
async fn follows(
    house: &House,
    prompt: &[TokenId],
    more: &Value,
    sampling: &Sampling,
    draws: usize,
) -> Option<u64> {
    let (mut counts, accepted) = drawn(house, prompt, more, draws).await?;
    let name = house.row.name;
    let law = law(&house.engine.house().toy, sampling, prompt, long(house.row));
    let mut p = p_value(&law, &counts);
    if p <= 0.001 {
        // One honest run in a thousand comes here; a fault comes here again.
        counts = drawn(house, prompt, more, draws).await.unwrap().0;
        p = p_value(&law, &counts);
    }
    assert!(p > 0.001, "{name} {more}: p = {p:.2e}\n{counts:?}\n{law:?}");
    Some(accepted)
}

/// Each with its parameter set alone: where the engines' seeds are no help, the distribution must be the engine's.
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
async fn unseeded_texts_follow_the_engines_own_law() {
    for row in TABLE.iter().filter(|row| !row.name.ends_with("deterministic")) {
        let house = House::build(row, setup(None)).await;
        let prompt = prompt(&house.engine.house().toy, row.ridden, !row.takes_ids);
        let free = plain(row.pipeline, long(row));
        let narrow = Sampling { top_k: 4, ..free.clone() };
        for (more, sampling) in [(json!({}), free), (json!({"top_k": 4}), narrow)] {
            // A ride has to last longer than the calls beside it that have to be answered before it can be left.
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
async fn unseeded_texts_follow_the_law_of_each_parameter_by_itself() {
    let (mut asked, mut leapt) = (BTreeSet::new(), BTreeSet::new());
    for row in TABLE.iter().filter(|row| !row.name.ends_with("deterministic")) {
        let house = House::build(row, setup(None)).await;
        let toy = &house.engine.house().toy;
        let (prompt, free) = (prompt(toy, row.ridden, !row.takes_ids), plain(row.pipeline, long(row)));
        let biased = branches(toy, &free, &Context::new(&prompt), prompt.len())[0].0;
        for (more, sampling) in singly(&free, biased) {
            let name = more.as_object().unwrap().keys().next().unwrap().clone();
            asked.insert(name.clone());
            // What a parameter leaves of the likely tokens may be none that the prompt has for a draft.
            if follows(&house, &prompt, &more, &sampling, FEW).await > Some(0) {
                leapt.insert(name);
            }
        }
        house.leave().await;
    }
    assert_eq!(leapt, asked, "somebody leaps with each of them");
}

#[test]
fn a_proxy_that_accepts_whatever_it_drafted_would_be_found_out() {
    let toy = Toy::new(setup(None).temper);
    let prompt = prompt(&toy, 1, false);
    let long = 1 + ROUND;
    let free = plain(Pipeline::VLLM, long);
    let wide = Sampling { top_k: WIDE, ..free.clone() };
    let law = law(&toy, &free, &prompt, long);
    let uniform = |draw: usize, place: usize| foretell::units::Dice::at(draw as u64, place);
    let mut counts = [BTreeMap::new(), BTreeMap::new()];
    for draw in 0..DRAWS {
        for (accepts_all, counts) in [false, true].into_iter().zip(&mut counts) {
            let mut path = Vec::new();
            for place in 0..long {
                let context = Context::new(&[prompt.as_slice(), &path].concat());
                let mut left = uniform(draw, place);
                let all = branches(&toy, &wide, &context, prompt.len());
                let drafted = place == 1 && accepts_all;
                let taken = all.iter().find(|(_, p)| {
                    left -= p;
                    drafted || left <= 0.0
                });
                path.push(taken.unwrap_or(&all[0]).0);
            }
            *counts.entry(toy.decode(&path, true)).or_default() += 1;
        }
    }
    let exact = super::law::law(&toy, &wide, &prompt, long);
    assert!(p_value(&exact, &counts[0]) > 0.001, "an honest sampler is not found out");
    assert!(p_value(&law, &counts[1]) < 1e-6, "p = {}", p_value(&law, &counts[1]));
}
