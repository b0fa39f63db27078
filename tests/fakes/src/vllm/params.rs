//! From a request's fields to the sampling of a sequence, with the server's defaults where the real
//! engine uses them.

use crate::TokenId;

use super::super::fields::Fields;
use super::super::house::Defaults;
use super::super::sample::{Noise, Pipeline, Sampling, fresh_seed};
use super::{Refusal, Runner, Vllm};

/// Temperatures below this are greedy.
const GREEDY: f64 = 1e-5;

impl Vllm {
    /// Parameters of the OpenAI routes: missing ones come from `generation_config.json`.
    pub(super) fn openai_sampling(&self, fields: &Fields, max_tokens: usize) -> Result<Sampling, Refusal> {
        let defaults = self.house.defaults.lock().clone();
        let mut sampling = self.sampling(fields, &defaults, max_tokens)?;
        sampling.bias.iter_mut().for_each(|(_, bias)| *bias = bias.clamp(-100.0, 100.0));
        Ok(sampling)
    }

    /// Parameters of the token endpoint: the engine's own class, without the server's defaults.
    pub(super) fn engine_sampling(&self, fields: &Fields, max_tokens: usize) -> Result<Sampling, Refusal> {
        self.sampling(fields, &Defaults::default(), max_tokens)
    }

    fn sampling(&self, fields: &Fields, defaults: &Defaults, max_tokens: usize) -> Result<Sampling, Refusal> {
        let seed = fields.int("seed")?.map_or_else(fresh_seed, |seed| seed as u64);
        let noise = match self.options.runner {
            Runner::V1 => Noise::Restarting(seed),
            Runner::V2 => Noise::Position(seed),
        };
        let mut sampling = Sampling::new(Pipeline::VLLM, noise, max_tokens);
        let or = |name: &str, default: Option<f64>, own: f64| -> Result<f64, Refusal> {
            Ok(fields.float(name)?.or(default).unwrap_or(own))
        };
        sampling.temperature = or("temperature", defaults.temperature, 1.0)?;
        sampling.top_p = or("top_p", defaults.top_p, 1.0)?;
        sampling.top_k = fields.int("top_k")?.or(defaults.top_k).unwrap_or(0).max(0) as usize;
        sampling.min_p = or("min_p", defaults.min_p, 0.0)?;
        let penalties = if self.minor() >= 32 { defaults.clone() } else { Defaults::default() };
        sampling.presence = or("presence_penalty", penalties.presence_penalty, 0.0)?;
        sampling.frequency = or("frequency_penalty", penalties.frequency_penalty, 0.0)?;
        sampling.repetition = or("repetition_penalty", defaults.repetition_penalty, 1.0)?;
        sampling.bias = fields.bias("logit_bias")?;
        sampling.allowed = fields.ids("allowed_token_ids")?;
        sampling.min_tokens = fields.uint("min_tokens")?.unwrap_or(0) as usize;
        sampling.stop = fields.texts("stop")?;
        sampling.stop_ids = fields.ids("stop_token_ids")?.unwrap_or_default();
        sampling.keep_stop = fields.flag("include_stop_str_in_output")?;
        sampling.ignore_eos = fields.flag("ignore_eos")?;
        sampling.skip_special = fields.get("skip_special_tokens").is_none_or(|skip| skip != false);
        self.check(&sampling)?;
        sampling.only = self.bound(fields)?;
        if !sampling.ignore_eos {
            sampling.stop_ids.extend(&self.options.other_ends);
        }
        if sampling.temperature < GREEDY {
            sampling.temperature = 0.0;
        }
        Ok(sampling)
    }

    fn check(&self, sampling: &Sampling) -> Result<(), Refusal> {
        let within = |name: &'static str, value: f64, from: f64, to: f64| {
            let fits = (from..=to).contains(&value);
            fits.then_some(()).ok_or_else(|| {
                Refusal::about(format!("{name} must be in [{from}, {to}], got {value}."), name)
            })
        };
        within("temperature", sampling.temperature, 0.0, 2.0)?;
        within("top_p", sampling.top_p, f64::MIN_POSITIVE, 1.0)?;
        within("min_p", sampling.min_p, 0.0, 1.0)?;
        within("presence_penalty", sampling.presence, -2.0, 2.0)?;
        within("frequency_penalty", sampling.frequency, -2.0, 2.0)?;
        within("repetition_penalty", sampling.repetition, f64::MIN_POSITIVE, f64::MAX)?;
        let size = self.house.toy.vocabulary();
        let known = |id: TokenId| (id as usize) < size;
        if let Some(&(id, _)) = sampling.bias.iter().find(|(id, _)| !known(*id)) {
            return Err(Refusal::about(
                format!("token_id {id} in logit_bias contains out-of-vocab token ids"),
                "logit_bias",
            ));
        }
        if sampling.min_tokens > sampling.max_tokens {
            let [least, most] = [sampling.min_tokens, sampling.max_tokens];
            let message = format!("min_tokens must be less than or equal to max_tokens={most}, got {least}.");
            return Err(Refusal::about(message, "min_tokens"));
        }
        if sampling.bias.len() > 1024 || sampling.stop_ids.len() > 128 {
            return Err(Refusal::bad("too many token ids"));
        }
        match &sampling.allowed {
            Some(ids) if ids.is_empty() => Err(Refusal::bad("allowed_token_ids is not None and empty!")),
            Some(ids) if !ids.iter().all(|&id| known(id)) => {
                Err(Refusal::bad("allowed_token_ids contains out-of-vocab token id"))
            }
            // Its worker raises where nothing catches it (0.32, `gpu/sample/logit_bias.py`).
            Some(ids) if ids.len() > 1024 && self.options.runner == Runner::V2 => {
                self.house.kill_by("more than 1,024 allowed_token_ids");
                Err(Refusal::broken(
                    "EngineCore encountered an issue. See stack trace (above) for the root cause.",
                ))
            }
            _ => Ok(()),
        }
    }

    /// Requested logprobs, within the server's cap.
    pub(super) fn logprobs(&self, fields: &Fields, name: &'static str) -> Result<Option<usize>, Refusal> {
        let Some(asked) = fields.int(name)? else { return Ok(None) };
        let cap = self.options.max_logprobs;
        let vocabulary = self.house.toy.vocabulary();
        if asked < -1 || (cap >= 0 && (asked > cap || asked == -1)) {
            let message = format!("Requested {name} of {asked}, which is greater than max allowed: {cap}");
            return Err(Refusal::about(message, name));
        }
        self.compile()?;
        Ok(Some(if asked == -1 { vocabulary } else { asked as usize }))
    }

    /// Maximum number of output tokens after a prompt.
    pub(super) fn room(
        &self,
        prompt: usize,
        asked: Option<u64>,
        unasked: Option<u64>,
    ) -> Result<usize, Refusal> {
        let longest = self.house.setup.max_len;
        let wanted = asked.unwrap_or(0) as usize;
        if prompt >= longest || prompt + wanted > longest {
            return Err(Refusal::about(
                format!(
                    "This model's maximum context length is {longest} tokens. However, you requested {wanted} output \
                     tokens and your prompt contains at least {prompt} input tokens, for a total of at least {} \
                     tokens. Please reduce the length of the input prompt or the number of requested output tokens.",
                    prompt + wanted
                ),
                "input_tokens",
            ));
        }
        let (own, caps) = {
            let defaults = self.house.defaults.lock();
            (defaults.max_new_tokens, defaults.caps)
        };
        let room = (longest - prompt) as u64;
        let cap = own.filter(|_| caps).unwrap_or(u64::MAX);
        Ok(asked.or(unasked).or(own).unwrap_or(room).min(room).min(cap) as usize)
    }
}
