//! An engine whose every call is counted, and the deployed binary before it.

use std::collections::BTreeMap;

use foretell::openai::Route;
use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::client::{Answer, Ask, metric};
use crate::fakes::vllm::{Options, Vllm};
use crate::fakes::{Fake, Pace, toy};
use crate::reasons::proxy::Proxy;

/// The path of rides.
pub const RIDES: &str = "/v1/completions";
/// The path of verify calls.
pub const VERIFIES: &str = "/inference/v1/generate";
/// What every policy here drafts by.
pub const DRAFTERS: &str = "drafters: [{ kind: prompt_lookup, ngram: { min: 1, max: 8 } }]";
/// No gate closes because the machine is busy.
pub const GATES: &str = "gates: { stale: 24h, latency: 10 }";
/// Tokens of an output, so many that some drafts were scored in it.
pub const TOKENS: u32 = 32;
/// Requests that are sent at a time.
const AT_ONCE: usize = 8;

/// A policy of this name, with more lines.
pub fn policy(name: &str, more: &str) -> String {
    format!("version: 1\nname: {name}\n{DRAFTERS}\n{GATES}\n{more}\n")
}

/// One that leaps at every token.
pub fn forced(name: &str) -> String {
    policy(name, "gamma: { max: 8, fixed: 4 }")
}

pub async fn engine(pace: Pace) -> Fake<Vllm> {
    let mut options = Options { scale_out: true, prompt_tokens_details: true, ..Options::of("0.33.0") };
    options.setup.temper.eos_every = None;
    options.setup.pace = pace;
    Fake::start(Vllm::new(options)).await
}

/// The binary before `engine`, with more lines of the process file and of the backend in it.
pub async fn before(engine: &Fake<Vllm>, process: &str, backend: &str, policy: &str) -> Proxy {
    let probe = if backend.contains("probe:") { "" } else { "    probe: { when: never }\n" };
    let process = format!(
        "version: 1\nobserve: {{ log: json }}\n{process}backends:\n  - name: toy\n    replicas: [\"http://{}\"]\n    \
         models: [{{ id: toy, tokenizer: {:?} }}]\n{probe}{backend}",
        engine.address,
        toy::folder().display().to_string(),
    );
    Proxy::start(&process, policy).await
}

/// A completion with a prompt of its own.
pub fn ask(number: u32) -> Ask {
    let prompt: Vec<u32> = (0..24).map(|at| 100 + number % 200 + at % 8).collect();
    Ask::new(Route::Completions, false, json!({"prompt": prompt, "max_tokens": TOKENS, "temperature": 0}))
}

/// Sends requests of these numbers, some at a time; each answer is what the engine says by itself.
pub async fn send(engine: &Fake<Vllm>, proxy: &Proxy, numbers: std::ops::Range<u32>) -> Vec<Answer> {
    let numbers: Vec<u32> = numbers.collect();
    let mut answers = Vec::new();
    for some in numbers.chunks(AT_ONCE) {
        let both = |number: u32| async move {
            let ask = ask(number);
            let through = ask.send(proxy.front, "").await;
            (through, ask.send(engine.address, "").await)
        };
        for (through, alone) in join_all(some.iter().map(|number| both(*number))).await {
            assert_eq!(through.plain.status, 200, "{}", through.message.text());
            assert_eq!((&through.plain, &through.ids), (&alone.plain, &alone.ids));
            answers.push(through);
        }
    }
    answers
}

/// How many answers have each reason; those that leapt to their end have none.
pub fn reasons(answers: &[Answer]) -> BTreeMap<String, u64> {
    let mut counted = BTreeMap::new();
    for answer in answers {
        let reason = answer.foretell()["reason"].as_str().unwrap_or("none").to_owned();
        *counted.entry(reason).or_insert(0) += 1;
    }
    counted
}

/// What `/api/policies` compares of the only policy at the only backend.
pub async fn compared(proxy: &Proxy) -> Value {
    let policies = proxy.get("/api/policies").await.json();
    policies["policies"][0]["compared"][0].clone()
}

/// Requests that leapt, and that were held back, as `/api/policies` counts them.
pub async fn requests(proxy: &Proxy) -> (u64, u64) {
    let requests = &compared(proxy).await["requests"];
    (requests["leaping"].as_u64().unwrap(), requests["held_back"].as_u64().unwrap())
}

/// The admin API shows these bounds, in order and as the metric has them. `labels` are those of the metric but `bound`,
/// with `BOUND` in its place.
pub async fn assert_agreed(proxy: &Proxy, shown: &Value, family: &str, labels: &str) {
    let mut bounds = Vec::new();
    for bound in ["low", "middle", "high"] {
        let labels = labels.replace("BOUND", &format!("bound=\"{bound}\""));
        let told = metric(proxy.admin, &format!("{family}{{{labels}}} ")).await;
        let value = shown[bound].as_f64().unwrap_or_else(|| panic!("{shown}"));
        assert!((told - value).abs() <= 0.000_51, "{family} {labels}: {told}, {shown}");
        bounds.push(value);
    }
    assert!(bounds.is_sorted() && bounds[0] > 0.0, "{shown}");
}

/// Lines of this family.
pub async fn series(proxy: &Proxy, family: &str) -> Vec<String> {
    let page = proxy.get("/metrics").await.text();
    page.lines().filter(|line| line.starts_with(&format!("{family}{{"))).map(str::to_owned).collect()
}
