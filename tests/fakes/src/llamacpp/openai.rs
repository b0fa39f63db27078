//! The OpenAI routes of llama-server: token ids only in logprobs, and usage of the first prompt
//! only.

use serde_json::{Value, json};

use super::super::fields::Fields;
use super::super::http::{Out, Request, Sent};
use super::super::openai::{Parsers, Parting, created, id};
use super::super::sequence::{Finish, Piece, Sequence};
use super::native::{Queue, Wave, timings};
use super::params::Params;
use super::{Llama, Refusal, refuse};

/// The constant part of the events.
struct Head {
    chat: bool,
    id: String,
    created: u64,
    usage: bool,
    parsers: Parsers,
}

impl Llama {
    pub(super) async fn openai(&self, request: &Request, out: &mut Out) -> Sent {
        let chat = request.path.ends_with("chat/completions");
        let asked = if chat { self.chat_asked(request) } else { self.asked(request) };
        let (fields, params, prompts) = match asked {
            Ok(asked) => asked,
            Err(refusal) => return refuse(&refusal, out).await,
        };
        let usage = fields
            .object("stream_options")
            .and_then(|options| options.flag("include_usage"))
            .unwrap_or(false);
        let parsers = Parsers::of(&self.house.setup, chat && fields.tools());
        let head = Head { chat, id: id("chatcmpl"), created: created(), usage, parsers };
        let count = prompts.len() * params.n_cmpl;
        let queue = Self::queue(prompts, &params);
        if params.stream {
            return self.stream_openai(&head, &params, queue, out).await;
        }
        let body = self.whole_openai(&head, &params, queue, count).await;
        out.json_utf8(200, &body).await
    }

    fn chat_asked(&self, request: &Request) -> Result<(Fields, Params, Vec<Vec<u32>>), Refusal> {
        let fields = Fields::of(request)?;
        let prompt = self.chat_prompt(&fields)?;
        self.fits(&prompt)?;
        let params = self.params(&fields)?;
        if fields.get("top_logprobs").is_some() && fields.get("logprobs").is_none_or(|wanted| wanted != true)
        {
            return Err(Refusal::bad("top_logprobs requires logprobs to be set to true"));
        }
        Ok((fields, params, vec![prompt]))
    }

    pub(super) fn chat_text(&self, fields: &Fields) -> Result<String, Refusal> {
        let messages = fields.get("messages").filter(|messages| messages.is_array());
        let messages = messages.ok_or_else(|| Refusal::bad("'messages' is required"))?;
        let opening = fields.get("add_generation_prompt").is_none_or(|opening| opening == true);
        self.house.toy.chat(messages, opening).map_err(|error| Refusal::bad(&error))
    }

    fn chat_prompt(&self, fields: &Fields) -> Result<Vec<u32>, Refusal> {
        Ok(self.house.toy.encode(&self.chat_text(fields)?))
    }

    fn frame(&self, head: &Head, object: &str, choices: &Value) -> Value {
        json!({"choices": choices, "created": head.created, "model": self.house.setup.model,
            "system_fingerprint": "b1-0c1e570", "object": object, "id": head.id})
    }

    async fn whole_openai(&self, head: &Head, params: &Params, mut queue: Queue, count: usize) -> Value {
        let mut choices = vec![Value::Null; count];
        let mut first = None;
        while !queue.is_empty() {
            let mut wave = self.launch(&mut queue, params).await;
            let mut pieces: Vec<Vec<Piece>> = wave.batch.sequences.iter().map(|_| Vec::new()).collect();
            loop {
                let step = wave.step().await;
                if step.is_empty() {
                    break;
                }
                for (at, piece) in step {
                    pieces[at].push(piece);
                }
            }
            for (at, pieces) in pieces.iter().enumerate() {
                let sequence = &wave.batch.sequences[at];
                choices[sequence.index] = self.choice(head, params, sequence, pieces);
            }
            first.get_or_insert_with(|| (usage(&wave, 0), timings(&wave, 0)));
        }
        let object = if head.chat { "chat.completion" } else { "text_completion" };
        let mut body = self.frame(head, object, &Value::from(choices));
        let (usage, timings) = first.unwrap_or_default();
        let id = body.as_object_mut().and_then(|members| members.shift_remove("id"));
        // The id of a whole answer comes after its usage.
        (body["usage"], body["id"], body["timings"]) = (usage, id.unwrap_or_default(), timings);
        body
    }

    fn choice(&self, head: &Head, params: &Params, sequence: &Sequence, pieces: &[Piece]) -> Value {
        let text = format!("{}{}", sequence.text, sequence.tail(&self.house.toy));
        let logprobs = (params.n_probs > 0).then(|| json!({"content": self.probabilities(pieces, params)}));
        let reason = sequence.finish.as_ref().map(Finish::reason);
        if !head.chat {
            return json!({"text": text, "index": sequence.index, "logprobs": logprobs, "finish_reason": reason});
        }
        let parsed = head.parsers.whole(&text);
        let mut message = json!({"role": "assistant", "content": parsed.said});
        if !parsed.thought.is_empty() {
            message["reasoning_content"] = json!(parsed.thought);
        }
        if let Some(arguments) = &parsed.call {
            let function = json!({"name": "weather", "arguments": arguments});
            message["tool_calls"] = json!([{"type": "function", "function": function, "id": id("call")}]);
        }
        let reason = ended(sequence, parsed.call.is_some());
        let mut choice = json!({"finish_reason": reason, "index": sequence.index, "message": message});
        if let Some(logprobs) = logprobs {
            choice["logprobs"] = logprobs;
        }
        choice
    }

    async fn stream_openai(&self, head: &Head, params: &Params, mut queue: Queue, out: &mut Out) -> Sent {
        out.stream("text/event-stream").await?;
        while !queue.is_empty() {
            let mut wave = self.launch(&mut queue, params).await;
            let mut partings: Vec<Parting> =
                wave.batch.sequences.iter().map(|_| Parting::new(head.parsers.clone())).collect();
            loop {
                let pieces = wave.step().await;
                if pieces.is_empty() {
                    break;
                }
                for (at, piece) in pieces {
                    let mut events =
                        self.deltas(head, params, &wave.batch.sequences[at], &piece, &mut partings[at]);
                    if let Some(last) = events.last_mut() {
                        if params.verbose && !head.chat {
                            last["__verbose"] = self.partial(&wave, at, params, &piece);
                        }
                        if params.timings_per_token {
                            last["timings"] = timings(&wave, at);
                        }
                    }
                    if piece.finish.is_some() {
                        let mut ending = self.ending(head, &wave, at, partings[at].called());
                        if params.verbose {
                            ending[0]["__verbose"] = self.last(&wave, at, params, None);
                        }
                        events.extend(ending);
                    }
                    for event in events {
                        out.event(event).await?;
                    }
                }
            }
        }
        out.event("[DONE]").await?;
        out.end().await
    }

    fn deltas(
        &self,
        head: &Head,
        params: &Params,
        sequence: &Sequence,
        piece: &Piece,
        parting: &mut Parting,
    ) -> Vec<Value> {
        let one = std::slice::from_ref(piece);
        let logprobs = (params.n_probs > 0).then(|| json!({"content": self.probabilities(one, params)}));
        if !head.chat {
            let choice = json!({"text": piece.text, "index": sequence.index, "logprobs": logprobs, "finish_reason": null});
            return if piece.incomplete {
                vec![]
            } else {
                vec![self.frame(head, "text_completion", &json!([choice]))]
            };
        }
        let mut deltas = Vec::new();
        if sequence.output().len() == 1 {
            deltas.push(json!({"role": "assistant", "content": null}));
        }
        let parsed = parting.push(&piece.text, piece.finish.is_some());
        if !parsed.thought.is_empty() {
            deltas.push(json!({"reasoning_content": parsed.thought}));
        }
        if !parsed.said.is_empty() {
            deltas.push(json!({"content": parsed.said}));
        }
        if let Some(arguments) = parsed.call {
            let call = if parsed.begins {
                json!({"index": 0, "id": id("call"), "type": "function",
                    "function": {"name": "weather", "arguments": arguments}})
            } else {
                json!({"index": 0, "function": {"arguments": arguments}})
            };
            deltas.push(json!({"tool_calls": [call]}));
        }
        let last = deltas.len();
        let event = |(at, delta): (usize, Value)| {
            let mut choice = json!({"finish_reason": null, "index": sequence.index, "delta": delta});
            if let Some(logprobs) = logprobs.as_ref().filter(|_| at + 1 == last) {
                choice["logprobs"] = logprobs.clone();
            }
            self.frame(head, "chat.completion.chunk", &json!([choice]))
        };
        deltas.into_iter().enumerate().map(event).collect()
    }

    fn ending(&self, head: &Head, wave: &Wave, at: usize, called: bool) -> Vec<Value> {
        let sequence = &wave.batch.sequences[at];
        let reason = ended(sequence, called);
        if !head.chat {
            let choice =
                json!({"text": "", "index": sequence.index, "logprobs": null, "finish_reason": reason});
            let mut event = self.frame(head, "text_completion", &json!([choice]));
            event["usage"] = usage(wave, at);
            event["timings"] = timings(wave, at);
            return vec![event];
        }
        let choice = json!({"finish_reason": reason, "index": sequence.index, "delta": {}});
        let mut events = vec![self.frame(head, "chat.completion.chunk", &json!([choice]))];
        if head.usage {
            let mut event = self.frame(head, "chat.completion.chunk", &json!([]));
            event["usage"] = usage(wave, at);
            events.push(event);
        }
        if let Some(last) = events.last_mut() {
            last["timings"] = timings(wave, at);
        }
        events
    }
}

/// A text that ends by itself after a tool call has that call as its finish reason.
fn ended(sequence: &Sequence, called: bool) -> Option<&'static str> {
    match &sequence.finish {
        Some(Finish::Eos) if called => Some("tool_calls"),
        finish => finish.as_ref().map(Finish::reason),
    }
}

fn usage(wave: &Wave, at: usize) -> Value {
    let sequence = &wave.batch.sequences[at];
    let (prompt, output) = (sequence.prompt, sequence.output().len());
    json!({"completion_tokens": output, "prompt_tokens": prompt, "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": wave.cached[at]}})
}
