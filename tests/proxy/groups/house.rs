//! An engine whose calls are all counted, with the deployed binary in front.

use std::collections::BTreeMap;

use foretell_wire::openai::Route;
use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::client::{Answer, Ask, metric};
use crate::fakes::vllm::Vllm;
use crate::fakes::{Fake, Pace, toy};
use crate::reasons::proxy::Proxy;

/// The route of plain requests.
pub const PLAIN_REQUESTS: &str = "/v1/completions";
/// The route of verify requests.
pub const VERIFIES: &str = "/inference/v1/generate";
/// The drafters of every policy here.
pub const DRAFTERS: &str = "drafters: [{ kind: prompt_lookup, ngram: { min: 1, max: 8 } }]";
/// Gates that do not close on a busy machine.
pub const GATES: &str = "gates: { stale: 24h, control: 10 }";
/// Tokens of an output, enough to score some drafts in it.
pub const TOKENS: u32 = 32;
/// Requests that are sent at a time.
const AT_ONCE: usize = 8;

/// A policy of this name, with more lines.
pub fn policy(name: &str, more: &str) -> String {
    format!("version: 1\nname: {name}\n{DRAFTERS}\n{GATES}\n{more}\n")
}

/// A policy that speculates at every token.
pub fn forced(name: &str) -> String {
    policy(name, "gamma: { max: 8, fixed: 4 }")
}

pub async fn engine(pace: Pace) -> Fake<Vllm> {
    crate::probe::house::vllm("0.33.0", |options| options.setup.pace = pace).await
}

/// The binary in front of `engine`, with more lines of the config file and of the backend in it.
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

/// A completion with its own prompt.
pub fn ask(number: u32) -> Ask {
    let prompt: Vec<u32> = (0..24).map(|at| 100 + number % 200 + at % 8).collect();
    Ask::new(Route::Completions, false, json!({"prompt": prompt, "max_tokens": TOKENS, "temperature": 0}))
}

/// Sends requests of these numbers, some at a time; each answer must be the engine's own.
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

/// Answers by reason; those that were speculated on to their end have none.
pub fn reasons(answers: &[Answer]) -> BTreeMap<String, u64> {
    let mut counted = BTreeMap::new();
    for answer in answers {
        let reason = answer.foretell()["reason"].as_str().unwrap_or("none").to_owned();
        *counted.entry(reason).or_insert(0) += 1;
    }
    counted
}

/// The comparison of the only policy at the only backend in `/api/policies`.
pub async fn compared(proxy: &Proxy) -> Value {
    let policies = proxy.get("/api/policies").await.json();
    policies["policies"][0]["compared"][0].clone()
}

/// Requests that were speculated on and those of the control group, as `/api/policies` counts them.
pub async fn requests(proxy: &Proxy) -> (u64, u64) {
    let requests = &compared(proxy).await["requests"];
    (requests["speculating"].as_u64().unwrap(), requests["control_group"].as_u64().unwrap())
}

/// Asserts that the admin API shows these bounds in order and equal to the metric. `labels` are
/// those of the metric, with `BOUND` in place of `bound`.
pub async fn assert_agreed(proxy: &Proxy, shown: &Value, family: &str, labels: &str) {
    let mut bounds = Vec::new();
    for bound in ["low", "middle", "high"] {
        let labels = labels.replace("BOUND", &format!("bound=\"{bound}\""));
        let exported = metric(proxy.admin, &format!("{family}{{{labels}}} ")).await;
        let value = shown[bound].as_f64().unwrap_or_else(|| panic!("{shown}"));
        assert!((exported - value).abs() <= 0.000_51, "{family} {labels}: {exported}, {shown}");
        bounds.push(value);
    }
    assert!(bounds.is_sorted() && bounds[0] > 0.0, "{shown}");
}

/// Lines of this family.
pub async fn series(proxy: &Proxy, family: &str) -> Vec<String> {
    let page = proxy.get("/metrics").await.text();
    page.lines().filter(|line| line.starts_with(&format!("{family}{{"))).map(str::to_owned).collect()
}
