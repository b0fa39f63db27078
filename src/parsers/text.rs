//! Tokens to text and back: tokenizer, incremental detokenizer, chat template, vocabulary
//! fingerprint, and translation between two vocabularies.

mod byte_table;
pub mod decode;
pub mod evidence;
pub mod fingerprint;
mod prepare;
pub mod template;
pub mod tokenizer;
pub mod translate;

pub use decode::{DecodeStep, Detokenizer, Stepwise};
pub use fingerprint::Fingerprint;
pub use template::ChatTemplate;
pub use tokenizer::{Piece, Tokenizer};

/// Errors of tokenizers and chat templates.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// A file cannot be read.
    #[error("{path}: {source}")]
    Read {
        path: std::path::PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A tokenizer that the library cannot read.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// A chat template that is missing, invalid, or refuses these messages.
    #[error("chat template: {0}")]
    Template(String),
}

/// Bytes of a file.
///
/// # Errors
/// It cannot be read.
pub fn read(path: &std::path::Path) -> Result<Vec<u8>, TextError> {
    std::fs::read(path).map_err(|source| TextError::Read { path: path.to_owned(), source })
}
