//! TensorRT-LLM's `trtllm-serve` (as read in mid-2026): a schema that forbids unknown fields, ids
//! only without text, penalties that can skip the prompt, and a cache that shares parts of blocks.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use serde_json::{Value, json};

use super::batch::Batch;
use super::fields::{Fields, Wrong};
use super::frontend::{Ask, Form, answer, chat_prompt, sampling, sequences, unfit, usage_with_cached};
use super::house::{Defaults, House, Setup};
use super::http::{Out, Request, Sent};
use super::openai::{Exposition, created};
use super::sample::Pipeline;
use super::sequence::{Finish, Hold, Piece, Sequence};
use super::server::Engine;

const VERSION: &str = "1.3.0";

/// Known fields of a completion only.
const COMPLETION: &[&str] = &["prompt", "best_of", "echo", "logprobs", "suffix", "return_context_logits"];
/// Known fields of a chat only.
const CHAT: &[&str] = &[
    "messages",
    "prompt_token_ids",
    "logprobs",
    "top_logprobs",
    "max_completion_tokens",
    "tools",
    "tool_choice",
    "add_generation_prompt",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "reasoning_effort",
    "best_of",
];
const BOTH: &[&str] = &[
    "model",
    "frequency_penalty",
    "logit_bias",
    "max_tokens",
    "n",
    "presence_penalty",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "temperature",
    "top_p",
    "user",
    "lora_request",
    "prompt_ignore_length",
    "use_beam_search",
    "top_k",
    "top_p_min",
    "min_p",
    "repetition_penalty",
    "length_penalty",
    "early_stopping",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
    "detokenize",
    "thinking_token_budget",
    "add_special_tokens",
    "response_format",
    "disaggregated_params",
    "priority",
    "conversation_params",
];

/// Start options of the server.
#[derive(Clone, Debug)]
pub struct Options {
    /// `kv_cache_config.enable_block_reuse`
    pub block_reuse: bool,
    /// `kv_cache_config.enable_partial_reuse`: a matching part of a block is copied.
    pub partial_reuse: bool,
    /// `kv_cache_config.tokens_per_block`
    pub tokens_per_block: usize,
    /// `return_perf_metrics`: the Prometheus route.
    pub perf_metrics: bool,
    /// `/_internal/tokenize` exists in newer builds.
    pub tokenizes: bool,
    /// The setup's block size is overridden by the options above.
    pub setup: Setup,
}

impl Default for Options {
    fn default() -> Self {
        let mut setup = Setup { blocks: 262_144, ..Setup::default() };
        // The server checks once a second for disconnected clients.
        setup.pace.cancel = Duration::from_secs(1);
        Self {
            block_reuse: true,
            partial_reuse: true,
            tokens_per_block: 32,
            perf_metrics: false,
            tokenizes: true,
            setup,
        }
    }
}

pub struct Trtllm {
    pub house: Arc<House>,
    pub options: Options,
    /// Statistics that `/metrics` returns once.
    iterations: Mutex<VecDeque<Value>>,
}

/// A refusal: its status, kind and message.
#[derive(Clone, Debug)]
pub struct Refusal(u16, &'static str, String);

impl Refusal {
    fn bad(message: impl Into<String>) -> Self {
        Self(400, "BadRequestError", message.into())
    }
}

impl From<Wrong> for Refusal {
    fn from(wrong: Wrong) -> Self {
        Self::bad(format!("[{{'type': 'type_error', 'loc': ('body',), 'msg': '{wrong}'}}]"))
    }
}

/// A parsed request.
struct Job {
    ask: Ask,
    sequences: Vec<Sequence>,
    detokenize: bool,
    context_logits: bool,
}

struct Told<'a> {
    house: &'a Arc<House>,
    job: &'a Job,
}

impl Form for Told<'_> {
    fn house(&self) -> &Arc<House> {
        self.house
    }

    fn dress(&self, choice: &mut Value, sequence: &Sequence, pieces: &[Piece]) {
        choice["stop_reason"] = match &sequence.finish {
            Some(Finish::StopText(text)) => json!(text),
            Some(Finish::StopToken(token)) => json!(token),
            _ => Value::Null,
        };
        if self.job.ask.chat {
            return;
        }
        choice["disaggregated_params"] = Value::Null;
        choice["token_ids"] = Value::Null;
        if !self.job.detokenize {
            choice["text"] = json!("");
            choice["token_ids"] = pieces.iter().map(|piece| piece.token).collect();
        }
        if !self.job.ask.stream {
            choice["context_logits"] = self.context_logits(sequence);
        }
    }

    fn usage(&self, batch: &Batch, ask: &Ask) -> Value {
        usage_with_cached(batch, ask.n)
    }

    /// Every event has the number of cached tokens (`postprocess_handlers.py`).
    fn running(&self, sequence: &Sequence) -> Value {
        let (input, output) = (sequence.prompt, sequence.output().len());
        json!({"prompt_tokens": input, "completion_tokens": output, "total_tokens": input + output,
            "prompt_tokens_details": {"cached_tokens": sequence.cached}})
    }
}

impl Told<'_> {
    /// A row for each token of the prompt that was computed in this call, over the whole
    /// vocabulary.
    fn context_logits(&self, sequence: &Sequence) -> Value {
        if !self.job.context_logits {
            return Value::Null;
        }
        let row = |at: usize| json!(self.house.toy.row(&sequence.context, at + 1).0);
        (sequence.cached..sequence.prompt).map(row).collect()
    }
}

impl Trtllm {
    pub fn new(options: Options) -> Self {
        let block = match (options.block_reuse, options.partial_reuse) {
            (false, _) => 0,
            // Parts of blocks are shared, so the granularity is one token.
            (true, true) => 1,
            (true, false) => options.tokens_per_block,
        };
        let setup = Setup { block, ..options.setup.clone() };
        Self { house: House::new(setup), options, iterations: Mutex::default() }
    }

    async fn route(&self, request: Request, out: &mut Out) -> Sent {
        let done = match request.route() {
            ("GET", "/health") => return out.empty(200).await,
            ("GET", "/version") => Ok(json!({"version": VERSION})),
            ("GET", "/v1/models") => Ok(self.models()),
            ("GET", "/server_info") => Ok(json!({"disaggregated_params": null})),
            ("GET", "/metrics") => Ok(self.iterations.lock().drain(..).collect()),
            ("GET", "/perf_metrics") => Ok(json!([])),
            ("GET", "/prometheus/metrics") if self.options.perf_metrics => {
                return out.text(200, &self.prometheus()).await;
            }
            ("POST", "/_internal/tokenize") if self.options.tokenizes => self.tokenize(&request),
            ("POST", "/v1/completions") => return self.generate(&request, false, out).await,
            ("POST", "/v1/chat/completions") => return self.generate(&request, true, out).await,
            _ => return out.json(404, &json!({"detail": "Not Found"})).await,
        };
        match done {
            Ok(body) => out.json(200, &body).await,
            Err(refusal) => refuse(&refusal, out).await,
        }
    }

    fn models(&self) -> Value {
        json!({"object": "list", "data": [{"id": self.house.setup.model, "object": "model", "created": created(),
            "owned_by": "tensorrt_llm"}]})
    }

    fn tokenize(&self, request: &Request) -> Result<Value, Refusal> {
        let fields = strict(request, &["model", "prompt"])?;
        let prompt = fields.text("prompt")?.ok_or_else(|| Refusal::bad("prompt: Field required"))?;
        let tokens = self.house.toy.encode(&prompt);
        Ok(json!({"count": tokens.len(), "tokens": tokens}))
    }

    async fn generate(&self, request: &Request, chat: bool, out: &mut Out) -> Sent {
        let mut job = match self.job(request, chat) {
            Ok(job) => job,
            Err(refusal) => return refuse(&refusal, out).await,
        };
        let (sequences, ask) = (std::mem::take(&mut job.sequences), job.ask);
        let before = self.house.tally();
        let sent = answer(&Told { house: &self.house, job: &job }, &ask, sequences, out).await;
        let after = self.house.tally();
        self.note_iteration(after.computed - before.computed, after.cached - before.cached);
        sent
    }

    /// Statistics of steps wait in a queue until they are read.
    fn note_iteration(&self, tokens: usize, reused: usize) {
        let mut queue = self.iterations.lock();
        let iteration = self.house.since_start(|tally| tally.sequences);
        let max = self.house.setup.blocks;
        let used = (self.house.kv_usage() * max as f64) as usize;
        queue.push_back(json!({"iter": iteration, "numActiveRequests": self.house.running(),
            "numQueuedRequests": self.house.waiting(), "maxNumActiveRequests": self.house.setup.max_running,
            "numContextTokens": tokens,
            "kvCacheStats": {"maxNumBlocks": max, "usedNumBlocks": used, "freeNumBlocks": max - used.min(max),
                "tokensPerBlock": self.options.tokens_per_block, "reusedBlocks": reused / self.options.tokens_per_block}}));
        // The oldest ones are dropped if they are not read.
        if queue.len() > 1000 {
            queue.pop_front();
        }
    }

    fn job(&self, request: &Request, chat: bool) -> Result<Job, Refusal> {
        let known = [BOTH, if chat { CHAT } else { COMPLETION }].concat();
        let fields = strict(request, &known)?;
        if fields.get("model").is_none() {
            return Err(Refusal::bad(
                "[{'type': 'missing', 'loc': ('body', 'model'), 'msg': 'Field required'}]",
            ));
        }
        if !fields.flag("stream")? && fields.get("stream_options").is_some() {
            return Err(Refusal::bad("Stream options can only be defined when stream is true."));
        }
        if fields.get("suffix").is_some() {
            return Err(Refusal::bad("suffix is not supported"));
        }
        let prompts = self.prompts(&fields, chat)?;
        if let Some(message) = unfit(&self.house, &prompts) {
            return Err(Refusal::bad(message));
        }
        let mut ask = Ask::of(&fields, chat)?;
        if ask.stream {
            // Only here usage is on by default.
            let options = fields.object("stream_options")?;
            ask.usage = !options.0.is_empty() && options.get("include_usage").is_none_or(|on| on == true);
            ask.continuous = ask.usage && options.flag("continuous_usage_stats")?;
        }
        let detokenize = fields.get("detokenize").is_none_or(|detokenize| detokenize == true);
        let sampling = self.sampling(&fields, chat)?;
        let seed = fields.uint("seed")?;
        let sequences = sequences(&self.house, &prompts, &sampling, seed, ask.n, Hold::Longest);
        Ok(Job { ask, sequences, detokenize, context_logits: fields.flag("return_context_logits")? })
    }

    fn prompts(&self, fields: &Fields, chat: bool) -> Result<Vec<Vec<u32>>, Refusal> {
        if !chat {
            return Ok(fields.prompts(&self.house.toy)?);
        }
        match fields.ids("prompt_token_ids")? {
            Some(ids) => Ok(vec![ids]),
            None => Ok(vec![chat_prompt(&self.house, fields).map_err(Refusal::bad)?]),
        }
    }

    fn sampling(&self, fields: &Fields, chat: bool) -> Result<super::sample::Sampling, Refusal> {
        let beyond = [
            "use_beam_search",
            "best_of",
            "echo",
            "response_format",
            "tools",
            "disaggregated_params",
            "lora_request",
            "thinking_token_budget",
            "truncate_prompt_tokens",
        ];
        if let Some(message) = fields.beyond(&beyond) {
            return Err(Refusal::bad(message));
        }
        let ignored = fields.uint("prompt_ignore_length")?.unwrap_or(0) as usize;
        let asked = match fields.uint("max_completion_tokens")? {
            Some(asked) => Some(asked),
            None => fields.uint("max_tokens")?,
        };
        let longest = self.house.setup.max_len as u64;
        if asked == Some(0) {
            return Err(Refusal::bad("max_tokens must be positive"));
        }
        // The default is the remaining context. Missing parameters come from the model's own
        // defaults [unverified: builds differ in this].
        let defaults: Defaults = self.house.defaults.lock().clone();
        let max = asked.or(defaults.max_new_tokens).unwrap_or(longest) as usize;
        let mut own = sampling(&self.house, fields, Pipeline::trtllm(ignored), &defaults, max)?;
        if let Some(&(id, bias)) = own.bias.iter().find(|(_, bias)| bias.abs() > 100.0) {
            return Err(Refusal::bad(format!(
                "logit_bias value for token ID {id} must be in [-100, 100], got {bias}"
            )));
        }
        if !(0.0..=1.0).contains(&own.top_p) || !(0.0..=1.0).contains(&own.min_p) || own.temperature < 0.0 {
            return Err(Refusal::bad(format!(
                "require temperature >= 0 and 0 <= top_p <= 1, got {fields:?} ({chat})"
            )));
        }
        own.min_tokens = fields.uint("min_tokens")?.unwrap_or(0) as usize;
        Ok(own)
    }

    fn prometheus(&self) -> String {
        let (house, mut out) = (&self.house, Exposition::default());
        let labels = format!("model_name=\"{}\",engine_type=\"pytorch\"", house.setup.model);
        let rate = house.since_start(|tally| tally.cached) as f64
            / house.since_start(|tally| tally.prompt).max(1) as f64;
        for (name, value) in [
            ("num_requests_running", house.running() as f64),
            ("num_requests_waiting", house.waiting() as f64),
            ("kv_cache_utilization", house.kv_usage()),
            ("kv_cache_hit_rate", rate),
            ("kv_cache_tokens_per_block", self.options.tokens_per_block as f64),
            ("kv_cache_iter_partial_reused_blocks", f64::from(u8::from(self.options.partial_reuse))),
        ] {
            out.gauge(&format!("trtllm_{name}"), &labels, format!("{value:?}"));
        }
        out.0
    }
}

/// The body's fields, all of which must be known.
fn strict(request: &Request, known: &[&str]) -> Result<Fields, Refusal> {
    let fields = Fields::of(request)?;
    match fields.unknown(known) {
        Some(name) => Err(Refusal::bad(format!(
            "[{{'type': 'extra_forbidden', 'loc': ('body', '{name}'), 'msg': 'Extra inputs are not permitted'}}]"
        ))),
        None => Ok(fields),
    }
}

async fn refuse(Refusal(status, of, message): &Refusal, out: &mut Out) -> Sent {
    let body = json!({"object": "error", "message": message, "type": of, "param": null, "code": status});
    out.json(*status, &body).await
}

impl Engine for Trtllm {
    fn house(&self) -> &Arc<House> {
        &self.house
    }

    fn serve<'a>(&'a self, request: Request, out: &'a mut Out) -> BoxFuture<'a, Sent> {
        self.route(request, out).boxed()
    }

    fn renewed(&self) {
        self.iterations.lock().clear();
    }
}
