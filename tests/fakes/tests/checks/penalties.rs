//! Penalties that continue unchanged if the generated text is sent again as a prompt.

use rstest::rstest;

use crate::fakes::sample::{Noise, Pipeline, Sampling};
use crate::fakes::sequence::{Hold, Sequence};
use crate::fakes::toy::Context;
use crate::fakes::{Temper, Toy};

const START: usize = 20;
const WHOLE: usize = 80;
const SENT: usize = 40;

fn run(toy: &Toy, prompt: &[u32], sampling: &Sampling, count: usize) -> Vec<u32> {
    let sampling = Sampling { max_tokens: count, ..sampling.clone() };
    let mut sequence = Sequence::new(0, Context::new(prompt), sampling, Hold::Longest);
    while sequence.step(toy).is_some() {}
    sequence.output().to_vec()
}

/// True if a greedy text that is cut and sent again continues as before; asserts that the penalty
/// has an effect.
fn goes_on(pipeline: Pipeline, set: fn(&mut Sampling)) -> bool {
    let toy = Toy::new(Temper { eos_every: None, ..Temper::default() });
    let prompt: Vec<u32> = (0..START as u32).map(|at| 100 + at * 7 % 900).collect();
    let mut sampling = Sampling::new(pipeline, Noise::Position(1), WHOLE);
    sampling.temperature = 0.0;
    let plain = run(&toy, &prompt, &sampling, WHOLE);
    set(&mut sampling);
    let whole = run(&toy, &prompt, &sampling, WHOLE);
    assert_ne!(whole, plain, "the penalty does nothing");
    run(&toy, &[&prompt, &whole[..SENT]].concat(), &sampling, WHOLE - SENT) == whole[SENT..]
}

#[rstest]
#[case::llama(Pipeline::LLAMA, true, true)]
#[case::vllm(Pipeline::VLLM, false, true)]
#[case::sglang(Pipeline::SGLANG, false, false)]
fn a_text_goes_on_as_before(#[case] pipeline: Pipeline, #[case] additive: bool, #[case] repetition: bool) {
    // Relative frequencies are small; presence shows the same.
    assert_eq!(goes_on(pipeline, |sampling| sampling.presence = 1.8), additive);
    assert_eq!(goes_on(pipeline, |sampling| sampling.repetition = 1.6), repetition);
}
