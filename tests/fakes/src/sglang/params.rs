//! Sampling parameters, under the names of `/generate`.

use serde_json::{Map, Value};

use super::super::fields::Fields;
use super::super::sample::{Noise, Pipeline, Sampling};
use super::{Refusal, Sglang};

/// Known fields of `sampling_params`; any other is an error.
const KNOWN: &[&str] = &[
    "max_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "min_new_tokens",
    "stop",
    "stop_token_ids",
    "stop_regex",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "no_stop_trim",
    "logit_bias",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "sampling_seed",
    "n",
    "custom_params",
    "stream_interval",
];

/// Default seed of a server in deterministic mode.
const DEFAULT_SEED: u64 = 42;

impl Sglang {
    /// Reads the parameters of one prompt.
    pub(super) fn sampling(&self, fields: &Fields) -> Result<(Sampling, usize), Refusal> {
        if let Some(name) = fields.unknown(KNOWN) {
            return Err(Refusal::native(format!(
                "SamplingParams.__init__() got an unexpected keyword argument '{name}'"
            )));
        }
        let beyond = ["stop_regex", "json_schema", "regex", "ebnf", "structural_tag", "custom_params"];
        if let Some(message) = fields.beyond(&beyond) {
            return Err(Refusal(501, Value::from(message)));
        }
        let wrong = |wrong: super::Wrong| Refusal::native(wrong.to_string());
        // Without the deterministic mode a seed is accepted and ignored.
        let noise = match fields.int("sampling_seed").map_err(wrong)? {
            _ if !self.options.deterministic => Noise::fresh(),
            seed => Noise::Position(seed.map_or(DEFAULT_SEED, |seed| seed as u64)),
        };
        let max = fields.uint("max_new_tokens").map_err(wrong)?.unwrap_or(128) as usize;
        let mut sampling = Sampling::new(Pipeline::SGLANG, noise, max);
        let read =
            |name: &str, own: f64| Ok::<f64, Refusal>(fields.float(name).map_err(wrong)?.unwrap_or(own));
        sampling.temperature = read("temperature", 1.0)?;
        sampling.top_p = read("top_p", 1.0)?;
        sampling.top_k = fields.int("top_k").map_err(wrong)?.unwrap_or(-1).max(0) as usize;
        sampling.min_p = read("min_p", 0.0)?;
        sampling.presence = read("presence_penalty", 0.0)?;
        sampling.frequency = read("frequency_penalty", 0.0)?;
        sampling.repetition = read("repetition_penalty", 1.0)?;
        sampling.bias = fields.bias("logit_bias").map_err(wrong)?;
        sampling.min_tokens = fields.uint("min_new_tokens").map_err(wrong)?.unwrap_or(0) as usize;
        sampling.stop = fields.texts("stop").map_err(wrong)?;
        sampling.stop_ids = fields.ids("stop_token_ids").map_err(wrong)?.unwrap_or_default();
        sampling.keep_stop = fields.flag("no_stop_trim").map_err(wrong)?;
        sampling.ignore_eos = fields.flag("ignore_eos").map_err(wrong)?;
        if sampling.ignore_eos {
            // `ignore_eos` also ignores stop tokens.
            sampling.stop_ids.clear();
        }
        sampling.skip_special = fields.get("skip_special_tokens").is_none_or(|skip| skip != false);
        self.check(&sampling)?;
        if sampling.temperature < 1e-6 {
            sampling.temperature = 0.0;
        }
        Ok((sampling, fields.uint("n").map_err(wrong)?.unwrap_or(1).max(1) as usize))
    }

    fn check(&self, sampling: &Sampling) -> Result<(), Refusal> {
        let ranges = [
            ("temperature", sampling.temperature, 0.0, f64::MAX),
            ("top_p", sampling.top_p, f64::MIN_POSITIVE, 1.0),
            ("min_p", sampling.min_p, 0.0, 1.0),
            ("frequency_penalty", sampling.frequency, -2.0, 2.0),
            ("presence_penalty", sampling.presence, -2.0, 2.0),
            ("repetition_penalty", sampling.repetition, 0.0, 2.0),
        ];
        if let Some((name, value, from, to)) =
            ranges.into_iter().find(|(_, value, from, to)| !(from..=to).contains(&value))
        {
            return Err(Refusal::native(format!("{name} must be in [{from}, {to}], got {value}.")));
        }
        if sampling.min_tokens > sampling.max_tokens {
            return Err(Refusal::native("min_new_tokens must be in [0, max_new_tokens]"));
        }
        if sampling.bias.iter().any(|&(id, _)| id as usize >= self.house.toy.vocabulary()) {
            return Err(Refusal::native("logit_bias must has keys in [0, vocab_size - 1]"));
        }
        if self.options.deterministic && sampling.min_p > 0.0 && sampling.temperature > 1e-6 {
            self.house.kill_by("min_p with a seed: an assertion in the sampler");
            return Err(Refusal(500, Value::Null));
        }
        Ok(())
    }
}

/// Parameters of an OpenAI request under the names of `/generate`.
pub(super) fn renamed(fields: &Fields, defaults: &Map<String, Value>, max: Option<u64>) -> Fields {
    const NAMES: &[(&str, &str)] = &[
        ("temperature", "temperature"),
        ("top_p", "top_p"),
        ("top_k", "top_k"),
        ("min_p", "min_p"),
        ("presence_penalty", "presence_penalty"),
        ("frequency_penalty", "frequency_penalty"),
        ("repetition_penalty", "repetition_penalty"),
        ("min_tokens", "min_new_tokens"),
        ("stop", "stop"),
        ("stop_token_ids", "stop_token_ids"),
        ("ignore_eos", "ignore_eos"),
        ("no_stop_trim", "no_stop_trim"),
        ("skip_special_tokens", "skip_special_tokens"),
        ("logit_bias", "logit_bias"),
        ("seed", "sampling_seed"),
        ("n", "n"),
    ];
    let mut params = defaults.clone();
    for (theirs, ours) in NAMES {
        if let Some(value) = fields.get(theirs) {
            params.insert((*ours).to_owned(), value.clone());
        }
    }
    params.insert("max_new_tokens".to_owned(), max.into());
    Fields(params)
}
