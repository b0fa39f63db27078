//! SGLang's behaviour (reference: the engine's source).

use serde_json::{Value, json};

use crate::client::{ask, events, gauge, get, ids, parsed, refusal};
use crate::fakes::sglang::{Options, Sglang};
use crate::fakes::{Defaults, Fake, Temper};
use crate::wire::{Wire, post};

const GENERATE: &str = "/generate";

async fn sglang(change: impl FnOnce(&mut Options)) -> Fake<Sglang> {
    let mut options = Options::default();
    options.setup.temper.eos_every = None;
    change(&mut options);
    Fake::start(Sglang::new(options)).await
}

fn prompt(len: u32) -> Vec<u32> {
    (0..len).map(|at| 100 + at * 7 % 900).collect()
}

fn greedy(count: u32) -> Value {
    json!({"max_new_tokens": count, "temperature": 0})
}

async fn plain(fake: &Fake<Sglang>, prompt: &[u32], count: u32) -> Vec<u32> {
    ids(
        &ask(fake.address, GENERATE, json!({"input_ids": prompt, "sampling_params": greedy(count)})).await["output_ids"],
    )
}

fn score(tokens: &[u32], start: i64) -> Value {
    json!({"input_ids": tokens, "sampling_params": greedy(1), "return_logprob": true, "logprob_start_len": start,
        "top_logprobs_num": 1})
}

#[tokio::test]
async fn input_rows_begin_with_a_null_and_the_cache_ends_where_they_begin() {
    let fake = sglang(|_| {}).await;
    let context = prompt(40);
    let more = plain(&fake, &context, 5).await;
    let draft = [&context[..], &more[..2], &[9]].concat();
    let answer = ask(fake.address, GENERATE, score(&draft, 39)).await;
    let meta = &answer["meta_info"];
    assert_eq!((&meta["cached_tokens"], &meta["prompt_tokens"]), (&json!(39), &json!(43)));
    let own = meta["input_token_logprobs"].as_array().unwrap();
    assert_eq!(own[0], json!([null, context[39], null]));
    assert_eq!(own.iter().map(|entry| entry[1].as_u64().unwrap() as u32).collect::<Vec<_>>(), draft[39..]);
    let best: Vec<u64> = (1..4).map(|at| meta["input_top_logprobs"][at][0][1].as_u64().unwrap()).collect();
    assert_eq!(best, more[..3].iter().map(|&id| u64::from(id)).collect::<Vec<_>>());
    assert!(meta["input_top_logprobs"][0].is_null());
    assert_eq!(meta["output_token_logprobs"][0][1], answer["output_ids"][0]);
    // From the start on, and the whole prompt is computed.
    let whole = ask(fake.address, GENERATE, score(&draft, 0)).await;
    assert_eq!(
        (
            &whole["meta_info"]["cached_tokens"],
            whole["meta_info"]["input_token_logprobs"].as_array().unwrap().len()
        ),
        (&json!(0), 43)
    );
    assert_eq!(refusal(fake.address, GENERATE, score(&draft, 44)).await.0, 400);
}

#[tokio::test]
async fn whole_pages_are_cached() {
    for (page, cached) in [(1, 40), (16, 32), (64, 0)] {
        let fake = sglang(|options| options.setup.block = page).await;
        plain(&fake, &prompt(41), 1).await;
        let answer =
            ask(fake.address, GENERATE, json!({"input_ids": prompt(41), "sampling_params": greedy(1)})).await;
        assert_eq!(answer["meta_info"]["cached_tokens"], cached);
        assert_eq!(get(fake.address, "/server_info").await.json()["page_size"], page);
    }
    let fake = sglang(|options| options.setup.block = 0).await;
    plain(&fake, &prompt(41), 1).await;
    plain(&fake, &prompt(41), 1).await;
    assert_eq!(fake.house.tally().cached, 0);
    assert_eq!(get(fake.address, "/server_info").await.json()["disable_radix_cache"], true);
}

#[tokio::test]
async fn prompts_of_one_call_do_not_share_what_is_new() {
    let fake = sglang(|_| {}).await;
    plain(&fake, &prompt(40), 1).await;
    let before = fake.house.tally().computed;
    let lists = [prompt(40), prompt(41), prompt(42)];
    let params =
        json!([greedy(1), {"max_new_tokens": 2, "temperature": 0, "logit_bias": {"7": 100}}, greedy(1)]);
    let answer = ask(fake.address, GENERATE, json!({"input_ids": lists, "sampling_params": params})).await;
    assert_eq!(answer.as_array().unwrap().len(), 3);
    assert_eq!(ids(&answer[1]["output_ids"]), [7, 7]);
    // 40 are cached except for the last; the rest is computed for each, and then one step for the
    // second.
    assert_eq!(fake.house.tally().computed - before, 1 + 1 + 2 + 1);
}

#[tokio::test]
async fn an_unknown_field_is_refused_by_its_name() {
    let fake = sglang(|_| {}).await;
    let body = json!({"input_ids": [5], "sampling_params": greedy(1), "prediction": {}});
    let (status, text) = refusal(fake.address, GENERATE, body).await;
    let error: Value = serde_json::from_str(&text).unwrap();
    assert!(status == 400 && error["error"].as_str().unwrap().contains("prediction"));
    let body = json!({"input_ids": [5], "sampling_params": {"max_tokens": 1}});
    assert_eq!(refusal(fake.address, GENERATE, body).await.0, 400);
    assert_eq!(refusal(fake.address, GENERATE, json!({"sampling_params": greedy(1)})).await.0, 400);
    let prefill =
        ask(fake.address, GENERATE, json!({"input_ids": [5, 6], "sampling_params": greedy(0)})).await;
    assert_eq!((ids(&prefill["output_ids"]).len(), fake.house.tally().computed), (0, 2));
    // The OpenAI routes ignore unknown fields.
    ask(fake.address, "/v1/completions", json!({"prompt": [5], "max_tokens": 1, "prediction": {}})).await;
}

#[tokio::test]
async fn an_id_outside_the_vocabulary_ends_the_server() {
    for (path, body) in
        [(GENERATE, json!({"input_ids": [9000]})), ("/v1/completions", json!({"prompt": [9000]}))]
    {
        let fake = sglang(|_| {}).await;
        for body in [body, json!({"prompt": [5], "input_ids": [5]})] {
            let mut wire = Wire::connect(fake.address).await;
            wire.send(post(path, "", body.to_string().as_bytes())).await;
            assert!(wire.message().await.is_none(), "{path}: no answer, now or later");
        }
        assert!(fake.house.fatal()[0].contains("9000"));
    }
}

#[tokio::test]
async fn one_page_waits_for_the_scheduler_and_the_load_is_what_it_published() {
    let fake = sglang(|options| options.publish_interval = 3).await;
    let load = async || get(fake.address, "/v1/loads").await.json()["loads"][0].clone();
    let idle = load().await;
    assert!(load().await["timestamp"].as_f64() > idle["timestamp"].as_f64(), "idle: at once");
    let scheduler = fake.house.scheduler().await;
    let (mut info, mut model) = (Wire::connect(fake.address).await, Wire::connect(fake.address).await);
    info.send("GET /server_info HTTP/1.1\r\nhost: x\r\n\r\n").await;
    assert_eq!(model.ask("GET /model_info HTTP/1.1\r\nhost: x\r\n\r\n").await.head.status(), 200);
    let mut stream = Wire::connect(fake.address).await;
    stream.send(post("/v1/completions", "", br#"{"prompt":[5,6],"max_tokens":9,"stream":true}"#)).await;
    while load().await["num_running_reqs"] != 1 {}
    let prefill = load().await;
    assert_eq!(load().await["timestamp"], prefill["timestamp"], "nothing was published since");
    drop(scheduler);
    assert_eq!(info.message().await.unwrap().head.status(), 200);
    assert!(stream.message().await.is_some());
    assert!(load().await["timestamp"].as_f64() > prefill["timestamp"].as_f64());
}

#[tokio::test]
async fn streams_repeat_all_output_by_default() {
    let body = json!({"input_ids": prompt(20), "sampling_params": greedy(6), "stream": true});
    let fake = sglang(|_| {}).await;
    let whole = plain(&fake, &prompt(20), 6).await;
    let all = events(fake.address, GENERATE, body).await;
    assert_eq!((all.len(), all[6].as_str()), (7, "[DONE]"));
    let all = parsed(&all);
    for (at, event) in all.iter().enumerate() {
        assert_eq!(ids(&event["output_ids"]), whole[..=at]);
    }
    assert_eq!(all[5]["meta_info"]["finish_reason"], json!({"type": "length", "length": 6}));
}

#[tokio::test]
async fn the_token_that_stops_is_in_the_ids_and_not_in_the_text() {
    let fake =
        sglang(|options| options.setup.temper = Temper { eos_every: Some(1), ..Temper::default() }).await;
    let answer = ask(fake.address, GENERATE, json!({"input_ids": [5], "sampling_params": greedy(9)})).await;
    assert_eq!((ids(&answer["output_ids"]), &answer["text"]), (vec![0], &json!("")));
    assert_eq!(answer["meta_info"]["finish_reason"], json!({"type": "stop", "matched": 0}));
}

#[tokio::test]
async fn a_seed_means_something_only_in_deterministic_mode() {
    let run = async |fake: &Fake<Sglang>, prompt: Vec<u32>, count: u32, seed: Option<u64>| {
        let params = json!({"max_new_tokens": count, "temperature": 1.4, "sampling_seed": seed});
        ids(
            &ask(fake.address, GENERATE, json!({"input_ids": prompt, "sampling_params": params})).await["output_ids"],
        )
    };
    let fake = sglang(|_| {}).await;
    assert_ne!(run(&fake, prompt(20), 20, Some(1)).await, run(&fake, prompt(20), 20, Some(1)).await);
    let fake = sglang(|options| options.deterministic = true).await;
    let whole = run(&fake, prompt(20), 20, Some(1)).await;
    assert_eq!(run(&fake, [&prompt(20), &whole[..9]].concat(), 11, Some(1)).await, whole[9..]);
    // Without a seed the default one is used.
    assert_eq!(run(&fake, prompt(20), 20, None).await, run(&fake, prompt(20), 20, Some(42)).await);
}

#[tokio::test]
async fn min_p_kills_a_deterministic_server() {
    let fake = sglang(|options| options.deterministic = true).await;
    let body = json!({"prompt": [5], "min_p": 0.1, "max_tokens": 1});
    let mut wire = crate::wire::Wire::connect(fake.address).await;
    wire.send(crate::wire::post("/v1/completions", "", body.to_string().as_bytes())).await;
    assert!(wire.message().await.is_none());
    assert_eq!((fake.house.fatal().len(), fake.house.is_dead()), (1, true));
    let harmless = sglang(|_| {}).await;
    ask(harmless.address, "/v1/completions", body).await;
}

#[tokio::test]
async fn every_penalty_counts_output_only() {
    let fake = sglang(|_| {}).await;
    for (name, value) in [("repetition_penalty", 1.5), ("presence_penalty", 1.5), ("frequency_penalty", 1.5)]
    {
        let run = async |prompt: Vec<u32>, count: u32| {
            let mut params = greedy(count);
            params[name] = json!(value);
            ids(
                &ask(fake.address, GENERATE, json!({"input_ids": prompt, "sampling_params": params})).await["output_ids"],
            )
        };
        let whole = run(prompt(20), 80).await;
        assert_ne!(run([&prompt(20), &whole[..40]].concat(), 40).await, whole[40..], "{name}");
    }
}

#[tokio::test]
async fn defaults_of_the_model_reach_the_chat_route_alone() {
    let defaults =
        Defaults { temperature: Some(0.0), repetition_penalty: Some(1.90625), ..Defaults::default() };
    let fake = sglang(|options| options.setup.defaults = defaults).await;
    let chat = async |extra: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 30, "return_token_ids": true});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        ask(fake.address, "/v1/chat/completions", body).await["choices"][0].clone()
    };
    let bare = chat(json!({})).await;
    assert_eq!(
        bare["response_token_ids"],
        chat(json!({"repetition_penalty": 1.90625, "temperature": 0})).await["response_token_ids"]
    );
    let prompt = ids(&bare["prompt_token_ids"]);
    let text = async |params: Value| {
        let answer =
            ask(fake.address, GENERATE, json!({"input_ids": prompt, "sampling_params": params})).await;
        ids(&answer["output_ids"])
    };
    let want = ids(&bare["response_token_ids"]);
    assert_eq!(
        text(json!({"max_new_tokens": 30, "temperature": 0, "repetition_penalty": 1.90625})).await,
        want
    );
    assert_ne!(text(json!({"max_new_tokens": 30, "temperature": 0})).await, want);
    let shown =
        get(fake.address, "/server_info").await.text() + &get(fake.address, "/model_info").await.text();
    assert!(!shown.contains("1.90625") && shown.contains("\"sampling_defaults\":\"model\""));
}

#[tokio::test]
async fn load_is_shown_and_metrics_are_behind_a_flag() {
    let fake = sglang(|_| {}).await;
    fake.house.pretend.lock().waiting = 2;
    assert_eq!(
        get(fake.address, "/v1/loads?include=core&format=json").await.json()["loads"][0]["num_waiting_reqs"],
        2
    );
    assert_eq!(get(fake.address, "/metrics").await.head.status(), 404);
    let fake = sglang(|options| options.metrics = true).await;
    fake.house.pretend.lock().running = 5;
    let text = get(fake.address, "/metrics").await.text();
    assert_eq!((gauge(&text, "sglang:num_running_reqs{"), gauge(&text, "sglang:page_size{")), ("5.0", "1.0"));
}

#[tokio::test]
async fn output_logprobs_are_processed_unless_all_is_greedy() {
    let fake = sglang(|_| {}).await;
    let logprob = async |temperature: f64, bias: Value| {
        let params = json!({"max_new_tokens": 1, "temperature": temperature, "top_k": 1, "logit_bias": bias});
        let body = json!({"input_ids": prompt(20), "sampling_params": params, "return_logprob": true});
        let answer = ask(fake.address, GENERATE, body).await;
        answer["meta_info"]["output_token_logprobs"][0][0].as_f64().unwrap()
    };
    assert!(logprob(0.0, json!({"7": 100})).await < -5.0);
    assert!(logprob(1.0, json!({"7": 100})).await > -1e-3);
    assert!(logprob(0.2, json!(null)).await > logprob(2.0, json!(null)).await);
}

#[tokio::test]
async fn openai_routes_return_ids_on_request() {
    let fake = sglang(|_| {}).await;
    let body = json!({"prompt": [prompt(20), prompt(22)], "max_tokens": 2, "temperature": 0, "return_token_ids": true});
    let answer = ask(fake.address, "/v1/completions", body).await;
    assert_eq!(ids(&answer["choices"][1]["token_ids"]), plain(&fake, &prompt(22), 2).await);
    assert_eq!(ids(&answer["choices"][1]["prompt_token_ids"]), prompt(22));
    let stream = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0, "stream": true,
        "stream_options": {"include_usage": true}});
    let all = events(fake.address, "/v1/chat/completions", stream).await;
    assert_eq!(all.last().unwrap(), "[DONE]");
    let all = parsed(&all);
    assert_eq!((all[0]["choices"][0]["delta"]["role"].as_str(), all.len()), (Some("assistant"), 6));
    assert_eq!(all[5]["usage"]["completion_tokens"], 3);
    let whole =
        json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "return_token_ids": true});
    let choice = ask(fake.address, "/v1/chat/completions", whole).await["choices"][0].take();
    assert!(choice["prompt_token_ids"].is_array());
    assert_eq!(choice["response_token_ids"].as_array().map(Vec::len), Some(1));
}

#[tokio::test]
async fn a_streamed_chat_has_no_ids_and_a_separate_end() {
    let fake = sglang(|_| {}).await;
    let body = |more: &Value| {
        let mut body = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0,
            "stream": true});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    for name in ["return_token_ids", "return_prompt_token_ids"] {
        assert_eq!(refusal(fake.address, "/v1/chat/completions", body(&json!({name: true}))).await.0, 400);
    }
    let all = parsed(&events(fake.address, "/v1/chat/completions", body(&json!({}))).await);
    let (first, last) = (&all[1]["choices"][0], &all[all.len() - 1]["choices"][0]);
    assert_eq!(
        (first["delta"].get("reasoning_content"), &first["finish_reason"]),
        (Some(&json!(null)), &json!(null))
    );
    assert_eq!(
        (&last["delta"], &last["finish_reason"]),
        (&json!({"reasoning_content": null}), &json!("length"))
    );
}
