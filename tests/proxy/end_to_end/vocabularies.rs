//! A drafter with another vocabulary: its drafts are translated, some are accepted, and every text
//! is the target's own.

use std::sync::Arc;
use std::time::{Duration, Instant};

use foretell_onnx::drafter::DrafterService;
use foretell_proxy::serving::drafters::{Drafters, LoadedDrafter};
use futures_util::stream::{self, StreamExt};
use serde_json::{Value, json};

use super::house::{Ask, House, Setup, send};
use super::model::{Babble, other_words};
use crate::wire::PATIENCE;

const PROMPT: &str =
    "for piece in text.split(',') { taken.push_str(piece) } — take the fox, über naïve 東京 💩: ";
const GAMMAS: [u32; 3] = [1, 4, 9];
const SPEECHES: [&str; 3] = ["slem", "auto", "same"];

fn name(translation_mode: &str, gamma: u32) -> String {
    format!("{translation_mode}-{gamma}")
}

async fn house() -> House {
    let policies: Vec<String> = SPEECHES
        .iter()
        .flat_map(|translation_mode| GAMMAS.map(|gamma| (translation_mode, gamma)))
        .map(|(translation_mode, gamma)| {
            let name = name(translation_mode, gamma);
            format!(
                "version: 1\nname: {name}\nmatch: {{ headers: {{ x-drafter: [{name}] }} }}\n\
                 drafters: [{{ kind: model, model: other, vocabulary: {translation_mode} }}]\ngamma: {{ fixed: {gamma} }}\n"
            )
        })
        .collect();
    let policies: Vec<&str> = policies.iter().map(String::as_str).collect();
    House::build(Setup {
        policies: &policies,
        more: "drafters: { other: { path: nowhere } }\n".to_owned(),
        drafters: Box::new(|_| {
            let words = other_words();
            let service = DrafterService::start_with(Box::new(Babble::new(&words, 2048, 16).with_seed(1)));
            Drafters::default().with("other", LoadedDrafter::new(service, words))
        }),
        ..Setup::default()
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_text_is_the_targets_own_for_every_drafter_and_vocabulary() {
    let house = Arc::new(house().await);
    let mut accepted = [0; 2];
    for sampling in [json!({"temperature": 0}), json!({"temperature": 0.8, "seed": 11})] {
        let mut fields = json!({"prompt": PROMPT, "max_tokens": 40, "ignore_eos": true});
        fields.as_object_mut().unwrap().extend(sampling.as_object().unwrap().clone());
        for ask in Ask::all(&fields) {
            let plain = house.direct(&ask).await;
            let cases = SPEECHES
                .iter()
                .enumerate()
                .flat_map(|(at, translation_mode)| GAMMAS.map(|gamma| (at, name(translation_mode, gamma))));
            let reports: Vec<(usize, String, Value)> = stream::iter(cases)
                .map(|(at, name)| {
                    let (house, ask, plain) = (Arc::clone(&house), ask.clone(), plain.plain.clone());
                    async move {
                        let answer = ask.send(house.front(), &format!("x-drafter: {name}\r\n")).await;
                        assert_eq!(answer.plain, plain, "{name}");
                        (at, name, answer.foretell().clone())
                    }
                })
                .buffer_unordered(4)
                .collect()
                .await;
            for (at, name, foretell) in reports {
                // A stream whose client did not ask for usage has no counts.
                let (Some(drafted), Some(right)) =
                    (foretell["drafted"].as_u64(), foretell["accepted"].as_u64())
                else {
                    continue;
                };
                match accepted.get_mut(at) {
                    Some(sum) => *sum += right,
                    None => assert_eq!(drafted, 0, "{name}: a pair that is not the same is refused"),
                }
            }
        }
    }
    assert!(accepted.iter().all(|&accepted| accepted > 0), "{accepted:?}");
    House::assert_calm();
}

/// Its numbers would name other texts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_target_whose_tokenizer_is_not_the_configured_one_is_passed_through() {
    let other = concat!(env!("CARGO_MANIFEST_DIR"), "/onnx/models/draft-other");
    let more = format!("    models: [{{ id: toy, tokenizer: {other} }}]\n");
    let house = House::build(Setup { more, ..Setup::default() }).await;
    let body = json!({"model": "toy", "prompt": PROMPT, "max_tokens": 4});
    let told = async || {
        let answer = send(house.front(), "/v1/completions", "", &body).await;
        ["x-foretell-path", "x-foretell-reason"].map(|name| answer.head.get(name).unwrap_or("").to_owned())
    };
    let begun = Instant::now();
    while told().await != ["passthrough", "tokenizer"] {
        assert!(begun.elapsed() < PATIENCE, "{:?}", told().await);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn explain_says_how_drafts_are_translated_and_names_both_where_they_may_not_be() {
    let house = house().await;
    for (name, says) in [
        ("slem-4", ["translated as text", "(slem)"]),
        ("same-4", ["the vocabulary of `other` (", "is not that of `toy` ("]),
    ] {
        let body = json!({"model": "toy", "prompt": "take", "temperature": 0});
        let explained =
            send(house.admin(), "/api/explain?route=completions", &format!("x-drafter: {name}\r\n"), &body)
                .await
                .json();
        let drafter = &explained["drafters"][0];
        let why = drafter["why"].as_str().unwrap_or_default();
        assert!(says.iter().all(|part| why.contains(part)), "{name}: {explained}");
        assert_eq!(drafter["drafts"], json!(!name.starts_with("same")), "{name}");
    }
}
