//! `foretell probe`.

use std::sync::Arc;
use std::time::Duration;

use foretell::cli::probe::ProbeArgs;
use foretell_core::words::VerifyMethod;
use foretell_engines::recognise::{Answers, Reply};
use foretell_engines::{Dialect, Engine};
use foretell_net::fleet::probe::{Limits, measure};
use foretell_net::fleet::{Replica, ReplicaSettings};
use foretell_parsers::text::Tokenizer;
use serde_json::{Value, json};

use super::house::{EXPENSIVE, INEXPENSIVE, arguments, probe, vllm};
use crate::fakes::vllm::{Garbage, Runner};
use crate::fakes::{Fault, When, toy};
use crate::wire::PATIENCE;

fn numbers(list: &Value, name: &str) -> Vec<f64> {
    list.as_array().unwrap().iter().map(|entry| entry[name].as_f64().unwrap()).collect()
}

#[tokio::test]
async fn a_new_vllm_is_measured_within_forty_safe_calls() {
    let fake = vllm("0.33.0", |options| options.setup.pace = INEXPENSIVE).await;
    let (code, report) = probe(&arguments(&fake.url())).await;
    assert_eq!((code, &report["engine"], &report["version"]), (0, &json!("vllm"), &json!("0.33.0")));
    assert_eq!(report["methods"], json!(["score", "fan_out"]), "{report:#}");
    assert_eq!((&report["cache"]["rows"], &report["cache"]["reported"]), (&json!("tail"), &json!(true)));
    assert_eq!((&report["cache"]["works"], &report["noise"]), (&json!(true), &json!("position")));
    assert_eq!((&report["several_engines"], &report["connections"]), (&json!(false), &json!(4)));
    let calls: usize = fake.house.tally().calls.values().sum();
    assert!(
        calls <= 40 && report["calls"].as_u64().unwrap() as usize == calls,
        "{calls} {}",
        report["calls"]
    );
    assert_eq!(fake.house.fatal(), Vec::<String>::new());
    let gammas = numbers(&report["verify"], "gamma");
    assert!([0.0, 2.0, 4.0, 8.0].iter().all(|gamma| gammas.contains(gamma)), "{gammas:?}");
    assert!(numbers(&report["verify"], "context").iter().any(|&context| context > 900.0));
    // A step takes 12 ms, and a score with a few tokens in it not much more.
    let token = report["times"]["token"][0]["ms"].as_f64().unwrap();
    assert!((10.0..40.0).contains(&token), "{token}");
    assert_eq!(report["pays"], json!(true), "{report:#}");
    assert!(report["conclusion"].as_str().unwrap().starts_with("Speculation pays here: up to "));
}

#[tokio::test]
async fn an_old_runner_is_recognised_by_its_rows_and_seeds() {
    let fake = vllm("0.32.0", |options| options.runner = Runner::V1).await;
    let (_, report) = probe(&arguments(&fake.url())).await;
    assert_eq!((&report["cache"]["rows"], &report["noise"]), (&json!("full"), &json!("call")), "{report:#}");
    assert_eq!(report["methods"], json!(["score", "fan_out"]));
    assert_eq!(fake.house.fatal(), Vec::<String>::new());
}

#[tokio::test]
async fn a_method_that_fails_over_a_cached_prefix_is_given_up() {
    let fake = vllm("0.32.0", |options| options.garbage = Garbage::NotANumber).await;
    let (code, report) = probe(&arguments(&fake.url())).await;
    assert_eq!((code, &report["methods"]), (0, &json!(["fan_out"])), "{report:#}");
    let missing = report["missing"].as_array().unwrap();
    let why = missing.iter().find(|missing| missing["method"] == "score").unwrap()["why"].as_str().unwrap();
    assert!(why.contains("500"), "{why}");
    assert!(fake.house.fatal().is_empty() && !fake.house.is_dead());
}

#[tokio::test]
async fn a_missing_method_is_explained_by_the_flag_that_enables_it() {
    let fake = vllm("0.33.0", |options| options.scale_out = false).await;
    let (_, report) = probe(&arguments(&fake.url())).await;
    assert_eq!(report["methods"], json!(["fan_out"]));
    let text = report["missing"].to_string();
    assert!(text.contains("--enable-scale-out"), "{text}");
    // They are those of the model's folder, and confirmed.
    assert_eq!((&report["defaults"]["temperature"], &report["problem"]), (&json!(1.0), &Value::Null));
}

#[tokio::test]
async fn where_every_token_costs_the_same_no_method_pays() {
    let slow = |options: &mut crate::fakes::vllm::Options| {
        options.setup.pace = EXPENSIVE;
        options.setup.max_len = 250;
    };
    let fake = vllm("0.33.0", slow).await;
    let (code, report) = probe(&arguments(&fake.url())).await;
    assert_eq!((code, &report["pays"]), (0, &json!(false)), "{report:#}");
    let result = report["conclusion"].as_str().unwrap();
    assert!(result.starts_with("Speculation will probably not pay here: one round of 4 costs "), "{result}");
    assert!(report["policy"].as_str().unwrap().contains("mode: plain"));
}

#[tokio::test]
async fn bounds_of_calls_and_time_hold() {
    let fake = vllm("0.33.0", |options| options.setup.pace.step = Duration::from_millis(150)).await;
    let backend = Replica::new(ReplicaSettings::new("b", fake.url())).unwrap();
    let mut engine = Engine::new(Dialect::Vllm, "toy", "0.33.0");
    engine.methods = vec![VerifyMethod::Score, VerifyMethod::FanOut];
    engine.cache.block = 16;
    let limits = |calls: u32, millis: u64| Limits {
        calls,
        within: Duration::from_millis(millis),
        bytes_max: 2 << 20,
        context_max: 8192,
        allow: VerifyMethod::ALL.to_vec(),
    };
    let tokenizer = &Arc::new(Tokenizer::from_file(&toy::folder().join("tokenizer.json")).unwrap());
    let few = measure(&backend, &engine, tokenizer, &limits(5, 60_000), 1).await;
    assert_eq!((few.calls, fake.house.tally().calls.values().sum::<usize>()), (5, 5));
    assert!(few.notes.iter().any(|note| note.contains("calls were used up")), "{:?}", few.notes);
    // No call is answered in less than 150 ms.
    let short = measure(&backend, &engine, tokenizer, &limits(40, 700), 2).await;
    assert!(short.calls <= 6, "{} calls", short.calls);
    // The probe does not wait for a call in flight.
    fake.house.pace.lock().step = Duration::from_hours(1);
    let none =
        tokio::time::timeout(PATIENCE, measure(&backend, &engine, tokenizer, &limits(40, 700), 3)).await;
    assert_eq!(none.expect("the time is up").calls, 1);
}

#[tokio::test]
async fn a_call_without_an_answer_ends_the_probe() {
    let fake = vllm("0.33.0", |_| {}).await;
    fake.house.faults.at(When::path("/v1/completions"), 1, Fault::Reset);
    let (_, report) = probe(&arguments(&fake.url())).await;
    assert!(report["notes"].to_string().contains("not answered"), "{report:#}");
}

#[tokio::test]
async fn a_probe_that_measured_too_little_prints_no_policy_and_says_what_to_do() {
    let fake = vllm("0.33.0", |options| options.setup.pace.step = Duration::from_hours(1)).await;
    let mut arguments = arguments(&fake.url());
    (arguments.within, arguments.json) = (Duration::from_millis(300), false);
    let mut out = Vec::new();
    assert_eq!(foretell::cli::probe::run(&arguments, &mut out).await.code(), 2);
    let text = String::from_utf8(out).unwrap();
    let next = "next         repeat it when the server is idle, or with --within 6s\n";
    assert!(text.contains("conclusion   Unknown") && text.contains(next), "{text}");
    assert!(!text.contains("policy"), "{text}");
    arguments.json = true;
    let (code, report) = probe(&arguments).await;
    assert_eq!((code, &report["pays"], &report["policy"]), (2, &Value::Null, &Value::Null));
    assert!(report["next"].as_str().unwrap().contains("--within 6s"), "{report:#}");
}

#[derive(clap::Parser)]
struct Line {
    #[command(flatten)]
    probe: ProbeArgs,
}

#[test]
fn the_time_of_a_probe_is_that_of_the_proxy_s_own_unless_it_is_given() {
    use clap::Parser;
    let within = |more: &[&str]| {
        let line = Line::try_parse_from([&["foretell", "http://h:1"], more].concat());
        line.map(|line| line.probe.within).map_err(|error| error.to_string())
    };
    assert_eq!(within(&[]), Ok(foretell_config::process::Probe::default().within));
    assert_eq!(within(&["--within", "60s"]), Ok(Duration::from_mins(1)));
    let refused = within(&["--within", "60"]).unwrap_err();
    assert!(refused.contains("60 has no unit; write for example 200ms, 30s, 5m or 1h"), "{refused}");
    assert!(within(&["--within", "0s"]).unwrap_err().contains("more than 0"));
}

#[tokio::test]
async fn an_unreachable_server_is_exit_one_and_an_invalid_url_is_a_usage_error() {
    let fake = vllm("0.33.0", |_| {}).await;
    fake.kill();
    assert_eq!(probe(&arguments(&fake.url())).await.0, 1);
    assert_eq!(probe(&arguments("nonsense")).await.0, 64);
}

#[tokio::test]
async fn a_billed_server_is_asked_for_its_models_and_nothing_else() {
    let fake = vllm("0.33.0", |_| {}).await;
    let mut arguments = arguments(&fake.url());
    arguments.billed = true;
    let (code, report) = probe(&arguments).await;
    assert_eq!((code, &report["passthrough"]), (0, &json!("billed")));
    let calls = fake.house.tally().calls;
    assert_eq!(calls.into_iter().collect::<Vec<_>>(), [("/v1/models".to_owned(), 1)]);
}

#[tokio::test]
async fn the_text_agrees_with_the_figures() {
    let fake = vllm("0.33.0", |options| options.setup.pace = INEXPENSIVE).await;
    let mut arguments = arguments(&fake.url());
    arguments.json = false;
    let mut out = Vec::new();
    assert_eq!(foretell::cli::probe::run(&arguments, &mut out).await, foretell::cli::Exit::Done);
    let text = String::from_utf8(out).unwrap();
    for part in [
        "engine       vllm 0.33.0",
        "methods      score, fan_out",
        "no tree",
        "tool chats   speculated on once",
        "prefix cache on (reported by the server; a long prompt: first ",
        "a round takes",
        "speedup, by acceptance",
        "conclusion   Speculation pays",
        "  version: 1",
    ] {
        assert!(text.contains(part), "{part:?} is missing in\n{text}");
    }
}

#[test]
fn without_the_page_with_the_start_time_the_engine_is_not_identified() {
    let mut answers = Answers::default();
    let mut page_after = |path: &str, body: &str| {
        answers.add(path, Reply { status: 200, server: None, body: body.as_bytes().to_vec() });
        foretell_engines::recognise::start_page(Dialect::Vllm, &answers)
    };
    page_after("/v1/models", r#"{"data":[{"id":"m","owned_by":"vllm","max_model_len":100}]}"#);
    assert_eq!(page_after("/version", r#"{"version":"0.33.0"}"#), None);
    assert_eq!(page_after("/metrics", "process_start_time_seconds 12\n"), Some("/metrics"));
}
