//! Structured output in front of vLLM: a grammar begins anew with every request there, so these
//! requests are passed through, and nothing of them is compiled here.

use std::net::SocketAddr;
use std::time::Duration;

use foretell::app::{Running, local};
use foretell_wire::openai::Route;
use rstest::rstest;
use serde_json::{Value, json};

use crate::client::{Answer, Ask, FORCED, panics, watch_panics};
use crate::fakes::vllm::{Options, Vllm};
use crate::fakes::{Fake, Temper, toy};
use crate::wire::PATIENCE;

/// Speculates at every token, and has no control group.
pub const EVERY: &str = "holdback: { start: 0, floor: 0 }\n";

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
    /// `model`: more of the model in the config file, `backend`: more lines of its backend.
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

    /// The request is passed through as it is, and makes the proxy ask the server nothing.
    async fn passes(&self, ask: &Ask, parameter: &str) {
        let want = self.direct(ask).await;
        self.engine.house.take_requests();
        let got = self.through(ask).await;
        let head = |name: &str| got.message.head.get(name).unwrap_or_default().to_owned();
        let told = ["path", "reason", "parameter"].map(|name| head(&format!("x-foretell-{name}")));
        assert_eq!(told, ["passthrough", "structured", parameter], "{ask:?}");
        // Above temperature 0 without a seed two answers differ.
        if ask.fields["temperature"] == 0 {
            assert_eq!((&got.plain, &got.ids), (&want.plain, &want.ids), "{ask:?}");
        }
        self.is_quiet().await;
        let requests = self.engine.house.take_requests();
        let sent: Vec<_> = requests.iter().filter(|request| request.path.starts_with("/v1/c")).collect();
        assert_eq!(sent.len(), 1, "{ask:?}");
        assert_eq!(sent[0].json().as_ref(), Some(&ask.body()), "{ask:?}");
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

fn schema(schema: &Value) -> Value {
    json!({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}})
}

fn asked(route: Route, stream: bool, structure: &Value, temperature: f64) -> Ask {
    let mut fields = json!({"prompt": "Answer with JSON.", "max_tokens": 24, "temperature": temperature});
    if temperature == 0.0 {
        fields["temperature"] = json!(0);
    }
    fields.as_object_mut().unwrap().extend(structure.as_object().unwrap().clone());
    Ask::new(route, stream, fields)
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn structured_output_is_passed_through(
    #[values("0.24.0", "0.32.0", "0.33.0")] version: &'static str,
    #[values(0.0, 0.8)] temperature: f64,
) {
    let scene = Scene::with(options(version), &[&format!("{FORCED}{EVERY}")], "", "").await;
    let object = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
    let outputs = |name: &str, value: Value| json!({"structured_outputs": {name: value}});
    for structure in [
        json!({"response_format": {"type": "json_object"}}),
        schema(&object),
        outputs("json", object.clone()),
        outputs("json_object", json!(true)),
        outputs("regex", json!("yes")),
        outputs("choice", json!(["yes", "no"])),
        outputs("grammar", json!("root ::= \"yes\"")),
    ] {
        let (parameter, _) = structure.as_object().unwrap().iter().next().unwrap();
        for (route, stream) in ways() {
            scene.passes(&asked(route, stream, &structure, temperature), parameter).await;
        }
    }
    scene.leave().await;
}

/// Schemas that end, hang or fill a process that compiles them. The server is the judge of them.
#[rstest]
#[case::stars(json!({"type": "string", "pattern": format!("a{}", "*".repeat(4_000))}))]
#[case::counts(json!({"type": "string", "pattern": format!("a{}", "{0,1}".repeat(2_000))}))]
#[case::nested_counts(json!({"type": "string", "pattern": "((a{0,50}b?){0,50}c?){0,50}"}))]
#[case::optional_properties(json!({"type": "object", "minProperties": 300, "properties":
    (0..600).map(|at| (format!("p{at}"), json!({"type": "integer"}))).collect::<serde_json::Map<_, _>>()}))]
#[case::least_number(json!({"type": "integer", "minimum": i64::MIN}))]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hostile_schema_is_passed_through_uncompiled(#[case] hostile: Value) {
    let scene = Scene::with(options("0.33.0"), &[&format!("{FORCED}{EVERY}")], "", "").await;
    for (route, stream) in ways() {
        scene.passes(&asked(route, stream, &schema(&hostile), 0.0), "response_format").await;
    }
    scene.leave().await;
}
