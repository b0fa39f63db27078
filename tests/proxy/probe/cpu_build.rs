//! A vLLM that may be the CPU build: its first call with log-probabilities compiles C++, and
//! without a working compiler it ends the engine. So Foretell makes no such call until the operator
//! has named the verification method that needs it.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};

use super::house::{complete, proxy, replica, until, vllm};
use crate::client::FORCED;
use crate::fakes::vllm::{Options, Vllm};
use crate::fakes::{Fake, toy};

const LONG: Duration = Duration::from_mins(1);

async fn cpu_build(version: &'static str, compiler: bool) -> Fake<Vllm> {
    let change = |options: &mut Options| {
        options.cpu = true;
        options.compiler = compiler;
    };
    vllm(version, change).await
}

/// Output of `foretell probe URL --json`, by the test's own binary or the one in `FORETELL_BIN`.
async fn probed(fake: &Fake<Vllm>, more: &[&str], code: i32) -> Value {
    let binary = std::env::var_os("FORETELL_BIN")
        .map_or_else(|| PathBuf::from(env!("CARGO_BIN_EXE_foretell")), PathBuf::from);
    let mut command = Command::new(binary);
    command.args(["probe", &fake.url(), "--json", "--tokenizer"]).arg(toy::folder()).args(more);
    let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    assert_eq!(output.status.code(), Some(code), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn why_not_score(report: &Value) -> String {
    let missing = report["missing"].as_array().unwrap();
    let score = missing.iter().find(|missing| missing["method"] == "score");
    score.unwrap_or_else(|| panic!("{report:#}"))["why"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn the_probe_does_not_kill_one_without_a_compiler_and_names_the_remedy() {
    for (version, sign) in [("0.15.1", "cpu_kvcache_space_bytes"), ("0.32.0", "kv_cache_memory_bytes")] {
        let fake = cpu_build(version, false).await;
        let report = probed(&fake, &[], 0).await;
        assert_eq!(fake.house.fatal(), Vec::<String>::new(), "{report:#}");
        assert!(!fake.house.is_dead());
        assert_eq!(report["methods"], json!(["fan_out"]), "{report:#}");
        let why = why_not_score(&report);
        for said in [sign, "C++ compiler", "verify.allow", "--score"] {
            assert!(why.contains(said), "{why}");
        }
    }
}

#[tokio::test]
async fn score_is_measured_where_the_operator_names_it() {
    let fake = cpu_build("0.32.0", true).await;
    let report = probed(&fake, &["--score"], 0).await;
    assert_eq!(report["methods"], json!(["score", "fan_out"]), "{report:#}");
    assert_eq!(fake.house.fatal(), Vec::<String>::new());
}

#[tokio::test]
async fn where_naming_it_was_wrong_the_report_names_the_cause() {
    let fake = cpu_build("0.32.0", false).await;
    let report = probed(&fake, &["--score"], 2).await;
    assert_eq!(fake.house.fatal().len(), 1, "not asked again: {report:#}");
    assert!(report["notes"].to_string().contains("InvalidCxxCompiler"), "{report:#}");
}

/// The verification methods that the replica is shown to have after its probe, and the accepted
/// tokens of a forced request.
async fn speculated(fake: &Fake<Vllm>, more: &str) -> (Value, u64) {
    let proxy = proxy(fake.address, FORCED, more).await;
    until(LONG, || async { replica(&proxy).await["probe"]["calls"].is_u64() }).await;
    let answer = complete(&proxy, 40).await;
    assert_eq!(answer.head.get("x-foretell-path"), Some("speculated"), "{}", answer.text());
    let accepted = answer.json()["usage"]["foretell"]["accepted"].as_u64().unwrap();
    (replica(&proxy).await["verify"].clone(), accepted)
}

#[tokio::test]
async fn a_proxy_fans_out_there_until_score_is_named() {
    let fake = cpu_build("0.32.0", false).await;
    let (methods, accepted) = speculated(&fake, "").await;
    assert_eq!((methods, fake.house.fatal()), (json!(["fan_out"]), Vec::<String>::new()));
    assert!(accepted > 0);
    let generate = "/inference/v1/generate";
    // Called once to see if the route exists, without a token to compute.
    assert_eq!(fake.house.tally().calls.get(generate), Some(&1));

    let fake = cpu_build("0.32.0", true).await;
    let (methods, accepted) = speculated(&fake, "    verify: { allow: [score, fan_out] }\n").await;
    assert_eq!((methods, fake.house.fatal()), (json!(["score", "fan_out"]), Vec::<String>::new()));
    assert!(accepted > 0 && fake.house.tally().calls[generate] > 1);
}
