//! Ollama (as read at fb30760): a llama-server behind a queue of one, strings without ids, lines
//! instead of events.

use std::sync::Arc;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use serde_json::{Value, json};

use super::batch::{Batch, Reuse};
use super::fields::{Fields, Wrong, outside};
use super::frontend::{Ask, Form, answer, chat_prompt, only, sampling, sequences, under, unfit};
use super::house::{Defaults, House, Setup};
use super::http::{Out, Request, Sent};
use super::openai::created;
use super::sample::{Counts, Pipeline, Sampling};
use super::sequence::{Finish, Hold, Piece, Sequence};
use super::server::Engine;
use super::toy::Context;

/// Maximum number of equal tokens in a row; more end the generation.
const REPEATS_MAX: usize = 30;

/// Start options of the server; Modelfile parameters are the defaults of the setup.
#[derive(Clone, Debug)]
pub struct Options {
    /// `OLLAMA_NUM_PARALLEL`
    pub num_parallel: usize,
    /// The only token that the model generates, if any.
    pub stuck: Option<u32>,
    /// The setup's slots are overridden by the option above.
    pub setup: Setup,
}

impl Default for Options {
    fn default() -> Self {
        Self { num_parallel: 1, stuck: None, setup: Setup { block: 1, blocks: 262_144, ..Setup::default() } }
    }
}

pub struct Ollama {
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
        Self::bad(format!(
            "json: cannot unmarshal {} into Go struct field of type {}",
            wrong.field, wrong.want
        ))
    }
}

struct Job {
    chat: bool,
    stream: bool,
    logprobs: Option<usize>,
    sequence: Sequence,
}

struct Told<'a>(&'a Arc<House>);

impl Form for Told<'_> {
    fn house(&self) -> &Arc<House> {
        self.0
    }

    fn dress(&self, choice: &mut Value, _: &Sequence, _: &[Piece]) {
        if let Some(delta) = choice.get_mut("delta") {
            delta["role"] = json!("assistant");
        }
    }

    fn role_first(&self) -> bool {
        false
    }
}

/// llama.cpp's defaults, with Ollama's own changes.
fn own_defaults() -> Defaults {
    Defaults {
        temperature: Some(0.8),
        top_k: Some(40),
        top_p: Some(0.9),
        min_p: Some(0.0),
        repetition_penalty: Some(1.0),
        max_new_tokens: None,
        caps: false,
        ..Defaults::default()
    }
}

impl Ollama {
    pub fn new(options: Options) -> Self {
        let setup = Setup { max_running: options.num_parallel, ..options.setup.clone() };
        Self { house: House::new(setup), options }
    }

    async fn route(&self, request: Request, out: &mut Out) -> Sent {
        let model = || json!({"name": self.house.setup.model, "model": self.house.setup.model, "size": 1});
        match request.route() {
            ("GET" | "HEAD", "/") => {
                out.whole(200, &[("content-type", "text/plain")], b"Ollama is running").await
            }
            ("GET", "/api/version") => out.json(200, &json!({"version": "0.20.4"})).await,
            ("GET", "/api/tags") => out.json(200, &json!({"models": [model()]})).await,
            ("GET", "/api/ps") => {
                let mut loaded = model();
                loaded["size_vram"] = json!(0);
                loaded["context_length"] = json!(self.house.setup.max_len);
                out.json(200, &json!({"models": [loaded]})).await
            }
            ("GET", "/v1/models") => {
                let one = json!({"id": self.house.setup.model, "object": "model", "created": created(), "owned_by": "library"});
                out.json(200, &json!({"object": "list", "data": [one]})).await
            }
            ("POST", path @ ("/api/generate" | "/api/chat")) => {
                self.native(&request, path == "/api/chat", out).await
            }
            ("POST", path @ ("/v1/completions" | "/v1/chat/completions")) => {
                self.openai(&request, path.contains("chat"), out).await
            }
            _ => out.whole(404, &[("content-type", "text/plain")], b"404 page not found").await,
        }
    }

    fn known_model(&self, fields: &Fields) -> Result<(), Refusal> {
        match fields.text("model")? {
            Some(model) if model == self.house.setup.model => Ok(()),
            Some(model) if !model.is_empty() => Err(Refusal(404, format!("model '{model}' not found"))),
            _ => Err(Refusal::bad("model is required")),
        }
    }

    async fn native(&self, request: &Request, chat: bool, out: &mut Out) -> Sent {
        let read = Fields::of(request).map_err(Refusal::from).and_then(|fields| {
            self.known_model(&fields)?;
            if fields.flag("_debug_render_only")? {
                return Ok(Err(self.rendered(&fields, chat)?));
            }
            self.job(&fields, chat).map(Ok)
        });
        let job = match read {
            Ok(Ok(job)) => job,
            Ok(Err(rendered)) => {
                let debug = json!({"rendered_template": rendered});
                let body =
                    json!({"model": self.house.setup.model, "created_at": now(), "_debug_info": debug});
                return out.json(200, &body).await;
            }
            Err(Refusal(status, message)) => return out.json(status, &json!({"error": message})).await,
        };
        self.run(job, out).await
    }

    async fn run(&self, job: Job, out: &mut Out) -> Sent {
        let (chat, stream, logprobs) = (job.chat, job.stream, job.logprobs);
        let mut batch = Batch::begin(&self.house, vec![job.sequence], Reuse::AfterStep).await;
        if stream {
            out.stream("application/x-ndjson").await?;
        }
        let mut all = Vec::new();
        let mut text = String::new();
        while let Some((_, mut piece)) = batch.step().await.pop() {
            let sequence = &batch.sequences[0];
            piece.text += &sequence.tail(&self.house.toy);
            text += &piece.text;
            all.push(piece);
            let stuck = repeats(&all) > REPEATS_MAX;
            if stream && !stuck {
                let last = std::slice::from_ref(&all[all.len() - 1]);
                let line = self.line(chat, sequence, &all[all.len() - 1].text, last, logprobs);
                out.piece(format!("{line}\n").as_bytes()).await?;
            }
            if stuck {
                // The answer ends without `done` [unverified].
                batch.sequences[0].finish = Some(Finish::Length);
                batch.finish().await;
                break;
            }
        }
        if stream {
            return out.end().await;
        }
        let mut line = self.line(chat, &batch.sequences[0], &text, &all, logprobs);
        if repeats(&all) > REPEATS_MAX {
            line["done"] = json!(false);
        }
        out.json(200, &line).await
    }

    fn line(
        &self,
        chat: bool,
        sequence: &Sequence,
        text: &str,
        pieces: &[Piece],
        top: Option<usize>,
    ) -> Value {
        let mut line = json!({"model": self.house.setup.model, "created_at": now()});
        if chat {
            line["message"] = json!({"role": "assistant", "content": text});
        } else {
            line["response"] = json!(text);
        }
        line["done"] = json!(sequence.finish.is_some());
        if let Some(finish) = &sequence.finish {
            line["done_reason"] = json!(finish.reason());
            line["prompt_eval_count"] = json!(sequence.prompt);
            line["eval_count"] = json!(sequence.output().len());
            for name in ["total_duration", "load_duration", "prompt_eval_duration", "eval_duration"] {
                line[name] = json!(1);
            }
        }
        if let Some(top) = top {
            line["logprobs"] = pieces.iter().map(|piece| self.logprob(piece, top)).collect();
        }
        line
    }

    /// Strings and no ids.
    fn logprob(&self, piece: &Piece, top: usize) -> Value {
        let entry = |id: u32| {
            let name = self.house.toy.name(id);
            json!({"token": name, "logprob": piece.raw.logprob(id), "bytes": name.as_bytes()})
        };
        let mut own = entry(piece.token);
        if top > 0 {
            own["top_logprobs"] = piece.raw.top(top).into_iter().map(|(id, _)| entry(id)).collect();
        }
        own
    }

    /// The text rendered by the template.
    fn rendered(&self, fields: &Fields, chat: bool) -> Result<String, Refusal> {
        let messages = if chat {
            fields.get("messages").cloned().unwrap_or_default()
        } else {
            let prompt = fields.text("prompt")?.unwrap_or_default();
            if fields.flag("raw")? {
                return Ok(prompt);
            }
            json!([{"role": "user", "content": prompt}])
        };
        self.house.toy.chat(&messages, true).map_err(Refusal::bad)
    }

    fn job(&self, fields: &Fields, chat: bool) -> Result<Job, Refusal> {
        let mut prompt = self.house.toy.encode(&self.rendered(fields, chat)?);
        if let Some(context) = fields.ids("context")? {
            if let Some(id) = outside(std::slice::from_ref(&context), &self.house.toy) {
                return Err(Refusal(500, format!("token {id} is out of range")));
            }
            // Earlier ids are decoded to text and tokenized again with the rest.
            let before = self.house.toy.decode(&context, false);
            prompt = self.house.toy.encode(&(before + &self.rendered(fields, chat)?));
        }
        if let Some(message) = unfit(&self.house, std::slice::from_ref(&prompt)) {
            return Err(Refusal::bad(message));
        }
        let top = fields.int("top_logprobs")?.unwrap_or(0);
        if !(0..=20).contains(&top) {
            return Err(Refusal::bad("top_logprobs must be between 0 and 20"));
        }
        let beyond = ["format", "tools", "images", "suffix", "system", "template", "think"];
        if let Some(message) = fields.beyond(&beyond) {
            return Err(Refusal::bad(message));
        }
        let sampling = self.options_sampling(&fields.object("options")?)?;
        Ok(Job {
            chat,
            // Streaming is the default.
            stream: fields.get("stream").is_none_or(|stream| stream == true),
            logprobs: fields.flag("logprobs")?.then_some(top as usize),
            sequence: Sequence::new(0, Context::new(&prompt), sampling, Hold::Prefix),
        })
    }

    fn options_sampling(&self, options: &Fields) -> Result<Sampling, Refusal> {
        let room = self.house.setup.max_len;
        let max = match options.int("num_predict")? {
            Some(count) if count >= 0 => count.max(1) as usize,
            _ => room / 2,
        };
        let defaults = under(&self.house.defaults.lock(), &own_defaults());
        let names =
            ["temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "stop"];
        let mut all = only(options, &names);
        if let Some(penalty) = options.get("repeat_penalty") {
            all.0.insert("repetition_penalty".into(), penalty.clone());
        }
        let last = match options.int("repeat_last_n")? {
            Some(-1) => Counts::All,
            Some(last) => Counts::Last(last.max(0) as usize),
            None => Counts::Last(64),
        };
        let pipeline = Pipeline { additive: last, repetition: last, ..Pipeline::LLAMA };
        let mut own = sampling(&self.house, &all, pipeline, &defaults, max)?;
        if let Some(seed) = options.int("seed")?.filter(|&seed| seed >= 0) {
            own.noise = super::sample::Noise::Restarting(seed as u64);
        }
        own.bias.extend(self.options.stuck.map(|token| (token, 1000.0)));
        Ok(own)
    }

    async fn openai(&self, request: &Request, chat: bool, out: &mut Out) -> Sent {
        let read = Fields::of(request).map_err(Refusal::from).and_then(|fields| self.choices(&fields, chat));
        match read {
            Ok((ask, all)) => answer(&Told(&self.house), &ask, all, out).await,
            Err(Refusal(status, message)) => {
                let of = if status == 404 { "not_found_error" } else { "invalid_request_error" };
                let error = json!({"message": message, "type": of, "param": null, "code": null});
                out.json(status, &json!({"error": error})).await
            }
        }
    }

    fn choices(&self, fields: &Fields, chat: bool) -> Result<(Ask, Vec<Sequence>), Refusal> {
        self.known_model(fields)?;
        if let Some(message) = fields.beyond(&["tools", "response_format", "suffix"]) {
            return Err(Refusal::bad(message));
        }
        let prompt = if chat {
            chat_prompt(&self.house, fields).map_err(Refusal::bad)?
        } else {
            // One string: no list and no ids.
            let text = fields.text("prompt")?.ok_or_else(|| Refusal::bad("prompt is required"))?;
            self.house.toy.encode(&text)
        };
        if let Some(message) = unfit(&self.house, std::slice::from_ref(&prompt)) {
            return Err(Refusal::bad(message));
        }
        let mut options = only(fields, &["top_p", "presence_penalty", "frequency_penalty", "stop", "seed"]);
        options.0.insert("num_predict".into(), json!(fields.int("max_tokens")?));
        // These routes have OpenAI's defaults, not the model's [unverified: from memory].
        options.0.insert("temperature".into(), json!(fields.float("temperature")?.unwrap_or(1.0)));
        options.0.entry("top_p").or_insert(json!(1.0));
        let own = self.options_sampling(&options)?;
        let seed = fields.uint("seed")?;
        let mut ask = Ask::of(fields, chat)?;
        ask.n = 1;
        Ok((ask, sequences(&self.house, &[prompt], &own, seed, 1, Hold::Prefix)))
    }
}

/// Number of equal tokens at the end.
fn repeats(pieces: &[Piece]) -> usize {
    let last = pieces.last().map(|piece| piece.token);
    pieces.iter().rev().take_while(|piece| Some(piece.token) == last).count()
}

/// The time in Go's format.
fn now() -> String {
    let seconds = created();
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = date(days);
    format!(
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}.000000000Z",
        rest / 3600,
        rest / 60 % 60,
        rest % 60
    )
}

/// Year, month and day of `days` days since 1970.
fn date(days: u64) -> (u64, u64, u64) {
    let is_leap =
        |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let (mut left, mut year) = (days, 1970);
    while left >= 365 + u64::from(is_leap(year)) {
        left -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let february = 28 + u64::from(is_leap(year));
    let mut month = 1;
    for len in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if left < len {
            break;
        }
        left -= len;
        month += 1;
    }
    (year, month, left + 1)
}

impl Engine for Ollama {
    fn house(&self) -> &Arc<House> {
        &self.house
    }

    fn serve<'a>(&'a self, request: Request, out: &'a mut Out) -> BoxFuture<'a, Sent> {
        self.route(request, out).boxed()
    }
}
