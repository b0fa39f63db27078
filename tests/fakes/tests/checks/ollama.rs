//! Ollama's behaviour (reference: its server's source).

use std::time::Duration;

use serde_json::{Value, json};

use crate::client::{ask, call, events, get, parsed, refusal, until};
use crate::fakes::ollama::{Ollama, Options};
use crate::fakes::{Defaults, Fake};
use crate::wire::{Wire, post};

const GENERATE: &str = "/api/generate";
const TEXT: &str = "Once upon a time there was a house by the sea";

async fn ollama(change: impl FnOnce(&mut Options)) -> Fake<Ollama> {
    let mut options = Options::default();
    options.setup.temper.eos_every = None;
    change(&mut options);
    Fake::start(Ollama::new(options)).await
}

#[allow(clippy::needless_pass_by_value)] // so that bodies are written in place
fn raw(text: &str, options: Value) -> Value {
    json!({"model": "toy", "prompt": text, "raw": true, "stream": false, "options": options})
}

async fn said(fake: &Fake<Ollama>, text: &str, options: Value) -> String {
    ask(fake.address, GENERATE, raw(text, options)).await["response"].as_str().unwrap().to_owned()
}

fn lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[tokio::test]
async fn strings_come_out_and_no_ids() {
    let fake = ollama(|_| {}).await;
    let mut body = raw(TEXT, json!({"num_predict": 2, "temperature": 0}));
    body["logprobs"] = json!(true);
    body["top_logprobs"] = json!(3);
    let answer = ask(fake.address, GENERATE, body.clone()).await;
    assert_eq!((&answer["done"], &answer["done_reason"]), (&json!(true), &json!("length")));
    assert_eq!(answer["eval_count"], 2);
    assert_eq!(answer["prompt_eval_count"], fake.house.toy.encode(TEXT).len());
    let own = &answer["logprobs"][0];
    assert_eq!(own["top_logprobs"].as_array().unwrap().len(), 3);
    assert!(own.get("id").is_none() && own["token"].is_string() && own["bytes"].is_array());
    body["top_logprobs"] = json!(21);
    assert_eq!(refusal(fake.address, GENERATE, body).await.0, 400);
    assert_eq!(call(fake.address, "/api/tokenize", &json!({})).await.head.status(), 404);
}

#[tokio::test]
async fn texts_only_and_old_ids_are_read_again() {
    let fake = ollama(|_| {}).await;
    let listed = json!({"model": "toy", "prompt": [5, 6], "stream": false});
    let (status, text) = refusal(fake.address, GENERATE, listed).await;
    assert_eq!((status, serde_json::from_str::<Value>(&text).unwrap()["error"].is_string()), (400, true));
    for prompt in [json!([5, 6]), json!(["a", "b"])] {
        let body = json!({"model": "toy", "prompt": prompt, "max_tokens": 1});
        assert_eq!(refusal(fake.address, "/v1/completions", body).await.0, 400);
    }
    let options = json!({"num_predict": 8, "temperature": 0});
    let mut body = raw(" by the sea", options.clone());
    body["context"] = json!(fake.house.toy.encode("Once upon a time there was a house"));
    let answer = ask(fake.address, GENERATE, body).await;
    assert_eq!(answer["response"], said(&fake, TEXT, options).await);
    assert_eq!(refusal(fake.address, GENERATE, json!({"model": "other", "prompt": "a"})).await.0, 404);
    let more = json!({"model": "toy", "prompt": "a", "prediction": 1, "stream": false, "options": {"num_predict": 1, "draft_num_predict": 4}});
    ask(fake.address, GENERATE, more).await;
}

#[tokio::test]
async fn lines_are_streamed_by_default() {
    let fake = ollama(|_| {}).await;
    let options = json!({"num_predict": 4, "temperature": 0});
    let body = json!({"model": "toy", "prompt": TEXT, "raw": true, "options": options});
    let answer = call(fake.address, GENERATE, &body).await;
    assert_eq!(answer.head.get("content-type"), Some("application/x-ndjson"));
    let all = lines(&answer.text());
    let text: String = all.iter().map(|line| line["response"].as_str().unwrap()).collect();
    assert_eq!((text, all.len()), (said(&fake, TEXT, options).await, 4));
    assert!(all[..3].iter().all(|line| line["done"] == false && line.get("eval_count").is_none()));
    assert_eq!((&all[3]["done"], &all[3]["eval_count"]), (&json!(true), &json!(4)));
    let chat = json!({"model": "toy", "messages": [{"role": "user", "content": "hi"}], "options": {"num_predict": 2}});
    let all = lines(&call(fake.address, "/api/chat", &chat).await.text());
    assert_eq!((&all[0]["message"]["role"], all.len()), (&json!("assistant"), 2));
    let body = json!({"model": "toy", "prompt": "a", "max_tokens": 2, "stream": true});
    let all = events(fake.address, "/v1/completions", body).await;
    assert_eq!((all.last().unwrap().as_str(), parsed(&all).len()), ("[DONE]", 2));
}

#[tokio::test]
async fn calls_wait_for_one_another() {
    let fake = ollama(|_| {}).await;
    fake.house.pace.lock().step = Duration::from_hours(1);
    let mut wires = Vec::new();
    for _ in 0..4 {
        wires.push(Wire::connect(fake.address).await);
        let body = raw(TEXT, json!({"num_predict": 1}));
        wires.last_mut().unwrap().send(post(GENERATE, "", body.to_string().as_bytes())).await;
    }
    until(|| (fake.house.running(), fake.house.waiting()) == (1, 3)).await;
    assert_eq!(ollama(|options| options.num_parallel = 4).await.house.setup.max_running, 4);
}

#[tokio::test]
async fn a_text_that_repeats_itself_is_aborted() {
    let fake = ollama(|options| options.stuck = Some(300)).await;
    let options = json!({"num_predict": 100, "temperature": 0});
    let answer = ask(fake.address, GENERATE, raw(TEXT, options.clone())).await;
    assert_eq!((&answer["done"], fake.house.tally().generated), (&json!(false), 31));
    let body = json!({"model": "toy", "prompt": TEXT, "raw": true, "options": options});
    let all = lines(&call(fake.address, GENERATE, &body).await.text());
    assert!(all.len() == 30 && all.iter().all(|line| line["done"] == false));
    assert_eq!(fake.house.running(), 0);
    // The maximum number of repeats is accepted.
    let answer = ask(fake.address, GENERATE, raw(TEXT, json!({"num_predict": 30, "temperature": 0}))).await;
    assert_eq!(answer["done"], true);
}

#[tokio::test]
async fn defaults_come_from_ollama_or_the_modelfile() {
    let fake = ollama(|_| {}).await;
    let bare = said(&fake, TEXT, json!({"num_predict": 20, "seed": 4})).await;
    let own = json!({"num_predict": 20, "seed": 4, "temperature": 0.8, "top_k": 40, "top_p": 0.9});
    assert_eq!(bare, said(&fake, TEXT, own).await);
    let defaults = Defaults { temperature: Some(0.0), ..Defaults::default() };
    let filed = ollama(|options| options.setup.defaults = defaults).await;
    let greedy = said(&fake, TEXT, json!({"num_predict": 20, "temperature": 0})).await;
    assert_eq!(said(&filed, TEXT, json!({"num_predict": 20})).await, greedy);
    // The OpenAI route defaults to 1.
    let body = json!({"model": "toy", "prompt": TEXT, "max_tokens": 20, "seed": 4});
    let text = |answer: Value| answer["choices"][0]["text"].clone();
    let told = text(ask(filed.address, "/v1/completions", body.clone()).await);
    let mut hot = body;
    hot["temperature"] = json!(1.0);
    assert_eq!(told, text(ask(filed.address, "/v1/completions", hot).await));
    assert_ne!(told, greedy);
}

#[tokio::test]
async fn the_penalty_window_can_be_set() {
    let fake = ollama(|_| {}).await;
    let run = async |text: &str, count: u32, last: i32| {
        let options =
            json!({"num_predict": count, "temperature": 0, "repeat_penalty": 1.6, "repeat_last_n": last});
        said(&fake, text, options).await
    };
    let whole = run(TEXT, 40, 64).await;
    assert_eq!(run(TEXT, 40, 64).await, whole);
    assert_ne!(run(TEXT, 40, 0).await, whole);
}

#[tokio::test]
async fn it_says_who_it_is_and_renders_templates() {
    let fake = ollama(|_| {}).await;
    assert!(get(fake.address, "/api/version").await.json()["version"].is_string());
    assert_eq!(get(fake.address, "/api/ps").await.json()["models"][0]["name"], "toy");
    assert_eq!(get(fake.address, "/v1/models").await.json()["data"][0]["owned_by"], "library");
    assert_eq!(get(fake.address, "/metrics").await.head.status(), 404);
    let body =
        json!({"model": "toy", "messages": [{"role": "user", "content": "hi"}], "_debug_render_only": true});
    let told = ask(fake.address, "/api/chat", body).await;
    assert!(told["_debug_info"]["rendered_template"].as_str().unwrap().contains("hi"));
    assert_eq!(fake.house.tally().sequences, 0);
}
