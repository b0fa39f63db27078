//! `/generate`: the native route, with its schema, its logprobs and its streams that repeat all
//! output.

use serde_json::{Value, json};

use super::super::batch::{Batch, Reuse};
use super::super::fields::{Fields, ids};
use super::super::http::{Out, Request, Sent};
use super::super::openai::id;
use super::super::sequence::{Finish, Hold, Piece, Sequence};
use super::super::toy::{Context, Row};
use super::{Refusal, Sglang};

/// Known fields of a request; any other is an error.
const KNOWN: &[&str] = &[
    "text",
    "input_ids",
    "input_embeds",
    "image_data",
    "video_data",
    "audio_data",
    "sampling_params",
    "rid",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "token_ids_logprob",
    "return_text_in_logprobs",
    "stream",
    "log_metrics",
    "return_hidden_states",
    "modalities",
    "session_params",
    "lora_path",
    "lora_id",
    "custom_logit_processor",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "data_parallel_rank",
    "priority",
    "extra_key",
    "cache_salt",
    "no_logs",
    "custom_labels",
    "return_bytes",
    "return_entropy",
    "return_prompt_token_ids",
    "return_flat_raw_top_logprobs",
    "return_flat_raw_top_logprobs_b64",
    "background",
    "conversation_id",
    "session_id",
];

/// Output settings of one sequence.
pub(super) struct OutputSettings {
    id: String,
    logprobs: bool,
    /// Position of the first input entry.
    start: usize,
    top: usize,
}

struct Asked {
    sequences: Vec<Sequence>,
    settings: Vec<OutputSettings>,
    many: bool,
    stream: bool,
}

impl Sglang {
    pub(super) async fn generate(&self, request: &Request, out: &mut Out) -> Sent {
        let asked = match self.asked(request) {
            Ok(asked) => asked,
            // A request that kills the engine's process has no answer.
            Err(_) if self.house.is_dead() => return out.reset(),
            Err(Refusal(status, body)) => return out.json(status, &body).await,
        };
        let (settings, many) = (asked.settings, asked.many);
        let mut batch = Batch::begin(&self.house, asked.sequences, Reuse::AfterStep).await;
        if asked.stream {
            return self.stream_generate(&mut batch, &settings, many, out).await;
        }
        let all = batch.finish().await;
        let told = batch.sequences.iter().zip(&all).zip(&settings);
        let mut bodies: Vec<Value> =
            told.map(|((sequence, pieces), settings)| self.told(sequence, pieces, settings)).collect();
        let body = if many { Value::from(bodies) } else { bodies.remove(0) };
        out.json(200, &body).await
    }

    fn asked(&self, request: &Request) -> Result<Asked, Refusal> {
        let bare = |message: String| Refusal(400, json!({"error": message}));
        let fields = Fields::of(request).map_err(|wrong| bare(wrong.to_string()))?;
        if let Some(message) = fields.beyond(&[
            "custom_logit_processor",
            "session_params",
            "return_flat_raw_top_logprobs",
            "token_ids_logprob",
            "return_text_in_logprobs",
        ]) {
            return Err(Refusal(501, Value::from(message)));
        }
        if let Some(name) = fields.unknown(KNOWN) {
            return Err(bare(format!("{name}: Extra inputs are not permitted")));
        }
        let (prompts, listed) = self.prompts(&fields)?;
        let params = fields.get("sampling_params").cloned().unwrap_or_else(|| json!({}));
        let mut asked = Asked { sequences: vec![], settings: vec![], many: listed, stream: false };
        asked.stream = fields.flag("stream").map_err(|wrong| bare(wrong.to_string()))?;
        let salt = fields.text("cache_salt")?.or(fields.text("extra_key")?).unwrap_or_default();
        let salt = salt.bytes().fold(0, |hash: u64, byte| hash * 131 + u64::from(byte));
        for (at, prompt) in prompts.iter().enumerate() {
            let own = if params.is_array() { params[at].clone() } else { params.clone() };
            let own = Fields::from(&own, "sampling_params").map_err(|wrong| bare(wrong.to_string()))?;
            let (mut sampling, n) = self.sampling(&own)?;
            let explicit = own.get("max_new_tokens").map_or(0, |_| sampling.max_tokens);
            if let Some(message) = self.too_long(prompt.len(), explicit) {
                return Err(Refusal::native(message));
            }
            sampling.max_tokens = sampling.max_tokens.min(self.house.setup.max_len - prompt.len());
            let own = || settings(&fields, at, prompt.len());
            asked.many |= n > 1;
            for _ in 0..n {
                let settings = own()?;
                let mut sequence = Sequence::new(
                    asked.sequences.len(),
                    Context::new(prompt),
                    sampling.clone(),
                    Hold::Prefix,
                );
                // The radix cache is not read from the first position with a requested logprob on.
                sequence.cache_limit = Some(settings.start + 1);
                sequence.salt = salt;
                // Only the prompt is computed.
                sequence.finish = (sequence.sampling.max_tokens == 0).then_some(Finish::Length);
                asked.sequences.push(sequence);
                asked.settings.push(settings);
            }
        }
        Ok(asked)
    }

    fn prompts(&self, fields: &Fields) -> Result<(Vec<Vec<u32>>, bool), Refusal> {
        let toy = &self.house.toy;
        let (prompts, listed) = match (fields.get("input_ids"), fields.get("text")) {
            (Some(Value::Array(lists)), None) if lists.first().is_some_and(Value::is_array) => {
                (lists.iter().map(ids).collect(), true)
            }
            (Some(list), None) => (ids(list).map(|prompt| vec![prompt]), false),
            (None, Some(Value::String(text))) => (Some(vec![toy.encode(text)]), false),
            (None, Some(Value::Array(texts))) => {
                (texts.iter().map(|text| Some(toy.encode(text.as_str()?))).collect(), true)
            }
            _ => (None, false),
        };
        let prompts: Vec<Vec<u32>> = prompts
            .ok_or_else(|| Refusal::native("Either text, input_ids or input_embeds should be provided."))?;
        if prompts.is_empty() || prompts.iter().any(Vec::is_empty) {
            return Err(Refusal::native("input_ids cannot be empty."));
        }
        self.in_vocabulary(&prompts)?;
        Ok((prompts, listed))
    }

    async fn stream_generate(
        &self,
        batch: &mut Batch,
        settings: &[OutputSettings],
        many: bool,
        out: &mut Out,
    ) -> Sent {
        out.events().await?;
        let mut so_far: Vec<Vec<Piece>> = settings.iter().map(|_| Vec::new()).collect();
        loop {
            let pieces = batch.step().await;
            if pieces.is_empty() {
                break;
            }
            for (at, piece) in pieces {
                so_far[at].push(piece);
                // Each event has all of the output.
                let mut event = self.told(&batch.sequences[at], &so_far[at], &settings[at]);
                if many {
                    event["index"] = json!(at);
                }
                out.event(event).await?;
            }
        }
        out.event("[DONE]").await?;
        out.end().await
    }

    /// The answer for a sequence.
    fn told(&self, sequence: &Sequence, pieces: &[Piece], settings: &OutputSettings) -> Value {
        let output: Vec<u32> = pieces.iter().map(|piece| piece.token).collect();
        let text: String = pieces.iter().map(|piece| piece.text.as_str()).collect();
        let completion = sequence.output().len();
        let mut meta = json!({"id": settings.id, "finish_reason": finish(sequence), "prompt_tokens": sequence.prompt,
            "weight_version": self.house.weight_version(), "weight_versions": self.weight_versions(completion),
            "num_retractions": 0, "reasoning_tokens": 0, "completion_tokens": completion,
            "cached_tokens": sequence.cached, "cached_tokens_details": cached_details(sequence.cached), "dp_rank": null,
            "e2e_latency": 0.01, "response_sent_to_client_ts": 0.0});
        if settings.logprobs {
            let inputs = self.input_logprobs(sequence, settings);
            meta.as_object_mut().expect("an object").extend(inputs);
            let rows = pieces.iter().map(|piece| (piece.token, told_row(piece)));
            let rows: Vec<(u32, &Row)> = rows.collect();
            meta["output_token_logprobs"] = rows.iter().map(|&(token, row)| entry(token, row)).collect();
            if settings.top > 0 {
                meta["output_top_logprobs"] = rows.iter().map(|(_, row)| tops(row, settings.top)).collect();
            }
            meta["output_token_logprobs_length"] = json!(rows.len());
        }
        json!({"text": text + &sequence.tail(&self.house.toy), "output_ids": output, "meta_info": meta})
    }

    /// The first entry is of the token at the start, and always null.
    fn input_logprobs(
        &self,
        sequence: &Sequence,
        settings: &OutputSettings,
    ) -> serde_json::Map<String, Value> {
        let tokens = &sequence.context.tokens()[..sequence.prompt];
        let (mut own, mut best) = (Vec::new(), Vec::new());
        for (at, &token) in tokens.iter().enumerate().skip(settings.start) {
            if at == settings.start {
                own.push(json!([null, token, null]));
                best.push(Value::Null);
                continue;
            }
            let row = self.house.toy.row(&sequence.context, at);
            own.push(entry(token, &row));
            best.push(tops(&row, settings.top));
        }
        let mut all = serde_json::Map::new();
        all.insert("input_token_logprobs".to_owned(), json!(own));
        if settings.top > 0 {
            all.insert("input_top_logprobs".to_owned(), json!(best));
        }
        all
    }
}

/// Without `return_text_in_logprobs` a token has no text.
fn entry(token: u32, row: &Row) -> Value {
    json!([row.logprob(token), token, null])
}

fn tops(row: &Row, top: usize) -> Value {
    row.top(top).into_iter().map(|(token, logprob)| json!([logprob, token, null])).collect()
}

/// Where the cached tokens were; null without any.
fn cached_details(cached: usize) -> Value {
    if cached > 0 { json!({"device": cached, "host": 0}) } else { Value::Null }
}

fn finish(sequence: &Sequence) -> Value {
    match &sequence.finish {
        None => Value::Null,
        Some(Finish::Length) => json!({"type": "length", "length": sequence.output().len()}),
        Some(Finish::StopText(text)) => json!({"type": "stop", "matched": text}),
        Some(Finish::Eos | Finish::StopToken(_)) => {
            json!({"type": "stop", "matched": sequence.output().last()})
        }
    }
}

/// Scalars apply to all prompts, lists have one entry per prompt.
fn settings(fields: &Fields, at: usize, prompt: usize) -> Result<OutputSettings, Refusal> {
    let own = |name: &str| match fields.get(name) {
        Some(Value::Array(list)) => list.get(at).cloned().unwrap_or_default(),
        Some(value) => value.clone(),
        None => Value::Null,
    };
    let logprobs = own("return_logprob").as_bool().unwrap_or(false);
    let start = own("logprob_start_len").as_i64().unwrap_or(-1);
    if logprobs && start > prompt as i64 {
        return Err(Refusal::native(format!(
            "logprob_start_len, ({start}) is higher than the number of input tokens ({prompt}). Request with a lower \
             logprob_start_len."
        )));
    }
    let last = prompt - 1;
    let start = usize::try_from(start).ok().filter(|_| logprobs).unwrap_or(last);
    Ok(OutputSettings {
        id: own("rid").as_str().map_or_else(|| id("rid"), str::to_owned),
        logprobs,
        start,
        top: own("top_logprobs_num").as_u64().unwrap_or(0) as usize,
    })
}

/// Output logprobs are processed ones, except for greedy decoding.
fn told_row(piece: &Piece) -> &Row {
    if piece.temperature > 0.0 { &piece.processed } else { &piece.raw }
}
