//! The drafter service over a real model: its drafts are those of plain decoding by the model.
//!
//! Runs on the bundled drafter, or on the model folder that `FORETELL_TEST_DRAFTER` names.

use std::path::PathBuf;

use foretell_core::words::TokenContext;
use foretell_onnx::drafter::{DrafterService, Noise};
use foretell_onnx::forward::{Feed, Forward, Rows};
use foretell_onnx::open::DeviceChoice;
use foretell_onnx::open::Options;
use foretell_onnx::runtime::model::Model;
use foretell_onnx::sampler::Sampler;
use foretell_wire::openai::Sampling;

fn folder() -> PathBuf {
    std::env::var_os("FORETELL_TEST_DRAFTER").map_or_else(
        || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("onnx/models/draft-same"),
        PathBuf::from,
    )
}

fn options(lanes: usize) -> Options {
    Options { device: DeviceChoice::Cpu, lanes, threads: 1, ..Options::default() }
}

fn token_context(text: &[u32], prompt_len: usize) -> TokenContext {
    let (prompt, output) = text.split_at(prompt_len);
    TokenContext::new(prompt, output)
}

/// The logits after a text, computed without a cache.
fn logits(model: &mut Model, text: &[u32]) -> Vec<f32> {
    let lane = model.reserve().unwrap();
    let rows =
        model.run(&[Feed { lane, tokens: text, parents: None, rows: Rows::Last, draft: None }]).unwrap();
    model.release(lane);
    rows.row(0, 0).unwrap().to_vec()
}

/// Every token of a draft is the plain choice, or its score differs by no more than another batch
/// shape may cause.
fn assert_drafted(model: &mut Model, sampler: &Sampler, context: &[u32], prompt_len: usize, drafted: &[u32]) {
    let mut text = context.to_vec();
    for &token in drafted {
        let row = logits(model, &text);
        let (prompt, output) = text.split_at(prompt_len);
        let plain = sampler.pick(&row, prompt, output);
        if plain != token {
            let gap = (row[plain as usize] - row[token as usize]).abs();
            assert!(sampler.sampling().temperature <= 0.0 && gap < 1e-3, "{token} is not {plain}, gap {gap}");
        }
        text.push(token);
    }
}

#[tokio::test]
async fn drafts_of_many_sessions_at_once_are_those_of_the_plain_model() {
    let service = DrafterService::start(&folder(), &options(6)).expect("the drafter opens");
    let mut model = Model::open(&folder(), &options(1)).unwrap();
    let vocabulary = service.config().vocabulary as u32;
    let sessions = (0..6_u32).map(|number| {
        let service = service.clone();
        async move {
            let temperature = if number % 2 == 0 { 0.0 } else { 0.8 };
            let sampling = Sampling { temperature, ..Sampling::default() };
            let noise = Noise { seed: Some(u64::from(number)), choice: 0, sampling: sampling.clone() };
            let slot = service.slot(noise).await.expect("six slots");
            let prompt_len = 20 + 60 * number as usize;
            let mut text: Vec<u32> =
                (0..prompt_len as u32).map(|index| (index * 37 + number) % vocabulary).collect();
            let mut rounds = Vec::new();
            for round in 0..6_usize {
                let drafted = slot.draft(token_context(&text, prompt_len), 4).await.unwrap();
                let ids: Vec<u32> = drafted.iter().map(|&(token, _)| token).collect();
                rounds.push((text.clone(), ids.clone()));
                text.extend(ids.iter().take(round));
                text.push((round as u32 * 101) % vocabulary);
            }
            let shadow = slot.shadow(token_context(&text, prompt_len), 1).await.unwrap();
            (Sampler::new(sampling, u64::from(number), 0), prompt_len, rounds, text, shadow)
        }
    });
    for (sampler, prompt_len, rounds, text, shadow) in futures_util::future::join_all(sessions).await {
        for (context, drafted) in rounds {
            assert!(!drafted.is_empty());
            assert_drafted(&mut model, &sampler, &context, prompt_len, &drafted);
        }
        assert_eq!(shadow.len(), text.len() - prompt_len);
        for (position, &token) in (prompt_len + 1..=text.len()).zip(&shadow) {
            assert_drafted(&mut model, &sampler, &text[..position], prompt_len, &[token]);
        }
    }
}
