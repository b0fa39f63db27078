//! Noise that is a function of the position: with a seed the text is that of plain decoding, for
//! any draft and any switch of the session. Noise that is not must be caught.

use super::backend::{Ask, plain};
use super::distribution::{Drafter, case, key};
use super::toy::{Distribution, Target, Toy, distance, distribution};
use super::world::{Case, Hooks, Wrong, play};
use foretell_core::draft::{Features, Source, Tree};
use foretell_core::units::TokenId;
use foretell_core::words::VerifyMethod;
use rstest::rstest;

/// Kinds of noise at a position, with their weights, and the noise of each kind for each token.
const NOISE_WEIGHTS: [f64; 3] = [0.5, 0.3, 0.2];
const NOISE: [[f64; 4]; 3] = [[0.0, 0.9, -0.4, 0.2], [1.4, -0.3, 0.1, 0.5], [-0.6, 0.2, 1.7, 0.9]];

#[derive(Clone, Copy, Debug, PartialEq)]
enum NoiseBug {
    None,
    KeyedByRound,
    WithoutToken,
    RestartedPerCall,
}

/// argmax of logit and noise: the target's, or the drafter's with its own logits and the same
/// noise.
fn coupled(weights: &[f64], kind: usize, without_token: bool) -> TokenId {
    let score = |token: usize| weights[token].ln() + NOISE[kind][if without_token { 0 } else { token }];
    (0..weights.len()).max_by(|&a, &b| score(a).total_cmp(&score(b)).then(b.cmp(&a))).unwrap_or(0) as TokenId
}

/// Joint distribution of the noise and the text: with a seed the text is a function of the noise,
/// plain or not.
fn noisy_distribution(toy: Toy, case: &Case, switches: Option<u32>, bug: NoiseBug) -> Distribution {
    distribution(|chance| {
        // Positions beyond the limit are sampled by eager backends but never read.
        let mut kinds: Vec<usize> = (0..case.max).map(|_| chance.pick(&NOISE_WEIGHTS)).collect();
        kinds.extend([0; 4]);
        let mut sample = |ask: &Ask<'_>| {
            let index = match bug {
                NoiseBug::None | NoiseBug::WithoutToken => ask.position,
                NoiseBug::KeyedByRound => (ask.position + ask.call) % case.max,
                NoiseBug::RestartedPerCall => ask.offset,
            };
            coupled(&toy.weights(ask.context), kinds[index], bug == NoiseBug::WithoutToken)
        };
        let (text, tokens, finish) = match switches {
            None => plain(case, &mut sample),
            Some(switches) => {
                let drafter = Toy { salt: toy.salt + 1, ..toy };
                let outcome = play(
                    case,
                    &mut Hooks {
                        sample: &mut sample,
                        told: &mut |_| None,
                        distribution: &mut |_| None,
                        draft: &mut |context, gamma| {
                            let mut full = context.to_vec();
                            for position in (context.len() - case.prompt.len()..).take(gamma) {
                                full.push(coupled(&drafter.weights(&full), kinds[position], false));
                            }
                            Tree::chain(&full[context.len()..], Source::Model, Features::default())
                        },
                        allow: &mut |event, _| switches >> event & 1 == 1,
                        chunk: &mut || 1,
                        chaos: &mut || None,
                        wrong: Wrong::default(),
                    },
                );
                (outcome.text, outcome.tokens, outcome.summary.finish.expect("ended"))
            }
        };
        format!("{kinds:?} {}", key(&text, &tokens, finish.name()))
    })
}

#[rstest]
fn noise_coupled_drafts_keep_every_seeded_text(
    #[values(VerifyMethod::FanOut, VerifyMethod::Tree)] method: VerifyMethod,
    #[values(3, 4)] vocabulary: usize,
) {
    for gamma in 1..=3 {
        let toy = Toy { vocabulary, salt: 31 };
        let case = case(vocabulary, Drafter::Chain, gamma, &[method]);
        let plain = noisy_distribution(toy, &case, None, NoiseBug::None);
        for switches in 0..16 {
            let tv = distance(&plain, &noisy_distribution(toy, &case, Some(switches), NoiseBug::None));
            assert!(tv < 1e-12, "gamma {gamma}, switches {switches:b}: {tv}");
        }
    }
}

#[rstest]
#[case(NoiseBug::KeyedByRound)]
#[case(NoiseBug::WithoutToken)]
#[case(NoiseBug::RestartedPerCall)]
fn wrong_noise_is_caught(#[case] bug: NoiseBug) {
    let toy = Toy { vocabulary: 3, salt: 31 };
    let case = case(3, Drafter::Chain, 2, &[VerifyMethod::Tree]);
    let plain = noisy_distribution(toy, &case, None, NoiseBug::None);
    let tv = distance(&plain, &noisy_distribution(toy, &case, Some(15), bug));
    assert!(tv > 1e-3, "not caught: {tv}");
}
