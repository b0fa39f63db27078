//! Reads the files next to a foreign graph: `config.json` in the layouts of Hugging Face's models,
//! and `genai_config.json`, which the builder of onnxruntime-genai writes instead.
//!
//! No member of `config.json` is required here: values that the graph declares are taken from the
//! graph.

use std::path::Path;

use serde::Deserialize;

use crate::open_error::DescriptionError;
use crate::runtime::description::{Generation, Ids, read};
use foretell_core::units::TokenId;

/// The members of `genai_config.json` that are used.
#[derive(Clone, Debug, Deserialize)]
pub struct GenaiConfig {
    pub model: GenaiModel,
}

#[derive(Clone, Debug, Deserialize)]
pub struct GenaiModel {
    /// Longest context, tokens.
    pub context_length: usize,
    /// Number of token ids.
    pub vocab_size: usize,
    eos_token_id: Option<Ids>,
    pub decoder: GenaiDecoder,
}

/// The graph of a `genai_config.json`.
#[derive(Clone, Debug, Deserialize)]
pub struct GenaiDecoder {
    head_size: Option<usize>,
    num_key_value_heads: Option<usize>,
    num_hidden_layers: Option<usize>,
    #[serde(default)]
    pub inputs: GenaiInputs,
    #[serde(default)]
    pub outputs: GenaiOutputs,
}

/// Names of a graph's inputs. In the names of cache inputs `%d` stands for the layer number.
#[derive(Clone, Debug, Deserialize)]
#[serde(default)]
pub struct GenaiInputs {
    pub input_ids: String,
    pub attention_mask: String,
    /// Positions of the tokens.
    pub position_ids: String,
    /// Keys before the run.
    pub past_key_names: String,
    /// Values before the run.
    pub past_value_names: String,
}

impl Default for GenaiInputs {
    fn default() -> Self {
        Self {
            input_ids: "input_ids".to_owned(),
            attention_mask: "attention_mask".to_owned(),
            position_ids: "position_ids".to_owned(),
            past_key_names: "past_key_values.%d.key".to_owned(),
            past_value_names: "past_key_values.%d.value".to_owned(),
        }
    }
}

/// Names of a graph's outputs.
#[derive(Clone, Debug, Deserialize)]
#[serde(default)]
pub struct GenaiOutputs {
    pub logits: String,
    /// Keys after the run.
    pub present_key_names: String,
    /// Values after the run.
    pub present_value_names: String,
}

impl Default for GenaiOutputs {
    fn default() -> Self {
        Self {
            logits: "logits".to_owned(),
            present_key_names: "present.%d.key".to_owned(),
            present_value_names: "present.%d.value".to_owned(),
        }
    }
}

impl GenaiConfig {
    /// Reads the file of a folder, if it has one.
    ///
    /// # Errors
    /// It cannot be read, or is not such a file.
    pub fn read(folder: &Path) -> Result<Option<Self>, DescriptionError> {
        let path = folder.join("genai_config.json");
        if path.is_file() { read(&path).map(Some) } else { Ok(None) }
    }
}

/// `config.json`: members with several possible names, all of them optional.
#[derive(Clone, Debug, Default, Deserialize)]
struct Config {
    vocab_size: Option<usize>,
    max_position_embeddings: Option<usize>,
    n_positions: Option<usize>,
    hidden_size: Option<usize>,
    n_embd: Option<usize>,
    num_hidden_layers: Option<usize>,
    n_layer: Option<usize>,
    num_attention_heads: Option<usize>,
    n_head: Option<usize>,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    eos_token_id: Option<Ids>,
    /// The language model within a multimodal one.
    #[serde(rename = "text_config")]
    inner: Option<Box<Config>>,
}

/// Properties of a model from its files; `None` where the files do not have them.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// Number of token ids.
    pub vocabulary: Option<usize>,
    /// Longest context, tokens.
    pub context: Option<usize>,
    /// The tokens that end a text.
    pub eos: Vec<TokenId>,
    /// Number of layers with a cache.
    pub layers: Option<usize>,
    /// Key and value heads.
    pub heads: Option<usize>,
    /// Elements of one key or value of one head.
    pub width: Option<usize>,
}

impl Facts {
    /// Reads the files of a folder. If both exist, `genai_config.json` has precedence: it was
    /// written for the graph.
    ///
    /// # Errors
    /// One of them cannot be read.
    pub fn read(folder: &Path) -> Result<Self, DescriptionError> {
        if let Some(config) = GenaiConfig::read(folder)? {
            let (model, decoder) = (config.model.clone(), config.model.decoder);
            return Ok(Self {
                vocabulary: Some(model.vocab_size),
                context: Some(model.context_length),
                eos: model.eos_token_id.map(Ids::list).unwrap_or_default(),
                layers: decoder.num_hidden_layers,
                heads: decoder.num_key_value_heads,
                width: decoder.head_size,
            });
        }
        let config: Config = read(&folder.join("config.json"))?;
        let path = folder.join("generation_config.json");
        let generation: Generation = if path.is_file() { read(&path)? } else { Generation::default() };
        let mut facts = config.facts();
        if let Some(eos) = generation.eos_token_id {
            facts.eos = eos.list();
        }
        Ok(facts)
    }
}

impl Config {
    fn facts(self) -> Facts {
        let inner = self.inner.map(|inner| inner.facts()).unwrap_or_default();
        let heads = self.num_attention_heads.or(self.n_head);
        let width = self.hidden_size.or(self.n_embd).zip(heads).map(|(size, heads)| size / heads.max(1));
        Facts {
            vocabulary: self.vocab_size.or(inner.vocabulary),
            context: self.max_position_embeddings.or(self.n_positions).or(inner.context),
            eos: self.eos_token_id.map_or(inner.eos, Ids::list),
            layers: self.num_hidden_layers.or(self.n_layer).or(inner.layers),
            heads: self.num_key_value_heads.or(heads).or(inner.heads),
            width: self.head_dim.or(width).or(inner.width),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn older_and_nested_layouts_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        write("config.json", r#"{"n_positions":64,"n_embd":48,"n_head":4,"n_layer":3,"eos_token_id":5}"#);
        let facts = Facts::read(folder.path()).unwrap();
        assert_eq!(
            (facts.context, facts.layers, facts.heads, facts.width),
            (Some(64), Some(3), Some(4), Some(12))
        );
        assert_eq!((facts.vocabulary, facts.eos), (None, vec![5]));
        write(
            "config.json",
            r#"{"text_config":{"vocab_size":9,"head_dim":7,"num_attention_heads":4,"num_key_value_heads":1,
                "hidden_size":64,"max_position_embeddings":32,"eos_token_id":[1,2]}}"#,
        );
        let facts = Facts::read(folder.path()).unwrap();
        assert_eq!(
            (facts.vocabulary, facts.context, facts.heads, facts.width),
            (Some(9), Some(32), Some(1), Some(7))
        );
        assert_eq!(facts.eos, vec![1, 2]);
        write("generation_config.json", r#"{"eos_token_id":3}"#);
        assert_eq!(Facts::read(folder.path()).unwrap().eos, vec![3]);
    }

    #[test]
    fn a_genai_config_has_precedence_and_must_be_complete() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        write("config.json", r#"{"vocab_size":1}"#);
        write(
            "genai_config.json",
            r#"{"model":{"context_length":8,"vocab_size":70,"eos_token_id":[4],"decoder":{}}}"#,
        );
        let facts = Facts::read(folder.path()).unwrap();
        assert_eq!((facts.vocabulary, facts.context, facts.eos), (Some(70), Some(8), vec![4]));
        write("genai_config.json", r#"{"model":{"vocab_size":70}}"#);
        let message = Facts::read(folder.path()).unwrap_err().to_string();
        assert!(message.contains("genai_config.json") && message.contains("context_length"), "{message}");
    }
}
