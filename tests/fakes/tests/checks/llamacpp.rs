//! Behaviour of llama-server (reference: its source at `0c1e570` and recorded answers).

use std::sync::atomic::Ordering;
use std::time::Duration;

use serde_json::{Value, json};

use crate::client::{ask, call, events, gauge, get, ids, parsed, refusal, until};
use crate::fakes::llamacpp::{Llama, Options};
use crate::fakes::{Defaults, Fake, Temper};
use crate::wire::{Wire, post};

const NATIVE: &str = "/completion";

async fn llama(change: impl FnOnce(&mut Options)) -> Fake<Llama> {
    let mut options = Options { cache_idle_slots: false, ..Options::default() };
    options.setup.temper.eos_every = None;
    change(&mut options);
    Fake::start(Llama::new(options)).await
}

fn prompt(len: u32) -> Vec<u32> {
    (0..len).map(|at| 100 + at * 7 % 900).collect()
}

fn body(prompt: impl Into<Value>, count: u32) -> Value {
    json!({"prompt": prompt.into(), "n_predict": count, "temperature": 0, "return_tokens": true})
}

async fn plain(fake: &Fake<Llama>, prompt: &[u32], count: u32) -> Vec<u32> {
    ids(&ask(fake.address, NATIVE, body(prompt.to_vec(), count)).await["tokens"])
}

fn cached(answer: &Value) -> u64 {
    answer["timings"]["cache_n"].as_u64().unwrap()
}

#[tokio::test]
async fn a_prompt_goes_to_the_closest_slot_and_computes_at_least_one_token() {
    let fake = llama(|_| {}).await;
    let one = ask(fake.address, NATIVE, body(prompt(40), 4)).await;
    let again = ask(fake.address, NATIVE, body(prompt(40), 4)).await;
    assert_eq!((cached(&one), cached(&again)), (0, 39));
    assert_eq!(one["id_slot"], again["id_slot"]);
    let other: Vec<u32> = prompt(60).into_iter().rev().collect();
    let other = ask(fake.address, NATIVE, body(other, 1)).await;
    assert!(other["id_slot"] != one["id_slot"] && cached(&other) == 0);
    assert_eq!(one["tokens_cached"], 40 + 4 - 1);
    assert_eq!(one["prompt"], fake.house.toy.decode(&prompt(40), false));
}

#[tokio::test]
async fn several_prompts_need_a_slot_each_and_the_rest_is_deferred() {
    let fake = llama(|options| options.slots = 3).await;
    let lists: Vec<Vec<u32>> = (0..5).map(|more| prompt(40 + more)).collect();
    let answer = ask(fake.address, NATIVE, body(json!(lists), 1)).await;
    let index: Vec<u64> =
        answer.as_array().unwrap().iter().map(|one| one["index"].as_u64().unwrap()).collect();
    assert_eq!(index, [0, 1, 2, 3, 4]);
    // The first three prefill all of it; the last two find it in the slots that are free again.
    assert_eq!(answer.as_array().unwrap().iter().map(cached).collect::<Vec<_>>(), [0, 0, 0, 42, 41]);
    fake.house.pace.lock().step = Duration::from_hours(1);
    let mut wire = Wire::connect(fake.address).await;
    wire.send(post(NATIVE, "", body(json!(lists), 1).to_string().as_bytes())).await;
    until(|| fake.slots().deferred.load(Ordering::SeqCst) == 2 && fake.house.running() == 3).await;
    assert_eq!(get(fake.address, "/slots?fail_on_no_slot=1").await.head.status(), 503);
    drop(wire);
    until(|| fake.slots().deferred.load(Ordering::SeqCst) + fake.house.running() == 0).await;
    assert_eq!(get(fake.address, "/slots?fail_on_no_slot=1").await.head.status(), 200);
}

#[tokio::test]
async fn a_fork_computes_its_prompt_once_and_warms_all_its_slots() {
    let fake = llama(|_| {}).await;
    let mut fork = body(prompt(40), 1);
    fork["n_cmpl"] = json!(4);
    let answer = ask(fake.address, NATIVE, fork.clone()).await;
    assert_eq!((answer.as_array().unwrap().len(), fake.house.tally().computed), (4, 40));
    let lists: Vec<Vec<u32>> = (0..4).map(|more| prompt(40 + more)).collect();
    let warm = ask(fake.address, NATIVE, body(json!(lists), 1)).await;
    assert_eq!(warm.as_array().unwrap().iter().map(cached).collect::<Vec<_>>(), [39, 40, 40, 40]);
    fork["n_cmpl"] = json!(5);
    assert_eq!(refusal(fake.address, NATIVE, fork).await.0, 400);
}

#[tokio::test]
async fn idle_slots_are_copied_out_and_cleared_at_every_task() {
    let lists: Vec<Vec<u32>> = (0..4).map(|more| prompt(40 + more)).collect();
    let copies = async |cache_idle: bool| {
        let fake = llama(|options| options.cache_idle_slots = cache_idle).await;
        for _ in 0..3 {
            ask(fake.address, NATIVE, body(json!(lists), 1)).await;
        }
        ask(fake.address, NATIVE, body(prompt(40), 1)).await;
        let empty = fake.slots().list().iter().filter(|slot| slot.tokens.is_empty()).count();
        (fake.slots().copies.load(Ordering::SeqCst), empty, fake.house.tally().computed)
    };
    let (copied, empty, warm) = copies(false).await;
    assert_eq!((copied, empty), (0, 0));
    let (copied, empty, ruined) = copies(true).await;
    assert!(copied >= 4 && empty == 3 && ruined > warm + 20, "{copied} {empty} {ruined} {warm}");
}

#[tokio::test]
async fn every_chunk_has_its_token_but_not_in_the_middle_of_a_character() {
    let fake = llama(|_| {}).await;
    let bytes: Vec<u32> = fake.house.toy.encode("💩");
    assert!(bytes.len() > 1);
    // The first token is the beginning of a character, and the next one is not its end.
    let mut half = body(prompt(20), 4);
    half["logit_bias"] = json!([[bytes[0], 100]]);
    half["stream"] = json!(true);
    let all = events(fake.address, NATIVE, half).await;
    assert!(all.iter().all(|event| event != "[DONE]"));
    let all = parsed(&all);
    let last = all.last().unwrap();
    assert_eq!(
        (&last["tokens_predicted"], &last["tokens"], &last["content"]),
        (&json!(4), &json!([]), &json!(""))
    );
    assert!(last["stop"] == true && all.len() < 5, "{all:?}");
    let mut whole = body(prompt(20), 6);
    whole["stream"] = json!(true);
    let all = parsed(&events(fake.address, NATIVE, whole).await);
    let told: Vec<u32> = all.iter().flat_map(|event| ids(&event["tokens"])).collect();
    let complete = plain(&fake, &prompt(20), 6).await;
    assert_eq!(all.iter().filter(|event| event["id_slot"] == -1).count(), told.len());
    assert!(told.iter().all(|id| complete.contains(id)));
}

#[tokio::test]
async fn defaults_are_the_servers_own_and_in_props() {
    let fake = llama(|_| {}).await;
    let told = get(fake.address, "/props").await.json()["default_generation_settings"]["params"].clone();
    let near = |name: &str, value: f64| (told[name].as_f64().unwrap() - value).abs() < 1e-6;
    assert!(near("temperature", 0.8) && near("top_k", 40.0) && near("top_p", 0.95) && near("min_p", 0.05));
    let defaults = Defaults { temperature: Some(0.0), repetition_penalty: Some(1.9), ..Defaults::default() };
    let fake = llama(|options| options.setup.defaults = defaults).await;
    let told = get(fake.address, "/props").await.json()["default_generation_settings"]["params"].clone();
    assert!((told["repeat_penalty"].as_f64().unwrap() - 1.9).abs() < 1e-6);
    let run = async |extra: Value| {
        let mut request = json!({"prompt": prompt(20), "n_predict": 30, "return_tokens": true});
        request.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        ids(&ask(fake.address, NATIVE, request).await["tokens"])
    };
    let bare = run(json!({})).await;
    assert_eq!(bare, run(json!({"temperature": 0, "repeat_penalty": 1.9})).await);
    assert_ne!(bare, run(json!({"repeat_penalty": 1})).await);
}

#[tokio::test]
async fn penalties_count_what_is_sent_again_and_seeds_start_again() {
    let fake = llama(|_| {}).await;
    let cut_equals_whole = async |extra: Value| {
        let run = async |prompt: Vec<u32>, count: usize| {
            let mut request = json!({"prompt": prompt, "n_predict": count, "return_tokens": true});
            request.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
            ids(&ask(fake.address, NATIVE, request).await["tokens"])
        };
        let whole = run(prompt(20), 60).await;
        assert_ne!(whole, plain(&fake, &prompt(20), 60).await, "it has an effect");
        run([&prompt(20), &whole[..30]].concat(), 30).await == whole[30..]
    };
    for penalty in ["presence_penalty", "frequency_penalty", "repeat_penalty"] {
        assert!(cut_equals_whole(json!({"temperature": 0, penalty: 1.5})).await, "{penalty}");
    }
    assert!(!cut_equals_whole(json!({"temperature": 1.5, "seed": 7})).await);
    let twice = async |seed: Option<u32>| {
        let request = json!({"prompt": prompt(20), "n_predict": 30, "temperature": 1.5, "seed": seed});
        ask(fake.address, NATIVE, request.clone()).await["content"]
            == ask(fake.address, NATIVE, request).await["content"]
    };
    assert!(twice(Some(7)).await && !twice(None).await);
}

#[tokio::test]
async fn accepted_and_refused_inputs_are_those_of_the_real_server() {
    let fake = llama(|options| options.setup.max_len = 64).await;
    let status = async |path: &str, body: Value| call(fake.address, path, &body).await.head.status();
    for fine in [
        json!({"temperature": -1}),
        json!({"model": "other"}),
        json!({"echo": true}),
        json!({"max_tokens": 5000}),
        json!({"prediction": 1}),
    ] {
        let mut request = json!({"prompt": prompt(20), "max_tokens": 4});
        request.as_object_mut().unwrap().extend(fine.as_object().unwrap().clone());
        assert_eq!(status("/v1/completions", request).await, 200, "{fine}");
    }
    let long = call(fake.address, NATIVE, &body(prompt(64), 1)).await.json()["error"].clone();
    assert_eq!((&long["type"], &long["n_prompt_tokens"]), (&json!("exceed_context_size_error"), &json!(64)));
    // A full context ends the output, and the answer reports it.
    let full = ask(fake.address, NATIVE, body(prompt(60), 100)).await;
    assert_eq!((&full["truncated"], &full["tokens_predicted"]), (&json!(true), &json!(4)));
}

#[tokio::test]
async fn openai_routes_have_no_ids_and_the_usage_of_the_first_prompt() {
    let fake = llama(|_| {}).await;
    let request =
        json!({"prompt": [prompt(20), prompt(25)], "max_tokens": 1, "temperature": 0, "return_tokens": true});
    let answer = ask(fake.address, "/v1/completions", request).await;
    assert_eq!(
        (answer["choices"].as_array().unwrap().len(), &answer["usage"]["prompt_tokens"]),
        (2, &json!(20))
    );
    assert!(!answer.to_string().contains("token_ids"));
    let request =
        json!({"prompt": prompt(20), "max_tokens": 2, "temperature": 0, "logprobs": 2, "stream": true});
    let all = events(fake.address, "/v1/completions", request).await;
    assert_eq!(all.last().unwrap(), "[DONE]");
    let all = parsed(&all);
    assert!(all[0]["choices"][0]["logprobs"]["content"][0]["id"].is_u64());
    assert_eq!(all.last().unwrap()["usage"]["completion_tokens"], 2);
}

#[tokio::test]
async fn the_end_is_a_token_of_its_own_and_can_be_banned() {
    let fake =
        llama(|options| options.setup.temper = Temper { eos_every: Some(1), ..Temper::default() }).await;
    let answer = ask(fake.address, NATIVE, body(prompt(20), 9)).await;
    assert_eq!(
        (ids(&answer["tokens"]), &answer["stop_type"], &answer["content"]),
        (vec![0], &json!("eos"), &json!(""))
    );
    let mut banned = body(prompt(20), 9);
    banned["ignore_eos"] = json!(true);
    let answer = ask(fake.address, NATIVE, banned).await;
    assert!(ids(&answer["tokens"]).len() == 9 && !ids(&answer["tokens"]).contains(&0));
}

#[tokio::test]
async fn load_and_start_are_shown_behind_flags() {
    let fake = llama(|_| {}).await;
    assert_eq!(get(fake.address, "/metrics").await.head.status(), 501);
    let fake = llama(|options| options.metrics = true).await;
    fake.house.pretend.lock().waiting = 2;
    let answer = get(fake.address, "/metrics").await;
    assert_eq!(gauge(&answer.text(), "llamacpp:requests_deferred "), "2");
    let start = |answer: &crate::wire::Message| {
        answer.head.get("process-start-time-unix").unwrap().parse::<u64>().unwrap()
    };
    let before = start(&answer);
    plain(&fake, &prompt(30), 1).await;
    fake.restart();
    assert!(start(&get(fake.address, "/metrics").await) > before);
    assert_eq!(cached(&ask(fake.address, NATIVE, body(prompt(30), 1)).await), 0);
}

#[tokio::test]
async fn words_go_in_and_come_out() {
    let fake = llama(|_| {}).await;
    let tokens = ask(fake.address, "/tokenize", json!({"content": "a <|user|> b"})).await;
    assert_eq!(ids(&tokens["tokens"]), [70, 226, 2, 311]);
    let plain =
        ask(fake.address, "/tokenize", json!({"content": "a <|user|> b", "parse_special": false})).await;
    assert!(!ids(&plain["tokens"]).contains(&2));
    let pieces =
        ask(fake.address, "/tokenize", json!({"content": "a <|user|> b", "with_pieces": true})).await;
    assert_eq!(pieces["tokens"][2], json!({"id": 2, "piece": "<|user|>"}));
    assert_eq!(ask(fake.address, "/detokenize", tokens).await, json!({"content": "a <|user|> b"}));
    let messages = json!({"messages": [{"role": "user", "content": "What is a socket?"}]});
    let template = ask(fake.address, "/apply-template", messages).await;
    assert_eq!(template, json!({"prompt": "<|user|>\nWhat is a socket?<|end|>\n<|assistant|>\n"}));
}

#[tokio::test]
async fn probabilities_come_before_or_after_the_samplers() {
    let fake = llama(|_| {}).await;
    let mut request = body(prompt(20), 1);
    request["n_probs"] = json!(2);
    request["logit_bias"] = json!([[7, 100]]);
    let raw = ask(fake.address, NATIVE, request.clone()).await["completion_probabilities"][0].clone();
    assert!(raw["logprob"].as_f64().unwrap() < -5.0 && raw["top_logprobs"].as_array().unwrap().len() == 2);
    request["post_sampling_probs"] = json!(true);
    request["response_fields"] = json!(["tokens", "completion_probabilities", "timings/cache_n"]);
    let answer = ask(fake.address, NATIVE, request).await;
    assert!(answer["completion_probabilities"][0]["prob"].as_f64().unwrap() > 0.99);
    assert_eq!(
        answer.as_object().unwrap().keys().collect::<Vec<_>>(),
        ["tokens", "completion_probabilities", "timings/cache_n"]
    );
}

trait HasSlots {
    fn slots(&self) -> &crate::fakes::llamacpp::Slots;
}

impl HasSlots for Fake<Llama> {
    fn slots(&self) -> &crate::fakes::llamacpp::Slots {
        &self.engine.slots
    }
}
