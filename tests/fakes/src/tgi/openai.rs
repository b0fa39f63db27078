//! TGI's `/v1`: texts only, few of them at a time, and no cache for completions that are not
//! streamed.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::super::batch::Batch;
use super::super::fields::{Fields, Wrong};
use super::super::frontend::{Ask, Form, answer};
use super::super::house::House;
use super::super::http::{Out, Request, Sent};
use super::super::openai::created;
use super::super::sequence::{Finish, Piece, Sequence};
use super::super::toy::Row;
use super::generate::{native_reason, told_row};
use super::{Refusal, Tgi, VERSION};

struct Told<'a> {
    tgi: &'a Tgi,
    ask: Ask,
}

impl Form for Told<'_> {
    fn house(&self) -> &Arc<House> {
        &self.tgi.house
    }

    fn head(&self, ask: &Ask) -> Value {
        let object = match (ask.chat, ask.stream) {
            (true, true) => "chat.completion.chunk",
            (true, false) => "chat.completion",
            (false, _) => "text_completion",
        };
        json!({"object": object, "id": "", "created": created(), "model": self.tgi.house.setup.model,
            "system_fingerprint": format!("{VERSION}-native")})
    }

    fn dress(&self, choice: &mut Value, _: &Sequence, _: &[Piece]) {
        if self.ask.stream && self.ask.chat {
            choice["delta"]["role"] = json!("assistant");
        }
        if self.ask.stream && !self.ask.chat && choice["finish_reason"].is_null() {
            choice["finish_reason"] = json!("");
        }
    }

    /// A stream of completions uses the native finish reason.
    fn reason(&self, finish: &Finish) -> &'static str {
        match finish {
            Finish::Eos | Finish::StopToken(_) if self.ask.chat || !self.ask.stream => "stop",
            finish => native_reason(finish),
        }
    }

    fn row(&self, piece: &Piece) -> Row {
        told_row(piece).clone()
    }

    fn role_first(&self) -> bool {
        false
    }

    /// The last event of each completion has its own usage.
    fn ending(&self, event: &mut Value, sequence: &Sequence) {
        if !self.ask.chat {
            let (prompt, output) = (sequence.prompt, sequence.output().len());
            event["usage"] = json!({"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output});
        }
    }

    fn usage(&self, batch: &Batch, _: &Ask) -> Value {
        super::super::frontend::usage(batch, 1)
    }
}

impl Tgi {
    pub(super) async fn completions(&self, request: &Request, out: &mut Out) -> Sent {
        let read = Fields::of(request).map_err(Refusal::from).and_then(|fields| self.texts(&fields));
        self.tell(read, out).await
    }

    pub(super) async fn chat(&self, request: &Request, out: &mut Out) -> Sent {
        let read = Fields::of(request).map_err(Refusal::from).and_then(|fields| self.messages(&fields));
        self.tell(read, out).await
    }

    async fn tell(&self, read: Result<(Ask, Vec<Sequence>), Refusal>, out: &mut Out) -> Sent {
        let (ask, sequences) = match read {
            Ok(read) => read,
            Err(refusal) => return self.refuse(&refusal, out).await,
        };
        let trouble = self.trouble.lock().take();
        match trouble {
            Some(trouble) => self.refuse(&trouble.refusal(ask.stream), out).await,
            None => answer(&Told { tgi: self, ask }, &ask, sequences, out).await,
        }
    }

    fn texts(&self, fields: &Fields) -> Result<(Ask, Vec<Sequence>), Refusal> {
        if fields.get("suffix").is_some() {
            let message = "Suffix is not supported and can be achieved by preprocessing the prompt.";
            return Err(Refusal(422, "suffix not supported", message.into()));
        }
        let prompts = fields.texts("prompt")?;
        if prompts.is_empty() {
            let (field, got) = ("prompt".to_owned(), "nothing".to_owned());
            return Err(Wrong { field, want: "a string or list of strings", got }.into());
        }
        let most = self.options.max_client_batch_size;
        if prompts.len() > most {
            let message = format!("Number of prompts exceeds the maximum allowed batch size of {most}");
            return Err(Refusal(422, "batch size exceeded", message));
        }
        let stream = fields.flag("stream")?;
        let mut parameters = common(fields)?;
        parameters.0.insert("repetition_penalty".into(), json!(fields.float("repetition_penalty")?));
        parameters.0.insert("max_new_tokens".into(), json!(fields.uint("max_tokens")?.unwrap_or(100)));
        // The usage is counted on the prefill, so a completion that is not streamed returns the
        // prefill and uses no cache.
        parameters.0.insert("decoder_input_details".into(), json!(!stream));
        let ask = Ask { chat: false, stream, usage: false, continuous: false, logprobs: None, n: 1 };
        let job = |(index, prompt): (usize, &String)| {
            let mut sequence = self.job(self.encode(prompt, false), &parameters, stream)?.sequence;
            sequence.index = index;
            Ok(sequence)
        };
        Ok((ask, prompts.iter().enumerate().map(job).collect::<Result<Vec<_>, Refusal>>()?))
    }

    fn messages(&self, fields: &Fields) -> Result<(Ask, Vec<Sequence>), Refusal> {
        if let Some(message) = fields.beyond(&["tools", "response_format"]) {
            return Err(Refusal::validation(message));
        }
        if let Some(bias) = fields.get("logit_bias").filter(|bias| !bias.is_array()) {
            let (field, got) = ("logit_bias".to_owned(), bias.to_string());
            return Err(Wrong { field, want: "a sequence", got }.into());
        }
        let stream = fields.flag("stream")?;
        let mut parameters = common(fields)?;
        // Presence moves the repetition penalty [unverified: from memory].
        let repetition = fields.float("presence_penalty")?.map(|presence| presence + 2.0);
        parameters.0.insert("repetition_penalty".into(), json!(repetition));
        // The default is the remaining context [unverified].
        parameters.0.insert("max_new_tokens".into(), json!(fields.uint("max_tokens")?));
        let top = fields.uint("top_logprobs")?;
        parameters.0.insert("top_n_tokens".into(), json!(top));
        // `n` is accepted and ignored.
        let mut ask = Ask::of(fields, true)?;
        ask.n = 1;
        let text = self.templated(fields)?;
        Ok((ask, vec![self.job(self.encode(&text, true), &parameters, stream)?.sequence]))
    }
}

/// Parameters that both routes pass on; temperature 0 makes them greedy.
fn common(fields: &Fields) -> Result<Fields, Wrong> {
    let mut parameters = Map::new();
    let temperature = fields.float("temperature")?;
    let greedy = temperature == Some(0.0);
    parameters.insert("do_sample".into(), json!(!greedy));
    parameters.insert("temperature".into(), json!(temperature.filter(|_| !greedy)));
    for name in ["frequency_penalty", "top_p", "seed", "stop"] {
        parameters.insert(name.into(), fields.get(name).cloned().unwrap_or_default());
    }
    Ok(Fields(parameters))
}
