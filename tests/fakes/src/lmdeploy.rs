//! LMDeploy (as read at 1263d5c): one prompt per native call, a cache only with a flag, logprobs
//! only with an engine option, and defaults that differ from route to route.

use std::sync::Arc;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use serde_json::{Value, json};

use super::batch::{Batch, Reuse};
use super::fields::{Fields, Wrong};
use super::frontend::{Ask, Form, answer, chat_prompt, sampling, sequences, unfit, usage};
use super::house::{Defaults, House, Setup};
use super::http::{Out, Request, Sent};
use super::openai::{Exposition, models};
use super::sample::Pipeline;
use super::sequence::{Finish, Hold, Piece, Sequence};
use super::server::Engine;

/// Start options of `lmdeploy serve api_server`.
#[derive(Clone, Debug)]
pub struct Options {
    /// `--enable-prefix-caching`
    pub prefix_caching: bool,
    /// `--cache-block-seq-len`
    pub block: usize,
    /// `--logprobs-mode`; with `None`, a request for logprobs is an error.
    pub logprobs_mode: Option<&'static str>,
    /// `--enable-metrics`
    pub metrics: bool,
    /// True: ids and counts include the stop id. False: only with `include_stop_str_in_output`. A
    /// client has to handle both.
    pub stop_ids: bool,
    /// The setup's block size is overridden by the options above.
    pub setup: Setup,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            prefix_caching: false,
            block: 64,
            logprobs_mode: None,
            metrics: false,
            stop_ids: false,
            setup: Setup::default(),
        }
    }
}

pub struct Lmdeploy {
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

/// Defaults of each route: LMDeploy's own schema, not the model's.
fn route_defaults(native: bool) -> Defaults {
    let (temperature, top_k) = if native { (1.0, 0) } else { (0.7, 40) };
    Defaults {
        temperature: Some(temperature),
        top_p: Some(1.0),
        top_k: Some(top_k),
        min_p: Some(0.0),
        repetition_penalty: Some(1.0),
        max_new_tokens: None,
        caps: false,
        ..Defaults::default()
    }
}

struct Told<'a> {
    engine: &'a Lmdeploy,
    chat: bool,
    ids: bool,
}

impl Form for Told<'_> {
    fn house(&self) -> &Arc<House> {
        &self.engine.house
    }

    fn usage(&self, batch: &Batch, ask: &Ask) -> Value {
        let mut usage = usage(batch, ask.n);
        let told: usize = batch.sequences.iter().map(|sequence| self.engine.count(sequence)).sum();
        usage["total_tokens"] = json!(usage["prompt_tokens"].as_u64().unwrap_or(0) + told as u64);
        usage["completion_tokens"] = json!(told);
        usage
    }

    /// The ids of a chat are next to its text, those of a completion too, under another name.
    fn dress(&self, choice: &mut Value, sequence: &Sequence, pieces: &[Piece]) {
        if !self.ids {
            return;
        }
        let told = pieces.iter().filter(|piece| !self.engine.hides(sequence, piece.finish.as_ref()));
        let ids: Value = told.map(|piece| piece.token).collect();
        let said = if choice.get("delta").is_some() { "delta" } else { "message" };
        if self.chat {
            choice[said]["gen_tokens"] = ids.clone();
            choice["output_ids"] = ids;
        } else {
            choice["gen_tokens"] = ids;
        }
    }
}

impl Lmdeploy {
    pub fn new(options: Options) -> Self {
        let block = if options.prefix_caching { options.block } else { 0 };
        let setup = Setup { block, ..options.setup.clone() };
        Self { house: House::new(setup), options }
    }

    async fn route(&self, request: Request, out: &mut Out) -> Sent {
        let done = match request.route() {
            ("GET", "/health") => return out.empty(200).await,
            ("GET", "/metrics") if self.options.metrics => return out.text(200, &self.metrics()).await,
            ("GET", "/v1/models") => {
                Ok(models(&self.house.setup.model, "lmdeploy", self.house.setup.max_len))
            }
            ("POST", "/v1/encode") => self.encode(&request),
            ("POST", "/generate") => return self.generate(&request, out).await,
            ("POST", "/v1/completions") => return self.openai(&request, false, out).await,
            ("POST", "/v1/chat/completions") => return self.openai(&request, true, out).await,
            ("POST", "/get_ppl") if self.options.prefix_caching => {
                Err(Refusal::bad("get_ppl is not supported with prefix caching"))
            }
            _ => return out.json(404, &json!({"detail": "Not Found"})).await,
        };
        match done {
            Ok(body) => out.json(200, &body).await,
            Err(refusal) => refuse(&refusal, out).await,
        }
    }

    /// Ids of a text, or of each of several.
    fn encode(&self, request: &Request) -> Result<Value, Refusal> {
        let fields = Fields::of(request)?;
        if fields.flag("do_preprocess")? {
            return Err(Refusal::bad("this fake has no do_preprocess"));
        }
        let many = fields.get("input").is_some_and(Value::is_array);
        let texts = fields.texts("input")?;
        if texts.is_empty() {
            return Err(Refusal::bad("input: Field required"));
        }
        // `add_bos` has no effect: this tokenizer has no such token.
        let all: Vec<Vec<u32>> = texts.iter().map(|text| self.house.toy.encode(text)).collect();
        Ok(if many {
            json!({"input_ids": all, "length": all.iter().map(Vec::len).collect::<Vec<_>>()})
        } else {
            json!({"input_ids": all[0], "length": all[0].len()})
        })
    }

    /// Range checks of the server.
    fn checked(&self, fields: &Fields, native: bool, max: usize) -> Result<super::sample::Sampling, Refusal> {
        let beyond = ["tools", "response_format", "echo", "suffix", "image_data"];
        if let Some(message) = fields.beyond(&beyond) {
            return Err(Refusal::bad(message));
        }
        let mut own = sampling(&self.house, fields, Pipeline::LMDEPLOY, &route_defaults(native), max)?;
        if !(own.top_p > 0.0 && own.top_p <= 1.0) {
            return Err(Refusal::bad(format!("The top_p {:?} must be in (0, 1].", own.top_p)));
        }
        if fields.int("top_k")?.is_some_and(|top_k| top_k < 0) {
            return Err(Refusal::bad("The top_k cannot be a negative integer."));
        }
        if !(0.0..=2.0).contains(&own.temperature) {
            return Err(Refusal::bad(format!("The temperature {:?} must be in [0, 2]", own.temperature)));
        }
        if native {
            // The native schema has neither and ignores unknown fields.
            (own.presence, own.frequency) = (0.0, 0.0);
            own.bias.clear();
        }
        own.min_tokens = fields.uint("min_new_tokens")?.unwrap_or(0) as usize;
        Ok(own)
    }

    async fn generate(&self, request: &Request, out: &mut Out) -> Sent {
        let (fields, sequence) = match Fields::of(request).map_err(Refusal::from).and_then(|fields| {
            let sequence = self.native(&fields)?;
            Ok((fields, sequence))
        }) {
            Ok(read) => read,
            Err(refusal) => return refuse(&refusal, out).await,
        };
        let logprobs = fields.get("return_logprob").is_some_and(|on| on == true);
        let stream = fields.get("stream").is_some_and(|on| on == true);
        let mut batch = Batch::begin(&self.house, vec![sequence], Reuse::AfterStep).await;
        if !stream {
            let pieces = batch.finish().await.remove(0);
            return out.json(200, &self.told(&batch.sequences[0], &pieces, logprobs)).await;
        }
        out.events().await?;
        while let Some((_, piece)) = batch.step().await.pop() {
            out.event(self.told(&batch.sequences[0], &[piece], logprobs)).await?;
        }
        out.event("[DONE]").await?;
        out.end().await
    }

    /// One prompt: a text or ids, and nothing else.
    fn native(&self, fields: &Fields) -> Result<Sequence, Refusal> {
        let prompt = match (fields.text("prompt")?, fields.ids("input_ids")?) {
            (Some(_), Some(_)) => {
                return Err(Refusal::bad("You must specify exactly one of prompt or input_ids"));
            }
            (Some(text), None) => self.house.toy.encode(&text),
            (None, Some(ids)) => ids,
            (None, None) => return Err(Refusal::bad("You must specify exactly one of prompt or input_ids")),
        };
        if let Some(message) = unfit(&self.house, std::slice::from_ref(&prompt)) {
            return Err(Refusal::bad(message));
        }
        if fields.flag("return_logprob")? && self.options.logprobs_mode.is_none() {
            return Err(Refusal::bad("return_logprob requires the engine's logprobs_mode to be set"));
        }
        let max = fields.uint("max_tokens")?.unwrap_or(128) as usize;
        if max == 0 {
            return Err(Refusal::bad("The max_tokens 0 must be a positive integer."));
        }
        // This route has no seed.
        let own = self.checked(fields, true, max)?;
        Ok(sequences(&self.house, &[prompt], &own, None, 1, Hold::Longest).remove(0))
    }

    fn told(&self, sequence: &Sequence, pieces: &[Piece], logprobs: bool) -> Value {
        let text: String = pieces.iter().map(|piece| piece.text.as_str()).collect();
        let raw_logits = self.options.logprobs_mode == Some("raw_logits");
        let entry = |piece: &Piece| {
            let logit = piece.raw.0[piece.token as usize];
            json!([if raw_logits { logit } else { piece.raw.logprob(piece.token) }, piece.token])
        };
        let told = pieces.iter().filter(|piece| !self.hides(sequence, piece.finish.as_ref()));
        let told: Vec<&Piece> = told.collect();
        let rows = logprobs.then(|| told.iter().map(|piece| entry(piece)).collect::<Vec<_>>());
        let ids: Vec<u32> = told.iter().map(|piece| piece.token).collect();
        json!({"text": text + &sequence.tail(&self.house.toy), "output_ids": ids,
            "meta_info": {"prompt_tokens": sequence.prompt, "completion_tokens": self.count(sequence),
                "finish_reason": finish(sequence), "output_token_logprobs": rows}})
    }

    /// True if the token that ended the text is not reported.
    fn hides(&self, sequence: &Sequence, finish: Option<&Finish>) -> bool {
        matches!(finish, Some(Finish::Eos | Finish::StopToken(_)))
            && !self.options.stop_ids
            && !sequence.sampling.keep_stop
    }

    /// Reported number of output tokens.
    fn count(&self, sequence: &Sequence) -> usize {
        sequence.output().len() - usize::from(self.hides(sequence, sequence.finish.as_ref()))
    }

    async fn openai(&self, request: &Request, chat: bool, out: &mut Out) -> Sent {
        let read = Fields::of(request).map_err(Refusal::from).and_then(|fields| self.choices(&fields, chat));
        match read {
            Ok((ask, ids, sequences)) => {
                answer(&Told { engine: self, chat, ids }, &ask, sequences, out).await
            }
            Err(refusal) => refuse(&refusal, out).await,
        }
    }

    fn choices(&self, fields: &Fields, chat: bool) -> Result<(Ask, bool, Vec<Sequence>), Refusal> {
        match fields.text("model")? {
            None => return Err(Refusal(422, "model: Field required".to_owned())),
            Some(model) if model != self.house.setup.model => {
                return Err(Refusal(404, format!("The model \"{model}\" does not exist.")));
            }
            Some(_) => {}
        }
        let prompts = if chat {
            vec![chat_prompt(&self.house, fields).map_err(Refusal::bad)?]
        } else {
            let texts = fields.texts("prompt")?;
            texts.iter().map(|text| self.house.toy.encode(text)).collect()
        };
        if let Some(message) = unfit(&self.house, &prompts) {
            return Err(Refusal::bad(message));
        }
        let ask = Ask::of(fields, chat)?;
        if ask.logprobs.is_some() && self.options.logprobs_mode.is_none() {
            return Err(Refusal::bad("logprobs require the engine's logprobs_mode to be set"));
        }
        let asked = match fields.uint("max_completion_tokens")? {
            Some(asked) => Some(asked),
            None => fields.uint("max_tokens")?,
        };
        let room = self.house.setup.max_len;
        let max = asked.map_or(if chat { room } else { 16 }, |asked| asked as usize);
        let own = self.checked(fields, false, max)?;
        let all = sequences(&self.house, &prompts, &own, fields.uint("seed")?, ask.n, Hold::Longest);
        Ok((ask, fields.flag("return_token_ids")?, all))
    }

    fn metrics(&self) -> String {
        let (house, mut out) = (&self.house, Exposition::default());
        let labels = format!("model_name=\"{}\",engine=\"0\"", house.setup.model);
        let rate = house.since_start(|tally| tally.cached) as f64
            / house.since_start(|tally| tally.prompt).max(1) as f64;
        for (name, value) in [
            ("num_requests_running", house.running() as f64),
            ("num_requests_waiting", house.waiting() as f64),
            ("num_api_requests_waiting", house.waiting() as f64),
            ("gpu_cache_usage_perc", house.kv_usage()),
            ("prefix_cache_hit_rate", if self.options.prefix_caching { rate } else { 0.0 }),
        ] {
            out.gauge(&format!("lmdeploy:{name}"), &labels, format!("{value:?}"));
        }
        out.0
    }
}

fn finish(sequence: &Sequence) -> Value {
    match sequence.finish.as_ref().map(Finish::reason) {
        None => Value::Null,
        Some("length") => json!({"type": "length", "length": sequence.output().len()}),
        Some(of) => json!({"type": of}),
    }
}

async fn refuse(Refusal(status, message): &Refusal, out: &mut Out) -> Sent {
    let of = if *status == 404 { "invalid_request_error" } else { "BadRequestError" };
    let body = json!({"message": message, "type": of, "code": status, "param": null, "object": "error"});
    out.json(*status, &body).await
}

impl Engine for Lmdeploy {
    fn house(&self) -> &Arc<House> {
        &self.house
    }

    fn serve<'a>(&'a self, request: Request, out: &'a mut Out) -> BoxFuture<'a, Sent> {
        self.route(request, out).boxed()
    }
}
