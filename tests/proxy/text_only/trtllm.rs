//! TensorRT-LLM: completions at temperature 0 are speculated on, all other requests are relayed
//! unchanged.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use serde_json::{Value, json};

use super::house::{Answer, Plain, ask, before, before_with, completion, front, metric};
use crate::fakes::http::{Out, Request, Sent};
use crate::fakes::trtllm::{Options, Trtllm};
use crate::fakes::{Engine, Fake, Fault, House, When, toy};
use crate::wire::{Wire, post};

const COMPLETIONS: &str = "/v1/completions";
const TEXT: &str = "The cat sat on the mat. The cat sat on the hat. The cat";

async fn trtllm(change: impl FnOnce(&mut Options)) -> Fake<Trtllm> {
    let mut options = Options { perf_metrics: true, ..Options::default() };
    options.setup.temper.eos_every = None;
    // Time for other calls during a plain request.
    options.setup.pace.step = Duration::from_millis(1);
    options.setup.pace.cancel = Duration::ZERO;
    change(&mut options);
    Fake::start(Trtllm::new(options)).await
}

async fn both(fake: &Fake<Trtllm>, to: std::net::SocketAddr, body: &Value) -> (Plain, Answer) {
    let direct = ask(fake.address, COMPLETIONS, "", body).await;
    assert_eq!(direct.plain.status, 200, "{}", direct.message.text());
    (direct.plain, ask(to, COMPLETIONS, "", body).await)
}

#[tokio::test]
async fn a_greedy_completion_is_speculated_on_and_keeps_its_text() {
    let fake = trtllm(|_| {}).await;
    let proxy = before(fake.address, "").await;
    let mut speculated = 0;
    for seed in 0..5_u32 {
        for more in [
            json!({"prompt": format!("{TEXT} {seed}")}),
            json!({"prompt": [5 + seed, 9, 200, 5 + seed, 9, 200]}),
            json!({"prompt": format!("{TEXT} {seed}"), "presence_penalty": 0.7, "frequency_penalty": 0.3}),
            json!({"prompt": format!("{TEXT} {seed}"), "logit_bias": {"300": 4}, "top_k": -1, "ignore_eos": true}),
            json!({"prompt": format!("{TEXT} {seed}"), "stream": true, "stream_options": {"include_usage": true}}),
            json!({"prompt": format!("{TEXT} {seed}"), "stream": true}),
        ] {
            let (direct, through) = both(&fake, front(&proxy), &completion(&more)).await;
            assert_eq!(through.plain, direct, "{more}");
            speculated += usize::from(through.path() == "speculated");
        }
    }
    assert!(speculated >= 20, "{speculated} of 25 that report it");
    assert!(metric(&proxy, "foretell_spec_decode_num_accepted_tokens_total").await > 100.0);
    let tally = fake.house.tally();
    assert_eq!((tally.calls_of("/metrics"), fake.house.fatal()), (0, Vec::<String>::new()));
}

#[tokio::test]
async fn the_end_of_the_text_and_the_limit_are_the_server_s_own() {
    for ends_in in [3_u64, 8, 30] {
        let fake = trtllm(|options| options.setup.temper.eos_every = Some(ends_in)).await;
        let proxy = before(fake.address, "").await;
        for seed in 0..4 {
            for max in [1, 2, 3, 17, 60] {
                let body = completion(&json!({"prompt": format!("{TEXT} {seed}"), "max_tokens": max}));
                let (direct, through) = both(&fake, front(&proxy), &body).await;
                assert_eq!(through.plain, direct, "every {ends_in}, seed {seed}, max {max}");
            }
        }
    }
}

#[tokio::test]
async fn a_request_that_would_not_be_exact_is_relayed_with_a_reason() {
    let fake = trtllm(|options| options.setup.max_len = 120).await;
    let proxy = before(fake.address, "").await;
    let chat = json!({"model": "toy", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 30, "temperature": 0});
    let mut predicted = chat.clone();
    predicted["prediction"] = json!({"type": "content", "content": "The cat"});
    let completion = |more: Value| completion(&more);
    for (path, body, reason) in [
        ("/v1/chat/completions", chat.clone(), "no_verify_method"),
        ("/v1/chat/completions", predicted, "no_verify_method"),
        (COMPLETIONS, completion(json!({"prompt": TEXT, "temperature": 0.8, "seed": 3})), "seed"),
        (
            COMPLETIONS,
            completion(json!({"prompt": TEXT, "temperature": null, "top_k": 1})),
            "defaults_unknown",
        ),
        (COMPLETIONS, completion(json!({"prompt": TEXT, "max_tokens": null})), "defaults_unknown"),
        (COMPLETIONS, completion(json!({"prompt": TEXT, "stop": "hat"})), "parameter"),
        (COMPLETIONS, completion(json!({"prompt": TEXT, "repetition_penalty": 1.2})), "parameter"),
    ] {
        let mut alone = body.clone();
        alone.as_object_mut().unwrap().shift_remove("prediction");
        let direct = ask(fake.address, path, "", &alone).await;
        let through = ask(front(&proxy), path, "", &body).await;
        assert_eq!(through.plain, direct.plain, "{body}");
        assert_eq!(
            (through.field("x-foretell-path"), through.field("x-foretell-reason")),
            ("relayed", reason)
        );
    }
}

#[tokio::test]
async fn a_server_that_may_clean_up_its_text_is_relayed() {
    let fake = trtllm(|_| {}).await;
    let folder = tempfile::tempdir().unwrap();
    let tokenizer = folder.path().join("tokenizer.json");
    std::fs::copy(toy::folder().join("tokenizer.json"), &tokenizer).unwrap();
    for config in [None, Some("{}"), Some(r#"{"clean_up_tokenization_spaces": true}"#)] {
        if let Some(config) = config {
            std::fs::write(folder.path().join("tokenizer_config.json"), config).unwrap();
        }
        let proxy = before_with(fake.address, &folder.path().display().to_string(), "").await;
        let through = ask(front(&proxy), COMPLETIONS, "", &completion(&json!({"prompt": TEXT}))).await;
        let headers = (through.field("x-foretell-path"), through.field("x-foretell-reason"));
        assert_eq!(headers, ("relayed", "tokenizer"), "{config:?}");
    }
}

#[tokio::test]
async fn a_missing_or_foreign_tokenizer_is_the_reported_reason() {
    let fake = trtllm(|_| {}).await;
    let body = completion(&json!({"prompt": TEXT}));
    let direct = ask(fake.address, COMPLETIONS, "", &body).await;
    let foreign = toy::folder().with_file_name("draft-other");
    for tokenizer in ["backend".to_owned(), foreign.display().to_string()] {
        let proxy = before_with(fake.address, &tokenizer, "").await;
        let through = ask(front(&proxy), COMPLETIONS, "", &body).await;
        assert_eq!(through.plain, direct.plain);
        let headers = (through.field("x-foretell-path"), through.field("x-foretell-reason"));
        assert_eq!(headers, ("relayed", "tokenizer"), "{tokenizer}");
        assert!(metric(&proxy, "foretell_requests_total{path=\"relayed\",reason=\"tokenizer\"}").await > 0.5);
    }
}

#[tokio::test]
async fn a_build_that_does_not_tokenize_is_plain_on_text_and_speculated_on_ids() {
    let fake = trtllm(|options| options.tokenizes = false).await;
    let proxy = before(fake.address, "").await;
    let (direct, through) = both(&fake, front(&proxy), &completion(&json!({"prompt": TEXT}))).await;
    assert_eq!((&through.plain, through.path()), (&direct, "plain"));
    let body = completion(&json!({"prompt": [5, 9, 200, 5, 9, 200]}));
    let (direct, through) = both(&fake, front(&proxy), &body).await;
    assert_eq!((&through.plain, through.path()), (&direct, "speculated"));
}

/// Notes the bodies of its completions and chats.
struct Noting(Trtllm, Arc<Mutex<Vec<Vec<u8>>>>);

impl Engine for Noting {
    fn house(&self) -> &Arc<House> {
        self.0.house()
    }

    fn serve<'a>(&'a self, request: Request, out: &'a mut Out) -> BoxFuture<'a, Sent> {
        if request.path.ends_with("completions") {
            self.1.lock().push(request.body.clone());
        }
        self.0.serve(request, out)
    }
}

/// For every reason and every form of the body: the field is removed, and nothing else changes.
#[tokio::test]
async fn a_prediction_is_removed_for_every_reason_to_relay() {
    let seen = Arc::<Mutex<Vec<Vec<u8>>>>::default();
    let mut options = Options::default();
    options.setup.pace.cancel = Duration::ZERO;
    let fake = Fake::start(Noting(Trtllm::new(options), Arc::clone(&seen))).await;
    let own = toy::folder().display().to_string();
    let prompt = r#""prompt":"The c\u0061t""#;
    // Only a chat may have a prediction and still be eligible.
    let chat = r#""messages":[ {"role":"user", "content":"The c\u0061t"} ]"#;
    let predicted = r#" , "prediction": {"type":"content", "content":"sat"}"#;
    for (tokenizer, backend, fields, asked, reason) in [
        (own.as_str(), "", "x-foretell: off\r\n", prompt, "client"),
        (&own, "", "x-foretell: faster\r\n", chat, "client"),
        (&own, "", "", &format!(r#"{prompt},"n":2"#), "choices"),
        (&own, "", "", &format!(r#"{prompt},"return_context_logits":false"#), "unknown_parameter"),
        (&own, "", "", &format!(r#"{prompt},"temperature":0"#), "body"),
        (&own, "", "", chat, "no_verify_method"),
        (&own, "mode: off\n", "", chat, "off"),
        (&own, "    billed: true\n    dialect: trtllm\n", "", chat, "billed"),
        ("backend", "", "", chat, "tokenizer"),
    ] {
        let proxy = before_with(fake.address, tokenizer, backend).await;
        let path = if asked == chat { "/v1/chat/completions" } else { COMPLETIONS };
        for with in ["", predicted] {
            seen.lock().clear();
            let body = format!(r#"{{ "model" : "toy","max_tokens": 4,"temperature": 0,{asked}{with} }}"#);
            let answer = Wire::connect(front(&proxy)).await.ask(post(path, fields, body.as_bytes())).await;
            let got = (answer.head.status(), answer.head.get("x-foretell-reason"));
            let wanted = if with.is_empty() {
                body
            } else {
                format!(r#"{{"model":"toy","max_tokens":4,"temperature":0,{asked}}}"#)
            };
            assert_eq!(String::from_utf8(seen.lock().pop().unwrap()).unwrap(), wanted, "{reason}");
            assert_eq!(got, (200, Some(reason)), "{wanted}: {}", answer.text());
        }
    }
}

/// A build whose tokenize route adds another token in front than its completions.
struct Otherwise(Trtllm);

impl Engine for Otherwise {
    fn house(&self) -> &Arc<House> {
        self.0.house()
    }

    fn serve<'a>(&'a self, request: Request, out: &'a mut Out) -> BoxFuture<'a, Sent> {
        async move {
            if request.path != "/_internal/tokenize" {
                return self.0.serve(request, out).await;
            }
            let text = request.json().unwrap()["prompt"].as_str().unwrap().to_owned();
            let mut tokens = self.0.house.toy.encode(&text);
            // Identification tokenizes another text, which is answered correctly.
            if text.starts_with("The cat") {
                tokens.insert(0, 0);
            }
            out.json(200, &json!({"count": tokens.len(), "tokens": tokens})).await
        }
        .boxed()
    }
}

#[tokio::test]
async fn ids_of_a_prompt_with_another_token_count_are_not_used() {
    let mut options = Options::default();
    options.setup.temper.eos_every = None;
    options.setup.pace.step = Duration::from_millis(1);
    options.setup.pace.cancel = Duration::ZERO;
    let fake = Fake::start(Otherwise(Trtllm::new(options))).await;
    let proxy = before(fake.address, "").await;
    for seed in 0..3 {
        let body = completion(&json!({"prompt": format!("{TEXT} {seed}")}));
        let direct = ask(fake.address, COMPLETIONS, "", &body).await;
        let calls = fake.house.tally().calls_of(COMPLETIONS);
        let through = ask(front(&proxy), COMPLETIONS, "", &body).await;
        assert_eq!((&through.plain, through.path()), (&direct.plain, "plain"));
        assert_eq!(fake.house.tally().calls_of(COMPLETIONS), calls + 1, "one plain call and nothing else");
    }
}

#[tokio::test]
async fn a_fault_in_the_call_for_ids_costs_the_speculation_and_not_the_answer() {
    let fake = trtllm(|_| {}).await;
    let proxy = before(fake.address, "").await;
    let body = completion(&json!({"prompt": TEXT}));
    let direct = ask(fake.address, COMPLETIONS, "", &body).await;
    for fault in [Fault::Status(400), Fault::Status(503), Fault::Later(429, 1), Fault::Garbage, Fault::Reset]
    {
        // The first call of a request is streamed and the one for its ids is not.
        fake.house.faults.at(When::path(COMPLETIONS).streamed(false), 0, fault.clone());
        let through = ask(front(&proxy), COMPLETIONS, "", &body).await;
        assert_eq!(through.plain, direct.plain, "{fault:?}");
        fake.house.faults.clear();
    }
}
