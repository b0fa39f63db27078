//! What the target needs of a tokenizer. A trait, so that tests can serve a model of bytes.

use serde_json::Value;

use crate::session::Decode;
use crate::units::TokenId;

/// Text to tokens and back.
pub trait Words: Send + Sync {
    /// The tokens of a text; `special` adds what the model expects at the beginning.
    ///
    /// # Errors
    /// If the tokenizer cannot.
    fn encode(&self, text: &str, special: bool) -> Result<Vec<TokenId>, String>;
    /// The text of tokens, special ones included if `special`.
    fn decode(&self, tokens: &[TokenId], special: bool) -> String;
    /// A decoder for output that grows behind a prompt; special tokens give no text.
    fn decoder(&self, prompt: &[TokenId]) -> Box<dyn Decode>;
    /// The prompt that the model's chat template makes of messages; `opening` ends it where the answer begins.
    ///
    /// # Errors
    /// If there is no template, or it refuses.
    fn chat(&self, messages: Vec<Value>, opening: bool) -> Result<String, String>;
    /// A token as the vocabulary spells it.
    fn spelling(&self, token: TokenId) -> String;
    /// The vocabulary as a `tokenizer.json`, for whoever drafts beside this server.
    fn file(&self) -> Option<Vec<u8>>;
}
