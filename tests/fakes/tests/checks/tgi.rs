//! TGI's behaviour (reference: the router's source).

use std::time::Duration;

use serde_json::{Value, json};

use crate::client::{ask, call, events, gauge, get, parsed, refusal, until};
use crate::fakes::tgi::{Attention, Options, Tgi, Trouble};
use crate::fakes::{Fake, Temper};
use crate::wire::{Wire, post};

const TEXT: &str = "Once upon a time there was a house by the sea";

async fn tgi(change: impl FnOnce(&mut Options)) -> Fake<Tgi> {
    let mut options = Options::default();
    options.setup.temper.eos_every = None;
    change(&mut options);
    Fake::start(Tgi::new(options)).await
}

fn body(text: &str, mut parameters: Value) -> Value {
    parameters["details"] = json!(true);
    json!({"inputs": text, "parameters": parameters})
}

async fn generated(fake: &Fake<Tgi>, text: &str, parameters: Value) -> Value {
    ask(fake.address, "/generate", body(text, parameters)).await
}

fn token_ids(answer: &Value) -> Vec<u64> {
    answer["details"]["tokens"]
        .as_array()
        .unwrap()
        .iter()
        .map(|token| token["id"].as_u64().unwrap())
        .collect()
}

#[tokio::test]
async fn only_texts_go_in_and_ids_come_out() {
    let fake = tgi(|_| {}).await;
    let answer = generated(&fake, TEXT, json!({"max_new_tokens": 3, "top_n_tokens": 2})).await;
    let details = &answer["details"];
    assert_eq!((&details["finish_reason"], &details["generated_tokens"]), (&json!("length"), &json!(3)));
    assert_eq!((&details["seed"], &details["prefill"]), (&Value::Null, &json!([])));
    assert_eq!(details["top_tokens"][0].as_array().unwrap().len(), 2);
    assert_eq!(details["tokens"][0]["special"], false);
    let ids: Vec<u32> = token_ids(&answer).iter().map(|&id| id as u32).collect();
    assert_eq!(answer["generated_text"], fake.house.toy.decode(&ids, true));
    // A prompt that is not a text is refused before the handler, as plain text and not as JSON.
    let wrong = call(fake.address, "/generate", &json!({"inputs": [1, 2]})).await;
    assert_eq!(wrong.head.status(), 422);
    assert!(serde_json::from_str::<Value>(&wrong.text()).is_err());
    let wrong = call(fake.address, "/v1/completions", &json!({"prompt": [[1, 2]], "stream": true})).await;
    assert_eq!(wrong.head.status(), 422);
}

#[tokio::test]
async fn special_tokens_are_always_added() {
    let fake = tgi(|options| options.bos = true).await;
    let tokens = ask(fake.address, "/tokenize", json!({"inputs": "a house"})).await;
    assert_eq!(tokens[0]["id"], fake.house.toy.eos());
    // A client cannot disable them.
    let parameters = json!({"max_new_tokens": 4, "add_special_tokens": false});
    let told = generated(&fake, "a house", parameters).await;
    let bare = tgi(|_| {}).await;
    let with = json!({"inputs": format!("{}a house", fake.house.toy.name(0)), "parameters": {"max_new_tokens": 4, "details": true}});
    assert_eq!(token_ids(&told), token_ids(&ask(bare.address, "/generate", with).await));
    assert_ne!(token_ids(&told), token_ids(&generated(&bare, "a house", json!({"max_new_tokens": 4})).await));
}

#[tokio::test]
async fn tokens_are_returned_with_their_offsets() {
    let fake = tgi(|_| {}).await;
    let tokens = ask(fake.address, "/tokenize", json!({"inputs": TEXT})).await;
    let all = tokens.as_array().unwrap();
    let joined: String = all.iter().map(|token| token["text"].as_str().unwrap()).collect();
    assert_eq!((joined.as_str(), &all[all.len() - 1]["stop"]), (TEXT, &json!(TEXT.len())));
    let messages = json!({"messages": [{"role": "user", "content": "hi"}]});
    let chat = ask(fake.address, "/chat_tokenize", messages).await;
    assert!(chat["templated_text"].as_str().unwrap().contains("hi"));
    assert!(chat["tokenize_response"][0]["id"].is_u64());
    assert_eq!(call(fake.address, "/detokenize", &json!({"tokens": [5]})).await.head.status(), 404);
}

#[tokio::test]
async fn sampling_has_to_be_requested() {
    let fake = tgi(|_| {}).await;
    let greedy = generated(&fake, TEXT, json!({"max_new_tokens": 12})).await;
    let same = generated(&fake, TEXT, json!({"max_new_tokens": 12, "temperature": 1.0, "seed": 3})).await;
    assert_eq!((token_ids(&greedy), &greedy["details"]["seed"]), (token_ids(&same), &Value::Null));
    let hot = json!({"max_new_tokens": 12, "temperature": 1.5, "seed": 3});
    let sampled = generated(&fake, TEXT, hot.clone()).await;
    assert_eq!(sampled["details"]["seed"], 3);
    assert_ne!(token_ids(&greedy), token_ids(&sampled));
    assert_eq!(token_ids(&generated(&fake, TEXT, hot).await), token_ids(&sampled));
    let told = json!({"max_new_tokens": 12, "do_sample": true});
    assert!(generated(&fake, TEXT, told).await["details"]["seed"].is_u64());
}

#[tokio::test]
async fn seeds_start_again_with_every_request() {
    let fake = tgi(|_| {}).await;
    let run = async |text: &str, count: u32| {
        generated(&fake, text, json!({"max_new_tokens": count, "temperature": 1.4, "seed": 9})).await
    };
    let whole = run(TEXT, 16).await;
    let first = run(TEXT, 8).await;
    let rest = run(&format!("{TEXT}{}", first["generated_text"].as_str().unwrap()), 8).await;
    assert_eq!(token_ids(&whole)[..8], token_ids(&first));
    assert_ne!(token_ids(&whole)[8..], token_ids(&rest));
}

#[tokio::test]
async fn penalties_have_names_of_their_own() {
    let fake = tgi(|_| {}).await;
    let run = async |parameters: Value| token_ids(&generated(&fake, TEXT, parameters).await);
    let plain = run(json!({"max_new_tokens": 40})).await;
    assert_ne!(run(json!({"max_new_tokens": 40, "repetition_penalty": 1.4})).await, plain);
    // There is no presence penalty here; a chat's moves the repetition penalty.
    assert_eq!(run(json!({"max_new_tokens": 40, "presence_penalty": 2.0})).await, plain);
    let chat = async |presence: f64| {
        let body = json!({"messages": [{"role": "user", "content": TEXT}], "max_tokens": 40, "temperature": 0,
            "presence_penalty": presence});
        ask(fake.address, "/v1/chat/completions", body).await["choices"][0]["message"]["content"].clone()
    };
    assert_ne!(chat(-0.5).await, chat(-1.0).await);
}

#[tokio::test]
async fn validation_has_a_kind_and_a_status() {
    let fake = tgi(|options| options.setup.max_len = 64).await;
    for (parameters, part) in [
        (json!({"temperature": 0.0}), "temperature"),
        (json!({"top_p": 1.0}), "top_p"),
        (json!({"top_k": 0}), "top_k"),
        (json!({"top_n_tokens": 6}), "top_n_tokens"),
        (json!({"max_new_tokens": 0}), "max_new_tokens"),
        (json!({"max_new_tokens": 63}), "max_new_tokens"),
        (json!({"max_new_tokens": 1, "stop": ["a", "b", "c", "d", "e"]}), "stop"),
        (json!({"max_new_tokens": 1, "frequency_penalty": 3}), "frequency_penalty"),
        (json!({"max_new_tokens": 1, "repetition_penalty": 0}), "repetition_penalty"),
    ] {
        let (status, text) = refusal(fake.address, "/generate", body(TEXT, parameters)).await;
        let error: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((status, &error["error_type"]), (422, &json!("validation")), "{text}");
        assert!(error["error"].as_str().unwrap().contains(part), "{text}");
    }
    let empty = json!({"inputs": "", "parameters": {"max_new_tokens": 1}});
    assert_eq!(refusal(fake.address, "/generate", empty).await.0, 422);
    let unknown =
        json!({"inputs": TEXT, "prediction": 1, "parameters": {"max_new_tokens": 1, "novel": true}});
    ask(fake.address, "/generate", unknown).await;
    let fields = json!({"prompt": TEXT, "max_tokens": 1, "suffix": "x"});
    assert!(refusal(fake.address, "/v1/completions", fields).await.1.contains("suffix not supported"));
    let biased =
        json!({"messages": [{"role": "user", "content": "hi"}], "logit_bias": {"5": 1}, "max_tokens": 1});
    assert_eq!(refusal(fake.address, "/v1/chat/completions", biased).await.0, 422);
}

#[tokio::test]
async fn no_more_prompts_than_the_batch_limit() {
    let fake = tgi(|_| {}).await;
    let many = |count: usize| json!({"prompt": vec![TEXT; count], "max_tokens": 1, "stream": true});
    assert_eq!(events(fake.address, "/v1/completions", many(4)).await.len(), 5);
    let (status, text) = refusal(fake.address, "/v1/completions", many(5)).await;
    assert_eq!((status, text.contains("batch size exceeded")), (422, true));
    assert_eq!(get(fake.address, "/info").await.json()["max_client_batch_size"], 4);
    let wide = tgi(|options| options.max_client_batch_size = 8).await;
    events(wide.address, "/v1/completions", many(8)).await;
}

#[tokio::test]
async fn completions_that_are_not_streamed_use_no_cache() {
    let fake = tgi(|_| {}).await;
    let complete =
        |stream: bool| json!({"prompt": TEXT, "max_tokens": 2, "temperature": 0, "stream": stream});
    let cached = || fake.house.tally().cached;
    ask(fake.address, "/v1/completions", complete(false)).await;
    ask(fake.address, "/v1/completions", complete(false)).await;
    events(fake.address, "/v1/completions", complete(true)).await;
    assert_eq!(cached(), 0);
    events(fake.address, "/v1/completions", complete(true)).await;
    let whole = fake.house.toy.encode(TEXT).len() - 1;
    assert_eq!(cached(), whole);
    ask(fake.address, "/v1/completions", complete(false)).await;
    assert_eq!(cached(), whole);
    let details = json!({"max_new_tokens": 1, "decoder_input_details": true});
    generated(&fake, TEXT, details.clone()).await;
    assert_eq!(cached(), whole);
    generated(&fake, TEXT, json!({"max_new_tokens": 1})).await;
    assert_eq!(cached(), 2 * whole);
    let (status, text) = refusal(fake.address, "/generate_stream", body(TEXT, details)).await;
    assert_eq!((status, text.contains("streaming")), (422, true));
}

#[tokio::test]
async fn the_attention_sets_the_cache_granularity() {
    let long = vec!["house"; 300].join(" ");
    for (attention, fine) in
        [(Attention::Flashinfer, 1), (Attention::Flashdecoding, 256), (Attention::Paged, 0)]
    {
        let fake = tgi(|options| options.attention = attention).await;
        let len = fake.house.toy.encode(&long).len() - 1;
        for _ in 0..2 {
            generated(&fake, &long, json!({"max_new_tokens": 1})).await;
        }
        let cached = fake.house.tally().cached;
        assert_eq!(cached, len.checked_div(fine).unwrap_or(0) * fine, "{attention:?}");
    }
}

#[tokio::test]
async fn prefill_is_returned_only_with_the_flag() {
    let fake = tgi(|options| options.prefill_logprobs = true).await;
    let answer = generated(&fake, TEXT, json!({"max_new_tokens": 1, "decoder_input_details": true})).await;
    let prefill = answer["details"]["prefill"].as_array().unwrap();
    assert_eq!(prefill.len(), fake.house.toy.encode(TEXT).len());
    assert!(
        prefill[0]["logprob"].is_null() && prefill[1]["logprob"].is_f64() && prefill[1]["rank"].is_null()
    );
    let off = tgi(|_| {}).await;
    let answer = generated(&off, TEXT, json!({"max_new_tokens": 1, "decoder_input_details": true})).await;
    assert_eq!(answer["details"]["prefill"], json!([]));
}

#[tokio::test]
async fn the_native_stream_has_no_end_mark_and_v1_has() {
    let fake = tgi(|_| {}).await;
    let sent = body(TEXT, json!({"max_new_tokens": 4, "top_n_tokens": 1}));
    let text = call(fake.address, "/generate_stream", &sent).await.text();
    assert!(!text.contains("[DONE]"));
    let all: Vec<Value> = text
        .split("\n\n")
        .filter_map(|event| event.strip_prefix("data:"))
        .map(|event| serde_json::from_str(event).unwrap())
        .collect();
    let whole = generated(&fake, TEXT, json!({"max_new_tokens": 4})).await;
    assert_eq!(
        all.iter().map(|event| event["token"]["id"].as_u64().unwrap()).collect::<Vec<_>>(),
        token_ids(&whole)
    );
    assert_eq!(
        (&all[0]["index"], &all[0]["generated_text"], &all[0]["details"]),
        (&json!(1), &Value::Null, &Value::Null)
    );
    assert_eq!(all[3]["generated_text"], whole["generated_text"]);
    assert_eq!(all[3]["details"]["finish_reason"], "length");
    let complete = json!({"prompt": TEXT, "max_tokens": 3, "temperature": 0, "stream": true});
    let all = events(fake.address, "/v1/completions", complete).await;
    assert_eq!(all.last().unwrap(), "[DONE]");
    let all = parsed(&all);
    assert_eq!((&all[0]["choices"][0]["finish_reason"], &all[0]["id"]), (&json!(""), &json!("")));
    assert_eq!(all[2]["usage"]["completion_tokens"], 3);
    let chat = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "stream": true, "temperature": 0});
    let all = events(fake.address, "/v1/chat/completions", chat).await;
    assert_eq!(all.last().unwrap(), "[DONE]");
    assert_eq!(parsed(&all)[0]["choices"][0]["delta"]["role"], "assistant");
}

#[tokio::test]
async fn the_end_has_two_names() {
    let fake = tgi(|options| options.setup.temper = Temper { eos_every: Some(1), ..Temper::default() }).await;
    let answer = generated(&fake, TEXT, json!({"max_new_tokens": 4})).await;
    assert_eq!(
        (&answer["details"]["finish_reason"], &answer["generated_text"]),
        (&json!("eos_token"), &json!(""))
    );
    assert_eq!(answer["details"]["tokens"][0]["special"], true);
    let complete =
        |stream: bool| json!({"prompt": TEXT, "max_tokens": 4, "temperature": 0, "stream": stream});
    let whole = ask(fake.address, "/v1/completions", complete(false)).await;
    assert_eq!(whole["choices"][0]["finish_reason"], "stop");
    let all = parsed(&events(fake.address, "/v1/completions", complete(true)).await);
    assert_eq!(all[0]["choices"][0]["finish_reason"], "eos_token");
}

#[tokio::test]
async fn a_stop_string_ends_the_text_and_stays_in_it() {
    let fake = tgi(|_| {}).await;
    let whole = generated(&fake, TEXT, json!({"max_new_tokens": 40})).await["generated_text"].clone();
    let whole = whole.as_str().unwrap();
    let stop: String = whole.chars().skip(whole.chars().count() / 2).take(6).collect();
    let answer = generated(&fake, TEXT, json!({"max_new_tokens": 40, "stop": [stop]})).await;
    assert_eq!(answer["details"]["finish_reason"], "stop_sequence");
    let end = whole.find(&stop).unwrap() + stop.len();
    assert_eq!(answer["generated_text"], whole[..end]);
}

#[tokio::test]
async fn errors_of_a_generation_and_of_too_many() {
    let fake = tgi(|options| options.max_concurrent_requests = 1).await;
    *fake.engine.trouble.lock() = Some(Trouble::Generation);
    let sent = body(TEXT, json!({"max_new_tokens": 4}));
    let (status, text) = refusal(fake.address, "/generate", sent.clone()).await;
    assert_eq!((status, text.contains("\"generation\"")), (424, true));
    *fake.engine.trouble.lock() = Some(Trouble::Incomplete);
    let text = call(fake.address, "/generate_stream", &sent).await.text();
    assert!(text.ends_with("\"error_type\":\"incomplete_generation_stream\"}\n\n"), "{text}");
    *fake.engine.trouble.lock() = Some(Trouble::Incomplete);
    assert_eq!(refusal(fake.address, "/generate", sent.clone()).await.0, 500);
    fake.house.pace.lock().step = Duration::from_hours(1);
    let mut wire = Wire::connect(fake.address).await;
    wire.send(post("/generate", "", sent.to_string().as_bytes())).await;
    until(|| fake.house.running() == 1).await;
    let (status, text) = refusal(fake.address, "/generate", sent).await;
    assert_eq!((status, text.contains("overloaded")), (429, true));
}

#[tokio::test]
async fn load_and_limits_are_shown() {
    let fake = tgi(|_| {}).await;
    fake.house.pretend.lock().waiting = 3;
    fake.house.pretend.lock().running = 2;
    for _ in 0..2 {
        generated(&fake, TEXT, json!({"max_new_tokens": 1})).await;
    }
    let text = get(fake.address, "/metrics").await.text();
    assert_eq!((gauge(&text, "tgi_queue_size"), gauge(&text, "tgi_batch_current_size")), ("3.0", "2.0"));
    assert!(gauge(&text, "tgi_request_skipped_tokens_sum").parse::<usize>().unwrap() > 5);
    assert!(
        gauge(&text, "tgi_batch_current_max_tokens") != "0" && text.contains("tgi_request_queue_duration")
    );
    let info = get(fake.address, "/info").await.json();
    assert_eq!(
        (&info["router"], &info["max_total_tokens"]),
        (&json!("text-generation-router"), &json!(40960))
    );
    assert_eq!(get(fake.address, "/health").await.head.status(), 200);
}
