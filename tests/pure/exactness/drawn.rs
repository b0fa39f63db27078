//! A million draws, with fixed seeds: every token of the client's output against the distribution
//! of its position, by chi-square.
//!
//! The enumeration ([`super::distribution`]) is exact for short outputs over tiny vocabularies;
//! here the outputs are longer, the drafts are deeper, and the draws are those of the shipped
//! judge.

use std::collections::BTreeMap;

use super::distribution::{Drafter, case, draft};
use super::toy::{ScoringToy, Target, Toy};
use super::world::{Case, Hooks, Wrong, play_judged};
use foretell_core::control::Control;
use foretell_core::session::Ending;
use foretell_core::session::accept::{Accept, Judge};
use foretell_core::units::{SplitMix64, TokenId};
use foretell_core::words::VerifyMethod;
use rstest::rstest;

/// Draws of a case; the four cases make a million.
const DRAWS: usize = 250_000;
/// Tokens of an output.
const TOKENS: usize = 10;

fn drawn(weights: &[f64], rng: &mut SplitMix64) -> TokenId {
    let mut left = rng.unit() * weights.iter().sum::<f64>();
    let found = weights.iter().position(|weight| {
        left -= weight;
        left < 0.0
    });
    found.unwrap_or_else(|| weights.iter().rposition(|weight| *weight > 0.0).unwrap_or(0)) as TokenId
}

/// The probability that chi-square with `freedom` degrees of freedom is at least this (Wilson and
/// Hilferty, 1931; Abramowitz and Stegun 26.2.17): accurate to three digits for more than 30.
fn tail(chi_square: f64, freedom: f64) -> f64 {
    let ninth = 2.0 / (9.0 * freedom);
    let z = ((chi_square / freedom).cbrt() - (1.0 - ninth)) / ninth.sqrt();
    let t = 1.0 / (1.0 + 0.231_641_9 * z.abs());
    let series = [0.319_381_530, -0.356_563_782, 1.781_477_937, -1.821_255_978, 1.330_274_429];
    let sum = series.iter().rev().fold(0.0, |sum, part| (sum + part) * t);
    let above = (-z * z / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt() * sum;
    if z > 0.0 { above } else { 1.0 - above }
}

/// p of the tokens of `DRAWS / TOKENS` outputs, and the number of outputs that were speculated on.
fn p(target: impl Target, case: &Case, drafter: Drafter, wrong: Wrong) -> (f64, usize) {
    let (mut counts, mut speculations) = (BTreeMap::<Vec<TokenId>, Vec<u32>>::new(), 0);
    for seed in 0..(DRAWS / TOKENS) as u64 {
        let mut rng = SplitMix64::new(SplitMix64::mix(seed));
        let mut hooks = Hooks {
            sample: &mut |ask| drawn(&target.weights(ask.context), &mut rng),
            told: &mut |context| target.row(context),
            distribution: &mut |_| None,
            draft: &mut |context, gamma| draft(drafter, target, context, gamma),
            allow: &mut |event, _| (seed >> (event % 8)) & 3 != 0,
            chunk: &mut || 1 + (seed % 3) as usize,
            chaos: &mut || None,
            wrong,
        };
        let judge = Judge::new(Accept::default(), seed);
        let outcome = play_judged(case, Control::new(), judge, &mut hooks);
        assert_eq!(outcome.tokens.len(), TOKENS);
        speculations += usize::from(outcome.summary.speculated);
        let text = [case.prompt.clone(), outcome.tokens].concat();
        for at in case.prompt.len()..text.len() {
            // The distribution of a toy depends on two tokens and the length.
            let key = [&[at as TokenId], &text[at - 2..at]].concat();
            let row = counts.entry(key).or_insert_with(|| vec![0; case.vocabulary.len()]);
            row[text[at] as usize] += 1;
        }
    }
    let (mut chi_square, mut freedom) = (0.0, 0.0);
    for (key, row) in &counts {
        let context = [vec![0; key[0] as usize - 2], key[1..].to_vec()].concat();
        let (weights, all) = (target.weights(&context), f64::from(row.iter().sum::<u32>()));
        // Positions with too few samples are left out of chi-square.
        if weights.iter().any(|weight| *weight > 0.0 && weight * all < 5.0) {
            continue;
        }
        let open = weights.iter().zip(row).filter(|(weight, _)| **weight > 0.0);
        assert!(
            weights.iter().zip(row).all(|(weight, count)| *weight > 0.0 || *count == 0),
            "{key:?}: {row:?}"
        );
        freedom += open.clone().count() as f64 - 1.0;
        chi_square += open
            .map(|(weight, &count)| (f64::from(count) - weight * all).powi(2) / (weight * all))
            .sum::<f64>();
    }
    assert!(freedom > 100.0, "{freedom}");
    (tail(chi_square, freedom), speculations)
}

fn long(vocabulary: usize, drafter: Drafter, gamma: usize, methods: &[VerifyMethod]) -> Case {
    Case { max: TOKENS, ending: Ending::default(), ..case(vocabulary, drafter, gamma, methods) }
}

#[rstest]
#[case::fan_out(Drafter::Chain, 5, &[VerifyMethod::FanOut])]
#[case::tree(Drafter::Bush, 6, &[VerifyMethod::Tree])]
fn a_quarter_of_a_million_draws_have_the_distribution_of_their_positions(
    #[case] drafter: Drafter,
    #[case] gamma: usize,
    #[case] methods: &[VerifyMethod],
) {
    assert_fits(Toy { vocabulary: 8, salt: 5 }, &long(8, drafter, gamma, methods), drafter);
}

fn assert_fits(target: impl Target, case: &Case, drafter: Drafter) {
    let (p, speculations) = p(target, case, drafter, Wrong::default());
    println!("{drafter:?}: p {p:.3} over {DRAWS} draws, {speculations} outputs speculated");
    assert!(p > 0.01, "p {p}");
    assert!(speculations > DRAWS / TOKENS / 2, "{speculations} speculated");
}

/// The judge itself draws.
#[test]
fn draws_from_a_scored_prompt_have_the_distribution_of_their_positions() {
    let (methods, drafter) = ([VerifyMethod::Score, VerifyMethod::FanOut], Drafter::Chain);
    let target = ScoringToy { salt: 9, special: false };
    assert_fits(target, &long(4, drafter, 3, &methods), drafter);
}

/// A backend that draws a second time if the first draw does not match the draft.
#[test]
fn a_slight_preference_for_drafts_is_caught() {
    let (methods, drafter) = ([VerifyMethod::Tree], Drafter::Chain);
    let wrong = Wrong { redraw: 1, ..Wrong::default() };
    let (p, _) = p(Toy { vocabulary: 8, salt: 5 }, &long(8, drafter, 5, &methods), drafter, wrong);
    assert!(p < 1e-6, "p {p}");
}

#[test]
fn the_tail_of_chi_square_is_that_of_tables() {
    // 5 % and 1 % points for 100 and 1,000 degrees of freedom.
    for (chi_square, freedom, wanted) in
        [(124.342, 100.0, 0.05), (135.807, 100.0, 0.01), (1106.969, 1000.0, 0.01)]
    {
        assert!((tail(chi_square, freedom) - wanted).abs() < wanted / 50.0, "{}", tail(chi_square, freedom));
    }
}
