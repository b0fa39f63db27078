//! TensorRT-LLM's behaviour (reference: `serve/openai_protocol.py` and the code around it).

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::client::{ask, events, gauge, get, ids, parsed, refusal, until};
use crate::fakes::trtllm::{Options, Trtllm};
use crate::fakes::{Defaults, Fake};
use crate::wire::{Wire, post};

const ROUTE: &str = "/v1/completions";

async fn trtllm(change: impl FnOnce(&mut Options)) -> Fake<Trtllm> {
    let mut options = Options::default();
    options.setup.temper.eos_every = None;
    change(&mut options);
    Fake::start(Trtllm::new(options)).await
}

fn prompt(len: u32) -> Vec<u32> {
    (0..len).map(|at| 100 + at * 7 % 900).collect()
}

#[allow(clippy::needless_pass_by_value)] // so that bodies are written in place
fn with(extra: Value) -> Value {
    let mut body = json!({"model": "toy", "max_tokens": 1, "temperature": 0, "detokenize": false});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

async fn tokens(fake: &Fake<Trtllm>, extra: Value) -> Vec<u32> {
    ids(&ask(fake.address, ROUTE, with(extra)).await["choices"][0]["token_ids"])
}

async fn cached(fake: &Fake<Trtllm>, prompt: Vec<u32>) -> u64 {
    let answer = ask(fake.address, ROUTE, with(json!({"prompt": prompt}))).await;
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

#[tokio::test]
async fn an_unknown_field_is_an_error() {
    let fake = trtllm(|_| {}).await;
    for name in ["prediction", "prompt_logprobs", "return_token_ids", "cache_salt", "max_completion_tokens"] {
        let mut body = with(json!({"prompt": [5]}));
        body[name] = json!(1);
        let (status, text) = refusal(fake.address, ROUTE, body).await;
        assert_eq!((status, text.contains("extra_forbidden")), (400, true), "{name}");
        let error: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(
            (&error["object"], &error["code"], &error["param"]),
            (&json!("error"), &json!(400), &Value::Null)
        );
    }
    let chat =
        json!({"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 1});
    ask(fake.address, "/v1/chat/completions", chat.clone()).await;
    let mut wrong = chat;
    wrong["prompt"] = json!("x");
    assert_eq!(refusal(fake.address, "/v1/chat/completions", wrong).await.0, 400);
    assert_eq!(refusal(fake.address, ROUTE, json!({"prompt": [5]})).await.0, 400);
    assert_eq!(refusal(fake.address, ROUTE, with(json!({"prompt": [5], "stream_options": {}}))).await.0, 400);
}

#[tokio::test]
async fn there_are_ids_or_there_is_a_text() {
    let fake = trtllm(|_| {}).await;
    let prompts = json!({"prompt": [prompt(20), prompt(21)], "max_tokens": 3});
    let ids_only = ask(fake.address, ROUTE, with(prompts.clone())).await;
    let choice = &ids_only["choices"][1];
    assert_eq!(
        (&choice["index"], &choice["text"], ids(&choice["token_ids"]).len()),
        (&json!(1), &json!(""), 3)
    );
    let mut body = with(prompts);
    body["detokenize"] = json!(true);
    let told = ask(fake.address, ROUTE, body).await["choices"][1].clone();
    assert!(told["token_ids"].is_null());
    assert_eq!(told["text"], fake.house.toy.decode(&ids(&choice["token_ids"]), true));
    let stream = with(
        json!({"prompt": prompt(20), "max_tokens": 3, "stream": true, "stream_options": {"include_usage": true}}),
    );
    let all = events(fake.address, ROUTE, stream).await;
    assert_eq!(all.last().unwrap(), "[DONE]");
    let all = parsed(&all);
    let streamed: Vec<u32> =
        all[..3].iter().flat_map(|event| ids(&event["choices"][0]["token_ids"])).collect();
    assert_eq!(streamed, ids(&ids_only["choices"][0]["token_ids"]));
    assert_eq!((&all[3]["choices"], &all[3]["usage"]["completion_tokens"]), (&json!([]), &json!(3)));
}

#[tokio::test]
async fn penalties_pass_over_what_is_told_to_be_ignored() {
    let fake = trtllm(|_| {}).await;
    for name in ["presence_penalty", "frequency_penalty", "repetition_penalty"] {
        let run = async |prompt: Vec<u32>, count: u32, ignored: u32, by: f64| {
            let mut body = json!({"prompt": prompt, "max_tokens": count, "prompt_ignore_length": ignored});
            body[name] = json!(by);
            tokens(&fake, body).await
        };
        let by = if name == "repetition_penalty" { 1.6 } else { 1.8 };
        let whole = run(prompt(20), 60, 20, by).await;
        assert_ne!(whole, run(prompt(20), 60, 20, if by < 1.7 { 1.0 } else { 0.0 }).await, "{name}");
        let rest = run([&prompt(20), &whole[..30]].concat(), 30, 20, by).await;
        assert_eq!(rest, whole[30..], "{name}");
    }
    // By default the prompt counts with the output.
    let of = async |ignored: Option<u32>| {
        let again = prompt(20);
        let prompt: Vec<u32> = again
            .iter()
            .chain(&tokens(&fake, json!({"prompt": again, "max_tokens": 40})).await)
            .copied()
            .collect();
        tokens(&fake, json!({"prompt": prompt, "max_tokens": 30, "presence_penalty": 2, "prompt_ignore_length": ignored})).await
    };
    assert_ne!(of(None).await, of(Some(60)).await);
}

#[tokio::test]
async fn parts_of_blocks_are_reused_by_default() {
    let fake = trtllm(|_| {}).await;
    cached(&fake, prompt(41)).await;
    assert_eq!(cached(&fake, prompt(41)).await, 40);
    let whole = trtllm(|options| options.partial_reuse = false).await;
    cached(&whole, prompt(41)).await;
    assert_eq!(cached(&whole, prompt(41)).await, 32);
    let none = trtllm(|options| options.block_reuse = false).await;
    cached(&none, prompt(41)).await;
    assert_eq!(cached(&none, prompt(41)).await, 0);
}

#[tokio::test]
async fn context_logits_are_of_what_was_computed() {
    let fake = trtllm(|_| {}).await;
    let first = tokens(&fake, json!({"prompt": prompt(12)})).await;
    let answer =
        ask(fake.address, ROUTE, with(json!({"prompt": prompt(12), "return_context_logits": true}))).await;
    let rows = answer["choices"][0]["context_logits"].as_array().unwrap();
    assert_eq!((rows.len(), rows[0].as_array().unwrap().len()), (1, 8192));
    let row: Vec<f64> = rows[0].as_array().unwrap().iter().map(|logit| logit.as_f64().unwrap()).collect();
    let best = row.iter().copied().fold(f64::MIN, f64::max);
    assert!((row[first[0] as usize] - best).abs() < 1e-6);
    assert!(
        ask(fake.address, ROUTE, with(json!({"prompt": prompt(12)}))).await["choices"][0]["context_logits"]
            .is_null()
    );
}

#[tokio::test]
async fn seeds_start_again_with_every_request_and_for_every_prompt() {
    let fake = trtllm(|_| {}).await;
    let hot = |prompt: Value, count: u32| json!({"prompt": prompt, "max_tokens": count, "temperature": 1.4, "seed": 5});
    let whole = tokens(&fake, hot(json!(prompt(20)), 16)).await;
    assert_eq!(tokens(&fake, hot(json!(prompt(20)), 16)).await, whole);
    let rest = tokens(&fake, hot(json!([&prompt(20)[..], &whole[..8]].concat()), 8)).await;
    assert_ne!(rest, whole[8..]);
    let both = ask(fake.address, ROUTE, with(hot(json!([prompt(20), prompt(20)]), 8))).await;
    assert_eq!(both["choices"][0]["token_ids"], both["choices"][1]["token_ids"]);
}

#[tokio::test]
async fn missing_parameters_come_from_the_defaults() {
    let defaults = Defaults { temperature: Some(0.0), repetition_penalty: Some(1.9), ..Defaults::default() };
    let fake = trtllm(|options| options.setup.defaults = defaults).await;
    let run = async |extra: Value| {
        let mut body = json!({"model": "toy", "prompt": prompt(20), "max_tokens": 30, "detokenize": false});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        ids(&ask(fake.address, ROUTE, body).await["choices"][0]["token_ids"])
    };
    assert_eq!(run(json!({})).await, run(json!({"temperature": 0, "repetition_penalty": 1.9})).await);
    assert_ne!(run(json!({})).await, run(json!({"repetition_penalty": 1})).await);
}

#[tokio::test]
async fn statistics_wait_in_a_queue_and_are_returned_once() {
    let fake = trtllm(|_| {}).await;
    for _ in 0..3 {
        tokens(&fake, json!({"prompt": prompt(40)})).await;
    }
    let told = get(fake.address, "/metrics").await.json();
    assert_eq!((told.as_array().unwrap().len(), &told[0]["kvCacheStats"]["tokensPerBlock"]), (3, &json!(32)));
    assert_eq!(get(fake.address, "/metrics").await.json(), json!([]));
    assert_eq!(get(fake.address, "/prometheus/metrics").await.head.status(), 404);
    let open = trtllm(|options| options.perf_metrics = true).await;
    open.house.pretend.lock().waiting = 4;
    let text = get(open.address, "/prometheus/metrics").await.text();
    assert_eq!(gauge(&text, "trtllm_num_requests_waiting{"), "4.0");
    assert_eq!(gauge(&text, "trtllm_kv_cache_tokens_per_block{"), "32.0");
}

#[tokio::test]
async fn it_says_who_it_is_and_reads_texts() {
    let fake = trtllm(|_| {}).await;
    assert!(get(fake.address, "/version").await.json()["version"].is_string());
    assert_eq!(get(fake.address, "/server_info").await.json(), json!({"disaggregated_params": null}));
    assert_eq!(get(fake.address, "/v1/models").await.json()["data"][0]["owned_by"], "tensorrt_llm");
    let read = ask(fake.address, "/_internal/tokenize", json!({"prompt": "a house"})).await;
    assert_eq!(read["count"], ids(&read["tokens"]).len());
    assert_eq!(refusal(fake.address, "/_internal/tokenize", json!({"messages": []})).await.0, 400);
    let old = trtllm(|options| options.tokenizes = false).await;
    assert_eq!(refusal(old.address, "/_internal/tokenize", json!({"prompt": "a"})).await.0, 404);
    let chat = json!({"model": "toy", "messages": [], "prompt_token_ids": prompt(20), "max_tokens": 3, "temperature": 0});
    let said =
        ask(fake.address, "/v1/chat/completions", chat).await["choices"][0]["message"]["content"].clone();
    let same = tokens(&fake, json!({"prompt": prompt(20), "max_tokens": 3})).await;
    assert_eq!(said, fake.house.toy.decode(&same, true));
}

#[tokio::test]
async fn a_disconnect_is_noticed_within_a_second() {
    assert_eq!(Options::default().setup.pace.cancel, Duration::from_secs(1));
    let short = Duration::from_millis(150);
    let fake = trtllm(|options| options.setup.pace.cancel = short).await;
    fake.house.pace.lock().step = Duration::from_hours(1);
    let mut wire = Wire::connect(fake.address).await;
    wire.send(post(ROUTE, "", with(json!({"prompt": [5], "max_tokens": 9})).to_string().as_bytes())).await;
    until(|| fake.house.running() == 1).await;
    let left = Instant::now();
    drop(wire);
    until(|| fake.house.running() == 0).await;
    assert!(left.elapsed() >= short);
}
