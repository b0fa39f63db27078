//! `/v1/completions`: several prompts, several choices, streamed or not.

use serde_json::{Value, json};

use super::super::batch::{Batch, Reuse};
use super::super::fields::{Fields, outside};
use super::super::http::{Out, Request, Sent};
use super::super::openai::{created, id};
use super::super::sample::{Noise, Sampling};
use super::super::sequence::{Finish, Hold, Piece, Sequence};
use super::super::toy::Context;
use super::answer::Told;
use super::{Of, Refusal, Vllm};

/// Maximum number of prompts of one call.
const PROMPTS_MAX: usize = 1024;

pub(super) struct Asked {
    pub sequences: Vec<Sequence>,
    n: usize,
    pub reuse: Reuse,
    pub logprobs: Option<usize>,
    pub prompt_logprobs: Option<usize>,
    pub return_ids: bool,
    names_are_ids: bool,
    echo: Option<String>,
    pub stream: Streaming,
}

/// Usage options of a stream.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Streaming {
    pub on: bool,
    pub usage: bool,
    pub continuous: bool,
}

impl Streaming {
    pub fn of(fields: &Fields) -> Result<Self, Refusal> {
        let options = fields.object("stream_options")?;
        let on = fields.flag("stream")?;
        if !on && fields.get("stream_options").is_some() {
            return Err(Refusal::about(
                "Stream options can only be defined when `stream=True`.",
                "stream_options",
            ));
        }
        let usage = options.flag("include_usage")?;
        Ok(Self { on, usage, continuous: usage && options.flag("continuous_usage_stats")? })
    }
}

/// `n` sequences of each prompt, seeded one after the other.
pub(super) fn sequences(prompts: &[Context], sampling: &[Sampling], n: usize, salt: u64) -> Vec<Sequence> {
    let mut all = Vec::new();
    for (at, prompt) in prompts.iter().enumerate() {
        for choice in 0..n {
            let mut own = sampling[at].clone();
            own.noise = match own.noise {
                Noise::Position(seed) => Noise::Position(seed.wrapping_add(choice as u64)),
                Noise::Restarting(seed) => Noise::Restarting(seed.wrapping_add(choice as u64)),
            };
            let mut sequence = Sequence::new(at * n + choice, prompt.clone(), own, Hold::Longest);
            sequence.salt = salt;
            all.push(sequence);
        }
    }
    all
}

impl Vllm {
    pub(super) async fn completions(&self, request: &Request, out: &mut Out) -> Sent {
        let asked = match self.open(request).and_then(|fields| self.asked(&fields)) {
            Ok(asked) => asked,
            Err(refusal) => return self.refuse(&refusal, out).await,
        };
        if asked.stream.on {
            let id = self.id_of(request, "cmpl");
            return self.stream_completion(asked, &id, out).await;
        }
        match self.whole_completion(asked).await {
            Ok(body) => out.json(200, &body).await,
            Err(refusal) => self.refuse(&refusal, out).await,
        }
    }

    fn asked(&self, fields: &Fields) -> Result<Asked, Refusal> {
        if fields.get("prompt").is_none_or(|prompt| prompt == "" || prompt == &json!([])) {
            return Err(Refusal::about(
                "Either prompt or prompt_embeds must be provided and non-empty.",
                "prompt",
            ));
        }
        let prompts = fields.prompts(&self.house.toy)?;
        self.check_prompts(&prompts)?;
        let stream = Streaming::of(fields)?;
        let prompt_logprobs = self.logprobs(fields, "prompt_logprobs")?;
        if stream.on && prompt_logprobs.is_some_and(|most| most > 0) {
            return Err(Refusal::about(
                "`prompt_logprobs` are not available when `stream=True`.",
                "prompt_logprobs",
            ));
        }
        let n = fields.uint("n")?.unwrap_or(1).max(1) as usize;
        let asked = fields.uint("max_tokens")?;
        if asked.is_some_and(|asked| asked as usize > self.house.setup.max_len) {
            let (asked, longest) = (asked.unwrap_or(0), self.house.setup.max_len);
            let message = format!(
                "max_tokens={asked} cannot be greater than max_model_len={longest}. Please request fewer output tokens."
            );
            return Err(Refusal::about(message, "max_tokens"));
        }
        if asked == Some(0) && !fields.flag("echo")? {
            return Err(Refusal::about("max_tokens must be at least 1, got 0.", "max_tokens"));
        }
        let sampling = prompts
            .iter()
            .map(|prompt| self.openai_sampling(fields, self.room(prompt.len(), asked, Some(16))?))
            .collect::<Result<Vec<_>, Refusal>>()?;
        if n > 1 && sampling[0].temperature == 0.0 {
            return Err(Refusal::about(format!("n must be 1 when using greedy sampling, got {n}."), "n"));
        }
        check_priority(fields)?;
        let contexts: Vec<Context> = prompts.iter().map(|prompt| Context::new(prompt)).collect();
        let text = fields.get("prompt").and_then(Value::as_str);
        Ok(Asked {
            sequences: sequences(&contexts, &sampling, n, salt(fields)?),
            n,
            // With prompt logprobs the cache is not read, and this route has no field to change
            // that.
            reuse: if prompt_logprobs.is_some() { Reuse::WriteOnly } else { Reuse::AtOnce },
            logprobs: self.logprobs(fields, "logprobs")?,
            prompt_logprobs,
            return_ids: fields.flag("return_token_ids")?,
            names_are_ids: fields.flag("return_tokens_as_token_ids")?,
            echo: text.filter(|_| fields.get("echo").is_some_and(|echo| echo == true)).map(str::to_owned),
            stream,
        })
    }

    pub(super) fn check_prompts(&self, prompts: &[Vec<u32>]) -> Result<(), Refusal> {
        if prompts.is_empty() || prompts.iter().any(Vec::is_empty) {
            return Err(Refusal::about(
                "Either prompt or prompt_embeds must be provided and non-empty.",
                "prompt",
            ));
        }
        if prompts.len() > PROMPTS_MAX {
            let message = format!("Too many prompts: {} exceeds the limit of {PROMPTS_MAX}.", prompts.len());
            return Err(Refusal::about(message, "prompt"));
        }
        match outside(prompts, &self.house.toy) {
            Some(id) => Err(Refusal::bad(format!("Token id {id} is out of vocabulary"))),
            None => Ok(()),
        }
    }

    async fn whole_completion(&self, asked: Asked) -> Result<Value, Refusal> {
        let mut batch = Batch::begin(&self.house, asked.sequences, asked.reuse).await;
        let all = batch.finish().await;
        let mut choices = Vec::new();
        for (sequence, pieces) in batch.sequences.iter().zip(&all) {
            let text = format!("{}{}", asked.echo.as_deref().unwrap_or_default(), sequence.text);
            let logprobs = asked.logprobs.map_or(Value::Null, |top| {
                self.completion_logprobs(pieces, top, &mut Told::default(), asked.names_are_ids)
            });
            let rows = match asked.prompt_logprobs {
                Some(top) => self.prompt_rows(sequence, top, true)?,
                None => Value::Null,
            };
            let ids = |ids: &[u32]| if asked.return_ids { json!(ids) } else { Value::Null };
            choices.push(json!({"index": sequence.index, "text": text, "logprobs": logprobs,
                "finish_reason": sequence.finish.as_ref().map(Finish::reason),
                "stop_reason": stop_reason(sequence.finish.as_ref()), "token_ids": ids(sequence.output()),
                "prompt_logprobs": rows, "prompt_token_ids": ids(&sequence.context.tokens()[..sequence.prompt])}));
        }
        // Of several prompts only the last one's cached tokens are reported.
        let cached = batch.sequences.last().map_or(0, |sequence| sequence.cached);
        let usage =
            self.usage(prompt_tokens(&batch.sequences, asked.n), batch.output_tokens(), cached, Of::Text);
        let mut body = json!({"id": id("cmpl"), "object": "text_completion", "created": created(),
            "model": self.house.setup.model, "choices": choices, "service_tier": null,
            "system_fingerprint": self.fingerprint(), "usage": usage, "kv_transfer_params": null});
        self.newer(&mut body);
        Ok(body)
    }

    async fn stream_completion(&self, asked: Asked, id: &str, out: &mut Out) -> Sent {
        let created = created();
        // The engine numbers the prompts of a completion.
        let stream = self.streams.begin(&format!("{id}-0"));
        let frame = |choices: Value| {
            json!({"id": id, "object": "text_completion", "created": created, "model": self.house.setup.model,
                "choices": choices})
        };
        let mut batch = Batch::begin(&self.house, asked.sequences, asked.reuse).await;
        let mut told: Vec<Told> = batch.sequences.iter().map(|_| Told::default()).collect();
        out.events().await?;
        loop {
            if stream.is_aborted() {
                let choice = json!({"index": 0, "text": "", "logprobs": null, "finish_reason": "abort", "stop_reason": null});
                out.event(frame(json!([choice]))).await?;
                break;
            }
            let pieces = batch.step().await;
            if pieces.is_empty() {
                break;
            }
            for (at, piece) in pieces {
                let sequence = &batch.sequences[at];
                let first = sequence.output().len() == 1;
                let logprobs = asked.logprobs.map_or(Value::Null, |top| {
                    self.completion_logprobs(
                        std::slice::from_ref(&piece),
                        top,
                        &mut told[at],
                        asked.names_are_ids,
                    )
                });
                let echo = asked.echo.as_deref().filter(|_| first).unwrap_or_default();
                let prompt = &sequence.context.tokens()[..sequence.prompt];
                let choice = json!({"index": sequence.index, "text": format!("{echo}{}", piece.text), "logprobs": logprobs,
                    "finish_reason": piece.finish.as_ref().map(Finish::reason),
                    "stop_reason": stop_reason(piece.finish.as_ref()),
                    "prompt_token_ids": (asked.return_ids && first).then_some(prompt),
                    "token_ids": asked.return_ids.then_some([piece.token])});
                let mut event = frame(json!([choice]));
                if piece.finish.is_some() && !asked.stream.usage && self.minor() >= 29 {
                    event["system_fingerprint"] = self.fingerprint();
                }
                if asked.stream.continuous {
                    event["usage"] = plain_usage(sequence.prompt, sequence.output().len());
                }
                out.event(event).await?;
            }
        }
        if asked.stream.usage {
            let mut event = frame(json!([]));
            let cached = batch.sequences.first().map_or(0, |sequence| sequence.cached);
            event["usage"] = self.last_usage(
                prompt_tokens(&batch.sequences, asked.n),
                batch.output_tokens(),
                cached,
                Of::Text,
            );
            if self.minor() >= 29 {
                event["system_fingerprint"] = self.fingerprint();
            }
            out.event(event).await?;
        }
        out.event("[DONE]").await?;
        out.end().await
    }

    /// Additional fields of whole answers in newer versions, always null here.
    pub(super) fn newer(&self, body: &mut Value) {
        if self.minor() < 32 {
            return;
        }
        for name in ["ec_transfer_params", "metrics"] {
            body[name] = Value::Null;
        }
        for choice in body["choices"].as_array_mut().into_iter().flatten() {
            choice["routed_experts"] = Value::Null;
        }
    }

    pub(super) fn fingerprint(&self) -> Value {
        if self.minor() < 29 {
            return Value::Null;
        }
        let model = self.house.setup.temper.seed as u32 ^ ((self.house.reloads() as u32) << 24);
        json!(format!("vllm-{}-{model:08x}", self.options.version))
    }
}

pub(super) fn plain_usage(prompt: usize, output: usize) -> Value {
    json!({"prompt_tokens": prompt, "total_tokens": prompt + output, "completion_tokens": output})
}

/// Every prompt counts once, for any number of choices.
fn prompt_tokens(sequences: &[Sequence], n: usize) -> usize {
    sequences.iter().step_by(n).map(|sequence| sequence.prompt).sum()
}

pub(super) fn stop_reason(finish: Option<&Finish>) -> Value {
    match finish {
        Some(Finish::StopToken(token)) => json!(token),
        Some(Finish::StopText(text)) => json!(text),
        _ => Value::Null,
    }
}

/// The cache salt; different salts share no cache.
pub(super) fn salt(fields: &Fields) -> Result<u64, Refusal> {
    let text = fields.text("cache_salt")?.unwrap_or_default();
    Ok(text.bytes().fold(0, |hash, byte| hash * 131 + u64::from(byte)))
}

/// The one piece of a step in a batch of one.
pub(super) fn only(pieces: Vec<(usize, Piece)>) -> Option<Piece> {
    pieces.into_iter().next().map(|(_, piece)| piece)
}

pub(super) fn check_priority(fields: &Fields) -> Result<(), Refusal> {
    match fields.int("priority")? {
        Some(priority) if priority != 0 => {
            Err(Refusal::bad(format!("Got priority {priority} but Priority scheduling is not enabled.")))
        }
        _ => Ok(()),
    }
}
