//! Probes of the other engines: each is unusable in its own way, and timed in its own way.

use serde_json::{Value, json};

use super::house::{INEXPENSIVE, arguments, probe};
use crate::fakes::llamacpp::{self, Llama};
use crate::fakes::sglang::{self, Sglang};
use crate::fakes::{Fake, Setup};

fn inexpensive(setup: Setup) -> Setup {
    Setup { pace: INEXPENSIVE, ..setup }
}

async fn llama(cache_idle_slots: bool) -> (u8, Value) {
    llama_that(|options| options.cache_idle_slots = cache_idle_slots).await
}

async fn llama_that(change: impl FnOnce(&mut llamacpp::Options)) -> (u8, Value) {
    let plain = llamacpp::Options::default();
    let setup = inexpensive(plain.setup.clone());
    let mut options = llamacpp::Options { slots: 9, cache_idle_slots: false, setup, ..plain };
    change(&mut options);
    let fake = Fake::start(Llama::new(options)).await;
    let found = probe(&arguments(&fake.url())).await;
    assert_eq!(fake.house.fatal(), Vec::<String>::new());
    assert!(fake.house.tally().calls.values().sum::<usize>() <= 40);
    found
}

fn why(report: &Value, method: &str) -> String {
    let missing = report["missing"].as_array().map_or(&[][..], Vec::as_slice);
    let entry = missing.iter().find(|missing| missing["method"] == method);
    entry.unwrap_or_else(|| panic!("{report:#}"))["why"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn a_llama_server_is_timed_by_answers_that_come_whole() {
    let (code, report) = llama(false).await;
    assert_eq!((code, &report["methods"]), (0, &json!(["fan_out"])), "{report:#}");
    // A step takes 12 ms and each token in it 60 µs.
    let token = report["times"]["token"][0]["ms"].as_f64().unwrap();
    assert!((10.0..40.0).contains(&token), "{token}");
    assert_eq!((&report["pays"], &report["cache"]["works"]), (&json!(true), &json!(true)), "{report:#}");
}

#[tokio::test]
async fn a_llama_server_that_clears_idle_slots_is_given_up_and_the_flag_is_named() {
    let (code, report) = llama(true).await;
    assert_eq!((code, &report["methods"]), (2, &json!([])), "{report:#}");
    assert!(why(&report, "fan_out").contains("--no-cache-idle-slots"), "{report:#}");
    assert_eq!(report["pays"], Value::Null, "{report:#}");
}

#[tokio::test]
async fn a_llama_server_with_stop_texts_of_its_own_is_given_up_and_the_flag_is_named() {
    let (code, report) = llama_that(|options| options.stop = vec!["no such text".to_owned()]).await;
    assert_eq!((code, &report["methods"]), (2, &json!([])), "{report:#}");
    assert!(why(&report, "fan_out").contains("--reverse-prompt"), "{report:#}");
}

#[tokio::test]
async fn an_sglang_is_scored_and_timed() {
    let plain = sglang::Options::default();
    let setup = inexpensive(plain.setup.clone());
    let fake = Fake::start(Sglang::new(sglang::Options { setup, ..plain })).await;
    let (code, report) = probe(&arguments(&fake.url())).await;
    assert_eq!((code, &report["methods"]), (0, &json!(["score", "fan_out"])), "{report:#}");
    assert_eq!((&report["pays"], &report["cache"]["works"]), (&json!(true), &json!(true)), "{report:#}");
    assert!(fake.house.tally().calls.values().sum::<usize>() <= 40);
    assert_eq!(fake.house.fatal(), Vec::<String>::new());
}
