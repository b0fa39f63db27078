//! Fakes to be probed, and a proxy in front of them.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use foretell::app::Running;
use foretell::app::local;
use foretell::cli::access::Access;
use foretell::cli::probe::{ProbeArgs, run};
use serde_json::{Value, json};

use crate::client::get;
use crate::fakes::vllm::{Options, Vllm};
use crate::fakes::{Fake, Pace, toy};
use crate::wire::{Message, Wire, post};

/// A step long enough to stand out from noise, and hardly longer with more tokens in it.
pub const INEXPENSIVE: Pace =
    Pace { step: Duration::from_millis(12), per_token: Duration::from_micros(60), cancel: Duration::ZERO };
/// Every token has the same cost: speculation cannot gain anything.
pub const EXPENSIVE: Pace =
    Pace { step: Duration::ZERO, per_token: Duration::from_millis(10), cancel: Duration::ZERO };

/// A vLLM that reports everything, unless changed.
pub async fn vllm(version: &'static str, change: impl FnOnce(&mut Options)) -> Fake<Vllm> {
    let mut options = Options::of(version);
    options.prompt_tokens_details = true;
    options.scale_out = true;
    options.setup.block = 16;
    options.setup.temper.eos_every = None;
    change(&mut options);
    Fake::start(Vllm::new(options)).await
}

pub fn arguments(url: &str) -> ProbeArgs {
    ProbeArgs {
        url: url.to_owned(),
        json: true,
        engine: "auto".to_owned(),
        tokenizer: Some(toy::folder()),
        model: None,
        access: Access::default(),
        billed: false,
        score: false,
        within: Duration::from_secs(10),
    }
}

/// Exit code and report of `foretell probe --json`.
pub async fn probe(arguments: &ProbeArgs) -> (u8, Value) {
    let mut out = Vec::new();
    let code = run(arguments, &mut out).await.code();
    (code, serde_json::from_slice(&out).unwrap_or(Value::Null))
}

/// A proxy in front of `address`. `more`: lines of the backend in the config file.
pub async fn proxy(address: SocketAddr, policy: &str, more: &str) -> Running {
    let process = format!(
        "version: 1\nbackends:\n  - name: toy\n    replicas: [\"http://{address}\"]\n    \
         models: [{{ id: toy, tokenizer: {:?} }}]\n    load: {{ every: 100ms }}\n{more}",
        toy::folder().display().to_string(),
    );
    local::proxy(&process, &[policy]).await.unwrap()
}

pub async fn replica(proxy: &Running) -> Value {
    get(proxy.gateway.admin.unwrap(), "/api/replicas").await.json()["replicas"][0].clone()
}

/// A greedy completion through the proxy.
pub async fn complete(proxy: &Running, tokens: u32) -> Message {
    let prompt: Vec<u32> = (0..24).map(|at| 100 + at % 8).collect();
    let body = json!({"model": "toy", "prompt": prompt, "max_tokens": tokens, "temperature": 0});
    let request = post("/v1/completions", "", body.to_string().as_bytes());
    Wire::connect(proxy.gateway.addresses[0]).await.ask(request).await
}

/// The reason why a completion through the proxy was not speculated on.
pub async fn reason(proxy: &Running) -> String {
    let answer = complete(proxy, 12).await;
    assert_eq!(answer.head.status(), 200, "{}", answer.text());
    answer.head.get("x-foretell-reason").unwrap_or("none").to_owned()
}

/// Polls until `so` is true.
pub async fn until<F: Future<Output = bool>>(within: Duration, mut so: impl FnMut() -> F) {
    let begun = Instant::now();
    while !so().await {
        assert!(begun.elapsed() < within, "not within {within:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
