//! Answers in OpenAI's shapes, whole or streamed, for the fakes that differ only in details.
//!
//! vLLM and SGLang have too many fields of their own for this and write their answers themselves.

use std::sync::Arc;

use crate::TokenId;
use serde_json::{Map, Value, json};

use super::batch::{Batch, Reuse};
use super::fields::{Fields, Wrong, outside};
use super::house::{Defaults, House};
use super::http::{Out, Sent};
use super::openai::{Parsed, Parsers, Parting, created, id};
use super::sample::{Noise, Pipeline, Sampling};
use super::sequence::{Finish, Hold, Piece, Sequence};
use super::toy::{Context, Row};

/// Requested form of an answer.
#[derive(Clone, Copy, Debug)]
pub struct Ask {
    pub chat: bool,
    pub stream: bool,
    /// A stream ends with a separate usage event.
    pub usage: bool,
    /// Every event of a stream has the usage.
    pub continuous: bool,
    /// Number of top logprobs besides the token's own.
    pub logprobs: Option<usize>,
    /// Choices per prompt.
    pub n: usize,
}

impl Ask {
    pub fn of(fields: &Fields, chat: bool) -> Result<Self, Wrong> {
        let n = fields.uint("n")?.unwrap_or(1).max(1) as usize;
        let usage = fields.object("stream_options")?.flag("include_usage")?;
        let logprobs = if chat {
            fields.flag("logprobs")?.then_some(fields.uint("top_logprobs")?.unwrap_or(0))
        } else {
            fields.uint("logprobs")?
        };
        Ok(Self {
            chat,
            stream: fields.flag("stream")?,
            usage,
            continuous: false,
            logprobs: logprobs.map(|top| top as usize),
            n,
        })
    }
}

/// The engine-specific parts of an answer.
pub trait Form: Sync {
    fn house(&self) -> &Arc<House>;

    /// Everything but choices and usage.
    fn head(&self, ask: &Ask) -> Value {
        let (prefix, object) = match (ask.chat, ask.stream) {
            (true, true) => ("chatcmpl", "chat.completion.chunk"),
            (true, false) => ("chatcmpl", "chat.completion"),
            (false, _) => ("cmpl", "text_completion"),
        };
        json!({"id": id(prefix), "object": object, "created": created(), "model": self.house().setup.model})
    }

    /// Adds to or changes the choice with these pieces.
    fn dress(&self, _choice: &mut Value, _sequence: &Sequence, _pieces: &[Piece]) {}

    fn usage(&self, batch: &Batch, ask: &Ask) -> Value {
        usage(batch, ask.n)
    }

    /// The finish reason.
    fn reason(&self, finish: &Finish) -> &'static str {
        finish.reason()
    }

    /// The logits of the reported logprobs.
    fn row(&self, piece: &Piece) -> Row {
        piece.raw.clone()
    }

    fn logprobs(&self, ask: &Ask, pieces: &[Piece], top: usize) -> Value {
        let rows = pieces.iter().map(|piece| (piece.token, self.row(piece)));
        let rows: Vec<(TokenId, Row)> = rows.collect();
        if ask.chat {
            chat_logprobs(self.house(), &rows, top)
        } else {
            text_logprobs(self.house(), &rows, top)
        }
    }

    /// A chat's stream begins with an event that has the role and no text.
    fn role_first(&self) -> bool {
        true
    }

    /// The usage of a stream so far.
    fn running(&self, sequence: &Sequence) -> Value {
        let (input, output) = (sequence.prompt, sequence.output().len());
        json!({"prompt_tokens": input, "completion_tokens": output, "total_tokens": input + output})
    }

    /// Changes the event that ends a sequence of a stream.
    fn ending(&self, _event: &mut Value, _sequence: &Sequence) {}

    /// First bytes of a stream.
    fn preamble(&self, _batch: &Batch) -> Option<String> {
        None
    }
}

/// Runs the sequences and writes their answer.
pub async fn answer(form: &dyn Form, ask: &Ask, sequences: Vec<Sequence>, out: &mut Out) -> Sent {
    let mut batch = Batch::begin(form.house(), sequences, Reuse::AfterStep).await;
    run(form, ask, &mut batch, out).await
}

/// Writes the answer of a running batch.
pub async fn run(form: &dyn Form, ask: &Ask, batch: &mut Batch, out: &mut Out) -> Sent {
    if ask.stream {
        return stream(form, ask, batch, out).await;
    }
    let all = batch.finish().await;
    let mut body = form.head(ask);
    let told = batch.sequences.iter().zip(&all);
    body["choices"] = told.map(|(sequence, pieces)| choice(form, ask, sequence, pieces)).collect();
    body["usage"] = form.usage(batch, ask);
    out.json(200, &body).await
}

fn choice(form: &dyn Form, ask: &Ask, sequence: &Sequence, pieces: &[Piece]) -> Value {
    let house = form.house();
    let text = format!("{}{}", sequence.text, sequence.tail(&house.toy));
    let mut choice = json!({"index": sequence.index});
    if ask.chat {
        let parsers = Parsers::of(&house.setup, false);
        let parsed = parsers.whole(&text);
        let said = Some(parsed.said).filter(|_| parsed.answers);
        choice["message"] = json!({"role": "assistant", "content": said});
        if parsers.reasons() {
            choice["message"]["reasoning_content"] = json!(parsed.thought);
        }
    } else {
        choice["text"] = json!(text);
    }
    choice["logprobs"] = json!(ask.logprobs.map(|top| form.logprobs(ask, pieces, top)));
    choice["finish_reason"] = json!(sequence.finish.as_ref().map(|finish| form.reason(finish)));
    form.dress(&mut choice, sequence, pieces);
    choice
}

async fn stream(form: &dyn Form, ask: &Ask, batch: &mut Batch, out: &mut Out) -> Sent {
    let parsers = Parsers::of(&form.house().setup, false);
    let mut partings: Vec<Parting> = batch.sequences.iter().map(|_| Parting::new(parsers.clone())).collect();
    let head = form.head(ask);
    let frame = |choices: Value| {
        let mut event = head.clone();
        event["choices"] = choices;
        event
    };
    out.events().await?;
    if let Some(comment) = form.preamble(batch) {
        out.piece(comment.as_bytes()).await?;
    }
    loop {
        let pieces = batch.step().await;
        if pieces.is_empty() {
            break;
        }
        for (at, mut piece) in pieces {
            let sequence = &batch.sequences[at];
            piece.text += &sequence.tail(&form.house().toy);
            if ask.chat && form.role_first() && sequence.output().len() == 1 {
                let delta = json!({"role": "assistant", "content": ""});
                out.event(frame(
                    json!([{"index": at, "delta": delta, "logprobs": null, "finish_reason": null}]),
                ))
                .await?;
            }
            let mut event = frame(json!([delta(form, ask, sequence, &piece, &mut partings[at])]));
            if ask.continuous {
                event["usage"] = form.running(sequence);
            }
            if piece.finish.is_some() {
                form.ending(&mut event, sequence);
            }
            out.event(event).await?;
        }
    }
    if ask.usage {
        let mut event = frame(json!([]));
        event["usage"] = form.usage(batch, ask);
        out.event(event).await?;
    }
    out.event("[DONE]").await?;
    out.end().await
}

fn delta(form: &dyn Form, ask: &Ask, sequence: &Sequence, piece: &Piece, parting: &mut Parting) -> Value {
    let mut choice = json!({"index": sequence.index});
    if ask.chat {
        let Parsed { thought, said, .. } = parting.push(&piece.text, piece.finish.is_some());
        choice["delta"] = match (thought.is_empty(), said.is_empty()) {
            (true, _) => json!({"content": said}),
            (false, true) => json!({"reasoning_content": thought}),
            (false, false) => json!({"reasoning_content": thought, "content": said}),
        };
    } else {
        choice["text"] = json!(piece.text);
    }
    let one = std::slice::from_ref(piece);
    choice["logprobs"] = json!(ask.logprobs.map(|top| form.logprobs(ask, one, top)));
    choice["finish_reason"] = json!(piece.finish.as_ref().map(|finish| form.reason(finish)));
    form.dress(&mut choice, sequence, one);
    choice
}

/// Every prompt counts once, for any number of choices.
pub fn usage(batch: &Batch, n: usize) -> Value {
    let prompt: usize = batch.sequences.iter().step_by(n).map(|sequence| sequence.prompt).sum();
    let output = batch.output_tokens();
    json!({"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output})
}

pub fn chat_logprobs(house: &House, rows: &[(TokenId, Row)], top: usize) -> Value {
    let entry = |id: TokenId, logprob: f32| {
        let name = house.toy.name(id);
        json!({"token": name, "logprob": logprob, "bytes": name.as_bytes()})
    };
    let content = rows.iter().map(|(token, row)| {
        let mut own = entry(*token, row.logprob(*token));
        own["top_logprobs"] = row.top(top).into_iter().map(|(id, logprob)| entry(id, logprob)).collect();
        own
    });
    json!({"content": content.collect::<Vec<_>>()})
}

pub fn text_logprobs(house: &House, rows: &[(TokenId, Row)], top: usize) -> Value {
    let name = |id: TokenId| house.toy.name(id);
    let tops = |row: &Row| -> Map<String, Value> {
        row.top(top).into_iter().map(|(id, logprob)| (name(id), json!(logprob))).collect()
    };
    let offsets = rows.iter().scan(0, |offset, (token, _)| {
        let at = *offset;
        *offset += name(*token).chars().count();
        Some(at)
    });
    json!({"text_offset": offsets.collect::<Vec<_>>(),
        "tokens": rows.iter().map(|(token, _)| name(*token)).collect::<Vec<_>>(),
        "token_logprobs": rows.iter().map(|(token, row)| row.logprob(*token)).collect::<Vec<_>>(),
        "top_logprobs": rows.iter().map(|(_, row)| tops(row)).collect::<Vec<_>>()})
}

/// Only the fields that an engine has; it ignores others.
pub fn only(fields: &Fields, names: &[&str]) -> Fields {
    let kept = fields.0.iter().filter(|(name, _)| names.contains(&name.as_str()));
    Fields(kept.map(|(name, value)| (name.clone(), value.clone())).collect())
}

/// The server's defaults, completed by the engine's own.
pub fn under(server: &Defaults, own: &Defaults) -> Defaults {
    Defaults {
        temperature: server.temperature.or(own.temperature),
        top_p: server.top_p.or(own.top_p),
        top_k: server.top_k.or(own.top_k),
        min_p: server.min_p.or(own.min_p),
        repetition_penalty: server.repetition_penalty.or(own.repetition_penalty),
        max_new_tokens: server.max_new_tokens.or(own.max_new_tokens),
        presence_penalty: server.presence_penalty.or(own.presence_penalty),
        frequency_penalty: server.frequency_penalty.or(own.frequency_penalty),
        caps: server.caps,
    }
}

/// Sampling parameters under their usual names; missing ones come from the defaults.
pub fn sampling(
    house: &House,
    fields: &Fields,
    pipeline: Pipeline,
    defaults: &Defaults,
    max: usize,
) -> Result<Sampling, Wrong> {
    let mut sampling = Sampling::new(pipeline, Noise::fresh(), max);
    sampling.temperature = fields.float("temperature")?.or(defaults.temperature).unwrap_or(1.0);
    sampling.top_p = fields.float("top_p")?.or(defaults.top_p).unwrap_or(1.0);
    sampling.top_k = fields.int("top_k")?.or(defaults.top_k).unwrap_or(0).max(0) as usize;
    sampling.min_p = fields.float("min_p")?.or(defaults.min_p).unwrap_or(0.0);
    sampling.presence = fields.float("presence_penalty")?.unwrap_or(0.0);
    sampling.frequency = fields.float("frequency_penalty")?.unwrap_or(0.0);
    sampling.repetition = fields.float("repetition_penalty")?.or(defaults.repetition_penalty).unwrap_or(1.0);
    sampling.bias = fields.bias("logit_bias")?;
    if let Some(&(id, _)) = sampling.bias.iter().find(|&&(id, _)| id as usize >= house.toy.vocabulary()) {
        let (field, got) = ("logit_bias".to_owned(), id.to_string());
        return Err(Wrong { field, want: "a dictionary of token ids of the vocabulary", got });
    }
    sampling.stop = fields.texts("stop")?;
    sampling.stop_ids = fields.ids("stop_token_ids")?.unwrap_or_default();
    sampling.ignore_eos = fields.flag("ignore_eos")?;
    sampling.keep_stop = fields.flag("include_stop_str_in_output")?;
    sampling.skip_special = fields.get("skip_special_tokens").is_none_or(|skip| skip != false);
    if (0.0..1e-6).contains(&sampling.temperature) {
        sampling.temperature = 0.0;
    }
    Ok(sampling)
}

/// `n` sequences of each prompt. With a seed, every prompt's generator starts from it.
pub fn sequences(
    house: &House,
    prompts: &[Vec<TokenId>],
    sampling: &Sampling,
    seed: Option<u64>,
    n: usize,
    hold: Hold,
) -> Vec<Sequence> {
    let mut all = Vec::new();
    for prompt in prompts {
        for choice in 0..n as u64 {
            let mut own = sampling.clone();
            own.noise = seed.map_or_else(Noise::fresh, |seed| Noise::Restarting(seed.wrapping_add(choice)));
            own.max_tokens = own.max_tokens.min(house.setup.max_len.saturating_sub(prompt.len()));
            all.push(Sequence::new(all.len(), Context::new(prompt), own, hold));
        }
    }
    all
}

/// Reason for which a prompt is invalid, if any.
pub fn unfit(house: &House, prompts: &[Vec<TokenId>]) -> Option<String> {
    let longest = house.setup.max_len;
    if prompts.is_empty() || prompts.iter().any(Vec::is_empty) {
        return Some("prompt must not be empty".to_owned());
    }
    if let Some(id) = outside(prompts, &house.toy) {
        return Some(format!("token id {id} is out of vocabulary"));
    }
    let long = prompts.iter().map(Vec::len).find(|&len| len >= longest)?;
    Some(format!("prompt length ({long}) should not exceed the context length ({longest})"))
}

/// The prompt rendered by the template from `messages`.
pub fn chat_prompt(house: &House, fields: &Fields) -> Result<Vec<TokenId>, String> {
    let messages = fields.get("messages").filter(|messages| messages.is_array());
    let messages = messages.ok_or("messages: Field required")?;
    let opening = fields.get("add_generation_prompt").is_none_or(|opening| opening == true);
    Ok(house.toy.encode(&house.toy.chat(messages, opening)?))
}
