//! Reads the description of a model from the files next to its graph: `config.json` in the Hugging
//! Face layout, and `generation_config.json` if present.

use std::fs;
use std::path::Path;

use serde::Deserialize;

use crate::open_error::DescriptionError;
use foretell_core::units::TokenId;

/// One id or several; both forms are common.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum Ids {
    One(TokenId),
    Many(Vec<TokenId>),
}

impl Ids {
    pub(super) fn list(self) -> Vec<TokenId> {
        match self {
            Self::One(id) => vec![id],
            Self::Many(ids) => ids,
        }
    }
}

#[derive(Debug, Deserialize)]
struct Config {
    vocab_size: usize,
    hidden_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    max_position_embeddings: usize,
    eos_token_id: Option<Ids>,
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct Generation {
    pub(super) eos_token_id: Option<Ids>,
}

/// Sizes of the model that decide the shape of its cache.
#[derive(Clone, Copy, Debug)]
pub struct CacheShape {
    /// Number of transformer layers.
    pub layers: usize,
    /// Key and value heads.
    pub heads: usize,
    /// Elements of one key or value of one head.
    pub width: usize,
}

/// Properties of a model that are known before it is loaded.
#[derive(Clone, Debug)]
pub struct Description {
    /// Number of token ids.
    pub vocabulary: usize,
    /// Longest context, tokens.
    pub context: usize,
    /// The tokens that end a text.
    pub eos: Vec<TokenId>,
    pub cache: CacheShape,
}

pub(super) fn read<T: for<'a> Deserialize<'a>>(path: &Path) -> Result<T, DescriptionError> {
    let text = fs::read_to_string(path)
        .map_err(|error| DescriptionError::Unreadable { path: path.to_owned(), error })?;
    serde_json::from_str(&text).map_err(|error| DescriptionError::Invalid { path: path.to_owned(), error })
}

impl Description {
    pub fn read(folder: &Path) -> Result<Self, DescriptionError> {
        let config: Config = read(&folder.join("config.json"))?;
        let path = folder.join("generation_config.json");
        let generation: Generation = if path.is_file() { read(&path)? } else { Generation::default() };
        let heads = config.num_attention_heads.max(1);
        Ok(Self {
            vocabulary: config.vocab_size,
            context: config.max_position_embeddings,
            eos: generation.eos_token_id.or(config.eos_token_id).map(Ids::list).unwrap_or_default(),
            cache: CacheShape {
                layers: config.num_hidden_layers,
                heads: config.num_key_value_heads.unwrap_or(heads),
                width: config.head_dim.unwrap_or(config.hidden_size / heads),
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_come_from_config_and_eos_from_generation_config() {
        let folder = tempfile::tempdir().unwrap();
        assert!(matches!(Description::read(folder.path()), Err(DescriptionError::Unreadable { .. })));
        let config = r#"{"vocab_size":99,"hidden_size":64,"num_hidden_layers":3,"num_attention_heads":4,
            "max_position_embeddings":128,"eos_token_id":7}"#;
        fs::write(folder.path().join("config.json"), config).unwrap();
        let read = Description::read(folder.path()).unwrap();
        assert_eq!((read.cache.layers, read.cache.heads, read.cache.width), (3, 4, 16));
        assert_eq!((read.vocabulary, read.context, read.eos), (99, 128, vec![7]));
        fs::write(folder.path().join("generation_config.json"), r#"{"eos_token_id":[7,8]}"#).unwrap();
        assert_eq!(Description::read(folder.path()).unwrap().eos, vec![7, 8]);
        fs::write(folder.path().join("config.json"), "{}").unwrap();
        let message = Description::read(folder.path()).unwrap_err().to_string();
        assert!(message.contains("config.json") && message.contains("vocab_size"), "{message}");
    }
}
