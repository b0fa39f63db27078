//! Behaviour of hosted APIs (reference: the providers' documentation).

use serde_json::{Value, json};

use crate::fakes::Fake;
use crate::fakes::hosted::{Bill, Hosted, Options, Provider};
use crate::wire::{Message, Wire, post};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

async fn hosted(change: impl FnOnce(&mut Options)) -> Fake<Hosted> {
    let mut options = Options::default();
    options.setup.temper.eos_every = None;
    change(&mut options);
    Fake::start(Hosted::new(options)).await
}

async fn call(fake: &Fake<Hosted>, path: &str, key: Option<&str>, body: &Value) -> Message {
    let field = key.map(|key| format!("authorization: Bearer {key}\r\n")).unwrap_or_default();
    Wire::connect(fake.address).await.ask(post(path, &field, body.to_string().as_bytes())).await
}

async fn ask(fake: &Fake<Hosted>, path: &str, body: Value) -> Value {
    let answer = call(fake, path, Some("sk-good"), &body).await;
    assert_eq!(answer.head.status(), 200, "{body}: {}", answer.text());
    answer.json()
}

async fn status(fake: &Fake<Hosted>, path: &str, body: Value) -> u16 {
    call(fake, path, Some("sk-good"), &body).await.head.status()
}

#[allow(clippy::needless_pass_by_value)] // so that bodies are written in place
fn chat(extra: Value) -> Value {
    let mut body = json!({"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 24, "temperature": 0});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

fn predicted(text: &str) -> Value {
    chat(json!({"prediction": {"type": "content", "content": text}}))
}

#[tokio::test]
async fn every_call_needs_a_key() {
    let fake = hosted(|_| {}).await;
    for (key, code) in [(None, Value::Null), (Some("sk-bad"), json!("invalid_api_key"))] {
        let answer = call(&fake, CHAT, key, &chat(json!({}))).await;
        assert_eq!((answer.head.status(), &answer.json()["error"]["code"]), (401, &code));
    }
    assert_eq!(fake.engine.bill(), Bill::default());
    ask(&fake, CHAT, chat(json!({}))).await;
}

#[tokio::test]
async fn a_rate_limited_client_gets_retry_after() {
    let fake = hosted(|options| options.calls = Some(1)).await;
    ask(&fake, CHAT, chat(json!({}))).await;
    let answer = call(&fake, CHAT, Some("sk-good"), &chat(json!({}))).await;
    assert_eq!((answer.head.status(), answer.head.get("retry-after")), (429, Some("20")));
    assert_eq!(answer.json()["error"]["code"], "rate_limit_exceeded");
    assert_eq!(fake.engine.bill().calls, 1);
    fake.engine.allow(1);
    ask(&fake, CHAT, chat(json!({}))).await;
}

#[tokio::test]
async fn a_prediction_is_counted_and_rejected_tokens_are_billed() {
    let fake = hosted(|_| {}).await;
    let plain = ask(&fake, CHAT, chat(json!({}))).await;
    let text = plain["choices"][0]["message"]["content"].as_str().unwrap();
    let mut before = fake.engine.bill();
    let right = ask(&fake, CHAT, predicted(text)).await;
    assert_eq!(right["choices"][0]["message"]["content"], text);
    let details = &right["usage"]["completion_tokens_details"];
    assert!(details["accepted_prediction_tokens"].as_u64().unwrap() >= 15, "{details}");
    before = Bill { output: fake.engine.bill().output - before.output, ..fake.engine.bill() };
    assert_eq!(right["usage"]["completion_tokens"], before.output);
    let wrong = ask(&fake, CHAT, predicted("nothing of this will ever come out of that model")).await;
    assert_eq!(wrong["choices"][0]["message"]["content"], text);
    let rejected =
        wrong["usage"]["completion_tokens_details"]["rejected_prediction_tokens"].as_u64().unwrap();
    assert!(rejected > 0);
    assert_eq!(wrong["usage"]["completion_tokens"], 24 + rejected);
    assert_eq!(
        fake.engine.bill().rejected as u64,
        rejected + details["rejected_prediction_tokens"].as_u64().unwrap()
    );
    let parts = json!([{"type": "text", "text": text}]);
    let parts = ask(&fake, CHAT, chat(json!({"prediction": {"type": "content", "content": parts}}))).await;
    assert_eq!(parts["usage"], right["usage"]);
}

#[tokio::test]
async fn a_prediction_goes_with_little_else() {
    let fake = hosted(|_| {}).await;
    for extra in [
        json!({"n": 2}),
        json!({"logprobs": true}),
        json!({"presence_penalty": 1}),
        json!({"frequency_penalty": 0.5}),
        json!({"tools": []}),
    ] {
        let mut body = predicted("a");
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        assert_eq!(status(&fake, CHAT, body).await, 400, "{extra}");
    }
    let legacy = json!({"model": "toy", "prompt": "a", "prediction": {"type": "content", "content": "b"}});
    assert_eq!(status(&fake, TEXT, legacy).await, 400);
    assert_eq!(status(&fake, CHAT, chat(json!({"prediction": "b"}))).await, 400);
    assert_eq!(status(&fake, CHAT, chat(json!({"novel": 1}))).await, 400);
    assert_eq!(status(&fake, CHAT, json!({"model": "other", "messages": []})).await, 404);
}

#[tokio::test]
async fn every_probe_is_billed_for_its_whole_input() {
    let fake = hosted(|_| {}).await;
    let context: Vec<u32> = (0..1200).map(|at| 100 + at * 7 % 900).collect();
    let prompts: Vec<&[u32]> = (0..4).map(|at| &context[..1140 + at]).collect();
    let probe = json!({"model": "toy", "prompt": prompts, "max_tokens": 1, "temperature": 0});
    let answer = ask(&fake, TEXT, probe.clone()).await;
    assert!(answer["choices"][0].get("token_ids").is_none());
    let bill = fake.engine.bill();
    assert_eq!((bill.input, bill.output, bill.cached), (4 * 1140 + 6, 4, 0));
    let again = ask(&fake, TEXT, probe).await;
    assert_eq!(again["usage"]["prompt_tokens_details"]["cached_tokens"], 4 * 1024);
    assert_eq!(fake.engine.bill().cached, 4 * 1024);
    // Short prompts are never cached.
    let short = json!({"model": "toy", "prompt": &context[..600], "max_tokens": 1});
    for _ in 0..2 {
        assert_eq!(
            ask(&fake, TEXT, short.clone()).await["usage"]["prompt_tokens_details"]["cached_tokens"],
            0
        );
    }
}

#[tokio::test]
async fn few_logprobs_and_none_of_the_prompt() {
    let fake = hosted(|_| {}).await;
    let body = |extra: Value| {
        let mut body = json!({"model": "toy", "prompt": "a house", "max_tokens": 1});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        body
    };
    assert_eq!(status(&fake, TEXT, body(json!({"logprobs": 6}))).await, 400);
    assert_eq!(status(&fake, TEXT, body(json!({"logprobs": 1, "echo": true}))).await, 400);
    assert_eq!(status(&fake, TEXT, body(json!({"logprobs": 5}))).await, 200);
    let together = hosted(|options| options.provider = Provider::Together).await;
    let told = ask(&together, TEXT, body(json!({"logprobs": 20, "echo": true}))).await["choices"][0].clone();
    let own = told["logprobs"]["token_logprobs"].as_array().unwrap();
    assert_eq!(own.len(), together.house.toy.encode("a house").len() + 1);
    assert!(own[0].is_null() && own[1].is_f64() && told["text"].as_str().unwrap().starts_with("a house"));
    assert_eq!(status(&together, TEXT, json!({"model": "toy", "prompt": [5], "max_tokens": 1})).await, 400);
    assert_eq!(status(&together, CHAT, predicted("a")).await, 400);
}

#[tokio::test]
async fn an_answer_can_be_prefilled_only_if_the_provider_supports_it() {
    let begun = json!({"model": "toy", "max_tokens": 8, "temperature": 0, "messages": [{"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Well,", "prefix": true}]});
    let (plain, mistral) =
        (hosted(|_| {}).await, hosted(|options| options.provider = Provider::Mistral).await);
    let said = async |fake: &Fake<Hosted>| {
        let answer = ask(fake, CHAT, begun.clone()).await;
        (
            answer["usage"]["prompt_tokens"].as_u64().unwrap(),
            answer["choices"][0]["message"]["content"].clone(),
        )
    };
    let (long, other) = said(&plain).await;
    let (short, goes_on) = said(&mistral).await;
    assert!(short < long && other != goes_on);
    let toy = &mistral.house.toy;
    let before = toy.chat(&json!([{"role": "user", "content": "hi"}]), true).unwrap();
    let expected = toy.encode(&before).len() + toy.encode("Well,").len();
    assert_eq!(short as usize, expected);
}

#[tokio::test]
async fn raw_tokens_are_returned_by_one_provider() {
    let fake = hosted(|options| options.provider = Provider::Cerebras).await;
    let body = json!({"model": "toy", "prompt": [5, 6], "max_tokens": 3, "return_raw_tokens": true});
    assert_eq!(ask(&fake, TEXT, body.clone()).await["choices"][0]["tokens"].as_array().unwrap().len(), 3);
    let other = hosted(|_| {}).await;
    assert_eq!(status(&other, TEXT, body).await, 400);
}
