//! Hosted APIs that speak OpenAI's protocol: keys, limits, bills, and a `prediction` instead of a
//! cache that could verify drafts.

mod prediction;

use std::sync::Arc;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use serde_json::{Value, json};

use super::batch::{Batch, Reuse};
use super::fields::{Fields, Wrong};
use super::frontend::{Ask, Form, chat_prompt, run, sampling, sequences, text_logprobs, unfit, usage};
use super::house::{Defaults, House, Setup};
use super::http::{Out, Request, Sent};
use super::openai::created;
use super::sample::Pipeline;
use super::sequence::{Hold, Piece, Sequence};
use super::server::Engine;
use super::toy::Row;
use prediction::Predicted;

/// Provider of the API.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Provider {
    /// `prediction` on chats; token prompts on the legacy route; no assistant prefill.
    OpenAi,
    /// `prediction` and `prefix: true` on an assistant's message.
    Mistral,
    /// `prediction`, token prompts, `return_raw_tokens`.
    Cerebras,
    /// `echo` with `logprobs` returns prompt logprobs.
    Together,
}

/// The account.
#[derive(Clone, Debug)]
pub struct Options {
    pub provider: Provider,
    /// Accepted keys.
    pub keys: Vec<&'static str>,
    /// Calls until the limit; `None` for no limit.
    pub calls: Option<usize>,
    /// `Retry-After` at the limit, seconds.
    pub retry_after: u64,
    pub setup: Setup,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            provider: Provider::OpenAi,
            keys: vec!["sk-good"],
            calls: None,
            retry_after: 20,
            // Prompts are cached in steps of 128 tokens, from 1024 on [unverified: from memory].
            setup: Setup { block: 128, ..Setup::default() },
        }
    }
}

/// Billed tokens of the account.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bill {
    pub calls: usize,
    pub input: usize,
    /// Input tokens at the reduced price.
    pub cached: usize,
    /// Output tokens, including rejected ones.
    pub output: usize,
    pub accepted: usize,
    pub rejected: usize,
}

pub struct Hosted {
    pub house: Arc<House>,
    pub options: Options,
    bill: Mutex<Bill>,
    left: Mutex<Option<usize>>,
}

/// A refusal: status, kind, message and code.
#[derive(Clone, Debug)]
pub struct Refusal(u16, &'static str, String, Option<&'static str>);

impl Refusal {
    fn bad(message: impl Into<String>) -> Self {
        Self(400, "invalid_request_error", message.into(), None)
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
    echo: bool,
    raw_tokens: bool,
}

struct Told<'a> {
    hosted: &'a Hosted,
    job: &'a Job,
}

impl Form for Told<'_> {
    fn house(&self) -> &Arc<House> {
        &self.hosted.house
    }

    fn dress(&self, choice: &mut Value, sequence: &Sequence, pieces: &[Piece]) {
        if self.job.raw_tokens {
            choice["tokens"] = pieces.iter().map(|piece| piece.token).collect();
        }
        if !self.job.echo || self.job.ask.stream {
            return;
        }
        let prompt = &sequence.context.tokens()[..sequence.prompt];
        let toy = &self.hosted.house.toy;
        let text = choice["text"].as_str().unwrap_or_default();
        choice["text"] = json!(format!("{}{text}", toy.decode(prompt, true)));
        if let Some(top) = self.job.ask.logprobs {
            let prompt = prompt.iter().enumerate().map(|(at, &id)| (id, toy.row(&sequence.context, at)));
            let output = pieces.iter().map(|piece| (piece.token, piece.raw.clone()));
            let rows: Vec<(u32, Row)> = prompt.chain(output).collect();
            choice["logprobs"] = text_logprobs(&self.hosted.house, &rows, top);
            choice["logprobs"]["token_logprobs"][0] = Value::Null;
            choice["logprobs"]["top_logprobs"][0] = Value::Null;
        }
    }

    fn usage(&self, batch: &Batch, ask: &Ask) -> Value {
        let (mut told, predicted) = (usage(batch, ask.n), self.predicted(batch));
        let (input, output) = (told["prompt_tokens"].as_u64(), batch.output_tokens() + predicted.rejected);
        told["completion_tokens"] = json!(output);
        told["total_tokens"] = json!(input.unwrap_or(0) as usize + output);
        told["prompt_tokens_details"] = json!({"cached_tokens": cached(batch, ask.n)});
        told["completion_tokens_details"] = json!({"reasoning_tokens": 0,
            "accepted_prediction_tokens": predicted.accepted, "rejected_prediction_tokens": predicted.rejected});
        told
    }
}

impl Told<'_> {
    fn predicted(&self, batch: &Batch) -> Predicted {
        let output = batch.sequences.first().map_or(&[][..], Sequence::output);
        Predicted::of(&self.job.prediction, output)
    }
}

/// Short prompts are never cached.
fn cached(batch: &Batch, n: usize) -> usize {
    let of = |sequence: &Sequence| if sequence.cached < 1024 { 0 } else { sequence.cached };
    batch.sequences.iter().step_by(n).map(of).sum()
}

impl Hosted {
    pub fn new(options: Options) -> Self {
        let left = Mutex::new(options.calls);
        Self { house: House::new(options.setup.clone()), options, bill: Mutex::default(), left }
    }

    pub fn bill(&self) -> Bill {
        *self.bill.lock()
    }

    /// Allows this number of further calls.
    pub fn allow(&self, calls: usize) {
        *self.left.lock() = Some(calls);
    }

    async fn route(&self, request: Request, out: &mut Out) -> Sent {
        if let Err(refusal) = self.let_in(&request) {
            return self.refuse(&refusal, out).await;
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
                let message = format!("Invalid URL ({method} {path})");
                return self.refuse(&Refusal(404, "invalid_request_error", message, None), out).await;
            }
        };
        match self.spend().and_then(|()| self.job(&request, chat)) {
            Ok(job) => self.generate(job, out).await,
            Err(refusal) => self.refuse(&refusal, out).await,
        }
    }

    async fn refuse(&self, Refusal(status, of, message, code): &Refusal, out: &mut Out) -> Sent {
        let body =
            json!({"error": {"message": message, "type": of, "param": null, "code": code}}).to_string();
        let json = ("content-type", "application/json");
        let seconds = self.options.retry_after.to_string();
        let later: &[_] = &[json, ("retry-after", &seconds), ("x-ratelimit-remaining-requests", "0")];
        let fields = if *status == 429 { later } else { &[json] };
        out.whole(*status, fields, body.as_bytes()).await
    }

    fn let_in(&self, request: &Request) -> Result<(), Refusal> {
        let unauthorised = |message: String, code| Refusal(401, "invalid_request_error", message, code);
        let key = request.get("authorization").and_then(|field| field.strip_prefix("Bearer "));
        match key {
            None => Err(unauthorised("You didn't provide an API key.".to_owned(), None)),
            Some(key) if !self.options.keys.contains(&key) => {
                let shown: String = key.chars().take(3).collect();
                Err(unauthorised(format!("Incorrect API key provided: {shown}***."), Some("invalid_api_key")))
            }
            Some(_) => Ok(()),
        }
    }

    fn spend(&self) -> Result<(), Refusal> {
        let mut left = self.left.lock();
        match &mut *left {
            None => Ok(()),
            Some(0) => {
                let message =
                    format!("Rate limit reached. Please try again in {}s.", self.options.retry_after);
                Err(Refusal(429, "requests", message, Some("rate_limit_exceeded")))
            }
            Some(calls) => {
                *calls -= 1;
                Ok(())
            }
        }
    }

    async fn generate(&self, mut job: Job, out: &mut Out) -> Sent {
        let (sequences, ask) = (std::mem::take(&mut job.sequences), job.ask);
        let mut batch = Batch::begin(&self.house, sequences, Reuse::AfterStep).await;
        let told = Told { hosted: self, job: &job };
        // The input is billed even if the client disconnects.
        let input: usize = batch.sequences.iter().step_by(ask.n).map(|sequence| sequence.prompt).sum();
        {
            let mut bill = self.bill.lock();
            bill.calls += 1;
            bill.input += input;
            bill.cached += cached(&batch, ask.n);
        }
        let sent = run(&told, &ask, &mut batch, out).await;
        let predicted = told.predicted(&batch);
        let mut bill = self.bill.lock();
        bill.output += batch.output_tokens() + predicted.rejected;
        bill.accepted += predicted.accepted;
        bill.rejected += predicted.rejected;
        sent
    }

    fn job(&self, request: &Request, chat: bool) -> Result<Job, Refusal> {
        let fields = Fields::of(request)?;
        if let Some(name) = fields.unknown(&self.known(chat)) {
            return Err(Refusal::bad(format!("Unrecognized request argument supplied: {name}")));
        }
        match fields.text("model")? {
            None => return Err(Refusal::bad("you must provide a model parameter")),
            Some(model) if model != self.house.setup.model => {
                let message = format!("The model `{model}` does not exist or you do not have access to it.");
                return Err(Refusal(404, "invalid_request_error", message, Some("model_not_found")));
            }
            Some(_) => {}
        }
        if let Some(message) = fields.beyond(&["tools", "response_format", "best_of", "suffix"]) {
            return Err(Refusal::bad(message));
        }
        let prompts = self.prompts(&fields, chat)?;
        if let Some(message) = unfit(&self.house, &prompts) {
            return Err(Refusal(400, "invalid_request_error", message, Some("context_length_exceeded")));
        }
        let ask = Ask::of(&fields, chat)?;
        let echo = fields.flag("echo")?;
        self.check_logprobs(&ask, echo)?;
        let prediction = self.prediction(&fields, &ask)?;
        let asked = match fields.uint("max_completion_tokens")? {
            Some(asked) => Some(asked),
            None => fields.uint("max_tokens")?,
        };
        let max = asked.map_or(if chat { self.house.setup.max_len } else { 16 }, |asked| asked as usize);
        // There are no defaults of operator or model here: 1 and 1.
        let own = sampling(&self.house, &fields, Pipeline::VLLM, &Defaults::default(), max.max(1))?;
        if !(0.0..=2.0).contains(&own.temperature) || !(0.0..=1.0).contains(&own.top_p) {
            return Err(Refusal::bad(
                "Invalid value: 'temperature' must be within 0 and 2, 'top_p' within 0 and 1.",
            ));
        }
        let seed = fields.uint("seed")?;
        let raw_tokens = fields.flag("return_raw_tokens")?;
        let sequences = sequences(&self.house, &prompts, &own, seed, ask.n, Hold::Longest);
        Ok(Job { ask, sequences, prediction, echo, raw_tokens })
    }

    fn check_logprobs(&self, ask: &Ask, echo: bool) -> Result<(), Refusal> {
        let most = if ask.chat || self.options.provider == Provider::Together { 20 } else { 5 };
        if ask.logprobs.is_some_and(|top| top > most) {
            return Err(Refusal::bad(format!("Invalid value for 'logprobs': must be at most {most}.")));
        }
        if echo && ask.logprobs.is_some() && self.options.provider != Provider::Together {
            return Err(Refusal::bad(
                "Setting 'echo' and 'logprobs' at the same time is not supported for this model.",
            ));
        }
        Ok(())
    }

    /// Known fields of a request.
    fn known(&self, chat: bool) -> Vec<&'static str> {
        let provider = self.options.provider;
        let mut all = vec![
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
        ];
        if chat {
            all.extend([
                "messages",
                "top_logprobs",
                "max_completion_tokens",
                "tools",
                "tool_choice",
                "store",
                "metadata",
                "response_format",
                "service_tier",
            ]);
        } else {
            all.extend(["prompt", "echo", "best_of", "suffix"]);
        }
        if chat && provider != Provider::Together {
            all.push("prediction");
        }
        if provider == Provider::Cerebras {
            all.push("return_raw_tokens");
        }
        if provider == Provider::Together {
            all.extend(["top_k", "min_p", "repetition_penalty"]);
        }
        all
    }

    fn prompts(&self, fields: &Fields, chat: bool) -> Result<Vec<Vec<u32>>, Refusal> {
        if chat {
            return Ok(vec![self.chat_prompt(fields)?]);
        }
        let tokens = matches!(self.options.provider, Provider::OpenAi | Provider::Cerebras);
        let texts = |value: &Value| value.is_string() || value.get(0).is_some_and(Value::is_string);
        if !tokens && !fields.get("prompt").is_some_and(texts) {
            return Err(Refusal::bad("Invalid type for 'prompt': expected a string."));
        }
        Ok(fields.prompts(&self.house.toy)?)
    }

    /// The prompt of a chat. An assistant's last message is continued only if the provider supports
    /// it.
    fn chat_prompt(&self, fields: &Fields) -> Result<Vec<u32>, Refusal> {
        let last = fields.get("messages").and_then(|messages| messages.as_array()?.last().cloned());
        let last = last.unwrap_or_default();
        if last["prefix"] != true || self.options.provider != Provider::Mistral {
            return chat_prompt(&self.house, fields).map_err(Refusal::bad);
        }
        let mut before = fields.clone();
        if let Some(messages) = before.0.get_mut("messages").and_then(Value::as_array_mut) {
            messages.pop();
        }
        let mut prompt = chat_prompt(&self.house, &before).map_err(Refusal::bad)?;
        prompt.extend(self.house.toy.encode(last["content"].as_str().unwrap_or_default()));
        Ok(prompt)
    }

    /// A text or parts of one; refused with parameters that are incompatible with a prediction
    /// [unverified: from memory].
    fn prediction(&self, fields: &Fields, ask: &Ask) -> Result<Vec<u32>, Refusal> {
        let Some(prediction) = fields.get("prediction") else { return Ok(Vec::new()) };
        let penalised = |name: &str| fields.get(name).and_then(Value::as_f64).is_some_and(|by| by > 0.0);
        if ask.n > 1
            || ask.logprobs.is_some()
            || fields.get("tools").is_some()
            || penalised("presence_penalty")
            || penalised("frequency_penalty")
        {
            return Err(Refusal::bad("This parameter is not supported together with 'prediction'."));
        }
        let text = match &prediction["content"] {
            Value::String(text) => Some(text.clone()),
            Value::Array(parts) => parts.iter().map(|part| part["text"].as_str()).collect(),
            _ => None,
        };
        match text.filter(|_| prediction["type"] == "content") {
            Some(text) => Ok(self.house.toy.encode(&text)),
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
