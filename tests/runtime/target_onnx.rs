//! The target on a real model: seeded output does not depend on how it is computed.
//!
//! Runs on the bundled target, or on the model folder that `FORETELL_TEST_MODEL` names. A run of
//! another shape may round differently; a first difference is accepted only if the two best scores
//! are nearly equal.

use std::path::PathBuf;

use bytes::Bytes;
use foretell::app::served;
use foretell_core::control::Tolerance;
use foretell_core::draft::{Features, Source, Tree};
use foretell_core::session::accept::{Accept, Judge, Judged, Rule, Walk};
use foretell_core::units::TokenId;
use foretell_core::words::{Dist, Row, VerifyResult};
use foretell_net::http::listen::Stop;
use foretell_onnx::noise::gumbel;
use foretell_onnx::open::DeviceChoice;
use foretell_onnx::open::Options;
use foretell_onnx::target::open::open;
use http::Request;
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};
use tokio::net::TcpListener;

const PROMPT: &str = "import os\n\ndef read_lines(path):\n    \"\"\"Return the lines of a file.\"\"\"\n";

fn folder() -> PathBuf {
    std::env::var_os("FORETELL_TEST_MODEL")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("onnx/models/target"), PathBuf::from)
}

struct Server {
    url: String,
    stop: Stop,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.accept.cancel();
        self.stop.cut.cancel();
    }
}

async fn serve() -> Server {
    let options = Options { device: DeviceChoice::Cpu, lanes: 8, threads: 2, ..Options::default() };
    let opened = open(&folder(), Some("toy".into()), &options, None)
        .expect("the model opens (make fetches ONNX Runtime)");
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let stop = Stop::default();
    tokio::spawn(served::serve(opened.app, listener, stop.clone()));
    Server { url, stop }
}

impl Server {
    async fn ask(&self, path: &str, body: &Value) -> Value {
        let client: Client<_, Full<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
        let request =
            Request::post(format!("{}{path}", self.url)).body(Full::new(body.to_string().into())).unwrap();
        let (head, answer) = client.request(request).await.unwrap().into_parts();
        let answer: Value = serde_json::from_slice(&answer.collect().await.unwrap().to_bytes()).unwrap();
        assert_eq!(head.status, 200, "{answer}");
        answer
    }
}

fn with(base: &Value, more: Value) -> Value {
    let mut body = base.clone();
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn settings() -> [Value; 5] {
    [
        json!({"temperature": 0, "structured_outputs": {"json": {"type": "array", "items": {"type": "string"}}}}),
        json!({"temperature": 0.9, "seed": 3, "structured_outputs": {"regex": "(take (fox|dog), )+"}}),
        json!({"temperature": 0}),
        json!({"temperature": 0.8, "top_p": 0.9, "seed": 1}),
        json!({"temperature": 1.0, "seed": 2, "frequency_penalty": 0.4}),
    ]
}

/// The same tokens, or the same up to a position at which both tokens have nearly the same score,
/// where another batch shape may decide differently.
async fn assert_same(server: &Server, setting: &Value, prompt: &[u32], want: &[u32], got: &[u32], way: &str) {
    let Some(at) = (0..want.len().max(got.len())).find(|&at| want.get(at) != got.get(at)) else { return };
    let (Some(&one), Some(&other)) = (want.get(at), got.get(at)) else {
        panic!("{way}: {} tokens instead of {}, {setting}", got.len(), want.len());
    };
    let context = [prompt, &want[..at]].concat();
    let position = context.len() as u64;
    let body = json!({"context": context, "generated": at, "tokens": [one, other], "parents": [-1, -1]});
    let rows = server.ask("/v1/verify", &with(setting, body)).await["rows"].clone();
    let temperature = setting["temperature"].as_f64().unwrap();
    let score = |row: usize, token: u32| {
        let logprob = rows[row]["draft_logprob"].as_f64().unwrap();
        let noise =
            setting.get("seed").map_or(0.0, |seed| gumbel(seed.as_u64().unwrap(), 0, position, token));
        if temperature > 0.0 { temperature * (logprob + noise) } else { logprob }
    };
    let gap = (score(1, one) - score(2, other)).abs();
    assert!(gap < 1e-3, "{way}: {other} instead of {one} at {at}, though {gap} apart, {setting}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn plain_continued_fanned_out_and_verified_runs_agree() {
    let server = serve().await;
    let prompt = ids(&server.ask("/tokenize", &json!({"prompt": PROMPT})).await["tokens"]);
    for setting in settings() {
        let setting = with(&setting, json!({"ignore_eos": true}));
        let body = json!({"prompt": prompt, "max_tokens": 64, "return_token_ids": true});
        let plain =
            ids(&server.ask("/v1/completions", &with(&setting, body)).await["choices"][0]["token_ids"]);
        assert_eq!(plain.len(), 64);

        let context = [prompt.clone(), plain[..13].to_vec()].concat();
        let body = json!({"prompt": context, "generated": 13, "max_tokens": 51, "return_token_ids": true});
        let rest =
            ids(&server.ask("/v1/completions", &with(&setting, body)).await["choices"][0]["token_ids"]);
        let rest = [plain[..13].to_vec(), rest].concat();
        assert_same(&server, &setting, &prompt, &plain, &rest, "continued").await;

        let prompts: Vec<Vec<u32>> =
            (0..9).map(|cut| [prompt.clone(), plain[..cut].to_vec()].concat()).collect();
        let generated: Vec<usize> = (0..9).collect();
        let body =
            json!({"prompt": prompts, "generated": generated, "max_tokens": 1, "return_token_ids": true});
        let rows = server.ask("/v1/completions", &with(&setting, body)).await;
        let fanned: Vec<u32> = (0..9).map(|row| ids(&rows["choices"][row]["token_ids"])[0]).collect();
        assert_same(&server, &setting, &prompt, &plain[..9], &fanned, "fanned out").await;

        let out = by_trees(&server, &setting, &prompt, &plain).await;
        assert_same(&server, &setting, &prompt, &plain, &out, "verified").await;
    }
}

/// The run in rounds of `/v1/verify`, up to its end or its first difference.
async fn by_trees(server: &Server, setting: &Value, prompt: &[u32], plain: &[u32]) -> Vec<u32> {
    let mut out = Vec::new();
    while out.len() < plain.len() && plain.starts_with(&out) {
        let right = &plain[out.len()..(out.len() + 3).min(plain.len() - 1)];
        // Every right token has a wrong sibling before it, so the accepted branch has to be moved.
        let tokens: Vec<u32> = right.iter().flat_map(|&token| [(token + 1) % 100 + 300, token]).collect();
        let parents: Vec<i64> =
            (0..right.len() as i64).flat_map(|depth| [2 * depth - 1, 2 * depth - 1]).collect();
        let context = [prompt.to_vec(), out.clone()].concat();
        let length = context.len() as u64;
        let body = json!({"context": context, "generated": out.len(), "tokens": tokens, "parents": parents});
        let result = server.ask("/v1/verify", &with(setting, body)).await;
        if !out.is_empty() {
            let cached = result["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
            assert_eq!(length - cached, 1, "all but the last token is cached");
        }
        let accepted = ids(&result["accepted"]);
        out.extend(accepted.iter().map(|&node| tokens[node as usize]));
        let last = accepted.last().map_or(0, |&node| node as usize + 1);
        out.push(result["rows"][last]["sample"].as_u64().unwrap() as u32);
    }
    out
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chat_is_answered_with_the_models_own_template() {
    let server = serve().await;
    let messages = json!([{"role": "user", "content": "Rename x to y in: x = 1"}]);
    let tokens = server.ask("/tokenize", &json!({"messages": messages})).await;
    let body = json!({"messages": messages, "max_tokens": 8, "temperature": 0, "return_token_ids": true});
    let answer = server.ask("/v1/chat/completions", &body).await;
    assert_eq!(answer["prompt_token_ids"], tokens["tokens"]);
    let text = server.ask("/detokenize", &json!({"tokens": tokens["tokens"]})).await;
    assert!(text["prompt"].as_str().unwrap().contains("Rename x to y"), "{text}");
    assert_eq!(answer["choices"][0]["message"]["role"], "assistant");
}

/// Empirical distribution of a position under a lossy rule, from ten thousand draws of the target
/// itself: the draft token is as frequent as by the rule's formula, and the distance from the
/// target's own distribution is within the ledger's charge.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_draws_of_one_position_lie_within_the_ledger() {
    const DRAWS: usize = 10_000;
    const AT_ONCE: usize = 100;
    let server = serve().await;
    let sampling = json!({"temperature": 0.9, "top_p": 0.95});
    let tokens = server.ask("/tokenize", &json!({"prompt": PROMPT})).await;
    // The prompt position with the likeliest second choice: likely, and often not sampled.
    let all = ids(&tokens["tokens"]);
    let ask = with(&sampling, json!({"context": all[..1], "tokens": all[1..], "top_logprobs": 3}));
    let rows = server.ask("/v1/verify", &ask).await["rows"].clone();
    let second = |row: usize| rows[row]["top"][1][1].as_f64().unwrap_or(f64::NEG_INFINITY);
    let row = (0..all.len()).max_by(|&a, &b| second(a).total_cmp(&second(b))).unwrap();
    let context = all[..=row].to_vec();
    let drafted = rows[row]["top"][1][0].as_u64().unwrap() as TokenId;
    let draft = Tree::chain(&[drafted], Source::Model, Features::default());
    let ask =
        with(&sampling, json!({"context": context, "tokens": [drafted], "parents": [-1], "top_logprobs": 3}));
    let told = server.ask("/v1/verify", &ask).await;
    let row = &told["rows"][0];
    let p = told["rows"][1]["draft_logprob"].as_f64().unwrap().exp();
    let listed = |entry: &Value| (entry[0].as_u64().unwrap() as TokenId, entry[1].as_f64().unwrap().exp());
    let dist = Dist {
        top: row["top"].as_array().unwrap().iter().map(listed).collect(),
        complete: false,
        slack: 0.0,
    };
    let behind = Row { draft_p: Some(p), ..Row::of(0) };
    let prompts = vec![context.clone(); AT_ONCE];
    let call = with(&sampling, json!({"prompt": prompts, "max_tokens": 1, "return_token_ids": true}));
    let mut samples = Vec::new();
    while samples.len() < DRAWS {
        let answer = server.ask("/v1/completions", &call).await;
        samples
            .extend(answer["choices"].as_array().unwrap().iter().map(|choice| ids(&choice["token_ids"])[0]));
    }
    for rule in
        [Rule::Ears { kappa: 0.0 }, Rule::Ears { kappa: 0.05 }, Rule::Typical { epsilon: 0.09, delta: 0.3 }]
    {
        let tolerance = 0.4;
        let accept = Accept {
            rule,
            tolerance: Tolerance { max: 1.0, ..Tolerance::default() },
            max_drift: None,
            drift_per_100_tokens: 100.0,
        };
        let (mut kept, mut own, mut charged) = (0_usize, 0_usize, 0.0);
        for (number, &sample) in samples.iter().enumerate() {
            let first = Row { dist: Some(dist.clone()), entropy: row["entropy"].as_f64(), ..Row::of(sample) };
            let result = VerifyResult { rows: vec![first, behind.clone()], ..VerifyResult::default() };
            let mut judge = Judge::new(accept.clone(), number as u64);
            let judged = Judged {
                draft: &draft,
                result: &result,
                context: context.len(),
                output: 0,
                tolerance,
                coupled: false,
                expected: 1.0,
                price: 0.0,
                worth: &[],
                free: &|_| true,
            };
            let token = judge.walk(&judged).unwrap().tokens[0];
            kept += usize::from(token == drafted);
            own += usize::from(sample == drafted);
            charged = judge.ledger().charged;
        }
        let share = |count: usize| count as f64 / DRAWS as f64;
        let spread = 4.0 * (0.25 / DRAWS as f64).sqrt();
        assert!((share(own) - p).abs() < spread, "the target's own: {} of {p}", share(own));
        // Only the draft token gains probability, so this is the total variation distance.
        let moved = share(kept) - p;
        assert!((moved - charged).abs() < spread, "{rule:?}: {moved} moved, {charged} charged");
        assert!(charged > 0.01, "{rule:?} is too tame: {charged}");
    }
}
