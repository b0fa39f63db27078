//! TGI v3 (as read at db931fc): text only, errors with a kind, and a native stream that has no end
//! mark.

mod generate;
mod openai;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use serde_json::{Value, json};

use super::fields::{Fields, Wrong};
use super::house::{House, Setup};
use super::http::{Out, Request, Sent};
use super::openai::Exposition;
use super::server::Engine;

const VERSION: &str = "3.3.7";

/// Attention kernel, which sets the granularity of the prefix cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attention {
    Flashinfer,
    Flashdecoding,
    Paged,
}

impl Attention {
    fn block(self) -> usize {
        match self {
            Self::Flashinfer => 1,
            Self::Flashdecoding => 256,
            // Plain paged attention has no prefix caching.
            Self::Paged => 0,
        }
    }
}

/// Start options of the launcher. The attention sets the block size of the setup.
#[derive(Clone, Debug)]
pub struct Options {
    pub attention: Attention,
    /// The tokenizer prepends a special token to every text, as for many models.
    pub bos: bool,
    /// `--max-client-batch-size`
    pub max_client_batch_size: usize,
    /// `--max-top-n-tokens`
    pub max_top_n_tokens: u64,
    /// `--max-stop-sequences`
    pub max_stop_sequences: usize,
    /// `--max-concurrent-requests`
    pub max_concurrent_requests: usize,
    /// `--enable-prefill-logprobs`
    pub prefill_logprobs: bool,
    pub setup: Setup,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            attention: Attention::Flashinfer,
            bos: false,
            max_client_batch_size: 4,
            max_top_n_tokens: 5,
            max_stop_sequences: 4,
            max_concurrent_requests: 128,
            prefill_logprobs: false,
            setup: Setup { blocks: 262_144, ..Setup::default() },
        }
    }
}

/// Internal failure of the next generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// The shard fails: 424.
    Generation,
    /// The shard stops answering: 500.
    Incomplete,
}

impl Trouble {
    fn refusal(self, streamed: bool) -> Refusal {
        match self {
            Self::Generation => Refusal(
                424,
                "generation",
                "Request failed during generation: Server error: CUDA error".into(),
            ),
            Self::Incomplete if streamed => {
                Refusal(500, "incomplete_generation_stream", "Incomplete generation stream".into())
            }
            Self::Incomplete => Refusal(500, "incomplete_generation", "Incomplete generation".into()),
        }
    }
}

pub struct Tgi {
    pub house: Arc<House>,
    pub options: Options,
    /// Applies to the next generation.
    pub trouble: Mutex<Option<Trouble>>,
    busy: AtomicUsize,
}

/// A refusal: status, `error_type`, message. Without a kind it is a plain text from the framework,
/// before the handler.
#[derive(Clone, Debug)]
struct Refusal(u16, &'static str, String);

impl Refusal {
    fn validation(message: impl std::fmt::Display) -> Self {
        Self(422, "validation", format!("Input validation error: {message}"))
    }

    fn body(&self) -> Value {
        json!({"error": self.2, "error_type": self.1})
    }
}

impl From<Wrong> for Refusal {
    fn from(wrong: Wrong) -> Self {
        let status = if wrong.field == "body" { 400 } else { 422 };
        let text = format!("Failed to deserialize the JSON body into the target type: {wrong}");
        Self(status, "", text)
    }
}

/// Admission of one request by the router.
struct Ticket<'a>(&'a AtomicUsize);

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Tgi {
    pub fn new(options: Options) -> Self {
        let setup = Setup { block: options.attention.block(), ..options.setup.clone() };
        Self { house: House::new(setup), options, trouble: Mutex::default(), busy: AtomicUsize::new(0) }
    }

    async fn route(&self, request: Request, out: &mut Out) -> Sent {
        let done = match request.route() {
            ("GET", "/health" | "/ping") => return out.empty(200).await,
            ("GET", "/metrics") => return out.text(200, &self.metrics()).await,
            ("GET", "/info") => Ok(self.info()),
            ("GET", "/v1/models") => Ok(self.models()),
            ("POST", "/tokenize") => self.tokenize(&request),
            ("POST", "/chat_tokenize") => self.chat_tokenize(&request),
            ("POST", "/" | "/generate" | "/generate_stream" | "/v1/completions" | "/v1/chat/completions") => {
                let Some(_ticket) = self.enter() else {
                    let refusal = Refusal(429, "overloaded", "Model is overloaded".into());
                    return self.refuse(&refusal, out).await;
                };
                return match request.path.as_str() {
                    "/v1/completions" => self.completions(&request, out).await,
                    "/v1/chat/completions" => self.chat(&request, out).await,
                    _ => self.generate(&request, out).await,
                };
            }
            _ => return out.empty(404).await,
        };
        match done {
            Ok(body) => out.json(200, &body).await,
            Err(refusal) => self.refuse(&refusal, out).await,
        }
    }

    async fn refuse(&self, refusal: &Refusal, out: &mut Out) -> Sent {
        if refusal.1.is_empty() {
            return out.text(refusal.0, &refusal.2).await;
        }
        out.json(refusal.0, &refusal.body()).await
    }

    fn enter(&self) -> Option<Ticket<'_>> {
        let before = self.busy.fetch_add(1, Ordering::SeqCst);
        let ticket = Ticket(&self.busy);
        (before < self.options.max_concurrent_requests).then_some(ticket)
    }

    /// A client cannot disable the special tokens, but the router leaves them out after a template
    /// [unverified: from memory].
    fn encode(&self, text: &str, templated: bool) -> Vec<u32> {
        let bos = (self.options.bos && !templated).then(|| self.house.toy.eos());
        bos.into_iter().chain(self.house.toy.encode(text)).collect()
    }

    fn info(&self) -> Value {
        let (options, longest) = (&self.options, self.house.setup.max_len);
        json!({"model_id": self.house.setup.model, "model_sha": null, "model_pipeline_tag": "text-generation",
            "max_concurrent_requests": options.max_concurrent_requests, "max_best_of": 2,
            "max_stop_sequences": options.max_stop_sequences, "max_input_tokens": longest - 1,
            "max_total_tokens": longest, "validation_workers": 2,
            "max_client_batch_size": options.max_client_batch_size, "router": "text-generation-router",
            "version": VERSION, "sha": "db931fc", "docker_label": null})
    }

    fn models(&self) -> Value {
        let model = &self.house.setup.model;
        // The owner is the model itself [unverified: from memory].
        json!({"object": "list", "data": [{"id": model, "object": "model", "created": 0, "owned_by": model}]})
    }

    fn metrics(&self) -> String {
        let (house, mut out) = (&self.house, Exposition::default());
        let longest = house.setup.max_len;
        out.gauge("tgi_queue_size", "", format!("{:?}", house.waiting() as f64));
        out.gauge("tgi_batch_current_size", "", format!("{:?}", house.running() as f64));
        out.gauge("tgi_batch_current_max_tokens", "", house.running() * longest);
        out.gauge("tgi_batch_total_tokens", "", house.setup.max_running * longest);
        let requests = house.since_start(|tally| tally.sequences);
        let skipped = house.since_start(|tally| tally.cached);
        out.add("histogram", "tgi_request_skipped_tokens_sum", "", skipped);
        out.add("histogram", "tgi_request_skipped_tokens_count", "", requests);
        out.add("histogram", "tgi_request_queue_duration_sum", "", "0.0");
        out.add("histogram", "tgi_request_queue_duration_count", "", requests);
        out.counter("tgi_request_count", "", requests);
        out.counter("tgi_request_success", "", house.since_start(|tally| tally.finished));
        out.0
    }

    /// Ids with their offsets in the text, in characters.
    fn spelled(&self, text: &str, templated: bool) -> Value {
        let ids = self.encode(text, templated);
        let special = usize::from(self.options.bos && !templated);
        let end = |count: usize| self.house.toy.decode(&ids[special..count], false).chars().count();
        let token = |(at, &id): (usize, &u32)| {
            if at < special {
                return json!({"id": id, "text": "", "start": 0, "stop": 0});
            }
            let (start, stop) = (end(at), end(at + 1));
            let part: String = text.chars().skip(start).take(stop - start).collect();
            json!({"id": id, "text": part, "start": start, "stop": stop})
        };
        ids.iter().enumerate().map(token).collect()
    }

    fn tokenize(&self, request: &Request) -> Result<Value, Refusal> {
        Ok(self.spelled(&inputs(&Fields::of(request)?)?, false))
    }

    fn chat_tokenize(&self, request: &Request) -> Result<Value, Refusal> {
        let text = self.templated(&Fields::of(request)?)?;
        Ok(json!({"tokenize_response": self.spelled(&text, true), "templated_text": text}))
    }

    fn templated(&self, fields: &Fields) -> Result<String, Refusal> {
        let missing =
            || Wrong { field: "messages".into(), want: "a list of messages", got: "nothing".into() };
        let messages = fields.get("messages").filter(|messages| messages.is_array()).ok_or_else(missing)?;
        let refusal = |error: String| Refusal(422, "template_error", format!("Template error: {error}"));
        self.house.toy.chat(messages, true).map_err(refusal)
    }
}

/// The prompt text; ids cannot be sent.
fn inputs(fields: &Fields) -> Result<String, Wrong> {
    let missing = || Wrong { field: "inputs".into(), want: "a string", got: "nothing".into() };
    fields.text("inputs")?.ok_or_else(missing)
}

impl Engine for Tgi {
    fn house(&self) -> &Arc<House> {
        &self.house
    }

    fn serve<'a>(&'a self, request: Request, out: &'a mut Out) -> BoxFuture<'a, Sent> {
        self.route(request, out).boxed()
    }
}
