//! The OpenAI routes of SGLang: the chat route takes the model's sampling defaults, the completions
//! route does not.

use serde_json::{Map, Value, json};

use super::super::batch::{Batch, Reuse};
use super::super::fields::Fields;
use super::super::http::{Out, Request, Sent};
use super::super::openai::{Parsed, Parsers, Parting, created, id};
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
    parsers: Parsers,
    tools: bool,
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
        let beyond = ["stop_regex", "json_schema", "regex", "ebnf", "echo", "suffix", "best_of"];
        if let Some(message) = fields.beyond(&beyond) {
            return Err(Refusal::openai(501, message));
        }
        let stream = fields.flag("stream")?;
        for name in ["return_prompt_token_ids", "return_token_ids"] {
            if chat && stream && fields.flag(name)? {
                let message = format!(
                    "{name} is not supported with streaming on /v1/chat/completions. Please set \
                    stream=false when using {name}=true."
                );
                return Err(Refusal::openai(400, message));
            }
        }
        let prompts =
            if chat { vec![self.chat_prompt(&fields)?] } else { fields.prompts(&self.house.toy)? };
        if prompts.is_empty() || prompts.iter().any(Vec::is_empty) {
            return Err(Refusal::openai(400, "Prompt cannot be empty"));
        }
        self.in_vocabulary(&prompts)?;
        let asked = match fields.uint("max_completion_tokens")?.filter(|_| chat) {
            Some(asked) => Some(asked),
            None => fields.uint("max_tokens")?,
        };
        if asked == Some(0) {
            return Err(Refusal::openai(400, "max_tokens must be positive"));
        }
        let defaults = if chat { self.model_defaults() } else { Map::new() };
        let options = fields.object("stream_options")?;
        let (mut sequences, mut choices) = (Vec::new(), 1);
        for prompt in &prompts {
            if let Some(message) = self.too_long(prompt.len(), asked.unwrap_or(0) as usize) {
                return Err(Refusal::openai(400, message));
            }
            let room = (self.house.setup.max_len - prompt.len()) as u64;
            let max = asked.unwrap_or(if chat { room } else { 16 }).min(room);
            let (mut sampling, n) = self.sampling(&renamed(&fields, &defaults, Some(max)))?;
            sampling.only = fields.grammar(&self.house.toy)?;
            choices = n;
            for _ in 0..n {
                let context = Context::new(prompt);
                sequences.push(Sequence::new(sequences.len(), context, sampling.clone(), Hold::Prefix));
            }
        }
        let top = fields.get(if chat { "top_logprobs" } else { "logprobs" }).and_then(Value::as_u64);
        let tells = !chat || self.options.chat_ids;
        let on = if chat { fields.flag("logprobs")? } else { top.is_some() };
        Ok(Asked {
            chat,
            n: choices,
            sequences,
            logprobs: on.then_some(top.unwrap_or(0) as usize),
            return_ids: tells && fields.flag("return_token_ids")?,
            return_prompt: tells
                && (fields.flag("return_prompt_token_ids")? || fields.flag("return_token_ids")?),
            usage: options.flag("include_usage")?,
            continuous: options.flag("continuous_usage_stats")?,
            parsers: Parsers::of(&self.house.setup, chat && fields.tools()),
            tools: chat && fields.tools(),
            stream,
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
        let thoughts = batch.sequences.iter().zip(&all).map(|(_, pieces)| counted(&asked, pieces)).sum();
        body["usage"] = usage(&batch.sequences, asked.n, thoughts);
        let version = self.house.weight_version();
        let first = batch.sequences.first().map_or(0, |sequence| sequence.output().len());
        body["metadata"] = json!({"weight_version": version, "weight_versions": self.weight_versions(first)});
        out.json(200, &body).await
    }

    fn choice(&self, asked: &Asked, sequence: &Sequence, pieces: &[Piece]) -> Value {
        let text = format!("{}{}", sequence.text, sequence.tail(&self.house.toy));
        let mut choice = json!({"index": sequence.index});
        let mut reason = sequence.finish.as_ref().map(Finish::reason);
        if asked.chat {
            let parsed = asked.parsers.whole(&text);
            choice["message"] = message(&parsed);
            reason = ending(sequence.finish.as_ref(), parsed.call.is_some());
        } else {
            choice["text"] = json!(text);
        }
        choice["logprobs"] = json!(asked.logprobs.map(|top| self.openai_logprobs(asked.chat, pieces, top)));
        choice["finish_reason"] = json!(reason);
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
        let mut partings: Vec<Parting> =
            batch.sequences.iter().map(|_| Parting::new(asked.parsers.clone())).collect();
        let frame = |choice: Value| {
            let mut event = head.clone();
            event["choices"] = json!([choice]);
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
                let mut events = Vec::new();
                if asked.chat {
                    if sequence.output().len() == 1 {
                        let delta = json!({"reasoning_content": null, "role": "assistant", "content": ""});
                        out.event(frame(chat_choice(at, delta))).await?;
                    }
                    let parsed = partings[at].push(&piece.text, piece.finish.is_some());
                    let logprobs = asked
                        .logprobs
                        .map(|top| self.openai_logprobs(true, std::slice::from_ref(&piece), top));
                    events.extend(deltas(at, &parsed, logprobs, asked.tools).into_iter().map(
                        |(choice, dumped)| {
                            let mut event = frame(choice);
                            if dumped {
                                event["usage"] = Value::Null;
                            }
                            event
                        },
                    ));
                } else {
                    let mut event = frame(self.text_choice(asked, sequence, &piece));
                    event["usage"] = Value::Null;
                    events.push(event);
                }
                for mut event in events {
                    if asked.continuous {
                        event["usage"] = usage(std::slice::from_ref(sequence), 1, partings[at].thoughts);
                    }
                    out.event(event).await?;
                }
            }
        }
        // The ends of all chats are sent last.
        for sequence in batch.sequences.iter().filter(|_| asked.chat) {
            let mut choice = chat_choice(sequence.index, json!({"reasoning_content": null}));
            choice["finish_reason"] =
                json!(ending(sequence.finish.as_ref(), partings[sequence.index].called()));
            choice["matched_stop"] = matched(sequence);
            out.event(frame(choice)).await?;
        }
        if asked.usage {
            let mut event = head.clone();
            event["choices"] = json!([]);
            let thoughts = partings.iter().map(|parting| parting.thoughts).sum();
            event["usage"] = usage(&batch.sequences, asked.n, thoughts);
            if !asked.chat {
                // `exclude_none` (`serving_completions.py`).
                let members = event["usage"].as_object_mut().expect("an object");
                members.retain(|_, value| !value.is_null());
            }
            out.event(event).await?;
        }
        out.event("[DONE]").await?;
        out.end().await
    }

    fn text_choice(&self, asked: &Asked, sequence: &Sequence, piece: &Piece) -> Value {
        let one = std::slice::from_ref(piece);
        let mut choice = json!({"index": sequence.index, "text": piece.text,
            "logprobs": asked.logprobs.map(|top| self.openai_logprobs(false, one, top)),
            "finish_reason": piece.finish.as_ref().map(Finish::reason), "matched_stop": matched(sequence)});
        if asked.return_ids {
            choice["token_ids"] = json!([piece.token]);
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

/// A whole message; texts are empty rather than null.
fn message(parsed: &Parsed) -> Value {
    let thought = Some(&parsed.thought).filter(|thought| !thought.is_empty());
    let mut message = json!({"role": "assistant", "content": parsed.said, "reasoning_content": thought});
    if let Some(arguments) = &parsed.call {
        let function = json!({"name": "weather", "arguments": arguments});
        message["tool_calls"] =
            json!([{"id": id("call"), "index": null, "type": "function", "function": function}]);
    }
    message
}

#[expect(clippy::needless_pass_by_value, reason = "made for it")]
fn chat_choice(index: usize, delta: Value) -> Value {
    json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": null, "matched_stop": null})
}

/// The choices of the events of a piece; none for empty text. Requests with tools use another
/// serialiser, which leaves out no field, not even `usage`: those are marked.
#[expect(clippy::needless_pass_by_value, reason = "made for it")]
fn deltas(at: usize, parsed: &Parsed, logprobs: Option<Value>, tools: bool) -> Vec<(Value, bool)> {
    let mut all = Vec::new();
    if !parsed.thought.is_empty() {
        all.push((chat_choice(at, json!({"reasoning_content": parsed.thought})), false));
    }
    let dumped = |content: Option<&str>| json!({"role": null, "content": content, "reasoning_content": null});
    if !parsed.said.is_empty() && tools {
        all.push((chat_choice(at, dumped(Some(&parsed.said))), true));
    } else if !parsed.said.is_empty() {
        all.push((chat_choice(at, json!({"reasoning_content": null, "content": parsed.said})), false));
    }
    if let Some(arguments) = &parsed.call {
        let mut told = |id: Value, name: Value, arguments: &str| {
            let function = json!({"name": name, "arguments": arguments});
            let mut delta = dumped(None);
            delta["tool_calls"] = json!([{"id": id, "index": 0, "type": "function", "function": function}]);
            all.push((chat_choice(at, delta), true));
        };
        if parsed.begins {
            told(json!(id("call")), json!("weather"), "");
        }
        if !arguments.is_empty() {
            told(Value::Null, Value::Null, arguments);
        }
    }
    if let Some((choice, _)) = all.first_mut() {
        choice["logprobs"] = json!(logprobs);
    }
    all
}

/// A text that ends by itself after a tool call has that call as its finish reason.
fn ending(finish: Option<&Finish>, called: bool) -> Option<&'static str> {
    match finish {
        Some(Finish::Eos) if called => Some("tool_calls"),
        finish => finish.map(Finish::reason),
    }
}

/// Tokens that a parser counts as reasoning.
fn counted(asked: &Asked, pieces: &[Piece]) -> usize {
    let mut parting = Parting::new(asked.parsers.clone());
    for piece in pieces {
        parting.push(&piece.text, piece.finish.is_some());
    }
    parting.thoughts
}

/// Every prompt counts once, for any number of choices.
fn usage(sequences: &[Sequence], n: usize, thoughts: usize) -> Value {
    let prompt: usize = sequences.iter().step_by(n).map(|sequence| sequence.prompt).sum();
    let output: usize = sequences.iter().map(|sequence| sequence.output().len()).sum();
    let mut usage = json!({"prompt_tokens": prompt, "total_tokens": prompt + output, "completion_tokens": output,
        "prompt_tokens_details": null, "reasoning_tokens": thoughts, "completion_tokens_details": null});
    if thoughts > 0 {
        usage["completion_tokens_details"] = json!({"reasoning_tokens": thoughts});
    }
    usage
}
