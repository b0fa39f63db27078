//! Detects a vLLM that may be the CPU build, by the labels of one metric.
//!
//! No endpoint names the device. `vllm:cache_config_info` has the cache's configuration as labels,
//! and the CPU build fills some of them in differently (read in the wheels of 0.15.1, 0.17.0,
//! 0.19.1, 0.20.2, 0.22.0, 0.23.0, 0.28.0, 0.29.0, 0.30.0 and 0.32.0):
//!
//! * up to 0.19 `cpu_kvcache_space_bytes`, always a number on the CPU and `None` on a GPU;
//! * from 0.20 on `kv_cache_memory_bytes` is a number where `VLLM_CPU_KVCACHE_SPACE` is set, and on
//!   a GPU only with `--kv-cache-memory-bytes`;
//! * the default block size is 128 on the CPU.
//!
//! A CPU build from 0.20 on with `--block-size` and without `VLLM_CPU_KVCACHE_SPACE` shows none of
//! these.

use crate::shared;

/// The metric whose labels hold the cache's configuration.
const CONFIGURATION: &str = "vllm:cache_config_info";
/// Default tokens per block of the CPU build.
const BLOCK: &str = "128";

/// The sign that this may be the CPU build, in words; `None` if there is none.
pub(super) fn may_be_cpu(metrics: &str) -> Option<&'static str> {
    let label = |name| shared::label(metrics, CONFIGURATION, name);
    let is_number = |value: &String| value.parse::<f64>().is_ok();
    let Some(block) = label("block_size") else {
        return Some("it does not report the configuration of its cache");
    };
    if let Some(space) = label("cpu_kvcache_space_bytes") {
        return is_number(&space).then_some("cpu_kvcache_space_bytes is set");
    }
    if label("kv_cache_memory_bytes").as_ref().is_some_and(is_number) {
        return Some("kv_cache_memory_bytes is set");
    }
    let chosen = label("user_specified_block_size").is_none_or(|chosen| chosen != "False");
    (!chosen && block == BLOCK).then_some("its blocks have 128 tokens by default")
}

/// Reason why `score` is not used there, and what the operator can do about it.
pub(super) fn caution(metrics: &str) -> String {
    let sign = may_be_cpu(metrics).unwrap_or("its metrics");
    format!(
        "its first call with logprobs might crash it. This may be the CPU build ({sign}), which compiles C++ at that \
         call, answers no request meanwhile, and crashes if no C++ compiler works there; no endpoint shows that. Send \
         one such request when a crash does no harm (a completion with \"logprobs\": 1). If it is answered, name score \
         in verify.allow, or measure it with foretell probe --score"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(labels: &str) -> String {
        format!("# TYPE vllm:cache_config_info gauge\n{CONFIGURATION}{{{labels}}} 1.0\n")
    }

    #[test]
    fn the_recorded_cpu_build_is_recognised() {
        let golden: serde_json::Value =
            serde_json::from_str(include_str!("../../../tests/goldens/vllm/metrics.json")).unwrap();
        assert_eq!(may_be_cpu(golden["body"].as_str().unwrap()), Some("kv_cache_memory_bytes is set"));
    }

    #[test]
    fn up_to_0_19_one_label_decides() {
        let at = |space: &str| {
            with(&format!(
                "block_size=\"128\",cpu_kvcache_space_bytes=\"{space}\",kv_cache_memory_bytes=\"4096\""
            ))
        };
        assert_eq!(may_be_cpu(&at("4294967296")), Some("cpu_kvcache_space_bytes is set"));
        assert_eq!(may_be_cpu(&at("None")), None, "a GPU whose operator has chosen both");
    }

    #[test]
    fn later_the_size_of_the_cache_or_of_a_block_raises_doubt() {
        let at = |block: &str, bytes: &str, chosen: &str| {
            let labels = format!(
                "_block_size_resolved=\"True\",block_size=\"{block}\",kv_cache_memory_bytes=\"{bytes}\",\
                 user_specified_block_size=\"{chosen}\""
            );
            may_be_cpu(&with(&labels)).is_some()
        };
        assert!(at("32", "1073741824", "True"));
        assert!(at("128", "None", "False"));
        assert!(!at("128", "None", "True") && !at("16", "None", "False") && !at("64", "None", "False"));
    }

    #[test]
    fn metrics_without_the_configuration_are_no_proof_of_a_gpu() {
        for metrics in ["", "process_start_time_seconds 1.0\n", &with("engine=\"0\"")] {
            assert_eq!(may_be_cpu(metrics), Some("it does not report the configuration of its cache"));
        }
    }

    #[test]
    fn the_caution_names_the_risk_and_the_remedy() {
        let caution = caution(&with("block_size=\"32\",kv_cache_memory_bytes=\"1\""));
        for said in ["kv_cache_memory_bytes is set", "C++ compiler", "logprobs", "verify.allow", "--score"] {
            assert!(caution.contains(said), "{caution}");
        }
    }
}
