//! vLLM's information and tokenizer routes.

use serde_json::{Value, json};

use super::super::fields::Fields;
use super::super::http::Request;
use super::super::openai::{Exposition, models};
use super::{Refusal, Vllm};

impl Vllm {
    pub(super) fn models(&self) -> Value {
        models(&self.house.setup.model, "vllm", self.house.setup.max_len)
    }

    pub(super) fn tokenize(&self, request: &Request) -> Result<Value, Refusal> {
        let fields = Fields::of(request)?;
        let toy = &self.house.toy;
        let tokens = match fields.text("prompt")? {
            Some(prompt) => toy.encode(&prompt),
            None => self.chat_prompt(&fields)?,
        };
        let name = |&id: &u32| toy.words.token(id).unwrap_or_default();
        let names = fields.flag("return_token_strs")?.then(|| tokens.iter().map(name).collect::<Vec<_>>());
        Ok(json!({"count": tokens.len(), "max_model_len": self.house.setup.max_len, "tokens": tokens,
            "token_strs": names}))
    }

    pub(super) fn detokenize(&self, request: &Request) -> Result<Value, Refusal> {
        let fields = Fields::of(request)?;
        let Some(tokens) = fields.ids("tokens")? else {
            return Err(Refusal::about("1 validation error:\n  tokens: Field required", "tokens"));
        };
        self.check_prompts(std::slice::from_ref(&tokens))?;
        Ok(json!({"prompt": self.house.toy.decode(&tokens, false)}))
    }

    /// The labels that distinguish the CPU build's cache from a GPU's.
    fn cache_bytes(&self) -> String {
        let bytes = if self.options.cpu { "4294967296" } else { "None" };
        match self.minor() {
            ..=19 => format!("cpu_kvcache_space_bytes=\"{bytes}\",kv_cache_memory_bytes=\"None\","),
            _ => format!("kv_cache_memory_bytes=\"{bytes}\","),
        }
    }

    pub(super) fn metrics(&self) -> String {
        let house = &self.house;
        let mut out = Exposition::default();
        let labels = format!("engine=\"0\",model_name=\"{}\"", house.setup.model);
        out.gauge("process_start_time_seconds", "", house.started() as f64 / 100.0);
        out.gauge("vllm:num_requests_running", &labels, format!("{:.1}", house.running() as f64));
        out.gauge("vllm:num_requests_waiting", &labels, format!("{:.1}", house.waiting() as f64));
        if self.minor() >= 29 {
            for (reason, waiting) in [("capacity", house.waiting()), ("deferred", 0)] {
                let labels = format!("{labels},reason=\"{reason}\"");
                out.gauge("vllm:num_requests_waiting_by_reason", &labels, format!("{:.1}", waiting as f64));
            }
        }
        if self.minor() <= 11 {
            // The old name, still exposed next to the new one.
            out.gauge("vllm:gpu_cache_usage_perc", &labels, house.kv_usage());
        }
        out.gauge("vllm:kv_cache_usage_perc", &labels, house.kv_usage());
        let mut counter = |name: &str, value: usize| {
            out.counter(&format!("vllm:{name}_total"), &labels, format!("{:.1}", value as f64));
            out.gauge(&format!("vllm:{name}_created"), &labels, house.started() as f64 / 100.0);
        };
        counter("prefix_cache_queries", house.since_start(|tally| tally.prompt));
        counter("prefix_cache_hits", house.since_start(|tally| tally.cached));
        counter("num_preemptions", 0);
        counter("prompt_tokens", house.since_start(|tally| tally.prompt));
        counter("generation_tokens", house.since_start(|tally| tally.generated));
        if self.options.speculates {
            counter("spec_decode_num_drafts", house.since_start(|tally| tally.generated) / 2);
            counter("spec_decode_num_draft_tokens", house.since_start(|tally| tally.generated));
            counter("spec_decode_num_accepted_tokens", house.since_start(|tally| tally.generated) / 2);
        }
        let finished = house.since_start(|tally| tally.finished);
        out.counter(
            "vllm:request_success_total",
            &format!("{labels},finished_reason=\"stop\""),
            finished as f64,
        );
        let config = format!(
            "block_size=\"{}\",cache_dtype=\"auto\",enable_prefix_caching=\"True\",engine=\"0\",{}num_gpu_blocks=\"{}\"",
            house.setup.block,
            self.cache_bytes(),
            house.setup.blocks
        );
        out.gauge("vllm:cache_config_info", &config, "1.0");
        out.0
    }
}
