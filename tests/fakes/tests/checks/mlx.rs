//! mlx-lm's behaviour (reference: `mlx_lm/server.py`).

use std::sync::atomic::Ordering;
use std::time::Duration;

use serde_json::{Value, json};

use crate::client::{ask, call, events, get, parsed, refusal, until};
use crate::fakes::mlx::{Mlx, Options};
use crate::fakes::{Defaults, Fake};
use crate::wire::{Wire, post};

const ROUTE: &str = "/v1/completions";
const TEXT: &str = "Once upon a time there was a house by the sea";

async fn mlx(change: impl FnOnce(&mut Options)) -> Fake<Mlx> {
    let mut options = Options::default();
    options.setup.temper.eos_every = None;
    change(&mut options);
    Fake::start(Mlx::new(options)).await
}

#[allow(clippy::needless_pass_by_value)] // so that bodies are written in place
fn body(text: &str, count: u32, extra: Value) -> Value {
    let mut body = json!({"prompt": text, "max_tokens": count});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

async fn told(fake: &Fake<Mlx>, text: &str, count: u32, extra: Value) -> Value {
    ask(fake.address, ROUTE, body(text, count, extra)).await
}

async fn said(fake: &Fake<Mlx>, text: &str, count: u32, extra: Value) -> String {
    told(fake, text, count, extra).await["choices"][0]["text"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn one_string_and_nothing_else() {
    let fake = mlx(|_| {}).await;
    said(&fake, TEXT, 2, json!({"prediction": 1, "novel": true})).await;
    for prompt in [json!([5, 6]), json!(["a", "b"]), json!([[5]])] {
        let (status, text) = refusal(fake.address, ROUTE, json!({"prompt": prompt, "max_tokens": 1})).await;
        assert_eq!((status, serde_json::from_str::<Value>(&text).unwrap()["error"].is_string()), (500, true));
    }
    for wrong in
        [json!({"top_p": 2}), json!({"temperature": -1}), json!({"top_logprobs": 11}), json!({"logprobs": 1})]
    {
        assert_eq!(refusal(fake.address, ROUTE, body(TEXT, 1, wrong.clone())).await.0, 400, "{wrong}");
    }
}

#[tokio::test]
async fn logprobs_are_not_the_sampled_tokens() {
    let fake = mlx(|_| {}).await;
    let plain = told(&fake, TEXT, 3, json!({"logprobs": true})).await["choices"][0].clone();
    let content = plain["logprobs"]["content"].as_array().unwrap();
    assert_eq!((content.len(), content[0].as_object().unwrap().len()), (3, 2));
    let sampled: Vec<&Value> = content.iter().map(|entry| &entry["id"]).collect();
    let tops = told(&fake, TEXT, 3, json!({"logprobs": true, "top_logprobs": 4})).await["choices"][0].clone();
    let content = tops["logprobs"]["content"].as_array().unwrap();
    for (entry, sampled) in content.iter().zip(sampled) {
        assert_ne!(&entry["id"], sampled);
        let all = entry["top_logprobs"].as_array().unwrap();
        assert_eq!((all.len(), &all[0]["id"]), (4, &entry["id"]));
        assert!(all.iter().any(|other| &other["id"] == sampled));
    }
    let stream = body(TEXT, 3, json!({"logprobs": true, "stream": true}));
    let all = parsed(&events(fake.address, ROUTE, stream).await);
    assert!(all.iter().all(|event| event["choices"][0].get("logprobs").is_none()));
}

#[tokio::test]
async fn logprobs_include_bias_and_not_temperature() {
    let fake = mlx(|_| {}).await;
    let logprob = async |extra: Value| {
        let mut extra = extra;
        extra["logprobs"] = json!(true);
        let answer = told(&fake, TEXT, 1, extra).await["choices"][0]["logprobs"]["content"][0].clone();
        (answer["id"].as_u64().unwrap(), answer["logprob"].as_f64().unwrap())
    };
    let (id, plain) = logprob(json!({})).await;
    let (_, hot) = logprob(json!({"temperature": 0.01})).await;
    assert!((plain - hot).abs() < 1e-3);
    let (forced, biased) = logprob(json!({"logit_bias": {"300": 100}})).await;
    assert!(forced == 300 && id != 300 && biased > -1e-3);
}

#[tokio::test]
async fn greedy_by_default_unless_set_by_request_or_flags() {
    let fake = mlx(|_| {}).await;
    let greedy = said(&fake, TEXT, 20, json!({"temperature": 0})).await;
    assert_eq!(said(&fake, TEXT, 20, json!({})).await, greedy);
    let whole = ask(fake.address, ROUTE, json!({"prompt": TEXT})).await;
    assert_eq!(whole["usage"]["completion_tokens"], 512);
    let defaults = Defaults { temperature: Some(1.4), max_new_tokens: Some(7), ..Defaults::default() };
    let hot = mlx(|options| options.setup.defaults = defaults).await;
    let short = ask(hot.address, ROUTE, json!({"prompt": TEXT, "seed": 3})).await;
    assert_eq!(short["usage"]["completion_tokens"], 7);
    let same = said(&fake, TEXT, 20, json!({"temperature": 1.4, "seed": 3})).await;
    assert_eq!(said(&hot, TEXT, 20, json!({"seed": 3})).await, same);
    assert_ne!(same, greedy);
}

#[tokio::test]
async fn few_conversations_are_kept_and_each_use_copies_one() {
    let fake = mlx(|options| options.prompt_cache_size = 2).await;
    let cached = async |text: &str| {
        told(&fake, text, 1, json!({})).await["usage"]["prompt_tokens_details"]["cached_tokens"]
            .as_u64()
            .unwrap()
    };
    let len = |text: &str| fake.house.toy.encode(text).len() as u64;
    assert_eq!((cached(TEXT).await, fake.engine.copies.load(Ordering::SeqCst)), (0, 0));
    assert_eq!((cached(TEXT).await, fake.engine.copies.load(Ordering::SeqCst)), (len(TEXT) - 1, 1));
    cached("The quick brown fox").await;
    cached("Lorem ipsum dolor sit amet").await;
    assert!(cached(TEXT).await < 3);
}

#[tokio::test]
async fn a_seed_is_served_alone_and_starts_again() {
    let fake = mlx(|_| {}).await;
    let hot = |seed: u32| json!({"temperature": 1.4, "seed": seed});
    let whole = said(&fake, TEXT, 16, hot(3)).await;
    assert_eq!(said(&fake, TEXT, 16, hot(3)).await, whole);
    let first = said(&fake, TEXT, 8, hot(3)).await;
    assert!(whole.starts_with(&first));
    assert_ne!(said(&fake, &format!("{TEXT}{first}"), 8, hot(3)).await, whole[first.len()..]);
    fake.house.pace.lock().step = Duration::from_hours(1);
    let mut wires = Vec::new();
    for extra in [json!({}), json!({}), hot(1)] {
        wires.push(Wire::connect(fake.address).await);
        let body = body(TEXT, 1, extra).to_string();
        wires.last_mut().unwrap().send(post(ROUTE, "", body.as_bytes())).await;
    }
    until(|| fake.house.running() == 2 && fake.house.tally().calls_of(ROUTE) == 7).await;
    // The seeded one is not even in the queue.
    assert_eq!((fake.house.running(), fake.house.waiting()), (2, 0));
}

#[tokio::test]
async fn penalties_count_the_last_twenty_by_default() {
    let fake = mlx(|_| {}).await;
    for name in ["repetition_penalty", "presence_penalty", "frequency_penalty"] {
        let run = async |text: &str, count: u32, last: u32| {
            let mut extra = json!({"repetition_context_size": last});
            extra[name] = json!(1.7);
            said(&fake, text, count, extra).await
        };
        let whole = run(TEXT, 60, 20).await;
        assert_ne!(run(TEXT, 60, 60).await, whole, "{name}");
        assert_ne!(said(&fake, TEXT, 60, json!({})).await, whole, "{name}");
    }
}

#[tokio::test]
async fn streams_begin_with_a_comment_and_end_with_a_mark() {
    let fake = mlx(|_| {}).await;
    let chat = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "stream": true,
        "stream_options": {"include_usage": true}});
    let text = call(fake.address, "/v1/chat/completions", &chat).await.text();
    assert!(text.starts_with(": keepalive") && text.ends_with("data: [DONE]\n\n"));
    let all = parsed(&events(fake.address, "/v1/chat/completions", chat).await);
    let delta = &all[0]["choices"][0]["delta"];
    assert_eq!((&delta["role"], &delta["tool_calls"]), (&json!("assistant"), &json!([])));
    assert_eq!(all.last().unwrap()["usage"]["completion_tokens"], 3);
}

#[tokio::test]
async fn there_are_no_load_metrics_and_no_tokenizer_route() {
    let fake = mlx(|options| options.draft_model = Some("small")).await;
    assert_eq!(get(fake.address, "/health").await.json(), json!({"status": "ok"}));
    assert!(get(fake.address, "/v1/models").await.json()["data"][0].get("owned_by").is_none());
    for path in ["/metrics", "/version", "/tokenize", "/info"] {
        assert_eq!(get(fake.address, path).await.head.status(), 404, "{path}");
    }
    said(&fake, TEXT, 1, json!({"draft_model": "small", "num_draft_tokens": 3})).await;
    assert_eq!(refusal(fake.address, ROUTE, body(TEXT, 1, json!({"draft_model": "large"}))).await.0, 500);
}
