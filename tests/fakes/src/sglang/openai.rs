//! The OpenAI routes of SGLang: the chat route takes the model's sampling defaults, the completions route does not.

use serde_json::{Map, Value, json};

use super::super::batch::{Batch, Reuse};
use super::super::fields::{Fields, outside};
use super::super::http::{Out, Request, Sent};
use super::super::openai::{Parting, created, id, reasoning};
use super::super::sequence::{Finish, Hold, Piece, Sequence};
use super::super::toy::Context;
use super::params::renamed;
use super::{Refusal, Sglang};

struct Asked {
    chat: bool,
    n: usize,
    sequences: Vec<Sequence>,
    logprobs: Option<usize>,
    return_ids: bool,
    return_prompt: bool,
    usage: bool,
    continuous: bool,
    stream: bool,
}

impl Sglang {
    pub(super) async fn completions(&self, request: &Request, out: &mut Out) -> Sent {
        self.answer(self.open(request, false), out).await
    }

    pub(super) async fn chat(&self, request: &Request, out: &mut Out) -> Sent {
        self.answer(self.open(request, true), out).await
    }

    fn open(&self, request: &Request, chat: bool) -> Result<Asked, Refusal> {
        let fields = Fields::of(request)?;
        let beyond = [
            "stop_regex",
            "json_schema",
            "regex",
            "ebnf",
            "response_format",
            "tools",
            "echo",
            "suffix",
            "best_of",
        ];
        if let Some(message) = fields.beyond(&beyond) {
            return Err(Refusal::openai(501, message));
        }
        let prompts =
            if chat { vec![self.chat_prompt(&fields)?] } else { fields.prompts(&self.house.toy)? };
        if prompts.is_empty() || prompts.iter().any(Vec::is_empty) {
            return Err(Refusal::openai(400, "Prompt cannot be empty"));
        }
        if let Some(id) = outside(&prompts, &self.house.toy) {
            return Err(Refusal::openai(400, format!("token id {id} is out of vocabulary")));
        }
        let asked = match fields.uint("max_completion_tokens")?.filter(|_| chat) {
            Some(asked) => Some(asked),
            None => fields.uint("max_tokens")?,
        };
        if asked == Some(0) {
            return Err(Refusal::openai(400, "max_tokens must be positive"));
        }
        let by_model = chat && self.options.sampling_defaults == "model";
        let defaults = if by_model { self.model_defaults() } else { Map::new() };
        let options = fields.object("stream_options")?;
        let (mut sequences, mut choices) = (Vec::new(), 1);
        for prompt in &prompts {
            if let Some(message) = self.too_long(prompt.len(), asked.unwrap_or(0) as usize) {
                return Err(Refusal::openai(400, message));
            }
            let room = (self.house.setup.max_len - prompt.len()) as u64;
            let max = asked.unwrap_or(if chat { room } else { 16 }).min(room);
            let (sampling, n) = self.sampling(&renamed(&fields, &defaults, Some(max)))?;
            choices = n;
            for _ in 0..n {
                let context = Context::new(prompt);
                sequences.push(Sequence::new(sequences.len(), context, sampling.clone(), Hold::Prefix));
            }
        }
        let top = fields.get(if chat { "top_logprobs" } else { "logprobs" }).and_then(Value::as_u64);
        let on = if chat { fields.flag("logprobs")? } else { top.is_some() };
        Ok(Asked {
            chat,
            n: choices,
            sequences,
            logprobs: on.then_some(top.unwrap_or(0) as usize),
            return_ids: fields.flag("return_token_ids")?,
            return_prompt: fields.flag("return_prompt_token_ids")? || fields.flag("return_token_ids")?,
            usage: options.flag("include_usage")?,
            continuous: options.flag("continuous_usage_stats")?,
            stream: fields.flag("stream")?,
        })
    }

    /// `generation_config.json`, for the chat route.
    fn model_defaults(&self) -> Map<String, Value> {
        let defaults = self.house.defaults.lock();
        let pairs = [
            ("temperature", json!(defaults.temperature)),
            ("top_p", json!(defaults.top_p)),
            ("top_k", json!(defaults.top_k)),
            ("min_p", json!(defaults.min_p)),
            ("repetition_penalty", json!(defaults.repetition_penalty)),
        ];
        pairs
            .into_iter()
            .filter(|(_, value)| !value.is_null())
            .map(|(name, value)| (name.to_owned(), value))
            .collect()
    }

    async fn answer(&self, asked: Result<Asked, Refusal>, out: &mut Out) -> Sent {
        let mut asked = match asked {
            Ok(asked) => asked,
            Err(_) if self.house.is_dead() => return out.reset(),
            Err(Refusal(status, body)) => return out.json(status, &body).await,
        };
        let sequences = std::mem::take(&mut asked.sequences);
        let mut batch = Batch::begin(&self.house, sequences, Reuse::AfterStep).await;
        let head = |object: &str| {
            let (prefix, object) =
                if asked.chat { ("chatcmpl", object) } else { ("cmpl", "text_completion") };
            json!({"id": id(prefix), "object": object, "created": created(), "model": self.house.setup.model})
        };
        if asked.stream {
            return self.stream(&asked, &mut batch, head("chat.completion.chunk"), out).await;
        }
        let all = batch.finish().await;
        let mut body = head("chat.completion");
        let told = batch.sequences.iter().zip(&all);
        body["choices"] = told.map(|(sequence, pieces)| self.choice(&asked, sequence, pieces)).collect();
        body["usage"] = usage(&batch.sequences, asked.n, self.options.cache_report);
        out.json(200, &body).await
    }

    fn choice(&self, asked: &Asked, sequence: &Sequence, pieces: &[Piece]) -> Value {
        let text = format!("{}{}", sequence.text, sequence.tail(&self.house.toy));
        let mut choice = json!({"index": sequence.index});
        if asked.chat {
            let (thought, said) = reasoning(&text, self.house.setup.reasoning_end.as_deref());
            choice["message"] = json!({"role": "assistant", "content": said, "reasoning_content": thought, "tool_calls": null});
        } else {
            choice["text"] = json!(text);
        }
        choice["logprobs"] = json!(asked.logprobs.map(|top| self.openai_logprobs(asked.chat, pieces, top)));
        choice["finish_reason"] = json!(sequence.finish.as_ref().map(Finish::reason));
        choice["matched_stop"] = matched(sequence);
        let ids = if asked.chat { "response_token_ids" } else { "token_ids" };
        if asked.return_ids {
            choice[ids] = json!(sequence.output());
        }
        if asked.return_prompt {
            choice["prompt_token_ids"] = json!(&sequence.context.tokens()[..sequence.prompt]);
        }
        choice
    }

    async fn stream(&self, asked: &Asked, batch: &mut Batch, head: Value, out: &mut Out) -> Sent {
        let marker = self.house.setup.reasoning_end.as_deref();
        let mut partings: Vec<Parting> = batch.sequences.iter().map(|_| Parting::new(marker)).collect();
        let frame = |choices: Value| {
            let mut event = head.clone();
            event["choices"] = choices;
            event
        };
        out.events().await?;
        loop {
            let pieces = batch.step().await;
            if pieces.is_empty() {
                break;
            }
            for (at, mut piece) in pieces {
                let sequence = &batch.sequences[at];
                piece.text += &sequence.tail(&self.house.toy);
                if asked.chat && sequence.output().len() == 1 {
                    let delta = json!({"role": "assistant", "content": "", "reasoning_content": null, "tool_calls": null});
                    out.event(frame(
                        json!([{"index": at, "delta": delta, "logprobs": null, "finish_reason": null,
                            "matched_stop": null}]),
                    ))
                    .await?;
                }
                let mut event = frame(json!([self.delta(asked, sequence, &piece, &mut partings[at])]));
                if asked.continuous {
                    event["usage"] = usage(std::slice::from_ref(sequence), 1, false);
                }
                out.event(event).await?;
            }
        }
        if asked.usage {
            let mut event = frame(json!([]));
            event["usage"] = usage(&batch.sequences, asked.n, self.options.cache_report);
            out.event(event).await?;
        }
        out.event("[DONE]").await?;
        out.end().await
    }

    fn delta(&self, asked: &Asked, sequence: &Sequence, piece: &Piece, parting: &mut Parting) -> Value {
        let mut choice = json!({"index": sequence.index});
        if asked.chat {
            let (thought, said) = parting.push(&piece.text, piece.finish.is_some());
            choice["delta"] = if thought.is_empty() {
                json!({"content": said, "reasoning_content": null})
            } else {
                json!({"content": null, "reasoning_content": thought})
            };
        } else {
            choice["text"] = json!(piece.text);
        }
        let one = std::slice::from_ref(piece);
        choice["logprobs"] = json!(asked.logprobs.map(|top| self.openai_logprobs(asked.chat, one, top)));
        choice["finish_reason"] = json!(piece.finish.as_ref().map(Finish::reason));
        choice["matched_stop"] = matched(sequence);
        if asked.return_ids {
            choice[if asked.chat { "response_token_ids" } else { "token_ids" }] = json!([piece.token]);
        }
        if asked.return_prompt && sequence.output().len() == 1 {
            choice["prompt_token_ids"] = json!(&sequence.context.tokens()[..sequence.prompt]);
        }
        choice
    }

    fn openai_logprobs(&self, chat: bool, pieces: &[Piece], top: usize) -> Value {
        let name = |id: u32| self.house.toy.name(id);
        let row =
            |piece: &Piece| if piece.temperature > 0.0 { piece.processed.clone() } else { piece.raw.clone() };
        if !chat {
            let tops = |piece: &Piece| -> Map<String, Value> {
                row(piece).top(top).into_iter().map(|(id, logprob)| (name(id), json!(logprob))).collect()
            };
            return json!({"text_offset": [], "tokens": pieces.iter().map(|piece| name(piece.token)).collect::<Vec<_>>(),
                "token_logprobs": pieces.iter().map(|piece| row(piece).logprob(piece.token)).collect::<Vec<_>>(),
                "top_logprobs": pieces.iter().map(tops).collect::<Vec<_>>()});
        }
        let entry = |id: u32, logprob: f32| json!({"token": name(id), "bytes": name(id).as_bytes(), "logprob": logprob});
        let content = pieces.iter().map(|piece| {
            let mut own = entry(piece.token, row(piece).logprob(piece.token));
            own["top_logprobs"] =
                row(piece).top(top).into_iter().map(|(id, logprob)| entry(id, logprob)).collect();
            own
        });
        json!({"content": content.collect::<Vec<_>>()})
    }
}

fn matched(sequence: &Sequence) -> Value {
    match &sequence.finish {
        Some(Finish::StopText(text)) => json!(text),
        Some(Finish::Eos | Finish::StopToken(_)) => json!(sequence.output().last()),
        _ => Value::Null,
    }
}

/// Every prompt counts once, however many choices it has.
fn usage(sequences: &[Sequence], n: usize, details: bool) -> Value {
    let prompt: usize = sequences.iter().step_by(n).map(|sequence| sequence.prompt).sum();
    let output: usize = sequences.iter().map(|sequence| sequence.output().len()).sum();
    let mut usage = json!({"prompt_tokens": prompt, "total_tokens": prompt + output, "completion_tokens": output,
        "prompt_tokens_details": null, "reasoning_tokens": 0});
    let cached: usize = sequences.iter().step_by(n).map(|sequence| sequence.cached).sum();
    if details && cached > 0 {
        usage["prompt_tokens_details"] = json!({"cached_tokens": cached});
    }
    usage
}
