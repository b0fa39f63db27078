//! SGLang 0.5.23: a radix cache, logprobs from a chosen position on, streams that repeat their
//! output.
//!
//! * The first logprob is null; an unknown field: 400.
//! * Streamed chats refuse `return_token_ids` and end in an event of their own; requests with tools
//!   keep nulls.
//! * Seeds ignored but in deterministic mode, where `min_p` asserts; all penalties of output only.
//! * `matched_stop` names the stop text or the end token; `ignore_eos` ignores stop tokens too.

mod generate;
mod info;
mod openai;
mod params;

use std::sync::Arc;

use parking_lot::Mutex;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use serde_json::{Value, json};

use super::fields::{Fields, Wrong, outside};
use super::house::{House, Setup};
use super::http::{Out, Request, Sent};
use super::server::Engine;

/// Start options of the server.
#[derive(Clone, Debug)]
pub struct Options {
    /// `--enable-deterministic-inference`
    pub deterministic: bool,
    /// `--enable-metrics`
    pub metrics: bool,
    /// Whole chats have ids if they are asked for; older servers ignore that.
    pub chat_ids: bool,
    /// `--load-snapshot-publish-interval`: steps of decoding between two publications of the load.
    pub publish_interval: usize,
    /// The block of the setup is the page size; 0 is `--disable-radix-cache`.
    pub setup: Setup,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            deterministic: false,
            metrics: false,
            chat_ids: true,
            publish_interval: 15,
            setup: Setup { block: 1, blocks: 262_144, ..Setup::default() },
        }
    }
}

pub struct Sglang {
    pub house: Arc<House>,
    pub options: Options,
    /// The load that was published last.
    snapshot: Mutex<Option<info::Snapshot>>,
}

/// A refusal: its status and its whole body.
#[derive(Clone, Debug)]
pub struct Refusal(u16, Value);

impl Refusal {
    /// A refusal of `/generate`.
    fn native(message: impl Into<String>) -> Self {
        Self(400, json!({"error": {"message": message.into()}}))
    }

    /// A refusal of the OpenAI routes.
    fn openai(status: u16, message: impl Into<String>) -> Self {
        let of = if status == 404 { "NotFoundError" } else { "BadRequestError" };
        Self(
            status,
            json!({"object": "error", "message": message.into(), "type": of, "param": null, "code": status}),
        )
    }
}

impl From<Wrong> for Refusal {
    fn from(wrong: Wrong) -> Self {
        Self::openai(400, wrong.to_string())
    }
}

impl Sglang {
    pub fn new(options: Options) -> Self {
        Self { house: House::new(options.setup.clone()), options, snapshot: Mutex::default() }
    }

    async fn route(&self, request: Request, out: &mut Out) -> Sent {
        if self.house.is_dead() {
            // The scheduler has crashed, and with it the process.
            return out.reset();
        }
        let done = match request.route() {
            ("POST", "/abort_request") => return out.empty(200).await,
            // Both compute a token, and wait for the forward pass that is running.
            ("GET", "/health" | "/health_generate") => {
                drop(self.house.scheduler().await);
                return out.empty(200).await;
            }
            ("GET", "/metrics") if self.options.metrics => return out.text(200, &self.metrics()).await,
            ("GET", "/v1/loads") => Ok(self.loads()),
            ("GET", "/server_info" | "/get_server_info") => {
                drop(self.house.scheduler().await);
                Ok(self.server_info())
            }
            ("GET", "/model_info" | "/get_model_info") => Ok(self.model_info()),
            ("GET", "/v1/models") => Ok(self.models()),
            ("POST", "/tokenize") => self.tokenize(&request),
            ("POST", "/detokenize") => self.detokenize(&request),
            ("POST" | "PUT", "/generate") => return self.generate(&request, out).await,
            ("POST", "/v1/completions") => return self.completions(&request, out).await,
            ("POST", "/v1/chat/completions") => return self.chat(&request, out).await,
            _ => return out.json(404, &json!({"detail": "Not Found"})).await,
        };
        match done {
            Ok(body) => out.json(200, &body).await,
            Err(Refusal(status, body)) => out.json(status, &body).await,
        }
    }

    /// Error message if the request exceeds the model's context.
    fn too_long(&self, prompt: usize, asked: usize) -> Option<String> {
        let longest = self.house.setup.max_len;
        if prompt >= longest {
            return Some(format!(
                "The input ({prompt} tokens) is longer than the model's context length ({longest} tokens)."
            ));
        }
        let total = prompt + asked;
        (total > longest).then(|| {
            format!(
                "Requested token count exceeds the model's maximum context length of {longest} tokens. You requested a \
                 total of {total} tokens: {prompt} tokens from the input messages and {asked} tokens for the completion."
            )
        })
    }

    /// Checks the ids of prompts as the real server does: not at all. Its embedding fails an
    /// assertion of theirs, which ends the scheduler and with it the process ("index out of range
    /// in self").
    fn in_vocabulary(&self, prompts: &[Vec<u32>]) -> Result<(), Refusal> {
        let Some(id) = outside(prompts, &self.house.toy) else { return Ok(()) };
        self.house.kill_by(&format!("a prompt with the id {id}, which is outside the vocabulary"));
        Err(Refusal(500, Value::Null))
    }

    /// The versions of the weights that made the output tokens.
    fn weight_versions(&self, tokens: usize) -> Value {
        json!([{"version": self.house.weight_version(), "start": 0, "end": tokens}])
    }

    /// The prompt rendered by the template from the messages.
    fn chat_prompt(&self, fields: &Fields) -> Result<Vec<u32>, Refusal> {
        let messages = fields.get("messages").filter(|messages| messages.is_array());
        let messages = messages.ok_or_else(|| Refusal::openai(400, "messages: Field required"))?;
        let opening = fields.get("add_generation_prompt").is_none_or(|opening| opening == true);
        let text = self.house.toy.chat(messages, opening).map_err(|error| Refusal::openai(400, error))?;
        Ok(self.house.toy.encode(&text))
    }
}

impl Engine for Sglang {
    fn house(&self) -> &Arc<House> {
        &self.house
    }

    fn serve<'a>(&'a self, request: Request, out: &'a mut Out) -> BoxFuture<'a, Sent> {
        self.route(request, out).boxed()
    }
}
