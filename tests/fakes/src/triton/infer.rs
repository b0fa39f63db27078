//! One inference: the draft of the request is verified in the step that computes the prompt.

use crate::TokenId;
use serde_json::{Value, json};

use super::super::batch::{Batch, Reuse};
use super::super::fields::{Fields, outside};
use super::super::http::Request;
use super::super::openai::id;
use super::super::sample::{Noise, Pipeline, Sampling};
use super::super::sequence::{Finish, Hold, Piece, Sequence};
use super::super::toy::{Context, Row};
use super::tensors::{Inputs, OUTPUTS, output};
use super::{Refusal, Triton};

/// Requested outputs besides ids.
struct Wanted {
    names: Vec<String>,
    exclude_input: bool,
    log_probs: bool,
    context: bool,
    generation: bool,
}

impl Triton {
    pub(super) async fn infer(&self, request: &Request) -> Result<Value, Refusal> {
        let fields = Fields::of(request)?;
        let inputs = Inputs::of(&fields)?;
        let wanted = self.wanted(&fields, &inputs)?;
        let prompt = self.prompt(&inputs)?;
        let draft = self.draft(&inputs)?;
        let lenience = self.lenience(&inputs, &draft);
        let sampling = self.engine_sampling(&inputs, prompt.len())?;
        let sequence = Sequence::new(0, Context::new(&prompt), sampling, Hold::Longest);
        let mut batch = Batch::begin(&self.house, vec![sequence], Reuse::AfterStep).await;
        let pieces = if draft.is_empty() {
            batch.finish().await.remove(0)
        } else {
            self.verify(&mut batch, &draft, lenience).await
        };
        let mut outputs = self.outputs(&batch.sequences[0], &pieces, &wanted);
        outputs.retain(|output| {
            wanted.names.is_empty() || wanted.names.iter().any(|name| output["name"] == name.as_str())
        });
        let request_id = fields.text("id")?.unwrap_or_else(|| id("infer"));
        Ok(
            json!({"id": request_id, "model_name": self.options.model, "model_version": "1", "outputs": outputs}),
        )
    }

    fn wanted(&self, fields: &Fields, inputs: &Inputs) -> Result<Wanted, Refusal> {
        let mut names = Vec::new();
        for value in fields.get("outputs").and_then(Value::as_array).into_iter().flatten() {
            let name = Fields::from(value, "outputs")?.text("name")?.unwrap_or_default();
            if !OUTPUTS.iter().any(|tensor| tensor.name == name) {
                return Err(Refusal::bad(format!(
                    "unexpected inference output '{name}' for model 'tensorrt_llm'"
                )));
            }
            names.push(name);
        }
        if inputs.flag("streaming") == Some(true) {
            // Streams need gRPC and a decoupled model.
            return Err(Refusal::bad("Streaming is only supported in decoupled mode."));
        }
        if inputs.flag("stop") == Some(true) {
            return Err(Refusal::bad("this fake has no stop"));
        }
        let flag = |name: &str| inputs.flag(name).unwrap_or(false);
        let (context, generation) = (flag("return_context_logits"), flag("return_generation_logits"));
        if (context || generation) && !self.options.gathers_logits {
            return Err(Refusal::bad(
                "the engine was built without gather_context_logits and gather_generation_logits",
            ));
        }
        let exclude_input = inputs.flag("exclude_input_in_output").unwrap_or(self.options.exclude_input);
        Ok(Wanted { names, exclude_input, log_probs: flag("return_log_probs"), context, generation })
    }

    fn prompt(&self, inputs: &Inputs) -> Result<Vec<TokenId>, Refusal> {
        inputs.needed("input_ids")?;
        inputs.needed("input_lengths")?;
        let (mut prompt, len) =
            (inputs.ids("input_ids"), inputs.whole("input_lengths").unwrap_or(0) as usize);
        if len == 0 || len > prompt.len() {
            return Err(Refusal::bad(format!(
                "input_lengths {len} does not fit input_ids of {}",
                prompt.len()
            )));
        }
        prompt.truncate(len);
        if let Some(id) = outside(std::slice::from_ref(&prompt), &self.house.toy) {
            // The engine does not check; it reads an embedding out of bounds.
            self.house.corrupt_by(&format!("token id {id} is not in the vocabulary"));
            return Err(Refusal(500, "CUDA error: an illegal memory access was encountered".to_owned()));
        }
        Ok(prompt)
    }

    fn draft(&self, inputs: &Inputs) -> Result<Vec<TokenId>, Refusal> {
        let draft = inputs.ids("draft_input_ids");
        if inputs.all("draft_logits").is_some() && draft.is_empty() {
            return Err(Refusal::bad("draft_logits without draft_input_ids"));
        }
        if draft.is_empty() {
            return Ok(draft);
        }
        let most = self.options.max_draft_len;
        if most == 0 || !self.options.reuse {
            return Err(Refusal::bad(
                "Draft tokens were given to an engine that was not built with draft_tokens_external and KV cache reuse",
            ));
        }
        if draft.len() > most {
            return Err(Refusal::bad(format!(
                "Draft token length ({}) exceeds max_draft_len ({most})",
                draft.len()
            )));
        }
        match outside(std::slice::from_ref(&draft), &self.house.toy) {
            Some(id) => Err(Refusal::bad(format!("draft token {id} is not in the vocabulary"))),
            None => Ok(draft),
        }
    }

    /// With a threshold the engine accepts draft tokens that are likely enough, which is not
    /// lossless. It needs the drafter's logits; the fake's use of both is [unverified].
    fn lenience(&self, inputs: &Inputs, draft: &[TokenId]) -> Option<f64> {
        let threshold = inputs.number("draft_acceptance_threshold").filter(|_| !draft.is_empty())?;
        self.house.corrupt_by("draft_acceptance_threshold: tokens are accepted that were not sampled");
        Some(threshold)
    }

    fn engine_sampling(&self, inputs: &Inputs, prompt: usize) -> Result<Sampling, Refusal> {
        inputs.needed("request_output_len")?;
        let max = inputs.whole("request_output_len").unwrap_or(0) as usize;
        let longest = self.house.setup.max_len;
        if max == 0 || prompt + max > longest {
            return Err(Refusal::bad(format!(
                "Prompt length ({prompt}) + request_output_len ({max}) must be within 1 and max_seq_len ({longest})"
            )));
        }
        let ignored = inputs.whole("prompt_ignore_length").unwrap_or(0) as usize;
        let seed = inputs.whole("seed");
        // The default seed is 0 for all requests [unverified: from memory].
        let noise = Noise::Restarting(seed.unwrap_or(0));
        let mut own = Sampling::new(Pipeline::trtllm(ignored), noise, max);
        own.top_k = inputs.whole("runtime_top_k").unwrap_or(0) as usize;
        let top_p = inputs.number("runtime_top_p").unwrap_or(0.0);
        // With neither, the best token is taken, at any temperature [unverified: from memory].
        let greedy = own.top_k == 1 || (own.top_k == 0 && top_p <= 0.0);
        own.top_p = if top_p > 0.0 { top_p } else { 1.0 };
        own.temperature = if greedy { 0.0 } else { inputs.number("temperature").unwrap_or(1.0) };
        if own.temperature < 0.0 || !(0.0..=1.0).contains(&own.top_p) {
            return Err(Refusal::bad(
                "temperature must not be negative, and runtime_top_p be within 0 and 1",
            ));
        }
        own.presence = inputs.number("presence_penalty").unwrap_or(0.0);
        own.frequency = inputs.number("frequency_penalty").unwrap_or(0.0);
        own.repetition = inputs.number("repetition_penalty").unwrap_or(1.0);
        // Without an end id the output does not end; another id ends it like a stop.
        own.ignore_eos = inputs.whole("end_id").is_none_or(|end| end != u64::from(self.house.toy.eos()));
        if own.ignore_eos {
            own.stop_ids = inputs.ids("end_id");
        }
        Ok(own)
    }

    /// The accepted draft tokens, and one more: the first mismatch or the token after the draft.
    async fn verify(&self, batch: &mut Batch, draft: &[TokenId], lenience: Option<f64>) -> Vec<Piece> {
        // The draft is computed in the prompt's step.
        self.house.note(|tally| tally.computed += draft.len());
        let longer = self.house.pace.lock().per_token * draft.len() as u32;
        if !longer.is_zero() {
            tokio::time::sleep(longer).await;
        }
        let mut pieces = Vec::new();
        for at in 0..=draft.len() {
            let sequence = &mut batch.sequences[0];
            let kept = sequence.sampling.allowed.take();
            if let (Some(threshold), Some(&token)) = (lenience, draft.get(at)) {
                let row = self.house.toy.row(&sequence.context, sequence.context.len());
                if f64::from(row.logprob(token).exp()) >= threshold {
                    sequence.sampling.allowed = Some(vec![token]);
                }
            }
            let piece = sequence.step(&self.house.toy);
            sequence.sampling.allowed = kept;
            let Some(piece) = piece else { break };
            let same = draft.get(at) == Some(&piece.token);
            pieces.push(piece);
            if !same {
                break;
            }
        }
        self.house.note(|tally| tally.generated += pieces.len());
        batch.sequences[0].finish.get_or_insert(Finish::Length);
        batch.finish().await;
        pieces
    }

    fn outputs(&self, sequence: &Sequence, pieces: &[Piece], wanted: &Wanted) -> Vec<Value> {
        let told = if wanted.exclude_input { sequence.output() } else { sequence.context.tokens() };
        let ids: Vec<Value> = told.iter().map(|&id| json!(id)).collect();
        let mut all = vec![
            output("output_ids", &[1, 1, ids.len()], &ids),
            output("sequence_length", &[1, 1], &[json!(ids.len())]),
        ];
        let logprobs: Vec<f32> = pieces.iter().map(|piece| piece.raw.logprob(piece.token)).collect();
        if wanted.log_probs {
            let each: Vec<Value> = logprobs.iter().map(|logprob| json!(logprob)).collect();
            all.push(output("cum_log_probs", &[1, 1], &[json!(logprobs.iter().sum::<f32>())]));
            all.push(output("output_log_probs", &[1, 1, each.len()], &each));
        }
        let flat = |rows: &[Row]| {
            rows.iter().flat_map(|row| row.0.iter().map(|logit| json!(logit))).collect::<Vec<_>>()
        };
        if wanted.context {
            let row = |at: usize| self.house.toy.row(&sequence.context, at + 1);
            let rows: Vec<Row> = (sequence.cached..sequence.prompt).map(row).collect();
            all.push(output("context_logits", &[1, rows.len(), self.house.toy.vocabulary()], &flat(&rows)));
        }
        if wanted.generation {
            let rows: Vec<Row> = pieces.iter().map(|piece| piece.raw.clone()).collect();
            all.push(output(
                "generation_logits",
                &[1, 1, rows.len(), self.house.toy.vocabulary()],
                &flat(&rows),
            ));
        }
        all
    }
}
