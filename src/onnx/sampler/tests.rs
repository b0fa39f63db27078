use super::*;
use crate::noise::gumbel;

fn sampling(temperature: f64) -> Sampling {
    Sampling { temperature, ..Sampling::default() }
}

/// Logits that look like a language model's: a few large ones, a long tail.
fn peaky(vocabulary: u32, salt: u64) -> Vec<f32> {
    (0..vocabulary).map(|token| (2.0 * gumbel(salt, 9, 0, token)) as f32).collect()
}

/// The definition, without any shortcut.
fn by_definition(sampling: &Sampling, logits: &[f32], seed: u64, choice: u32, position: u64) -> TokenId {
    let t = sampling.temperature;
    let mut order: Vec<(TokenId, f32)> = (0..).zip(logits.iter().copied()).collect();
    order.sort_by(by_logit);
    let most = f64::from(order[0].1);
    order.retain(|&(_, l)| ((f64::from(l) - most) / t).exp() >= sampling.min_p);
    order.truncate(sampling.top_k.unwrap_or(u32::MAX) as usize);
    let total: f64 = order.iter().map(|&(_, l)| ((f64::from(l) - most) / t).exp()).sum();
    let mut before = 0.0;
    order.retain(|&(_, l)| {
        let stays = before < sampling.top_p;
        before += ((f64::from(l) - most) / t).exp() / total;
        stays
    });
    let score = |&(token, l): &(TokenId, f32)| f64::from(l) / t + gumbel(seed, choice, position, token);
    order.iter().max_by(|a, b| score(a).total_cmp(&score(b)).then(b.0.cmp(&a.0))).unwrap().0
}

#[test]
fn the_shortcuts_pick_what_the_definition_picks() {
    for case in 0..400_u64 {
        let logits = peaky(997, case);
        let sampling = Sampling {
            temperature: [0.3, 0.8, 1.0, 2.0][case as usize % 4],
            top_p: [1.0, 0.9, 0.5, 0.99, 1e-9][case as usize % 5],
            top_k: [None, Some(40), Some(1)][case as usize % 3],
            min_p: [0.0, 0.05][case as usize / 7 % 2],
            ..Sampling::default()
        };
        let want = by_definition(&sampling, &logits, case, 1, 3);
        let got = Sampler::new(sampling.clone(), case, 1).pick(&logits, &[1, 2], &[3]);
        assert_eq!(got, want, "case {case}, {sampling:?}");
    }
}

#[test]
fn greedy_takes_the_lowest_id_of_equal_logits() {
    let sampler = Sampler::new(sampling(0.0), 1, 0);
    assert_eq!(sampler.pick(&[0.0, 2.0, 1.0, 2.0], &[], &[]), 1);
    assert_eq!(sampler.pick(&[f32::NEG_INFINITY, -5.0, f32::NAN], &[], &[]), 1);
}

#[test]
fn equal_logits_at_the_edge_of_top_k_and_top_p_leave_the_lowest_ids() {
    let logits = [1.0, 1.0, 1.0, 1.0];
    let kept = |sampling: Sampling| {
        let sampler = Sampler::new(sampling, 0, 0);
        let top = sampler.process(&logits, &History::default()).top(9);
        top.into_iter().map(|(token, _)| token).collect::<Vec<_>>()
    };
    assert_eq!(kept(Sampling { top_k: Some(2), ..Sampling::default() }), [0, 1]);
    assert_eq!(kept(Sampling { top_p: 0.5, ..Sampling::default() }), [0, 1]);
    assert_eq!(kept(Sampling { top_p: 0.500_001, ..Sampling::default() }), [0, 1, 2]);
    assert_eq!(kept(Sampling { top_p: 0.0, ..Sampling::default() }), [0]);
    assert_eq!(kept(Sampling { top_p: 0.9, top_k: Some(2), ..Sampling::default() }), [0, 1]);
    assert_eq!(kept(Sampling { min_p: 1.0, ..Sampling::default() }), [0, 1, 2, 3]);
}

#[test]
fn a_top_p_of_nearly_one_keeps_what_is_needed_and_no_more() {
    let logits: Vec<f32> = (0..1000).map(|token| if token == 500 { 20.0 } else { 0.0 }).collect();
    let sampler = Sampler::new(Sampling { top_p: 0.999_999, ..Sampling::default() }, 0, 0);
    let kept = sampler.process(&logits, &History::default()).top(2000);
    // 999·e⁻²⁰ is 2.06e-6, twice what may be left out: about half of the tail stays.
    assert!((500..530).contains(&kept.len()), "{}", kept.len());
    assert_eq!((kept[0].0, kept[1].0), (500, 0));
}

#[test]
fn samples_follow_the_softmax() {
    let logits = [1.5_f32, 0.0, -1.0, 0.7, 2.0, f32::NEG_INFINITY];
    for temperature in [0.7, 1.0, 1.6] {
        let weights: Vec<f64> = logits.iter().map(|&l| (f64::from(l) / temperature).exp()).collect();
        let total: f64 = weights.iter().sum();
        let (n, mut seen) = (40_000_u32, [0_u32; 6]);
        for draw in 0..n {
            // Half of the draws vary the seed, half the position: both must be independent.
            let (seed, position) = if draw % 2 == 0 { (u64::from(draw), 5) } else { (77, draw as usize) };
            let sampler = Sampler::new(sampling(temperature), seed, 0);
            let context = History { prompt: position, ..History::default() };
            seen[sampler.next(&logits, &context) as usize] += 1;
        }
        let chi: f64 = (0..5)
            .map(|i| {
                let want = weights[i] / total * f64::from(n);
                (f64::from(seen[i]) - want).powi(2) / want
            })
            .sum();
        assert_eq!(seen[5], 0);
        // 4 degrees of freedom: beyond 18.5 only once in a thousand.
        assert!(chi < 18.5, "T={temperature}: chi² {chi}, {seen:?}");
    }
}

#[test]
fn picks_equal_the_golden_vectors() {
    let logits = peaky(8192, 4);
    let nucleus = Sampling { temperature: 0.8, top_p: 0.9, ..Sampling::default() };
    let picks = |sampling: &Sampling, seed, choice| -> Vec<TokenId> {
        let sampler = Sampler::new(sampling.clone(), seed, choice);
        (0..6).map(|len| sampler.next(&logits, &History { prompt: len, ..History::default() })).collect()
    };
    // Computed by another implementation of the definition (Python).
    assert_eq!(picks(&nucleus, 42, 0), [6649, 6649, 6649, 6649, 6649, 2937]);
    assert_eq!(picks(&nucleus, 42, 1), [6649, 6649, 2937, 6649, 2937, 6649]);
    assert_eq!(picks(&sampling(1.0), 42, 0), [2260, 6649, 6649, 6649, 6649, 2937]);
    assert_eq!(picks(&sampling(3.0), 7, 0), [7184, 548, 555, 433, 4555, 7344]);
}

#[test]
fn penalties_are_taken_in_vllms_order_and_only_where_they_belong() {
    let sampling = Sampling {
        temperature: 0.0,
        repetition_penalty: 2.0,
        frequency_penalty: 0.25,
        presence_penalty: 0.5,
        logit_bias: vec![(0, 4.0), (99, 1.0)],
        ..Sampling::default()
    };
    let sampler = Sampler::new(sampling, 0, 0);
    let context = sampler.history(&[1, 3], &[2, 2, 3]);
    let processed = sampler.process(&[1.0, 6.0, 6.0, -1.0, 2.0], &context);
    // biased; prompt: repetition only; output twice: both counts; negative: multiplied; untouched.
    assert_eq!(processed.logits.as_ref(), [5.0, 3.0, 3.0 - 0.5 - 0.5, -2.0 - 0.25 - 0.5, 2.0]);
}

#[test]
fn a_kept_history_equals_a_recount() {
    let sampling = Sampling { repetition_penalty: 1.3, presence_penalty: 0.4, ..Sampling::default() };
    let sampler = Sampler::new(sampling, 3, 0);
    let mut context = sampler.history(&[5, 6], &[]);
    let mut output = Vec::new();
    for step in 0..50 {
        let logits = peaky(64, step);
        let pick = sampler.next(&logits, &context);
        assert_eq!(pick, sampler.pick(&logits, &[5, 6], &output));
        context.push(pick);
        output.push(pick);
    }
    assert_eq!(context.position(), 52);
}

#[test]
fn the_end_is_masked_until_min_tokens() {
    let sampling = Sampling { temperature: 0.0, min_tokens: 2, ..Sampling::default() };
    let sampler = Sampler::new(sampling, 0, 0).with_ends(vec![1]);
    let logits = [0.0, 9.0, 1.0];
    assert_eq!(sampler.pick(&logits, &[7, 7], &[]), 2);
    assert_eq!(sampler.pick(&logits, &[7], &[7]), 2);
    assert_eq!(sampler.pick(&logits, &[], &[7, 7]), 1);
    assert_eq!(sampler.process(&logits, &sampler.history(&[], &[])).logprob(1).to_bits(), NEVER.to_bits());
}

#[test]
fn logprobs_sum_to_one_over_what_is_kept() {
    let logits = peaky(300, 1);
    let sampling = Sampling { temperature: 0.7, top_p: 0.8, top_k: Some(50), ..Sampling::default() };
    let sampler = Sampler::new(sampling, 1, 0);
    let processed = sampler.process(&logits, &History::default());
    let top = processed.top(300);
    let mass: f64 = top.iter().map(|&(_, logprob)| f64::from(logprob).exp()).sum();
    assert!((mass - 1.0).abs() < 1e-6, "{mass}");
    assert!(top.len() <= 50 && top.is_sorted_by(|a, b| a.1 >= b.1));
    assert_eq!(processed.logprob(top[1].0).to_bits(), top[1].1.to_bits());
    assert_eq!(processed.top(1), top[..1]);
    assert!(processed.top(0).is_empty());
    assert_eq!(processed.logprob(1_000_000).to_bits(), NEVER.to_bits());
}

#[test]
fn greedy_logprobs_are_the_softmax_without_temperature() {
    let sampler = Sampler::new(sampling(0.0), 0, 0);
    let processed = sampler.process(&[0.0, 0.0], &History::default());
    assert!((processed.logprob(1) - 0.5_f32.ln()).abs() < 1e-6);
}
