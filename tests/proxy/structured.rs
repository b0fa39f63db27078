//! Output under a grammar before vLLM: at temperature 0 it is the server's own, token by token,
//! above that as likely as the server's.

mod others;
mod refused;
mod same;

use std::net::SocketAddr;
use std::time::Duration;

use foretell::app::{Running, local};
use foretell_engines::openai::Route;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::client::{Answer, Ask, FORCED, panics, watch_panics};
use crate::fakes::vllm::{Library, Options, Vllm};
use crate::fakes::{Fake, Temper, toy};
use crate::wire::PATIENCE;

const COMPLETIONS: &str = "/v1/completions";
const SCORE: &str = "/inference/v1/generate";
/// Wait for an answer to prove its grammar.
const PROOF: Duration = Duration::from_secs(30);
/// Speculates at every token, and has no control group.
pub const EVERY: &str = "holdback: { start: 0, floor: 0 }\n";

/// A text with JSON in it.
const PROMPT: &str = "Answer with JSON: {\"name\": \"Bob\", \"age\": 42, \"tags\": [\"a\", \"b\"]}, \
    {\"name\": \"Eve\", \"age\": 42, \"tags\": [\"a\", \"b\"]}, ";

/// The path and the reason of an answer.
fn told(answer: &Answer) -> (String, String) {
    let told = answer.foretell();
    let text = |name: &str| told[name].as_str().unwrap_or_default().to_owned();
    let head = |name: &str| answer.message.head.get(name).unwrap_or_default().to_owned();
    match text("path") {
        path if path.is_empty() => (head("x-foretell-path"), head("x-foretell-reason")),
        path => (path, text("reason")),
    }
}

fn plain(reason: &str) -> (String, String) {
    ("plain".to_owned(), reason.to_owned())
}

fn relayed(reason: &str) -> (String, String) {
    ("relayed".to_owned(), reason.to_owned())
}

/// A request at temperature 0 that asks for this structure.
fn asked(route: Route, stream: bool, structure: &Value, more: &Value) -> Ask {
    let mut fields = json!({"prompt": PROMPT, "max_tokens": 48, "temperature": 0, "return_token_ids": true});
    for part in [structure, more] {
        fields.as_object_mut().unwrap().extend(part.as_object().unwrap().clone());
    }
    Ask::new(route, stream, fields)
}

fn schema(schema: &Value) -> Value {
    json!({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}})
}

/// A server whose model likes to write JSON, and other things too.
fn options(version: &'static str) -> Options {
    let mut options = Options { scale_out: true, prompt_tokens_details: true, ..Options::of(version) };
    options.setup.block = 16;
    options.setup.temper = Temper { punctuates: true, eos_every: Some(60), ..Temper::default() };
    options
}

pub struct Scene {
    pub engine: Fake<Vllm>,
    proxy: Running,
}

impl Scene {
    /// A proxy before this server that speculates at every token.
    async fn of(options: Options) -> Self {
        Self::under(options, &[&format!("{FORCED}{EVERY}")]).await
    }

    async fn under(options: Options, policies: &[&str]) -> Self {
        Self::with(options, policies, "", "").await
    }

    /// `model`: more of the model in the process file, `backend`: more lines of its backend.
    pub async fn with(options: Options, policies: &[&str], model: &str, backend: &str) -> Self {
        watch_panics();
        let engine = Fake::start(Vllm::new(options)).await;
        let process = format!(
            "version: 1\ntimeouts: {{ verify: 10s, connect: 10s, idle: 4s }}\nbackends:\n  - name: toy\n    \
             replicas: [\"{}\"]\n    models: [{{ id: toy, tokenizer: {}{model} }}]\n    probe: {{ when: never }}\n{backend}",
            engine.url(),
            toy::folder().display(),
        );
        let proxy = local::proxy(&process, policies).await.unwrap();
        engine.house.keep_requests();
        Self { engine, proxy }
    }

    fn front(&self) -> SocketAddr {
        self.proxy.gateway.addresses[0]
    }

    pub async fn direct(&self, ask: &Ask) -> Answer {
        ask.send(self.engine.address, "").await
    }

    pub async fn through(&self, ask: &Ask) -> Answer {
        let answer = ask.send(self.front(), "te: trailers\r\n");
        tokio::time::timeout(PATIENCE, answer).await.expect("no hang")
    }

    /// The answer through the proxy, which is the server's own. Returns its path and reason.
    async fn alike(&self, ask: &Ask) -> (String, String) {
        let (want, got) = (self.direct(ask).await, self.through(ask).await);
        assert_eq!(got.plain, want.plain, "{ask:?} {:?}", told(&got));
        assert_eq!((&got.ids, &got.prompt_ids), (&want.ids, &want.prompt_ids), "{ask:?} {:?}", told(&got));
        told(&got)
    }

    /// Compares answers until the grammar has proved itself. Returns true if a draft then decided a
    /// token; where none did, the answer is plain for that reason.
    async fn proves(&self, ask: &Ask) -> bool {
        let begun = Instant::now();
        loop {
            let told = self.alike(ask).await;
            if told != plain("grammar") {
                let reasons = ["undecided", "no_draft", "no_gain", "untrusted_ids", "held_back_text"];
                let may = told.0 == "speculated" || (told.0 == "plain" && reasons.contains(&told.1.as_str()));
                assert!(may, "{told:?}: {ask:?}");
                return told.0 == "speculated";
            }
            assert!(begun.elapsed() < PROOF, "never speculated on: {ask:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Sends the request for so long that a proof would have come to its end.
    async fn stays_plain(&self, ask: &Ask) {
        for _ in 0..4 {
            let is_greedy = ask.fields["temperature"] == 0;
            let told = if is_greedy { self.alike(ask).await } else { told(&self.through(ask).await) };
            assert_eq!(told, plain("grammar"), "{ask:?}");
            self.is_quiet().await;
        }
    }

    /// Waits until no call has come for a while.
    async fn is_quiet(&self) {
        let count = || self.engine.house.tally().calls.values().sum::<usize>();
        loop {
            let before = count();
            tokio::time::sleep(Duration::from_millis(150)).await;
            if count() == before && self.engine.house.running() == 0 {
                return;
            }
        }
    }

    /// The bodies of the proxy's own completions for one token among some, since the last call.
    fn one_token_calls(&self) -> Vec<Value> {
        let requests = self.engine.house.take_requests();
        let bodies = requests.iter().filter(|request| request.path == COMPLETIONS);
        let bodies = bodies.filter_map(crate::fakes::http::Request::json);
        let among =
            |body: &Value| body.get("allowed_token_ids").is_some() || body.get("logit_bias").is_some();
        bodies.filter(|body| among(body) && body.get("structured_outputs").is_none()).collect()
    }

    pub async fn leave(self) {
        self.is_quiet().await;
        assert_eq!(self.engine.house.fatal(), Vec::<String>::new());
        assert_eq!(panics(), Vec::<String>::new(), "panics");
    }
}

/// All four ways to send a request.
fn ways() -> [(Route, bool); 4] {
    [(Route::Completions, false), (Route::Completions, true), (Route::Chat, false), (Route::Chat, true)]
}
