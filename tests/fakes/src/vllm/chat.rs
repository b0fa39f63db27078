//! `/v1/chat/completions`: one prompt made by the template, one or more choices, and a reasoning parser if there is one.

use serde_json::{Value, json};

use super::super::batch::{Batch, Reuse};
use super::super::fields::Fields;
use super::super::http::{Out, Request, Sent};
use super::super::openai::{Parting, created, id, reasoning};
use super::super::sample::Sampling;
use super::super::sequence::{Finish, Sequence};
use super::super::toy::Context;
use super::completions::{Streaming, plain_usage, salt, sequences, stop_reason};
use super::{Refusal, Vllm};

pub(super) struct Chat {
    pub prompt: Vec<u32>,
    pub sampling: Sampling,
    n: usize,
    salt: u64,
    logprobs: Option<usize>,
    prompt_logprobs: Option<usize>,
    return_ids: bool,
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
            return self.stream_chat(chat, out).await;
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
        self.check_priority(fields)?;
        Ok(Chat {
            prompt,
            sampling,
            n,
            salt: salt(fields)?,
            logprobs: logprobs.then_some(top.unwrap_or(0)),
            prompt_logprobs: self.logprobs(fields, "prompt_logprobs")?,
            return_ids: fields.flag("return_token_ids")?,
            stream: Streaming::of(fields)?,
        })
    }

    async fn whole_chat(&self, chat: Chat) -> Result<Value, Refusal> {
        let mut batch = Batch::begin(&self.house, chat.sequences(), chat.reuse()).await;
        let all = batch.finish().await;
        let marker = self.house.setup.reasoning_end.as_deref();
        let choice = |(sequence, pieces): (&Sequence, &Vec<_>)| {
            let (thought, said) = reasoning(&sequence.text, marker);
            let message = json!({"role": "assistant", "content": said, "refusal": null, "annotations": null,
                "audio": null, "function_call": null});
            let message =
                thought.map_or_else(|| message.clone(), |thought| self.thought(&thought, message.clone()));
            json!({"index": sequence.index, "message": message,
                "logprobs": chat.logprobs.map(|top| self.chat_logprobs(pieces, top)),
                "finish_reason": sequence.finish.as_ref().map(Finish::reason),
                "stop_reason": stop_reason(sequence.finish.as_ref()),
                "token_ids": chat.return_ids.then(|| sequence.output())})
        };
        let choices: Vec<Value> = batch.sequences.iter().zip(&all).map(choice).collect();
        let first = &batch.sequences[0];
        let rows = match chat.prompt_logprobs {
            Some(top) => self.prompt_rows(first, top, true)?,
            None => Value::Null,
        };
        Ok(json!({"id": id("chatcmpl"), "object": "chat.completion", "created": created(),
            "model": self.house.setup.model, "choices": choices, "service_tier": null,
            "system_fingerprint": self.fingerprint(),
            "usage": self.usage(chat.prompt.len(), batch.output_tokens(), first.cached),
            "prompt_logprobs": rows, "prompt_token_ids": chat.return_ids.then_some(&chat.prompt), "prompt_text": null,
            "kv_transfer_params": null}))
    }

    /// A message or delta with a thought under the name that it has in this version.
    fn thought(&self, thought: &str, mut message: Value) -> Value {
        if self.minor() >= 15 {
            message["reasoning"] = json!(thought);
        }
        if self.minor() <= 15 {
            message["reasoning_content"] = json!(thought);
        }
        message
    }

    async fn stream_chat(&self, chat: Chat, out: &mut Out) -> Sent {
        let (id, created) = (id("chatcmpl"), created());
        let frame = |choices: Value| {
            json!({"id": id, "object": "chat.completion.chunk", "created": created, "model": self.house.setup.model,
                "choices": choices})
        };
        let mut batch = Batch::begin(&self.house, chat.sequences(), chat.reuse()).await;
        let mut partings: Vec<Parting> =
            batch.sequences.iter().map(|_| Parting::new(self.house.setup.reasoning_end.as_deref())).collect();
        out.events().await?;
        for at in 0..chat.n {
            let mut event =
                frame(json!([{"index": at, "delta": {"role": "assistant", "content": ""}, "logprobs": null,
                "finish_reason": null}]));
            event["prompt_token_ids"] = json!(chat.return_ids.then_some(&chat.prompt));
            event["prompt_text"] = Value::Null;
            if chat.stream.continuous {
                event["usage"] = plain_usage(chat.prompt.len(), 0);
            }
            out.event(event).await?;
        }
        loop {
            let pieces = batch.step().await;
            if pieces.is_empty() {
                break;
            }
            for (at, piece) in pieces {
                let (thought, said) = partings[at].push(&piece.text, piece.finish.is_some());
                let parsed = self.house.setup.reasoning_end.is_some();
                let delta = match (thought.is_empty(), said.is_empty() && parsed) {
                    (false, _) => self.thought(&thought, json!({"content": null})),
                    (true, true) if piece.finish.is_none() => json!({}),
                    (true, _) => json!({"content": said}),
                };
                let mut choice = json!({"index": at, "delta": delta,
                    "logprobs": chat.logprobs.map(|top| self.chat_logprobs(std::slice::from_ref(&piece), top)),
                    "finish_reason": piece.finish.as_ref().map(Finish::reason)});
                if piece.finish.is_some() {
                    choice["stop_reason"] = stop_reason(piece.finish.as_ref());
                }
                choice["token_ids"] = json!(chat.return_ids.then_some([piece.token]));
                let mut event = frame(json!([choice]));
                if piece.finish.is_some() && !chat.stream.usage && self.minor() >= 29 {
                    event["system_fingerprint"] = self.fingerprint();
                }
                if chat.stream.continuous {
                    event["usage"] = plain_usage(chat.prompt.len(), batch.sequences[at].output().len());
                }
                out.event(event).await?;
            }
        }
        if chat.stream.usage {
            let mut event = frame(json!([]));
            event["usage"] = self.usage(chat.prompt.len(), batch.output_tokens(), batch.sequences[0].cached);
            if self.minor() >= 29 {
                event["system_fingerprint"] = self.fingerprint();
            }
            out.event(event).await?;
        }
        out.event("[DONE]").await?;
        out.end().await
    }
}
