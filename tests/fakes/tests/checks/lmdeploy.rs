//! LMDeploy's behaviour (reference: `serve/openai/protocol.py` and the API server).

use serde_json::{Value, json};

use crate::client::{ask, events, gauge, get, ids, parsed, refusal};
use crate::fakes::lmdeploy::{Lmdeploy, Options};
use crate::fakes::{Defaults, Fake, Temper};

const GENERATE: &str = "/generate";

async fn lmdeploy(change: impl FnOnce(&mut Options)) -> Fake<Lmdeploy> {
    let mut options = Options::default();
    options.setup.temper.eos_every = None;
    change(&mut options);
    Fake::start(Lmdeploy::new(options)).await
}

fn prompt(len: u32) -> Vec<u32> {
    (0..len).map(|at| 100 + at * 7 % 900).collect()
}

fn greedy(prompt: &[u32], count: u32) -> Value {
    json!({"input_ids": prompt, "max_tokens": count, "temperature": 0})
}

async fn plain(fake: &Fake<Lmdeploy>, body: Value) -> Vec<u32> {
    ids(&ask(fake.address, GENERATE, body).await["output_ids"])
}

#[tokio::test]
async fn one_prompt_per_call_as_text_or_as_ids() {
    let fake = lmdeploy(|_| {}).await;
    let answer = ask(fake.address, GENERATE, greedy(&prompt(20), 3)).await;
    let meta = &answer["meta_info"];
    assert_eq!((&meta["prompt_tokens"], &meta["completion_tokens"]), (&json!(20), &json!(3)));
    assert_eq!(meta["finish_reason"], json!({"type": "length", "length": 3}));
    assert!(meta["output_token_logprobs"].is_null());
    assert_eq!(answer["text"], fake.house.toy.decode(&ids(&answer["output_ids"]), true));
    for wrong in [
        json!({"input_ids": [prompt(3), prompt(4)], "max_tokens": 1}),
        json!({"prompt": ["a", "b"], "max_tokens": 1}),
        json!({"prompt": "a", "input_ids": [5], "max_tokens": 1}),
        json!({"max_tokens": 1}),
        json!({"input_ids": [9000], "max_tokens": 1}),
        json!({"input_ids": [5], "max_tokens": 0}),
        json!({"input_ids": [5], "top_p": 0}),
        json!({"input_ids": [5], "top_k": -1}),
    ] {
        assert_eq!(refusal(fake.address, GENERATE, wrong.clone()).await.0, 400, "{wrong}");
    }
    let several =
        json!({"model": "toy", "prompt": ["a house", "the sea"], "max_tokens": 2, "temperature": 0});
    assert_eq!(ask(fake.address, "/v1/completions", several).await["choices"].as_array().unwrap().len(), 2);
    let tokens = json!({"model": "toy", "prompt": [5, 6], "max_tokens": 2});
    assert_eq!(refusal(fake.address, "/v1/completions", tokens).await.0, 400);
}

#[tokio::test]
async fn errors_are_flat() {
    let fake = lmdeploy(|_| {}).await;
    let (status, text) =
        refusal(fake.address, "/v1/completions", json!({"model": "other", "prompt": "a"})).await;
    let error: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((status, &error["object"], &error["code"]), (404, &json!("error"), &json!(404)));
    assert!(error["message"].is_string() && error["param"].is_null() && error["type"].is_string());
}

#[tokio::test]
async fn caching_needs_a_flag_and_has_blocks_of_64() {
    let fake = lmdeploy(|_| {}).await;
    for _ in 0..2 {
        plain(&fake, greedy(&prompt(150), 1)).await;
    }
    assert_eq!(fake.house.tally().cached, 0);
    let fake = lmdeploy(|options| options.prefix_caching = true).await;
    for _ in 0..2 {
        plain(&fake, greedy(&prompt(150), 1)).await;
    }
    assert_eq!((fake.house.tally().cached, fake.house.setup.block), (128, 64));
    assert_eq!(refusal(fake.address, "/get_ppl", json!({"input": "a"})).await.0, 400);
}

#[tokio::test]
async fn logprobs_need_a_mode_of_the_engine() {
    let fake = lmdeploy(|_| {}).await;
    let mut body = greedy(&prompt(20), 2);
    body["return_logprob"] = json!(true);
    assert_eq!(refusal(fake.address, GENERATE, body.clone()).await.0, 400);
    let raw = lmdeploy(|options| options.logprobs_mode = Some("raw_logprobs")).await;
    let told = ask(raw.address, GENERATE, body.clone()).await;
    let own = told["meta_info"]["output_token_logprobs"].as_array().unwrap();
    assert_eq!((own.len(), &own[0][1]), (2, &told["output_ids"][0]));
    assert!(own[0][0].as_f64().unwrap() <= 0.0);
    let logits = lmdeploy(|options| options.logprobs_mode = Some("raw_logits")).await;
    let told = ask(logits.address, GENERATE, body).await;
    assert!(told["meta_info"]["output_token_logprobs"][0][0].as_f64().unwrap() > 0.0);
}

#[tokio::test]
async fn every_route_has_defaults_of_its_own_and_none_of_the_model() {
    let defaults = Defaults { temperature: Some(0.0), repetition_penalty: Some(1.9), ..Defaults::default() };
    let fake = lmdeploy(|options| options.setup.defaults = defaults).await;
    // The native route defaults to temperature 1 and all tokens, without a seed.
    let hot = json!({"input_ids": prompt(20), "max_tokens": 24});
    assert_ne!(plain(&fake, hot.clone()).await, plain(&fake, hot).await);
    let complete = async |extra: Value| {
        let mut body = json!({"model": "toy", "prompt": "a house", "max_tokens": 24, "seed": 4, "return_token_ids": true});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        ids(&ask(fake.address, "/v1/completions", body).await["choices"][0]["gen_tokens"])
    };
    let bare = complete(json!({})).await;
    assert_eq!(bare, complete(json!({"temperature": 0.7, "top_k": 40, "top_p": 1.0})).await);
    assert_ne!(bare, complete(json!({"temperature": 0})).await);
    let short = json!({"model": "toy", "prompt": "a house", "return_token_ids": true});
    let short = ask(fake.address, "/v1/completions", short).await;
    assert_eq!(short["usage"]["completion_tokens"], 16);
    assert_eq!(
        ask(fake.address, GENERATE, json!({"input_ids": [5]})).await["meta_info"]["completion_tokens"],
        128
    );
}

#[tokio::test]
async fn repetition_counts_output_only() {
    let fake = lmdeploy(|_| {}).await;
    let run = async |prompt: Vec<u32>, count: u32| {
        let mut body = greedy(&prompt, count);
        body["repetition_penalty"] = json!(1.5);
        plain(&fake, body).await
    };
    let whole = run(prompt(20), 60).await;
    assert_ne!(run([&prompt(20), &whole[..30]].concat(), 30).await, whole[30..]);
    // The native schema ignores unknown fields.
    let mut body = greedy(&prompt(20), 30);
    body["presence_penalty"] = json!(2.0);
    body["seed"] = json!(3);
    assert_eq!(plain(&fake, body).await, plain(&fake, greedy(&prompt(20), 30)).await);
}

#[tokio::test]
async fn stop_ids_are_returned_only_if_the_server_does() {
    let ends = Temper { eos_every: Some(1), ..Temper::default() };
    let fake = lmdeploy(|options| options.setup.temper = ends.clone()).await;
    let answer = ask(fake.address, GENERATE, greedy(&[5], 9)).await;
    assert_eq!((ids(&answer["output_ids"]), &answer["text"]), (vec![], &json!("")));
    assert_eq!(answer["meta_info"]["finish_reason"]["type"], "stop");
    let fake = lmdeploy(|options| {
        options.setup.temper = ends;
        options.stop_ids = true;
    })
    .await;
    assert_eq!(plain(&fake, greedy(&[5], 9)).await, [0]);
    let mut through = greedy(&[5], 9);
    through["ignore_eos"] = json!(true);
    assert_eq!(plain(&fake, through).await.len(), 9);
    let fake = lmdeploy(|_| {}).await;
    let whole = plain(&fake, greedy(&prompt(20), 9)).await;
    let mut stopped = greedy(&prompt(20), 9);
    stopped["stop_token_ids"] = json!([whole[4]]);
    let first = whole.iter().position(|id| *id == whole[4]).unwrap();
    assert_eq!(plain(&fake, stopped).await, whole[..first]);
}

#[tokio::test]
async fn words_become_ids() {
    let fake = lmdeploy(|_| {}).await;
    let one = ask(fake.address, "/v1/encode", json!({"input": "a house", "do_preprocess": false})).await;
    assert_eq!(one["length"], ids(&one["input_ids"]).len());
    let two = ask(fake.address, "/v1/encode", json!({"input": ["a house", "b"]})).await;
    assert_eq!((&two["input_ids"][0], two["length"].as_array().unwrap().len()), (&one["input_ids"], 2));
}

#[tokio::test]
async fn streams_have_ids_next_to_the_text_and_end() {
    let fake = lmdeploy(|_| {}).await;
    let mut body = greedy(&prompt(20), 4);
    let whole = plain(&fake, body.clone()).await;
    body["stream"] = json!(true);
    let all = events(fake.address, GENERATE, body).await;
    assert_eq!(all.last().unwrap(), "[DONE]");
    assert_eq!(parsed(&all).iter().flat_map(|event| ids(&event["output_ids"])).collect::<Vec<_>>(), whole);
    let chat = json!({"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "stream": true,
        "temperature": 0, "return_token_ids": true});
    let all = parsed(&events(fake.address, "/v1/chat/completions", chat.clone()).await);
    let streamed: Vec<u32> = all.iter().flat_map(|event| ids(&event["choices"][0]["output_ids"])).collect();
    let mut whole = chat;
    whole["stream"] = json!(false);
    let answer = ask(fake.address, "/v1/chat/completions", whole).await;
    assert_eq!((ids(&answer["choices"][0]["output_ids"]), streamed.len()), (streamed, 3));
}

#[tokio::test]
async fn metrics_are_behind_a_flag() {
    let fake = lmdeploy(|_| {}).await;
    assert_eq!(get(fake.address, "/metrics").await.head.status(), 404);
    let fake = lmdeploy(|options| {
        options.metrics = true;
        options.prefix_caching = true;
    })
    .await;
    fake.house.pretend.lock().waiting = 2;
    for _ in 0..2 {
        plain(&fake, greedy(&prompt(65), 1)).await;
    }
    let text = get(fake.address, "/metrics").await.text();
    assert_eq!(gauge(&text, "lmdeploy:num_requests_waiting{"), "2.0");
    let rate: f64 = gauge(&text, "lmdeploy:prefix_cache_hit_rate{").parse().unwrap();
    assert!((rate - 64.0 / 130.0).abs() < 1e-9);
}
