//! Triton's behaviour (reference: the KServe protocol and
//! `inflight_batcher_llm/tensorrt_llm/1/model.py`).

use std::sync::Arc;

use serde_json::{Value, json};

use crate::client::{ask, events, gauge, get, ids, refusal};
use crate::fakes::Fake;
use crate::fakes::triton::{MetricsPort, Options, Triton};

const INFER: &str = "/v2/models/tensorrt_llm/infer";

async fn triton(change: impl FnOnce(&mut Options)) -> Fake<Triton> {
    let mut options = Options::default();
    options.setup.temper.eos_every = None;
    change(&mut options);
    Fake::start(Triton::new(options)).await
}

fn prompt(len: u32) -> Vec<u32> {
    (0..len).map(|at| 100 + at * 7 % 900).collect()
}

fn tensor(name: &str, datatype: &str, shape: &[usize], data: impl Into<Value>) -> Value {
    json!({"name": name, "datatype": datatype, "shape": shape, "data": data.into()})
}

fn one(name: &str, datatype: &str, value: impl Into<Value>) -> Value {
    tensor(name, datatype, &[1, 1], vec![value.into()])
}

/// An inference with additional inputs; only the output is returned.
fn body(prompt: &[u32], count: usize, extra: &[Value]) -> Value {
    let mut inputs = vec![
        tensor("input_ids", "INT32", &[1, prompt.len()], prompt),
        one("input_lengths", "INT32", prompt.len()),
        one("request_output_len", "INT32", count),
        one("exclude_input_in_output", "BOOL", true),
    ];
    inputs.extend_from_slice(extra);
    json!({"inputs": inputs})
}

fn draft(tokens: &[u32]) -> Value {
    tensor("draft_input_ids", "INT32", &[1, tokens.len()], tokens)
}

fn output(answer: &Value, name: &str) -> Value {
    let outputs = answer["outputs"].as_array().unwrap();
    outputs.iter().find(|output| output["name"] == name).cloned().unwrap_or_default()
}

async fn tokens(fake: &Fake<Triton>, body: Value) -> Vec<u32> {
    ids(&output(&ask(fake.address, INFER, body).await, "output_ids")["data"])
}

#[tokio::test]
async fn metadata_describes_the_server_and_its_model() {
    let fake = triton(|_| {}).await;
    assert_eq!(get(fake.address, "/v2").await.json()["name"], "triton");
    let model = get(fake.address, "/v2/models/tensorrt_llm").await.json();
    let takes = model["inputs"].as_array().unwrap();
    let draft = takes.iter().find(|input| input["name"] == "draft_input_ids").unwrap();
    assert_eq!((&draft["datatype"], &draft["shape"]), (&json!("INT32"), &json!([-1, -1])));
    assert_eq!(get(fake.address, "/v2/models/other").await.head.status(), 404);
    assert_eq!(get(fake.address, "/v2/health/ready").await.head.status(), 200);
    assert_eq!(get(fake.address, "/metrics").await.head.status(), 404);
    assert_eq!(get(fake.address, "/v1/models").await.head.status(), 404);
}

#[tokio::test]
async fn tensors_are_validated() {
    let fake = triton(|_| {}).await;
    let good = || body(&prompt(5), 2, &[]);
    ask(fake.address, INFER, good()).await;
    let bad = [
        one("temperature", "FP64", 1.0),
        tensor("temperature", "FP32", &[1], vec![1.0]),
        tensor("temperature", "FP32", &[1, 2], vec![1.0, 2.0]),
        tensor("draft_input_ids", "INT32", &[1, 3], vec![5, 6]),
        tensor("draft_input_ids", "INT32", &[1, 1], vec![1.5]),
        one("draft_input_id", "INT32", 5),
        one("seed", "UINT64", -1),
        one("input_lengths", "INT32", 5),
        draft(&[9000]),
        one("streaming", "BOOL", true),
        one("return_context_logits", "BOOL", true),
    ];
    for extra in bad {
        let (status, text) =
            refusal(fake.address, INFER, body(&prompt(5), 2, std::slice::from_ref(&extra))).await;
        let error: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((status, error["error"].is_string()), (400, true), "{extra}");
    }
    let mut wrong = good();
    wrong["outputs"] = json!([{"name": "logits"}]);
    assert_eq!(refusal(fake.address, INFER, wrong).await.0, 400);
    let mut less = good();
    less["inputs"].as_array_mut().unwrap().remove(2);
    assert_eq!(refusal(fake.address, INFER, less).await.0, 400);
    let mut chosen = good();
    chosen["outputs"] = json!([{"name": "sequence_length"}]);
    let answer = ask(fake.address, INFER, chosen).await;
    assert_eq!(
        answer["outputs"],
        json!([{"name": "sequence_length", "shape": [1, 1], "datatype": "INT32", "data": [2]}])
    );
    assert!(fake.house.fatal().is_empty());
}

#[tokio::test]
async fn a_draft_is_verified_in_one_step_and_yields_one_more_token() {
    let fake = triton(|_| {}).await;
    let plain = tokens(&fake, body(&prompt(20), 8, &[])).await;
    let before = fake.house.tally();
    let good = [&plain[..3], &[9, 9]].concat();
    assert_eq!(tokens(&fake, body(&prompt(20), 6, &[draft(&good)])).await, plain[..4]);
    let after = fake.house.tally();
    // One token of the prompt is never cached, and the draft is computed with it.
    assert_eq!((after.computed - before.computed, after.sequences - before.sequences), (6, 1));
    assert_eq!(tokens(&fake, body(&prompt(20), 6, &[draft(&plain[..5])])).await, plain[..6]);
    assert_eq!(tokens(&fake, body(&prompt(20), 6, &[draft(&[9])])).await, plain[..1]);
    assert_eq!(tokens(&fake, body(&prompt(20), 2, &[draft(&plain[..5])])).await, plain[..2]);
}

#[tokio::test]
async fn drafts_need_an_engine_that_was_built_for_them() {
    let none = triton(|options| options.max_draft_len = 0).await;
    assert_eq!(refusal(none.address, INFER, body(&prompt(5), 3, &[draft(&[5])])).await.0, 400);
    let cold = triton(|options| options.reuse = false).await;
    assert_eq!(refusal(cold.address, INFER, body(&prompt(5), 3, &[draft(&[5])])).await.0, 400);
    let short = triton(|options| options.max_draft_len = 2).await;
    assert_eq!(refusal(short.address, INFER, body(&prompt(5), 9, &[draft(&[5, 6, 7])])).await.0, 400);
}

#[tokio::test]
async fn a_threshold_accepts_unsampled_tokens_and_is_recorded() {
    let fake = triton(|_| {}).await;
    let wrong = vec![9, 9];
    let lenient = one("draft_acceptance_threshold", "FP32", 0.0);
    let told = tokens(&fake, body(&prompt(20), 4, &[draft(&wrong), lenient])).await;
    assert_eq!((&told[..2], fake.house.fatal().len()), (&wrong[..], 1));
}

#[tokio::test]
async fn the_input_is_in_the_output_by_default() {
    let fake = triton(|_| {}).await;
    let mut whole = body(&prompt(20), 3, &[]);
    whole["inputs"].as_array_mut().unwrap().remove(3);
    let answer = ask(fake.address, INFER, whole).await;
    let told = output(&answer, "output_ids");
    assert_eq!((&told["shape"], &ids(&told["data"])[..20]), (&json!([1, 1, 23]), &prompt(20)[..]));
    assert_eq!(output(&answer, "sequence_length")["data"], json!([23]));
}

#[tokio::test]
async fn decoding_is_greedy_unless_sampling_is_requested() {
    let fake = triton(|_| {}).await;
    let run = async |extra: &[Value]| tokens(&fake, body(&prompt(20), 16, extra)).await;
    let plain = run(&[]).await;
    assert_eq!(run(&[one("temperature", "FP32", 1.5)]).await, plain);
    assert_eq!(run(&[one("runtime_top_k", "INT32", 1), one("temperature", "FP32", 1.5)]).await, plain);
    let hot = [one("runtime_top_p", "FP32", 1.0), one("temperature", "FP32", 1.5)];
    let sampled = run(&hot).await;
    assert_ne!(sampled, plain);
    // The default seed is always the same.
    assert_eq!(run(&hot).await, sampled);
    let seeded = [&hot[..], &[one("seed", "UINT64", 7)]].concat();
    assert_ne!(run(&seeded).await, sampled);
}

#[tokio::test]
async fn penalties_pass_over_what_is_told_to_be_ignored() {
    let fake = triton(|_| {}).await;
    let run = async |prompt: Vec<u32>, count: usize| {
        let extra = [one("presence_penalty", "FP32", 1.8), one("prompt_ignore_length", "INT32", 20)];
        tokens(&fake, body(&prompt, count, &extra)).await
    };
    let whole = run(prompt(20), 60).await;
    assert_eq!(run([&prompt(20), &whole[..30]].concat(), 30).await, whole[30..]);
    assert_ne!(tokens(&fake, body(&prompt(20), 60, &[])).await, whole);
}

#[tokio::test]
async fn logits_and_logprobs_are_returned_on_request_if_built_in() {
    let fake = triton(|options| options.gathers_logits = true).await;
    let extra = [
        one("return_log_probs", "BOOL", true),
        one("return_context_logits", "BOOL", true),
        one("return_generation_logits", "BOOL", true),
    ];
    let answer = ask(fake.address, INFER, body(&prompt(4), 2, &extra)).await;
    assert_eq!(output(&answer, "output_log_probs")["shape"], json!([1, 1, 2]));
    assert_eq!(output(&answer, "context_logits")["shape"], json!([1, 4, 8192]));
    assert_eq!(output(&answer, "generation_logits")["shape"], json!([1, 1, 2, 8192]));
    // There are none for cached tokens.
    let again = ask(fake.address, INFER, body(&prompt(4), 2, &extra)).await;
    assert_eq!(output(&again, "context_logits")["shape"], json!([1, 1, 8192]));
}

#[tokio::test]
async fn the_output_ends_only_with_an_end_id() {
    let fake = triton(|options| options.setup.temper.eos_every = Some(1)).await;
    assert_eq!(tokens(&fake, body(&prompt(4), 5, &[])).await.len(), 5);
    assert_eq!(tokens(&fake, body(&prompt(4), 5, &[one("end_id", "INT32", 0)])).await, [0]);
}

#[tokio::test]
async fn metrics_have_a_port_of_their_own() {
    let fake = triton(|_| {}).await;
    let port = Fake::start(MetricsPort(Arc::clone(&fake.engine))).await;
    fake.house.pretend.lock().running = 3;
    let text = get(port.address, "/metrics").await.text();
    let name = "nv_trt_llm_request_metrics{model=\"tensorrt_llm\",request_type=\"scheduled\"";
    assert_eq!(gauge(&text, name), "3");
    assert!(text.contains("nv_trt_llm_kv_cache_block_metrics"));
}

#[tokio::test]
async fn an_openai_frontend_may_be_at_the_same_address() {
    let fake = triton(|options| options.frontend = true).await;
    assert_eq!(get(fake.address, "/v1/models").await.json()["data"][0]["id"], "tensorrt_llm");
    assert_eq!(get(fake.address, "/v2").await.json()["name"], "triton");
    let text = json!({"model": "tensorrt_llm", "prompt": "a house", "max_tokens": 3, "temperature": 0});
    let answer = ask(fake.address, "/v1/completions", text).await;
    assert_eq!(answer["usage"]["completion_tokens"], 3);
    let chat = json!({"model": "tensorrt_llm", "messages": [{"role": "user", "content": "hi"}], "stream": true, "max_tokens": 2});
    assert_eq!(events(fake.address, "/v1/chat/completions", chat).await.last().unwrap(), "[DONE]");
    let ids = json!({"model": "tensorrt_llm", "prompt": [5], "max_tokens": 3});
    assert_eq!(refusal(fake.address, "/v1/completions", ids).await.0, 400);
}
