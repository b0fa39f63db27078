//! vLLM's behaviour (reference: the engine's source and recorded answers of 0.32).

use serde_json::{Value, json};

use crate::client::{ask, events, gauge, get, ids, parsed, refusal};
use crate::fakes::vllm::{Garbage, Options, Vllm};
use crate::fakes::{Defaults, Fake, Temper};

const GENERATE: &str = "/inference/v1/generate";

async fn vllm(version: &'static str, change: impl FnOnce(&mut Options)) -> Fake<Vllm> {
    let mut options = Options::of(version);
    options.prompt_tokens_details = true;
    options.scale_out = true;
    options.setup.block = 16;
    options.setup.temper.eos_every = None;
    change(&mut options);
    Fake::start(Vllm::new(options)).await
}

fn prompt(len: u32) -> Vec<u32> {
    (0..len).map(|at| 100 + at * 7 % 900).collect()
}

fn score(tokens: &[u32], top: u32) -> Value {
    json!({"token_ids": tokens, "sampling_params": {"max_tokens": 1, "temperature": 0, "prompt_logprobs": top,
        "skip_reading_prefix_cache": false, "detokenize": false}})
}

/// The greedy continuation.
async fn plain(fake: &Fake<Vllm>, prompt: &[u32], count: u32) -> Vec<u32> {
    let body = json!({"prompt": prompt, "max_tokens": count, "temperature": 0, "return_token_ids": true});
    ids(&ask(fake.address, "/v1/completions", body).await["choices"][0]["token_ids"])
}

#[tokio::test]
async fn on_v2_rows_are_short_and_stand_at_the_right() {
    let fake = vllm("0.29.0", |_| {}).await;
    let context = prompt(40);
    let more = plain(&fake, &context, 5).await;
    let draft = [&context[..], &more[..3], &[9]].concat();
    let answer = ask(fake.address, GENERATE, score(&draft, 1)).await;
    let rows = answer["prompt_logprobs"].as_array().unwrap();
    // 32 tokens are in whole blocks that were computed, so rows begin with the token at 33.
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 32);
    assert!(rows[0].is_null() && rows.len() == 44 - 32);
    for (row, token) in rows[rows.len() - 4..].iter().zip(&more[..3]) {
        assert_eq!(row.as_object().unwrap().keys().collect::<Vec<_>>(), [&token.to_string()]);
    }
    let last: Vec<&String> = rows[rows.len() - 1].as_object().unwrap().keys().collect();
    assert_eq!(last, [&"9".to_owned(), &more[3].to_string()]);
    assert!(fake.house.fatal().is_empty());
}

#[tokio::test]
async fn on_v2_no_rows_at_all_are_null() {
    let fake = vllm("0.33.0", |_| {}).await;
    let context = prompt(33);
    plain(&fake, &context, 1).await;
    let answer = ask(fake.address, GENERATE, score(&context, 0)).await;
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 32);
    assert!(answer["prompt_logprobs"].is_null());
}

#[tokio::test]
async fn on_v1_rows_are_many_and_those_under_the_cache_are_garbage() {
    let fake = vllm("0.32.0", |_| {}).await;
    let context = prompt(40);
    let clean = ask(fake.address, GENERATE, score(&context, 1)).await;
    let dirty = ask(fake.address, GENERATE, score(&context, 1)).await;
    let (clean, dirty) =
        (clean["prompt_logprobs"].as_array().unwrap(), dirty["prompt_logprobs"].as_array().unwrap());
    assert_eq!((clean.len(), dirty.len()), (40, 40));
    assert_eq!(clean[33..], dirty[33..]);
    assert!((1..=32).all(|at| clean[at] != dirty[at]));
    let wild = vllm("0.32.0", |options| options.garbage = Garbage::NotANumber).await;
    ask(wild.address, GENERATE, score(&context, 1)).await;
    assert_eq!(refusal(wild.address, GENERATE, score(&context, 1)).await.0, 500);
    assert!(!wild.house.is_dead());
}

#[tokio::test]
async fn on_v1_a_cached_prefix_with_detokenization_kills_the_engine() {
    let fake = vllm("0.32.0", |_| {}).await;
    let mut body = score(&prompt(40), 1);
    body["sampling_params"].as_object_mut().unwrap().remove("detokenize");
    // Cold, and with the cache not read, it is harmless.
    ask(fake.address, GENERATE, body.clone()).await;
    let mut skipping = body.clone();
    skipping["sampling_params"].as_object_mut().unwrap().remove("skip_reading_prefix_cache");
    ask(fake.address, GENERATE, skipping).await;
    assert!(fake.house.fatal().is_empty());
    assert_eq!(refusal(fake.address, GENERATE, body).await.0, 500);
    assert_eq!(fake.house.fatal().len(), 1);
    let any = json!({"prompt": [5], "max_tokens": 1});
    assert_eq!(refusal(fake.address, "/v1/completions", any.clone()).await.0, 500);
    assert_eq!(get(fake.address, "/health").await.head.status(), 503);
    fake.restart();
    ask(fake.address, "/v1/completions", any).await;
}

#[tokio::test]
async fn rows_of_completions_never_read_the_cache() {
    let fake = vllm("0.32.0", |_| {}).await;
    for _ in 0..2 {
        let body = json!({"prompt": prompt(40), "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0});
        let answer = ask(fake.address, "/v1/completions", body).await;
        assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
        assert_eq!(answer["choices"][0]["prompt_logprobs"].as_array().unwrap().len(), 40);
    }
    let stream = json!({"prompt": prompt(4), "stream": true, "prompt_logprobs": 1});
    assert_eq!(refusal(fake.address, "/v1/completions", stream).await.0, 400);
}

#[tokio::test]
async fn the_token_endpoint_is_there_by_version_and_flag() {
    let status = async |version: &'static str, flag: bool| {
        let fake = vllm(version, |options| options.scale_out = flag).await;
        refusal(fake.address, GENERATE, score(&[5, 6], 0)).await
    };
    assert_eq!(status("0.11.0", true).await.0, 404);
    for version in ["0.15.1", "0.24.0", "0.29.0"] {
        assert_eq!(status(version, false).await.0, 200);
    }
    let (code, message) = status("0.33.0", false).await;
    assert!(code == 403 && message.contains("--enable-scale-out"));
    assert_eq!(status("0.33.0", true).await.0, 200);
}

#[tokio::test]
async fn defaults_fill_what_is_left_out_on_openai_routes_and_are_shown_by_render_alone() {
    let defaults = Defaults { temperature: Some(0.0), repetition_penalty: Some(1.9), ..Defaults::default() };
    let fake = vllm("0.33.0", |options| options.setup.defaults = defaults).await;
    let run = async |extra: Value| {
        let mut body = json!({"prompt": prompt(20), "max_tokens": 30, "return_token_ids": true});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        ids(&ask(fake.address, "/v1/completions", body).await["choices"][0]["token_ids"])
    };
    let bare = run(json!({})).await;
    assert_eq!(bare, run(json!({"temperature": null, "repetition_penalty": 1.9})).await);
    assert_ne!(bare, run(json!({"repetition_penalty": 1})).await);
    let rendered = ask(fake.address, "/v1/completions/render", json!({"prompt": "a", "max_tokens": 3})).await;
    assert_eq!(rendered[0]["sampling_params"]["repetition_penalty"], 1.9);
    let messages = json!({"messages": [{"role": "user", "content": "hi"}]});
    let rendered = ask(fake.address, "/v1/chat/completions/render", messages.clone()).await;
    assert_eq!(rendered["sampling_params"]["temperature"], 0.0);
    let tokens = ask(fake.address, "/tokenize", messages).await["tokens"].clone();
    assert_eq!(rendered["token_ids"], tokens);
    // The engine's own parameters ignore the server's defaults: temperature 1.
    let body =
        json!({"token_ids": prompt(20), "sampling_params": {"max_tokens": 30, "repetition_penalty": 1.9}});
    assert_ne!(ids(&ask(fake.address, GENERATE, body).await["choices"][0]["token_ids"]), bare);
}

#[tokio::test]
async fn seeds_go_on_by_position_on_v2_and_start_again_on_v1() {
    for (version, same) in [("0.33.0", true), ("0.32.0", false)] {
        let fake = vllm(version, |_| {}).await;
        let body = |prompt: Vec<u32>, count: u32| json!({"prompt": prompt, "max_tokens": count, "seed": 42, "temperature": 1.4, "return_token_ids": true});
        let answer = ask(fake.address, "/v1/completions", body(prompt(20), 20)).await;
        let whole = ids(&answer["choices"][0]["token_ids"]);
        let again = body([&prompt(20), &whole[..10]].concat(), 10);
        let rest = ids(&ask(fake.address, "/v1/completions", again).await["choices"][0]["token_ids"]);
        assert_eq!(rest == whole[10..], same, "{version}");
    }
}

#[tokio::test]
async fn without_a_seed_output_is_unpredictable() {
    let fake = vllm("0.33.0", |_| {}).await;
    let body = json!({"prompt": prompt(20), "max_tokens": 20, "temperature": 1.4, "return_token_ids": true});
    let first = ask(fake.address, "/v1/completions", body.clone()).await["choices"][0]["token_ids"].clone();
    assert_ne!(ask(fake.address, "/v1/completions", body).await["choices"][0]["token_ids"], first);
}

#[tokio::test]
async fn prompts_of_one_call_share_blocks_and_only_the_last_cached_count_is_reported() {
    let fake = vllm("0.29.0", |_| {}).await;
    let context = prompt(40);
    let longer = [&context[..], &[5]].concat();
    let body =
        json!({"prompt": [context, longer], "max_tokens": 1, "temperature": 0, "return_token_ids": true});
    let answer = ask(fake.address, "/v1/completions", body).await;
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 32);
    assert_eq!((answer["usage"]["prompt_tokens"].as_u64(), fake.house.tally().computed), (Some(81), 81 - 32));
    assert_eq!(answer["choices"][1]["prompt_token_ids"].as_array().unwrap().len(), 41);
    let salted = json!({"prompt": prompt(40), "max_tokens": 1, "cache_salt": "x"});
    // Before 0.32 cached tokens are left out if there are none.
    assert!(ask(fake.address, "/v1/completions", salted).await["usage"]["prompt_tokens_details"].is_null());
}

#[tokio::test]
async fn penalties_count_output_but_repetition_counts_all() {
    let fake = vllm("0.33.0", |_| {}).await;
    let cut_equals_whole = async |extra: Value| {
        let run = async |prompt: Vec<u32>, count: usize| {
            let mut body =
                json!({"prompt": prompt, "max_tokens": count, "temperature": 0, "return_token_ids": true});
            body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
            ids(&ask(fake.address, "/v1/completions", body).await["choices"][0]["token_ids"])
        };
        let whole = run(prompt(20), 60).await;
        assert_ne!(whole, plain(&fake, &prompt(20), 60).await, "it has an effect");
        let rest = run([&prompt(20), &whole[..30]].concat(), 30).await;
        rest == whole[30..]
    };
    assert!(cut_equals_whole(json!({"repetition_penalty": 1.3})).await);
    assert!(!cut_equals_whole(json!({"presence_penalty": 1.5})).await);
    assert!(!cut_equals_whole(json!({"frequency_penalty": 1.5})).await);
}

#[tokio::test]
async fn streams_have_ids_usage_and_an_end() {
    let fake = vllm("0.32.0", |_| {}).await;
    let body = json!({"prompt": prompt(20), "max_tokens": 5, "temperature": 0, "stream": true, "return_token_ids": true,
        "stream_options": {"include_usage": true, "continuous_usage_stats": true}});
    let all = events(fake.address, "/v1/completions", body).await;
    assert_eq!((all.len(), all.last().unwrap().as_str()), (7, "[DONE]"));
    let all = parsed(&all);
    assert_eq!(ids(&all[0]["choices"][0]["prompt_token_ids"]), prompt(20));
    assert!(all[1]["choices"][0]["prompt_token_ids"].is_null());
    let tokens: Vec<u32> = all[..5].iter().flat_map(|event| ids(&event["choices"][0]["token_ids"])).collect();
    assert_eq!(tokens, plain(&fake, &prompt(20), 5).await);
    assert_eq!(all[2]["usage"], json!({"prompt_tokens": 20, "total_tokens": 23, "completion_tokens": 3}));
    assert_eq!((&all[5]["choices"], &all[5]["usage"]["completion_tokens"]), (&json!([]), &json!(5)));
}

#[tokio::test]
async fn a_reasoning_parser_moves_text_out_of_the_content() {
    let messages = json!([{"role": "user", "content": "hi"}]);
    let body =
        |stream: bool| json!({"messages": messages, "max_tokens": 40, "temperature": 0, "stream": stream});
    let open = vllm("0.33.0", |_| {}).await;
    let whole = ask(open.address, "/v1/chat/completions", body(false)).await;
    let whole = whole["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    let marker: String = whole.chars().skip(whole.chars().count() / 2).take(6).collect();
    let (thought, said) = whole.split_once(&marker).unwrap();
    for (version, name) in [("0.11.0", "reasoning_content"), ("0.33.0", "reasoning")] {
        let fake = vllm(version, |options| options.setup.reasoning_end = Some(marker.clone())).await;
        let answer = ask(fake.address, "/v1/chat/completions", body(false)).await;
        let message = &answer["choices"][0]["message"];
        assert_eq!((&message[name], &message["content"]), (&json!(thought), &json!(said)));
        let all = parsed(&events(fake.address, "/v1/chat/completions", body(true)).await);
        let joined = |name: &str| -> String {
            all.iter().filter_map(|event| event["choices"][0]["delta"][name].as_str()).collect()
        };
        assert_eq!((joined(name).as_str(), joined("content").as_str()), (thought, said));
    }
}

#[tokio::test]
async fn wrong_fields_are_refused_and_unknown_ones_ignored() {
    let fake = vllm("0.29.0", |options| options.setup.max_len = 64).await;
    let status = async |path: &str, body: Value| refusal(fake.address, path, body).await.0;
    let route = "/v1/completions";
    assert_eq!(status(route, json!({"prompt": [5], "max_tokens": 1, "prediction": 1})).await, 200);
    assert_eq!(status(route, json!({"prompt": [5], "logprobs": 21})).await, 400);
    assert_eq!(status(route, json!({"prompt": [5], "n": 2, "temperature": 0})).await, 400);
    assert_eq!(status(route, json!({"prompt": [5], "priority": 3})).await, 400);
    assert_eq!(status(route, json!({"prompt": [5], "max_tokens": 0})).await, 400);
    assert_eq!(status(route, json!({"prompt": [5], "bad_words": ["a"]})).await, 501);
    assert_eq!(status(route, json!({"prompt": vec![[5]; 1025], "max_tokens": 1})).await, 400);
    assert_eq!(status(route, json!({"prompt": prompt(60), "max_tokens": 5})).await, 400);
    assert_eq!(status(GENERATE, score(&prompt(64), 0)).await, 400);
    let old = vllm("0.15.1", |options| options.setup.max_len = 64).await;
    assert_eq!(refusal(old.address, GENERATE, score(&prompt(64), 0)).await.0, 500);
}

#[tokio::test]
async fn gauges_show_load_start_and_the_names_of_their_time() {
    let fake = vllm("0.11.0", |_| {}).await;
    fake.house.pretend.lock().waiting = 3;
    fake.house.pretend.lock().kv = 0.5;
    let text = get(fake.address, "/metrics").await.text();
    assert_eq!(gauge(&text, "vllm:num_requests_waiting{"), "3.0");
    assert_eq!(gauge(&text, "vllm:gpu_cache_usage_perc{"), "0.5");
    assert!(text.contains("block_size=\"16\""));
    let started: f64 = gauge(&text, "process_start_time_seconds").parse().unwrap();
    plain(&fake, &prompt(20), 2).await;
    let text = get(fake.address, "/metrics").await.text();
    assert_eq!(gauge(&text, "vllm:prompt_tokens_total{"), "20.0");
    fake.restart();
    let text = get(fake.address, "/metrics").await.text();
    assert_eq!(gauge(&text, "vllm:prompt_tokens_total{"), "0.0");
    assert!(gauge(&text, "process_start_time_seconds").parse::<f64>().unwrap() > started);
    let new = vllm("0.33.0", |_| {}).await;
    let text = get(new.address, "/metrics").await.text();
    assert!(!text.contains("gpu_cache_usage_perc") && !text.contains("spec_decode"));
}

#[tokio::test]
async fn logprobs_have_the_shape_of_their_route() {
    let fake = vllm("0.32.0", |_| {}).await;
    let body = json!({"prompt": prompt(20), "max_tokens": 2, "temperature": 0, "logprobs": 2, "return_tokens_as_token_ids": true,
        "return_token_ids": true});
    let choice = ask(fake.address, "/v1/completions", body).await["choices"][0].clone();
    let token = choice["token_ids"][0].as_u64().unwrap();
    let name = format!("token_id:{token}");
    assert_eq!(choice["logprobs"]["tokens"][0], name);
    assert_eq!(choice["logprobs"]["top_logprobs"][0][&name], choice["logprobs"]["token_logprobs"][0]);
    let body = json!({"token_ids": prompt(20), "sampling_params": {"max_tokens": 1, "temperature": 0, "logprobs": 2}});
    let entry = ask(fake.address, GENERATE, body).await["choices"][0]["logprobs"]["content"][0].clone();
    assert_eq!((&entry["token_id"], &entry["rank"]), (&json!(token), &json!(1)));
    assert_eq!(entry["top_logprobs"].as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn an_echo_repeats_a_text_and_min_tokens_keep_the_end_away() {
    let fake =
        vllm("0.33.0", |options| options.setup.temper = Temper { eos_every: Some(1), ..Temper::default() })
            .await;
    let run = async |body: Value| ask(fake.address, "/v1/completions", body).await["choices"][0].clone();
    let first =
        run(json!({"prompt": "a house", "max_tokens": 9, "temperature": 0, "return_token_ids": true})).await;
    assert_eq!(
        (ids(&first["token_ids"]).len(), &first["finish_reason"], &first["stop_reason"]),
        (1, &json!("stop"), &Value::Null)
    );
    let kept =
        run(json!({"prompt": "a house", "max_tokens": 9, "min_tokens": 4, "temperature": 0, "echo": true,
        "return_token_ids": true}))
        .await;
    assert_eq!(ids(&kept["token_ids"]).len(), 5);
    assert!(kept["text"].as_str().unwrap().starts_with("a house"));
    let through = run(json!({"prompt": "a house", "max_tokens": 9, "ignore_eos": true, "temperature": 0,
        "return_token_ids": true}))
    .await;
    assert_eq!((ids(&through["token_ids"]).len(), &through["finish_reason"]), (9, &json!("length")));
}

/// The greedy text of a completion with these fields.
async fn text(fake: &Fake<Vllm>, more: Value) -> String {
    let mut body = json!({"prompt": "A text", "max_tokens": 24, "temperature": 0});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let answer = ask(fake.address, "/v1/completions", body).await;
    format!("{}|{}", answer["choices"][0]["text"].as_str().unwrap(), answer["choices"][0]["finish_reason"])
}

#[tokio::test]
async fn a_grammar_binds_every_output_from_its_first_token_to_its_end() {
    let fake = vllm("0.33.0", |_| {}).await;
    let object = "{\"answer\": true}|\"stop\"";
    for structured in [json!({"choice": ["yes", "no"]}), json!({"json": {}}), json!({"json_object": true})] {
        let more = json!({"structured_outputs": structured});
        assert_eq!(text(&fake, more).await, object);
    }
    let again = json!({"structured_outputs": {"regex": "aab"}, "prompt": "A text aa"});
    assert_eq!(text(&fake, again).await, "aab|\"stop\"", "the prompt is no part of it");
    let rendered = ask(
        fake.address,
        "/v1/completions/render",
        json!({"prompt": "A", "structured_outputs": {"regex": "a"}}),
    );
    assert!(rendered.await[0]["sampling_params"]["structured_outputs"].is_object());
}

/// The second runner ends with a longer list.
#[tokio::test]
async fn too_many_allowed_tokens_end_the_second_runner() {
    let fake = vllm("0.33.0", |_| {}).await;
    let many: Vec<u32> = (0..1025).collect();
    let body = json!({"prompt": "A text", "allowed_token_ids": many, "max_tokens": 1});
    let v1 = vllm("0.32.0", |_| {}).await;
    ask(v1.address, "/v1/completions", body.clone()).await;
    assert_eq!(refusal(fake.address, "/v1/completions", body).await.0, 500);
    assert!(fake.house.is_dead() && !v1.house.is_dead());
}
