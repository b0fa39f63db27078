//! Hosted APIs that speak OpenAI's protocol: keys (401), unknown fields (400), a bill, and a
//! `prediction` instead of a cache that could verify drafts.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use serde_json::{Value, json};

use super::batch::{Batch, Reuse};
use super::fields::{Fields, Wrong};
use super::frontend::{Ask, Form, chat_prompt, run, sampling, sequences, unfit, usage};
use super::house::{Defaults, House, Setup};
use super::http::{Out, Request, Sent};
use super::openai::created;
use super::sample::Pipeline;
use super::sequence::{Hold, Sequence};
use super::server::Engine;

/// The accepted key.
const KEY: &str = "sk-good";

/// Known fields of every request, of chats and of completions.
const KNOWN: [&[&str]; 3] = [
    &[
        "model",
        "max_tokens",
        "temperature",
        "top_p",
        "n",
        "stream",
        "stream_options",
        "stop",
        "seed",
        "user",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "logprobs",
    ],
    &[
        "messages",
        "top_logprobs",
        "max_completion_tokens",
        "tools",
        "tool_choice",
        "store",
        "metadata",
        "response_format",
        "service_tier",
        "prediction",
    ],
    &["prompt", "echo", "best_of", "suffix"],
];

pub struct Hosted {
    pub house: Arc<House>,
    billed: AtomicUsize,
}

/// A refusal: status, message and code.
#[derive(Clone, Debug)]
pub struct Refusal(u16, String, Option<&'static str>);

impl Refusal {
    fn bad(message: impl Into<String>) -> Self {
        Self(400, message.into(), None)
    }
}

impl From<Wrong> for Refusal {
    fn from(wrong: Wrong) -> Self {
        Self::bad(format!("Invalid type for '{}': expected {}.", wrong.field, wrong.want))
    }
}

struct Job {
    ask: Ask,
    sequences: Vec<Sequence>,
    /// Tokens predicted by the client.
    prediction: Vec<u32>,
}

struct Answer<'a> {
    house: &'a Arc<House>,
    prediction: &'a [u32],
}

impl Form for Answer<'_> {
    fn house(&self) -> &Arc<House> {
        self.house
    }

    /// A prediction is accepted up to its first wrong token [unverified: no provider documents how
    /// it counts]; the rejected rest is output on the bill.
    fn usage(&self, batch: &Batch, ask: &Ask) -> Value {
        let mut usage = usage(batch, ask.n);
        let output = batch.sequences.first().map_or(&[][..], Sequence::output);
        let accepted = self.prediction.iter().zip(output).take_while(|(guess, token)| guess == token).count();
        let rejected = self.prediction.len() - accepted;
        for name in ["completion_tokens", "total_tokens"] {
            usage[name] = json!(usage[name].as_u64().unwrap_or(0) as usize + rejected);
        }
        usage["prompt_tokens_details"] = json!({"cached_tokens": 0});
        usage["completion_tokens_details"] = json!({"reasoning_tokens": 0,
            "accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected});
        usage
    }
}

impl Hosted {
    pub fn new(setup: Setup) -> Self {
        Self { house: House::new(setup), billed: AtomicUsize::new(0) }
    }

    /// Number of billed calls.
    pub fn billed(&self) -> usize {
        self.billed.load(Ordering::SeqCst)
    }

    async fn route(&self, request: Request, out: &mut Out) -> Sent {
        if let Err(refusal) = Self::let_in(&request) {
            return Self::refuse(&refusal, out).await;
        }
        let chat = match request.route() {
            ("GET", "/v1/models") => {
                let model = &self.house.setup.model;
                let one = json!({"id": model, "object": "model", "created": created(), "owned_by": "system"});
                return out.json(200, &json!({"object": "list", "data": [one]})).await;
            }
            ("POST", "/v1/chat/completions") => true,
            ("POST", "/v1/completions") => false,
            (method, path) => {
                return Self::refuse(&Refusal(404, format!("Invalid URL ({method} {path})"), None), out)
                    .await;
            }
        };
        match self.job(&request, chat) {
            Ok(job) => self.generate(job, out).await,
            Err(refusal) => Self::refuse(&refusal, out).await,
        }
    }

    async fn refuse(Refusal(status, message, code): &Refusal, out: &mut Out) -> Sent {
        let error = json!({"message": message, "type": "invalid_request_error", "param": null, "code": code});
        out.json(*status, &json!({"error": error})).await
    }

    fn let_in(request: &Request) -> Result<(), Refusal> {
        match request.get("authorization").and_then(|field| field.strip_prefix("Bearer ")) {
            None => Err(Refusal(401, "You didn't provide an API key.".to_owned(), None)),
            Some(KEY) => Ok(()),
            Some(_) => Err(Refusal(401, "Incorrect API key provided.".to_owned(), Some("invalid_api_key"))),
        }
    }

    async fn generate(&self, job: Job, out: &mut Out) -> Sent {
        self.billed.fetch_add(1, Ordering::SeqCst);
        let mut batch = Batch::begin(&self.house, job.sequences, Reuse::AfterStep).await;
        run(&Answer { house: &self.house, prediction: &job.prediction }, &job.ask, &mut batch, out).await
    }

    fn job(&self, request: &Request, chat: bool) -> Result<Job, Refusal> {
        let fields = Fields::of(request)?;
        let [common, chats, texts] = KNOWN;
        if let Some(name) = fields.unknown(&[common, if chat { chats } else { texts }].concat()) {
            return Err(Refusal::bad(format!("Unrecognized request argument supplied: {name}")));
        }
        match fields.text("model")? {
            None => return Err(Refusal::bad("you must provide a model parameter")),
            Some(model) if model != self.house.setup.model => {
                let message = format!("The model `{model}` does not exist or you do not have access to it.");
                return Err(Refusal(404, message, Some("model_not_found")));
            }
            Some(_) => {}
        }
        if let Some(message) = fields.beyond(&["tools", "response_format", "best_of", "suffix", "echo"]) {
            return Err(Refusal::bad(message));
        }
        let prompts = if chat {
            vec![chat_prompt(&self.house, &fields).map_err(Refusal::bad)?]
        } else {
            fields.prompts(&self.house.toy)?
        };
        if let Some(message) = unfit(&self.house, &prompts) {
            return Err(Refusal(400, message, Some("context_length_exceeded")));
        }
        let ask = Ask::of(&fields, chat)?;
        let most = if chat { 20 } else { 5 };
        if ask.logprobs.is_some_and(|top| top > most) {
            return Err(Refusal::bad(format!("Invalid value for 'logprobs': must be at most {most}.")));
        }
        let prediction = self.prediction(&fields, &ask)?;
        let limit = match fields.uint("max_completion_tokens")? {
            Some(limit) => Some(limit),
            None => fields.uint("max_tokens")?,
        };
        let max = limit.map_or(if chat { self.house.setup.max_len } else { 16 }, |limit| limit as usize);
        // There are no defaults of operator or model here: 1 and 1.
        let sampling = sampling(&self.house, &fields, Pipeline::VLLM, &Defaults::default(), max.max(1))?;
        if !(0.0..=2.0).contains(&sampling.temperature) || !(0.0..=1.0).contains(&sampling.top_p) {
            return Err(Refusal::bad(
                "Invalid value: 'temperature' must be within 0 and 2, 'top_p' within 0 and 1.",
            ));
        }
        let seed = fields.uint("seed")?;
        let sequences = sequences(&self.house, &prompts, &sampling, seed, ask.n, Hold::Longest);
        Ok(Job { ask, sequences, prediction })
    }

    /// A text; refused with parameters that are incompatible with a prediction [unverified: from
    /// memory].
    fn prediction(&self, fields: &Fields, ask: &Ask) -> Result<Vec<u32>, Refusal> {
        let Some(prediction) = fields.get("prediction") else { return Ok(Vec::new()) };
        let penalised = |name: &str| fields.get(name).and_then(Value::as_f64).is_some_and(|by| by > 0.0);
        if ask.n > 1
            || ask.logprobs.is_some()
            || penalised("presence_penalty")
            || penalised("frequency_penalty")
        {
            return Err(Refusal::bad("This parameter is not supported together with 'prediction'."));
        }
        match prediction["content"].as_str().filter(|_| prediction["type"] == "content") {
            Some(text) => Ok(self.house.toy.encode(text)),
            None => Err(Refusal::bad("Invalid value for 'prediction'.")),
        }
    }
}

impl Engine for Hosted {
    fn house(&self) -> &Arc<House> {
        &self.house
    }

    fn serve<'a>(&'a self, request: Request, out: &'a mut Out) -> BoxFuture<'a, Sent> {
        self.route(request, out).boxed()
    }
}
