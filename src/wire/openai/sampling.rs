//! How the target samples: the client's explicit fields plus the server's defaults.

use std::sync::Arc;

use serde::Deserialize;

use super::grammar::Grammar;
use foretell_core::units::TokenId;

/// The sampling fields for which servers have defaults.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SamplingField {
    Temperature,
    TopP,
    TopK,
    MinP,
    PresencePenalty,
    FrequencyPenalty,
    RepetitionPenalty,
}

impl SamplingField {
    /// Every field, in the order of its bit.
    pub const ALL: [Self; 7] = [
        Self::Temperature,
        Self::TopP,
        Self::TopK,
        Self::MinP,
        Self::PresencePenalty,
        Self::FrequencyPenalty,
        Self::RepetitionPenalty,
    ];
}

/// The sampling fields that the client has set, one bit each; the server sets the others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetFields(u8);

impl SamplingField {
    /// The parameter's name in a request.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Temperature => "temperature",
            Self::TopP => "top_p",
            Self::TopK => "top_k",
            Self::MinP => "min_p",
            Self::PresencePenalty => "presence_penalty",
            Self::FrequencyPenalty => "frequency_penalty",
            Self::RepetitionPenalty => "repetition_penalty",
        }
    }
}

impl SetFields {
    /// The set with one more field.
    #[must_use]
    pub const fn with(self, field: SamplingField) -> Self {
        Self(self.0 | 1 << field as u8)
    }

    /// True if the field was set.
    pub const fn has(self, field: SamplingField) -> bool {
        self.0 & (1 << field as u8) != 0
    }
}

/// A server's values for fields that the client omits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Defaults {
    /// See [`Sampling::temperature`].
    pub temperature: f64,
    /// See [`Sampling::top_p`].
    pub top_p: f64,
    /// See [`Sampling::top_k`].
    pub top_k: Option<u32>,
    /// See [`Sampling::min_p`].
    pub min_p: f64,
    /// See [`Sampling::presence_penalty`].
    pub presence_penalty: f64,
    /// See [`Sampling::frequency_penalty`].
    pub frequency_penalty: f64,
    /// See [`Sampling::repetition_penalty`].
    pub repetition_penalty: f64,
}

impl Defaults {
    /// The defaults of OpenAI's API.
    pub const OPENAI: Self = Self {
        temperature: 1.0,
        top_p: 1.0,
        top_k: None,
        min_p: 0.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        repetition_penalty: 1.0,
    };

    /// The default of one field; 0 where `top_k` retains all.
    pub fn of(&self, field: SamplingField) -> f64 {
        match field {
            SamplingField::Temperature => self.temperature,
            SamplingField::TopP => self.top_p,
            SamplingField::TopK => f64::from(self.top_k.unwrap_or(0)),
            SamplingField::MinP => self.min_p,
            SamplingField::PresencePenalty => self.presence_penalty,
            SamplingField::FrequencyPenalty => self.frequency_penalty,
            SamplingField::RepetitionPenalty => self.repetition_penalty,
        }
    }
}

/// A model's `generation_config.json`: what servers take for defaults of requests.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerationConfig {
    /// Its sampling fields, and OpenAI's defaults for those that it lacks.
    pub defaults: Defaults,
    /// Its `max_new_tokens`.
    pub max_tokens: Option<u32>,
    /// Its `eos_token_id`: the tokens that end an output.
    pub ends: Vec<TokenId>,
}

impl GenerationConfig {
    /// That of a model without the file.
    pub const NONE: Self = Self { defaults: Defaults::OPENAI, max_tokens: None, ends: Vec::new() };

    /// Reads the file.
    ///
    /// # Errors
    /// It is no JSON object, or a field is no number.
    pub fn read(json: &[u8]) -> Result<Self, serde_json::Error> {
        let read: ConfigFile = serde_json::from_slice(json)?;
        let plain = Defaults::OPENAI;
        Ok(Self {
            defaults: Defaults {
                temperature: read.temperature.unwrap_or(plain.temperature),
                top_p: read.top_p.unwrap_or(plain.top_p),
                top_k: read.top_k.and_then(|top_k| u32::try_from(top_k).ok()).filter(|&top_k| top_k > 0),
                min_p: read.min_p.unwrap_or(plain.min_p),
                presence_penalty: read.presence_penalty.unwrap_or(plain.presence_penalty),
                frequency_penalty: read.frequency_penalty.unwrap_or(plain.frequency_penalty),
                repetition_penalty: read.repetition_penalty.unwrap_or(plain.repetition_penalty),
            },
            max_tokens: read.max_new_tokens.and_then(|tokens| u32::try_from(tokens).ok()),
            ends: read.eos_token_id.map(Ends::into_ids).unwrap_or_default(),
        })
    }

    /// The same for a server that does not take penalties on output from it (SGLang 0.5.23, vLLM
    /// before 0.32).
    #[must_use]
    pub const fn without_output_penalties(mut self) -> Self {
        self.defaults.presence_penalty = 0.0;
        self.defaults.frequency_penalty = 0.0;
        self
    }
}

/// The fields of a `generation_config.json` that servers take for defaults (vLLM 0.32,
/// `config/model.py`; SGLang 0.5.23).
#[derive(Deserialize)]
struct ConfigFile {
    temperature: Option<f64>,
    top_p: Option<f64>,
    top_k: Option<i64>,
    min_p: Option<f64>,
    presence_penalty: Option<f64>,
    frequency_penalty: Option<f64>,
    repetition_penalty: Option<f64>,
    max_new_tokens: Option<i64>,
    eos_token_id: Option<Ends>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Ends {
    One(TokenId),
    Several(Vec<TokenId>),
}

impl Ends {
    fn into_ids(self) -> Vec<TokenId> {
        match self {
            Self::One(id) => vec![id],
            Self::Several(ids) => ids,
        }
    }
}

/// Effective sampling of one request. Defaults are OpenAI's.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Temperature; 0 is greedy.
    pub temperature: f64,
    /// Share of probability, above 0 to 1: the smallest set of the likeliest tokens that reaches it
    /// is retained; 1 retains all.
    pub top_p: f64,
    /// Maximum tokens retained; `None` retains all.
    pub top_k: Option<u32>,
    /// Minimum probability ÷ that of the most probable token, 0 to 1; 0 retains all.
    pub min_p: f64,
    /// Subtracted once from the logit of every token of the output so far.
    pub presence_penalty: f64,
    /// Subtracted per occurrence from the logit of every token of the output so far.
    pub frequency_penalty: f64,
    /// Divides positive and multiplies negative logits of tokens of prompt and output; 1 is none.
    pub repetition_penalty: f64,
    /// Added to the logits of these tokens, −100 to 100; ascending by token id.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// Seed of the noise; `None` if none is given.
    pub seed: Option<u64>,
    /// The end-of-text token may not be sampled before this many output tokens.
    pub min_tokens: u32,
    /// The end-of-text token does not end the output.
    pub ignore_eos: bool,
    /// The grammar that binds the output; `None` if none does.
    pub grammar: Option<Arc<Grammar>>,
    /// The fields that the client has set; the others have the server's default, or OpenAI's if the
    /// server's is not known.
    pub set_by_client: SetFields,
}

impl Default for Sampling {
    fn default() -> Self {
        let Defaults {
            temperature,
            top_p,
            top_k,
            min_p,
            presence_penalty,
            frequency_penalty,
            repetition_penalty,
        } = Defaults::OPENAI;
        Self {
            temperature,
            top_p,
            top_k,
            min_p,
            presence_penalty,
            frequency_penalty,
            repetition_penalty,
            logit_bias: Vec::new(),
            seed: None,
            min_tokens: 0,
            ignore_eos: false,
            grammar: None,
            set_by_client: SetFields::default(),
        }
    }
}

impl Sampling {
    /// The numbers by which a logit depends on the output so far, so that output must not be sent
    /// as prompt; each is true if it does here.
    pub fn counting(&self) -> [(bool, &'static str); 3] {
        let [presence, frequency] = self.output_penalties();
        [presence, frequency, (self.min_tokens > 0, "min_tokens")]
    }

    /// The penalties on tokens of the output so far; each is true if it applies here.
    pub fn output_penalties(&self) -> [(bool, &'static str); 2] {
        [
            (self.presence_penalty != 0.0, "presence_penalty"),
            (self.frequency_penalty != 0.0, "frequency_penalty"),
        ]
    }

    /// True if a logit depends on the output so far.
    pub fn counts_output(&self) -> bool {
        self.grammar.is_some() || self.counting().iter().any(|(counts, _)| *counts)
    }

    /// True if tokens of the output so far, or of prompt and output, are penalized.
    pub fn penalizes(&self) -> bool {
        self.penalizes_repetition() || self.output_penalties().iter().any(|(applies, _)| *applies)
    }

    /// True if tokens of prompt and output are penalized.
    #[expect(clippy::float_cmp, reason = "a penalty of exactly one is none")]
    pub fn penalizes_repetition(&self) -> bool {
        self.repetition_penalty != 1.0
    }

    /// The client's fields, and the server's where the client has set none.
    #[must_use]
    pub fn with_defaults(&self, defaults: &Defaults) -> Self {
        use SamplingField as F;
        fn pick<T>(set_by_client: SetFields, field: SamplingField, value: T, default: T) -> T {
            if set_by_client.has(field) { value } else { default }
        }
        let set_by_client = self.set_by_client;
        Self {
            temperature: pick(set_by_client, F::Temperature, self.temperature, defaults.temperature),
            top_p: pick(set_by_client, F::TopP, self.top_p, defaults.top_p),
            top_k: pick(set_by_client, F::TopK, self.top_k, defaults.top_k),
            min_p: pick(set_by_client, F::MinP, self.min_p, defaults.min_p),
            presence_penalty: pick(
                set_by_client,
                F::PresencePenalty,
                self.presence_penalty,
                defaults.presence_penalty,
            ),
            frequency_penalty: pick(
                set_by_client,
                F::FrequencyPenalty,
                self.frequency_penalty,
                defaults.frequency_penalty,
            ),
            repetition_penalty: pick(
                set_by_client,
                F::RepetitionPenalty,
                self.repetition_penalty,
                defaults.repetition_penalty,
            ),
            ..self.clone()
        }
    }

    /// The same, with every field set: later requests send all of them.
    #[must_use]
    pub fn all_set(self) -> Self {
        let set_by_client = SamplingField::ALL.into_iter().fold(self.set_by_client, SetFields::with);
        Self { set_by_client, ..self }
    }

    /// True if the client has set every field, and leaves none to the server.
    pub fn sets_all(&self) -> bool {
        self.first_unset().is_none()
    }

    /// The first field that the client has not set; `None` if it has set all.
    pub fn first_unset(&self) -> Option<SamplingField> {
        SamplingField::ALL.into_iter().find(|field| !self.set_by_client.has(*field))
    }

    /// True if the most probable token by the logits alone is always taken, unless `min_tokens`
    /// bars it because it ends the text.
    pub fn plainly_greedy(&self) -> bool {
        self.temperature == 0.0 && !self.penalizes() && self.logit_bias.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_of_a_model_are_those_of_its_file() {
        let read = |json: &str| GenerationConfig::read(json.as_bytes());
        let qwen = r#"{"do_sample": true, "eos_token_id": [1, 2], "temperature": 0.6, "top_k": 20, "top_p": 0.95,
            "presence_penalty": 1.5, "max_new_tokens": 2048}"#;
        let want = Defaults {
            temperature: 0.6,
            top_k: Some(20),
            top_p: 0.95,
            presence_penalty: 1.5,
            ..Defaults::OPENAI
        };
        let config = read(qwen).unwrap();
        assert_eq!(config, GenerationConfig { defaults: want, max_tokens: Some(2048), ends: vec![1, 2] });
        assert_eq!(config.without_output_penalties().defaults, Defaults { presence_penalty: 0.0, ..want });
        assert_eq!(read(r#"{"top_k": -1, "temperature": null}"#).unwrap(), GenerationConfig::NONE);
        assert_eq!(read(r#"{"eos_token_id": 7}"#).unwrap().ends, [7]);
        assert!(read("[1]").is_err() && read(r#"{"min_p": "0.1"}"#).is_err());
        let sampling = Sampling::default().with_defaults(&want).all_set();
        assert!(sampling.sets_all() && sampling.top_k == Some(20));
    }

    #[test]
    fn the_server_fills_in_only_what_the_client_left_open() {
        let set_by_client = SetFields::default().with(SamplingField::Temperature);
        let own = Sampling { temperature: 0.0, set_by_client, ..Sampling::default() };
        let server = Defaults { temperature: 0.6, repetition_penalty: 1.05, ..Defaults::OPENAI };
        let effective = own.with_defaults(&server);
        assert_eq!((effective.temperature, effective.repetition_penalty), (0.0, 1.05));
        assert!(own.plainly_greedy() && !effective.plainly_greedy());
        assert!(!own.sets_all());
    }
}
