//! SGLang's information and tokenizer routes.

use serde_json::{Value, json};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use super::super::fields::Fields;
use super::super::http::Request;
use super::super::openai::{Exposition, models};
use super::{Refusal, Sglang};

pub(super) const VERSION: &str = "0.5.23";

/// A load, with its time and what had happened until then.
#[derive(Clone, Debug)]
pub(super) struct Snapshot {
    at: OffsetDateTime,
    steps: usize,
    prefills: usize,
    running: usize,
    waiting: usize,
    usage: f64,
}

/// A duration that a process measured at its start.
fn drawn(started: u64, salt: u64) -> f64 {
    1.0 + (started.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(salt) >> 40) as f64 / 1e7
}

impl Sglang {
    fn capacity(&self) -> usize {
        self.house.setup.block * self.house.setup.blocks
    }

    pub(super) fn models(&self) -> Value {
        models(&self.house.setup.model, "sglang", self.house.setup.max_len)
    }

    pub(super) fn model_info(&self) -> Value {
        json!({"model_path": self.house.setup.model, "tokenizer_path": self.house.setup.model, "is_generation": true,
            "preferred_sampling_params": null, "weight_version": self.house.weight_version(),
            "reasoning_parser": self.house.setup.reasoning_end.as_ref().map(|_| "deepseek-r1"), "tool_call_parser": null,
            "has_image_understanding": false, "has_audio_understanding": false, "model_type": "llama",
            "architectures": ["LlamaForCausalLM"]})
    }

    pub(super) fn server_info(&self) -> Value {
        json!({"model_path": self.house.setup.model, "served_model_name": self.house.setup.model,
            "page_size": self.house.setup.block.max(1), "context_length": self.house.setup.max_len,
            "enable_metrics": self.options.metrics, "enable_deterministic_inference": self.options.deterministic,
            "speculative_algorithm": null, "preferred_sampling_params": null,
            "weight_version": self.house.weight_version(), "disable_radix_cache": self.house.setup.block == 0,
            "random_seed": self.house.started() % 1_073_741_824, "startup_time": {"load_weight": drawn(self.house.started(), 1),
            "init_cuda_graph": drawn(self.house.started(), 2)},
            "sampling_defaults": "model", "incremental_streaming_output": false,
            "reasoning_parser": self.house.setup.reasoning_end.as_ref().map(|_| "deepseek-r1"),
            "chat_template": null, "max_total_num_tokens": self.capacity(), "internal_states": [{}], "version": VERSION})
    }

    /// The load as the scheduler published it last: at once at a prefill and while idle, else once
    /// in so many steps of decoding.
    pub(super) fn loads(&self) -> Value {
        let (house, capacity) = (&self.house, self.capacity());
        let now = OffsetDateTime::now_utc();
        let (steps, prefills) = (house.steps(), house.tally().sequences);
        let mut published = self.snapshot.lock();
        let due = published.as_ref().is_none_or(|last| {
            house.really_running() == 0
                || last.prefills != prefills
                || steps - last.steps >= self.options.publish_interval
        });
        if due {
            let (running, waiting, usage) = (house.running(), house.waiting(), house.kv_usage());
            *published = Some(Snapshot { at: now, steps, prefills, running, waiting, usage });
        }
        let Snapshot { at, running, waiting, usage, .. } = published.clone().expect("published above");
        let used = (usage * capacity as f64) as usize;
        json!({"timestamp": now.format(&Rfc3339).expect("a date"), "version": VERSION, "accelerator": "cpu",
            "num_accelerators": 1,
            "loads": [{"timestamp": at.unix_timestamp_nanos() as f64 * 1e-9, "dp_rank": 0, "num_running_reqs": running,
                "num_waiting_reqs": waiting, "num_waiting_uncached_tokens": 0, "num_used_tokens": used,
                "num_total_tokens": used, "max_total_num_tokens": capacity,
                "max_running_requests": house.setup.max_running, "token_usage": usage, "gen_throughput": 0.0,
                "cache_hit_rate": self.hit_rate(), "utilization": running as f64 / house.setup.max_running as f64}]})
    }

    fn hit_rate(&self) -> f64 {
        let prompt = self.house.since_start(|tally| tally.prompt);
        self.house.since_start(|tally| tally.cached) as f64 / prompt.max(1) as f64
    }

    pub(super) fn metrics(&self) -> String {
        let (house, capacity) = (&self.house, self.capacity());
        let mut out = Exposition::default();
        let labels = format!(
            "model_name=\"{}\",engine_type=\"unified\",tp_rank=\"0\",pp_rank=\"0\"",
            house.setup.model
        );
        let used = house.kv_usage() * capacity as f64;
        for (name, value) in [
            ("num_running_reqs", house.running() as f64),
            ("num_queue_reqs", house.waiting() as f64),
            ("token_usage", house.kv_usage()),
            ("num_used_tokens", used.floor()),
            ("kv_available_tokens", (capacity as f64 - used).ceil()),
            ("max_total_num_tokens", capacity as f64),
            ("utilization", house.running() as f64 / house.setup.max_running as f64),
            ("cache_hit_rate", self.hit_rate()),
            ("gen_throughput", 0.0),
            ("page_size", house.setup.block as f64),
        ] {
            out.gauge(&format!("sglang:{name}"), &labels, format!("{value:?}"));
        }
        out.counter("sglang:prompt_tokens_total", &labels, house.since_start(|tally| tally.prompt));
        out.counter("sglang:generation_tokens_total", &labels, house.since_start(|tally| tally.generated));
        out.0
    }

    pub(super) fn tokenize(&self, request: &Request) -> Result<Value, Refusal> {
        let fields = Fields::of(request)?;
        let longest = self.house.setup.max_len;
        let tokens = match fields.text("prompt")? {
            Some(prompt) => self.house.toy.encode(&prompt),
            None => self.chat_prompt(&fields)?,
        };
        Ok(json!({"tokens": tokens, "count": tokens.len(), "max_model_len": longest}))
    }

    pub(super) fn detokenize(&self, request: &Request) -> Result<Value, Refusal> {
        let fields = Fields::of(request)?;
        let skip = fields.get("skip_special_tokens").is_none_or(|skip| skip == true);
        let tokens = fields.ids("tokens")?.ok_or_else(|| Refusal::openai(400, "tokens: Field required"))?;
        if tokens.iter().any(|&id| id as usize >= self.house.toy.vocabulary()) {
            return Err(Refusal::openai(400, "token id out of range"));
        }
        Ok(json!({"text": self.house.toy.decode(&tokens, skip)}))
    }
}
