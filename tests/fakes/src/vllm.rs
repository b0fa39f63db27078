//! vLLM, from 0.11 to 0.33: an engine whose behaviour depends on its version and on its model
//! runner.
//!
//! * Prompt logprobs: short and right-aligned (V2), full length with garbage in the cache (V1).
//! * The call that ends the engine: V1, a cached prefix, `detokenize`; more than 1,024
//!   `allowed_token_ids` (V2).
//! * Routes by version and flag: 404, 403, open; `/v1/completions` with `prompt_logprobs` never
//!   reads the cache.
//! * Parsers of reasoning and tool calls: events, members and usage as recorded of 0.32.0; members
//!   that are null in complete answers.
//! * A grammar binds the output from the first token on, whatever the prompt is.
//! * Noise by position (V2) or from the start again (V1); only repetition counts the prompt.

mod answer;
mod chat;
mod completions;
mod generate;
mod info;
mod params;
mod streams;
mod tags;

use std::sync::Arc;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use serde_json::{Value, json};

use super::fields::{Fields, Wrong};
use super::house::{House, Setup};
use super::http::{Out, Request, Sent};
use super::server::Engine;
use crate::TokenId;
use streams::{ABORT, Streams};

const DERENDER: &str = "/v1/chat/completions/derender";

/// Model runner: the two differ in prompt logprobs under a cached prefix, and in noise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Runner {
    V1,
    V2,
}

/// Contents of uninitialised rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Garbage {
    Numbers,
    /// Not representable in JSON: the request fails.
    NotANumber,
}

/// Start options of `vllm serve`.
#[derive(Clone, Debug)]
pub struct Options {
    /// As in `/version`.
    pub version: &'static str,
    pub runner: Runner,
    /// `--enable-scale-out`
    pub scale_out: bool,
    /// `--enable-prompt-tokens-details`
    pub prompt_tokens_details: bool,
    /// A gateway in front of it replaces the `x-request-id` of every request.
    pub renamed: bool,
    /// `--max-logprobs`, -1 for no cap
    pub max_logprobs: i64,
    pub garbage: Garbage,
    /// The CPU build, as shown by its cache configuration.
    pub cpu: bool,
    /// A C++ compiler is available. Without one the first call with log-probabilities ends the CPU
    /// build.
    pub compiler: bool,
    /// Built-in speculative decoding, shown by the counters of `vllm:spec_decode_*`.
    pub speculates: bool,
    /// `eos_token_id` of its generation config, besides the tokenizer's own end of text: the engine
    /// takes them as stop tokens of every request.
    pub other_ends: Vec<TokenId>,
    pub setup: Setup,
}

impl Options {
    /// Options of one of the known versions: 0.11.0, 0.15.1, 0.24.0, 0.29.0, 0.32.0 (the CPU build)
    /// and 0.33.0.
    pub fn of(version: &'static str) -> Self {
        let minor = minor(version);
        let cpu = minor == 32;
        let runner = if minor >= 29 && !cpu { Runner::V2 } else { Runner::V1 };
        let setup = Setup { block: if cpu { 128 } else { 16 }, ..Setup::default() };
        Self {
            version,
            runner,
            scale_out: false,
            prompt_tokens_details: false,
            renamed: false,
            max_logprobs: 20,
            garbage: Garbage::Numbers,
            cpu: false,
            compiler: true,
            speculates: false,
            other_ends: Vec::new(),
            setup,
        }
    }
}

/// Parameters of vLLM that this fake lacks.
const BEYOND: &[&str] = &[
    "bad_words",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "best_of",
    "suffix",
    "use_beam_search",
    "logprob_token_ids",
    "prompt_logprob_token_ids",
    "thinking_token_budget",
    "repetition_detection",
    "truncate_prompt_tokens",
    "prompt_embeds",
];

fn minor(version: &str) -> u32 {
    version.split('.').nth(1).and_then(|minor| minor.parse().ok()).unwrap_or(0)
}

pub struct Vllm {
    pub house: Arc<House>,
    pub options: Options,
    streams: Streams,
}

/// A refusal: status, kind, message and the parameter that it is about.
#[derive(Clone, Debug)]
pub struct Refusal(u16, &'static str, String, Option<String>);

impl Refusal {
    fn bad(message: impl Into<String>) -> Self {
        Self(400, "BadRequestError", message.into(), None)
    }

    fn about(message: impl Into<String>, param: &'static str) -> Self {
        Self(400, "BadRequestError", message.into(), Some(param.to_owned()))
    }

    fn broken(message: impl Into<String>) -> Self {
        Self(500, "InternalServerError", message.into(), None)
    }
}

impl From<Wrong> for Refusal {
    fn from(wrong: Wrong) -> Self {
        let position =
            if wrong.field == "body" { "body.1".to_owned() } else { format!("body.{}", wrong.field) };
        Self(400, "Bad Request", format!("1 validation error:\n  {wrong}"), Some(position))
    }
}

impl Vllm {
    pub fn new(options: Options) -> Self {
        let house = House::new(options.setup.clone());
        Self { house, options, streams: Streams::default() }
    }

    fn minor(&self) -> u32 {
        minor(self.options.version)
    }

    async fn route(&self, request: Request, out: &mut Out) -> Sent {
        let done = match request.route() {
            ("GET", "/health") => return out.empty(if self.house.is_dead() { 503 } else { 200 }).await,
            ("GET", "/metrics") => return out.text(200, &self.metrics()).await,
            // Without `--enable-server-load-tracking` the load stays 0.
            ("GET", "/load") => return out.json(200, &json!({"server_load": 0})).await,
            ("GET", "/version") => return out.json(200, &json!({"version": self.options.version})).await,
            ("GET", "/v1/models") => return out.json(200, &self.models()).await,
            ("POST", "/tokenize") => self.tokenize(&request),
            ("POST", "/detokenize") => self.detokenize(&request),
            ("POST", path) if self.is_scale_out(path) => match self.scale_out_open() {
                Ok(()) if path == ABORT => match self.streams.abort(&request) {
                    Ok(()) => return out.empty(200).await,
                    Err(refusal) => Err(refusal),
                },
                Ok(()) if path == "/inference/v1/generate" => return self.generate(&request, out).await,
                Ok(()) if path == DERENDER => self.derender(&request),
                Ok(()) => self.render(&request),
                Err(refusal) => Err(refusal),
            },
            ("POST", "/v1/completions") => return self.completions(&request, out).await,
            ("POST", "/v1/chat/completions") => return self.chat(&request, out).await,
            (_, "/v1/completions" | "/v1/chat/completions" | "/tokenize" | "/detokenize") => {
                return out.json(405, &json!({"detail": "Method Not Allowed"})).await;
            }
            _ => return out.json(404, &json!({"detail": "Not Found"})).await,
        };
        match done {
            Ok(body) => out.json(200, &body).await,
            Err(refusal) => self.refuse(&refusal, out).await,
        }
    }

    /// The routes of token-in/token-out, by version.
    fn is_scale_out(&self, path: &str) -> bool {
        match path {
            "/inference/v1/generate" | "/v1/chat/completions/render" => self.minor() >= 15,
            "/v1/completions/render" | DERENDER => self.minor() >= 24,
            ABORT => self.minor() >= 32,
            _ => false,
        }
    }

    fn scale_out_open(&self) -> Result<(), Refusal> {
        if self.minor() >= 32 && !self.options.scale_out {
            let message = "This endpoint is disabled. Start the server with --enable-scale-out to use it.";
            return Err(Refusal(403, "PermissionDeniedError", message.to_owned(), None));
        }
        Ok(())
    }

    /// The first rank of a token compiles C++, even with `--enforce-eager`; recorded with 0.32.0
    /// without a compiler.
    fn compile(&self) -> Result<(), Refusal> {
        if self.options.compiler {
            return Ok(());
        }
        self.house.kill_by("log-probabilities where no C++ compiler works");
        Err(Refusal::broken("EngineCore encountered an issue. See stack trace (above) for the root cause."))
    }

    async fn refuse(&self, Refusal(status, of, message, param): &Refusal, out: &mut Out) -> Sent {
        let body = json!({"error": {"message": message, "type": of, "param": param, "code": status}});
        out.json(*status, &body).await
    }

    /// First checks of every generating route.
    fn open(&self, request: &Request) -> Result<Fields, Refusal> {
        if self.house.is_dead() {
            return Err(Refusal::broken(
                "EngineCore encountered an issue. See stack trace (above) for the root cause.",
            ));
        }
        let fields = Fields::of(request)?;
        match fields.text("model")? {
            Some(model) if model != self.house.setup.model => {
                let message =
                    format!("The model `{model}` does not exist. Valid aliases: {}.", self.house.setup.model);
                Err(Refusal(404, "NotFoundError", message, Some("model".to_owned())))
            }
            _ => match fields.beyond(BEYOND) {
                Some(message) => Err(Refusal(501, "NotImplementedError", message, None)),
                None => Ok(fields),
            },
        }
    }

    /// Usage of a whole answer.
    fn usage(&self, prompt: usize, output: usize, cached: usize, of: Of) -> Value {
        // Before 0.32 cached tokens are left out if there are none.
        let told = self.options.prompt_tokens_details && (cached > 0 || self.minor() >= 32);
        let mut details = if told { json!({"cached_tokens": cached}) } else { Value::Null };
        if told && self.minor() >= 32 {
            details["created_cache_tokens"] = if of == Of::Text { Value::Null } else { json!(0) };
            details["multimodal_tokens"] = Value::Null;
        }
        let mut usage = json!({"prompt_tokens": prompt, "total_tokens": prompt + output, "completion_tokens": output,
            "prompt_tokens_details": details});
        if self.minor() >= 32 {
            usage["completion_tokens_details"] = of.details();
        }
        usage
    }

    /// Usage at the end of a stream, without null members.
    fn last_usage(&self, prompt: usize, output: usize, cached: usize, of: Of) -> Value {
        let mut usage = self.usage(prompt, output, cached, of);
        bare(&mut usage);
        usage
    }
}

/// Kind of usage: of a completion, or of a chat with its number of reasoning tokens if a parser
/// counts them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Of {
    Text,
    Chat(Option<usize>),
}

impl Of {
    /// `completion_tokens_details`
    fn details(self) -> Value {
        match self {
            Self::Chat(Some(thoughts)) => json!({"reasoning_tokens": thoughts}),
            _ => Value::Null,
        }
    }
}

/// Removes null members.
fn bare(value: &mut Value) {
    if let Value::Object(members) = value {
        members.retain(|_, member| !member.is_null());
        members.values_mut().for_each(bare);
    }
}

impl Engine for Vllm {
    fn house(&self) -> &Arc<House> {
        &self.house
    }

    fn serve<'a>(&'a self, request: Request, out: &'a mut Out) -> BoxFuture<'a, Sent> {
        self.route(request, out).boxed()
    }
}
