//! `/v1/chat/completions`: one prompt rendered by the template, one or more choices, and optional
//! parsers of reasoning and tool calls.

use serde_json::{Value, json};

use super::super::batch::{Batch, Reuse};
use super::super::fields::Fields;
use super::super::hermes;
use super::super::http::{Out, Request, Sent};
use super::super::openai::{Parsed, Parsers, Parting, created, id};
use super::super::sample::Sampling;
use super::super::sequence::{Finish, Piece, Sequence};
use super::super::toy::Context;
use super::answer::Told;
use super::completions::{Streaming, check_priority, plain_usage, salt, sequences, stop_reason};
use super::tags::Forced;
use super::{Of, Refusal, Vllm};

pub(super) struct Chat {
    pub prompt: Vec<u32>,
    pub sampling: Sampling,
    n: usize,
    salt: u64,
    logprobs: Option<usize>,
    prompt_logprobs: Option<usize>,
    return_ids: bool,
    parsers: Parsers,
    /// All calls but the first are left out.
    single_call: bool,
    forced: Option<Forced>,
    /// The output is the arguments of this function: no tag binds it.
    arguments_of: Option<String>,
    stream: Streaming,
}

impl Chat {
    fn sequences(&self) -> Vec<Sequence> {
        sequences(&[Context::new(&self.prompt)], std::slice::from_ref(&self.sampling), self.n, self.salt)
    }

    fn reuse(&self) -> Reuse {
        if self.prompt_logprobs.is_some() { Reuse::WriteOnly } else { Reuse::AtOnce }
    }
}

impl Vllm {
    pub(super) async fn chat(&self, request: &Request, out: &mut Out) -> Sent {
        let chat = match self.open(request).and_then(|fields| self.chat_asked(&fields)) {
            Ok(chat) => chat,
            Err(refusal) => return self.refuse(&refusal, out).await,
        };
        if chat.stream.on {
            let id = self.id_of(request, "chatcmpl");
            return self.stream_chat(chat, &id, out).await;
        }
        match self.whole_chat(chat).await {
            Ok(body) => out.json(200, &body).await,
            Err(refusal) => self.refuse(&refusal, out).await,
        }
    }

    pub(super) fn chat_prompt(&self, fields: &Fields) -> Result<Vec<u32>, Refusal> {
        let Some(messages) = fields.get("messages").filter(|messages| messages.is_array()) else {
            return Err(Refusal::about("1 validation error:\n  messages: Field required", "messages"));
        };
        let opening = fields.get("add_generation_prompt").is_none_or(|opening| opening == true);
        let text = self.house.toy.chat(messages, opening).map_err(Refusal::bad)?;
        Ok(self.house.toy.encode(&text))
    }

    pub(super) fn chat_asked(&self, fields: &Fields) -> Result<Chat, Refusal> {
        let prompt = self.chat_prompt(fields)?;
        let asked = fields.uint("max_completion_tokens")?.or(fields.uint("max_tokens")?);
        let sampling = self.openai_sampling(fields, self.room(prompt.len(), asked, None)?)?;
        let n = fields.uint("n")?.unwrap_or(1).max(1) as usize;
        if n > 1 && sampling.temperature == 0.0 {
            return Err(Refusal::about(format!("n must be 1 when using greedy sampling, got {n}."), "n"));
        }
        let top = self.logprobs(fields, "top_logprobs")?;
        let logprobs = fields.flag("logprobs")?;
        if logprobs {
            self.compile()?;
        }
        if top.is_some_and(|top| top > 0) && !logprobs {
            return Err(Refusal::about(
                "when using `top_logprobs`, `logprobs` must be set to true.",
                "top_logprobs",
            ));
        }
        check_priority(fields)?;
        Ok(Chat {
            prompt,
            sampling,
            n,
            salt: salt(fields)?,
            logprobs: logprobs.then_some(top.unwrap_or(0)),
            prompt_logprobs: self.logprobs(fields, "prompt_logprobs")?,
            return_ids: fields.flag("return_token_ids")?,
            parsers: Parsers::of(&self.house.setup, fields.tools()),
            single_call: fields.single_call(),
            arguments_of: match (self.made_of_tools(fields)?, Forced::of(fields)) {
                (Some(("json", _)), Some(Forced::Named(name))) => Some(name),
                _ => None,
            },
            forced: Forced::of(fields).filter(|_| self.minor() >= 32),
            stream: Streaming::of(fields)?,
        })
    }

    async fn whole_chat(&self, chat: Chat) -> Result<Value, Refusal> {
        let mut batch = Batch::begin(&self.house, chat.sequences(), chat.reuse()).await;
        let all = batch.finish().await;
        let mut thoughts = 0;
        let mut choice = |(sequence, pieces): (&Sequence, &Vec<_>)| {
            let mut parsed = chat.parsers.whole(&sequence.text);
            if let Some(name) = &chat.arguments_of {
                let call = hermes::Call { name: name.clone(), arguments: sequence.text.clone() };
                parsed = Parsed { calls: vec![call], answers: true, ..Parsed::default() };
            }
            thoughts += counted(&chat.parsers, pieces);
            let finish = sequence.finish.as_ref();
            let reason = match &chat.forced {
                None if !parsed.calls.is_empty() => Some("tool_calls"),
                None => reason(finish, parsed.call.is_some()),
                Some(Forced::Any) => reason(finish, true),
                Some(Forced::Named(_)) => reason(finish, false),
            };
            let mut message = self.message(&chat.parsers, &parsed);
            if chat.forced.is_some() && message["content"].is_null() {
                message["content"] = json!("");
            }
            if let Some(calls) = single(&chat, &mut message) {
                calls.truncate(1);
            }
            json!({"index": sequence.index, "message": message,
                "logprobs": chat.logprobs.map(|top| self.chat_logprobs(pieces, top, &mut Told::default())),
                "finish_reason": reason,
                "stop_reason": stop_reason(sequence.finish.as_ref()),
                "token_ids": chat.return_ids.then(|| sequence.output())})
        };
        let choices: Vec<Value> = batch.sequences.iter().zip(&all).map(&mut choice).collect();
        let of = Of::Chat(chat.parsers.reasons().then_some(thoughts));
        let first = &batch.sequences[0];
        let rows = match chat.prompt_logprobs {
            Some(top) => self.prompt_rows(first, top, true)?,
            None => Value::Null,
        };
        let mut body = json!({"id": id("chatcmpl"), "object": "chat.completion", "created": created(),
            "model": self.house.setup.model, "choices": choices, "service_tier": null,
            "system_fingerprint": self.fingerprint(),
            "usage": self.usage(chat.prompt.len(), batch.output_tokens(), first.cached, of),
            "prompt_logprobs": rows, "prompt_token_ids": chat.return_ids.then_some(&chat.prompt), "prompt_text": null,
            "kv_transfer_params": null});
        self.newer(&mut body);
        Ok(body)
    }

    /// A whole message with its reasoning, text and tool call, if present.
    fn message(&self, parsers: &Parsers, parsed: &Parsed) -> Value {
        let said = (!parsers.any() || !parsed.said.is_empty()).then_some(&parsed.said);
        let mut message = json!({"role": "assistant", "content": said, "refusal": null, "annotations": null,
            "audio": null, "function_call": null});
        if let Some(arguments) = &parsed.call {
            let function = json!({"name": "weather", "arguments": arguments});
            message["tool_calls"] =
                json!([{"id": id("chatcmpl-tool"), "type": "function", "function": function}]);
        }
        if !parsed.calls.is_empty() {
            let calls = parsed.calls.iter().map(|call| {
                json!({"id": id("chatcmpl-tool"), "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments}})
            });
            message["tool_calls"] = calls.collect();
        }
        if parsers.reasons() || self.minor() >= 32 {
            self.thought(Some(&parsed.thought).filter(|thought| !thought.is_empty()), message)
        } else {
            message
        }
    }

    /// A whole answer from token ids, whose parser decodes all special tokens as text.
    pub(super) fn derender(&self, request: &Request) -> Result<Value, Refusal> {
        let fields = Fields::of(request)?;
        let missing = |name: &'static str| {
            Refusal::about(format!("1 validation error:\n  {name}: Field required"), name)
        };
        let generated = fields.get("generate_response").ok_or_else(|| missing("generate_response"))?;
        let asked =
            Fields::from(fields.get("chat_request").ok_or_else(|| missing("chat_request"))?, "chat_request")?;
        let choice = generated.pointer("/choices/0").ok_or_else(|| missing("choices"))?;
        let ids = Fields::from(choice, "choices")?.ids("token_ids")?.unwrap_or_default();
        if ids.is_empty() {
            return Err(Refusal::bad("choice 0 has empty or null token_ids"));
        }
        let parsers = Parsers::of(&self.house.setup, asked.tools());
        // By steps: a token whose text ends within a character is held.
        let whole = (0..=ids.len()).rev().map(|end| self.house.toy.decode(&ids[..end], !parsers.any()));
        let text = whole.into_iter().find(|text| !text.ends_with(char::REPLACEMENT_CHARACTER));
        let parsed = parsers.whole(&text.unwrap_or_default());
        let mut message = self.message(&parsers, &parsed);
        if Forced::of(&asked).is_some() && message["content"].is_null() {
            message["content"] = json!("");
        }
        for call in message.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
            call["id"] = json!(id(""));
        }
        Ok(json!({"id": id("derendered"), "object": "chat.completion", "created": created(),
            "model": self.house.setup.model, "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": plain_usage(0, ids.len())}))
    }

    /// The delta of an event; `None` if the parsers returned nothing.
    fn delta(&self, parsers: &Parsers, parsed: &Parsed) -> Option<Value> {
        if parsed.is_nothing() {
            return (!parsers.any()).then(|| json!({"content": ""}));
        }
        let mut delta = json!({});
        if !parsed.thought.is_empty() {
            delta = self.thought(Some(&parsed.thought), delta);
        }
        if !parsed.said.is_empty() || parsed.call.is_some() {
            delta["content"] = json!(Some(&parsed.said).filter(|said| !said.is_empty()));
        }
        if let Some(arguments) = &parsed.call {
            let mut call = json!({"index": 0, "function": {}});
            if parsed.begins {
                call = json!({"id": id("chatcmpl-tool"), "type": "function", "index": 0, "function": {"name": "weather"}});
            }
            if !arguments.is_empty() {
                call["function"]["arguments"] = json!(arguments);
            }
            delta["tool_calls"] = json!([call]);
        }
        if !parsed.calls.is_empty() {
            if !parsed.said.is_empty() {
                delta["content"] = json!(parsed.said);
            }
            delta["tool_calls"] =
                parsed.calls.iter().enumerate().flat_map(|(at, call)| deltas(at, call)).collect();
        }
        Some(delta)
    }

    /// A message or delta with reasoning under this version's field name.
    fn thought(&self, thought: Option<&String>, mut message: Value) -> Value {
        if self.minor() >= 15 {
            message["reasoning"] = json!(thought);
        }
        if self.minor() <= 15 {
            message["reasoning_content"] = json!(thought);
        }
        message
    }

    async fn stream_chat(&self, chat: Chat, id: &str, out: &mut Out) -> Sent {
        let created = created();
        let stream = self.streams.begin(id);
        let named = matches!(chat.forced, Some(Forced::Named(_)));
        let frame = |choices: Value| {
            json!({"id": id, "object": "chat.completion.chunk", "created": created, "model": self.house.setup.model,
                "choices": choices})
        };
        let mut batch = Batch::begin(&self.house, chat.sequences(), chat.reuse()).await;
        let mut partings: Vec<Parting> =
            batch.sequences.iter().map(|_| Parting::new(chat.parsers.clone())).collect();
        let mut told: Vec<Told> = batch.sequences.iter().map(|_| Told::default()).collect();
        out.events().await?;
        for at in 0..chat.n {
            let mut event =
                frame(json!([{"index": at, "delta": {"role": "assistant", "content": ""}, "logprobs": null,
                "finish_reason": null}]));
            event["prompt_token_ids"] = json!(chat.return_ids.then_some(&chat.prompt));
            event["prompt_text"] = Value::Null;
            if chat.stream.continuous {
                event["usage"] = self.running_usage(chat.prompt.len(), 0, Self::of(&chat, 0));
            }
            out.event(event).await?;
        }
        loop {
            if stream.is_aborted() {
                let ended = |at| json!({"index": at, "delta": {}, "logprobs": null, "finish_reason": "abort", "stop_reason": null});
                out.event(frame((0..chat.n).map(ended).collect())).await?;
                break;
            }
            let pieces = batch.step().await;
            if pieces.is_empty() {
                break;
            }
            for (at, piece) in pieces {
                let mut parsed = partings[at].push(&piece.text, piece.finish.is_some());
                if let Some(name) = &chat.arguments_of {
                    let name =
                        if batch.sequences[at].output().len() == 1 { name.clone() } else { String::new() };
                    let call = hermes::Call { name, arguments: piece.text.clone() };
                    parsed = Parsed { calls: vec![call], answers: true, ..Parsed::default() };
                }
                // There is no event without parsed output, unless it has ids or a finish reason.
                let delta = match self.delta(&chat.parsers, &parsed) {
                    None if piece.finish.is_none() && !chat.return_ids && chat.logprobs.is_none() => continue,
                    delta => delta.unwrap_or_else(|| json!({})),
                };
                let mut delta = delta;
                if let Some(calls) = single(&chat, &mut delta) {
                    calls.retain(|call| call["index"] == 0);
                }
                let mut choice = json!({"index": at, "delta": delta,
                    "logprobs": chat.logprobs.map(|top| self.chat_logprobs(std::slice::from_ref(&piece), top, &mut told[at])),
                    "finish_reason": reason(piece.finish.as_ref(), partings[at].called() && !named)});
                if piece.finish.is_some() {
                    choice["stop_reason"] = stop_reason(piece.finish.as_ref());
                }
                choice["token_ids"] = json!(chat.return_ids.then_some([piece.token]));
                let mut event = frame(json!([choice]));
                if piece.finish.is_some() && !chat.stream.usage && self.minor() >= 29 {
                    event["system_fingerprint"] = self.fingerprint();
                }
                if chat.stream.continuous {
                    let output = batch.sequences[at].output().len();
                    let of = Self::of(&chat, partings[at].thoughts);
                    event["usage"] = self.running_usage(chat.prompt.len(), output, of);
                }
                out.event(event).await?;
            }
        }
        if chat.stream.usage {
            let mut event = frame(json!([]));
            let of = Self::of(&chat, partings.iter().map(|parting| parting.thoughts).sum());
            event["usage"] =
                self.last_usage(chat.prompt.len(), batch.output_tokens(), batch.sequences[0].cached, of);
            if self.minor() >= 29 {
                event["system_fingerprint"] = self.fingerprint();
            }
            out.event(event).await?;
        }
        out.event("[DONE]").await?;
        out.end().await
    }

    fn of(chat: &Chat, thoughts: usize) -> Of {
        Of::Chat(chat.parsers.reasons().then_some(thoughts))
    }

    /// Usage so far, in an event.
    fn running_usage(&self, prompt: usize, output: usize, of: Of) -> Value {
        let mut usage = plain_usage(prompt, output);
        if self.minor() >= 32 {
            usage["completion_tokens_details"] = of.details();
        }
        usage
    }
}

/// The calls of a message or delta, if all but the first are to be left out.
fn single<'a>(chat: &Chat, said: &'a mut Value) -> Option<&'a mut Vec<Value>> {
    said.get_mut("tool_calls").filter(|_| chat.single_call)?.as_array_mut()
}

/// The deltas of a call: its id and name, and its arguments.
fn deltas(at: usize, call: &hermes::Call) -> Vec<Value> {
    let begins =
        json!({"id": id("chatcmpl-tool"), "type": "function", "index": at, "function": {"name": call.name}});
    let goes_on = json!({"index": at, "function": {"arguments": call.arguments}});
    let both = [(!call.name.is_empty(), begins), (!call.arguments.is_empty(), goes_on)];
    both.into_iter().filter_map(|(is, delta)| is.then_some(delta)).collect()
}

/// Tokens that a parser counts as reasoning.
fn counted(parsers: &Parsers, pieces: &[Piece]) -> usize {
    let mut parting = Parting::new(parsers.clone());
    for piece in pieces {
        parting.push(&piece.text, piece.finish.is_some());
    }
    parting.thoughts
}

/// A text that ends by itself after a tool call has that call as its finish reason.
fn reason(finish: Option<&Finish>, called: bool) -> Option<&'static str> {
    match finish {
        Some(Finish::Eos) if called => Some("tool_calls"),
        finish => finish.map(Finish::reason),
    }
}
