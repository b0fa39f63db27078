//! The tokenizer interface of the ONNX server. It is a trait so that tests can serve a model of
//! bytes.

use serde_json::Value;

use foretell_core::session::Decode;
use foretell_core::units::TokenId;

/// Converts between text and tokens.
pub trait Words: Send + Sync {
    /// The tokens of a text; `special` adds the tokens that the model expects at the beginning.
    ///
    /// # Errors
    /// The tokenizer failed; the reason in words.
    fn encode(&self, text: &str, special: bool) -> Result<Vec<TokenId>, String>;
    /// The text of tokens, including special tokens if `special`.
    fn decode(&self, tokens: &[TokenId], special: bool) -> String;
    /// A decoder for output that follows `prompt`; special tokens give no text.
    fn decoder(&self, prompt: &[TokenId]) -> Box<dyn Decode>;
    /// The prompt text that the chat template makes of messages; `opening` ends it with the start
    /// of the answer.
    ///
    /// # Errors
    /// There is no template, or it rejects the messages.
    fn chat(&self, messages: Vec<Value>, opening: bool) -> Result<String, String>;
    /// A token as the vocabulary writes it.
    fn spelling(&self, token: TokenId) -> String;
    /// The `tokenizer.json` of the vocabulary, for a proxy that drafts; `None` if there is none.
    fn file(&self) -> Option<Vec<u8>>;
}
