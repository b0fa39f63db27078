//! The parameters of a task, from its fields and the server's command line.

use crate::TokenId;
use serde_json::{Value, json};

use super::super::fields::{Fields, Wrong, ids};
use super::super::sample::{Counts, Noise, Pipeline, Sampling, fresh_seed};
use super::{Llama, Refusal};

/// Parameters of llama-server that this fake lacks.
const BEYOND: &[&str] = &[
    "grammar",
    "json_schema",
    "mirostat",
    "dry_multiplier",
    "xtc_probability",
    "typical_p",
    "dynatemp_range",
    "top_n_sigma",
    "adaptive_target",
    "min_keep",
    "n_indent",
    "t_max_predict_ms",
    "n_cache_reuse",
    "samplers",
    "n_keep",
    "n_discard",
    "lora",
];

/// Value for no seed.
const RANDOM: u32 = u32::MAX;

/// Parameters of a task.
#[derive(Clone, Debug)]
pub struct Params {
    pub sampling: Sampling,
    pub seed: u32,
    /// `None` for as many as fit into the context.
    pub n_predict: Option<usize>,
    pub n_cmpl: usize,
    pub n_probs: usize,
    pub post_sampling: bool,
    pub verbose: bool,
    pub timings_per_token: bool,
    pub repeat_last_n: usize,
    pub stream: bool,
    pub cache_prompt: bool,
    pub return_tokens: bool,
    pub id_slot: Option<usize>,
}

impl Llama {
    pub(super) fn params(&self, fields: &Fields) -> Result<Params, Refusal> {
        if let Some(message) = fields.beyond(BEYOND) {
            return Err(Refusal::of(501, "not_supported_error", &message));
        }
        let defaults = self.house.defaults.lock().clone();
        let first =
            |names: &[&str]| names.iter().map(|name| fields.int(name)).find(|it| !matches!(it, Ok(None)));
        let int = |names: &[&str]| first(names).unwrap_or(Ok(None));
        let float =
            |name: &str, own: f64| Ok::<f64, Wrong>(f64::from(fields.float(name)?.unwrap_or(own) as f32));
        let seed = fields.int("seed")?.map_or(RANDOM, |seed| seed as u32);
        let noise = Noise::Restarting(if seed == RANDOM { fresh_seed() } else { u64::from(seed) });
        let mut sampling = Sampling::new(Pipeline::LLAMA, noise, 0);
        sampling.temperature = float("temperature", defaults.temperature.unwrap_or(0.8))?;
        sampling.top_k = fields.int("top_k")?.or(defaults.top_k).unwrap_or(40).max(0) as usize;
        sampling.top_p = float("top_p", defaults.top_p.unwrap_or(0.95))?;
        sampling.min_p = float("min_p", defaults.min_p.unwrap_or(0.05))?;
        sampling.presence = float("presence_penalty", 0.0)?;
        sampling.frequency = float("frequency_penalty", 0.0)?;
        sampling.repetition = float("repeat_penalty", defaults.repetition_penalty.unwrap_or(1.0))?;
        let last = fields.uint("repeat_last_n")?.map_or(64, |last| last as usize);
        sampling.pipeline.additive = Counts::Last(last);
        sampling.pipeline.repetition = Counts::Last(last);
        sampling.bias = self.bias(fields)?;
        sampling.stop = fields.texts("stop")?.into_iter().filter(|stop| !stop.is_empty()).collect();
        if sampling.stop.is_empty() {
            sampling.stop.clone_from(&self.options.stop);
        }
        sampling.only = fields.grammar(&self.house.toy)?;
        sampling.ban_eos = fields.flag("ignore_eos")?;
        let n_cmpl = int(&["n_cmpl", "n"])?.unwrap_or(1);
        if n_cmpl < 1 || n_cmpl as usize > self.options.slots {
            return Err(Refusal::bad(&format!(
                "Field 'n_cmpl': value must be between 1 and {}",
                self.options.slots
            )));
        }
        let most = int(&["n_predict", "max_completion_tokens", "max_tokens"])?.unwrap_or(-1);
        // The chat route takes a flag and a number, the others a number.
        let probs = match fields.get("logprobs") {
            Some(Value::Bool(on)) => {
                if *on {
                    fields.int("top_logprobs")?
                } else {
                    Some(0)
                }
            }
            _ => int(&["n_probs", "logprobs"])?,
        };
        Ok(Params {
            sampling,
            seed,
            n_predict: usize::try_from(most).ok(),
            n_cmpl: n_cmpl as usize,
            n_probs: probs.unwrap_or(0).max(0) as usize,
            post_sampling: fields.flag("post_sampling_probs")?,
            verbose: fields.flag("verbose")?,
            timings_per_token: fields.flag("timings_per_token")?,
            repeat_last_n: last,
            stream: fields.flag("stream")?,
            cache_prompt: fields.get("cache_prompt").is_none_or(|cache| cache != false),
            return_tokens: fields.flag("return_tokens")?,
            id_slot: fields.int("id_slot")?.and_then(|slot| usize::try_from(slot).ok()),
        })
    }

    /// A list of pairs of a token or a text and a number or `false`, or an object.
    fn bias(&self, fields: &Fields) -> Result<Vec<(TokenId, f32)>, Refusal> {
        let Some(Value::Array(pairs)) = fields.get("logit_bias") else {
            return Ok(fields.bias("logit_bias")?);
        };
        let mut all = Vec::new();
        for pair in pairs {
            let bias = match &pair[1] {
                Value::Bool(false) => f32::NEG_INFINITY,
                bias => bias.as_f64().unwrap_or(0.0) as f32,
            };
            let tokens = match &pair[0] {
                Value::String(text) => self.house.toy.encode(text),
                id => id.as_u64().map(|id| id as TokenId).into_iter().collect(),
            };
            all.extend(tokens.into_iter().map(|id| (id, bias)));
        }
        all.retain(|&(id, _)| (id as usize) < self.house.toy.vocabulary());
        Ok(all)
    }

    /// A text, ids, both mixed, or a list of any of these.
    pub(super) fn prompts(&self, fields: &Fields) -> Result<Vec<Vec<TokenId>>, Refusal> {
        let Some(prompt) = fields.0.get("prompt") else {
            return Err(Refusal::bad("[json.exception.out_of_range.403] key 'prompt' not found"));
        };
        let wrong = || {
            Refusal::bad(
                "\"prompt\" elements must be a string, a list of tokens, a JSON object containing a prompt string, or a list of mixed strings & tokens.",
            )
        };
        let one = |value: &Value| match value {
            Value::String(text) => Ok(self.house.toy.encode(text)),
            Value::Array(parts) => parts.iter().try_fold(Vec::new(), |mut all, part| {
                match part {
                    Value::String(text) => all.extend(self.house.toy.encode(text)),
                    id => all.extend(ids(&json!([id])).ok_or_else(wrong)?),
                }
                Ok(all)
            }),
            _ => Err(wrong()),
        };
        let prompts = match prompt {
            Value::Array(parts) if parts.iter().any(Value::is_number) => vec![one(prompt)?],
            Value::Array(parts) if !parts.is_empty() => parts.iter().map(one).collect::<Result<_, _>>()?,
            Value::Array(_) => return Err(Refusal::bad("\"prompt\" must not be empty")),
            _ => vec![one(prompt)?],
        };
        for prompt in &prompts {
            self.fits(prompt)?;
        }
        Ok(prompts)
    }

    pub(super) fn fits(&self, prompt: &[TokenId]) -> Result<(), Refusal> {
        let (len, longest) = (prompt.len(), self.house.setup.max_len);
        if prompt.iter().any(|&id| id as usize >= self.house.toy.vocabulary()) {
            return Err(Refusal::bad("Prompt contains invalid tokens"));
        }
        if len < longest {
            return Ok(());
        }
        let message = format!(
            "request ({len} tokens) exceeds the available context size ({longest} tokens), try increasing it"
        );
        let Refusal(status, mut error) = Refusal::of(400, "exceed_context_size_error", &message);
        error["n_prompt_tokens"] = json!(len);
        error["n_ctx"] = json!(longest);
        Err(Refusal(status, error))
    }
}

/// The settings as reported by the server: 32-bit floats.
pub(super) fn settings(params: &Params) -> Value {
    let sampling = &params.sampling;
    let single = |value: f64| f64::from(value as f32);
    let most = params.n_predict.map_or(-1, |most| most as i64);
    let mut all = json!({"seed": params.seed, "temperature": single(sampling.temperature), "dynatemp_range": 0.0,
        "dynatemp_exponent": 1.0, "top_k": sampling.top_k, "top_p": single(sampling.top_p),
        "min_p": single(sampling.min_p), "top_n_sigma": -1.0, "xtc_probability": 0.0, "xtc_threshold": single(0.1),
        "typical_p": 1.0, "repeat_last_n": params.repeat_last_n, "repeat_penalty": single(sampling.repetition),
        "presence_penalty": single(sampling.presence), "frequency_penalty": single(sampling.frequency),
        "dry_multiplier": 0.0, "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": 64, "mirostat": 0,
        "mirostat_tau": 5.0, "mirostat_eta": single(0.1), "adaptive_target": -1.0, "adaptive_decay": single(0.9)});
    let rest = json!({"max_tokens": most, "n_predict": most, "n_keep": 0, "n_discard": 0,
        "ignore_eos": sampling.ban_eos, "stream": params.stream, "n_probs": params.n_probs, "min_keep": 0,
        "chat_format": "Content-only", "reasoning_format": "none", "reasoning_in_content": false,
        "generation_prompt": "",
        "samplers": ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
        "speculative.types": "none", "timings_per_token": false, "post_sampling_probs": params.post_sampling,
        "backend_sampling": false, "lora": []});
    let rest = rest.as_object().expect("an object").clone();
    all.as_object_mut().expect("an object").extend(rest);
    all
}
