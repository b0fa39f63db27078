//! mlx-lm's server (as read in 0.32.2): one text per call, logprobs that are not the sampled
//! token's, a cache of few whole conversations that is copied at every use, and no gauges.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::RwLock;

use super::batch::{Batch, Reuse};
use super::fields::{Fields, Wrong};
use super::frontend::{
    Ask, Form, chat_prompt, only, run, sampling, sequences, under, unfit, usage_with_cached,
};
use super::house::{Defaults, House, Setup};
use super::http::{Out, Request, Sent};
use super::openai::created;
use super::sample::Pipeline;
use super::sequence::{Hold, Piece, Sequence};
use super::server::Engine;

/// Start options of the server; its sampling flags are the defaults of the setup.
#[derive(Clone, Debug)]
pub struct Options {
    /// `--prompt-cache-size`, in conversations.
    pub prompt_cache_size: usize,
    /// `--draft-model`
    pub draft_model: Option<&'static str>,
    pub setup: Setup,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            prompt_cache_size: 10,
            draft_model: None,
            setup: Setup { block: 1, blocks: 262_144, ..Setup::default() },
        }
    }
}

pub struct Mlx {
    pub house: Arc<House>,
    pub options: Options,
    /// Number of copies of a conversation's keys and values.
    pub copies: AtomicUsize,
    /// The cached conversations, the least recently used first.
    kept: Mutex<Vec<Vec<u32>>>,
    /// Requests share the model; a request with a seed runs alone.
    alone: RwLock<()>,
}

/// A refusal: its status and message.
#[derive(Clone, Debug)]
pub struct Refusal(u16, String);

impl From<Wrong> for Refusal {
    /// [unverified: the server may drop the connection instead]
    fn from(wrong: Wrong) -> Self {
        Self(400, wrong.to_string())
    }
}

struct Job {
    ask: Ask,
    top: usize,
    seeded: bool,
    sequence: Sequence,
}

struct Told<'a> {
    house: &'a Arc<House>,
    top: usize,
    mlx: &'a Mlx,
    /// The conversation is in the cache, before its answer has ended: the next request finds it.
    kept: AtomicBool,
}

impl Form for Told<'_> {
    fn house(&self) -> &Arc<House> {
        self.house
    }

    fn dress(&self, choice: &mut Value, _: &Sequence, _: &[Piece]) {
        for said in ["delta", "message"] {
            if let Some(said) = choice.get_mut(said).and_then(Value::as_object_mut) {
                said.insert("role".into(), json!("assistant"));
                said.insert("reasoning".into(), Value::Null);
                said.insert("tool_calls".into(), json!([]));
            }
        }
        if choice["logprobs"].is_null() {
            choice.as_object_mut().expect("an object").remove("logprobs");
        }
    }

    /// The outer entry of the list is the first of the partition, which may not be the sampled
    /// token.
    fn logprobs(&self, _: &Ask, pieces: &[Piece], _: usize) -> Value {
        let entry = |piece: &Piece, id: u32, named: bool| {
            let row = if piece.temperature > 0.0 {
                piece.processed.cooled(1.0 / piece.temperature)
            } else {
                piece.processed.clone()
            };
            let mut entry = json!({"id": id});
            if named {
                entry["token"] = json!(self.house.toy.name(id));
            }
            entry["logprob"] = json!(row.logprob(id));
            entry
        };
        let content = pieces.iter().map(|piece| {
            if self.top == 0 {
                return entry(piece, piece.token, false);
            }
            let row = &piece.processed;
            let all = row.top(self.top).into_iter().rev().map(|(id, _)| entry(piece, id, true));
            let all: Vec<Value> = all.collect();
            let mut first = all[0].clone();
            first["top_logprobs"] = json!(all);
            first
        });
        json!({"content": content.collect::<Vec<_>>()})
    }

    fn role_first(&self) -> bool {
        false
    }

    fn usage(&self, batch: &Batch, ask: &Ask) -> Value {
        self.keep(batch);
        usage_with_cached(batch, ask.n)
    }

    fn preamble(&self, batch: &Batch) -> Option<String> {
        let len = batch.prompt_tokens();
        Some(format!(": keepalive {len}/{len}\n\n"))
    }
}

impl Told<'_> {
    /// Puts the conversation into the cache, once.
    fn keep(&self, batch: &Batch) {
        if !self.kept.swap(true, Ordering::SeqCst) {
            self.mlx.insert(batch.sequences[0].context.tokens());
        }
    }
}

impl Mlx {
    pub fn new(options: Options) -> Self {
        Self {
            house: House::new(options.setup.clone()),
            options,
            copies: AtomicUsize::new(0),
            kept: Mutex::default(),
            alone: RwLock::new(()),
        }
    }

    async fn route(&self, request: Request, out: &mut Out) -> Sent {
        match request.route() {
            ("GET", "/health") => out.json(200, &json!({"status": "ok"})).await,
            ("GET", "/v1/models") => {
                let model = json!({"id": self.house.setup.model, "object": "model", "created": created()});
                out.json(200, &json!({"object": "list", "data": [model]})).await
            }
            ("POST", path @ ("/v1/completions" | "/chat/completions" | "/v1/chat/completions")) => {
                match self.job(&request, path.ends_with("/chat/completions")) {
                    Ok(job) => self.generate(job, out).await,
                    Err(Refusal(status, message)) => out.json(status, &json!({"error": message})).await,
                }
            }
            _ => out.whole(404, &[("content-type", "text/plain")], b"Not Found").await,
        }
    }

    async fn generate(&self, job: Job, out: &mut Out) -> Sent {
        let (_shared, _own) = if job.seeded {
            (None, Some(self.alone.write().await))
        } else {
            (Some(self.alone.read().await), None)
        };
        let mut sequence = job.sequence;
        sequence.cache_limit = Some(self.fetch(sequence.context.tokens()) + 1);
        let mut batch = Batch::begin(&self.house, vec![sequence], Reuse::AfterStep).await;
        let told = Told { house: &self.house, top: job.top, mlx: self, kept: AtomicBool::new(false) };
        let sent = run(&told, &job.ask, &mut batch, out).await;
        told.keep(&batch);
        sent
    }

    /// Length of the longest cached prefix; copies its conversation.
    fn fetch(&self, prompt: &[u32]) -> usize {
        let mut kept = self.kept.lock();
        let shared = |own: &Vec<u32>| own.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        let best = kept.iter().enumerate().map(|(at, own)| (shared(own), at)).max();
        let Some((len, at)) = best.filter(|(len, _)| *len > 0) else { return 0 };
        self.copies.fetch_add(1, Ordering::SeqCst);
        let own = kept.remove(at);
        kept.push(own);
        len
    }

    fn insert(&self, tokens: &[u32]) {
        let mut kept = self.kept.lock();
        kept.push(tokens[..tokens.len() - 1].to_vec());
        if kept.len() > self.options.prompt_cache_size {
            kept.remove(0);
        }
    }

    fn job(&self, request: &Request, chat: bool) -> Result<Job, Refusal> {
        let fields = Fields::of(request)?;
        let prompt = if chat {
            chat_prompt(&self.house, &fields).map_err(|message| Refusal(500, message))?
        } else {
            // A prompt that is not a text fails in the tokenizer.
            let text = fields.get("prompt").and_then(Value::as_str);
            let text = text.ok_or_else(|| Refusal(500, "TextEncodeInput must be Union[str]".to_owned()))?;
            self.house.toy.encode(text)
        };
        if let Some(message) = unfit(&self.house, std::slice::from_ref(&prompt)) {
            return Err(Refusal(500, message));
        }
        if let Some(model) = fields.text("draft_model")?.filter(|model| model != "default_model")
            && self.options.draft_model != Some(model.as_str())
        {
            return Err(Refusal(500, format!("cannot load {model}")));
        }
        if let Some(message) = fields.beyond(&["tools", "adapters", "xtc_probability"]) {
            return Err(Refusal(400, message));
        }
        fields.uint("num_draft_tokens")?;
        let top = fields.int("top_logprobs")?.unwrap_or(-1);
        if top != -1 && !(1..=10).contains(&top) {
            return Err(Refusal(400, format!("top_logprobs must be between 1 and 10 but got {top}")));
        }
        let (stream, logprobs) = (fields.flag("stream")?, fields.flag("logprobs")?);
        let usage = fields.object("stream_options")?.flag("include_usage")?;
        // Streams have none.
        let ask = Ask {
            chat,
            stream,
            usage,
            continuous: false,
            logprobs: (logprobs && !stream).then_some(0),
            n: 1,
        };
        let seed = fields.uint("seed")?;
        let own = self.sampling(&fields)?;
        let sequence = sequences(&self.house, &[prompt], &own, seed, 1, Hold::Prefix).remove(0);
        Ok(Job { ask, top: top.max(0) as usize, seeded: seed.is_some(), sequence })
    }

    /// Missing parameters come from the server's flags, which are greedy by default.
    fn sampling(&self, fields: &Fields) -> Result<super::sample::Sampling, Refusal> {
        let flags = Defaults { temperature: Some(0.0), max_new_tokens: Some(512), ..Defaults::default() };
        let defaults = under(&self.house.defaults.lock(), &flags);
        let asked = match fields.uint("max_completion_tokens")? {
            Some(asked) => Some(asked),
            None => fields.uint("max_tokens")?,
        };
        let max = asked.or(defaults.max_new_tokens).unwrap_or(512) as usize;
        let last = fields.uint("repetition_context_size")?.unwrap_or(20) as usize;
        let names = [
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "logit_bias",
            "stop",
        ];
        let mut own =
            sampling(&self.house, &only(fields, &names), Pipeline::mlx(last), &defaults, max.max(1))?;
        for (name, value) in [("top_p", own.top_p), ("min_p", own.min_p)] {
            if !(0.0..=1.0).contains(&value) {
                return Err(Refusal(400, format!("{name} must be a float between 0 and 1")));
            }
        }
        if own.temperature < 0.0 || own.repetition < 0.0 {
            return Err(Refusal(400, "temperature must be a non-negative float".to_owned()));
        }
        // Here 0 means no penalty.
        if own.repetition == 0.0 {
            own.repetition = 1.0;
        }
        if own.top_p == 0.0 {
            own.top_p = 1.0;
        }
        Ok(own)
    }
}

impl Engine for Mlx {
    fn house(&self) -> &Arc<House> {
        &self.house
    }

    fn serve<'a>(&'a self, request: Request, out: &'a mut Out) -> BoxFuture<'a, Sent> {
        self.route(request, out).boxed()
    }

    fn renewed(&self) {
        self.kept.lock().clear();
    }
}
