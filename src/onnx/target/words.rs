//! The tokenizer interface of the ONNX server. It is a trait so that tests can serve a model of
//! bytes.

use serde_json::{Map, Value};

use foretell_core::session::Decode;
use foretell_core::units::TokenId;
use foretell_parsers::text::Tokenizer;

/// Converts between text and tokens.
pub trait Words: Send + Sync {
    /// The tokens of a text; `special` adds the tokens that the model expects at the beginning.
    ///
    /// # Errors
    /// The tokenizer failed; the reason in words.
    fn encode(&self, text: &str, special: bool) -> Result<Vec<TokenId>, String>;
    /// The text of tokens, including special tokens if `special`.
    fn decode(&self, tokens: &[TokenId], special: bool) -> String;
    /// A decoder for output that follows `prompt`; special tokens give text only if `special`.
    fn decoder(&self, prompt: &[TokenId], special: bool) -> Box<dyn Decode>;
    /// The prompt text that the chat template makes of messages; `opening` ends it with the start
    /// of the answer, `variables` are further ones of the template.
    ///
    /// # Errors
    /// There is no template, or it rejects the messages.
    fn chat(
        &self,
        messages: Vec<Value>,
        opening: bool,
        variables: &Map<String, Value>,
    ) -> Result<String, String>;
    /// The tokenizer, in which output parsers look up their markers; `None` if there is none.
    fn tokenizer(&self) -> Option<&Tokenizer>;
    /// Length of the text of the longest token, bytes.
    fn longest(&self) -> usize;
    /// A token as the vocabulary writes it.
    fn spelling(&self, token: TokenId) -> String;
    /// The `tokenizer.json` of the vocabulary, for a proxy that drafts; `None` if there is none.
    fn file(&self) -> Option<Vec<u8>>;
}
