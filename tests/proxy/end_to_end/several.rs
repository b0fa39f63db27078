//! Several model drafters in one policy: one of them drafts for each request, all of them are
//! evaluated after it, and every text is the target's own.

use std::time::Duration;

use foretell::serving::drafters::{Drafters, LoadedDrafter};
use foretell_onnx::drafter::DrafterService;
use serde_json::{Value, json};

use super::house::{Ask, House, Setup, send};
use super::model::{Babble, other_words};

const POLICY: &str = "version: 1\nname: both\ndrafters: [{ kind: model, model: stranger }, { kind: model, model: twin }]\n\
                      gamma: { fixed: 4 }\n";
const PROMPT: &str = "for piece in text.split(',') { taken.push_str(piece) }: ";

async fn house() -> House {
    House::build(Setup {
        policies: &[POLICY],
        more: "drafters: { stranger: { path: nowhere }, twin: { path: nowhere } }\n".to_owned(),
        drafters: Box::new(|target| {
            let words = other_words();
            let stranger = DrafterService::start_with(Box::new(Babble::new(&words, 2048, 4).with_seed(5)));
            let twin = DrafterService::start_with(Box::new(Babble::new(target, 2048, 4)));
            Drafters::default()
                .with("stranger", LoadedDrafter::new(stranger, words))
                .with("twin", LoadedDrafter::new(twin, target.clone()))
        }),
        ..Setup::default()
    })
    .await
}

async fn drawn(house: &House, model: &str) -> f64 {
    house.metric(&format!("foretell_drafter_drawn_total{{drafter=\"{model}\",policy=\"both\"}}")).await
}

async fn explained(house: &House) -> Value {
    let body = json!({"model": "toy", "prompt": PROMPT, "temperature": 0});
    send(house.admin(), "/api/explain?route=completions", "", &body).await.json()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_of_them_drafts_all_are_evaluated_and_every_text_is_the_targets_own() {
    let house = house().await;
    let chances = |explanation: &Value| -> Vec<(String, f64)> {
        let models = explanation["now"]["models"].as_array().unwrap().iter();
        models
            .map(|line| (line["model"].as_str().unwrap().to_owned(), line["chance"].as_f64().unwrap()))
            .collect()
    };
    let before = explained(&house).await;
    assert_eq!(
        chances(&before),
        [("stranger".to_owned(), 1.0), ("twin".to_owned(), 0.0)],
        "the policy's order"
    );
    let why = before["drafters"][1]["why"].as_str().unwrap();
    assert!(why.contains("one of the models drafts for a request"), "{why}");
    let mut asked = 0.0;
    for sampling in [json!({"temperature": 0}), json!({"temperature": 0.8, "seed": 11})] {
        for turn in 0..3 {
            let mut fields =
                json!({"prompt": format!("{PROMPT}{turn}"), "max_tokens": 40, "ignore_eos": true});
            fields.as_object_mut().unwrap().extend(sampling.as_object().unwrap().clone());
            for ask in Ask::all(&fields) {
                let plain = house.direct(&ask).await;
                let through = house.through(&ask, "several").await;
                assert_eq!(through.plain, plain.plain);
                asked += 1.0;
            }
        }
    }
    // The first text is evaluated; the cost of that decides when the next one is.
    let evaluated = "foretell_drafter_evaluations_total{result=\"evaluated\"}";
    tokio::time::timeout(Duration::from_mins(1), async {
        while house.metric(evaluated).await < 1.0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await
    .expect("the models are evaluated after an answer");
    assert!((drawn(&house, "stranger").await + drawn(&house, "twin").await - asked).abs() < 0.5);
    let after = chances(&explained(&house).await);
    assert!((after.iter().map(|(_, chance)| chance).sum::<f64>() - 1.0).abs() < 1e-9, "{after:?}");
    House::assert_calm();
}
