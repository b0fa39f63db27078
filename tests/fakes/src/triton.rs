//! Triton with the `tensorrt_llm` model over a TensorRT engine (as read in mid-2026): tensors
//! instead of fields, and drafts that come with the request.

mod infer;
mod tensors;

use std::sync::Arc;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use serde_json::{Value, json};

use super::fields::{Fields, Wrong};
use super::frontend::{Ask, Form, answer, chat_prompt, only, sampling, sequences, unfit};
use super::house::{Defaults, House, Setup};
use super::http::{Out, Request, Sent};
use super::openai::{Exposition, created};
use super::sample::Pipeline;
use super::sequence::{Hold, Sequence};
use super::server::Engine;
use tensors::{INPUTS, OUTPUTS, Tensor};

/// Build options of the engine and start options of the server.
#[derive(Clone, Debug)]
pub struct Options {
    /// The model's name in its repository.
    pub model: &'static str,
    /// `--speculative_decoding_mode draft_tokens_external --max_draft_len N`; 0 is an engine
    /// without.
    pub max_draft_len: usize,
    /// `exclude_input_in_output` of the model's parameters; a request may override it.
    pub exclude_input: bool,
    /// `gather_context_logits` and `gather_generation_logits`
    pub gathers_logits: bool,
    /// `enable_kv_cache_reuse` with a paged context: the block of the setup is 1 or none.
    pub reuse: bool,
    /// The OpenAI frontend answers at the same address.
    pub frontend: bool,
    pub setup: Setup,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            model: "tensorrt_llm",
            max_draft_len: 16,
            exclude_input: false,
            gathers_logits: false,
            reuse: true,
            frontend: false,
            setup: Setup { blocks: 262_144, ..Setup::default() },
        }
    }
}

pub struct Triton {
    pub house: Arc<House>,
    pub options: Options,
}

/// A refusal: its status and message.
#[derive(Clone, Debug)]
pub struct Refusal(u16, String);

impl Refusal {
    fn bad(message: impl Into<String>) -> Self {
        Self(400, message.into())
    }
}

impl From<Wrong> for Refusal {
    fn from(wrong: Wrong) -> Self {
        Self::bad(wrong.to_string())
    }
}

/// The metrics are on a separate port, 8002 in the real server.
pub struct MetricsPort(pub Arc<Triton>);

struct Told<'a>(&'a Arc<House>);

impl Form for Told<'_> {
    fn house(&self) -> &Arc<House> {
        self.0
    }
}

impl Triton {
    pub fn new(options: Options) -> Self {
        let setup = Setup { block: usize::from(options.reuse), ..options.setup.clone() };
        Self { house: House::new(setup), options }
    }

    async fn route(&self, request: Request, out: &mut Out) -> Sent {
        let path = request.path.clone();
        let done = match (request.method.as_str(), path.as_str()) {
            ("GET", "/v2") => Ok(server()),
            ("GET", "/v2/health/live" | "/v2/health/ready") => return out.empty(200).await,
            (method, path) if path.starts_with("/v2/models/") => match (method, self.model_route(path)) {
                ("GET", Ok("")) => Ok(self.model()),
                ("GET", Ok("ready")) => return out.empty(200).await,
                ("GET", Ok("config")) => Ok(self.config()),
                ("POST", Ok("infer")) => self.infer(&request).await,
                (_, Err(refusal)) => Err(refusal),
                _ => return out.empty(405).await,
            },
            (method, path) if self.options.frontend && path.starts_with("/v1/") => match (method, path) {
                ("GET", "/v1/models") => Ok(self.models()),
                ("POST", "/v1/completions") => return self.openai(&request, false, out).await,
                ("POST", "/v1/chat/completions") => return self.openai(&request, true, out).await,
                _ => return out.json(404, &json!({"detail": "Not Found"})).await,
            },
            _ => return out.json(404, &json!({"error": "Not Found"})).await,
        };
        match done {
            Ok(body) => out.json(200, &body).await,
            Err(Refusal(status, message)) => out.json(status, &json!({"error": message})).await,
        }
    }

    /// The requested resource of a model; there is one model, in version 1.
    fn model_route<'a>(&self, path: &'a str) -> Result<&'a str, Refusal> {
        let rest = &path["/v2/models/".len()..];
        let (name, what) = rest.split_once('/').unwrap_or((rest, ""));
        if name != self.options.model {
            let message = format!("Request for unknown model: '{name}' is not found");
            return Err(Refusal(404, message));
        }
        Ok(what.strip_prefix("versions/1").map_or(what, |what| what.trim_start_matches('/')))
    }

    fn model(&self) -> Value {
        let told = |all: &[Tensor]| -> Value {
            all.iter()
                .map(|it| json!({"name": it.name, "datatype": it.datatype, "shape": it.told_shape()}))
                .collect()
        };
        json!({"name": self.options.model, "versions": ["1"], "platform": "python", "inputs": told(INPUTS),
            "outputs": told(OUTPUTS)})
    }

    fn config(&self) -> Value {
        json!({"name": self.options.model, "backend": "python", "max_batch_size": self.house.setup.max_running,
            "model_transaction_policy": {"decoupled": false},
            "parameters": {"exclude_input_in_output": {"string_value": self.options.exclude_input.to_string()},
                "enable_kv_cache_reuse": {"string_value": self.options.reuse.to_string()}}})
    }

    fn models(&self) -> Value {
        json!({"object": "list", "data": [{"id": self.options.model, "object": "model", "created": created(),
            "owned_by": "Triton Inference Server"}]})
    }

    /// The frontend takes texts, and only OpenAI's own parameters [unverified].
    async fn openai(&self, request: &Request, chat: bool, out: &mut Out) -> Sent {
        let read = Fields::of(request).map_err(Refusal::from).and_then(|fields| self.choices(&fields, chat));
        match read {
            Ok((ask, sequences)) => answer(&Told(&self.house), &ask, sequences, out).await,
            Err(Refusal(status, message)) => out.json(status, &json!({"detail": message})).await,
        }
    }

    fn choices(&self, fields: &Fields, chat: bool) -> Result<(Ask, Vec<Sequence>), Refusal> {
        match fields.text("model")? {
            Some(model) if model == self.options.model => {}
            Some(model) => return Err(Refusal(400, format!("Unknown model: {model}"))),
            None => return Err(Refusal(422, "model: Field required".to_owned())),
        }
        let prompts = if chat {
            vec![chat_prompt(&self.house, fields).map_err(Refusal::bad)?]
        } else {
            let text = fields
                .text("prompt")?
                .ok_or_else(|| Refusal::bad("only a single string prompt is supported"))?;
            vec![self.house.toy.encode(&text)]
        };
        if let Some(message) = unfit(&self.house, &prompts) {
            return Err(Refusal::bad(message));
        }
        if let Some(message) = fields.beyond(&["tools", "response_format", "echo", "suffix", "logit_bias"]) {
            return Err(Refusal::bad(message));
        }
        let mut ask = Ask::of(fields, chat)?;
        if ask.n > 1 || ask.logprobs.is_some() {
            return Err(Refusal::bad("only n=1 without logprobs is supported"));
        }
        ask.usage = false;
        let names = ["temperature", "top_p", "presence_penalty", "frequency_penalty", "stop"];
        let max = fields.uint("max_tokens")?.unwrap_or(16) as usize;
        let own =
            sampling(&self.house, &only(fields, &names), Pipeline::trtllm(0), &Defaults::default(), max)?;
        let seed = fields.uint("seed")?;
        Ok((ask, sequences(&self.house, &prompts, &own, seed, 1, Hold::Longest)))
    }
}

fn server() -> Value {
    json!({"name": "triton", "version": "2.60.0", "extensions": ["classification", "sequence", "model_repository",
        "schedule_policy", "model_configuration", "system_shared_memory", "binary_tensor_data", "parameters", "statistics"]})
}

impl Engine for Triton {
    fn house(&self) -> &Arc<House> {
        &self.house
    }

    fn serve<'a>(&'a self, request: Request, out: &'a mut Out) -> BoxFuture<'a, Sent> {
        self.route(request, out).boxed()
    }
}

impl Engine for MetricsPort {
    fn house(&self) -> &Arc<House> {
        &self.0.house
    }

    /// The names are unverified.
    fn serve<'a>(&'a self, request: Request, out: &'a mut Out) -> BoxFuture<'a, Sent> {
        async move {
            if request.route() != ("GET", "/metrics") {
                return out.empty(404).await;
            }
            let (house, model, mut text) = (&self.0.house, self.0.options.model, Exposition::default());
            for (of, value) in [("active", house.running() + house.waiting()), ("scheduled", house.running())]
            {
                let labels = format!("model=\"{model}\",request_type=\"{of}\",version=\"1\"");
                text.gauge("nv_trt_llm_request_metrics", &labels, value);
            }
            let max = house.setup.blocks;
            let used = (house.kv_usage() * max as f64) as usize;
            for (of, value) in [("max", max), ("used", used), ("free", max - used.min(max))] {
                let labels = format!("kv_cache_block_type=\"{of}\",model=\"{model}\",version=\"1\"");
                text.gauge("nv_trt_llm_kv_cache_block_metrics", &labels, value);
            }
            out.text(200, &text.0).await
        }
        .boxed()
    }
}
