//! Behaviour of hosted APIs (reference: the providers' documentation).

use serde_json::{Value, json};

use crate::fakes::hosted::Hosted;
use crate::fakes::{Fake, Setup, Temper};
use crate::wire::{Message, Wire, post};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

async fn hosted() -> Fake<Hosted> {
    let temper = Temper { eos_every: None, ..Temper::default() };
    Fake::start(Hosted::new(Setup { temper, ..Setup::default() })).await
}

async fn call(fake: &Fake<Hosted>, path: &str, key: Option<&str>, body: &Value) -> Message {
    let field = key.map(|key| format!("authorization: Bearer {key}\r\n")).unwrap_or_default();
    Wire::connect(fake.address).await.ask(post(path, &field, body.to_string().as_bytes())).await
}

async fn chat(fake: &Fake<Hosted>, extra: Value) -> Message {
    let mut body = json!({"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 24, "temperature": 0});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    call(fake, CHAT, Some("sk-good"), &body).await
}

fn predicted(text: &str) -> Value {
    json!({"prediction": {"type": "content", "content": text}})
}

#[tokio::test]
async fn every_call_needs_a_key_and_is_billed() {
    let fake = hosted().await;
    for (key, code) in [(None, Value::Null), (Some("sk-bad"), json!("invalid_api_key"))] {
        let answer = call(&fake, CHAT, key, &json!({})).await;
        assert_eq!((answer.head.status(), &answer.json()["error"]["code"]), (401, &code));
    }
    assert_eq!(fake.engine.billed(), 0);
    assert_eq!((chat(&fake, json!({})).await.head.status(), fake.engine.billed()), (200, 1));
}

#[tokio::test]
async fn a_prediction_is_counted_and_its_rejected_tokens_are_output() {
    let fake = hosted().await;
    let text = chat(&fake, json!({})).await.json()["choices"][0]["message"]["content"].clone();
    for prediction in [text.as_str().unwrap(), "nothing of this comes out of it"] {
        let answer = chat(&fake, predicted(prediction)).await.json();
        assert_eq!(answer["choices"][0]["message"]["content"], text);
        let details = &answer["usage"]["completion_tokens_details"];
        let count = |name: &str| details[name].as_u64().unwrap();
        let rejected = count("rejected_prediction_tokens");
        assert!(count("accepted_prediction_tokens") + rejected > 0, "{details}");
        assert_eq!(answer["usage"]["completion_tokens"], 24 + rejected);
    }
}

#[tokio::test]
async fn a_prediction_goes_with_little_else_and_unknown_fields_are_refused() {
    let fake = hosted().await;
    for extra in [
        json!({"n": 2}),
        json!({"logprobs": true}),
        json!({"presence_penalty": 1}),
        json!({"frequency_penalty": 0.5}),
        json!({"prediction": "b"}),
        json!({"novel": 1}),
    ] {
        let mut fields = predicted("a");
        fields.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        assert_eq!(chat(&fake, fields).await.head.status(), 400, "{extra}");
    }
    assert_eq!(chat(&fake, json!({"model": "other"})).await.head.status(), 404);
    for (extra, status) in [
        (predicted("b"), 400),
        (json!({"logprobs": 6}), 400),
        (json!({"logprobs": 1, "echo": true}), 400),
        (json!({"logprobs": 5}), 200),
    ] {
        let mut body = json!({"model": "toy", "prompt": "a house", "max_tokens": 1});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        assert_eq!(call(&fake, TEXT, Some("sk-good"), &body).await.head.status(), status, "{extra}");
    }
}
