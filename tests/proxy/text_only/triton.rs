//! Triton: the published model repository around the engine, and native drafts.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use serde_json::{Value, json};

use super::house::{Answer, Plain, ask, before, completion, front, metric};
use crate::fakes::http::{Out, Request, Sent};
use crate::fakes::triton::{Options, Triton};
use crate::fakes::{Engine, Fake, House, Setup};

const COMPLETIONS: &str = "/v1/completions";
const INFER: &str = "/v2/models/tensorrt_llm/infer";
const TEXT: &str = "The cat sat on the mat. The cat sat on the hat. The cat";

/// The engine with `ensemble`, `preprocessing` and streams of ids (`generate_stream`).
pub struct Repository(Triton);

impl Repository {
    async fn answer(&self, mut request: Request, out: &mut Out) -> Sent {
        match request.route() {
            ("GET", "/v1/models") => {
                let models = ["ensemble", "postprocessing", "preprocessing", "tensorrt_llm"];
                let models = models.map(|id| json!({"id": id, "owned_by": "Triton Inference Server"}));
                out.json(200, &json!({"object": "list", "data": models})).await
            }
            ("POST", "/v2/models/preprocessing/infer") => {
                let body = request.json().unwrap();
                let toy = &self.0.house.toy;
                let ids = toy.encode(body["inputs"][0]["data"][0].as_str().unwrap());
                let output = |name: &str, data: &[u32]| json!({"name": name, "datatype": "INT32", "shape": [1, data.len()], "data": data});
                let outputs = [output("INPUT_ID", &ids), output("OUT_END_ID", &[toy.eos()])];
                out.json(200, &json!({"model_name": "preprocessing", "outputs": outputs})).await
            }
            ("POST", "/v2/models/tensorrt_llm/generate_stream") => self.stream(&request, out).await,
            ("POST", COMPLETIONS) => {
                let mut body = request.json().unwrap();
                if body["model"] == "ensemble" {
                    body["model"] = json!("tensorrt_llm");
                }
                request.body = body.to_string().into_bytes();
                self.0.serve(request, out).await
            }
            _ => self.0.serve(request, out).await,
        }
    }

    /// Greedy ids, an event each, up to the end id or the length; then the stream is over.
    async fn stream(&self, request: &Request, out: &mut Out) -> Sent {
        let body = request.json().unwrap();
        assert_eq!((&body["runtime_top_k"], &body["streaming"]), (&json!(1), &json!(true)));
        let ids: Vec<u32> = serde_json::from_value(body["input_ids"].clone()).unwrap();
        assert_eq!(body["input_lengths"], json!(ids.len()));
        let mut context = crate::fakes::toy::Context::new(&ids);
        out.events().await?;
        for _ in 0..body["request_output_len"].as_u64().unwrap() {
            let toy = &self.0.house.toy;
            let token = toy.row(&context, context.len()).best();
            context.push(token);
            out.event(json!({"model_name": "tensorrt_llm", "model_version": "1", "sequence_end": false, "output_ids": [token]})).await?;
            if body["end_id"] == token {
                break;
            }
        }
        out.end().await
    }
}

impl Engine for Repository {
    fn house(&self) -> &Arc<House> {
        self.0.house()
    }

    fn serve<'a>(&'a self, request: Request, out: &'a mut Out) -> BoxFuture<'a, Sent> {
        self.answer(request, out).boxed()
    }
}

/// Such a server.
pub fn repository(setup: Setup) -> Repository {
    Repository(Triton::new(Options { frontend: true, setup, ..Options::default() }))
}

async fn triton(change: impl FnOnce(&mut Options)) -> Fake<Repository> {
    let mut options = Options { frontend: true, ..Options::default() };
    options.setup.temper.eos_every = Some(200);
    // Time for other calls during a plain request.
    options.setup.pace.step = Duration::from_millis(1);
    change(&mut options);
    Fake::start(Repository(Triton::new(options))).await
}

fn body(seed: u32, max: u32) -> Value {
    let prompt = format!("{TEXT} {seed}");
    completion(&json!({"model": "ensemble", "prompt": prompt, "max_tokens": max, "stream": true}))
}

async fn both(fake: &Fake<Repository>, to: std::net::SocketAddr, body: &Value) -> (Plain, Answer) {
    let direct = ask(fake.address, COMPLETIONS, "", body).await;
    assert_eq!(direct.plain.status, 200, "{}", direct.message.text());
    (direct.plain, ask(to, COMPLETIONS, "", body).await)
}

const NATIVE: &str = "    verify: { allow: [native] }\n";

#[tokio::test]
async fn the_engine_verifies_the_draft_itself() {
    for exclude_input in [false, true] {
        let fake = triton(|options| options.exclude_input = exclude_input).await;
        let proxy = before(fake.address, NATIVE).await;
        for seed in 0..8 {
            for max in [3, 120] {
                let (direct, through) = both(&fake, front(&proxy), &body(seed, max)).await;
                assert_eq!(through.plain, direct, "seed {seed}, max {max}");
            }
        }
        assert!(fake.house.tally().calls_of(INFER) > 50, "{:?}", fake.house.tally().calls);
        let accepted = metric(&proxy, "foretell_spec_decode_num_accepted_tokens_total").await;
        assert!(accepted > 10.0, "{accepted}");
        assert_eq!(fake.house.fatal(), Vec::<String>::new());
    }
}

#[tokio::test]
async fn an_engine_that_takes_no_drafts_stays_plain() {
    let fake = triton(|options| options.max_draft_len = 0).await;
    let proxy = before(fake.address, NATIVE).await;
    for seed in 0..5 {
        let (direct, through) = both(&fake, front(&proxy), &body(seed, 40)).await;
        assert_eq!(through.plain, direct);
    }
    assert_eq!(metric(&proxy, "foretell_spec_decode_num_accepted_tokens_total").await as u32, 0);
}

#[tokio::test]
async fn without_the_operator_s_consent_the_engine_gets_no_calls() {
    let fake = triton(|_| {}).await;
    let proxy = before(fake.address, "").await;
    let (direct, through) = both(&fake, front(&proxy), &body(1, 40)).await;
    assert_eq!(through.plain, direct);
    let mut whole = body(1, 40);
    whole["stream"] = json!(false);
    let (direct, through) = both(&fake, front(&proxy), &whole).await;
    assert_eq!((&through.plain, through.field("x-foretell-reason")), (&direct, "no_verify_method"));
    assert_eq!(fake.house.tally().calls_of(INFER), 0);
}
