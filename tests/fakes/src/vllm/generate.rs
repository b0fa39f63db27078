//! `/inference/v1/generate` and the `render` routes: tokens in, tokens out, and the engine's own
//! parameters.

use serde_json::{Map, Value, json};

use super::super::batch::{Batch, Reuse};
use super::super::fields::Fields;
use super::super::http::{Out, Request, Sent};
use super::super::openai::{created, id};
use super::super::sample::Sampling;
use super::super::sequence::{Finish, Hold, Piece, Sequence};
use super::super::toy::Context;
use super::answer::Told;
use super::completions::{check_priority, only, salt, stop_reason};
use super::{Of, Refusal, Runner, Vllm};

struct Asked {
    id: String,
    sequence: Sequence,
    reuse: Reuse,
    detokenize: bool,
    logprobs: Option<usize>,
    prompt_logprobs: Option<usize>,
    stream: bool,
}

impl Vllm {
    pub(super) async fn generate(&self, request: &Request, out: &mut Out) -> Sent {
        let asked = match self.open(request).and_then(|fields| self.generate_asked(&fields)) {
            Ok(asked) => asked,
            Err(refusal) => return self.refuse(&refusal, out).await,
        };
        if asked.stream {
            return self.stream_generate(asked, out).await;
        }
        match self.whole_generate(asked).await {
            Ok(body) => out.json(200, &body).await,
            Err(refusal) => self.refuse(&refusal, out).await,
        }
    }

    fn generate_asked(&self, fields: &Fields) -> Result<Asked, Refusal> {
        let required = |name: &'static str| {
            Refusal::about(format!("1 validation error:\n  {name}: Field required"), name)
        };
        let prompt = fields.ids("token_ids")?.ok_or_else(|| required("token_ids"))?;
        if fields.get("sampling_params").is_none() {
            return Err(required("sampling_params"));
        }
        self.check_prompts(std::slice::from_ref(&prompt))?;
        let params = fields.object("sampling_params")?;
        if let Some(message) = params.beyond(super::BEYOND) {
            return Err(Refusal(501, "NotImplementedError", message, None));
        }
        let asked = params.uint("max_tokens")?;
        // In older versions the engine detects it, and the answer is a server error.
        let too_long =
            |refusal: Refusal| if self.minor() <= 15 { Refusal::broken(refusal.2) } else { refusal };
        let unasked = if self.minor() >= 33 { None } else { Some(16) };
        let room = self.room(prompt.len(), asked, unasked).map_err(too_long)?;
        let sampling = self.engine_sampling(&params, room)?;
        check_priority(fields)?;
        let stream = fields.flag("stream")?;
        let prompt_logprobs = self.logprobs(&params, "prompt_logprobs")?;
        let skips =
            params.get("skip_reading_prefix_cache").map_or(prompt_logprobs.is_some(), |skip| skip == true);
        let mut sequence = Sequence::new(0, Context::new(&prompt), sampling, Hold::Longest);
        sequence.salt = salt(fields)?;
        Ok(Asked {
            id: fields.text("request_id")?.unwrap_or_else(|| id("generate-tokens")),
            sequence,
            reuse: if skips { Reuse::WriteOnly } else { Reuse::AtOnce },
            detokenize: params.get("detokenize").is_none_or(|wanted| wanted == true),
            logprobs: self.logprobs(&params, "logprobs")?,
            prompt_logprobs,
            stream,
        })
    }

    async fn whole_generate(&self, asked: Asked) -> Result<Value, Refusal> {
        let mut batch = Batch::begin(&self.house, vec![asked.sequence], asked.reuse).await;
        let cached = batch.cached_tokens();
        if asked.prompt_logprobs.is_some()
            && cached > 0
            && self.options.runner == Runner::V1
            && asked.detokenize
        {
            self.house.kill_by("prompt_logprobs over a cached prefix without detokenize:false");
            return Err(Refusal::broken(
                "EngineCore encountered an issue. See stack trace (above) for the root cause.",
            ));
        }
        let pieces = batch.finish().await.remove(0);
        let sequence = &batch.sequences[0];
        let rows = match asked.prompt_logprobs {
            Some(top) => self.prompt_rows(sequence, top, asked.detokenize)?,
            None => Value::Null,
        };
        let choice = self.generate_choice(&pieces, asked.logprobs, sequence.finish.as_ref());
        if self.minor() <= 15 {
            return Ok(json!({"request_id": asked.id, "choices": [choice], "prompt_logprobs": rows,
                "kv_transfer_params": null}));
        }
        Ok(json!({"request_id": asked.id, "model": self.house.setup.model, "created": created(),
            "usage": self.usage(sequence.prompt, sequence.output().len(), cached, Of::Text), "prompt_logprobs": rows,
            "prompt_token_id_logprobs": null, "prompt_token_ids": null, "mm_placeholders": null, "metrics": null,
            "kv_transfer_params": null, "ec_transfer_params": null, "output_mode": "tokens", "choices": [choice]}))
    }

    async fn stream_generate(&self, asked: Asked, out: &mut Out) -> Sent {
        let mut batch = Batch::begin(&self.house, vec![asked.sequence], asked.reuse).await;
        out.events().await?;
        while let Some(piece) = only(batch.step().await) {
            let finish = piece.finish.clone();
            let choice = self.generate_choice(std::slice::from_ref(&piece), asked.logprobs, finish.as_ref());
            let event =
                json!({"request_id": asked.id, "usage": null, "output_mode": "tokens", "choices": [choice]});
            out.event(event).await?;
        }
        out.event("[DONE]").await?;
        out.end().await
    }

    fn generate_choice(&self, pieces: &[Piece], logprobs: Option<usize>, finish: Option<&Finish>) -> Value {
        let ids: Vec<u32> = pieces.iter().map(|piece| piece.token).collect();
        let mut choice = json!({"index": 0, "finish_reason": finish.map(Finish::reason)});
        if self.minor() <= 15 {
            choice["token_ids"] = json!(ids);
            choice["logprobs"] =
                json!(logprobs.map(|top| self.chat_logprobs(pieces, top, &mut Told::default())));
            return choice;
        }
        choice["stop_reason"] = stop_reason(finish);
        choice["token_ids"] = json!(ids);
        choice["routed_experts"] = Value::Null;
        choice["sampling_mask"] = Value::Null;
        choice["weight_versions"] = Value::Null;
        choice["logprobs"] = json!(logprobs.map(|top| Self::token_logprobs(pieces, top)));
        choice
    }

    /// The parameters that the OpenAI routes would pass to the engine: the only route that shows
    /// the server's defaults.
    pub(super) fn render(&self, request: &Request) -> Result<Value, Refusal> {
        let fields = self.open(request)?;
        if request.path == "/v1/chat/completions/render" {
            let chat = self.chat_asked(&fields)?;
            if self.minor() <= 15 {
                // The first version returned the conversation and the prompts, without parameters.
                return Ok(json!([fields.get("messages"), [{"prompt_token_ids": chat.prompt}]]));
            }
            return Ok(self.rendered(&id("chatcmpl"), &chat.prompt, &chat.sampling, &fields));
        }
        let prompts = fields.prompts(&self.house.toy)?;
        self.check_prompts(&prompts)?;
        let asked = fields.uint("max_tokens")?;
        let render = |prompt: &Vec<u32>| {
            let sampling = self.openai_sampling(&fields, self.room(prompt.len(), asked, Some(16))?)?;
            Ok(self.rendered(&id("cmpl"), prompt, &sampling, &fields))
        };
        prompts.iter().map(render).collect::<Result<Vec<_>, Refusal>>().map(Value::from)
    }

    fn rendered(&self, id: &str, prompt: &[u32], sampling: &Sampling, fields: &Fields) -> Value {
        let mut params = Map::new();
        let mut put = |name: &str, value: Value| drop(params.insert(name.to_owned(), value));
        put("presence_penalty", json!(sampling.presence));
        put("frequency_penalty", json!(sampling.frequency));
        put("repetition_penalty", json!(sampling.repetition));
        put("temperature", json!(sampling.temperature));
        // Greedy decoding needs no truncation, so none is shown.
        if sampling.temperature > 0.0 {
            put("top_p", json!(sampling.top_p));
            if sampling.top_k > 0 {
                put("top_k", json!(sampling.top_k));
            }
            put("min_p", json!(sampling.min_p));
        }
        for name in ["seed", "logit_bias", "ignore_eos", "min_tokens", "logprobs", "prompt_logprobs"] {
            if let Some(value) = fields.get(name) {
                put(name, value.clone());
            }
        }
        put("stop", json!(sampling.stop));
        // Those that the engine adds come later.
        put("stop_token_ids", fields.get("stop_token_ids").cloned().unwrap_or_else(|| json!([])));
        // Defaults of the class are left out.
        if sampling.max_tokens != 16 {
            put("max_tokens", json!(sampling.max_tokens));
        }
        match self.made_of_tools(fields) {
            Ok(Some((name, made))) => {
                let mut grammar = json!({"json": null, "regex": null, "choice": null, "grammar": null, "json_object": null,
                    "disable_any_whitespace": false, "disable_additional_properties": false, "whitespace_pattern": null,
                    "structural_tag": null});
                grammar[name] = made;
                put("structured_outputs", grammar);
            }
            _ if !sampling.only.is_empty() => {
                put(
                    "structured_outputs",
                    fields.get("structured_outputs").cloned().unwrap_or_else(|| json!({})),
                );
            }
            _ => {}
        }
        put("output_kind", json!(2));
        put("skip_clone", json!(true));
        put("bad_words", json!([]));
        put("skip_reading_prefix_cache", json!(fields.get("prompt_logprobs").is_some()));
        json!({"request_id": id, "token_ids": prompt, "token_offsets": null, "features": null, "content_parts": null,
            "sampling_params": params, "model": self.house.setup.model, "reasoning_ended": null,
            "reasoning_parser_kwargs": null, "return_token_ids": null, "output_mode": "tokens", "stream": false,
            "stream_options": null, "cache_salt": fields.get("cache_salt"), "priority": 0, "kv_transfer_params": null,
            "ec_transfer_params": null})
    }
}
