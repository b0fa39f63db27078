//! llama-server's information and tokenizer routes.

use std::sync::atomic::Ordering;

use serde_json::{Value, json};

use super::super::fields::Fields;
use super::super::http::{Out, Request, Sent};
use super::super::openai::{Exposition, created};
use super::params::settings;
use super::{Llama, Refusal, refuse};

impl Llama {
    /// The server's settings: defaults of the fields that a request leaves out.
    pub(super) fn props(&self) -> Value {
        let params = self.params(&Fields::default()).ok();
        let end = self.house.toy.name(self.house.toy.eos());
        json!({"default_generation_settings": {"params": params.map(|params| settings(&params)),
                "n_ctx": self.house.setup.max_len},
            "total_slots": self.options.slots, "model_alias": self.house.setup.model, "model_ftype": "all F32",
            "model_path": "model.gguf", "modalities": {"vision": false, "video": false, "audio": false},
            "endpoint_slots": true, "endpoint_props": false,
            "endpoint_metrics": self.options.metrics, "chat_template": self.house.toy.words.template,
            "bos_token": end, "eos_token": end, "build_info": "b1-0c1e570", "is_sleeping": false})
    }

    pub(super) fn models(&self) -> Value {
        let id = &self.house.setup.model;
        json!({"models": [{"name": id, "model": id, "type": "model", "capabilities": ["completion"]}], "object": "list",
            "data": [{"id": id, "aliases": [id], "object": "model", "created": created(), "owned_by": "llamacpp",
                "meta": {"vocab_type": 2, "n_vocab": self.house.toy.vocabulary(), "n_ctx": self.house.setup.max_len,
                    "n_ctx_train": self.house.setup.max_len}}]})
    }

    pub(super) fn slot_list(&self, request: &Request) -> Result<Value, Refusal> {
        let slots = self.slots.list();
        if request.query.contains("fail_on_no_slot") && slots.iter().all(|slot| slot.busy) {
            return Err(Refusal::of(503, "unavailable_error", "no slot available"));
        }
        let told = |(id, slot): (usize, &super::slots::Slot)| {
            let mut told = json!({"id": id, "n_ctx": self.house.setup.max_len, "speculative": false,
                "is_processing": slot.busy});
            if slot.busy || slot.last_used > 0 {
                told["n_prompt_tokens"] = json!(slot.tokens.len());
            }
            told
        };
        Ok(slots.iter().enumerate().map(told).collect())
    }

    pub(super) async fn metrics(&self, out: &mut Out) -> Sent {
        if !self.options.metrics {
            let message = "This server does not support metrics endpoint. Start it with `--metrics`";
            return refuse(&Refusal::of(501, "not_supported_error", message), out).await;
        }
        let house = &self.house;
        let mut text = Exposition::default();
        for (name, value) in [
            (
                "prompt_tokens_total",
                house.since_start(|tally| tally.prompt) - house.since_start(|tally| tally.cached),
            ),
            ("prompt_tokens_cached_total", house.since_start(|tally| tally.cached)),
            ("tokens_predicted_total", house.since_start(|tally| tally.generated)),
            ("spec_decode_num_drafts_total", 0),
        ] {
            text.counter(&format!("llamacpp:{name}"), "", value);
        }
        text.gauge("llamacpp:requests_processing", "", house.running());
        let pretended = house.pretend.lock().waiting;
        text.gauge("llamacpp:requests_deferred", "", self.slots.deferred.load(Ordering::SeqCst) + pretended);
        let started = (house.started() * 1_000_000).to_string();
        let fields =
            [("content-type", "text/plain; version=0.0.4"), ("process-start-time-unix", started.as_str())];
        out.whole(200, &fields, text.0.as_bytes()).await
    }

    pub(super) fn tokenize(&self, request: &Request) -> Result<Value, Refusal> {
        let fields = Fields::of(request)?;
        let content = fields.text("content")?.unwrap_or_default();
        let toy = &self.house.toy;
        let tokens = if fields.get("parse_special").is_some_and(|parse| parse == false) {
            // Special tokens are parsed as text: split so that none of them stays whole.
            content
                .split_inclusive("<|")
                .flat_map(|part| match part.strip_suffix('|') {
                    Some(part) => [toy.encode(part), toy.encode("|")].concat(),
                    None => toy.encode(part),
                })
                .collect()
        } else {
            toy.encode(&content)
        };
        if !fields.flag("with_pieces")? {
            return Ok(json!({"tokens": tokens}));
        }
        let pieces = tokens.iter().map(|&id| json!({"id": id, "piece": toy.name(id)}));
        Ok(json!({"tokens": pieces.collect::<Vec<_>>()}))
    }

    pub(super) fn detokenize(&self, request: &Request) -> Result<Value, Refusal> {
        let tokens = Fields::of(request)?.ids("tokens")?.unwrap_or_default();
        self.fits(&tokens[..tokens.len().min(self.house.setup.max_len - 1)])?;
        Ok(json!({"content": self.house.toy.decode(&tokens, false)}))
    }

    pub(super) fn apply_template(&self, request: &Request) -> Result<Value, Refusal> {
        Ok(json!({"prompt": self.chat_text(&Fields::of(request)?)?}))
    }
}
