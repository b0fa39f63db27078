//! The shapes of answers: vLLM's, field by field.

use serde_json::{Value, json};

use super::client::{choices, ids, ids_of, serve, text_of};
use super::fake::{EOS, Fake, extend, logits};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_completion_has_the_shape_that_clients_know() {
    let server = serve(Fake::new(2, 512)).await;
    let body = json!({"model": "toy", "prompt": "hello", "max_tokens": 4, "temperature": 0, "return_token_ids": true, "user": "me"});
    let answer = server.ask("/v1/completions", &body).await;
    assert!(answer["id"].as_str().unwrap().starts_with("cmpl-"));
    assert_eq!((&answer["object"], &answer["model"]), (&json!("text_completion"), &json!("toy")));
    let choice = &answer["choices"][0];
    assert_eq!(
        (&choice["index"], &choice["finish_reason"], &choice["logprobs"]),
        (&json!(0), &json!("length"), &Value::Null)
    );
    assert_eq!(ids(&choice["prompt_token_ids"]), "hello".bytes().map(u32::from).collect::<Vec<_>>());
    assert_eq!(ids(&choice["token_ids"]).len(), 4);
    let usage = json!({"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9, "prompt_tokens_details": {"cached_tokens": 0}});
    assert_eq!(answer["usage"], usage);
    let again = server.ask("/v1/completions", &body).await;
    assert_eq!(again["usage"]["prompt_tokens_details"]["cached_tokens"], 4);
    assert_eq!(again["choices"][0]["text"], choice["text"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_has_one_event_per_token_and_adds_up_to_the_whole() {
    let server = serve(Fake::new(2, 512)).await;
    let mut body = json!({"prompt": "hello", "max_tokens": 30, "temperature": 1.0, "seed": 5, "return_token_ids": true, "ignore_eos": true});
    let whole = server.ask("/v1/completions", &body).await;
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    let events = server.stream("/v1/completions", &body).await;
    assert_eq!(events.len(), 31);
    assert_eq!(text_of(&events, 0), whole["choices"][0]["text"].as_str().unwrap());
    assert_eq!(ids_of(&events, 0), ids(&whole["choices"][0]["token_ids"]));
    let (first, second, last) =
        (&events[0]["choices"][0], &events[1]["choices"][0], &events[29]["choices"][0]);
    assert_eq!(first["prompt_token_ids"], whole["choices"][0]["prompt_token_ids"]);
    assert_eq!(
        (first["seed"].as_u64(), second.get("seed"), second.get("prompt_token_ids")),
        (Some(5), None, None)
    );
    assert_eq!((&first["finish_reason"], &last["finish_reason"]), (&Value::Null, &json!("length")));
    assert_eq!((&events[30]["choices"], &events[30]["usage"]["completion_tokens"]), (&json!([]), &json!(30)));
    assert!(
        events.iter().all(|event| event["id"] == events[0]["id"] && event["object"] == "text_completion")
    );
    assert!(events[..30].iter().all(|event| event.get("usage").is_none()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chat_begins_with_its_role_and_fills_the_context() {
    let server = serve(Fake::new(2, 100)).await;
    let messages = json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]);
    let body = json!({"model": "toy", "messages": messages, "temperature": 0, "return_token_ids": true, "ignore_eos": true, "prediction": {"type": "content", "content": "x"}});
    let whole = server.ask("/v1/chat/completions", &body).await;
    let prompt: Vec<u32> = "[system]Be brief.\n[user]Hi\n[assistant]".bytes().map(u32::from).collect();
    assert_eq!(
        (&whole["object"], ids(&whole["prompt_token_ids"])),
        (&json!("chat.completion"), prompt.clone())
    );
    let choice = &whole["choices"][0];
    assert_eq!(
        (&choice["message"]["role"], &choice["finish_reason"]),
        (&json!("assistant"), &json!("length"))
    );
    assert_eq!(choice.get("prompt_token_ids"), None);
    assert_eq!(whole["usage"]["total_tokens"], 100);
    let mut body = body;
    body["stream"] = json!(true);
    let events = server.stream("/v1/chat/completions", &body).await;
    assert_eq!(
        (&events[0]["object"], ids(&events[0]["prompt_token_ids"])),
        (&json!("chat.completion.chunk"), prompt)
    );
    let roles: Vec<_> = choices(&events, 0).map(|choice| choice["delta"].get("role").cloned()).collect();
    assert_eq!(roles[0], Some(json!("assistant")));
    assert!(roles[1..].iter().all(Option::is_none));
    assert_eq!(text_of(&events, 0), choice["message"]["content"].as_str().unwrap());
    assert_eq!(ids_of(&events, 0), ids(&choice["token_ids"]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_prompts_and_choices_come_in_order() {
    let server = serve(Fake::new(2, 512)).await;
    let body = |prompt: Value| json!({"prompt": prompt, "n": 2, "max_tokens": 5, "temperature": 1.0, "seed": 9, "return_token_ids": true, "ignore_eos": true});
    let answer = server.ask("/v1/completions", &body(json!(["one", "two", "three"]))).await;
    assert_eq!(answer["choices"].as_array().unwrap().len(), 6);
    assert_eq!(
        (&answer["usage"]["prompt_tokens"], &answer["usage"]["completion_tokens"]),
        (&json!(11), &json!(30))
    );
    for (i, prompt) in ["one", "two", "three"].into_iter().enumerate() {
        let alone = server.ask("/v1/completions", &body(json!(prompt))).await;
        for choice in 0..2 {
            let got = &answer["choices"][2 * i + choice];
            assert_eq!(got["index"], 2 * i + choice);
            assert_eq!(got["token_ids"], alone["choices"][choice]["token_ids"]);
        }
    }
    let lists = server
        .ask("/v1/completions", &body(json!([[111, 110, 101], [116, 119, 111], [116, 104, 114, 101, 101]])))
        .await;
    let texts = |answer: &Value| {
        answer["choices"].as_array().unwrap().iter().map(|c| c["text"].clone()).collect::<Vec<_>>()
    };
    assert_eq!(texts(&lists), texts(&answer));
    let mut streamed = body(json!(["one", "two", "three"]));
    streamed["stream"] = json!(true);
    let events = server.stream("/v1/completions", &streamed).await;
    for choice in 0..6 {
        assert_eq!(text_of(&events, choice), answer["choices"][choice]["text"].as_str().unwrap());
    }
}

/// Log-softmax by the definition.
fn log_softmax(row: &[f32], id: u32) -> f64 {
    let total: f64 = row.iter().map(|&logit| f64::from(logit).exp()).sum();
    f64::from(row[id as usize]) - total.ln()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn logprobs_echo_and_prompt_logprobs_are_right() {
    let server = serve(Fake::new(2, 512)).await;
    // The cache is warm: it must not be used where the prompt is scored.
    server.ask("/v1/completions", &json!({"prompt": "echo", "max_tokens": 2})).await;
    let body = json!({"prompt": "echo", "max_tokens": 2, "temperature": 0, "echo": true, "logprobs": 1, "return_token_ids": true,
        "return_tokens_as_token_ids": true, "prompt_logprobs": 1, "ignore_eos": true});
    let answer = server.ask("/v1/completions", &body).await;
    let choice = &answer["choices"][0];
    assert!(choice["text"].as_str().unwrap().starts_with("echo"));
    let all = [ids(&choice["prompt_token_ids"]), ids(&choice["token_ids"])].concat();
    let (scores, rows) = (&choice["logprobs"], choice["prompt_logprobs"].as_array().unwrap());
    assert_eq!((scores["token_logprobs"].as_array().unwrap().len(), rows.len()), (6, 4));
    assert_eq!(
        (&scores["token_logprobs"][0], &scores["top_logprobs"][0], &rows[0]),
        (&Value::Null, &Value::Null, &Value::Null)
    );
    assert_eq!(&scores["text_offset"].as_array().unwrap()[..4], [0, 1, 2, 3]);
    let mut hash = extend(0, all[0]);
    for (at, &id) in all.iter().enumerate().skip(1) {
        let want = log_softmax(&logits(hash), id);
        assert!((scores["token_logprobs"][at].as_f64().unwrap() - want).abs() < 1e-4);
        assert_eq!(scores["tokens"][at], format!("token_id:{id}"));
        if at < 4 {
            let entry = &rows[at][id.to_string()];
            assert!((entry["logprob"].as_f64().unwrap() - want).abs() < 1e-4);
            let best = entry["rank"] == 1;
            assert_eq!(rows[at].as_object().unwrap().len(), if best { 1 } else { 2 });
        }
        hash = extend(hash, id);
    }
    let nothing = json!({"prompt": "echo", "max_tokens": 0, "echo": true, "logprobs": 0});
    let nothing = server.ask("/v1/completions", &nothing).await;
    assert_eq!(
        (&nothing["choices"][0]["text"], &nothing["usage"]["completion_tokens"]),
        (&json!("echo"), &json!(0))
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chat_logprobs_list_tokens_with_their_bytes() {
    let server = serve(Fake::new(2, 512)).await;
    let body = json!({"messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 3, "temperature": 0, "logprobs": true, "top_logprobs": 2});
    let answer = server.ask("/v1/chat/completions", &body).await;
    let content = answer["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(content.len(), 3);
    for entry in content {
        let top = entry["top_logprobs"].as_array().unwrap();
        assert_eq!((top.len(), &top[0]["logprob"]), (2, &entry["logprob"]));
        assert!(entry["bytes"].is_array() && entry["token"].is_string());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stops_end_the_output_at_their_position() {
    let server = serve(Fake::new(2, 1024)).await;
    let base = json!({"prompt": "stop", "max_tokens": 200, "temperature": 0.9, "seed": 1, "return_token_ids": true, "ignore_eos": true});
    let ask = async |more: Value| {
        let mut body = base.clone();
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.ask("/v1/completions", &body).await["choices"][0].clone()
    };
    let plain = ask(json!({})).await;
    let text = plain["text"].as_str().unwrap();
    let stop: String = text.chars().skip(20).take(3).collect();
    let before = &text[..text.find(&stop).unwrap()];
    let cut = ask(json!({"stop": [stop, "never there"]})).await;
    assert_eq!(
        (cut["text"].as_str(), &cut["finish_reason"], cut["stop_reason"].as_str()),
        (Some(before), &json!("stop"), Some(stop.as_str()))
    );
    let kept = ask(json!({"stop": stop, "include_stop_str_in_output": true})).await;
    assert_eq!(kept["text"], format!("{before}{stop}"));
    assert_eq!(kept["token_ids"], cut["token_ids"]);
    let id = ids(&plain["token_ids"])[7];
    let first = ids(&plain["token_ids"]).iter().position(|&token| token == id).unwrap();
    let cut = ask(json!({"stop_token_ids": [id]})).await;
    assert_eq!((ids(&cut["token_ids"]).len(), &cut["stop_reason"]), (first + 1, &json!(id)));
    let late = ask(json!({"stop_token_ids": [id], "min_tokens": 12})).await;
    assert!(ids(&late["token_ids"])[..12].iter().all(|&token| token != id));
    let kept_by = |tokens: &serde_json::Value| ids(tokens).len();
    let late = ask(json!({"stop": stop, "min_tokens": 60})).await;
    assert!(kept_by(&late["token_ids"]) > 60, "a stop string does not count before min_tokens");
    let biased = ask(json!({"logit_bias": {"256": 100}, "ignore_eos": false})).await;
    assert_eq!(
        (&biased["text"], &biased["finish_reason"], ids(&biased["token_ids"])),
        (&json!(""), &json!("stop"), vec![EOS])
    );
    assert_eq!(biased["stop_reason"], Value::Null);
    let mut streamed = base.clone();
    streamed
        .as_object_mut()
        .unwrap()
        .extend(json!({"stop": stop, "stream": true}).as_object().unwrap().clone());
    let events = server.stream("/v1/completions", &streamed).await;
    assert_eq!(text_of(&events, 0), before);
    assert_eq!(choices(&events, 0).last().unwrap()["stop_reason"], stop);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_and_text_are_translated_both_ways() {
    let server = serve(Fake::new(1, 64)).await;
    let tokens = server.ask("/tokenize", &json!({"model": "toy", "prompt": "hé"})).await;
    assert_eq!(
        tokens,
        json!({"count": 3, "max_model_len": 64, "tokens": [104, 195, 169], "token_strs": null})
    );
    let text = server.ask("/detokenize", &json!({"tokens": [104, 195, 169]})).await;
    assert_eq!(text, json!({"prompt": "hé"}));
    let chat = server.ask("/tokenize", &json!({"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": false, "return_token_strs": true})).await;
    assert_eq!((&chat["count"], &chat["token_strs"][0]), (&json!(8), &json!("t91")));
    let empty = server.ask("/tokenize", &json!({"prompt": ""})).await;
    assert_eq!(empty["count"], 0);
}
