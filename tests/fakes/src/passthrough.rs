//! The engines whose requests Foretell passes through, as far as it sees them: how each names
//! itself, where it reports its load, and OpenAI's two routes.

use std::sync::Arc;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use serde_json::{Value, json};

use super::fields::{Fields, Wrong};
use super::frontend::{Ask, Form, answer, chat_prompt, sampling, sequences, unfit};
use super::house::{Defaults, House, Setup};
use super::http::{Out, Request, Sent};
use super::openai::{Exposition, created, models};
use super::sample::Pipeline;
use super::sequence::{Hold, Sequence};
use super::server::Engine;

/// The engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `trtllm-serve`, with `return_perf_metrics`.
    Trtllm,
    /// Triton with its OpenAI frontend; its metrics are on another port.
    Triton,
    /// LMDeploy, with `--enable-metrics`.
    Lmdeploy,
    /// TGI v3.
    Tgi,
    Ollama,
    /// mlx-lm's server, which is built on Python's own.
    Mlx,
}

impl Kind {
    /// The list of its models.
    fn models(self, setup: &Setup) -> Value {
        let owner = match self {
            Self::Trtllm => "tensorrt_llm",
            Self::Triton => "Triton Inference Server",
            Self::Lmdeploy => "lmdeploy",
            Self::Tgi => &setup.model,
            Self::Ollama => "library",
            Self::Mlx => {
                let model = json!({"id": setup.model, "object": "model", "created": created()});
                return json!({"object": "list", "data": [model]});
            }
        };
        models(&setup.model, owner, setup.max_len)
    }

    /// The page that names the server or its version.
    fn about(self, setup: &Setup) -> Option<(&'static str, Value)> {
        match self {
            Self::Tgi => Some((
                "/info",
                json!({
                    "model_id": setup.model, "max_total_tokens": setup.max_len, "router": "text-generation-router",
                    "version": "3.3.7",
                }),
            )),
            Self::Ollama => Some(("/api/version", json!({"version": "0.20.4"}))),
            Self::Trtllm => Some(("/version", json!({"version": "1.3.0"}))),
            Self::Triton => {
                Some(("/v2", json!({"name": "triton", "version": "2.60.0", "extensions": ["sequence"]})))
            }
            Self::Lmdeploy | Self::Mlx => None,
        }
    }

    /// The page with its load, and the names there: running, waiting, and the share of the KV
    /// cache in use.
    const fn load(self) -> Option<(&'static str, [&'static str; 3])> {
        match self {
            Self::Trtllm => Some((
                "/prometheus/metrics",
                ["trtllm_num_requests_running", "trtllm_num_requests_waiting", "trtllm_kv_cache_utilization"],
            )),
            Self::Triton | Self::Tgi | Self::Ollama | Self::Mlx => None,
            Self::Lmdeploy => Some((
                "/metrics",
                [
                    "lmdeploy:num_requests_running",
                    "lmdeploy:num_requests_waiting",
                    "lmdeploy:gpu_cache_usage_perc",
                ],
            )),
        }
    }
}

pub struct Passthrough {
    pub house: Arc<House>,
    pub kind: Kind,
}

struct Told<'a>(&'a Arc<House>);

impl Form for Told<'_> {
    fn house(&self) -> &Arc<House> {
        self.0
    }
}

impl Passthrough {
    pub fn new(kind: Kind, setup: Setup) -> Self {
        Self { house: House::new(setup), kind }
    }

    async fn route(&self, request: Request, out: &mut Out) -> Sent {
        let setup = &self.house.setup;
        match request.route() {
            ("GET", "/health") => out.empty(200).await,
            ("GET", "/v1/models") => {
                out.whole(200, &self.fields(), self.kind.models(setup).to_string().as_bytes()).await
            }
            ("POST", "/v1/completions") => self.generate(&request, false, out).await,
            ("POST", "/v1/chat/completions") => self.generate(&request, true, out).await,
            ("GET", path) => match (self.kind.about(setup), self.kind.load()) {
                (Some((page, about)), _) if page == path => out.json(200, &about).await,
                (_, Some((page, names))) if page == path => out.text(200, &self.metrics(names)).await,
                _ => self.unknown(out).await,
            },
            _ => self.unknown(out).await,
        }
    }

    fn fields(&self) -> Vec<(&'static str, &'static str)> {
        let mut fields = vec![("content-type", "application/json")];
        if self.kind == Kind::Mlx {
            fields.push(("server", "BaseHTTP/0.6 Python/3.12.3"));
        }
        fields
    }

    async fn unknown(&self, out: &mut Out) -> Sent {
        match self.kind {
            Kind::Mlx => out.whole(404, &self.fields(), b"Not Found").await,
            _ => out.json(404, &json!({"detail": "Not Found"})).await,
        }
    }

    async fn generate(&self, request: &Request, chat: bool, out: &mut Out) -> Sent {
        match self.choices(request, chat) {
            Ok((ask, sequences)) => answer(&Told(&self.house), &ask, sequences, out).await,
            Err(message) => out.json(400, &json!({"object": "error", "message": message, "code": 400})).await,
        }
    }

    fn choices(&self, request: &Request, chat: bool) -> Result<(Ask, Vec<Sequence>), String> {
        let fields = Fields::of(request).map_err(|wrong| wrong.to_string())?;
        let prompts = if chat {
            chat_prompt(&self.house, &fields).map(|prompt| vec![prompt])?
        } else {
            self.prompts(&fields)?
        };
        if let Some(message) = unfit(&self.house, &prompts) {
            return Err(message);
        }
        self.sequences(&fields, &prompts, chat).map_err(|wrong| wrong.to_string())
    }

    fn prompts(&self, fields: &Fields) -> Result<Vec<Vec<u32>>, String> {
        fields.prompts(&self.house.toy).map_err(|wrong| wrong.to_string())
    }

    fn sequences(
        &self,
        fields: &Fields,
        prompts: &[Vec<u32>],
        chat: bool,
    ) -> Result<(Ask, Vec<Sequence>), Wrong> {
        let ask = Ask::of(fields, chat)?;
        let max = fields.uint("max_tokens")?.unwrap_or(16) as usize;
        let own = sampling(&self.house, fields, Pipeline::VLLM, &Defaults::default(), max)?;
        let seed = fields.uint("seed")?;
        Ok((ask, sequences(&self.house, prompts, &own, seed, ask.n, Hold::Longest)))
    }

    fn metrics(&self, [running, waiting, kv]: [&str; 3]) -> String {
        let (house, mut out) = (&self.house, Exposition::default());
        let labels = format!("model_name=\"{}\"", house.setup.model);
        let values = [house.running() as f64, house.waiting() as f64, house.kv_usage()];
        for (name, value) in [running, waiting, kv].into_iter().zip(values) {
            out.gauge(name, &labels, format!("{value:?}"));
        }
        out.0
    }
}

impl Engine for Passthrough {
    fn house(&self) -> &Arc<House> {
        &self.house
    }

    fn serve<'a>(&'a self, request: Request, out: &'a mut Out) -> BoxFuture<'a, Sent> {
        self.route(request, out).boxed()
    }
}
